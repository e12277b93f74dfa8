"""One reading of the machine while a run is on: what the driver and the system show. Cheap, and never raises."""

from __future__ import annotations

import time
from typing import Any, Final

import psutil

from vramfit.hardware.devices import Device, _ask, import_nvml
from vramfit.training.metrics import Telemetry

_HOT: Final = 0x20 | 0x40
"""The driver's bits for clocks held down by heat: nvmlClocksEventReason{Sw,Hw}ThermalSlowdown."""


class Sampler:
    """Reads one device's sensors. A sensor that is missing or lost reads None; the other ones go on."""

    def __init__(self, device: Device, *, nvml: Any = None) -> None:
        self._nvml: Any = None
        self._handle: Any = None
        self._process: psutil.Process | None = None
        if device.kind == "cuda":
            self._open(device.identity, nvml if nvml is not None else import_nvml())

    def _open(self, identity: str, nvml: Any) -> None:
        """By UUID, which no visibility mask changes."""
        if nvml is None:
            return
        try:
            nvml.nvmlInit()
            self._handle = nvml.nvmlDeviceGetHandleByUUID(identity)
            self._nvml = nvml
        except nvml.NVMLError:
            self._handle = None

    def read(self, pid: int) -> Telemetry:
        """The device, and the resident set and CPU use (share of all cores, 0..1) of process `pid`."""
        resident, cores = self._process_use(pid)
        memory = self._sensor("nvmlDeviceGetMemoryInfo")
        rates = self._sensor("nvmlDeviceGetUtilizationRates")
        power = self._sensor("nvmlDeviceGetPowerUsage")
        temperature = self._sensor("nvmlDeviceGetTemperature", 0)  # 0: the chip's own sensor
        return Telemetry(
            time=time.time(),
            device_bytes=int(memory.used) if memory is not None else None,
            host_bytes=resident,
            utilisation=rates.gpu / 100 if rates is not None else None,
            power_watts=power / 1000 if power is not None else None,
            temperature_c=float(temperature) if temperature is not None else None,
            cpu_utilisation=cores,
            slowed_by_heat=self._slowed_by_heat(),
        )

    def _slowed_by_heat(self) -> bool | None:
        reasons = self._sensor("nvmlDeviceGetCurrentClocksEventReasons")
        if reasons is None:  # what it is called in drivers before 535
            reasons = self._sensor("nvmlDeviceGetCurrentClocksThrottleReasons")
        return None if reasons is None else bool(reasons & _HOT)

    def _sensor(self, function: str, *arguments: Any) -> Any:
        return None if self._handle is None else _ask(self._nvml, function, self._handle, *arguments)

    def _process_use(self, pid: int) -> tuple[int, float | None]:
        """Bytes resident and share of all cores since the last reading (None at the first one)."""
        try:
            first = self._process is None or self._process.pid != pid
            if first:
                self._process = psutil.Process(pid)
            process = self._process
            if process is None:
                return 0, None
            with process.oneshot():
                used = process.cpu_percent() / 100 / (psutil.cpu_count() or 1)
                return process.memory_info().rss, None if first else used
        except psutil.Error:
            self._process = None
            return 0, None
