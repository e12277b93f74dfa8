"""python -m vramfit explore --cost: the arithmetic of planning/cost.py on planned setups, each number editable."""

from __future__ import annotations

import json
from typing import Any

import pytest

from vramfit.__main__ import main
from vramfit.hardware.catalogue import get
from vramfit.planning.cost import DRAWN, ELECTRICITY_USD, REST_WATTS, USEFUL_HOURS


def costs(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["explore", "--cost", *arguments, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["costs"]
    return found


def test_eight_4090s_are_compared_with_four_a100s_when_nobody_says(capsys: pytest.CaptureFixture[str]) -> None:
    found = costs(capsys)
    first, second = found["setups"]
    assert (first["setup"]["cards"], second["setup"]["cards"]) == (8, 4)
    card = get("RTX 4090")
    assert first["setup"]["price_note"] == card.price_note  # it says the day
    assert first["hours"] == pytest.approx(100e6 / first["tokens_per_s"] / 3600)
    watts = 8 * card.power_watts * DRAWN + REST_WATTS
    assert first["kwh"] == pytest.approx(first["hours"] * watts / 1000)
    assert first["electricity_usd"] == pytest.approx(first["kwh"] * ELECTRICITY_USD)
    assert first["wear_usd"] == pytest.approx(8 * card.price_usd * first["hours"] / USEFUL_HOURS)
    assert first["rented_usd"] == pytest.approx(8 * card.rent_usd * first["hours"])
    assert first["needs"]  # several cards are not in this version
    (ratios,) = found["first_against_each"]
    assert ratios["hours"] == pytest.approx(first["hours"] / second["hours"])
    assert ratios["bought_usd"] == pytest.approx(first["bought_usd"] / second["bought_usd"])


def test_every_number_of_a_setup_can_be_edited(capsys: pytest.CaptureFixture[str]) -> None:
    edited = "2 x RTX 3090,price=700,rent=0.5,watts=300,electricity=0.4,rest=200,drawn=0.5,hours=1000,ram=128"
    found = costs(capsys, "--tokens", "2.5M", "--model", "Qwen/Qwen3-1.7B", "--setup", edited)
    (one,) = found["setups"]
    assert found["first_against_each"] == []
    assert one["tokens"] == 2.5e6
    assert one["kwh"] == pytest.approx(one["hours"] * (2 * 300 * 0.5 + 200) / 1000)
    assert one["electricity_usd"] == pytest.approx(one["kwh"] * 0.4)
    assert one["wear_usd"] == pytest.approx(1400 * one["hours"] / 1000)
    assert one["rented_usd"] == pytest.approx(2 * 0.5 * one["hours"])
    assert one["setup"]["price_note"] == "as you gave it"


def test_the_table_says_money_hours_and_where_prices_are_from(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explore", "--cost", "--setup", "RTX 4090", "--setup", "RTX 3060"]) == 0
    text = capsys.readouterr().out
    for word in ("kWh", "$", "tokens/s", "2026", "1 x GeForce RTX 4090 / 1 x GeForce RTX 3060", "no price known"):
        assert word in text


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--tokens", "0"), "--tokens is '0'"),
        (("--tokens=-5M",), "--tokens is '-5M'"),
        (("--tokens", "many"), "--tokens is 'many'"),
        (("--tokens", "1e999"), "--tokens is '1e999'"),
        (("--setup", "0 x RTX 4090"), "has 0 cards"),
        (("--setup", "-2 x RTX 4090"), "has -2 cards"),
        (("--setup", "1.5 x RTX 4090"), "has 1.5 cards"),
        (("--setup", "9999 x RTX 4090"), "has 9999 cards"),
        (("--setup", "8 x GTX 9999"), "no 'GTX 9999'"),
        (("--setup", ""), "names no card"),
        (("--setup", "RTX 4090,price"), "price is ''"),
        (("--setup", "RTX 4090,price=-1"), "price is '-1'"),
        (("--setup", "RTX 4090,rent=nan"), "rent is 'nan'"),
        (("--setup", "RTX 4090,drawn=3"), "drawn is '3', it must be 0 to 1"),
        (("--setup", "RTX 4090,hours=0"), "useful_hours is 0"),
        (("--setup", "RTX 4090,ram=0"), "ram is 0 GiB"),
        (("--setup", "RTX 4090,colour=red"), "no 'colour'"),
        (("--card", "RTX 4090"), "--card does not go with --cost. --card goes with --lengths or --presets or"),
        (("--cards", "8", "--ram-gib", "64"), "--cards and --ram-gib do not go with --cost"),
        (("--model", "meta-llama/Llama-3.1-405B", "--method", "full", "--setup", "RTX 3060"), "is short"),
        (tuple(word for _ in range(11) for word in ("--setup", "RTX 4090")), "11 setups"),
    ],
)
def test_wrong_input_is_one_sentence(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert main(["explore", "--cost", *arguments]) == 2
    heard = capsys.readouterr()
    assert words in heard.err
    assert heard.err.count("\n") == 1
    assert heard.out == ""
