"""The supervisor with real processes: claim, spawn, stop, kill, adopt. The trainer is a stand-in without torch."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from jobs import processes, schema
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.supervisor import LEASE_STALE_S, Patience, Supervisor, can_start, ensure_running, holder_alive
from vramfit.config import OutputChoice, RunConfig
from vramfit.errors import JobError

STAND_IN = Path(__file__).with_name("stand_in.py")
NO_STEP = "It does not go on by itself, because no step was done."
HASTY = Patience(stop=1.0, term=1.0, start=1.0, leave=1.0, idle=5.0)


def add(store: Store, **wishes: object) -> int:
    return store.add_job(RunConfig(name=" ".join(f"{key}={value}" for key, value in wishes.items())))


def add_mortal(store: Store, *, automatic_resumes: int = 3, **wishes: object) -> int:
    name = " ".join(f"{key}={value}" for key, value in {"steps": 60, "save": 10, **wishes}.items())
    return store.add_job(RunConfig(name=name, output=OutputChoice(automatic_resumes=automatic_resumes)))


def told(store: Store, id_: int, kind: str) -> list[str]:
    return [event.message for event in store.events(id_) if event.kind == kind]


def claim_and_vanish(store: Store) -> None:
    """What a supervisor leaves that dies right after a claim (its lease is as good as given back)."""
    assert store.take_lease(SUPERVISOR_LEASE, owner="gone", alive=lambda *_: False)
    assert store.claim_next("gone") is not None
    store.release_lease(SUPERVISOR_LEASE, owner="gone")


def recorded_steps(store: Store, id_: int) -> list[int]:
    return store.series(id_, max_points=10**6).columns["step"]  # type: ignore[return-value]


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_trainer_that_has_not_left_yet_is_waited_for_by_the_next_supervisor(
    store: Store, drive: Callable[..., object]
) -> None:
    """Its job has ended, so no row names it; it may still hold the card that the next one needs."""
    first = add(store, steps=5)
    drive(HASTY).until_over(first)
    second = add(store, steps=5)
    lingering = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "jobs.run_job", str(first), "--data-dir",
         str(store.data_dir), "--attempt", "1"],
        start_new_session=True,
    )  # fmt: skip
    elsewhere = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(600)", "jobs.run_job", "1", "--data-dir", "/", "--attempt", "1"]
    )
    try:
        store.release_lease(SUPERVISOR_LEASE, owner=processes.own_identity())
        driven = drive(HASTY)
        for _ in range(5):
            driven.supervisor.step(driven.now)
        assert store.job(second).state == "queued", "it waits"
        driven.until_over(second)  # one that does not leave is ended after Patience.leave
        assert store.job(second).state == "succeeded"
        assert lingering.wait(5) == -signal.SIGKILL
        assert elsewhere.poll() is None, "a trainer of another data folder is none of its business"
        assert (store.job(first).state, store.job(first).attempt) == ("succeeded", 1)
    finally:
        for process in (lingering, elsewhere):
            process.kill()
            process.wait(5)


def test_two_jobs_run_one_after_the_other_in_queue_order(store: Store, drive: Callable[..., object]) -> None:
    first, second = add(store, steps=30), add(store, steps=10)
    driven = drive()
    driven.until_over(second)
    one, two = store.job(first), store.job(second)
    assert (one.state, two.state) == ("succeeded", "succeeded")
    assert recorded_steps(store, first) == list(range(1, 31))
    assert recorded_steps(store, second) == list(range(1, 11))
    assert one.finished_at <= two.claimed_at
    assert one.final_loss == pytest.approx(1 / 30)
    assert one.peak_allocated_bytes == 1030
    assert one.owner is None and one.attempt == 1
    assert store.log_tail(first, lines=1) == "step 30"
    assert store.telemetry(first).rows >= 1


def test_a_job_whose_folder_was_deleted_while_it_waited_runs(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, steps=10)
    shutil.rmtree(store.job(id_).folder)
    drive().until_over(id_)
    assert store.job(id_).state == "succeeded"
    assert recorded_steps(store, id_) == list(range(1, 11))


@pytest.mark.parametrize(
    ("code", "state", "hint"),
    [
        (errno.EROFS, "paused", "mount it for writing."),
        (errno.EACCES, "paused", "Give the folder back its right to be written to."),
        (errno.ENOEXEC, "failed", ""),
    ],
)
def test_a_trainer_that_cannot_be_started_leaves_the_job_where_it_can_go_on(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch, code: int, state: str, hint: str
) -> None:
    id_ = add(store, steps=5)
    driven = drive()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code), str(store.job(id_).log))

    monkeypatch.setattr(processes, "spawn", refuse)
    driven.supervisor.step(0.0)
    job = store.job(id_)
    assert (job.state, job.failure) == (state, f"The trainer could not be started: {os.strerror(code)}.")
    assert (job.remedy or "").startswith(("Start it again", "Check the drive", hint or "Start it again"))
    assert hint in (job.remedy or "")
    monkeypatch.undo()
    store.enqueue(id_)
    driven.until_over(id_)
    assert store.job(id_).state == "succeeded"


@pytest.mark.parametrize(
    ("code", "hint"),
    [
        (errno.ENOSPC, "Free some room."),
        (errno.EDQUOT, "Free some room."),
        (errno.EMFILE, "Raise the limit of open files (ulimit -n), or close other programs."),
        (errno.ENFILE, "Raise the limit of open files (ulimit -n), or close other programs."),
        (errno.EAGAIN, "Close other programs."),
        (errno.ENOMEM, "Close other programs."),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else "",
)
def test_where_no_trainer_can_be_started_the_queue_waits_and_says_so_once(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch, code: int, hint: str
) -> None:
    ids = [add(store, steps=2) for _ in range(3)]
    driven = drive()

    def refuse(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(processes, "spawn", refuse)
    for now in range(50):  # it is tried again a few times
        driven.supervisor.step(float(now))
    assert [store.job(id_).state for id_ in ids] == ["queued"] * 3
    assert store.queue() == ids
    assert [store.job(id_).attempt for id_ in ids] == [4, 0, 0], "the others are not tried in their turn"
    why = store.queue_waits
    assert why is not None and os.strerror(code) in why and hint in why
    assert told(store, ids[0], "queued") == [why]
    (alert,) = store.alerts()
    assert (alert.kind, alert.job, alert.body["message"]) == ("held", ids[0], why)
    assert not store.retire(SUPERVISOR_LEASE, owner=processes.own_identity()), "it stays for when there is room"


def test_a_queue_that_waited_for_room_goes_on_by_itself_under_another_supervisor_too(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = [add(store, steps=2) for _ in range(2)]
    driven = drive()
    monkeypatch.setattr("jobs.supervisor.START_BYTES", 2**60)
    driven.supervisor.step(0.0)
    assert "of its disk are free" in (store.queue_waits or "")
    driven.supervisor.stop()
    again = drive()
    for now in range(20):
        again.supervisor.step(float(now))
    assert store.job(ids[0]).attempt == 1, "with less room than a start takes none is tried"
    monkeypatch.undo()
    again.now = 20.0
    again.until_over(ids[1])
    assert [store.job(id_).state for id_ in ids] == ["succeeded"] * 2
    assert store.queue_waits is None and not store.queue_held


def test_a_queue_that_waits_is_tried_at_once_when_a_person_lets_it_go_and_a_hold_of_theirs_stays(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = add(store, steps=2)
    driven = drive()
    monkeypatch.setattr("jobs.supervisor.START_BYTES", 2**60)
    driven.supervisor.step(0.0)
    assert store.queue_waits is not None
    store.hold_queue(True)
    assert store.queue_waits is None
    monkeypatch.undo()
    driven.supervisor.step(20.0)
    assert store.queue_held and store.job(id_).state == "queued"
    store.hold_queue(False)
    driven.now = 20.1
    assert driven.until_over(id_).state == "succeeded"


def test_a_stop_that_comes_while_the_trainer_cannot_be_started_is_heard(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, paused = add(store), add(store)
    driven = drive()
    asked = {stopped: store.request_stop, paused: store.request_pause}

    def refuse(*_: object, log: Path, **__: object) -> None:
        id_ = next(id_ for id_ in asked if store.job(id_).log == log)
        asked[id_](id_)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(processes, "spawn", refuse)
    for now in range(3):
        driven.supervisor.step(float(now))
    assert [store.job(id_).state for id_ in (stopped, paused)] == ["cancelled", "paused"]


def test_what_is_tried_before_a_start_leaves_nothing_behind(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = sorted(store.data_dir.iterdir()), len(psutil.Process().open_files())
    assert can_start(store.data_dir)
    monkeypatch.setattr(os, "fsync", refused := Refused(errno.EDQUOT))
    assert not can_start(store.data_dir)
    assert refused.asked == 1
    assert (sorted(store.data_dir.iterdir()), len(psutil.Process().open_files())) == before


class Refused:
    """A call that the system refuses."""

    def __init__(self, code: int) -> None:
        self.code, self.asked = code, 0

    def __call__(self, *_: object) -> None:
        self.asked += 1
        raise OSError(self.code, os.strerror(self.code))


def test_a_waiting_job_is_starting_after_one_round(store: Store, drive: Callable[..., object]) -> None:
    driven = drive()
    id_ = add(store, steps=1)
    driven.supervisor.step(0.0)
    assert store.job(id_).state == "starting"
    assert store.job(id_).phase.name == "starting"
    driven.until_over(id_)


@pytest.mark.parametrize(
    ("mishap", "state", "sentence"),
    [
        ("user", "failed", "The data set holds 0 rows."),
        ("bug", "failed", "Unexpected error (ValueError: seven is not a colour)."),
        ("memory", "failed", "The machine ran out of memory: no more could be had."),
        ("kill", "interrupted", f"The trainer was ended from outside (SIGKILL). {NO_STEP}"),
        ("crash", "interrupted", f"The trainer crashed (SIGSEGV). {NO_STEP}"),
        ("exit", "failed", "The trainer ended with exit code 7 before it could say how the run went."),
    ],
)
def test_every_end_has_a_reason(
    store: Store, drive: Callable[..., object], mishap: str, state: str, sentence: str
) -> None:
    id_ = add(store, mishap=mishap)
    job = drive().until_over(id_)
    assert (job.state, job.failure) == (state, sentence)
    assert job.remedy
    assert "Traceback" not in job.failure + job.remedy
    assert ("Traceback" in store.log_tail(id_)) == (mishap in ("bug", "memory"))


def test_stop_saves_and_resume_goes_on_without_gap_or_double(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, steps=60, delay=0.02)
    driven = drive()
    driven.until(lambda: store.job(id_).step >= 10)
    store.request_stop(id_)
    assert store.request_stop(id_) == "stopping"  # a double click
    job = driven.until_over(id_)
    assert job.state == "cancelled" and job.failure is None
    assert 10 <= job.step < 60
    assert job.resumable
    store.enqueue(id_)
    job = driven.until_over(id_)
    assert (job.state, job.attempt) == ("succeeded", 2)
    assert recorded_steps(store, id_) == list(range(1, 61))


def test_pause_ends_as_paused(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, steps=1000, delay=0.02)
    driven = drive()
    driven.until(lambda: store.job(id_).step >= 1)
    assert store.request_pause(id_) == "pausing"
    assert driven.until_over(id_).state == "paused"


def test_stop_while_the_model_loads_ends_at_once(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, mishap="loading")
    driven = drive()  # two minutes of patience, of which nothing is needed
    driven.until(lambda: store.job(id_).state == "running")
    store.request_stop(id_)
    job = driven.until_over(id_)
    assert (job.state, job.failure, job.step) == ("cancelled", None, 0)


def test_a_stop_waits_for_a_step_that_is_long_and_says_how_long(store: Store, drive: Callable[..., object]) -> None:
    """The test's clock runs about ten times as fast as the trainer's: a step of a second is long for HASTY."""
    id_ = add(store, steps=50, delay=1, step_s=20)
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).step >= 1)
    store.request_stop(id_)
    job = driven.until_over(id_)
    assert (job.state, job.failure, job.has_checkpoint) == ("cancelled", None, True)
    assert told(store, id_, "stop") == ["A step takes up to 20 s, so it has 100 s to hear the stop."]


def test_a_stop_waits_for_a_checkpoint_that_grows(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In real time; what stands still while it is written has no more time than a step."""
    monkeypatch.setattr("jobs.deadline.WRITING_TIMES", 1)
    id_ = add(store, steps=100_000, delay=0.01, save_s=5)
    driven = drive(Patience(stop=3.0))
    driven.until(lambda: store.job(id_).step >= 1)
    store.request_stop(id_)
    while not store.job(id_).final:
        driven.supervisor.step(time.monotonic())
        time.sleep(0.05)
    job = store.job(id_)
    assert (job.state, job.failure, job.has_checkpoint) == ("cancelled", None, True)
    assert told(store, id_, "stop") == []


