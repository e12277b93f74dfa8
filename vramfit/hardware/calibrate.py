"""What this machine reaches, measured in about ten seconds and kept in the data folder: python -m vramfit calibrate.

A child process (`calibrate_worker.py`) imports torch and measures; the panel never does. It writes one JSON object a
line: {"share": 0.4, "what": "bf16 products"} while it works, then {"measured": {...}}, or {"error": "..."}.

What is kept is named by the device, its driver and torch's version: any of them changed, it is measured anew.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vramfit import scratch
from vramfit.errors import HardwareError
from vramfit.hardware.devices import Device, ProductRate, TorchBuild, torch_build
from vramfit.json_text import load_json
from vramfit.sentences import say

log = logging.getLogger(__name__)

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and what is measured next."""

_MOST_RATE: Final = 1e18
"""FLOP/s or bytes/s: a thousand times the fastest card's."""

PATIENCE_S: Final = 180.0
"""A card's first kernels compile and its clocks wake; a calibration still under way after this long hangs."""


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """Measured rates, in bytes/s and FLOP/s; 0 where a rate could not be measured.

    `products` by shape and dtype, `memory` of the device, `to_device` and `from_device` of pinned RAM over the link,
    `ram` of one copy in RAM (read and written), `disk_read` and `disk_write` of the data folder's disk past the cache,
    `launch_seconds` of one small operation with its autograd. `day` it was measured.
    """

    products: tuple[ProductRate, ...]
    memory: float
    to_device: float
    from_device: float
    ram: float
    disk_read: float
    disk_write: float
    launch_seconds: float
    day: str

    @property
    def link(self) -> float:
        """The slower direction: weights go one way, gradients the other."""
        return min(self.to_device, self.from_device)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Calibration:
        """Raises ValueError naming what no measurement can be, or what is missing."""
        try:
            products = tuple(ProductRate(**row) for row in values["products"])
            found = cls(**{**values, "products": products})
        except (KeyError, TypeError) as error:
            raise ValueError(f"it lacks a figure or has one too many ({error})") from None
        for name, value in dataclasses.asdict(found).items():
            if name not in ("products", "day") and not _is_rate(value):
                raise ValueError(f"{name} is {value!r}, no number from 0 to {_MOST_RATE:g}")
        for rate in products:
            if not (
                isinstance(rate.dtype, str) and all(_is_rate(n) and n for n in (rate.rows, rate.width, rate.flops))
            ):
                raise ValueError(f"a product is {dataclasses.asdict(rate)}, not numbers above 0")
        return found


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= _MOST_RATE


def calibrate(
    device: Device,
    data_dir: Path,
    *,
    progress: Progress | None = None,
    tiny: bool = False,
    command: tuple[str, ...] | None = None,
) -> Calibration:
    """Measure `device` and the disk of `data_dir`, and keep the result there. `tiny` sizes are for tests.

    Raises HardwareError when the measuring process fails, with its own words.
    """
    data_dir.mkdir(parents=True, exist_ok=True)
    order = json.dumps(
        {
            "device": device.torch_device,
            "dtypes": ["fp32", *(name for name in ("bf16", "fp16") if getattr(device, name))],
            "folder": str(data_dir),
            "tiny": tiny,
        }
    )
    measured = _ask_worker(command or (sys.executable, "-m", "vramfit.hardware.calibrate_worker"), order, progress)
    _keep(data_dir, key(device), measured)
    return measured


def _ask_worker(command: tuple[str, ...], order: str, progress: Progress | None) -> Calibration:
    """Runs the worker, hands its progress on and returns what it measured."""
    found, problem = None, ""
    with (
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints,  # a pipe nobody reads fills up
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            cwd=Path(__file__).parent.parent.parent,
            encoding="utf-8",
            env={**os.environ, "PYTHONUTF8": "1"},
        ) as worker,
        _ended_after(worker, PATIENCE_S),
    ):
        for said in _exchange(worker, order):
            if "share" in said and progress is not None:
                progress(float(said["share"]), str(said["what"]))
            elif "measured" in said:
                found, problem = _understood(said["measured"])
            problem = str(said.get("error", problem))
        worker.wait()
        complaints.seek(0)
        last = (problem or complaints.read()).strip().splitlines()
    if found is None:
        why = last[-1] if last else say("hardware.no_reason")
        raise HardwareError(say("hardware.not_measured", why=why), say("hardware.measure_again"))
    return found


