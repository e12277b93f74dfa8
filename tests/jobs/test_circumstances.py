"""What machines do to the queue: clocks that jump, processes that stand still, a locked database, ten megabytes of log,
fifty open pages. Real processes; only the clock is the test's, and a lock is held for a twentieth of the time."""

from __future__ import annotations

import json
import os
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from jobs import processes, schema
from jobs.store import LOG_TAIL_BYTES, SUPERVISOR_LEASE, Store
from jobs.supervisor import LEASE_STALE_S, Supervisor, ensure_running
from tests.jobs.stand_in import save
from tests.jobs.test_supervisor import HASTY, STAND_IN, add, is_gone, recorded_steps, told
from ui.monitor import Cursor, run_view
from ui.texts import texts_of
from vramfit.errors import JobError

DAY_S = 24 * 3600.0
ROOT = Path(__file__).parents[2]
posix = pytest.mark.skipif(os.name == "nt", reason="no process can be stopped by a signal on Windows")


# ---- the clock --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [DAY_S, -DAY_S], ids=["forward", "back"])
def test_a_clock_that_jumps_by_a_day_neither_loses_the_lease_nor_a_step(
    store: Store, data_dir: Path, drive: Callable[..., Any], jump: float
) -> None:
    """The trainer goes by the machine's clock, the supervisor by one that jumps: each sees the other a day away."""
    id_, waits = add(store, steps=60, delay=0.02), add(store, steps=3)
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).step >= 5)
    store.clock = lambda: time.time() + jump
    with Store(data_dir, clock=store.clock) as other:
        rival = Supervisor(other)
        rival._who = processes.identity(os.getppid())  # another process that lives
        assert not rival.start()
    ensure_running(data_dir)
    assert store.lease(SUPERVISOR_LEASE)[0] == processes.own_identity()
    owner = store.job(id_).owner
    driven.until(lambda: store.job(id_).step >= 30)
    assert (store.job(id_).attempt, store.job(id_).owner) == (1, owner)
    store.clock = time.time
    assert driven.until_over(id_).state == "succeeded"
    assert driven.until_over(waits).state == "succeeded"
    assert recorded_steps(store, id_) == list(range(1, 61))


@pytest.mark.parametrize("jump", [DAY_S, -DAY_S], ids=["forward", "back"])
def test_the_queue_keeps_its_order_and_a_resume_its_place_over_a_jump(
    store: Store, drive: Callable[..., Any], jump: float
) -> None:
    first, second = add(store, steps=40, save=10, delay=0.02), add(store, steps=3)
    driven = drive(HASTY)
    driven.until(lambda: store.job(first).step >= 15)
    store.request_pause(first)
    assert driven.until_over(first).state == "paused"
    saved = store.job(first).newest_checkpoint
    assert saved >= 15
    store.clock = lambda: time.time() + jump
    third = add(store, steps=3)
    store.enqueue(first)
    assert store.queue()[-2:] == [third, first]
    driven.until_over(first)
    assert store.job(first).state == store.job(second).state == store.job(third).state == "succeeded"
    assert store.job(first).checkpoint_before == saved
    assert recorded_steps(store, first) == list(range(1, 41))


def test_a_lease_of_another_machine_is_judged_by_how_far_its_heartbeat_is_and_never_by_which_is_later(
    data_dir: Path,
) -> None:
    now = [1_000_000.0]
    with Store(data_dir, clock=lambda: now[0]) as store:
        for jump in (DAY_S, -DAY_S):
            store.take_lease(SUPERVISOR_LEASE, owner="elsewhere|1|1", alive=lambda *_: False)
            now[0] += LEASE_STALE_S / 2
            assert not Supervisor(store).start()
            now[0] += jump
            supervisor = Supervisor(store)
            assert supervisor.start()
            now[0] -= 2 * jump
            assert supervisor.step(0.0), "its own lease is its own at any hour"
            supervisor.stop()


# ---- processes that stand still ---------------------------------------------------------------------------------


@posix
def test_a_trainer_that_stands_still_for_longer_than_the_lease_is_neither_doubled_nor_given_up(
    store: Store, drive: Callable[..., Any]
) -> None:
    id_, waits = add(store, steps=40, delay=0.02), add(store, steps=3)
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).step >= 5)
    trainer = psutil.Process(processes.pid_of(store.job(id_).owner))
    trainer.suspend()
    store.clock = lambda: time.time() + 10 * LEASE_STALE_S
    for _ in range(30):
        driven.now += LEASE_STALE_S
        assert driven.supervisor.step(driven.now)
    assert (store.job(id_).state, store.job(id_).attempt) == ("running", 1)
    assert store.job(waits).state == "queued"
    store.clock = time.time
    trainer.resume()
    assert driven.until_over(id_).state == "succeeded"
    assert recorded_steps(store, id_) == list(range(1, 41))


