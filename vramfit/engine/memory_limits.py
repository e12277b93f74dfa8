"""What memory bore on this machine: where it ran out, the next run of the same kind starts with what fitted.

A small JSON file in the cache folder. It is a memory of failures, nothing depends on it: a file that cannot be read, or
is of another version, is an empty one.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from vramfit.json_text import load_json
from vramfit.models.architecture import Architecture
from vramfit.planning.plan import Plan

FILE: Final = "memory_limits.json"
VERSION: Final = 1
MOST_ENTRIES: Final = 200
MOST_AGE_S: Final = 90 * 86400.0
ROOMIER: Final = 1.05
"""A run that may use more than this times what there was when memory ran out is not held to it."""

_NOT_OF_THE_KIND: Final = (
    "device",
    "budget_bytes",
    "max_length",
    "micro_batch",
    "accumulation",
    "recompute",
    "reasons",
)


@dataclass(frozen=True, kw_only=True)
class Limit:
    """What fitted within `bytes`, when more had run out of memory at `time` (Unix).

    `rows` at once was the most (0: no number of rows has run out). `notch` is what each block had to go on to
    (`Governor.relieved_to`) with `notch_rows` at once; "": none had to. `ended_run` is whether the step could not be
    repeated; then `rows` is what to try next."""

    rows: int
    bytes: int
    time: float
    ended_run: bool = False
    notch: str = ""
    notch_rows: int = 0


def run_kind(plan: Plan, architecture: Architecture, *, card: str, longest_tokens: int, versions: str) -> str:
    """Runs that memory treats alike: the card's name, the model's shape, the plan but for how much of it there is, the
    length up to the next power of two, and the versions of what computes it."""
    shape = {name: value for name, value in asdict(architecture).items() if name != "name"}
    settings = {name: value for name, value in asdict(plan).items() if name not in _NOT_OF_THE_KIND}
    text = json.dumps([shape, settings], sort_keys=True, default=str)
    length = 1 << max(0, longest_tokens - 1).bit_length()
    return f"{card} | {architecture.family} | {plan.method} | {length} | {versions} | {_digest(text)}"


class MemoryLimits:
    """The limits kept in `folder`. Never raises for a file that is bad or cannot be written."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    def find(self, kind: str, *, budget_bytes: int, recomputed: int, now: float | None = None) -> Limit | None:
        """What fitted last for this kind of run, unless there is more room now or more blocks are recomputed."""
        entry = self._read().get(kind)
        if entry is None:
            return None
        limit, then = entry
        old = (time.time() if now is None else now) - limit.time > MOST_AGE_S
        return None if old or budget_bytes > ROOMIER * limit.bytes or recomputed > then else limit

    def remember(self, kind: str, limit: Limit, *, recomputed: int) -> None:
        """Keep `limit` for later runs of this kind. The oldest entries make room."""
        entries = {**self._read(), kind: (limit, recomputed)}
        newest = sorted(entries.items(), key=lambda item: item[1][0].time)[-MOST_ENTRIES:]
        values = {
            "version": VERSION,
            "limits": {kind: {**asdict(limit), "recomputed": recomputed} for kind, (limit, recomputed) in newest},
        }
        with contextlib.suppress(OSError):
            _replace(self._path, json.dumps(values, ensure_ascii=False, indent=1))

    def _read(self) -> dict[str, tuple[Limit, int]]:
        try:
            values = load_json(self._path.read_text(encoding="utf-8"))
            if values["version"] != VERSION:
                return {}
            return {str(kind): _entry(entry) for kind, entry in values["limits"].items()}
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError):
            return {}


def _entry(values: dict[str, Any]) -> tuple[Limit, int]:
    limit = Limit(
        rows=int(values["rows"]),
        bytes=int(values["bytes"]),
        time=float(values["time"]),
        ended_run=bool(values["ended_run"]),
        notch=str(values.get("notch", "")),  # files of earlier versions have none
        notch_rows=int(values.get("notch_rows", 0)),
    )
    if limit.rows < (0 if limit.notch else 1):
        raise ValueError("a limit that limits nothing")
    return limit, int(values["recomputed"])


def _replace(path: Path, text: str) -> None:
    """Write beside it and move: another run may read at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".new")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(name).replace(path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
