"""Which devices this machine has now, by name, for the queue. Looked for by a thread: some drivers take seconds."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Final

from vramfit.hardware.devices import probe

FRESH_S: Final = 60.0


class DeviceWatch:
    """`names()` never waits: what was found last, and a new look behind it when that is older than FRESH_S.

    Empty until the first look has ended. Best first; the CPU is always the last.
    """

    def __init__(self, data_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._data_dir, self._clock = data_dir, clock
        self._found: tuple[str, ...] = ()
        self._looked_at: float | None = None
        self._thread: threading.Thread | None = None

    def names(self) -> tuple[str, ...]:
        looking = self._thread is not None and self._thread.is_alive()
        if not looking and (self._looked_at is None or self._clock() - self._looked_at >= FRESH_S):
            self._thread = threading.Thread(target=self._look, name="devices", daemon=True)
            self._thread.start()
        return self._found

    def _look(self) -> None:
        try:
            self._found = tuple(device.torch_device for device in probe(self._data_dir).devices)
        except Exception:  # what was found before stays; the next look may see more
            traceback.print_exc()
        self._looked_at = self._clock()
