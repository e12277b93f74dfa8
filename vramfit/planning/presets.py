"""One click per GPU model: for a card and a goal the run that the planner finds best. No table of answers.

A preset is a search over models of a ladder (small to large, known to be good and open) and over lengths; each step of
the search is a whole plan, so a preset fits by the same arithmetic as any other run, and says what it will take.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal, get_args

from vramfit.config import RunConfig
from vramfit.errors import ConfigError, WontFit
from vramfit.hardware.catalogue import Card, machine_with
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import ENGINE, Abilities, missing
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.planner import forecast_run

Goal = Literal["quick taste", "best quality", "longest context", "biggest model"]
GOALS: Final[tuple[Goal, ...]] = get_args(Goal)

LADDER: Final = (
    "HuggingFaceTB/SmolLM2-135M",
    "HuggingFaceTB/SmolLM2-360M",
    "Qwen/Qwen3-0.6B",
    "Qwen/Qwen3-1.7B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-8B",
    "Qwen/Qwen3-14B",
    "Qwen/Qwen3-32B",
    "meta-llama/Llama-3.3-70B-Instruct",
    "Qwen/Qwen3-235B-A22B",
    "meta-llama/Llama-3.1-405B",
)
"""Models to choose from, small to large."""

CONTEXT_LADDER: Final = (1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
"""Tokens a sequence may have; a model is never given more than the positions it was made for."""

CONTEXT_MODEL_PARAMS: Final = 3.5e9
"""Longest context is asked of a model that can use it: the smallest of the ladder above this, or what fits below."""

TASTE_SECONDS: Final = 300.0
"""A quick taste is over in five minutes."""

TASTES: Final = ((512, 16, 100), (256, 4, 100), (256, 4, 30), (128, 2, 20))
"""Tokens of a sequence, sequences of a step, steps: of the first the largest model that is quick enough; where none is,
the first of the others that the smallest model is quick enough for."""

LONG_SECONDS: Final = 2 * 86400.0
"""What takes longer than two days is marked."""

USUAL_DATA: Final = Workload(sequences=10_000, mean_tokens=700.0, longest_tokens=2048)
"""What a preset is planned for until there is data: conversations, a few of them long."""


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A run for a goal: what to set, and what the planner says of it. `changes` are fields of the form."""

    goal: Goal
    model: str
    changes: dict[str, Any]
    forecast: Forecast

    def config(self) -> RunConfig:
        """The run, still without data."""
        return RunConfig.parse(self.changes)

    @property
    def needs(self) -> tuple[str, ...]:
        """What this version lacks for it."""
        return missing(self.forecast.plan)

    @property
    def takes_long(self) -> bool:
        """Whether it takes days, with as much data as is assumed: for a look at what fits, not for a try."""
        return self.forecast.seconds > LONG_SECONDS


def preset(goal: Goal, machine: Machine, *, abilities: Abilities = ENGINE) -> Preset | None:
    """The best run for `goal` on the machine's first device, and with SEVERAL_CARDS on all that are like it; None where
    even the smallest model does not fit."""
    return _GOALS[goal](machine, abilities)


def presets_of(
    card: Card | str, *, count: int = 1, ram_gib: float | None = None, abilities: Abilities = ENGINE
) -> dict[Goal, Preset | None]:
    """Every goal's preset for a card of the catalogue, or for `count` of it."""
    machine = machine_with(card, count=count, ram_gib=ram_gib)
    return {goal: preset(goal, machine, abilities=abilities) for goal in GOALS}


