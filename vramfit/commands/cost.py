"""python -m vramfit explore --cost: hours, energy and money of a token count on one setup of cards against another."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
from collections.abc import Sequence
from typing import Any, Final

from vramfit.errors import ConfigError, Problem, UserError
from vramfit.hardware import catalogue as cards
from vramfit.models.architecture import Architecture
from vramfit.planning.cost import COMPARED, SETUP_RAM_GIB, Comparison, Cost, Setup, compare, cost
from vramfit.planning.explore import Outcome, shared_outcome
from vramfit.units import format_bytes, format_count, format_duration

USUAL_TOKENS: Final = "100M"
MOST_TOKENS: Final = 1e18
MOST_CARDS: Final = 1024
FIRST_MODEL: Final = "Qwen/Qwen3-8B"
_LETTERS: Final = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}
_EDITABLE: Final = {
    "price": "price_usd",
    "rent": "rent_usd",
    "watts": "power_watts",
    "electricity": "electricity_usd",
    "rest": "rest_watts",
    "drawn": "drawn",
    "hours": "useful_hours",
}
"""What may stand behind a setup's card, and the field of Setup it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that only --cost reads."""
    usual = " against ".join(f"{count} x {name}" for name, count in COMPARED)
    parser.add_argument("--tokens", help=f"for --cost: 250M, 1.5B, 1e9 (default {USUAL_TOKENS})")
    parser.add_argument(
        "--setup",
        action="append",
        metavar="N x CARD[,price=USD,...]",
        help="for --cost, up to ten of them: cards, and what is other than in the catalogue: a card's price, rent (an "
        "hour) and watts, the share that is drawn, watts of the rest, electricity (a kWh), useful hours, ram (GiB); "
        f"such as '8 x RTX 4090, price=2200, rent=0.3' (default: {usual})",
    )


def show(options: argparse.Namespace, models: Sequence[Architecture]) -> None:
    """Print every model's costs as a table or JSON. Raises UserError."""
    tokens = _tokens(USUAL_TOKENS if options.tokens is None else options.tokens)
    setups = [_setup(text) for text in options.setup or [f"{count} x {name}" for name, count in COMPARED]]
    if len(setups) > 10:
        raise _wrong("--setup", f"There are {len(setups)} setups, at most 10 can be compared", "Leave some out.")
    found = [_costs(model, setups, tokens, options) for model in models]
    if options.json:
        print(json.dumps({"costs": [_json(model, rows) for model, rows in zip(models, found, strict=True)]}))
        return
    print("\n\n".join(_table(model, options, rows) for model, rows in zip(models, found, strict=True)))


Costed = tuple[Cost, Outcome]


def _costs(
    model: Architecture, setups: Sequence[tuple[Setup, float, cards.Card]], tokens: float, options: argparse.Namespace
) -> list[Costed]:
    rows = []
    for setup, ram_gib, card in setups:
        machine = cards.machine_with(card, count=setup.cards, ram_gib=ram_gib)
        found = shared_outcome(machine, model, options.method, length=options.length)
        if found.verdict == "no":
            raise UserError(
                f"{setup.name} cannot train {model.name} with {options.method} at {options.length:,} tokens: "
                f"{found.limit} is short",
                "Choose another model or method, more cards, or cards with more memory.",
            )
        rows.append((cost(setup, tokens=tokens, tokens_per_s=found.tokens_per_s), found))
    return rows


# --- what was asked for ----------------------------------------------------------------------------------------------


def _wrong(flag: str, what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field="", what=what if what.startswith(flag) else f"{flag}: {what}", remedy=remedy)])


def _tokens(text: str) -> float:
    """A number of tokens, with K, M, B or T for thousands and so on. Raises ConfigError."""
    match = re.fullmatch(r"\s*([\d.,_]*\d(?:\.\d*)?(?:e[+-]?\d+)?)\s*([kmbgt]?)\s*", text.lower())
    try:
        value = float(match[1].replace(",", "").replace("_", "")) * _LETTERS[match[2]] if match else math.nan
    except (ValueError, OverflowError):
        value = math.nan
    if not 1 <= value <= MOST_TOKENS:
        raise _wrong("--tokens", f"--tokens is {text[:40]!r}, it must be 1 to {MOST_TOKENS:g}", "Write 250M or 1.5B.")
    return value


