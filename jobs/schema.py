"""The tables, as named migrations that are only ever appended, and how a connection is opened.

Each migration runs in one transaction together with the record that it ran. `PRAGMA user_version` holds the number
of migrations applied, so that an older VRAMFit refuses a newer file instead of guessing at it.
"""

from __future__ import annotations

import sqlite3
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from jobs.file_systems import network_file_system
from vramfit.errors import JobError


@contextmanager
def _without(*modules: str) -> Iterator[None]:
    """Let an import find these modules missing, unless they are loaded already."""
    hidden = [name for name in modules if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type]  # None: "not there", by Python's own rule
    try:
        yield
    finally:
        for name in hidden:
            del sys.modules[name]


# sqlite-utils loads pandas (which gradio brings) to know two column types that we have no use for. Without them the
# supervisor and every trainer start 0.4 s earlier and the supervisor takes 60 MB less.
with _without("pandas", "numpy"):
    import sqlite_utils
    from sqlite_utils.migrations import Migrations

BUSY_TIMEOUT_S: Final = 10.0
WISHED: Final = "CASE WHEN json_valid(config) THEN coalesce(json_extract(config, '$.device'), 'auto') END"
"""SQL: the device that a job asks for. An index is made of it, so it never changes."""

AT_REST: Final = "state NOT IN ('queued', 'starting', 'running', 'pausing', 'stopping')"
"""SQL: nothing is going to happen to the job by itself. An index is made of it, too."""

TO_MARK: Final = "frozen IS NULL AND state IN ('queued', 'draft')"
"""SQL: nobody has taken the marks of what the job is made from. The same."""

migrations: Final = Migrations("vramfit")


@migrations(name="0001_first_tables")  # type: ignore[untyped-decorator,unused-ignore]
def _first_tables(db: Any) -> None:
    """Jobs, what they measured, and who holds which lease. Times are Unix seconds, sizes bytes."""
    for statement in (
        """CREATE TABLE jobs (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            name TEXT NOT NULL,
            state TEXT NOT NULL,
            attempt INTEGER NOT NULL DEFAULT 0,
            revision INTEGER NOT NULL DEFAULT 0,
            position REAL NOT NULL,
            foreground INTEGER NOT NULL DEFAULT 0,
            config TEXT NOT NULL,
            forecast TEXT,
            folder TEXT NOT NULL,
            owner TEXT,
            phase TEXT,
            total_steps INTEGER NOT NULL DEFAULT 0,
            created_at REAL NOT NULL,
            claimed_at REAL,
            started_at REAL,
            finished_at REAL,
            heartbeat_at REAL,
            stop_requested_at REAL,
            final_loss REAL,
            eval_loss REAL,
            peak_allocated_bytes INTEGER,
            export TEXT,
            failure TEXT,
            remedy TEXT
        )""",
        "CREATE INDEX jobs_by_state ON jobs (state, position, id)",
        """CREATE TABLE metrics (
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            step INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            time REAL NOT NULL,
            loss REAL,
            learning_rate REAL,
            grad_norm REAL,
            tokens INTEGER,
            tokens_per_s REAL,
            step_seconds REAL,
            epoch REAL,
            allocated_bytes INTEGER,
            reserved_bytes INTEGER,
            resident_bytes INTEGER,
            loss_scale REAL,
            skipped INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (job, step)
        ) WITHOUT ROWID""",
        """CREATE TABLE telemetry (
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            number INTEGER NOT NULL,
            time REAL NOT NULL,
            device_bytes INTEGER,
            host_bytes INTEGER,
            utilisation REAL,
            power_watts REAL,
            temperature_c REAL,
            cpu_utilisation REAL,
            PRIMARY KEY (job, number)
        ) WITHOUT ROWID""",
        """CREATE TABLE evaluations (
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            step INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            time REAL NOT NULL,
            loss REAL,
            tokens INTEGER NOT NULL,
            PRIMARY KEY (job, step)
        ) WITHOUT ROWID""",
        """CREATE TABLE samples (
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            step INTEGER NOT NULL,
            stage TEXT NOT NULL,
            prompt TEXT NOT NULL,
            attempt INTEGER NOT NULL,
            text TEXT NOT NULL,
            PRIMARY KEY (job, step, stage, prompt)
        )""",
        """CREATE TABLE events (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            time REAL NOT NULL,
            level TEXT NOT NULL,
            kind TEXT NOT NULL,
            message TEXT NOT NULL,
            step INTEGER
        )""",
        "CREATE INDEX events_by_job ON events (job, id)",
        """CREATE TABLE leases (
            name TEXT PRIMARY KEY,
            owner TEXT NOT NULL,
            heartbeat_at REAL NOT NULL
        )""",
    ):
        db.execute(statement)


