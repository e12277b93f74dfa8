"""Whether a run is well: what its numbers and the machine's say, each thing told once, and when the run should end.

Robust statistics throughout: medians and median absolute deviations (MAD; 1.4826 MAD is a normal deviation), which one
odd step does not move. Nothing here imports torch; a step's look costs some ten microseconds.
"""

from __future__ import annotations

import contextlib
import math
import platform
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING, Any, Final, Literal

from vramfit.errors import UserError
from vramfit.sentences import say
from vramfit.training.metrics import StepMetrics, Telemetry
from vramfit.units import MIB, format_bytes

if TYPE_CHECKING:
    from vramfit.data.conversations import Example

WINDOW: Final = 64
"""Steps that the next one is compared with."""
FEWEST: Final = 16
"""Steps before anything is said."""
SPIKE_DEVIATIONS: Final = 8.0
SPIKE_SHARE: Final = 0.1
"""A spike is this far above the median too: a loss that hardly varies makes no alarm of its last digits."""
PLATEAU_BLOCKS: Final = 10
"""A run is looked at in so many blocks of steps, of 50 to 1,000 each."""
PLATEAU_SHARE: Final = 0.001
"""Falling by less from one block's median to the next is standing still."""
SLOW_SHARE: Final = 0.5
NAMED_ROWS: Final = 8
UNHEALTHY: Final = frozenset({"loss-spike", "not-finite", "drift", "slow", "heat", "spill"})
"""Kinds of events by which a run is not well, where their level is a warning: what somebody who is away wants to hear
of."""
_NORMAL: Final = 1.4826


@dataclass(frozen=True, kw_only=True)
class Finding:
    """What is told: as an event, without its time."""

    level: Literal["info", "warning", "error"]
    kind: str
    message: str


@dataclass
class Alarm:
    """Goes off once when something was so `needs` times in a row, and is set again after `calm` times otherwise."""

    needs: int = 1
    calm: int = 1
    on: bool = False
    count: int = 0

    def sees(self, *, wrong: bool, right: bool) -> bool:
        """Whether it goes off now. Between wrong and right nothing changes: that is the hysteresis."""
        counted = right if self.on else wrong
        self.count = self.count + 1 if counted else 0
        if self.count < (self.calm if self.on else self.needs):
            return False
        self.on, self.count = not self.on, 0
        return self.on

    def state(self) -> dict[str, Any]:
        return {"on": self.on, "count": self.count}

    def load_state(self, values: dict[str, Any]) -> None:
        """The inverse of `state`; as it was made where there is none."""
        self.on, self.count = bool(values.get("on", False)), int(values.get("count", 0))


