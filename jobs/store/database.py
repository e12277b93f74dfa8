"""The database of a data folder: one connection a thread, transactions, damage, and copies of it."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, Self

from jobs import schema
from vramfit.errors import JobError, OutOfDisk, UserError

DATABASE: Final = "vramfit.db"
TABLES_OF_JOBS: Final = (
    "metrics",
    "metrics_by_64",
    "telemetry",
    "evaluations",
    "samples",
    "events",
    "drifts",
    "alerts",
)
_UNOWNED: Final = "job NOT IN (SELECT id FROM jobs)"


class Database:
    """Opens (and creates or upgrades) the file; `close()` or `with` closes it. See jobs.store.Store."""

    def __init__(self, data_dir: Path, *, clock: Callable[[], float] = time.time) -> None:
        self.data_dir = Path(data_dir).resolve()
        self.path = self.data_dir / DATABASE
        self.clock = clock
        self._local = threading.local()
        self._connections: dict[threading.Thread, Any] = {}
        self._lock = threading.Lock()
        try:
            for name in ("runs", "uploads", "cache"):
                (self.data_dir / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise JobError(
                f"The data folder {self.data_dir} cannot be used: {error.strerror}",
                "Choose a folder you may write to with --data-dir.",
            ) from error
        with self._reported():
            try:
                schema.migrate(self._db)
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Close the connections of all threads. The store must not be in use."""
        with self._lock:
            for connection in self._connections.values():
                connection.close()
            self._connections.clear()
            self._local = threading.local()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- connections and transactions ---------------------------------------------------------------------------

    @property
    def _db(self) -> Any:
        """This thread's connection."""
        found = getattr(self._local, "db", None)
        if found is None:
            found = self._local.db = schema.connect(self.path)
            with self._lock:
                for thread in [thread for thread in self._connections if not thread.is_alive()]:
                    self._connections.pop(thread).close()
                self._connections[threading.current_thread()] = found
        return found

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Turn SQLite's own errors into ours."""
        try:
            yield
        except sqlite3.Error as error:
            raise _explained(error, self.path) from error

    @contextmanager
    def _write(self, *, durable: bool) -> Iterator[Any]:
        """One write transaction. `durable` waits until the change is on the disk."""
        with self._reported():
            db = self._db
            db.execute(f"PRAGMA synchronous={'FULL' if durable else 'NORMAL'}")
            db.execute("BEGIN IMMEDIATE")
            try:
                yield db
                db.execute("COMMIT")
            except BaseException:
                db.rollback()
                raise

    @contextmanager
    def _read(self) -> Iterator[Any]:
        """One read transaction: everything read inside belongs together."""
        with self._reported():
            db = self._db
            db.execute("BEGIN")
            try:
                yield db
            finally:
                db.rollback()

    def _one(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any] | None:
        return next(iter(self._db.query(sql, values)), None)

    # ---- the file itself ----------------------------------------------------------------------------------------

    def check(self) -> None:
        """Read the whole file for damage. Raises JobError that says what is damaged."""
        with self._reported():
            found = [str(row[0]) for row in self._db.execute("PRAGMA quick_check(1)")]
        if found != ["ok"]:
            raise _damaged(self.path, found[0])

    def backup(self, target: Path) -> Path:
        """Copy the database, as it is at one moment, to `target` (a new file, or a folder), while others go on writing.

        Returns the file. Raises JobError (it is there already, it cannot be written) and OutOfDisk.
        """
        if target.is_dir():
            target = target / time.strftime("vramfit-%Y%m%d-%H%M%S.db", time.localtime(self.clock()))
        if target.exists():
            raise JobError(f"{target} is there already", "Give the name of a new file: a backup replaces nothing.")
        partial = target.with_name(f"{target.name}.partial")
        try:
            partial.unlink(missing_ok=True)
            copy = sqlite3.connect(partial)
            try:
                self._db.conn.backup(copy)
                copy.execute("PRAGMA journal_mode=DELETE")  # one file, with nothing beside it
            finally:
                copy.close()
            with partial.open("rb+") as file:
                os.fsync(file.fileno())
            partial.rename(target)
        except (OSError, sqlite3.Error) as error:
            partial.unlink(missing_ok=True)
            if isinstance(error, sqlite3.Error) and "unable to open" not in str(error):
                raise _explained(error, self.path) from error
            reason = error.strerror if isinstance(error, OSError) else error
            raise JobError(f"{target} cannot be written: {reason}", "Choose another place for the backup.") from error
        return target

    def unowned_rows(self) -> dict[str, int]:
        """How many rows of each table belong to no job."""
        with self._reported():
            counts = {
                table: int(self._db.execute(f"SELECT count(*) FROM {table} WHERE {_UNOWNED}").fetchone()[0])
                for table in TABLES_OF_JOBS
            }
        return {table: count for table, count in counts.items() if count}

    def remove_unowned_rows(self) -> None:
        """Delete the rows that belong to no job: nothing can show them."""
        with self._write(durable=True) as db:
            for table in TABLES_OF_JOBS:
                db.execute(f"DELETE FROM {table} WHERE {_UNOWNED}")

    def job_rows(self) -> list[dict[str, Any]]:
        """What the jobs' rows hold, uninterpreted: also those that no Job can be made of."""
        columns = "id, name, state, attempt, owner, heartbeat_at, folder, config"
        with self._reported():
            return list(self._db.query(f"SELECT {columns} FROM jobs ORDER BY id"))


def no_answer(error: UserError) -> bool:
    """Whether it says that the database is locked, its disk full, or that it cannot be read: what was asked of it may
    be asked again. (What a job's state does not allow is refused for good.)"""
    return isinstance(error.__cause__, sqlite3.Error)


def _explained(error: sqlite3.Error, path: Path) -> JobError | OutOfDisk:
    """SQLite's message in our three parts."""
    text = str(error)
    if "full" in text:
        return OutOfDisk(f"The disk that holds {path} is full", "Free some room; nothing recorded so far is lost.")
    if "locked" in text or "busy" in text:
        return JobError(
            f"The job database {path} has been locked by another program for {schema.BUSY_TIMEOUT_S:.0f} s",
            "Close that program (a database viewer, a backup) and try again.",
        )
    if "malformed" in text:
        return _damaged(path, text)
    return JobError(
        f"The job database {path} cannot be used: {text}", "Check the disk, or choose another folder with --data-dir."
    )


def _damaged(path: Path, what: str) -> JobError:
    return JobError(
        f"The job database {path} is damaged: {what}",
        f"Run `python -m jobs.store doctor --data-dir {path.parent}`, or put a backup in its place. Runs and their "
        "checkpoints are folders of their own and are not touched.",
    )
