"""Presets are what the planner finds, for every card and goal."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.hardware.catalogue import Card, cards, machine_with
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue
from vramfit.planning.abilities import DESIGNED
from vramfit.planning.planner import forecast_run
from vramfit.planning.presets import GOALS, LADDER, TASTE_SECONDS, USUAL_DATA, Goal, Preset, preset, presets_of


def params(model: str) -> int:
    found = catalogue.find(model)
    assert found is not None
    return found.params


def next_up(model: str) -> str | None:
    place = LADDER.index(model) + 1
    return LADDER[place] if place < len(LADDER) else None


def replanned(one: Preset, machine: Machine, **changes: object) -> object:
    """The planner's own answer to a preset's wish."""
    architecture = catalogue.find(str(changes.get("model", one.model)))
    assert architecture is not None
    values = {**one.changes, "model": {"source": architecture.name}}
    return forecast_run(
        RunConfig.parse(values), architecture=architecture, machine=machine, workload=one.forecast.workload
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


@pytest.mark.parametrize("goal", ["best quality", "biggest model"])
@pytest.mark.parametrize("name", ["RTX 3060", "RTX 4090", "A770", "A100 80GB"])
def test_the_next_larger_model_would_not_fit(name: str, goal: Goal) -> None:
    machine = machine_with(name)
    one = preset(goal, machine)
    assert one is not None
    larger = next_up(one.model)
    assert larger is not None

    with pytest.raises(WontFit):
        replanned(one, machine, model=larger)


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
