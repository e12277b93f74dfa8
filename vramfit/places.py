"""Where things lie on this machine: one data folder holds the queue, the runs, the uploads and the caches."""

from __future__ import annotations

import contextlib
import errno
import os
from pathlib import Path
from typing import Final

from vramfit.errors import UserError
from vramfit.sentences import say

UNWRITABLE: Final = (errno.EROFS, errno.EACCES)
"""The system's errors for a folder that takes no writes and will again once somebody has seen to it."""

NO_MORE_FILES: Final = (errno.EMFILE, errno.ENFILE)
"""The system's errors where a process, or the whole machine, has as many files open as it may."""

NO_ROOM: Final = (errno.ENOSPC, getattr(errno, "EDQUOT", errno.ENOSPC))
"""The system's errors for a disk that is full, and for a quota that is used up."""


def takes_no_writes(error: BaseException, folder: Path) -> bool:
    """Whether an error says that something inside `folder` cannot be written, by its drive or by its rights."""
    if not isinstance(error, OSError) or error.errno not in UNWRITABLE:
        return False
    return isinstance(error.filename, str | os.PathLike) and Path(error.filename).is_relative_to(folder)


def cure_of(error: OSError, *, resume: bool = False) -> str:
    """What a person can do about an error of the system, as a sentence, with `resume` for a run that it ended; "" where
    nobody knows."""
    name = next((name for codes, name in _CURES.items() if error.errno in codes), "")
    return say(f"cure.{name}{'.run' if resume else ''}") if name else ""


_CURES: Final = {NO_ROOM: "room", NO_MORE_FILES: "files", (errno.EROFS,): "readonly", (errno.EACCES,): "rights"}


def default_data_folder() -> Path:
    """$VRAMFIT_DATA_DIR, or `vramfit` in the user's home: visible, since the trained models lie there."""
    chosen = os.environ.get("VRAMFIT_DATA_DIR")
    return Path(chosen) if chosen else Path.home() / "vramfit"


def typed_path(text: str | Path) -> Path:
    """What a person typed as a path, `~` expanded where such a home exists. Never raises."""
    path = Path(text)
    with contextlib.suppress(RuntimeError):  # `~nobody`: left as it is, and then not found
        path = path.expanduser()
    return path


def is_folder(path: Path) -> bool:
    """Path.is_dir for paths that people typed: a name that is too long or forbidden is no folder, not an OSError."""
    return os.path.isdir(path)  # noqa: PTH112


def is_file(path: Path) -> bool:
    """Path.is_file in the same way."""
    return os.path.isfile(path)  # noqa: PTH113


def open_data_folder(folder: Path) -> Path:
    """Make `folder` and its parts if need be, and return its absolute path. Raises UserError."""
    folder = typed_path(folder)
    if str(folder).startswith("~"):
        raise UserError(f"There is no home folder for {folder.parts[0]}", "Choose another one with --data-dir.")
    folder = folder.resolve()
    try:
        for part in (folder, runs_folder(folder), uploads_folder(folder), cache_folder(folder)):
            part.mkdir(parents=True, exist_ok=True)
        probe = folder / f".write-test-{os.getpid()}"
        probe.write_text("", encoding="utf-8")
        probe.unlink()
    except OSError as error:
        raise UserError(
            f"The data folder {folder} cannot be written to: {error.strerror or error}",
            "Choose another one with --data-dir.",
        ) from error
    return folder


def runs_folder(data_folder: Path) -> Path:
    return data_folder / "runs"


def uploads_folder(data_folder: Path) -> Path:
    return data_folder / "uploads"


def cache_folder(data_folder: Path) -> Path:
    return data_folder / "cache"
