"""Whole runs that train the last blocks alone: killed and resumed, on the device and streamed, they are one run."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.errors import CheckpointError
from vramfit.training.loop import train

pytestmark = pytest.mark.long

Keep = Callable[[], Any]

KILLED = """
import os, signal, sys
from pathlib import Path
from tests.vramfit.training.conftest import Kept
from vramfit.config import RunConfig
from vramfit.training.loop import train

class Dies(Kept):
    def steps(self, metrics):
        super().steps(metrics)
        if metrics[-1].step == 3:
            os.kill(os.getpid(), signal.SIGKILL)

config, folder, cache = sys.argv[1:]
train(RunConfig.from_file(Path(config)), folder=Path(folder), cache=Path(cache), recorder=Dies())
"""


def a_run(folder: Path, rows: Path, **memory: Any) -> RunConfig:
    return RunConfig.parse(
        {
            "method": "full",
            "device": "cpu",
            "train_last_blocks": 2,
            "model": {"source": str(folder)},
            "data": {"paths": [str(rows)], "max_length": 48, "eval_share": 0.1},
            "schedule": {"max_steps": 4, "sequences_per_step": 4, "learning_rate": 2e-3},
            "memory": {"micro_batch": 2, **memory},
            "output": {"prompts": ["The fox"], "sample_tokens": 4, "checkpoint_every": 2, "evaluate_every": 2},
        }
    )


def test_killed_and_resumed_wherever_its_blocks_are_it_is_the_undisturbed_run(
    deep_folder: Path, rows_file: Path, cache: Path, kept: Keep, tmp_path: Path
) -> None:
    from safetensors.torch import load_file

    whole = kept()
    train(a_run(deep_folder, rows_file), folder=tmp_path / "whole", cache=cache, recorder=whole)
    there = whole.forecasts[0]
    assert there.plan.weights_tier == "device"
    assert any("last 2 of 12 blocks" in choice.value for choice in there.plan.reasons)

    # So little less that some blocks must visit.
    budgets = {"resident": there.memory.device_bytes, "streamed": there.memory.device_bytes - 2 * 2**20}
    exports = [load_file(tmp_path / "whole" / "export" / "model.safetensors")]
    for name, budget in budgets.items():
        config = a_run(deep_folder, rows_file, budget_gib=budget / 2**30)
        file, folder, resumed = tmp_path / f"{name}.yaml", tmp_path / name, kept()
        file.write_text(config.to_yaml(), encoding="utf-8")
        died = subprocess.run([sys.executable, "-c", KILLED, str(file), str(folder), str(cache)], capture_output=True)
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-2000:]
        train(config, folder=folder, cache=cache, recorder=resumed, resume=True)

        plan = resumed.forecasts[0].plan
        assert plan.weights_tier == ("device" if name == "resident" else "disk"), name
        assert resumed.losses == whole.losses[2:]
        assert [step.grad_norm for step in resumed.metrics] == [step.grad_norm for step in whole.metrics[2:]]
        assert resumed.evaluations[-1].loss == whole.evaluations[-1].loss
        exports.append(load_file(folder / "export" / "model.safetensors"))

    begun = load_file(deep_folder / "model.safetensors")
    for export in exports:
        assert export.keys() == begun.keys()
        assert [name for name in export if not export[name].equal(exports[0][name])] == []
    changed = {name for name in begun if not begun[name].equal(exports[0][name])}
    assert changed and all(name.startswith(("model.layers.10.", "model.layers.11.", "model.norm.")) for name in changed)


def test_a_checkpoint_has_what_trains_and_fits_no_other_base(
    deep_folder: Path, rows_file: Path, cache: Path, kept: Keep, tmp_path: Path
) -> None:
    """Frozen weights are not in it, so the base is told from another one of its shape."""
    import shutil

    import torch
    from safetensors.torch import load_file, save_file

    other = tmp_path / "base"
    shutil.copytree(deep_folder, other)
    config, heard = a_run(other, rows_file), kept()
    run = {"folder": tmp_path / "run", "cache": cache}
    train(config, recorder=heard, should_stop=lambda: len(heard.metrics) == 2, **run)
    saved = load_file(tmp_path / "run" / "checkpoints" / "step-00000002" / "tensors.safetensors")
    names = {name.removeprefix("model.") for name in saved if name.startswith("model.")}
    assert {name.split(".layers.")[1].split(".")[0] for name in names if ".layers." in name} == {"10", "11"}
    assert names - {name for name in names if ".layers." in name} == {"model.norm.weight"}

    weights = load_file(other / "model.safetensors")
    weights["model.embed_tokens.weight"] = torch.zeros_like(weights["model.embed_tokens.weight"])
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="base was"):
        train(config, recorder=kept(), resume=True, **run)
