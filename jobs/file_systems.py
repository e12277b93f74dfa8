"""On what file system a folder lies: a write-ahead log needs memory that processes share, and no network has that.

https://sqlite.org/wal.html: "WAL does not work over a network filesystem".
"""

from __future__ import annotations

import os
import sys
from functools import lru_cache
from pathlib import Path
from typing import Final

import psutil

NETWORK: Final = frozenset(
    {"nfs", "nfs3", "nfs4", "cifs", "smb", "smb2", "smb3", "smbfs", "afpfs", "afs", "ncpfs", "webdav", "davfs", "9p",
     "drvfs", "sshfs", "davfs2", "rclone", "glusterfs", "lustre", "gpfs", "beegfs", "ceph", "s3fs", "remote"}
)  # fmt: skip
"""Types as the system names them, those behind `fuse.` included. `remote` is what Windows calls a drive of the net."""


@lru_cache(maxsize=64)
def network_file_system(folder: Path) -> str | None:
    """The type of the network file system that `folder` (absolute) lies on; None: a local one, or it cannot be read."""
    if sys.platform == "win32" and str(folder).startswith("\\\\"):
        return "remote"
    kind = _type_of(folder, _mounts())
    plain = (kind or "").lower().removeprefix("fuse.")
    return kind if plain in NETWORK else None


def notice(folder: Path) -> str | None:
    """What a person has to know about a data folder on a network file system; None for any other."""
    kind = network_file_system(folder)
    if kind is None:
        return None
    return (
        f"The data folder {folder} is on a network file system ({kind}): the job database goes without a write-ahead "
        "log there, is slower, and must be used from one machine only. A local folder (--data-dir) is safer."
    )


def _mounts() -> list[tuple[str, str]]:
    """(where, type) of everything that is mounted, in order: a later one at the same place covers the earlier."""
    try:
        parts = psutil.disk_partitions(all=True)
    except (OSError, psutil.Error, RuntimeError):
        return []
    return [(part.mountpoint, "remote" if "remote" in part.opts.split(",") else part.fstype) for part in parts]


def _type_of(folder: Path, mounts: list[tuple[str, str]]) -> str | None:
    """The type of the innermost mount that `folder` lies in."""
    best, found = -1, None
    path = os.path.normcase(os.path.realpath(folder))
    for where, kind in mounts:
        top = os.path.normcase(where).rstrip("/\\")
        inside = path == top or path.startswith((f"{top}/", f"{top}\\"))
        if inside and len(top) >= best:
            best, found = len(top), kind
    return found
