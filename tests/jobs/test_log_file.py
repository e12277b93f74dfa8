"""A trainer's log: below a size with its beginning and its end, in whole lines, while another process appends to it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import log_file
from jobs.log_file import shorten
from jobs.store import Store
from tests.jobs.test_supervisor import HASTY, add

REMOVED = re.compile(rb"\[\.\.\. ([\d,]+) bytes of this log were removed here \.\.\.\]\n")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thousandth of the real sizes."""
    for name in ("MOST_BYTES", "FIRST_BYTES", "LAST_BYTES"):
        monkeypatch.setattr(log_file, name, getattr(log_file, name) // 1024)


def test_the_real_sizes_leave_ten_megabytes_alone() -> None:
    source = Path(log_file.__file__).read_text(encoding="utf-8")
    assert "MOST_BYTES: Final = 10 * 2**20" in source


def test_beginning_and_end_stay_in_whole_lines_and_what_is_gone_is_counted(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    lines = [f"{number:06d} {'x' * (number % 40)}\n".encode() for number in range(2000)]
    log.write_bytes(b"".join(lines))
    before = log.read_bytes()
    assert shorten(log)
    first, count, last = REMOVED.split(log.read_bytes())
    assert before.startswith(first) and before.endswith(last)
    assert first.endswith(b"\n") and last[:7] in {line[:7] for line in lines}
    assert int(count.replace(b",", b"")) == len(before) - len(first) - len(last)
    assert log_file.FIRST_BYTES - 50 <= len(first) <= log_file.FIRST_BYTES
    assert log_file.LAST_BYTES - 50 <= len(last) <= log_file.LAST_BYTES
    after = log.read_bytes()
    assert not shorten(log) and log.read_bytes() == after


def test_a_log_of_one_line_is_cut_all_the_same_and_one_that_is_not_there_is_none(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    log.write_bytes(b"x" * (log_file.MOST_BYTES + 1))
    assert shorten(log)
    first, _, last = REMOVED.split(log.read_bytes())
    assert (len(first), len(last)) == (log_file.FIRST_BYTES, log_file.LAST_BYTES)
    assert not shorten(tmp_path / "nothing")


@pytest.mark.skipif(os.name == "nt", reason="output does not follow the end of its file on Windows")
def test_while_another_process_writes_the_log_stays_small_and_ends_with_its_last_line(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    code = """
import os, time
for number in range(20000):
    if number == 19999:  # the last line comes when the file was shortened
        time.sleep(0.1)
    os.write(1, b"%08d %s\\n" % (number, b"y" * 40))
"""
    with log.open("ab") as output, subprocess.Popen([sys.executable, "-c", code], stdout=output) as writer:
        largest = 0
        while writer.poll() is None:
            shorten(log)
            largest = max(largest, log.stat().st_size)
            time.sleep(0.001)
    shorten(log)
    lines = log.read_bytes().splitlines()
    assert lines[0].startswith(b"00000000 ") and lines[-1].startswith(b"00019999 ")
    assert log.stat().st_size <= log_file.MOST_BYTES
    numbers = [int(line[:8]) for line in lines if line[:8].isdigit()]
    assert numbers == sorted(set(numbers)), "no line twice, none out of order"


@pytest.mark.skipif(os.name == "nt", reason="output does not follow the end of its file on Windows")
def test_a_trainer_keeps_its_own_log_small(store: Store, drive: Callable[..., Any], monkeypatch: Any) -> None:
    monkeypatch.undo()
    id_ = add(store, steps=100, delay=0.02, noise=12)
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).step > 0 and store.job(id_).log.stat().st_size < log_file.MOST_BYTES)
    assert driven.until_over(id_).state == "succeeded"
    text = store.job(id_).log.read_bytes()
    assert len(text) < log_file.MOST_BYTES
    assert len(REMOVED.findall(text)) == 1
    assert text.startswith(b"00000000 ") and text.endswith(b"step 100\n")
