"""The check on a card goes its ways without one, too: it is seldom run, and must not break in between."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

GPU = Path(__file__).parents[2] / "bench" / "gpu"


def load(name: str) -> ModuleType:
    if str(GPU) not in sys.path:
        sys.path.insert(0, str(GPU))
    return importlib.import_module(name)


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
@pytest.mark.parametrize("part", ["equality", "in_parts"])
def test_streamed_steps_are_compared_with_resident_ones(part: str, tmp_path: Path) -> None:
    found = getattr(load("streaming_part"), part)(torch.device("cpu"), "fp32", tmp_path)

    assert found
    assert all(each["ok"] for each in found), found


def test_every_part_is_there() -> None:
    parts = load("parts")
    wanted = [part.name for part in load("run").PARTS]

    assert [name for name in wanted if not callable(getattr(parts, name, None))] == []


@pytest.mark.skipif(sys.platform == "win32", reason="a shell script")
@pytest.mark.parametrize("own", ["", "backend:cudaMallocAsync"])
def test_the_allocator_is_set_as_in_a_run(own: str, tmp_path: Path) -> None:
    """By the same function; what a person has set is left alone. Here another program stands in for Python."""
    python = tmp_path / "python"
    python.write_text(
        '#!/bin/sh\ncase "$2" in *prepare_allocator*) echo grows:1,unrounded:2 ;; esac\n'
        '[ "$1" = -c ] || echo "$1 $PYTORCH_ALLOC_CONF $PYTORCH_CUDA_ALLOC_CONF"\n'
    )
    python.chmod(0o755)
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTORCH_")}
    chosen = {"PYTORCH_CUDA_ALLOC_CONF": own} if own else {}

    said = subprocess.run(
        ["bash", str(GPU / "run.sh")],
        env={**plain, **chosen, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=True,
    )
    settings = own or "grows:1,unrounded:2"
    assert said.stdout.split() == ["bench/gpu/run.py", settings, settings]
