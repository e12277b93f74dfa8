"""How a run ends: every exception as a sentence and an exit code, every stop by who asked for it."""

from __future__ import annotations

import errno
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Iterator

import pytest

from jobs.attempt import Attempt, explain, insist
from jobs.run_job import run
from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.errors import CheckpointError, InternalError, JobError, OutOfDisk, Unwritable, WontFit
from vramfit.training.health import watches_of_machine
from vramfit.training.metrics import RunResult, StepMetrics, Telemetry
from vramfit.units import GIB


class OutOfMemoryError(RuntimeError):
    """Named as torch names it."""


@pytest.mark.parametrize(
    ("error", "what", "code"),
    [
        (
            WontFit("Needs 27.4 GiB", needed_bytes=2, available_bytes=1, suggestions=["Use QLoRA."]),
            "Needs 27.4 GiB.",
            2,
        ),
        (CheckpointError("All 2 are damaged.", "Start again."), "All 2 are damaged.", 2),
        (InternalError("A sum was wrong"), "A sum was wrong.", 1),
        (MemoryError(), "The machine ran out of memory: no more could be had.", 2),
        (
            OutOfMemoryError("CUDA out of memory. Tried 2 GiB.\nDetails"),
            "The device ran out of memory: CUDA out of memory. Tried 2 GiB.",
            2,
        ),
        (
            RuntimeError("DefaultCPUAllocator: can't allocate memory: 9 bytes"),
            "The machine ran out of memory: DefaultCPUAllocator: can't allocate memory: 9 bytes.",
            2,
        ),
        (OSError(errno.ENOSPC, "No space left on device", "/x/y"), "The disk is full: /x/y.", 2),
        (
            OSError(errno.EMFILE, "Too many open files"),
            "No further file could be opened (Too many open files).",
            2,
        ),
        (
            OSError(errno.EIO, "Input/output error", "/x/y"),
            "The disk did not do what was asked of it (Input/output error: /x/y).",
            2,
        ),
        (
            RuntimeError("CUDA error: uncorrectable ECC error encountered\nDetails"),
            "The card was lost while it trained: CUDA error: uncorrectable ECC error encountered.",
            2,
        ),
        (KeyError(), "Unexpected error (KeyError).", 1),
    ],
)
def test_every_exception_becomes_a_sentence(error: Exception, what: str, code: int) -> None:
    failure = explain(error)
    assert (failure.what, failure.code) == (what, code)
    assert failure.remedy.endswith(".")


def test_case_151_a_lost_card_interrupts_and_a_bug_that_speaks_of_one_does_not() -> None:
    assert explain(RuntimeError("UR error: UR_RESULT_ERROR_DEVICE_LOST")).state == "interrupted"
    assert explain(ValueError("device lost")).state == "failed"


@pytest.mark.parametrize(
    "error",
    [
        OutOfDisk("The disk filled up while a checkpoint of 3 GiB was written", "Free some space and resume the run."),
        OSError(errno.ENOSPC, "No space left on device", "/x/y"),
        OSError(errno.EDQUOT, "Disk quota exceeded"),
    ],
)
@pytest.mark.parametrize(("asked", "state"), [(False, "paused"), (True, "cancelled")])
def test_case_123_a_full_disk_pauses_the_run_with_the_remedy_and_resume_goes_on(
    store: Store, job: int, error: Exception, asked: bool, state: str
) -> None:
    def fail(session: Attempt, resume: bool) -> RunResult:
        if asked:
            store.request_stop(job)
        raise error

    assert run(store, job, attempt=1, train=fail) == 2
    found = store.job(job)
    assert found.state == state
    assert "disk" in (found.failure or "").lower()
    assert "resume the run" in (found.remedy or "")
    assert found.owner is None
    store.enqueue(job)
    store.claim_next("me")
    assert run(store, job, attempt=2, train=lambda session, resume: result(stopped=False)) == 0
    assert (store.job(job).state, store.job(job).failure) == ("succeeded", None)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_folder_that_takes_no_writes_pauses_the_run_and_another_file_does_not(
    store: Store, job: int, code: int
) -> None:
    folder = store.job(job).folder

    def fail(session: Attempt, resume: bool) -> RunResult:
        raise OSError(code, os.strerror(code), str(folder / "blocks" / "3"))

    assert run(store, job, attempt=1, train=fail) == 2
    found = store.job(job)
    assert found.state == "paused"
    assert found.failure == f"The run's folder takes no writes ({os.strerror(code)}: {folder / 'blocks' / '3'})."
    assert "then resume the run" in (found.remedy or "")
    wrapped = Unwritable("A checkpoint could not be written", "Mount the drive.")
    for error, state in ((OSError(code, os.strerror(code), "/elsewhere"), "failed"), (wrapped, "paused")):
        store.enqueue(job)
        claimed = store.claim_next("me")
        assert claimed is not None

        def fail_otherwise(session: Attempt, resume: bool, error: Exception = error) -> RunResult:
            raise error

        run(store, job, attempt=claimed.attempt, train=fail_otherwise)
        assert store.job(job).state == state


