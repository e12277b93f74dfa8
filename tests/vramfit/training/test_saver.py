"""Saving while training goes on: the bytes of a save that waits, and its errors, whatever goes on meanwhile."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.config import RunConfig
from vramfit.engine.later import Later
from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.training import checkpoint, loop
from vramfit.training.loop import CHECKPOINTS, train
from vramfit.training.metrics import PhaseProgress
from vramfit.training.saver import FROM_ITS_PLACE, NOT_PLANNED, Saver

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]


class Gate:
    """Holds the thread that writes at a named point until it is opened; then, where asked, the disk says no."""

    def __init__(self) -> None:
        self.point, self.reached, self.opened = "save: before the files", threading.Event(), threading.Event()
        self.error: BaseException | None = None

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.reached.set()
            assert self.opened.wait(60)
            if self.error is not None:
                raise self.error


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate()
    monkeypatch.setattr(checkpoint, "reach", made)
    yield made
    made.opened.set()


def something() -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(3)
    return {
        "w": torch.randn(64, 33, generator=made),
        "turned": torch.randn(8, 5, generator=made).t(),
        "half": torch.randn(7, generator=made).to(torch.bfloat16),
        "number": torch.tensor(4.0),
        "codes": torch.arange(9, dtype=torch.uint8),
    }


def bytes_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_changed_in_place_meanwhile_is_not_in_the_checkpoint(tmp_path: Path, gate: Gate) -> None:
    live, values = something(), {"numbers": [1, 2], "inner": {"at": 1}}
    with Saver() as saver:
        saver.save(tmp_path / "aside", step=4, tensors=live, values=values, keep=2)
        assert gate.reached.wait(60)
        assert saver.busy and saver.finished() == []
        for tensor in live.values():
            tensor.add_(1)
        values["numbers"].append(3)  # type: ignore[attr-defined]
        values["inner"]["at"] = 2  # type: ignore[index]
        assert checkpoint.steps(tmp_path / "aside") == []
        gate.opened.set()
        saver.wait()
        (saved,) = saver.finished()
    assert (saved.step, saved.in_one_go) == (4, "")
    plain = {"numbers": [1, 2], "inner": {"at": 1}}
    checkpoint.save(tmp_path / "waiting", step=4, tensors=something(), values=plain, keep=2)
    assert bytes_of(tmp_path / "aside" / "step-00000004") == bytes_of(tmp_path / "waiting" / "step-00000004")


def test_one_is_on_its_way_at_most_and_rotation_follows_the_order(tmp_path: Path, gate: Gate) -> None:
    second = threading.Event()
    with Saver() as saver:
        saver.save(tmp_path, step=1, tensors=something(), values={}, keep=1)
        assert gate.reached.wait(60)

        def go_on() -> None:
            saver.save(tmp_path, step=2, tensors=something(), values={}, keep=1)
            second.set()

        thread = threading.Thread(target=go_on)
        thread.start()
        assert not second.wait(0.2)
        gate.opened.set()
        thread.join(60)
    assert second.is_set()
    assert [saved.step for saved in saver.finished()] == [1, 2]
    assert checkpoint.steps(tmp_path) == [2]
    assert saver.take_waited() > 0.1
    assert saver.take_waited() == 0


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), OutOfDisk),
        (OSError(errno.EIO, os.strerror(errno.EIO)), CheckpointError),
        (RuntimeError("nobody foresaw it"), RuntimeError),
    ],
)
def test_an_error_of_the_writer_is_raised_once_at_the_next_look(
    tmp_path: Path, gate: Gate, error: Exception, told: type[Exception]
) -> None:
    with Saver() as saver:
        gate.point = ""
        saver.save(tmp_path, step=1, tensors=something(), values={}, keep=1)
        saver.wait()
        gate.point, gate.error = "save: tensors written", error
        saver.save(tmp_path, step=2, tensors=something(), values={}, keep=1)
        gate.opened.set()
        with pytest.raises(told):
            while saver.busy or saver.finished():
                pass
            saver.finished()
        assert checkpoint.steps(tmp_path) == [1]
        gate.error = None
        saver.save(tmp_path, step=3, tensors=something(), values={}, keep=1)
    assert checkpoint.steps(tmp_path) == [3]
    assert checkpoint.leftovers(tmp_path) == []


def test_the_end_waits_and_raises_unless_something_else_ended_it(tmp_path: Path, gate: Gate) -> None:
    gate.error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    gate.opened.set()
    with pytest.raises(OutOfDisk), Saver() as saver:
        saver.save(tmp_path, step=1, tensors=something(), values={}, keep=1)
    with pytest.raises(ZeroDivisionError), Saver() as saver:
        saver.save(tmp_path, step=1, tensors=something(), values={}, keep=1)
        raise ZeroDivisionError
    gate.error = None
    with pytest.raises(ZeroDivisionError), Saver() as saver:
        saver.save(tmp_path, step=2, tensors=something(), values={}, keep=1)
        raise ZeroDivisionError
    assert checkpoint.steps(tmp_path) == [2]


def test_without_room_for_a_copy_it_waits_and_says_why(tmp_path: Path) -> None:
    def reason(saver: Saver, tensors: Any) -> str:
        with saver:
            saver.save(tmp_path, step=1, tensors=tensors, values={}, keep=1)
            at_once = saver.finished()
            saver.wait()
            (saved,) = at_once or saver.finished()
        assert at_once or not saved.in_one_go
        assert checkpoint.steps(tmp_path) == [1]
        return saved.in_one_go

    later = {**something(), "block": Later(shape=(2,), dtype=torch.float32, read=lambda: torch.ones(2))}
    assert reason(Saver(), later) == FROM_ITS_PLACE
    assert reason(Saver(copies=False), something()) == NOT_PLANNED
    told = reason(Saver(free=lambda: 600 * 2**20, needs=lambda: 100 * 2**20), something())
    assert told == "a copy and the next step need 612 MiB of RAM, 600 MiB are free"
    assert reason(Saver(free=lambda: 613 * 2**20, needs=lambda: 100 * 2**20), something()) == ""


def test_a_run_that_saves_aside_leaves_the_bytes_of_one_that_waits(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    often = {"checkpoint_every": 1, "keep_checkpoints": 9, "evaluate_every": 2}
    config = small_run(output=often, schedule={"max_steps": 3})
    told = {}
    for name, copies in (("aside", True), ("waiting", False)):
        recorder = kept()
        with monkeypatch.context() as patch:
            if not copies:
                patch.setattr(loop, "Saver", lambda **_: Saver(copies=False))
            train(config, folder=tmp_path / name, cache=cache, recorder=recorder)
        told[name] = [event.message for event in recorder.events if event.kind == "checkpoint"]
        waits = [step.save_seconds for step in recorder.metrics]
        assert waits[0] is None and all(wait is not None and wait > 0 for wait in waits[1:])
    saved = [f"Checkpoint saved at step {step}." for step in range(1, 4)]
    assert told["aside"] == saved
    assert [message for message in told["waiting"] if message in saved] == saved
    assert f"Training waits while a checkpoint is written: {NOT_PLANNED}." in told["waiting"]
    for step in range(1, 4):
        at = f"step-{step:08d}"
        found = {name: checkpoint.load(tmp_path / name / CHECKPOINTS, step) for name in told}
        for each in found.values():
            del each.values["executor"]["governor"]  # what it saw of the machine's memory
            each.values.pop("peak_allocated_bytes")  # in which a copy that is still being written is, too
            del each.values["health"]["watches"]["SpeedCollapse"]["usual"]  # and of its speed
        assert found["aside"].values == found["waiting"].values
        files = [(tmp_path / name / CHECKPOINTS / at / checkpoint.TENSORS).read_bytes() for name in told]
        assert files[0] == files[1]


def test_what_storing_the_rows_before_a_checkpoint_takes_is_part_of_what_it_held_up(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    recorder = kept()
    heard = recorder.phase

    def slow(progress: PhaseProgress) -> None:
        if progress.name == "saving":
            time.sleep(0.5)
        heard(progress)

    recorder.phase = slow
    config = small_run(output={"checkpoint_every": 2, "evaluate_every": 0}, schedule={"max_steps": 4})
    train(config, folder=tmp_path / "run", cache=cache, recorder=recorder)
    first, second, behind, last = (step.save_seconds for step in recorder.metrics)
    assert (first, second, last) == (None, None, None)
    assert behind is not None and behind >= 0.5


def test_a_full_disk_while_training_goes_on_ends_the_run_and_it_goes_on_from_the_one_before(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(output={"checkpoint_every": 2, "keep_checkpoints": 9})
    reference, first, second = kept(), kept(), kept()
    train(config, folder=tmp_path / "reference", cache=cache, recorder=reference)
    seen: list[str] = []

    def full_at_the_second(point: str) -> None:
        seen.append(point)
        if point == "save: tensors written" and seen.count(point) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "reach", full_at_the_second)
        with pytest.raises(OutOfDisk):
            train(config, folder=tmp_path / "run", cache=cache, recorder=first)
    assert checkpoint.steps(tmp_path / "run" / CHECKPOINTS) == [2]
    assert 4 <= len(first.metrics) < 7
    train(config, folder=tmp_path / "run", cache=cache, recorder=second, resume=True)
    assert second.losses == reference.losses[2:]
