"""Inputs that wait on disk give the bits of those that wait in memory, and a drive that fails is told."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine import test_trained_blocks as in_full
from tests.vramfit.engine.conftest import make_sequences, pad
from tests.vramfit.engine.test_split_blocks import mixtral, opened
from tests.vramfit.engine.test_streaming import a_plan, assert_equal_runs, batches, resident, saved, streaming, trained
from vramfit.config import RunConfig
from vramfit.engine import inputs_file
from vramfit.engine.inputs_file import InputsFile
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.engine.streaming import StreamingExecutor
from vramfit.engine.waiting import WaitingInputs
from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.hardware.devices import Device, Machine
from vramfit.models.catalogue import architecture_of
from vramfit.planning import planner
from vramfit.planning.plan import Forecast, InputTier, Workload
from vramfit.planning.search import Search
from vramfit.positioned import PositionedFile
from vramfit.training.opening import open_executor

LENGTH, SEQUENCES = 32, 8


def planned(config: RunConfig, tier: InputTier) -> Forecast:
    """The planner's own plan of the streamed way whose inputs wait there, on a processor."""
    cpu = Device(
        kind="cpu",
        name="CPU",
        torch_device="cpu",
        identity="cpu",
        memory_bytes=2**34,
        free_bytes=2**34,
        bf16=False,
        fp16=False,
    )
    machine = Machine(devices=(cpu,), ram_bytes=2**34, ram_free_bytes=2**34, disk_free_bytes=2**40, cpu_cores=2)
    workload = Workload(sequences=100, mean_tokens=LENGTH, longest_tokens=LENGTH)
    search = Search.of(config, architecture_of(config.model), machine, workload)
    family = next(each for each in search.families if each.streams)
    way = dataclasses.replace(family, changes={**family.changes, "input_tier": tier})
    return planner._forecast(search, search.least(way))


def a_run(folder: Path, method: str) -> RunConfig:
    return RunConfig.parse(
        {
            "method": method,
            "device": "cpu",
            "model": {"source": str(folder)},
            "data": {"paths": ["rows.json"]},
            "adapter": {"rank": 4},
            "schedule": {"sequences_per_step": SEQUENCES},
            "memory": {"micro_batch": 2},
        }
    )


