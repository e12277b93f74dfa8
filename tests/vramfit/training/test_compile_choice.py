"""Compiling in a run: as asked for, told, the same numbers; and a trial that is remembered."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.conftest import build, make_plan
from vramfit.config import RunConfig, ScheduleChoice
from vramfit.engine import compiling
from vramfit.engine.compiling import CompiledBlocks, Trial
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.planning.plan import Plan
from vramfit.training import compile_choice
from vramfit.training.compile_choice import compiled_blocks, settle
from vramfit.training.loop import train
from vramfit.training.memory_care import Note

pytestmark = pytest.mark.filterwarnings("ignore")  # a compiler notes much about torch's own code

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same capture of graphs, without a compiler's minute."""
    real = torch.compile
    monkeypatch.setattr(
        compiling.torch, "compile", lambda f, *, mode, dynamic: real(f, backend="aot_eager", dynamic=dynamic)
    )
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_a_compiled_run_is_the_run_and_says_so(small_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    heard = {}
    for wish in ("off", "default"):
        heard[wish] = kept()
        config = small_run(memory={"compile": wish}, schedule={"max_steps": 3})
        train(config, folder=tmp_path / wish, cache=cache, recorder=heard[wish])
    assert heard["default"].losses == heard["off"].losses
    (event,) = [event for event in heard["default"].events if event.kind == "compile"]
    found = re.search(r"calls ([\d,]+) of torch's operators without the compiler and ([\d,]+) with it", event.message)
    assert found is not None and int(found[1].replace(",", "")) > 0
    assert not [event for event in heard["off"].events if event.kind == "compile"]


@pytest.mark.parametrize(
    ("wish", "device", "hours", "made"),
    [
        ("auto", "cpu", 100, False),  # 47 s of a compiler for nothing
        ("auto", "cuda:0", 0.1, False),  # over before the trial has paid
        ("auto", "cuda:0", 2, True),
        ("off", "cuda:0", 2, False),
        ("default", "cpu", 0.1, True),
    ],
)
def test_when_blocks_are_made_ready(wish: str, device: str, hours: float, made: bool, a_plan: Plan) -> None:
    import dataclasses

    config = RunConfig.parse({"memory": {"compile": wish}})
    plan = dataclasses.replace(a_plan, device=device, compiled=wish == "default")
    model = a_model()
    assert (compiled_blocks(config, plan, model, run_s=3600 * hours) is not None) == made


class Executor:
    """What is asked of one here: where it is."""

    device = torch.device("cpu")


@pytest.fixture
def a_plan() -> Plan:
    return Plan(
        method="full",
        device="cpu",
        budget_bytes=2**30,
        compute="fp32",
        weight_format="fp32",
        max_length=32,
        micro_batch=2,
        accumulation=1,
        recompute=0,
        loss="chunked",
    )


def a_model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]))


@pytest.mark.parametrize("faster", [1.5, 0.9])
def test_a_trial_is_remembered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, faster: float) -> None:
    tried = []

    def trial(executor: Any, blocks: CompiledBlocks, piece: Any) -> Trial:
        tried.append(piece)
        made = Trial(eager_s=faster, compiled_s=1.0, first_s=30.0, launches=(900, 300))
        blocks.on = made.pays
        return made

    monkeypatch.setattr(compile_choice, "trial", trial)
    monkeypatch.setattr(compile_choice, "first_pass", lambda executor, blocks, piece: 1.0)
    executor: Any = Executor()
    for _ in range(2):
        blocks = CompiledBlocks(a_model())
        (note,) = settled(blocks, executor, "piece", folder=tmp_path, kind="a card | a model")
        assert blocks.on == (faster > 1)
        assert (
            f"{faster:.2f} times as fast" in note.message
            and "a step has 8 such passes, 7,200 and 2,400" in note.message
        )
    assert tried == ["piece"]
    settled(CompiledBlocks(a_model()), executor, "piece", folder=tmp_path, kind="another")
    assert len(tried) == 2


