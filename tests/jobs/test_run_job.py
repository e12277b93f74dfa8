"""The trainer's command line: what it says without a traceback, and that it starts light."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import processes
from jobs.attempt import Attempt
from jobs.freezer import Freezer
from jobs.run_job import main, run
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.supervisor import trainer_command
from tests.jobs.stand_in import metrics, save
from vramfit.config import RunConfig
from vramfit.errors import OutOfDisk
from vramfit.training import checkpoint
from vramfit.training.metrics import CHECKPOINT, Event, RunResult


def test_an_unknown_job_is_one_sentence_and_exit_code_2(data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["99", "--data-dir", str(data_dir)]) == 2
    assert capsys.readouterr().err == "There is no job 99. Reload the page to see which jobs there are.\n"


def test_the_supervisors_command_names_job_folder_and_attempt(store: Store) -> None:
    job = store.job(store.add_job(RunConfig()))
    command = trainer_command(job, store.data_dir)
    assert command[1:] == ["-P", "-m", "jobs.run_job", "1", "--data-dir", str(store.data_dir), "--attempt", "0"]
    assert main(command[4:]) == 2, "a job that was not claimed is nobody's to run"


def test_nothing_heavy_is_imported_before_the_first_phase_is_written() -> None:
    code = (
        "import jobs.run_job, jobs.supervisor, sys; "
        "print([name for name in ('torch', 'transformers', 'gradio', 'pandas', 'numpy') if name in sys.modules]); "
        "import numpy"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=processes.ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout.strip(), done.returncode) == ("[]", 0), done.stderr


def test_a_job_whose_settings_this_version_does_not_know_is_listed_and_says_so_when_it_starts(store: Store) -> None:
    id_ = store.add_job(RunConfig(name="from elsewhere"))
    with sqlite3.connect(store.path) as db:
        db.execute("UPDATE jobs SET config = ? WHERE id = ?", ['{"name": "from elsewhere", "later": 1}', id_])
    job = store.job(id_)
    assert job.config.name == "from elsewhere" and job.config_error is not None
    assert [each.id for each in store.jobs()] == [id_]
    assert Freezer(store, poll_s=0.01).freeze_next() and not Freezer(store, poll_s=0.01).freeze_next()
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    claimed = store.claim_next("me")
    assert claimed is not None and claimed.id == id_

    command = ["--data-dir", str(store.data_dir), "--attempt", str(claimed.attempt)]
    assert main([str(id_), *command]) != 0

    ended = store.job(id_)
    assert ended.state == "failed" and ended.failure is not None and "later is not a setting" in ended.failure


def test_a_run_whose_checkpoints_were_removed_fails_by_name_and_keeps_its_curve(store: Store) -> None:
    """It is never started from scratch without a word; put back, they are what it goes on from."""
    id_ = store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)

    def again() -> int:
        claimed = store.claim_next("me")
        assert claimed is not None
        return run(store, id_, attempt=claimed.attempt, train=train)

    def train(session: Attempt, resume: bool) -> RunResult:
        begun.append(resume)
        for step in range(5 if resume else 1, 8):
            session.recorder.steps([metrics(step)])
        save(session, 4)
        session.recorder.event(Event(time=0.0, level="info", kind=CHECKPOINT, message="Saved.", step=4))
        raise OutOfDisk("The disk is full")

    begun: list[bool] = []
    assert again() == 2
    job = store.job(id_)
    job.checkpoints.rename(job.folder / "elsewhere")
    for _ in range(2):  # asked a second time it says the same
        store.enqueue(id_)
        assert again() == 2
        job = store.job(id_)
        assert (job.state, job.resumable, begun) == ("failed", False, [False])
        assert job.failure == f"Run {id_} had a checkpoint of step 4, and none is left in {job.checkpoints}."
        assert job.remedy == "Put the checkpoints back and resume, or duplicate the run to start it anew."
        assert store.series(id_).columns["step"] == list(range(1, 8))
    shutil.rmtree(job.folder)  # with its folder gone, which a start makes again, it is the same
    store.enqueue(id_)
    assert again() == 2 and "none is left in" in (store.job(id_).failure or "")
    anew = store.job(store.duplicate(id_))
    assert store.saved_step(anew.id) == 0
    save_at(job.checkpoints / "step-00000004")
    assert store.job(id_).resumable
    store.enqueue(id_)
    store.request_stop(anew.id)
    assert again() == 2
    assert (store.job(id_).state, begun) == ("paused", [False, True])


def test_a_run_that_never_saved_starts_from_scratch_when_its_folder_was_emptied(store: Store) -> None:
    id_ = store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    waits = Event(time=0.0, level="warning", kind=CHECKPOINT, message="No checkpoint was saved.", step=4)
    for attempt in (1, 2):
        store.claim_next("me")

        def train(session: Attempt, resume: bool) -> RunResult:
            assert not resume
            session.recorder.steps([metrics(1)])
            session.recorder.event(waits)
            raise OutOfDisk("The disk is full")

        assert run(store, id_, attempt=attempt, train=train) == 2
        assert store.job(id_).state == "paused"
        store.enqueue(id_)


def save_at(folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / checkpoint.MANIFEST).write_text("{}", encoding="utf-8")
