"""How the CPU's threads wait for each other. To be called before torch is imported, which reads it once."""

from __future__ import annotations

import os

SHORT_SPIN = 1000  # rounds of a waiting loop: some microseconds


def let_threads_sleep() -> None:
    """Make torch's CPU threads spin only briefly while they wait, then sleep, unless the user has chosen otherwise.

    By default they spin long. Beside a browser and a panel on a small machine a spinning thread takes the core from the
    very thread it waits for. Measured, ms a step of the starter on two cores: spinning 34 alone and 319 beside a
    browser; sleeping at once 63 and 61; a short spin 36 and 46. OMP_WAIT_POLICY speaks to every OpenMP, the spin count
    to GNU's, which torch's Linux builds carry.
    """
    if "OMP_WAIT_POLICY" not in os.environ and "GOMP_SPINCOUNT" not in os.environ:
        os.environ.update(OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT=str(SHORT_SPIN))
