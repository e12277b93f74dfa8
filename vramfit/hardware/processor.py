"""What a CPU's cores can compute and read when nobody has measured it: from its vector units and its clock.

A core's peak is clock x vector units x numbers in a vector x 2, a multiplication and an addition in one instruction:

    AVX-512 on server parts (Xeon since Skylake) and AMD since Zen 5    2 units x 16 numbers    64 FLOPs a cycle
    AVX-512 elsewhere (Zen 4: two halves), AVX2 with FMA, Apple's NEON  as 4 x 4 or 2 x 8       32
    AVX, or NEON on other ARM cores                                                             16
    SSE                                                                                          8

All cores under vector load run below the highest clock of one: three quarters of it, as vendors' tables of turbo bins
have it. A core reads as many bytes as it can have cache lines on their way: 12 lines of 64 bytes each 64 ns are 12
GB/s, and a machine with two channels of DDR4-2666, the least in use, gives 36 GB/s of its 42 to all of them.
"""

from __future__ import annotations

import platform
import re
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

import psutil

from vramfit.sentences import Sentence, say

ASSUMED_CLOCK: Final = 2.5e9
BYTES_PER_CORE: Final = 12e9
BYTES_OF_ALL: Final = 36e9
_OF_HIGHEST_CLOCK: Final = 0.75
_CLOCKS: Final = (1e9, 6e9)
_WINDOWS_FEATURES: Final = {"avx": 39, "avx2": 40, "avx512f": 41}  # PF_..._INSTRUCTIONS_AVAILABLE of winnt.h
_AMD_ZEN_5: Final = 26


@dataclass(frozen=True, kw_only=True)
class Processor:
    """One core: FLOPs a cycle in fp32, cycles a second under load, and what its vector units are called."""

    flops_per_cycle: int
    clock: float
    vectors: str

    def flops(self, cores: int) -> float:
        """FLOP/s of `cores` of them, at their peak."""
        return cores * self.flops_per_cycle * self.clock

    def bandwidth(self, cores: int) -> float:
        """Bytes/s that `cores` of them read or write."""
        return min(cores * BYTES_PER_CORE, BYTES_OF_ALL)

    def told(self, cores: int) -> Sentence:
        """What its rate was taken from, as a note."""
        return say("assumed.cpu", cores=cores, vectors=self.vectors, clock=f"{self.clock / 1e9:.1f}")


@cache
def this_processor() -> Processor:
    """The one that is here. What cannot be found out is taken for AVX2 at 2.5 GHz."""
    flags, vendor, model, family = _linux_facts() if sys.platform.startswith("linux") else (_other_flags(), "", "", 0)
    flops, vectors = vector_units(
        flags, vendor=vendor, model=model or platform.processor(), family=family, machine=platform.machine()
    )
    return Processor(flops_per_cycle=flops, clock=_clock(), vectors=vectors)


def vector_units(flags: frozenset[str], *, vendor: str, model: str, family: int, machine: str) -> tuple[int, str]:
    """(FLOPs a cycle in fp32, what the units are called). `flags` are Linux's; `family` is the vendor's number."""
    if machine.lower() in ("arm64", "aarch64"):
        return (32, "Apple's NEON") if sys.platform == "darwin" else (16, "NEON")
    if "avx512f" in flags:
        wide = "xeon" in model.lower() or (vendor == "AuthenticAMD" and family >= _AMD_ZEN_5)
        return (64, "AVX-512") if wide else (32, "AVX-512")
    if "avx2" in flags or not flags:
        return 32, "AVX2"
    return (16, "AVX") if "avx" in flags else (8, "SSE")


def _linux_facts() -> tuple[frozenset[str], str, str, int]:
    """(flags, vendor, model name, family) of the first core."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
    except OSError:
        text = ""
    found = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in text.splitlines())}
    family = re.match(r"\d+", found.get("cpu family", ""))
    return (
        frozenset(found.get("flags", "").split()),
        found.get("vendor_id", ""),
        found.get("model name", ""),
        int(family[0]) if family else 0,
    )


def _other_flags() -> frozenset[str]:
    """Windows says which it has; nothing is known elsewhere."""
    try:
        from ctypes import windll  # type: ignore[attr-defined,unused-ignore]
    except ImportError:
        return frozenset()
    there = windll.kernel32.IsProcessorFeaturePresent
    return frozenset(name for name, number in _WINDOWS_FEATURES.items() if there(number)) | {"sse"}


def _clock() -> float:
    """Cycles a second with all cores at work. Linux tells the highest clock of one core, virtual machines and Windows
    the nominal one."""
    try:
        told = psutil.cpu_freq()
    except (OSError, RuntimeError, NotImplementedError, AttributeError):
        told = None
    if told is None:
        return ASSUMED_CLOCK
    highest = told.max * 1e6
    hertz = (_OF_HIGHEST_CLOCK if sys.platform.startswith("linux") else 1.0) * highest or told.current * 1e6
    return hertz if _CLOCKS[0] <= hertz <= _CLOCKS[1] else ASSUMED_CLOCK
