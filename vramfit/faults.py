"""Named points at which a test makes the process die or a call fail: VRAMFIT_FAULT="save: tensors written:kill:2".

`reach(point)` does nothing unless the variable names that point; it may name several faults, with semicolons between.
The kinds: `kill` (SIGKILL, as a power cut ends a process), `error` (an exception of ours), `enospc` (the disk is full),
`edquot` (the quota is used up), `eio` (the disk fails), `emfile` (no further file can be opened). The number says at
which arrival, counted in each process from 1, which it is when left out. `tests/faults` strikes them all.
"""

from __future__ import annotations

import errno
import os
import signal
import threading
from collections import Counter
from typing import Final

VARIABLE: Final = "VRAMFIT_FAULT"
_CODES: Final = {
    "enospc": errno.ENOSPC,
    "edquot": getattr(errno, "EDQUOT", errno.ENOSPC),
    "eio": errno.EIO,
    "emfile": errno.EMFILE,
}
KINDS: Final = ("kill", "error", *_CODES)
POINTS: Final = (
    "save: before the files",
    "save: tensors written",
    "save: manifest written",
    "save: renamed",
    "save: rotating",
    "export: weights written",
    "export: before the move",
    "trainer: loading",
    "resume: checkpoint read",
    "trainer: before a step",
    "trainer: in a step",
    "trainer: after a step",
    "trainer: after an evaluation",
    "trainer: before the end is noted",
    "claim: before the spawn",
    "claim: after the spawn",
    "supervisor: adopting",
    "supervisor: burying",
    "supervisor: going on",
    "recorder: flush",
)

_arrivals: Counter[str] = Counter()
_lock = threading.Lock()


def reach(point: str) -> None:
    """The process is at this point. Raises RuntimeError or OSError, or never returns, where the variable says so."""
    asked = os.environ.get(VARIABLE)
    if not asked:
        return
    faults = {where: (kind, number) for where, kind, number in map(parse, asked.split(";"))}
    assert point in POINTS, point
    if point not in faults:
        return
    kind, number = faults[point]
    with _lock:
        _arrivals[point] += 1
        if _arrivals[point] != number:
            return
    _strike(point, kind)


def parse(text: str) -> tuple[str, str, int]:
    """Point, kind and arrival of one fault's text. Raises ValueError for one that names no fault."""
    rest, _, last = text.rpartition(":")
    number = 1
    if last.isdecimal():
        number = int(last)
        rest, _, last = rest.rpartition(":")
    if rest not in POINTS or last not in KINDS or number < 1:
        raise ValueError(f"{VARIABLE}={text} names no fault: POINT:KIND[:COUNT], one of {POINTS} and of {KINDS}")
    return rest, last, number


def _strike(point: str, kind: str) -> None:
    os.write(2, f"fault: {kind} at {point}\n".encode())  # at once: nothing is flushed after SIGKILL
    if kind == "kill":
        os.kill(os.getpid(), getattr(signal, "SIGKILL", signal.SIGTERM))
    if kind == "error":
        raise RuntimeError(f"fault at {point}")
    raise OSError(_CODES[kind], os.strerror(_CODES[kind]), point)
