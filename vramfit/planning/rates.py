"""What a device reaches of what its data sheet says: products by their shape, memory, links, launches.

**Products.** A product of `rows x inputs` by `inputs x outputs` is cut into tiles of 128 x 128 results, dealt out to
the card's units. Two losses follow. The last wave of tiles is on average half full: half a wave is `units x 8192`
results, so the share is results / (results + that): a product needs rows and width. And each tile fills and drains its
pipeline: two trips to memory of about 0.75 microseconds, against `2 x 128 x 128 x inputs` operations at the unit's
share of the rate: inputs / (inputs + k0). Where rows are few, reading the matrix from memory is longer than both.
What remains, the share of the dense rate that the largest products reach, is a fact of the card (`Device.reach`:
clocks under load, power). Measured rates of this machine (`hardware/calibrate.py`) take the place of the form.

**Everything between** products is bound by memory: streaming kernels reach 85 % of the data sheet's bandwidth.

**Links.** Gathering moves (N - 1) / N of the bytes to each card. Over NVLink collectives reach three quarters of one
direction's rate (published: 230 of 300 GB/s on A100). Cards that cannot read each other's memory go through RAM: each
byte crosses a card's link out and another's in, with a copy between, which halves what one link gives.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final, Literal

from vramfit.config import Precision
from vramfit.hardware.devices import Device, ProductRate

RateSource = Literal["catalogue", "measured", "assumed"]

ASSUMED_FLOPS: Final = {"fp32": 10e12, "bf16": 25e12, "fp16": 25e12}
ASSUMED_BANDWIDTH: Final = 300e9
"""A card nobody has facts about is taken for the smallest of the catalogue."""

ASSUMED_LINK: Final = 13e9
"""PCIe 4.0 x8, the least of the catalogue."""

ASSUMED_RAM_BANDWIDTH: Final = 12e9
"""What one stream reaches on an old two-channel machine; two busy cores here measured 10 to 14 GB/s."""

ASSUMED_DISK_READ: Final = 2.5e9
ASSUMED_DISK_WRITE: Final = 1.2e9
"""An NVMe drive on PCIe 3.0, long after its write cache is full."""

SLOW_16_BIT_ON_CPU: Final = 18.0
"""How much slower bf16 and fp16 are on a CPU without units for them, measured."""

STREAMED: Final = 0.85
"""What streaming kernels reach of the bandwidth on the data sheet."""

COLLECTIVE_OF_PEER_LINK: Final = 0.75
COLLECTIVE_THROUGH_RAM: Final = 0.5

FORWARD_LAUNCH_SECONDS: Final = 11e-6
BACKWARD_LAUNCH_SECONDS: Final = 6e-6
COMPILED_LAUNCH_SECONDS: Final = 5e-6
"""What a kernel costs the host: forward passes Python, dispatcher and autograd, backward runs in C++, a compiled graph
calls its kernels from generated code. Measured on one core: a Llama block with adapters, 87 kernels forward and 143
backward, of next to nothing took 0.97 and 0.79 ms."""

LIBRARY_SHARE: Final = 1.8
"""A kernel of a model library's block against the plain operation that a calibration times, forward: views, checks and
hooks in between. Measured on one core: 11 against 6 microseconds; backward 6."""

MISALIGNED: Final = 0.5
"""Products in 16 bits whose widths are no multiples of 8 cannot be read 16 bytes at a time: about half the rate."""

CPU_OPERATION_SECONDS: Final = 20e-6
"""On a CPU an operation costs this beside its work: the starter's step of four sequences, cut in turn into passes of 4,
2 and 1 in one run, took 36.9, 42.1 and 53.3 ms."""

_TILE: Final = 128 * 128
_TILE_SECONDS: Final = 1.5e-6
_ASSUMED_UNITS: Final = 32
_USUAL_INPUTS: Final = 4096
"""Shapes at which the reach of cards was measured."""

_CPU_REACH: Final = 0.82
_CPU_HALF_ROWS: Final = 16
_CPU_HALF_WIDTH: Final = 8


@dataclass(frozen=True)
class Rates:
    """What one device reaches in one compute format. FLOP/s and bytes/s; `dense` is the data sheet's rate."""

    dense: float
    reach: float
    attention_reach: float
    units: int
    bandwidth: float
    link: float
    collective: float
    ram: float
    disk_read: float
    disk_write: float
    on_cpu: bool
    source: RateSource
    forward_launch: float
    backward_launch: float
    measured: tuple[ProductRate, ...] = ()

    def product_seconds(self, rows: float, inputs: float, outputs: float, *, size: float) -> float:
        """Seconds of one product: arithmetic at the rate its shape allows, or moving its numbers of `size` bytes."""
        flops = 2.0 * rows * inputs * outputs
        moved = size * (rows * inputs + inputs * outputs + rows * outputs)
        if self.on_cpu:  # rows are in a cache, the matrix comes from RAM
            return max(flops / self.product_rate(rows, inputs, outputs), size * inputs * outputs / self.ram)
        if size < 4 and (inputs % 8 or outputs % 8):
            flops /= MISALIGNED
        return max(flops / self.product_rate(rows, inputs, outputs), moved / self.bandwidth)

    def attention_rate(self, length: float, head: int) -> float:
        """FLOP/s of an attention kernel's forward at `length` positions of heads `head` wide.

        Blocks on the diagonal are computed whole, and each row of blocks starts and ends a pipeline; exponentials take
        the same time whatever the head's width. FlashAttention-2's own figures on A100 (110 to 195 TFLOP/s from length
        1k to 4k, 165 with narrow heads at 4k) have this form with 768 positions and 20 features.
        """
        if self.on_cpu:
            return self.dense * self.reach * 0.5
        shape = length / (length + 768.0) * head / (head + 20.0) * 1.15
        return self.dense * self.reach * self.attention_reach * min(1.0, shape)

    def product_rate(self, rows: float, inputs: float, outputs: float) -> float:
        """FLOP/s of a product of that shape."""
        if self.measured:
            return _interpolated(self.measured, rows, math.sqrt(inputs * outputs))
        if self.on_cpu:
            width = min(inputs, outputs)
            filled = rows / (rows + _CPU_HALF_ROWS) * width / (width + _CPU_HALF_WIDTH)
            return self.dense * self.reach * filled
        results = rows * outputs
        waves = results / (results + 0.5 * self.units * _TILE)
        k0 = _TILE_SECONDS * self.dense / self.units / (2.0 * _TILE)
        return self.dense * self.reach * waves * inputs / (inputs + k0) * (1 + k0 / _USUAL_INPUTS)