@pytest.fixture
def job(store: Store) -> Iterator[int]:
    before = signal.getsignal(signal.SIGTERM)
    id_ = store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    store.claim_next("me")
    yield id_
    signal.signal(signal.SIGTERM, before)


def result(*, stopped: bool) -> RunResult:
    return RunResult(
        steps=3,
        total_steps=9,
        stopped=stopped,
        final_loss=0.5,
        eval_loss=0.6,
        peak_allocated_bytes=77,
        export=None if stopped else "/runs/x/export",
    )


def test_success_is_noted_with_its_figures(store: Store, job: int, eventually: Callable[..., None]) -> None:
    def train(session: Attempt, resume: bool) -> RunResult:
        eventually(lambda: len(store.telemetry(job).columns["host_bytes"]) > 0)
        return result(stopped=False)

    assert run(store, job, train=train) == 0
    ended = store.job(job)
    assert (ended.state, ended.final_loss, ended.eval_loss, ended.peak_allocated_bytes, ended.export) == (
        "succeeded",
        0.5,
        0.6,
        77,
        "/runs/x/export",
    )
    assert store.telemetry(job).columns["host_bytes"][0] > 0


def test_a_running_trainer_hears_stop_and_beats(store: Store, job: int) -> None:
    def train(session: Attempt, resume: bool) -> RunResult:
        assert not resume
        assert store.job(job).state == "running"
        assert store.job(job).phase.name == "loading"
        assert not session.should_stop()
        store.request_stop(job)
        deadline = time.monotonic() + 2
        while not session.should_stop():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return result(stopped=True)

    assert run(store, job, train=train) == 0
    assert store.job(job).state == "cancelled"
    assert store.job(job).final_loss == 0.5


def test_term_saves_and_ends_as_interrupted(store: Store, job: int) -> None:
    def train(session: Attempt, resume: bool) -> RunResult:
        signal.raise_signal(signal.SIGTERM)
        assert session.should_stop()
        return result(stopped=True)

    assert run(store, job, train=train) == 0
    ended = store.job(job)
    assert (ended.state, ended.failure) == (
        "interrupted",
        "The system asked the trainer to end; it saved its work at step 3.",
    )


def test_a_run_that_finished_before_it_noticed_the_stop_succeeded(store: Store, job: int) -> None:
    def train(session: Attempt, resume: bool) -> RunResult:
        store.request_stop(job)
        return result(stopped=False)

    run(store, job, train=train)
    assert store.job(job).state == "succeeded"


def test_only_the_rightful_attempt_trains(store: Store, job: int) -> None:
    with pytest.raises(JobError, match="attempt"):
        run(store, job, attempt=2, train=lambda session, resume: pytest.fail("must not train"))
    assert store.job(job).state == "starting"


def test_a_trainer_that_was_replaced_stops_and_changes_nothing(store: Store, job: int) -> None:
    def train(session: Attempt, resume: bool) -> RunResult:
        store.transition(job, expected=("running",), state="interrupted")
        store.enqueue(job)
        store.claim_next("me")
        deadline = time.monotonic() + 2
        while not session.should_stop():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        return result(stopped=True)

    with pytest.raises(JobError, match="is at attempt 2"):
        run(store, job, train=train)
    assert (store.job(job).state, store.job(job).attempt) == ("starting", 2)


def test_a_change_is_insisted_on_while_the_database_is_locked() -> None:
    tries: list[int] = []

    def locked_twice() -> None:
        tries.append(1)
        if len(tries) < 3:
            raise JobError("locked") from sqlite3.OperationalError("database is locked")

    insist(locked_twice)
    assert len(tries) == 3

    def refused() -> None:
        tries.append(1)
        raise JobError("not your attempt")

    with pytest.raises(JobError, match="not your attempt"):
        insist(refused)
    assert len(tries) == 4, "what is refused is not asked again"


class HotCard:
    """A sampler of a card that is always too hot, and on which the driver shows 10 GiB in use."""

    def read(self, pid: int) -> Telemetry:
        return Telemetry(
            time=time.time(),
            device_bytes=10 * GIB,
            host_bytes=1,
            utilisation=1.0,
            power_watts=300.0,
            temperature_c=93.0,
            slowed_by_heat=True,
        )


def test_what_the_machine_shows_becomes_an_event_once(store: Store, job: int) -> None:
    with Attempt(store, store.job(job)) as attempt:
        step = StepMetrics(
            step=1, time=0.0, loss=1.0, learning_rate=0.1, grad_norm=1.0, tokens=1, tokens_per_s=1.0, step_seconds=1.0,
            epoch=0.0, allocated_bytes=1, reserved_bytes=25 * GIB, resident_bytes=1,
        )  # fmt: skip
        attempt.recorder.steps([step])
        watches = watches_of_machine(24 * GIB)
        for _ in range(20):
            attempt._read_machine(HotCard(), watches)  # type: ignore[arg-type]
        attempt.recorder.flush()
        told = {event.kind: event.message for event in store.events(job)}
        assert [event.kind for event in store.events(job)] == ["heat", "spill"]
        assert "93 °C" in told["heat"]
        assert "holds 25.0 GiB" in told["spill"] and "a card of 24.0 GiB" in told["spill"]
        attempt.finish(result(stopped=False))
