"""The estimator against published measurements: python bench/estimator_accuracy.py ROWS.csv [--oom OOM.csv] [--json]

Each row of the reference columns becomes a model, a plan and the record of the program that ran (`reference_rows.py`).
The closed form predicts allocated; the allocator's simulation the reserved figure and whether a run completes on its
card; the speed model tokens/s. Errors are relative, weights are `dedup_weight`. Without --json a table is printed and
`docs/accuracy.md` written, with its scatter plot beside it.

Rows whose length is only a cap are judged from one side and reported apart: the estimate at the cap must not be below
what was measured. Rows of an unknown metric or of quality C are predicted, and judged nowhere.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from accuracy_page import write_page
from reference_rows import NoRows, Row, Run, Unusable, decimal, is_set, measured, read_rows, run_of, stand_in
from reference_speed import compare_speed, speed_summary

from vramfit.hardware import catalogue as cards
from vramfit.planning.cap import LEAST_OUTSIDE_BYTES, CapOfRun
from vramfit.planning.memory import estimate_memory
from vramfit.units import GIB

DOCS: Final = Path(__file__).parent.parent / "docs"
_METRICS: Final = ("allocated", "reserved", "nvidia-smi")
_VISIBLE: Final = 0.985
"""What of a card's memory as sold a program can see: 79.15 of 80, 39.39 of 40, 23.64 of 24 GiB."""


@dataclass(frozen=True, kw_only=True)
class Memory:
    """What is predicted for a row, in GiB: `figure` is that of the row's metric."""

    figure_gib: float
    allocated_gib: float
    phase: str


def predict_memory(row: Row) -> Memory:
    """Allocated from the closed form; reserved, where that was measured, from the allocator's simulation under the
    row's card, and with the context beside it where the driver was asked. Raises Unusable."""
    run = run_of(row)
    estimate = estimate_memory(run.architecture, run.plan, run.workload, program=run.program)
    figure = float(estimate.peak_bytes)
    if row["metric"] in ("reserved", "nvidia-smi"):
        cap = _cap(run)
        figure = float(cap.reserved_bytes((card_gib(row) or math.inf) * GIB))
        figure += cap.outside if row["metric"] == "nvidia-smi" else 0
    return Memory(figure_gib=figure / GIB, allocated_gib=estimate.peak_bytes / GIB, phase=estimate.peak.name)


def completes(row: Row, card_gib: float) -> bool:
    """Whether the row's run is predicted to complete on a card with `card_gib`. Raises Unusable."""
    return _cap(run_of(row)).completes(card_gib * GIB)


@lru_cache(maxsize=8)
def _cap(run: Run) -> CapOfRun:
    return CapOfRun(
        run.architecture,
        run.plan,
        run.workload,
        program=run.program,
        evaluates=False,
        outside=LEAST_OUTSIDE_BYTES,
    )


def card_gib(row: Row) -> float | None:
    """Memory of the row's card as a program sees it; None when its name does not tell, or what was measured is more.
    Raises Unusable."""
    found = _named_gib(row["gpu_model"])
    return found if found and found >= measured(row, "peak_gib") else None


def _named_gib(name: str) -> float | None:
    stated = re.search(r"\(([\d.]+) ?G[Bi]", name) or re.search(r"(\d+) ?GB?\b", name)
    if stated and decimal(stated[1]) > 0:
        return float(stated[1]) * (1.0 if "(" in name else _VISIBLE)
    card = cards.find(name)
    return card.memory_gib * _VISIBLE if card else None


def _failed_gib(row: Row) -> float:
    """Memory of the card that a run failed on. Raises Unusable."""
    if row["card_gib"]:
        return measured(row, "card_gib")
    found = _named_gib(row["gpu_model"])
    if found is None:
        raise Unusable("neither card_gib nor the card's name tells its memory")
    return found


# --- memory ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row's outcome, in GiB. `stand_in` is the record taken for a program that has none of its own."""

    id: str
    source: str
    program: str
    method: str
    recompute: str
    metric: str
    quality: str
    capped: bool
    weight: float
    measured_gib: float
    predicted_gib: float
    error: float
    phase: str
    stand_in: str = ""

    @property
    def judged(self) -> bool:
        """Whether it counts: good quality, exact lengths, a known metric."""
        return self.quality in ("A", "B") and not self.capped and self.metric in _METRICS


def compare(row: Row) -> Compared:
    """Predicted against measured. Raises Unusable."""
    found, peak = predict_memory(row), measured(row, "peak_gib")
    return Compared(
        id=row["id"],
        source=row["source_url"],
        program=row["program"],
        method=row["method"],
        recompute=row["grad_ckpt"],
        metric=row["metric"],
        quality=row["quality"],
        capped=is_set(row["seq_len_is_cap"]),
        weight=weight(row),
        measured_gib=peak,
        predicted_gib=found.figure_gib,
        error=found.figure_gib / peak - 1,
        phase=found.phase,
        stand_in=stand_in(row),
    )


def weight(row: Row) -> float:
    """How much a measurement counts that has copies; 1 where the column does not tell."""
    found = decimal(row["dedup_weight"])
    return found if found > 0 else 1.0


