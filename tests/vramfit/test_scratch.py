"""What dead processes left in the making is swept, what living ones write is not."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vramfit import scratch

ROOT = Path(__file__).parents[2]
KILLED = """
import os, signal, sys
from pathlib import Path
from vramfit import scratch

entry = scratch.beside(Path(sys.argv[1]) / "entry")
entry.mkdir()
(entry / "half").write_text("x", encoding="utf-8")
scratch.beside(Path(sys.argv[1]) / "trials.json").write_text("{", encoding="utf-8")
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """A cache in which a process was killed while it wrote a folder and a file; a whole entry is there."""
    parent = tmp_path / "cache" / "tokenised"
    (parent / "whole").mkdir(parents=True)
    done = subprocess.run([sys.executable, "-c", KILLED, str(parent)], cwd=ROOT, check=False)
    assert done.returncode != 0 and len(list(parent.iterdir())) == 3
    return tmp_path / "cache"


def names(folder: Path) -> list[str]:
    return sorted(path.name.partition(".unfinished-")[0] for path in folder.rglob("*"))


def test_what_a_killed_process_left_is_swept(left: Path) -> None:
    assert [path.name.partition(".unfinished-")[0] for path in scratch.abandoned(left)] == ["entry", "trials.json"]
    scratch.sweep(left)
    assert names(left) == ["tokenised", "whole"]


def test_what_a_living_process_writes_stays(left: Path) -> None:
    scratch.sweep(left)
    for pid in (os.getpid(), os.getppid()):
        place = scratch.beside(left / "tokenised" / "entry")
        place.with_name(place.name.replace(f"-{os.getpid()}-", f"-{pid}-")).mkdir()
        os.utime(left, (1, 1))
    assert scratch.abandoned(left) == []
    scratch.sweep(left)
    assert len(list((left / "tokenised").iterdir())) == 3


def test_what_another_machine_writes_is_given_up_once_it_is_quiet(left: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or another boot of this one: nobody can say here whether such a process lives."""
    monkeypatch.setattr(scratch, "_home", lambda: "0" * 8)
    (left / "tokenised" / "unfinished-ab12cd_3").mkdir()  # of an earlier version
    assert scratch.abandoned(left) == []
    long_ago = time.time() - scratch.QUIET_S - 1
    for path in left.rglob("*"):
        os.utime(path, (long_ago, long_ago))
    (writes,) = left.rglob("half")
    os.utime(writes)  # in a folder that is old: somebody is at work in it
    assert [path.name.partition(".unfinished-")[0] for path in scratch.abandoned(left)] == [
        "trials.json",
        "unfinished-ab12cd_3",
    ]
    os.utime(writes, (long_ago, long_ago))
    scratch.sweep(left)
    assert names(left) == ["tokenised", "whole"]


def test_nothing_is_swept_where_there_is_nothing(tmp_path: Path) -> None:
    scratch.sweep(tmp_path / "absent")
    assert not (tmp_path / "absent").exists()
