"""A mixture's block that comes in parts gives the bits of the whole one, and comes no more often."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.vramfit.engine.test_streaming import (
    a_config,
    a_plan,
    assert_equal_runs,
    batches,
    resident,
    saved,
    trained,
)
from vramfit.config import ScheduleChoice
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.streaming import StreamingExecutor
from vramfit.errors import ModelError
from vramfit.models.adapters import attach_adapters
from vramfit.models.block_tiers import split_blocks
from vramfit.models.catalogue import architecture_of
from vramfit.models.streamed import open_streamed
from vramfit.planning.memory import Work
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS

MIXTRAL: dict[str, Any] = {"num_local_experts": 5, "num_experts_per_tok": 3}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_routed_experts": 6,
    "num_experts_per_tok": 3,
    "n_shared_experts": 1,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
QWEN3: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 64,
    "mlp_only_layers": [0],
    "head_dim": 16,
}
OSS: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 3, "head_dim": 16}
SLOT = {"qlora": 30_000, "lora": 210_000}
"""Bytes: two experts of each."""


def opened(
    folder: Path, plan: Plan, tmp_path: Path, *, split: bool = False, experts: bool = False, dropout: float = 0.0
) -> StreamingExecutor:
    """Blocks that visit, with adapters beside their linears and perhaps their experts."""
    plan = dataclasses.replace(plan, slot_bytes=SLOT[plan.method] if split else 0)
    model, visits = open_streamed(
        a_config(folder, plan.method),
        plan,
        scratch=tmp_path / "scratch" / str(split),
        attach=lambda model: attach_adapters(model, rank=4, alpha=8.0, seed=3, experts=experts, dropout=dropout),
    )
    executor = StreamingExecutor(
        model,
        visits=visits,
        plan=plan,
        optimizer=build_optimizer(model, ScheduleChoice(), plan),
        inputs_file=tmp_path / "scratch" / str(split) / "inputs.bin",
    )
    executor.check()
    return executor


def mixtral(tmp_path: Path, **changes: Any) -> Path:
    return saved("mixtral", tmp_path / "model", **{"num_hidden_layers": 2, **MIXTRAL, **changes})


@pytest.mark.parametrize(
    ("family", "changes"), [("mixtral", MIXTRAL), ("deepseek_v3", LATENT), ("qwen3_moe", QWEN3), ("gpt_oss", OSS)]
)
def test_in_few_bits(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model", num_hidden_layers=2, **changes)
    plan = a_plan("qlora", weights_tier="host", attention="eager" if family == "gpt_oss" else "sdpa")
    here = opened(folder, plan, tmp_path, split=True)
    assert len(here.visits.split) == 2 - (family in ("deepseek_v3", "qwen3_moe"))

    assert_equal_runs(opened(folder, plan, tmp_path), here, steps=1)


@pytest.mark.parametrize(("tier", "stay"), [("host", 1), ("disk", 0), ("disk", 2)])
def test_plain_weights_give_the_bits_of_the_resident_run(tier: Any, stay: int, tmp_path: Path) -> None:
    """Two experts for each token: their sum is the same in either order, which is the library's own."""
    folder = mixtral(tmp_path, num_experts_per_tok=2)
    plan = a_plan()
    here = opened(folder, dataclasses.replace(plan, weights_tier=tier, resident_blocks=stay), tmp_path, split=True)
    assert len(here.visits.split) == 2

    assert_equal_runs(resident(folder, plan, tmp_path), here)


