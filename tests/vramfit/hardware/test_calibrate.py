"""Measuring this machine, with tiny sizes; what is kept, and when it is used."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from vramfit.__main__ import main
from vramfit.errors import HardwareError
from vramfit.hardware import calibrate as module
from vramfit.hardware.calibrate import Calibration, calibrate, kept_in, key, saved, with_measured_rates
from vramfit.hardware.devices import Device, ProductRate, TorchBuild, probe

CPU = Device(
    kind="cpu", name="CPU (2 cores)", torch_device="cpu", identity="cpu", memory_bytes=2**33, free_bytes=2**33,
    bf16=False, fp16=False, flops={"fp32": 90e9},
)  # fmt: skip
FOUND = Calibration(
    products=(ProductRate(dtype="fp32", rows=8, width=16, flops=2e9),), memory=3e9, to_device=0.0, from_device=0.0,
    ram=8e9, disk_read=0.0, disk_write=1e9, launch_seconds=5e-6, day="2026-01-01",
)  # fmt: skip
CARD = dataclasses.replace(
    CPU, kind="rocm", name="card", torch_device="cuda:0", identity="pci", flops={"bf16": 1e14}, link_bandwidth=2e10
)


def says(*lines: object, code: int = 0) -> tuple[str, ...]:
    """A worker that prints these lines."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    return sys.executable, "-c", f"import sys; sys.stdin.readline(); print({text!r}); sys.exit({code})"


def test_this_machine_is_measured_kept_and_used(tmp_path: Path) -> None:
    """The real worker."""
    heard: list[tuple[float, str]] = []
    cpu = probe(tmp_path).device("cpu")
    found = calibrate(cpu, tmp_path, progress=lambda share, what: heard.append((share, what)), tiny=True)

    assert {(rate.dtype, rate.rows, rate.width) for rate in found.products} == {
        ("fp32", rows, width) for rows in (8, 32) for width in (16, 64)
    }
    assert all(rate.flops > 0 for rate in found.products)
    assert min(found.memory, found.ram, found.disk_write, found.launch_seconds) > 0
    assert (found.to_device, found.from_device) == (0, 0)
    assert [share for share, _ in heard] == sorted(share for share, _ in heard)
    assert heard[0] == (0.0, "fp32 products")
    assert heard[-1][0] == 1.0

    again = probe(tmp_path).device("cpu")
    assert cpu.rates == "assumed"
    assert again.rates == "measured"
    assert again.products == found.products
    assert again.flops["fp32"] == max(rate.flops for rate in found.products)
    assert [place.name for place in tmp_path.iterdir()] == ["cache"]


def test_what_libraries_print_is_nothing_to_us(tmp_path: Path) -> None:
    command = says("warning: something", "[1]", {"share": 0.5, "what": "link"}, {"measured": FOUND.to_json()})
    heard: list[float] = []

    assert calibrate(CPU, tmp_path, progress=lambda share, _: heard.append(share), command=command) == FOUND
    assert heard == [0.5]
    assert saved(CPU, tmp_path) == FOUND


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (says({"error": "CUDA error: device lost"}, code=1), "device lost"),
        ((sys.executable, "-c", "raise SystemExit('no torch here')"), "no torch here"),
    ],
)
def test_a_measurement_that_fails_says_why_and_keeps_nothing(
    tmp_path: Path, command: tuple[str, ...], words: str
) -> None:
    with pytest.raises(HardwareError, match=words):
        calibrate(CPU, tmp_path, command=command)

    assert saved(CPU, tmp_path) is None


def test_another_driver_torch_or_device_is_measured_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calibrate(CPU, tmp_path, command=says({"measured": FOUND.to_json()}))

    assert with_measured_rates(dataclasses.replace(CPU, name="CPU (4 cores)"), tmp_path).rates == "assumed"
    assert with_measured_rates(CPU, tmp_path).rates == "measured"
    assert key(CPU, build=TorchBuild(version="9.9")) != key(CPU)
    monkeypatch.setattr(module, "torch_build", lambda: TorchBuild(version="9.9"))
    assert saved(CPU, tmp_path) is None


