"""Limits of memory from outside: what counts, who ends the process, and what is taken for want of memory."""

from __future__ import annotations

import sys
from pathlib import Path

import memory_limit
import pytest
from memory_limit import Ended, group_home, run_inside

MIB = 2**20

_CHANGES_A_FILE = """
import mmap, sys, time
with open(sys.argv[1], "w+b") as file:
    file.truncate({nbytes})
    mapped = mmap.mmap(file.fileno(), {nbytes})
    {work}
    time.sleep(1)
"""

_WRITES = f"[mapped.__setitem__(at, 1) for at in range(0, {96 * MIB}, 4096)]"
_READS = f"sum(mapped[at] for at in range(0, {96 * MIB}, 4096))"

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits are Linux' own")


def changing(tmp_path: Path, work: str, limit: int = 48 * MIB) -> Ended:
    code = _CHANGES_A_FILE.format(nbytes=96 * MIB, work=work)
    return run_inside([sys.executable, "-c", code, str(tmp_path / "pages")], limit_bytes=limit)


@pytest.fixture
def without_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_limit, "group_home", lambda: None)


@pytest.mark.usefixtures("without_groups")
def test_changed_pages_of_a_shared_file_count_though_rlimit_data_leaves_them_out(tmp_path: Path) -> None:
    side = changing(tmp_path, _WRITES)
    assert side.ended_by_limit and side.lacked_memory and not side.held
    assert side.own_bytes > 48 * MIB


@pytest.mark.usefixtures("without_groups")
def test_pages_that_are_only_read_do_not_count(tmp_path: Path) -> None:
    side = changing(tmp_path, _READS)
    assert side.held and not side.ended_by_limit and side.code == 0
    assert side.own_bytes <= 48 * MIB < side.resident_bytes


@pytest.mark.usefixtures("without_groups")
def test_own_memory_is_refused_beyond_the_limit() -> None:
    side = run_inside([sys.executable, "-c", f"bytearray({96 * MIB})"], limit_bytes=48 * MIB)
    assert side.code == 1 and side.lacked_memory and not side.held
    assert side.last_words == "MemoryError"


@pytest.mark.parametrize(
    ("told", "lacks"),
    [
        ("RuntimeError: DefaultCPUAllocator: can't allocate memory: you tried to allocate 11534336 bytes", True),
        ("OSError: [Errno 12] Cannot allocate memory", True),
        ("vramfit.errors.ModelError: Memory ran out while the weights of x were loaded", True),
        ("vramfit.errors.ModelError: The folder x has no config.json", False),
        ("", False),
    ],
)
def test_only_words_about_memory_are_taken_for_want_of_memory(told: str, lacks: bool) -> None:
    side = Ended(code=1, out="", told=told, own_bytes=1, resident_bytes=1, limit_bytes=2, ended_by_limit=False)
    assert side.lacked_memory is lacks
    assert side.last_words == (told or "exit code 1")


def test_a_group_is_made_under_the_nearest_one_whose_children_can_have_limits(tmp_path: Path) -> None:
    (tmp_path / "user" / "session").mkdir(parents=True)
    own = tmp_path / "of"
    own.write_text("4:memory:/elsewhere\n0::/user/session\n")
    mounted = tmp_path
    assert group_home(mounted, own) is None
    (tmp_path / "cgroup.subtree_control").write_text("cpu memory\n")
    assert group_home(mounted, own) == tmp_path
    (tmp_path / "user" / "cgroup.subtree_control").write_text("memory pids\n")
    assert group_home(mounted, own) == tmp_path / "user"
    own.write_text("4:memory:/elsewhere\n")
    assert group_home(mounted, own) is None
