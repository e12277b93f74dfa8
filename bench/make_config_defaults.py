"""Writes vramfit/models/config_defaults.json: what a config.json means that lacks a key, from transformers' classes.

    python bench/make_config_defaults.py

For every family of `families.py` the keys that `architecture.from_config` reads, with the default of the family's
configuration class; which of them may be null; and the other names under which that class takes a key.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import typing
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.models import families

TARGET: Final = Path(__file__).parent.parent / "vramfit" / "models" / "config_defaults.json"

OTHER_KEYS: Final = (
    "tie_word_embeddings",
    "sliding_window",
    "use_sliding_window",
    "max_window_layers",
    "final_logit_softcapping",
    "attn_logit_softcapping",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_rope_head_dim",
    "qk_nope_head_dim",
    "v_head_dim",
    "multi_query",
    "word_embed_proj_dim",
    "do_layer_norm_before",
    "_remove_final_layer_norm",
    "new_decoder_architecture",
    "parallel_attn",
    "num_kv_heads",
    "num_ln_in_parallel_attn",
    "alibi",
    "layer_norm_elementwise_affine",
    "qk_layernorm",
    "use_parallel_residual",
    "use_qk_norm",
    *families.DROPOUT_KEYS,
)
"""Keys that `from_config` reads by name, and not through a family's row."""

OLD_NAMES: Final = {"bloom": {"n_embed": "hidden_size"}, "falcon": {"n_embed": "hidden_size"}}
"""Names that a class takes in its code, and not in its map."""

MEANT: Final = {"glm4_moe_lite": {"first_k_dense_replace": 1}}
"""What a class means by a default it makes in its code: here a list of which blocks have experts, all but the first."""


def keys_read(name: str) -> list[str]:
    """The keys of config.json that may be read for a family."""
    row = families.FAMILIES[name]
    keys = [key for key in {**families.USUAL_KEYS, **row.keys}.values() if key]
    if row.latent:  # its heads have parts, each with a key of its own
        keys.remove("head_dim")
    keys += [key for key, _ in row.switches.values()]
    if row.experts is not None:
        experts = row.experts
        named = (experts.count, experts.active, experts.width, experts.shared_count, experts.shared_width)
        keys += [key for key in (*named, experts.first_dense, experts.every, experts.dense_layers) if key]
    return list(dict.fromkeys((*keys, *OTHER_KEYS)))


def of_family(name: str) -> dict[str, Any]:
    """Defaults, keys that may be null and other names, as the family's class has them."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    made: Any = CONFIG_MAPPING[name]
    fields = {field.name: field for field in dataclasses.fields(made)}
    keys = [key for key in keys_read(name) if key in fields]
    defaults = {key: fields[key].default for key in keys} | MEANT.get(name, {})
    others = {other: key for other, key in made.attribute_map.items() if key in keys}
    # A map from the key that is read to one that is not is the same name the other way round.
    others |= {key: other for other, key in made.attribute_map.items() if other in keys and key not in keys}
    return {
        "defaults": defaults,
        "nullable": [key for key in keys if type(None) in typing.get_args(fields[key].type)],
        "names": others | OLD_NAMES.get(name, {}),
    }


def all_families() -> dict[str, Any]:
    return {name: of_family(name) for name in sorted(families.FAMILIES)}


def text_of(values: dict[str, Any]) -> str:
    """One family a line."""
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(row)}" for name, row in values.items())
    return f"{{\n{lines}\n}}\n"


if __name__ == "__main__":
    TARGET.write_text(text_of(all_families()), encoding="utf-8")
