"""What each chart shows: pure functions of what is known about a run."""

from __future__ import annotations

import json
import math

from ui.charts import (
    DRIFT_COLUMNS,
    SERIES_COLUMNS,
    TELEMETRY_COLUMNS,
    WAIT_COLUMNS,
    columns,
    drift_figure,
    figures,
    loss_scale_figure,
    memory_figure,
    waits_figure,
    with_compute,
)
from ui.texts import texts_of
from vramfit.units import GIB

EN = texts_of("en")


def _figures(*, has_card: bool) -> dict[str, dict[str, object]]:
    found = figures(has_card=has_card, predicted_bytes=8 * GIB, budget_bytes=22 * GIB, texts=EN)
    return {figure["key"]: figure for figure in found}


def test_a_card_has_sensors_and_a_machine_without_one_has_none() -> None:
    common = ["loss", "speed", "memory", "rate", "norm", "use"]
    assert list(_figures(has_card=True)) == [*common, "power", "temperature"]
    assert list(_figures(has_card=False)) == common


def test_memory_is_drawn_in_gib_against_prediction_and_budget() -> None:
    memory = _figures(has_card=True)["memory"]
    assert [trace["column"] for trace in memory["traces"]] == ["allocated_bytes", "reserved_bytes"]
    assert all(trace["scale"] == 1 / GIB for trace in memory["traces"])
    assert [(line["name"], line["value"]) for line in memory["lines"]] == [("predicted peak", 8.0), ("budget", 22.0)]


def test_without_a_card_memory_is_the_trainers_tensors_and_the_resident_set() -> None:
    memory = _figures(has_card=False)["memory"]
    assert [trace["column"] for trace in memory["traces"]] == ["allocated_bytes", "resident_bytes"]
    assert memory["traces"][0]["name"] == "trainer's tensors"


def test_before_the_forecast_is_known_there_are_no_lines() -> None:
    assert memory_figure(has_card=True, predicted_bytes=None, budget_bytes=None, texts=EN)["lines"] == []


def test_every_drawn_column_is_one_that_is_sent() -> None:
    for has_card in (True, False):
        for figure in _figures(has_card=has_card).values():
            sent = SERIES_COLUMNS if figure["source"] == "series" else TELEMETRY_COLUMNS
            assert {trace["column"] for trace in figure["traces"]} <= set(sent)


def test_drift_is_drawn_in_percent_against_its_limit() -> None:
    drift = drift_figure(0.003, EN)
    assert [(trace["column"], trace["scale"]) for trace in drift["traces"]] == [("loss", 100), ("grad_norm", 100)]
    assert [(line["name"], line["value"]) for line in drift["lines"]] == [("limit", 0.3)]
    assert (drift["source"], drift["unit"]) == ("drift", "%")
    assert {trace["column"] for trace in drift["traces"]} <= set(DRIFT_COLUMNS)
    assert loss_scale_figure(EN)["traces"][0]["column"] in SERIES_COLUMNS


def test_columns_are_valid_json_whatever_was_measured() -> None:
    sent = columns({"loss": [1.0, math.nan, math.inf, None], "step": [1, 2, 3, 4], "other": [0]}, SERIES_COLUMNS)
    assert sent == {"step": [1, 2, 3, 4], "loss": [1.0, None, None, None]}
    json.dumps(sent, allow_nan=False)


def test_the_parts_of_a_step_lie_on_top_of_each_other() -> None:
    waits = waits_figure(EN)
    drawn = [trace["column"] for trace in waits["traces"]]
    assert drawn == ["compute_seconds", "link_seconds", "optimizer_seconds", "disk_seconds"]
    assert all(trace["stacked"] and trace["scale"] == 1 for trace in waits["traces"])
    assert {*drawn, waits["now"]} == set(WAIT_COLUMNS)
    assert (waits["source"], waits["unit"], waits["floor"]) == ("series", "s", 0)
    assert not any(trace["stacked"] for figure in _figures(has_card=True).values() for trace in figure["traces"])


def test_what_is_no_wait_is_computing() -> None:
    rows = {
        "step": [1, 2, 3, 4],
        "step_seconds": [10.0, 10.0, 10.0, None],
        "link_seconds": [1.0, None, 9.0, 1.0],
        "optimizer_seconds": [2.0, None, 2.0, 1.0],
        "disk_seconds": [3.0, None, 0.0, 1.0],
    }
    found = with_compute(rows)
    assert found["compute_seconds"] == [4.0, None, 0.0, None]
    assert {name: values for name, values in found.items() if name != "compute_seconds"} == rows
