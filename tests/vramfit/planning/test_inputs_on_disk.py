"""Inputs of blocks that visit wait on disk where RAM has no room for a step's, at a price that is told."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from tests.vramfit.planning.test_planner import laptop, model, reason, refusal_on, wish
from vramfit.config import RunConfig
from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Machine
from vramfit.planning.abilities import ENGINE, Abilities
from vramfit.planning.memory import estimate_memory, least_memory
from vramfit.planning.plan import Forecast, Plan, Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.search import Search
from vramfit.planning.speed import estimate_speed
from vramfit.units import GIB

SEVENTY = "meta-llama/Meta-Llama-3-70B"
FULL_ROWS = Workload(sequences=1000, mean_tokens=2048, longest_tokens=2048)
WITHOUT_DISK = dataclasses.replace(ENGINE, inputs=("device", "host"))


def a_step(sequences: int = 64, method: str = "qlora", **changes: Any) -> RunConfig:
    return wish(method, schedule={"sequences_per_step": sequences}, **changes)


def planned(
    ram_gib: float, config: RunConfig | None = None, *, of: str = SEVENTY, disk_gib: int = 4000, **changes: Any
) -> Forecast:
    return forecast_run(
        config or a_step(), architecture=model(of), machine=with_ram(ram_gib, disk_gib), workload=FULL_ROWS, **changes
    )


def with_ram(gib: float, disk_gib: int = 4000) -> Machine:
    return dataclasses.replace(machine_with("RTX 4090", ram_gib=gib), disk_free_bytes=disk_gib * GIB)


def inputs_bytes(of: str = SEVENTY, sequences: int = 64, each: int = 2) -> int:
    shape = model(of)
    return sequences * 2048 * shape.hidden_size * each * shape.layers


def test_ram_has_them_as_long_as_it_has_room() -> None:
    """The same run with ever less RAM: blocks' inputs are what leaves it, and all else is as it was."""
    roomy, tight = planned(256), planned(64)
    assert (roomy.plan.weights_tier, roomy.plan.input_tier) == ("host", "host")
    assert (tight.plan.weights_tier, tight.plan.input_tier) == ("host", "disk")
    least = planned(roomy.memory.host_bytes / GIB + 0.1)
    assert least.plan.input_tier == "host"

    one = dataclasses.replace(roomy.plan, reasons=())
    other = dataclasses.replace(one, input_tier="disk")
    there, here = (estimate_memory(model(SEVENTY), plan, FULL_ROWS) for plan in (one, other))
    wait = inputs_bytes()
    in_use = 2 * wait // (model(SEVENTY).layers * one.accumulation)
    assert here.device_bytes == there.device_bytes
    assert there.host_bytes - here.host_bytes == pytest.approx(wait - in_use, abs=2)
    assert here.disk_bytes - there.disk_bytes == pytest.approx(wait, abs=2)
    assert here.written_per_step_bytes == pytest.approx(wait, abs=1) and there.written_per_step_bytes == 0


def test_blocks_and_states_on_disk_are_written_beside_them() -> None:
    """Of full training: what is written is what it was, and the inputs."""
    found = planned(32, a_step(128, "full"), of="meta-llama/Meta-Llama-3-8B")
    assert (found.plan.weights_tier, found.plan.optimizer_tier, found.plan.input_tier) == ("disk", "disk", "disk")
    shape = model("meta-llama/Meta-Llama-3-8B")
    others = 4 * (shape.params - shape.outside_params) + 12 * shape.params
    inputs = inputs_bytes("meta-llama/Meta-Llama-3-8B", 128)
    assert found.memory.written_per_step_bytes == pytest.approx(others + inputs, rel=1e-6)


def test_a_processor_s_inputs_leave_its_budget_for_a_file() -> None:
    """7B in 4 bits within 5 GiB: 64 rows' inputs alone are 32 GiB, in fp32."""
    config = a_step(device="cpu", memory={"budget_gib": 5})
    found = forecast_run(config, architecture=model("mistralai/Mistral-7B-v0.1"), machine=laptop(), workload=FULL_ROWS)
    assert (found.plan.weights_tier, found.plan.input_tier) == ("disk", "disk")
    assert found.memory.device_bytes <= 5 * GIB < inputs_bytes("mistralai/Mistral-7B-v0.1", each=4)
    assert found.memory.written_per_step_bytes == inputs_bytes("mistralai/Mistral-7B-v0.1", each=4)


