"""The store: states change once and only as expected, curves are thinned the same for everyone, nothing doubles."""

from __future__ import annotations

import errno
import json
import math
import sqlite3
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs.job import ACTIVE, FINAL, Job, Series
from jobs.store import SUPERVISOR_LEASE, Store, stride_for
from vramfit.config import RunConfig
from vramfit.errors import JobError, OutOfDisk
from vramfit.training.metrics import DriftCheck, Evaluation, Event, PhaseProgress, StepMetrics, Telemetry, TextSample


def metrics(step: int, *, loss: float | None = None, allocated_bytes: int = 100) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=1000.0 + step,
        loss=1.0 / step if loss is None else loss,
        learning_rate=0.1,
        grad_norm=2.0,
        tokens=10,
        tokens_per_s=50.0,
        step_seconds=0.2,
        epoch=step / 10,
        allocated_bytes=allocated_bytes,
        reserved_bytes=200,
        resident_bytes=300,
    )


def telemetry(number: int) -> Telemetry:
    return Telemetry(
        time=float(number), device_bytes=None, host_bytes=number, utilisation=0.5, power_watts=None, temperature_c=None
    )


def claimed(store: Store, config: RunConfig | None = None) -> Job:
    """A job in state starting, attempt 1."""
    store.add_job(config or RunConfig())
    assert store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    job = store.claim_next("me")
    assert job is not None
    return job


def running(store: Store, *, rows: int = 0) -> Job:
    job = claimed(store)
    store.begin_attempt(job.id, attempt=1, owner="trainer")
    if rows:
        store.record(job.id, attempt=1, steps=[metrics(step) for step in range(1, rows + 1)])
    return store.job(job.id)


# ---- jobs ---------------------------------------------------------------------------------------------------------


def test_a_job_comes_back_as_it_was_added(store: Store) -> None:
    config = RunConfig(name="Привет: a/b\\c 数据?", seed=7)
    job = store.job(store.add_job(config, forecast={"steps": 40, "seconds": 3.5}))
    assert job.config == config
    assert (job.state, job.attempt, job.step, job.total_steps) == ("queued", 0, 0, 40)
    assert job.forecast == {"steps": 40, "seconds": 3.5}
    assert job.folder.parent == store.data_dir / "runs"
    assert job.folder.name == "0001-привет-a-b-c-数据"
    assert RunConfig.from_file(job.folder / "config.json") == config


def test_a_run_never_gets_a_folder_that_is_there_already(store: Store) -> None:
    (store.data_dir / "runs" / "0001-same").mkdir()
    assert store.job(store.add_job(RunConfig(name="same"))).folder.name == "0001-same-2"
    assert store.job(store.add_job(RunConfig())).name == "starter pretrain"
    assert store.job(store.add_job(RunConfig(name="///"))).folder.name == "0003-run"


def test_no_job_remains_when_its_folder_cannot_be_made(store: Store) -> None:
    (store.data_dir / "runs").rmdir()
    (store.data_dir / "runs").write_text("in the way", encoding="utf-8")
    with pytest.raises(JobError, match="cannot be written"):
        store.add_job(RunConfig())
    assert store.jobs() == []


def test_jobs_are_listed_newest_first_and_wait_in_order(store: Store) -> None:
    ids = [store.add_job(RunConfig()) for _ in range(5)]
    assert [job.id for job in store.jobs(limit=3)] == ids[:1:-1]
    assert store.queue() == ids
    store.request_stop(ids[1])
    assert store.queue() == [ids[0], *ids[2:]]
    store.enqueue(ids[1])
    assert store.queue() == [ids[0], *ids[2:], ids[1]], "at the end again"


def test_an_unknown_job_is_an_error_with_a_remedy(store: Store) -> None:
    for ask in (store.job, store.request_stop, store.enqueue, store.series, store.telemetry, store.log_tail):
        with pytest.raises(JobError, match="There is no job 9") as caught:
            ask(9)
        assert caught.value.remedy
    assert store.events(9) == []


