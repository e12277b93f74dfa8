"""A run's checkpoint goes on wherever its next executor has the weights: on the device, or visiting it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.vramfit.engine import test_streaming as adapted
from tests.vramfit.engine import test_trained_blocks as in_full
from tests.vramfit.engine.test_streaming import a_plan, batches, saved
from tests.vramfit.engine.test_trained_blocks import disk, full_plan
from vramfit.engine.governor import StepCost, build_governor, build_stay_governor
from vramfit.engine.optimizer_state import MASTER
from vramfit.engine.resident import MODEL, OPTIMIZER, ResidentExecutor
from vramfit.engine.streaming import StreamingExecutor

NARROW = {"compute": "bf16", "weight_format": "bf16", "trained_format": "bf16"}


def checkpoint(executor: ResidentExecutor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """What a checkpoint keeps of it: copies of tensors, values that have been JSON."""
    return in_full.state_of(executor), json.loads(json.dumps(executor.state()[1]))


def govern(executor: ResidentExecutor, *, budget_bytes: int = 2**40) -> None:
    """With a governor of its kind, which has nothing to do in a large budget."""
    if isinstance(executor, StreamingExecutor):
        executor.govern(
            build_stay_governor(
                executor.stays, device=executor.device, apply=executor.set_stays, budget_bytes=budget_bytes
            )
        )
    else:
        modes = executor.activations or ("keep",) * 5
        executor.govern(
            build_governor(
                modes, device=executor.device, apply=executor.set_activations, budget_bytes=budget_bytes, fixed=True
            )
        )


def governed_step(executor: ResidentExecutor, step: int) -> tuple[float, float]:
    result = executor.step(batches(), 1e-2)
    assert executor.governor is not None
    executor.governor.after_step(
        executor.reading(), StepCost(step=step, seconds=1.0, tokens=99, largest_tokens=result.largest_tokens)
    )
    return result.loss, result.grad_norm


def masters(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The fp32 copies by their weights' names."""
    found = {name.removesuffix(f".{MASTER}"): each for name, each in state.items() if name.endswith(f".{MASTER}")}
    return {name.removeprefix(OPTIMIZER): each for name, each in found.items()}


def weights(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(MODEL): each for name, each in state.items() if name.startswith(MODEL)}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found and found.keys() == wanted.keys()
    assert [name for name in found if not torch.equal(found[name], wanted[name])] == []


# --- how activations are held, which blocks stay ---------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [3, 5])
@pytest.mark.parametrize("way", ["to streamed", "to resident"])
def test_a_governed_run_moves(way: str, recompute: int, tmp_path: Path) -> None:
    """What one kind of governor did to blocks means nothing to the other."""
    folder = saved("llama", tmp_path / "model")
    there = adapted.resident(folder, a_plan(recompute=recompute), tmp_path)
    here = adapted.streaming(folder, a_plan(weights_tier="disk", resident_blocks=2), tmp_path)
    begun, goes_on = (there, here) if way == "to streamed" else (here, there)
    govern(begun)
    govern(goes_on)
    for step in (1, 2):
        governed_step(begun, step)
    before = list(there.activations), here.stays

    goes_on.load_state(*checkpoint(begun))

    assert (list(there.activations), here.stays) == before
    for step in (3, 4):
        assert governed_step(goes_on, step) == governed_step(begun, step)


def test_a_run_that_compressed_goes_on_streamed(tmp_path: Path) -> None:
    """From the same weights; its blocks are recomputed from now on, so the last bits of its steps are others."""
    folder = saved("llama", tmp_path / "model")
    there = adapted.resident(folder, a_plan(compress=5), tmp_path)
    here = adapted.streaming(folder, a_plan(weights_tier="disk", resident_blocks=2), tmp_path)
    govern(there)
    govern(here)
    governed_step(there, 1)

    here.load_state(*checkpoint(there))

    assert here.stays == ["stay", "stay", "visit", "visit", "visit"]
    assert here.evaluate(batches()) == there.evaluate(batches())
    assert governed_step(here, 2) == pytest.approx(governed_step(there, 2), rel=0.05)


