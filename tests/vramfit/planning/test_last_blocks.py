"""Full training of the last blocks, planned: what trains and is kept, what a step does, moves, writes; refusals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.vramfit.planning.test_planner import forecast, model, reason, wish
from vramfit.errors import ConfigError
from vramfit.hardware.catalogue import machine_with
from vramfit.planning.allocator import live_peak
from vramfit.planning.events import training_events
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS
from vramfit.planning.rates import rates_of
from vramfit.planning.speed import _Step, flops_per_token
from vramfit.planning.stored import trained_params

TIED, UNTIED, MIXTURE = "Qwen/Qwen3-0.6B", "Qwen/Qwen3-8B", "allenai/OLMoE-1B-7B-0924"


def test_what_trains_is_blocks_norm_and_a_head_of_its_own(plan: Callable[..., Plan]) -> None:
    for name in (TIED, UNTIED, MIXTURE):
        architecture = model(name)
        head = 0 if architecture.tied_embeddings else architecture.head_params
        wanted = 3 * architecture.params_of_block(architecture.layers - 1) + architecture.hidden_size + head
        assert trained_params(architecture, plan(method="full", last_blocks=3)) == wanted
    assert trained_params(model(UNTIED), plan(method="full")) == model(UNTIED).params


@pytest.mark.parametrize("name", [TIED, UNTIED, MIXTURE, "openai-community/gpt2"])
@pytest.mark.parametrize(
    "changes",
    [
        {"last_blocks": 3},
        {"last_blocks": 5, "recompute": 2, "accumulation": 4},
        {"last_blocks": 1, "compute": "bf16", "micro_batch": 8},
        {"last_blocks": 4, "compress": 2},
    ],
    ids=["kept", "recomputed", "bf16", "compressed"],
)
def test_the_events_of_a_run_have_the_peak_of_the_closed_form(
    plan: Callable[..., Plan], workload: Callable[..., Workload], name: str, changes: dict[str, Any]
) -> None:
    planned, lengths = plan(method="full", device="cuda:0", **changes), workload()

    found = live_peak(training_events(model(name), planned, lengths))

    assert found == pytest.approx(estimate_memory(model(name), planned, lengths).peak_bytes, rel=0.01)


def test_frozen_blocks_keep_nothing_however_many_they_are(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    """But for their weights a model of 28 blocks takes what one of 14 takes."""
    deep = model(UNTIED)
    shallow = dataclasses.replace(deep, layers=deep.layers // 2)
    planned, lengths = plan(method="full", last_blocks=4, micro_batch=4), workload()
    peaks = [estimate_memory(shape, planned, lengths).peak_bytes for shape in (deep, shallow)]

    frozen = 4 * (deep.params - shallow.params)
    assert peaks[0] - peaks[1] == pytest.approx(frozen, rel=1e-6)


def test_a_frozen_block_is_passed_once_and_one_that_trains_three_times(plan: Callable[..., Plan]) -> None:
    architecture = dataclasses.replace(model(UNTIED), vocab_size=8)  # nothing but blocks
    length, layers = 64, architecture.layers
    every = flops_per_token(architecture, plan(), length=length)
    ten = flops_per_token(architecture, plan(method="full", last_blocks=10), length=length)
    again = flops_per_token(architecture, plan(method="full", last_blocks=10, recompute=10), length=length)

    assert ten / every == pytest.approx((layers + 2 * 10) / (3 * layers), rel=1e-3)
    assert (again - ten) / every == pytest.approx(10 / (3 * layers), rel=1e-3)


def test_fewer_blocks_need_less_and_are_faster() -> None:
    few, more, every = (
        forecast(wish("full", train_last_blocks=count, schedule={"sequences_per_step": 4})) for count in (2, 8, None)
    )
    assert few.memory.peak_bytes < more.memory.peak_bytes < every.memory.peak_bytes
    assert few.speed.step_seconds < more.speed.step_seconds < every.speed.step_seconds
    assert few.memory.disk_bytes < more.memory.disk_bytes < every.memory.disk_bytes
    assert few.memory.written_per_checkpoint_bytes == 12 * trained_params(model(TIED), few.plan)
    assert (few.plan.last_blocks, every.plan.last_blocks) == (2, 0)
    assert "embedding's own table" in reason(few, "trained weights")
    own_head = forecast(wish("full", train_last_blocks=2), of=UNTIED)
    assert "with the final norm and the head" in reason(own_head, "trained weights")
    assert "trained weights" not in {choice.setting for choice in every.plan.reasons}


def test_no_more_blocks_are_recomputed_than_train() -> None:
    tight = wish("full", train_last_blocks=6, memory={"activations": "recompute"})
    found = forecast(tight, of=UNTIED, on="A100 80GB")

    assert found.plan.recompute == 6
    assert next(c.value for c in found.plan.reasons if c.setting == "activations") == "recompute 6 of 6 blocks"


def test_streamed_frozen_blocks_come_once_a_step_and_are_not_written(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model(UNTIED)
    streamed = {"method": "full", "weights_tier": "disk", "optimizer_tier": "disk", "recompute": 4}
    planned = plan(last_blocks=4, **streamed)
    block = 4 * architecture.params_of_block(0)

    def visits(one: Plan) -> float:
        rates = rates_of(machine_with("RTX 4090").devices[0], "fp32")
        return _Step(
            architecture=architecture,
            plan=one,
            program=OURS,
            rates=rates,
            length=128,
            trained_share=1.0,
            passes=1,
        ).visits

    assert visits(planned) == pytest.approx(block * (architecture.layers - 4 + 2 * 4))
    assert visits(dataclasses.replace(planned, resident_blocks=3)) == pytest.approx(block * (32 + 2 * 1 + 3))
    assert visits(dataclasses.replace(planned, resident_blocks=5)) == pytest.approx(block * (31 + 4))
    adapters = plan(method="lora", lora_rank=8, lora_targets=("q_proj",), weights_tier="disk", resident_blocks=3)
    assert visits(adapters) == pytest.approx(2 * block * (architecture.layers - 3)), "those that stay do not change"
    estimate = estimate_memory(architecture, planned, workload())
    trained = trained_params(architecture, planned)
    # weights and gradients of the blocks, two states of everything that trains
    assert estimate.written_per_step_bytes == pytest.approx(4 * (2 * 4 * block / 4 + 2 * trained), rel=1e-6)
    whole = estimate_memory(architecture, plan(**{**streamed, "recompute": architecture.layers}), workload())
    assert estimate.disk_bytes < whole.disk_bytes and estimate.device_bytes < whole.device_bytes


def test_which_blocks_stay_first_those_that_would_come_twice(plan: Callable[..., Plan]) -> None:
    assert plan(last_blocks=3, resident_blocks=2).staying(8) == (5, 6)
    assert plan(last_blocks=3, resident_blocks=5).staying(8) == (0, 1, 5, 6, 7)
    assert plan(resident_blocks=2).staying(8) == (0, 1)


def test_a_budget_too_small_streams_what_it_must() -> None:
    found = forecast(wish("full", train_last_blocks=4), of=UNTIED, on="RTX 3060 12GB")

    assert found.plan.weights_tier != "device" and found.plan.recompute == 4
    assert found.memory.device_bytes <= found.plan.budget_bytes


def test_wishes_that_make_no_sense_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"train_last_blocks is 29, and .* has 28 blocks"):
        forecast(wish("full", train_last_blocks=29))
    for method, words in (
        ("lora", "lora trains adapters beside"),
        ("pretrain", "a run from random weights trains all"),
    ):
        with pytest.raises(ConfigError, match=f"train_last_blocks is 2, and {words}"):
            wish(method, train_last_blocks=2)
    with pytest.raises(ConfigError, match="train_last_blocks is 0, the least is 1"):
        wish("full", train_last_blocks=0)
