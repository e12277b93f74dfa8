"""Measuring this machine from the page: begun by a button, its progress told, the estimates follow when it is done."""

from __future__ import annotations

import html
import logging
import threading
from typing import Any

from jobs.store import Store
from ui.estimate import notice_card
from ui.preview import Previewer
from ui.texts import Texts
from vramfit.errors import InternalError, UserError, VramfitError
from vramfit.hardware.calibrate import Calibration, calibrate

log = logging.getLogger("vramfit.panel")


class Calibrator:
    """One calibration at a time, in a thread that watches its child process. Thread-safe."""

    def __init__(self, store: Store, previewer: Previewer) -> None:
        self._store, self._previewer = store, previewer
        self._lock = threading.Lock()
        self._running = False
        self._share, self._what = 0.0, ""
        self._found: tuple[str, Calibration] | None = None
        self._error: VramfitError | None = None

    def start(self, texts: Texts, *, tiny: bool = False) -> None:
        """Begin, unless one is under way. Raises UserError while a run is at work: both would be measured wrong."""
        if self._store.active_jobs():
            raise UserError(texts["calibrate.busy"], texts["calibrate.busy.remedy"])
        with self._lock:
            if self._running:
                return
            self._running, self._share, self._what, self._error, self._found = True, 0.0, "", None, None
        threading.Thread(target=self._measure, args=(tiny,), name="calibration", daemon=True).start()

    def view(self, texts: Texts) -> dict[str, Any]:
        """How far it is, or what was found, as HTML."""
        with self._lock:
            running, share, what = self._running, self._share, self._what
            found, error = self._found, self._error
        if running:
            return {"state": "running", "html": _progress(share, what, texts)}
        if error is not None:
            return {"state": "failed", "html": notice_card(error, texts)}
        if found is not None:
            return {"state": "done", "html": found_html(*found, texts)}
        return {"state": "idle", "html": ""}

    def _measure(self, tiny: bool) -> None:
        try:
            device = self._previewer.machine().device("auto")
            found = calibrate(device, self._store.data_dir, progress=self._progress, tiny=tiny)
            self._previewer.refresh()
            outcome: tuple[tuple[str, Calibration] | None, VramfitError | None] = ((device.name, found), None)
        except VramfitError as error:
            outcome = (None, error)
        except Exception as error:  # whatever it was, the page must not wait for ever
            log.exception("in a calibration")
            outcome = (None, InternalError(f"Measuring this machine failed: {type(error).__name__}"))
        with self._lock:
            (self._found, self._error), self._running = outcome, False

    def _progress(self, share: float, what: str) -> None:
        with self._lock:
            self._share, self._what = share, what


def _progress(share: float, what: str, texts: Texts) -> str:
    said = texts["calibrate.running"].format(share=f"{share:.0%}", what=what)
    return (
        f'<div class="vf-progress-bar"><i style="width:{share:.1%}"></i></div>'
        f'<div class="vf-sub">{html.escape(said)}</div>'
    )


def found_html(name: str, found: Calibration, texts: Texts) -> str:
    """What was measured, the best product of each number format first."""
    best: dict[str, float] = {}
    for rate in found.products:
        best[rate.dtype] = max(rate.flops, best.get(rate.dtype, 0.0))
    rates = [(dtype, f"{flops / 1e12:.3g} TFLOP/s") for dtype, flops in best.items()]
    for key in ("memory", "link", "ram", "disk_read", "disk_write"):
        value = getattr(found, key)
        rates.append((texts[f"calibrate.{key}"], f"{value / 1e9:.1f} GB/s" if value else "–"))
    cells = "".join(f"<div><dt>{html.escape(key)}</dt><dd>{html.escape(value)}</dd></div>" for key, value in rates)
    said = html.escape(texts["calibrate.done"].format(name=name, day=found.day))
    return f'<p class="vf-good">{said}</p><dl class="vf-facts">{cells}</dl>'