class LossSpikes:
    """A loss SPIKE_DEVIATIONS above the median of the WINDOW steps before, told at that step."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._alarm = Alarm(calm=4)

    def step(self, now: StepMetrics) -> Iterator[Finding]:
        if not math.isfinite(now.loss):
            return
        if len(self._losses) >= FEWEST:
            usual, spread = middle_and_spread(self._losses)
            room = max(SPIKE_DEVIATIONS * spread, SPIKE_SHARE * abs(usual))
            if self._alarm.sees(wrong=now.loss > usual + room, right=now.loss < usual + room / 2):
                yield Finding(
                    level="warning",
                    kind="loss-spike",
                    message=say(
                        "health.spike",
                        loss=f"{now.loss:.4g}",
                        steps=len(self._losses),
                        usual=f"{usual:.4g}",
                        spread=f"{spread:.2g}",
                    ),
                )
        self._losses.append(now.loss)

    def state(self) -> dict[str, Any]:
        return {"losses": list(self._losses), "alarm": self._alarm.state()}

    def load_state(self, values: dict[str, Any]) -> None:
        self._losses.extend(values["losses"])
        self._alarm.load_state(values["alarm"])


class Plateau:
    """Two blocks of steps in a row in which the loss did not fall by more than its noise and PLATEAU_SHARE.

    The noise of a difference of two medians of n losses is 1.2533 sqrt(2 / n) deviations. Steps at less than a tenth of
    `peak_rate`, the highest learning rate of the run, are left out: there it begins, or is meant to come to rest.
    """

    def __init__(self, total_steps: int, *, peak_rate: float) -> None:
        self._size = min(1000, max(50, total_steps // PLATEAU_BLOCKS))
        self._block: list[float] = []
        self._before: float | None = None
        self._alarm = Alarm(needs=2)
        self._peak_rate = peak_rate

    def step(self, now: StepMetrics) -> Iterator[Finding]:
        if not math.isfinite(now.loss) or now.learning_rate < 0.1 * self._peak_rate:
            return
        self._block.append(now.loss)
        if len(self._block) < self._size:
            return
        middle, spread = middle_and_spread(self._block)
        before, self._before = self._before, middle
        self._block = []
        if before is None:
            return
        least = max(1.2533 * math.sqrt(2 / self._size) * spread, PLATEAU_SHARE * abs(before))
        fell = before - middle
        if self._alarm.sees(wrong=fell < least, right=fell >= least):
            yield Finding(
                level="info",
                kind="plateau",
                message=f"The loss has not fallen for {2 * self._size} steps by more than it varies: its median over "
                f"the last {self._size} is {middle:.4g}, {before:.4g} over those before.",
            )

    def state(self) -> dict[str, Any]:
        return {"block": self._block, "before": self._before, "alarm": self._alarm.state()}

    def load_state(self, values: dict[str, Any]) -> None:
        self._block, self._before = list(values["block"]), values["before"]
        self._alarm.load_state(values["alarm"])


class SpeedCollapse:
    """Tokens/s below SLOW_SHARE of the usual ones for five steps in a row; slow steps do not become the usual ones.

    What is usual is so on one machine, with so many sequences at once: `where` names both, and elsewhere a resumed run
    finds it out anew.
    """

    def __init__(self, where: str = "") -> None:
        self._where = where
        self._usual: deque[float] = deque(maxlen=WINDOW)
        self._alarm = Alarm(needs=5, calm=5)

    def step(self, now: StepMetrics) -> Iterator[Finding]:
        if len(self._usual) < FEWEST:
            self._usual.append(now.tokens_per_s)
            return
        usual = median(self._usual)
        slow = now.tokens_per_s < SLOW_SHARE * usual
        if self._alarm.sees(wrong=slow, right=now.tokens_per_s > (1 + SLOW_SHARE) / 2 * usual):
            yield Finding(
                level="warning",
                kind="slow",
                message=say("health.slow", speed=f"{now.tokens_per_s:,.0f}", usual=f"{usual:,.0f}"),
            )
        if not slow and not self._alarm.on:
            self._usual.append(now.tokens_per_s)

    def state(self) -> dict[str, Any]:
        return {"where": self._where, "usual": list(self._usual), "alarm": self._alarm.state()}

    def load_state(self, values: dict[str, Any]) -> None:
        if values["where"] == self._where:
            self._usual.extend(values["usual"])
            self._alarm.load_state(values["alarm"])


class Watches:
    """Everything that looks at each step. A mistake of ours in one of them ends that one, never the run."""

    def __init__(self, watches: Iterable[Any]) -> None:
        self._watches = list(watches)

    @classmethod
    def of_steps(cls, total_steps: int, *, peak_rate: float, where: str = "") -> Watches:
        return cls([LossSpikes(), Plateau(total_steps, peak_rate=peak_rate), SpeedCollapse(where)])

    def state(self) -> dict[str, Any]:
        """What each has seen, by its name: what a resume needs, so that nothing is told twice nor begun anew."""
        return {type(watch).__name__: watch.state() for watch in self._watches}

    def load_state(self, values: dict[str, Any]) -> None:
        """The inverse of `state`. Never raises: what a checkpoint does not know is watched from here on."""
        for watch in self._watches:
            with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
                watch.load_state(values[type(watch).__name__])

    def step(self, now: StepMetrics) -> list[Finding]:
        """What is to be told about this step. Never raises."""
        return self._ask(lambda watch: list(watch.step(now)))

    def reading(self, now: Telemetry, *, reserved_bytes: int) -> list[Finding]:
        """What is to be told about this reading of the machine. Never raises."""
        return self._ask(lambda watch: list(watch.reading(now, reserved_bytes)))

    def _ask(self, question: Callable[[Any], list[Finding]]) -> list[Finding]:
        found: list[Finding] = []
        for watch in tuple(self._watches):
            try:
                found += question(watch)
            except Exception:
                self._watches.remove(watch)
                print(f"{type(watch).__name__} ends watching:", file=sys.stderr)
                traceback.print_exc()
        return found


class Heat:
    """Five readings in a row in which the driver holds the clocks down for heat."""

    def __init__(self) -> None:
        self._alarm = Alarm(needs=5, calm=30)

    def reading(self, now: Telemetry, reserved_bytes: int) -> Iterator[Finding]:
        if now.slowed_by_heat is None:
            return
        if self._alarm.sees(wrong=now.slowed_by_heat, right=not now.slowed_by_heat):
            degrees = now.temperature_c
            message = say("health.hot") if degrees is None else say("health.hot.at", degrees=f"{degrees:.0f}")
            yield Finding(level="warning", kind="heat", message=message)


class Spill:
    """Memory that the card does not have: a driver that puts what is too much into RAM makes steps many times slower.

    Sure where the allocator holds more than the card has. Where drivers do that by themselves (`may_spill`: Windows and
    WSL), also where it holds clearly more than the driver says is in use on the card by everyone: the rest must be
    elsewhere. Five readings in a row, because the allocator's number is of the last step and the driver's of now.
    """

    def __init__(self, memory_bytes: int, *, may_spill: bool) -> None:
        self._memory_bytes, self._may_spill = memory_bytes, may_spill
        self._alarm = Alarm(needs=5, calm=5)

    def reading(self, now: Telemetry, reserved_bytes: int) -> Iterator[Finding]:
        if not reserved_bytes or not self._memory_bytes:
            return
        there = self._memory_bytes
        if self._may_spill and now.device_bytes is not None:
            there = min(there, now.device_bytes + max(512 * MIB, self._memory_bytes // 20))
        spilled = reserved_bytes > there
        if self._alarm.sees(wrong=spilled, right=not spilled):
            used = self._memory_bytes if now.device_bytes is None else now.device_bytes
            yield Finding(
                level="warning",
                kind="spill",
                message=say(
                    "health.spill",
                    held=format_bytes(reserved_bytes),
                    used=format_bytes(used),
                    size=format_bytes(self._memory_bytes),
                ),
            )


def watches_of_machine(memory_bytes: int) -> Watches:
    """What looks at each reading of a card with `memory_bytes` (0: there is none)."""
    return Watches([Heat(), Spill(memory_bytes, may_spill=drivers_spill())])


def drivers_spill() -> bool:
    """Whether this system's drivers put into RAM what a card has no room for."""
    return sys.platform == "win32" or "microsoft" in platform.release().lower()


