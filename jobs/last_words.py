"""Last words: how a run ended, in a file of its folder, where the database did not take it.

The file is made when the attempt begins, with the bytes that it may need: the reason may be a full disk. (A file system
that writes to other places than it has, as btrfs and ZFS do, may refuse it all the same.) The supervisor reads it when
the trainer is gone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jobs.job import FINAL, State
from jobs.store.states import SETTABLE
from vramfit.sentences import packed, unpacked

NAME: Final = "end.json"
BYTES: Final = 16 * 1024


@dataclass(frozen=True, kw_only=True)
class LastWords:
    """The state that the attempt ended in, and what is to be set with it, as in Store.transition."""

    state: State
    values: dict[str, Any]


def reserve(folder: Path) -> None:
    """Make room for the words of the attempt that begins. Where that is refused there is none."""
    with contextlib.suppress(OSError):
        (folder / NAME).write_bytes(b" " * BYTES)


def note(folder: Path, *, attempt: int, state: State, values: Mapping[str, Any]) -> bool:
    """Keep how the attempt ended, over what was there. False: the disk did not take it."""
    text = {"attempt": attempt, "state": state, "values": {name: packed(value) for name, value in values.items()}}
    try:
        with (folder / NAME).open("r+b") as file:
            file.write(json.dumps(text).encode().ljust(BYTES))
            file.truncate()
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    return True


def read(folder: Path, *, attempt: int) -> LastWords | None:
    """What that attempt noted; None where it noted nothing, or nothing that can be used."""
    try:
        found = json.loads((folder / NAME).read_bytes())
        values = {
            name: unpacked(value) if isinstance(value, dict) else value for name, value in found["values"].items()
        }
        usable = found["attempt"] == attempt and found["state"] in FINAL and set(values) <= SETTABLE
        return LastWords(state=found["state"], values=values) if usable else None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None


def forget(folder: Path) -> None:
    """The database knows."""
    with contextlib.suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)
