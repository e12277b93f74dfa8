"""The process that measures a device: python -m vramfit.hardware.calibrate_worker, an order as JSON on stdin.

Each figure is the middle of several repetitions on a card, whose clocks settle, and the best on a CPU, where what else
runs only slows. Products of rows x width by width x width, so that efficiency as a function of both is measured.
Paths of cards could not be run where this was written; the CPU's are.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vramfit.hardware.calibrate import Calibration
from vramfit.hardware.devices import ProductRate
from vramfit.units import MIB

DTYPES: Final = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Sizes = tuple[int, ...]
CARD_ROWS, CARD_WIDTHS = (64, 512, 4096, 16384), (768, 2048, 4096, 8192)
CPU_ROWS, CPU_WIDTHS = (32, 128, 512, 2048), (128, 512, 1024)
TINY_ROWS, TINY_WIDTHS = (8, 32), (16, 64)
SECONDS_EACH: Final = 0.12
LAYERS: Final = 24


@dataclass(frozen=True)
class Bench:
    """A device to time things on. `each` is seconds spent on one figure."""

    device: torch.device
    each: float

    @property
    def on_cpu(self) -> bool:
        return self.device.type == "cpu"

    def seconds(self, work: Callable[[], object]) -> float:
        """Seconds of `work`, done until `each` seconds are over, at least three times after a first."""
        work()
        self.wait()
        took: list[float] = []
        while len(took) < 3 or sum(took) < self.each:
            began = self.clock()
            work()
            self.wait()
            took.append(self.clock() - began)
        return max(1e-9, min(took) if self.on_cpu else statistics.median(took))

    def clock(self) -> float:
        """Wall time; with one thread on a CPU the process's own, which others cannot lengthen."""
        alone = self.on_cpu and torch.get_num_threads() == 1
        return time.process_time() if alone else time.perf_counter()

    def wait(self) -> None:
        """Until the device is done."""
        if self.device.type == "mps":
            torch.mps.synchronize()
        elif not self.on_cpu:
            torch.get_device_module(self.device).synchronize(self.device)


def products(bench: Bench, dtype: str, rows: Sizes, widths: Sizes) -> tuple[ProductRate, ...]:
    """FLOP/s of products of each shape."""
    found = []
    for width in widths:
        matrix = torch.randn(width, width, device=bench.device).to(DTYPES[dtype])
        for count in rows:
            left = torch.randn(count, width, device=bench.device).to(DTYPES[dtype])
            out = torch.empty(count, width, device=bench.device, dtype=DTYPES[dtype])
            took = bench.seconds(lambda left=left, matrix=matrix, out=out: torch.mm(left, matrix, out=out))  # type: ignore[misc]
            found.append(ProductRate(dtype=dtype, rows=count, width=width, flops=2.0 * count * width * width / took))
    return tuple(found)


