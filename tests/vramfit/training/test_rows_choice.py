"""The trial of micro-batches: nothing changes by it, the fastest is used, and it is remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.data.batches import split
from vramfit.data.conversations import Example
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.randomness import random_state
from vramfit.engine.resident import ResidentExecutor
from vramfit.models.load import build_starter
from vramfit.planning.plan import Plan
from vramfit.training import rows_choice
from vramfit.training.rows_choice import candidates, fastest_rows, rehearse


def test_candidates_are_halves() -> None:
    assert candidates(8) == [8, 4, 2]
    assert candidates(3) == [3, 1]
    assert candidates(1) == [1]


def test_a_rehearsal_changes_nothing() -> None:
    plan = Plan(
        method="pretrain",
        device="cpu",
        budget_bytes=2**30,
        compute="fp32",
        weight_format="fp32",
        max_length=16,
        micro_batch=4,
        accumulation=1,
        recompute=0,
        loss="chunked",
    )
    torch.manual_seed(1)
    model = build_starter()
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    rows = [
        Example(torch.arange(3, 3 + length).int().numpy(), torch.ones(length).bool().numpy(), row)
        for row, length in enumerate((9, 5, 12, 7))
    ]
    before = [parameter.detach().clone() for parameter in executor.model.parameters()]
    random = random_state(executor.device)
    cuts: list[int] = []

    def cut(most: int) -> Any:
        cuts.append(most)
        return split(rows, most, 0)

    seconds = rehearse(executor, cut, [4, 2, 1])
    assert list(seconds) == [4, 2, 1] and all(took > 0 for took in seconds.values())
    assert cuts == [4, 2, 1] * (rows_choice.ROUNDS + 1)
    assert all(torch.equal(*pair) for pair in zip(before, executor.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in executor.model.parameters())
    assert all(torch.equal(state, random[name]) for name, state in random_state(executor.device).items())


@pytest.mark.parametrize(
    ("seconds", "chosen"),
    [({8: 1.0, 4: 0.8, 2: 0.9}, 4), ({8: 1.0, 4: 0.99, 2: 1.2}, 8), ({8: 1.0, 4: 1.1, 2: 0.5}, 2)],
)
def test_the_fastest_is_used_where_it_is_worth_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: dict[int, float], chosen: int
) -> None:
    asked = []
    monkeypatch.setattr(rows_choice, "rehearse", lambda *arguments: asked.append(arguments) or seconds)
    for _ in range(2):
        rows, note = fastest_rows(object(), object(), most=8, folder=tmp_path, kind="a card")  # type: ignore[arg-type]
        assert rows == chosen
        assert note.message.startswith(f"{chosen} sequences at a time")  # type: ignore[union-attr]
    assert len(asked) == 1  # the second time it was remembered
    list(fastest_rows(object(), object(), most=8, folder=tmp_path, kind="another"))  # type: ignore[arg-type]
    assert len(asked) == 2


@pytest.mark.parametrize("kept", [3, [1], {"8": 1.0}, {"8": "x", "4": 1.0, "2": 1.0}])
def test_what_cannot_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: Any) -> None:
    monkeypatch.setattr(rows_choice, "rehearse", lambda *_: {8: 1.0, 4: 0.5, 2: 1.0})
    (tmp_path / rows_choice.FILE).write_text(json.dumps({"a card | 8 rows": kept}), encoding="utf-8")
    assert next(iter(fastest_rows(object(), object(), most=8, folder=tmp_path, kind="a card"))) == 4  # type: ignore[arg-type]
