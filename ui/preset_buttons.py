"""One click per goal: the presets of the card that the form names, as buttons that say what they would set."""

from __future__ import annotations

import html
import threading
from collections import OrderedDict
from typing import Any, Final, cast

from ui.preview import Previewer, abilities_for
from ui.texts import Texts
from vramfit.errors import UserError
from vramfit.hardware.devices import Machine
from vramfit.planning.presets import GOALS, Goal, Preset, preset
from vramfit.units import format_bytes, format_count, format_duration

KEPT: Final = 128


class Presets:
    """The presets of machines, worked out once each (a tenth of a second). Thread-safe."""

    def __init__(self, previewer: Previewer) -> None:
        self._previewer = previewer
        self._lock = threading.Lock()
        self._kept: OrderedDict[tuple[str, str], Preset | None] = OrderedDict()

    def get(self, goal: str, card: str) -> Preset | None:
        """The preset of a goal on the form's card (`auto`, a device, `plan:NAME`). Raises HardwareError, UserError."""
        if goal not in GOALS:
            raise UserError(f"There is no preset {goal[:40]!r}", "Reload the page.")
        machine = self._machine(card)
        abilities = abilities_for(card)
        key = (goal, repr((machine, abilities)))
        with self._lock:
            if key not in self._kept:
                self._kept[key] = preset(cast(Goal, goal), machine, abilities=abilities)
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)
            return self._kept[key]

    def view(self, card: str, texts: Texts) -> dict[str, Any]:
        """The buttons as HTML."""
        return {"html": "".join(_button(goal, self.get(goal, card), texts) for goal in GOALS)}

    def _machine(self, card: str) -> Machine:
        return self._previewer.machine_of(card)


def waiting(card: str, texts: Texts) -> str:
    """The row of buttons before their figures are known; assets/panel.js asks for them by the card's name."""
    buttons = "".join(_plain(goal, "…", texts) for goal in GOALS)
    return f'<div class="vf-presets" data-card="{html.escape(card, quote=True)}">{buttons}</div>'


def _button(goal: Goal, found: Preset | None, texts: Texts) -> str:
    if found is None:
        return _plain(goal, texts["preset.none"], texts)
    forecast = found.forecast
    said = texts["preset.says"].format(
        model=found.model.rpartition("/")[2],
        method=texts[f"method.{forecast.plan.method}"],
        length=f"{forecast.plan.max_length:,}",
    )
    figures = texts["preset.figures"].format(
        size=format_bytes(forecast.memory.device_bytes),
        speed=format_count(forecast.speed.tokens_per_s)
        if forecast.speed.tokens_per_s >= 10
        else f"{forecast.speed.tokens_per_s:.2g}",
    )
    if found.takes_long:
        figures = texts["preset.long"].format(figures=figures, time=format_duration(forecast.seconds))
    title, hint = texts[f"preset.{_key(goal)}"], texts[f"preset.{_key(goal)}.help"]
    return (
        f'<button type="button" data-goal="{goal}" title="{_esc(hint)}"><b>{_esc(title)}</b>'
        f"<span>{_esc(said)}</span><span>{_esc(figures)}</span></button>"
    )


def _plain(goal: Goal, said: str, texts: Texts) -> str:
    title, hint = texts[f"preset.{_key(goal)}"], texts[f"preset.{_key(goal)}.help"]
    return f'<button type="button" disabled title="{_esc(hint)}"><b>{_esc(title)}</b><span>{_esc(said)}</span></button>'


def _key(goal: str) -> str:
    return goal.replace(" ", "_")


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
