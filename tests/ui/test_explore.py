"""The Explore page: what it asks, what its parts show, and what it says of a wish that means nothing."""

from __future__ import annotations

import dataclasses
import html
from pathlib import Path

import pytest

from ui.explore import Explorer, Look, budget_of, length_figure, map_table, page_html, told
from ui.preview import Previewer
from ui.texts import texts_of
from vramfit.errors import ConfigError, UserError
from vramfit.hardware import catalogue as cards
from vramfit.hardware.catalogue import machine_with
from vramfit.models import catalogue
from vramfit.planning.explore import heat_map, over_lengths
from vramfit.units import GIB, format_bytes

EN = texts_of("en")
CARD = "plan:GeForce RTX 4090"


@pytest.fixture(scope="module")
def explorer(tmp_path_factory: pytest.TempPathFactory) -> Explorer:
    return Explorer(Previewer(tmp_path_factory.mktemp("explore")))


def test_a_look_names_every_number_that_is_none() -> None:
    with pytest.raises(ConfigError) as caught:
        Look.of({"count": "0", "length": "many", "ram": "64"}, EN)
    assert [problem.field for problem in caught.value.problems] == ["count", "length"]
    look = Look.of({"count": "2", "ram": "", "length": "4,096"}, EN)
    assert (look.count, look.ram_gib, look.length, look.method) == (2, None, 4096, "lora")


@pytest.mark.parametrize(
    ("query", "said"), [({"count": "2.7"}, "'2.7'"), ({"length": "99.5"}, "'99.5'"), ({"method": "dpo"}, "'dpo'")]
)
def test_a_look_is_never_another_than_was_asked_for(query: dict[str, str], said: str) -> None:
    for language in ("en", "zh"):
        with pytest.raises(ConfigError) as caught:
            Look.of(query, texts_of(language))
        (problem,) = caught.value.problems
        assert said in problem.what


def test_the_map_has_a_cell_for_every_model_and_method(explorer: Explorer) -> None:
    shown = explorer.view("map", {"card": CARD, "length": "2048"}, EN)["html"]
    assert shown.count("<td") == 33
    assert shown.count("data-chosen") == 1
    assert "vf-cell-fits" in shown
    assert "vf-cell-streams" in shown
    assert "vf-cell-later" in shown
    assert "vf-cell-no" in shown


def test_without_a_card_ram_is_called_ram() -> None:
    machine = machine_with("GeForce RTX 4090", ram_gib=24)
    cpu = dataclasses.replace(
        machine.devices[0], kind="cpu", name="CPU (2 cores)", torch_device="cpu", bf16=False, memory_bytes=24 * GIB
    )
    models = [catalogue.find(name) for name in ("Qwen/Qwen3-0.6B", "meta-llama/Llama-3.1-405B")]
    found = heat_map(dataclasses.replace(machine, devices=(cpu,)), [model for model in models if model])
    assert {one.verdict for one in found} >= {"fits", "no"}
    for one in found:
        assert "RAM" in told(one, EN)
        assert "card" not in told(one, EN)
        assert "显存" not in told(one, texts_of("zh"))
        assert "显卡" not in told(one, texts_of("zh"))


def test_a_cell_says_speed_and_bytes_and_on_hover_what_is_missing() -> None:
    machine = machine_with("GeForce RTX 4090")
    names = ("Qwen/Qwen3-0.6B", "meta-llama/Meta-Llama-3-8B", "Qwen/Qwen3-32B", "meta-llama/Llama-3.1-405B")
    models = [model for name in names if (model := catalogue.find(name)) is not None]
    found = heat_map(machine, [model for model in models if model])
    shown = map_table(found, Look.of({}, EN), EN)
    by_name = {(one.model, one.method): one for one in found}
    fits = by_name["Qwen/Qwen3-0.6B", "lora"]
    assert format_bytes(fits.device_bytes) in shown
    streams = by_name["Qwen/Qwen3-32B", "lora"]
    assert streams.verdict == "streams"
    assert "Not in this version" not in told(streams, EN)
    full = by_name["meta-llama/Meta-Llama-3-8B", "full"]
    later = dataclasses.replace(full, verdict="needs", needs=("several cards (FSDP)",), least_bytes=30 * GIB)
    assert f"Not in this version: {', '.join(later.needs)}" in told(later, EN)
    assert f"at least {format_bytes(later.least_bytes)}" in told(later, EN)
    never = by_name["meta-llama/Llama-3.1-405B", "full"]
    assert "no (card memory)" in told(never, EN)


