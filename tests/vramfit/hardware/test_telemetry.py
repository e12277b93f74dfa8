"""Readings: complete with a card, honest without one, alive when a sensor dies."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from vramfit.hardware.devices import TorchBuild, probe
from vramfit.hardware.telemetry import Sampler
from vramfit.units import GIB

EVERY_SENSOR = {
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetPowerUsage",
    "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons",
    "nvmlDeviceGetCurrentClocksThrottleReasons",
}
CUDA_BUILD = TorchBuild(version="2.13.0+cu130", cuda="13.0")


def test_a_card_tells_memory_load_power_and_temperature(driver: Any, card: Any, tmp_path: Path) -> None:
    nvml = driver(card())
    device = probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0]

    reading = Sampler(device, nvml=nvml).read(os.getpid())

    assert reading.device_bytes == 1 * GIB
    assert reading.utilisation == 0.87
    assert reading.power_watts == 312.5
    assert reading.temperature_c == 64
    assert reading.host_bytes > 2**20


def test_a_lost_sensor_reads_none_and_the_others_go_on(driver: Any, card: Any, tmp_path: Path) -> None:
    lost = card()
    nvml = driver(lost)
    sampler = Sampler(probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0], nvml=nvml)
    lost.broken |= {"nvmlDeviceGetPowerUsage", "nvmlDeviceGetMemoryInfo"}

    reading = sampler.read(os.getpid())

    assert reading.power_watts is None
    assert reading.device_bytes is None
    assert reading.temperature_c == 64


def test_case_146_147_readings_are_of_the_card_that_was_chosen(driver: Any, card: Any, tmp_path: Path) -> None:
    """By its UUID: cuda:0 is another card under a mask, and where CUDA counts the fastest first."""
    gib = [2, 3, 5, 7]
    nvml = driver(*(card(uuid=f"GPU-{index}", free=(24 - used) * GIB) for index, used in enumerate(gib)))
    masked = probe(tmp_path, nvml=nvml, environment={"CUDA_VISIBLE_DEVICES": "2,3"}, build=CUDA_BUILD)
    mixed = driver(card(name="NVIDIA GeForce RTX 3060", uuid="GPU-slow", free=23 * GIB, cores=3584), nvml.cards[3])
    fastest_first = probe(tmp_path, nvml=mixed, environment={}, build=CUDA_BUILD)

    for machine, driver_s, expected in ((masked, nvml, ("GPU-2", 5)), (fastest_first, mixed, ("GPU-3", 7))):
        chosen = machine.device("cuda:0")
        reading = Sampler(chosen, nvml=driver_s).read(os.getpid())
        assert (chosen.identity, reading.device_bytes) == (expected[0], expected[1] * GIB)


def test_case_151_a_card_that_falls_off_the_bus_while_it_is_read_ends_no_reading(
    driver: Any, card: Any, tmp_path: Path
) -> None:
    lost = card()
    nvml = driver(lost)
    sampler = Sampler(probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0], nvml=nvml)
    readings = []
    for call in range(1, 21):
        if call == 10:
            lost.broken |= EVERY_SENSOR
        readings.append(sampler.read(os.getpid()))

    assert all(reading.temperature_c == 64 for reading in readings[:9])
    for reading in readings[9:]:
        assert reading.device_bytes is reading.power_watts is reading.temperature_c is reading.utilisation is None
        assert reading.slowed_by_heat is None
        assert reading.host_bytes > 2**20


@pytest.mark.parametrize(("bits", "hot"), [(0x0, False), (0x4 | 0x1, False), (0x20, True), (0x40 | 0x8, True)])
@pytest.mark.parametrize("broken", [set(), {"nvmlDeviceGetCurrentClocksEventReasons"}])
def test_clocks_held_down_by_heat_are_told_from_all_other_reasons(
    driver: Any, card: Any, tmp_path: Path, bits: int, hot: bool, broken: set[str]
) -> None:
    """Drivers before 535 know the question by its older name only."""
    nvml = driver(card(clocks=bits, broken=broken))
    sampler = Sampler(probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0], nvml=nvml)
    assert sampler.read(os.getpid()).slowed_by_heat is hot


def test_a_driver_that_does_not_tell_what_holds_the_clocks_reads_none(driver: Any, card: Any, tmp_path: Path) -> None:
    silent = card(
        clocks=0x20, broken={"nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"}
    )
    nvml = driver(silent)
    sampler = Sampler(probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0], nvml=nvml)
    assert sampler.read(os.getpid()).slowed_by_heat is None


def test_without_a_card_there_is_the_process(driver: Any, tmp_path: Path) -> None:
    nvml = driver(fails="NVML Shared Library Not Found")
    device = probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0]
    sampler = Sampler(device)

    first = sampler.read(os.getpid())
    began = time.process_time()
    while time.process_time() - began < 0.05:
        pass
    second = sampler.read(os.getpid())

    assert first.device_bytes is None
    assert first.cpu_utilisation is None
    assert second.cpu_utilisation is not None
    assert second.cpu_utilisation > 0
    assert second.host_bytes > 2**20


def test_case_153_a_process_that_is_gone_reads_zero(driver: Any, tmp_path: Path) -> None:
    nvml = driver(fails="NVML Shared Library Not Found")
    device = probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0]

    assert Sampler(device).read(2**22 + 12345).host_bytes == 0


def test_a_reading_is_cheap(driver: Any, card: Any, tmp_path: Path) -> None:
    nvml = driver(card())
    sampler = Sampler(probe(tmp_path, nvml=nvml, environment={}, build=CUDA_BUILD).devices[0], nvml=nvml)
    sampler.read(os.getpid())

    began = time.process_time()
    for _ in range(50):
        sampler.read(os.getpid())

    assert (time.process_time() - began) / 50 < 0.002
