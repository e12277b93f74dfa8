"""UTF-8 everywhere, whatever the terminal's language settings say: names of runs and files come in any script."""

from __future__ import annotations

import os
import sys


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