@posix
def test_a_trainer_that_stands_still_is_ended_in_bounded_time_once_it_is_asked_to(
    store: Store, drive: Callable[..., Any]
) -> None:
    id_, waits = add(store, steps=4000, delay=0.02), add(store, steps=3)
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).step >= 5)
    trainer = psutil.Process(processes.pid_of(store.job(id_).owner))
    trainer.suspend()
    store.request_stop(id_)
    assert driven.until_over(waits).state == "succeeded"
    assert store.job(id_).state == "cancelled"
    assert is_gone(trainer.pid)


@posix
def test_a_supervisor_that_stands_still_for_longer_than_the_lease_stays_the_only_one(
    store: Store, data_dir: Path, eventually: Callable[..., None]
) -> None:
    """It lives, so nobody takes its place; its trainer goes on meanwhile, and what waits starts when it wakes up."""
    id_, waits = add(store, steps=60, delay=0.02), add(store, steps=3)
    started = subprocess.Popen([sys.executable, str(STAND_IN), "supervise", str(data_dir), "60"])
    try:
        eventually(lambda: store.job(id_).step >= 5, seconds=60)
        started.send_signal(signal.SIGSTOP)
        with Store(data_dir, clock=lambda: time.time() + 10 * LEASE_STALE_S) as later:
            assert not Supervisor(later).start()
        ensure_running(data_dir)
        eventually(lambda: store.job(id_).final, seconds=60)
        assert store.job(waits).state == "queued"
        started.send_signal(signal.SIGCONT)
        eventually(lambda: store.job(waits).final, seconds=60)
        eventually(lambda: not psutil.Process(started.pid).children(), seconds=60)
    finally:
        started.kill()
        started.wait(10)
    assert [(store.job(each).state, store.job(each).attempt) for each in (id_, waits)] == [("succeeded", 1)] * 2
    assert recorded_steps(store, id_) == list(range(1, 61))
    assert not (data_dir / "supervisor.log").exists(), "no other one was started"


def test_a_supervisor_whose_lease_went_elsewhere_while_it_stood_still_starts_nothing(
    store: Store, drive: Callable[..., Any]
) -> None:
    """In another container its process cannot be seen, so after a while its place is taken."""
    driven = drive(HASTY)
    id_ = add(store, steps=3)
    assert store.take_lease(SUPERVISOR_LEASE, owner="elsewhere|1|1", alive=lambda *_: False)
    assert not driven.supervisor.step(driven.now)
    with pytest.raises(JobError, match="Another supervisor"):
        store.claim_next(processes.own_identity())
    assert (store.job(id_).state, store.job(id_).attempt) == ("queued", 0)
    store.release_lease(SUPERVISOR_LEASE, owner="elsewhere|1|1")


# ---- pids -------------------------------------------------------------------------------------------------------


def test_the_same_pid_with_another_start_is_another_process(store: Store, drive: Callable[..., Any]) -> None:
    """Lease and trainer alike: a stranger got the pid of the supervisor and of its trainer, and is left alone."""
    id_ = add(store, steps=3)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        boot, pid, start = str(processes.identity(stranger.pid)).split("|")
        earlier = f"{boot}|{pid}|{float(start) - 100:.2f}" if "." in start else f"{boot}|{pid}|{int(start) - 100}"
        assert store.take_lease(SUPERVISOR_LEASE, owner=earlier, alive=lambda *_: False)
        claimed = store.claim_next(earlier)
        assert claimed is not None
        store.begin_attempt(id_, attempt=1, owner=earlier)
        save_at(store, id_, 2)
        driven = drive(HASTY)
        driven.until(lambda: store.job(id_).attempt == 2 or store.job(id_).final)
        driven.until_over(id_)
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def save_at(store: Store, id_: int, step: int) -> None:
    class Session:
        job = store.job(id_)

    save(Session(), step)  # type: ignore[arg-type]


# ---- a locked database ------------------------------------------------------------------------------------------


