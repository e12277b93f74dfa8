"""Which devices a machine has, under masks and with cards that do not answer."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest

from vramfit.errors import HardwareError
from vramfit.hardware import devices
from vramfit.hardware.devices import Machine, TorchBuild, probe, torch_build
from vramfit.units import GIB

CUDA_BUILD = TorchBuild(version="2.13.0+cu130", cuda="13.0")


def machine(nvml: Any, tmp_path: Path, **environment: str) -> Machine:
    return probe(tmp_path, nvml=nvml, environment=environment, build=CUDA_BUILD)


def identities(found: Machine) -> list[tuple[str, str]]:
    return [(device.torch_device, device.identity) for device in found.devices if device.kind == "cuda"]


def test_a_card_has_its_driver_facts_and_catalogue_rates(driver: Any, card: Any, tmp_path: Path) -> None:
    found = machine(driver(card()), tmp_path).devices[0]

    assert (found.kind, found.torch_device, found.identity) == ("cuda", "cuda:0", "GPU-aaaa0000")
    assert (found.memory_bytes, found.free_bytes) == (24 * GIB, 23 * GIB)
    assert found.bf16
    assert found.fp8
    assert found.flops["bf16"] == 165.2e12
    assert found.rates == "catalogue"
    assert found.power_watts == 450


def test_a_card_without_an_entry_has_unknown_rates(driver: Any, card: Any, tmp_path: Path) -> None:
    found = machine(driver(card(name="NVIDIA Tesla T4", capability=(7, 5))), tmp_path).devices[0]

    assert found.flops == {}
    assert not found.bf16
    assert found.fp16


def test_the_cpu_is_the_last_device_and_its_memory_is_the_ram(driver: Any, card: Any, tmp_path: Path) -> None:
    found = machine(driver(card()), tmp_path)
    cpu = found.devices[-1]

    assert cpu.torch_device == "cpu"
    assert 0 < cpu.free_bytes <= cpu.memory_bytes == found.ram_bytes <= psutil.virtual_memory().total
    assert cpu.flops["fp32"] > 0
    assert found.disk_free_bytes > 0


def test_case_152_a_lost_card_does_not_hide_the_others(driver: Any, card: Any, tmp_path: Path) -> None:
    nvml = driver(card(uuid="GPU-a"), card(uuid="GPU-b", broken={"handle"}), card(uuid="GPU-c"))

    found = machine(nvml, tmp_path)

    assert identities(found) == [("cuda:0", "GPU-a"), ("cuda:1", "GPU-c")]
    assert any("card 1 does not answer (GPU is lost)" in note for note in found.notes)


def test_a_card_that_hides_its_memory_keeps_the_numbers_of_the_others(driver: Any, card: Any, tmp_path: Path) -> None:
    nvml = driver(card(uuid="GPU-a", broken={"nvmlDeviceGetMemoryInfo"}), card(uuid="GPU-b"))

    found = machine(nvml, tmp_path)

    assert identities(found) == [("cuda:1", "GPU-b")]
    assert any("does not tell its memory" in note for note in found.notes)


def test_a_sensor_that_fails_costs_only_itself(driver: Any, card: Any, tmp_path: Path) -> None:
    nvml = driver(card(broken={"nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetCudaComputeCapability"}))

    found = machine(nvml, tmp_path).devices[0]

    assert found.power_watts == 450  # the catalogue's
    assert not found.bf16


@pytest.mark.parametrize(
    ("mask", "expected"),
    [
        ("2,0", ["GPU-ccc1", "GPU-aaa1"]),
        (" 1 ", ["GPU-bbb1"]),
        ("GPU-bbb", ["GPU-bbb1"]),
        ("GPU-ccc1,0", ["GPU-ccc1", "GPU-aaa1"]),
        ("0,7,1", ["GPU-aaa1"]),
        ("0,-1,1", ["GPU-aaa1"]),
        ("0,foo", ["GPU-aaa1"]),
        ("MIG-ddd1", ["MIG-ddd1"]),
        ("MIG-nowhere", []),
        ("GPU-", []),
        ("", []),
        ("-1", []),
        ("NoDevFiles", []),
        ("1,1", []),
    ],
)
def test_case_148_the_mask_is_read_as_cuda_reads_it(
    driver: Any, card: Any, tmp_path: Path, mask: str, expected: list[str]
) -> None:
    nvml = driver(card(uuid="GPU-aaa1"), card(uuid="GPU-bbb1"), card(uuid="GPU-ccc1"), slices=[card(uuid="MIG-ddd1")])

    found = machine(nvml, tmp_path, CUDA_VISIBLE_DEVICES=mask)

    assert identities(found) == [(f"cuda:{index}", uuid) for index, uuid in enumerate(expected)]
    if not expected:
        assert any("CUDA_VISIBLE_DEVICES" in note for note in found.notes)


def test_case_147_cuda_counts_the_fastest_first_unless_told_otherwise(driver: Any, card: Any, tmp_path: Path) -> None:
    slow = card(name="NVIDIA GeForce RTX 3060", uuid="GPU-slow", total=12 * GIB, free=11 * GIB, cores=3584)
    nvml = driver(slow, card(uuid="GPU-fast"))

    assert identities(machine(nvml, tmp_path)) == [("cuda:0", "GPU-fast"), ("cuda:1", "GPU-slow")]
    by_address = machine(nvml, tmp_path, CUDA_DEVICE_ORDER="PCI_BUS_ID")
    assert identities(by_address) == [("cuda:1", "GPU-fast"), ("cuda:0", "GPU-slow")]  # most free memory first


def test_a_silent_driver_leaves_the_cpu_and_a_note(driver: Any, tmp_path: Path) -> None:
    broken = machine(driver(fails="Driver/library version mismatch"), tmp_path)
    none = machine(driver(fails="NVML Shared Library Not Found"), tmp_path)

    assert [device.kind for device in broken.devices] == ["cpu"]
    assert "version mismatch" in broken.notes[0]
    assert [device.kind for device in none.devices] == ["cpu"]
    assert none.notes == ()


def test_a_torch_without_cuda_cannot_use_the_card(driver: Any, card: Any, tmp_path: Path) -> None:
    found = probe(tmp_path, nvml=driver(card()), environment={}, build=TorchBuild(version="2.13.0+cpu"))

    assert [device.kind for device in found.devices] == ["cpu"]
    assert "not built for NVIDIA cards" in found.notes[0]


def test_an_absent_device_is_refused_with_those_there_are(driver: Any, card: Any, tmp_path: Path) -> None:
    found = machine(driver(card()), tmp_path)

    assert found.device("auto") is found.devices[0]
    with pytest.raises(HardwareError, match=r"no device 'cuda:3', it has: cuda:0, cpu"):
        found.device("cuda:3")


def test_the_build_of_torch_is_read_without_importing_it() -> None:
    import torch

    build = torch_build()

    assert build is not None
    assert build.version == torch.__version__
    assert build.cuda == torch.version.cuda


def test_the_disk_of_a_folder_that_is_not_there_yet(driver: Any, tmp_path: Path) -> None:
    found = machine(driver(fails="NVML Shared Library Not Found"), tmp_path / "not" / "yet")

    assert found.disk_free_bytes > 0
    assert found.cpu_cores >= 1


BINDINGS = {
    "hangs": "import time\ntime.sleep(600)\n",
    "ends whoever asks": "import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n",
    "is no binding": "raise SystemExit(3)\n",
    "answers": (
        "from types import SimpleNamespace\n"
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): pass\n"
        "def nvmlDeviceGetCount(): return 1\n"
        "def nvmlDeviceGetHandleByIndex(index): return index\n"
        "def nvmlDeviceGetName(handle): return 'NVIDIA GeForce RTX 4090'\n"
        f"def nvmlDeviceGetMemoryInfo(handle): return SimpleNamespace(total={24 * GIB}, free={23 * GIB}, used={GIB})\n"
    ),
}


def of_a_child(folder: Path, what: str, monkeypatch: pytest.MonkeyPatch, build: TorchBuild = CUDA_BUILD) -> Machine:
    """The machine, where the driver's binding does this."""
    (folder / "pynvml.py").write_text(BINDINGS[what], encoding="utf-8")
    monkeypatch.setattr(devices, "_driver_there", lambda: True)
    return probe(folder, environment={"PYTHONPATH": str(folder)}, build=build)