@pytest.mark.skipif(os.name == "nt", reason="a process on Windows cannot be deaf to TERM")
def test_case_130_a_deaf_trainer_and_its_deaf_children_are_ended_in_bounded_time(
    store: Store, drive: Callable[..., object]
) -> None:
    id_ = add(store, mishap="hang")
    stranger = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        driven = drive(HASTY)
        driven.until(lambda: store.job(id_).step == 1)
        children = [int(pid) for pid in (store.job(id_).folder / "child.pid").read_text(encoding="utf-8").split()]
        assert len(children) == 2
        trainer = processes.pid_of(store.job(id_).owner)
        store.request_stop(id_)
        job = driven.until_over(id_)
        assert job.state == "cancelled"
        assert "did not end within 1 s of Stop and was ended" in job.failure
        assert all(map(is_gone, [*children, trainer]))
        assert [event.kind for event in store.events(id_)] == ["stop", "stop", "cancelled"]
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


@pytest.mark.skipif(os.name == "nt", reason="no process can be stopped by a signal on Windows")
@pytest.mark.parametrize("journal", ["WAL", "TRUNCATE"])
def test_a_trainer_that_stands_still_inside_a_write_is_ended_though_nobody_else_can_write(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, drive_on: Callable[..., object], journal: str
) -> None:
    """Without a write-ahead log (network file systems) nobody can even read while the write is being committed."""
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.1)
    monkeypatch.setattr(schema, "network_file_system", lambda _: None if journal == "WAL" else "nfs")
    with Store(data_dir) as store:
        id_ = add(store, mishap="locked")
        driven = drive_on(store, HASTY)
        driven.until(lambda: store.job(id_).step == 1)
        trainer = processes.pid_of(store.job(id_).owner)
        store.request_stop(id_)
        driven.until(lambda: psutil.Process(trainer).status() == psutil.STATUS_STOPPED)
        with pytest.raises(JobError, match="locked by another program"):
            store.panel_alive()
        driven.until(lambda: is_gone(trainer))
        assert driven.until_over(id_).state == "cancelled"
        assert [event.kind for event in store.events(id_)] == ["stop", "stop", "cancelled"]


