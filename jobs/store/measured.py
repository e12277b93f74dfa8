"""What was measured: steps, readings, evaluations, texts. Written in batches, read thinned and by cursors."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

from jobs.job import FINAL, JobEvent, Saves, Series, Streamed
from jobs.store.alerts import Alerts
from jobs.store.rows import as_json, put_rows
from vramfit.errors import JobError
from vramfit.planning.plan import Forecast
from vramfit.training.metrics import (
    CHECKPOINT,
    RESUME,
    DriftCheck,
    Evaluation,
    Event,
    PhaseProgress,
    StepMetrics,
    Telemetry,
    TextSample,
)

if TYPE_CHECKING:
    from jobs.recorder import StoreRecorder

_Row = TypeVar("_Row", DriftCheck, Event)

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


class Measured(Alerts):
    """Rows of a run. Of an attempt that is over none is written."""

    # ---- writing ------------------------------------------------------------------------------------------------

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
        made_by: int | None = None,
    ) -> bool:
        """Write a batch in one transaction. Writing the same step again replaces it. False: the attempt is over.

        `made_by` is the earlier attempt whose rows these are, where a checkpoint has carried them to this one: what of
        them was written after all is not written twice.
        """
        with self._write(durable=durable) as db:
            if self._one("SELECT 1 FROM jobs WHERE id = ? AND attempt = ?", [id_, attempt]) is None:
                return False
            if made_by is not None:
                attempt = made_by
                drifts = self._not_there(db, id_, "drifts", ("step", "time", "raised"), drifts)
                events = self._not_there(db, id_, "events", ("time", "kind", "message"), events)
            self._record_steps(db, id_, attempt, steps)
            self._record_numbered(db, "telemetry", id_, telemetry)
            self._record_numbered(db, "drifts", id_, drifts, attempt=attempt)
            for evaluation in evaluations:
                values = {"job": id_, "attempt": attempt, **dataclasses.asdict(evaluation)}
                put_rows(db, "evaluations", [values])
            for sample in samples:
                put_rows(db, "samples", [{"job": id_, "attempt": attempt, **dataclasses.asdict(sample)}])
            for event in events:
                self._add_event(db, id_, event)
            if phase is not None:
                db.execute("UPDATE jobs SET phase = ? WHERE id = ?", [as_json(dataclasses.asdict(phase)), id_])
            if forecast is not None:
                db.execute(
                    "UPDATE jobs SET forecast = ?, total_steps = ? WHERE id = ?",
                    [as_json(forecast.to_json()), forecast.steps, id_],
                )
        return True

    def _not_there(self, db: Any, id_: int, table: str, names: tuple[str, ...], rows: Sequence[_Row]) -> list[_Row]:
        """Those rows of a job that have no equal, by these columns, in a table that has no key of their own."""
        first = min((row.time for row in rows), default=0.0)
        sql = f"SELECT {', '.join(names)} FROM {table} WHERE job = ? AND time >= ?"
        there = set(db.execute(sql, [id_, first]).fetchall()) if rows else set()
        return [row for row in rows if tuple(getattr(row, name) for name in names) not in there]

    def _record_steps(self, db: Any, id_: int, attempt: int, steps: Sequence[StepMetrics]) -> None:
        if not steps:
            return
        # An attempt's first step says where it resumed: older rows from there on are taken back with it.
        self._take_back(db, id_, after=min(row.step for row in steps) - 1, before_attempt=attempt)
        put_rows(db, "metrics", [{"job": id_, "attempt": attempt, **dataclasses.asdict(row)} for row in steps])
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
        put_rows(db, table, [{"job": id_, "number": n, **values, **dataclasses.asdict(row)} for n, row in numbered])

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

    # ---- reading ------------------------------------------------------------------------------------------------

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

    def saved_step(self, id_: int) -> int:
        """The step of the newest checkpoint that is on record as complete, 0 where none is: whatever lies in the folder
        by now. The run told when it was, and when it went on from it."""
        sql = "SELECT coalesce(max(step), 0) FROM events WHERE job = ? AND kind IN (?, ?) AND level = 'info'"
        with self._reported():
            return int(self._db.execute(sql, [id_, CHECKPOINT, RESUME]).fetchone()[0])

    def step_seconds(self, id_: int) -> float | None:
        """What the longest of the last twenty steps on record took; None where there is none."""
        sql = "SELECT step_seconds FROM metrics WHERE job = ? ORDER BY step DESC LIMIT 20"
        with self._reported():
            found = self._db.execute(f"SELECT max(step_seconds) FROM ({sql})", [id_]).fetchone()[0]
        return None if found is None else float(found)

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
                raise no_job(id_)
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


def no_job(id_: int) -> JobError:
    return JobError(f"There is no job {id_}", "Reload the page to see which jobs there are.")
