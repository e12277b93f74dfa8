"""The events of a run are those of the closed form: what is alive at their highest moment is its peak."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from vramfit.models import catalogue
from vramfit.planning.allocator import live_peak
from vramfit.planning.events import training_events
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS, PROGRAMS, Program

MODELS = ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B", "google/gemma-2-2b", "openai-community/gpt2")
ADAPTERS: dict[str, Any] = {"lora_rank": 16, "lora_targets": ("all-linear",), "weight_format": "bf16"}


def cases() -> Iterator[Any]:
    """(program, changes of a plan) with an id each."""
    everything = {"recompute": 100, "micro_batch": 4}
    yield pytest.param(OURS, {"method": "full"}, id="full")
    yield pytest.param(OURS, {"method": "full", "accumulation": 4, **everything}, id="full recompute accumulation")
    yield pytest.param(OURS, {"method": "full", "loss": "full", "micro_batch": 8}, id="full whole logits")
    yield pytest.param(OURS, {"method": "lora", **ADAPTERS}, id="lora")
    yield pytest.param(
        OURS, {"method": "lora", **ADAPTERS, **everything, "input_tier": "host"}, id="lora inputs in RAM"
    )
    yield pytest.param(OURS, {"method": "qlora", **ADAPTERS, "weight_format": "nf4", **everything}, id="qlora")
    yield pytest.param(OURS, {"method": "lora", **ADAPTERS, "micro_batch": 16, "compress": 8}, id="lora compressed")
    yield pytest.param(PROGRAMS["fms"], {"method": "full", **everything, "loss": "full"}, id="fms full")
    sharded = {"cards": 2, "sharding": "fsdp", **everything, "max_length": 512}
    yield pytest.param(PROGRAMS["fms"], {"method": "lora", **ADAPTERS, **sharded, "loss": "full"}, id="fms fsdp lora")
    yield pytest.param(PROGRAMS["fms"], {"method": "full", **sharded, "loss": "fused"}, id="fms fsdp full")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("program", "changes"), list(cases()))
def test_their_peak_is_the_closed_forms(
    plan: Callable[..., Plan],
    workload: Callable[..., Workload],
    name: str,
    program: Program,
    changes: dict[str, Any],
) -> None:
    architecture = catalogue.find(name)
    assert architecture is not None
    changes = {"device": "cuda:0", "compute": "bf16", "trained_format": "fp32", **changes}
    changes["recompute"] = min(changes.get("recompute", 0), architecture.layers)
    wish = plan(**changes)
    lengths = workload(wish.max_length)

    found = live_peak(training_events(architecture, wish, lengths, program=program))

    assert found == pytest.approx(estimate_memory(architecture, wish, lengths, program=program).peak_bytes, rel=0.01)


def test_every_tensor_is_freed_once_and_what_lives_on_is_there_in_every_step(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = catalogue.find("Qwen/Qwen3-0.6B")
    assert architecture is not None
    wish = plan(method="full", device="cuda:0", compute="bf16", trained_format="fp32", recompute=3, accumulation=2)
    alive = dict[int, int]()
    for tensor, size, _ in training_events(architecture, wish, workload()):
        if size:
            assert tensor not in alive
            alive[tensor] = size
        else:
            del alive[tensor]

    # fp32 weights and two fp32 moments; each tensor's bytes are rounded down
    assert sum(alive.values()) == pytest.approx(12 * architecture.params, abs=len(alive))