def test_case_135_a_trainer_that_never_returns_from_a_native_call_is_ended_and_the_queue_goes_on(
    store: Store, drive: Callable[..., object]
) -> None:
    id_, waits = add(store, mishap="native"), add(store, steps=2)
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).step == 1)
    trainer = processes.pid_of(store.job(id_).owner)
    store.request_stop(id_)
    assert driven.until_over(waits).state == "succeeded"
    assert store.job(id_).state == "cancelled"
    assert "did not end within 1 s of Stop and was ended" in store.job(id_).failure
    assert is_gone(trainer)


def test_what_a_trainer_leaves_behind_is_ended(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, mishap="orphan", steps=3)
    job = drive().until_over(id_)
    assert job.state == "succeeded"
    assert is_gone(int((job.folder / "child.pid").read_text(encoding="utf-8")))


@pytest.mark.skipif(os.name == "nt", reason="kills with SIGKILL")
def test_a_killed_supervisor_is_replaced_and_the_run_misses_nothing(
    store: Store, data_dir: Path, drive: Callable[..., object], eventually: Callable[..., None]
) -> None:
    id_ = add(store, steps=100, delay=0.02)
    doomed = subprocess.Popen([sys.executable, str(STAND_IN), "supervise", str(data_dir), "60"])
    eventually(lambda: store.job(id_).step >= 5)
    owner = store.job(id_).owner
    doomed.send_signal(signal.SIGKILL)
    doomed.wait()
    assert processes.alive(owner)
    driven = drive()  # takes the dead one's lease at once
    driven.until(lambda: store.job(id_).step >= 40)
    assert store.job(id_).owner == owner
    job = driven.until_over(id_)
    assert (job.state, job.attempt) == ("succeeded", 1)
    assert recorded_steps(store, id_) == list(range(1, 101))


