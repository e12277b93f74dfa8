"""What a config.json means that lacks a key: the same as transformers takes it for, and told; or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bench.make_config_defaults import TARGET, all_families, text_of
from vramfit.errors import ModelError
from vramfit.models import families
from vramfit.models.architecture import Architecture, from_config
from vramfit.models.config_json import config_values
from vramfit.models.config_keys import ACTIVATIONS, known_keys

SIZES = ("hidden_size", "layers", "heads", "vocab_size", "mlp_width")
WIDTHS = {"qk_rope_head_dim": 16, "qk_nope_head_dim": 24, "v_head_dim": 40, "kv_lora_rank": 48, "q_lora_rank": 56}
TINY = {
    "hidden_size": 128,
    "layers": 6,
    "heads": 8,
    "kv_heads": 2,
    "head_dim": 32,
    "mlp_width": 192,
    "vocab_size": 320,
    "max_position": 256,
}
SAME_KV_HEADS = {"deepseek_v2", "deepseek_v3", "glm4_moe_lite"}

transformers = pytest.importorskip("transformers")


def keys_of_sizes(name: str) -> set[str]:
    """The keys that a file of its own must have."""
    row = families.FAMILIES[name]
    fields = SIZES[:-1] if name in families.FOUR_TIMES_WIDE else SIZES
    return {row.keys.get(field, families.USUAL_KEYS[field]) for field in fields}


def class_of(name: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return CONFIG_MAPPING[name]


def complete(name: str) -> dict[str, Any]:
    """A file of a tiny model of the family that says every key, each with a value that is not the default."""
    known, row = known_keys(name), families.FAMILIES[name]
    values = dict(known.defaults)
    for field, size in TINY.items():
        key = row.keys.get(field, families.USUAL_KEYS[field])
        if key in known.defaults:
            values[key] = size
    values |= {key: size for key, size in WIDTHS.items() if key in known.defaults}
    if row.experts is not None:
        values |= {row.experts.count: 6, row.experts.active: 2, row.experts.width: 64}
        for key, value in ((row.experts.first_dense, 2), (row.experts.shared_width, 96), (row.experts.every, 2)):
            values |= {key: value} if key in known.defaults else {}
        values |= {row.experts.shared_count: 3} if row.experts.shared_count else {}
        values |= {row.experts.dense_layers: [0]} if row.experts.dense_layers else {}
    if name in SAME_KV_HEADS:
        values["num_key_value_heads"] = TINY["heads"]
    switches = [key for key, value in values.items() if isinstance(value, bool)]
    values |= {key: not known.defaults[key] for key in switches}
    values |= {"num_kv_heads": 2, "num_ln_in_parallel_attn": 1} if name == "falcon" else {}
    values |= {"word_embed_proj_dim": 64} if name == "opt" else {}
    values |= {"seq_length": 256} if name == "bloom" else {}
    values |= {"attention_types": [[["global"], TINY["layers"]]]} if name == "gpt_neo" else {}
    return {"model_type": name, **values}


def as_transformers_reads(name: str, values: dict[str, Any]) -> Architecture:
    """The file that transformers writes after reading `values`: every key of its class, in words of its own."""
    if name == "glm4_moe_lite" and "first_k_dense_replace" in values:  # its class has a list of every block's kind
        dense = values["first_k_dense_replace"] or 0
        values = {**values, "mlp_layer_types": ["dense"] * dense + ["sparse"] * (TINY["layers"] - dense)}
    return from_config(json.loads(class_of(name).from_dict(values).to_json_string(use_diff=False)), "m")


CASES = [(name, key) for name in families.FAMILIES for key in known_keys(name).defaults]


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_a_file_that_says_everything_assumes_nothing(name: str) -> None:
    assert from_config(complete(name), "m").notes == ()


@pytest.mark.parametrize(("name", "key"), CASES)
def test_a_missing_key_is_taken_as_transformers_takes_it_and_told(name: str, key: str) -> None:
    values = complete(name)
    del values[key]
    if key in keys_of_sizes(name):
        with pytest.raises(ModelError, match=rf"{key} is missing"):
            from_config(values, "m")
        return
    try:
        expected = as_transformers_reads(name, values)
    except ModelError:  # it has no default, or one that does not go with the tiny model's other sizes
        with pytest.raises(ModelError, match=rf"{key} is missing"):
            from_config(values, "m")
        return
    found = from_config(values, "m")
    assert found == expected
    assert found.notes[0].startswith(f"config.json does not say {key} (")


@pytest.mark.parametrize(("name", "key"), CASES)
def test_null_means_what_it_means_to_transformers_or_is_refused(name: str, key: str) -> None:
    values = {**complete(name), key: None}
    try:
        expected: Architecture | None = as_transformers_reads(name, values)
    except Exception:  # its own classes of complaint, and ours of what came of it
        expected = None
    if expected is None or known_keys(name).needs_value(key):
        with pytest.raises(ModelError, match=rf"{key} is (null|missing)"):
            from_config(values, "m")
    else:
        assert from_config(values, "m") == expected


def test_the_table_is_what_the_installed_transformers_has() -> None:
    """Another release may have other defaults: then `python bench/make_config_defaults.py` says which."""
    assert TARGET.read_text(encoding="utf-8") == text_of(all_families())


@pytest.mark.parametrize("name", sorted(families.FAMILIES))
def test_which_families_drop_out_without_being_told_is_their_class_s_default(name: str) -> None:
    shares = [known_keys(name).defaults.get(key) or 0.0 for key in families.DROPOUT_KEYS]
    assert (name in families.DROPS_OUT) == any(share > 0 for share in shares)


def test_a_part_of_a_larger_model_may_leave_out_sizes_and_tells_them() -> None:
    """As transformers writes the text part of Gemma 3: only what differs from the family's first model."""
    part = {"model_type": "gemma3_text", "hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34}
    found = from_config({"model_type": "gemma3", "text_config": part}, "gemma")

    from transformers import AutoConfig

    read = AutoConfig.for_model("gemma3", text_config=part).text_config
    assert (found.heads, found.kv_heads, found.head_dim) == (
        read.num_attention_heads,
        read.num_key_value_heads,
        read.head_dim,
    )
    assert found.vocab_size == read.vocab_size
    assert f"vocab_size ({read.vocab_size})" in found.notes[0]
    assert "num_attention_heads (8)" in found.notes[0]


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("gpt2", "hidden_size", "n_embd"),
        ("gpt2", "num_hidden_layers", "n_layer"),
        ("bloom", "n_embed", "hidden_size"),
        ("bloom", "num_attention_heads", "n_head"),
        ("mixtral", "num_experts", "num_local_experts"),
        ("deepseek_v3", "num_local_experts", "n_routed_experts"),
        ("mpt", "num_hidden_layers", "n_layers"),
    ],
)
def test_old_names_of_keys_are_read(name: str, old: str, new: str) -> None:
    values = complete(name)
    expected = from_config(values, "m")
    values[old] = values.pop(new)
    assert as_transformers_reads(name, values) == expected
    assert from_config(values, "m") == expected


