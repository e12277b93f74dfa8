"""What machine is this: cards, RAM, disk. Nothing here imports torch; the panel calls it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

DeviceKind = Literal["cuda", "rocm", "xpu", "mps", "cpu"]


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device that can train. Bytes, FLOP/s, bytes/s and watts; a rate of 0 is unknown.

    `name` is the driver's; `identity` is its UUID or PCI address, which never changes with visibility masks;
    `torch_device` is what torch calls it ("cuda:0", "xpu:0", "mps", "cpu"). `rates` says where the rates come from.
    """

    kind: DeviceKind
    name: str
    torch_device: str
    identity: str
    memory_bytes: int
    free_bytes: int
    bf16: bool
    fp16: bool
    fp8: bool = False
    flops: dict[str, float] = field(default_factory=dict)  # dense FLOP/s by compute dtype: fp32, bf16, fp16
    memory_bandwidth: float = 0.0
    link_bandwidth: float = 0.0
    power_watts: float = 0.0
    rates: Literal["catalogue", "measured", "assumed"] = "assumed"


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices (best first; the CPU is always the last), RAM and the disk that holds the data folder, in bytes."""

    devices: tuple[Device, ...]
    ram_bytes: int
    ram_free_bytes: int
    disk_free_bytes: int
    cpu_cores: int
    notes: tuple[str, ...] = ()

    def device(self, name: str) -> Device:
        """The device called `name` ("auto": the first). Raises HardwareError, naming what there is."""
        from vramfit.errors import HardwareError

        if name == "auto":
            return self.devices[0]
        for device in self.devices:
            if device.torch_device == name:
                return device
        there = ", ".join(device.torch_device for device in self.devices)
        raise HardwareError(f"This machine has no device {name!r}, it has: {there}", "Choose one of those, or auto.")
