"""Leases: who is the supervisor of a data folder, whether a panel is open; and which devices were found."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, Final

from jobs.store.database import Database

SUPERVISOR_LEASE: Final = "supervisor"
PANEL_LEASE: Final = "panel"
_DEVICES: Final = "devices"
_SILENT: Final = "driver silent since"


class Leases(Database):
    """A lease is renewed by its holder, and taken from one that no longer lives."""

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

    # ---- devices ------------------------------------------------------------------------------------------------

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
