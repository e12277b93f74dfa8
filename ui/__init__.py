"""The panel. It submits rows and reads rows; nothing it does owns a run."""
