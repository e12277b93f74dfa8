"""A step that is interrupted while weights are written: what resumes from the checkpoint knows nothing of it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.test_streaming import batches, saved
from tests.vramfit.engine.test_trained_blocks import disk, full_plan, state_of, streaming
from vramfit.engine.streaming import StreamingExecutor
from vramfit.engine.tiers import DiskTier
from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.models.stored import TensorsOnDisk
from vramfit.positioned import PositionedFile
from vramfit.training import checkpoint

pytestmark = pytest.mark.long


class Interrupted(BaseException):
    """Stands for whatever ends a step from outside."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return saved("llama", tmp_path / "model", num_hidden_layers=2, hidden_size=32, intermediate_size=64)


def opened(folder: Path, tmp_path: Path) -> StreamingExecutor:
    return streaming(folder, disk(full_plan()), tmp_path)


def keep(executor: StreamingExecutor, root: Path, *, step: int) -> None:
    tensors, values = executor.state()
    checkpoint.save(root, step=step, tensors=tensors, values={"executor": values}, keep=2)


def resumed(folder: Path, tmp_path: Path) -> StreamingExecutor:
    found = checkpoint.newest(tmp_path / "checkpoints")
    assert found is not None
    executor = opened(folder, tmp_path)
    executor.load_state(found.checkpoint.tensors, found.checkpoint.values["executor"])
    return executor


def test_at_every_write_to_the_tier(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = opened(folder, tmp_path)
    executor.step(batches(), 1e-2)
    keep(executor, tmp_path / "checkpoints", step=1)
    writes: list[int] = []
    usual = DiskTier.put

    def counted(self: DiskTier, block: int, name: str, tensor: torch.Tensor) -> None:
        writes.append(block)
        if len(writes) == stop_at:
            raise Interrupted
        usual(self, block, name, tensor)

    stop_at = 0
    with monkeypatch.context() as patched:
        patched.setattr(DiskTier, "put", counted)
        executor.step(batches(), 1e-2)
    wanted, whole_step = state_of(executor), len(writes)
    assert whole_step > 90

    for stop_at in range(1, whole_step + 1):
        with monkeypatch.context() as patched:
            executor = resumed(folder, tmp_path)
            patched.setattr(DiskTier, "put", counted)
            writes.clear()
            with pytest.raises(Interrupted):
                executor.step(batches(), 1e-2)
        if stop_at % 10 and stop_at != whole_step:
            continue  # what is resumed from is the same each time: a look at every tenth will do
        again = resumed(folder, tmp_path)
        again.step(batches(), 1e-2)
        found = state_of(again)
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


CHILD = """
import json, os, signal, sys
from pathlib import Path
sys.path.insert(0, {root!r})
from vramfit.engine.threads import let_threads_sleep
let_threads_sleep()
from tests.vramfit.engine.test_interrupted_steps import *

folder, work, stop_at = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
executor = resumed(folder, work)
done, usual = 0, DiskTier.put

def put(self, block, name, tensor):
    global done
    done += 1
    if done == stop_at:
        os.kill(os.getpid(), signal.SIGKILL)
    usual(self, block, name, tensor)

DiskTier.put = put
executor.step(batches(), 1e-2)
print(json.dumps(done))
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="there is no SIGKILL here")
def test_killed_at_a_write_a_run_goes_on_as_if_nothing_had_happened(folder: Path, tmp_path: Path) -> None:
    executor = opened(folder, tmp_path)
    executor.step(batches(), 1e-2)
    keep(executor, tmp_path / "checkpoints", step=1)
    executor.step(batches(), 1e-2)
    wanted = state_of(executor)
    root = str(Path(__file__).parents[3])

    for stop_at in (9, 40, 95):  # among the gradients, and among weights and states
        killed = subprocess.run(
            [sys.executable, "-c", CHILD.format(root=root), str(folder), str(tmp_path), str(stop_at)],
            capture_output=True,
            text=True,
            check=False,
        )
        assert killed.returncode == -signal.SIGKILL, killed.stderr
        assert list((tmp_path / "scratch").iterdir()) == [], "what it had on disk is gone with it"
        again = resumed(folder, tmp_path)
        again.step(batches(), 1e-2)
        found = state_of(again)
        assert [name for name in wanted if not torch.equal(wanted[name], found[name])] == []


def test_a_disk_that_fills_in_mid_step_is_told(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = opened(folder, tmp_path)
    executor.step(batches(), 1e-2)
    keep(executor, tmp_path / "checkpoints", step=1)
    usual = PositionedFile.write_from
    done, most = 0, 10**9

    def full(self: PositionedFile, offset: int, view: memoryview) -> None:
        nonlocal done
        done += 1
        if done > most:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        usual(self, offset, view)

    with monkeypatch.context() as patched:
        patched.setattr(PositionedFile, "write_from", full)
        executor.step(batches(), 1e-2)
        assert done > 1
        done, most = 0, done // 2  # the next step ends in the middle of its writes
        with pytest.raises(OutOfDisk, match=r"has no room for .* of blocks"):
            executor.step(batches(), 1e-2)
    assert resumed(folder, tmp_path).step(batches(), 1e-2).problem == ""


def test_a_tier_that_is_too_small_is_known_before_step_1(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(self: PositionedFile, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(PositionedFile, "reserve", no_room)
    with pytest.raises(OutOfDisk, match=r"has no room for .* of blocks \(No space left on device\)"):
        opened(folder, tmp_path)


def test_a_checkpoint_of_another_shape_is_refused(folder: Path, tmp_path: Path) -> None:
    executor = opened(folder, tmp_path)
    executor.step(batches(), 1e-2)
    keep(executor, tmp_path / "checkpoints", step=1)
    other = saved("llama", tmp_path / "other", num_hidden_layers=2, hidden_size=32, intermediate_size=96)

    with pytest.raises(CheckpointError, match=r"mlp\.\w+\.weight has shape \[.*\], the model's"):
        resumed(other, tmp_path)


class InUse:
    """Bytes of the tensors that something gave and that are still held: now, and at most."""

    def __init__(self) -> None:
        self.now, self.most = 0, 0

    def watching(self, usual: Any) -> Any:
        def given(*arguments: Any) -> torch.Tensor:
            found: torch.Tensor = usual(*arguments)
            self.now += found.nbytes
            self.most = max(self.most, self.now)
            weakref.finalize(found, self._freed, found.nbytes)
            return found

        return given

    def _freed(self, nbytes: int) -> None:
        self.now -= nbytes


def test_the_checkpoint_says_what_it_holds_without_reading_it_all(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither writing nor reading back has two large tensors in memory: a weight, or one of its states."""
    executor = opened(folder, tmp_path)
    executor.step(batches(), 1e-2)
    before = state_of(executor)
    largest = max(each.nbytes for each in before.values())
    written, read = InUse(), InUse()
    monkeypatch.setattr(DiskTier, "take", written.watching(DiskTier.take))
    keep(executor, tmp_path / "checkpoints", step=1)
    assert written.most <= largest

    monkeypatch.setattr(TensorsOnDisk, "__getitem__", read.watching(TensorsOnDisk.__getitem__))
    again = resumed(folder, tmp_path)
    assert 0 < read.most < 2 * largest
    after = state_of(again)
    assert before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)

    names: Any = json.loads((tmp_path / "checkpoints" / "step-00000001" / "manifest.json").read_text())["files"]
    assert set(names) == {"tensors.safetensors", "values.json"}
