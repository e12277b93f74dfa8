"""What a card must have: replays against the closed form, and runs whose outcome is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.cap import LEAST_OUTSIDE_BYTES, CapOfRun, needs_of
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS, PROGRAMS
from vramfit.units import GIB, MIB

A100_80GB = 79.15 * GIB
QUARTER = ("q_proj", "k_proj", "v_proj", "o_proj")


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


@pytest.fixture
def fms(plan: Callable[..., Plan]) -> Plan:
    """Llama-3-8B as fms-acceleration trains it with a fused loss: 4096 tokens, all recomputed, pure bf16."""
    return plan(
        method="full",
        device="cuda:0",
        compute="bf16",
        weight_format="bf16",
        trained_format="bf16",
        optimizer_bits=16,
        max_length=4096,
        recompute=32,
        loss="fused",
        loss_chunk_tokens=1024,
        attention="flash",
    )


def cap_of(name: str, wish: Plan, program: str) -> CapOfRun:
    lengths = Workload(sequences=100, mean_tokens=4096, longest_tokens=4096, exact=True)
    return CapOfRun(model(name), wish, lengths, program=PROGRAMS[program], evaluates=False, outside=LEAST_OUTSIDE_BYTES)


def test_one_run_with_75_gib_allocated_completes_where_one_with_76_fails(fms: Plan) -> None:
    """Published, same card and program: 8 sequences complete with 74.80 GiB allocated at the optimizer's few large
    tensors, 16 fail in backward, where gradients that stay lie between what comes and goes."""
    step = cap_of("meta-llama/Meta-Llama-3-8B", replace(fms, micro_batch=8), "fms/foak")
    backward = cap_of("meta-llama/Meta-Llama-3-8B", replace(fms, micro_batch=16), "fms/foak")

    assert step.completes(A100_80GB)
    assert not backward.completes(A100_80GB)
    assert step.fragmentation < GIB < 5 * GIB < backward.fragmentation


def test_reserved_and_context_are_what_the_driver_showed(fms: Plan) -> None:
    """Published nvidia-smi levels: 75.72 and 78.01 GiB with 4 and 8 sequences."""
    for sequences, shown in ((4, 75.72), (8, 78.01)):
        found = cap_of("meta-llama/Meta-Llama-3-8B", replace(fms, micro_batch=sequences), "fms/foak")

        assert (found.reserved_bytes(A100_80GB) + found.outside) / GIB == pytest.approx(shown, rel=0.005)


def test_sharded_frozen_blocks_that_hold_their_inputs_fail_with_67_gib_allocated(fms: Plan) -> None:
    """Published: 70B QLoRA on two cards completes with 2 sequences and fails with 4."""
    wish = replace(
        fms,
        method="qlora",
        weight_format="nf4",
        recompute=80,
        loss="full",
        loss_chunk_tokens=0,
        lora_rank=16,
        lora_targets=QUARTER,
        lora_dropout=0.1,
        cards=2,
        sharding="fsdp",
        optimizer_bits=32,
    )
    name, program = "meta-llama/Llama-2-70b-hf", "fms/foak-quantised"

    assert cap_of(name, replace(wish, micro_batch=2), program).completes(A100_80GB)
    assert not cap_of(name, replace(wish, micro_batch=4), program).completes(A100_80GB)


def test_expandable_segments_need_hardly_more_than_the_tensors(fms: Plan) -> None:
    lengths = Workload(sequences=100, mean_tokens=4096, longest_tokens=4096, exact=True)
    wish = replace(fms, micro_batch=16)
    found = CapOfRun(
        model("meta-llama/Meta-Llama-3-8B"),
        wish,
        lengths,
        program=PROGRAMS["fms/foak"],
        evaluates=False,
        expandable=True,
    )

    assert found.fragmentation < 0.02 * 76 * GIB


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "meta-llama/Llama-3.2-1B"])
@pytest.mark.parametrize(
    "changes",
    [
        {"method": "full", "micro_batch": 4},
        {"method": "full", "micro_batch": 4, "loss": "full", "loss_chunk_tokens": 0},
        {"method": "lora", "lora_rank": 16, "lora_targets": ("all-linear",), "micro_batch": 8},
        {"method": "qlora", "weight_format": "nf4", "lora_rank": 16, "lora_targets": ("all-linear",), "recompute": 16},
    ],
)
def test_the_closed_form_of_the_device_is_near_the_replays(
    plan: Callable[..., Plan], workload: Callable[..., Workload], name: str, changes: dict[str, Any]
) -> None:
    usual = {
        "device": "cuda:0",
        "compute": "bf16",
        "weight_format": "bf16",
        "max_length": 1024,
        "loss_chunk_tokens": 64,
    }
    wish = plan(**{**usual, **changes})
    estimate = estimate_memory(model(name), wish, workload(1024))
    replayed = CapOfRun(model(name), wish, workload(1024)).smallest_bytes

    assert 0.95 * replayed <= estimate.device_bytes <= 1.1 * replayed


def test_what_a_traced_peak_needs_of_a_card(plan: Callable[..., Plan], workload: Callable[..., Workload]) -> None:
    """100 MiB more tensors than the closed form's are 100 MiB more of the card; the replay's pieces stay the same."""
    wish = plan(device="cuda:0", compute="bf16", weight_format="bf16", max_length=1024, loss_chunk_tokens=64)
    shape, work = model("Qwen/Qwen3-0.6B"), workload(1024)
    peak = estimate_memory(shape, wish, work).peak_bytes
    found, more = (
        needs_of(shape, wish, work, tensors=tensors, device_bytes=48 * GIB) for tensors in (peak, peak + 100 * MIB)
    )

    assert found.smallest == CapOfRun(shape, wish, work).smallest_bytes
    assert more.smallest - found.smallest == 100 * MIB
    assert (found.tensors, found.outside) == (peak, OURS.context_bytes)
    assert found.reserved is not None and more.reserved is not None
    assert peak < found.smallest - found.outside <= found.reserved
    assert more.reserved > found.reserved
    short = needs_of(shape, wish, work, tensors=peak, device_bytes=found.smallest // 2)
    assert short.reserved == found.smallest - found.outside  # what it would take to complete


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_where_no_allocator_is_simulated_the_closed_form_says_what_is_added(
    plan: Callable[..., Plan], workload: Callable[..., Workload], device: str
) -> None:
    wish, shape = plan(device=device, max_length=256), model("HuggingFaceTB/SmolLM2-135M")
    estimate = estimate_memory(shape, wish, workload(256))
    found = needs_of(shape, wish, workload(256), tensors=estimate.peak_bytes + 7, device_bytes=GIB)

    assert found.reserved is None
    assert found.smallest == estimate.device_bytes + 7 == found.tensors + found.outside
