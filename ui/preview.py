"""What the form needs to know for its estimate: this machine, how much data there is, and the planner's answer.

Kept by the panel process, so that a keystroke costs arithmetic only: the machine is probed in the background, and so is
a data set surveyed, once per version of its files: while that lasts the form goes on without an estimate.
"""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from ui.samples import Samples
from vramfit.config import STARTER_QUESTIONS, STARTER_STORIES, DataChoice, RunConfig
from vramfit.data.prepare import data_paths
from vramfit.data.read import ReadOptions, Survey, guess_workload, survey
from vramfit.errors import ModelError
from vramfit.hardware import catalogue as cards
from vramfit.hardware.devices import Device, Machine, probe
from vramfit.models.architecture import Architecture
from vramfit.models.catalogue import architecture_of, may_be_hub_id
from vramfit.places import cache_folder, is_file, is_folder, typed_path
from vramfit.planning.abilities import ENGINE, SEVERAL_CARDS, Abilities
from vramfit.planning.cost import COMPARED, SETUP_RAM_GIB
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.start import length_limit
from vramfit.starter.corpus import corpus_workload

PLAN_PREFIX: Final = "plan:"
"""A card choice that starts with this names a catalogue card, or `N x` that card, not a device of this machine."""

KEPT_SURVEYS: Final = 32
SURVEYS_AT_ONCE: Final = 2
PATIENCE_S: Final = 0.1
"""An answer waits this long for a survey; the estimate is to follow a change within 200 ms."""
ASKED_S: Final = 10.0
"""A survey that nobody has asked for in this time is not begun. (A page that waits asks about every second.)"""
COUNTED_FILES: Final = 2_000
"""So many files of a folder are looked at to see whether it changed."""

Missing = Literal["data", "model"]


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A forecast and what it is for: `cards` of the device together. `here` is False when it is not in this machine.

    Without a forecast, `missing` says what is not known yet: the data (it is being read) or the model's shape (a hub id
    whose config.json the run will fetch). Such a run can be started; the trainer plans it before step 1.
    """

    forecast: Forecast | None
    device: Device
    here: bool
    missing: Missing | None = None
    cards: int = 1

    @property
    def name(self) -> str:
        """What it is planned for."""
        return setup_name(self.device.name, self.cards)


class _Reading:
    """A survey under way, or its outcome."""

    def __init__(self) -> None:
        self.asked_at = time.monotonic()
        self.done = threading.Event()
        self.found: Survey | None = None
        self.error: Exception | None = None


class Previewer:
    """Forecasts for the form. Thread-safe. An answer waits `patience_s` seconds for a survey, then goes without."""

    def __init__(self, data_dir: Path, *, patience_s: float = PATIENCE_S) -> None:
        self._data_dir, self._patience_s = data_dir, patience_s
        self._lock = threading.Lock()
        self._machine: Machine | None = None
        self._probed_at = 0.0
        self._surveys: OrderedDict[object, _Reading] = OrderedDict()
        self._turn = threading.BoundedSemaphore(SURVEYS_AT_ONCE)
        self.samples = Samples(data_dir, version=version_of)

    def refresh(self) -> None:
        """Probe the machine again (seconds, when a torch process has to be asked)."""
        machine = probe(self._data_dir)
        with self._lock:
            self._machine, self._probed_at = machine, time.monotonic()

    @property
    def age_s(self) -> float:
        """Seconds since the last probe."""
        return time.monotonic() - self._probed_at

    def machine(self) -> Machine:
        """This machine as last probed; probes when it never was."""
        with self._lock:
            known = self._machine
        if known is None:
            self.refresh()
            return self.machine()
        return known

    def machine_of(self, card: str) -> Machine:
        """This machine, or the one that `plan:NAME` stands for; of several devices the chosen one comes first.

        Raises HardwareError for a card or device that is not there.
        """
        if card.startswith(PLAN_PREFIX):
            name, count = planned_setup(card)
            return cards.machine_with(name, count=count, ram_gib=SETUP_RAM_GIB if count > 1 else None)
        machine = self.machine()
        chosen = machine.device(card)
        others = tuple(device for device in machine.devices if device != chosen)
        return dataclasses.replace(machine, devices=(chosen, *others))

    def preview(self, config: RunConfig, card: str) -> Preview:
        """The planner's answer for `config` on `card` (a torch device, "auto", or `plan:NAME`). Raises UserError."""
        here, machine = not card.startswith(PLAN_PREFIX), self.machine_of(card)
        device, count = machine.device(config.device), cards_together(card)
        architecture = _shape_of(config)
        if architecture is None:
            self.workload(config, max_length=0)  # what is wrong with the data is said now
            return Preview(forecast=None, device=device, here=here, missing="model", cards=count)
        workload = self.workload(config, max_length=length_limit(config, architecture))
        if workload is None:
            return Preview(forecast=None, device=device, here=here, missing="data", cards=count)
        forecast = forecast_run(
            config, architecture=architecture, machine=machine, workload=workload, abilities=abilities_for(card)
        )
        return Preview(forecast=forecast, device=device, here=here, cards=count)

    def workload(self, config: RunConfig, *, max_length: int) -> Workload | None:
        """How much there is to train: known for the starter, else from a survey that is kept while the files stay.

        None while the survey is being made. Raises DataError for data that cannot be used.
        """
        choice = config.data
        if choice.paths in ((STARTER_STORIES,), (STARTER_QUESTIONS,)):
            return corpus_workload(choice.paths[0])
        found = self.survey(config)
        if found is None or not max_length:
            return None
        sample = self.samples.known(config)
        return guess_workload(
            found,
            max_length,
            packing=choice.packing,
            eval_share=choice.eval_share,
            measured=sample.lengths if sample else (),
            trained_share=sample.trained_share if sample else None,
        )

    def survey(self, config: RunConfig) -> Survey | None:
        """What the data is, or None while it is being read, which may take many seconds. Raises DataError."""
        return self._survey(config.data)

    def limit(self, config: RunConfig) -> int | None:
        """Tokens a sequence may have; None while the model's shape is not known. Raises ModelError, ConfigError."""
        architecture = _shape_of(config)
        return None if architecture is None else length_limit(config, architecture)

    def _survey(self, choice: DataChoice) -> Survey | None:
        """The survey of these files as they are now, or None while it is being made."""
        options = ReadOptions.of(choice)
        key = (repr(options), tuple(version_of(path) for path in choice.paths))
        with self._lock:
            reading = self._surveys.get(key)
            if reading is None:
                reading = self._surveys[key] = _Reading()
                arguments = (key, reading, choice, options)
                threading.Thread(target=self._read, args=arguments, name="survey", daemon=True).start()
            reading.asked_at = time.monotonic()
            self._surveys.move_to_end(key)
            while len(self._surveys) > KEPT_SURVEYS:
                self._surveys.popitem(last=False)
        if not reading.done.wait(self._patience_s):
            return None
        if reading.error is not None:
            raise reading.error.with_traceback(None)
        return reading.found

    def _read(self, key: object, reading: _Reading, choice: DataChoice, options: ReadOptions) -> None:
        """Make one survey when it is its turn, unless nobody waits for it any more."""
        with self._turn:
            if time.monotonic() - reading.asked_at > ASKED_S:
                with self._lock:
                    self._surveys.pop(key, None)
                return
            try:
                reading.found = survey(data_paths(choice, cache_folder(self._data_dir)), options)
            except Exception as error:
                reading.error = error
            reading.done.set()


