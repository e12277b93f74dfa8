"""Output that never fails: UTF-8 everywhere, as names come in any script, and logs that a full disk does not end."""

from __future__ import annotations

import io
import os
import sys
from typing import Any


def use_utf8() -> None:
    """Call first in a program's main.

    Under an old locale (LC_ALL=C) Python cannot even name a file with an umlaut; it is then started again in its UTF-8
    mode. Output that a console cannot show is escaped, so that printing never fails.
    """
    if sys.getfilesystemencoding().lower() != "utf-8" and not sys.flags.utf8_mode:
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-X", "utf8", *sys.orig_argv[1:]])
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(encoding="utf-8", errors="backslashreplace")


def lose_what_is_not_taken() -> None:
    """For programs whose output is a log file: from now on what its disk does not take is lost, and nothing else is.

    Else every print would raise (OSError: no space left on device), in whatever thread, and end what it tells of.
    """
    for name in ("stdout", "stderr"):
        raw = _Lossy(getattr(sys, name).fileno(), "w", closefd=False)
        lines = io.TextIOWrapper(
            io.BufferedWriter(raw), encoding="utf-8", errors="backslashreplace", line_buffering=True
        )
        setattr(sys, name, lines)


class _Lossy(io.FileIO):
    """A file that takes everything."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError:
            return len(data)