def test_the_names_of_activations_are_those_of_transformers() -> None:
    pytest.importorskip("torch")
    from transformers.activations import ACT2FN

    assert set(ACT2FN) == ACTIVATIONS


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"num_hidden_layers": 5000},
            "num_hidden_layers is 5000, and it must be a whole number above 0, at most 4,096",
        ),
        ({"vocab_size": 2**32}, "at most 2,147,483,648"),
        ({"vocab_size": 10**30}, "vocab_size is 1e+30"),
        ({"vocab_size": float("inf")}, "vocab_size is inf, not a number"),
        ({"vocab_size": "32000"}, "vocab_size is '32000', not a number"),
        ({"hidden_act": "many"}, "hidden_act is 'many', which is no activation's name"),
        ({"hidden_act": 3}, "hidden_act is 3, which is no activation's name"),
        ({"hidden_act": ""}, "hidden_act is '', which is no activation's name"),
        ({"tie_word_embeddings": 7}, "tie_word_embeddings is 7, not true or false"),
        ({"tie_word_embeddings": []}, "tie_word_embeddings is [], not true or false"),
        ({"mlp_bias": None}, "mlp_bias is null, and it must have a value"),
    ],
)
def test_nonsense_is_refused_by_name(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_config({**complete("llama"), **changes}, "m")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("family", "changes", "says"),
    [
        ("qwen3_moe", {"mlp_only_layers": "all"}, "mlp_only_layers is 'all', not a list of numbers of blocks"),
        ("qwen3_moe", {"mlp_only_layers": [1, "2"]}, "not a list of numbers of blocks"),
        (
            "glm4_moe_lite",
            {"mlp_layer_types": ["sparse"] + ["dense"] * (TINY["layers"] - 1)},
            "not a list of dense blocks and then sparse ones",
        ),
        ("glm4_moe_lite", {"mlp_layer_types": 3}, "mlp_layer_types is 3"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense"]}, f"has 1 entries, and there are {TINY['layers']} blocks"),
        ("glm4_moe_lite", {"mlp_layer_types": ["dense", 5]}, "mlp_layer_types holds 5, not dense or sparse"),
        ("qwen3_moe", {"mlp_only_layers": [0, 99]}, f"mlp_only_layers holds 99, and the {TINY['layers']} blocks"),
        ("qwen3_moe", {"mlp_only_layers": [-1]}, "mlp_only_layers holds -1"),
        ("gemma2", {"layer_types": ["full_attention"]}, f"has 1 entries, and there are {TINY['layers']} blocks"),
        ("gemma3_text", {"layer_types": ["global"] * TINY["layers"]}, "layer_types holds 'global', not full_attention"),
        ("llama", {"layer_types": "full_attention"}, "layer_types is 'full_attention', not a list of"),
        ("gemma3_text", {"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
        ("cohere2", {"sliding_window_pattern": [1]}, "sliding_window_pattern is [1]"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is true"),
        ("gpt_bigcode", {"add_cross_attention": True}, "add_cross_attention is true"),
        ("gemma2", {"final_logit_softcapping": 0}, "final_logit_softcapping is 0"),
        ("gemma2", {"attn_logit_softcapping": "50"}, "attn_logit_softcapping is '50'"),
        ("gpt2", {"resid_pdrop": 2}, "resid_pdrop is 2, and it must be 0 to 1"),
        ("gpt2", {"resid_pdrop": "0.1"}, "resid_pdrop is '0.1'"),
    ],
)
def test_nonsense_that_only_some_families_read_is_refused_too(family: str, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as caught:
        from_config({**complete(family), **changes}, "m")
    assert says in str(caught.value)


def test_a_quantised_part_of_a_larger_model_is_refused_as_a_whole_one_is() -> None:
    part = {**complete("llama"), "quantization_config": {"quant_method": "gptq"}}
    with pytest.raises(ModelError, match="quantised with GPTQ"):
        from_config({"model_type": "llava", "text_config": part}, "m")


FULL, SLIDING = "full_attention", "sliding_attention"


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("gemma3_text", {}),
        ("gemma3_text", {"sliding_window_pattern": 2}),
        ("gemma3_text", {"sliding_window_pattern": 1}),
        ("gemma3_text", {"sliding_window_pattern": 2, "layer_types": [SLIDING, SLIDING, FULL, FULL, FULL, SLIDING]}),
        ("gemma2", {"sliding_window_pattern": 3}),
        ("gemma2", {"layer_types": [FULL] * 6}),
        ("cohere2", {"sliding_window_pattern": 3}),
        ("olmo3", {"layer_types": [FULL, SLIDING] * 3}),
        ("gpt_oss", {"layer_types": [FULL, SLIDING] * 3}),
        ("qwen3", {"layer_types": [FULL, SLIDING] * 3, "use_sliding_window": True}),
        ("qwen3", {"layer_types": [FULL] * 6, "use_sliding_window": False}),
        ("qwen3", {"use_sliding_window": True}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 0}),
        ("qwen2_moe", {"use_sliding_window": True, "max_window_layers": 3}),
    ],
)
def test_the_blocks_that_slide_are_those_of_transformers(family: str, said: dict[str, Any]) -> None:
    from transformers import AutoConfig

    layers = families.FAMILIES[family].keys.get("layers", "num_hidden_layers")
    values = {**complete(family), "sliding_window": 64, layers: 6, **said}
    found = from_config(values, "m")
    theirs = AutoConfig.for_model(family, **{key: value for key, value in values.items() if key != "model_type"})

    assert found.windows == tuple(kind == SLIDING for kind in theirs.layer_types)
    again = from_config(config_values(found), "m")
    assert (again.windows, again.sliding_layers) == (found.windows, found.sliding_layers)


def test_blocks_named_as_usual_are_the_usual_shape() -> None:
    named = {**complete("gemma2"), "layer_types": [SLIDING, FULL] * (TINY["layers"] // 2)}
    assert from_config(named, "m") == from_config(complete("gemma2"), "m")
    assert from_config({**complete("mistral"), "layer_types": [FULL] * TINY["layers"]}, "m").sliding_layers is None