# ---- changes of state ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [*ACTIVE, "queued"])
def test_a_change_names_what_it_expects(store: Store, state: str) -> None:
    job = running(store)
    with pytest.raises(JobError, match="is running and cannot become"):
        store.transition(job.id, expected=("queued", "failed"), state=state)
    assert store.job(job.id).state == "running"


def test_a_change_for_an_older_attempt_is_refused(store: Store) -> None:
    job = running(store)
    with pytest.raises(JobError, match="is at attempt 1, so attempt 0 may not"):
        store.transition(job.id, expected=("running",), state="failed", attempt=0)
    store.transition(job.id, expected=("running",), state="failed", attempt=1, failure="It broke.", final_loss=math.nan)
    ended = store.job(job.id)
    assert (ended.state, ended.failure, ended.final_loss, ended.owner) == ("failed", "It broke.", None, None)
    assert ended.finished_at is not None


def test_stop_means_what_the_state_allows(store: Store) -> None:
    waiting, draft = store.add_job(RunConfig()), store.add_job(RunConfig(), draft=True)
    assert store.request_stop(waiting) == "cancelled"
    assert store.request_stop(waiting) == "cancelled"
    assert store.request_stop(draft) == "cancelled"
    job = running(store)
    assert not store.stopping(job.id, attempt=1)
    assert store.request_pause(job.id) == "pausing"
    assert store.request_stop(job.id) == "stopping", "a stop outranks a pause"
    assert store.request_pause(job.id) == "stopping"
    assert store.stopping(job.id, attempt=1)
    assert store.job(job.id).stop_requested
    store.transition(job.id, expected=("stopping",), state="cancelled", attempt=1)
    assert store.request_stop(job.id) == "cancelled"


def test_a_stop_before_the_trainer_says_hello_is_not_forgotten(store: Store) -> None:
    job = claimed(store)
    store.request_stop(job.id)
    assert store.begin_attempt(job.id, attempt=1, owner="trainer") == "stopping"
    assert store.stopping(job.id, attempt=1)


def test_an_attempt_is_begun_once_and_by_the_rightful_one(store: Store) -> None:
    job = claimed(store)
    with pytest.raises(JobError, match="is at attempt 1, so attempt 2"):
        store.begin_attempt(job.id, attempt=2, owner="trainer")
    store.begin_attempt(job.id, attempt=1, owner="trainer")
    with pytest.raises(JobError):
        store.begin_attempt(job.id, attempt=1, owner="a second trainer")
    store.set_owner(job.id, attempt=1, owner="a launcher")
    assert store.job(job.id).owner == "trainer"


def test_only_the_holder_of_the_lease_claims_and_only_one_job_at_a_time(store: Store) -> None:
    store.add_job(RunConfig())
    with pytest.raises(JobError, match="Another supervisor"):
        store.claim_next("me")
    job = claimed(store)
    assert (job.state, job.attempt) == ("starting", 1)
    assert store.claim_next("me") is None
    store.transition(job.id, expected=("starting",), state="failed", attempt=1)
    following = store.claim_next("me")
    assert following is not None and following.id == job.id + 1


def test_many_threads_that_claim_get_one_job(store: Store) -> None:
    for _ in range(3):
        store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    with ThreadPoolExecutor(8) as pool:
        got = [job for job in pool.map(lambda _: store.claim_next("me"), range(16)) if job]
    assert [job.id for job in got] == [1]
    assert [job.attempt for job in store.jobs()] == [0, 0, 1]


def test_a_resumed_job_forgets_its_failure_and_gets_a_new_attempt(store: Store) -> None:
    job = running(store)
    store.transition(job.id, expected=("running",), state="failed", attempt=1, failure="It broke.", remedy="Mend it.")
    store.enqueue(job.id)
    waiting = store.job(job.id)
    assert (waiting.state, waiting.failure, waiting.remedy, waiting.finished_at) == ("queued", None, None, None)
    again = store.claim_next("me")
    assert again is not None and (again.id, again.attempt) == (job.id, 2)
    store.transition(job.id, expected=("starting",), state="succeeded")
    with pytest.raises(JobError, match="is succeeded and cannot become queued"):
        store.enqueue(job.id)


