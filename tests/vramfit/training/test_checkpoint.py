"""Checkpoints: whole or not at all, newest by step number, never silently from scratch."""

from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
import torch

from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.training import checkpoint


def write(root: Path, step: int, *, keep: int = 3) -> Path:
    tensors = {"w": torch.full((4, 3), float(step)), "moment": torch.arange(5, dtype=torch.bfloat16)}
    return checkpoint.save(root, step=step, tensors=tensors, values={"seed": 7, "step": step}, keep=keep)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    write(tmp_path, 12)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 12
    assert found.damaged == ()
    assert torch.equal(found.checkpoint.tensors["w"], torch.full((4, 3), 12.0))
    assert found.checkpoint.tensors["moment"].dtype == torch.bfloat16
    assert found.checkpoint.values == {"seed": 7, "step": 12}


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") is None
    assert checkpoint.newest(tmp_path) is None


def test_case_114_rotation_goes_by_step_number_not_by_file_time(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        path = write(tmp_path, step)
        os.utime(path, (2_000_000_000 - step * 1_000_000, 2_000_000_000 - step * 1_000_000))
    write(tmp_path, 400)
    assert checkpoint.steps(tmp_path) == [200, 300, 400]


def test_case_115_rotation_touches_only_its_own_folders(tmp_path: Path) -> None:
    strange = [tmp_path / "checkpoint-500", tmp_path / "step-7", tmp_path / "notes"]
    for folder in strange:
        folder.mkdir()
    for step in range(1, 6):
        write(tmp_path, step, keep=1)
    assert checkpoint.steps(tmp_path) == [5]
    assert all(folder.is_dir() for folder in strange)


def test_case_113_incomplete_newest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    write(tmp_path, 10)
    (write(tmp_path, 20) / checkpoint.MANIFEST).unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 10


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.VALUES, checkpoint.MANIFEST])
def test_damaged_newest_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    write(tmp_path, 10)
    damaged = write(tmp_path, 20) / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 10
    assert len(found.damaged) == 1
    assert "step-00000020" in found.damaged[0]


def test_all_damaged_is_an_error_never_a_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / checkpoint.TENSORS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="All 2 checkpoints"):
        checkpoint.newest(tmp_path)


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path, 3) / checkpoint.MANIFEST
    values = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**values, "format": "other-9"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="other-9"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_case_123_full_disk_keeps_the_older_ones_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write(tmp_path, 10)

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OutOfDisk, match="disk filled up"):
        write(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert checkpoint.steps(tmp_path) == [10]


def test_too_little_room_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: _Usage(free=1024))
    with pytest.raises(OutOfDisk, match=r"needs 64 MiB of disk, .* has 1 KiB free"):
        write(tmp_path, 1)


class _Usage:
    def __init__(self, *, free: int) -> None:
        self.free = free


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5)
    checkpoint.save(tmp_path, step=5, tensors={"w": torch.zeros(1)}, values={"again": True}, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.values == {"again": True}


def test_leftovers_of_a_crash_are_swept_at_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "step-00000004.partial").mkdir()
    write(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_checkpoints_of_a_future_that_was_given_up_go_at_the_next_save(tmp_path: Path) -> None:
    """A resume has passed over damaged ones: they must neither push out good ones nor be passed over again."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / checkpoint.TENSORS).write_bytes(b"damaged")
    write(tmp_path, 15, keep=2)
    assert checkpoint.steps(tmp_path) == [10, 15]


def test_the_best_outlives_rotation_until_another_is_the_best(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2)}
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5)):
        checkpoint.save(tmp_path, step=step, tensors=tensors, values={}, keep=2, best=best)
        assert best in checkpoint.steps(tmp_path)
    assert checkpoint.steps(tmp_path) == [5, 6]
    for step in (7, 8):
        checkpoint.save(tmp_path, step=step, tensors=tensors, values={}, keep=2, best=5)
    assert checkpoint.steps(tmp_path) == [5, 7, 8]


def test_the_checkpoint_of_one_step_is_verified_when_it_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert torch.equal(checkpoint.load(tmp_path, 3).tensors["w"], torch.full((4, 3), 3.0))
    (path / checkpoint.VALUES).write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not match its manifest"):
        checkpoint.load(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step-00000004 cannot be read"):
        checkpoint.load(tmp_path, 4)
