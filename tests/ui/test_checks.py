"""Check precisely: offered for what can be built, traced in a child, told by phase; a newer check ends an older one."""

from __future__ import annotations

import dataclasses
import html
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ui.checks import Checks, compared_html, estimated_phases, model_config, timeline_figure
from ui.estimate import forecast_card
from ui.preview import Previewer
from ui.texts import Texts, texts_of
from vramfit.config import ModelChoice
from vramfit.errors import UserError
from vramfit.planning.plan import Forecast
from vramfit.starter.recipe import starter_run
from vramfit.starter.shape import MODEL_CONFIG

EN = texts_of("en")
TRACE = {
    "trace": {
        "peak_bytes": 40 * 2**20,
        "phases": {"load": 2**20, "loss": 40 * 2**20, "backward": 30 * 2**20},
        "traced_blocks": 2,
        "linear": True,
        "operations": 4706,
        "timeline": [[1, 2**20, "load"], [2, 40 * 2**20, "loss"]],
    }
}


@pytest.fixture
def forecast(tmp_path: Path) -> Forecast:
    found = Previewer(tmp_path).preview(starter_run(), "cpu").forecast
    assert found is not None
    return found


def answering(text: str, *, seconds: float = 0.0) -> tuple[str, ...]:
    code = f"import sys, time; sys.stdin.read(); time.sleep({seconds}); print({text!r})"
    return (sys.executable, "-c", code)


def ended(checks: Checks, token: str) -> dict[str, object]:
    deadline = time.monotonic() + 120
    while (view := checks.view(token, EN))["state"] == "running":
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return view


def test_the_starter_is_really_traced(forecast: Forecast) -> None:
    checks = Checks()
    token = checks.offer(starter_run().model, forecast)
    assert checks.view(token, EN)["state"] == "idle"
    checks.start(token)
    view = ended(checks, token)
    assert view["state"] == "done", view["html"]
    peak = checks._known[token].answer["trace"]["peak_bytes"]  # type: ignore[index]
    assert peak == pytest.approx(forecast.memory.peak_bytes, rel=0.05)
    assert "Traced peak" in str(view["html"])
    assert EN["check.least.cpu"] in str(view["html"])
    assert len(view["figure"]["x"]) > 100  # type: ignore[index]


def test_the_same_settings_are_one_check_and_others_another(forecast: Forecast) -> None:
    checks = Checks(answering(json.dumps(TRACE)))
    model = ModelChoice(source="HuggingFaceTB/SmolLM2-135M")
    token = checks.offer(model, forecast)
    assert token == checks.offer(model, forecast)
    assert token != checks.offer(starter_run().model, forecast)


def test_a_model_that_cannot_be_built_is_not_offered(forecast: Forecast, tmp_path: Path) -> None:
    assert Checks().offer(ModelChoice(source=str(tmp_path)), forecast) == ""
    assert Checks().offer(ModelChoice(source="owner/unknown-model"), forecast) == ""
    (tmp_path / "config.json").write_text(json.dumps(MODEL_CONFIG), encoding="utf-8")
    assert Checks().offer(ModelChoice(source=str(tmp_path)), forecast)
    assert model_config(ModelChoice(source=str(tmp_path))) == MODEL_CONFIG


@pytest.mark.parametrize("texts", [EN, texts_of("zh")], ids=["en", "zh"])
@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"weights_tier": "host"}, "streams"),
        ({"compiled": True}, "compiled"),
        ({"cards": 8, "sharding": "fsdp"}, "several_cards"),
        ({"optimizer_tier": "disk"}, "disk"),
        ({"optimizer_tier": "host"}, ""),
    ],
)
def test_a_plan_that_no_trace_follows_has_no_button_but_the_reason(
    forecast: Forecast, changes: dict[str, Any], why: str, texts: Texts
) -> None:
    planned = dataclasses.replace(forecast, plan=dataclasses.replace(forecast.plan, **changes))
    token = Checks().offer(starter_run().model, planned)
    shown = forecast_card(planned, texts, device_name="card", check=token)
    assert (token == "") == bool(why)
    assert ("data-check" in shown) == (not why)
    assert not why or html.escape(texts[f"check.none.{why}"]) in shown


