"""A queue for each device: one job at a time on each, in order, none held up by a device that is not there."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs import processes
from jobs.attempt import Attempt
from jobs.beside import left_beside
from jobs.device_watch import FRESH_S, DeviceWatch, Found
from jobs.run_job import run
from jobs.store import SUPERVISOR_LEASE, Store
from tests.jobs.stand_in import metrics
from tests.jobs.test_supervisor import HASTY
from ui.runs import runs_view
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Device, probe
from vramfit.training.metrics import RunResult
from vramfit.units import GIB

CARDS = ("cuda:0", "cuda:1", "cpu")


def add(store: Store, device: str, **wishes: object) -> int:
    name = " ".join(f"{key}={value}" for key, value in {"steps": 400, "delay": 0.05, **wishes}.items())
    return store.add_job(RunConfig(name=name, device=device))


def claims(store: Store, *, devices: tuple[str, ...] = CARDS, held: tuple[str, ...] = ()) -> list[tuple[int, str]]:
    """What is claimed one after the other until nothing more may start."""
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    found = []
    while (job := store.claim_next("me", devices, held=held)) is not None:
        found.append((job.id, str(job.device)))
    return found


def test_each_device_takes_its_own_jobs_in_order_and_auto_the_first_free_card(store: Store) -> None:
    wishes = ("cuda:1", "cuda:1", "auto", "auto", "cpu", "cuda:0")
    ids = [add(store, wish) for wish in wishes]
    assert claims(store) == [(ids[0], "cuda:1"), (ids[2], "cuda:0"), (ids[4], "cpu")]
    assert store.job(ids[2]).asked_config.device == "cuda:0"
    assert store.job(ids[2]).config.device == "auto"
    assert store.queue() == [ids[1], ids[3], ids[5]]
    store.transition(ids[2], expected=("starting",), state="succeeded", attempt=1)
    assert claims(store) == [(ids[3], "cuda:0")]  # it came before the one that names that card
    store.transition(ids[0], expected=("starting",), state="succeeded", attempt=1)
    assert claims(store) == [(ids[1], "cuda:1")]


def test_without_a_card_auto_is_the_cpu(store: Store) -> None:
    first, second = add(store, "auto"), add(store, "auto")
    assert claims(store, devices=("cpu",)) == [(first, "cpu")]
    assert store.queue() == [second]


def test_a_device_that_is_not_there_or_is_held_keeps_only_its_own_jobs(store: Store) -> None:
    gone, other, auto = add(store, "cuda:7"), add(store, "cuda:1"), add(store, "auto")
    assert claims(store, held=("cuda:0",)) == [(other, "cuda:1")]
    assert claims(store, devices=(*CARDS, "cuda:7")) == [(gone, "cuda:7"), (auto, "cuda:0")]


def test_a_held_queue_starts_nothing_anywhere_and_a_foreground_run_takes_its_device(store: Store) -> None:
    store.begin_foreground(RunConfig(device="auto"), owner=processes.own_identity())
    ids = [add(store, wish) for wish in ("cuda:0", "cuda:1", "cpu")]
    store.hold_queue(True)
    assert claims(store) == []
    store.hold_queue(False)
    assert claims(store) == [(ids[1], "cuda:1"), (ids[2], "cpu")]


def test_what_cannot_start_now_writes_nothing(store: Store) -> None:
    add(store, "cpu")
    assert len(claims(store)) == 1
    add(store, "cpu")
    before = store._db.execute("PRAGMA data_version").fetchone()[0]
    with Store(store.data_dir) as other:
        for _ in range(3):
            assert other.claim_next("me", CARDS) is None
    assert store._db.execute("PRAGMA data_version").fetchone()[0] == before


@pytest.mark.parametrize("wish", ["cuda:0", "auto"])
def test_a_run_whose_card_was_lost_goes_on_by_itself_once_the_card_is_there_again(
    store: Store, drive: Callable[..., Any], wish: str
) -> None:
    """Neither it nor the next one is started before somebody has looked for the card, nor on the CPU instead."""
    lost, then = add(store, wish, steps=60, delay=0.002, save=10, die_at=15, by="card"), add(store, "cuda:0", steps=2)
    driven = drive(HASTY)
    driven.devices, driven.looked_at = ("cuda:0", "cpu"), 0.0
    driven.until(lambda: store.job(lost).resumes == 1 and lost not in driven.supervisor._trainers)
    step(driven, times=10)
    assert [(store.job(id_).state, store.job(id_).attempt) for id_ in (lost, then)] == [("queued", 1), ("queued", 0)]
    driven.devices, driven.looked_at = ("cpu",), driven.now
    step(driven, times=10)
    shown = next(run for run in runs_view(store, texts_of("en"))["runs"] if run["id"] == lost)
    assert (shown["state"], shown["blocked"]) == ("queued", True)
    assert shown["waits"] == "Waits for cuda:0, which this machine does not have now; it has cpu. Others go on."
    driven.devices, driven.looked_at = ("cuda:0", "cpu"), driven.now
    job = driven.until_over(lost)
    assert (job.state, job.attempt, job.resumes, job.device) == ("succeeded", 2, 1, "cuda:0")
    assert store.series(lost, max_points=10**6).columns["step"] == list(range(1, 61))
    (resumed,) = [event.message for event in store.events(lost) if event.kind == "resumed"]
    assert resumed == (
        "The card was lost while it trained: CUDA error: GPU is lost. It goes on by itself from the checkpoint of "
        "step 10 (time 1 of at most 3)."
    )
    assert driven.until_over(then).state == "succeeded"


def test_a_run_that_loses_its_card_again_without_getting_further_stays_interrupted(
    store: Store, drive: Callable[..., Any]
) -> None:
    id_ = add(store, "cuda:0", steps=60, delay=0.002, save=10, die_at="15,15", by="card")
    driven = drive(HASTY)
    driven.devices, driven.looked_at = ("cuda:0", "cpu"), 0.0
    driven.until(lambda: store.job(id_).resumes == 1)
    driven.looked_at = driven.now + 0.2
    job = driven.until_over(id_)
    assert (job.state, job.attempt, job.again) == ("interrupted", 2, False)
    assert job.failure == (
        "The card was lost while it trained: CUDA error: GPU is lost. It does not go on by itself, because the start "
        "before had come to step 15 too."
    )
    assert "driver's tool" in (job.remedy or "")


def test_a_card_that_was_lost_while_no_supervisor_was_there_is_no_end_either(
    store: Store, drive: Callable[..., Any]
) -> None:
    id_ = add(store, "cpu", steps=3)
    assert claims(store) == [(id_, "cpu")]

    def lose(session: Attempt, resume: bool) -> RunResult:
        session.recorder.steps([metrics(1)])
        raise RuntimeError("CUDA error: GPU is lost")

    assert run(store, id_, train=lose) == 2
    assert (store.job(id_).state, store.job(id_).again) == ("interrupted", True)
    store.release_lease(SUPERVISOR_LEASE, owner="me")
    job = drive(HASTY).until_over(id_)
    assert (job.state, job.attempt, job.resumes) == ("succeeded", 2, 1)


@pytest.mark.parametrize(("asked", "state"), [("request_stop", "cancelled"), ("request_pause", "paused")])
def test_a_card_that_is_lost_on_the_way_to_an_end_that_was_asked_for_ends_so(
    store: Store, asked: str, state: str
) -> None:
    id_ = add(store, "cpu")
    assert claims(store) == [(id_, "cpu")]

    def lose(session: Attempt, resume: bool) -> RunResult:
        session.recorder.steps([metrics(1)])
        getattr(store, asked)(id_)
        raise RuntimeError("CUDA error: GPU is lost")

    assert run(store, id_, train=lose) == 2
    job = store.job(id_)
    assert (job.state, job.again) == (state, False)
    assert job.failure == "The card was lost while it trained: CUDA error: GPU is lost."


def step(driven: Any, *, times: int) -> None:
    for _ in range(times):
        driven.supervisor.step(driven.now)
        driven.now += 0.1


def test_two_devices_train_at_once_stop_apart_and_are_adopted_both(
    store: Store, drive: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    one, two, then = add(store, "cuda:0"), add(store, "cpu"), add(store, "cpu", steps=3)
    driven = drive(HASTY)
    driven.devices = CARDS
    driven.until(lambda: store.job(one).step > 0 and store.job(two).step > 0)
    assert store.job(one).owner != store.job(two).owner
    assert store.job(then).state == "queued"
    assert store.devices == CARDS
    driven.supervisor.stop()
    again = drive(HASTY)
    again.devices = CARDS
    again.supervisor.step(0.0)
    assert set(again.supervisor._trainers) == {one, two}
    started = [trainer.process for trainer in driven.supervisor._trainers.values()]
    driven.supervisor._trainers.clear()  # the first supervisor is gone; its children are this process's all the same
    store.request_stop(two)
    assert again.until_over(two).state == "cancelled"
    assert store.job(one).state == "running"
    assert again.until_over(then).state == "succeeded"
    assert store.job(one).attempt == 1
    store.request_stop(one)
    assert again.until_over(one).state == "cancelled"
    assert all(process.wait(5) is not None for process in started)


def test_a_job_starts_once_its_device_is_there(store: Store, drive: Callable[..., Any]) -> None:
    late, other = add(store, "cuda:1", steps=3), add(store, "cpu", steps=3)
    driven = drive(HASTY)
    driven.until_over(other)
    assert store.job(late).state == "queued"
    driven.devices = CARDS
    assert driven.until_over(late).state == "succeeded"


def test_ram_of_a_run_beside_is_left_to_it(store: Store) -> None:
    first = add(store, "cuda:0")
    claims(store)
    store.set_owner(first, attempt=1, owner=processes.own_identity())
    store._db.execute("UPDATE jobs SET forecast = ?", [f'{{"memory": {{"host_bytes": {20 * GIB}}}}}'])
    cpu = Device(
        kind="cpu", name="CPU", torch_device="cpu", identity="cpu", memory_bytes=64 * GIB, free_bytes=40 * GIB,
        bf16=False, fp16=False,
    )  # fmt: skip
    card = machine_with("RTX 4090").devices[0]
    machine = replace(machine_with("RTX 4090"), devices=(card, cpu), ram_bytes=64 * GIB, ram_free_bytes=40 * GIB)
    left, told = left_beside(machine, store.active_jobs())
    assert left.ram_bytes == 44 * GIB
    mine = psutil.Process().memory_info().rss  # what its plan takes already
    assert left.ram_free_bytes == pytest.approx(20 * GIB + mine, abs=GIB / 4)
    assert left.devices[0] == card
    assert left.devices[1].free_bytes == left.ram_free_bytes
    assert len(told) == 1 and told[0].startswith("Run 1 on cuda:0 takes 20.0 GiB of RAM by its plan, 1")
    store._db.execute("UPDATE jobs SET forecast = NULL")
    assert left_beside(machine, store.active_jobs()) == (machine, [])


def test_devices_are_looked_for_behind_and_again_after_a_while(tmp_path: Path, eventually: Callable[..., None]) -> None:
    now = [0.0]
    watch = DeviceWatch(tmp_path, clock=lambda: now[0])
    assert watch.found() == Found(())
    eventually(lambda: watch.found().names != ())
    assert watch.found().names[-1] == "cpu"
    first = watch._thread
    watch.found()
    assert watch._thread is first
    now[0] = FRESH_S + 1
    watch.found()
    assert watch._thread is not first


def test_a_driver_that_is_silent_holds_up_what_needs_a_card_and_nothing_else(
    store: Store, drive: Callable[..., Any], eventually: Callable[..., None]
) -> None:
    auto, named, cpu = add(store, "auto", steps=3), add(store, "cuda:0", steps=3), add(store, "cpu", steps=3)
    driven = drive(HASTY)
    driven.silent_since = 1_000_000.0
    assert driven.until_over(cpu).state == "succeeded"
    driven.devices = CARDS
    driven.supervisor.step(driven.now)
    assert [store.job(id_).state for id_ in (auto, named)] == ["queued"] * 2
    assert (store.devices, store.driver_silent_since) == (CARDS, 1_000_000.0)
    for language, words in (("en", "has not answered since"), ("zh", "没有回应")):
        texts = texts_of(language)
        shown = runs_view(store, texts)
        assert words in shown["silent"] and "1970-01-1" in shown["silent"]
        assert [run["waits"] for run in shown["runs"][:2]] == [shown["silent"]] * 2
    driven.silent_since = None
    driven.until_over(auto)
    driven.until_over(named)
    assert store.driver_silent_since is None
    assert runs_view(store, texts_of("en"))["silent"] == ""


def test_a_driver_that_falls_silent_keeps_its_cards_names_and_the_time_it_was_first_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, eventually: Callable[..., None]
) -> None:
    whole = probe(tmp_path)
    whole = replace(whole, devices=(machine_with("RTX 4090").devices[0], whole.devices[-1]))
    now, machine = [0.0], [whole]
    monkeypatch.setattr("jobs.device_watch.probe", lambda folder: machine[0])
    watch = DeviceWatch(tmp_path, clock=lambda: now[0])
    watch.found()
    eventually(lambda: watch.found()[:2] == (("cuda:0", "cpu"), None))
    began = time.time()
    for _ in range(2):
        machine[0] = replace(machine[0], devices=machine[0].devices[-1:], silent=True)
        now[0] += FRESH_S + 1
        watch.found()
        watch._thread.join()
    names, since, _ = watch.found()
    assert names == ("cuda:0", "cpu")
    assert since is not None and began <= since < began + FRESH_S
    machine[0], now[0] = whole, now[0] + FRESH_S + 1
    watch.found()
    watch._thread.join()
    assert watch.found()[:2] == (("cuda:0", "cpu"), None)


def test_a_job_does_not_start_again_before_its_last_trainer_has_left(store: Store, drive: Callable[..., Any]) -> None:
    """Another device is free meanwhile, which other jobs get; the folder and its files are still the first one's."""
    id_, other = add(store, "auto", linger=600), add(store, "cpu", steps=3)
    driven = drive(HASTY)
    driven.devices = CARDS
    driven.until(lambda: store.job(id_).step > 0)
    first = driven.supervisor._trainers[id_]
    store.request_stop(id_)
    driven.until(lambda: store.job(id_).final)
    store.enqueue(id_)
    then = add(store, "cuda:1", steps=3)
    driven.until(lambda: store.job(id_).attempt == 2)
    assert not processes.alive(first.who), "it was ended after Patience.leave, and only then followed"
    assert first.process.poll() is not None
    assert store.job(then).attempt == 1
    assert driven.until_over(other).state == "succeeded"
    driven.until(lambda: store.job(id_).state == "running")
    store.request_stop(id_)
    assert driven.until_over(id_).state == "cancelled"
    driven.until_over(then)


