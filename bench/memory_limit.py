"""A process inside a hard limit of memory, enforced from outside: by a control group, or by RLIMIT_DATA and a watch.

Memory that counts is what the system cannot take back without writing: the process's own pages, and pages of mapped
files that it changed. A control group (v2, where root may make one) counts both. RLIMIT_DATA counts what a process
asked for of its own, whether used or not, but no page of a shared file. There a watch looks at both in turns and ends
the process that passes the limit; between two looks only changed pages of files can grow unseen, and their peak is
bounded by `resident_bytes`, which the system keeps exactly. Linux only.
"""

from __future__ import annotations

import contextlib
import os
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

LOOKS_S: Final = 0.1
"""Between two looks. A look walks the pages of the process: 10 ms for 3 GiB of them."""

_OF_MEMORY: Final = re.compile(r"allocate memory|memory ran out|out of memory|MemoryError|OutOfMemory", re.I)


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a process ended. `own_bytes`: the most that was seen of its own and changed pages; `resident_bytes`: its
    highest resident set, clean pages of files among it (the system's own figure)."""

    code: int
    out: str
    told: str
    own_bytes: int
    resident_bytes: int
    limit_bytes: int
    ended_by_limit: bool

    @property
    def held(self) -> bool:
        """Whether it went to its end and was never seen above the limit."""
        return self.code == 0 and (not self.limit_bytes or self.own_bytes <= self.limit_bytes)

    @property
    def lacked_memory(self) -> bool:
        """Whether it ended for want of memory, and for nothing else."""
        return self.ended_by_limit or (self.code != 0 and bool(_OF_MEMORY.search(self.told)))

    @property
    def last_words(self) -> str:
        if self.ended_by_limit:
            return f"ended by the limit with {self.own_bytes / 2**30:.2f} GiB"
        lines = [line for line in self.told.splitlines() if line.strip()]
        return lines[-1][:300] if lines else f"exit code {self.code}"


def run_inside(command: Sequence[str], *, limit_bytes: int, environment: Mapping[str, str] | None = None) -> Ended:
    """Run `command` with at most `limit_bytes` of memory; 0: no limit, its memory is measured only."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as told, _group(limit_bytes) as group:

        def begin() -> None:
            if group is not None:
                (group / "cgroup.procs").write_text("0", encoding="ascii")
            elif limit_bytes:
                resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, limit_bytes))

        with subprocess.Popen(command, stdout=out, stderr=told, preexec_fn=begin, env=environment) as process:
            try:
                own, resident, passed = _watched(process, 0 if group is not None else limit_bytes)
            finally:
                process.kill()  # who is interrupted leaves nothing running; one that has ended does not notice
        killed = group is not None and _line(group / "memory.events", "oom_kill") not in ("", "oom_kill 0")
        return Ended(
            code=process.returncode,
            out=_text(out),
            told=_text(told),
            own_bytes=own,
            resident_bytes=resident,
            limit_bytes=limit_bytes,
            ended_by_limit=passed or killed,
        )


def _watched(process: subprocess.Popen[bytes], limit_bytes: int) -> tuple[int, int, bool]:
    """(most own bytes, most resident bytes, whether it was ended for them) of a process, waited for."""
    own, resident, passed = 0, 0, False
    while process.poll() is None:
        own, resident = max(own, own_bytes(process.pid)), max(resident, resident_bytes(process.pid))
        if limit_bytes and own > limit_bytes and not passed:
            process.kill()
            passed = True
        time.sleep(LOOKS_S)
    return own, resident, passed


def own_bytes(pid: int) -> int:
    """A process's own pages and those of files that it changed, at this moment; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    return 1024 * sum(int(line.split()[1]) for line in lines if line.startswith(("Private_Dirty:", "Shared_Dirty:")))


def resident_bytes(pid: int) -> int:
    """A process's highest resident set so far; 0 where it has ended."""
    found = _line(Path(f"/proc/{pid}/status"), "VmHWM:").split()
    return 1024 * int(found[1]) if found else 0


def _line(path: Path, begins: str) -> str:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line for line in lines if line.split()[:1] == [begins]), "")


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode("utf-8", errors="replace")


# --- control groups --------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _group(limit_bytes: int) -> Iterator[Path | None]:
    """A control group with that limit and no swap, gone afterwards; None where none is asked for or can be had."""
    home = group_home() if limit_bytes else None
    made = None if home is None else home / f"vramfit-limit-{os.getpid()}"
    if made is None:
        yield None
        return
    try:
        made.mkdir()
        (made / "memory.max").write_text(str(limit_bytes), encoding="ascii")
        (made / "memory.swap.max").write_text("0", encoding="ascii")
    except OSError:
        with contextlib.suppress(OSError):
            made.rmdir()
        yield None
        return
    try:
        yield made
    finally:
        with contextlib.suppress(OSError):
            made.rmdir()


def group_home(mounted: Path = Path("/sys/fs/cgroup"), of: Path = Path("/proc/self/cgroup")) -> Path | None:
    """The nearest group above this process whose children can have a limit of memory, if it can be written to. Below
    the process's own group none may be made: a group of v2 has either processes or children with limits."""
    own = next((line[3:].strip("/") for line in _lines(of) if line.startswith("0::")), None)
    if own is None:
        return None
    for folder in (mounted / own, *(mounted / own).parents):
        if "memory" in " ".join(_lines(folder / "cgroup.subtree_control")).split() and os.access(folder, os.W_OK):
            return folder
        if folder == mounted:
            return None
    return None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