@pytest.mark.skipif(os.name == "nt", reason="kills with SIGKILL")
def test_a_trainer_found_dead_is_interrupted(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store)
    claim_and_vanish(store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as dead:
        store.set_owner(id_, attempt=1, owner=processes.identity(dead.pid))
        store.begin_attempt(id_, attempt=1, owner=processes.identity(dead.pid))
        dead.kill()
    job = drive().until_over(id_)
    assert job.state == "interrupted"
    assert "ended without a word" in job.failure


def test_a_pid_used_again_is_not_taken_for_the_trainer(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        boot, pid, start = processes.identity(stranger.pid).split("|")
        claim_and_vanish(store)
        earlier = str(float(start) - 100) if "." in start else str(int(start) - 100)
        store.begin_attempt(id_, attempt=1, owner=f"{boot}|{pid}|{earlier}")
        job = drive().until_over(id_)
        assert job.state == "interrupted"
        assert stranger.poll() is None, "the stranger with the same pid must not be touched"
        stranger.communicate(b"\n")


@pytest.mark.parametrize("asked", [False, True], ids=["running", "stopping"])
@pytest.mark.parametrize("taken", [False, True], ids=["pid-gone", "pid-taken"])
def test_case_134_after_power_loss_the_queue_goes_on_and_no_stranger_is_touched(
    store: Store, drive: Callable[..., object], asked: bool, taken: bool
) -> None:
    """A run that was to stop when its trainer died has stopped; one that was not is interrupted."""
    id_, waits = add(store), add(store, steps=2)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stranger:
        boot, pid, start = processes.identity(stranger.pid).split("|")
        claim_and_vanish(store)
        earlier = str(float(start) - 100) if "." in start else str(int(start) - 100)
        store.begin_attempt(id_, attempt=1, owner=f"{boot}|{pid if taken else 2**22 + 12345}|{earlier}")
        if asked:
            assert store.request_stop(id_) == "stopping"
        driven = drive()
        assert driven.until_over(waits).state == "succeeded"
        assert store.job(id_).state == ("cancelled" if asked else "interrupted")
        assert store.job(id_).owner is None
        assert stranger.poll() is None
        stranger.communicate(b"\n")


def test_a_restart_of_the_machine_interrupts(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store)
    claim_and_vanish(store)
    store.begin_attempt(id_, attempt=1, owner=f"another-boot|{os.getpid()}|1")
    job = drive().until_over(id_)
    assert (job.state, job.failure) == ("interrupted", f"The machine was started again while it trained. {NO_STEP}")


def test_a_job_whose_supervisor_died_before_spawning_waits_again(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, steps=2)
    claim_and_vanish(store)
    job = drive(HASTY).until_over(id_)
    assert (job.state, job.attempt) == ("succeeded", 2)


def test_a_foreground_run_is_left_alone_until_its_process_dies(store: Store, drive: Callable[..., object]) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as owner:
        job = store.begin_foreground(RunConfig(), owner=processes.identity(owner.pid))
        waiting = add(store, steps=1)
        driven = drive()
        for now in range(5):
            driven.supervisor.step(float(now))
        assert store.job(job.id).state == "running"
        assert store.job(waiting).state == "queued", "one run at a time has the machine"
        owner.kill()
    driven.until(lambda: store.job(job.id).state == "interrupted", seconds=2)
    assert "ended without a word" in store.job(job.id).failure
    driven.until_over(waiting)


def test_the_second_supervisor_says_so_and_leaves_with_0(store: Store, data_dir: Path) -> None:
    first = Supervisor(store)
    assert first.start()
    command = processes.python_module("jobs.supervisor", "--data-dir", str(data_dir))
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=20, check=False, cwd=processes.ROOT, env=with_root()
    )
    assert done.returncode == 0, done.stderr
    assert f"Another supervisor (pid {os.getpid()}) works on" in done.stdout
    assert first.step(0.0), "the first one is not disturbed"


def with_root() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(processes.ROOT), "PYTHONUTF8": "1"}


