"""How many rows at once are fastest on a card: a short trial of the planned micro-batch against its halves.

The planner takes what its estimate says is fastest of all that fit; a real card may be quicker with less at a time
(caches, kernels that suit one shape). A step's gradient does not depend on the cut, and less needs less memory, so only
smaller ones are tried, and what is found is remembered. What has no room is left out, and limits the run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
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

Cut = Callable[[int], Sequence[Batch]]
"""The rows of one real step in micro-batches of at most so many."""


def candidates(most: int) -> list[int]:
    """The planned rows, half of them, a quarter: each at least 1, none twice."""
    return list(dict.fromkeys(max(1, most >> halving) for halving in range(HALVINGS + 1)))


def fastest_rows(
    executor: ResidentExecutor, cut: Cut, *, most: int, folder: Path, kind: str, fewer: Fewer
) -> Iterator[Note | int]:
    """Try them on one step's rows, or remember; yields the number to use, and what there is to tell.

    No weight and no random state changes. `kind` names runs for which one trial stands. Where memory runs out there
    are `fewer` sequences; what a single one has no room for, the first step says with its numbers.
    """
    asked, kind = most, f"{kind} | {most} rows"
    known = remembered(folder / FILE, kind)
    seconds = _seconds_of(known, most)
    if seconds is None:
        seconds = rehearse(executor, cut, candidates(most))
        while not seconds and most > 1:
            most = max(1, most >> (HALVINGS + 1))
            seconds = rehearse(executor, cut, candidates(most))
        fitted = max(seconds, default=1)
        if fitted < asked:
            yield fewer(fitted, f"when {asked} sequences at a time were tried")
        if not seconds:
            yield 1
            return
        most = fitted
        if fitted == asked:
            remember(folder / FILE, kind, {str(rows): took for rows, took in seconds.items()})
    best = min(seconds, key=lambda rows: seconds[rows])
    chosen = best if seconds[most] >= WORTH_IT * seconds[best] else most
    yield chosen
    listed = ", ".join(f"{rows}: {1e3 * took:.0f} ms" for rows, took in seconds.items())
    yield Note(kind="rows", message=f"{chosen} sequences at a time, as tried on this card (a step's passes, {listed}).")


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


def _seconds_of(known: Any, most: int) -> dict[int, float] | None:
    try:
        seconds = {int(rows): float(took) for rows, took in known.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        return None
    return seconds if list(seconds) == candidates(most) else None