def test_the_driver_is_asked_by_a_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = of_a_child(tmp_path, "answers", monkeypatch)
    assert (found.devices[0].name, found.devices[0].free_bytes) == ("NVIDIA GeForce RTX 4090", 23 * GIB)
    assert found.devices[0].flops["bf16"] == 165.2e12
    assert not found.silent


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("hangs", "did not answer within 1 s"),
        ("ends whoever asks", f"ended the process that asked it (signal {signal.SIGSEGV.value})"),
        ("is no binding", "could not be asked (exit code 3)"),
    ],
)
@pytest.mark.skipif(os.name == "nt", reason="no process ends by a signal on Windows")
def test_case_151_a_driver_that_hangs_or_ends_whoever_asks_it_takes_nothing_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str, words: str
) -> None:
    monkeypatch.setattr(devices, "_DRIVER_SECONDS", 1.0)
    before = psutil.Process().children()  # other tests' workers
    found = of_a_child(tmp_path, what, monkeypatch)
    assert [device.kind for device in found.devices] == ["cpu"]
    assert found.silent and words in found.notes[0] and "nvidia-smi" in found.notes[0]
    assert psutil.Process().children() == before


def test_a_silent_driver_that_torch_cannot_use_anyway_keeps_nothing_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = of_a_child(tmp_path, "is no binding", monkeypatch, TorchBuild(version="2.13.0+cpu"))
    assert not found.silent


def test_a_child_that_cannot_be_ended_is_left_and_no_second_one_joins_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one is that waits inside the system: here KILL does not reach it."""
    monkeypatch.setattr(devices, "_DRIVER_SECONDS", 0.1)
    monkeypatch.setattr(devices, "_KILLED_SECONDS", 0.1)
    monkeypatch.setattr(subprocess.Popen, "kill", lambda child: None)
    before = psutil.Process().children()
    assert of_a_child(tmp_path, "hangs", monkeypatch).silent
    (stuck,) = [child for child in psutil.Process().children() if child not in before]
    again = of_a_child(tmp_path, "answers", monkeypatch)
    assert again.silent and "still not answered" in again.notes[0]
    assert [child for child in psutil.Process().children() if child not in before] == [stuck]
    os.kill(stuck.pid, signal.SIGTERM)
    devices._stuck[0].wait(10)
    monkeypatch.setattr(devices, "_DRIVER_SECONDS", 20.0)
    assert not of_a_child(tmp_path, "answers", monkeypatch).silent
