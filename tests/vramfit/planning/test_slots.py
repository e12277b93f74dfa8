"""How much of a streamed model comes at once, and what that makes of the smallest card."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tests.vramfit.planning.test_planner import laptop
from vramfit.config import RunConfig
from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Device
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import ENGINE
from vramfit.planning.memory import Work
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS
from vramfit.planning.search import Candidate, Search
from vramfit.planning.slots import slot_bytes, split_block, together
from vramfit.planning.speed import estimate_speed
from vramfit.planning.standing import STREAM_SLOTS
from vramfit.planning.stored import stored
from vramfit.units import GIB, MIB

DEEPSEEK, LLAMA = "deepseek-ai/DeepSeek-V3", "HuggingFaceTB/SmolLM2-135M"


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def work(length: int) -> Workload:
    return Workload(sequences=1000, mean_tokens=length, longest_tokens=length, exact=True)


def streamed(
    name: str, *, card: str = "RTX 4090", length: int = 1024, method: str = "qlora", **memory: Any
) -> Candidate:
    """What a plan that streams from RAM needs at the least."""
    config = RunConfig.parse(
        {"method": method, "model": {"source": name}, "data": {"max_length": length}, "memory": memory}
    )
    search = Search.of(config, model(name), machine_with(card, ram_gib=4096), work(length), abilities=ENGINE)
    return search.least(next(family for family in search.families if family.name == "streaming from RAM"))


def whole(plan: Plan) -> Plan:
    return dataclasses.replace(plan, slot_bytes=0)


def test_a_place_is_made_for_parts_of_a_large_block_and_for_several_small_ones() -> None:
    assert slot_bytes(3 * GIB, 100 * GIB) == 512 * MIB
    assert slot_bytes(1.5 * GIB, 100 * GIB) == 0
    assert slot_bytes(1.5 * GIB, 8 * GIB) == 512 * MIB
    assert slot_bytes(0.3 * GIB, 2 * GIB) == 256 * MIB
    assert slot_bytes(100 * MIB, 100 * GIB) == 512 * MIB
    assert slot_bytes(100 * MIB, 4 * GIB) == 0
    assert together((3.0, 5.0), 100, splits=True) == 5
    assert together((3.0, 5.0), 100, splits=False) == 100


def test_a_split_block_is_cut_into_whole_experts() -> None:
    found = split_block(110.0, 100.0, 8, 30)
    assert found is not None
    assert (found.whole, found.shared, found.slice, found.slices) == (110.0, 10.0, 25.0, 4)
    lone = split_block(110.0, 100.0, 4, 20)
    assert lone is not None and (lone.slice, lone.slices) == (25.0, 4)
    assert split_block(110.0, 100.0, 8, 110) is None
    assert split_block(110.0, 0.0, 0, 30) is None


def test_a_model_whose_block_is_larger_than_the_card_allows_streams_in_parts() -> None:
    least = streamed(DEEPSEEK)
    split = stored(model(DEEPSEEK), least.plan).split
    places = Work.of(model(DEEPSEEK), least.plan, work(1024), OURS).slot_sizes
    before = Work.of(model(DEEPSEEK), whole(least.plan), work(1024), OURS).slot_sizes

    assert least.fits
    assert [each is not None for each in split] == [False] * 3 + [True] * 58
    assert len(places) == 2 * STREAM_SLOTS and max(places) <= 512 * MIB
    assert sum(before) > 11 * GIB and sum(places) < 2 * GIB
    assert streamed(DEEPSEEK, card="RTX 4060 Ti 16GB", method="lora").fits_device


def test_what_waits_between_the_parts_decides_too() -> None:
    """With 16 sequences of 4,096 tokens it would be more than the smaller places save."""
    name = "mistralai/Mixtral-8x22B-v0.1"
    assert streamed(name, budget_gib=8).plan.slot_bytes == 512 * MIB
    assert streamed(name, budget_gib=8, length=4096).plan.slot_bytes == 0


def test_splitting_costs_time_and_small_blocks_are_not_split() -> None:
    least, card = streamed(DEEPSEEK), machine_with("RTX 4090").devices[0]

    def step(plan: Plan, device: Device) -> dict[str, float]:
        return estimate_speed(model(DEEPSEEK), plan, device, work(1024), sequences_per_step=16).bounds

    assert step(least.plan, card)["compute"] > step(whole(least.plan), card)["compute"]
    small = streamed(LLAMA, method="full")
    assert small.plan.slot_bytes == 512 * MIB
    assert set(stored(model(LLAMA), small.plan).split) == {None}
    assert math.isclose(
        sum(Work.of(model(LLAMA), small.plan, work(1024), OURS).slot_sizes)
        - sum(Work.of(model(LLAMA), whole(small.plan), work(1024), OURS).slot_sizes),
        STREAM_SLOTS * 29 * 2 * model(LLAMA).params_of_block(0),
    )


@pytest.mark.parametrize("name", [LLAMA, "Qwen/Qwen3-30B-A3B"])
def test_on_the_processor_small_blocks_come_one_by_one(name: str) -> None:
    config = RunConfig.parse({"method": "qlora", "model": {"source": name}})
    search = Search.of(config, model(name), laptop(), work(512), abilities=ENGINE)
    (family,) = [family for family in search.families if family.streams]
    assert "slot_bytes" not in family.changes