def one_step() -> list[Any]:
    """As many tokens as the plan has, none of them padding."""
    return [pad(make_sequences(LENGTH, LENGTH, seed=seed)) for seed in range(SEQUENCES // 2)]


@pytest.mark.parametrize("method", ["lora", "qlora", "full"])
def test_loss_and_every_gradient_are_the_same_wherever_inputs_wait(method: str, tmp_path: Path) -> None:
    """By the planner's plan, opened as a run opens it: the file is in the run's folder, and its bytes are those the
    planner foresaw."""
    config = a_run(saved("llama", tmp_path / "model"), method)
    piece, made = Piece.of(batches()[0]), {}
    tiers: tuple[InputTier, ...] = ("device", "host", "disk")
    for tier in tiers:
        found = planned(config, tier)
        assert (found.plan.input_tier, found.plan.weights_tier) == (tier, "disk")
        executor = open_executor(
            config,
            found,
            cache=tmp_path / "cache",
            folder=tmp_path / tier,
            start_file=tmp_path / "start.safetensors",
            resumed=False,
        )
        assert isinstance(executor, StreamingExecutor)
        first = executor.gradients(piece)
        steps = [executor.step(one_step(), 1e-2) for _ in range(2)]
        made[tier] = first, [(step.loss, step.grad_norm) for step in steps], in_full.state_of(executor)
        waits = steps[-1].waits
        assert waits is not None
        counts = found.memory.written_per_step_bytes - waits.written_bytes
        assert abs(counts) <= 4 * 100, "the states' numbers of steps are not in the plan"
        assert (waits.written_bytes > 0) == (tier == "disk" or method == "full")

    (loss, gradients), losses, state = made["device"]
    assert len(gradients) > 10
    for (other_loss, others), other_losses, other_state in (made["host"], made["disk"]):
        assert (loss, losses) == (other_loss, other_losses)
        assert all(_same(each, others[name]) for name, each in gradients.items())
        assert all(torch.equal(each, other_state[name]) for name, each in state.items())


def _same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    return one is other if one is None or other is None else torch.equal(one, other)


def test_the_run_s_folder_has_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the blocks that are there, and not where the system keeps temporary files, which may be RAM."""
    config = a_run(saved("llama", tmp_path / "model"), "lora")
    made: list[Path] = []
    usual = PositionedFile.__init__

    def noted(self: PositionedFile, path: Path, **options: Any) -> None:
        made.append(path)
        usual(self, path, **options)

    monkeypatch.setattr(inputs_file.PositionedFile, "__init__", noted)
    where = {"cache": tmp_path / "cache", "folder": tmp_path / "run", "start_file": tmp_path / "start.safetensors"}
    for tier in ("device", "disk"):
        before = len(made)
        open_executor(config, planned(config, tier), resumed=False, **where)
        there = [path for path in made[before:] if path.name == "inputs.bin"]
        assert there == ([tmp_path / "run" / "blocks" / "inputs.bin"] if tier == "disk" else [])
    assert list((tmp_path / "run" / "blocks").iterdir()) == [], "it is gone with the process"


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_blocks_in_parts_have_their_experts_answers_there_too(dropout: float, tmp_path: Path) -> None:
    folder = mixtral(tmp_path)
    plan = a_plan("qlora", weights_tier="disk")
    runs = []
    for tier in ("device", "disk"):
        torch.manual_seed(5)
        runs.append(opened(folder, dataclasses.replace(plan, input_tier=tier), tmp_path, split=True, dropout=dropout))
    assert len(runs[1].visits.split) == 2
    steps = []
    for executor in runs:
        torch.manual_seed(7)
        steps.append([executor.step(batches(), 1e-2).loss for _ in range(2)])

    assert steps[0] == steps[1]
    assert all(torch.equal(each, trained(runs[1])[name]) for name, each in trained(runs[0]).items())


def test_a_step_that_ran_out_of_memory_is_done_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the first attempt had written, or was about to read, is not taken for the second's."""
    folder = saved("llama", tmp_path / "model")
    there, here = (
        streaming(folder, a_plan(weights_tier="disk", input_tier=tier), tmp_path) for tier in ("device", "disk")
    )
    for executor in (there, here):
        usual, calls = executor.visits.compute, iter(range(10**9))

        def failing(*args: Any, usual: Any = usual, calls: Any = calls) -> torch.Tensor:
            if next(calls) == 22:  # in backward, with the next input on its way
                raise torch.OutOfMemoryError("CUDA out of memory")
            found: torch.Tensor = usual(*args)
            return found

        with monkeypatch.context() as patched:
            patched.setattr(executor.visits, "compute", failing)
            assert executor.step(batches(), 1e-2).recovered
    assert_equal_runs(there, here, steps=1)


# --- the file itself -------------------------------------------------------------------------------------------------


def filled(path: Path, blocks: int = 3, pieces: int = 2) -> tuple[InputsFile, dict[tuple[int, ...], torch.Tensor]]:
    file = InputsFile(path, torch.device("cpu"))
    put = {(block, piece): torch.randn(4, 5) for block in range(blocks) for piece in range(pieces)}
    for key, each in put.items():
        file.put(key, each)
    return file, put


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_what_is_taken_is_what_was_put(kind: torch.dtype, tmp_path: Path) -> None:
    waiting = WaitingInputs("disk", torch.device("cpu"), tmp_path / "blocks" / "inputs.bin")
    whole = torch.randn(3, 6, 8).to(kind)
    put = {(0, 0): whole, (0, 1): whole[:, ::2], (1, 0): whole.transpose(0, 1), (1, 1): whole[:1]}
    for key, each in put.items():
        waiting.put(key, each, {"cpu": torch.tensor(key)})
    assert waiting.nbytes == 0

    for key in ((1, 0), (1, 1), (0, 0), (0, 1)):
        assert waiting.look(key)[0].equal(put[key])
        found, drawn = waiting.take(key)
        assert found.equal(put[key]) and drawn is not None and drawn["cpu"].tolist() == list(key)
    assert waiting.waited()[1] == sum(each.nbytes for each in put.values())


def test_each_is_read_once_and_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, put = filled(tmp_path / "inputs.bin")
    read: list[int] = []
    usual = InputsFile._read
    monkeypatch.setattr(InputsFile, "_read", lambda self, place: read.append(place.start) or usual(self, place))
    asked = sorted(put, key=lambda key: (-key[0], key[1]))

    for count, key in enumerate(asked, start=1):
        assert file.get(key).equal(put[key])
        file.forget(key)
        if file._coming is not None:
            file._coming[1].result()
        assert len(read) == min(len(asked), count + 1)


def test_no_more_than_one_is_held_for_the_drive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow one is waited for, and the wait is told: memory was planned with room for one."""
    goes_on, usual = threading.Event(), PositionedFile.write_from
    monkeypatch.setattr(PositionedFile, "write_from", lambda self, *args: goes_on.wait(30) and usual(self, *args))
    file = InputsFile(tmp_path / "inputs.bin", torch.device("cpu"))
    began = time.perf_counter()
    file.put((0, 0), torch.ones(4))
    assert file.waited_seconds == 0 and time.perf_counter() - began < 5, "it is written behind the computation"

    threading.Timer(0.2, goes_on.set).start()
    file.put((1, 0), torch.zeros(4))
    assert file.waited_seconds > 0.1
    assert file.get((1, 0)).tolist() == [0] * 4 and file.get((0, 0)).tolist() == [1] * 4
    assert file.written_bytes == 32


def test_a_file_that_is_cut_off_or_cannot_be_read_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, _ = filled(tmp_path / "inputs.bin", blocks=1, pieces=1)
    file._be_written()
    os.ftruncate(file._file.descriptor, 8)
    with pytest.raises(CheckpointError, match=r"inputs\.bin has been cut off"):
        file.get((0, 0))

    def broken(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(PositionedFile, "read_into", broken)
    with pytest.raises(CheckpointError, match=r"inputs\.bin cannot be read \(Input/output error\)"):
        file.get((0, 0))


# --- a disk that is full ---------------------------------------------------------------------------------------------


def full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def on_disk(folder: Path, tmp_path: Path) -> StreamingExecutor:
    return streaming(folder, a_plan(weights_tier="disk", input_tier="disk"), tmp_path)


def test_a_disk_too_small_for_a_step_is_told_before_the_step_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor = on_disk(saved("llama", tmp_path / "model"), tmp_path)
    computed: list[int] = []
    usual = executor.visits.compute
    monkeypatch.setattr(executor.visits, "compute", lambda *args: computed.append(args[0]) or usual(*args))
    with monkeypatch.context() as patched:
        patched.setattr(PositionedFile, "reserve", full)
        with pytest.raises(OutOfDisk, match=r"has no room for .* of blocks' inputs \(No space left on device\)"):
            executor.step(batches(), 1e-2)
    assert computed == []


@pytest.mark.parametrize("fails_at", [1, 7, 15])
def test_a_disk_that_fills_in_mid_step_changes_nothing(
    fails_at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 15 inputs; the last one's write is waited for by the first that is asked for."""
    folder = saved("llama", tmp_path / "model")
    executor, there = on_disk(folder, tmp_path), resident(folder, a_plan(), tmp_path)
    usual, writes = PositionedFile.write_from, iter(range(1, 10**6))
    with monkeypatch.context() as patched:
        patched.setattr(
            PositionedFile,
            "write_from",
            lambda self, *args: full() if next(writes) == fails_at else usual(self, *args),
        )
        with pytest.raises(OutOfDisk, match="of blocks' inputs"):
            executor.step(batches(), 1e-2)
    assert next(writes) == fails_at + 1, "no other write was begun"
    assert_equal_runs(there, executor)


def test_inputs_of_a_model_that_stays_have_no_such_place(tmp_path: Path) -> None:
    from vramfit.planning.abilities import missing

    assert missing(a_plan(input_tier="disk")) == ("activations on disk",)
    assert missing(a_plan(input_tier="disk", weights_tier="disk")) == ()
    with pytest.raises(ValueError, match="need the path of a file"):
        WaitingInputs("disk", torch.device("cpu"))
    assert isinstance(resident(saved("llama", tmp_path / "model"), a_plan(), tmp_path), ResidentExecutor)
