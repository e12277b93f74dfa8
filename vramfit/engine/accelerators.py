"""What each kind of device can do, in one table: the only place in the engine that knows a vendor.

The rest asks `backend_of(device)` and the functions below with the string or torch.device it has ("cuda:0", "xpu:0",
"mps", "cpu"). AMD's cards are "cuda" to torch and a row of their own here. Importing this file does not import torch:
`prepare_allocator` has to run before torch does.
"""

from __future__ import annotations

import dataclasses
import os
import platform
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vramfit.hardware.devices import torch_build

if TYPE_CHECKING:
    import torch

DeviceLike: TypeAlias = "str | torch.device"
Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Backend:
    """What torch offers on a kind of device, whatever the model of the card.

    `kind` is torch's word for it and `name` ours. `autocast` are the formats it casts to; `pinned` whether copies from
    page-locked memory run beside computing, `paged` whether its driver can move memory to RAM when it runs short, and
    `streams` whether there are streams for copies; `statistics` whether its allocator counts allocated and reserved
    bytes, `peaks` whether it keeps their highest, `caches` whether it holds freed memory back; `expandable` whether its
    segments can grow (on Linux; see `prepare_allocator`). `fused` is whether optimizers have one kernel for all
    parameters, `flash` whether attention has one that never makes the scores, `graphs` whether a step can be recorded
    and replayed.
    """

    name: str
    kind: str
    autocast: tuple[Format, ...] = ()
    pinned: bool = False
    paged: bool = False
    streams: bool = False
    statistics: bool = False
    peaks: bool = False
    caches: bool = False
    expandable: bool = False
    fused: bool = False
    flash: bool = False
    graphs: bool = False


_CARD: Final = Backend(
    name="cuda",
    kind="cuda",
    autocast=("bf16", "fp16"),
    pinned=True,
    paged=True,
    streams=True,
    statistics=True,
    peaks=True,
    caches=True,
    expandable=True,
    fused=True,
    flash=True,
    graphs=True,
)

BACKENDS: Final[dict[str, Backend]] = {
    backend.name: backend
    for backend in (
        _CARD,
        dataclasses.replace(_CARD, name="rocm"),
        dataclasses.replace(_CARD, name="xpu", kind="xpu", graphs=False, paged=False),
        Backend(
            name="mps", kind="mps", autocast=("bf16", "fp16"), statistics=True, caches=True, fused=True
        ),  # its memory is the machine's own, so nothing is copied to it
        Backend(name="cpu", kind="cpu", autocast=("bf16", "fp16"), fused=True, flash=True),
    )
}


OUT_OF_MEMORY_WORDS: Final = (
    "out of memory",  # what drivers and most allocators say
    "out_of_device_memory",  # Level Zero
    "alloc_failed",  # cuBLAS, cuDNN
    "can't allocate memory",  # torch on the CPU: a plain RuntimeError
    "not enough memory",
    "cannot allocate memory",
    "bad allocation",
)
"""Parts of messages, in small letters, of errors that are not of torch's class for it but mean the same."""


def backend_of(device: DeviceLike) -> Backend:
    """The row of a device, which need not be in this machine. A kind that is not in the table can nothing special."""
    kind = _kind(device)
    if kind == "cuda":
        import torch

        return BACKENDS["rocm" if torch.version.hip else "cuda"]
    return BACKENDS.get(kind, Backend(name=kind, kind=kind))


def has_hardware(device: DeviceLike, number: Format) -> bool:
    """Whether this device computes products in `number` faster than in fp32 (fp32 itself: always). It must be here."""
    import torch

    match backend_of(device).name, number:
        case _, "fp32":
            return True
        case "cuda", "bf16":
            # Cards before Ampere report emulated bf16, which is slower than fp32: count only hardware.
            return bool(torch.cuda.is_bf16_supported(including_emulation=False))
        case "cuda", "tf32":
            return torch.cuda.get_device_capability(device) >= (8, 0)
        case "cuda", "fp8":
            return torch.cuda.get_device_capability(device) >= (8, 9)
        case "rocm", "bf16":
            return bool(torch.cuda.is_bf16_supported())
        case "rocm", "fp8":  # CDNA 3 and RDNA 4
            return _amd_architecture(device).startswith(("gfx94", "gfx95", "gfx12"))
        case "xpu", "bf16":
            return bool(torch.xpu.is_bf16_supported())
        case (("cuda" | "rocm" | "xpu" | "mps"), "fp16"):
            return True
        case "mps", "bf16":
            return bool(torch.backends.mps.is_macos_or_newer(14, 0))
        case "cpu", "bf16":
            return _cpu_has("amx_bf16") or _cpu_has("avx512_bf16")
        case "cpu", "fp16":
            return _cpu_has("amx_fp16")
    return False


def product_settings() -> Any:
    """torch's newer interface to what products of fp32 numbers are computed in: its `fp32_precision` is "ieee" or
    "tf32". The older one, `torch.set_float32_matmul_precision`, names no vendor."""
    import torch

    return torch.backends.cuda.matmul


@dataclass(frozen=True, kw_only=True)
class DeviceMemory:
    """Bytes now: `allocated` in tensors and `reserved` by the allocator, both this process's; `free` for anyone, of
    `total`. A CPU counts no tensors and reserves nothing: 0."""

    allocated: int
    reserved: int
    free: int
    total: int

    @property
    def unused(self) -> int:
        """What the allocator holds and no tensor has: its cache, and gaps too small to be used."""
        return max(0, self.reserved - self.allocated)


