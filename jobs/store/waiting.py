"""Jobs as rows: added, read, put into order, changed while they wait. Nothing here changes a state."""

from __future__ import annotations

import json
import shutil
import unicodedata
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from jobs import schema
from jobs.job import ACTIVE, Job, State
from jobs.store.measured import Measured, no_job
from jobs.store.rows import as_json, config_of, forecast_values, in_states, revived
from vramfit.config import RunConfig
from vramfit.errors import JobError
from vramfit.planning.plan import Forecast
from vramfit.sentences import unpacked
from vramfit.training.inputs import Marks
from vramfit.training.metrics import PhaseProgress

LOG_TAIL_BYTES: Final = 256 * 1024
JOB_COLUMNS: Final = (
    "id, name, state, attempt, revision, position, foreground, config, forecast, folder, owner, phase, total_steps, "
    "created_at, claimed_at, started_at, finished_at, heartbeat_at, stop_requested_at, final_loss, "
    "coalesce(eval_loss, (SELECT loss FROM evaluations WHERE job = jobs.id ORDER BY step DESC LIMIT 1)) AS eval_loss, "
    "peak_allocated_bytes, export, failure, remedy, resumes, losses, step_before, checkpoint_before, after, "
    "after_anyway, (SELECT state FROM jobs AS first WHERE first.id = jobs.after) AS after_state, go_on, "
    "frozen, accepted, device, again, said, "
    "coalesce((SELECT max(step) FROM metrics WHERE job = jobs.id), 0) AS step"
)


