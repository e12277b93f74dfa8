"""The closed form against the traced engine step: python bench/trace_against_closed_form.py [--only NAME] [--json]

Every model of the catalogue that `transformers` builds, at three plans: full fine-tuning with recompute, LoRA that
keeps its activations, QLoRA in 16 bits with recompute. Goal: within 3 % each. Also prints the slowest trace. A model
with the shape of one before is not traced again. `--rows FILE` adds every comparison to a file as a line of JSON, and
what it holds already is not traced again either: its trace is compared with today's closed form.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.engine.trace import trace
from vramfit.errors import ModelError
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.models.config_json import config_values
from vramfit.models.families import EAGER_ONLY
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import MemoryEstimate, Plan, Workload
from vramfit.planning.start import chunk_tokens

LENGTH = 1024
GOAL = 0.03


@dataclass(frozen=True, kw_only=True)
class Compared:
    """One model and plan: bytes by the closed form and by the trace."""

    name: str
    family: str
    plan: str
    predicted: int
    traced: int
    phase: str
    seconds: float

    @property
    def error(self) -> float:
        return self.predicted / self.traced - 1

    def line(self) -> str:
        return (
            f"{self.name:<46}{self.family:<14}{self.plan:<7}{self.error:+8.2%}  {self.phase:<44}{self.seconds:5.1f} s"
        )


def plans(architecture: Architecture) -> dict[str, Plan]:
    """Three plans of one model."""
    plain = architecture.chunked_logits
    shared: dict[str, Any] = {
        "device": "cpu",
        "budget_bytes": 0,
        "max_length": min(LENGTH, architecture.max_position),
        "micro_batch": 2,
        "loss": "chunked" if plain else "full",
        "loss_chunk_tokens": chunk_tokens(architecture.vocab_size) if plain else 0,
        "attention": "eager" if architecture.family in EAGER_ONLY else "sdpa",
    }
    adapted = {"lora_rank": 16, "lora_targets": ("all-linear",)}
    everything = architecture.layers
    return {
        "full": Plan(
            method="full", compute="fp32", weight_format="fp32", accumulation=2, recompute=everything, **shared
        ),
        "lora": Plan(
            method="lora", compute="bf16", weight_format="bf16", accumulation=1, recompute=0, **shared, **adapted
        ),
        "qlora": Plan(
            method="qlora",
            compute="bf16",
            weight_format="nf4",
            accumulation=2,
            recompute=everything,
            **shared,
            **adapted,
        ),
    }


def compare(architecture: Architecture, name: str, plan: Plan) -> Compared:
    """Raises ModelError where transformers cannot build the model."""
    began = time.perf_counter()
    made = trace(config_values(architecture), plan, length=plan.max_length, name=architecture.name)
    estimate = closed_form(architecture, plan)
    return Compared(
        name=architecture.name,
        family=architecture.family,
        plan=name,
        predicted=estimate.peak_bytes,
        traced=made.peak_bytes,
        phase=f"{estimate.peak.name} / {max(made.phases, key=lambda phase: made.phases[phase])}",
        seconds=time.perf_counter() - began,
    )


def closed_form(architecture: Architecture, plan: Plan) -> MemoryEstimate:
    work = Workload(sequences=100, mean_tokens=plan.max_length, longest_tokens=plan.max_length, exact=True)
    return estimate_memory(architecture, plan, work)


def traced_before(path: Path | None) -> dict[tuple[str, str], Compared]:
    """The rows of a file, by model and plan."""
    if path is None or not path.exists():
        return {}
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(row["name"], row["plan"]): Compared(**{key: row[key] for key in row if key != "error"}) for row in rows}


def shape(architecture: Architecture) -> Architecture:
    """What a trace depends on: two models that differ in their names alone are one."""
    return dataclasses.replace(architecture, name="", published_params=None)


def chosen(only: str, *, one_per_family: bool) -> tuple[list[Architecture], int]:
    """(models to trace, how many others have the shape of one of them)."""
    models: dict[Architecture, Architecture] = {}
    families: set[str] = set()
    alike = 0
    for name in catalogue.known():
        model = catalogue.find(name)
        assert model is not None
        if only not in f"{name} {model.family}" or (one_per_family and model.family in families):
            continue
        families.add(model.family)
        alike += shape(model) in models
        models.setdefault(shape(model), model)
    return list(models.values()), alike


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="models whose name or family contains this")
    parser.add_argument("--one-per-family", action="store_true", help="the first model of each family")
    parser.add_argument("--rows", type=Path, help="file to which every comparison is added, a JSON object a line")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows: list[Compared] = []
    skipped: dict[str, str] = {}
    models, alike = chosen(options.only, one_per_family=options.one_per_family)
    before = traced_before(options.rows)
    for model in models:
        for name, plan in plans(model).items():
            if (model.name, name) in before:
                traced = before[model.name, name]
                rows.append(dataclasses.replace(traced, predicted=closed_form(model, plan).peak_bytes))
                continue
            try:
                row = compare(model, name, plan)
            except ModelError as error:
                skipped[model.name] = error.what
                break
            except Exception as error:
                skipped[f"{model.name} {name}"] = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
                continue
            rows.append(row)
            if not options.json:
                print(row.line(), flush=True)
            if options.rows:
                with options.rows.open("a", encoding="utf-8") as file:
                    file.write(json.dumps({**dataclasses.asdict(row), "error": row.error}) + "\n")
    figures = {
        "compared": len(rows),
        "within goal": sum(abs(row.error) <= GOAL for row in rows),
        "worst": max((abs(row.error) for row in rows), default=None),
        "slowest seconds": max((row.seconds for row in rows), default=None),
        "of the shape of another": alike,
        "skipped": skipped,
    }
    print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