@pytest.mark.parametrize(("method", "at_once"), [("lora", False), ("qlora", True)])
def test_adapters_beside_experts(method: str, at_once: bool, tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    plan = a_plan(method, weights_tier="disk", lora_experts=True, optimizer_in_backward=at_once, clip_passes=1)

    assert_equal_runs(
        opened(folder, plan, tmp_path, experts=True), opened(folder, plan, tmp_path, split=True, experts=True)
    )


def test_every_slice_comes_twice_a_step_however_many_micro_batches(tmp_path: Path) -> None:
    executor = opened(mixtral(tmp_path), a_plan(weights_tier="host", resident_blocks=1), tmp_path, split=True)
    experts: Any = executor.visits._experts
    slices = sum(layout.nbytes for at, layout in enumerate(experts.tier.layouts) if experts.slices[at].block)
    executor.step(batches()[:1], 1e-3)
    moved = []
    for count in (1, 2, 3):
        before = executor.visits.stream.traffic.moved_bytes
        executor.step(batches()[:count], 1e-3)
        moved.append(executor.visits.stream.traffic.moved_bytes - before)

    # What is around the experts of the other block is there already.
    assert moved == [2 * slices] * 3


def test_blocks_may_go_and_stay_between_steps(tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    plan = a_plan("qlora", weights_tier="host", resident_blocks=2)
    there, here = opened(folder, plan, tmp_path), opened(folder, plan, tmp_path, split=True)
    for stays in (["visit", "stay"], ["visit", "visit"], ["stay", "visit"]):
        here.set_stays(stays)  # type: ignore[arg-type]
        assert_equal_runs(there, here, steps=1)
    whole = there.visits.stream.tier.layouts[0].nbytes
    assert here.stays == ["stay", "visit"]
    assert here.visits.staying_bytes == pytest.approx(whole, rel=0.05)


@pytest.mark.usefixtures("copied")
def test_the_device_never_holds_more_than_the_places(tmp_path: Path) -> None:
    """The closed form knows each place, and none is for a whole block."""
    folder = saved("deepseek_v3", tmp_path / "model", num_hidden_layers=3, **LATENT)
    plan = a_plan("qlora", weights_tier="host", slot_bytes=SLOT["qlora"])
    architecture = architecture_of(a_config(folder).model)
    work = Work.of(architecture, plan, Workload(sequences=8, mean_tokens=32, longest_tokens=64, exact=True), OURS)
    executor = opened(folder, plan, tmp_path, split=True)
    places = sorted(executor.visits.places.values())

    # Each small tensor begins at a multiple of 256 bytes.
    assert len(places) == len(work.slot_sizes) == 4
    for place, size in zip(places, sorted(work.slot_sizes), strict=True):
        assert size <= place < size + 256 * 50
    assert max(places) < 0.6 * max(work.stored.block_bytes)


def test_experts_that_are_split_have_a_smaller_peak(tmp_path: Path) -> None:
    folder = mixtral(tmp_path, num_local_experts=16, intermediate_size=512)
    plan = a_plan(weights_tier="host", accumulation=1)
    peaks = []
    for split in (False, True):
        executor = opened(folder, plan, tmp_path, split=split)
        peaks.append(max(_peak_of(executor) for _ in range(2)))

    block = 16 * 3 * 64 * 512 * 4
    assert peaks[1] < peaks[0] - 1.5 * block


def _peak_of(executor: StreamingExecutor) -> int:
    executor.step(batches()[:1], 1e-3)
    return executor.memory()[0]


def test_text_and_parts_of_the_merged_model(tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    plan = a_plan("qlora", weights_tier="disk", lora_experts=True)
    there, here = (opened(folder, plan, tmp_path, split=split, experts=True) for split in (False, True))
    for executor in (there, here):
        executor.step(batches(), 1e-2)

    def text(executor: StreamingExecutor) -> list[int]:
        executor.model.eval()
        model: Any = executor.model
        prompt = torch.tensor([[5, 9, 33, 12]])
        tokens: list[int] = model.generate(input_ids=prompt, max_new_tokens=4, do_sample=False)[0].tolist()
        return tokens

    assert text(there) == text(here)
    for one, other in zip(there.parts(), here.parts(), strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            first, second = (each if isinstance(each, torch.Tensor) else each.read() for each in (value, other[name]))
            assert torch.equal(first, second), name


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder, plan = mixtral(tmp_path), a_plan("qlora", weights_tier="host", lora_experts=True)
    whole, begun, resumed = (opened(folder, plan, tmp_path, split=True, experts=True) for _ in range(3))
    for _ in range(2):
        expected = whole.step(batches(), 1e-2)
    begun.step(batches(), 1e-2)
    resumed.load_state(*begun.state())

    assert resumed.step(batches(), 1e-2) == expected
    assert all(torch.equal(value, trained(whole)[name]) for name, value in trained(resumed).items())


@pytest.mark.parametrize("raised", [(), ("all",)])
def test_in_16_bits_and_raised_from_them(raised: tuple[str, ...], tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    plan = a_plan("qlora", weights_tier="host", compute="bf16")
    losses = []
    for split in (False, True):
        executor = opened(folder, plan, tmp_path, split=split)
        executor.raised.set(raised)
        losses.append([executor.step(batches(), 1e-2).loss for _ in range(2)])

    assert losses[0] == pytest.approx(losses[1], rel=1e-6 if raised else 1e-3)


def test_dropout_is_drawn_alike_forward_and_back(tmp_path: Path) -> None:
    """Drawn in attention's adapters and in those of experts: the gradient is that of the loss, by a finite step."""
    plan = a_plan(weights_tier="host", lora_experts=True, lora_dropout=0.4, accumulation=2)
    executor = opened(mixtral(tmp_path), plan, tmp_path, split=True, experts=True, dropout=0.4)
    executor.step(batches(), 1e-1)  # away from where B is zero

    def measured() -> tuple[float, dict[str, Any]]:
        torch.manual_seed(7)
        losses = []
        gradients: dict[str, Any] = {}
        for piece in (piece for batch in batches()[:1] for piece in executor.pieces(batch)):
            loss, gradients = executor.gradients(piece)
            losses.append(loss)
        return losses[0], gradients

    loss, gradients = measured()
    assert (loss, gradients.keys()) == (measured()[0], gradients.keys())
    step, expected = 1e-3, 0.0
    with torch.no_grad():
        for name, value in executor.model.named_parameters():
            if value.requires_grad and gradients.get(name) is not None:
                direction = gradients[name] / gradients[name].norm().clamp_min(1e-12)
                value.add_(step * direction)
                expected += step * float((gradients[name] * direction).sum())
    assert measured()[0] - loss == pytest.approx(expected, rel=0.1)


def test_experts_of_another_layout_are_refused_by_name() -> None:
    class Strange(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.Parameter(torch.zeros(2, 300, 40))

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.odd = Strange()

    with pytest.raises(ModelError, match=r"A block of 94 KiB is more than .* 1 KiB, .*cannot bring odd \(Strange\)"):
        split_blocks(a_plan(slot_bytes=1024), [Block()])
    assert split_blocks(a_plan(), [Block()]) == {}