@dataclass
class Refusals:
    """Steps in a row that left the weights as they were for want of finite numbers. `most` of them end the run."""

    most: int
    in_a_row: int = 0

    def count(self, step: int, problem: str, *, rows: str, collapsed: bool) -> None:
        """Hear how a step went: `problem` is "" when well. Raises UserError once there were too many, and at once when
        fp16's loss scale has `collapsed`, which took dozens of refused steps already."""
        self.in_a_row = self.in_a_row + 1 if problem else 0
        if not problem or not (collapsed or self.in_a_row >= self.most):
            return
        how_many = {} if self.in_a_row == 1 else {"count": self.in_a_row, "step": step}
        what = say("health.ends" if how_many else "health.ends.one", problem=problem, rows=rows, **how_many)
        raise UserError(what, say("health.format" if collapsed else "health.rate"))


@dataclass
class Evaluations:
    """The best evaluation so far, and how many in a row were not better. A loss that is no number is never better."""

    patience: int
    best_loss: float = math.inf
    best_step: int | None = None
    without_better: int = 0

    def hear(self, step: int, loss: float) -> bool:
        """Whether this one is the best so far."""
        better = loss < self.best_loss
        if better:
            self.best_loss, self.best_step = loss, step
        self.without_better = 0 if better else self.without_better + 1
        return better

    @property
    def enough(self) -> bool:
        """No better loss for as long as the config waits."""
        return 0 < self.patience <= self.without_better

    def state(self) -> dict[str, Any]:
        """What a resume needs; JSON has no word for infinity."""
        best = self.best_loss if math.isfinite(self.best_loss) else None
        return {"best_loss": best, "best_step": self.best_step, "without_better": self.without_better}

    def load_state(self, values: dict[str, Any]) -> None:
        """The inverse of `state`; nothing of it where the checkpoint is older than this."""
        best = values.get("best_loss")
        self.best_loss = math.inf if best is None else best
        self.best_step, self.without_better = values.get("best_step"), values.get("without_better", 0)


@dataclass
class Health:
    """All that the loop asks about a run's health."""

    refusals: Refusals
    evaluations: Evaluations
    watches: Watches
    drifting: Alarm = field(default_factory=Alarm)

    def state(self) -> dict[str, Any]:
        """What a resume needs beside the evaluations."""
        return {"watches": self.watches.state(), "drifting": self.drifting.state()}

    def load_state(self, values: dict[str, Any]) -> None:
        """The inverse of `state`; nothing of it where the checkpoint is older than this."""
        self.watches.load_state(values.get("watches", {}))
        self.drifting.load_state(values.get("drifting", {}))


def row_numbers(examples: Sequence[Example]) -> list[int]:
    """The rows of the data that these sequences hold, as a person counts them: from 1, as the data card's do."""
    return sorted({row + 1 for example in examples for row in (example.rows or (example.row,))})


def named_rows(examples: Sequence[Example]) -> str:
    """Which rows of the data these sequences hold, in words: the first NAMED_ROWS of them, and how many more."""
    rows = row_numbers(examples)
    names = ", ".join(f"{row:,}" for row in rows[:NAMED_ROWS])
    if len(rows) > NAMED_ROWS:
        return say("rows.more", names=names, more=f"{len(rows) - NAMED_ROWS:,}")
    return say("rows.some" if len(rows) > 1 else "rows.one", names=names)


def middle_and_spread(values: Sequence[float] | deque[float]) -> tuple[float, float]:
    """Median, and the deviation of a normal distribution that has this median absolute deviation."""
    middle = median(values)
    return middle, _NORMAL * median(abs(value - middle) for value in values)
