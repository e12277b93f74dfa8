"""The starter's shape: its config.json, and the same as an Architecture."""

from __future__ import annotations

from typing import Any, Final

from vramfit.models.architecture import Architecture, from_config
from vramfit.starter.tokenizer import END, MAX_LENGTH, PAD, SPECIAL_TOKENS, VOCAB_SIZE

MODEL_CONFIG: Final[dict[str, Any]] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "intermediate_size": 384,
    "hidden_act": "silu",
    "max_position_embeddings": MAX_LENGTH,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "initializer_range": 0.06,
    "pad_token_id": SPECIAL_TOKENS.index(PAD),
    "bos_token_id": None,
    "eos_token_id": SPECIAL_TOKENS.index(END),
    "dtype": "float32",
}
"""What `LlamaConfig(**MODEL_CONFIG)` takes. Chosen by `bench/starter.py`; the trials are in docs/log.md."""


def architecture() -> Architecture:
    """The starter as the planner sees it."""
    return from_config(MODEL_CONFIG, "starter")
