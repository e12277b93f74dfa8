"""python -m vramfit explore: what a card could train, one model on all cards, memory against length, presets, cost."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from vramfit.commands import cost, wish
from vramfit.config import RunConfig
from vramfit.errors import ConfigError, Problem
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.models.catalogue import architecture_of
from vramfit.planning.abilities import ENGINE, SEVERAL_CARDS
from vramfit.planning.explore import METHODS, Outcome, across_cards, heat_map, over_lengths
from vramfit.planning.presets import GOALS, LADDER, Preset, preset
from vramfit.units import format_bytes, format_count, format_duration

_METHOD: Final = "lora"
_LENGTH: Final = 2048

_MACHINE: Final = frozenset({"card", "cards", "ram_gib"})
_READS: Final[Mapping[str, frozenset[str]]] = {
    "across": frozenset({"model", "method", "length"}),
    "lengths": _MACHINE | {"model", "method"},
    "presets": _MACHINE,
    "cost": frozenset({"model", "method", "length", "tokens", "setup"}),
    "": _MACHINE | {"model", "length"},
}
"""What each look reads; "" is the table of all methods, when no look is named."""
_ALL_FLAGS: Final = ("card", "cards", "ram_gib", "model", "method", "length", "tokens", "setup")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """A machine, and what to look at: the heat map of the ladder's models when nothing else is said."""
    wish.add_machine_arguments(parser)
    parser.add_argument("--model", action="append", help="a model id, a folder or starter; may be given several times")
    parser.add_argument("--method", choices=METHODS, help=f"for --across, --lengths and --cost (default {_METHOD})")
    parser.add_argument("--length", type=int, help=f"tokens of a sequence (default {_LENGTH})")
    look = parser.add_mutually_exclusive_group()
    look.add_argument("--across", action="store_true", help="the model on every card of the catalogue")
    look.add_argument("--lengths", action="store_true", help="memory and speed of the model as sequences grow")
    look.add_argument("--presets", action="store_true", help="the best run for each goal on the card, or on --cards")
    look.add_argument("--cost", action="store_true", help="hours, energy and money of --tokens on each --setup")
    cost.add_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> None:
    """Print what was asked for as a table or JSON. Raises UserError."""
    _refuse_foreign(options)
    options.method = options.method or _METHOD
    options.length = _LENGTH if options.length is None else options.length
    wish.check_length(options.length)
    if options.presets:
        _show_presets(wish.machine_from(options), as_json=options.json)
        return
    if options.cost:
        cost.show(options, _models(options.model or [cost.FIRST_MODEL]))
        return
    models = _models(options.model)
    if options.across:
        found = [one for model in models for one in across_cards(model, options.method, length=options.length)]
    elif options.lengths:
        machine = wish.machine_from(options)
        found = [one for model in models for one in over_lengths(machine, model, options.method)]
    else:
        found = heat_map(wish.machine_from(options), models, length=options.length)
    print(json.dumps({"outcomes": [dataclasses.asdict(one) for one in found]}) if options.json else table(found))


def _models(names: Sequence[str] | None) -> list[Architecture]:
    if names:
        return [architecture_of(RunConfig.parse({"model": {"source": name}}).model) for name in names]
    return [found for name in LADDER if (found := catalogue.find(name)) is not None]


def table(found: Iterable[Outcome]) -> str:
    """One line per outcome."""
    return "\n".join(
        f"{one.model:<40} {one.method:<6} {one.length:>7,} {one.card:<32} {_verdict(one):<28} "
        f"{format_bytes(one.device_bytes):>10} {_speed(one):>16}"
        for one in found
    )


def _verdict(one: Outcome) -> str:
    if one.verdict == "fits":
        return "fits"
    if one.verdict == "no":
        return f"no ({one.limit})"
    return f"not yet ({one.way})" if one.needs else one.way


def _speed(one: Outcome) -> str:
    return "" if one.verdict == "no" else f"{format_count(one.tokens_per_s)} tokens/s"


def _refuse_foreign(options: argparse.Namespace) -> None:
    """Raises ConfigError for flags that what was asked for does not read."""
    look = next((name for name in _READS if name and getattr(options, name)), "")
    given = {name: getattr(options, name) not in (None, 1 if name == "cards" else None) for name in _ALL_FLAGS}
    foreign = [name for name in _ALL_FLAGS if given[name] and name not in _READS[look]]
    if not foreign:
        return
    flags, shown = [_flag(name) for name in foreign], f"--{look}" if look else "the table of all methods on a card"
    what = f"{' and '.join(flags)} {'do' if len(flags) > 1 else 'does'} not go with {shown}"
    goes = (f"{_flag(name)} goes with {_readers(name)}" for name in foreign)
    remedy = f"{'; '.join(goes)}."
    if look == "cost" and _MACHINE & {*foreign}:
        remedy += " Write --setup '8 x RTX 4090, ram=256' for another machine."
    raise ConfigError([Problem(field="", what=what, remedy=remedy)])


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _readers(name: str) -> str:
    readers = [f"--{look}" if look else "the table of all methods" for look, flags in _READS.items() if name in flags]
    return " or ".join(readers)


def _show_presets(machine: Machine, *, as_json: bool) -> None:
    """On all cards of a kind where there are several: planned as if this version could share a run, and marked."""
    alike = sum(device.name == machine.devices[0].name and device.kind != "cpu" for device in machine.devices)
    abilities = SEVERAL_CARDS if alike > 1 else ENGINE
    found = {goal: preset(goal, machine, abilities=abilities) for goal in GOALS}
    if as_json:
        values = {goal: None if one is None else _plain(one) for goal, one in found.items()}
        print(json.dumps({"device": machine.devices[0].name, "presets": values}))
        return
    for goal, one in found.items():
        print(f"{goal:<18} {'nothing fits' if one is None else _told(one)}")


def _plain(one: Preset) -> dict[str, Any]:
    return {
        "changes": one.changes,
        "needs": one.needs,
        "takes_long": one.takes_long,
        "forecast": one.forecast.to_json(),
    }


def _told(one: Preset) -> str:
    plan, forecast = one.forecast.plan, one.forecast
    each = f" a card of {plan.cards}" if plan.cards > 1 else ""
    lacks = f" (not in this version: {', '.join(one.needs)})" if one.needs else ""
    days = " (days: to see what fits, not to try)" if one.takes_long else ""
    return (
        f"{one.model}, {plan.method}, {plan.max_length:,} tokens: {format_bytes(forecast.memory.device_bytes)} of "
        f"{format_bytes(plan.budget_bytes)}{each}, {format_count(forecast.speed.tokens_per_s)} tokens/s, "
        f"{forecast.steps:,} steps of {plan.micro_batch * plan.accumulation * plan.cards} in "
        f"{format_duration(forecast.seconds)}{days}{lacks}"
    )