def test_a_lease_passes_only_from_the_dead(store: Store) -> None:
    assert store.take_lease("x", owner="a", alive=lambda *_: True)
    assert not store.take_lease("x", owner="b", alive=lambda *_: True)
    assert store.take_lease("x", owner="b", alive=lambda owner, _: owner != "a")
    assert not store.renew_lease("x", owner="a")
    assert store.renew_lease("x", owner="b")
    store.release_lease("x", owner="a")
    assert store.lease("x")[0] == "b"


# ---- rows ---------------------------------------------------------------------------------------------------------


def test_what_was_recorded_comes_back(store: Store) -> None:
    job = running(store)
    evaluation = Evaluation(step=2, time=5.0, loss=1.5, tokens=100)
    sample = TextSample(step=0, stage="before", prompt="Once", text="upon\n a time 🎈")
    event = Event(time=1.0, level="warning", kind="skipped", message="It skipped a step.", step=2)
    phase = PhaseProgress(name="tokenising", done=5, total=10, unit="rows")
    assert store.record(
        job.id,
        attempt=1,
        steps=[metrics(1), metrics(2, loss=math.inf)],
        telemetry=[telemetry(1), telemetry(2)],
        evaluations=[evaluation],
        samples=[sample, replace(sample, step=2, stage="after")],
        events=[event],
        phase=phase,
    )
    now = store.job(job.id)
    assert (now.phase, now.step, now.eval_loss) == (phase, 2, 1.5)
    series = store.series(job.id)
    assert series.columns["loss"] == [1.0, None], "what is not a number is no number"
    assert json.dumps(series.columns, allow_nan=False)
    assert store.telemetry(job.id).columns["host_bytes"] == [1, 2]
    assert store.evaluations(job.id) == [evaluation]
    assert [found.stage for found in store.samples(job.id)] == ["before", "after"]
    (found,) = store.events(job.id)
    assert (found.message, found.step) == ("It skipped a step.", 2)
    assert store.events(job.id, after=found.id) == []


def test_a_step_written_twice_is_there_once(store: Store) -> None:
    job = running(store, rows=3)
    store.record(job.id, attempt=1, steps=[metrics(3, loss=9.0)])
    assert store.series(job.id).columns["step"] == [1, 2, 3]
    assert store.series(job.id).columns["loss"][-1] == 9.0


def test_an_attempt_that_is_over_writes_nothing(store: Store) -> None:
    job = running(store, rows=3)
    assert not store.record(job.id, attempt=0, steps=[metrics(4)], events=[])
    assert store.job(job.id).step == 3


def resumed(store: Store, job: Job, *, resume_step: int) -> None:
    store.transition(job.id, expected=("running",), state="interrupted", attempt=1)
    store.enqueue(job.id)
    store.claim_next("me")
    store.begin_attempt(job.id, attempt=2, owner="trainer", resume_step=resume_step)


def test_a_resume_takes_back_what_will_be_done_again(store: Store) -> None:
    job = running(store, rows=10)
    text = TextSample(step=0, stage="before", prompt="p", text="t")
    late = [Evaluation(step=step, time=0.0, loss=1.0, tokens=1) for step in (5, 10)]
    store.record(job.id, attempt=1, evaluations=late, samples=[text, replace(text, step=10, stage="after")])
    resumed(store, job, resume_step=6)
    assert store.series(job.id).columns["step"] == [1, 2, 3, 4, 5, 6]
    assert [evaluation.step for evaluation in store.evaluations(job.id)] == [5]
    assert store.samples(job.id) == [text]


