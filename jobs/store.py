"""The job store: every SQL statement of the project, behind small methods that any process and thread may call.

One SQLite file, DATA/vramfit.db, in WAL mode: one writer at a time, readers never wait. Every change of a job's state
is one transaction that names the states it expects and the attempt it is made for, so that a late or doubled call
changes nothing. State changes are synced to disk (`synchronous=FULL`); measured rows are not (`NORMAL`: a power cut
may lose the last rows, never the file).
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import shutil
import sqlite3
import sys
import threading
import time
import unicodedata
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self, cast

from jobs import alert, schema
from jobs.alert import Alert
from jobs.job import ACTIVE, FINAL, RESUMABLE, UNSUCCESSFUL, Job, JobEvent, Saves, Series, State, Streamed
from vramfit.config import RunConfig
from vramfit.errors import ConfigError, JobError, OutOfDisk
from vramfit.planning.plan import Forecast
from vramfit.sentences import Sentence, packed, unpacked
from vramfit.training.health import UNHEALTHY
from vramfit.training.inputs import Marks
from vramfit.training.metrics import DriftCheck, Evaluation, Event, PhaseProgress, StepMetrics, Telemetry, TextSample

if TYPE_CHECKING:
    from jobs.recorder import StoreRecorder

DATABASE: Final = "vramfit.db"
SUPERVISOR_LEASE: Final = "supervisor"
PANEL_LEASE: Final = "panel"
LOG_TAIL_BYTES: Final = 256 * 1024

# How a bucket of rows becomes one point.
_METRICS: Final = {
    "step": "max",
    "time": "max",
    "loss": "mean",
    "learning_rate": "mean",
    "grad_norm": "mean",
    "tokens": "sum",
    "tokens_per_s": "mean",
    "step_seconds": "mean",
    "epoch": "max",
    "allocated_bytes": "max",
    "reserved_bytes": "max",
    "resident_bytes": "max",
    "loss_scale": "mean",
    "skipped": "max",
    "link_seconds": "mean",
    "optimizer_seconds": "mean",
    "disk_seconds": "mean",
    "written_bytes": "sum",
    "save_seconds": "sum",
}
_TELEMETRY: Final = {
    "number": "max",
    "time": "max",
    "device_bytes": "max",
    "host_bytes": "max",
    "utilisation": "mean",
    "power_watts": "mean",
    "temperature_c": "max",
    "cpu_utilisation": "mean",
    "slowed_by_heat": "max",
}
_DRIFTS: Final = {"number": "max", "step": "max", "loss": "max", "grad_norm": "max"}
_ROLLUP: Final = 64  # steps of a bucket in metrics_by_64; charts with a stride of at least that read it
_JOB_COLUMNS: Final = (
    "id, name, state, attempt, revision, position, foreground, config, forecast, folder, owner, phase, total_steps, "
    "created_at, claimed_at, started_at, finished_at, heartbeat_at, stop_requested_at, final_loss, "
    "coalesce(eval_loss, (SELECT loss FROM evaluations WHERE job = jobs.id ORDER BY step DESC LIMIT 1)) AS eval_loss, "
    "peak_allocated_bytes, export, failure, remedy, resumes, losses, step_before, checkpoint_before, after, "
    "after_anyway, (SELECT state FROM jobs AS first WHERE first.id = jobs.after) AS after_state, go_on, "
    "frozen, accepted, device, said, "
    "coalesce((SELECT max(step) FROM metrics WHERE job = jobs.id), 0) AS step"
)
_TABLES_OF_JOBS: Final = (
    "metrics",
    "metrics_by_64",
    "telemetry",
    "evaluations",
    "samples",
    "events",
    "drifts",
    "alerts",
)
_WEBHOOK: Final = "webhook"  # the names of settings
_LANGUAGE: Final = "language of alerts"
_DEVICES: Final = "devices"
_SILENT: Final = "driver silent since"
_ALERT_COLUMNS: Final = "id, job, kind, about, body, said, created_at, tries, next_try_at, sent_at, error"
_UNOWNED: Final = "job NOT IN (SELECT id FROM jobs)"
_SETTABLE: Final = frozenset(
    {"owner", "final_loss", "eval_loss", "peak_allocated_bytes", "export", "failure", "remedy", "ended_boot", "asks"}
)
# A job that may be started now: nothing it waits for is still to come.
_CLAIMABLE: Final = (
    "jobs.state = 'queued' AND (SELECT held_at FROM queue) IS NULL AND (jobs.after IS NULL OR EXISTS ("
    "SELECT 1 FROM jobs AS first WHERE first.id = jobs.after AND (first.state = 'succeeded' OR (jobs.after_anyway AND "
    f"first.state IN {tuple(UNSUCCESSFUL)}))))"
)


class Store:
    """The jobs of one data folder. Opens (and creates or upgrades) the file; `close()` or `with` closes it.

    `clock` gives Unix seconds. Raises JobError when the folder cannot be used or was written by a newer version.
    """

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

    # ---- connections and transactions -------------------------------------------------------------------------

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

    # ---- the file itself --------------------------------------------------------------------------------------

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
                for table in _TABLES_OF_JOBS
            }
        return {table: count for table, count in counts.items() if count}

    def remove_unowned_rows(self) -> None:
        """Delete the rows that belong to no job: nothing can show them."""
        with self._write(durable=True) as db:
            for table in _TABLES_OF_JOBS:
                db.execute(f"DELETE FROM {table} WHERE {_UNOWNED}")

    def job_rows(self) -> list[dict[str, Any]]:
        """What the jobs' rows hold, uninterpreted: also those that no Job can be made of."""
        columns = "id, name, state, attempt, owner, heartbeat_at, folder, config"
        with self._reported():
            return list(self._db.query(f"SELECT {columns} FROM jobs ORDER BY id"))

    # ---- jobs -------------------------------------------------------------------------------------------------

    def add_job(
        self,
        config: RunConfig,
        *,
        forecast: Forecast | Mapping[str, Any] | None = None,
        draft: bool = False,
        after: int | None = None,
        after_anyway: bool = False,
    ) -> int:
        """Put a run at the end of the queue (or aside, as a draft) and make its folder. Returns the job's id.

        `after`: it starts once that job has succeeded, with `after_anyway` also when it has ended without success.
        """
        with _folders_undone() as made, self._write(durable=True) as db:
            id_ = self._insert(db, config, state="draft" if draft else "queued", forecast=forecast, made=made)
            if after is not None:
                self._set_after(db, id_, after, anyway=after_anyway)
            return id_

    def begin_foreground(
        self, config: RunConfig, *, owner: str, forecast: Forecast | Mapping[str, Any] | None = None
    ) -> Job:
        """A job that the calling process (`owner`: its identity) runs itself, outside the queue, already running."""
        now = self.clock()
        with _folders_undone() as made, self._write(durable=True) as db:
            id_ = self._insert(db, config, state="running", forecast=forecast, made=made)
            db.execute(
                "UPDATE jobs SET foreground = 1, attempt = 1, owner = ?, claimed_at = ?, started_at = ?, "
                "heartbeat_at = ? WHERE id = ?",
                [owner, now, now, now, id_],
            )
        return self.job(id_)

    def _insert(self, db: Any, config: RunConfig, *, state: State, forecast: Any, made: list[Path]) -> int:
        values = _forecast_values(forecast)
        name = config.name.strip() or _default_name(config)
        cursor = db.execute(
            "INSERT INTO jobs (name, state, position, config, forecast, folder, total_steps, created_at) "
            "VALUES (?, ?, (SELECT coalesce(max(position), 0) + 1 FROM jobs), ?, ?, '', ?, ?)",
            [name, state, config.to_json(), _json(values), int((values or {}).get("steps") or 0), self.clock()],
        )
        id_ = int(cursor.lastrowid)
        # The folder is made before the commit: when that fails there is no job without a folder.
        folder = self._make_folder(id_, name, config, made)
        db.execute("UPDATE jobs SET folder = ? WHERE id = ?", [folder.relative_to(self.data_dir).as_posix(), id_])
        return id_

    def _make_folder(self, id_: int, name: str, config: RunConfig, made: list[Path]) -> Path:
        wanted = self.data_dir / "runs" / f"{id_:04d}-{_slug(name)}"
        folder, number = wanted, 1
        try:
            while True:
                try:
                    folder.mkdir(parents=True)
                    made.append(folder)
                    break
                except FileExistsError:  # left by a database that was deleted: never write into someone else's run
                    number += 1
                    folder = wanted.with_name(f"{wanted.name}-{number}")
        except OSError as error:
            raise _unwritable(folder, error) from error
        self._write_config(folder, config)
        return folder

    def _write_config(self, folder: Path, config: RunConfig) -> None:
        """config.json is what was asked for, for people; the database holds what counts."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            partial = folder / "config.json.partial"
            partial.write_text(config.to_json(), encoding="utf-8")
            partial.replace(folder / "config.json")
        except OSError as error:
            raise _unwritable(folder, error) from error

    def job(self, id_: int) -> Job:
        """The job as it is now. Raises JobError when there is none with this number."""
        with self._reported():
            row = self._one(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE id = ?", [id_])
        if row is None:
            raise _no_job(id_)
        return self._job(row)

    def jobs(self, limit: int = 200) -> list[Job]:
        """The last `limit` jobs, newest first."""
        with self._reported():
            rows = list(self._db.query(f"SELECT {_JOB_COLUMNS} FROM jobs ORDER BY id DESC LIMIT ?", [limit]))
        return [self._job(row) for row in rows]

    def jobs_at_rest(self, limit: int = 200) -> list[Job]:
        """The last `limit` jobs that neither wait in the queue nor are at work, newest first."""
        where = f"INDEXED BY jobs_at_rest WHERE {schema.AT_REST}"
        with self._reported():
            rows = list(self._db.query(f"SELECT {_JOB_COLUMNS} FROM jobs {where} ORDER BY id DESC LIMIT ?", [limit]))
        return [self._job(row) for row in rows]

    def waiting_by_device(self) -> dict[str, int]:
        """How many queued jobs ask for each device; "auto" leaves it to the queue."""
        sql = f"SELECT {schema.WISHED}, count(*) FROM jobs INDEXED BY jobs_waiting WHERE state = 'queued' GROUP BY 1"
        with self._reported():
            return {str(wish): int(count) for wish, count in self._db.execute(sql) if wish is not None}

    def active_jobs(self) -> list[Job]:
        """Jobs that a trainer owns, foreground ones included."""
        with self._reported():
            rows = list(self._db.query(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE state IN {_in(ACTIVE)} ORDER BY id"))
        return [self._job(row) for row in rows]

    def queue(self) -> list[int]:
        """The ids of queued jobs in the order in which they will start."""
        with self._reported():
            rows = self._db.execute("SELECT id FROM jobs WHERE state = 'queued' ORDER BY position, id")
            return [int(row[0]) for row in rows]

    def queued_jobs(self, limit: int = 200) -> list[Job]:
        """The first `limit` queued jobs, in the order in which they will start."""
        sql = f"SELECT {_JOB_COLUMNS} FROM jobs WHERE state = 'queued' ORDER BY position, id LIMIT ?"
        with self._reported():
            rows = list(self._db.query(sql, [limit]))
        return [self._job(row) for row in rows]

    # ---- the order of the queue -------------------------------------------------------------------------------

    def set_after(self, id_: int, after: int | None, *, anyway: bool = False) -> None:
        """Let a job that has not started wait for another one (None: for none). Raises JobError for a circle."""
        with self._write(durable=True) as db:
            self._set_after(db, id_, after, anyway=anyway)

    def _set_after(self, db: Any, id_: int, after: int | None, *, anyway: bool) -> None:
        row = self._one("SELECT state FROM jobs WHERE id = ?", [id_])
        if row is None:
            raise _no_job(id_)
        if row["state"] not in ("draft", "queued"):
            raise JobError(f"Job {id_} is {row['state']}, so it cannot wait for another one", "Choose a waiting job.")
        link = after
        while link is not None:
            if link == id_:
                raise JobError(
                    f"Job {id_} cannot come after job {after}, which itself waits for job {id_}", "Choose another one."
                )
            found = self._one("SELECT after FROM jobs WHERE id = ?", [link])
            if found is None:
                raise _no_job(link)
            link = found["after"]
        db.execute(
            "UPDATE jobs SET after = ?, after_anyway = ? WHERE id = ?", [after, after is not None and anyway, id_]
        )

    def move(self, id_: int, *, later: bool) -> None:
        """Change places with the next queued job, or the one before. At the end of the queue nothing happens.

        Raises JobError when the job does not wait.
        """
        with self._write(durable=True) as db:
            row = self._one("SELECT position FROM jobs WHERE id = ? AND state = 'queued'", [id_])
            if row is None:
                raise self._refused(id_, "queued", None)
            sign, order = (">", "") if later else ("<", "DESC")
            other = self._one(
                f"SELECT id, position FROM jobs WHERE state = 'queued' AND (position, id) {sign} (?, ?) "
                f"ORDER BY position {order}, id {order} LIMIT 1",
                [row["position"], id_],
            )
            if other is None:
                return
            for moved, position in ((id_, other["position"]), (other["id"], row["position"])):
                db.execute("UPDATE jobs SET position = ? WHERE id = ?", [position, moved])

    def duplicate(self, id_: int) -> int:
        """Queue the same settings once more, at the end. Returns the new job's id."""
        job = self.job(id_)
        return self.add_job(job.config, forecast=job.forecast)

    def replace_config(
        self, id_: int, config: RunConfig, *, forecast: Forecast | Mapping[str, Any] | None = None
    ) -> None:
        """Put other settings in the place of those of a job that waits and has done no step. Raises JobError."""
        values = _forecast_values(forecast)
        with self._write(durable=True) as db:
            row = self._one(
                "SELECT folder FROM jobs WHERE id = ? AND state IN ('draft', 'queued') "
                "AND NOT EXISTS (SELECT 1 FROM metrics WHERE job = jobs.id)",
                [id_],
            )
            if row is None:
                state = self.job(id_).state
                raise JobError(
                    f"Run {id_} has begun (it is {state}), so its settings stay as they are",
                    "Press Start again to queue these settings as a new run.",
                )
            db.execute(
                "UPDATE jobs SET name = ?, config = ?, forecast = ?, total_steps = ?, frozen = NULL WHERE id = ?",
                [
                    config.name.strip() or _default_name(config),
                    config.to_json(),
                    _json(values),
                    int((values or {}).get("steps") or 0),
                    id_,
                ],
            )
            self._write_config(self.data_dir / row["folder"], config)

    def hold_queue(self, held: bool) -> None:
        """Start no further job until the queue is let go again. What is at work goes on."""
        with self._write(durable=True) as db:
            db.execute("UPDATE queue SET held_at = ?, why = NULL WHERE id = 1", [self.clock() if held else None])

    def wait_for_a_start(self, id_: int, *, attempt: int, why: str, event: Event | None) -> None:
        """No trainer can be started now, whoever's turn it is: the job that was to be goes back to its place, and the
        queue waits, for `why`. Where a person holds it already, that stays. `event` (None: told before) is the job's.

        Raises JobError when the attempt is over.
        """
        with self._write(durable=True) as db:
            self._transition(db, id_, expected=("starting",), state="queued", attempt=attempt, values={"failure": None})
            sql = "UPDATE queue SET held_at = ?, why = ? WHERE id = 1 AND (held_at IS NULL OR why IS NOT NULL)"
            db.execute(sql, [self.clock(), _json(packed(why))])
            if event is not None:
                self._add_event(db, id_, event)
                self._add_alert(db, id_, "held", message=why)

    def start_again(self) -> None:
        """The queue waits no longer for what kept trainers from being started. A person's hold stays."""
        with self._write(durable=True) as db:
            db.execute("UPDATE queue SET held_at = NULL, why = NULL WHERE id = 1 AND why IS NOT NULL")

    @property
    def queue_waits(self) -> str | None:
        """Why the queue waits though nobody holds it; None when it does not."""
        with self._reported():
            row = self._one("SELECT why FROM queue WHERE id = 1")
        return None if row is None or row["why"] is None else unpacked(json.loads(row["why"]))

    @property
    def queue_held(self) -> bool:
        with self._reported():
            row = self._one("SELECT held_at FROM queue WHERE id = 1")
        return row is not None and row["held_at"] is not None

    # ---- rows -------------------------------------------------------------------------------------------------

    def _one(self, sql: str, values: Sequence[Any] = ()) -> dict[str, Any] | None:
        return next(iter(self._db.query(sql, values)), None)

    def _job(self, row: dict[str, Any]) -> Job:
        values = dict(row)
        stop_requested_at = values.pop("stop_requested_at")
        values.update(_revived(values, values.pop("said"), "failure", "remedy"))
        return Job(
            **{
                **values,
                "foreground": bool(values["foreground"]),
                "after_anyway": bool(values["after_anyway"]),
                "go_on": bool(values["go_on"]),
                "accepted": bool(values["accepted"]),
                "frozen": json.loads(values["frozen"]) if values["frozen"] else None,
                "config": _config(values["config"])[0],
                "config_error": _config(values["config"])[1],
                "forecast": json.loads(values["forecast"]) if values["forecast"] else None,
                "phase": PhaseProgress(**json.loads(values["phase"])) if values["phase"] else None,
                "folder": self.data_dir / values["folder"],
                "stop_requested": stop_requested_at is not None,
            }
        )

    # ---- changes of state -------------------------------------------------------------------------------------

    def transition(
        self, id_: int, *, expected: Sequence[State], state: State, attempt: int | None = None, **values: Any
    ) -> None:
        """Move a job from one of the `expected` states to `state`, if `attempt` is still its attempt; else JobError.

        `values` sets further columns in the same transaction. A final state stamps `finished_at` and ends ownership.
        """
        assert set(values) <= _SETTABLE, values
        with self._write(durable=True) as db:
            self._transition(db, id_, expected=expected, state=state, attempt=attempt, values=values)

    def _transition(
        self,
        db: Any,
        id_: int,
        *,
        expected: Sequence[State],
        state: State,
        attempt: int | None,
        values: Mapping[str, Any],
    ) -> None:
        columns = {"state": state, **values}
        if "failure" in values or "remedy" in values:
            columns["said"] = _said(values, "failure", "remedy")
        if state in FINAL:
            columns = {"finished_at": self.clock(), "owner": None, **columns}
        assignments = ", ".join(f"{name} = ?" for name in columns)
        changed = db.execute(
            f"UPDATE jobs SET {assignments} WHERE id = ? AND state IN {_in(expected)} "
            "AND attempt = coalesce(?, attempt)",
            [*map(_finite, columns.values()), id_, attempt],
        ).rowcount
        if not changed:
            raise self._refused(id_, state, attempt)
        if state in UNSUCCESSFUL:
            self._tell_waiting(db, id_, state)
        kind = alert.kind_of(state, values.get("failure"))
        if kind is not None:
            self._add_alert(db, id_, kind)
        if state in ("paused", "cancelled") and self._one("SELECT 1 FROM jobs WHERE id = ? AND go_on", [id_]):
            self._enqueue(db, id_)

    def _refused(self, id_: int, state: State, attempt: int | None) -> JobError:
        row = self._one("SELECT state, attempt FROM jobs WHERE id = ?", [id_])
        if row is None:
            return _no_job(id_)
        if attempt is not None and row["attempt"] != attempt:
            return JobError(
                f"Job {id_} is at attempt {row['attempt']}, so attempt {attempt} may not change it",
                "Nothing is to be done: the newer attempt goes on.",
            )
        return JobError(f"Job {id_} is {row['state']} and cannot become {state}", "Reload the page to see its state.")

    def request_stop(self, id_: int) -> State:
        """Ask a job to save and end; a waiting one is cancelled at once. Returns its new state.

        Asking twice, or asking a job that has ended, changes nothing.
        """
        return self._request(id_, waiting="cancelled", working="stopping")

    def request_pause(self, id_: int) -> State:
        """Like request_stop, but the job ends as paused."""
        return self._request(id_, waiting="paused", working="pausing")

    def _request(self, id_: int, *, waiting: State, working: State) -> State:
        now = self.clock()
        with self._write(durable=True) as db:
            row = self._one("SELECT state FROM jobs WHERE id = ?", [id_])
            if row is None:
                raise _no_job(id_)
            state: State = row["state"]
            if state in ("draft", "queued"):
                db.execute("UPDATE jobs SET state = ?, finished_at = ? WHERE id = ?", [waiting, now, id_])
                if waiting in UNSUCCESSFUL:
                    self._tell_waiting(db, id_, waiting)
                return waiting
            if state in ("starting", "running") or (state == "pausing" and working == "stopping"):
                db.execute(
                    "UPDATE jobs SET state = ?, stop_requested_at = coalesce(stop_requested_at, ?), go_on = 0 "
                    "WHERE id = ?",
                    [working, now, id_],
                )
                return working
            if state in ("pausing", "stopping"):
                db.execute("UPDATE jobs SET go_on = 0 WHERE id = ?", [id_])  # the last word counts
            return state

    def _tell_waiting(self, db: Any, id_: int, state: State) -> None:
        """An event for every queued job that waits for this one, which ended without success."""
        for row in db.execute("SELECT id, after_anyway FROM jobs WHERE after = ? AND state = 'queued'", [id_]):
            what = (
                "it starts all the same" if row[1] else f"it waits until run {id_} is resumed, or you start it anyway"
            )
            message = f"Run {id_}, which this one comes after, is {state}: {what}."
            event = Event(time=self.clock(), level="warning", kind="waiting", message=message)
            self._add_event(db, row[0], event)

    def enqueue(self, id_: int) -> None:
        """Put a draft, or a job that ended early, (back) at the end of the queue. JobError when it cannot go on.

        One that is still ending as asked goes back once it has; one that waits or is at work already stays as it is.
        """
        with self._write(durable=True) as db:
            row = self._one("SELECT state FROM jobs WHERE id = ?", [id_])
            if row is not None and row["state"] in ("queued", "starting", "running"):
                return
            if row is not None and row["state"] in ("pausing", "stopping"):
                db.execute("UPDATE jobs SET go_on = 1 WHERE id = ?", [id_])
                return
            self._enqueue(db, id_)

    def _enqueue(self, db: Any, id_: int) -> None:
        self._transition(db, id_, expected=("draft", *RESUMABLE), state="queued", attempt=None, values={})
        db.execute(
            "UPDATE jobs SET position = (SELECT coalesce(max(position), 0) + 1 FROM jobs), finished_at = NULL, "
            "stop_requested_at = NULL, failure = NULL, remedy = NULL, said = NULL, foreground = 0, "
            "revision = revision + 1, resumes = 0, losses = 0, ended_boot = NULL, go_on = 0, accepted = asks, "
            "frozen = CASE WHEN asks THEN NULL ELSE frozen END, asks = 0 WHERE id = ?",
            [id_],
        )

    # ---- what a job is made from ------------------------------------------------------------------------------

    def next_unfrozen(self) -> Job | None:
        """The first job that waits and has no marks yet of what it is made from."""
        where = f"INDEXED BY jobs_to_mark WHERE {schema.TO_MARK}"
        with self._reported():
            row = self._one(f"SELECT {_JOB_COLUMNS} FROM jobs {where} ORDER BY id LIMIT 1")
        return None if row is None else self._job(row)

    def freeze(self, id_: int, *, config: RunConfig, marks: Marks) -> None:
        """Keep the marks of what the job is made from, unless it has some or its settings are others by now."""
        with self._write(durable=True) as db:
            # Compared as settings: an earlier version, which had fewer of them, wrote the same ones as another text.
            row = self._one("SELECT config FROM jobs WHERE id = ? AND frozen IS NULL", [id_])
            if row is not None and _config(row["config"])[0] == config:
                db.execute("UPDATE jobs SET frozen = ? WHERE id = ?", [_json(marks), id_])

    # ---- going on without being asked -------------------------------------------------------------------------

    def go_on(self, id_: int, *, attempt: int) -> int:
        """Put a job whose trainer was ended from outside back into the queue, in its old place, and count it.

        Returns how often that was by now. Raises JobError when `attempt` is over or the job was stopped meanwhile.
        """
        with self._write(durable=True) as db:
            self._transition(
                db,
                id_,
                expected=("starting", "running", "interrupted"),
                state="queued",
                attempt=attempt,
                values={"owner": None, "failure": None, "remedy": None, "ended_boot": None},
            )
            db.execute(
                "UPDATE jobs SET resumes = resumes + 1, revision = revision + 1, finished_at = NULL, "
                "stop_requested_at = NULL, phase = NULL WHERE id = ?",
                [id_],
            )
            # "Interrupted" is not worth a word any more when nobody has heard it yet.
            db.execute(
                "UPDATE alerts SET next_try_at = NULL WHERE job = ? AND kind = 'interrupted' AND tries = 0", [id_]
            )
            row = self._one("SELECT resumes FROM jobs WHERE id = ?", [id_])
            assert row is not None
            return int(row["resumes"])

    def ended_by_restart(self, boot: str) -> list[Job]:
        """Jobs that saved and ended because the system went down, before the boot `boot`."""
        where = "state = 'interrupted' AND ended_boot IS NOT NULL AND ended_boot != ?"
        with self._reported():
            rows = list(self._db.query(f"SELECT {_JOB_COLUMNS} FROM jobs WHERE {where} ORDER BY position", [boot]))
        return [self._job(row) for row in rows]

    def count_loss(self, id_: int, *, attempt: int) -> int:
        """Note that a supervisor died over this attempt. Returns how often since a person last asked for the job."""
        with self._write(durable=True) as db:
            db.execute("UPDATE jobs SET losses = losses + 1 WHERE id = ? AND attempt = ?", [id_, attempt])
            row = self._one("SELECT losses FROM jobs WHERE id = ?", [id_])
            assert row is not None
            return int(row["losses"])

    def stopping(self, id_: int, *, attempt: int) -> bool:
        """Whether this attempt's trainer should save and end: it was asked to, or is no longer the rightful one."""
        with self._reported():
            row = self._one("SELECT state, attempt FROM jobs WHERE id = ?", [id_])
        return row is None or row["attempt"] != attempt or row["state"] not in ("starting", "running")

    def stop_requested_at(self, id_: int) -> float | None:
        """When the stop was asked for (Unix seconds), or None."""
        with self._reported():
            row = self._one("SELECT stop_requested_at FROM jobs WHERE id = ?", [id_])
        return None if row is None else row["stop_requested_at"]

    # ---- the supervisor's and trainer's side ------------------------------------------------------------------

    def claim_next(
        self,
        owner: str,
        devices: Sequence[str] = ("cpu",),
        *,
        held: Collection[str] = (),
        leaving: Collection[int] = (),
    ) -> Job | None:
        """Move the first queued job that waits for no other one, and whose device is free, to `starting`, attempt + 1.

        `devices` are this machine's, best first, the CPU last. One job at a time is on each; one that leaves the choice
        gets the first card that is free, or the CPU where there is no card. `held` are those that are not free although
        no job is on them ("auto": none is chosen for those that leave the choice); `leaving` are jobs that an earlier
        trainer has not left yet. None while none may start, or the queue is held. A job whose device is not there
        waits, and others pass it.

        `owner` must hold the supervisor's lease; JobError when it lost it.
        """
        now = self.clock()
        with self._reported():
            if self._first_with_a_device(self._db, devices, held, leaving) is None:  # mostly: nothing to write
                return None
        with self._write(durable=True) as db:
            lease = self._one("SELECT owner FROM leases WHERE name = ?", [SUPERVISOR_LEASE])
            if lease is None or lease["owner"] != owner:
                raise JobError("Another supervisor holds the lease of this data folder", "Let that one work.")
            chosen = self._first_with_a_device(db, devices, held, leaving)
            if chosen is None:
                return None
            id_, device = chosen
            db.execute(
                "UPDATE jobs SET state = 'starting', attempt = attempt + 1, owner = NULL, phase = ?, claimed_at = ?, "
                "heartbeat_at = ?, started_at = NULL, finished_at = NULL, stop_requested_at = NULL, failure = NULL, "
                "remedy = NULL, said = NULL, step_before = NULL, checkpoint_before = NULL, go_on = 0, "
                "device = ? WHERE id = ?",
                [_json(dataclasses.asdict(PhaseProgress(name="starting"))), now, now, device, id_],
            )
        return self.job(id_)

    def _first_with_a_device(
        self, db: Any, devices: Sequence[str], held: Collection[str], leaving: Collection[int]
    ) -> tuple[int, str] | None:
        """The job to start next and the device for it. Looks up the first of each device, however many wait."""
        by_itself = tuple(name for name in devices if name != "cpu") or tuple(devices)
        busy = {
            device or (wished if wished != "auto" else next(iter(by_itself), ""))
            for device, wished in db.execute(f"SELECT device, {schema.WISHED} FROM jobs WHERE state IN {_in(ACTIVE)}")
        }
        free = {name: name for name in devices if name not in busy and name not in held}
        if "auto" not in held and (auto := next((name for name in by_itself if name in free), None)) is not None:
            free["auto"] = auto
        others = "".join(f" AND jobs.id != {int(id_)}" for id_ in leaving)
        first = (
            f"SELECT position, id FROM jobs INDEXED BY jobs_waiting WHERE {_CLAIMABLE} AND {schema.WISHED} = ?{others} "
            "ORDER BY position, id LIMIT 1"
        )
        found = [
            (*row, device) for wish, device in free.items() if (row := db.execute(first, [wish]).fetchone()) is not None
        ]
        return min(found)[1:] if found else None

    @property
    def devices(self) -> tuple[str, ...]:
        """The machine's devices as the supervisor last found them, best first; () while nobody looked."""
        with self._reported():
            row = self._one("SELECT value FROM settings WHERE name = ?", [_DEVICES])
        return () if row is None else tuple(json.loads(row["value"]))

    @property
    def driver_silent_since(self) -> float | None:
        """When a driver was first asked that has not answered since (Unix seconds); None where all answer."""
        with self._reported():
            row = self._one("SELECT value FROM settings WHERE name = ?", [_SILENT])
        return None if row is None else json.loads(row["value"])

    def set_devices(self, names: Sequence[str], *, silent_since: float | None = None) -> None:
        """Note what devices the machine has, and since when a driver does not answer."""
        with self._write(durable=False) as db:
            for name, value in ((_DEVICES, list(names)), (_SILENT, silent_since)):
                db.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", [name, json.dumps(value)])

    def set_owner(self, id_: int, *, attempt: int, owner: str) -> None:
        """Note which process is this attempt's trainer, unless it said so itself already or the attempt is over.

        (Under a virtual environment on Windows the process that was spawned is only a launcher of the trainer.)
        """
        with self._write(durable=True) as db:
            db.execute(
                f"UPDATE jobs SET owner = ? WHERE id = ? AND attempt = ? AND owner IS NULL AND state IN {_in(ACTIVE)}",
                [owner, id_, attempt],
            )

    def begin_attempt(self, id_: int, *, attempt: int, owner: str, resume_step: int = 0) -> State:
        """The trainer `owner` takes up its attempt: `starting` becomes `running`; a stop asked for meanwhile stays.

        Rows beyond `resume_step` (the step of the checkpoint it goes on from) are taken back in the same transaction.
        Raises JobError when this attempt is not the rightful one.
        """
        now = self.clock()
        with self._write(durable=True) as db:
            row = self._one("SELECT state, started_at FROM jobs WHERE id = ? AND attempt = ?", [id_, attempt])
            if row is None or row["state"] not in ACTIVE or row["started_at"] is not None:
                raise self._refused(id_, "running", attempt)
            state: State = "running" if row["state"] == "starting" else row["state"]
            db.execute(
                "UPDATE jobs SET state = ?, owner = ?, started_at = ?, heartbeat_at = ?, checkpoint_before = ?, "
                "step_before = (SELECT coalesce(max(step), 0) FROM metrics WHERE job = jobs.id) WHERE id = ?",
                [state, owner, now, now, resume_step, id_],
            )
            self._take_back(db, id_, after=resume_step, before_attempt=attempt)
            return state

    def _take_back(self, db: Any, id_: int, *, after: int, before_attempt: int) -> None:
        """Delete what earlier attempts recorded beyond step `after`: it will be done again."""
        removed = 0
        for table in ("metrics", "evaluations", "drifts"):
            removed += db.execute(
                f"DELETE FROM {table} WHERE job = ? AND step > ? AND attempt < ?", [id_, after, before_attempt]
            ).rowcount
        removed += db.execute(
            "DELETE FROM samples WHERE job = ? AND step > ? AND attempt < ? AND stage = 'after'",
            [id_, after, before_attempt],
        ).rowcount
        if removed:
            left = "(SELECT coalesce(max(step), 0) FROM metrics WHERE job = ?)"
            db.execute(f"DELETE FROM metrics_by_64 WHERE job = ? AND step > {left}", [id_, id_])
            db.execute("UPDATE jobs SET revision = revision + 1 WHERE id = ?", [id_])

    def heartbeat(self, id_: int, *, attempt: int) -> None:
        """The trainer of this attempt lives."""
        with self._write(durable=False) as db:
            db.execute("UPDATE jobs SET heartbeat_at = ? WHERE id = ? AND attempt = ?", [self.clock(), id_, attempt])

    def recorder(self, id_: int, attempt: int) -> StoreRecorder:
        """Where the trainer of this attempt reports. Use as a context manager."""
        from jobs.recorder import StoreRecorder

        return StoreRecorder(self, id_, attempt=attempt)

    def record(
        self,
        id_: int,
        *,
        attempt: int,
        steps: Sequence[StepMetrics] = (),
        telemetry: Sequence[Telemetry] = (),
        evaluations: Sequence[Evaluation] = (),
        drifts: Sequence[DriftCheck] = (),
        samples: Sequence[TextSample] = (),
        events: Sequence[Event] = (),
        phase: PhaseProgress | None = None,
        forecast: Forecast | None = None,
        durable: bool = False,
    ) -> bool:
        """Write a batch in one transaction. Writing the same step again replaces it. False: the attempt is over."""
        with self._write(durable=durable) as db:
            if self._one("SELECT 1 FROM jobs WHERE id = ? AND attempt = ?", [id_, attempt]) is None:
                return False
            self._record_steps(db, id_, attempt, steps)
            self._record_numbered(db, "telemetry", id_, telemetry)
            self._record_numbered(db, "drifts", id_, drifts, attempt=attempt)
            for evaluation in evaluations:
                values = {"job": id_, "attempt": attempt, **dataclasses.asdict(evaluation)}
                _replace(db, "evaluations", [values])
            for sample in samples:
                _replace(db, "samples", [{"job": id_, "attempt": attempt, **dataclasses.asdict(sample)}])
            for event in events:
                self._add_event(db, id_, event)
            if phase is not None:
                db.execute("UPDATE jobs SET phase = ? WHERE id = ?", [_json(dataclasses.asdict(phase)), id_])
            if forecast is not None:
                db.execute(
                    "UPDATE jobs SET forecast = ?, total_steps = ? WHERE id = ?",
                    [_json(forecast.to_json()), forecast.steps, id_],
                )
        return True

    def _record_steps(self, db: Any, id_: int, attempt: int, steps: Sequence[StepMetrics]) -> None:
        if not steps:
            return
        # An attempt's first step says where it resumed: older rows from there on are taken back with it.
        self._take_back(db, id_, after=min(row.step for row in steps) - 1, before_attempt=attempt)
        _replace(db, "metrics", [{"job": id_, "attempt": attempt, **dataclasses.asdict(row)} for row in steps])
        self._roll_up(db, id_, first=min(row.step for row in steps), last=max(row.step for row in steps))

    def _roll_up(self, db: Any, id_: int, *, first: int, last: int) -> None:
        """Sum up the full buckets that rows from `first` to `last` lie in."""
        start, end = (first - 1) // _ROLLUP * _ROLLUP, ((last - 1) // _ROLLUP + 1) * _ROLLUP
        wanted = ", ".join(_aggregate(name, how, weight="1") for name, how in _METRICS.items())
        db.execute(
            f"INSERT OR REPLACE INTO metrics_by_64 (job, {', '.join(_METRICS)}) SELECT job, {wanted} FROM metrics "
            "WHERE job = ? AND step > ? AND step <= ? GROUP BY (step - 1) / ? HAVING max(step) % ? = 0",
            [id_, start, end, _ROLLUP, _ROLLUP],
        )

    def _record_numbered(
        self, db: Any, table: str, id_: int, rows: Sequence[Telemetry | DriftCheck], **values: Any
    ) -> None:
        """Append rows that are counted as they come."""
        if not rows:
            return
        last = self._one(f"SELECT coalesce(max(number), 0) AS number FROM {table} WHERE job = ?", [id_])
        assert last is not None
        numbered = enumerate(rows, start=last["number"] + 1)
        _replace(db, table, [{"job": id_, "number": n, **values, **dataclasses.asdict(row)} for n, row in numbered])

    def add_event(self, id_: int, event: Event) -> None:
        """Record an event from outside the trainer (the supervisor's)."""
        with self._write(durable=False) as db:
            self._add_event(db, id_, event)

    def _add_event(self, db: Any, id_: int, event: Event) -> None:
        _replace(db, "events", [{"job": id_, **dataclasses.asdict(event)}])
        if event.kind in UNHEALTHY and event.level != "info":
            self._add_alert(db, id_, "unhealthy", about=event.kind, message=event.message, step=event.step)

    # ---- alerts -----------------------------------------------------------------------------------------------

    def _add_alert(self, db: Any, id_: int, kind: alert.Kind, *, about: str = "", **values: Any) -> None:
        """Put an alert of the job, as it is now, in line for the webhook (where there is none: only for the pages).

        The same thing is told once an attempt: a loss that jumps about makes one alert.
        """
        columns = "id AS job, name, state, failure, remedy, final_loss, said"
        row = self._one(f"SELECT {columns} FROM jobs WHERE id = ?", [id_])
        assert row is not None
        row.update(_revived(row, row.pop("said"), "failure", "remedy"))
        now, chosen = self.clock(), self._one("SELECT value FROM settings WHERE name = ?", [_LANGUAGE])
        language = "en" if chosen is None else chosen["value"]
        body = alert.body_of(**row, kind=kind, time=now, language=language, **values)
        db.execute(
            "INSERT OR IGNORE INTO alerts (job, attempt, kind, about, body, said, created_at, next_try_at) VALUES (?, "
            "(SELECT attempt FROM jobs WHERE id = ?), ?, ?, ?, ?, ?, (SELECT ? FROM settings WHERE name = ?))",
            [id_, id_, kind, about, _json(body), _said(body, *alert.TOLD), now, now, _WEBHOOK],
        )

    @property
    def webhook(self) -> str:
        """The address that alerts are posted to, "" for none. A secret: never print it."""
        with self._reported():
            row = self._one("SELECT value FROM settings WHERE name = ?", [_WEBHOOK])
        return "" if row is None else str(row["value"])

    def set_webhook(self, address: str, *, language: str = "en") -> None:
        """Post alerts from now on to `address`, also those that still wait; with "" to nobody. What arises from now on
        is told in `language` (jobs/alert.py).

        What was given up under the address before is not shown any longer.
        """
        with self._write(durable=True) as db:
            db.execute("DELETE FROM settings WHERE name = ?", [_WEBHOOK])
            if address:
                for name, value in ((_WEBHOOK, address), (_LANGUAGE, language)):
                    db.execute("INSERT OR REPLACE INTO settings (name, value) VALUES (?, ?)", [name, value])
            at = self.clock() if address else None
            db.execute("UPDATE alerts SET next_try_at = ? WHERE next_try_at IS NOT NULL", [at])
            db.execute(
                "UPDATE alerts SET error = NULL WHERE sent_at IS NULL AND error NOT NULL AND next_try_at IS NULL"
            )

    def claim_alert(self, owner: str) -> tuple[Alert, str] | None:
        """The alert whose time has come, counted as tried once more, and the address. None: there is none.

        `owner` must hold the supervisor's lease. Its next try is set already: when the caller dies in this one, it is
        tried again. One that is further ahead than any wait (a clock set back) is due as well.
        """
        now = self.clock()
        if not self._alert_due(now):  # mostly: nothing to write
            return None
        with self._write(durable=True) as db:
            lease = self._one("SELECT owner FROM leases WHERE name = ?", [SUPERVISOR_LEASE])
            row, address = self._alert_due(now), self._one("SELECT value FROM settings WHERE name = ?", [_WEBHOOK])
            if row is None or address is None or lease is None or lease["owner"] != owner:
                return None
            tries = row["tries"] + 1
            at = None if tries >= alert.MOST_TRIES else now + alert.wait_s(tries) + alert.LONGEST_TRY_S
            db.execute("UPDATE alerts SET tries = ?, next_try_at = ? WHERE id = ?", [tries, at, row["id"]])
        return _alert({**row, "tries": tries, "next_try_at": at}), str(address["value"])

    def _alert_due(self, now: float) -> dict[str, Any] | None:
        furthest = now + alert.LONGEST_WAIT_S + alert.LONGEST_TRY_S
        with self._reported():
            return self._one(
                f"SELECT {_ALERT_COLUMNS} FROM alerts WHERE next_try_at <= ? OR next_try_at > ? "
                "ORDER BY next_try_at, id LIMIT 1",
                [now, furthest],
            )

    def note_alert(self, id_: int, *, tries: int, error: str | None) -> None:
        """What came of the try number `tries`: None, it was taken and is never sent again; else what is shown."""
        now = self.clock()
        with self._write(durable=True) as db:
            if error is None:
                db.execute(
                    "UPDATE alerts SET sent_at = ?, next_try_at = NULL, error = NULL WHERE id = ? AND sent_at IS NULL",
                    [now, id_],
                )
            else:  # with next_try_at NULL there is no further try: given up, or the address was removed meanwhile
                db.execute(
                    "UPDATE alerts SET error = ?, next_try_at = CASE WHEN next_try_at IS NOT NULL THEN ? END "
                    "WHERE id = ? AND tries = ? AND sent_at IS NULL",
                    [error, now + alert.wait_s(tries), id_, tries],
                )

    def alerts_wait(self) -> bool:
        """Whether an alert is still to be posted."""
        with self._reported():
            return self._one("SELECT 1 FROM alerts WHERE next_try_at IS NOT NULL LIMIT 1") is not None

    def alerts(self, *, after: int = 0, troubled: bool = False, limit: int = 50) -> list[Alert]:
        """The newest `limit` alerts with a number above `after`, newest first; with `troubled` those that could not be
        delivered so far, or were given up."""
        where = "id > ? AND sent_at IS NULL AND error IS NOT NULL" if troubled else "id > ?"
        sql = f"SELECT {_ALERT_COLUMNS} FROM alerts WHERE {where} ORDER BY id DESC LIMIT ?"
        with self._reported():
            return [_alert(row) for row in self._db.query(sql, [after, limit])]

    # ---- leases -----------------------------------------------------------------------------------------------

    def take_lease(self, name: str, *, owner: str, alive: Callable[[str, float], bool]) -> bool:
        """Take or renew a lease. `alive(owner, heartbeat_at)` judges the present holder. False: someone else has it."""
        with self._write(durable=True) as db:
            row = self._one("SELECT owner, heartbeat_at FROM leases WHERE name = ?", [name])
            if row is not None and row["owner"] != owner and alive(row["owner"], row["heartbeat_at"]):
                return False
            self._set_lease(db, name, owner)
            return True

    def renew_lease(self, name: str, *, owner: str) -> bool:
        """Say that the holder lives. False: it is no longer the holder."""
        with self._write(durable=False) as db:
            sql = "UPDATE leases SET heartbeat_at = ? WHERE name = ? AND owner = ?"
            return bool(db.execute(sql, [self.clock(), name, owner]).rowcount)

    def release_lease(self, name: str, *, owner: str) -> None:
        with self._write(durable=True) as db:
            db.execute("DELETE FROM leases WHERE name = ? AND owner = ?", [name, owner])

    def retire(self, name: str, *, owner: str) -> bool:
        """Give a lease back if no job may start, could as soon as there is room, or is active, in one transaction, so
        that none is left behind."""
        waits = "state = 'queued' AND (SELECT why FROM queue) IS NOT NULL"
        with self._write(durable=True) as db:
            if self._one(f"SELECT 1 FROM jobs WHERE state IN {_in(ACTIVE)} OR ({_CLAIMABLE}) OR ({waits}) LIMIT 1"):
                return False
            db.execute("DELETE FROM leases WHERE name = ? AND owner = ?", [name, owner])
            return True

    def lease(self, name: str) -> tuple[str, float] | None:
        """The holder's identity and its last heartbeat (Unix seconds)."""
        with self._reported():
            row = self._one("SELECT owner, heartbeat_at FROM leases WHERE name = ?", [name])
        return None if row is None else (row["owner"], row["heartbeat_at"])

    def panel_alive(self) -> None:
        """A panel is open on this folder; it calls this about every ten seconds, so the supervisor stays."""
        with self._write(durable=False) as db:
            self._set_lease(db, PANEL_LEASE, "panel")

    def _set_lease(self, db: Any, name: str, owner: str) -> None:
        db.execute(
            "INSERT OR REPLACE INTO leases (name, owner, heartbeat_at) VALUES (?, ?, ?)", [name, owner, self.clock()]
        )

    # ---- what the pages read ----------------------------------------------------------------------------------

    def series(
        self,
        id_: int,
        *,
        after: int = 0,
        stride: int | None = None,
        revision: int | None = None,
        max_points: int = 2000,
    ) -> Series:
        """The curves of the optimizer steps, a value per step or bucket of steps. See Series for how to follow them."""
        return self._series(id_, "metrics", "step", _METRICS, after, stride, revision, max_points)

    def telemetry(
        self,
        id_: int,
        *,
        after: int = 0,
        stride: int | None = None,
        revision: int | None = None,
        max_points: int = 2000,
    ) -> Series:
        """The machine's readings, about one a second, from the start of the trainer. The cursor counts readings."""
        return self._series(id_, "telemetry", "number", _TELEMETRY, after, stride, revision, max_points)

    def drifts(
        self,
        id_: int,
        *,
        after: int = 0,
        stride: int | None = None,
        revision: int | None = None,
        max_points: int = 2000,
    ) -> Series:
        """How far the run's precision strayed from fp32, a value per check. The cursor counts checks."""
        return self._series(id_, "drifts", "number", _DRIFTS, after, stride, revision, max_points)

    def skipped_steps(self, id_: int) -> int:
        """How many steps left the weights as they were."""
        with self._reported():
            # By name: without statistics SQLite would rather read all steps of the job.
            sql = "SELECT count(*) FROM metrics INDEXED BY metrics_skipped WHERE job = ? AND skipped = 1"
            return int(self._db.execute(sql, [id_]).fetchone()[0])

    def streamed(self, id_: int) -> Streamed:
        """The steps on record in which the model streamed, and what they wrote to disk."""
        with self._reported():
            # By name, as above.
            sql = (
                "SELECT count(*), coalesce(sum(written_bytes), 0) FROM metrics INDEXED BY metrics_streamed "
                "WHERE job = ? AND written_bytes IS NOT NULL"
            )
            return Streamed(*self._db.execute(sql, [id_]).fetchone())

    def saves(self, id_: int) -> Saves:
        """How often and how long training waited for a checkpoint, as far as it went on after it."""
        with self._reported():
            sql = (
                "SELECT count(*), coalesce(sum(save_seconds), 0) FROM metrics INDEXED BY metrics_saved "
                "WHERE job = ? AND save_seconds IS NOT NULL"
            )
            return Saves(*self._db.execute(sql, [id_]).fetchone())

    def _series(
        self,
        id_: int,
        table: str,
        key: str,
        columns: Mapping[str, str],
        after: int,
        stride: int | None,
        revision: int | None,
        max_points: int,
    ) -> Series:
        with self._read() as db:
            job = self._one("SELECT state, revision FROM jobs WHERE id = ?", [id_])
            if job is None:
                raise _no_job(id_)
            last = int(db.execute(f"SELECT coalesce(max({key}), 0) FROM {table} WHERE job = ?", [id_]).fetchone()[0])
            now_stride = stride_for(last, max_points=max_points)
            reset = stride != now_stride or revision != job["revision"]
            start = 0 if reset else after
            whole = last if job["state"] in FINAL else last - last % now_stride

            def points(first: int, end: int) -> dict[str, list[float | int | None]]:
                rows = self._points(id_, table, key, columns, first, end, now_stride) if end > first else []
                return {name: [row[i] for row in rows] for i, name in enumerate(columns)}

            return Series(
                columns=points(start, whole),
                tail=points(max(start, whole), last),
                cursor=max(start, whole),
                stride=now_stride,
                revision=job["revision"],
                reset=reset,
                rows=last,
            )

    def _points(
        self, id_: int, table: str, key: str, columns: Mapping[str, str], first: int, end: int, stride: int
    ) -> list[tuple[Any, ...]]:
        """Rows (first, end], `stride` of them to a point."""
        names = ", ".join(columns)
        where = f"FROM {table} WHERE job = ? AND {key} > ? AND {key} <= ?"
        values: list[Any] = [id_, first, end]
        if stride == 1:
            rows = self._db.execute(f"SELECT {names} {where} ORDER BY {key}", values).fetchall()
            return cast("list[tuple[Any, ...]]", rows)
        source = f"SELECT {names}, 1 AS weight {where}"
        if table == "metrics" and stride >= _ROLLUP:
            # Full buckets of 64 from their own table, only the rows behind the last of them one by one.
            summed = end - end % _ROLLUP
            source = f"SELECT {names}, {_ROLLUP} AS weight {where.replace(table, 'metrics_by_64')} UNION ALL {source}"
            values = [id_, first, summed, id_, max(first, summed), end]
        wanted = ", ".join(_aggregate(name, how, weight="weight") for name, how in columns.items())
        sql = f"SELECT {wanted} FROM ({source}) GROUP BY ({key} - 1) / ? ORDER BY 1"
        return cast("list[tuple[Any, ...]]", self._db.execute(sql, [*values, stride]).fetchall())

    def evaluations(self, id_: int) -> list[Evaluation]:
        """All evaluations, by step."""
        return [Evaluation(**row) for row in self._of_job(id_, "evaluations", "step, time, loss, tokens", "step")]

    def samples(self, id_: int) -> list[TextSample]:
        """All generated texts, by step."""
        return [TextSample(**row) for row in self._of_job(id_, "samples", "step, stage, prompt, text", "step, rowid")]

    def events(self, id_: int, *, after: int = 0) -> list[JobEvent]:
        """Events with a number above `after`, oldest first."""
        rows = self._of_job(id_, "events", "id, time, level, kind, message, step", "id", after=after)
        return [JobEvent(**row) for row in rows]

    def _of_job(
        self, id_: int, table: str, columns: str, order: str, *, after: int | None = None
    ) -> list[dict[str, Any]]:
        where = "job = ?" if after is None else "job = ? AND id > ?"
        values = [id_] if after is None else [id_, after]
        with self._reported():
            return list(self._db.query(f"SELECT {columns} FROM {table} WHERE {where} ORDER BY {order}", values))

    def log_tail(self, id_: int, lines: int = 200) -> str:
        """The last `lines` lines of the trainer's output, at most 256 KiB; "" while there is none."""
        return tail_of(self.job(id_).log, lines=lines)