def test_ensure_running_called_twice_leaves_one_that_leaves_by_itself(
    store: Store, data_dir: Path, eventually: Callable[..., None]
) -> None:
    ensure_running(data_dir)
    ensure_running(data_dir)
    eventually(lambda: store.lease(SUPERVISOR_LEASE) is not None)
    who, _ = store.lease(SUPERVISOR_LEASE)
    assert processes.alive(who)
    ensure_running(data_dir)  # finds it: nothing is started
    running = [
        process
        for process in psutil.process_iter(["cmdline"])
        if str(data_dir) in (process.info["cmdline"] or []) and not is_gone(process.pid)
    ]
    # The second one leaves because the first has the lease; wait for that before the first is ended.
    eventually(lambda: sum(not is_gone(process.pid) for process in running) == 1)
    os.kill(processes.pid_of(who), signal.SIGTERM)
    eventually(lambda: all(is_gone(process.pid) for process in running))
    assert store.lease(SUPERVISOR_LEASE) is None, "given back"
    log = (data_dir / "supervisor.log").read_text(encoding="utf-8")
    assert "Asked to leave" in log and "Traceback" not in log


def test_it_leaves_when_idle_unless_a_panel_is_open(store: Store) -> None:
    supervisor = Supervisor(store, patience=Patience(idle=60))
    assert supervisor.start()
    assert supervisor.step(0.0)
    for now in (10.0, 30.0, 50.0, 100.0):
        store.panel_alive()
        time.sleep(0.002)
        assert supervisor.step(now)
    assert supervisor.step(159.0)
    id_ = store.add_job(RunConfig(), draft=True)
    assert not supervisor.step(161.0)
    assert store.job(id_).state == "draft"
    assert store.lease(SUPERVISOR_LEASE) is None


