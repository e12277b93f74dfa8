"""The C heap of a process that trains in RAM: what one step frees stays for the next, instead of going back and forth.

A step frees as much as it allocates. By default GNU's C library maps every piece above 32 MiB anew and gives the
heap's end back whenever 128 KiB of it are free; each page that comes back is a fault, in which the kernel fills it with
zeros.
"""

from __future__ import annotations

import ctypes
import os
import platform
from typing import Final

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD of malloc.h
_NEVER: Final = 2**31 - 1
_LARGE: Final = 2**20
_USUAL_TRIM: Final = 2**17


def give_back_freed_memory() -> None:
    """Once, all pages that are free now go back to the system: after work that took much more than a step does."""
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_memory() -> bool:
    """From now on, give back what the process frees, pieces of 1 MiB and more at once. Returns whether it does.

    For a run that was planned to the last of a limit: by default the C library learns from each large piece that is
    freed to keep pieces of that size, up to 32 MiB, and what lies between others cannot be given back later.
    """
    if platform.libc_ver()[0] != "glibc" or {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _LARGE)) and bool(mallopt(_TRIM_THRESHOLD, _USUAL_TRIM))


def keep_freed_memory() -> bool:
    """From now on, keep what the process frees. Returns whether it does: only GNU's C library can be told to.

    The resident set then stays at its highest, which a run in RAM comes back to in every step anyway. A user who has
    set MALLOC_MMAP_THRESHOLD_ or MALLOC_TRIM_THRESHOLD_ is left alone.
    """
    if platform.libc_ver()[0] != "glibc" or {"MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"} & os.environ.keys():
        return False
    mallopt = ctypes.CDLL(None).mallopt
    return bool(mallopt(_MMAP_THRESHOLD, _NEVER)) and bool(mallopt(_TRIM_THRESHOLD, _NEVER))
