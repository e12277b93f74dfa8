"""Two steps of a long work that go on at the same time, each on another piece of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Piece = TypeVar("Piece")
Half = TypeVar("Half")
Done = TypeVar("Done")


def pipelined(
    pieces: Iterable[Piece], first: Callable[[Piece], Half], second: Callable[[Half], Done]
) -> Iterator[Done]:
    """`second(first(piece))` of every piece, in order. Raises what a step raises, at its piece.

    The first step has a thread, the second has two, and the caller's makes pieces and uses results: the steps should be
    ones that wait for another process or work outside of Python. Two pieces are in the second step so that one of them
    is outside of Python while the other is not. At most four pieces are made and not yet given back.
    """
    firsts, seconds = ThreadPoolExecutor(1, "pipeline 1"), ThreadPoolExecutor(2, "pipeline 2")
    waiting: deque[Future[Done]] = deque()
    try:
        for piece in pieces:
            half = firsts.submit(first, piece)
            waiting.append(seconds.submit(_after, half, second))
            if len(waiting) > 3:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        firsts.shutdown(cancel_futures=True)
        seconds.shutdown(cancel_futures=True)


def _after(half: Future[Half], second: Callable[[Half], Done]) -> Done:
    return second(half.result())
