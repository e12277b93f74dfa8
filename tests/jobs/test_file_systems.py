"""Which file systems are of the network, and that the database goes without a write-ahead log there, which is told."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import file_systems, processes
from jobs.store import Store
from vramfit.config import RunConfig

MOUNTS = [
    ("/", "ext4"),
    ("/mnt", "nfs4"),
    ("/mnt/local", "xfs"),
    ("/share", "ext4"),
    ("/share", "cifs"),
    ("/home/me/far", "fuse.sshfs"),
]


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As on a machine with these mounts."""
    monkeypatch.setattr(file_systems, "_mounts", lambda: MOUNTS)
    file_systems.network_file_system.cache_clear()
    yield
    file_systems.network_file_system.cache_clear()


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/home/me/vramfit", None),
        ("/mnt/vramfit", "nfs4"),
        ("/mnt", "nfs4"),
        ("/mnt/local/vramfit", None),
        ("/mntx/vramfit", None),
        ("/share/vramfit", "cifs"),
        ("/home/me/far/vramfit", "fuse.sshfs"),
    ],
)
def test_the_innermost_mount_decides(mounted: None, folder: str, kind: str | None) -> None:
    assert file_systems.network_file_system(Path(folder)) == kind


def test_this_machine_tells_its_mounts() -> None:
    assert file_systems._mounts(), "nothing is mounted here"


def test_on_a_network_there_is_no_write_ahead_log_and_everything_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Store(tmp_path) as store:  # made on a local disk, then the folder was moved
        assert store._db.execute("PRAGMA journal_mode").fetchone()[0] == "wal"
        store.add_job(RunConfig())
    monkeypatch.setattr(file_systems, "_mounts", lambda: [("/", "nfs4")])
    file_systems.network_file_system.cache_clear()
    try:
        with Store(tmp_path) as store, Store(tmp_path) as other:
            assert store._db.execute("PRAGMA journal_mode").fetchone()[0] == "truncate"
            assert store.add_job(RunConfig()) == 2
            assert [job.id for job in other.jobs()] == [2, 1]
        assert "network file system (nfs4)" in (file_systems.notice(tmp_path) or "")
    finally:
        monkeypatch.undo()
        file_systems.network_file_system.cache_clear()
    assert file_systems.notice(tmp_path) is None


def test_the_supervisor_says_so_in_its_log(tmp_path: Path) -> None:
    code = (
        "import sys; from jobs import file_systems, supervisor; file_systems._mounts = lambda: [('/', 'cifs')]; "
        "sys.exit(supervisor.main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", code, "--data-dir", str(tmp_path), "--idle", "0"]
    done = subprocess.run(command, cwd=processes.ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is on a network file system (cifs)" in done.stdout
