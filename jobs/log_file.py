"""A trainer's log stays below a size: its beginning and its end are kept, and what was between them is gone.

Only for files that are written by appending: a write of another process lands behind whatever the file's end is then.
"""

from __future__ import annotations

from pathlib import Path
from typing import BinaryIO, Final

MOST_BYTES: Final = 10 * 2**20
FIRST_BYTES: Final = 2**20
LAST_BYTES: Final = 4 * 2**20


def shorten(path: Path) -> bool:
    """Bring a log above MOST_BYTES down to about FIRST_BYTES and LAST_BYTES, in whole lines. False: it was not above.

    The end is put in its new place before anything is cut off, so that a process that dies meanwhile loses none of it;
    of what others write in the instant of the cut a line may be lost. Raises OSError.
    """
    if not path.is_file() or path.stat().st_size <= MOST_BYTES:
        return False
    with path.open("rb+") as file:
        size = file.seek(0, 2)
        start, end = _line_before(file, FIRST_BYTES), _line_behind(file, size - LAST_BYTES)
        file.seek(start)
        file.write(f"[... {end - start:,} bytes of this log were removed here ...]\n".encode())
        read, written = end, file.tell()
        while True:  # also what is appended meanwhile
            file.seek(read)
            piece = file.read(2**20)
            if not piece:
                break
            file.seek(written)
            written += file.write(piece)
            read += len(piece)
        file.truncate(written)
    return True


def _line_before(file: BinaryIO, position: int) -> int:
    """Where the line that `position` lies in begins; `position` itself in a line as long as that."""
    file.seek(0)
    return file.read(position).rfind(b"\n") + 1 or position


def _line_behind(file: BinaryIO, position: int) -> int:
    """Where the next line begins, within a MiB; else `position` itself."""
    file.seek(position)
    return position + file.read(2**20).find(b"\n") + 1