def quantile(pairs: Iterable[tuple[float, float]], share: float) -> float | None:
    """Weighted quantile of (value, weight)."""
    ordered = sorted(pairs)
    if not ordered:
        return None
    total, passed = sum(weight for _, weight in ordered), 0.0
    for value, weight in ordered:
        passed += weight
        if passed >= share * total - 1e-12:
            return value
    return ordered[-1][0]


def summary(rows: Iterable[Compared], *, balanced: bool = False) -> dict[str, Any]:
    """n, median and 90th percentile of absolute relative errors; `balanced`: every source weighs the same."""
    chosen = list(rows)
    per_source: dict[str, float] = {}
    for row in chosen:
        per_source[row.source] = per_source.get(row.source, 0.0) + row.weight
    pairs = [(abs(row.error), row.weight / (per_source[row.source] if balanced else 1.0)) for row in chosen]
    return {"n": len(chosen), "median": quantile(pairs, 0.5), "p90": quantile(pairs, 0.9)}


def by(rows: Iterable[Compared], field: str) -> dict[str, dict[str, Any]]:
    """A summary for every value of `field`."""
    chosen = list(rows)
    values = sorted({getattr(row, field) for row in chosen})
    return {value: summary(row for row in chosen if getattr(row, field) == value) for value in values}


# --- the report ------------------------------------------------------------------------------------------------------


def report(rows: list[Row], failed: list[Row]) -> tuple[dict[str, Any], list[Compared]]:
    """(what --json prints, the compared rows)."""
    compared, skipped, speeds = [], [], []
    for row in rows:
        try:
            compared.append(compare(row))
        except Unusable as reason:
            skipped.append({"id": row["id"], "reason": str(reason)})
            continue
        try:
            if row["tokens_per_s"] and row["quality"] in ("A", "B"):
                speeds.append(compare_speed(row))
        except Unusable:  # no such card in the catalogue, so no rate to predict with; or no number was measured
            continue
    judged = [row for row in compared if row.judged]
    of_a = speed_summary(row for row in speeds if row.quality == "A")
    found = {
        "allocated_A": summary(row for row in judged if row.quality == "A" and row.metric == "allocated"),
        "all_AB": summary(judged, balanced=True),
        "oom": failures(failed, skipped),
        "completed": alarms(rows),
        "speed": {key: value for key, value in speed_summary(speeds).items() if key != "pairs"}
        | {"A": {key: of_a[key] for key in ("n", "median")}},
        "by": {field: by(judged, field) for field in ("source", "method", "recompute", "metric", "program")},
        "rows": [
            {key: getattr(row, key) for key in ("id", "measured_gib", "predicted_gib", "error", "phase")}
            | ({"stand_in": row.stand_in} if row.stand_in else {})
            for row in compared
        ],
        "skipped": skipped,
    }
    return found, compared


def failures(rows: Iterable[Row], skipped: list[dict[str, str]]) -> dict[str, int]:
    """Of the runs that likely ran out of memory, how many are predicted not to fit."""
    n = caught = 0
    for row in rows:
        if not is_set(row["likely_oom"]):
            continue
        try:
            caught += not completes(row, _failed_gib(row))
            n += 1
        except Unusable as reason:
            skipped.append({"id": row["id"], "reason": str(reason)})
    return {"n": n, "caught": caught}


def alarms(rows: Iterable[Row]) -> dict[str, int]:
    """Of the runs that completed on a card of known size, how many are predicted not to."""
    n = false = 0
    for row in rows:
        if row["quality"] not in ("A", "B") or is_set(row["seq_len_is_cap"]):
            continue
        try:
            size = card_gib(row)
            if size is not None:
                false += not completes(row, size)
                n += 1
        except Unusable:  # it is among the skipped already
            continue
    return {"n": n, "false_alarms": false}


def read(path: Path | None) -> list[Row]:
    return [] if path is None else read_rows(path)


def print_rows(rows: Iterable[Compared]) -> None:
    for row in rows:
        print(
            f"{row.id} {row.quality}{' cap' if row.capped else '    '} {row.program:38.38} {row.method:6} "
            f"{row.metric:9} {row.measured_gib:7.2f} {row.predicted_gib:7.2f} {row.error:+7.1%} {row.phase}"
        )


def main() -> None:
    try:
        run()
    except NoRows as reason:
        print(f"estimator_accuracy: {reason}.", file=sys.stderr)
        sys.exit(2)


def run() -> None:
    """Raises NoRows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--oom", type=Path, help="rows of runs that did not complete")
    parser.add_argument("--only", default="", help="rows whose program contains this; writes no page")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = [row for row in read(options.rows) if options.only in row["program"]]
    found, compared = report(rows, [row for row in read(options.oom) if options.only in row["program"]])
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print_rows(compared)
    for key in ("allocated_A", "all_AB", "oom", "completed", "speed", "skipped"):
        print(key, found[key])
    if not options.only:
        write_page(DOCS, found, compared)


if __name__ == "__main__":
    main()
