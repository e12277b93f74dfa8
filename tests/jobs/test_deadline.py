"""Until when a trainer has time that was asked to end: by what it shows, and in bounded time."""

from __future__ import annotations

import pytest

from jobs.deadline import MOST_TURNS, WRITING_TIMES, Deadline, allowed_s


@pytest.mark.parametrize(("step_s", "allowed"), [(None, 120.0), (0.5, 120.0), (24.0, 120.0), (142.0, 710.0)])
def test_long_steps_have_the_time_of_five_of_them(step_s: float | None, allowed: float) -> None:
    assert allowed_s(120.0, step_s) == allowed


def test_a_step_shows_nothing_and_has_its_time_once() -> None:
    deadline = Deadline(since=0.0, allowed=120.0, phase="training", shown=7)
    for now in range(0, 120, 10):
        deadline.hear(float(now), phase="training", shown=now)  # it trains on, as one that is deaf does
        assert not deadline.over(float(now))
    assert deadline.over(120.0)


@pytest.mark.parametrize(
    ("phase", "times"), [("evaluating", 1), ("saving", WRITING_TIMES), ("exporting", WRITING_TIMES)]
)
def test_what_gets_further_has_its_time_anew(phase: str, times: int) -> None:
    deadline = Deadline(since=0.0, allowed=120.0, phase="training")
    for now in range(100, 10_000, 100):  # hours, a sign every 100 s
        deadline.hear(float(now), phase=phase, shown=now)
        assert not deadline.over(float(now + 119))
    deadline.hear(10_000.0, phase=phase, shown=9_900)
    assert not deadline.over(9_900 + 120.0 * times - 1) and deadline.over(9_900 + 120.0 * times)


def test_one_that_goes_round_and_round_is_ended_all_the_same() -> None:
    deadline = Deadline(since=0.0, allowed=120.0, phase="training")
    for turn in range(100):
        now = 100.0 * turn
        if deadline.over(now):
            break
        deadline.hear(now, phase=("saving", "training")[turn % 2], shown=turn)
    assert deadline.over(now) and turn <= MOST_TURNS + 3
