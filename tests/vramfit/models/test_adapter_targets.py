"""The modules found in real (tiny) models of every family, against what the planner counts."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest
import torch
import transformers

from tests.vramfit.models.tiny_families import TINY, tiny_config, tiny_ids
from vramfit.errors import ModelError
from vramfit.models.adapter_targets import adapted_names, moved_to_experts
from vramfit.models.adapters import attach_adapters
from vramfit.models.architecture import from_config
from vramfit.planning.stored import adapted_linears, adapter_params

FAMILIES = dict(TINY)


def build(model_type: str, values: dict[str, Any] | None = None, *, device: str = "meta") -> Any:
    config = tiny_config(model_type, FAMILIES[model_type] if values is None else values)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config)


def shape_of(module: torch.nn.Module) -> tuple[int, int]:
    """(inputs, outputs)"""
    rows, columns = module.weight.shape
    return (rows, columns) if type(module).__name__ == "Conv1D" else (columns, rows)


@pytest.mark.parametrize(("model_type", "values"), TINY, ids=tiny_ids())
def test_all_linear_is_what_the_planner_counts(model_type: str, values: dict[str, Any]) -> None:
    model = build(model_type, values)
    architecture = from_config(json.loads(model.config.to_json_string(use_diff=True)), model_type)
    modules = dict(model.named_modules())
    found = Counter((name.rpartition(".")[2], *shape_of(modules[name])) for name in adapted_names(model, "all-linear"))

    planned: Counter[tuple[str, int, int]] = Counter()
    for layer in range(architecture.layers):
        for linear in adapted_linears(architecture, layer, ("all-linear",)):
            planned[(linear.name, linear.inputs, linear.outputs)] += linear.copies
    assert found == planned

    adapted = attach_adapters(model, rank=3, alpha=6, seed=0)
    trained = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
    assert trained == adapter_params(architecture, rank=3, targets=("all-linear",))


@pytest.mark.parametrize("model_type", ["deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "qwen2_moe"])
def test_a_named_projection_is_the_modules_of_that_name_and_no_experts(model_type: str) -> None:
    model = build(model_type)
    wanted = [name for name, _ in model.named_modules() if name.endswith(".gate_proj")]
    adapted = attach_adapters(model, rank=2, alpha=4, targets=["gate_proj"], seed=0)
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}

    assert wanted
    assert {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in trained} == set(wanted)
    assert not any("experts." in name and "shared_expert" not in name for name in trained)


@pytest.mark.parametrize(
    ("model_type", "fused"), [("gpt2", "c_attn"), ("phi3", "qkv_proj"), ("gpt_neox", "query_key_value")]
)
def test_case_082_where_attention_is_one_projection_the_refusal_lists_the_real_names(
    model_type: str, fused: str
) -> None:
    with pytest.raises(ModelError, match=f"'q_proj' matches 0 .*Choose all-linear, or from: .*{fused}"):
        attach_adapters(build(model_type), rank=2, alpha=4, targets=["q_proj", "v_proj"], seed=0)


def test_routers_that_are_linears_by_their_class_get_none() -> None:
    model = build("phimoe")
    assert [name for name, _ in model.named_modules() if name.endswith(".router")]
    assert not [name for name in adapted_names(model, "all-linear") if "router" in name]


def test_what_peft_would_take_for_the_experts_is_known() -> None:
    model = build("deepseek_v2")
    names = adapted_names(model, "all-linear")
    moved = moved_to_experts(model, names)

    assert moved == {name for name in names if name.endswith(("gate_proj", "up_proj", "down_proj"))}
    assert not moved_to_experts(build("llama"), adapted_names(build("llama"), "all-linear"))
