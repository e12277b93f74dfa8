"""A run of the command line: the same rows and ends as a queued one, owned by the calling process."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import processes
from jobs.foreground import foreground_job
from jobs.store import SUPERVISOR_LEASE, Store
from tests.jobs.test_supervisor import HASTY, told
from tests.receiver import receiving
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


def test_with_a_webhook_its_alerts_are_posted_though_no_panel_is_open(
    store: Store, data_dir: Path, eventually: Callable[..., None]
) -> None:
    """A supervisor is there from the start, so that what is unhealthy on the way is posted as well."""
    with receiving(200) as receiver:
        store.set_webhook(receiver.url)
        with pytest.raises(DataError), foreground_job(data_dir, RunConfig(name="by hand")):
            eventually(lambda: store.lease(SUPERVISOR_LEASE) is not None)
            raise DataError("There are 0 rows")
        eventually(lambda: len(receiver.got) == 1)
        assert (receiver.got[0]["kind"], receiver.got[0]["failure"]) == ("failed", "There are 0 rows.")
        eventually(lambda: not store.alerts_wait())
    lease = store.lease(SUPERVISOR_LEASE)
    assert lease is not None
    os.kill(processes.pid_of(lease[0]), signal.SIGTERM)
    eventually(lambda: not processes.alive(lease[0]))


def test_without_a_webhook_no_supervisor_is_started(store: Store, data_dir: Path) -> None:
    with foreground_job(data_dir, RunConfig()) as job:
        job.finish(RESULT)
    assert store.lease(SUPERVISOR_LEASE) is None and not (data_dir / "supervisor.log").exists()


def test_a_stop_that_has_no_effect_is_told_with_what_to_do_and_nothing_is_ended(
    store: Store, drive: Callable[..., object]
) -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as hung:
        job = store.begin_foreground(RunConfig(), owner=processes.identity(hung.pid))
        driven = drive(HASTY)
        store.request_stop(job.id)
        driven.until(lambda: told(store, job.id, "stop") != [])
        for _ in range(100):
            driven.supervisor.step(driven.now)
            driven.now += 0.1
        assert told(store, job.id, "stop") == [
            "It did not end within 1 s of Stop, and as it was started outside of the queue nobody ends it: press "
            f"Ctrl-C twice where it was started, or end its process ({hung.pid})."
        ]
        assert hung.poll() is None and store.job(job.id).state == "stopping"
        hung.kill()
    driven.until(lambda: store.job(job.id).state == "interrupted")
