"""The doctor: what it finds in a data folder, what it mends, and that it copies the database first."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from jobs import doctor, processes
from jobs.doctor import examine, main
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.store.database import TABLES_OF_JOBS
from vramfit import scratch
from vramfit.config import RunConfig
from vramfit.errors import JobError
from vramfit.training import checkpoint

GONE = f"{processes.boot()}|999999999|1"  # no process has this pid


def change(data_dir: Path, sql: str, *values: object) -> None:
    """What a person with a database viewer does, foreign keys not looked at."""
    with closing(sqlite3.connect(data_dir / "vramfit.db")) as db:
        db.execute(sql, values)
        db.commit()


def messages(data_dir: Path) -> list[str]:
    return [finding.message for finding in examine(data_dir)]


def doctor_says(data_dir: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, str]:
    code = main(["doctor", "--data-dir", str(data_dir), *flags])
    return code, capsys.readouterr().out


@pytest.fixture
def job_folder(store: Store) -> Path:
    """Of a job that was started by a supervisor and a trainer that are no more."""
    id_ = store.add_job(RunConfig(name="one"))
    store.take_lease(SUPERVISOR_LEASE, owner="gone", alive=lambda *_: False)
    job = store.claim_next("gone")
    assert job is not None
    store.begin_attempt(id_, attempt=1, owner=GONE)
    store.release_lease(SUPERVISOR_LEASE, owner="gone")
    return job.folder


def save(folder: Path, step: int) -> Path:
    import torch

    return checkpoint.save(folder / "checkpoints", step=step, tensors={"w": torch.ones(4)}, values={}, keep=5)


def test_a_folder_in_order_has_nothing_to_mend(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.add_job(RunConfig())
    assert doctor_says(store.data_dir, capsys) == (0, "Nothing is wrong with this data folder.\n")
    assert doctor_says(store.data_dir, capsys, "--repair")[0] == 0
    assert list(store.data_dir.glob("*before-repair*")) == [], "no copy where nothing is mended"


def test_a_running_job_without_owner_becomes_interrupted(
    store: Store, job_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert messages(store.data_dir) == ["Job 1 (one) is running, but neither its trainer nor a supervisor lives."]
    code, text = doctor_says(store.data_dir, capsys)
    assert (code, store.job(1).state) == (1, "running"), "only --repair changes anything"
    assert "With --repair it becomes interrupted" in text
    code, text = doctor_says(store.data_dir, capsys, "--repair")
    assert (code, store.job(1).state) == (0, "interrupted")
    assert "mended    state: Job 1 (one)" in text
    store.enqueue(1)
    assert store.queue() == [1]


def test_a_job_that_is_worked_on_is_left_alone(store: Store, job_folder: Path) -> None:
    change(store.data_dir, "UPDATE jobs SET owner = ?", processes.own_identity())
    assert messages(store.data_dir) == []
    change(store.data_dir, "UPDATE jobs SET owner = ?", GONE)
    store.take_lease(SUPERVISOR_LEASE, owner=processes.own_identity(), alive=lambda *_: False)
    assert messages(store.data_dir) == [], "its supervisor will see it itself"


def test_states_and_configs_that_cannot_be_are_told(store: Store) -> None:
    for _ in range(2):
        store.add_job(RunConfig(name="x"))
    change(store.data_dir, "UPDATE jobs SET state = 'lost' WHERE id = 1")
    change(store.data_dir, "UPDATE jobs SET config = '{\"method\": 7' WHERE id = 2")
    first, second = messages(store.data_dir)
    assert first == "Job 1 (x) is in a state that does not exist: 'lost'."
    assert second.startswith("Job 2 (x) has a config that cannot be read: ")


def test_rows_of_no_job_are_deleted_after_a_copy_was_made(
    store: Store, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_job(RunConfig())
    change(data_dir, "INSERT INTO metrics (job, step, attempt, time) VALUES (7, 1, 1, 1), (7, 2, 1, 1)")
    assert messages(data_dir) == ["Rows belong to no job: 2 of metrics."]
    assert doctor_says(data_dir, capsys, "--repair")[0] == 0
    assert store.unowned_rows() == {}
    (copy,) = data_dir.glob("vramfit-before-repair-*.db")
    with closing(sqlite3.connect(copy)) as db:
        assert db.execute("SELECT count(*) FROM metrics").fetchone()[0] == 2, "the copy is of before"


def test_every_table_that_belongs_to_jobs_is_looked_at(store: Store) -> None:
    names = store._db.table_names()
    owned = {name for name in names if "job" in store._db[name].columns_dict}
    assert owned == set(TABLES_OF_JOBS)


def test_folders_without_a_row_and_rows_without_a_folder_are_told_and_left(
    store: Store, job_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change(store.data_dir, "UPDATE jobs SET state = 'succeeded', owner = NULL")
    shutil.rmtree(job_folder)
    stray = store.data_dir / "runs" / "0099-stray"
    stray.mkdir()
    assert messages(store.data_dir) == [
        f"Job 1 (one) has lost its folder {job_folder}.",
        f"{stray} belongs to no job; it is left as it is.",
    ]
    assert doctor_says(store.data_dir, capsys, "--repair")[0] == 1
    assert stray.is_dir()


def test_a_waiting_job_gets_its_folder_when_it_starts(store: Store) -> None:
    shutil.rmtree(store.job(store.add_job(RunConfig())).folder)
    assert messages(store.data_dir) == []


def test_leftovers_go_and_a_result_under_its_interim_name_comes_back(
    store: Store, job_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = save(job_folder, 2)
    (job_folder / "checkpoints" / "step-00000003.partial").mkdir()
    half = save(job_folder, 3)
    (half / checkpoint.MANIFEST).unlink()
    (job_folder / "checkpoints" / "step-00000004.partial").mkdir()
    (job_folder / "export.partial").mkdir()
    (job_folder / "export.old").mkdir()
    (job_folder / "export.old" / "model.safetensors").write_bytes(b"result")
    change(store.data_dir, "UPDATE jobs SET owner = ?", processes.own_identity())
    assert messages(store.data_dir) == [], "of a trainer at work nothing is a leftover"
    change(store.data_dir, "UPDATE jobs SET state = 'failed', owner = NULL")
    assert len(messages(store.data_dir)) == 4
    assert doctor_says(store.data_dir, capsys, "--repair")[0] == 0
    assert sorted(path.name for path in job_folder.iterdir()) == ["checkpoints", "config.json", "export"]
    assert (job_folder / "export" / "model.safetensors").read_bytes() == b"result"
    assert list((job_folder / "checkpoints").iterdir()) == [kept]


def test_what_a_dead_process_left_in_the_cache_goes_and_what_a_living_one_writes_stays(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    place = scratch.beside(store.data_dir / "cache" / "tokenised" / "entry")
    dead = place.with_name(place.name.replace(f"-{os.getpid()}-", f"-{2**22 + 1}-"))  # above every pid of Linux
    place.mkdir(parents=True)
    (dead / "deep").mkdir(parents=True)
    assert messages(store.data_dir) == [f"{dead} is an unfinished part of the cache, whose writer is gone."]
    assert doctor_says(store.data_dir, capsys, "--repair")[0] == 0
    assert (dead.exists(), place.exists()) == (False, True)


def test_damaged_checkpoints_are_named(store: Store, job_folder: Path) -> None:
    change(store.data_dir, "UPDATE jobs SET state = 'failed', owner = NULL")
    save(job_folder, 1)
    (save(job_folder, 2) / checkpoint.TENSORS).write_bytes(b"")
    assert messages(store.data_dir) == [
        f"{job_folder / 'checkpoints'}: step-00000002/tensors.safetensors does not match its manifest. "
        "Resume passes it over where there is another."
    ]


def test_a_damaged_index_is_made_anew(store: Store, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(3):
        store.add_job(RunConfig())
    store.close()
    with closing(sqlite3.connect(data_dir / "vramfit.db")) as db:  # a row that the index knows otherwise
        db.execute("PRAGMA writable_schema=ON")
        sql = "CREATE INDEX jobs_by_state ON jobs (name, position, id)"
        db.execute("UPDATE sqlite_master SET sql = ? WHERE name = 'jobs_by_state'", [sql])
        db.commit()
    assert "missing from index jobs_by_state" in messages(data_dir)[0]
    assert doctor_says(data_dir, capsys, "--repair")[0] == 0
    with Store(data_dir) as again:
        again.check()
        assert len(again.jobs()) == 3


def break_pages(data_dir: Path) -> None:
    """Overwrite the middle of the database, as a failing disk does."""
    path = data_dir / "vramfit.db"
    content = bytearray(path.read_bytes())
    content[4096 : len(content) // 2] = b"\xff" * (len(content) // 2 - 4096)
    path.write_bytes(content)


def test_a_damaged_database_is_told_with_what_to_do(
    store: Store, data_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_job(RunConfig())
    with closing(sqlite3.connect(data_dir / "vramfit.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    break_pages(data_dir)
    (found,) = examine(data_dir)
    assert (found.kind, found.mend) == ("database", None)
    assert "is damaged" in found.message and "Put a backup in its place" in found.message
    assert doctor_says(data_dir, capsys, "--repair")[0] == 1


@pytest.mark.parametrize("command", [["-m", "jobs.supervisor"], ["app.py", "--no-browser"]])
def test_panel_and_supervisor_refuse_a_damaged_database(store: Store, data_dir: Path, command: list[str]) -> None:
    store.add_job(RunConfig())
    with closing(sqlite3.connect(data_dir / "vramfit.db")) as db:
        db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    store.close()
    break_pages(data_dir)
    done = subprocess.run(
        [sys.executable, *command, "--data-dir", str(data_dir)],
        cwd=processes.ROOT, capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "is damaged" in done.stderr and "python -m jobs.store doctor" in done.stderr


def test_a_backup_is_a_whole_database_and_replaces_nothing(
    store: Store, data_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store.add_job(RunConfig(name="kept"))
    target = tmp_path / "elsewhere" / "vramfit.db"
    target.parent.mkdir()
    with store._write(durable=True) as db:  # somebody is in the middle of a change, which is not part of it
        db.execute("UPDATE jobs SET name = 'changed'")
        assert main(["backup", str(target), "--data-dir", str(data_dir)]) == 0
    assert capsys.readouterr().out == f"The database was copied to {target}.\n"
    assert [path.name for path in target.parent.iterdir()] == ["vramfit.db"], "one file, nothing beside it"
    with Store(target.parent) as copy:
        copy.check()
        assert [job.name for job in copy.jobs()] == ["kept"]
    assert main(["backup", str(target), "--data-dir", str(data_dir)]) == 2
    assert "is there already" in capsys.readouterr().err


def test_a_backup_to_a_place_that_cannot_be_written_says_so(store: Store, tmp_path: Path) -> None:
    with pytest.raises(JobError, match="cannot be written"):
        store.backup(tmp_path / "no" / "such" / "folder.db")
    named = store.backup(tmp_path)
    assert named.parent == tmp_path and named.name.startswith("vramfit-")


def test_where_there_is_no_database_none_is_made(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for command in (["doctor"], ["backup", str(tmp_path / "copy.db")]):
        assert main([*command, "--data-dir", str(tmp_path / "none")]) == 2
        assert "There is no job database" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_newer_database_is_refused_with_a_message(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    change(store.data_dir, "PRAGMA user_version=99")
    assert main(["doctor", "--data-dir", str(store.data_dir)]) == 2
    assert "was written by a newer VRAMFit (schema 99" in capsys.readouterr().err


def test_the_command_answers_in_json(store: Store, job_folder: Path) -> None:
    command = [sys.executable, "-m", "jobs.store", "doctor", "--json", "--repair", "--data-dir", str(store.data_dir)]
    done = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, check=False)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["found"]) == (0, [])
    assert [each["kind"] for each in answer["mended"]] == ["state"]
    assert Path(answer["backup"]).is_file()
    assert doctor.examine(store.data_dir) == []
