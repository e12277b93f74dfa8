"""The estimator against published measurements: python bench/estimator_accuracy.py ROWS.csv [--oom OOM.csv] [--json]

Each row of the reference columns becomes an Architecture, a Plan and the record of the program that ran; the closed
form predicts what was measured (allocated, or the allocator's reserved figure). Writes docs/accuracy.md with --write.
"""

from __future__ import annotations

import argparse
import csv
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))

from reference_rows import Row, Unusable, run_of

from vramfit.models.architecture import Architecture
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import MemoryEstimate, Plan
from vramfit.units import GIB

def predicted(row: Row) -> tuple[MemoryEstimate, Plan, Architecture]:
    """The estimate of a row. Raises Unusable."""
    run = run_of(row)
    estimate = estimate_memory(run.architecture, run.plan, run.workload, program=run.program)
    return estimate, run.plan, run.architecture


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One row's outcome, in GiB."""

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


def compare(row: Row) -> Compared:
    """Predicted against measured. Raises Unusable."""
    estimate, _, _ = predicted(row)
    measured = float(row["peak_gib"])
    there = (estimate.peak_bytes if row["metric"] == "allocated" else estimate.device_bytes) / GIB
    return Compared(
        id=row["id"],
        source=row["source_url"],
        program=row["program"],
        method=row["method"],
        recompute=row["grad_ckpt"],
        metric=row["metric"],
        quality=row["quality"],
        capped=row["seq_len_is_cap"] == "1",
        weight=float(row["dedup_weight"] or 1),
        measured_gib=measured,
        predicted_gib=there,
        error=there / measured - 1,
        phase=estimate.peak.name,
    )


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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--oom", type=Path)
    parser.add_argument("--only", default="", help="rows whose program contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    compared, skipped = [], []
    for row in csv.DictReader(options.rows.open(encoding="utf-8")):
        if options.only not in row["program"]:
            continue
        try:
            compared.append(compare(row))
        except Unusable as reason:
            skipped.append({"id": row["id"], "reason": str(reason)})
    for row in compared:
        print(
            f"{row.id} {row.quality} {row.program:36} {row.method:6} {row.metric:9} "
            f"{row.measured_gib:7.2f} {row.predicted_gib:7.2f} {row.error:+7.1%} {row.phase}"
        )
    print(summary(row for row in compared if row.quality == "A" and row.metric == "allocated"))
    print(skipped)


if __name__ == "__main__":
    main()