class Waiting(Measured):
    """The queue, its order, and the jobs of the history."""

    # ---- jobs ---------------------------------------------------------------------------------------------------

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
        values = forecast_values(forecast)
        name = config.name.strip() or _default_name(config)
        cursor = db.execute(
            "INSERT INTO jobs (name, state, position, config, forecast, folder, total_steps, created_at) "
            "VALUES (?, ?, (SELECT coalesce(max(position), 0) + 1 FROM jobs), ?, ?, '', ?, ?)",
            [name, state, config.to_json(), as_json(values), int((values or {}).get("steps") or 0), self.clock()],
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
            row = self._one(f"SELECT {JOB_COLUMNS} FROM jobs WHERE id = ?", [id_])
        if row is None:
            raise no_job(id_)
        return self._job(row)

    def jobs(self, limit: int = 200) -> list[Job]:
        """The last `limit` jobs, newest first."""
        with self._reported():
            rows = list(self._db.query(f"SELECT {JOB_COLUMNS} FROM jobs ORDER BY id DESC LIMIT ?", [limit]))
        return [self._job(row) for row in rows]

    def jobs_at_rest(self, limit: int = 200) -> list[Job]:
        """The last `limit` jobs that neither wait in the queue nor are at work, newest first."""
        where = f"INDEXED BY jobs_at_rest WHERE {schema.AT_REST}"
        with self._reported():
            rows = list(self._db.query(f"SELECT {JOB_COLUMNS} FROM jobs {where} ORDER BY id DESC LIMIT ?", [limit]))
        return [self._job(row) for row in rows]

    def waiting_by_device(self) -> dict[str, int]:
        """How many queued jobs ask for each device; "auto" leaves it to the queue."""
        sql = f"SELECT {schema.WISHED}, count(*) FROM jobs INDEXED BY jobs_waiting WHERE state = 'queued' GROUP BY 1"
        with self._reported():
            return {str(wish): int(count) for wish, count in self._db.execute(sql) if wish is not None}

    def active_jobs(self) -> list[Job]:
        """Jobs that a trainer owns, foreground ones included."""
        with self._reported():
            rows = list(
                self._db.query(f"SELECT {JOB_COLUMNS} FROM jobs WHERE state IN {in_states(ACTIVE)} ORDER BY id")
            )
        return [self._job(row) for row in rows]

    def queue(self) -> list[int]:
        """The ids of queued jobs in the order in which they will start."""
        with self._reported():
            rows = self._db.execute("SELECT id FROM jobs WHERE state = 'queued' ORDER BY position, id")
            return [int(row[0]) for row in rows]

    def queued_jobs(self, limit: int = 200) -> list[Job]:
        """The first `limit` queued jobs, in the order in which they will start."""
        sql = f"SELECT {JOB_COLUMNS} FROM jobs WHERE state = 'queued' ORDER BY position, id LIMIT ?"
        with self._reported():
            rows = list(self._db.query(sql, [limit]))
        return [self._job(row) for row in rows]

    def _job(self, row: dict[str, Any]) -> Job:
        values = dict(row)
        stop_requested_at = values.pop("stop_requested_at")
        values.update(revived(values, values.pop("said"), "failure", "remedy"))
        return Job(
            **{
                **values,
                "foreground": bool(values["foreground"]),
                "after_anyway": bool(values["after_anyway"]),
                "go_on": bool(values["go_on"]),
                "accepted": bool(values["accepted"]),
                "again": bool(values["again"]),
                "frozen": json.loads(values["frozen"]) if values["frozen"] else None,
                "config": config_of(values["config"])[0],
                "config_error": config_of(values["config"])[1],
                "forecast": json.loads(values["forecast"]) if values["forecast"] else None,
                "phase": PhaseProgress(**json.loads(values["phase"])) if values["phase"] else None,
                "folder": self.data_dir / values["folder"],
                "stop_requested": stop_requested_at is not None,
            }
        )

    def log_tail(self, id_: int, lines: int = 200) -> str:
        """The last `lines` lines of the trainer's output, at most 256 KiB; "" while there is none."""
        return tail_of(self.job(id_).log, lines=lines)

    # ---- the order of the queue ---------------------------------------------------------------------------------

    def set_after(self, id_: int, after: int | None, *, anyway: bool = False) -> None:
        """Let a job that has not started wait for another one (None: for none). Raises JobError for a circle."""
        with self._write(durable=True) as db:
            self._set_after(db, id_, after, anyway=anyway)

    def _set_after(self, db: Any, id_: int, after: int | None, *, anyway: bool) -> None:
        row = self._one("SELECT state FROM jobs WHERE id = ?", [id_])
        if row is None:
            raise no_job(id_)
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
                raise no_job(link)
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
        values = forecast_values(forecast)
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
                    as_json(values),
                    int((values or {}).get("steps") or 0),
                    id_,
                ],
            )
            self._write_config(self.data_dir / row["folder"], config)

    def _refused(self, id_: int, state: State, attempt: int | None) -> JobError:
        row = self._one("SELECT state, attempt FROM jobs WHERE id = ?", [id_])
        if row is None:
            return no_job(id_)
        if attempt is not None and row["attempt"] != attempt:
            return JobError(
                f"Job {id_} is at attempt {row['attempt']}, so attempt {attempt} may not change it",
                "Nothing is to be done: the newer attempt goes on.",
            )
        return JobError(f"Job {id_} is {row['state']} and cannot become {state}", "Reload the page to see its state.")

    # ---- holding all of it --------------------------------------------------------------------------------------

    def hold_queue(self, held: bool) -> None:
        """Start no further job until the queue is let go again. What is at work goes on."""
        with self._write(durable=True) as db:
            db.execute("UPDATE queue SET held_at = ?, why = NULL WHERE id = 1", [self.clock() if held else None])

    @property
    def queue_held(self) -> bool:
        with self._reported():
            row = self._one("SELECT held_at FROM queue WHERE id = 1")
        return row is not None and row["held_at"] is not None

    @property
    def queue_waits(self) -> str | None:
        """Why the queue waits though nobody holds it; None when it does not."""
        with self._reported():
            row = self._one("SELECT why FROM queue WHERE id = 1")
        return None if row is None or row["why"] is None else unpacked(json.loads(row["why"]))

    def start_again(self) -> None:
        """The queue waits no longer for what kept trainers from being started. A person's hold stays."""
        with self._write(durable=True) as db:
            db.execute("UPDATE queue SET held_at = NULL, why = NULL WHERE id = 1 AND why IS NOT NULL")

    # ---- what a job is made from --------------------------------------------------------------------------------

    def next_unfrozen(self) -> Job | None:
        """The first job that waits and has no marks yet of what it is made from."""
        where = f"INDEXED BY jobs_to_mark WHERE {schema.TO_MARK}"
        with self._reported():
            row = self._one(f"SELECT {JOB_COLUMNS} FROM jobs {where} ORDER BY id LIMIT 1")
        return None if row is None else self._job(row)

    def freeze(self, id_: int, *, config: RunConfig, marks: Marks) -> None:
        """Keep the marks of what the job is made from, unless it has some or its settings are others by now."""
        with self._write(durable=True) as db:
            # Compared as settings: an earlier version, which had fewer of them, wrote the same ones as another text.
            row = self._one("SELECT config FROM jobs WHERE id = ? AND frozen IS NULL", [id_])
            if row is not None and config_of(row["config"])[0] == config:
                db.execute("UPDATE jobs SET frozen = ? WHERE id = ?", [as_json(marks), id_])

    def mark_more(self, id_: int, *, attempt: int, marks: Marks) -> None:
        """Keep marks that hold more than those of before: what was fetched only when this attempt began."""
        with self._write(durable=True) as db:
            db.execute("UPDATE jobs SET frozen = ? WHERE id = ? AND attempt = ?", [as_json(marks), id_, attempt])


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
