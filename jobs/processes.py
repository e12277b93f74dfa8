"""Processes, platform by platform, in this one place: who is that, start it apart, end it with everything it started.

A process is named by boot, pid and start time, never by a pid alone: pids are used again, after a restart of the
machine and without one. POSIX: a trainer leads its own session and process group. Windows: its own process group.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import psutil

ROOT: Final = Path(__file__).resolve().parent.parent
_START_TOLERANCE_S: Final = 2.0  # macOS and Windows tell start times in wall-clock seconds, rounded


# ---- who is that ------------------------------------------------------------------------------------------------


def identity(pid: int | None = None) -> str | None:
    """`boot|pid|start` of a process (default: this one); None when there is no such process."""
    pid = os.getpid() if pid is None else pid
    found = _start(pid)
    return None if found is None else f"{boot()}|{pid}|{found}"


def own_identity() -> str:
    """This process's identity."""
    found = identity()
    assert found is not None
    return found


def pid_of(who: str) -> int:
    """The pid in an identity."""
    return int(who.split("|")[1])


def same_boot(who: str) -> bool:
    """Whether the process was started since this machine (or container) was."""
    return who.split("|")[0] == boot()


def alive(who: str) -> bool:
    """Whether exactly that process still runs. One that ended and was not yet collected (a zombie) does not."""
    _, pid, start = who.split("|")
    found = _start(int(pid)) if same_boot(who) else None
    return found is not None and _equal(found, start) and not _is_zombie(int(pid))


@lru_cache(maxsize=1)
def boot() -> str:
    """What changes when the machine, or the container this runs in, is started again."""
    if sys.platform == "linux":
        boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot_id}:{Path('/proc/self/ns/pid').stat().st_ino}"
    return platform.node() or "machine"  # start times are absolute here, so they tell boots apart


def _start(pid: int) -> str | None:
    """When the process started: ticks since boot on Linux (setting the clock moves nothing), else Unix seconds."""
    if sys.platform == "linux":
        fields = _stat(pid)
        return None if fields is None else fields[19]
    try:
        return f"{psutil.Process(pid).create_time():.2f}"
    except psutil.Error:
        return None


