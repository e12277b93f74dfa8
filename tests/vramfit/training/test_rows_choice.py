"""The trial of micro-batches: nothing changes by it, the fastest is used, and it is remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.conftest import build, make_plan
from vramfit.config import ScheduleChoice
from vramfit.data.batches import split
from vramfit.data.conversations import Example
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.randomness import random_state
from vramfit.engine.resident import ResidentExecutor
from vramfit.training import rows_choice
from vramfit.training.memory_care import Note
from vramfit.training.rows_choice import candidates, fastest_rows, rehearse


def test_candidates_are_halves() -> None:
    assert candidates(8) == [8, 4, 2]
    assert candidates(3) == [3, 1]
    assert candidates(1) == [1]


def an_executor() -> ResidentExecutor:
    model, plan = build("llama"), make_plan(micro_batch=4)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))


def some_rows(*lengths: int) -> list[Example]:
    return [
        Example(torch.arange(3, 3 + length).int().numpy(), torch.ones(length).bool().numpy(), row)
        for row, length in enumerate(lengths)
    ]


def test_a_rehearsal_changes_nothing() -> None:
    executor = an_executor()
    normal = torch.nn.BatchNorm1d(1, affine=False)
    executor.model.get_submodule("model.norm").register_forward_hook(
        lambda module, given, output: output + 0 * normal(output.mean(-1).view(-1, 1)).sum()
    )
    executor.model.add_module("normal", normal)
    rows = some_rows(9, 5, 12, 7)
    before = [parameter.detach().clone() for parameter in executor.model.parameters()]
    random, moving = random_state(executor.device), {name: each.clone() for name, each in normal.named_buffers()}
    cuts: list[int] = []

    def cut(most: int) -> Any:
        cuts.append(most)
        return split(rows, most, 0)

    seconds = rehearse(executor, cut, [4, 2, 1])
    assert list(seconds) == [4, 2, 1] and all(took > 0 for took in seconds.values())
    assert cuts == [4, 2, 1] * (rows_choice.ROUNDS + 1)
    assert all(torch.equal(*pair) for pair in zip(before, executor.model.parameters(), strict=True))
    assert all(parameter.grad is None for parameter in executor.model.parameters())
    assert all(torch.equal(each, moving[name]) for name, each in normal.named_buffers())
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
        rows, note = found(tmp_path, "a card")
        assert rows == chosen
        assert note.message.startswith(f"{chosen} sequences at a time")  # type: ignore[union-attr]
    assert len(asked) == 1  # the second time it was remembered
    found(tmp_path, "another")
    assert len(asked) == 2


def found(folder: Path, kind: str) -> list[Any]:
    def never(rows: int, where: str) -> Any:
        raise AssertionError("memory did not run out")

    return list(fastest_rows(object(), object(), most=8, folder=folder, kind=kind, fewer=never))  # type: ignore[arg-type]


@pytest.mark.parametrize(("bears", "chosen", "limit"), [(9, 9, 0), (8, 4, 4), (2, 2, 2), (1, 1, 1), (0, 1, 1)])
def test_what_has_no_room_is_left_out_and_is_the_limit_from_then_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, bears: int, chosen: int, limit: int
) -> None:
    executor, rows = an_executor(), some_rows(*[5] * 9)
    real = ResidentExecutor._sums

    def limited(self: Any, piece: Any, *arguments: Any, **options: Any) -> Any:
        if piece.rows > bears:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, piece, *arguments, **options)

    monkeypatch.setattr(ResidentExecutor, "_sums", limited)
    monkeypatch.setattr(rows_choice, "WORTH_IT", 1e9)  # what is possible decides here, not what is fast
    limits: list[tuple[int, str]] = []

    def fewer(count: int, where: str) -> Note:
        limits.append((count, where))
        return Note(kind="out-of-memory", message=where)

    answers = list(
        fastest_rows(executor, lambda most: split(rows, most, 0), most=9, folder=tmp_path, kind="a", fewer=fewer)
    )
    assert [each for each in answers if isinstance(each, int)] == [chosen]
    assert limits == ([(limit, "when 9 sequences at a time were tried")] if limit else [])
    assert (tmp_path / rows_choice.FILE).exists() == (not limit)
    assert all(parameter.grad is None for parameter in executor.model.parameters())


@pytest.mark.parametrize("kept", [3, [1], {"8": 1.0}, {"8": "x", "4": 1.0, "2": 1.0}])
def test_what_cannot_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: Any) -> None:
    monkeypatch.setattr(rows_choice, "rehearse", lambda *_: {8: 1.0, 4: 0.5, 2: 1.0})
    (tmp_path / rows_choice.FILE).write_text(json.dumps({"a card | 8 rows": kept}), encoding="utf-8")
    assert found(tmp_path, "a card")[0] == 4