def test_an_older_checkpoint_than_thought_leaves_no_double_either(store: Store) -> None:
    """The newest checkpoint was damaged, so the loop resumes at 3 though its step was told as 6."""
    job = running(store, rows=10)
    resumed(store, job, resume_step=6)
    seen = store.series(job.id)
    store.record(job.id, attempt=2, steps=[metrics(4, loss=7.0)])
    now = store.series(job.id, after=seen.cursor, stride=seen.stride, revision=seen.revision)
    assert now.reset, "a reader that follows is told to draw anew"
    assert now.columns["step"] == [1, 2, 3, 4]
    assert now.columns["loss"][-1] == 7.0


# ---- curves -------------------------------------------------------------------------------------------------------


def test_strides_are_powers_of_two() -> None:
    assert [stride_for(rows, max_points=2000) for rows in (0, 2000, 2001, 4000, 4001, 100_000)] == [1, 1, 2, 2, 4, 64]


def test_a_point_is_the_mean_of_its_bucket_and_the_maximum_of_its_memory(store: Store) -> None:
    job = running(store)
    rows = [metrics(step, loss=float(step), allocated_bytes=1000 - step) for step in range(1, 11)]
    store.record(job.id, attempt=1, steps=rows)
    series = store.series(job.id, max_points=3)
    assert series.stride == 4
    assert series.columns["step"] == [4, 8]
    assert series.columns["loss"] == [2.5, 6.5]
    assert series.columns["allocated_bytes"] == [999, 995]
    assert series.columns["tokens"] == [40, 40]
    assert series.tail["step"] == [10] and series.tail["loss"] == [9.5]
    assert series.cursor == 8
    store.transition(job.id, expected=("running",), state="succeeded")
    assert store.series(job.id, max_points=3).columns["step"] == [4, 8, 10], "the last bucket of a run that ended"


class Follower:
    """What a page does with the answers."""

    def __init__(self) -> None:
        self.columns: dict[str, list[float | int | None]] = {}
        self.last: Series | None = None

    def ask(self, store: Store, id_: int, max_points: int) -> Series:
        known = (
            {}
            if self.last is None
            else {"after": self.last.cursor, "stride": self.last.stride, "revision": self.last.revision}
        )
        self.last = store.series(id_, max_points=max_points, **known)
        if self.last.reset:
            self.columns = {name: [] for name in self.last.columns}
        for name, values in self.last.columns.items():
            self.columns[name] += values
        return self.last


@settings(max_examples=25, deadline=None)
@given(batches=st.lists(st.integers(1, 40), min_size=1, max_size=12), max_points=st.integers(1, 30))
def test_whoever_follows_sees_what_whoever_comes_late_sees(
    tmp_path_factory: pytest.TempPathFactory, batches: Sequence[int], max_points: int
) -> None:
    with Store(tmp_path_factory.mktemp("data")) as store:
        job, follower, step = running(store), Follower(), 0
        for size in batches:
            store.record(job.id, attempt=1, steps=[metrics(step + i) for i in range(1, size + 1)])
            step += size
            answer = follower.ask(store, job.id, max_points)
            assert follower.columns == store.series(job.id, max_points=max_points).columns
            assert len(follower.columns["step"]) <= max_points
            assert [*follower.columns["step"], *answer.tail["step"]][-1] == step, "the newest step is always shown"
        store.transition(job.id, expected=("running",), state="succeeded")
        follower.ask(store, job.id, max_points)
        assert follower.columns == store.series(job.id, max_points=max_points).columns
        assert follower.columns["step"][-1] == step


def copy_first_step(store: Store, job: int, count: int) -> None:
    """Copies of the first row up to step `count`: so many objects would take longer than any test."""
    store._db.execute(
        "INSERT INTO metrics (job, step, attempt, time, loss, learning_rate, grad_norm, tokens, tokens_per_s, "
        "step_seconds, epoch, allocated_bytes, reserved_bytes, resident_bytes, loss_scale, skipped) "
        "SELECT job, value, attempt, time + value, loss / value, learning_rate, grad_norm, tokens, "
        "tokens_per_s, step_seconds, epoch, allocated_bytes, reserved_bytes, resident_bytes, loss_scale, skipped "
        "FROM metrics, (WITH RECURSIVE n (value) AS (VALUES (2) UNION ALL SELECT value + 1 FROM n LIMIT ?) "
        "SELECT value FROM n) WHERE job = ?",
        [count - 1, job],
    )
    with store._write(durable=False) as db:
        store._roll_up(db, job, first=1, last=count)


