"""Things made once and kept in the cache: written beside their place and moved there whole, named by what made them."""

from __future__ import annotations

import errno
import functools
import hashlib
import os
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

from vramfit import scratch
from vramfit.errors import InternalError, OutOfDisk

MAKERS = ("words.py", "lines.py", "stories.py", "questions.py", "corpus.py", "tokenizer.py")


@functools.cache
def starter_key() -> str:
    """Sixteen hex digits over the code that makes corpus and tokenizer, and the version of the BPE trainer."""
    digest = hashlib.sha256(version("tokenizers").encode())
    for name in MAKERS:
        # Line ends differ between checkouts; the content does not.
        digest.update(Path(__file__).with_name(name).read_bytes().replace(b"\r\n", b"\n"))
    return digest.hexdigest()[:16]


def keep(place: Path, write: Callable[[Path], None]) -> Path:
    """The folder `place`, filled by `write(folder)` unless it is already there.

    Two processes may do this at once: each fills its own folder and the first to move it wins. Raises OutOfDisk.
    """
    if place.is_dir():
        return place
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        unfinished = scratch.beside(place)
        unfinished.mkdir()
        try:
            write(unfinished)
            _move(unfinished, place)
        finally:
            shutil.rmtree(unfinished, ignore_errors=True)
    except OSError as error:
        if error.errno == errno.ENOSPC:
            raise OutOfDisk(f"The disk is full while writing {place}", "Free about 50 MiB and try again.") from error
        raise InternalError(f"{place} cannot be written: {error.strerror}", "Check who may write there.") from error
    return place


def _move(unfinished: Path, place: Path) -> None:
    try:
        os.replace(unfinished, place)  # noqa: PTH105 (pathlib's replace is this, but the intent is the atomic move)
    except OSError:
        if not place.is_dir():
            raise
