"""The trainer's command line: what it says without a traceback, and that it starts light."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from jobs import processes
from jobs.freezer import Freezer
from jobs.run_job import main
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.supervisor import trainer_command
from vramfit.config import RunConfig


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
