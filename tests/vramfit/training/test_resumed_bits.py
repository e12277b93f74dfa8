"""A resumed run keeps the bits of its optimizer's states where they fit, and converts them where they do not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.training import loop
from vramfit.training.loop import train

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]


def begun(config: RunConfig, folder: Path, cache: Path, heard: Any) -> None:
    train(config, folder=folder, cache=cache, recorder=heard, should_stop=lambda: len(heard.metrics) >= 3)


def test_the_bits_stay_when_nobody_asks_for_others(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    first, second = kept(), kept()
    begun(small_run(memory={"optimizer_bits": "8"}), tmp_path, cache, first)
    train(small_run(), folder=tmp_path, cache=cache, recorder=second, resume=True)
    assert second.forecasts[0].plan.optimizer_bits == 8
    assert not [event for event in second.events if "converted" in event.message]
    assert second.metrics[-1].step == 7


def test_bits_that_no_longer_fit_are_converted_and_told(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = kept(), kept()
    begun(small_run(memory={"optimizer_bits": "8"}), tmp_path, cache, first)
    real = loop.forecast_run

    def without_room(config: RunConfig, **about: Any) -> Any:
        if config.memory.optimizer_bits == "8":
            raise WontFit("8 bits have no room", needed_bytes=2, available_bytes=1)
        return real(config, **about)

    monkeypatch.setattr(loop, "forecast_run", without_room)
    train(small_run(), folder=tmp_path, cache=cache, recorder=second, resume=True)
    assert second.forecasts[0].plan.optimizer_bits == 32
    (told,) = [event.message for event in second.events if "converted" in event.message]
    assert told.startswith("The optimizer's states were converted from 8 to 32 bits")
    assert second.metrics[0].step == 4 and second.metrics[-1].step == 7
