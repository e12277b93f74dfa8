"""Whatever the terminal's settings say: what is printed never ends a program."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = (
    "import sys; from vramfit.console import use_utf8; use_utf8()\n"
    "for stream in (sys.stdout, sys.stderr):\n"
    "    print('\\u2047 \\U0001f600 \\u65e5\\u672c gr\\xf6\\xdfer', chr(0xd83d), file=stream)\n"
)


@pytest.mark.parametrize(
    "settings",
    [
        {"PYTHONIOENCODING": "cp1252"},
        {"PYTHONIOENCODING": "gbk"},
        {"PYTHONIOENCODING": "ascii:strict"},
        {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"},
        {"PYTHONUTF8": "1"},
    ],
)
def test_case_006_007_what_a_console_cannot_show_is_escaped(settings: dict[str, str]) -> None:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "LC_", "LANG"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, env={**kept, **settings}, capture_output=True, check=True, timeout=60
    )
    for said in (done.stdout, done.stderr):
        assert said.decode("utf-8").split() == ["\u2047", "\U0001f600", "日本", "größer", "\\ud83d"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no device that is always full")
def test_a_log_on_a_full_disk_ends_nothing_that_writes_to_it() -> None:
    program = (
        "import sys; from vramfit.console import lose_what_is_not_taken; lose_what_is_not_taken()\n"
        "for stream in (sys.stdout, sys.stderr): print('lost', file=stream, flush=True)\n"
    )
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=full, stderr=full, check=False)
    assert done.returncode == 0
    taken = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert (taken.stdout, taken.stderr) == ("lost\n", "lost\n")
