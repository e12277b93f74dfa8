"""The queue: what waits for what, its order, holding it, changing what waits, and asking twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.store import SUPERVISOR_LEASE, Store
from jobs.supervisor import Patience, Supervisor
from tests.jobs.test_store import metrics
from vramfit.config import RunConfig
from vramfit.errors import JobError


@pytest.fixture
def leased(store: Store) -> Store:
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    return store


def add(store: Store, *names: str, **options: object) -> list[int]:
    return [store.add_job(RunConfig(name=name), **options) for name in names]


def messages(store: Store, id_: int) -> list[str]:
    return [event.message for event in store.events(id_)]


# ---- after another job ------------------------------------------------------------------------------------------


def test_a_job_starts_once_the_one_it_comes_after_has_succeeded(leased: Store) -> None:
    [first] = add(leased, "first")
    [second] = add(leased, "second", after=first)
    [third] = add(leased, "third")
    leased.move(second, later=False)
    assert leased.queue() == [second, first, third]
    assert leased.claim_next("me").id == first
    assert leased.job(second).blocked
    leased.transition(first, expected=("starting",), state="succeeded")
    assert not leased.job(second).blocked
    assert leased.claim_next("me").id == second


@pytest.mark.parametrize("state", ["failed", "cancelled", "interrupted"])
def test_one_that_ended_badly_holds_up_its_followers_which_are_told(leased: Store, state: str) -> None:
    [first] = add(leased, "first")
    [waits] = add(leased, "waits", after=first)
    [anyway] = add(leased, "anyway", after=first, after_anyway=True)
    if state == "cancelled":
        leased.request_stop(first)
    else:
        leased.transition(first, expected=("queued",), state=state)
    assert leased.claim_next("me").id == anyway
    leased.transition(anyway, expected=("starting",), state="succeeded")
    assert leased.claim_next("me") is None
    assert leased.job(waits).blocked
    waiting = f"it waits until run {first} is resumed, or you start it anyway"
    assert messages(leased, waits) == [f"Run {first}, which this one comes after, is {state}: {waiting}."]
    assert messages(leased, anyway) == [f"Run {first}, which this one comes after, is {state}: it starts all the same."]
    leased.set_after(waits, first, anyway=True)
    assert leased.claim_next("me").id == waits


def test_a_paused_one_is_waited_for_in_any_case(leased: Store) -> None:
    [first] = add(leased, "first")
    [anyway] = add(leased, "anyway", after=first, after_anyway=True)
    leased.request_pause(first)
    assert leased.claim_next("me") is None
    assert leased.job(anyway).blocked
    assert messages(leased, anyway) == []


def test_no_job_waits_for_itself_in_a_circle_or_for_one_that_is_not_there(store: Store) -> None:
    one, two, three = add(store, "1", "2", "3")
    store.set_after(two, one)
    store.set_after(three, two)
    for wrong, after in ((one, three), (one, one)):
        with pytest.raises(JobError, match=f"Job {wrong} cannot come after job {after}"):
            store.set_after(wrong, after)
    with pytest.raises(JobError, match="no job 99"):
        store.set_after(one, 99)
    with pytest.raises(JobError, match="no job 99"):
        store.set_after(99, one)
    with pytest.raises(JobError, match="no job 99"):
        store.add_job(RunConfig(), after=99)
    assert [job.id for job in store.jobs()] == [three, two, one], "no job was added"
    store.set_after(three, None)
    assert store.job(three).after is None
    store.request_stop(three)
    with pytest.raises(JobError, match="is cancelled"):
        store.set_after(three, one)


def test_a_supervisor_leaves_when_all_that_waits_cannot_start(store: Store) -> None:
    [first] = add(store, "first")
    add(store, "second", after=first)
    store.request_stop(first)
    supervisor = Supervisor(store, patience=Patience(idle=1))
    assert supervisor.start()
    assert supervisor.step(0.0)
    assert not supervisor.step(2.0)


# ---- order and hold ---------------------------------------------------------------------------------------------


def test_queued_jobs_change_places_and_stay_put_at_the_ends(store: Store) -> None:
    one, two, three = add(store, "1", "2", "3")
    store.move(three, later=False)
    assert store.queue() == [one, three, two]
    store.move(one, later=True)
    assert store.queue() == [three, one, two]
    store.move(three, later=False)
    store.move(two, later=True)
    assert store.queue() == [three, one, two] == [job.id for job in store.queued_jobs()]
    store.request_stop(one)
    store.move(two, later=False)
    assert store.queue() == [two, three]
    with pytest.raises(JobError, match="is cancelled"):
        store.move(one, later=True)


def test_a_held_queue_starts_nothing_until_it_is_let_go(store: Store, drive: Callable[..., object]) -> None:
    first, second = add(store, "steps=200 delay=0.01", "steps=2")
    driven = drive()
    driven.until(lambda: store.job(first).step >= 1)
    store.hold_queue(True)
    store.hold_queue(True)
    assert store.queue_held
    driven.until_over(first)
    assert store.job(first).state == "succeeded", "what is at work goes on"
    for _ in range(5):
        driven.supervisor.step(driven.now)
    assert store.job(second).state == "queued"
    store.hold_queue(False)
    assert not store.queue_held
    driven.until_over(second)


def test_the_queue_goes_on_after_a_job_that_failed(store: Store, drive: Callable[..., object]) -> None:
    bad, worse, good = add(store, "mishap=user", "mishap=exit", "steps=2")
    drive().until_over(good)
    assert [store.job(id_).state for id_ in (bad, worse, good)] == ["failed", "failed", "succeeded"]


# ---- duplicate and change ---------------------------------------------------------------------------------------


def test_a_duplicate_waits_at_the_end_in_a_folder_of_its_own(store: Store) -> None:
    config = RunConfig(name="Model", seed=7)
    first = store.add_job(config, forecast={"steps": 40})
    add(store, "other")
    copy = store.job(store.duplicate(first))
    assert (copy.config, copy.forecast, copy.total_steps, copy.state) == (config, {"steps": 40}, 40, "queued")
    assert copy.folder != store.job(first).folder
    assert store.queue()[-1] == copy.id


def test_what_waits_can_be_given_other_settings_in_its_place(store: Store) -> None:
    one, two = add(store, "1", "2")
    store.set_after(two, one)
    store.replace_config(one, RunConfig(name="changed", seed=9), forecast={"steps": 12})
    job = store.job(one)
    assert (job.name, job.config.seed, job.total_steps, store.queue()) == ("changed", 9, 12, [one, two])
    assert json.loads((job.folder / "config.json").read_text(encoding="utf-8"))["seed"] == 9
    assert [path.name for path in job.folder.iterdir()] == ["config.json"]


def test_what_has_begun_keeps_its_settings(leased: Store) -> None:
    [id_] = add(leased, "1")
    leased.claim_next("me")
    leased.begin_attempt(id_, attempt=1, owner="trainer")
    with pytest.raises(JobError, match=f"Run {id_} has begun .it is running"):
        leased.replace_config(id_, RunConfig(seed=9))
    leased.record(id_, attempt=1, steps=[metrics(1)])
    leased.transition(id_, expected=("running",), state="failed")
    leased.enqueue(id_)
    with pytest.raises(JobError, match=f"Run {id_} has begun .it is queued"):
        leased.replace_config(id_, RunConfig(seed=9))
    assert leased.job(id_).config.seed == 42


def test_settings_that_cannot_be_written_change_nothing(store: Store) -> None:
    [id_] = add(store, "1")
    folder = store.job(id_).folder
    (folder / "config.json").unlink()
    folder.rmdir()
    Path(folder).write_text("in the way", encoding="utf-8")
    with pytest.raises(JobError, match="cannot be written"):
        store.replace_config(id_, RunConfig(seed=9))
    assert store.job(id_).config.seed == 42


# ---- asking twice -----------------------------------------------------------------------------------------------


def test_asking_twice_to_resume_queues_once(leased: Store) -> None:
    [id_] = add(leased, "1")
    leased.request_pause(id_)
    assert leased.request_pause(id_) == "paused"
    leased.enqueue(id_)
    revision = leased.job(id_).revision
    leased.enqueue(id_)
    leased.claim_next("me")
    leased.enqueue(id_)
    job = leased.job(id_)
    assert (job.state, job.attempt, job.revision) == ("starting", 1, revision)


@pytest.mark.parametrize("ask", ["request_pause", "request_stop"])
def test_stopped_and_resumed_at_once_it_goes_on_without_gap_or_double(
    store: Store, drive: Callable[..., object], ask: str
) -> None:
    [id_] = add(store, "steps=60 delay=0.02")
    driven = drive()
    driven.until(lambda: store.job(id_).step >= 5)
    for _ in range(2):  # a double click on each
        getattr(store, ask)(id_)
    store.enqueue(id_)
    store.enqueue(id_)
    assert store.job(id_).go_on
    driven.until(lambda: store.job(id_).state == "succeeded")
    assert store.job(id_).attempt == 2
    assert store.series(id_, max_points=1000).columns["step"] == list(range(1, 61))


def test_the_last_of_stop_resume_stop_counts(leased: Store) -> None:
    [id_] = add(leased, "1")
    leased.claim_next("me")
    leased.request_pause(id_)
    leased.enqueue(id_)
    assert leased.request_stop(id_) == "stopping"
    leased.enqueue(id_)
    assert leased.request_stop(id_) == "stopping"
    leased.transition(id_, expected=("stopping",), state="cancelled")
    assert leased.job(id_).state == "cancelled"
