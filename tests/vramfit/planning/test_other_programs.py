"""Our plan as other programs would carry it out: their loss, their formats, and what does not fit there."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest

from vramfit.errors import ConfigError
from vramfit.hardware.catalogue import machine_with
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.explore import across_programs
from vramfit.planning.memory import estimate_memory
from vramfit.planning.other_programs import COMPARED, Run, chunk_rows, elsewhere, plan_in, record_of, with_buckets
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import PROGRAMS
from vramfit.units import GIB

Makes = Callable[..., Any]


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def on_card(plan: Makes, **changes: Any) -> Plan:
    usual = {"method": "full", "device": "cuda:0", "compute": "bf16", "budget_bytes": 23 * GIB}
    found: Plan = plan(**{**usual, **changes})
    return found


def run_of(architecture: Architecture, workload: Workload, sequences: int = 16) -> Run:
    device = machine_with("RTX 4090").devices[0]
    return Run(architecture=architecture, device=device, workload=workload, sequences=sequences, ram_bytes=64 * GIB)


def test_a_program_is_found_by_name_and_by_what_the_plan_is(plan: Makes) -> None:
    qlora = on_card(plan, method="qlora", lora_rank=8, lora_targets=("all-linear",), weight_format="nf4")
    lora = on_card(plan, method="lora", lora_rank=8, lora_targets=("all-linear",), weight_format="bf16")
    assert record_of("litgpt", qlora).name == "litgpt-quantised"
    assert record_of("litgpt", lora).name == "litgpt"
    assert record_of("litgpt", on_card(plan)).loss == "chunked"
    with pytest.raises(ConfigError, match=rf"'axolotl' among {len(PROGRAMS)}.*transformers, "):
        record_of("axolotl", lora)
    with pytest.raises(ConfigError, match=r"torchtitan is of 2 methods, and lora is none.*pretrain or full"):
        record_of("torchtitan", lora)


def test_our_own_techniques_are_left_out(plan: Makes, workload: Makes) -> None:
    ours = on_card(
        plan, weights_tier="host", optimizer_tier="host", compress=3, optimizer_in_backward=True, slot_bytes=GIB
    )
    found = plan_in(PROGRAMS["transformers"], ours, model("Qwen/Qwen3-0.6B"), workload(1024))
    assert (found.weights_tier, found.optimizer_tier, found.compress) == ("device", "device", 0)
    assert (found.optimizer_in_backward, found.slot_bytes) == (False, 0)
    assert (found.loss, found.loss_chunk_tokens, found.trained_format) == ("full", 0, "fp32")


def test_a_program_in_pure_bf16_has_its_states_so_unless_it_keeps_fp32_copies(plan: Makes, workload: Makes) -> None:
    """10 bytes a parameter in LitGPT's step (2 each of weight, gradient, two moments and a temporary), 20 in the
    Trainer's under autocast: twice as much of everything."""
    architecture = model("Qwen/Qwen3-0.6B")
    steps = {}
    for name in ("transformers", "torchtune", "deepspeed"):
        found = plan_in(PROGRAMS[name], on_card(plan, micro_batch=1), architecture, workload(64))
        estimate = estimate_memory(architecture, found, workload(64), program=PROGRAMS[name])
        steps[name] = next(phase.total_bytes for phase in estimate.phases if phase.name == "step") / architecture.params
    assert steps["transformers"] == pytest.approx(20)
    assert steps["torchtune"] == pytest.approx(8)  # fused: no temporary
    assert steps["deepspeed"] == pytest.approx(2 + 4 + 8 + 2 + 4)


def test_rows_of_logits_are_the_programs_own() -> None:
    architecture = model("meta-llama/Llama-2-7b-hf")
    rows = {
        (name, loss): chunk_rows(PROGRAMS[name], loss, architecture, micro_batch=2, tokens=4096)
        for name, loss in (("peft", "full"), ("litgpt", "chunked"), ("torchtune", "chunked"), ("unsloth", "fused"))
    }
    assert list(rows.values()) == [0, 256, 512, 1024]  # fused: 4096 x 4096 / 32000 = 524, and the next power


def test_zero_holds_buckets_and_live_parameters(plan: Makes) -> None:
    large, small = model("meta-llama/Llama-2-7b-hf"), model("Qwen/Qwen3-0.6B")
    zero3 = on_card(plan, cards=4, sharding="zero3")
    zero2 = on_card(plan, cards=4, sharding="zero2")
    deepspeed = PROGRAMS["deepspeed"]
    assert with_buckets(deepspeed, zero3, large).sharding.bucket_bytes == 4 * 5e8 + 2e9
    assert with_buckets(deepspeed, zero2, large).sharding.bucket_bytes == 4 * 5e8
    assert with_buckets(deepspeed, zero3, small).sharding.bucket_bytes == 4 * 5e8 + 2 * small.params
    assert with_buckets(PROGRAMS["transformers"], zero3, large) == PROGRAMS["transformers"]


def test_what_does_not_fit_gets_smaller_micro_batches_of_the_same_step(plan: Makes, workload: Makes) -> None:
    """Whole logits of 8 x 2,048 tokens are 12 x 152 K x 16 K = 28 GiB, of one sequence an eighth."""
    architecture, work = model("Qwen/Qwen3-0.6B"), workload(2048)
    ours = on_card(plan, max_length=2048, micro_batch=8, accumulation=2)
    found = elsewhere("transformers", ours, run_of(architecture, work))
    kept = elsewhere("transformers", ours, run_of(architecture, work), keeps_micro_batch=True)
    assert found.fits
    assert found.plan.micro_batch < 8
    assert found.plan.micro_batch * found.plan.accumulation == 16
    assert (kept.plan.micro_batch, kept.fits) == (8, False)
    assert kept.memory.peak.parts["logits"] == 12 * 151936 * 8 * 2048


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
def test_the_comparison_begins_with_ours_and_takes_less_than_a_second(method: Any) -> None:
    machine = machine_with("RTX 4090")
    across_programs(machine, model("Qwen/Qwen3-0.6B"), method)
    began = time.process_time()
    found = across_programs(machine, model("Qwen/Qwen3-8B"), method)
    assert time.process_time() - began < 1.0
    assert found[0].program == "vramfit"
    others = [one.program for one in found[1:]]
    assert set(others) <= set(COMPARED)
    assert len(others) == len(set(others)) >= 8
    speeds = [one.speed.tokens_per_s for one in found[1:] if one.fits]
    assert speeds == sorted(speeds, reverse=True)
