from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.conftest import build, make_plan, make_sequences, pad
from tests.vramfit.engine.pseudo_card import PseudoCard
from vramfit.config import RunConfig, ScheduleChoice
from vramfit.engine import governor
from vramfit.engine.activations import planned_modes
from vramfit.engine.governor import build_governor
from vramfit.engine.loss import TokenLoss
from vramfit.engine.memory_limits import FILE, MemoryLimits
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor, StepResult
from vramfit.errors import WontFit
from vramfit.training import run
from vramfit.training.loop import train
from vramfit.training.memory_care import MemoryCare

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]


@pytest.fixture
def own_cache(cache: Path, tmp_path: Path) -> Path:
    """Limits are kept beside everything else that is cached: here in a folder that no other test sees."""
    folder = tmp_path / "cache"
    folder.mkdir()
    for path in cache.iterdir():
        if path.name != FILE:
            (folder / path.name).symlink_to(path)
    return folder


def bear_only(monkeypatch: pytest.MonkeyPatch, most_rows: int) -> None:
    """More rows than these run out of memory while they train."""
    real = TokenLoss.sums

    def limited(self: Any, inputs: Any, targets: Any, **options: Any) -> Any:
        if torch.is_grad_enabled() and len(inputs["input_ids"]) > most_rows:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, inputs, targets, **options)

    monkeypatch.setattr(TokenLoss, "sums", limited)


def told(heard: Any, kind: str) -> list[str]:
    return [event.message for event in heard.events if event.kind == kind]


