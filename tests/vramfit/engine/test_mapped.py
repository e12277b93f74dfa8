"""A tier on disk lends its tensors where they lie, tells what cannot be had, and can do without."""

from __future__ import annotations

import errno
import sys
from pathlib import Path

import pytest
import torch

from vramfit.engine.blocks import Layout
from vramfit.engine.mapped import MappedFile
from vramfit.engine.tiers import DiskTier
from vramfit.errors import CheckpointError
from vramfit.positioned import PositionedFile

SHAPE = (300, 1000)

linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="files are lent on Linux only")


def a_tier(folder: Path, *, leaves: bool = False) -> DiskTier:
    layout = Layout({"odd": ((3,), torch.float32), "weight": (SHAPE, torch.float32)})
    return DiskTier([layout, layout], folder / "blocks.bin", leaves=leaves)


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
