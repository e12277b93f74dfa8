"""A file read and written at positions, straight into and out of buffers; closed when its owner is gone."""

from __future__ import annotations

import errno
import os
import threading
import weakref
from pathlib import Path
from typing import Final

from vramfit.places import NO_ROOM

_PROBED: Final = 4096
"""Bytes that are written as they are, to see whether they can be."""


class PositionedFile:
    """Reads and writes go on until all is done or the file ends. Any thread may do either. Raises OSError.

    One that `vanishes` is gone with the process, however that ends.
    """

    def __init__(self, path: Path, *, write: bool = False, vanishes: bool = False) -> None:
        flags = (os.O_RDWR | os.O_CREAT | os.O_TRUNC) if write else os.O_RDONLY
        flags |= getattr(os, "O_TEMPORARY", 0) if vanishes else 0  # where an open file cannot be removed
        self.path = path
        self.descriptor = os.open(path, flags | getattr(os, "O_BINARY", 0), 0o600)
        if vanishes and not hasattr(os, "O_TEMPORARY"):
            path.unlink()
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._seeking = threading.Lock()  # only where a position has to be sought before a read

    def read_into(self, offset: int, view: memoryview) -> int:
        """Fill `view` with the bytes from `offset` on. Returns how many there were: fewer where the file ends."""
        done = 0
        while done < len(view):
            read = self._read_once(view[done:], offset + done)
            if read == 0:
                break
            done += read
        return done

    def write_from(self, offset: int, view: memoryview) -> None:
        done = 0
        while done < len(view):
            done += self._write_once(view[done:], offset + done)

    def reserve(self, nbytes: int) -> None:
        """All of its room at once."""
        if nbytes and hasattr(os, "posix_fallocate"):
            os.posix_fallocate(self.descriptor, 0, nbytes)
        else:
            os.ftruncate(self.descriptor, nbytes)

    def lacks_room(self, offset: int, nbytes: int) -> OSError | None:
        """Why the file system would not take those bytes of the file, if that is for want of room: the disk is full, or
        a quota used up. Where what is overwritten goes to a new place, room that was reserved is no promise."""
        try:
            if os.fstat(self.descriptor).st_size < offset + nbytes:
                return None  # it was cut off
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(self.descriptor, offset, nbytes)
            if hasattr(os, "fstatvfs"):
                found = os.fstatvfs(self.descriptor)
                if found.f_bavail * found.f_frsize < nbytes:
                    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            own = memoryview(bytearray(min(nbytes, _PROBED)))
            self.write_from(offset, own[: self.read_into(offset, own)])
        except OSError as error:
            return error if error.errno in NO_ROOM else None
        return None

    def state(self) -> tuple[int, int]:
        """(bytes, time of the last change): what tells a file that was changed."""
        found = os.fstat(self.descriptor)
        return found.st_size, found.st_mtime_ns

    def close(self) -> None:
        self._close()

    def _read_once(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self.descriptor, [view], offset)
        with self._seeking:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            read = os.read(self.descriptor, len(view))
        view[: len(read)] = read
        return len(read)

    def _write_once(self, view: memoryview, offset: int) -> int:
        if hasattr(os, "pwritev"):
            return os.pwritev(self.descriptor, [view], offset)
        with self._seeking:
            os.lseek(self.descriptor, offset, os.SEEK_SET)
            return os.write(self.descriptor, view)