def test_a_limit_is_told_and_the_next_run_begins_with_it(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(memory={"micro_batch": 3})
    calm = kept()
    train(config, folder=tmp_path / "calm", cache=own_cache, recorder=calm)
    assert told(calm, "out-of-memory") == [] and not (own_cache / FILE).exists()
    bear_only(monkeypatch, 1)
    first, second = kept(), kept()
    train(config, folder=tmp_path / "first", cache=own_cache, recorder=first)
    assert [message.split(" (")[0] for message in told(first, "out-of-memory")] == [
        "Memory ran out with 3 sequences at a time; the step was repeated with 1"
    ]
    train(config, folder=tmp_path / "second", cache=own_cache, recorder=second)
    (message,) = told(second, "out-of-memory")
    assert "1 sequences at a time fitted: this one begins with 1, not 3" in message
    assert second.losses == first.losses == pytest.approx(calm.losses, rel=1e-4)


def test_a_resumed_run_goes_on_as_it_was(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another run of the same kind has met a limit meanwhile; the last bits of this one do not change."""
    config = small_run(memory={"micro_batch": 3})
    whole, first, second = kept(), kept(), kept()
    train(config, folder=tmp_path / "whole", cache=own_cache, recorder=whole)
    train(
        config,
        folder=tmp_path / "cut",
        cache=own_cache,
        recorder=first,
        should_stop=lambda: len(first.metrics) >= 3,
    )
    with monkeypatch.context() as patched:
        bear_only(patched, 2)
        train(config, folder=tmp_path / "other", cache=own_cache, recorder=kept())
    assert (own_cache / FILE).is_file()
    train(config, folder=tmp_path / "cut", cache=own_cache, recorder=second, resume=True)
    assert told(second, "out-of-memory") == []
    assert first.losses + second.losses == whole.losses


def test_a_run_that_memory_ended_is_resumed_with_less_at_once(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights had changed when memory ran out, so the step could not be repeated."""
    config = small_run(memory={"micro_batch": 3}, output={"checkpoint_every": 1})
    real, calls = TokenLoss.sums, []

    def fails_once(self: Any, inputs: Any, targets: Any, **options: Any) -> Any:
        calls.append(len(inputs["input_ids"]))
        if torch.is_grad_enabled() and sum(size == 3 for size in calls) == 4:
            with torch.no_grad():
                next(parameter for parameter in self.model.parameters() if parameter.requires_grad).mul_(1.5)
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, inputs, targets, **options)

    with monkeypatch.context() as patched:
        patched.setattr(TokenLoss, "sums", fails_once)
        with pytest.raises(WontFit, match="had already changed"):
            train(config, folder=tmp_path / "run", cache=own_cache, recorder=kept())
    heard = kept()
    train(config, folder=tmp_path / "run", cache=own_cache, recorder=heard, resume=True)
    (message,) = told(heard, "out-of-memory")
    assert "begins with 2, not 3" in message
    assert heard.metrics[0].step > 1 and heard.metrics[-1].step == 7


@pytest.mark.parametrize("adapts", [True, False])
def test_the_governor_is_told_of_and_can_be_turned_off(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, adapts: bool
) -> None:
    """Watermarks so low that every step is above them; the losses are the same bit for bit."""
    calm, heard = kept(), kept()
    wishes = {"micro_batch": 3, "adapt": adapts}
    once = {"checkpoint_every": 7}  # memory is read in all other steps, where no checkpoint's copy is there
    train(small_run(memory=wishes, output=once), folder=tmp_path / "calm", cache=own_cache, recorder=calm)
    assert told(calm, "governor") == []
    monkeypatch.setattr(governor, "TRUSTED", 0.0)  # of what the run may have: the high watermark is at most there
    train(small_run(memory=wishes, output=once), folder=tmp_path / "run", cache=own_cache, recorder=heard)
    messages = told(heard, "governor")
    assert bool(messages) is adapts
    assert heard.losses == calm.losses
    if adapts:
        assert "block 1 now recomputes its activations. That freed" in messages[0]
        least = [min(step.allocated_bytes for step in run.metrics[3:6]) for run in (heard, calm)]
        assert least[0] < least[1]


def test_the_file_of_limits_is_plain(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bear_only(monkeypatch, 2)
    train(small_run(memory={"micro_batch": 3}), folder=tmp_path / "run", cache=own_cache, recorder=kept())
    values = json.loads((own_cache / FILE).read_text(encoding="utf-8"))
    ((kind, limit),) = values["limits"].items()
    assert "pretrain" in kind and torch.__version__ in kind
    assert limit["rows"] == 2 and limit["bytes"] > 0 and limit["ended_run"] is False


def test_an_evaluation_without_room_does_not_shrink_what_trains(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Told once; the steps are those of a run that had room, bit for bit, and so are the steps after a resume."""
    config = small_run(
        data={"eval_share": 0.3},
        memory={"micro_batch": 3},
        output={"evaluate_every": 2, "checkpoint_every": 4, "prompts": [], "sample_tokens": 0},
    )
    calm, heard, cut, resumed = kept(), kept(), kept(), kept()
    train(config, folder=tmp_path / "calm", cache=own_cache, recorder=calm)
    real = TokenLoss.sums

    def limited(self: Any, inputs: Any, targets: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled() and len(inputs["input_ids"]) > 1:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, inputs, targets, **options)

    monkeypatch.setattr(TokenLoss, "sums", limited)
    train(config, folder=tmp_path / "run", cache=own_cache, recorder=heard)
    assert told(heard, "out-of-memory") == [
        "Memory ran out in an evaluation; evaluations go on with 1 sequences at a time, and training with as many as "
        "before."
    ]
    assert heard.losses == calm.losses and not (own_cache / FILE).exists()
    wanted = [each.loss for each in calm.evaluations]
    assert [each.loss for each in heard.evaluations] == pytest.approx(wanted, rel=1e-5)

    train(config, folder=tmp_path / "cut", cache=own_cache, recorder=cut, should_stop=lambda: len(cut.metrics) >= 3)
    train(config, folder=tmp_path / "cut", cache=own_cache, recorder=resumed, resume=True)
    assert told(resumed, "out-of-memory") == []  # the checkpoint knows
    assert [each.loss for each in resumed.evaluations] == [each.loss for each in heard.evaluations][-3:]


def test_a_trial_of_rows_without_room_is_told_and_remembered(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = small_run(memory={"micro_batch": "auto"}, schedule={"sequences_per_step": 4})
    monkeypatch.setattr(run.Run, "tries_rows", lambda self, run_s: True)  # as on a card, in a long run
    bear_only(monkeypatch, 2)
    first, second = kept(), kept()
    train(config, folder=tmp_path / "first", cache=own_cache, recorder=first)
    (message,) = told(first, "out-of-memory")
    assert message.startswith(
        "Memory ran out when 4 sequences at a time were tried, before step 1: the run begins with 2"
    )
    train(config, folder=tmp_path / "second", cache=own_cache, recorder=second)
    (message,) = told(second, "out-of-memory")
    assert "2 sequences at a time fitted: this one begins with 2, not 4" in message
    assert len(first.metrics) == len(second.metrics) == 7


def a_care(folder: Path, **changes: Any) -> MemoryCare:
    """A model of four blocks with a governor, whose limits are kept in `folder`."""
    model = build("llama", num_hidden_layers=4)
    plan = make_plan(accumulation=1, budget_bytes=1, **{"micro_batch": 2, **changes})
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    modes = planned_modes(plan, 4)
    executor.govern(build_governor(modes, device=executor.device, apply=executor.set_activations, budget_bytes=1))
    assert executor.recovery.relieves_first  # all of this budget would be gradients that wait
    return MemoryCare(executor=executor, limits=MemoryLimits(folder), kind="a kind")


def on_a_card(care: MemoryCare, *, budget_bytes: int) -> tuple[StepResult, PseudoCard]:
    """A step of two sequences, and the run's care after it."""
    with PseudoCard(care.executor.model, budget_bytes=budget_bytes) as card:
        result = care.executor.step([pad(make_sequences(60, 58))], 1e-2)
    care.executor.governor = None  # it has nothing more to decide here
    care.after_step(1, result, 1.0)
    return result, card


def test_blocks_that_recompute_to_save_a_step_are_how_the_next_run_of_the_kind_begins(tmp_path: Path) -> None:
    """A card that has room for two sequences where all blocks recompute, and not where they keep: the second run meets
    no end of memory, and its numbers are those of the first."""
    _, lean = on_a_card(a_care(tmp_path / "lean", recompute=4), budget_bytes=0)
    budget = lean.peak_bytes + 4096
    first = a_care(tmp_path)
    assert list(first.heed_limits(resumed=False)) == []
    governor = first.executor.governor
    with PseudoCard(first.executor.model, budget_bytes=budget) as card:
        saved = first.executor.step([pad(make_sequences(60, 58))], 1e-2)
    assert card.raised == 1 and "4 blocks went on to another way" in saved.recovered
    assert first.executor.recovery.most_rows == 0 and governor.relieved_to == "recompute"
    first.after_step(1, saved, 1.0)

    second, fewer, resumed = a_care(tmp_path), a_care(tmp_path, micro_batch=1), a_care(tmp_path)
    (note,) = second.heed_limits(resumed=False)
    assert "this one begins with 4 blocks, each of which recomputes its activations" in note.message
    result, card = on_a_card(second, budget_bytes=budget)
    assert card.raised == 0 and result.recovered == ""
    assert (result.loss, result.grad_norm) == (saved.loss, saved.grad_norm)
    assert list(fewer.heed_limits(resumed=False)) == []  # one at a time may well keep them
    assert list(resumed.heed_limits(resumed=True)) == []  # it is in its checkpoint, or the run had none


def test_text_that_has_no_room_is_told_and_ends_nothing(
    small_run: Build, kept: Keep, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_room(*_: Any, **__: Any) -> str:
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    monkeypatch.setattr(run, "generate", no_room)
    heard = kept()
    config = small_run(output={"prompts": ["The fox"], "sample_tokens": 8})
    train(config, folder=tmp_path / "run", cache=own_cache, recorder=heard)
    assert len(heard.metrics) == 7 and heard.samples == []
    assert told(heard, "sample") == [
        f"No text was written {stage} training: memory ran out (Tried to allocate 2.00 GiB)."
        for stage in ("before", "after")
    ]
