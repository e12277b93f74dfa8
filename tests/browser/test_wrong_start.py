"""Starting the panel wrong: one sentence and exit code 2, or the next free port."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.browser
ROOT = Path(__file__).parents[2]


def _app(*flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "app.py", "--no-browser", *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=120, check=False)


def test_a_data_folder_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("mine", encoding="utf-8")
    done = _app("--data-dir", str(tmp_path / "note.txt"))
    assert done.returncode == 2
    assert "note.txt" in done.stderr
    assert "--data-dir" in done.stderr
    assert "Traceback" not in done.stderr
    assert (tmp_path / "note.txt").read_text(encoding="utf-8") == "mine"


def test_an_address_that_is_not_this_machines(tmp_path: Path) -> None:
    done = _app("--data-dir", str(tmp_path), "--host", "192.0.2.1")
    assert done.returncode == 2
    assert "192.0.2.1" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_taken_port_is_announced_and_the_next_one_used(seeded: object, tmp_path: Path) -> None:
    panel = type(seeded)(tmp_path / "data")
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        panel.port = taken = other.getsockname()[1]
        try:
            panel.start()
            assert taken < panel.port <= taken + 20
        finally:
            panel.end()
