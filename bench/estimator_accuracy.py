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

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import MemoryEstimate, Plan, Workload
from vramfit.planning.program import PROGRAMS, Program
from vramfit.units import GIB

Row = Mapping[str, str]


class Unusable(Exception):
    """Why a row cannot be compared."""


def program_of(row: Row) -> Program:
    """The record of the program that ran a row."""
    name = row["program"]
    quantised = row["method"] == "qlora"
    if name.startswith("fms"):
        if "foak" not in name:
            return PROGRAMS["fms-quantised" if quantised else "fms"]
        return PROGRAMS["fms/foak-quantised" if quantised else "fms/foak"]
    return PROGRAMS["transformers"]


_WEIGHTS: Final = {"nf4": "nf4-plain", "nf4-dq": "nf4"}


def plan_of(row: Row, architecture: Architecture) -> Plan:
    """The row's settings as a plan."""
    adapter = row["method"] in ("lora", "qlora", "dora")
    targets, saved = _targets(row["lora_targets"])
    quantised = row["weight_dtype"] not in ("bf16", "fp16", "fp32")
    weights = _WEIGHTS.get(row["weight_dtype"], row["weight_dtype"])
    if row["program"].startswith("fms") and weights == "nf4-plain":
        weights = "nf4"  # fms-acceleration quantises doubly: its steady state is 0.516 bytes a parameter
    compute = row["compute_dtype"] if row["compute_dtype"] in ("bf16", "fp16", "fp32") else "bf16"
    offloaded = row["offload"] == "params"
    bits, tier = _optimizer(row["optimizer"], row["offload"])
    layers = architecture.layers
    return Plan(
        method="qlora" if quantised and adapter else ("lora" if adapter else "full"),
        device="cuda:0",
        budget_bytes=0,
        compute=compute,  # type: ignore[arg-type]
        weight_format=weights,  # type: ignore[arg-type]
        weights_tier="host" if offloaded else "device",
        trained_format=row["weight_dtype"] if row["weight_dtype"] in ("fp32", "bf16", "fp16") else "fp32",  # type: ignore[arg-type]
        optimizer_bits=bits,  # type: ignore[arg-type]
        optimizer_tier="host" if tier == "host" or offloaded else "device",
        max_length=int(row["seq_len"]),
        micro_batch=int(row["micro_batch"]),
        accumulation=1,
        recompute=layers if row["grad_ckpt"] not in ("none", "selective") else 0,
        input_tier="host" if row["offload"] == "activations" or row["grad_ckpt"] == "unsloth" else "device",
        loss=row["loss_impl"] if row["loss_impl"] in ("full", "chunked", "fused") else "full",  # type: ignore[arg-type]
        loss_chunk_tokens=128 if row["loss_impl"] == "chunked" else (1024 if row["loss_impl"] == "fused" else 0),
        attention=row["attention"] if row["attention"] in ("eager", "flash", "sdpa") else "sdpa",  # type: ignore[arg-type]
        lora_rank=int(row["lora_rank"] or 8) if adapter else 0,
        lora_targets=targets if adapter else (),
        lora_dropout=0.1 if adapter else 0.0,
        saved_modules=saved,  # type: ignore[arg-type]
        cards=int(row["gpus"] or 1),
        sharding=row["sharding"] if row["sharding"] in ("ddp", "fsdp", "zero1", "zero2", "zero3") else "none",  # type: ignore[arg-type]
        compiled=row["compile"] not in ("no", ""),
    )


def _targets(text: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """(adapted linears, modules trained whole)."""
    names = [name for name in text.split("+") if name]
    places = {"wte": "embedding", "embed_tokens": "embedding", "lm_head": "head"}
    saved = tuple(places[name[5:]] for name in names if name.startswith("save:"))
    adapted = tuple(name for name in names if not name.startswith("save:") and name != "lm_head")
    return (adapted if adapted and adapted != ("unknown",) else ("q_proj", "v_proj")), saved


def _optimizer(name: str, offload: str) -> tuple[int, str]:
    tier = "host" if name.startswith("paged") or offload == "optimizer" else "device"
    bits = {"bf16": 16, "fp32": 32, "8bit": 8, "4bit": 4}.get(name.rpartition("_")[2], 32)
    return bits, tier


def predicted(row: Row) -> tuple[MemoryEstimate, Plan, Architecture]:
    """The estimate of a row. Raises Unusable."""
    architecture = catalogue.find(row["model_id"])
    if architecture is None:
        raise Unusable(f"the catalogue has no {row['model_id']}")
    plan = plan_of(row, architecture)
    length = int(row["seq_len"])
    workload = Workload(sequences=1000, mean_tokens=length, longest_tokens=length, exact=True)
    return estimate_memory(architecture, plan, workload, program=program_of(row)), plan, architecture


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
