"""Where things lie on this machine: one data folder holds the queue, the runs, the uploads and the caches."""

from __future__ import annotations

import os
from pathlib import Path

from vramfit.errors import UserError

DATABASE = "vramfit.db"


def default_data_folder() -> Path:
    """$VRAMFIT_DATA_DIR, or `vramfit` in the user's home: visible, since the trained models lie there."""
    chosen = os.environ.get("VRAMFIT_DATA_DIR")
    return Path(chosen) if chosen else Path.home() / "vramfit"


def open_data_folder(folder: Path) -> Path:
    """Make `folder` and its parts if need be, and return its absolute path. Raises UserError."""
    folder = folder.expanduser().resolve()
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
