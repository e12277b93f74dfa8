"""The supervisor: python -m jobs.supervisor --data-dir DIR. Claims jobs, one a device, starts and watches trainers.

A job whose trainer was ended from outside goes on by itself while it makes progress, a few times; see jobs/death.py.
One per data folder, by lease. It owns no run: killed, it leaves the trainer at work, and the next supervisor adopts
it. It leaves by itself when there is nothing to do, no alert waits to be posted (jobs/webhook.py) and no panel was
open for a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Final, Literal

from jobs import file_systems, last_words, processes
from jobs.deadline import WRITING, Deadline, allowed_s
from jobs.death import MOST_LOSSES, cause_of, obstacle
from jobs.device_watch import DeviceWatch, Found
from jobs.freezer import Freezer
from jobs.job import ACTIVE, Job, State
from jobs.log_file import shorten
from jobs.store import PANEL_LEASE, SUPERVISOR_LEASE, Store, no_answer
from jobs.webhook import Sender
from vramfit.console import lose_what_is_not_taken
from vramfit.errors import JobError, UserError
from vramfit.faults import reach
from vramfit.places import NO_MORE_FILES, NO_ROOM, cure_of, takes_no_writes
from vramfit.sentences import joined, say
from vramfit.training.metrics import Event
from vramfit.units import format_bytes

POLL_S: Final = 0.1
LOOK_S: Final = 1.0
LONGEST_LOOK_S: Final = 5.0
SAME_LINE_S: Final = 60.0
LEASE_S: Final = 2.0
LEASE_STALE_S: Final = 30.0  # for a holder on another machine or in another container, where no pid can be checked
TRAINER: Final = "jobs.run_job"
LOG: Final = "supervisor.log"
LOG_BYTES: Final = 5 * 2**20
RETRY_S: Final = 5.0
LONGEST_RETRY_S: Final = 60.0
START_BYTES: Final = 64 * 2**20
"""What must be free on a run's disk when its trainer is started: for its log, its rows and the first of a cache."""
NOBODY_STARTS: Final = (*NO_ROOM, *NO_MORE_FILES, errno.EAGAIN, errno.ENOMEM)
"""The system's errors that any other trainer would meet now as well."""


@dataclass(frozen=True, kw_only=True)
class Patience:
    """How long things may take, in seconds.

    `stop`: from Stop to TERM (longer where steps are, and while a trainer gets further: jobs/deadline.py); `term`: from
    TERM to KILL; `start`: until a spawned trainer of a dead supervisor has said who it is; `leave`: from a trainer's
    final state to the end of its process; `idle`: without work and without a panel until the supervisor leaves.
    """

    stop: float = 120.0
    term: float = 10.0
    start: float = 60.0
    leave: float = 30.0
    idle: float = 60.0


def trainer_command(job: Job, data_dir: Path) -> list[str]:
    """The command of the real trainer."""
    return processes.python_module(TRAINER, str(job.id), "--data-dir", str(data_dir), "--attempt", str(job.attempt))


@dataclass(kw_only=True)
class _Trainer:
    """One trainer under watch. Times are the loop's `now`."""

    job: int
    attempt: int
    device: str  # "auto" where it was started outside of the queue, which chooses the best one
    who: str | None  # None: spawned by an earlier supervisor and not yet known
    process: subprocess.Popen[bytes] | None  # None: adopted
    since: float
    events: Path | None  # where the system counts its out-of-memory kills
    kills_before: int | None
    lost: bool = False  # that a supervisor died over it is counted
    stop_seen_at: float | None = None
    deadline: Deadline | None = None  # once it was asked to end
    written: tuple[float, int] = (float("-inf"), 0)  # when its folder was last looked at, and the bytes in it
    final_seen_at: float | None = None
    gone: bool = False  # its process is, and what that had started
    look_at: float = float("-inf")  # it is looked after again from then on
    look_s: float = LOOK_S  # the wait after the last round in which the database did not answer
    pressed: Literal["no", "term", "kill"] = "no"
    pressed_at: float = 0.0  # when TERM was sent

    def ended(self, now: float, *, start: float) -> bool:
        if self.process is not None:
            return self.process.poll() is not None
        if self.who is None:
            return now - self.since > start
        return not processes.alive(self.who)

    @property
    def code(self) -> int | None:
        return None if self.process is None else self.process.returncode

    @property
    def stop_note(self) -> str | None:
        """What is said of one that had to be ended; None of one that ended by itself."""
        if self.pressed == "no" or self.stop_seen_at is None:
            return None
        return say("death.late", seconds=f"{self.pressed_at - self.stop_seen_at:.0f}")


