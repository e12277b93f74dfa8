import errno
import threading
from pathlib import Path

import pytest

from vramfit.errors import InternalError, OutOfDisk
from vramfit.starter.kept import keep, starter_key


def test_made_once(tmp_path: Path) -> None:
    calls = []

    def write(folder: Path) -> None:
        calls.append(folder)
        (folder / "a").write_text("x", encoding="utf-8")

    place = tmp_path / "new folder" / "thing"
    assert keep(place, write) == keep(place, write) == place
    assert len(calls) == 1 and (place / "a").read_text(encoding="utf-8") == "x"
    assert list(place.parent.iterdir()) == [place]


def test_a_failure_leaves_nothing(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / "half").write_text("x", encoding="utf-8")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OutOfDisk, match="The disk is full"):
        keep(tmp_path / "thing", write)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(InternalError, match="cannot be written"):
        keep(tmp_path / "file" / "thing", lambda folder: None)


def test_two_at_once_agree(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def write(folder: Path) -> None:
        (folder / "a").write_text("x", encoding="utf-8")
        both.wait(timeout=20)

    threads = [threading.Thread(target=keep, args=(tmp_path / "thing", write)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert list(tmp_path.iterdir()) == [tmp_path / "thing"]
    assert (tmp_path / "thing" / "a").read_text(encoding="utf-8") == "x"


def test_key_is_hex_and_stable() -> None:
    assert starter_key() == starter_key() and len(starter_key()) == 16 and int(starter_key(), 16) >= 0