@contextmanager
def _folders_undone() -> Iterator[list[Path]]:
    """Folders that are put into the list are removed again when what is done inside fails: no run without a row."""
    made: list[Path] = []
    try:
        yield made
    except BaseException:
        for folder in made:
            shutil.rmtree(folder, ignore_errors=True)
        raise


def _aggregate(column: str, how: str, *, weight: str) -> str:
    """SQL of one point's value. A mean leaves out rows without a value (a loss that was not finite); a summed-up bucket
    weighs all of its 64 rows even when some had none."""
    if how == "mean":
        return f"sum({column} * {weight}) / sum(CASE WHEN {column} IS NOT NULL THEN {weight} END)"
    return f"{how}({column})"


def stride_for(rows: int, *, max_points: int) -> int:
    """The power of two that thins `rows` rows to at most `max_points` full buckets."""
    stride = 1
    while rows > stride * max_points:
        stride *= 2
    return stride


def tail_of(path: Path, *, lines: int) -> str:
    """The last lines of a text file that may still be growing. Of a progress bar's rewrites only the last is kept."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - LOG_TAIL_BYTES))
            text = file.read(LOG_TAIL_BYTES).decode("utf-8", errors="replace")
    except OSError:
        return ""
    found = text.replace("\r\n", "\n").split("\n")
    if size > LOG_TAIL_BYTES:
        found = found[1:]  # begins in the middle of a line
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in found[-lines - 1 :]).strip("\n")


def _replace(db: Any, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows of equal columns; a row with the same primary key is replaced."""
    if not rows:
        return
    names = list(rows[0])
    marks = ", ".join("?" * len(names))
    db.conn.executemany(
        f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})",
        [[_finite(row[name]) for name in names] for row in rows],
    )