def test_no_other_way_is_looked_at_where_ram_has_room_or_is_too_small_without_them() -> None:
    def ways(gib: float) -> dict[str, list[str]]:
        search = Search.of(a_step(), model(SEVENTY), with_ram(gib), FULL_ROWS)
        return {each.name: [way.changes.get("input_tier") for way in search.ways(each)] for each in search.families}

    assert ways(256)["streaming from RAM"] == ways(256)["streaming from disk"] == ["host"]
    assert ways(64)["streaming from RAM"] == ways(64)["streaming from disk"] == ["host", "disk"]
    assert ways(64)["on the device"] == [None] and ways(64)["block inputs in RAM"] == ["host"]
    full = Search.of(a_step(8, "full"), model(SEVENTY), with_ram(64), FULL_ROWS)
    from_ram = next(each for each in full.families if each.name == "streaming from RAM")
    states = least_memory(model(SEVENTY), full.least(from_ram).plan, FULL_ROWS)
    assert states.host_bytes - states.inputs_bytes > 64 * GIB
    assert [way.changes["input_tier"] for way in full.ways(from_ram)] == ["host"]


@pytest.mark.parametrize("abilities", [ENGINE, WITHOUT_DISK])
def test_an_engine_that_cannot_is_not_asked_to(abilities: Abilities) -> None:
    if abilities is ENGINE:
        assert planned(64, abilities=abilities).fits
        return
    found = refusal_on(with_ram(16, 30), of=SEVENTY, method="qlora", abilities=abilities)
    assert found.forecast is not None and found.forecast.plan.input_tier != "disk"


def test_the_drive_bounds_a_step_that_computes_less_than_it_writes(plan: Callable[..., Plan]) -> None:
    """Away and back at the drive's rates, hidden behind computing, or else what is not; blocks that come from the same
    drive take their part of it."""
    shape, slow = model(SEVENTY), dataclasses.replace(with_ram(64).devices[0], disk_read=2e8, disk_write=1e8)
    usual = {
        "method": "qlora",
        "weight_format": "nf4",
        "compute": "bf16",
        "lora_rank": 16,
        "lora_targets": ("all-linear",),
        "max_length": 2048,
        "micro_batch": 1,
        "accumulation": 64,
        "recompute": 80,
        "weights_tier": "host",
    }

    def bounds(device: Any, **changes: Any) -> dict[str, float]:
        return estimate_speed(shape, plan(**{**usual, **changes}), device, FULL_ROWS).bounds

    in_ram, on_disk = bounds(slow, input_tier="host"), bounds(slow, input_tier="disk")
    moving = inputs_bytes() / 2e8 + inputs_bytes() / 1e8
    working = sum(in_ram.values()) - in_ram["optimizer"]
    assert moving > 2 * working > 0
    assert in_ram["disk"] == 0 and on_disk["disk"] == pytest.approx(moving - working + moving / 80)
    assert {**on_disk, "disk": 0} == {**in_ram, "disk": 0}, "all else is as with inputs in RAM"
    both = bounds(slow, input_tier="disk", weights_tier="disk")
    weights = bounds(slow, input_tier="host", weights_tier="disk")["disk"]
    assert both["disk"] > on_disk["disk"] + 0.9 * 2 * 35e9 / 2e8 > weights

    quick = dataclasses.replace(slow, disk_read=7e9, disk_write=6e9)
    hidden = bounds(quick, input_tier="disk")["disk"]
    assert hidden == pytest.approx((inputs_bytes() / 7e9 + inputs_bytes() / 6e9) / 80)


def test_it_is_told_with_what_it_costs_the_drive() -> None:
    found = planned(64)
    inputs = next(choice for choice in found.plan.reasons if choice.setting == "block inputs")
    assert (inputs.value, inputs.fixed) == ("a file", False)
    assert "more than RAM has room for" in inputs.reason
    steps = 2_400 * 10**12 // found.memory.written_per_step_bytes
    assert f"{steps:,} such steps" in reason(found, "disk writes")


def test_a_disk_without_room_for_them_is_named_with_what_would_do() -> None:
    found = refusal_on(with_ram(8, 10), of="Qwen/Qwen3-32B", method="lora")
    assert found.tier == "disk" and "(with what blocks are given in a step)" in str(found)
    shorter = next(text for text in found.suggestions if text.startswith("Sequences of at most"))
    length = int(shorter.split()[4])
    again = forecast_run(
        wish("lora", data={"max_length": length}),
        architecture=model("Qwen/Qwen3-32B"),
        machine=with_ram(8, 10),
        workload=FULL_ROWS,
    )
    assert again.fits and again.memory.disk_bytes <= 10 * GIB