def test_a_job_added_while_it_leaves_is_not_left_behind(store: Store) -> None:
    assert store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    add(store)
    assert not store.retire(SUPERVISOR_LEASE, owner="me")
    assert store.lease(SUPERVISOR_LEASE) is not None


def test_a_holder_of_another_boot_is_judged_by_its_heartbeat() -> None:
    assert holder_alive("elsewhere|1|1", 1000.0, now=1000.0 + LEASE_STALE_S - 1)
    assert not holder_alive("elsewhere|1|1", 1000.0, now=1000.0 + LEASE_STALE_S + 1)
    assert not holder_alive("elsewhere|1|1", 90_000.0, now=1000.0), "a clock set back a day"
    own = processes.own_identity()
    assert holder_alive(own, 0.0, now=1e9), "a process that is seen alive needs no heartbeat"


def test_after_a_restart_of_the_machine_the_lease_is_waited_for(
    store: Store, data_dir: Path, eventually: Callable[..., None]
) -> None:
    """The holder's heartbeat is fresh, but from another boot: it may live in another container, so wait and see."""
    moment = store.clock()
    store.clock = lambda: moment - LEASE_STALE_S + 1.5
    assert store.take_lease(SUPERVISOR_LEASE, owner="another-boot|1|1", alive=lambda *_: False)
    ensure_running(data_dir)
    assert store.lease(SUPERVISOR_LEASE)[0] == "another-boot|1|1"
    began = subprocess.Popen([sys.executable, str(STAND_IN), "supervise", str(data_dir), "0"], env=with_root())
    try:
        assert began.wait(20) == 0
    finally:
        began.kill()
    assert store.lease(SUPERVISOR_LEASE) is None, "taken, idle at once, and given back"


