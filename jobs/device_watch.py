"""Which devices this machine has now, by name, for the queue. Looked for by a thread: some drivers take seconds."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from vramfit.hardware.devices import probe

FRESH_S: Final = 60.0


class Found(NamedTuple):
    """Devices by name, best first, the CPU the last; () until the first look has ended. `silent_since`: when a driver
    was first asked that has not answered since (Unix seconds), None where all answer. `looked_at`: when the look that
    found them began, by the watch's clock."""

    names: tuple[str, ...]
    silent_since: float | None = None
    looked_at: float | None = None


class DeviceWatch:
    """`found()` never waits: what was found last, and a new look behind it when that is older than FRESH_S.

    While a driver is silent its cards are still named, as they were when it last answered.
    """

    def __init__(self, data_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._data_dir, self._clock = data_dir, clock
        self._found = Found(())
        self._looked_at: float | None = None
        self._thread: threading.Thread | None = None

    def found(self) -> Found:
        known = self._found  # before a look begins, which can be as quick as this
        looking = self._thread is not None and self._thread.is_alive()
        if not looking and (self._looked_at is None or self._clock() - self._looked_at >= FRESH_S):
            self._thread = threading.Thread(target=self._look, name="devices", daemon=True)
            self._thread.start()
        return known

    def _look(self) -> None:
        began, looked_at, before = time.time(), self._clock(), self._found
        try:
            machine = probe(self._data_dir)
            names = tuple(device.torch_device for device in machine.devices)
            if machine.silent:
                since = began if before.silent_since is None else before.silent_since
                self._found = Found((*(name for name in before.names if name not in names), *names), since, looked_at)
            else:
                self._found = Found(names, looked_at=looked_at)
        except Exception:  # what was found before stays; the next look may see more
            traceback.print_exc()
        self._looked_at = self._clock()
