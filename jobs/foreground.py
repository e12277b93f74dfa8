"""foreground_job: a run that the calling process does itself, recorded where the panel looks.

The queue waits meanwhile (one run at a time has the card), the panel shows the run and its Stop works. When the
process dies, the supervisor marks the run interrupted. Where alerts are to be posted, a supervisor is there for that.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jobs import processes
from jobs.attempt import Attempt
from jobs.job import Job
from jobs.recorder import StoreRecorder
from jobs.store import Store
from jobs.supervisor import ensure_running
from vramfit.config import RunConfig
from vramfit.errors import InternalError, UserError
from vramfit.training.metrics import RunResult


class ForegroundJob:
    """What the command line trains with."""

    def __init__(self, attempt: Attempt) -> None:
        self._attempt = attempt
        self.finished = False

    @property
    def job(self) -> Job:
        return self._attempt.job

    @property
    def folder(self) -> Path:
        return self._attempt.job.folder

    @property
    def recorder(self) -> StoreRecorder:
        return self._attempt.recorder

    def stop_requested(self) -> bool:
        """Someone pressed Stop in the panel."""
        return self._attempt.should_stop()

    def finish(self, result: RunResult) -> None:
        """The run is over: note how."""
        self.finished = True
        self._attempt.finish(result)


@contextmanager
def foreground_job(data_folder: Path, config: RunConfig) -> Iterator[ForegroundJob]:
    """A job in state running, owned by this process. An exception inside marks it failed and goes on its way."""
    with Store(data_folder) as store:
        job = store.begin_foreground(config, owner=processes.own_identity())
        try:
            if store.webhook:
                _have_alerts_posted(data_folder)
            with Attempt(store, job) as attempt:
                foreground = ForegroundJob(attempt)
                try:
                    yield foreground
                    if not foreground.finished:
                        raise InternalError("The run ended without a result")
                except BaseException as error:
                    if not foreground.finished:
                        attempt.fail(error)
                    raise
        finally:
            if store.webhook:  # the one that was there may have left, or been ended
                _have_alerts_posted(data_folder)


def _have_alerts_posted(data_folder: Path) -> None:
    """By a supervisor, since no panel may be open to start one. It leaves by itself when nothing is left to do."""
    try:
        ensure_running(data_folder)
    except UserError as error:
        print(f"Alerts wait until a panel is opened: {error}", file=sys.stderr)
