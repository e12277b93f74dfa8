"""Calibrating from the page: its progress, its result in the estimates, and when it is refused."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jobs.store import Store
from ui import calibration
from ui.calibration import Calibrator
from ui.preview import Previewer
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import HardwareError, UserError
from vramfit.starter.recipe import starter_run

EN = texts_of("en")


def ended(calibrator: Calibrator) -> dict[str, str]:
    deadline = time.monotonic() + 120
    while (view := calibrator.view(EN))["state"] == "running":
        assert "vf-progress-bar" in view["html"]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return view


def test_what_was_measured_is_used_by_the_next_estimate(store: Store, tmp_path: Path) -> None:
    previewer = Previewer(store.data_dir)
    calibrator = Calibrator(store, previewer)
    assert calibrator.view(EN)["state"] == "idle"
    calibrator.start(EN, tiny=True)
    view = ended(calibrator)
    assert view["state"] == "done", view["html"]
    assert "TFLOP/s" in view["html"]
    forecast = previewer.preview(starter_run(), "cpu").forecast
    assert forecast is not None
    assert forecast.speed.rate_source == "measured"


def test_a_failure_is_told_and_it_can_be_tried_again(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise HardwareError("The driver is gone", "Restart the machine.")

    monkeypatch.setattr(calibration, "calibrate", fails)
    calibrator = Calibrator(store, Previewer(store.data_dir))
    for _ in range(2):
        calibrator.start(EN)
        view = ended(calibrator)
        assert view["state"] == "failed"
        assert "The driver is gone" in view["html"]


def test_it_waits_for_the_queue(store: Store) -> None:
    store.add_job(RunConfig(name="busy"))
    store.claim_next("test:1")
    with pytest.raises(UserError, match="at work"):
        Calibrator(store, Previewer(store.data_dir)).start(EN)
