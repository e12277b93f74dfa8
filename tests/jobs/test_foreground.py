"""A run of the command line: the same rows and ends as a queued one, owned by the calling process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jobs import processes
from jobs.foreground import foreground_job
from jobs.store import Store
from vramfit.config import RunConfig
from vramfit.errors import DataError, InternalError
from vramfit.training.metrics import PhaseProgress, RunResult

RESULT = RunResult(
    steps=2, total_steps=2, stopped=False, final_loss=0.1, eval_loss=None, peak_allocated_bytes=5, export=None
)


def test_it_runs_and_is_recorded(store: Store, data_dir: Path) -> None:
    with foreground_job(data_dir, RunConfig(name="by hand")) as job:
        seen = store.job(job.job.id)
        assert (seen.state, seen.foreground, seen.attempt) == ("running", True, 1)
        assert seen.owner == processes.own_identity()
        assert job.folder == seen.folder and job.folder.is_dir()
        job.recorder.phase(PhaseProgress(name="training"))
        assert not job.stop_requested()
        job.finish(RESULT)
    ended = store.job(seen.id)
    assert (ended.state, ended.final_loss, ended.phase.name) == ("succeeded", 0.1, "training")


def test_stop_in_the_panel_reaches_it(store: Store, data_dir: Path) -> None:
    with foreground_job(data_dir, RunConfig()) as job:
        store.request_stop(job.job.id)
        deadline = time.monotonic() + 2
        while not job.stop_requested():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        job.finish(RunResult(**{**RESULT.__dict__, "stopped": True}))
    assert store.job(job.job.id).state == "cancelled"


@pytest.mark.parametrize(
    ("error", "state", "failure"),
    [
        (DataError("There are 0 rows"), "failed", "There are 0 rows."),
        (KeyboardInterrupt(), "interrupted", "The run was interrupted from the keyboard."),
        (ZeroDivisionError("division by zero"), "failed", "Unexpected error (ZeroDivisionError: division by zero)."),
    ],
)
def test_an_exception_is_noted_and_goes_on_its_way(
    store: Store, data_dir: Path, error: BaseException, state: str, failure: str
) -> None:
    with pytest.raises(type(error)), foreground_job(data_dir, RunConfig()):
        raise error
    (job,) = store.jobs()
    assert (job.state, job.failure) == (state, failure)


def test_an_end_without_a_result_is_our_fault(store: Store, data_dir: Path) -> None:
    with pytest.raises(InternalError), foreground_job(data_dir, RunConfig()):
        pass
    assert store.jobs()[0].state == "failed"
