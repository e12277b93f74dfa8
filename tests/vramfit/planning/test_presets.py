"""Presets are what the planner finds, for every card and goal."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.hardware.catalogue import Card, cards, machine_with
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue
from vramfit.planning.abilities import DESIGNED, ENGINE, SEVERAL_CARDS, Abilities
from vramfit.planning.cost import COMPARED, SETUP_RAM_GIB
from vramfit.planning.plan import Forecast
from vramfit.planning.planner import forecast_run
from vramfit.planning.presets import GOALS, LADDER, TASTE_SECONDS, USUAL_DATA, Preset, preset, presets_of


def params(model: str) -> int:
    found = catalogue.find(model)
    assert found is not None
    return found.params


def next_up(model: str) -> str | None:
    place = LADDER.index(model) + 1
    return LADDER[place] if place < len(LADDER) else None


def layers(model: str) -> int:
    found = catalogue.find(model)
    assert found is not None
    return found.layers


def replanned(one: Preset, machine: Machine, *, abilities: Abilities = ENGINE, **changes: object) -> Forecast:
    """The planner's own answer to a preset's wish."""
    architecture = catalogue.find(str(changes.get("model", one.model)))
    assert architecture is not None
    values = {**one.changes, "model": {"source": architecture.name}}
    return forecast_run(
        RunConfig.parse(values),
        architecture=architecture,
        machine=machine,
        workload=one.forecast.workload,
        abilities=abilities,
    )


def test_the_ladder_goes_up() -> None:
    sizes = [params(name) for name in LADDER]

    assert sizes == sorted(sizes)


@pytest.mark.parametrize("card", cards(), ids=lambda card: card.name)
def test_every_card_has_a_run_for_every_goal_and_it_fits(card: Card) -> None:
    machine = machine_with(card)
    for goal, one in presets_of(card).items():
        assert one is not None, goal
        assert one.forecast.fits
        assert one.forecast.memory.host_bytes <= machine.ram_bytes
        # The same wish given to the planner is the same plan: nothing in a preset is its own.
        assert replanned(one, machine) == one.forecast


@pytest.mark.parametrize(("name", "count"), COMPARED)
def test_every_setup_of_several_cards_has_a_run_for_every_goal_and_it_fits(name: str, count: int) -> None:
    machine = machine_with(name, count=count, ram_gib=SETUP_RAM_GIB)
    found = presets_of(name, count=count, ram_gib=SETUP_RAM_GIB, abilities=SEVERAL_CARDS)
    for goal, one in found.items():
        assert one is not None, goal
        assert one.forecast.fits
        assert one.forecast.plan.cards == count
        assert one.forecast.memory.host_bytes <= machine.ram_bytes
        assert replanned(one, machine, abilities=SEVERAL_CARDS) == one.forecast


@pytest.mark.parametrize("name", ["RTX 3060", "RTX 4090", "A770", "A100 80GB"])
def test_the_model_after_the_biggest_would_not_fit(name: str) -> None:
    machine = machine_with(name)
    one = preset("biggest model", machine)
    assert one is not None
    larger = next_up(one.model)
    if larger is not None:
        with pytest.raises(WontFit):
            replanned(one, machine, model=larger)


@pytest.mark.parametrize("name", ["RTX 3060", "RTX 4090", "A770", "A100 80GB"])
def test_the_model_after_the_best_would_have_to_stream(name: str) -> None:
    machine = machine_with(name)
    one = preset("best quality", machine)
    assert one is not None
    assert one.forecast.plan.resident_blocks in (0, layers(one.model))
    larger = next_up(one.model)
    assert larger is not None
    try:
        next_one = replanned(one, machine, model=larger)
    except WontFit:
        return
    assert next_one.plan.weights_tier != "device"
    assert next_one.plan.resident_blocks < layers(larger)


@pytest.mark.parametrize("name", ["RTX 3060", "RTX 4090", "H100"])
def test_a_quick_taste_is_over_in_five_minutes(name: str) -> None:
    one = preset("quick taste", machine_with(name))

    assert one is not None
    assert one.forecast.seconds <= TASTE_SECONDS


def test_long_context_is_planned_for_full_sequences() -> None:
    one = preset("longest context", machine_with("RTX 4090"))

    assert one is not None
    assert one.forecast.plan.max_length == one.forecast.workload.longest_tokens > USUAL_DATA.longest_tokens


@pytest.mark.parametrize(("name", "count"), [("RTX 4090", 8), ("A100 80GB", 4)])
def test_several_cards_have_presets_too(name: str, count: int) -> None:
    machine = machine_with(name, count=count, ram_gib=1024)
    alone, together = (
        preset("best quality", found, abilities=DESIGNED) for found in (machine_with(name, ram_gib=1024), machine)
    )

    assert alone is not None and together is not None
    assert params(together.model) >= params(alone.model)
    assert all(preset(goal, machine, abilities=DESIGNED) for goal in GOALS)


def test_where_nothing_fits_there_is_none() -> None:
    machine = machine_with("RTX 3060")
    full = dataclasses.replace(machine.devices[0], free_bytes=2**28)

    assert preset("biggest model", dataclasses.replace(machine, devices=(full,))) is None


def two_cores(ram_gib: float = 16) -> Machine:
    """A machine without a card."""
    machine = machine_with("RTX 4090", ram_gib=ram_gib)
    ram = machine.ram_bytes
    cpu = dataclasses.replace(
        machine.devices[0],
        kind="cpu",
        name="CPU (2 cores)",
        torch_device="cpu",
        memory_bytes=ram,
        free_bytes=ram,
        bf16=False,
        flops={"fp32": 200e9},
        memory_bandwidth=24e9,
        rates="assumed",
    )
    return dataclasses.replace(machine, devices=(cpu,))


def test_a_quick_taste_ends_in_time_on_two_cores_too() -> None:
    one = preset("quick taste", two_cores())
    assert one is not None
    assert one.model == LADDER[0]
    assert one.forecast.seconds <= TASTE_SECONDS
    assert 20 <= one.forecast.steps < 100


def test_what_takes_days_is_marked() -> None:
    slow, quick = preset("biggest model", two_cores()), preset("best quality", machine_with("RTX 4090"))
    assert slow is not None
    assert quick is not None
    assert slow.takes_long
    assert not quick.takes_long
    assert slow.forecast.seconds > 2 * 86400 > quick.forecast.seconds


@pytest.mark.parametrize(("name", "count"), [("RTX 4090", 8), ("A100 80GB", 4)])
def test_several_cards_train_more_together_and_say_what_is_missing(name: str, count: int) -> None:
    machine = machine_with(name, count=count, ram_gib=512)
    for goal in GOALS:
        alone, together = preset(goal, machine), preset(goal, machine, abilities=SEVERAL_CARDS)
        assert alone is not None
        assert together is not None
        assert (alone.forecast.plan.cards, alone.needs) == (1, ())
        assert together.forecast.plan.cards == count
        assert together.needs[0].startswith("several cards (")
        assert together.forecast.memory.device_bytes <= together.forecast.plan.budget_bytes
        bigger = params(together.model) > params(alone.model)
        assert bigger or together.forecast.speed.tokens_per_s > 2 * alone.forecast.speed.tokens_per_s


def test_what_this_version_does_on_one_card_is_not_said_to_be_lacking() -> None:
    """Full training of an 8B on eight 4090s: refused, and streaming on one of them is in this version."""
    name, count = COMPARED[0]
    machine = machine_with(name, count=count, ram_gib=SETUP_RAM_GIB)
    one = preset("best quality", machine, abilities=SEVERAL_CARDS)
    assert one is not None
    full = dataclasses.replace(one, changes={**one.changes, "method": "full"})
    with pytest.raises(WontFit) as refused:
        replanned(full, machine, abilities=SEVERAL_CARDS, model="Qwen/Qwen3-8B")
    assert refused.value.suggestions
    assert not any("(: " in str(suggestion) for suggestion in refused.value.suggestions)
