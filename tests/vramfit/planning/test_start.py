"""Decisions that stand alone: how often a checkpoint is written."""

from __future__ import annotations

from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.planning.start import checkpoints_written


@pytest.mark.parametrize(
    ("output", "steps", "expected"),
    [
        ({}, 100, 10),  # every tenth of the run
        ({}, 63, 11),  # every 6 steps, 10 of them, and the last
        ({}, 4, 4),
        ({"checkpoint_every": 30}, 100, 4),  # 30, 60, 90, 100
        ({"checkpoint_every": 1000}, 100, 1),
        ({"checkpoint_every": 30, "keep_every": 20}, 100, 7),  # 20, 30, 40, 60, 80, 90, 100
    ],
)
def test_checkpoints_are_counted_as_the_loop_writes_them(output: dict[str, Any], steps: int, expected: int) -> None:
    config = RunConfig.parse({"output": output})
    assert checkpoints_written(config, steps) == expected
    every = output.get("checkpoint_every") or max(1, steps // 10)
    due = {step for step in range(1, steps + 1) if step % every == 0 or step == steps}
    due |= {step for step in range(1, steps + 1) if output.get("keep_every") and step % output["keep_every"] == 0}
    assert len(due) == expected
