"""The arithmetic of hours, energy and money, by hand."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.errors import ConfigError
from vramfit.hardware import catalogue
from vramfit.planning.cost import OWN_NOTE, Setup, compare, cost

TWO = Setup(
    name="two", cards=2, price_usd=1000, price_note="made up", power_watts=400, rent_usd=0.5, electricity_usd=0.25,
    rest_watts=200, drawn=0.75, useful_hours=10_000,
)  # fmt: skip


def test_hours_energy_and_money_by_hand() -> None:
    """72 M tokens at 1,000 a second: 20 hours. 2 x 400 x 0.75 + 200 = 800 W: 16 kWh, 4 dollars. 2,000 dollars of cards
    lose 20 / 10,000: 4 dollars. Rented: 20 x 2 x 0.5 = 20 dollars."""
    found = cost(TWO, tokens=72e6, tokens_per_s=1000)

    assert found.hours == pytest.approx(20)
    assert found.kwh == pytest.approx(16)
    assert found.electricity_usd == pytest.approx(4)
    assert found.wear_usd == pytest.approx(4)
    assert found.own_usd == pytest.approx(8)
    assert found.own_usd_per_million_tokens == pytest.approx(8 / 72)
    assert found.rented_usd == pytest.approx(20)


def test_buying_pays_off_when_rent_saved_is_the_price() -> None:
    """An hour saves 2 x 0.5 of rent and costs 0.8 kWh x 0.25 = 0.2: 0.8 dollars; 2,000 / 0.8 hours."""
    assert cost(TWO, tokens=1e6, tokens_per_s=10).pays_off_hours == pytest.approx(2500)
    dear = dataclasses.replace(TWO, electricity_usd=2.0)
    assert cost(dear, tokens=1e6, tokens_per_s=10).pays_off_hours is None
    unoffered = cost(dataclasses.replace(TWO, rent_usd=0.0), tokens=1e6, tokens_per_s=10)
    assert unoffered.rented_usd is None
    assert unoffered.pays_off_hours is None


def test_eight_4090_against_four_a100() -> None:
    """Prices, power and rent are the catalogue's: 8 x 2,500 against 4 x 8,000 dollars, 8 x 450 against 4 x 400 W."""
    consumer = Setup.of(catalogue.get("RTX 4090"), 8, rest_watts=400)
    centre = Setup.of(catalogue.get("A100 80GB"), 4, rest_watts=400)
    both = compare(cost(consumer, tokens=1e9, tokens_per_s=20_000), cost(centre, tokens=1e9, tokens_per_s=16_000))

    assert (consumer.name, consumer.bought_usd, centre.bought_usd) == ("8 x GeForce RTX 4090", 20_000, 32_000)
    assert both.price == pytest.approx(0.625)
    assert both.hours == pytest.approx(0.8)
    assert consumer.watts == pytest.approx(8 * 450 * 0.85 + 400)
    assert both.kwh == pytest.approx(0.8 * (8 * 450 * 0.85 + 400) / (4 * 400 * 0.85 + 400))
    assert both.rented_usd == pytest.approx(0.8 * 8 * 0.34 / (4 * 1.39))
    assert both.own_usd < 1
    assert "2026" in consumer.price_note


def test_every_number_may_be_edited() -> None:
    setup = Setup.of(catalogue.get("RTX 3090"), 2, price_usd=700, price_note="mine", electricity_usd=0.4)

    assert setup.bought_usd == 1400
    assert setup.price_note == "mine"
    assert Setup.of(catalogue.get("RTX 3090"), price_usd=700).price_note == OWN_NOTE
    assert Setup.of(catalogue.get("RTX 3090"), price_usd=700).rent_note == catalogue.get("RTX 3090").rent_note
    assert cost(setup, tokens=1e6, tokens_per_s=100).electricity_usd == pytest.approx(
        1e4 / 3600 * setup.watts / 1e3 * 0.4
    )


def test_nonsense_is_refused_by_name() -> None:
    with pytest.raises(ConfigError) as caught:
        Setup.of(catalogue.get("RTX 4090"), 0, electricity_usd=-1, useful_hours=0, drawn=float("nan"))
    assert {problem.field for problem in caught.value.problems} == {"cards", "electricity_usd", "useful_hours", "drawn"}

    with pytest.raises(ConfigError) as caught:
        cost(TWO, tokens=0, tokens_per_s=float("nan"))
    assert [problem.field for problem in caught.value.problems] == ["tokens", "tokens_per_s"]

    with pytest.raises(ConfigError, match="same number"):
        compare(cost(TWO, tokens=1, tokens_per_s=1), cost(TWO, tokens=2, tokens_per_s=1))