def rates_of(device: Device, compute: Precision, *, compiled: bool = False) -> Rates:
    """What `device` reaches in `compute`; what nobody knows is assumed, and the source says so."""
    on_cpu = device.kind == "cpu"
    dense, source = dense_rate(device, compute)
    if not device.memory_bandwidth:
        source = "assumed"
    measured = tuple(rate for rate in device.products if rate.dtype == compute)
    bandwidth = device.memory_bandwidth * (1.0 if device.rates == "measured" else STREAMED)
    forward, backward = FORWARD_LAUNCH_SECONDS, BACKWARD_LAUNCH_SECONDS
    if compiled:
        forward = backward = COMPILED_LAUNCH_SECONDS
    if on_cpu:
        forward = backward = CPU_OPERATION_SECONDS
    elif compiled and device.launch_seconds:
        device = dataclasses.replace(device, launch_seconds=0.0)  # what was timed is not compiled
    link = device.link_bandwidth or ASSUMED_LINK
    through_ram = COLLECTIVE_THROUGH_RAM * link
    return Rates(
        dense=dense,
        reach=_CPU_REACH if on_cpu else device.reach,
        attention_reach=device.attention_reach,
        units=device.units or _ASSUMED_UNITS,
        bandwidth=bandwidth or (ASSUMED_RAM_BANDWIDTH if on_cpu else STREAMED * ASSUMED_BANDWIDTH),
        link=link,
        collective=COLLECTIVE_OF_PEER_LINK * device.peer_bandwidth if device.peer_bandwidth else through_ram,
        ram=device.ram_bandwidth or ASSUMED_RAM_BANDWIDTH,
        disk_read=device.disk_read or ASSUMED_DISK_READ,
        disk_write=device.disk_write or ASSUMED_DISK_WRITE,
        on_cpu=on_cpu,
        source=source,
        forward_launch=LIBRARY_SHARE * device.launch_seconds or forward,
        backward_launch=device.launch_seconds or backward,
        measured=measured,
    )


def dense_rate(device: Device, compute: Precision) -> tuple[float, RateSource]:
    """(dense FLOP/s in a compute format, where it comes from). Without facts, those of a small card.

    Tensor cores multiply tf32 at half their rate of 16-bit numbers, on every card that has it.
    """
    if compute == "tf32" and "tf32" not in device.flops:
        half, source = dense_rate(device, "bf16")
        return half / 2, source
    known = device.flops.get(compute, 0.0)
    if known:
        return known, device.rates
    if device.kind == "cpu":
        return device.flops.get("fp32", ASSUMED_FLOPS["fp32"] / 100) / SLOW_16_BIT_ON_CPU, "assumed"
    return ASSUMED_FLOPS[compute], "assumed"


def _interpolated(measured: tuple[ProductRate, ...], rows: float, width: float) -> float:
    """FLOP/s between the measured shapes, linear in the logarithms; beyond them as at the last."""
    widths = sorted({rate.width for rate in measured})
    by_width = {each: sorted((rate.rows, rate.flops) for rate in measured if rate.width == each) for each in widths}
    return _between([(each, _between(by_width[each], rows)) for each in widths], width)


def _between(points: list[tuple[int, float]], place: float) -> float:
    below = [point for point in points if point[0] <= place]
    above = [point for point in points if point[0] > place]
    if not below or not above:
        # fewer rows than were measured: a product takes as long as with the fewest
        (at, value) = points[0] if not below else points[-1]
        return value * min(1.0, place / at)
    (low, low_value), (high, high_value) = below[-1], above[0]
    share = math.log(place / low) / math.log(high / low)
    return math.exp((1 - share) * math.log(low_value) + share * math.log(high_value))
