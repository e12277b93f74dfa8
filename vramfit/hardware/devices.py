"""What machine is this: cards, RAM, disk. Nothing here imports torch; the panel calls it.

NVIDIA cards are asked through their driver's library (NVML), other cards through torch, and only when the installed
torch is built for them. A child process asks, with a time limit: drivers may hang, or end whoever asks them. The CPU is
always there.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from vramfit.hardware.processor import this_processor

DeviceKind = Literal["cuda", "rocm", "xpu", "mps", "cpu"]

_DRIVER_SECONDS = 20.0
_TORCH_SECONDS = 40.0
_KILLED_SECONDS = 2.0
_stuck: list[subprocess.Popen[str]] = []  # children inside a driver from which even KILL does not bring them back
_stuck_lock = threading.Lock()


@dataclass(frozen=True, kw_only=True)
class ProductRate:
    """FLOP/s that a product of `rows` x `width` by `width` x `width` was measured to reach in `dtype`."""

    dtype: str
    rows: int
    width: int
    flops: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One device that can train. Bytes, FLOP/s, bytes/s and watts; a rate of 0 is unknown.

    `name` is the driver's; `identity` is its UUID or PCI address, which never changes with visibility masks;
    `torch_device` is what torch calls it ("cuda:0", "xpu:0", "mps", "cpu"). `rates` says where the rates come from.

    `reach` is the share of the dense rate that the largest products reach, `attention_reach` what attention kernels
    reach of that at great length, `units` how many processors share a product's tiles (0: unknown), `peer_bandwidth`
    one direction between two such cards (0: they go through RAM). `ram_bandwidth`, `disk_read` and `disk_write` are of
    the machine it is in, `launch_seconds` what a kernel costs its host, `products` what shapes of products were
    measured here. `rates_note`: what assumed rates were taken from, as a sentence.
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
    reach: float = 0.75
    attention_reach: float = 0.84
    units: int = 0
    peer_bandwidth: float = 0.0
    ram_bandwidth: float = 0.0
    disk_read: float = 0.0
    disk_write: float = 0.0
    launch_seconds: float = 0.0
    products: tuple[ProductRate, ...] = ()
    rates: Literal["catalogue", "measured", "assumed"] = "assumed"
    rates_note: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices (best first; the CPU is always the last), RAM and the disk that holds the data folder, in bytes.

    `silent`: a driver gave no answer, so that cards may be there of which nothing is known.
    """

    devices: tuple[Device, ...]
    ram_bytes: int
    ram_free_bytes: int
    disk_free_bytes: int
    cpu_cores: int
    notes: tuple[str, ...] = ()
    silent: bool = False

    def device(self, name: str) -> Device:
        """The device called `name` ("auto": the first). Raises HardwareError, naming what there is."""
        from vramfit.errors import HardwareError
        from vramfit.sentences import say

        if name == "auto":
            return self.devices[0]
        for device in self.devices:
            if device.torch_device == name:
                return device
        there = ", ".join(device.torch_device for device in self.devices)
        raise HardwareError(say("hardware.no_device", name=name, there=there), say("hardware.choose_device"))


@dataclass(frozen=True, kw_only=True)
class TorchBuild:
    """What the installed torch was built for, read from its files and not by importing it. None: not built for it."""

    version: str
    cuda: str | None = None
    hip: str | None = None
    xpu: str | None = None


