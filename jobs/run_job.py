"""The trainer's process: python -m jobs.run_job ID --data-dir DIR [--attempt N]

Started by the supervisor in a session of its own; it outlives panel and supervisor. Output goes to the run's
trainer.log. Exit code 0: done or stopped as asked, 2: the user's side is at fault, 1: ours.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Literal

from jobs import last_words, processes
from jobs.attempt import Attempt, insist
from jobs.beside import left_beside
from jobs.job import Job
from jobs.store import Store, no_answer
from vramfit.console import lose_what_is_not_taken
from vramfit.engine.accelerators import prepare_allocator
from vramfit.engine.threads import let_threads_sleep
from vramfit.errors import CheckpointError, UserError
from vramfit.faults import reach
from vramfit.hardware.devices import probe
from vramfit.sentences import ended, say
from vramfit.training.inputs import IfChanged, Marks, changes, hub_mark, marks_of, settle_changes
from vramfit.training.metrics import Event, PhaseProgress, RunResult

Train = Callable[[Attempt, bool], RunResult]


def main(arguments: Sequence[str] | None = None) -> int:
    """Take up the attempt, train, note how it ended. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m jobs.run_job", description=__doc__.partition("\n")[0])
    parser.add_argument("id", type=int)
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--attempt", type=int, help="refuse to run when this is not the job's attempt any more")
    options = parser.parse_args(arguments)
    let_threads_sleep()  # before anything imports torch
    prepare_allocator()  # the same
    try:
        with Store(options.data_dir) as store:
            return run(store, options.id, attempt=options.attempt)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def run(store: Store, id_: int, *, attempt: int | None = None, train: Train | None = None) -> int:
    """Run the current attempt of a job in this process. `train` is what trains (tests give their own).

    Raises JobError when the attempt is not this process's to run.
    """
    job = store.job(id_)
    number = job.attempt if attempt is None else attempt
    saved, was_saved = job.newest_checkpoint, store.saved_step(id_)
    gone = was_saved > 0 and saved == 0  # then what is on record stays: it is all that is left of the run
    begins_at = job.step if gone else saved
    _begin(store, job, attempt=number, resume_step=begins_at)
    with Attempt(store, store.job(id_), may_leave=True) as session:
        _listen(session)
        session.recorder.phase(PhaseProgress(name="loading", detail="torch"))
        session.recorder.flush()  # shown before the seconds that importing torch takes
        try:
            if gone:
                raise _checkpoints_gone(job, was_saved)
            result = (train or _train)(session, saved > 0)
        except BaseException as error:
            if isinstance(error, UserError):  # of any other error the traceback goes to the log
                print(f"failed: {error}", file=sys.stderr)
            return session.fail(error)
        session.finish(result)
        return 0


def _begin(store: Store, job: Job, *, attempt: int, resume_step: int) -> None:
    """Take up the attempt. Where the database does not answer, the run waits for a person, and why is left to the
    supervisor. Raises UserError."""
    try:
        insist(
            lambda: store.begin_attempt(
                job.id, attempt=attempt, owner=processes.own_identity(), resume_step=resume_step
            )
        )
    except UserError as error:
        if no_answer(error):
            last_words.reserve(job.folder)
            values = {"failure": ended(error.what), "remedy": error.remedy}
            last_words.note(job.folder, attempt=attempt, state="paused", values=values)
        raise


def _checkpoints_gone(job: Job, step: int) -> CheckpointError:
    """Somebody removed what the run was to go on from: to begin anew is for a person to ask for."""
    what = say("gone.checkpoints", job=job.id, step=f"{step:,}", folder=str(job.checkpoints))
    return CheckpointError(what, say("cure.checkpoints"))


def _train(session: Attempt, resume: bool) -> RunResult:
    job: Job = session.job
    if job.config_error is not None:
        raise job.config_error
    if_changed = "go on" if job.accepted else job.config.output.if_changed
    marks = check_inputs(session, if_changed)
    reach("trainer: loading")
    from vramfit.training.loop import train  # seconds, which what was refused above has not to wait for

    others = [other for other in session.store.active_jobs() if other.id != job.id]
    machine, told = left_beside(probe(job.folder), others)
    for message in told:
        tell(session, "info", "memory", message)
    return train(
        job.asked_config,
        folder=job.folder,
        cache=session.store.data_dir / "cache",
        recorder=session.recorder,
        should_stop=session.should_stop,
        resume=resume,
        if_changed=if_changed,
        machine=machine,
        opened=lambda: check_hub(session, if_changed, told=marks),
    )


def check_inputs(session: Attempt, if_changed: IfChanged) -> Marks:
    """Tell what of the job's data, model and libraries is no longer as it was when the job was queued. Returns their
    marks now.

    Raises Changed or CheckpointError where the run is not to go on with that.
    """
    job, now = session.job, marks_of(session.job.config)
    if job.frozen is None:
        session.store.freeze(job.id, config=job.config, marks=now)
        return now
    for message in settle_changes(changes(job.frozen, now), if_changed, since="the run was queued"):
        tell(session, "warning", "changed", message)
    return now


def check_hub(session: Attempt, if_changed: IfChanged, *, told: Marks) -> None:
    """As `check_inputs`, for a model of the hub once it is loaded: which commit it is, is decided by loading it.

    `told` are the marks of before. A first commit becomes a mark of the job. Raises as `check_inputs`.
    """
    job = session.store.job(session.job.id)
    now, frozen = hub_mark(job.config), job.frozen or {}
    before = frozen.get("model", {})
    if not now.keys() <= before.keys():
        session.store.mark_more(job.id, attempt=job.attempt, marks={**frozen, "model": {**before, **now}})
    if now.items() <= told["model"].items():
        return
    for message in settle_changes(changes({"model": before}, {"model": now}), if_changed, since="the run was queued"):
        tell(session, "warning", "changed", message)


def tell(session: Attempt, level: Literal["info", "warning"], kind: str, message: str) -> None:
    """An event of the run, for the log as well."""
    print(message, flush=True)
    session.recorder.event(Event(time=time.time(), level=level, kind=kind, message=message))


def _listen(session: Attempt) -> None:
    """TERM (and Windows' break) only sets a flag: the loop saves and ends at the next step."""

    def ask(number: int, frame: FrameType | None) -> None:
        session.terminated = True

    signal.signal(signal.SIGTERM, ask)
    if sys.platform == "win32":
        signal.signal(signal.SIGBREAK, ask)


if __name__ == "__main__":
    lose_what_is_not_taken()
    sys.exit(main())
