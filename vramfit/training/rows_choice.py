"""How many rows at once are fastest on a card: a short trial of the planned micro-batch, its halves and its double.

The planner takes what its estimate says is fastest of all that fit; a real card may be quicker with less at a time
(caches, kernels that suit one shape), or have room for more than was estimated. A step's gradient does not depend on
the cut. Less needs less memory; twice as many are tried only where what the planned rows were measured to need leaves
room for them, below where a governor would act. What is found is remembered. What has no room is left out, and limits
the run where it had been planned.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vramfit.engine.accelerators import synchronize
from vramfit.engine.compiling import nothing_changed
from vramfit.engine.loss import Batch
from vramfit.engine.recovery import attempt
from vramfit.engine.resident import ResidentExecutor
from vramfit.training.compile_choice import Fewer
from vramfit.training.kept_trials import remember, remembered
from vramfit.training.memory_care import Note

FILE: Final = "rows_trials.json"
HALVINGS: Final = 2
ROUNDS: Final = 3
WORTH_IT: Final = 1.02
LEAST_RUN_S: Final = 600.0
NO_ROOM: Final = 2**62
"""Bytes that more rows need where they ran out of memory."""

Cut = Callable[[int], Sequence[Batch]]
"""The rows of one real step in micro-batches of at most so many."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """What more rows than planned may take: `bytes` for a step, of which `to_come_bytes` are not there in a rehearsal
    (the optimizer's states, what allocator and driver take). Rows to come have up to `longest_tokens`."""

    bytes: int
    to_come_bytes: int
    longest_tokens: int


def candidates(most: int) -> list[int]:
    """The planned rows, half of them, a quarter: each at least 1, none twice."""
    return list(dict.fromkeys(max(1, most >> halving) for halving in range(HALVINGS + 1)))


def fastest_rows(
    executor: ResidentExecutor,
    cut: Cut,
    *,
    most: int,
    of: int,
    room: Room | None,
    folder: Path,
    kind: str,
    fewer: Fewer,
) -> Iterator[Note | int]:
    """Try them on one step's rows, of which there are `of`, or remember; yields the number to use, and what there is to
    tell.

    No weight and no random state changes. `kind` names runs for which one trial stands. Where memory runs out there
    are `fewer` sequences; what a single one has no room for, the first step says with its numbers. `room` is what is
    there for more than `most`, None: no more are tried.
    """
    asked, kind = most, f"{kind} | {most} rows"
    known = remembered(folder / FILE, kind)
    twice = 2 * most if room is not None and math.ceil(of / (2 * most)) < math.ceil(of / most) else 0
    needs = _needs_of(known) or (twice_needs(executor, cut, most, room) if room is not None and twice else 0)
    if room is None or needs > room.bytes:
        twice = 0
    tried = [twice, *candidates(most)] if twice else candidates(most)
    if tried == [1]:
        return
    seconds = _seconds_of(known, tried)
    if seconds is None:
        seconds = rehearse(executor, cut, tried)
        while not seconds and most > 1:
            most = max(1, most >> (HALVINGS + 1))
            seconds = rehearse(executor, cut, candidates(most))
        fitted = max(seconds, default=1)
        if fitted < asked:
            yield fewer(fitted, f"when {asked} sequences at a time were tried")
        if not seconds:
            yield 1
            return
        if twice and fitted < twice:
            needs = NO_ROOM
        if fitted >= asked:
            found = {str(rows): took for rows, took in seconds.items()}
            remember(folder / FILE, kind, {**found, "twice_needs_bytes": needs})
    usual = asked if asked in seconds else max(seconds)
    best = min(seconds, key=lambda rows: seconds[rows])
    chosen = best if seconds[usual] >= WORTH_IT * seconds[best] else usual
    yield chosen
    listed = ", ".join(f"{rows}: {1e3 * took:.0f} ms" for rows, took in seconds.items())
    yield Note(kind="rows", message=f"{chosen} sequences at a time, as tried on this card (a step's passes, {listed}).")


def twice_needs(executor: ResidentExecutor, cut: Cut, rows: int, room: Room) -> int:
    """Bytes that a step with twice `rows` at once needs with the longest rows to come; NO_ROOM where it runs out.

    Reckoned from what `rows` need, and where that has room measured, so that a trial does not exceed it: above what
    lies there all is taken to grow with tokens, gradients too.
    """
    reckoned = _needs(executor, cut, rows, room, twice=2 * rows)
    return reckoned if reckoned > room.bytes else _needs(executor, cut, 2 * rows, room, twice=2 * rows)


def _needs(executor: ResidentExecutor, cut: Cut, rows: int, room: Room, *, twice: int) -> int:
    batches = cut(rows)
    with nothing_changed(executor):
        reading, _ = attempt(lambda: executor.rehearsed(batches), executor.device)
    if reading is None:
        return NO_ROOM
    tokens = max(piece.input_ids.numel() for batch in batches for piece in executor.pieces(batch))
    growth = max(1.0, twice * room.longest_tokens / tokens)
    return int(reading.at_rest + growth * (reading.allocated - reading.at_rest)) + room.to_come_bytes


def rehearse(executor: ResidentExecutor, cut: Cut, rows: Sequence[int]) -> dict[int, float]:
    """Seconds of one step's forward and backward passes for each number of rows at once, the median of some turns.

    Numbers for which memory runs out are left out.
    """
    took: dict[int, list[float]] = {each: [] for each in rows}
    with nothing_changed(executor):
        for number in range(ROUNDS + 1):  # the first in each shape also warms caches
            for each in list(took):
                batches = cut(each)
                seconds, _ = attempt(lambda batches=batches: _seconds(executor, batches), executor.device)  # type: ignore[misc]
                executor.optimizer.zero_grad(set_to_none=True)
                if seconds is None:
                    del took[each]
                elif number:
                    took[each].append(seconds)
    return {each: statistics.median(seconds) for each, seconds in took.items()}


def _seconds(executor: ResidentExecutor, batches: Sequence[Batch]) -> float:
    synchronize(executor.device)
    began = time.perf_counter()
    executor.rehearse(batches)
    synchronize(executor.device)
    return time.perf_counter() - began


def _needs_of(known: Any) -> int:
    """What twice the rows were found to need, bytes; 0 where nobody looked."""
    try:
        return int(known["twice_needs_bytes"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return 0


def _seconds_of(known: Any, tried: Sequence[int]) -> dict[int, float] | None:
    """What was measured of these numbers; None where it was of others, or cannot be read."""
    try:
        seconds = {int(rows): float(took) for rows, took in known.items() if rows != "twice_needs_bytes"}
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return seconds if list(seconds) == list(tried) else None