def test_a_database_that_is_locked_three_times_as_long_as_anybody_waits_only_makes_all_late(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, drive_on: Callable[..., Any]
) -> None:
    """30 s against the usual 10 s, for supervisor and page a twentieth of both: 1.5 s against 0.5 s."""
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", schema.BUSY_TIMEOUT_S / 20)
    with Store(data_dir) as store:
        id_, waits = add(store, steps=100, delay=0.02), add(store, steps=3)
        driven = drive_on(store, HASTY)
        driven.until(lambda: store.job(id_).step >= 5)
        holder = sqlite3.connect(store.path, isolation_level=None)
        holder.execute("BEGIN IMMEDIATE")
        locked_at, refusals = time.monotonic(), 0
        while time.monotonic() - locked_at < 1.5:
            driven.now += 3.0  # more than between two renewals of the lease
            assert driven.supervisor.step(driven.now)
            assert run_view(store, id_, Cursor(), texts_of("en"), with_log=True)["job"]["state"] == "running"
            with pytest.raises(JobError, match="locked by another program"):
                store.panel_alive()
            refusals += 1
        holder.execute("ROLLBACK")
        holder.close()
        assert refusals > 0
        assert driven.until_over(id_).state == "succeeded"
        assert driven.until_over(waits).state == "succeeded"
        assert recorded_steps(store, id_) == list(range(1, 101))
        assert (store.job(id_).attempt, store.job(waits).attempt) == (1, 1)


# ---- ten megabytes of log ---------------------------------------------------------------------------------------


def test_ten_megabytes_on_stderr_hold_nothing_up_and_the_page_shows_their_end(
    store: Store, drive: Callable[..., Any]
) -> None:
    """Output goes to a file, so nobody has to read it for the trainer to go on; the page reads the end of it alone."""
    id_ = add(store, steps=5, noise=10)
    job = drive(HASTY).until_over(id_)
    assert job.state == "succeeded"
    assert job.log.stat().st_size > 9.9e6
    page = run_view(store, id_, Cursor(), texts_of("en"), with_log=True)
    shown = page["log"].splitlines()
    assert shown[-1] == "step 5"
    assert "00099999 " + "x" * 90 in shown
    assert len(page["log"].encode()) <= LOG_TAIL_BYTES
    assert told(store, id_, "failed") == []


# ---- fifty open pages -------------------------------------------------------------------------------------------


@pytest.fixture
def panel(store: Store, data_dir: Path) -> Iterator[str]:
    """The real panel as a process of its own; its address."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(data_dir)]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    said = ""
    while "http://127.0.0.1:" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    yield "http://127.0.0.1:" + said.split("http://127.0.0.1:")[1].split("/")[0]
    process.kill()
    process.wait(10)
    process.stdout.close()


class Tab(threading.Thread):
    """An open page: asks for its run from its cursors on, and for the queue, until the run has ended."""

    def __init__(self, address: str, run: int) -> None:
        super().__init__(daemon=True)
        self.address, self.run_, self.steps, self.trouble = address, run, list[int](), list[str]()

    def run(self) -> None:
        try:
            self._follow()
        except Exception as error:
            self.trouble.append(repr(error))

    def _follow(self) -> None:
        cursor: dict[str, Any] = {}
        while True:
            asked = "&".join(f"{name}={value}" for name, value in cursor.items())
            page = self._get(f"/vramfit/data/run/{self.run_}?{asked}")
            series = page["series"]
            self.steps = [*([] if series["reset"] else self.steps), *series["columns"]["step"]]
            cursor = {
                "series_after": series["cursor"],
                "series_stride": series["stride"],
                "revision": series["revision"],
                "want_log": 1,
            }
            assert self.run_ in [run["id"] for run in self._get("/vramfit/data/runs")["runs"]]
            if page["job"]["final"]:
                return

    def _get(self, path: str) -> Any:
        with urllib.request.urlopen(self.address + path, timeout=60) as answer:
            return json.load(answer)


def test_fifty_pages_that_follow_a_run_see_every_step_once_and_hold_nothing_up(
    store: Store, drive: Callable[..., Any], panel: str
) -> None:
    id_ = add(store, steps=150, delay=0.02)
    driven = drive()
    tabs = [Tab(panel, id_) for _ in range(50)]
    for tab in tabs:
        tab.start()
    driven.until(lambda: store.job(id_).final, seconds=120)
    assert driven.until_over(id_).state == "succeeded"
    for tab in tabs:
        tab.join(120)
    assert [trouble for tab in tabs for trouble in tab.trouble] == []
    assert {tuple(tab.steps) for tab in tabs} == {tuple(range(1, 151))}
    assert recorded_steps(store, id_) == list(range(1, 151))
