"""What a core is taken for: its vector units by their flags, its clock, and how many bytes all cores read."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from vramfit.hardware import processor
from vramfit.hardware.processor import ASSUMED_CLOCK, Processor, this_processor, vector_units

AVX512 = frozenset({"sse", "avx", "avx2", "avx512f"})


@pytest.mark.parametrize(
    ("flags", "facts", "flops"),
    [
        (AVX512, {"vendor": "GenuineIntel", "model": "Intel(R) Xeon(R) Platinum 8480+", "family": 6}, 64),
        (AVX512, {"vendor": "GenuineIntel", "model": "11th Gen Intel(R) Core(TM) i7-1185G7", "family": 6}, 32),
        (AVX512, {"vendor": "AuthenticAMD", "model": "AMD Ryzen 9 7950X", "family": 25}, 32),
        (AVX512, {"vendor": "AuthenticAMD", "model": "AMD Ryzen 9 9950X", "family": 26}, 64),
        (AVX512 - {"avx512f"}, {"vendor": "AuthenticAMD", "model": "AMD Ryzen 5 5600", "family": 25}, 32),
        (frozenset({"sse", "avx"}), {"vendor": "GenuineIntel", "model": "Intel(R) Xeon(R) E5-2670", "family": 6}, 16),
        (frozenset({"sse"}), {"vendor": "GenuineIntel", "model": "Intel(R) Core(TM)2", "family": 6}, 8),
        (frozenset(), {"vendor": "", "model": "", "family": 0}, 32),
    ],
)
def test_flops_a_cycle_follow_the_vector_units(flags: frozenset[str], facts: dict[str, Any], flops: int) -> None:
    assert vector_units(flags, machine="x86_64", **facts)[0] == flops


def test_arm_cores_have_narrow_units_and_apple_s_twice_as_many(monkeypatch: pytest.MonkeyPatch) -> None:
    facts: dict[str, Any] = {"vendor": "", "model": "", "family": 0}
    monkeypatch.setattr(sys, "platform", "linux")
    assert vector_units(frozenset(), machine="aarch64", **facts)[0] == 16
    monkeypatch.setattr(sys, "platform", "darwin")
    assert vector_units(frozenset(), machine="arm64", **facts)[0] == 32


@pytest.mark.parametrize(
    ("told", "hertz"),
    [
        (SimpleNamespace(current=800.0, max=4800.0), 3.6e9),  # a laptop at rest: three quarters of its highest
        (SimpleNamespace(current=2600.0, max=0.0), 2.6e9),  # a virtual machine
        (SimpleNamespace(current=0.0, max=0.0), ASSUMED_CLOCK),
        (SimpleNamespace(current=4.0, max=4.0), ASSUMED_CLOCK),  # some systems tell it in other units
        (None, ASSUMED_CLOCK),
    ],
)
def test_the_clock_is_that_of_all_cores_at_work(monkeypatch: pytest.MonkeyPatch, told: Any, hertz: float) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(psutil, "cpu_freq", lambda: told)
    assert processor._clock() == pytest.approx(hertz)


def test_cores_add_up_and_share_the_memory() -> None:
    core = Processor(flops_per_cycle=32, clock=3e9, vectors="AVX2")
    assert core.flops(8) == 8 * 96e9
    assert [core.bandwidth(cores) for cores in (1, 2, 3, 16)] == [12e9, 24e9, 36e9, 36e9]
    assert "8 core(s) with AVX2 at 3.0 GHz" in core.told(8)


def test_this_machine_s_processor_is_told() -> None:
    found = this_processor()
    assert found.flops_per_cycle in (8, 16, 32, 64)
    assert 1e9 <= found.clock <= 6e9
