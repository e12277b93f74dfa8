"""Predicted against measured memory of real steps on the CPU: our engine, a small Llama, each method and option.

    python bench/memory_against_cpu.py [--json]

Measured: live tensor bytes before the step plus the highest rise of torch's CPU allocator inside it, of the second
step (the optimizer's states exist then). Prints predicted / measured for each case.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.models.architecture import Architecture, from_config
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Plan, Workload

MODEL = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 352,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}


@dataclass(frozen=True)
class Case:
    """One program to measure: a plan, and how many micro-batches make a step."""

    name: str
    config: dict[str, Any]
    plan: Plan


def cases() -> list[Case]:
    """Methods x recompute x loss, then accumulation, length, an untied head and grouped heads."""
    base = Plan(
        method="pretrain",
        device="cpu",
        budget_bytes=0,
        compute="fp32",
        weight_format="fp32",
        max_length=256,
        micro_batch=2,
        accumulation=1,
        recompute=0,
        loss="chunked",
        loss_chunk_tokens=128,
    )
    adapted = {"lora_rank": 8, "lora_targets": ("all-linear",)}
    methods = {"pretrain": {}, "lora": {"method": "lora", **adapted}}
    found = []
    for (method, values), recompute, loss in product(methods.items(), (0, 2, 4), ("full", "chunked", "fused")):
        plan = replace(base, **values, recompute=recompute, loss=loss, loss_chunk_tokens=0 if loss == "full" else 128)
        found.append(Case(f"{method} recompute {recompute} {loss}", MODEL, plan))
    attention_only = {"method": "lora", "lora_rank": 8, "lora_targets": ("q_proj", "v_proj")}
    untied = {**MODEL, "tie_word_embeddings": False}
    found += [
        Case("pretrain accumulation 2", MODEL, replace(base, accumulation=2)),
        Case("pretrain accumulation 2 recompute", MODEL, replace(base, accumulation=2, recompute=4)),
        Case("pretrain untied", untied, base),
        Case("pretrain untied accumulation 2", untied, replace(base, accumulation=2)),
        Case("pretrain all heads", {**MODEL, "num_key_value_heads": 8}, base),
        Case("pretrain short", MODEL, replace(base, max_length=64)),
        Case("pretrain short recompute", MODEL, replace(base, max_length=64, recompute=4)),
        Case("lora q and v", MODEL, replace(base, **attention_only)),
        Case("lora dropout", MODEL, replace(base, method="lora", **adapted, lora_dropout=0.1)),
        Case("lora accumulation 2", MODEL, replace(base, method="lora", **adapted, accumulation=2)),
        Case("qwen3 with head norms", {**MODEL, "model_type": "qwen3", "head_dim": 32}, base),
        Case("pretrain packed", MODEL, replace(base, packing=True)),
        Case("pretrain packed recompute", MODEL, replace(base, packing=True, recompute=4)),
        Case("pretrain compress", MODEL, replace(base, compress=4)),
        Case("lora compress and recompute", MODEL, replace(base, method="lora", **adapted, recompute=1, compress=2)),
        Case("gpt2", GPT2, base),
        Case("gpt2 recompute", GPT2, replace(base, recompute=4)),
    ]
    return found


GPT2 = {
    "model_type": "gpt2",
    "n_embd": 128,
    "n_layer": 4,
    "n_head": 8,
    "n_positions": 1024,
    "vocab_size": 4096,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attn_pdrop": 0.0,
}


def predicted(case: Case) -> tuple[int, str]:
    """(peak allocated bytes, phase) by the closed form."""
    workload = Workload(
        sequences=100, mean_tokens=case.plan.max_length, longest_tokens=case.plan.max_length, exact=True
    )
    estimate = estimate_memory(architecture_of(case), case.plan, workload)
    # These steps do not evaluate.
    peak = max((phase for phase in estimate.phases if phase.name != "evaluation"), key=lambda phase: phase.total_bytes)
    return peak.total_bytes, peak.name


def architecture_of(case: Case) -> Architecture:
    return from_config(case.config, case.name)


def measured(case: Case) -> int:
    """Peak allocated bytes of the second real step."""
    import torch
    import transformers

    from vramfit.config import ScheduleChoice
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.peak import PeakMeter
    from vramfit.engine.resident import ResidentExecutor

    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**case.config)
    model = transformers.AutoModelForCausalLM.from_config(config)
    if case.plan.lora_rank:
        model = _with_adapters(model, case.plan)
    optimizer = build_optimizer(model, ScheduleChoice(), case.plan)
    executor = ResidentExecutor(model, plan=case.plan, optimizer=optimizer)
    batches = [_batch(case.plan, config.vocab_size) for _ in range(case.plan.accumulation)]
    executor.step(batches, learning_rate=1e-4)
    gc.collect()  # what the case before left behind would be freed inside the measurement
    executor._peak = PeakMeter(model, optimizer, torch.device("cpu"))
    executor.step(batches, learning_rate=1e-4)
    return executor.memory()[0]


def _with_adapters(model: Any, plan: Plan) -> Any:
    import peft

    targets = "all-linear" if plan.lora_targets == ("all-linear",) else list(plan.lora_targets)
    options = peft.LoraConfig(
        r=plan.lora_rank, lora_alpha=16, lora_dropout=plan.lora_dropout, target_modules=targets, task_type="CAUSAL_LM"
    )
    return peft.get_peft_model(model, options)


@dataclass(frozen=True)
class _Batch:
    input_ids: Any
    labels: Any
    attention_mask: Any = None
    position_ids: Any = None
    weights: Any = None


def _batch(plan: Plan, vocab: int) -> _Batch:
    import torch

    ids = torch.randint(0, vocab, (plan.micro_batch, plan.max_length))
    if not plan.packing:
        return _Batch(ids, ids.clone())
    half = torch.arange(plan.max_length // 2)
    return _Batch(ids, ids.clone(), position_ids=torch.cat([half, half]).repeat(plan.micro_batch, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    rows = []
    for case in cases():
        if options.only not in case.name:
            continue
        there = measured(case)
        ours, phase = predicted(case)
        rows.append({"case": case.name, "measured": there, "predicted": ours, "ratio": ours / there, "phase": phase})
        if not options.json:
            mib = 2**20
            print(
                f"{case.name:<40}{there / mib:8.1f} MiB {ours / mib:8.1f} MiB {ours / there:7.3f}  {phase}", flush=True
            )
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
