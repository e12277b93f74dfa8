"""What a training costs: hours, energy, money; and one setup of cards against another. Every number may be edited.

    hours = tokens / tokens per second / 3600
    energy = hours x (cards x watts x share drawn + watts of the rest)
    bought: the cards lose their price over their useful hours, electricity is paid; rented: hours x cards x price

Nothing here asks a machine or a clock. Prices carry the day they are from, and whoever shows them shows it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from vramfit.errors import ConfigError, Problem
from vramfit.hardware.catalogue import Card, find
from vramfit.planning.plan import Forecast

ELECTRICITY_USD: Final = 0.17
"""US dollars a kWh: the average of households in the United States in 2025. To be edited: 0.08 to 0.45 elsewhere."""

REST_WATTS: Final = 150.0
"""CPU, RAM, drives, fans and the power supply's loss of a workstation, beside its cards."""

DRAWN: Final = 0.85
"""Of their power limit, what cards draw in a training: 400 of 450 W on 4090s, 375 for a 70B (answer.ai)."""

USEFUL_HOURS: Final = 3 * 365 * 24 * 0.5
"""A card is worth nothing after three years of being used half the time. To be edited."""


COMPARED: Final = (("GeForce RTX 4090", 8), ("A100 80GB (SXM4/PCIe)", 4))
"""The two setups that are compared when nobody says which."""

OWN_NOTE: Final = "as you gave it"
"""Where a price is from that a person typed."""

SETUP_RAM_GIB: Final = 512.0
"""RAM of compared setups: machines of many cards have that and more."""


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Cards and what is paid for them. US dollars, watts, hours; all of it may be edited.

    `price_usd` and `rent_usd` (an hour) are of one card; a rent of 0 is one that nobody offers. `drawn` is the share of
    `power_watts` that a card draws. `price_note` says where and when the price was seen.
    """

    name: str
    cards: int
    price_usd: float
    price_note: str
    power_watts: float
    rent_usd: float = 0.0
    rent_note: str = ""
    electricity_usd: float = ELECTRICITY_USD
    rest_watts: float = REST_WATTS
    drawn: float = DRAWN
    useful_hours: float = USEFUL_HOURS

    @classmethod
    def of(cls, card: Card, count: int = 1, **changes: Any) -> Setup:
        """`count` of a catalogue's card, with what differs: a price or rent that is given is not the catalogue's, and
        says so. Raises ConfigError for numbers that mean nothing."""
        own = {f"{name}_note": OWN_NOTE for name in ("price", "rent") if f"{name}_usd" in changes}
        values: dict[str, Any] = {
            "name": f"{count} x {card.name}",
            "cards": count,
            "price_usd": card.price_usd,
            "price_note": card.price_note,
            "power_watts": card.power_watts,
            "rent_usd": card.rent_usd,
            "rent_note": card.rent_note,
        }
        found = cls(**{**values, **own, **changes})
        found.check()
        return found

    def check(self) -> None:
        """Raises ConfigError, naming every number that means nothing."""
        low = {"cards": 1, "drawn": 0.0, "price_usd": 0.0, "power_watts": 0.0, "rent_usd": 0.0}
        low |= {"electricity_usd": 0.0, "rest_watts": 0.0}
        problems = [
            Problem(
                field=name, what=f"{name} is {getattr(self, name)}, it must be at least {least:g}", remedy="Raise it."
            )
            for name, least in low.items()
            if not getattr(self, name) >= least  # NaN is not
        ]
        if not self.useful_hours > 0:
            what = f"useful_hours is {self.useful_hours}, it must be above 0"
            problems.append(Problem(field="useful_hours", what=what, remedy="Give hours, such as 13140."))
        if problems:
            raise ConfigError(problems)

    @property
    def watts(self) -> float:
        """What the whole machine draws."""
        return self.cards * self.power_watts * self.drawn + self.rest_watts

    @property
    def bought_usd(self) -> float:
        """The price of all cards."""
        return self.cards * self.price_usd


@dataclass(frozen=True, kw_only=True)
class Cost:
    """What training `tokens` takes on a setup.

    `electricity_usd` is paid where the cards are one's own; `wear_usd` is the part of their price that these hours use
    up; `rented_usd` is what the same hours cost in a cloud, None where the card is not offered.
    """

    setup: Setup
    tokens: float
    tokens_per_s: float
    hours: float
    kwh: float
    electricity_usd: float
    wear_usd: float
    rented_usd: float | None

    @property
    def own_usd(self) -> float:
        """Electricity and wear."""
        return self.electricity_usd + self.wear_usd

    @property
    def own_usd_per_million_tokens(self) -> float:
        return self.own_usd / self.tokens * 1e6

    @property
    def pays_off_hours(self) -> float | None:
        """Hours after which buying is cheaper than renting; None where it never is, or nobody rents the card out."""
        setup = self.setup
        saved = setup.cards * setup.rent_usd - setup.watts / 1000 * setup.electricity_usd
        return setup.bought_usd / saved if saved > 0 else None


def cost(setup: Setup, *, tokens: float, tokens_per_s: float) -> Cost:
    """Hours, energy and money of `tokens` at the speed of all the setup's cards. Raises ConfigError."""
    setup.check()
    problems = [
        Problem(field=name, what=f"{name} is {value:g}, it must be above 0", remedy="Give a number above 0.")
        for name, value in (("tokens", tokens), ("tokens_per_s", tokens_per_s))
        if not value > 0
    ]
    if problems:
        raise ConfigError(problems)
    hours = tokens / tokens_per_s / 3600
    kwh = hours * setup.watts / 1000
    return Cost(
        setup=setup,
        tokens=tokens,
        tokens_per_s=tokens_per_s,
        hours=hours,
        kwh=kwh,
        electricity_usd=kwh * setup.electricity_usd,
        wear_usd=setup.bought_usd * hours / setup.useful_hours,
        rented_usd=hours * setup.cards * setup.rent_usd if setup.rent_usd else None,
    )


def cost_of_run(forecast: Forecast) -> Cost | None:
    """What a forecast's run costs on its cards, at the catalogue's prices; None for a card it does not have, such as a
    CPU, whose watts nobody knows."""
    card, plan, speed = find(forecast.card), forecast.plan, forecast.speed
    if card is None or not speed.watts or not forecast.seconds > 0:
        return None
    setup = Setup.of(card, plan.cards, power_watts=speed.watts / plan.cards)
    return cost(setup, tokens=speed.tokens_per_s * forecast.seconds, tokens_per_s=speed.tokens_per_s)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Two setups on the same tokens. Ratios are of the first to the second: 0.5 is half as long, or half as dear."""

    first: Cost
    second: Cost

    @property
    def hours(self) -> float:
        return self.first.hours / self.second.hours

    @property
    def kwh(self) -> float:
        return self.first.kwh / self.second.kwh

    @property
    def price(self) -> float:
        """Of buying the cards."""
        return self.first.setup.bought_usd / self.second.setup.bought_usd

    @property
    def own_usd(self) -> float:
        """Of electricity and wear."""
        return self.first.own_usd / self.second.own_usd

    @property
    def rented_usd(self) -> float | None:
        if self.first.rented_usd is None or not self.second.rented_usd:
            return None
        return self.first.rented_usd / self.second.rented_usd


def compare(first: Cost, second: Cost) -> Comparison:
    """Raises ConfigError when the two are not about the same tokens."""
    if first.tokens != second.tokens:
        what = f"One cost is of {first.tokens:g} tokens, the other of {second.tokens:g}"
        raise ConfigError([Problem(field="tokens", what=what, remedy="Compare the same number.")])
    return Comparison(first=first, second=second)
