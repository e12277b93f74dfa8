"""The freezer: marks what queued jobs are made from, by a thread of the supervisor, soon after they were queued."""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Final, Self

from vramfit.errors import UserError
from vramfit.training.inputs import marks_of

if TYPE_CHECKING:
    from jobs.store import Store

POLL_S: Final = 1.0


class Freezer(threading.Thread):
    """Takes the marks of one job after the other. Reading files may take its time: nobody waits for it.

    Use as a context manager.
    """

    def __init__(self, store: Store, *, say: Callable[[str], None] = print, poll_s: float = POLL_S) -> None:
        super().__init__(name="freezer", daemon=True)
        self._store, self._say, self._poll_s = store, say, poll_s
        self._ended = threading.Event()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self.join(timeout=1.0)

    def run(self) -> None:
        while not self._ended.wait(self._poll_s):
            try:
                while self.freeze_next() and not self._ended.is_set():
                    pass
            except UserError as error:
                self._say(f"marks wait: {error}")
            except Exception:
                traceback.print_exc(file=sys.stderr)

    def freeze_next(self) -> bool:
        """Mark what the next job without marks is made from. False: there is none. Raises UserError."""
        job = self._store.next_unfrozen()
        if job is None:
            return False
        try:
            marks = marks_of(job.config)
        except Exception:  # what nobody foresaw must not keep the jobs behind it from their marks
            traceback.print_exc(file=sys.stderr)
            self._say(f"Of what job {job.id} is made from no marks could be taken: changes of it are not noticed.")
            marks = {}
        self._store.freeze(job.id, config=job.config, marks=marks)
        return True
