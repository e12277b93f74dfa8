"""How long checkpoints hold training up, beside the copy alone: python bench/saving.py [--width 512] [--json]

Trains a Llama of that width (eight blocks) in full on the CPU, first with checkpoints written aside, then with steps
that wait for them. The copy alone is that of a checkpoint's own tensors into RAM of their own, as often as there were
checkpoints. Figures are medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
from transformers import LlamaConfig, PreTrainedTokenizerFast

from jobs import processes
from jobs.recorder import StoreRecorder
from jobs.store import Store
from vramfit.config import RunConfig
from vramfit.planning.plan import Forecast
from vramfit.starter.shape import architecture
from vramfit.starter.tokenizer import tokenizer_folder
from vramfit.training import checkpoint, loop
from vramfit.training.metrics import PhaseProgress, StepMetrics
from vramfit.training.saver import Saver

EVERY = 4
"""Steps from one checkpoint to the next."""


class Listener:
    """A recorder that keeps the steps, and how long it took to store them before each checkpoint; the job store's own
    does all else."""

    def __init__(self, store: StoreRecorder) -> None:
        self._store = store
        self.metrics: list[StepMetrics] = []
        self.flushes: list[float] = []

    def phase(self, progress: PhaseProgress) -> None:
        began = time.monotonic()
        self._store.phase(progress)
        if progress.name == "saving":
            self.flushes.append(time.monotonic() - began)

    def steps(self, metrics: Sequence[StepMetrics]) -> None:
        self.metrics += metrics
        self._store.steps(metrics)

    def forecast(self, forecast: Forecast) -> None:
        self._store.forecast(forecast)
        print(
            f"checkpoints: {'aside' if forecast.memory.saves_aside else 'training waits'} by the plan", file=sys.stderr
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


def make_run(folder: Path, cache: Path, *, width: int, steps: int) -> RunConfig:
    """A model folder without weights, and rows for it."""
    PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(cache)).save_pretrained(folder / "model")
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=architecture().vocab_size,
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=8,
        num_attention_heads=8,
        bos_token_id=None,
        eos_token_id=0,
    ).save_pretrained(folder / "model")
    rows = folder / "rows.jsonl"
    line = "The fox number {} found berries by the river and told the others where they grow. "
    rows.write_text("\n".join(json.dumps({"text": line.format(n) * 8}) for n in range(4 * steps)), encoding="utf-8")
    return RunConfig.parse(
        {
            "method": "pretrain",
            "device": "cpu",
            "model": {"source": str(folder / "model")},
            "data": {"paths": [str(rows)], "max_length": 128, "eval_share": 0.0},
            "schedule": {"max_steps": steps, "sequences_per_step": 4},
            "output": {
                "prompts": [],
                "sample_tokens": 0,
                "evaluate_every": 0,
                "checkpoint_every": EVERY,
                "keep_checkpoints": 1,
            },
        }
    )


def one(config: RunConfig, folder: Path, cache: Path, *, aside: bool) -> Listener:
    """What one run reported to a job store of its own."""
    usual = loop.Saver
    if not aside:
        loop.Saver = lambda **_: Saver(copies=False)  # type: ignore[assignment,misc]
    try:
        with Store(folder) as store:
            job = store.begin_foreground(config, owner=processes.own_identity())
            with contextlib.redirect_stdout(sys.stderr), store.recorder(job.id, job.attempt) as recorder:
                heard = Listener(recorder)
                loop.train(config, folder=folder, cache=cache, recorder=heard)  # type: ignore[arg-type]
    finally:
        loop.Saver = usual  # type: ignore[misc]
    return heard


def copies(root: Path, times: int) -> tuple[int, list[float]]:
    """(bytes of a checkpoint's tensors, seconds of each copy of them into RAM of its own)."""
    found = checkpoint.newest(root)
    assert found is not None
    held = {name: found.checkpoint.tensors[name].clone() for name in found.checkpoint.tensors}
    took = []
    for _ in range(times):
        began = time.monotonic()
        copied = {name: torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor) for name, tensor in held.items()}
        took.append(time.monotonic() - began)
        del copied
    return sum(tensor.nbytes for tensor in held.values()), took


def figures(heard: Listener) -> dict[str, list[float]]:
    """Seconds: of steps that no checkpoint comes before, of those right behind one, what each checkpoint held up, and
    how much of that it took to store the rows before it.

    A step's own seconds end before its checkpoint begins; `save_seconds` of the next one is what that took.
    """
    metrics = heard.metrics
    behind = {step.step for step in metrics if step.save_seconds}
    return {
        "usual": [step.step_seconds for step in metrics[2:] if step.step not in behind],
        "behind": [step.step_seconds for step in metrics if step.step in behind],
        "held": [step.save_seconds for step in metrics if step.save_seconds],
        "rows": heard.flushes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--width", type=int, default=512, help="a multiple of 16")
    parser.add_argument("--saves", type=int, default=4, help="checkpoints of each run")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, cache = Path(scratch), Path(scratch) / "cache"
        config = make_run(folder, cache, width=options.width, steps=EVERY * options.saves + 2)
        found: dict[str, Any] = {"load": os.getloadavg()[0], "threads": torch.get_num_threads()}
        for name, aside in (("aside", True), ("waits", False)):
            found[name] = figures(one(config, folder / name, cache, aside=aside))
        found["bytes"], found["copy"] = copies(folder / "aside" / loop.CHECKPOINTS, options.saves)
        found["load_after"] = os.getloadavg()[0]
    if options.json:
        print(json.dumps(found, indent=1))
        return
    print(f"{found['bytes'] / 2**20:.0f} MiB a checkpoint; load {found['load']:.1f} to {found['load_after']:.1f}")
    print(f"{'a copy alone':<44} {spread(found['copy'])}")
    for name in ("aside", "waits"):
        for what, words in WORDS.items():
            print(f"{name + ': ' + words:<44} {spread(found[name][what])}")
    over = statistics.median(found["aside"]["held"]) - statistics.median(found["copy"])
    print(f"{'aside: held up beyond the copy':<44} {over:.3f} s, rows included")


WORDS = {
    "held": "held up by a checkpoint",
    "rows": "of that, rows stored before it",
    "usual": "a step",
    "behind": "the step behind it",
}


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.3f} s ({min(seconds):.3f} to {max(seconds):.3f}, n={len(seconds)})"


if __name__ == "__main__":
    main()