def test_a_foreground_run_holds_the_device_it_names_and_no_other(store: Store, drive: Callable[..., Any]) -> None:
    at_work = store.begin_foreground(RunConfig(device="cpu"), owner=processes.own_identity())
    card, waits = add(store, "cuda:0", steps=3), add(store, "cpu", steps=3)
    driven = drive(HASTY)
    driven.devices = CARDS
    assert driven.until_over(card).state == "succeeded"
    assert store.job(waits).state == "queued"
    store.transition(at_work.id, expected=("running",), state="succeeded", attempt=1)
    assert driven.until_over(waits).state == "succeeded"


def test_a_device_that_vanishes_leaves_the_run_on_it_alone_and_what_waits_for_it_waiting(
    store: Store, drive: Callable[..., Any]
) -> None:
    id_, waits, auto = add(store, "cuda:1", steps=60), add(store, "cuda:1", steps=3), add(store, "auto", steps=3)
    driven = drive(HASTY)
    driven.devices = CARDS
    driven.until(lambda: store.job(id_).step > 0)
    driven.devices = ("cuda:0", "cpu")
    assert driven.until_over(id_).state == "succeeded"
    assert driven.until_over(auto).device == "cuda:0"
    assert store.job(waits).state == "queued"
    assert store.devices == ("cuda:0", "cpu")


def test_a_job_whose_settings_cannot_be_read_holds_up_no_other(store: Store) -> None:
    broken, whole = add(store, "cuda:0"), add(store, "cuda:0")
    store._db.execute("UPDATE jobs SET config = '{\"device\": ' WHERE id = ?", [broken])
    assert claims(store) == [(whole, "cuda:0")]
    assert store.queue() == [broken]


def test_settings_from_before_there_was_a_device_leave_it_to_the_queue(store: Store) -> None:
    id_ = add(store, "auto")
    store._db.execute("UPDATE jobs SET config = json_remove(config, '$.device')")
    assert claims(store) == [(id_, "cuda:0")]