def test_it_gives_way_when_its_lease_was_taken(store: Store) -> None:
    supervisor = Supervisor(store)
    assert supervisor.start()
    assert store.take_lease(SUPERVISOR_LEASE, owner="another", alive=lambda *_: False)
    assert not supervisor.step(0.0)


# ---- going on by itself -----------------------------------------------------------------------------------------

posix = pytest.mark.skipif(os.name == "nt", reason="ends processes with signals")


@posix
def test_a_killed_trainer_goes_on_by_itself_without_gap_or_double(store: Store, drive: Callable[..., object]) -> None:
    id_ = add_mortal(store, die_at="15,35")
    job = drive().until_over(id_)
    assert (job.state, job.attempt, job.resumes, job.failure) == ("succeeded", 3, 2, None)
    assert recorded_steps(store, id_) == list(range(1, 61))
    assert told(store, id_, "resumed") == [
        "The trainer was ended from outside (SIGKILL). It goes on by itself from the checkpoint of step 10 "
        "(time 1 of at most 3).",
        "The trainer was ended from outside (SIGKILL). It goes on by itself from the checkpoint of step 30 "
        "(time 2 of at most 3).",
    ]


@posix
def test_a_crash_goes_on_by_itself_and_before_another_waiting_job(store: Store, drive: Callable[..., object]) -> None:
    id_, other = add_mortal(store, die_at="15", by="SIGSEGV"), add(store, steps=1)
    driven = drive()
    driven.until_over(other)
    assert store.job(id_).state == "succeeded"
    assert store.job(id_).finished_at <= store.job(other).claimed_at


@posix
def test_it_goes_on_by_itself_at_most_as_often_as_set(store: Store, drive: Callable[..., object]) -> None:
    id_ = add_mortal(store, die_at="15,25,35,45,55", automatic_resumes=2)
    driven = drive()
    job = driven.until_over(id_)
    assert (job.state, job.attempt, job.step) == ("interrupted", 3, 35)
    assert "(SIGKILL). It went on by itself 2 times, which is the most that was set" in job.failure
    assert job.remedy.startswith("Resume goes on from the last checkpoint")
    store.enqueue(id_)  # a person asks for it: the count begins again
    job = driven.until_over(id_)
    assert (job.state, job.attempt, job.resumes) == ("succeeded", 6, 2)


@posix
def test_without_progress_it_does_not_go_on_by_itself(store: Store, drive: Callable[..., object]) -> None:
    id_ = add_mortal(store, die_at="15,15")
    job = drive().until_over(id_)
    assert (job.state, job.attempt, job.resumes) == ("interrupted", 2, 1)
    assert "because the start before had come to step 15 too" in job.failure