def memory(bench: Bench, size: int) -> float:
    """Bytes/s of what lies between products: a scaling, an activation and a norm of a tensor of `size` bytes, each of
    which reads it and writes another. On a card memory bounds all three; on a CPU the exponentials do."""
    numbers = torch.ones(size // 1024, 256, device=bench.device)
    operations: tuple[Callable[[], object], ...] = (
        lambda: torch.mul(numbers, 1.5),
        lambda: nn.functional.silu(numbers),
        lambda: nn.functional.layer_norm(numbers, (256,)),
    )
    return sum(2.0 * size for _ in operations) / sum(bench.seconds(operation) for operation in operations)


def link(bench: Bench, size: int) -> tuple[float, float]:
    """Bytes/s from pinned RAM to the device and back; zeros on a CPU and where nothing can be pinned."""
    if bench.on_cpu or bench.device.type == "mps":
        return 0.0, 0.0
    there = torch.empty(size, dtype=torch.uint8, device=bench.device)
    here = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return (
        size / bench.seconds(lambda: there.copy_(here, non_blocking=True)),
        size / bench.seconds(lambda: here.copy_(there, non_blocking=True)),
    )


def ram(each: float, size: int) -> float:
    """Bytes/s read and written by a copy in RAM larger than any cache."""
    bench = Bench(torch.device("cpu"), each)
    source, target = torch.ones(size, dtype=torch.uint8), torch.empty(size, dtype=torch.uint8)
    return 2.0 * size / bench.seconds(lambda: target.copy_(source))


def launch(bench: Bench) -> float:
    """Seconds the host needs for one small operation of a module with its autograd, forward.

    A stack of linear, norm and activation on next to nothing, timed without waiting for the device.
    """
    layers = [module for _ in range(LAYERS) for module in (nn.Linear(8, 8), nn.LayerNorm(8), nn.SiLU())]
    model = nn.Sequential(*layers).to(bench.device)
    rows = torch.randn(4, 8, device=bench.device)
    took = []
    for _ in range(8):
        bench.wait()
        began = bench.clock()
        model(rows)
        took.append(bench.clock() - began)
    return min(took) / len(layers)


def disk(folder: Path, size: int) -> tuple[float, float]:
    """(bytes/s read past the cache, written and flushed). The read is 0 where the system cannot drop its cache."""
    place = folder / f".calibration-{os.getpid()}.bin"
    block = os.urandom(min(size, 4 * MIB))  # drives and file systems compress zeros
    try:
        began = time.perf_counter()
        with place.open("wb") as file:
            for _ in range(max(1, size // len(block))):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        written = place.stat().st_size / (time.perf_counter() - began)
        return _read(place), written
    finally:
        with contextlib.suppress(OSError):
            place.unlink()


def _read(place: Path) -> float:
    advise = getattr(os, "posix_fadvise", None)
    if advise is None:
        return 0.0
    with place.open("rb", buffering=0) as file:
        advise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began, read = time.perf_counter(), 0
        while chunk := file.read(4 * MIB):
            read += len(chunk)
        return read / (time.perf_counter() - began)


def _sizes(bench: Bench, *, tiny: bool) -> tuple[Sizes, Sizes]:
    """(rows, widths) of the products to measure."""
    if tiny:
        return TINY_ROWS, TINY_WIDTHS
    return (CPU_ROWS, CPU_WIDTHS) if bench.on_cpu else (CARD_ROWS, CARD_WIDTHS)


def measure(order: dict[str, Any], say: Callable[[float, str], None]) -> Calibration:
    """Everything, in about ten seconds."""
    tiny, folder = bool(order["tiny"]), Path(order["folder"])
    bench = Bench(torch.device(order["device"]), 0.002 if tiny else SECONDS_EACH)
    rows, widths = _sizes(bench, tiny=tiny)
    large = MIB if tiny else 256 * MIB
    found: list[ProductRate] = []
    for number, dtype in enumerate(order["dtypes"]):
        say(0.5 * number / len(order["dtypes"]), f"{dtype} products")
        found += products(bench, dtype, rows, widths)
    say(0.5, "memory")
    # On a CPU what lies between products is as large as its caches, not as its RAM.
    moved = memory(bench, MIB if tiny else (4 * MIB if bench.on_cpu else large))
    say(0.6, "link")
    to_device, from_device = link(bench, large)
    say(0.7, "RAM")
    in_ram = ram(bench.each, large)
    say(0.8, "disk")
    read, written = disk(folder, MIB if tiny else 256 * MIB)
    say(0.95, "launches")
    launched = launch(bench)
    say(1.0, "done")
    return Calibration(
        products=tuple(found),
        memory=moved,
        to_device=to_device,
        from_device=from_device,
        ram=in_ram,
        disk_read=read,
        disk_write=written,
        launch_seconds=launched,
        day=datetime.now(UTC).date().isoformat(),
    )


@contextlib.contextmanager
def _only_ours() -> Iterator[Any]:
    """Standard output for our lines alone; what libraries print goes to the errors."""
    ours, sys.stdout = sys.stdout, sys.stderr
    try:
        yield ours
    finally:
        sys.stdout = ours


def main() -> None:
    order = json.loads(sys.stdin.readline())
    with _only_ours() as out:

        def tell(said: dict[str, Any]) -> None:
            out.write(json.dumps(said) + "\n")
            out.flush()

        try:
            measured = measure(order, lambda share, what: tell({"share": share, "what": what}))
        except (RuntimeError, OSError, AssertionError) as error:  # the driver's or the disk's words, for a person
            tell({"error": str(error).splitlines()[0] if str(error) else type(error).__name__})
            sys.exit(1)
        tell({"measured": measured.to_json()})


if __name__ == "__main__":
    main()
