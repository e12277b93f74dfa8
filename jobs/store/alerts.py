"""Events of a run, and the alerts that they and its end become: in line for the webhook, each thing once an attempt."""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from jobs import alert
from jobs.alert import Alert
from jobs.store.leases import SUPERVISOR_LEASE, Leases
from jobs.store.rows import alert_of, as_json, put_rows, revived, said_of
from vramfit.training.health import UNHEALTHY
from vramfit.training.metrics import Event

_WEBHOOK: Final = "webhook"  # the names of settings
_LANGUAGE: Final = "language of alerts"
_ALERT_COLUMNS: Final = "id, job, kind, about, body, said, created_at, tries, next_try_at, sent_at, error"


class Alerts(Leases):
    """Written in the transaction of what they tell of."""

    def add_event(self, id_: int, event: Event) -> None:
        """Record an event from outside the trainer (the supervisor's)."""
        with self._write(durable=False) as db:
            self._add_event(db, id_, event)

    def _add_event(self, db: Any, id_: int, event: Event) -> None:
        put_rows(db, "events", [{"job": id_, **dataclasses.asdict(event)}])
        if event.kind in UNHEALTHY and event.level != "info":
            self._add_alert(db, id_, "unhealthy", about=event.kind, message=event.message, step=event.step)

    def _add_alert(self, db: Any, id_: int, kind: alert.Kind, *, about: str = "", **values: Any) -> None:
        """Put an alert of the job, as it is now, in line for the webhook (where there is none: only for the pages).

        The same thing is told once an attempt: a loss that jumps about makes one alert.
        """
        columns = "id AS job, name, state, failure, remedy, final_loss, said"
        row = self._one(f"SELECT {columns} FROM jobs WHERE id = ?", [id_])
        assert row is not None
        row.update(revived(row, row.pop("said"), "failure", "remedy"))
        now, chosen = self.clock(), self._one("SELECT value FROM settings WHERE name = ?", [_LANGUAGE])
        language = "en" if chosen is None else chosen["value"]
        body = alert.body_of(**row, kind=kind, time=now, language=language, **values)
        db.execute(
            "INSERT OR IGNORE INTO alerts (job, attempt, kind, about, body, said, created_at, next_try_at) VALUES (?, "
            "(SELECT attempt FROM jobs WHERE id = ?), ?, ?, ?, ?, ?, (SELECT ? FROM settings WHERE name = ?))",
            [id_, id_, kind, about, as_json(body), said_of(body, *alert.TOLD), now, now, _WEBHOOK],
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
        return alert_of({**row, "tries": tries, "next_try_at": at}), str(address["value"])

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
            return [alert_of(row) for row in self._db.query(sql, [after, limit])]