def _stat(pid: int) -> list[str] | None:
    """The fields of /proc/PID/stat behind the name (which may hold anything): state, parent, group, session ..."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


def _equal(start: str, other: str) -> bool:
    return start == other if sys.platform == "linux" else abs(float(start) - float(other)) < _START_TOLERANCE_S


def _is_zombie(pid: int) -> bool:
    if sys.platform == "linux":
        fields = _stat(pid)
        return fields is None or fields[0] in "ZX"
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.Error:
        return True


# ---- start it apart ---------------------------------------------------------------------------------------------


def python_module(module: str, *arguments: str) -> list[str]:
    """The command that runs one of our modules with this Python. `-P`: nothing in the working folder can shadow it."""
    return [sys.executable, "-P", "-m", module, *arguments]


class Apart(subprocess.Popen[bytes]):
    """A process that may outlive this one: that it still runs when nobody holds the handle any more is no mistake, so
    Python does not warn of it. One that has ended is collected all the same."""

    def __del__(self) -> None:
        super().__del__(_warn=_silently)  # type: ignore[call-arg]  # not in the stubs


def _silently(*_: object, **__: object) -> None:
    """No warning."""


def spawn(command: Sequence[str], *, log: Path, environment: Mapping[str, str] | None = None) -> Apart:
    """Start a process that outlives this one, its output appended to `log`: a file, since a pipe would break with us.

    It keeps this process's working folder, so that relative paths mean the same. Raises OSError.
    """
    ours = {"PYTHONUTF8": "1", "PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    variables = {**os.environ, **ours, "PYTHONPATH": path, **(environment or {})}
    with log.open("ab") as output:
        if sys.platform == "win32":
            apart = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
            return Apart(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=variables,
                creationflags=apart,
            )
        return Apart(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=variables,
            start_new_session=True,
        )


def running(module: str, *arguments: str) -> dict[str, list[str]]:
    """Living processes that run one of our modules with all of these arguments: identity -> command line.

    Of a process and those that it forked (which have its command line) only the first is told.
    """
    found: dict[int, list[str]] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            if module in line and all(argument in line for argument in arguments) and not _is_zombie(process.pid):
                found[process.pid] = line
    first = {}
    for pid, line in found.items():
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).ppid() not in found and (who := identity(pid)) is not None:
                first[who] = line
    return first


# ---- end it with everything it started --------------------------------------------------------------------------


def members(who: str) -> list[psutil.Process]:
    """Every living process of the group that `who` leads or led, and every descendant of it that left the group.

    Empty when the pid now belongs to a stranger: then the group is gone.
    """
    pid = pid_of(who)
    if not same_boot(who) or (psutil.pid_exists(pid) and not _is_ours(who)):
        return []
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        if _in_group(process, pid):
            found[process.pid] = process
    with contextlib.suppress(psutil.Error):
        for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
            found[process.pid] = process
    return [process for process in found.values() if not _is_zombie(process.pid)]


def _is_ours(who: str) -> bool:
    """The pid still names that process, a zombie included (it keeps the pid from being used again)."""
    found = _start(pid_of(who))
    return found is not None and _equal(found, who.split("|")[2])


def _in_group(process: psutil.Process, group: int) -> bool:
    if sys.platform == "win32":
        try:
            return process.ppid() == group
        except psutil.Error:
            return False
    try:
        return os.getpgid(process.pid) == group
    except OSError:
        return False


def terminate(who: str) -> None:
    """Ask the whole group to end (TERM; on Windows a break event, which only reaches a process with our console)."""
    if sys.platform == "win32":
        with contextlib.suppress(OSError):
            if alive(who):
                os.kill(pid_of(who), signal.CTRL_BREAK_EVENT)
        return
    for process in members(who):
        with contextlib.suppress(psutil.Error):
            process.terminate()


def kill(who: str) -> None:
    """End the whole group without asking. Repeated until nothing is left, since a member may be starting another."""
    _kill(who, [])


def end(who: str, *, grace_s: float) -> None:
    """TERM, then KILL what is left after `grace_s`. Returns when the group is gone, or nothing more can be done."""
    # Kept, because a child that left the group cannot be found any more once its parent is gone.
    known = members(who)
    terminate(who)
    _wait(known, seconds=grace_s)
    _kill(who, known)


def _kill(who: str, known: list[psutil.Process]) -> None:
    for _ in range(5):
        known = [process for process in {*known, *members(who)} if _lives(process)]
        for process in known:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not known:
            return
        _wait(known, seconds=0.2)


def _wait(known: Sequence[psutil.Process], *, seconds: float) -> None:
    """Until all are gone, zombies included. (psutil's own wait would collect our children's exit codes.)"""
    deadline = time.monotonic() + seconds
    while any(map(_lives, known)) and time.monotonic() < deadline:
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    return process.is_running() and not _is_zombie(process.pid)


# ---- how did it end ---------------------------------------------------------------------------------------------


def memory_events(pid: int, *, root: Path = Path("/")) -> Path | None:
    """The file in which the control group (cgroup v2) of a living process counts the killer's strikes; None without."""
    try:
        groups = (root / "proc" / str(pid) / "cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    place = next((line.removeprefix("0::/") for line in groups if line.startswith("0::/")), None)
    if place is None:
        return None
    found = root / "sys" / "fs" / "cgroup" / place / "memory.events"
    return found if found.is_file() else None


def out_of_memory_kills(events: Path | None = None) -> int | None:
    """How often the kernel's out-of-memory killer struck: in the control group whose `memory_events` these are, else
    since boot; None where the system does not tell."""
    try:
        text = (events or Path("/proc/vmstat")).read_text(encoding="ascii")
    except OSError:
        return None
    for line in text.splitlines():
        name, _, count = line.partition(" ")
        if name == "oom_kill":
            return int(count)
    return None


def signal_name(number: int) -> str:
    """`SIGKILL` for 9; the number itself when it has no name here."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
