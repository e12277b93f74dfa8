"""Changes of state: each is one transaction that names the states it expects and the attempt it is made for."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Final

from jobs import alert, schema
from jobs.job import ACTIVE, FINAL, RESUMABLE, UNSUCCESSFUL, Job, State
from jobs.store.leases import SUPERVISOR_LEASE
from jobs.store.measured import no_job
from jobs.store.rows import as_json, finite, in_states, said_of
from jobs.store.waiting import JOB_COLUMNS, Waiting
from vramfit.errors import JobError
from vramfit.sentences import packed
from vramfit.training.metrics import Event, PhaseProgress

SETTABLE: Final = frozenset(
    {
        "owner",
        "final_loss",
        "eval_loss",
        "peak_allocated_bytes",
        "export",
        "failure",
        "remedy",
        "ended_boot",
        "asks",
        "again",
    }
)
# A job that may be started now: nothing it waits for is still to come.
_CLAIMABLE: Final = (
    "jobs.state = 'queued' AND (SELECT held_at FROM queue) IS NULL AND (jobs.after IS NULL OR EXISTS ("
    "SELECT 1 FROM jobs AS first WHERE first.id = jobs.after AND (first.state = 'succeeded' OR (jobs.after_anyway AND "
    f"first.state IN {tuple(UNSUCCESSFUL)}))))"
)
# Of those that leave the choice: not one that goes on by itself after its card was lost, which is to come back.
_NOT_FROM_A_CARD: Final = " AND (jobs.resumes = 0 OR coalesce(jobs.device, 'cpu') = 'cpu')"


class States(Waiting):
    """What pages, supervisor and trainer ask of a job."""

    # ---- asked for by a person ----------------------------------------------------------------------------------

    def transition(
        self, id_: int, *, expected: Sequence[State], state: State, attempt: int | None = None, **values: Any
    ) -> None:
        """Move a job from one of the `expected` states to `state`, if `attempt` is still its attempt; else JobError.

        `values` sets further columns in the same transaction. A final state stamps `finished_at` and ends ownership.
        """
        assert set(values) <= SETTABLE, values
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
            columns["said"] = said_of(values, "failure", "remedy")
        if state in FINAL:
            columns = {"finished_at": self.clock(), "owner": None, **columns}
        assignments = ", ".join(f"{name} = ?" for name in columns)
        changed = db.execute(
            f"UPDATE jobs SET {assignments} WHERE id = ? AND state IN {in_states(expected)} "
            "AND attempt = coalesce(?, attempt)",
            [*map(finite, columns.values()), id_, attempt],
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
                raise no_job(id_)
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
            "revision = revision + 1, resumes = 0, losses = 0, ended_boot = NULL, again = 0, go_on = 0, "
            "accepted = asks, "
            "frozen = CASE WHEN asks THEN NULL ELSE frozen END, asks = 0 WHERE id = ?",
            [id_],
        )

    # ---- going on without being asked ---------------------------------------------------------------------------

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
                values={"owner": None, "failure": None, "remedy": None, "ended_boot": None, "again": False},
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

    def to_go_on(self, boot: str) -> list[Job]:
        """Jobs that noted an end after which they go on: the system went down, before the boot `boot`, or their card
        was lost."""
        where = "state = 'interrupted' AND (again OR (ended_boot IS NOT NULL AND ended_boot != ?))"
        with self._reported():
            rows = list(self._db.query(f"SELECT {JOB_COLUMNS} FROM jobs WHERE {where} ORDER BY position", [boot]))
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

    # ---- the supervisor's and trainer's side --------------------------------------------------------------------

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
        gets the first card that is free, or the CPU where there is no card (unless it goes on by itself from a card:
        then it waits for one). `held` are those that are not free although no job is on them ("auto": none is chosen
        for those that leave the choice); `leaving` are jobs that an earlier trainer has not left yet. None while none
        may start, or the queue is held. A job whose device is not there waits, and others pass it.

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
                [as_json(dataclasses.asdict(PhaseProgress(name="starting"))), now, now, device, id_],
            )
        return self.job(id_)

    def _first_with_a_device(
        self, db: Any, devices: Sequence[str], held: Collection[str], leaving: Collection[int]
    ) -> tuple[int, str] | None:
        """The job to start next and the device for it. Looks up the first of each device, however many wait."""
        by_itself = tuple(name for name in devices if name != "cpu") or tuple(devices)
        busy = {
            device or (wished if wished != "auto" else next(iter(by_itself), ""))
            for device, wished in db.execute(
                f"SELECT device, {schema.WISHED} FROM jobs WHERE state IN {in_states(ACTIVE)}"
            )
        }
        free = {name: name for name in devices if name not in busy and name not in held}
        if "auto" not in held and (auto := next((name for name in by_itself if name in free), None)) is not None:
            free["auto"] = auto
        others = "".join(f" AND jobs.id != {int(id_)}" for id_ in leaving)
        found = []
        for wish, device in free.items():
            more = f"{others}{_NOT_FROM_A_CARD}" if (wish, device) == ("auto", "cpu") else others
            row = db.execute(
                f"SELECT position, id FROM jobs INDEXED BY jobs_waiting WHERE {_CLAIMABLE} AND {schema.WISHED} = ?"
                f"{more} ORDER BY position, id LIMIT 1",
                [wish],
            ).fetchone()
            found += [] if row is None else [(*row, device)]
        return min(found)[1:] if found else None

    def wait_for_a_start(self, id_: int, *, attempt: int, why: str, event: Event | None) -> None:
        """No trainer can be started now, whoever's turn it is: the job that was to be goes back to its place, and the
        queue waits, for `why`. Where a person holds it already, that stays. `event` (None: told before) is the job's.

        Raises JobError when the attempt is over.
        """
        with self._write(durable=True) as db:
            self._transition(db, id_, expected=("starting",), state="queued", attempt=attempt, values={"failure": None})
            sql = "UPDATE queue SET held_at = ?, why = ? WHERE id = 1 AND (held_at IS NULL OR why IS NOT NULL)"
            db.execute(sql, [self.clock(), as_json(packed(why))])
            if event is not None:
                self._add_event(db, id_, event)
                self._add_alert(db, id_, "held", message=why)

    def set_owner(self, id_: int, *, attempt: int, owner: str) -> None:
        """Note which process is this attempt's trainer, unless it said so itself already or the attempt is over.

        (Under a virtual environment on Windows the process that was spawned is only a launcher of the trainer.)
        """
        with self._write(durable=True) as db:
            db.execute(
                "UPDATE jobs SET owner = ? WHERE id = ? AND attempt = ? AND owner IS NULL "
                f"AND state IN {in_states(ACTIVE)}",
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

    def retire(self, name: str, *, owner: str) -> bool:
        """Give a lease back if no job may start, could as soon as there is room, or is active, in one transaction, so
        that none is left behind."""
        waits = "state = 'queued' AND (SELECT why FROM queue) IS NOT NULL"
        with self._write(durable=True) as db:
            if self._one(
                f"SELECT 1 FROM jobs WHERE state IN {in_states(ACTIVE)} OR ({_CLAIMABLE}) OR ({waits}) LIMIT 1"
            ):
                return False
            db.execute("DELETE FROM leases WHERE name = ? AND owner = ?", [name, owner])
            return True
