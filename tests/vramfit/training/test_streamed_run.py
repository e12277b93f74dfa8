"""A run whose budget is too small for its model streams it, and learns what a resident run learns."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.training.loop import train

pytestmark = pytest.mark.long

Keep = Callable[[], Any]


def a_run(folder: Path, rows: Path, **changes: Any) -> RunConfig:
    values: dict[str, Any] = {
        "method": "lora",
        "device": "cpu",
        "model": {"source": str(folder)},
        "data": {"paths": [str(rows)], "max_length": 64, "eval_share": 0.1},
        "adapter": {"rank": 4},
        "schedule": {"max_steps": 3, "sequences_per_step": 4, "learning_rate": 2e-3},
        "memory": {"micro_batch": 2},
        "output": {"prompts": ["The fox"], "sample_tokens": 4},
    }
    for section, settings in changes.items():
        values[section] = {**values.get(section, {}), **settings} if isinstance(settings, dict) else settings
    return RunConfig.parse(values)


def test_a_budget_that_is_too_small_streams_and_gives_the_same_losses(
    smollm2_folder: Path, rows_file: Path, kept: Keep, tmp_path: Path
) -> None:
    there, here, resumed = kept(), kept(), kept()
    train(a_run(smollm2_folder, rows_file), folder=tmp_path / "there", cache=tmp_path / "cache", recorder=there)
    tight = a_run(smollm2_folder, rows_file, memory={"budget_gib": 0.9})
    run = {"folder": tmp_path / "here", "cache": tmp_path / "cache"}
    begun = train(tight, recorder=here, should_stop=lambda: len(here.metrics) == 2, **run)
    train(tight, recorder=resumed, resume=True, **run)

    assert there.forecasts[0].plan.weights_tier == "device"
    assert here.forecasts[0].plan.weights_tier == "disk"
    assert begun.stopped
    kernels = [[event.message for event in run.events if event.kind == "attention"] for run in (there, here)]
    assert kernels[0] == kernels[1] and "takes flash attention here" in kernels[0][0]
    assert here.losses + resumed.losses == there.losses
    assert here.evaluations[0].loss == there.evaluations[0].loss
    assert resumed.evaluations[-1].loss == there.evaluations[-1].loss
    assert here.samples[0].text == there.samples[0].text
    assert max(step.allocated_bytes for step in here.metrics) < 0.5 * max(s.allocated_bytes for s in there.metrics)
    assert (tmp_path / "here" / "export" / "adapter_model.safetensors").is_file()
    # What bounds it is told: it waits for the disk, writes nothing there, and waits for no longer than the step takes.
    assert all(step.disk_seconds > 0 and step.written_bytes == 0 for step in here.metrics)
    assert all(
        step.link_seconds + step.optimizer_seconds + step.disk_seconds <= step.step_seconds for step in here.metrics
    )
    assert {step.disk_seconds for step in there.metrics} == {step.written_bytes for step in there.metrics} == {None}


def test_a_start_that_changes_the_base_keeps_a_run_from_streaming(
    smollm2_folder: Path, rows_file: Path, kept: Keep, tmp_path: Path
) -> None:
    """Told before step 1, with what it would need to stay on the device."""
    tight = a_run(smollm2_folder, rows_file, memory={"budget_gib": 0.9}, adapter={"start": "pissa"})
    heard = kept()

    with pytest.raises(WontFit, match=r"needs 1\.\d GiB at its peak .* and 921 MiB of CPU"):
        train(tight, folder=tmp_path / "run", cache=tmp_path / "cache", recorder=heard)
    assert heard.metrics == []


def test_a_full_run_whose_budget_is_too_small_trains_on_disk_to_the_same_model(
    deep_folder: Path, rows_file: Path, kept: Keep, tmp_path: Path
) -> None:
    """Through a checkpoint and an export that never hold the model in memory."""
    from safetensors.torch import load_file

    there, here, resumed = kept(), kept(), kept()
    short = {"method": "full", "schedule": {"max_steps": 2}, "output": {"prompts": [], "evaluate_every": 2}}
    train(
        a_run(deep_folder, rows_file, **short),
        folder=tmp_path / "there",
        cache=tmp_path / "cache",
        recorder=there,
    )
    memory = there.forecasts[0].memory
    tight = a_run(
        deep_folder, rows_file, memory={"budget_gib": (memory.device_bytes - memory.peak_bytes // 2) / 2**30}, **short
    )
    run = {"folder": tmp_path / "here", "cache": tmp_path / "cache"}
    begun = train(tight, recorder=here, should_stop=lambda: len(here.metrics) == 1, **run)
    train(tight, recorder=resumed, resume=True, **run)

    plan = here.forecasts[0].plan
    assert there.forecasts[0].plan.weights_tier == "device"
    assert (plan.weights_tier, plan.optimizer_tier) == ("disk", "disk")
    assert begun.stopped
    assert here.losses + resumed.losses == there.losses
    assert resumed.evaluations[-1].loss == there.evaluations[-1].loss
    assert max(step.allocated_bytes for step in here.metrics) < 0.5 * max(s.allocated_bytes for s in there.metrics)
    assert all(step.written_bytes > 0 and step.disk_seconds > 0 for step in here.metrics)
    assert [event for event in here.events if event.kind == "disk"] == []
    exported = [load_file(tmp_path / name / "export" / "model.safetensors") for name in ("there", "here")]
    assert exported[0].keys() == exported[1].keys()
    assert all(exported[0][name].equal(exported[1][name]) for name in exported[0])