def setup_name(card: str, count: int) -> str:
    """How a setup is called, as a choice and to a person."""
    return f"{count} x {card}" if count > 1 else card


def planned_setup(card: str) -> tuple[str, int]:
    """(the card's name, how many of it) of a choice that starts with PLAN_PREFIX. The setups of several cards are those
    of the form's list: what anybody else writes there is a name, which the catalogue then does not know."""
    name = card.removeprefix(PLAN_PREFIX)
    return {setup_name(*setup): setup for setup in COMPARED}.get(name, (name, 1))


def cards_together(card: str) -> int:
    """How many cards a run on this choice is planned for: one, but for the setups of several."""
    return planned_setup(card)[1] if card.startswith(PLAN_PREFIX) else 1


def abilities_for(card: str) -> Abilities:
    """What is planned with: this version's engine, or for a setup of several cards what they would do together."""
    return SEVERAL_CARDS if cards_together(card) > 1 else ENGINE


def _shape_of(config: RunConfig) -> Architecture | None:
    """The model's shape; None for a hub id that is not in the catalogue. Raises ModelError for what is no model."""
    try:
        return architecture_of(config.model)
    except ModelError:
        source = config.model.source
        here = is_folder(typed_path(source)) or is_file(typed_path(source))
        if here or "/" not in source or not may_be_hub_id(source):
            raise
        return None


def version_of(name: str) -> tuple[str, int, int, int]:
    """Changes when the file does, or a file in the folder; zeros when it is not there (the starter's, a hub id), which
    the survey says better."""
    path = typed_path(name)
    states = []
    try:
        states.append(path.stat())
        if is_folder(path):
            for folder, _, names in os.walk(path):
                states += [Path(folder, name).lstat() for name in names[: COUNTED_FILES - len(states)]]
                if len(states) >= COUNTED_FILES:
                    break
    except (OSError, ValueError):  # gone meanwhile, or a name that no file can have
        pass
    latest = max((max(state.st_mtime_ns, state.st_ctime_ns) for state in states), default=0)
    return str(path), len(states), latest, sum(state.st_size for state in states)
