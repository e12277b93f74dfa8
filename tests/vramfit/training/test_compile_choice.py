"""Compiling in a run: as asked for, told, the same numbers; and a trial that is remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.config import RunConfig
from vramfit.engine import compiling
from vramfit.engine.compiling import CompiledBlocks, Trial
from vramfit.planning.plan import Plan
from vramfit.training import compile_choice
from vramfit.training.compile_choice import compiled_blocks, settle
from vramfit.training.loop import train

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
    assert "launches a pass before" in event.message
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
        (note,) = settle(blocks, executor, "piece", wish="auto", folder=tmp_path, kind="a card | a model")  # type: ignore[arg-type]
        assert blocks.on == (faster > 1)
        assert f"{faster:.2f} times as fast" in note.message and "900 launches a pass before, 300 after" in note.message
    assert tried == ["piece"]
    list(settle(CompiledBlocks(a_model()), executor, "piece", wish="auto", folder=tmp_path, kind="another"))  # type: ignore[arg-type]
    assert len(tried) == 2


def test_a_broken_memory_of_trials_is_tried_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = Trial(eager_s=2.0, compiled_s=1.0, first_s=30.0, launches=(9, 3))
    monkeypatch.setattr(compile_choice, "trial", lambda *_: made)
    for text in ("{", "[]", '{"kind | default": 3}', '{"kind | default": {"launches": [1]}}'):
        (tmp_path / compile_choice.FILE).write_text(text, encoding="utf-8")
        executor: Any = Executor()
        (note,) = settle(CompiledBlocks(a_model()), executor, "piece", wish="auto", folder=tmp_path, kind="kind")  # type: ignore[arg-type]
        assert "a trial" in note.message
