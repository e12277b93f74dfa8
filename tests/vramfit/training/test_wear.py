"""A run that would wear a drive says so once, before it begins, with what would help."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramfit.config import RunConfig
from vramfit.planning.reasons import DRIVE_RATED_BYTES
from vramfit.training.loop import train
from vramfit.training.wear import share_of_drive, wear_warning

Keep = Callable[[], Any]


def test_a_drives_life_is_one() -> None:
    assert share_of_drive(DRIVE_RATED_BYTES) == 1.0


def test_up_to_a_twentieth_of_a_drives_life_nothing_is_said() -> None:
    assert wear_warning(0, steps=10**9) is None
    assert wear_warning(DRIVE_RATED_BYTES // 20_000, steps=1000) is None
    assert wear_warning(DRIVE_RATED_BYTES // 20_000 + 1, steps=1000) is not None


def test_the_warning_has_the_numbers_and_the_remedy() -> None:
    assert wear_warning(16 * 2**30, steps=10_000) == (
        "The run will write 172 TB to disk, 16.0 GiB in each of 10,000 steps: that is 7.2 % of the 2,400 TB that a "
        "4 TB consumer drive is rated for. Fewer steps, more RAM, or an adapter method (LoRA, QLoRA), which only "
        "reads, would spare the drive."
    )


def _run(model: Path, rows: Path, method: str, *, steps: int, budget_gib: float) -> RunConfig:
    return RunConfig.parse(
        {
            "method": method,
            "device": "cpu",
            "model": {"source": str(model)},
            "data": {"paths": [str(rows)], "max_length": 64, "eval_share": 0.1},
            "schedule": {"max_steps": steps, "sequences_per_step": 4},
            "memory": {"micro_batch": 2, "budget_gib": budget_gib},
            "output": {"prompts": ["The fox"], "sample_tokens": 4},
        }
    )


def test_a_long_run_on_disk_warns_before_it_trains_and_one_that_only_reads_does_not(
    smollm2_folder: Path, rows_file: Path, kept: Keep, tmp_path: Path
) -> None:
    steps, places = 10**8, {"cache": tmp_path / "cache", "should_stop": lambda: True}
    writes, reads = kept(), kept()
    full = _run(smollm2_folder, rows_file, "full", steps=steps, budget_gib=1.5)
    train(full, recorder=writes, folder=tmp_path / "full", **places)
    lora = _run(smollm2_folder, rows_file, "lora", steps=steps, budget_gib=0.9)
    train(lora, recorder=reads, folder=tmp_path / "lora", **places)

    written = writes.forecasts[0].memory.written_per_step_bytes
    assert reads.forecasts[0].plan.weights_tier == "disk"
    assert reads.forecasts[0].memory.written_per_step_bytes == 0
    assert share_of_drive(written * steps) > 0.05
    told = [(event.level, event.kind, event.message) for event in writes.events if event.kind == "disk"]
    assert told == [("warning", "disk", wear_warning(written, steps=steps))]
    assert [event for event in reads.events if event.kind == "disk"] == []
