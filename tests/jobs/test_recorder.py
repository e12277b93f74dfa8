"""StoreRecorder: rows appear soon, nothing is lost while the database is locked, and training never waits for it."""

from __future__ import annotations

import dataclasses
import json
import sqlite3
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import processes, schema
from jobs.recorder import PHASE_S, StoreRecorder
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.supervisor import trainer_command
from tests.vramfit.training.conftest import rows_in, small_config
from vramfit.config import RunConfig
from vramfit.training import checkpoint
from vramfit.training.metrics import DriftCheck, Evaluation, Event, PhaseProgress, StepMetrics, Telemetry, Unstored


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


# ---- what a checkpoint carries ----------------------------------------------------------------------------------


def drift(step: int) -> DriftCheck:
    return DriftCheck(step=step, time=float(step), loss=0.01, grad_norm=0.02)


def report(recorder: StoreRecorder, *steps: int) -> None:
    for step in steps:
        recorder.drift(drift(step))
        recorder.steps([metrics(step)])
        recorder.evaluation(Evaluation(step=step, time=float(step), loss=float(step), tokens=9))
        recorder.event(Event(time=float(step), level="info", kind="x", message=f"Step {step}."))


def next_attempt(store: Store, job: int, *, resume_step: int) -> int:
    """The trainer was ended, and another goes on from a checkpoint. Returns its number."""
    store.transition(job, expected=("running",), state="interrupted")
    store.enqueue(job)
    claimed = store.claim_next("me")
    assert claimed is not None
    store.begin_attempt(job, attempt=claimed.attempt, owner="trainer", resume_step=resume_step)
    return claimed.attempt


def is_whole(store: Store, job: int, last: int) -> None:
    """Steps 1 to `last` are on record, each once, with all that was reported of them."""
    steps = list(range(1, last + 1))
    assert store.series(job).columns["step"] == steps
    assert [found.step for found in store.evaluations(job)] == steps
    assert store.drifts(job).columns["step"] == steps
    assert [event.message for event in store.events(job) if event.kind == "x"] == [f"Step {step}." for step in steps]


