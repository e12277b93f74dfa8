"""Small models of every family: what is not as in BASE, by model_type."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

BASE = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
TINY: list[tuple[str, dict[str, Any]]] = [
    ("llama", {}),
    ("llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True}),
    ("mistral", {"head_dim": 32}),
    ("ministral3", {"head_dim": 32}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen2", {}),
    ("qwen3", {"head_dim": 32}),
    (
        "qwen2_moe",
        {
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 48,
            "decoder_sparse_step": 2,
        },
    ),
    ("qwen2_moe", {"num_experts": 4, "moe_intermediate_size": 32, "qkv_bias": False}),
    (
        "qwen3_moe",
        {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [0]},
    ),
    ("gemma", {"head_dim": 32}),
    ("gemma2", {"head_dim": 32}),
    ("gemma3_text", {"head_dim": 32}),
    ("phi", {}),
    ("phi", {"qk_layernorm": True}),
    ("phi3", {"pad_token_id": 0}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 128}),
    ("gpt_bigcode", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 128}),
    ("gptj", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_positions": 128, "vocab_size": 128, "rotary_dim": 8}),
    (
        "gpt_neo",
        {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "vocab_size": 128,
            "max_position_embeddings": 128,
            "attention_types": [[["global", "local"], 1]],
        },
    ),
    ("gpt_neox", {"num_key_value_heads": None}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 32, "do_layer_norm_before": False}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64, "layer_norm_elementwise_affine": False}),
    ("bloom", {"hidden_size": 64, "n_layer": 3, "n_head": 4, "vocab_size": 128}),
    ("falcon", {"multi_query": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"multi_query": False, "parallel_attn": False, "bias": True, "alibi": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 128, "expansion_ratio": 2}),
    ("mpt", {"d_model": 64, "n_layers": 3, "n_heads": 4, "vocab_size": 128}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": None}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 24}),
    ("deepseek_v2", {**LATENT, "q_lora_rank": 24, "attention_bias": True, "mlp_bias": True}),
    ("deepseek_v3", {**LATENT, "q_lora_rank": 24}),
    ("glm4_moe_lite", {**LATENT, "q_lora_rank": 24}),
    ("glm4_moe", {**LATENT, "num_key_value_heads": 2, "head_dim": 16, "use_qk_norm": True, "attention_bias": True}),
    ("glm", {"head_dim": 16, "pad_token_id": 0, "attention_bias": True}),
    ("glm4", {"head_dim": 16, "pad_token_id": 0}),
    ("olmo", {}),
    ("olmo2", {}),
    ("olmo3", {}),
    ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    ("cohere", {"use_qk_norm": True}),
    ("cohere2", {"head_dim": 16}),
    ("stablelm", {"use_qkv_bias": True}),
    ("stablelm", {"use_parallel_residual": True, "qk_layernorm": True}),
    ("starcoder2", {}),
    ("nemotron", {"head_dim": 16}),
    ("granite", {}),
    ("granitemoe", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
    ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2, "lm_head_bias": True, "attention_bias": True}),
    ("seed_oss", {"head_dim": 16}),
    ("smollm3", {"pad_token_id": 0}),
]
ONLY_COUNTED: list[tuple[str, dict[str, Any]]] = [("falcon", {"num_ln_in_parallel_attn": 2})]
"""What transformers builds and cannot run: its forward asks for a norm that is not there."""


def tiny_config(model_type: str, values: dict[str, Any]) -> Any:
    """The configuration of one of TINY, of its family's class."""
    import transformers

    gpt_like = {"n_embd", "n_layer", "d_model", "num_layers"} & values.keys()
    return transformers.AutoConfig.for_model(model_type, **(values if gpt_like else {**BASE, **values}))


def tiny_ids(models: Sequence[tuple[str, dict[str, Any]]] = tuple(TINY)) -> list[str]:
    return [f"{kind}-{i}" for i, (kind, _) in enumerate(models)]
