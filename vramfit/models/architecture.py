"""What is being trained: shapes and exact parameter counts of a decoder, from its config.json alone. No weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Experts:
    """Mixture-of-experts facts of the blocks that have them. Widths are of one branch of one expert."""

    count: int
    active: int
    expert_width: int
    shared_width: int = 0
    first_moe_layer: int = 0
    every: int = 1


@dataclass(frozen=True, kw_only=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek): ranks and head parts."""

    q_rank: int
    kv_rank: int
    rope_dim: int
    nope_dim: int
    value_dim: int


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """A decoder's shape. Widths are numbers of features, `vocab_size` is rows of the embedding as stored."""

    name: str
    family: str
    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp_width: int
    vocab_size: int
    max_position: int
    mlp: Literal["gated", "plain"] = "gated"
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    tied_embeddings: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    head_bias: bool = False
    qk_norm: Literal["none", "per_head", "per_head_distinct", "full"] = "none"
    norms_per_layer: int = 2
    final_norm: bool = True
    embed_norm: bool = False
    learned_positions: int = 0
    embed_proj_dim: int | None = None
    sliding_window: int | None = None
    logit_softcap: float | None = None
    attn_softcap: float | None = None
    experts: Experts | None = None
    latent: LatentAttention | None = None
    extra_params: int = 0
    published_params: int | None = None