def probe(
    data_dir: Path,
    *,
    nvml: Any = None,
    environment: Mapping[str, str] | None = None,
    build: TorchBuild | None = None,
) -> Machine:
    """This machine: its cards (as a child process finds them), the CPU, RAM and the disk of `data_dir`.

    Rates are those measured here, where `data_dir` keeps a calibration, else the catalogue's.
    Never raises for a card that does not answer, and waits for no driver for longer than _DRIVER_SECONDS (torch:
    _TORCH_SECONDS): `notes` says so in full sentences. `nvml` (a module like `pynvml`, asked in this process),
    `environment` and `build` are what is asked, for tests.
    """
    from vramfit.hardware.calibrate import with_measured_rates  # it builds on this module's types

    environment = os.environ if environment is None else environment
    build = torch_build() if build is None else build
    notes: list[str] = []
    silent = False
    try:
        cards = nvidia_cards(nvml, environment, notes) if nvml is not None else _cards_of_driver(environment, notes)
    except _NoAnswer as error:
        cards, silent = [], build is None or build.cuda is not None
        notes.append(f"The NVIDIA driver {error}. {_SILENT}")
    if cards and build is not None and build.cuda is None:
        notes.append(
            f"{cards[0].name} is there, but the installed torch {build.version} is not built for NVIDIA cards, so "
            "runs use the CPU. Install the torch build for your card (see the README)."
        )
        cards = []
    if not cards and _torch_may_know_cards(build):
        try:
            cards = [with_catalogue_rates(Device(**row)) for row in _answer("torch_devices", _TORCH_SECONDS)]
        except _NoAnswer as error:
            silent = True
            notes.append(f"torch, asked for its cards, {error}. {_SILENT}")
    memory = psutil.virtual_memory()
    ram, free = _within_cgroup(memory.total, memory.available)
    cores = _cores(environment)
    found = (*_best_first(cards), _cpu(ram, free, cores))
    return Machine(
        devices=tuple(with_measured_rates(device, data_dir) for device in found),
        ram_bytes=ram,
        ram_free_bytes=free,
        disk_free_bytes=shutil.disk_usage(_existing(data_dir)).free,
        cpu_cores=cores,
        notes=tuple(notes),
        silent=silent,
    )


class _NoAnswer(Exception):
    """A child that was to ask a driver brought no answer; the text says what it did, behind a name for it."""


_SILENT = (
    "Runs use the CPU until it answers: ask the card's own tool (nvidia-smi), and restart the machine if that hangs"
)


def _answer(module: str, seconds: float, environment: Mapping[str, str] | None = None) -> Any:
    """What python -m vramfit.hardware.MODULE prints as JSON on its last line. Raises _NoAnswer, in bounded time.

    A child that KILL does not end (it waits inside the system) is left, and none is started while it is there.
    """
    with _stuck_lock:
        _stuck[:] = [child for child in _stuck if child.poll() is None]
        if _stuck:
            raise _NoAnswer("has still not answered an earlier question")
    command = [sys.executable, "-m", f"vramfit.hardware.{module}"]
    variables = {**os.environ, **(environment or {}), "PYTHONUTF8": "1"}
    try:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=Path(__file__).parent.parent.parent,
            env=variables,
            encoding="utf-8",
        )
    except OSError as error:
        raise _NoAnswer(f"could not be asked ({error.strerror or error})") from error
    try:
        said, _ = child.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        _give_up(child)
        raise _NoAnswer(f"did not answer within {seconds:.0f} s") from None
    if child.returncode < 0:
        raise _NoAnswer(f"ended the process that asked it (signal {-child.returncode})")
    try:
        return json.loads(said.strip().splitlines()[-1])
    except (ValueError, IndexError):
        raise _NoAnswer(f"could not be asked (exit code {child.returncode})") from None


def _give_up(child: subprocess.Popen[str]) -> None:
    child.kill()
    try:
        child.wait(_KILLED_SECONDS)
    except subprocess.TimeoutExpired:
        with _stuck_lock:
            _stuck.append(child)
    if child.stdout is not None:
        child.stdout.close()


