"""Attempt: one trainer at work on one job, whoever started it. It records, shows that it lives, hears Stop, and ends.

The queue's child (run_job) and `python -m vramfit train` (foreground) both train inside one, so a run leaves the same
rows and ends by the same rules either way.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from jobs import last_words, processes
from jobs.death import obstacle
from jobs.job import ACTIVE, Job, State
from jobs.log_file import shorten
from jobs.store import Store, no_answer
from vramfit.errors import Changed, InternalError, OutOfDisk, Unwritable, UserError, VramfitError
from vramfit.faults import reach
from vramfit.hardware.devices import Device, probe
from vramfit.hardware.telemetry import Sampler
from vramfit.places import NO_MORE_FILES, NO_ROOM, cure_of, takes_no_writes
from vramfit.sentences import ended, joined, say
from vramfit.training.health import Watches, watches_of_machine
from vramfit.training.metrics import Event, RunResult

WATCH_S: Final = 0.5
HEARTBEAT_S: Final = 2.0
TELEMETRY_S: Final = 1.0
LEAVE_S: Final = 3.0
INSIST_S: Final = 60.0
_LOST_CARD: Final = (
    "fallen off the bus",
    "gpu is lost",
    "device lost",
    "device_lost",
    "uncorrectable ecc error",
    "no cuda-capable device",
    "busy or unavailable",
    "a hardware error",
)
_UNKNOWN: Final = Device(
    kind="cpu", name="", torch_device="cpu", identity="", memory_bytes=0, free_bytes=0, bf16=False, fp16=False
)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """How a failed run is explained: one sentence, what to do, and the exit code (2: the user's side, 1: ours).
    `state` is interrupted where what ended it came from outside."""

    what: str
    remedy: str
    code: int
    state: Literal["failed", "interrupted"] = "failed"


class Attempt:
    """Use as a context manager around the training of `job`, whose current attempt must belong to this process.

    `recorder` and `should_stop` go to the training loop; `finish` or `fail` ends the job. With `may_leave`, a stop that
    comes before the first step (a model that loads for a minute) ends the process at once: nothing is there to save.
    """

    def __init__(self, store: Store, job: Job, *, may_leave: bool = False) -> None:
        self.store, self.job = store, job
        self.terminated = False  # set by a signal handler: the system, not the user, wants an end
        self._may_leave = may_leave
        self._asked_at: float | None = None
        self._over = threading.Event()
        # Taken by whoever ends the job (main thread or _leave) and never given back: a job ends once.
        self._ending = threading.Lock()
        self.recorder = store.recorder(job.id, job.attempt)
        self._threads = [
            threading.Thread(target=self._watch, name="watch", daemon=True),
            threading.Thread(target=self._sample, name="telemetry", daemon=True),
        ]

    def __enter__(self) -> Self:
        last_words.reserve(self.job.folder)
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self.recorder.close()
        for thread in self._threads:
            thread.join(timeout=5)

    def should_stop(self) -> bool:
        """True once the run should save and end. Cheap: a thread asks the store every half second."""
        return self.terminated or self._asked_at is not None

    # ---- threads ----------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Hear Stop, and show that the process lives. A locked database only makes this late."""
        beat_at = time.monotonic()
        while not self._over.wait(WATCH_S):
            try:
                if self._asked_at is None and (
                    self.terminated or self.store.stopping(self.job.id, attempt=self.job.attempt)
                ):
                    self._asked_at = time.monotonic()
                if time.monotonic() - beat_at >= HEARTBEAT_S:
                    self.store.heartbeat(self.job.id, attempt=self.job.attempt)
                    beat_at = time.monotonic()
            except UserError as error:
                print(f"the job store did not answer: {error}", file=sys.stderr)
            self._shorten_log()
            if self._may_leave and self._nothing_to_save():
                self._leave()

    def _shorten_log(self) -> None:
        """By the trainer itself: it outlives its supervisor. On Windows its output does not follow the file's end."""
        if sys.platform != "win32":
            with contextlib.suppress(OSError):  # on a full disk, say: what was written stays as it is
                shorten(self.job.log)

    def _nothing_to_save(self) -> bool:
        """Asked to stop a moment ago, and no step of this attempt was done, nor is the result being written."""
        return (
            self._asked_at is not None
            and time.monotonic() - self._asked_at >= LEAVE_S
            and not self.recorder.stepped
            and self.recorder.phase_name not in ("saving", "exporting")
        )

    def _leave(self) -> None:
        """End the process from this thread; the main one may sit in a long call that cannot be interrupted."""
        if not self._ending.acquire(blocking=False):
            return
        print("Asked to stop before the first step: there is nothing to save.", flush=True)
        self._end_stopped(steps=0)
        sys.stdout.flush()
        os._exit(0)

    def _sample(self) -> None:
        """Read the machine once a second, from the very start; which card it is takes longer to find out."""
        sampler, watches = Sampler(_UNKNOWN), watches_of_machine(0)
        self._read_machine(sampler, watches)
        if self.job.asked_config.device != "cpu":  # for which no driver is to be asked, nor waited for
            try:
                device = probe(self.store.data_dir).device(self.job.asked_config.device)
                sampler = Sampler(device)
                watches = watches_of_machine(device.memory_bytes if device.kind != "cpu" else 0)
            except VramfitError as error:
                print(f"telemetry shows the process only: {error}", file=sys.stderr)
        while not self._over.wait(TELEMETRY_S):
            self._read_machine(sampler, watches)

    def _read_machine(self, sampler: Sampler, watches: Watches) -> None:
        """Record one reading, and what it says of the run's health."""
        reading = sampler.read(os.getpid())
        self.recorder.telemetry(reading)
        for found in watches.reading(reading, reserved_bytes=self.recorder.reserved_bytes):
            print(found.message, flush=True)
            self.recorder.event(Event(time=reading.time, level=found.level, kind=found.kind, message=found.message))

    # ---- the end ----------------------------------------------------------------------------------------------

    def finish(self, result: RunResult) -> None:
        """The loop returned: succeeded, or stopped with a checkpoint."""
        self._ending.acquire()
        values = {
            "final_loss": result.final_loss,
            "eval_loss": result.eval_loss,
            "peak_allocated_bytes": result.peak_allocated_bytes,
            "export": result.export,
        }
        if result.stopped:
            self._end_stopped(steps=result.steps, **values)
        else:
            self._end("succeeded", **values)

    def fail(self, error: BaseException) -> int:
        """The loop raised: failed, with the reason. The traceback goes to the log. Returns the exit code."""
        self._ending.acquire()
        if not isinstance(error, UserError):
            traceback.print_exception(error)
        if isinstance(error, KeyboardInterrupt):
            self._end(
                "interrupted",
                failure=say("death.keyboard"),
                remedy=say("next.resume"),
            )
            return 1
        failure = explain(error, folder=self.job.folder)
        if _is_disk_full(error) or _is_unwritable(error, self.job.folder):
            return self._wait_for_a_person(failure)
        if isinstance(error, Changed):
            return self._wait_for_a_person(failure, asks=True)
        if failure.state == "interrupted":
            return self._lose_the_card(failure)
        self._end("failed", failure=failure.what, remedy=failure.remedy)
        return failure.code

    def _lose_the_card(self, failure: Failure) -> int:
        """The card may be there again the next time: the supervisor puts the run back, unless something speaks against
        that, which is then told. Not a run that was to end."""
        self.recorder.close()  # whether it got further is in its rows
        job = self._now()
        asked: State | None = {"stopping": "cancelled", "pausing": "paused"}.get(job.state)  # type: ignore[assignment]
        against = "" if asked else obstacle(job)
        what = joined(failure.what, against or "")
        self._end(asked or "interrupted", failure=what, remedy=failure.remedy, again=against is None)
        return failure.code

    def _wait_for_a_person(self, failure: Failure, *, asks: bool = False) -> int:
        """The run waits, its older checkpoints untouched, until somebody has seen to what is wrong and resumes it. With
        `asks` the resume says that it goes on with what has changed."""
        stopping = self._now().state == "stopping"
        self._end("cancelled" if stopping else "paused", failure=failure.what, remedy=failure.remedy, asks=asks)
        return failure.code

    def _end_stopped(self, *, steps: int, **values: Any) -> None:
        state = self._now().state
        if state == "pausing":
            self._end("paused", **values)
        elif state == "stopping" or not self.terminated:
            self._end("cancelled", **values)
        else:
            self._end(
                "interrupted",
                failure=say("death.system", step=steps),
                remedy=say("next.there"),
                ended_boot=processes.boot(),  # after a restart of the machine it goes on by itself
                **values,
            )

    def _end(self, state: State, **values: Any) -> None:
        """All rows first, then the final state, so that whoever sees the state sees all rows.

        What the database does not take is left, as last words, to the supervisor.
        """
        self._over.set()
        self.recorder.close()
        noted = last_words.note(self.job.folder, attempt=self.job.attempt, state=state, values=values)
        reach("trainer: before the end is noted")
        try:
            insist(
                lambda: self.store.transition(
                    self.job.id, expected=ACTIVE, state=state, attempt=self.job.attempt, **values
                )
            )
        except UserError as error:
            if not noted or not no_answer(error):
                raise
            print(f"The end ({state}) is left to the supervisor: {error}", file=sys.stderr)
            return
        last_words.forget(self.job.folder)

    def _now(self) -> Job:
        """The job as it is; where the database does not answer, as it was when the attempt began."""
        try:
            return self.store.job(self.job.id)
        except UserError as error:
            print(f"the job store did not answer: {error}", file=sys.stderr)
            return self.job


def insist(change: Callable[[], object], *, seconds: float | None = None) -> None:
    """Make a change of the store, again and again while it does not answer, for INSIST_S. Raises UserError."""
    deadline, wait = time.monotonic() + (INSIST_S if seconds is None else seconds), 0.1
    while True:
        try:
            change()
            return
        except UserError as error:
            if not no_answer(error) or time.monotonic() > deadline:
                raise
        time.sleep(wait)
        wait = min(2 * wait, 5.0)


def explain(error: BaseException, *, folder: Path | None = None) -> Failure:
    """An exception as the user reads it. Never a traceback. `folder` is the run's own."""
    log = say("next.log")
    if isinstance(error, UserError):
        return Failure(what=ended(error.what), remedy=error.remedy, code=2)
    if isinstance(error, InternalError):
        return Failure(what=ended(error.what), remedy=error.remedy or log, code=1)
    text = next(iter(str(error).splitlines()), "")
    if _is_out_of_memory(error, text):
        key = "failed.memory.device" if "CUDA" in text or "XPU" in text else "failed.memory"
        what = say(key, reason=text or say("failed.memory.none"))
        return Failure(what=ended(what), remedy=say("cure.smaller"), code=2)
    if _is_lost_card(error, text):
        what = say("failed.card", reason=text)
        return Failure(what=ended(what), remedy=say("cure.card"), code=2, state="interrupted")
    if _is_disk_full(error):
        reason = getattr(error, "filename", None) or getattr(error, "strerror", None) or text
        what = say("failed.full", reason=str(reason))
        return Failure(what=ended(what), remedy=say("cure.room.run"), code=2)
    if isinstance(error, OSError) and (key := _key_of(error, folder)):
        reason = ": ".join(str(part) for part in (error.strerror or text, error.filename) if part)
        remedy = cure_of(error, resume=True) if key != "failed.disk" else say("cure.drive.run")
        return Failure(what=ended(say(key, reason=reason)), remedy=remedy, code=2)
    what = say("failed.unexpected", reason=f"{type(error).__name__}{': ' + text if text else ''}")
    return Failure(what=ended(what), remedy=log, code=1)


def _key_of(error: OSError, folder: Path | None) -> str:
    """Which sentence says what the system refused; "" where none does."""
    if folder is not None and takes_no_writes(error, folder):
        return "failed.folder"
    if error.errno in (errno.EIO, errno.EROFS):
        return "failed.disk"
    return "failed.files" if error.errno in NO_MORE_FILES else ""


def _is_disk_full(error: BaseException) -> bool:
    """No room left, or the quota used up: what a person can cure, and the run then go on from."""
    return isinstance(error, OutOfDisk) or (isinstance(error, OSError) and error.errno in NO_ROOM)


def _is_unwritable(error: BaseException, folder: Path) -> bool:
    return isinstance(error, Unwritable) or takes_no_writes(error, folder)


def _is_out_of_memory(error: BaseException, text: str) -> bool:
    """torch's own errors are told by name and text: this module must not import torch."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and ("out of memory" in text or "can't allocate memory" in text)


def _is_lost_card(error: BaseException, text: str) -> bool:
    """The driver no longer answers for the card, by the words of CUDA, NVML and Level Zero."""
    return isinstance(error, RuntimeError) and any(sign in text.lower() for sign in _LOST_CARD)
