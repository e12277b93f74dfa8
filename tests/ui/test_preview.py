"""Forecasts for the form: quick, for this machine or another, and a data set read once per version of its file."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from ui import preview
from ui.preview import PLAN_PREFIX, Previewer
from vramfit.config import STARTER_STORIES, RunConfig
from vramfit.errors import DataError, HardwareError, ModelError
from vramfit.hardware.catalogue import cards
from vramfit.starter.recipe import starter_run


@pytest.fixture(scope="module")
def previewer(tmp_path_factory: pytest.TempPathFactory) -> Previewer:
    return Previewer(tmp_path_factory.mktemp("data"), patience_s=30)


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
        previewer.preview(RunConfig.parse({"method": "lora", "model": {"source": "no/such/folder"}}), "auto")
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


def test_the_starter_beside_a_file_counts_both(previewer: Previewer, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "one two three"}\n' * 50, encoding="utf-8")
    alone = previewer.workload(
        RunConfig.parse({"data": {"paths": [STARTER_STORIES], "packing": False}}), max_length=224
    )
    both = RunConfig.parse({"data": {"paths": [STARTER_STORIES, str(file)], "packing": False, "eval_share": 0}})
    assert previewer.workload(both, max_length=224).sequences == alone.sequences + 50


@pytest.mark.parametrize("source", ["nobody/nothing", "Some-Org_1/model.v2"])
def test_a_hub_id_that_no_catalogue_has_has_no_forecast_yet(previewer: Previewer, source: str) -> None:
    found = previewer.preview(RunConfig.parse({"method": "lora", "model": {"source": source}}), "auto")
    assert found.forecast is None
    assert found.missing == "model"


@pytest.mark.parametrize(
    "source", ["nothing-at-all", "a/b/c", "./a/b", "~nobody/x", "C:\\models", "a b/c", "x" * 5000, "/" + "x" * 300]
)
def test_what_is_no_hub_id_is_an_error(previewer: Previewer, source: str) -> None:
    with pytest.raises(ModelError) as caught:
        previewer.preview(RunConfig.parse({"method": "lora", "model": {"source": source}}), "auto")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("path", ["x" * 5000, "~nobody/x.txt", "a\0b"])
def test_a_path_that_no_file_can_have_is_an_error_of_the_data(previewer: Previewer, path: str) -> None:
    with pytest.raises(DataError) as caught:
        previewer.preview(RunConfig.parse({"data": {"paths": [path]}}), "auto")
    assert len(str(caught.value)) < 500


def test_a_long_survey_does_not_hold_up_the_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, real = threading.Event(), preview.survey
    monkeypatch.setattr(preview, "survey", lambda *arguments: (go_on.wait(30), real(*arguments))[1])
    file = tmp_path / "large.jsonl"
    file.write_text('{"text": "one two three"}\n' * 20, encoding="utf-8")
    config = RunConfig.parse({"data": {"paths": [str(file)]}})
    hasty = Previewer(tmp_path, patience_s=0.01)
    found = hasty.preview(config, "auto")
    assert (found.forecast, found.missing) == (None, "data")
    assert hasty.preview(starter_run(), "auto").forecast is not None  # other wishes go on meanwhile
    go_on.set()
    deadline = time.monotonic() + 30
    while found.forecast is None and time.monotonic() < deadline:
        found = hasty.preview(config, "auto")
    assert found.forecast is not None


def test_a_changed_file_in_a_folder_is_seen(previewer: Previewer, tmp_path: Path) -> None:
    file = tmp_path / "rows" / "mine.jsonl"
    file.parent.mkdir()
    config = RunConfig.parse({"data": {"paths": [str(file.parent)]}})
    counts = []
    for rows in (20, 400):
        file.write_text('{"text": "one two three"}\n' * rows, encoding="utf-8")
        counts.append(previewer.workload(config, max_length=64).sequences)
    assert counts[0] < counts[1]
