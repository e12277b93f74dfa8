"""What adapters train of a mixture's blocks is told before step 1, with a warning where a name misses the experts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.vramfit.models.conftest import make_plan
from tests.vramfit.models.tiny_families import TINY, tiny_config
from tests.vramfit.training.test_adapters_in_runs import write_model
from vramfit.config import RunConfig
from vramfit.models.adapters import attach_adapters
from vramfit.models.architecture import Architecture, from_config
from vramfit.training.adapted_share import adapted_share
from vramfit.training.loop import train

MIXTURES = ["mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3"]


def mixture(model_type: str) -> tuple[Any, Architecture]:
    """A model without numbers, and its architecture."""
    config = tiny_config(model_type, dict(TINY)[model_type])
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    return model, from_config(json.loads(config.to_json_string(use_diff=True)), model_type)


def told(architecture: Architecture, *targets: str, experts: bool = False) -> tuple[str, str]:
    found = adapted_share(architecture, make_plan(lora_rank=4, lora_targets=targets, lora_experts=experts))
    assert found is not None
    return found


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_case_083_the_share_is_that_of_the_model_itself(model_type: str, experts: bool) -> None:
    model, architecture = mixture(model_type)
    assert architecture.experts is not None
    layer = next(filter(architecture.experts.at, range(architecture.layers)))
    whole = sum(value.numel() for value in model.model.layers[layer].state_dict().values())
    adapted = attach_adapters(model, rank=4, alpha=8, experts=experts, seed=0)
    block = adapted.get_base_model().model.layers[layer]
    trained = sum(value.numel() for value in block.parameters() if value.requires_grad)

    level, message = told(architecture, "all-linear", experts=experts)
    assert level == "info"
    assert f"train {trained:,} numbers beside the {whole:,} of a block with experts" in message
    assert ("Turn on adapter.experts" in message) is not experts


def test_case_083_a_name_that_misses_the_experts_is_a_warning() -> None:
    _, architecture = mixture("deepseek_v3")  # whose shared experts have a gate_proj, too
    level, message = told(architecture, "o_proj", "mlp.gate_proj")
    assert level == "warning"
    assert "no target means them (mlp.gate_proj matches 0)" in message
    assert told(architecture, "o_proj")[0] == "info"
    assert told(architecture, "o_proj", "mlp.gate_proj", experts=True)[0] == "info"


def test_without_experts_or_adapters_there_is_nothing_to_tell() -> None:
    _, dense = mixture("llama")
    _, mixed = mixture("mixtral")
    assert adapted_share(dense, make_plan(lora_rank=4, lora_targets=("all-linear",))) is None
    assert adapted_share(mixed, make_plan()) is None


def test_case_083_a_run_tells_it_before_step_1(
    small_run: Callable[..., RunConfig], kept: Callable[[], Any], cache: Path, tmp_path: Path
) -> None:
    heard = kept()
    config = small_run(
        method="lora",
        model={"source": write_model(tmp_path / "model", cache, experts=True)},
        schedule={"max_steps": 1},
        data={"packing": False},
    )
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    [event] = [event for event in heard.events if event.kind == "adapters"]
    assert (event.level, event.step) == ("info", None)
    assert "have none. Turn on adapter.experts" in event.message
