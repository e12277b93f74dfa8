"""What a step waited for: the link, the optimizer, the disk; and what it wrote there."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch

from vramfit.engine.accelerators import backend_of


class Waits(NamedTuple):
    """Seconds in which nothing was computed, and bytes written to a tier on disk."""

    link_seconds: float = 0.0
    optimizer_seconds: float = 0.0
    disk_seconds: float = 0.0
    written_bytes: int = 0

    def since(self, before: Waits) -> Waits:
        return Waits(
            self.link_seconds - before.link_seconds,
            self.optimizer_seconds - before.optimizer_seconds,
            self.disk_seconds - before.disk_seconds,
            self.written_bytes - before.written_bytes,
        )


class Mark(Protocol):
    """A place in what a card has been given to do: whether it has come there, and milliseconds between two of them."""

    def query(self) -> bool: ...

    def elapsed_time(self, later: Any, /) -> float: ...


Clock = Callable[[], float]
"""Seconds since some moment."""


def marks_on(device: torch.device) -> Callable[[], Mark] | None:
    """What puts a mark behind all that `device` has been given so far; None where that is done when it was given."""
    if not backend_of(device).streams:
        return None
    return lambda: torch.accelerator.current_stream(device).record_event(torch.Event(device, enable_timing=True))


class Gaps:
    """When nothing was computed because of a wait: each gap goes to `found` as (its beginning, its end) by the clock.

    A processor stands still while it waits. A card does not, as long as it has been given more to do: its gap is from
    the mark before the wait, which it passes when that is done, to the one behind. Those are found by `read`, once the
    card has passed them; nobody waits for that.
    """

    def __init__(
        self,
        found: Callable[[float, float], None],
        *,
        mark: Callable[[], Mark] | None,
        clock: Clock = time.perf_counter,
    ) -> None:
        self._found, self._mark, self._clock = found, mark, clock
        self._open: deque[tuple[Mark, Mark, float]] = deque()

    @contextlib.contextmanager
    def around(self) -> Iterator[None]:
        """Inside, something is waited for, by the host or by what the card is given next."""
        began, before = self._clock(), None if self._mark is None else self._mark()
        try:
            yield
        finally:
            if self._mark is None or before is None:
                self._found(began, self._clock())
            else:
                self._open.append((before, self._mark(), self._clock()))

    def read(self) -> None:
        """Find the gaps of a card that are over."""
        while self._open and self._open[0][1].query():
            before, after, ended = self._open.popleft()
            self._found(ended - before.elapsed_time(after) / 1e3, ended)


class Spans:
    """When something was done, by the clock: how much of it lies in another time. Any thread may add and ask."""

    def __init__(self, clock: Clock = time.perf_counter, *, most: int = 4096) -> None:
        self._clock = clock
        self._spans: deque[tuple[float, float]] = deque(maxlen=most)  # of a step or two

    @contextlib.contextmanager
    def during(self) -> Iterator[None]:
        began = self._clock()
        try:
            yield
        finally:
            self._spans.append((began, self._clock()))

    def within(self, began: float, ended: float) -> float:
        """Seconds of it from `began` to `ended`. What is not over yet does not count."""
        overlaps = (min(ended, last) - max(began, first) for first, last in tuple(self._spans))
        return sum(each for each in overlaps if each > 0)