def test_a_run_of_100_000_steps_opens_thinned_and_is_followed_row_by_row(store: Store) -> None:
    job = running(store, rows=1)
    copy_first_step(store, job.id, 100_000)
    series = store.series(job.id)
    assert (series.rows, series.stride, len(series)) == (100_000, 64, 1562)
    store.record(job.id, attempt=1, steps=[metrics(100_001)])
    more = store.series(job.id, after=series.cursor, stride=series.stride, revision=series.revision)
    assert not more.reset and len(more) == 0 and more.tail["step"] == [100_001]


def test_summed_up_buckets_say_what_their_rows_say(store: Store) -> None:
    """Strides of 64 and more read full buckets of 64, written as they fill, in whatever portions the rows come."""
    job = running(store)
    step = 0
    for size in (1, 62, 1, 3, 130, 200, 100, 503):
        rows = [metrics(step + i, loss=math.nan if i % 7 == 0 else float(i)) for i in range(1, size + 1)]
        store.record(job.id, attempt=1, steps=rows)
        step += size
    store.record(job.id, attempt=1, steps=[metrics(70, loss=900.0)])  # a step done again, long after
    whole = store.series(job.id, max_points=10_000).columns
    for max_points in (16, 5, 1):
        series = store.series(job.id, max_points=max_points)
        assert series.stride >= 64
        for i, last in enumerate([*series.columns["step"], *series.tail["step"]]):
            bucket = slice(i * series.stride, int(last))
            for name, how in (("loss", mean), ("tokens", sum), ("allocated_bytes", max), ("step_seconds", mean)):
                value = [*series.columns[name], *series.tail[name]][i]
                assert value == pytest.approx(how([x for x in whole[name][bucket] if x is not None]), rel=1e-2)


def test_summed_up_buckets_are_taken_back_with_their_rows(store: Store) -> None:
    job = running(store, rows=300)
    resumed(store, job, resume_step=100)
    store.record(job.id, attempt=2, steps=[metrics(step, loss=5.0) for step in range(101, 193)])
    series = store.series(job.id, max_points=3)
    assert series.columns["step"] == [64, 128, 192]
    assert series.columns["loss"][2] == 5.0
    assert series.columns["loss"][1] == pytest.approx((sum(1 / step for step in range(65, 101)) + 28 * 5.0) / 64)


def test_readings_are_numbered_so_that_a_clock_set_back_loses_none(store: Store) -> None:
    job = running(store)
    store.record(job.id, attempt=1, telemetry=[telemetry(100), telemetry(101)])
    store.record(job.id, attempt=1, telemetry=[telemetry(7), telemetry(100)])
    series = store.telemetry(job.id)
    assert series.columns["time"] == [100.0, 101.0, 7.0, 100.0]
    assert series.cursor == 4


# ---- the file -----------------------------------------------------------------------------------------------------


def test_log_tail_keeps_the_end_and_the_last_state_of_a_progress_bar(store: Store) -> None:
    job = running(store)
    assert store.log_tail(job.id) == ""
    job.log.write_bytes(b"x" * 300_000 + b"\nfirst\r\nbar 1%\rbar 50%\rbar 99%\r\nbad \xff byte\nlast\n")
    assert store.log_tail(job.id, lines=3) == "bar 99%\nbad \ufffd byte\nlast"
    assert store.log_tail(job.id).startswith("first\n"), "the line that was cut is left out"


def test_a_locked_database_is_waited_for(store: Store) -> None:
    job = running(store)
    holder = sqlite3.connect(store.path, isolation_level=None, check_same_thread=False)
    holder.execute("BEGIN IMMEDIATE")
    assert store.job(job.id).state == "running", "readers do not wait: the lock is held until after this"
    timer = threading.Timer(0.3, holder.close)
    timer.start()
    began = time.perf_counter()
    assert store.record(job.id, attempt=1, steps=[metrics(1)])
    assert time.perf_counter() - began > 0.25
    timer.join()


