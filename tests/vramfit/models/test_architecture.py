"""Shapes and parameter counts: against published exact counts, and against what transformers builds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.vramfit.models.tiny_families import ONLY_COUNTED, TINY, tiny_config, tiny_ids
from vramfit.errors import ModelError
from vramfit.models import catalogue, families
from vramfit.models.architecture import from_config, is_quantised

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 256,
}


def test_counts_of_every_known_model_are_the_published_ones(reference_data: Path) -> None:
    facts = json.loads((reference_data / "reference" / "models.json").read_text(encoding="utf-8"))
    wrong = {}
    for fact in facts:
        architecture = catalogue.find(fact["id"])
        assert architecture is not None, fact["id"]
        if (architecture.params, architecture.active_params) != (fact["total_params"], fact["active_params"]):
            wrong[fact["id"]] = (architecture.params, fact["total_params"])
    assert wrong == {}


@pytest.fixture(scope="module")
def transformers_models() -> Any:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    return torch, transformers


@pytest.mark.parametrize(("model_type", "values"), TINY + ONLY_COUNTED, ids=tiny_ids(TINY + ONLY_COUNTED))
def test_counts_of_tiny_models_are_those_of_transformers(
    transformers_models: Any, model_type: str, values: dict[str, Any]
) -> None:
    """The file is read as transformers writes it, so the names of the keys are checked too."""
    torch, transformers = transformers_models
    config = tiny_config(model_type, values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    # A router's correction bias is a buffer here and a parameter in the published counts.
    biases = sum(buffer.numel() for name, buffer in model.named_buffers() if "e_score_correction_bias" in name)
    architecture = from_config(json.loads(config.to_json_string(use_diff=True)), model_type)

    assert architecture.params == sum(parameter.numel() for parameter in model.parameters()) + biases
    linears = {
        name.rpartition(".")[2]
        for name, module in model.named_modules()
        if type(module).__name__ in ("Linear", "Conv1D") or "Linear" in type(module).__name__
    } - {"lm_head", "embed_out", "project_in", "project_out", "gate", "router"}
    ours = {item.name for layer in range(architecture.layers) for item in architecture.linears(layer) if item.module}
    assert ours == linears


def test_a_multimodal_config_is_read_by_its_text_part() -> None:
    architecture = from_config({"model_type": "gemma3", "text_config": {**LLAMA, "model_type": "gemma3_text"}}, "g")

    assert architecture.family == "gemma3_text"
    assert architecture.tied_embeddings


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"hidden_size": 0}, "hidden_size is 0, and it must be a whole number above 0"),
        ({"num_hidden_layers": -3}, "num_hidden_layers is -3"),
        ({"vocab_size": "many"}, "vocab_size is 'many', not a number"),
        ({"vocab_size": float("nan")}, "vocab_size is nan, not a number"),
        ({"vocab_size": True}, "vocab_size is true, not a number"),
        ({"intermediate_size": 96.5}, "intermediate_size is 96.5"),
        ({"num_attention_heads": 5}, "hidden_size is 64, which 5 heads do not divide"),
        ({"num_key_value_heads": 3}, "num_key_value_heads is 3, which does not divide the 4 heads"),
        ({"attention_bias": "yes"}, "attention_bias is 'yes', not true or false"),
        ({"intermediate_size": None}, "intermediate_size is missing"),
        ({"model_type": None}, "does not say its model_type"),
        ({"model_type": ["llama"]}, "does not say its model_type"),
        ({"model_type": {}}, "does not say its model_type"),
        ({"model_type": "mamba"}, "model_type 'mamba', which VRAMFit does not know"),
        ({"model_type": "baichuan"}, "only loads with code from its own folder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"model_type": "roberta"}, "an encoder"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantised with GPTQ"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantised with AWQ"),
        ({"quantization_config": {"bits": 4, "group_size": 128}}, "quantised with a method it does not name"),
        ({"hidden_size": 10**20}, "hidden_size is 1e+20, and it must be a whole number above 0, at most 2,147,483,648"),
        ({"hidden_size": 10**400}, "hidden_size is a number of more than 300 digits, and it must be a whole number"),
        ({"hidden_size": -(10**400)}, "hidden_size is a number of more than 300 digits"),
        ({"vocab_size": float("-inf")}, "vocab_size is -inf, not a number"),
        ({"final_logit_softcapping": 10**400}, "final_logit_softcapping is a number of more than 300 digits"),
        ({"attention_dropout": 0, "hidden_dropout": 10**400}, "hidden_dropout is a number of more than 300 digits"),
        ({"attention_bias": [10**400] * 99}, "attention_bias is ["),
    ],
)
def test_a_wrong_config_is_refused_with_the_field(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ModelError) as raised:
        from_config({**LLAMA, **changes}, "my-model")

    assert says in str(raised.value)
    assert "my-model" in str(raised.value)
    assert raised.value.remedy


@pytest.mark.parametrize("stored", [{}, None, {"quant_method": None}, {"load_in_4bit": False, "load_in_8bit": False}])
def test_a_quantization_that_says_nothing_is_none(stored: object) -> None:
    values = {**LLAMA, "quantization_config": stored}
    assert from_config(values, "m") == from_config(LLAMA, "m")
    assert not is_quantised(values)


@pytest.mark.parametrize(
    "stored",
    [
        {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
        {"load_in_8bit": True, "quant_method": None},
        {"quant_method": "bitsandbytes"},
    ],
)
def test_bits_of_bitsandbytes_can_be_trained_on(stored: object) -> None:
    values = {**LLAMA, "quantization_config": stored}
    assert from_config(values, "m") == from_config(LLAMA, "m")
    assert is_quantised(values)


def test_falcon_s_first_files_are_falcon_s() -> None:
    sizes = {"hidden_size": 64, "vocab_size": 99, "bias": False, "alibi": False, "parallel_attn": True}
    old = {**sizes, "n_layer": 2, "n_head": 8}
    new = {**sizes, "num_hidden_layers": 2, "num_attention_heads": 8, "model_type": "falcon"}

    grouped = from_config({**old, "model_type": "RefinedWeb", "n_head_kv": 2}, "m")
    assert grouped == from_config({**new, "new_decoder_architecture": True, "num_kv_heads": 2}, "m")
    assert (grouped.kv_heads, grouped.norms_per_layer) == (2, 2)
    single = from_config({**old, "model_type": "RefinedWebModel", "multi_query": True}, "m")
    assert single == from_config({**new, "multi_query": True}, "m")
    assert single.kv_heads == 1
    assert from_config({**old, "model_type": "RefinedWebModel", "multi_query": False}, "m").kv_heads == 8


@pytest.mark.parametrize("family", sorted(families.FOUR_TIMES_WIDE))
def test_a_width_that_is_not_said_is_four_times_the_model_s_in_these_families(family: str) -> None:
    shape = {"hidden_size": 64, "n_embd": 64, "d_model": 64, "n_layer": 2, "n_layers": 2, "num_hidden_layers": 2}
    heads = {"n_head": 4, "n_heads": 4, "num_heads": 4, "num_attention_heads": 4}
    layers = {"num_layers": 2, "attention_types": [[["global", "local"], 1]], "n_positions": 32}
    architecture = from_config(
        {"model_type": family, "vocab_size": 99, "max_position_embeddings": 32, **shape, **heads, **layers}, "m"
    )

    assert architecture.mlp_width == 256
