"""StoreRecorder: rows appear soon, nothing is lost while the database is locked, and training never waits for it."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable

import pytest

from jobs import schema
from jobs.recorder import PHASE_S
from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.training.metrics import Event, PhaseProgress, StepMetrics, Telemetry


def metrics(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=float(step),
        loss=1.0,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens=8,
        tokens_per_s=80.0,
        step_seconds=0.1,
        epoch=0.0,
        allocated_bytes=1,
        reserved_bytes=0,
        resident_bytes=2,
    )


@pytest.fixture
def job(store: Store) -> int:
    id_ = store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    store.claim_next("me")
    store.begin_attempt(id_, attempt=1, owner="trainer")
    return id_


def test_a_row_appears_while_the_next_step_takes_long(store: Store, job: int, eventually: Callable[..., None]) -> None:
    with store.recorder(job, 1) as recorder:
        recorder.steps([metrics(1)])
        eventually(lambda: store.job(job).step == 1, seconds=10)


def test_a_new_phase_appears_at_once_and_its_progress_five_times_a_second(
    store: Store, job: int, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[PhaseProgress] = []
    record = store.record

    def counted(*arguments: object, **values: object) -> bool:
        if values["phase"] is not None:
            written.append(values["phase"])  # type: ignore[arg-type]
        return record(*arguments, **values)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "record", counted)
    with store.recorder(job, 1) as recorder:
        began = time.monotonic()
        recorder.phase(PhaseProgress(name="loading"))
        eventually(lambda: bool(written), seconds=10)
        while time.monotonic() - began < 1.0:
            recorder.phase(PhaseProgress(name="tokenising", done=time.monotonic(), total=1.0))
            time.sleep(0.005)
        recorder.phase(PhaseProgress(name="tokenising", done=1.0, total=1.0))
    assert 2 <= len(written) <= 4 + (time.monotonic() - began) / PHASE_S
    assert store.job(job).phase == PhaseProgress(name="tokenising", done=1.0, total=1.0), "the last one always"


def test_two_hundred_rows_go_at_once(
    store: Store, job: int, eventually: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jobs.recorder.FLUSH_S", 600.0)  # so that only their number can send them
    with store.recorder(job, 1) as recorder:
        recorder.steps([metrics(step) for step in range(1, 201)])
        eventually(lambda: store.job(job).step == 200, seconds=10)


def test_a_locked_database_ends_nothing_and_loses_nothing(
    store: Store, job: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A lock of ten seconds, short: a busy timeout of 0.4 s instead of ten, and a lock of 1 s."""
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.4)
    holder = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    with store.recorder(job, 1) as recorder:
        holder.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(1.0, holder.close)
        timer.start()
        slowest = 0.0
        for step in range(1, 101):
            began = time.perf_counter()
            recorder.steps([metrics(step)])
            recorder.telemetry(
                Telemetry(
                    time=float(step),
                    device_bytes=None,
                    host_bytes=step,
                    utilisation=None,
                    power_watts=None,
                    temperature_c=None,
                )
            )
            slowest = max(slowest, time.perf_counter() - began)
            time.sleep(0.01)
        recorder.event(Event(time=0.0, level="info", kind="x", message="Said while locked."))
        timer.join()
    assert slowest < 0.9, "training did not wait for the lock"
    assert store.series(job).columns["step"] == list(range(1, 101))
    assert store.telemetry(job).columns["host_bytes"] == list(range(1, 101))
    assert len(store.events(job)) == 1
    assert capsys.readouterr().err.count("metrics wait in memory") == 1


def test_case_132_two_runs_write_while_a_third_program_holds_the_database(
    store: Store, job: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queued run and one in the foreground: both train on, lose no row and end as what they are."""
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.1)
    other = store.begin_foreground(RunConfig(), owner="terminal").id
    holder = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    with store.recorder(job, 1) as first, store.recorder(other, 1) as second:
        holder.execute("BEGIN IMMEDIATE")
        timer = threading.Timer(0.5, holder.close)
        timer.start()
        for step in range(1, 31):
            first.steps([metrics(step)])
            second.steps([metrics(step)])
            time.sleep(0.01)
        timer.join()
    for id_ in (job, other):
        assert store.series(id_).columns["step"] == list(range(1, 31))
        store.transition(id_, expected=("running",), state="succeeded", attempt=1)
        assert store.job(id_).state == "succeeded"


def test_what_cannot_be_stored_at_the_end_is_in_the_log(
    store: Store, job: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    recorder = store.recorder(job, 1)
    with sqlite3.connect(store.path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        recorder.steps([metrics(1)])
        recorder.close(timeout_s=0.3)
    holder.close()
    assert 'not stored: steps {"step": 1' in capsys.readouterr().err


def test_rows_of_an_attempt_that_was_replaced_are_dropped(store: Store, job: int) -> None:
    with store.recorder(job, 1) as recorder:
        recorder.steps([metrics(1)])
        assert recorder.flush()
        store.transition(job, expected=("running",), state="interrupted")
        store.enqueue(job)
        store.claim_next("me")
        recorder.steps([metrics(2)])
        assert recorder.flush()
        assert recorder.fenced
    assert store.job(job).step == 1


def test_rows_are_on_disk_before_the_checkpoint_that_counts_on_them(store: Store, job: int) -> None:
    with store.recorder(job, 1) as recorder:
        recorder.steps([metrics(1)])
        recorder.phase(PhaseProgress(name="saving"))
        assert store.job(job).step == 1, "written before the call returned"


def test_flush_tells_when_it_was_in_vain(store: Store, job: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    with store.recorder(job, 1) as recorder:
        with sqlite3.connect(store.path, isolation_level=None) as holder:
            holder.execute("BEGIN IMMEDIATE")
            recorder.steps([metrics(1)])
            assert not recorder.flush(timeout_s=0.2)
        holder.close()
        assert recorder.flush()
    assert store.job(job).step == 1


@pytest.mark.parametrize(("times", "lost"), [(1, False), (2, False), (3, True)])
def test_a_fault_of_ours_is_tried_again_and_with_one_batch_does_not_stop_the_next(
    store: Store, job: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], times: int, lost: bool
) -> None:
    record, faults = store.record, [ValueError("ours")] * times

    def faulty(*arguments: object, **values: object) -> bool:
        if faults:
            raise faults.pop()
        return record(*arguments, **values)  # type: ignore[arg-type]

    monkeypatch.setattr(store, "record", faulty)
    with store.recorder(job, 1) as recorder:
        recorder.steps([metrics(1)])
        recorder.flush()
        recorder.steps([metrics(2)])
    assert store.series(job).columns["step"] == ([2] if lost else [1, 2])
    assert ('not stored: steps {"step": 1' in capsys.readouterr().err) == lost
