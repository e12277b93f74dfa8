"""The job store: every SQL statement of the project, behind small methods that any process and thread may call.

One SQLite file, DATA/vramfit.db, in WAL mode: one writer at a time, readers never wait. Every change of a job's state
is one transaction that names the states it expects and the attempt it is made for, so that a late or doubled call
changes nothing. State changes are synced to disk (`synchronous=FULL`); measured rows are not (`NORMAL`: a power cut
may lose the last rows, never the file).
"""

from __future__ import annotations

from jobs.store.database import DATABASE, no_answer
from jobs.store.leases import PANEL_LEASE, SUPERVISOR_LEASE
from jobs.store.measured import stride_for
from jobs.store.states import States
from jobs.store.waiting import LOG_TAIL_BYTES

__all__ = ["DATABASE", "LOG_TAIL_BYTES", "PANEL_LEASE", "SUPERVISOR_LEASE", "Store", "no_answer", "stride_for"]


class Store(States):
    """The jobs of one data folder. Opens (and creates or upgrades) the file; `close()` or `with` closes it.

    `clock` gives Unix seconds. Raises JobError when the folder cannot be used or was written by a newer version.
    """
