"""Files and folders in the making: written beside their place, under a name that says by whom, and moved there whole.

What a process that was killed has left of them is swept when the next run begins; the doctor finds it, too. What a
living process writes is never touched.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import psutil

QUIET_S: Final = 600.0
"""What a process of another machine, container or boot writes, of which nobody can say here whether it lives, is given
up once nothing of it was written for so long."""

_NAME: Final = re.compile(r"\.unfinished-([0-9a-f]{8})-(\d+)-[0-9a-f]{8}$")
_EARLIER: Final = re.compile(r"^unfinished-\w+$")  # of earlier versions, which did not say by whom


def beside(place: Path) -> Path:
    """A name beside `place`, for what this process is about to write there."""
    return place.with_name(f"{place.name}.unfinished-{_home()}-{os.getpid()}-{secrets.token_hex(4)}")


def abandoned(folder: Path) -> list[Path]:
    """What processes that are gone have left in the making, anywhere under `folder`."""
    return [path for path in _unfinished(folder) if _is_given_up(path)]


def sweep(folder: Path) -> None:
    """Remove it."""
    for path in abandoned(folder):
        remove(path)


def remove(path: Path) -> None:
    """A file, or a folder and what is in it. What cannot be removed stays."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _unfinished(folder: Path) -> Iterator[Path]:
    for parent, folders, files in os.walk(folder):
        found = [name for name in (*folders, *files) if _NAME.search(name) or _EARLIER.match(name)]
        folders[:] = [name for name in folders if name not in found]
        yield from (Path(parent, name) for name in sorted(found))


def _is_given_up(path: Path) -> bool:
    name = _NAME.search(path.name)
    if name and name[1] == _home():
        return not psutil.pid_exists(int(name[2]))
    return time.time() - _written_at(path) > QUIET_S


def _written_at(path: Path) -> float:
    """When something in it was last written, Unix seconds; now, where it goes away meanwhile."""
    try:
        latest: float = max(each.stat().st_mtime for each in (path, *(path.rglob("*") if path.is_dir() else ())))
    except OSError:
        return time.time()
    return latest


@cache
def _home() -> str:
    """Eight hexadecimal digits of the machine, or container, and its boot: within one, a pid says who lives."""
    known = platform.node()
    with suppress(OSError):  # where the system tells: Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        known += f"{boot}{Path('/proc/self/ns/pid').stat().st_ino}"
    return hashlib.sha256(known.encode()).hexdigest()[:8]