class Supervisor:
    """`start()` takes the lease, then `step(now)` is called over and over with a monotonic time in seconds.

    `command` makes the trainer's command line from the job and the data folder.
    """

    def __init__(
        self,
        store: Store,
        *,
        command: Callable[[Job, Path], Sequence[str]] = trainer_command,
        patience: Patience = Patience(),
        devices: Callable[[], Found] | None = None,
    ) -> None:
        self._store, self._command, self._patience = store, command, patience
        self._devices = devices or DeviceWatch(store.data_dir).found
        self._noted_devices: tuple[object, ...] | None = None
        self._foreground: dict[int, _Trainer] = {}  # runs that other processes do by themselves
        self._lost_cards: dict[str, float] = {}  # by device, when a run lost it, by the loop's `now`
        self._who = processes.own_identity()
        self._trainers: dict[int, _Trainer] = {}  # by job: one on each device
        self._renewed_at = float("-inf")
        self._panel_beat: float | None = None
        self._busy_at: float | None = None
        self._looked_for_lingering = False
        self._tried_at: float | None = None  # when what keeps trainers from being started was last looked at
        self._retry_s = RETRY_S
        self._untold: list[tuple[int, str, str]] = []  # job, kind and message of events not yet in the database
        self._dead_before = False  # the supervisor before this one died at work, on this boot

    def start(self, *, wait: Callable[[float], None] | None = None) -> bool:
        """Take the lease. False: a living supervisor has it.

        After a restart of the machine or container the dead holder's heartbeat may still be fresh. With `wait` (such
        as time.sleep) it is watched until it goes stale, or moves: then the holder lives somewhere else.
        """
        first = self._store.lease(SUPERVISOR_LEASE)
        while not self._store.take_lease(SUPERVISOR_LEASE, owner=self._who, alive=self._holder_alive):
            holder = self._store.lease(SUPERVISOR_LEASE)
            if wait is None or holder != first or (holder is not None and processes.same_boot(holder[0])):
                return False
            wait(0.5)
        self._dead_before = first is not None and first[0] != self._who and processes.same_boot(first[0])
        self._go_on_with_what_ended()
        return True

    def _go_on_with_what_ended(self) -> None:
        """What saved and ended because the machine went down, or lost its card while no supervisor saw it, goes on
        where it was."""
        for job in self._store.to_go_on(processes.boot()):
            if obstacle(job) is None:
                self._go_on(job, job.failure or "" if job.again else "The machine was started again.")

    def _holder_alive(self, who: str, heartbeat_at: float) -> bool:
        return holder_alive(who, heartbeat_at, now=self._store.clock())

    def step(self, now: float) -> bool:
        """One round: renew, watch, claim. False: leave (nothing to do, or the lease is gone).

        A trainer that was seen to be asked to end is pressed first, by the clock alone: it may itself be what keeps
        the database locked. Nor does a lease that cannot be renewed now keep trainers from being watched.
        """
        self._press(now)
        if now - self._renewed_at >= LEASE_S:
            try:
                if not self._store.renew_lease(SUPERVISOR_LEASE, owner=self._who):
                    log("The lease of this data folder is gone; leaving it to the other supervisor.")
                    return False
                self._renewed_at = now
            except UserError as error:  # nobody else can take it meanwhile: its holder lives
                log(f"The lease is renewed later: {error}")
        self._tell_later()
        active = self._store.active_jobs()
        self._watch(active, now)
        self._claim(active, now)
        return not self._idle(now, busy=bool(active) or bool(self._trainers))

    # ---- watching ---------------------------------------------------------------------------------------------

    def _watch(self, active: Sequence[Job], now: float) -> None:
        at_work = {job.id for job in active}
        self._foreground = {id_: trainer for id_, trainer in self._foreground.items() if id_ in at_work}
        for job in active:
            with told_later(f"Job {job.id}"):
                if job.foreground:
                    self._watch_foreground(job, now)
                elif job.id not in self._trainers:
                    self._adopt(job, now)
        self._dead_before = False
        for trainer in list(self._trainers.values()):
            if now >= trainer.look_at:
                trainer.look_s = min(2 * trainer.look_s, LONGEST_LOOK_S)
                trainer.look_at = now + trainer.look_s  # unless this round comes to its end
                with told_later(f"Job {trainer.job}"):
                    self._watch_trainer(trainer, now)
                    trainer.look_s, trainer.look_at = LOOK_S, now

    def _watch_trainer(self, trainer: _Trainer, now: float) -> None:
        if trainer.who is None:
            trainer.who = self._store.job(trainer.job).owner
        if trainer.ended(now, start=self._patience.start):
            self._bury(trainer, now)
            del self._trainers[trainer.job]
            return
        job = self._store.job(trainer.job)
        if job.active and job.attempt == trainer.attempt:
            self._press_to_stop(trainer, job, now)
        else:
            self._press_to_leave(trainer, now)

    def _watch_foreground(self, job: Job, now: float) -> None:
        """Its process watches itself; only its death is ours to note, and that a stop has no effect."""
        if job.owner is None:
            return
        if self._holder_alive(job.owner, job.heartbeat_at or 0.0):
            self._watch_its_stop(self._foreground.setdefault(job.id, _watched(job, job.owner, None, now)), job, now)
            return
        if self._take_down(job).active:
            key = "death.foreground" if processes.same_boot(job.owner) else "death.foreground.boot"
            self._conclude(job, "interrupted", say(key))

    def _watch_its_stop(self, trainer: _Trainer, job: Job, now: float) -> None:
        """A process that somebody started at a terminal is not ended by us: they are told how to."""
        self._hear(trainer, job, now)
        if trainer.deadline is None or trainer.stop_seen_at is None or trainer.who is None:
            return
        if trainer.pressed == "no" and trainer.deadline.over(now):
            trainer.pressed = "term"  # told once
            waited, pid = now - trainer.stop_seen_at, processes.pid_of(trainer.who)
            self._tell(
                job.id,
                f"It did not end within {waited:.0f} s of Stop, and as it was started outside of the queue nobody ends "
                f"it: press Ctrl-C twice where it was started, or end its process ({pid}).",
            )

    def _adopt(self, job: Job, now: float) -> None:
        """An active job from before this supervisor: its trainer lives, or will be found dead in this same round."""
        reach("supervisor: adopting")
        self._trainers[job.id] = trainer = _watched(job, job.owner, None, now)
        if self._dead_before:
            trainer.lost = True
            self._store.count_loss(job.id, attempt=job.attempt)
        log(f"Found job {job.id} {job.state}; watching its trainer ({job.owner}).")

    def _bury(self, trainer: _Trainer, now: float) -> None:
        """The trainer's process is gone: end what it started, and note its death unless it noted its own end.

        Raises UserError while the database does not answer; then it is called again.
        """
        if not trainer.gone and trainer.who is not None:
            processes.end(trainer.who, grace_s=0.0 if trainer.pressed == "kill" else 1.0)
        trainer.gone = True
        reach("supervisor: burying")
        job = self._store.job(trainer.job)
        log(f"The trainer of job {job.id} ended, exit code {trainer.code}, state {job.state}.")
        if job.attempt != trainer.attempt:
            return
        if job.active:
            job = self._take_down(job)
        if job.state == "interrupted" and job.again:
            self._lost_cards[job.asked_config.device] = now
            self._go_on(job, job.failure or "")
        if job.active:
            self._note_death(trainer, job)
        last_words.forget(job.folder)

    def _take_down(self, job: Job) -> Job:
        """What the trainer of an active job could not tell the database before it ended, told now. The job as it is
        then."""
        words = last_words.read(job.folder, attempt=job.attempt)
        if words is None:
            return job
        state, values = words.state, words.values
        if job.state in ("stopping", "pausing") and state not in ("succeeded", "failed"):  # it had not heard of that
            state = "cancelled" if job.state == "stopping" else "paused"
            values = {**values, "again": False}
        with unless_refused():
            self._store.transition(job.id, expected=ACTIVE, state=state, attempt=job.attempt, **values)
            log(f"job {job.id}: {state}, by its trainer's last words")
        return self._store.job(job.id)

    def _note_death(self, trainer: _Trainer, job: Job) -> None:
        """Of a trainer that left no word."""
        if job.state in ("stopping", "pausing"):
            self._conclude(job, "cancelled" if job.state == "stopping" else "paused", trainer.stop_note)
            return
        if job.started_at is None and trainer.process is None:
            self._never_began(trainer, job)
            return
        death = cause_of(
            code=trainer.code,
            kills_before=trainer.kills_before,
            kills_now=processes.out_of_memory_kills(trainer.events),
            other_boot=trainer.who is not None and not processes.same_boot(trainer.who),
        )
        if not death.again:
            self._conclude(job, death.state, death.cause)
            return
        reason = obstacle(job)
        if reason is None:
            self._go_on(job, death.cause)
        else:
            self._conclude(job, death.state, joined(death.cause, reason), hint=death.remedy)

    def _never_began(self, trainer: _Trainer, job: Job) -> None:
        """The supervisor died between claiming and starting. The next attempt's number shuts this one out."""
        if not trainer.lost:
            self._store.count_loss(job.id, attempt=job.attempt)
            trainer.lost = True
        job = self._store.job(job.id)
        if job.losses >= MOST_LOSSES:
            self._conclude(job, "interrupted", joined(say("death.never"), obstacle(job) or ""))
            return
        self._store.transition(job.id, expected=("starting",), state="queued", attempt=job.attempt)
        self._note(job.id, "queued", "Its trainer never began, because the supervisor was ended; it waits again.")

    def _go_on(self, job: Job, cause: str) -> None:
        """Back into the queue, in its old place: the attempt that follows starts from the newest checkpoint."""
        reach("supervisor: going on")
        where = f"the checkpoint of step {job.newest_checkpoint:,}" if job.has_checkpoint else "the start"
        with unless_refused():  # it was stopped, or noted its own end, a moment before
            times = self._store.go_on(job.id, attempt=job.attempt)
            most = job.config.output.automatic_resumes
            self._note(
                job.id, "resumed", f"{cause} It goes on by itself from {where} (time {times} of at most {most})."
            )

    def _conclude(self, job: Job, state: State, failure: str | None, *, hint: str = "") -> None:
        remedy = None
        if failure is not None:
            remedy = joined(hint, say("next.resume.log" if job.has_checkpoint else "next.again.log"))
        with unless_refused():  # the trainer noted its own end a moment before
            self._store.transition(
                job.id,
                expected=("starting", "running", "pausing", "stopping"),
                state=state,
                attempt=job.attempt,
                failure=failure,
                remedy=remedy,
            )
            if failure is not None:
                self._note(job.id, state, failure)

    def _note(self, id_: int, kind: str, message: str) -> None:
        """An event of a job, behind those that wait; where the database does not take it now, later."""
        log(f"job {id_}: {message}")
        self._untold.append((id_, kind, message))
        self._tell_later()

    def _press_to_stop(self, trainer: _Trainer, job: Job, now: float) -> None:
        """A stop has a deadline: then TERM, then KILL, for the whole group."""
        if trainer.who is not None:
            self._hear(trainer, job, now)
            self._press_one(trainer, now)

    def _hear(self, trainer: _Trainer, job: Job, now: float) -> None:
        """Once it was asked to end: how far it is on the way, which says until when it has time."""
        if job.state not in ("stopping", "pausing"):
            return
        phase = job.phase.name if job.phase is not None else ""
        shown = (job.phase, self._written(trainer, job, now) if phase in WRITING else 0)
        if trainer.deadline is None:
            step_s = self._store.step_seconds(job.id)
            allowed = allowed_s(self._patience.stop, step_s)
            trainer.stop_seen_at = now
            trainer.deadline = Deadline(since=now, allowed=allowed, phase=phase, shown=shown)
            if allowed > self._patience.stop:
                self._tell(job.id, f"A step takes up to {step_s:.0f} s, so it has {allowed:.0f} s to hear the stop.")
        trainer.deadline.hear(now, phase=phase, shown=shown)

    def _written(self, trainer: _Trainer, job: Job, now: float) -> int:
        """Bytes in the run's folder, looked at once a second."""
        if now - trainer.written[0] >= 1.0:
            trainer.written = (now, bytes_in(job.folder))
        return trainer.written[1]

    def _press(self, now: float) -> None:
        """End what is overdue, without a word to the database before it is done."""
        for trainer in self._trainers.values():
            self._press_one(trainer, now)

    def _press_one(self, trainer: _Trainer, now: float) -> None:
        if trainer.who is None or trainer.gone or trainer.deadline is None or trainer.stop_seen_at is None:
            return
        if trainer.pressed == "no" and trainer.deadline.over(now):
            trainer.pressed, trainer.pressed_at = "term", now
            processes.terminate(trainer.who)
            waited = now - trainer.stop_seen_at
            self._tell(trainer.job, f"It did not end within {waited:.0f} s of Stop and is asked once more (TERM).")
        elif trainer.pressed == "term" and now - trainer.pressed_at >= self._patience.term:
            trainer.pressed = "kill"
            processes.kill(trainer.who)
            self._tell(trainer.job, f"It did not end within {self._patience.term:.0f} s of TERM and is ended (KILL).")

    def _tell(self, id_: int, message: str) -> None:
        """An event about a stop, written in the next round: what is overdue is ended without a word to the database."""
        log(f"job {id_}: {message}")
        self._untold.append((id_, "stop", message))

    def _tell_later(self) -> None:
        """Write the events that wait, in their order. What the database does not take now is tried again."""
        while self._untold:
            id_, kind, message = self._untold[0]
            try:
                event = Event(time=self._store.clock(), level="warning", kind=kind, message=message)
                self._store.add_event(id_, event)
            except UserError as error:
                log(f"An event is written later: {error}")
                return
            del self._untold[0]

    def _press_to_leave(self, trainer: _Trainer, now: float) -> None:
        """The job is over but the process lingers, and may still hold the card that the next one needs."""
        if trainer.final_seen_at is None:
            trainer.final_seen_at = now
        if now - trainer.final_seen_at >= self._patience.leave and trainer.who is not None:
            log(f"The trainer of job {trainer.job} did not leave within {self._patience.leave:.0f} s; ending it.")
            trainer.pressed = "kill"
            processes.kill(trainer.who)

    # ---- starting ---------------------------------------------------------------------------------------------

    def _find_lingering(self, now: float) -> None:
        """Trainers from before this supervisor whose job has ended, while their process still leaves and holds a card.

        Its job no longer names it, so the processes are looked through, once: later trainers are this one's children.
        """
        for who, line in processes.running(TRAINER, "--data-dir", str(self._store.data_dir), "--attempt").items():
            id_, attempt = line[line.index(TRAINER) + 1], line[line.index("--attempt") + 1]
            with contextlib.suppress(JobError, ValueError):  # no trainer of ours has such a command line
                if int(id_) not in self._trainers:
                    self._trainers[int(id_)] = _watched(self._store.job(int(id_)), who, None, now, attempt=int(attempt))
                    log(f"The trainer of job {id_} has not left yet ({who}); waiting for it.")

    def _claim(self, active: Sequence[Job], now: float) -> None:
        """Start what may start. The devices of jobs that were `active` when the round began are left for the next."""
        if not self._looked_for_lingering:
            self._looked_for_lingering = True
            self._find_lingering(now)
        self._try_again(now)
        found = self._devices()
        there = found.names
        if there and found[:2] != self._noted_devices:
            self._store.set_devices(there, silent_since=found.silent_since)
            self._noted_devices = found[:2]
        taken = [trainer.device for trainer in self._trainers.values()] + [job.asked_config.device for job in active]
        held = {there[0] if device == "auto" else device for device in taken if there}
        if found.silent_since is not None:  # what has its cards would hang, too; one that leaves the choice means them
            held |= {"auto", *(name for name in there if name != "cpu")}
        held |= self._lost(found)
        # A job whose last trainer has not left yet waits for that, also where another device is free.
        while (job := self._store.claim_next(self._who, there, held=held, leaving=self._trainers)) is not None:
            held.add(job.device or "")  # also where it did not come to be: not all that waits is tried in one round
            self._start(job, now)

    def _lost(self, found: Found) -> set[str]:
        """Devices that a run has lost since they were last looked for: whether they are there again is not known."""
        looked_at = float("-inf") if found.looked_at is None else found.looked_at
        self._lost_cards = {name: at for name, at in self._lost_cards.items() if looked_at <= at}
        return set(self._lost_cards)

    def _start(self, job: Job, now: float) -> None:
        try:
            reach("claim: before the spawn")
            job.folder.mkdir(parents=True, exist_ok=True)  # someone may have deleted it while the job waited
            check_room(job.folder)
            shorten(job.log)  # the trainer does so itself, where the system lets it
            process = processes.spawn(self._command(job, self._store.data_dir), log=job.log)
        except OSError as error:
            if error.errno in NOBODY_STARTS:
                self._wait_for_a_start(job, error)
                return
            # A folder that takes no writes: this one waits until somebody has seen to that.
            hint = cure_of(error) if takes_no_writes(error, job.folder) else ""
            reason = say("start.failed", reason=error.strerror or str(error))
            self._conclude(job, "paused" if hint else "failed", reason, hint=hint)
            return
        reach("claim: after the spawn")
        who = processes.identity(process.pid)
        self._trainers[job.id] = _watched(job, who, process, now)
        if who is not None:
            self._store.set_owner(job.id, attempt=job.attempt, owner=who)
        log(f"Started job {job.id}, attempt {job.attempt}, pid {process.pid}.")

    def _wait_for_a_start(self, job: Job, error: OSError) -> None:
        """No room, no files or no memory: the next job would meet the same, so the queue waits, and says so once."""
        cure = cure_of(error) or say("cure.programs")
        why = joined(say("queue.waits", reason=error.strerror or str(error)), cure, say("queue.tries"))
        event = Event(time=self._store.clock(), level="warning", kind="queued", message=why)
        again = self._tried_at is not None
        log(f"job {job.id}: {why}")
        try:
            self._store.wait_for_a_start(job.id, attempt=job.attempt, why=why, event=None if again else event)
        except JobError as error:  # it was stopped a moment before
            if no_answer(error):
                raise
            state = self._store.job(job.id).state
            self._conclude(job, "paused" if state == "pausing" else "cancelled", None)

    def _try_again(self, now: float) -> None:
        """A queue that waits until trainers can be started is let go once that is so, looked at ever less often."""
        if self._store.queue_waits is None:
            self._tried_at, self._retry_s = None, RETRY_S
            return
        if self._tried_at is None:
            self._tried_at = now
        if now - self._tried_at < self._retry_s:
            return
        self._tried_at, self._retry_s = now, min(2 * self._retry_s, LONGEST_RETRY_S)
        if can_start(self._store.data_dir):
            self._store.start_again()

    # ---- leaving ----------------------------------------------------------------------------------------------

    def _idle(self, now: float, *, busy: bool) -> bool:
        """Nothing to do and no panel for a while. What counts is that the panel's time stamp changes, not its value,
        so that a clock set back or forward closes nothing."""
        panel = self._store.lease(PANEL_LEASE)
        beat = None if panel is None else panel[1]
        if self._busy_at is None or busy or beat != self._panel_beat:
            self._busy_at, self._panel_beat = now, beat
        if now - self._busy_at < self._patience.idle:
            return False
        if self._store.alerts_wait():  # whoever waits for them may have closed the panel for that
            self._busy_at = now  # looked at again after the same while, not ten times a second
            return False
        return self._store.retire(SUPERVISOR_LEASE, owner=self._who)

    def stop(self) -> None:
        """Give the lease back. The trainer goes on."""
        self._store.release_lease(SUPERVISOR_LEASE, owner=self._who)