@posix
def test_death_before_the_first_checkpoint_goes_on_from_the_start(store: Store, drive: Callable[..., object]) -> None:
    id_ = add_mortal(store, die_at="5")
    assert drive().until_over(id_).state == "succeeded"
    assert recorded_steps(store, id_) == list(range(1, 61))
    assert "It goes on by itself from the start (time 1" in told(store, id_, "resumed")[0]


@posix
@pytest.mark.parametrize(("wishes", "state"), [({"automatic_resumes": 0}, "interrupted"), ({"by": "exit"}, "failed")])
def test_switched_off_or_ended_by_itself_it_stays_ended(
    store: Store, drive: Callable[..., object], wishes: dict[str, object], state: str
) -> None:
    id_ = add_mortal(store, die_at="15", **wishes)
    job = drive().until_over(id_)
    assert (job.state, job.attempt, job.resumable) == (state, 1, True)
    assert job.failure in (
        "The trainer was ended from outside (SIGKILL).",
        "The trainer ended with exit code 7 before it could say how the run went.",
    )


def test_a_job_whose_start_ended_the_supervisor_twice_is_parked(store: Store, drive: Callable[..., object]) -> None:
    id_ = add(store, steps=2)
    for _ in range(2):
        claim_and_vanish(store)
        driven = drive(HASTY)
        driven.until(lambda: not store.job(id_).active)
    job = store.job(id_)
    assert (job.state, job.attempt, job.losses) == ("interrupted", 2, 2)
    assert "The supervisor of the queue died 2 times over this run, so it is parked" in job.failure
    for _ in range(10):
        driven.supervisor.step(driven.now)
    assert store.job(id_).attempt == 2, "never claimed again by itself"
    store.enqueue(id_)
    assert driven.until_over(id_).state == "succeeded"


@posix
def test_a_run_that_lost_two_supervisors_lives_on_but_is_not_resumed_by_itself(
    store: Store, data_dir: Path, drive: Callable[..., object], eventually: Callable[..., None]
) -> None:
    id_ = add_mortal(store, steps=2000, delay=0.02)
    for losses in range(2):
        doomed = subprocess.Popen([sys.executable, str(STAND_IN), "supervise", str(data_dir), "60"])
        eventually(lambda n=losses: store.job(id_).step >= 1 and store.job(id_).losses == n)
        doomed.send_signal(signal.SIGKILL)
        doomed.wait()
    driven = drive()
    driven.until(lambda: store.job(id_).losses == 2)
    assert store.job(id_).attempt == 1
    os.kill(processes.pid_of(store.job(id_).owner), signal.SIGKILL)
    job = driven.until_over(id_)
    assert job.state == "interrupted"
    assert "died 2 times over this run, so it is parked" in job.failure


def test_what_a_restart_of_the_machine_ended_in_peace_goes_on(store: Store, drive: Callable[..., object]) -> None:
    ids = [add(store, steps=20), add(store, steps=20)]
    driven = drive()
    for id_, boot in zip(ids, ("another-boot", processes.boot()), strict=True):
        store.transition(id_, expected=("queued",), state="interrupted", failure="Asked to end.", ended_boot=boot)
    with store._write(durable=False) as db:  # as if an attempt had come to step 7
        db.execute("UPDATE jobs SET attempt = 1, step_before = 0, checkpoint_before = 0")
        for id_ in ids:
            db.execute("INSERT INTO metrics (job, step, attempt, time) VALUES (?, 7, 1, 1)", [id_])
    driven.supervisor.stop()
    drive().until_over(ids[0])
    assert [store.job(id_).state for id_ in ids] == ["succeeded", "interrupted"]
    assert told(store, ids[0], "resumed")[0].startswith("The machine was started again. It goes on by itself")