def memory_of(device: DeviceLike) -> DeviceMemory:
    """The memory of a device that is here. For the CPU it is the machine's RAM."""
    import torch

    kind = _kind(device)
    if not backend_of(device).statistics:
        import psutil

        ram = psutil.virtual_memory()
        return DeviceMemory(allocated=0, reserved=0, free=ram.available, total=ram.total)
    if kind == "mps":
        reserved, total = torch.mps.driver_allocated_memory(), torch.mps.recommended_max_memory()
        return DeviceMemory(
            allocated=torch.mps.current_allocated_memory(),
            reserved=reserved,
            free=max(0, total - reserved),
            total=total,
        )
    index = _index(device)
    free, total = _free_and_total(kind, index)
    return DeviceMemory(
        allocated=torch.accelerator.memory_allocated(index),
        reserved=torch.accelerator.memory_reserved(index),
        free=free,
        total=total,
    )


def peak_of(device: DeviceLike) -> tuple[int, int]:
    """(allocated, reserved) bytes at their highest since `reset_peak`; now, where no peak is kept; 0 on a CPU."""
    import torch

    if not backend_of(device).peaks:
        now = memory_of(device)
        return now.allocated, now.reserved
    index = _index(device)
    return torch.accelerator.max_memory_allocated(index), torch.accelerator.max_memory_reserved(index)


def reset_peak(device: DeviceLike) -> None:
    """From now on `peak_of` counts anew."""
    import torch

    if backend_of(device).peaks:
        torch.accelerator.reset_peak_memory_stats(_index(device))


def empty_cache(device: DeviceLike) -> None:
    """Give back what the allocator holds and no tensor needs. Does nothing where it holds nothing."""
    import torch

    if _kind(device) == "mps":
        torch.mps.empty_cache()
    elif backend_of(device).caches:
        torch.accelerator.empty_cache()


def synchronize(device: DeviceLike) -> None:
    """Wait until the device has done all it was given."""
    import torch

    kind = _kind(device)
    if kind == "mps":
        torch.mps.synchronize()
    elif kind != "cpu":
        torch.accelerator.synchronize(_index(device))


def generator_state(device: DeviceLike) -> torch.Tensor | None:
    """The state of the device's own random generator, uint8 on the CPU; None where it has none."""
    import torch

    kind = _kind(device)
    if kind == "cpu":
        return None
    state: torch.Tensor = (
        torch.mps.get_rng_state() if kind == "mps" else torch.get_device_module(kind).get_rng_state(device)
    )
    return state


def set_generator_state(device: DeviceLike, state: torch.Tensor) -> None:
    """Put `generator_state`'s result back."""
    import torch

    kind = _kind(device)
    if kind == "mps":
        torch.mps.set_rng_state(state.cpu())
    elif kind != "cpu":
        torch.get_device_module(kind).set_rng_state(state.cpu(), device)


# ---- the allocator's settings, before torch is imported --------------------------------------------------------------

_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
"""Where torch reads them: the first is its own word today, the others are older ones that still work."""


def prepare_allocator(environment: MutableMapping[str, str] = os.environ) -> bool:
    """Let the allocator's segments grow, which keeps freed memory in one piece, and give page-locked RAM out as it is
    asked for, where it would be rounded up to the next power of two (a block of 1.2 GiB to 2). Returns whether anything
    was set.

    Call it before torch is imported, which reads the variable once. A user's own setting is never touched: torch
    parses the variable as a whole, so adding to it could undo a part of it.
    """
    if any(environment.get(name) for name in _SETTINGS):
        return False
    wanted = [setting for setting, can in ((_GROWING, _segments_can_grow), (_UNROUNDED, _rounds_locked_ram)) if can()]
    if wanted:
        environment[_SETTINGS[0]] = ",".join(wanted)
    return bool(wanted)


_GROWING: Final = "expandable_segments:True"
_UNROUNDED: Final = "pinned_max_round_threshold_mb:1"
"""What is larger than so many MiB is not rounded up."""


def _rounds_locked_ram() -> bool:
    """Whether torch has a card to lock pages for, and can be told not to round."""
    build = torch_build()
    return build is not None and bool(build.cuda or build.hip or build.xpu) and _numbers(build.version) >= (2, 13)


def _segments_can_grow() -> bool:
    """Not where the system is another than Linux, under WSL (its driver refuses the calls: pytorch issue 192330), or in
    a build without a card."""
    if sys.platform != "linux" or "microsoft" in platform.release().lower():
        return False
    build = torch_build()
    if build is None or build.cuda:
        return build is not None
    version = _numbers(build.version)
    if build.hip:  # pytorch pull request 177974, gated on ROCm 7
        return version >= (2, 13) and _numbers(build.hip) >= (7, 0)
    return bool(build.xpu) and version >= (2, 10)


def _numbers(version: str) -> tuple[int, ...]:
    """The first two numbers of a version: (2, 13) of "2.13.0+cpu"."""
    parts = version.split(".")[:2]
    return tuple(int(part) for part in parts if part.isdigit())


def _free_and_total(kind: str, index: int) -> tuple[int, int]:
    import torch

    asked = getattr(torch.accelerator, "get_memory_info", None)  # not in every torch >= 2.11
    free, total = asked(index) if asked else torch.get_device_module(kind).mem_get_info(index)
    return int(free), int(total)


def _kind(device: DeviceLike) -> str:
    return str(device).partition(":")[0]


def _index(device: DeviceLike) -> int:
    return int(str(device).partition(":")[2] or 0)


def _amd_architecture(device: DeviceLike) -> str:
    import torch

    return str(getattr(torch.cuda.get_device_properties(device), "gcnArchName", ""))


def _cpu_has(feature: str) -> bool:
    import torch

    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()  # newer torch only
    return bool(known.get(feature))
