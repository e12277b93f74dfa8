"""Predicted against measured seconds of real steps on this CPU, before and after calibration.

    python bench/speed_against_cpu.py [--data-dir FOLDER] [--json]

Each case is a step of our engine: the starter's shape, an 18.7 M Llama and LoRA of SmolLM2-135M. Measured is the
quickest of several steps, so that what else the machine does counts least. "before" uses assumed rates, "after" those
that `python -m vramfit calibrate` has kept in the data folder (left out when there are none). On a busy machine run it,
and calibrate, with OMP_NUM_THREADS=1.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.hardware.devices import Device, probe
from vramfit.models.architecture import Architecture, from_config
from vramfit.places import default_data_folder
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.speed import estimate_speed
from vramfit.starter.shape import MODEL_CONFIG

LLAMA = {
    "model_type": "llama",
    "hidden_size": 384,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "intermediate_size": 1024,
    "vocab_size": 6000,
    "max_position_embeddings": 256,
}
SMOL = {
    "model_type": "llama",
    "hidden_size": 576,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "intermediate_size": 1536,
    "vocab_size": 49152,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}
PLAN = Plan(
    method="pretrain",
    device="cpu",
    budget_bytes=0,
    compute="fp32",
    weight_format="fp32",
    max_length=128,
    micro_batch=4,
    accumulation=1,
    recompute=0,
    loss="chunked",
    loss_chunk_tokens=1024,
)
LORA = {"method": "lora", "lora_rank": 16, "lora_targets": ("all-linear",), "micro_batch": 1, "max_length": 256}


@dataclass(frozen=True)
class Case:
    """One kind of step, and how many of it are measured."""

    name: str
    config: dict[str, Any]
    plan: Plan
    steps: int = 5


CASES = (
    Case("starter, 1 x 128", MODEL_CONFIG, dataclasses.replace(PLAN, micro_batch=1), 30),
    Case("starter, 4 x 128", MODEL_CONFIG, PLAN, 30),
    Case("starter, 4 of 1 x 128", MODEL_CONFIG, dataclasses.replace(PLAN, micro_batch=1, accumulation=4), 20),
    Case("18.7 M Llama, 4 x 256", LLAMA, dataclasses.replace(PLAN, max_length=256)),
    Case("18.7 M Llama, 4 x 256 recomputed", LLAMA, dataclasses.replace(PLAN, max_length=256, recompute=8)),
    Case("18.7 M Llama, 1 x 32", LLAMA, dataclasses.replace(PLAN, micro_batch=1, max_length=32), 10),
    Case("LoRA of SmolLM2-135M, 1 x 256", SMOL, dataclasses.replace(PLAN, **LORA), 4),
    Case("LoRA of SmolLM2-135M, 1 x 64", SMOL, dataclasses.replace(PLAN, **{**LORA, "max_length": 64}), 4),
)


def predicted(case: Case, device: Device) -> tuple[float, str]:
    """(seconds of a step, what bounds it)."""
    length = case.plan.max_length
    workload = Workload(sequences=100, mean_tokens=length, longest_tokens=length, exact=True)
    found = estimate_speed(architecture_of(case), case.plan, device, workload)
    return found.step_seconds, found.bound_by


def architecture_of(case: Case) -> Architecture:
    return from_config(case.config, case.name)


def measured(case: Case) -> float:
    """Seconds of the quickest real step."""
    import torch
    import transformers
    from memory_against_cpu import _batch, _with_adapters

    from vramfit.config import ScheduleChoice
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.resident import ResidentExecutor

    torch.manual_seed(0)
    values = {key: value for key, value in case.config.items() if key != "architectures"}
    config = transformers.AutoConfig.for_model(**values)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if case.plan.lora_rank:
        model = _with_adapters(model, case.plan)
    executor = ResidentExecutor(model, plan=case.plan, optimizer=build_optimizer(model, ScheduleChoice(), case.plan))
    batches = [_batch(case.plan, config.vocab_size) for _ in range(case.plan.accumulation)]
    # With one thread the process's own time, which others on the machine cannot lengthen.
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    took = []
    for _ in range(case.steps + 1):
        began = clock()
        executor.step(batches, learning_rate=1e-4)
        took.append(clock() - began)
    return min(took[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-dir", type=Path, default=default_data_folder())
    parser.add_argument("--only", default="")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    here = probe(options.data_dir).device("cpu")
    with tempfile.TemporaryDirectory() as nothing:  # where no calibration is kept
        plain = probe(Path(nothing)).device("cpu")
    rows = []
    for case in CASES:
        if options.only not in case.name:
            continue
        there = measured(case)
        row = {"case": case.name, "measured_s": there, "before": predicted(case, plain)[0] / there}
        if here.rates == "measured":
            row["after"] = predicted(case, here)[0] / there
        rows.append(row)
        if not options.json:
            print(" ".join(f"{key}={value:.3f}" if key != "case" else f"{value:<34}" for key, value in row.items()))
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    from vramfit.engine.threads import let_threads_sleep

    let_threads_sleep()
    main()
