"""The check on a card goes its ways without one, too: it is seldom run, and must not break in between."""

from __future__ import annotations

import importlib
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
