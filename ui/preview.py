"""What the form needs to know for its estimate: this machine, how much data there is, and the planner's answer.

Kept by the panel process, so that a keystroke costs arithmetic only: the machine is probed in the background, a data
set is surveyed once per version of its files.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from vramfit.config import RunConfig
from vramfit.data.read import ReadOptions, Survey, guess_workload, survey
from vramfit.hardware import catalogue as cards
from vramfit.hardware.devices import Device, Machine, probe
from vramfit.models.catalogue import architecture_of
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.planner import forecast_run, length_limit
from vramfit.starter.corpus import corpus_workload

PLAN_PREFIX: Final = "plan:"
"""A card choice that starts with this names a catalogue card, not a device of this machine."""

KEPT_SURVEYS: Final = 32


@dataclass(frozen=True, kw_only=True)
class Preview:
    """A forecast and what it is for. `here` is False when the card is not in this machine."""

    forecast: Forecast
    device: Device
    here: bool


class Previewer:
    """Forecasts for the form. Thread-safe."""

    def __init__(self, data_dir: Path) -> None:
        self._data_dir = data_dir
        self._lock = threading.Lock()
        self._machine: Machine | None = None
        self._probed_at = 0.0
        self._surveys: OrderedDict[object, Survey] = OrderedDict()

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

    def preview(self, config: RunConfig, card: str) -> Preview:
        """The planner's answer for `config` on `card` (a torch device, "auto", or `plan:NAME`). Raises UserError."""
        here = not card.startswith(PLAN_PREFIX)
        machine = self.machine() if here else cards.machine_with(card.removeprefix(PLAN_PREFIX))
        architecture = architecture_of(config.model)
        limit = length_limit(config, architecture)
        forecast = forecast_run(
            config, architecture=architecture, machine=machine, workload=self.workload(config, max_length=limit)
        )
        return Preview(forecast=forecast, device=machine.device(config.device), here=here)

    def workload(self, config: RunConfig, *, max_length: int) -> Workload:
        """How much there is to train: known for the starter, else from a survey that is kept while the files stay."""
        starter = [path for path in config.data.paths if path.startswith("starter:")]
        if starter:
            return corpus_workload(starter[0])
        choice = config.data
        found = self._survey([Path(path).expanduser() for path in choice.paths], ReadOptions.of(choice))
        return guess_workload(found, max_length, packing=choice.packing, eval_share=choice.eval_share)

    def _survey(self, paths: list[Path], options: ReadOptions) -> Survey:
        """A survey costs seconds for a large file; it is made once per version of the files and way of reading them."""
        key = (repr(options), tuple(_version(path) for path in paths))
        with self._lock:
            if key in self._surveys:
                self._surveys.move_to_end(key)
                return self._surveys[key]
        found = survey(paths, options)
        with self._lock:
            self._surveys[key] = found
            while len(self._surveys) > KEPT_SURVEYS:
                self._surveys.popitem(last=False)
        return found


def _version(path: Path) -> tuple[str, int, int]:
    """Changes when the file or folder does; (path, 0, 0) when it is not there, which the survey will say better."""
    try:
        state = path.stat()
    except OSError:
        return str(path), 0, 0
    return str(path), state.st_mtime_ns, state.st_size
