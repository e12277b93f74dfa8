"""The presets as buttons: what they say is what the planner found, and where nothing fits they say so."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ui.preset_buttons import Presets, waiting
from ui.preview import Previewer
from ui.texts import texts_of
from vramfit.errors import HardwareError, UserError
from vramfit.hardware.catalogue import machine_with
from vramfit.planning.abilities import SEVERAL_CARDS
from vramfit.planning.cost import COMPARED, SETUP_RAM_GIB
from vramfit.planning.presets import GOALS, preset
from vramfit.units import GIB, format_bytes, format_duration

EN = texts_of("en")


def test_each_button_says_model_length_memory_and_speed(tmp_path: Path) -> None:
    presets = Presets(Previewer(tmp_path))
    shown = presets.view("plan:GeForce RTX 4090", EN)["html"]
    assert shown.count("data-goal") == 4
    for goal in GOALS:
        found = presets.get(goal, "plan:GeForce RTX 4090")
        assert found is not None
        assert found.model.rpartition("/")[2] in shown
        assert f"{found.forecast.plan.max_length:,} tokens" in shown
        assert format_bytes(found.forecast.memory.device_bytes) in shown


@pytest.mark.parametrize(("name", "count"), COMPARED)
def test_several_cards_have_their_presets_with_all_of_them(tmp_path: Path, name: str, count: int) -> None:
    found = Presets(Previewer(tmp_path)).get("biggest model", f"plan:{count} x {name}")
    machine = machine_with(name, count=count, ram_gib=SETUP_RAM_GIB)
    assert found == preset("biggest model", machine, abilities=SEVERAL_CARDS)
    assert found is not None
    assert found.forecast.plan.cards == count


def test_where_nothing_fits_the_button_cannot_be_pressed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previewer = Previewer(tmp_path)
    machine = previewer.machine_of("plan:GeForce RTX 3060 12GB")
    tiny = dataclasses.replace(machine.devices[0], memory_bytes=GIB // 4, free_bytes=GIB // 8)
    monkeypatch.setattr(previewer, "machine_of", lambda card: dataclasses.replace(machine, devices=(tiny,)))
    shown = Presets(previewer).view("auto", EN)["html"]
    assert shown.count("disabled") == 4
    assert "data-goal" not in shown
    assert EN["preset.none"] in shown


def test_what_is_not_there_is_refused(tmp_path: Path) -> None:
    presets = Presets(Previewer(tmp_path))
    with pytest.raises(UserError, match="no preset"):
        presets.get("world peace", "auto")
    with pytest.raises(HardwareError, match="Voodoo"):
        presets.get("quick taste", "plan:Voodoo 2")


def test_the_row_names_its_card_escaped() -> None:
    assert 'data-card="plan:a&quot;b"' in waiting('plan:a"b', EN)


def test_a_run_of_days_says_how_long_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previewer = Previewer(tmp_path)
    machine = previewer.machine_of("plan:GeForce RTX 3060 12GB")
    slow = dataclasses.replace(machine.devices[0], flops={"bf16": 1e11, "fp32": 1e11})
    monkeypatch.setattr(previewer, "machine_of", lambda card: dataclasses.replace(machine, devices=(slow,)))
    shown = Presets(previewer).view("auto", EN)["html"]
    found = Presets(previewer).get("biggest model", "auto")
    assert found is not None
    assert f"{format_duration(found.forecast.seconds)} for 10,000 conversations" in shown
    monkeypatch.undo()
    quick = Presets(previewer).view("plan:GeForce RTX 4090", EN)["html"]
    assert "for 10,000 conversations" not in quick.partition("</button>")[0]  # a taste takes minutes
