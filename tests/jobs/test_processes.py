"""Who a process is, and ending a whole group without touching a stranger."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from jobs import processes

posix = pytest.mark.skipif(os.name == "nt", reason="process groups and zombies are POSIX's")
SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
WITH_CHILD = "import subprocess, sys, time; p = subprocess.Popen({child!r}, **{extra!r}); print(p.pid, flush=True); "


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[[list[str]], subprocess.Popen[bytes]]]:
    started: list[subprocess.Popen[bytes]] = []

    def make(command: list[str]) -> subprocess.Popen[bytes]:
        started.append(processes.spawn(command, log=tmp_path / "log"))
        return started[-1]

    yield make
    for process in started:
        process.kill()
        process.wait()


def identity_of(process: subprocess.Popen[bytes]) -> str:
    who = processes.identity(process.pid)
    assert who is not None
    return who


def test_an_identity_names_one_process_for_ever(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = spawn(SLEEP)
    who = identity_of(process)
    assert who == identity_of(process)
    assert processes.pid_of(who) == process.pid
    assert processes.alive(who) and processes.same_boot(who)
    boot, pid, start = who.split("|")
    assert not processes.alive(f"another|{pid}|{start}")
    assert not processes.alive(f"{boot}|{pid}|{float(start) - 500:.0f}")
    process.kill()
    process.wait()
    assert not processes.alive(who)
    assert processes.identity(process.pid) is None


@posix
def test_a_zombie_is_not_alive(spawn: Callable[..., subprocess.Popen[bytes]], eventually: Callable[..., None]) -> None:
    process = spawn([sys.executable, "-c", ""])
    who = identity_of(process)
    eventually(lambda: not processes.alive(who))
    assert psutil.Process(process.pid).status() == psutil.STATUS_ZOMBIE
    assert processes.members(who) == []


def test_a_spawned_process_writes_utf_8_to_its_log_at_once_and_finds_our_modules(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "jobs.py").write_text("raise SystemExit('shadowed')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    code = "import jobs.processes, os, sys; print('数据', os.getcwd()); sys.stderr.write('err\\n')"
    process = spawn([sys.executable, "-P", "-c", code])
    assert process.wait(20) == 0
    lines = (tmp_path / "log").read_text(encoding="utf-8").splitlines()
    assert lines == [f"数据 {tmp_path.resolve()}", "err"]


def with_child(*, apart: bool = False) -> list[str]:
    extra = {"start_new_session": True} if apart else {}
    return [sys.executable, "-c", WITH_CHILD.format(child=SLEEP, extra=extra) + "time.sleep(600)"]


def first_line(path: Path, eventually: Callable[..., None]) -> int:
    eventually(lambda: path.exists() and path.read_text(encoding="utf-8").endswith("\n"))
    return int(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("apart", [False, pytest.param(True, marks=posix)])
def test_the_whole_group_is_ended_even_a_child_that_left_it(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]], eventually: Callable[..., None], apart: bool
) -> None:
    process = spawn(with_child(apart=apart))
    who = identity_of(process)
    child = first_line(tmp_path / "log", eventually)
    assert {member.pid for member in processes.members(who)} == {process.pid, child}
    began = time.monotonic()
    processes.end(who, grace_s=60)
    assert time.monotonic() - began < 50, "they heard TERM"
    assert process.wait(1) != 0
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


@posix
def test_a_group_outlives_its_leader_and_is_still_found(
    tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]], eventually: Callable[..., None]
) -> None:
    process = spawn(with_child())
    who = identity_of(process)
    child = first_line(tmp_path / "log", eventually)
    process.kill()
    process.wait()
    assert [member.pid for member in processes.members(who)] == [child]
    processes.kill(who)
    assert processes.members(who) == []


def test_a_stranger_with_the_same_pid_is_never_touched(spawn: Callable[..., subprocess.Popen[bytes]]) -> None:
    process = spawn(SLEEP)
    boot, pid, start = identity_of(process).split("|")
    before = f"{boot}|{pid}|{float(start) - 500:.0f}"
    assert processes.members(before) == []
    processes.end(before, grace_s=0)
    processes.kill(f"another-boot|{pid}|{start}")
    assert process.poll() is None


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_what_linux_tells() -> None:
    assert processes.out_of_memory_kills() is not None
    assert processes.signal_name(9) == "SIGKILL"
    assert processes.signal_name(999) == "signal 999"


def test_the_killer_s_strikes_are_counted_in_the_process_s_own_control_group(tmp_path: Path) -> None:
    group = tmp_path / "sys" / "fs" / "cgroup" / "user.slice" / "run 1.scope"
    group.mkdir(parents=True)
    (tmp_path / "proc" / "7").mkdir(parents=True)
    (tmp_path / "proc" / "7" / "cgroup").write_text("4:memory:/old\n0::/user.slice/run 1.scope\n", encoding="utf-8")
    assert processes.memory_events(7, root=tmp_path) is None, "no memory controller here"
    (group / "memory.events").write_text("low 0\nhigh 5\nmax 9\noom 2\noom_kill 3\n", encoding="utf-8")
    found = processes.memory_events(7, root=tmp_path)
    assert found == group / "memory.events"
    assert processes.out_of_memory_kills(found) == 3
    assert processes.memory_events(8, root=tmp_path) is None
    assert processes.out_of_memory_kills(tmp_path / "gone") is None


def test_a_process_that_outlives_its_handle_is_no_warning_and_is_collected(tmp_path: Path) -> None:
    process = processes.spawn(SLEEP, log=tmp_path / "log")
    pid = process.pid
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        del process
        gc.collect()
    assert told == []
    psutil.Process(pid).kill()
    deadline = time.monotonic() + 10
    while psutil.pid_exists(pid) and time.monotonic() < deadline:
        subprocess._cleanup()
        time.sleep(0.01)
    assert not psutil.pid_exists(pid)