def test_a_database_locked_for_too_long_says_so(store: Store) -> None:
    job = running(store)
    store._db.execute("PRAGMA busy_timeout=50")
    with sqlite3.connect(store.path, isolation_level=None) as holder:
        holder.execute("BEGIN IMMEDIATE")
        with pytest.raises(JobError, match="locked by another program") as caught:
            store.request_stop(job.id)
        assert caught.value.remedy
    holder.close()
    assert store.request_stop(job.id) == "stopping"


def test_a_full_disk_says_so_and_loses_nothing(store: Store) -> None:
    job = running(store, rows=10)
    pages = store._db.execute("PRAGMA page_count").fetchone()[0]
    store._db.execute(f"PRAGMA max_page_count={pages}")
    with pytest.raises(OutOfDisk, match="is full"):
        store.record(job.id, attempt=1, steps=[metrics(step) for step in range(11, 5000)])
    assert store.job(job.id).step == 10
    store._db.execute("PRAGMA max_page_count=1000000")
    store.record(job.id, attempt=1, steps=[metrics(11)])
    assert store.job(job.id).step == 11


def test_a_folder_that_is_a_file_and_a_file_that_is_no_database(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(JobError, match="cannot be used"):
        Store(tmp_path / "file")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "vramfit.db").write_bytes(b"this is no database " * 100)
    with pytest.raises(JobError, match="cannot be used: file is not a database"):
        Store(tmp_path / "folder")


def test_states_are_either_active_or_final_or_waiting() -> None:
    assert not set(ACTIVE) & set(FINAL)
    assert len({*ACTIVE, *FINAL, "draft", "queued"}) == 11