def holder_alive(who: str, heartbeat_at: float, *, now: float) -> bool:
    """Whether the holder of a lease lives: by its process here, by its heartbeat when it is not of this boot.

    A heartbeat from the future (a clock set back) counts as stale after the same time as one from the past.
    """
    if processes.same_boot(who):
        return processes.alive(who)
    return abs(now - heartbeat_at) < LEASE_STALE_S


@contextlib.contextmanager
def unless_refused() -> Iterator[None]:
    """A change that the job's state no longer allows is left. Raises UserError where the database does not answer."""
    try:
        yield
    except JobError as error:
        if no_answer(error):
            raise


@contextlib.contextmanager
def told_later(what: str) -> Iterator[None]:
    """What fails for one job, for the database does not answer or no file can be opened, is tried again and holds up
    no other."""
    try:
        yield
    except (UserError, OSError) as error:
        log(f"{what} is looked after later: {error}")


def check_room(folder: Path) -> None:
    """Raises OSError (ENOSPC) when the disk of `folder` has less room than a trainer needs to begin."""
    free = shutil.disk_usage(folder).free
    if free < START_BYTES:
        reason = say("start.room", size=format_bytes(free), needed=format_bytes(START_BYTES))
        raise OSError(errno.ENOSPC, reason, str(folder))