def test_more_ram_lets_more_models_stream(explorer: Explorer) -> None:
    little = explorer.view("map", {"card": CARD, "ram": "3"}, EN)["html"]
    much = explorer.view("map", {"card": CARD, "ram": "2048"}, EN)["html"]
    assert much.count("vf-cell-no") < little.count("vf-cell-no")


def test_the_curve_grows_and_never_plans_above_the_budget() -> None:
    machine, model = machine_with("GeForce RTX 4090"), catalogue.find("Qwen/Qwen3-8B")
    assert model is not None
    budget = budget_of(machine)
    assert 20 * GIB < budget < 24 * GIB
    figure = length_figure(over_lengths(machine, model, "qlora"), budget_bytes=budget, texts=EN)
    planned, smallest = figure["lines"]
    assert max(planned["y"]) <= figure["budget"]
    assert smallest["y"] == sorted(smallest["y"])
    assert smallest["x"] == figure["lengths"]


def test_one_model_on_every_card(explorer: Explorer) -> None:
    shown = explorer.view("cards", {"model": "Qwen/Qwen3-4B", "method": "qlora"}, EN)["html"]
    assert shown.count("<tr") == 19


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_same_run_in_other_trainers_begins_with_ours(explorer: Explorer, language: str) -> None:
    query = {"card": CARD, "model": "Qwen/Qwen3-8B", "method": "qlora"}
    shown = explorer.view("programs", query, texts_of(language))["html"]
    rows = shown.split("<tr")[1:]
    assert "VRAMFit" in rows[0]
    assert len(rows) == 10  # ours, and nine others that train adapters on a base in 4 bits
    assert "unsloth" in shown
    assert "torchtitan" not in shown
    large = explorer.view("programs", {**query, "model": "meta-llama/Llama-3.1-70B"}, texts_of(language))["html"]
    assert "vf-cell-fits" in large.split("<tr")[1]  # ours streams
    assert large.count("vf-cell-no") == 9


def test_the_cost_of_two_setups_follows_the_prices_typed(explorer: Explorer) -> None:
    usual = explorer.view("cost", {}, EN)
    assert "8 x GeForce RTX 4090" in usual["html"]
    assert "4 x A100" in usual["html"]
    assert "2026" in usual["html"]  # when the prices were seen
    assert usual["usual"]["a"]["price"] == 2500
    dear = explorer.view("cost", {"a_price": "5000"}, EN)["html"]
    assert "$20,000" in usual["html"]
    assert "$40,000" in dear


def test_a_typed_price_is_not_the_catalogues_and_says_so(explorer: Explorer) -> None:
    texts, card = texts_of("zh"), cards.get("RTX 4090")
    usual = explorer.view("cost", {}, EN)["html"]
    typed = explorer.view("cost", {"a_price": "5000"}, EN)["html"]
    assert html.escape(f"price: {card.price_note}; rent: {card.rent_note}.") in usual
    assert html.escape(f"price: as you gave it; rent: {card.rent_note}.") in typed
    assert html.escape(card.price_note) not in typed
    shown = explorer.view("cost", {"a_price": "5000", "a_rent": "0.5"}, texts)["html"]
    given = texts["explore.cost.given"]
    assert texts["explore.cost.sources"].format(price=given, rent=given) in shown


@pytest.mark.parametrize(
    ("part", "query", "said"),
    [
        ("map", {"length": "x"}, "Sequence length (tokens)"),
        ("map", {"card": "plan:Voodoo 2"}, "Voodoo 2"),
        ("cards", {"model": "no/such-model"}, "no/such-model"),
        ("cost", {"tokens": "-3"}, "Tokens (millions)"),
        ("cost", {"tokens": "0"}, "Tokens (millions)"),
        ("cost", {"a_price": "cheap"}, "Price of a card"),
        ("cost", {"model": "meta-llama/Llama-3.1-405B", "method": "full", "a_count": "1"}, "cannot train"),
    ],
)
def test_what_is_wrong_is_said_in_the_part(explorer: Explorer, part: str, query: dict[str, str], said: str) -> None:
    answer = explorer.view(part, query, EN)
    assert answer["failed"]
    assert said in answer["html"]


def test_an_unknown_part_is_refused(explorer: Explorer) -> None:
    with pytest.raises(UserError, match="no part"):
        explorer.view("nonsense", {}, EN)


@pytest.mark.parametrize("language", ["en", "zh"])
def test_the_page_offers_this_machine_and_every_card(tmp_path: Path, language: str) -> None:
    shown = page_html(Previewer(tmp_path), texts_of(language))
    assert shown.count("plan:") == 19
    for part in ("map", "cards", "lengths", "programs", "cost"):
        assert f'data-part="{part}"' in shown
