"""python -m vramfit calibrate: what this machine reaches, measured in about ten seconds and used from then on."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from vramfit.hardware.calibrate import Calibration, calibrate
from vramfit.hardware.devices import probe
from vramfit.places import default_data_folder, typed_path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda:0, ...")
    parser.add_argument("--data-dir", type=Path, help="where the result is kept (default: the panel's data folder)")
    parser.add_argument(
        "--json", action="store_true", help="one JSON object a line: progress as share and what, then the result"
    )


def run(options: argparse.Namespace) -> None:
    """Measure and print. Raises HardwareError."""
    folder = typed_path(options.data_dir) if options.data_dir else default_data_folder()
    device = probe(folder).device(options.device)
    found = calibrate(device, folder, progress=_json_line if options.json else _bar)
    if options.json:
        print(json.dumps({"device": device.name, "measured": found.to_json()}), flush=True)
        return
    print(describe(device.name, found))


def _json_line(share: float, what: str) -> None:
    print(json.dumps({"share": share, "what": what}), flush=True)


def _bar(share: float, what: str) -> None:
    """One line on the terminal, drawn over itself."""
    done = round(30 * share)
    end = "\n" if share >= 1 else ""
    print(f"\r[{'#' * done}{'.' * (30 - done)}] {what:<16}", end=end, file=sys.stderr, flush=True)


def describe(name: str, found: Calibration) -> str:
    """What was measured, in a few lines."""
    lines = [
        name,
        *(
            f"  {rate.dtype} {rate.rows:>6} x {rate.width:<5} {rate.flops / 1e12:10.3f} TFLOP/s"
            for rate in found.products
        ),
    ]
    for what, value in (
        ("memory", found.memory),
        ("RAM to device", found.to_device),
        ("device to RAM", found.from_device),
        ("copy in RAM", found.ram),
        ("disk, read", found.disk_read),
        ("disk, written", found.disk_write),
    ):
        lines.append(f"  {what:<20} {f'{value / 1e9:8.2f} GB/s' if value else '   not measured'}")
    lines.append(f"  {'an operation':<20} {found.launch_seconds * 1e6:8.1f} microseconds of the host")
    return "\n".join(lines)
