"""Writes vramfit/models/catalogue.json: the shapes of well-known decoders, from a file of sourced facts.

    python bench/make_model_catalogue.py FACTS.json

FACTS.json is a list of shapes with their sources (`models.json` of the reference data). Only fields that differ from
Architecture's defaults are written, so that the product's file stays small.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from vramfit.models import families
from vramfit.models.architecture import Architecture

TARGET = Path(__file__).parent.parent / "vramfit" / "models" / "catalogue.json"

MODEL_TYPES = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen2MoeForCausalLM": "qwen2_moe",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "QWenLMHeadModel": "qwen",
    "GPTNeoXForCausalLM": "gpt_neox",
    "GPTNeoForCausalLM": "gpt_neo",
    "GPTJForCausalLM": "gptj",
    "GPT2LMHeadModel": "gpt2",
    "GPTBigCodeForCausalLM": "gpt_bigcode",
    "OPTForCausalLM": "opt",
    "Gemma3ForCausalLM": "gemma3_text",
    "DeepseekForCausalLM": "deepseek",
    "DeepseekV2ForCausalLM": "deepseek_v2",
    "DeepseekV3ForCausalLM": "deepseek_v3",
    "Glm4MoeForCausalLM": "glm4_moe",
    "Glm4MoeLiteForCausalLM": "glm4_moe_lite",
    "GptOssForCausalLM": "gpt_oss",
    "SeedOssForCausalLM": "seed_oss",
    "ChatGLMModel": "chatglm",
    "GLM130B": "glm130b",
    "InternLM2ForCausalLM": "internlm2",
    "InternLMForCausalLM": "internlm",
}
RENAMED = {
    "num_layers": "layers",
    "num_attention_heads": "heads",
    "num_kv_heads": "kv_heads",
    "intermediate_size": "mlp_width",
    "tie_word_embeddings": "tied_embeddings",
    "attn_qkv_bias": "qkv_bias",
    "attn_out_bias": "out_bias",
    "lm_head_bias": "head_bias",
}
OWN_CODE_ACTIVATIONS = {"glm130b": "gelu"}


def model_type(architecture: str) -> str:
    return MODEL_TYPES.get(architecture, architecture.removesuffix("ForCausalLM").lower())


def experts(moe: dict[str, Any]) -> dict[str, Any]:
    values = {
        "count": moe["num_experts"],
        "active": moe["experts_per_token"],
        "expert_width": moe["moe_intermediate_size"],
        "shared_width": moe["shared_intermediate_size"] or 0,
        "first_moe_layer": moe["dense_layers"],
    }
    return values | {key: True for key in ("shared_gate", "router_bias", "expert_bias") if moe.get(key)}


def latent(mla: dict[str, Any]) -> dict[str, Any]:
    return {
        "q_rank": mla["q_lora_rank"] or 0,
        "kv_rank": mla["kv_lora_rank"],
        "rope_dim": mla["qk_rope_head_dim"],
        "nope_dim": mla["qk_nope_head_dim"],
        "value_dim": mla["v_head_dim"],
    }


def entry(fact: dict[str, Any]) -> dict[str, Any]:
    """One row of the product's file: Architecture fields that differ from their defaults, and aliases."""
    family = model_type(fact["architecture"])
    values = {RENAMED.get(key, key): value for key, value in fact.items()}
    values |= {
        "name": fact["id"],
        "family": family,
        "activation": OWN_CODE_ACTIVATIONS.get(family) or families.family(family).activation,
        "experts": experts(fact["moe"]) if fact["moe"] else None,
        "latent": latent(fact["mla"]) if fact["mla"] else None,
        "attn_sinks": family == "gpt_oss",
    }
    row: dict[str, Any] = {}
    for field in dataclasses.fields(Architecture):
        value = values.get(field.name, field.default)
        if value != field.default:
            row[field.name] = value
    if fact["aliases"]:
        row["aliases"] = fact["aliases"]
    if fact["count_verified"] != "exact":
        row["count_verified"] = fact["count_verified"]
    return row


def main(source: Path) -> None:
    facts = json.loads(source.read_text(encoding="utf-8"))
    rows = [json.dumps(entry(fact), ensure_ascii=False, separators=(",", ":")) for fact in facts]
    TARGET.write_text("[\n" + ",\n".join(rows) + "\n]\n", encoding="utf-8")
    print(f"{len(rows)} models, {TARGET.stat().st_size / 1024:.0f} KiB, {TARGET}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