@migrations(name="0002_metrics_by_64")  # type: ignore[untyped-decorator,unused-ignore]
def _metrics_by_64(db: Any) -> None:
    """Full buckets of 64 steps, summed up once: what a chart of a long run reads instead of a million rows."""
    db.execute(
        """CREATE TABLE metrics_by_64 (
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            step INTEGER NOT NULL,
            time REAL NOT NULL,
            loss REAL,
            learning_rate REAL,
            grad_norm REAL,
            tokens INTEGER,
            tokens_per_s REAL,
            step_seconds REAL,
            epoch REAL,
            allocated_bytes INTEGER,
            reserved_bytes INTEGER,
            resident_bytes INTEGER,
            loss_scale REAL,
            skipped INTEGER NOT NULL DEFAULT 0,
            PRIMARY KEY (job, step)
        ) WITHOUT ROWID"""
    )
    db.execute(
        """INSERT INTO metrics_by_64
        SELECT job, ((step - 1) / 64 + 1) * 64, max(time), avg(loss), avg(learning_rate), avg(grad_norm), sum(tokens),
            avg(tokens_per_s), avg(step_seconds), max(epoch), max(allocated_bytes), max(reserved_bytes),
            max(resident_bytes), avg(loss_scale), max(skipped)
        FROM metrics GROUP BY job, (step - 1) / 64 HAVING max(step) % 64 = 0"""
    )


@migrations(name="0003_drifts_and_heat")  # type: ignore[untyped-decorator,unused-ignore]
def _drifts_and_heat(db: Any) -> None:
    """How far a run's precision strays from fp32, numbered as they come; an index that counts skipped steps without
    reading all of a long run's; and whether heat holds the card's clocks down."""
    db.execute(
        """CREATE TABLE drifts (
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            number INTEGER NOT NULL,
            step INTEGER NOT NULL,
            attempt INTEGER NOT NULL,
            time REAL NOT NULL,
            loss REAL,
            grad_norm REAL,
            raised TEXT NOT NULL DEFAULT '',
            PRIMARY KEY (job, number)
        ) WITHOUT ROWID"""
    )
    db.execute("CREATE INDEX metrics_skipped ON metrics (job) WHERE skipped = 1")
    db.execute("ALTER TABLE telemetry ADD COLUMN slowed_by_heat INTEGER")


@migrations(name="0004_waits")  # type: ignore[untyped-decorator,unused-ignore]
def _waits(db: Any) -> None:
    """What a step of a streamed model waited for and wrote; an index that adds up what was written without reading the
    steps of runs that stream nothing."""
    for table in ("metrics", "metrics_by_64"):
        for column in ("link_seconds REAL", "optimizer_seconds REAL", "disk_seconds REAL", "written_bytes INTEGER"):
            db.execute(f"ALTER TABLE {table} ADD COLUMN {column}")
    db.execute("CREATE INDEX metrics_streamed ON metrics (job, written_bytes) WHERE written_bytes IS NOT NULL")


@migrations(name="0005_going_on")  # type: ignore[untyped-decorator,unused-ignore]
def _going_on(db: Any) -> None:
    """What decides whether a job goes on by itself; what it waits for; whether the whole queue is held."""
    for column in (
        "resumes INTEGER NOT NULL DEFAULT 0",
        "losses INTEGER NOT NULL DEFAULT 0",
        "step_before INTEGER",
        "checkpoint_before INTEGER",
        "ended_boot TEXT",
        "go_on INTEGER NOT NULL DEFAULT 0",
        "after INTEGER REFERENCES jobs (id)",
        "after_anyway INTEGER NOT NULL DEFAULT 0",
    ):
        db.execute(f"ALTER TABLE jobs ADD COLUMN {column}")
    db.execute("CREATE INDEX jobs_by_after ON jobs (after) WHERE after IS NOT NULL")
    db.execute("CREATE TABLE queue (id INTEGER PRIMARY KEY CHECK (id = 1), held_at REAL)")
    db.execute("INSERT INTO queue (id, held_at) VALUES (1, NULL)")


@migrations(name="0006_alerts")  # type: ignore[untyped-decorator,unused-ignore]
def _alerts(db: Any) -> None:
    """What is told of runs outside of the page, each thing once an attempt, and the panel's few settings."""
    db.execute(
        """CREATE TABLE alerts (
            id INTEGER PRIMARY KEY AUTOINCREMENT,
            job INTEGER NOT NULL REFERENCES jobs (id) ON DELETE CASCADE,
            attempt INTEGER NOT NULL,
            kind TEXT NOT NULL,
            about TEXT NOT NULL DEFAULT '',
            body TEXT NOT NULL,
            created_at REAL NOT NULL,
            tries INTEGER NOT NULL DEFAULT 0,
            next_try_at REAL,
            sent_at REAL,
            error TEXT,
            UNIQUE (job, attempt, kind, about)
        )"""
    )
    db.execute("CREATE INDEX alerts_waiting ON alerts (next_try_at) WHERE next_try_at IS NOT NULL")
    db.execute("CREATE INDEX alerts_troubled ON alerts (id) WHERE sent_at IS NULL AND error IS NOT NULL")
    db.execute("CREATE TABLE settings (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID")


