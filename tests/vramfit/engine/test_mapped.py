"""A tier on disk lends its tensors where they lie, tells what cannot be had, and can do without."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from vramfit.engine.blocks import BlockStream, Layout
from vramfit.engine.mapped import MappedFile
from vramfit.engine.tiers import DiskTier, FilesTier, FrozenBeforeTrained, RamTier
from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.positioned import PositionedFile

SHAPE = (300, 1000)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are lent on Linux only")


def a_tier(folder: Path, *, count: int = 2, leaves: bool = False) -> DiskTier:
    layout = Layout({"odd": ((3,), torch.float32), "weight": (SHAPE, torch.float32)})
    return DiskTier([layout] * count, folder / "blocks.bin", leaves=leaves)


def mapped_kib(path: Path) -> int:
    """Of a file, what the process has in memory."""
    kib, here = 0, False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        if "-" in line.split()[0]:
            here = str(path) in line
        elif here and line.startswith("Rss:"):
            kib += int(line.split()[1])
    return kib


@linux
def test_what_is_lent_is_changed_where_it_lies(tmp_path: Path) -> None:
    tier = a_tier(tmp_path)
    numbers = torch.randn(SHAPE)
    tier.put(1, "weight", numbers)

    lent = tier.lend(1, "weight", changes=True)
    lent.mul_(2)

    assert torch.equal(tier.take(1, "weight"), numbers * 2), "before it is given back"
    tier.put(1, "weight", lent)
    assert tier.written_bytes == 2 * numbers.nbytes
    assert torch.equal(tier.lend(1, "weight", changes=False), numbers * 2)
    whole = torch.empty(tier.layouts[1].nbytes, dtype=torch.uint8)
    tier.read(1, whole)
    assert torch.equal(tier.layouts[1].views(whole)["weight"], numbers * 2)


@linux
@pytest.mark.parametrize("leaves", [True, False])
def test_what_was_given_back_leaves_memory_where_that_is_wanted(leaves: bool, tmp_path: Path) -> None:
    tier = a_tier(tmp_path, leaves=leaves)
    lent = tier.lend(0, "weight", changes=True)
    lent.fill_(7)
    there = mapped_kib(tier.path)
    tier.put(0, "weight", lent)

    assert there >= lent.nbytes // 1024
    assert (mapped_kib(tier.path) < there / 10) == leaves
    assert bool((tier.take(0, "weight") == 7).all())


@linux
def test_what_cannot_be_had_is_an_error_and_no_signal(tmp_path: Path) -> None:
    """The file ends before what is asked for: touching it would end the process."""
    file = PositionedFile(tmp_path / "file", write=True)
    file.reserve(2**20)
    mapped = MappedFile.of(file, 2**20)
    assert mapped is not None
    with (tmp_path / "file").open("r+b") as other:
        other.truncate(2**16)

    assert mapped.present(0, 2**16, changes=True).shape == (2**16,)
    with pytest.raises(OSError, match="Input/output error"):
        mapped.present(2**17, 2**12, changes=True)


@linux
def test_a_drive_that_fails_while_it_lends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = a_tier(tmp_path)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(MappedFile, "_ask", broken)
    with pytest.raises(CheckpointError, match=r"blocks\.bin cannot be read \(Input/output error\)"):
        tier.lend(0, "weight", changes=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a megabyte, where one may be mounted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


@linux
def test_a_disk_that_fills_under_what_is_lent_is_told(small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a file system overwrites nothing in place: room that was reserved is none."""
    monkeypatch.setattr(PositionedFile, "reserve", lambda self, nbytes: os.ftruncate(self.descriptor, nbytes))
    tier = a_tier(small_disk)

    with pytest.raises(OutOfDisk, match=r"has no room for 2 MiB of blocks \(No space left on device\)"):
        tier.lend(0, "weight", changes=True)
    tier.lend(0, "odd", changes=True).fill_(3)