def _planned(
    machine: Machine,
    abilities: Abilities,
    goal: Goal,
    model: str,
    method: str,
    length: int,
    schedule: dict[str, int] | None = None,
) -> Preset | None:
    architecture = _architecture(model)
    changes = {
        "method": method,
        "model": {"source": model},
        "data": {"max_length": length},
        **({"schedule": schedule} if schedule else {}),
    }
    # Lengths as long as the wish, so that a preset for long context is planned for full sequences.
    work = dataclasses.replace(USUAL_DATA, longest_tokens=length, mean_tokens=min(USUAL_DATA.mean_tokens, length))
    try:
        forecast = forecast_run(
            RunConfig.parse(changes), architecture=architecture, machine=machine, workload=work, abilities=abilities
        )
    except (WontFit, ConfigError):
        return None
    return Preset(goal=goal, model=model, changes=changes, forecast=forecast)


def _architecture(model: str) -> Architecture:
    found = catalogue.find(model)
    if found is None:
        raise AssertionError(f"the ladder names {model}, which the catalogue lacks")
    return found


def _largest(steps: Sequence[Callable[[], Preset | None]]) -> Preset | None:
    """The last of `steps` that gives a preset, when every one after a failing one fails too. Found by halving."""
    found: Preset | None = None
    low, high = 0, len(steps)
    while low < high:
        middle = (low + high) // 2
        made = steps[middle]()
        if made is None:
            high = middle
        else:
            found, low = made, middle + 1
    return found


def _taste(machine: Machine, abilities: Abilities) -> Preset | None:
    """LoRA of the largest model that does a hundred short steps in five minutes; else less of the smallest."""

    def taste(model: str, length: int, sequences: int, steps: int) -> Preset | None:
        schedule = {"max_steps": steps, "sequences_per_step": sequences}
        return _planned(machine, abilities, "quick taste", model, "lora", length, schedule)

    def quick(model: str, length: int, sequences: int, steps: int) -> Preset | None:
        made = taste(model, length, sequences, steps)
        return made if made is not None and made.forecast.seconds <= TASTE_SECONDS else None

    found = _largest([partial(quick, model, *TASTES[0]) for model in LADDER])
    smaller = (quick(LADDER[0], *less) for less in TASTES[1:])
    return found or next((made for made in smaller if made is not None), None) or taste(LADDER[0], *TASTES[-1])


def _resident(*choice: Any) -> Preset | None:
    """As `_planned`, where the whole model stays on the device: only the biggest one is worth the wait of streaming."""
    made = _planned(*choice)
    if made is None:
        return None
    plan, layers = made.forecast.plan, _architecture(made.model).layers
    return made if plan.weights_tier == "device" or plan.resident_blocks >= layers else None


def _quality(machine: Machine, abilities: Abilities) -> Preset | None:
    """The largest model whose base stays on the device in 16 bits, with LoRA on every linear, at 2,048 tokens."""
    return _largest([partial(_resident, machine, abilities, "best quality", model, "lora", 2048) for model in LADDER])


def _biggest(machine: Machine, abilities: Abilities) -> Preset | None:
    """The largest model that trains at all, streamed if need be: a 4-bit base, at 1,024 tokens."""
    return _largest([partial(_planned, machine, abilities, "biggest model", model, "qlora", 1024) for model in LADDER])


def _context(machine: Machine, abilities: Abilities) -> Preset | None:
    """The longest sequences a 4-billion model takes on a 4-bit base; else the largest model that fits."""
    usable = [model for model in LADDER if _architecture(model).params >= CONTEXT_MODEL_PARAMS][:1]
    smaller = [model for model in reversed(LADDER) if _architecture(model).params < CONTEXT_MODEL_PARAMS]
    for model in (*usable, *smaller):
        lengths = [length for length in CONTEXT_LADDER if length <= _architecture(model).max_position]
        plans = [
            partial(_resident, machine, abilities, "longest context", model, "qlora", length) for length in lengths
        ]
        if (made := _largest(plans)) is not None:
            return made
    return None


_GOALS: Final[dict[Goal, Callable[[Machine, Abilities], Preset | None]]] = {
    "quick taste": _taste,
    "best quality": _quality,
    "longest context": _context,
    "biggest model": _biggest,
}