def can_start(folder: Path) -> bool:
    """Whether room and files can be had. Tried, since a quota is in no figure that could be asked for; nothing is
    left. Memory for another process is only found out by starting one."""
    opened: list[int] = []
    try:
        check_room(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(2**20))
            file.flush()
            os.fsync(file.fileno())
            for _ in range(8):
                opened += os.pipe()
    except OSError:
        return False
    finally:
        for descriptor in opened:
            os.close(descriptor)
    return True


def bytes_in(folder: Path) -> int:
    """What the files in a run's folder take, less its log. Files that go meanwhile are not counted."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                total += 0 if name == "trainer.log" else (Path(place) / name).stat().st_size
    return total


def _watched(
    job: Job, who: str | None, process: subprocess.Popen[bytes] | None, now: float, *, attempt: int | None = None
) -> _Trainer:
    events = None if who is None or not processes.same_boot(who) else processes.memory_events(processes.pid_of(who))
    return _Trainer(
        job=job.id,
        attempt=job.attempt if attempt is None else attempt,
        device=job.asked_config.device,
        who=who,
        process=process,
        since=now,
        events=events,
        kills_before=processes.out_of_memory_kills(events),
    )


def ensure_running(data_dir: Path) -> None:
    """Start a supervisor for this folder, apart from this process, unless a living one has the lease.

    Takes a few milliseconds and does not wait for it. Called twice at once, two may start; the second one leaves.
    """
    with Store(data_dir) as store:
        holder = store.lease(SUPERVISOR_LEASE)
        if holder is not None and holder_alive(*holder, now=store.clock()):
            return
        folder = store.data_dir
    place = folder / LOG
    with contextlib.suppress(OSError):
        if place.stat().st_size > LOG_BYTES:
            place.replace(place.with_suffix(".log.1"))
    command = processes.python_module("jobs.supervisor", "--data-dir", str(folder))
    _started[:] = [process for process in _started if process.poll() is None]
    try:
        _started.append(processes.spawn(command, log=place))
    except OSError as error:
        raise JobError(
            f"The job supervisor could not be started: {error.strerror or error}",
            "Free some memory or disk, and retry.",
        ) from error


_started: list[subprocess.Popen[bytes]] = []  # kept, so that ended ones are collected


def main(arguments: Sequence[str] | None = None) -> int:
    """Hold the lease and work until there is nothing to do or a signal comes."""
    parser = argparse.ArgumentParser(prog="python -m jobs.supervisor", description=__doc__.partition("\n")[0])
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--idle", type=float, default=Patience.idle, help="seconds without work until it leaves")
    options = parser.parse_args(arguments)
    asked = signal_flag()  # before the lease is taken, so that it is given back even when the signal comes early
    try:
        with Store(options.data_dir) as store:
            store.check()
            if notice := file_systems.notice(store.data_dir):
                log(notice)
            supervisor = Supervisor(store, patience=Patience(idle=options.idle))
            if not supervisor.start(wait=time.sleep):
                holder = store.lease(SUPERVISOR_LEASE)
                pid = processes.pid_of(holder[0]) if holder else "unknown"
                log(f"Another supervisor (pid {pid}) works on {store.data_dir}; this one leaves.")
                return 0
            with Sender(store, owner=processes.own_identity(), say=log), Freezer(store, say=log):
                loop(supervisor, asked=asked)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def loop(supervisor: Supervisor, *, asked: Callable[[], bool]) -> None:
    """Step until it wants to leave or `asked()` is true. A locked database only makes it late."""
    while not asked():
        try:
            if not supervisor.step(time.monotonic()):
                return
        except UserError as error:
            log(f"will try again: {error}")
        time.sleep(POLL_S)
    log("Asked to leave; trainers go on.")
    with contextlib.suppress(UserError):
        supervisor.stop()


def signal_flag() -> Callable[[], bool]:
    """Install handlers for TERM and INT that set a flag and nothing else. The result tells whether it is set."""
    seen: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        seen.append(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, note)
    return lambda: bool(seen)


_said: dict[str, float] = {}


def log(message: str) -> None:
    """A line in supervisor.log, the same one at most once a minute: what fails in every round is not to fill a disk."""
    now = time.monotonic()
    if now - _said.get(message, float("-inf")) < SAME_LINE_S:
        return
    if len(_said) >= 1000:
        _said.clear()
    _said[message] = now
    print(f"{time.strftime('%Y-%m-%d %H:%M:%S')} {message}", flush=True)


if __name__ == "__main__":
    lose_what_is_not_taken()
    sys.exit(main())