def torch_build() -> TorchBuild | None:
    """What torch was built for, from its version.py (importing torch would cost seconds). None without torch."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    except OSError:
        return None
    found = {
        name: match.group(1)
        for name in ("__version__", "cuda", "hip", "xpu")
        if (match := re.search(rf"^{name}\b[^=\n]*=\s*['\"]([^'\"]*)['\"]", text, flags=re.MULTILINE))
    }
    return TorchBuild(
        version=found.get("__version__", "?"), cuda=found.get("cuda"), hip=found.get("hip"), xpu=found.get("xpu")
    )


def _best_first(cards: Sequence[Device]) -> list[Device]:
    """Most free memory first: it is what decides which models fit. Equal cards keep the driver's order."""
    return sorted(cards, key=lambda card: -(card.free_bytes // 2**30))


# --- NVIDIA ----------------------------------------------------------------------------------------------------------


def _cards_of_driver(environment: Mapping[str, str], notes: list[str]) -> list[Device]:
    """The cards as a child process finds them. Raises _NoAnswer. No child is started where there is no driver."""
    if importlib.util.find_spec("pynvml") is None or not _driver_there():
        return []
    found = _answer("nvidia_cards", _DRIVER_SECONDS, environment)
    notes += found["notes"]
    return [Device(**row) for row in found["cards"]]


def _driver_there() -> bool:
    """Whether the driver's library is installed. Loading it asks the driver nothing."""
    if sys.platform == "darwin":
        return False
    if sys.platform == "win32":
        folders = (Path(os.environ.get("WINDIR", "C:/Windows"), "System32"),
                   Path(os.environ.get("PROGRAMFILES", "C:/Program Files"), "NVIDIA Corporation", "NVSMI"))  # fmt: skip
        return any((folder / "nvml.dll").is_file() for folder in folders)
    try:
        ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return False
    return True


def nvidia_cards(nvml: Any, environment: Mapping[str, str], notes: list[str]) -> list[Device]:
    """Cards a CUDA program sees, called as torch calls them. One silent card does not hide the others."""
    if nvml is None:
        return []
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        if not _means_no_card(error):
            notes.append(f"The NVIDIA driver does not answer ({error}). Runs use the CPU until it does.")
        return []
    handles = _handles(nvml, notes)
    handles = _cuda_order(nvml, handles, environment, notes)
    visible = _visible(nvml, handles, environment.get("CUDA_VISIBLE_DEVICES"), notes)
    cards = [_nvidia_card(nvml, handle, index, notes) for index, handle in enumerate(visible)]
    return [card for card in cards if card is not None]


def import_nvml() -> Any:
    """The binding to the driver's library, None where it is not installed."""
    try:
        return importlib.import_module("pynvml")
    except ImportError:
        return None


def _means_no_card(error: Exception) -> bool:
    return any(
        word in type(error).__name__ + str(error) for word in ("LibraryNotFound", "DriverNotLoaded", "Not Found")
    )


def _handles(nvml: Any, notes: list[str]) -> list[Any]:
    """Handles in PCI order. A lost card has none, and CUDA does not count it either."""
    handles = []
    try:
        count = nvml.nvmlDeviceGetCount()
    except nvml.NVMLError as error:
        notes.append(f"The NVIDIA driver does not say how many cards there are ({error}).")
        return []
    for index in range(count):
        try:
            handles.append(nvml.nvmlDeviceGetHandleByIndex(index))
        except nvml.NVMLError as error:
            notes.append(f"NVIDIA card {index} does not answer ({error}); the others are used.")
    return handles


def _cuda_order(nvml: Any, handles: list[Any], environment: Mapping[str, str], notes: list[str]) -> list[Any]:
    """CUDA's numbering. NVML counts by PCI address; CUDA does so only when told, and else puts the fastest first."""
    if environment.get("CUDA_DEVICE_ORDER", "").upper() == "PCI_BUS_ID" or len(handles) < 2:
        return handles
    names = {_text(_ask(nvml, "nvmlDeviceGetName", handle, default=str(i))) for i, handle in enumerate(handles)}
    if len(names) == 1:
        return handles
    notes.append(
        "The cards differ, and CUDA numbers the fastest one 0. Set CUDA_DEVICE_ORDER=PCI_BUS_ID to number them as "
        "nvidia-smi does."
    )
    return sorted(handles, key=lambda handle: -_speed_guess(nvml, handle))  # stable: equal ones keep PCI order


def _speed_guess(nvml: Any, handle: Any) -> float:
    """CUDA's own order is by cores times clock; both are asked, 0 when the driver does not say."""
    cores = _ask(nvml, "nvmlDeviceGetNumGpuCores", handle, default=0)
    clock = _ask(nvml, "nvmlDeviceGetMaxClockInfo", handle, getattr(nvml, "NVML_CLOCK_SM", 1), default=1)
    return float(cores) * float(clock)


def _visible(nvml: Any, handles: list[Any], mask: str | None, notes: list[str]) -> list[Any]:
    """What CUDA_VISIBLE_DEVICES leaves, in its order.

    CUDA's rules: unset shows all, empty none; entries are indices or the beginnings of UUIDs; the first invalid entry
    ends the list; a card named twice hides them all.
    """
    if mask is None:
        return handles
    uuids = [_text(_ask(nvml, "nvmlDeviceGetUUID", handle, default="")) for handle in handles]
    chosen: list[Any] = []
    for entry in (part.strip() for part in mask.split(",")):
        handle = _entry(nvml, entry, handles, uuids)
        if handle is None:
            break
        if any(handle is other for other in chosen):
            notes.append(f"CUDA_VISIBLE_DEVICES={mask} names a card twice, so CUDA shows none.")
            return []
        chosen.append(handle)
    if handles and not chosen:
        notes.append(f"CUDA_VISIBLE_DEVICES={mask!r} hides all {len(handles)} NVIDIA cards. Unset it to use them.")
    return chosen


def _entry(nvml: Any, entry: str, handles: list[Any], uuids: list[str]) -> Any:
    """The card one entry of the mask means, or None. MIG slices are asked for by their own UUID."""
    if entry.startswith("MIG-"):
        return _ask(nvml, "nvmlDeviceGetHandleByUUID", entry)
    if entry.startswith("GPU-"):
        matches = [handle for handle, uuid in zip(handles, uuids, strict=True) if uuid and uuid.startswith(entry)]
        return matches[0] if len(matches) == 1 else None
    number = re.match(r"\+?(\d+)", entry)
    index = int(number.group(1)) if number else -1
    return handles[index] if 0 <= index < len(handles) else None


def _nvidia_card(nvml: Any, handle: Any, index: int, notes: list[str]) -> Device | None:
    """One card's facts. Without its memory it cannot be planned for; everything else may be unknown."""
    name = _text(_ask(nvml, "nvmlDeviceGetName", handle, default=f"NVIDIA card {index}"))
    try:
        memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    except nvml.NVMLError as error:
        notes.append(f"{name} (cuda:{index}) does not tell its memory ({error}); it is not used.")
        return None
    capability = _ask(nvml, "nvmlDeviceGetCudaComputeCapability", handle, default=(0, 0))
    return with_catalogue_rates(
        Device(
            kind="cuda",
            name=name,
            torch_device=f"cuda:{index}",
            identity=_text(_ask(nvml, "nvmlDeviceGetUUID", handle, default=f"cuda:{index}")),
            memory_bytes=int(memory.total),
            free_bytes=int(memory.free),
            bf16=tuple(capability) >= (8, 0),
            fp16=tuple(capability) >= (5, 3),
            fp8=tuple(capability) >= (8, 9),
            power_watts=_ask(nvml, "nvmlDeviceGetEnforcedPowerLimit", handle, default=0) / 1000,
        )
    )


def _ask(nvml: Any, function: str, *arguments: Any, default: Any = None) -> Any:
    """One optional question to the driver: `default` when it cannot answer or does not know the question."""
    try:
        return getattr(nvml, function)(*arguments)
    except (nvml.NVMLError, AttributeError):
        return default


def _text(value: Any) -> str:
    """Older NVML bindings answer in bytes."""
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def with_catalogue_rates(device: Device) -> Device:
    """`device` with the rates of its entry in the catalogue; as it is when the catalogue has none."""
    import dataclasses

    from vramfit.hardware.catalogue import find  # it builds on this module's types

    card = find(device.name, memory_bytes=device.memory_bytes)
    if card is None:
        return device
    slowed = power_share(device.power_watts, card.power_watts)
    return dataclasses.replace(
        device,
        flops={dtype: slowed * rate for dtype, rate in card.flops.items()},
        memory_bandwidth=card.memory_bandwidth,
        link_bandwidth=card.link_bandwidth,
        power_watts=device.power_watts or card.power_watts,
        reach=card.reach,
        attention_reach=card.attention_reach,
        units=card.units,
        peer_bandwidth=card.peer_bandwidth,
        rates="catalogue",
    )


def power_share(limit_watts: float, usual_watts: float) -> float:
    """What a power limit leaves of a card's rate. Power grows with clock times voltage squared, and voltage with the
    clock, so the clock goes with the cube root; a higher limit than usual is not counted on."""
    if not limit_watts or not usual_watts:
        return 1.0
    return float(min(1.0, (limit_watts / usual_watts) ** (1 / 3)))


# --- cards only torch knows ------------------------------------------------------------------------------------------


def _torch_may_know_cards(build: TorchBuild | None) -> bool:
    """Whether starting torch to ask can find anything: it costs seconds."""
    return build is not None and bool(build.hip or build.xpu or sys.platform == "darwin")


# --- the machine itself ----------------------------------------------------------------------------------------------


def _cpu(ram: int, free: int, cores: int) -> Device:
    """The CPU as a device: RAM is its memory. 16-bit arithmetic works but is slower than fp32 nearly everywhere."""
    processor = this_processor()
    return Device(
        kind="cpu",
        name=f"CPU ({cores} cores)" if cores > 1 else "CPU (1 core)",
        torch_device="cpu",
        identity="cpu",
        memory_bytes=ram,
        free_bytes=free,
        bf16=False,
        fp16=False,
        flops={"fp32": processor.flops(cores)},
        memory_bandwidth=processor.bandwidth(cores),
        ram_bandwidth=processor.bandwidth(cores),
        rates_note=processor.told(cores),
    )


def _cores(environment: Mapping[str, str]) -> int:
    """Cores this process may use: physical ones, within its affinity, its cgroup's share and OMP_NUM_THREADS."""
    limits = [psutil.cpu_count(logical=False) or psutil.cpu_count() or 1]
    if hasattr(os, "sched_getaffinity"):
        limits.append(len(os.sched_getaffinity(0)))
    quota = _cgroup_numbers("cpu.max")
    limits += [max(1, int(numbers[0] / numbers[1])) for numbers in quota if len(numbers) == 2 and numbers[1]]
    threads = environment.get("OMP_NUM_THREADS", "")
    limits += [int(threads)] if threads.isdigit() and int(threads) else []
    return max(1, min(limits))


def free_ram_bytes() -> int:
    """RAM that can be had now, within what a container's or job's limit leaves."""
    memory = psutil.virtual_memory()
    return _within_cgroup(memory.total, memory.available)[1]


def _within_cgroup(total: int, free: int, *, groups: Sequence[Path] | None = None) -> tuple[int, int]:
    """RAM and free RAM, not more than a container's or job's limit allows. Files that were read or written and could
    be read again count as used there, but make room: what a checkpoint leaves in the page cache is free."""
    for folder in _cgroup_folders() if groups is None else groups:
        limit, used = _first_number(folder / "memory.max"), _first_number(folder / "memory.current")
        if limit is not None and used is not None and limit < total:
            total = int(limit)
            free = min(free, max(0, int(limit - used + _cached_files(folder / "memory.stat"))))
    return total, free


def _cached_files(stat: Path) -> int:
    """Bytes of the page cache in a control group that a process which asks for memory gets."""
    lines = (line.partition(" ") for line in _text_of(stat).splitlines())
    return sum(int(value) for name, _, value in lines if name in ("inactive_file", "active_file"))


def _first_number(path: Path) -> float | None:
    """None where there is no such file, or it says "max"."""
    word = _text_of(path).partition(" ")[0].strip()
    return float(word) if word and word != "max" else None


def _cgroup_numbers(name: str) -> list[list[float]]:
    """The file `name` of our control group and of each above it (Linux, version 2), as numbers; "max" is empty."""
    found = [_text_of(folder / name).split() for folder in _cgroup_folders()]
    return [[float(word) for word in words] if words and words[0] != "max" else [] for words in found]


def _cgroup_folders() -> list[Path]:
    """Our control group and each above it."""
    root = Path("/sys/fs/cgroup")
    try:
        own = Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines()[0].rpartition(":")[2].lstrip("/")
    except (OSError, IndexError):
        return []
    group = root / own
    return [folder for folder in (group, *group.parents) if folder.is_relative_to(root)]


def _text_of(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def _existing(folder: Path) -> Path:
    """`folder` or the nearest one above it that exists: its disk is where the data will lie."""
    folder = folder.expanduser().absolute()
    return next((place for place in (folder, *folder.parents) if place.exists()), Path.cwd())
