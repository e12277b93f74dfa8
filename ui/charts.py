"""Rows -> figures. What each live chart shows, as plain data that monitor.js draws. Pure functions, no widgets.

A figure names the columns it draws; the rows themselves travel apart (see `run_view` in monitor.py), so that a tick
sends only new points. Columns come in the store's units; `scale` turns them into what the axis says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ui.texts import Texts
from vramfit.units import GIB

Figure = dict[str, Any]

SERIES_COLUMNS: Final = (
    "step",
    "time",
    "loss",
    "learning_rate",
    "grad_norm",
    "tokens_per_s",
    "allocated_bytes",
    "reserved_bytes",
    "resident_bytes",
    "loss_scale",
)
WAIT_COLUMNS: Final = ("step_seconds", "compute_seconds", "link_seconds", "optimizer_seconds", "disk_seconds")
"""Sent beside SERIES_COLUMNS where the model streams."""
DRIFT_COLUMNS: Final = ("step", "loss", "grad_norm")
TELEMETRY_COLUMNS: Final = ("time", "device_bytes", "utilisation", "power_watts", "temperature_c", "cpu_utilisation")


def figures(*, has_card: bool, predicted_bytes: int | None, budget_bytes: int | None, texts: Texts) -> list[Figure]:
    """The charts of one run, in reading order. Without a card: no power, no temperature, the CPU's utilisation."""
    charts = [
        _loss(texts),
        _one("speed", texts["chart.speed"], texts["chart.speed.unit"], "tokens_per_s", colour=2),
        memory_figure(has_card=has_card, predicted_bytes=predicted_bytes, budget_bytes=budget_bytes, texts=texts),
        _one("rate", texts["chart.rate"], "", "learning_rate", colour=4),
        _one("norm", texts["chart.norm"], "", "grad_norm", colour=5),
    ]
    if not has_card:
        return [*charts, _sensor("use", texts["chart.use.cpu"], "%", "cpu_utilisation", scale=100.0, top=100)]
    return [
        *charts,
        _sensor("use", texts["chart.use"], "%", "utilisation", scale=100.0, top=100),
        _sensor("power", texts["chart.power"], "W", "power_watts"),
        _sensor("temperature", texts["chart.temperature"], "°C", "temperature_c"),
    ]


def loss_scale_figure(texts: Texts) -> Figure:
    """fp16's loss scale: it halves at every skipped step and doubles after many good ones."""
    return {**_one("scale", texts["chart.scale"], "", "loss_scale", colour=7), "log": True}


def drift_figure(limit: float, texts: Texts) -> Figure:
    """How far loss and gradient norm were from fp32's, against the limit above which the run warns."""
    traces = [
        _trace("loss", texts["chart.drift.loss"], colour=1, scale=100.0),
        _trace("grad_norm", texts["chart.drift.norm"], colour=5, scale=100.0),
    ]
    lines = [{"name": texts["chart.drift.limit"], "value": 100.0 * limit, "style": "dash"}]
    return {**_figure("drift", texts["chart.drift"], "%", traces, lines=lines, floor=0), "source": "drift"}


def waits_figure(texts: Texts) -> Figure:
    """Where a step's time goes in a run whose model streams: parts on top of each other, together a step's seconds."""
    parts = (("compute", 1), ("link", 2), ("optimizer", 4), ("disk", 3))
    traces = [
        _trace(f"{part}_seconds", texts[f"chart.waits.{part}"], colour=colour, stacked=True) for part, colour in parts
    ]
    return {**_figure("waits", texts["chart.waits"], "s", traces, floor=0), "now": "step_seconds"}


def with_compute(rows: Mapping[str, Sequence[float | int | None]]) -> dict[str, Sequence[float | int | None]]:
    """The rows with a column `compute_seconds`: what is left of a step without its waits, None where none are known."""
    each = zip(*(rows[f"{part}_seconds"] for part in ("step", "link", "optimizer", "disk")), strict=True)
    return {**rows, "compute_seconds": [_left(whole, waits) for whole, *waits in each]}


def memory_figure(*, has_card: bool, predicted_bytes: int | None, budget_bytes: int | None, texts: Texts) -> Figure:
    """Allocated and reserved against the predicted peak and the budget; without a card tensors and resident set."""
    scale = 1.0 / GIB
    if has_card:
        traces = [
            _trace("allocated_bytes", texts["chart.memory.allocated"], colour=1, scale=scale, fill=True),
            _trace("reserved_bytes", texts["chart.memory.reserved"], colour=3, scale=scale),
        ]
    else:
        traces = [
            _trace("allocated_bytes", texts["chart.memory.tensors"], colour=1, scale=scale, fill=True),
            _trace("resident_bytes", texts["chart.memory.resident"], colour=3, scale=scale),
        ]
    lines = [
        {"name": texts[f"chart.memory.{name}"], "value": size * scale, "style": style}
        for name, size, style in (("predicted", predicted_bytes, "dot"), ("budget", budget_bytes, "dash"))
        if size
    ]
    return _figure("memory", texts["chart.memory"], "GiB", traces, lines=lines, floor=0)


def columns(rows: Mapping[str, Iterable[float | int | None]], wanted: Iterable[str]) -> dict[str, list[Any]]:
    """The wanted columns with what JSON cannot say (NaN, infinity) as None, and floats to seven figures."""
    return {name: [_plain(value) for value in rows[name]] for name in wanted if name in rows}


def _loss(texts: Texts) -> Figure:
    traces = [
        _trace("loss", texts["chart.loss.train"], colour=1, faint=True),
        _trace("loss", texts["chart.loss.smooth"], colour=1, smooth=True),
    ]
    return {**_figure("loss", texts["chart.loss"], "", traces), "evaluations": texts["chart.loss.eval"]}


def _one(key: str, title: str, unit: str, column: str, *, colour: int) -> Figure:
    return _figure(key, title, unit, [_trace(column, title, colour=colour)])


def _sensor(key: str, title: str, unit: str, column: str, *, scale: float = 1.0, top: float | None = None) -> Figure:
    traces = [_trace(column, title, colour=6, scale=scale, fill=True)]
    return {**_figure(key, title, unit, traces, floor=0, top=top), "source": "telemetry"}


def _figure(
    key: str,
    title: str,
    unit: str,
    traces: list[dict[str, Any]],
    *,
    lines: list[dict[str, Any]] | None = None,
    floor: float | None = None,
    top: float | None = None,
) -> Figure:
    return {
        "key": key,
        "title": title,
        "unit": unit,
        "source": "series",
        "traces": traces,
        "lines": lines or [],
        "floor": floor,
        "top": top,
    }


def _trace(
    column: str,
    name: str,
    *,
    colour: int,
    scale: float = 1.0,
    fill: bool = False,
    faint: bool = False,
    smooth: bool = False,
    stacked: bool = False,
) -> dict[str, Any]:
    return {
        "column": column,
        "name": name,
        "colour": colour,
        "scale": scale,
        "fill": fill,
        "faint": faint,
        "smooth": smooth,
        "stacked": stacked,
    }


def _left(whole: float | int | None, waits: Iterable[float | int | None]) -> float | None:
    known = [wait for wait in waits if wait is not None]
    # A bucket's seconds are the mean of all its steps, its waits that of those that streamed: it may be less than they.
    return None if whole is None or not known else max(0.0, whole - sum(known))


def _plain(value: float | int | None) -> float | int | None:
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.10g}") if abs(value) < float("inf") else None
