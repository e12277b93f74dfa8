"""Every part of the check on a card, each in a process of its own with a time limit, into one JSON file.

    bench/gpu/run.sh [--device cuda:0] [--quick] [--out FILE] [--only PART ...] [--seconds 460]

A part that fails or takes too long is recorded with its last words; the others go on. The file is written anew after
each part, so that what was measured is there whatever happens next.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

BENCH: Final = Path(__file__).parent.parent


@dataclass(frozen=True)
class Part:
    """A name and the most seconds it may take on a card; the most telling ones come first."""

    name: str
    seconds: float


PARTS: Final = (
    Part("machine", 30),
    Part("equality", 70),
    Part("fp16", 40),
    Part("out_of_memory", 40),
    Part("memory", 60),
    Part("techniques", 110),
    Part("streaming", 60),
    Part("streamed_70b", 110),
    Part("streamed_full", 110),
    Part("trainer", 120),
    Part("compile", 150),
    Part("calibration", 40),
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--quick", action="store_true", help="a tiny model: whether it runs, not how fast")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", ".")) / "gpu.json")
    parser.add_argument("--only", nargs="+", default=[part.name for part in PARTS], choices=[p.name for p in PARTS])
    parser.add_argument("--seconds", type=float, default=460, help="for all parts together")
    parser.add_argument("--patience", type=float, default=1.0, help="times each part's limit, for slow machines")
    options = parser.parse_args()
    began = time.monotonic()
    report: dict[str, Any] = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": options.device,
        "quick": options.quick,
        "parts": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        for part in PARTS:
            if part.name not in options.only:
                continue
            left = options.seconds * options.patience - (time.monotonic() - began)
            limit = min(part.seconds * options.patience, left)
            made = run(part.name, options, scratch, limit) if limit > 5 else {"ok": False, "why": "no time was left"}
            report["parts"][part.name] = made
            report["seconds"] = round(time.monotonic() - began, 1)
            options.out.parent.mkdir(parents=True, exist_ok=True)
            options.out.write_text(json.dumps(report, indent=1), encoding="utf-8")
            print(
                f"{part.name:<16}{'ok' if made['ok'] else 'FAILED':<8}{made.get('seconds', 0):6.1f} s  {shown(made)}",
                flush=True,
            )
    print(f"{report['seconds']:.0f} s, written to {options.out}")
    return 0 if all(made["ok"] for made in report["parts"].values()) else 1


def run(name: str, options: argparse.Namespace, scratch: str, limit: float) -> dict[str, Any]:
    """{"ok", "seconds", "found" or "why"} of one part."""
    began = time.monotonic()
    command = [sys.executable, str(BENCH / "gpu" / "parts.py"), name, "--device", options.device, "--scratch", scratch]
    try:
        made = subprocess.run(
            [*command, *(["--quick"] if options.quick else [])],
            capture_output=True,
            timeout=limit,
            text=True,
            encoding="utf-8",
            errors="replace",
        )
    except subprocess.TimeoutExpired as late:
        said = late.stdout.decode("utf-8", "replace") if isinstance(late.stdout, bytes) else late.stdout or ""
        return {"ok": False, "seconds": round(limit, 1), "why": f"more than {limit:.0f} s", "found": found_in(said)}
    seconds = round(time.monotonic() - began, 1)
    found = found_in(made.stdout)
    if made.returncode == 0:
        return {"ok": all(entry.get("ok", True) for entry in found), "seconds": seconds, "found": found}
    last = [line for line in made.stderr.splitlines() if line.strip()][-12:]
    return {"ok": False, "seconds": seconds, "why": last, "found": found}


def found_in(text: str) -> list[dict[str, Any]]:
    """A part says what it found as JSON objects, one a line; what libraries print in between is passed over."""
    found = []
    for line in text.splitlines():
        if line.startswith('{"'):
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def shown(made: dict[str, Any]) -> str:
    if made["ok"]:
        return f"{len(made['found'])} entries"
    wrong = [entry.get("name", "?") for entry in made.get("found", []) if not entry.get("ok", True)]
    return str(made.get("why", ["?"])[-1] if isinstance(made.get("why"), list) else made.get("why", wrong))[:160]


if __name__ == "__main__":
    sys.exit(main())
