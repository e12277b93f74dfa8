"""Until when a trainer that was asked to end has time. Pure: no process, and no clock of its own."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final

STEPS: Final = 5
"""So many steps, as long as they take, are allowed until the stop is heard, which is at the end of one."""

WRITING: Final = ("saving", "exporting")
WRITING_TIMES: Final = 10
"""As much more is allowed while nothing moves that can be seen from outside: what was written is hashed and synced."""

MOVING: Final = (*WRITING, "evaluating")
"""Phases that show how far they are."""

MOST_TURNS: Final = 8
"""More often a trainer that has heard the stop does not go from one phase into the next."""


@dataclass(kw_only=True)
class Deadline:
    """`allowed` seconds from the stop, and anew from each sign that the trainer is on its way to its end: that it goes
    over into another phase, and that a checkpoint, the result or an evaluation gets further.

    A trainer that only goes round and round is deaf: its turns are counted. `since` is a time of the caller's clock.
    """

    since: float
    allowed: float
    phase: str = ""
    shown: Hashable = None
    turns: int = 0

    def hear(self, now: float, *, phase: str, shown: Hashable) -> None:
        """How the trainer looks `now`; `shown` changes when its phase gets further."""
        turned = phase != self.phase
        if self.turns <= MOST_TURNS and (turned or (phase in MOVING and shown != self.shown)):
            self.since = now
        self.turns += turned
        self.phase, self.shown = phase, shown

    def over(self, now: float) -> bool:
        """Whether it is to be ended."""
        return now - self.since >= self.allowed * (WRITING_TIMES if self.phase in WRITING else 1)


def allowed_s(stop: float, step_seconds: float | None) -> float:
    """Seconds from Stop until the trainer must have shown something: `stop`, and more where its steps are long."""
    return max(stop, STEPS * (step_seconds or 0.0))
