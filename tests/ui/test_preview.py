"""Forecasts for the form: quick, for this machine or another, and a data set read once per version of its file."""

from __future__ import annotations

from pathlib import Path

import pytest

from ui import preview
from ui.preview import PLAN_PREFIX, Previewer
from vramfit.config import RunConfig
from vramfit.errors import DataError, HardwareError, ModelError
from vramfit.hardware.catalogue import cards
from vramfit.starter.recipe import starter_run


@pytest.fixture(scope="module")
def previewer(tmp_path_factory: pytest.TempPathFactory) -> Previewer:
    return Previewer(tmp_path_factory.mktemp("data"))


def test_the_starter_fits_this_machine(previewer: Previewer) -> None:
    found = previewer.preview(starter_run(), "auto")
    assert found.here
    assert found.forecast.fits
    assert found.forecast.steps == starter_run().schedule.max_steps


def test_another_card_can_be_planned_for(previewer: Previewer) -> None:
    card = cards()[0]
    found = previewer.preview(starter_run(), PLAN_PREFIX + card.name)
    assert not found.here
    assert found.device.name == card.name


def test_a_card_that_no_catalogue_has(previewer: Previewer) -> None:
    with pytest.raises(HardwareError):
        previewer.preview(starter_run(), PLAN_PREFIX + "RTX 9999")


def test_unknown_models_and_missing_files_are_told_apart(previewer: Previewer, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        previewer.preview(RunConfig.parse({"method": "lora", "model": {"source": "nobody/nothing"}}), "auto")
    with pytest.raises(DataError):
        previewer.preview(RunConfig.parse({"data": {"paths": [str(tmp_path / "none.jsonl")]}}), "auto")


def test_a_file_is_surveyed_once_until_it_changes(
    previewer: Previewer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    surveyed = []
    monkeypatch.setattr(preview, "survey", lambda *arguments: (surveyed.append(1), survey(*arguments))[1])
    survey = preview.__dict__["guess_workload"].__globals__["survey"]
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "one two three"}\n' * 20, encoding="utf-8")
    config = RunConfig.parse({"data": {"paths": [str(file)]}})
    few = previewer.workload(config, max_length=64)
    assert previewer.workload(config, max_length=64) == few
    assert len(surveyed) == 1
    file.write_text('{"text": "one two three"}\n' * 400, encoding="utf-8")
    assert previewer.workload(config, max_length=64).sequences > few.sequences
    assert len(surveyed) == 2