def _understood(values: Any) -> tuple[Calibration | None, str]:
    """What a worker measured, or why that is no measurement."""
    try:
        return Calibration.from_json(values), ""
    except ValueError as error:
        return None, f"what was measured cannot be: {error}"


def _exchange(worker: subprocess.Popen[str], order: str) -> Iterator[dict[str, Any]]:
    """Gives the order and yields what comes back, line by line."""
    if worker.stdin is None or worker.stdout is None:
        raise AssertionError("the worker is started with pipes")
    with contextlib.suppress(BrokenPipeError, OSError):  # it ended before it read; its last words say why
        worker.stdin.write(order + "\n")
        worker.stdin.close()
    for line in worker.stdout:
        yield _parsed(line)


@contextlib.contextmanager
def _ended_after(worker: subprocess.Popen[str], seconds: float) -> Iterator[None]:
    """The worker is gone when this ends, or when it has taken `seconds`: a driver that hangs answers nobody."""
    timer = threading.Timer(seconds, worker.kill)
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        worker.kill()


def _parsed(line: str) -> dict[str, Any]:
    """One line of the worker; what libraries print in between is nothing to us."""
    try:
        said = json.loads(line)
    except ValueError:
        return {}
    return said if isinstance(said, dict) else {}


# --- kept ------------------------------------------------------------------------------------------------------------


def key(device: Device, *, build: TorchBuild | None = None) -> str:
    """What decides a measurement: the device, its driver, torch, and how many cores a CPU has."""
    build = build or torch_build()
    torch = "none" if build is None else build.version
    return " | ".join((device.kind, device.name, device.identity, _driver(device), torch))


def _driver(device: Device) -> str:
    if device.kind != "cuda":
        return ""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        version = nvml.nvmlSystemGetDriverVersion()
    except Exception:  # no driver that answers: then nothing was measured on it either
        return ""
    return version.decode() if isinstance(version, bytes) else str(version)


def kept_in(data_dir: Path) -> Path:
    """The file all calibrations of a data folder are kept in."""
    return data_dir / "cache" / "calibration.json"


def saved(device: Device, data_dir: Path) -> Calibration | None:
    """What was measured of `device` with its present driver and torch; None when nothing was. What is kept and cannot
    have been measured is left alone, and the log says so."""
    every = _all(data_dir)
    values = every.get(key(device)) if every else None
    if values is None:
        return None
    try:
        return Calibration.from_json(values)
    except ValueError as error:
        log.warning(
            "The calibration of %s in %s is not used: %s. The catalogue's rates are, until it is measured again "
            "(python -m vramfit calibrate).",
            device.name,
            kept_in(data_dir),
            error,
        )
        return None


def _all(data_dir: Path) -> dict[str, Any]:
    try:
        values = load_json(kept_in(data_dir).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def _keep(data_dir: Path, name: str, measured: Calibration) -> None:
    place = kept_in(data_dir)
    place.parent.mkdir(parents=True, exist_ok=True)
    beside = scratch.beside(place)
    beside.write_text(json.dumps({**_all(data_dir), name: measured.to_json()}, indent=1), encoding="utf-8")
    beside.replace(place)


def with_measured_rates(device: Device, data_dir: Path) -> Device:
    """`device` with what was measured of it; as it is when nothing was. Rates that could not be measured stay."""
    found = saved(device, data_dir)
    if found is None:
        return device
    best: dict[str, float] = {}
    for rate in found.products:
        best[rate.dtype] = max(rate.flops, best.get(rate.dtype, 0.0))
    # The data sheet's dense rate stays where there is one: utilisation is told against it.
    return dataclasses.replace(
        device,
        flops={**best, **device.flops} if device.kind != "cpu" else {**device.flops, **best},
        memory_bandwidth=found.memory or device.memory_bandwidth,
        link_bandwidth=found.link or device.link_bandwidth,
        ram_bandwidth=found.ram,
        disk_read=found.disk_read,
        disk_write=found.disk_write,
        launch_seconds=found.launch_seconds,
        products=found.products,
        rates="measured",
    )
