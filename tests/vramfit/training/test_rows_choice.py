"""The trial of micro-batches: nothing changes by it, the fastest is used, and it is remembered."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.conftest import build, make_plan
from tests.vramfit.engine.pseudo_card import PseudoCard
from vramfit.config import ScheduleChoice
from vramfit.data.batches import split
from vramfit.data.conversations import Example
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.randomness import random_state
from vramfit.engine.resident import ResidentExecutor
from vramfit.training import rows_choice
from vramfit.training.memory_care import Note
from vramfit.training.rows_choice import Room, candidates, fastest_rows, rehearse


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

    return list(fastest_rows(object(), object(), most=8, of=8, room=None, folder=folder, kind=kind, fewer=never))  # type: ignore[arg-type]


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
        fastest_rows(
            executor,
            lambda most: split(rows, most, 0),
            most=9,
            of=9,
            room=None,
            folder=tmp_path,
            kind="a",
            fewer=fewer,
        )
    )
    assert [each for each in answers if isinstance(each, int)] == [chosen]
    assert limits == ([(limit, "when 9 sequences at a time were tried")] if limit else [])
    assert (tmp_path / rows_choice.FILE).exists() == (not limit)
    assert all(parameter.grad is None for parameter in executor.model.parameters())


STATES = 2**16


def tried_on(
    monkeypatch: pytest.MonkeyPatch, folder: Path, *, room_bytes: int, card_bytes: int, of: int = 8, most: int = 2
) -> tuple[list[Any], list[int], PseudoCard]:
    """What a trial of two rows yields on a card where more at once are always faster, which numbers were timed, and the
    card: `room_bytes` is what the run believes to have, `card_bytes` what is there."""
    executor, rows, timed = an_executor(), some_rows(*[24] * of), []
    real = rows_choice._seconds

    def faster_together(executor: Any, batches: Any) -> float:
        real(executor, batches)
        timed.append(len(batches[0].input_ids))
        return 1.0 / len(batches[0].input_ids)

    monkeypatch.setattr(rows_choice, "_seconds", faster_together)
    monkeypatch.setattr(rows_choice, "ROUNDS", 1)
    room = Room(bytes=room_bytes, to_come_bytes=STATES, longest_tokens=24)
    with PseudoCard(executor.model, budget_bytes=card_bytes) as card:
        answers = list(
            fastest_rows(
                executor,
                lambda rows_at_once: split(rows, rows_at_once, 0),
                most=most,
                of=of,
                room=room,
                folder=folder,
                kind="a card",
                fewer=lambda rows, where: Note(kind="out-of-memory", message=f"{rows} {where}"),
            )
        )
    return answers, sorted(set(timed)), card


def test_twice_the_rows_are_tried_where_the_measured_peak_leaves_room_and_remembered(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Never beyond the budget: with what is still to come, on a card that ends what goes over it."""
    answers, timed, lavish = tried_on(monkeypatch, tmp_path / "lavish", room_bytes=2**40, card_bytes=0)
    assert answers[0] == 4 and timed == [1, 2, 4]
    budget = lavish.peak_bytes * 2 + STATES  # reckoned: activations and gradients of two rows, twice
    answers, timed, card = tried_on(monkeypatch, tmp_path, room_bytes=budget, card_bytes=budget - STATES)
    assert answers[0] == 4 and timed == [1, 2, 4]
    assert card.raised == 0 and card.peak_bytes + STATES <= budget
    again, timed, card = tried_on(monkeypatch, tmp_path, room_bytes=budget, card_bytes=budget)
    assert again[0] == 4 and timed == [] and card.allocations == 0
    less, timed, _ = tried_on(monkeypatch, tmp_path, room_bytes=STATES, card_bytes=0)  # another program has the rest
    assert less[0] == 2 and timed == [1, 2]


@pytest.mark.parametrize(
    ("room_bytes", "of", "most", "rows"),
    [
        (2**18, 8, 2, [1, 2]),  # the model and two rows, but not twice their activations
        (2**40, 2, 2, [1, 2]),  # the step has no more
        (2**40, 3, 2, [1, 2, 4]),  # one pass instead of two
        (2**40, 8, 1, [1, 2]),
        (2**18, 8, 1, []),
    ],
)
def test_twice_the_rows_are_left_alone_where_they_have_no_room_or_help_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, room_bytes: int, of: int, most: int, rows: list[int]
) -> None:
    answers, timed, card = tried_on(monkeypatch, tmp_path, room_bytes=room_bytes, card_bytes=0, of=of, most=most)
    assert timed == [min(each, of) for each in rows]
    assert [each for each in answers if isinstance(each, int)] == ([max(rows)] if rows else [])
    assert card.raised == 0


def test_a_reckoning_that_was_wrong_limits_nothing_that_was_planned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    _, _, two = tried_on(monkeypatch, tmp_path / "two", room_bytes=0, card_bytes=0)
    answers, timed, card = tried_on(monkeypatch, tmp_path, room_bytes=2**40, card_bytes=two.peak_bytes + 4096)
    assert card.raised == 1 and timed == [1, 2]
    assert answers[0] == 2 and len(answers) == 2 and answers[1].kind == "rows"
    kept = json.loads((tmp_path / rows_choice.FILE).read_text(encoding="utf-8"))
    assert kept["a card | 2 rows"]["twice_needs_bytes"] == rows_choice.NO_ROOM


@pytest.mark.parametrize("kept", [3, [1], {"8": 1.0}, {"8": "x", "4": 1.0, "2": 1.0}])
def test_what_cannot_be_read_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kept: Any) -> None:
    monkeypatch.setattr(rows_choice, "rehearse", lambda *_: {8: 1.0, 4: 0.5, 2: 1.0})
    (tmp_path / rows_choice.FILE).write_text(json.dumps({"a card | 8 rows": kept}), encoding="utf-8")
    assert found(tmp_path, "a card")[0] == 4
