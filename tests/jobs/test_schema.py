"""Migrations: named, complete, in one transaction each, safe for two processes, and never backwards."""

from __future__ import annotations

import hashlib
import sqlite3
import threading
from pathlib import Path

import pytest

from jobs import schema
from jobs.store import Store
from vramfit.config import RunConfig
from vramfit.errors import JobError

# The tables that each released migration made. A line is added with each one and never changed.
RELEASED = {
    "0001_first_tables": "61e3c0",
    "0002_metrics_by_64": "694b42",
    "0003_drifts_and_heat": "2ea786",
    "0004_waits": "92c8f0",
    "0005_going_on": "b0f0b3",
    "0006_alerts": "4a1e63",
    "0007_saves": "d2e405",
    "0008_frozen": "9aefc7",
    "0009_devices": "c635cc",
    "0010_waiting": "5ff341",
    "0011_said": "f402dd",
    "0012_again": "0fa758",
}


def tables(path: Path) -> str:
    with sqlite3.connect(path) as connection:
        rows = connection.execute(
            "SELECT sql FROM sqlite_master WHERE name NOT LIKE '%sqlite_%' ORDER BY name"
        ).fetchall()
    connection.close()
    return hashlib.sha256(" ".join(" ".join(row[0] for row in rows).split()).encode()).hexdigest()[:6]


def test_released_migrations_still_make_the_same_tables(tmp_path: Path) -> None:
    Store(tmp_path).close()
    assert list(RELEASED) == [migration.name for migration in schema.migrations._migrations]
    assert tables(tmp_path / "vramfit.db") == list(RELEASED.values())[-1]


def test_the_file_waits_for_locks_and_syncs_what_matters(store: Store) -> None:
    db = store._db
    assert db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
    assert db.execute("PRAGMA busy_timeout").fetchone()[0] == 10_000
    assert db.execute("PRAGMA foreign_keys").fetchone()[0] == 1
    with store._write(durable=True) as inside:
        assert inside.execute("PRAGMA synchronous").fetchone()[0] == 2, "FULL for changes of state"
    with store._write(durable=False) as inside:
        assert inside.execute("PRAGMA synchronous").fetchone()[0] == 1, "NORMAL for measured rows"


def test_opening_twice_changes_nothing(tmp_path: Path) -> None:
    with Store(tmp_path) as first:
        first.add_job(RunConfig())
    with Store(tmp_path) as second:
        assert [job.id for job in second.jobs()] == [1]
        applied = second._db.execute("SELECT name FROM _sqlite_migrations").fetchall()
    assert [row[0] for row in applied] == list(RELEASED)


def test_a_file_of_the_version_before_keeps_its_rows(tmp_path: Path) -> None:
    """Written by the first two migrations alone, as 0.1 did."""
    (tmp_path / "runs").mkdir()
    db = schema.connect(tmp_path / "vramfit.db")
    for migration in schema.migrations._migrations[:2]:
        migration.fn(db)
        db["_sqlite_migrations"].insert(
            {"migration_set": "vramfit", "name": migration.name, "applied_at": "2026-11-01"}, alter=True
        )
    db.execute("PRAGMA user_version=2")
    config = RunConfig().to_json()
    db.execute(
        "INSERT INTO jobs (name, state, position, config, folder, created_at) "
        "VALUES ('old', 'failed', 1, ?, 'runs/1', 1)",
        [config],
    )
    db.execute("INSERT INTO metrics (job, step, attempt, time, loss, skipped) VALUES (1, 1, 1, 1, 2.5, 1)")
    db.execute("INSERT INTO telemetry (job, number, time, host_bytes) VALUES (1, 1, 1, 7)")
    db.close()
    with Store(tmp_path) as store:
        assert store.job(1).name == "old"
        assert store.series(1).columns["loss"] == [2.5]
        assert store.skipped_steps(1) == 1
        assert store.telemetry(1).columns["host_bytes"] == [7]
        assert len(store.drifts(1)) == 0
        assert store.series(1).columns["link_seconds"] == [None]
        assert store.streamed(1) == (0, 0)
        applied = [row[0] for row in store._db.execute("SELECT name FROM _sqlite_migrations").fetchall()]
    assert applied == list(RELEASED)


def test_many_that_open_a_new_folder_at_once_all_succeed(tmp_path: Path) -> None:
    errors: list[Exception] = []

    def open_it() -> None:
        try:
            Store(tmp_path).close()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=open_it) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    Store(tmp_path).close()
    with sqlite3.connect(tmp_path / "vramfit.db") as connection:
        connection.execute("PRAGMA user_version=99")
    connection.close()
    with pytest.raises(JobError, match=r"newer VRAMFit \(schema 99, this one knows \d+\)") as caught:
        Store(tmp_path)
    assert "Update VRAMFit" in caught.value.remedy


def test_a_migration_that_fails_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(db: object) -> None:
        db.execute("CREATE TABLE half (x)")  # type: ignore[attr-defined]
        raise RuntimeError("power cut")

    step = schema.migrations._migrations[0]
    monkeypatch.setattr(step, "fn", broken)
    with pytest.raises(RuntimeError, match="power cut"):
        Store(tmp_path)
    monkeypatch.undo()
    with Store(tmp_path) as store:
        assert store.jobs() == []
        assert "half" not in store._db.table_names()