def test_two_devices_are_kept_beside_each_other(tmp_path: Path) -> None:
    other = dataclasses.replace(FOUND, ram=1e9)
    calibrate(CPU, tmp_path, command=says({"measured": FOUND.to_json()}))
    calibrate(CARD, tmp_path, command=says({"measured": other.to_json()}))

    assert saved(CPU, tmp_path) == FOUND
    assert saved(CARD, tmp_path) == other


def test_rates_that_could_not_be_measured_stay(tmp_path: Path) -> None:
    calibrate(CARD, tmp_path, command=says({"measured": FOUND.to_json()}))
    found = with_measured_rates(CARD, tmp_path)

    assert found.link_bandwidth == CARD.link_bandwidth
    assert found.flops == {"bf16": 1e14, "fp32": 2e9}
    assert found.memory_bandwidth == 3e9


@pytest.mark.parametrize("text", ["", "[]", "{", '{"x": 1}', "[" * 20_000, "9" * 5000])
def test_a_damaged_file_is_as_none(tmp_path: Path, text: str) -> None:
    kept_in(tmp_path).parent.mkdir(parents=True)
    kept_in(tmp_path).write_text(text.replace("x", key(CPU)), encoding="utf-8")

    assert saved(CPU, tmp_path) is None
    assert with_measured_rates(CPU, tmp_path) == CPU


ABSURD: list[dict[str, object]] = [
    {"memory": float("nan")},
    {"memory": -3e9},
    {"ram": float("inf")},
    {"to_device": "fast"},
    {"disk_read": None},
    {"launch_seconds": True},
    {"launch_seconds": 1e300},
    {"products": None},
    {"products": [1]},
    {"products": [{"dtype": "fp32", "rows": 8, "width": 16}]},
    {"products": [{"dtype": "fp32", "rows": 8, "width": 16, "flops": 0.0}]},
    {"products": [{"dtype": "fp32", "rows": 0, "width": 16, "flops": 1e9}]},
    {"products": [{"dtype": 5, "rows": 8, "width": 16, "flops": 1e9}]},
    {"colour": 1.0},
]


@pytest.mark.parametrize("changes", ABSURD)
def test_what_no_machine_can_have_is_not_used_and_the_log_says_so(
    tmp_path: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    kept_in(tmp_path).parent.mkdir(parents=True)
    kept_in(tmp_path).write_text(json.dumps({key(CPU): {**FOUND.to_json(), **changes}}), encoding="utf-8")

    assert with_measured_rates(CPU, tmp_path) == CPU
    assert f"calibration of {CPU.name}" in caplog.text and "is not used" in caplog.text
    assert next(iter(changes)).removesuffix("s") in caplog.text or "lacks a figure" in caplog.text


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(Calibration)])
def test_a_figure_that_is_missing_is_a_measurement_that_failed(tmp_path: Path, name: str) -> None:
    measured = {key: value for key, value in FOUND.to_json().items() if key != name}
    with pytest.raises(HardwareError, match="cannot be: it lacks a figure"):
        calibrate(CPU, tmp_path, command=says({"measured": measured}))
    assert saved(CPU, tmp_path) is None


def test_a_worker_that_hangs_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PATIENCE_S", 0.5)
    with pytest.raises(HardwareError, match="did not come to an end"):
        calibrate(CPU, tmp_path, command=(sys.executable, "-c", "import time; time.sleep(600)"))


def test_the_command_tells_its_progress_in_json_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command = says({"share": 0.0, "what": "fp32 products"}, {"measured": FOUND.to_json()})
    monkeypatch.setattr(
        "vramfit.commands.calibrate.calibrate", lambda *given, **named: calibrate(*given, **named, command=command)
    )

    assert main(["calibrate", "--device", "cpu", "--data-dir", str(tmp_path), "--json"]) == 0
    first, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == {"share": 0.0, "what": "fp32 products"}
    assert Calibration.from_json(last["measured"]) == FOUND

    assert main(["calibrate", "--device", "cpu", "--data-dir", str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert "8.00 GB/s" in said.out
    assert "not measured" in said.out
    assert "fp32 products" in said.err