def test_blocks_that_a_governor_sent_away_stay_away(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = a_plan(weights_tier="disk", resident_blocks=4)
    begun, resumed = (adapted.streaming(folder, plan, tmp_path) for _ in range(2))
    govern(begun, budget_bytes=1)
    govern(resumed, budget_bytes=1)
    for step in (1, 2):
        governed_step(begun, step)
    assert begun.stays.count("stay") == 2

    resumed.load_state(*checkpoint(begun))

    assert resumed.stays == begun.stays
    assert governed_step(resumed, 3) == governed_step(begun, 3)
    assert resumed.stays == begun.stays and resumed.stays.count("stay") == 1


# --- 16 bits and fp32 copies -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("formats", [NARROW, {"compute": "bf16"}], ids=["weights in bf16", "weights in fp32"])
def test_a_resident_run_goes_on_streamed_with_fp32_copies_of_its_weights(
    formats: dict[str, Any], tmp_path: Path
) -> None:
    """It had no copies: its weights themselves were trained. Those in fp32 lose nothing."""
    folder = saved("llama", tmp_path / "model")
    there = in_full.resident(folder, full_plan(**formats), tmp_path)
    there.step(batches(), 1e-3)
    kept = checkpoint(there)
    assert not masters(kept[0])
    here = in_full.streaming(folder, disk(full_plan(**NARROW)), tmp_path)

    here.load_state(*kept)

    found, trained = in_full.state_of(here), weights(kept[0])
    assert_same(masters(found), {name: each.float() for name, each in trained.items()})
    assert_same(weights(found), {name: each.bfloat16() for name, each in trained.items()})
    first, second = there.step(batches(), 1e-3), here.step(batches(), 1e-3)
    assert second.loss == pytest.approx(first.loss, rel=0.02)
    assert here.evaluate(batches())[0] == pytest.approx(there.evaluate(batches())[0], rel=0.02)


@pytest.mark.parametrize("formats", [NARROW, {"compute": "bf16"}], ids=["weights in bf16", "weights in fp32"])
def test_a_streamed_run_goes_on_resident_from_its_fp32_copies(formats: dict[str, Any], tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    here = in_full.streaming(folder, disk(full_plan(**NARROW)), tmp_path)
    here.step(batches(), 1e-3)
    kept = checkpoint(here)
    there = in_full.resident(folder, full_plan(**formats), tmp_path)

    there.load_state(*kept)

    found = weights(in_full.state_of(there))
    assert_same(found, {name: each.to(found[name].dtype) for name, each in masters(kept[0]).items()})
    first, second = here.step(batches(), 1e-3), there.step(batches(), 1e-3)
    assert second.loss == pytest.approx(first.loss, rel=0.02)


@pytest.mark.parametrize("formats", [NARROW, {"compute": "bf16"}], ids=["weights in bf16", "weights in fp32"])
def test_a_stale_fp32_copy_does_not_come_back(formats: dict[str, Any], tmp_path: Path) -> None:
    """Streamed, then resident, which trains the weights and not the copies, then streamed again."""
    folder = saved("llama", tmp_path / "model")
    streamed = disk(full_plan(**NARROW))
    here = in_full.streaming(folder, streamed, tmp_path)
    here.step(batches(), 1e-3)
    there = in_full.resident(folder, full_plan(**formats), tmp_path)
    there.load_state(*checkpoint(here))
    there.step(batches(), 1e-2)
    kept = checkpoint(there)
    assert not masters(kept[0])

    again = in_full.streaming(folder, streamed, tmp_path)
    again.load_state(*kept)

    assert_same(masters(in_full.state_of(again)), {name: each.float() for name, each in weights(kept[0]).items()})
    again.step(batches(), 1e-9)
    assert again.evaluate(batches())[0] == pytest.approx(there.evaluate(batches())[0], rel=0.02)
