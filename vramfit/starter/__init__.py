"""The embedded default: a story grammar, a tokenizer and a small model that learns to tell stories on any machine."""
