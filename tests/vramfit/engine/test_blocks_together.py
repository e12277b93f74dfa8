"""Small blocks that come several at a time: the same bits, the same traffic."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine import test_trained_blocks as full
from tests.vramfit.engine.test_streaming import a_plan, assert_equal_runs, batches, resident, saved, streaming
from vramfit.engine.blocks import BlockStream, Layout
from vramfit.engine.tiers import RamTier
from vramfit.errors import CheckpointError
from vramfit.planning.slots import groups_of

pytestmark = pytest.mark.usefixtures("copied")

TWO = {"lora": 300_000, "qlora": 50_000, "full": 300_000}
"""Bytes in which two blocks of the small model fit, and not three."""


@pytest.mark.parametrize(
    ("method", "tier", "stay"), [("lora", "host", 0), ("lora", "disk", 2), ("qlora", "host", 1), ("qlora", "disk", 5)]
)
def test_with_adapters(method: str, tier: Any, stay: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = a_plan(method)
    visits = dataclasses.replace(plan, weights_tier=tier, resident_blocks=stay, slot_bytes=TWO[method])
    here = streaming(folder, visits, tmp_path)
    block = here.visits.stream.tier.layouts[0].nbytes
    assert [slot.flat.nbytes for slot in here.visits.stream._slots] == [2 * block] * (2 if stay < 5 else 0)

    assert_equal_runs(resident(folder, plan, tmp_path), here)


@pytest.mark.parametrize(("at_once", "last_blocks"), [(False, 0), (True, 0), (False, 3)])
def test_in_full(at_once: bool, last_blocks: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = full.full_plan(optimizer_in_backward=at_once, clip_passes=1, last_blocks=last_blocks)
    alone = full.disk(plan)

    full.assert_equal_runs(
        full.streaming(folder, alone, tmp_path / "alone"),
        full.streaming(folder, dataclasses.replace(alone, slot_bytes=TWO["full"]), tmp_path / "together"),
        steps=2,
    )


def test_a_step_moves_two_passes_less_what_is_at_the_turns(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", num_hidden_layers=8)
    executor = streaming(folder, a_plan(weights_tier="host", slot_bytes=TWO["lora"]), tmp_path)
    traffic, block = executor.visits.stream.traffic, executor.visits.stream.tier.layouts[0].nbytes
    executor.step(batches()[:1], 1e-3)
    for count in (1, 3):
        before = dataclasses.replace(traffic)
        executor.step(batches()[:count], 1e-3)

        # Eight blocks, two groups of two places each: four of eight are there at either turn.
        assert traffic.visits - before.visits == 2 * (8 - 4)
        assert traffic.moved_bytes - before.moved_bytes == 2 * (8 - 4) * block


def test_the_next_ones_are_fetched_while_the_first_of_a_group_is_computed() -> None:
    tier = numbered(6)
    stream = BlockStream(tier, torch.device("cpu"), together=2 * tier.layouts[0].nbytes)

    there = []
    for block in (0, 1, 2, 3, 4, 5):
        assert stream.bring(block, "up")["weight"].unique().item() == block
        there.append([slot.blocks for slot in stream._slots])
    for block in (5, 4, 3, 2, 1, 0):
        assert stream.bring(block, "down")["weight"].unique().item() == block

    assert there[:3] == [[(0, 1), (2, 3)], [(0, 1), (2, 3)], [(4, 5), (2, 3)]]
    stream.stay([2])
    assert [stream.bring(block, "up")["weight"].unique().item() for block in range(6)] == list(range(6))
    stream.close()


def numbered(count: int) -> RamTier:
    """Blocks of 64 numbers, each of which is the block's."""
    tier = RamTier([Layout({"weight": ((64,), torch.float32)}) for _ in range(count)], pinned=False)
    for block in range(count):
        tier.flats[block].view(torch.float32).fill_(block)
    return tier


@pytest.mark.parametrize(
    ("stays", "moved"), [([0, 1, 2], [3, 4, 4, 5, 6, 6]), ([3, 4, 5], [4, 6, 6, 6, 6, 6]), ([1, 4], [4, 4, 5, 6, 6, 6])]
)
def test_what_has_changed_of_blocks_that_stay_comes_one_by_one_ahead_of_need(
    stays: list[int], moved: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """From where it lies, with nothing made of a block on the way; counted, and not once more."""
    tier = numbered(6)
    stream = BlockStream(tier, torch.device("cpu"), resident=stays)
    monkeypatch.setattr(BlockStream, "_whole", None)
    for block in range(6):
        tier.flats[block].view(torch.float32).add_(10)
        stream.forget(block)
    begun, found, seen = stream.traffic.visits, [], []
    for block in range(6):
        found.append(stream.bring(block, "up")["weight"].unique().item())
        seen.append(stream.traffic.visits - len(stays))

    assert begun == len(stays) + 1, "the first while the step ends"
    assert found == [10, 11, 12, 13, 14, 15]
    assert seen == moved
    assert stream.traffic.moved_bytes == (6 + len(stays)) * tier.layouts[0].nbytes
    stream.close()


def test_a_block_that_stays_and_left_before_what_had_changed_of_it_came() -> None:
    tier = numbered(4)
    stream = BlockStream(tier, torch.device("cpu"), resident=[0, 1])
    for block in (0, 1):
        tier.flats[block].view(torch.float32).fill_(7)
        stream.forget(block)
    stream.stay([1])

    assert [stream.bring(block, "up")["weight"].unique().item() for block in range(4)] == [7, 7, 2, 3]
    stream.close()


def test_a_block_that_cannot_be_renewed_is_never_taken_for_what_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    tier = numbered(2)
    stream = BlockStream(tier, torch.device("cpu"), resident=[0])

    def broken(*_: object) -> None:
        raise CheckpointError("The drive is gone", "Check it.")

    monkeypatch.setattr(stream, "_read", broken)
    stream.forget(0)
    for _ in range(2):
        with pytest.raises(CheckpointError, match="The drive is gone"):
            stream.bring(0, "up")
    stream.close()


def test_groups_keep_their_order_and_never_mix_what_comes_once_with_what_comes_twice() -> None:
    sizes = dict.fromkeys(range(7), 3.0)

    assert groups_of(sizes, 0) == [(block,) for block in range(7)]
    assert groups_of(sizes, 6) == [(0, 1), (2, 3), (4, 5), (6,)]
    assert groups_of(sizes, 6, turn=3) == [(0, 1), (2,), (3, 4), (5, 6)]
    assert groups_of({1: 2.0, 3: 9.0, 4: 2.0, 6: 2.0}, 5) == [(1,), (3,), (4, 6)]