@pytest.mark.parametrize("written", [False, True], ids=["lost", "written after all"])
def test_rows_that_a_checkpoint_carried_are_there_once_after_a_resume(
    store: Store, job: int, monkeypatch: pytest.MonkeyPatch, written: bool
) -> None:
    """The database is locked while a checkpoint is saved after step 5; then the process is gone, or writes on."""
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    first = store.recorder(job, 1)
    report(first, 1, 2)
    assert first.flush() and first.unstored() == []
    with sqlite3.connect(store.path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        report(first, 3)
        assert not first.flush(timeout_s=0.2)  # these are on their way at times
        report(first, 4, 5)
        carried = json.loads(json.dumps(first.unstored()))
        report(first, 6)
        if not written:
            monkeypatch.setattr(first, "_write", lambda batch: True)  # SIGKILL: what is in memory is no more
            first.close(timeout_s=0.2)
    holder.close()
    if written:
        first.close()
    assert {row["attempt"] for row in carried} == {1}
    assert [row["values"]["step"] for row in carried if row["kind"] == "steps"] == [3, 4, 5]
    with store.recorder(job, next_attempt(store, job, resume_step=5)) as second:
        second.restore(carried)
        report(second, *((6,) if not written else ()), 7)
    if written:  # the event of step 6 is of what was done, and stays; its rows were taken back
        assert store.series(job).columns["step"] == [1, 2, 3, 4, 5, 7]
        assert [event.message for event in store.events(job)] == [f"Step {step}." for step in range(1, 8)]
        assert store.drifts(job).columns["step"] == [1, 2, 3, 4, 5, 7]
    else:
        is_whole(store, job, 7)


def test_rows_that_wait_through_two_attempts_keep_the_number_of_the_first(
    store: Store, job: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Still locked when the run goes on: its next checkpoint carries them, too."""
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    carried = [Unstored(attempt=1, kind="steps", values=dataclasses.asdict(metrics(step))) for step in (1, 2)]
    second = next_attempt(store, job, resume_step=2)
    with store.recorder(job, second) as recorder, sqlite3.connect(store.path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        recorder.restore(carried)
        recorder.steps([metrics(3)])
        assert not recorder.flush(timeout_s=0.2)
        waits = [(row["attempt"], row["values"]["step"]) for row in recorder.unstored()]
        holder.rollback()
    holder.close()
    assert waits == [(1, 1), (1, 2), (second, 3)]
    assert store.series(job).columns["step"] == [1, 2, 3]


def test_what_an_older_attempt_had_on_record_gives_way_to_what_was_carried(store: Store, job: int) -> None:
    """Attempt 1 recorded steps 1 to 4; attempt 2 did step 3 anew, and only its checkpoint has that."""
    with store.recorder(job, 1) as recorder:
        recorder.steps([metrics(step) for step in range(1, 5)])
    anew = dataclasses.replace(metrics(3), loss=7.0)
    assert next_attempt(store, job, resume_step=4) == 2  # whose every word was lost
    third = next_attempt(store, job, resume_step=3)
    assert store.series(job).columns["loss"] == [1.0, 1.0, 1.0]
    assert store.record(job, attempt=third, steps=[anew], made_by=2)
    assert store.series(job).columns["loss"] == [1.0, 1.0, 7.0]


def test_nothing_of_an_attempt_that_is_over_is_written_for_an_earlier_one(store: Store, job: int) -> None:
    second = next_attempt(store, job, resume_step=0)
    assert not store.record(job, attempt=second - 1, made_by=1, steps=[metrics(1)])
    with store.recorder(job, second - 1) as recorder:
        recorder.restore([Unstored(attempt=1, kind="steps", values=dataclasses.asdict(metrics(1)))])
        assert recorder.flush()
    assert store.job(job).step == 0


def test_fields_of_another_version_are_passed_over_and_rows_that_are_none_refused(store: Store, job: int) -> None:
    with store.recorder(job, 1) as recorder:
        recorder.restore([Unstored(attempt=1, kind="events", values={**event_values(), "colour": "red"})])
        for values in ({}, None):
            with pytest.raises(TypeError):
                recorder.restore([Unstored(attempt=1, kind="events", values=values)])  # type: ignore[typeddict-item]
        with pytest.raises(KeyError):
            recorder.restore([Unstored(attempt=1, kind="jobs", values={})])  # type: ignore[typeddict-item]
    assert [event.message for event in store.events(job)] == ["Said."]


def event_values() -> dict[str, Any]:
    return dataclasses.asdict(Event(time=0.0, level="info", kind="x", message="Said."))


def start(store: Store, job: int) -> processes.Apart:
    """A real trainer of the job's next attempt."""
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    claimed = store.claim_next("me")
    assert claimed is not None and claimed.id == job
    return processes.spawn(trainer_command(claimed, store.data_dir), log=claimed.log)


def carried_steps(store: Store, job: int) -> list[int]:
    """Of the newest complete checkpoint."""
    rows = checkpoint.peek(store.job(job).checkpoints).get("unstored", [])
    return [row["values"]["step"] for row in rows if row["kind"] == "steps"]


def test_a_database_that_is_locked_over_a_save_and_then_sigkill_leave_no_hole(
    store: Store, tmp_path: Path, eventually: Callable[..., None]
) -> None:
    """A real trainer, whose checkpoint is complete while its steps are in its memory alone; and then it is gone."""
    often = {"checkpoint_every": 8, "evaluate_every": 8}
    job = store.add_job(small_config(rows_in(tmp_path), schedule={"max_steps": 120}, output=often))
    first = start(store, job)
    eventually(lambda: store.job(job).step >= 1, seconds=120)
    with sqlite3.connect(store.path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        eventually(lambda: bool(carried_steps(store, job)), seconds=120)
        first.kill()
        first.wait()
        carried, saved = carried_steps(store, job), store.job(job).newest_checkpoint
        assert carried[-1] == saved > store.job(job).step, "no reader of the database knows of it"
        holder.rollback()
    holder.close()
    store.transition(job, expected=("running",), state="interrupted")
    store.enqueue(job)
    assert start(store, job).wait(timeout=240) == 0
    assert store.job(job).state == "succeeded"
    assert store.job(job).checkpoint_before == saved
    assert store.series(job).columns["step"] == list(range(1, 121))
    assert [found.step for found in store.evaluations(job)] == list(range(8, 121, 8))