@migrations(name="0007_saves")  # type: ignore[untyped-decorator,unused-ignore]
def _saves(db: Any) -> None:
    """What training waited for checkpoints; an index that adds it up without reading the steps beside none."""
    for table in ("metrics", "metrics_by_64"):
        db.execute(f"ALTER TABLE {table} ADD COLUMN save_seconds REAL")
    db.execute("CREATE INDEX metrics_saved ON metrics (job, save_seconds) WHERE save_seconds IS NOT NULL")


@migrations(name="0008_frozen")  # type: ignore[untyped-decorator,unused-ignore]
def _frozen(db: Any) -> None:
    """The marks of what a job is made from, taken once it was queued; and whether somebody, asked, let it go on."""
    db.execute("ALTER TABLE jobs ADD COLUMN frozen TEXT")
    db.execute("ALTER TABLE jobs ADD COLUMN asks INTEGER NOT NULL DEFAULT 0")
    db.execute("ALTER TABLE jobs ADD COLUMN accepted INTEGER NOT NULL DEFAULT 0")
    db.execute("CREATE INDEX jobs_unfrozen ON jobs (id) WHERE frozen IS NULL")


@migrations(name="0009_devices")  # type: ignore[untyped-decorator,unused-ignore]
def _devices(db: Any) -> None:
    """On which device the last attempt of a job was started."""
    db.execute("ALTER TABLE jobs ADD COLUMN device TEXT")


@migrations(name="0010_waiting")  # type: ignore[untyped-decorator,unused-ignore]
def _waiting(db: Any) -> None:
    """The first waiting job of each device, the next one to be marked and the newest that have ended are found without
    reading what else waits."""
    db.execute(f"CREATE INDEX jobs_waiting ON jobs ({WISHED}, position, id) WHERE state = 'queued'")
    db.execute(f"CREATE INDEX jobs_at_rest ON jobs (id) WHERE {AT_REST}")
    db.execute("DROP INDEX jobs_unfrozen")  # all that has ended without marks was in it as well
    db.execute(f"CREATE INDEX jobs_to_mark ON jobs (id) WHERE {TO_MARK}")


@migrations(name="0011_said")  # type: ignore[untyped-decorator,unused-ignore]
def _said(db: Any) -> None:
    """Causes and remedies as any language says them; why the queue waits where nobody holds it."""
    db.execute("ALTER TABLE jobs ADD COLUMN said TEXT")
    db.execute("ALTER TABLE alerts ADD COLUMN said TEXT")
    db.execute("ALTER TABLE queue ADD COLUMN why TEXT")


@migrations(name="0012_again")  # type: ignore[untyped-decorator,unused-ignore]
def _again(db: Any) -> None:
    """Whether a job was ended by something that may be gone the next time, so that it goes on by itself."""
    db.execute("ALTER TABLE jobs ADD COLUMN again INTEGER NOT NULL DEFAULT 0")


# Append new migrations here. Never change or remove one that was released.

VERSION: Final = len(migrations._migrations)


def connect(path: Path) -> Any:
    """A sqlite_utils.Database on `path`, WAL, waiting up to BUSY_TIMEOUT_S for a lock, in driver-level autocommit.

    On a network file system, where a write-ahead log may lose what was written, a journal is kept instead.

    Transactions are opened by hand (BEGIN IMMEDIATE), so that a transaction that will write takes its lock at the
    start and never fails half-way. The connection may be closed from another thread, but is used by one only.
    """
    connection = sqlite3.connect(path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False)
    try:
        mode = "WAL" if network_file_system(path.parent) is None else "TRUNCATE"
        connection.execute(f"PRAGMA journal_mode={mode}")
        connection.execute("PRAGMA foreign_keys=ON")
        return sqlite_utils.Database(connection, execute_plugins=False)
    except BaseException:
        connection.close()
        raise


def migrate(db: Any) -> None:
    """Bring the file up to this version in one transaction. Raises JobError when a newer VRAMFit wrote it."""
    if _version(db) == VERSION:
        return
    db.execute("PRAGMA synchronous=FULL")
    db.execute("BEGIN IMMEDIATE")
    try:
        found = _version(db)  # again, under the lock: another process may have migrated meanwhile
        if found > VERSION:
            raise JobError(
                f"The job database was written by a newer VRAMFit (schema {found}, this one knows {VERSION})",
                "Update VRAMFit, or choose another folder with --data-dir.",
            )
        migrations.apply(db)
        db.execute(f"PRAGMA user_version={VERSION}")
        db.execute("COMMIT")
    except BaseException:
        db.rollback()
        raise


def _version(db: Any) -> int:
    return int(db.execute("PRAGMA user_version").fetchone()[0])