def _finite(value: Any) -> Any:
    """NaN and infinities become NULL: no chart draws them and JSON has no word for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _in(states: Sequence[State]) -> str:
    return "(" + ", ".join(f"'{state}'" for state in states) + ")"


def _json(values: Any) -> str | None:
    return None if values is None else json.dumps(values, ensure_ascii=False)


def _forecast_values(forecast: Forecast | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    return forecast.to_json() if isinstance(forecast, Forecast) else dict(forecast)


def _alert(row: Mapping[str, Any]) -> Alert:
    values = dict(row)
    body = json.loads(values.pop("body"))
    return Alert(**values | {"body": {**body, **_revived(body, values.pop("said"), *alert.TOLD)}})


def _said(texts: Mapping[str, Any], *names: str) -> str | None:
    """Those of the texts that any language can say, as JSON; None where none is one."""
    found = {name: packed(text) for name in names if isinstance(text := texts.get(name), Sentence)}
    return _json(found or None)


def _revived(texts: Mapping[str, Any], said: str | None, *names: str) -> dict[str, str | None]:
    """The texts with these names, as sentences where `said` (from `_said`) tells how to say just that text."""
    known = {name: unpacked(found) for name, found in json.loads(said or "{}").items()}
    return {name: known[name] if name in known and known[name] == texts[name] else texts[name] for name in names}


@lru_cache(maxsize=512)
def _config(text: str) -> tuple[RunConfig, ConfigError | None]:
    return RunConfig.from_stored(text)


def _default_name(config: RunConfig) -> str:
    model = config.model.source.replace("\\", "/").rstrip("/").rpartition("/")[2] or "model"
    return f"{model} {config.method}"


def _slug(name: str) -> str:
    """A short folder name in any script: letters and digits stay, everything else becomes a hyphen."""
    plain = unicodedata.normalize("NFC", name).lower()
    words = "".join(letter if letter.isalnum() else " " for letter in plain).split()
    return "-".join(words)[:40].strip("-") or "run"


def _unwritable(folder: Path, error: OSError) -> JobError:
    return JobError(
        f"The run's folder {folder} cannot be written: {error.strerror}", "Free some room, or check its rights."
    )


def _no_job(id_: int) -> JobError:
    return JobError(f"There is no job {id_}", "Reload the page to see which jobs there are.")


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


if __name__ == "__main__":
    from jobs.doctor import main

    sys.exit(main())