def test_a_broken_memory_of_trials_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Trial(eager_s=2.0, compiled_s=1.0, first_s=30.0, launches=(9, 3))
    monkeypatch.setattr(compile_choice, "trial", lambda *_: made)
    for text in ("{", "[]", '{"kind | default": 3}', '{"kind | default": {"launches": [1]}}'):
        (tmp_path / compile_choice.FILE).write_text(text, encoding="utf-8")
        executor: Any = Executor()
        (note,) = settled(CompiledBlocks(a_model()), executor, "piece", folder=tmp_path, kind="kind")
        assert "a trial" in note.message


@pytest.mark.parametrize(
    ("device", "passes", "told"),
    [
        (
            "cuda:0",
            1,
            "One pass forward and backward starts 900 kernels on the card without the compiler and 300 with it, and "
            "what the optimizer does besides.",
        ),
        (
            "cpu",
            4,
            "One pass forward and backward calls 900 of torch's operators without the compiler and 300 with it; a step "
            "has 4 such passes, 3,600 and 1,200, and what the optimizer does besides.",
        ),
    ],
)
def test_launches_are_told_for_a_pass_and_for_a_step(device: str, passes: int, told: str) -> None:
    assert compiling.launches_told((900, 300), device=torch.device(device), passes=passes) == told


def settled(blocks: CompiledBlocks, executor: Any, piece: Any, *, folder: Path, kind: str) -> list[Any]:
    def never(rows: int, where: str) -> Any:
        raise AssertionError("memory did not run out")

    return list(settle(blocks, executor, piece, wish="auto", folder=folder, kind=kind, passes=8, fewer=never))


@pytest.mark.parametrize(
    ("wish", "compiled_rows", "plain_rows", "on", "rows", "told"),
    [
        ("auto", 1, 4, False, 0, ["Blocks are not compiled: memory ran out when blocks were compiled, with 4"]),
        ("auto", 1, 1, True, 1, ["Memory ran out when blocks were compiled, with 4", "with 2", "times as fast"]),
        ("auto", 0, 0, False, 1, ["with 4", "with 2", "Blocks are not compiled"]),
        (
            "default",
            2,
            4,
            True,
            2,
            ["Memory ran out when blocks were compiled, with 4", "One pass forward and backward calls"],
        ),
        ("default", 0, 4, False, 1, ["with 4", "with 2", "Blocks are not compiled: memory ran out"]),
    ],
)
def test_a_trial_without_room_does_with_less_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    wish: str,
    compiled_rows: int,
    plain_rows: int,
    on: bool,
    rows: int,
    told: list[str],
) -> None:
    """Compiled blocks have room for so many sequences, plain ones for so many: the real trial decides."""
    executor = an_executor()
    blocks = CompiledBlocks(executor.model)
    real = ResidentExecutor.gradients

    def limited(self: Any, piece: Any, **options: Any) -> Any:
        if piece.rows > (compiled_rows if blocks.on else plain_rows):
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, piece, **options)

    monkeypatch.setattr(ResidentExecutor, "gradients", limited)
    monkeypatch.setattr(compiling, "WORTH_IT", 0.0)
    limits: list[int] = []

    def fewer(count: int, where: str) -> Note:
        limits.append(count)
        return Note(kind="out-of-memory", message=f"Memory ran out {where}")

    piece = Piece(
        input_ids=torch.arange(3, 51).view(4, 12),
        labels=torch.arange(3, 51).view(4, 12),
        attention_mask=None,
        position_ids=None,
    )
    notes = list(settle(blocks, executor, piece, wish=wish, folder=tmp_path, kind="a card", passes=1, fewer=fewer))
    assert len(notes) == len(told)
    assert all(words in note.message for words, note in zip(told, notes, strict=True))
    assert blocks.on == on and (limits[-1] if limits else 0) == rows
    assert all(parameter.grad is None for parameter in executor.model.parameters())


def an_executor() -> ResidentExecutor:
    model, plan = build("llama"), make_plan(micro_batch=4)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
