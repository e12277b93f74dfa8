"""How the CPU's threads wait for each other. To be called before torch is imported, which reads it once."""

from __future__ import annotations

import os


def let_threads_sleep() -> None:
    """Make torch's CPU threads sleep while they wait, unless the user has chosen otherwise (OMP_WAIT_POLICY).

    By default they spin. Beside a browser and a panel on a small machine a spinning thread takes the core from the very
    thread it waits for: the starter's step, measured on two busy cores, takes 0.06-0.13 s with sleeping threads and
    0.6-4 s with spinning ones. GNU, LLVM and Intel's OpenMP all read this variable.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
