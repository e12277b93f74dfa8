"""The streaming bench: a model inside a limit in which it does not load, and what its figures count as met."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest
from memory_limit import Ended
from streaming import GIB, Order, Shape, answer_of, ended, inside_figure, write_model

SMALL = Shape(hidden=1024, inner=2816, layers=9, heads=8, key_heads=8, words=1024)
"""0.12 B: 0.46 GiB in fp32, beside 0.35 GiB for Python, torch and transformers."""


@pytest.mark.timeout(900)  # two processes that import torch and transformers, on machines with other work
@pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux' own")
def test_a_model_trains_inside_a_limit_in_which_it_does_not_load(tmp_path: Path) -> None:
    folder = str(write_model(SMALL, tmp_path / "model"))
    order = Order(folder=folder, limit_gib=0.75, tokens=16, micro_batches=1, steps=1, threads=1)
    streamed, resident = ended(order), ended(replace(order, resident=True))
    assert streamed.held and isinstance(answer_of(streamed), dict), streamed.last_words
    assert streamed.own_bytes <= streamed.limit_bytes == int(0.75 * GIB)
    assert resident.lacked_memory and not resident.held, resident.last_words


@pytest.mark.parametrize(
    ("code", "own_gib", "met"),
    [(0, 1.9, True), (0, 2.1, False), (1, 0.5, False)],
    ids=["inside", "at its end, above the limit", "failed"],
)
def test_a_limit_is_met_by_the_memory_seen_and_the_end(code: int, own_gib: float, met: bool) -> None:
    side = Ended(
        code=code,
        out='{"seconds": [1.0], "written": [0]}',
        told="",
        own_bytes=int(own_gib * GIB),
        resident_bytes=int(own_gib * GIB),
        limit_bytes=2 * GIB,
        ended_by_limit=False,
    )
    figure = inside_figure("3B lora", side, SMALL.params)
    assert figure.met is met and figure.value == pytest.approx(own_gib) and figure.goal == 2.0
