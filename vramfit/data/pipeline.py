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

    Each step has a thread of its own, while the caller's makes pieces and uses results: the steps should be ones that
    wait for another process or work outside of Python. At most three pieces are made and not yet given back.
    """
    firsts, seconds = ThreadPoolExecutor(1, "pipeline 1"), ThreadPoolExecutor(1, "pipeline 2")
    waiting: deque[Future[Done]] = deque()
    try:
        for piece in pieces:
            half = firsts.submit(first, piece)
            waiting.append(seconds.submit(_after, half, second))
            if len(waiting) > 2:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        firsts.shutdown(cancel_futures=True)
        seconds.shutdown(cancel_futures=True)


def _after(half: Future[Half], second: Callable[[Half], Done]) -> Done:
    return second(half.result())