def _setup(text: str) -> tuple[Setup, float, cards.Card]:
    """(the setup, its GiB of RAM, the card). Raises ConfigError, HardwareError."""
    head, *changes = text.split(",")
    match = re.fullmatch(r"\s*(?:([-+\d.]+)\s*[x×*]\s*)?(.+?)\s*", head)
    if match is None:
        raise _wrong("--setup", f"--setup {text[:60]!r} names no card", "Write it as '8 x RTX 4090'.")
    count = int(match[1]) if match[1] and match[1].isdigit() else (0 if match[1] else 1)
    if not 1 <= count <= MOST_CARDS:
        what = f"--setup {text[:60]!r} has {match[1]} cards, it must be 1 to {MOST_CARDS}"
        raise _wrong("--setup", what, "Write it as '8 x RTX 4090'.")
    card, values = cards.get(match[2]), {"ram": SETUP_RAM_GIB}
    for change in changes:
        name, _, value = (part.strip() for part in change.partition("="))
        if name not in (*_EDITABLE, "ram"):
            remedy = f"Choose from {', '.join((*_EDITABLE, 'ram'))}."
            raise _wrong("--setup", f"--setup has no {name[:40]!r}", remedy)
        values[name] = _amount(name, value)
    ram = values.pop("ram")
    if not 1 <= ram <= 1_048_576:
        raise _wrong("--setup", f"ram is {ram:g} GiB, it must be 1 to 1,048,576", "Give the GiB of RAM, such as 512.")
    return Setup.of(card, count, **{_EDITABLE[name]: value for name, value in values.items()}), ram, card


def _amount(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    most = 1.0 if name == "drawn" else 1e9
    if not 0 <= value <= most:
        raise _wrong("--setup", f"{name} is {text[:40]!r}, it must be 0 to {most:,.0f}", "Give a number.")
    return value


# --- what is shown ---------------------------------------------------------------------------------------------------


def _json(model: Architecture, rows: Sequence[Costed]) -> dict[str, Any]:
    return {
        "model": model.name,
        "setups": [
            {
                **dataclasses.asdict(one),
                "own_usd": one.own_usd,
                "bought_usd": one.setup.bought_usd,
                "watts": one.setup.watts,
                "pays_off_hours": one.pays_off_hours,
                "plan": found.way,
                "needs": found.needs,
            }
            for one, found in rows
        ],
        "first_against_each": [_ratios(compare(rows[0][0], one)) for one, _ in rows[1:]],
    }


def _ratios(compared: Comparison) -> dict[str, float | None]:
    first, second = compared.first, compared.second
    return {
        "second": second.setup.name,  # type: ignore[dict-item]
        "tokens_per_s": first.tokens_per_s / second.tokens_per_s,
        "hours": compared.hours,
        "kwh": compared.kwh,
        "own_usd": compared.own_usd if second.own_usd else None,
        "rented_usd": compared.rented_usd,
        "bought_usd": compared.price if second.setup.bought_usd else None,
    }


def _table(model: Architecture, options: argparse.Namespace, rows: Sequence[Costed]) -> str:
    first = rows[0][0]
    lines = [
        f"{model.name}, {options.method}, sequences of {options.length:,} tokens, {format_count(first.tokens)} tokens",
        f"{'':<34}" + "".join(f"{one.setup.name:>34}" for one, _ in rows),
    ]
    for label, values in (
        ("Speed", [f"{format_count(one.tokens_per_s)} tokens/s" for one, _ in rows]),
        ("Duration", [format_duration(one.hours * 3600) for one, _ in rows]),
        ("Energy", [f"{one.kwh:,.1f} kWh" for one, _ in rows]),
        ("Electricity", [_usd(one.electricity_usd) for one, _ in rows]),
        ("Wear (share of the price)", [_usd(one.wear_usd) for one, _ in rows]),
        ("Own cards: electricity and wear", [_usd(one.own_usd) for one, _ in rows]),
        ("Rented instead", [_usd(one.rented_usd) for one, _ in rows]),
        ("Buying the cards", [_usd(one.setup.bought_usd) for one, _ in rows]),
        ("Memory of a card", [format_bytes(found.device_bytes) for _, found in rows]),
    ):
        lines.append(f"{label:<34}" + "".join(f"{value:>34}" for value in values))
    for other, _ in rows[1:]:
        ratios = {name: value for name, value in _ratios(compare(first, other)).items() if name != "second"}
        told = ", ".join(f"{name} {value:.2f}" for name, value in ratios.items() if value is not None)
        lines.append(f"{first.setup.name} / {other.setup.name}: {told}")
    return "\n".join([*lines, *(line for one, found in rows for line in _basis(one.setup, found))])


def _basis(setup: Setup, found: Outcome) -> list[str]:
    """What a setup's figures rest on; all of it can be edited behind --setup."""
    lacks = f" (not in this version: {', '.join(found.needs)})" if found.needs else ""
    return [
        f"{setup.name}: planned {found.way}{lacks}",
        f"  price  ${setup.price_usd:,.0f} a card: {setup.price_note}",
        f"  rent   {f'${setup.rent_usd:g} an hour and card: ' if setup.rent_usd else ''}{setup.rent_note}",
        f"  energy {setup.electricity_usd:g} $/kWh; cards draw {setup.drawn:.0%} of {setup.power_watts:g} W, the rest "
        f"{setup.rest_watts:g} W; worth nothing after {setup.useful_hours:,.0f} hours",
    ]


def _usd(value: float | None) -> str:
    return "no price known" if value is None else f"${value:,.2f}" if value < 1000 else f"${value:,.0f}"