@pytest.mark.parametrize(
    ("said", "read"),
    [
        (json.dumps({"error": {"what": "transformers cannot build it", "remedy": "Check it."}}), "cannot build it"),
        ("", "did not come to an end"),
        ("not json", "did not come to an end"),
    ],
)
def test_a_childs_failure_is_told_in_words(forecast: Forecast, said: str, read: str) -> None:
    checks = Checks(answering(said))
    token = checks.offer(starter_run().model, forecast)
    checks.start(token)
    view = ended(checks, token)
    assert view["state"] == "failed"
    assert read in str(view["html"])


def test_a_newer_check_ends_the_one_under_way(forecast: Forecast) -> None:
    checks = Checks(answering(json.dumps(TRACE), seconds=60))
    old = checks.offer(starter_run().model, forecast)
    new = checks.offer(ModelChoice(source="Qwen/Qwen3-0.6B"), forecast)
    checks.start(old)
    until(lambda: checks._known[old].worker is not None)
    checks.start(new)
    assert ended(checks, old)["state"] == "idle"
    until(lambda: checks._known[new].worker is not None)
    checks.end()
    assert ended(checks, new)["state"] == "idle"


def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_token_nobody_knows_is_refused() -> None:
    with pytest.raises(UserError, match="not estimated"):
        Checks().view("nonsense", EN)


def test_phases_of_blocks_and_the_embedding_are_one_backward(forecast: Forecast) -> None:
    phases = estimated_phases(forecast)
    blocks = [phase.total_bytes for phase in forecast.memory.phases if phase.name.startswith("backward")]
    assert blocks
    assert phases["backward"] == max(blocks)
    assert "embedding" not in phases


def test_the_comparison_says_peak_phases_and_difference(forecast: Forecast) -> None:
    shown = compared_html(forecast, TRACE["trace"], EN, seconds=8.4)
    assert "Traced peak 40 MiB" in shown
    assert "4,706 operations" in shown
    assert shown.count("<tr>") == 4
    assert "allocator" not in shown  # nothing was asked of it
    figure = timeline_figure(TRACE["trace"], EN)
    assert (figure["unit"], figure["y"]) == ("MiB", [1.0, 40.0])


def on(device: str, forecast: Forecast, *, budget: int) -> Forecast:
    plan = dataclasses.replace(forecast.plan, device=device, budget_bytes=budget)
    return dataclasses.replace(forecast, plan=plan)


@pytest.mark.parametrize("texts", [EN, texts_of("zh")], ids=["en", "zh"])
def test_a_card_is_told_from_tensors_to_the_least_memory(forecast: Forecast, texts: Texts) -> None:
    needs = {"tensors": 40 * 2**20, "reserved": 60 * 2**20, "outside": 600 * 2**20, "smallest": 650 * 2**20}
    shown = compared_html(
        on("cuda:0", forecast, budget=700 * 2**20), {**TRACE["trace"], "needs": needs}, texts, seconds=8
    )
    order = [shown.index(html.escape(texts[f"check.{key}"])) for key in ("tensors", "reserved", "shown", "least")]
    assert order == sorted(order)
    assert "<td>60 MiB</td>" in shown
    assert "<td>660 MiB</td>" in shown  # with the context
    assert html.escape(texts["check.completes"].format(least="650 MiB", budget="700 MiB")) in shown
    assert html.escape(texts["check.allocator.card"]) in shown
    short = compared_html(
        on("cuda:0", forecast, budget=640 * 2**20), {**TRACE["trace"], "needs": needs}, texts, seconds=8
    )
    assert html.escape(texts["check.short"].format(least="650 MiB", budget="640 MiB")) in short


@pytest.mark.parametrize("device", ["cpu", "mps"])
def test_what_is_not_simulated_is_told(forecast: Forecast, device: str) -> None:
    needs = {"tensors": 40 * 2**20, "reserved": None, "outside": 560 * 2**20, "smallest": 600 * 2**20}
    shown = compared_html(on(device, forecast, budget=2**30), {**TRACE["trace"], "needs": needs}, EN, seconds=8)
    assert EN["check.reserved"] not in shown
    assert EN[f"check.least.{device}"] in shown
    assert html.escape(EN[f"check.allocator.{device}"]) in shown


def test_the_estimate_offers_the_check_and_the_other_ways(forecast: Forecast) -> None:
    shown = forecast_card(forecast, EN, device_name="CPU", check="abc")
    assert 'data-token="abc"' in shown
    assert "Check precisely" not in forecast_card(forecast, EN, device_name="CPU")
    assert EN["estimate.others"] in shown
