"""The best evaluation is of weights that are kept: not of those a refused step has left, which are not saved."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.config import RunConfig
from vramfit.training import checkpoint, loop

Keep = Callable[[], Any]


def test_an_evaluation_after_a_refused_step_is_not_the_best(
    rows_file: Path, kept: Keep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usual, heard = loop.open_executor, kept()
    losses = {2: 3.0, 4: 2.9, 6: 3.5}

    def opened(*arguments: Any, **options: Any) -> Any:
        executor = usual(*arguments, **options)
        step, done = executor.step, 0

        def fourth_is_refused(batches: Any, rate: float) -> Any:
            nonlocal done
            done += 1
            if done == 4:  # weights that are no numbers make the loss none
                batches = [
                    dataclasses.replace(each, weights=torch.full(each.labels.shape, float("nan"))) for each in batches
                ]
            return step(batches, rate)

        monkeypatch.setattr(executor, "step", fourth_is_refused)
        monkeypatch.setattr(executor, "evaluate", lambda batches: (losses[done], 5))
        return executor

    monkeypatch.setattr(loop, "open_executor", opened)
    config = RunConfig.parse(
        {
            "data": {"paths": [str(rows_file)], "max_length": 48, "eval_share": 0.2},
            "memory": {"micro_batch": 4, "precision": "fp32"},
            "schedule": {"max_steps": 6, "sequences_per_step": 4},
            "output": {
                "prompts": [],
                "sample_tokens": 0,
                "evaluate_every": 2,
                "checkpoint_every": 2,
                "keep_checkpoints": 1,
                "keep_best": True,
            },
            "device": "cpu",
        }
    )

    loop.train(config, folder=tmp_path / "run", cache=tmp_path / "cache", recorder=heard)

    assert next(step for step in heard.metrics if step.step == 4).skipped
    assert checkpoint.steps(tmp_path / "run" / "checkpoints") == [2, 6]
    assert [event.message for event in heard.events if event.kind == "best"] == [
        "Step 2 is exported: its test was the best, 3.0000; the last gave 3.5000."
    ]