@linux
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_room_that_a_disk_or_a_quota_refuses_is_no_drive_that_fails(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a page cannot be had the system does not say why. A write of what is there does."""
    tier = a_tier(tmp_path)
    numbers = torch.randn(SHAPE)
    tier.put(0, "weight", numbers)

    def broken(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    def refused(*_: object) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(MappedFile, "_ask", broken)
    with pytest.raises(CheckpointError, match="cannot be read"):
        tier.lend(0, "weight", changes=True)
    assert torch.equal(tier.take(0, "weight"), numbers)
    monkeypatch.setattr(os, "pwritev", refused)
    with pytest.raises(OutOfDisk, match=os.strerror(code)):
        tier.lend(0, "weight", changes=True)
    with pytest.raises(CheckpointError, match="cannot be read"):
        tier.lend(0, "weight", changes=False)


@linux
def test_a_drive_that_cannot_be_written_is_not_a_full_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = a_tier(tmp_path)

    def broken(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "pwritev", broken)
    with pytest.raises(CheckpointError, match=r"blocks\.bin cannot be written \(Input/output error\)"):
        tier.put(0, "weight", torch.zeros(SHAPE))


def test_where_files_cannot_be_lent_copies_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "elsewhere")
    tier = a_tier(tmp_path)
    numbers = torch.randn(SHAPE)
    tier.put(1, "weight", numbers)

    copy = tier.lend(1, "weight", changes=True)
    copy.mul_(2)

    assert torch.equal(tier.take(1, "weight"), numbers)
    tier.put(1, "weight", copy)
    assert torch.equal(tier.take(1, "weight"), numbers * 2)


@linux
@pytest.mark.parametrize("leaves", [True, False])
def test_the_processor_computes_with_blocks_where_they_lie(leaves: bool, tmp_path: Path) -> None:
    """Nothing is copied, so what is changed on the disk is changed; one that is passed leaves where that is wanted."""
    tier = a_tier(tmp_path, count=5, leaves=leaves)
    numbers = torch.randn(SHAPE)
    for block in range(5):
        tier.put(block, "weight", numbers + block)
    stream = BlockStream(tier, torch.device("cpu"))
    there = []
    for block in range(5):
        weight = stream.bring(block, "up")["weight"]
        assert torch.equal(weight, numbers + block)
        there.append(mapped_kib(tier.path) // (tier.layouts[0].nbytes // 1024))

    assert sum(stream.places.values()) == 2 * tier.layouts[0].nbytes, "as many as two places have"
    assert weight.untyped_storage().data_ptr() in stream.places
    tier.put(4, "weight", numbers)
    assert torch.equal(weight, numbers)
    assert there[-1] == (2 if leaves else 5)
    assert stream.traffic.moved_bytes == 5 * tier.layouts[0].nbytes
    stream.close()


@linux
def test_a_block_that_cannot_be_read_is_an_error_before_it_is_computed_with(tmp_path: Path) -> None:
    tier = a_tier(tmp_path)
    os.ftruncate(tier._file.descriptor, tier.layouts[0].nbytes)
    stream = BlockStream(tier, torch.device("cpu"))
    stream.bring(0, "up")

    with pytest.raises(CheckpointError, match="cannot be read"):
        stream.bring(1, "up")
    stream.close()


@pytest.mark.parametrize("stays", [[], [0], [0, 1, 2]])
def test_a_device_that_copies_by_itself_is_asked_for_no_streams_and_no_locked_pages(
    stays: list[int], tmp_path: Path
) -> None:
    """As Apple silicon, whose place torch's device for nothing takes here: blocks are read into RAM, then copied."""
    tier = a_tier(tmp_path, count=3)
    stream = BlockStream(tier, torch.device("meta"), resident=stays)
    for direction in ("up", "down", "up"):
        for block in range(3) if direction == "up" else (2, 1, 0):
            assert stream.bring(block, direction)["weight"].is_meta  # type: ignore[arg-type]
        for block in range(3):
            stream.forget(block)

    changed = 2 * len(stays) + min(1, len(stays))  # before the second pass and the third, and what comes for a fourth
    visits = 3 + 3 + 3 if not stays else {1: 2 + 2 + 2, 3: 0}[len(stays)]
    assert stream.traffic.visits == len(stays) + changed + visits
    assert [each.flat.nbytes for each in stream._staging] == [tier.layouts[0].nbytes] * 2
    assert not any(each.flat.is_pinned() for each in stream._staging)
    stream.close()


def test_blocks_that_stay_in_ram_are_not_there_twice() -> None:
    layout = Layout({"weight": (SHAPE, torch.float32)})
    tier = RamTier([layout, layout, layout], pinned=False)
    stream = BlockStream(tier, torch.device("cpu"), resident=[2])
    for block in range(3):
        tier.take(block, "weight").fill_(block)
        stream.forget(block)

    found = [stream.bring(block, "up")["weight"] for block in range(3)]
    assert [each.data_ptr() for each in found] == [flat.data_ptr() for flat in tier.flats]
    assert [each.unique().item() for each in found] == [0, 1, 2]
    stream.close()


@linux
def test_frozen_blocks_are_copied_and_trained_ones_are_not(tmp_path: Path) -> None:
    tier = a_tier(tmp_path)
    frozen = FilesTier(tier.layouts, [{"odd": _Source(1.0), "weight": _Source(1.0)}] * 2, tier.layouts)
    both = FrozenBeforeTrained(frozen, tier, turn=1)
    stream = BlockStream(both, torch.device("cpu"), turn=1)

    assert bool((stream.bring(0, "up")["weight"] == 1).all())
    tier.put(1, "weight", torch.full(SHAPE, 5.0))
    assert bool((stream.bring(1, "up")["weight"] == 5).all())
    assert stream.bring(1, "up")["weight"].data_ptr() == tier.lend(1, "weight", changes=False).data_ptr()
    stream.close()


class _Source:
    """Where a tensor of one number comes from."""

    def __init__(self, number: float) -> None:
        self._number = number

    def read_into(self, into: torch.Tensor) -> int:
        into.fill_(self._number)
        return into.nbytes
