"""StoreRecorder: where a trainer reports. The training thread only appends to memory; one thread writes.

Rows reach the file at most FLUSH_S late, also while a step takes long, or as soon as FLUSH_ROWS wait. When the
database is locked or the disk is full, training goes on and the rows wait in memory until a retry succeeds (a row is
a few hundred bytes: an hour of ten steps a second is about ten MB). A checkpoint that is saved meanwhile carries them,
all but the machine's readings, and the attempt that goes on from it writes them, under the number of the one they are
of: a row is known by its attempt and step, so one that was written after all is not there twice.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Self

from vramfit.errors import UserError
from vramfit.faults import reach
from vramfit.planning.plan import Forecast
from vramfit.training.metrics import (
    DriftCheck,
    Evaluation,
    Event,
    PhaseProgress,
    StepMetrics,
    Telemetry,
    TextSample,
    Unstored,
)

if TYPE_CHECKING:
    from jobs.store.measured import Measured

FLUSH_S: Final = 0.5
FLUSH_ROWS: Final = 200
PHASE_S: Final = 0.2
LONGEST_RETRY_S: Final = 5.0
CLOSE_S: Final = 60.0
UNEXPECTED_TRIES: Final = 3
_CARRIED: Final[dict[str, type[Any]]] = {
    "steps": StepMetrics,
    "evaluations": Evaluation,
    "drifts": DriftCheck,
    "samples": TextSample,
    "events": Event,
}


@dataclass
class _Batch:
    """What waits to be written."""

    steps: list[StepMetrics] = field(default_factory=list)
    telemetry: list[Telemetry] = field(default_factory=list)
    evaluations: list[Evaluation] = field(default_factory=list)
    drifts: list[DriftCheck] = field(default_factory=list)
    samples: list[TextSample] = field(default_factory=list)
    events: list[Event] = field(default_factory=list)
    phase: PhaseProgress | None = None
    forecast: Forecast | None = None

    def values(self) -> dict[str, Any]:
        return {item.name: getattr(self, item.name) for item in dataclasses.fields(self)}

    def __bool__(self) -> bool:
        return any(bool(value) for value in self.values().values())

    def lists(self) -> dict[str, Any]:
        """The rows that a checkpoint carries, by kind."""
        return {kind: getattr(self, kind) for kind in _CARRIED}

    def before(self, newer: _Batch) -> _Batch:
        """This batch with a newer one behind it."""
        merged = _Batch()
        for name, value in self.values().items():
            later = getattr(newer, name)
            setattr(merged, name, value + later if isinstance(value, list) else later if later is not None else value)
        return merged


class StoreRecorder:
    """Implements vramfit.training.metrics.Recorder for one attempt of one job. Use as a context manager.

    `fenced` becomes True when a newer attempt has taken over: nothing of this one is written any more. `stepped` is
    True once a step was reported, `reserved_bytes` what the allocator held in the last one; `phase_name` is the last
    phase.
    """

    def __init__(self, store: Measured, job: int, *, attempt: int) -> None:
        self._store, self._job, self._attempt = store, job, attempt
        self._waiting, self._writing = _Batch(), _Batch()
        self._carried: list[tuple[int, _Batch]] = []  # earlier attempts, and what a checkpoint carried of them
        self._wanted_at: float | None = None  # monotonic time at which what waits must be written
        self._phase_at = float("-inf")
        self.phase_name: str | None = None
        self.stepped = False
        self.reserved_bytes = 0
        self._closing = False
        self._lock = threading.Condition()
        self._retry_s = 0.0
        self._unexpected = 0  # errors in a row that nobody foresaw
        self.fenced = False
        self._thread = threading.Thread(target=self._run, name="recorder", daemon=True)
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the Recorder protocol --------------------------------------------------------------------------------

    def phase(self, progress: PhaseProgress) -> None:
        now = time.monotonic()
        with self._lock:
            # A new phase is shown at once, progress within one at most five times a second.
            wait = 0.0 if progress.name != self.phase_name else max(0.0, self._phase_at + PHASE_S - now)
            self.phase_name, self._waiting.phase = progress.name, progress
            self._want(now + wait)
        if progress.name == "saving":
            # A checkpoint must not outlive the rows of its steps: after a power cut nobody would write them again.
            self.flush()

    def forecast(self, forecast: Forecast) -> None:
        with self._lock:
            self._waiting.forecast = forecast
            self._want(time.monotonic())

    def steps(self, metrics: Sequence[StepMetrics]) -> None:
        with self._lock:
            self._waiting.steps.extend(metrics)
            if metrics:
                self.stepped, self.reserved_bytes = True, metrics[-1].reserved_bytes
            full = len(self._waiting.steps) >= FLUSH_ROWS
            self._want(time.monotonic() + (0.0 if full else FLUSH_S))

    def evaluation(self, evaluation: Evaluation) -> None:
        with self._lock:
            self._waiting.evaluations.append(evaluation)
            self._want(time.monotonic())

    def drift(self, check: DriftCheck) -> None:
        with self._lock:
            self._waiting.drifts.append(check)
            self._want(time.monotonic() + FLUSH_S)

    def sample(self, sample: TextSample) -> None:
        with self._lock:
            self._waiting.samples.append(sample)
            self._want(time.monotonic())

    def event(self, event: Event) -> None:
        with self._lock:
            self._waiting.events.append(event)
            self._want(time.monotonic())

    def telemetry(self, reading: Telemetry) -> None:
        with self._lock:
            self._waiting.telemetry.append(reading)
            self._want(time.monotonic() + (FLUSH_S if len(self._waiting.telemetry) > 1 else 0.0))

    def unstored(self) -> list[Unstored]:
        """What is not known to be in the store, for a checkpoint to carry. [] when all is."""
        with self._lock:
            batches = [*self._carried, (self._attempt, self._writing.before(self._waiting))]
        return [
            Unstored(attempt=attempt, kind=kind, values=dataclasses.asdict(row))  # type: ignore[typeddict-item]
            for attempt, batch in batches
            for kind, rows in batch.lists().items()
            for row in rows
        ]

    def restore(self, rows: Sequence[Unstored]) -> None:
        """Write what a checkpoint carried, before anything of this attempt. Raises KeyError or TypeError for what is no
        row."""
        batches: dict[int, _Batch] = {}
        for row in rows:
            kind, values = _CARRIED[row["kind"]], row["values"]
            known = {item.name: values[item.name] for item in dataclasses.fields(kind) if item.name in values}
            getattr(batches.setdefault(row["attempt"], _Batch()), row["kind"]).append(kind(**known))
        with self._lock:
            self._carried += sorted(batches.items())
            self._want(time.monotonic())

    # ---- writing ----------------------------------------------------------------------------------------------

    def flush(self, *, timeout_s: float = 5.0) -> bool:
        """Wait until everything reported so far is in the store. False: not within `timeout_s`."""
        with self._lock:
            self._want(time.monotonic())
            return self._lock.wait_for(self._idle, timeout_s)

    def close(self, *, timeout_s: float | None = None) -> None:
        """Write what waits and end the thread. What cannot be stored in time (CLOSE_S) goes to the log, row by row."""
        timeout_s = CLOSE_S if timeout_s is None else timeout_s
        with self._lock:
            if self._closing:
                return
            self._want(time.monotonic())
            self._lock.wait_for(self._idle, timeout_s)
            self._closing = True
            self._lock.notify_all()
        self._thread.join(timeout_s)
        for _, batch in self._carried:
            _log(batch)
        _log(self._waiting)

    def _idle(self) -> bool:
        return not self._waiting and not self._carried and not self._writing

    def _want(self, at: float) -> None:
        """Have the thread write no later than `at`. The lock is held."""
        self._wanted_at = at if self._wanted_at is None else min(self._wanted_at, at)
        self._lock.notify_all()

    def _run(self) -> None:
        while True:
            with self._lock:
                while not self._closing and (self._wanted_at is None or self._wanted_at > time.monotonic()):
                    self._lock.wait(None if self._wanted_at is None else self._wanted_at - time.monotonic())
                if self._closing:
                    return
                batch, self._waiting = self._waiting, _Batch()
                self._writing, self._wanted_at = batch, None
                if batch.phase is not None:
                    self._phase_at = time.monotonic()
            written = self._write(batch)
            with self._lock:
                self._writing = _Batch()
                if not written:
                    self._waiting = batch.before(self._waiting)
                    self._wanted_at = time.monotonic() + self._retry_s
                self._lock.notify_all()

    def _write(self, batch: _Batch) -> bool:
        if self.fenced:
            self._carried = []
        if self.fenced or not (batch or self._carried):
            return True
        saving = batch.phase is not None and batch.phase.name == "saving"
        try:
            reach("recorder: flush")
            self._write_carried()
            self.fenced = not self._store.record(self._job, attempt=self._attempt, durable=saving, **batch.values())
        except (UserError, OSError) as error:
            return self._later(f"metrics wait in memory: {error}")
        except Exception as error:  # a fault of ours must not stop later rows; these are kept in the log in the end
            self._unexpected += 1
            if self._unexpected < UNEXPECTED_TRIES:
                return self._later(f"metrics wait in memory: {type(error).__name__}: {error}")
            traceback.print_exc()
            for _, carried in self._carried:
                _log(carried)
            _log(batch)
            self._carried = []
        self._retry_s, self._unexpected = 0.0, 0
        return True

    def _write_carried(self) -> None:
        """The rows of earlier attempts, oldest first. What was written waits no longer."""
        while self._carried:
            attempt, batch = self._carried[0]
            self._store.record(self._job, attempt=self._attempt, made_by=attempt, durable=True, **batch.lists())
            with self._lock:
                self._carried = self._carried[1:]

    def _later(self, message: str) -> bool:
        """Keep the batch for another try; the wait doubles. Says so the first time, and that nothing was written."""
        if self._retry_s == 0.0:
            print(message, file=sys.stderr)
        self._retry_s = min(LONGEST_RETRY_S, max(0.1, 2 * self._retry_s))
        return False


def _log(batch: _Batch) -> None:
    """The last resort for rows that could not be stored: one line of JSON each in the trainer's log."""
    for name, rows in batch.values().items():
        for row in rows if isinstance(rows, list) else ():
            print(f"not stored: {name} {json.dumps(dataclasses.asdict(row))}", file=sys.stderr)
