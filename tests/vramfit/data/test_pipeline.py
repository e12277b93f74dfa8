"""Two steps at once: the order is kept, failures come at their piece, and nothing runs ahead without end."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from vramfit.data.pipeline import pipelined


def test_results_come_in_order() -> None:
    assert list(pipelined(range(50), lambda n: n + 1, lambda n: n * 2)) == [2 * (n + 1) for n in range(50)]
    assert list(pipelined([], str, str)) == []


def test_both_steps_work_at_the_same_time() -> None:
    """Each side waits for the other: without two threads nobody would come."""
    meeting = threading.Barrier(2, timeout=20)

    def first(number: int) -> int:
        if number:
            meeting.wait()
        return number

    def second(number: int) -> int:
        if number < 5:
            meeting.wait()
        return number

    assert list(pipelined(range(6), first, second)) == list(range(6))


def test_no_more_than_four_pieces_are_made_ahead() -> None:
    made = 0

    def pieces() -> Iterator[int]:
        nonlocal made
        for number in range(100):
            made += 1
            yield number

    for given, _ in enumerate(pipelined(pieces(), lambda n: n, lambda n: n)):
        assert made <= given + 4


@pytest.mark.parametrize("broken", ["first", "second", "pieces"])
def test_a_failure_comes_at_its_piece_and_ends_the_threads(broken: str) -> None:
    def step(name: str) -> object:
        def work(number: int) -> int:
            if name == broken and number == 7:
                raise ValueError(name)
            return number

        return work

    def pieces() -> Iterator[int]:
        for number in range(20):
            if broken == "pieces" and number == 7:
                raise ValueError(broken)
            yield number

    seen: list[int] = []
    with pytest.raises(ValueError, match=broken):
        seen.extend(pipelined(pieces(), step("first"), step("second")))  # type: ignore[arg-type]
    # The pieces' own failure is met as it is made, before the last results are given back.
    assert seen == list(range(len(seen)))
    assert len(seen) == (4 if broken == "pieces" else 7)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline")]


def test_leaving_early_ends_the_threads() -> None:
    for number in pipelined(range(1000), lambda n: n, lambda n: n):
        if number == 3:
            break
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("pipeline")]
