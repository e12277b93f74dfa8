"""An architecture as the config.json its family reads: the inverse of `architecture.from_config`.

For models that are known by shape alone, so that `transformers` can build them (on fake tensors) without a download.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from vramfit.errors import ModelError
from vramfit.models import families
from vramfit.models.architecture import Architecture, Experts, LatentAttention
from vramfit.models.config_keys import known_keys
from vramfit.models.families import ExpertKeys


def config_values(architecture: Architecture, *, layers: int | None = None) -> dict[str, Any]:
    """config.json of `architecture`, with `layers` blocks when given. Raises ModelError for a family that only loads
    with code from the model's own folder."""
    family = families.FAMILIES.get(architecture.family)
    if family is None:
        raise ModelError(
            f"{architecture.name} is of the family {architecture.family!r}, which is known by its shape alone",
            "Choose a model whose family VRAMFit can build.",
        )
    keys = {**families.USUAL_KEYS, **family.keys}
    values: dict[str, Any] = {"model_type": architecture.family, "tie_word_embeddings": architecture.tied_embeddings}
    for field, key in keys.items():
        if key and not (field == "head_dim" and architecture.latent):  # two parts, each with a key of its own
            values[key] = getattr(architecture, field)
    values |= {key: getattr(architecture, field) for field, (key, _) in family.switches.items()}
    values[keys["layers"]] = layers or architecture.layers
    if architecture.experts is not None and family.experts is not None:
        values |= _experts(architecture.experts, family.experts, architecture)
    elif family.experts is not None:
        values[family.experts.count] = 0
    if architecture.latent is not None:
        values |= _latent(architecture.latent)
    known = known_keys(architecture.family).defaults
    if "sliding_window" in known or architecture.sliding_window is not None:
        values["sliding_window"] = architecture.sliding_window  # null is none, where absent is the family's
    if architecture.sliding_layers is not None:
        sliding = {*architecture.sliding_layers}
        count = values[keys["layers"]]
        values["layer_types"] = [f"{'sliding' if layer in sliding else 'full'}_attention" for layer in range(count)]
    if "use_sliding_window" in known:
        values["use_sliding_window"] = architecture.sliding_window is not None
    values |= {
        "final_logit_softcapping": architecture.logit_softcap,
        "attn_logit_softcapping": architecture.attn_softcap,
    }
    return {**values, **_special(architecture, values[keys["layers"]])}


def _experts(experts: Experts, keys: ExpertKeys, architecture: Architecture) -> dict[str, Any]:
    values: dict[str, Any] = {
        keys.count: experts.count,
        keys.active: experts.active,
        keys.width: experts.expert_width,
    }
    if keys.shared_width:
        values[keys.shared_width] = experts.shared_width
    if keys.shared_count:
        values[keys.shared_count] = experts.shared_width // experts.expert_width
    if keys.first_dense:
        values[keys.first_dense] = experts.first_moe_layer
    if keys.every:
        values[keys.every] = experts.every
    if keys.dense_layers:
        values[keys.dense_layers] = list(experts.dense_layers)
    return values


def _latent(latent: LatentAttention) -> dict[str, Any]:
    return {
        "q_lora_rank": latent.q_rank or None,
        "kv_lora_rank": latent.kv_rank,
        "qk_rope_head_dim": latent.rope_dim,
        "qk_nope_head_dim": latent.nope_dim,
        "v_head_dim": latent.value_dim,
    }


def _special(architecture: Architecture, layers: int) -> dict[str, Any]:
    """What a family writes in its own way."""
    made = _WRITERS.get(architecture.family)
    return made(architecture, layers) if made else {}


def _falcon(architecture: Architecture, layers: int) -> dict[str, Any]:
    """Three generations, as `from_config` reads them."""
    new = 1 < architecture.kv_heads < architecture.heads or architecture.norms_per_layer == 2
    new = new and architecture.parallel_residual
    return {
        "new_decoder_architecture": new,
        "num_kv_heads": architecture.kv_heads,
        "multi_query": architecture.kv_heads == 1,
        "parallel_attn": architecture.parallel_residual,
        "alibi": architecture.position == "alibi",
        "num_ln_in_parallel_attn": architecture.norms_per_layer if new else None,
        "ffn_hidden_size": architecture.mlp_width,
    }


def _opt(architecture: Architecture, layers: int) -> dict[str, Any]:
    narrow = architecture.embed_proj_dim or architecture.hidden_size
    # The 350M normalises behind its branches and ends without a norm.
    affine = architecture.norm != "layernorm_noaffine"
    return {
        "word_embed_proj_dim": narrow,
        "do_layer_norm_before": architecture.final_norm,
        "layer_norm_elementwise_affine": affine,
    }


_WRITERS: Final[Mapping[str, Callable[[Architecture, int], dict[str, Any]]]] = {
    "falcon": _falcon,
    "opt": _opt,
    "gpt_bigcode": lambda architecture, layers: {"multi_query": architecture.kv_heads == 1},
    "phi": lambda architecture, layers: {"qk_layernorm": architecture.qk_norm != "none"},
    "stablelm": lambda architecture, layers: {
        "use_parallel_residual": architecture.parallel_residual,
        "qk_layernorm": architecture.qk_norm != "none",
    },
    "cohere": lambda architecture, layers: {"use_qk_norm": architecture.qk_norm != "none"},
    "glm4_moe": lambda architecture, layers: {"use_qk_norm": architecture.qk_norm != "none"},
    "gpt_neo": lambda architecture, layers: {"attention_types": [[["global"], layers]]},
}