def test_no_folder_remains_when_its_job_cannot_be_added(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: the folder can still be made, what is written into it cannot."""

    def full(path: Path, *_: object, **__: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(JobError, match="No space left"):
        store.add_job(RunConfig(name="full"))
    assert store.jobs() == []
    assert list((store.data_dir / "runs").iterdir()) == []


# ---- precision ------------------------------------------------------------------------------------------------------


def drift(step: int, loss: float = 0.001, raised: str = "") -> DriftCheck:
    return DriftCheck(step=step, time=1000.0 + step, loss=loss, grad_norm=2 * loss, raised=raised)


def test_drifts_are_numbered_as_they_come_also_several_at_a_step(store: Store) -> None:
    job = running(store)
    store.record(job.id, attempt=1, drifts=[drift(10, 0.02), drift(10, 0.001, "head")])
    store.record(job.id, attempt=1, drifts=[drift(20, math.inf)])
    found = store.drifts(job.id)
    assert found.columns["number"] == [1, 2, 3]
    assert found.columns["step"] == [10, 10, 20]
    assert found.columns["loss"] == [0.02, 0.001, None]
    assert store.drifts(job.id, after=2, stride=1, revision=found.revision).columns["step"] == [20]
    rows = store._db.execute("SELECT raised, attempt FROM drifts WHERE job = ? ORDER BY number", [job.id]).fetchall()
    assert rows == [("", 1), ("head", 1), ("", 1)]


def test_a_resume_takes_back_the_drifts_of_steps_that_will_be_done_again(store: Store) -> None:
    job = running(store, rows=30)
    store.record(job.id, attempt=1, drifts=[drift(10), drift(20), drift(30)])
    store.transition(job.id, expected=("running",), state="failed", attempt=1)
    store.enqueue(job.id)
    store.claim_next("me")
    store.begin_attempt(job.id, attempt=2, owner="trainer", resume_step=20)
    store.record(job.id, attempt=2, drifts=[drift(30, 0.5)])
    assert store.drifts(job.id).columns["number"] == [1, 2, 3]
    assert store.drifts(job.id).columns["loss"] == [0.001, 0.001, 0.5]


def test_a_long_run_draws_the_worst_drift_of_each_bucket(store: Store) -> None:
    job = running(store)
    store.record(job.id, attempt=1, drifts=[drift(step, step / 1000) for step in range(1, 101)])
    found = store.drifts(job.id, max_points=50)
    assert found.stride == 2
    assert found.columns["loss"] == [step / 1000 for step in range(2, 101, 2)]


def test_skipped_steps_are_counted(store: Store) -> None:
    job = running(store)
    other = store.add_job(RunConfig())
    rows = [replace(metrics(step), skipped=step in (1, 2, 7)) for step in range(1, 11)]
    store.record(job.id, attempt=1, steps=rows)
    assert (store.skipped_steps(job.id), store.skipped_steps(other)) == (3, 0)
    store.record(job.id, attempt=1, steps=[metrics(7)])  # done again after a resume, and taken this time
    assert store.skipped_steps(job.id) == 2


def test_heat_is_kept_with_the_other_readings(store: Store) -> None:
    job = running(store)
    readings = [replace(telemetry(1), slowed_by_heat=True), replace(telemetry(2), slowed_by_heat=False), telemetry(3)]
    store.record(job.id, attempt=1, telemetry=readings)
    assert store.telemetry(job.id).columns["slowed_by_heat"] == [1, 0, None]


def streamed(step: int, *, written_bytes: int = 1000) -> StepMetrics:
    """A step that waited, longer the later it is."""
    waits = {"link_seconds": 0.01 * step, "optimizer_seconds": 0.02 * step, "disk_seconds": 0.03 * step}
    return replace(metrics(step), **waits, written_bytes=written_bytes)  # type: ignore[arg-type]


def test_what_a_step_waited_for_is_kept_and_is_none_where_nothing_streams(store: Store) -> None:
    job = running(store)
    store.record(job.id, attempt=1, steps=[streamed(1), metrics(2)])
    columns = store.series(job.id).columns
    assert [columns[f"{part}_seconds"] for part in ("link", "optimizer", "disk")] == [
        [0.01, None],
        [0.02, None],
        [0.03, None],
    ]
    assert columns["written_bytes"] == [1000, None]


def test_a_bucket_has_the_mean_of_waits_and_the_sum_of_bytes(store: Store) -> None:
    job = running(store)
    store.record(job.id, attempt=1, steps=[streamed(step) for step in range(1, 257)])
    for max_points, size in ((128, 2), (4, 64)):  # from single rows, and from the buckets that were summed up
        found = store.series(job.id, max_points=max_points)
        assert found.stride == size
        assert found.columns["written_bytes"] == [1000 * size] * (256 // size)
        assert found.columns["disk_seconds"][0] == pytest.approx(0.03 * (size + 1) / 2)


def test_streamed_steps_and_what_they_wrote_are_added_up(store: Store) -> None:
    job = running(store)
    other = store.add_job(RunConfig())
    store.record(job.id, attempt=1, steps=[metrics(1), streamed(2), streamed(3, written_bytes=0), streamed(4)])
    assert (store.streamed(job.id), store.streamed(other)) == ((3, 2000), (0, 0))
    store.record(job.id, attempt=1, steps=[streamed(4, written_bytes=500)])  # done again after a resume
    assert store.streamed(job.id) == (3, 1500)


def test_what_checkpoints_held_up_is_added_up(store: Store) -> None:
    job = running(store)
    waits = {3: 0.25, 5: 0.5, 70: 0.125}
    rows = [replace(metrics(step), save_seconds=waits.get(step)) for step in range(1, 129)]
    store.record(job.id, attempt=1, steps=rows)
    assert store.saves(job.id) == (3, 0.875)
    for points, stride in ((128, 1), (16, 8), (2, 64), (1, 128)):
        found = store.series(job.id, max_points=points)
        assert found.stride == stride
        assert sum(value or 0 for value in found.columns["save_seconds"]) == 0.875
