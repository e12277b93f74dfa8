"""Blocks that train while they visit get the weights of blocks that stay, whatever the tier and the optimizer."""

from __future__ import annotations

import dataclasses
import math
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.test_streaming import EAGER, a_config, a_plan, batches, saved
from tests.vramfit.models.tiny_families import TINY
from vramfit.config import RunConfig, ScheduleChoice
from vramfit.engine import trained_blocks
from vramfit.engine.governor import StepCost, build_stay_governor
from vramfit.engine.later import Later
from vramfit.engine.mapped import MappedFile
from vramfit.engine.optimizers import build_host_optimizer, build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.engine.streaming import StreamingExecutor
from vramfit.engine.trained_blocks import TrainedBlocks
from vramfit.models.block_tiers import own_tier
from vramfit.models.load import load_model
from vramfit.models.streamed import open_streamed
from vramfit.planning.plan import Plan

FAMILIES = [(family, changes) for family, changes in TINY if family not in ("gpt_neo",)]
SCHEDULE = ScheduleChoice(weight_decay=0.1)


def full_plan(method: Any = "full", **changes: Any) -> Plan:
    return a_plan(method, lora_rank=0, lora_targets=(), **changes)


def resident(
    folder: Path, plan: Plan, tmp_path: Path, config: RunConfig | None = None, **options: Any
) -> ResidentExecutor:
    model = load_model(config or a_config(folder, plan.method), plan, cache=tmp_path)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, SCHEDULE, plan, seed=3), **options)


def streaming(
    folder: Path, plan: Plan, tmp_path: Path, config: RunConfig | None = None, **options: Any
) -> StreamingExecutor:
    scratch = tmp_path / "scratch"
    model, visits = open_streamed(config or a_config(folder, plan.method), plan, scratch=scratch)
    optimizer, stand_ins = build_host_optimizer(model, SCHEDULE, plan, seed=3)
    weights: Any = visits.stream.tier
    trained = TrainedBlocks(
        visits, weights, optimizer, stand_ins, lambda each, name: own_tier(plan, plan.weights_tier, each, scratch, name)
    )
    options = {"inputs_file": scratch / "inputs.bin", **options}
    return StreamingExecutor(model, visits=visits, trained=trained, plan=plan, optimizer=optimizer, **options)


def state_of(executor: ResidentExecutor) -> dict[str, torch.Tensor]:
    tensors, _ = executor.state()
    return {name: each.read().clone() if isinstance(each, Later) else each.clone() for name, each in tensors.items()}


def assert_equal_states(one: ResidentExecutor, other: ResidentExecutor) -> None:
    left, right = state_of(one), state_of(other)
    assert left.keys() == right.keys()
    differing = [name for name in left if not torch.equal(left[name], right[name])]
    assert differing == []


def assert_equal_runs(one: ResidentExecutor, other: ResidentExecutor, *, steps: int = 3) -> None:
    for _ in range(steps):
        first, second = one.step(batches(), 1e-2), other.step(batches(), 1e-2)
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert_equal_states(one, other)
    assert one.evaluate(batches()) == other.evaluate(batches())


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)])
def test_every_family_trains_to_the_same_bits(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    known = transformers.AutoConfig.for_model(family).to_dict()
    at_random = [key for key in known if "drop" in key or "jitter" in key]
    folder = saved(family, tmp_path / "model", **dict.fromkeys(at_random, 0.0), **changes)
    plan = full_plan(attention="eager" if family in EAGER else "sdpa")

    there, here = resident(folder, plan, tmp_path), streaming(folder, disk(plan), tmp_path)
    assert_equal_runs(there, here, steps=2)


def disk(plan: Plan, **changes: Any) -> Plan:
    return dataclasses.replace(plan, **{"weights_tier": "disk", "optimizer_tier": "disk", **changes})


@pytest.mark.parametrize(("tier", "stay"), [*[("disk", stay) for stay in range(6)], ("host", 1)])
def test_any_number_of_blocks_may_stay(tier: Any, stay: int, tmp_path: Path) -> None:
    _any_number_of_blocks(tier, stay, tmp_path)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(("tier", "stay"), [("host", 0), ("host", 3), ("disk", 1), ("disk", 5)])
def test_any_number_of_blocks_may_be_copied(tier: Any, stay: int, tmp_path: Path) -> None:
    _any_number_of_blocks(tier, stay, tmp_path)


def _any_number_of_blocks(tier: Any, stay: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = full_plan()
    streams = disk(plan, weights_tier=tier, optimizer_tier=tier, resident_blocks=stay)

    assert_equal_runs(resident(folder, plan, tmp_path), streaming(folder, streams, tmp_path))


@pytest.mark.parametrize(
    ("optimizer", "bits"), [("adamw", 8), ("adamw", 4), ("adafactor", 32), ("lion", 32), ("lion", 8), ("sgd", 32)]
)
def test_every_optimizer(optimizer: Any, bits: Any, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = full_plan(optimizer=optimizer, optimizer_bits=bits)

    assert_equal_runs(resident(folder, plan, tmp_path), streaming(folder, disk(plan), tmp_path))


@pytest.mark.parametrize("optimizer", ["adamw", "lion", "sgd"])
@pytest.mark.parametrize("lends", [True, False])
def test_weights_stepped_in_stretches(
    optimizer: Any, lends: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many a weight, the last one shorter, with clipped gradients; where a drive lends, and where it copies."""
    monkeypatch.setattr(trained_blocks, "STRETCH", 1056)
    if not lends:
        monkeypatch.setattr(MappedFile, "of", staticmethod(lambda file, nbytes: None))
    folder = saved("llama", tmp_path / "model", hidden_size=60, num_attention_heads=3, num_key_value_heads=1)
    plan = full_plan(optimizer=optimizer)
    options = {"max_grad_norm": 1e-3}

    here = streaming(folder, disk(plan), tmp_path, **options)
    assert_equal_runs(resident(folder, plan, tmp_path, **options), here)


def test_muon(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = full_plan(optimizer="muon")

    assert_equal_runs(resident(folder, plan, tmp_path), streaming(folder, disk(plan), tmp_path))


def test_bf16_weights_have_fp32_copies_beside_their_states(tmp_path: Path) -> None:
    """As they have where states are in RAM and the model is on the device."""
    folder = saved("llama", tmp_path / "model")
    plan = full_plan(compute="bf16", weight_format="bf16", trained_format="bf16")
    there = resident(folder, dataclasses.replace(plan, optimizer_tier="host"), tmp_path)

    assert_equal_runs(there, streaming(folder, disk(plan), tmp_path))


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "qwen3"])
def test_a_table_that_is_embedding_and_head_is_summed_as_in_a_resident_run(family: str, tmp_path: Path) -> None:
    changes: dict[str, Any] = {"head_dim": 16} if family in ("gemma2", "qwen3") else {}
    if family == "gpt2":
        changes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    folder = saved(family, tmp_path / "model", tie_word_embeddings=True, **changes)
    plan = full_plan(attention="eager" if family in EAGER else "sdpa")

    assert_equal_runs(resident(folder, plan, tmp_path), streaming(folder, disk(plan), tmp_path))


def test_a_whole_step_of_padded_rows_through_one_micro_batch(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", tie_word_embeddings=True)
    plan = full_plan(loss="full", loss_chunk_tokens=0)
    there, here = resident(folder, plan, tmp_path), streaming(folder, disk(plan), tmp_path)
    for _ in range(2):
        first, second = there.step(batches()[:1], 1e-2), here.step(batches()[:1], 1e-2)
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    assert_equal_states(there, here)


def test_a_step_without_finite_numbers_changes_nothing(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, disk(full_plan()), tmp_path)
    here.step(batches(), 1e-2)
    before = state_of(here)
    broken = batches()
    with torch.no_grad():
        head = here.model.get_output_embeddings().weight
        good = head[0, 0].item()
        head[0, 0] = math.inf

    result = here.step(broken, 1e-2)

    with torch.no_grad():
        head[0, 0] = good
    assert result.skipped and "not a finite number" in result.problem
    after = state_of(here)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_a_checkpoint_of_one_executor_goes_on_in_the_other(tmp_path: Path) -> None:
    """A run moves between fully resident and fully streamed as its budget changes."""
    folder = saved("llama", tmp_path / "model")
    plan = full_plan()
    there = resident(folder, plan, tmp_path)
    there.step(batches(), 1e-2)
    tensors, values = there.state()
    kept = {name: each.read() if isinstance(each, Later) else each.clone() for name, each in tensors.items()}

    here = streaming(folder, disk(plan, resident_blocks=2), tmp_path)
    here.load_state(kept, values)
    assert_equal_states(there, here)
    assert_equal_runs(there, here, steps=1)

    back = resident(folder, plan, tmp_path)
    stored, values = here.state()
    back.load_state({name: each.read() if isinstance(each, Later) else each for name, each in stored.items()}, values)
    assert_equal_runs(back, here, steps=1)


def test_beside_backward_clips_by_the_norm_of_the_step_before(tmp_path: Path) -> None:
    """Where nothing is clipped its weights are those of the exact mode, and it writes no gradients."""
    folder = saved("llama", tmp_path / "model")
    plan = full_plan()
    one_pass = disk(plan, optimizer_in_backward=True, clip_passes=1)
    exact = streaming(folder, disk(plan), tmp_path / "exact", max_grad_norm=0.0)
    beside = streaming(folder, one_pass, tmp_path / "beside", max_grad_norm=0.0)
    assert_equal_runs(exact, beside)
    assert exact.trained is not None and beside.trained is not None
    weights = sum(each.numel() for name, each in state_of(beside).items() if name.startswith("model.model.layers"))
    assert exact.trained.written_bytes - beside.trained.written_bytes == 3 * 4 * weights

    there = resident(folder, dataclasses.replace(plan, optimizer_in_backward=True, clip_passes=1), tmp_path)
    clipped = streaming(folder, one_pass, tmp_path / "clipped")
    assert_equal_runs(there, clipped)


def test_what_a_step_waits_for_and_writes_is_told(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, disk(full_plan()), tmp_path)
    blocks = sum(each.numel() for name, each in state_of(here).items() if ".layers." in name)
    every = sum(each.numel() for name, each in state_of(here).items() if name.startswith("model."))
    vectors = [each for name, each in here.trained.stored_weights().items()] if here.trained is not None else []

    here.step(batches(), 1e-2)
    waits = here.step(batches(), 1e-2).waits

    assert waits is not None
    counts = 4 * (len(vectors) + 3)  # each weight's number of steps; the embedding, the norm and the head are 3
    assert waits.written_bytes == 4 * (2 * blocks + 2 * every) + counts
    assert waits.disk_seconds > 0 and waits.optimizer_seconds > 0 and waits.link_seconds == 0


@pytest.mark.parametrize("at_once", [True, False])
def test_a_disk_that_backward_waits_for_is_no_optimizer(
    at_once: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In one pass each block is read, stepped and written beside backward; else its gradients are written there."""
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, disk(full_plan(optimizer_in_backward=at_once, clip_passes=1)), tmp_path)
    assert here.trained is not None
    here.step(batches(), 1e-2)
    slow, of = ("_take", TrainedBlocks) if at_once else ("put", type(here.trained._gradients))
    usual = getattr(of, slow)

    def slowly(self: Any, *args: Any) -> Any:
        time.sleep(0.04 if at_once or self is here.trained._gradients else 0.0)  # type: ignore[union-attr]
        return usual(self, *args)

    monkeypatch.setattr(of, slow, slowly)
    waits = here.step(batches(), 1e-2).waits

    assert waits is not None
    assert waits.disk_seconds > 5 * 9 * 0.04 / 2, "of 45 weights' more than a half is not hidden"
    assert waits.disk_seconds > waits.optimizer_seconds > 0


@pytest.mark.parametrize("tier", ["host", "disk", "host, copied"])
def test_blocks_may_come_to_stay_and_leave_between_steps(
    tier: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    tier, _, copied = tier.partition(", ")
    if copied:
        request.getfixturevalue(copied)
    folder = saved("llama", tmp_path / "model")
    plan = full_plan()
    there = resident(folder, plan, tmp_path)
    here = streaming(folder, disk(plan, weights_tier=tier, optimizer_tier=tier, resident_blocks=5), tmp_path)

    for stays in (
        ["visit"] * 5,
        ["stay", "stay", "visit", "visit", "visit"],
        ["visit", "stay"] * 2 + ["stay"],
        ["stay"] * 5,
    ):
        assert_equal_runs(there, here, steps=1)
        here.set_stays(stays)  # type: ignore[arg-type]
        assert here.stays == stays
    assert_equal_runs(there, here, steps=1)


def test_a_governor_sends_blocks_away_one_a_step_while_memory_is_short(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = full_plan()
    there = resident(folder, plan, tmp_path)
    here = streaming(folder, disk(plan, resident_blocks=5), tmp_path)
    first, second = there.step(batches(), 1e-2), here.step(batches(), 1e-2)
    budget = here.reading().allocated
    here.govern(build_stay_governor(here.stays, device=here.device, apply=here.set_stays, budget_bytes=budget))

    counts = []
    for step in range(2, 6):
        assert here.governor is not None
        first, second = there.step(batches(), 1e-2), here.step(batches(), 1e-2)
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
        here.governor.after_step(here.reading(), StepCost(step=step, seconds=1.0, tokens=99, largest_tokens=50))
        counts.append(here.stays.count("stay"))
    assert counts[:2] == [4, 3]
    assert here.reading().allocated < budget
    assert here.governor is not None and here.governor.relieve().startswith("after")
    assert here.stays == ["visit"] * 5
    assert_equal_runs(there, here, steps=1)


@pytest.mark.parametrize("accumulation", [1, 3])
def test_a_step_moves_two_passes_less_the_blocks_at_the_turn(accumulation: int, tmp_path: Path) -> None:
    """However many micro-batches it has. At the bottom nothing is saved: what was there has been stepped. What has
    changed of the block that stays comes once."""
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, disk(full_plan(), resident_blocks=1), tmp_path)
    here.step(batches()[:accumulation], 1e-2)
    traffic, layout = here.visits.stream.traffic, here.visits.stream.tier.layouts[0]
    before = dataclasses.replace(traffic)

    here.step(batches()[:accumulation], 1e-2)

    assert traffic.visits - before.visits == 2 * 4 - 2 + 1
    assert traffic.moved_bytes - before.moved_bytes == (2 * 4 - 2 + 1) * layout.nbytes


@pytest.mark.parametrize(
    ("kind", "bits"),
    [*[(kind, 32) for kind in ("adamw", "adafactor", "lion", "sgd", "muon")], ("adamw", 8), ("adamw", 4), ("lion", 8)],
)
def test_states_are_known_without_a_number_of_the_weight(kind: Any, bits: Any, tmp_path: Path) -> None:
    """What a step on real zeros would keep, at the cost of none."""
    folder = saved("llama", tmp_path / "model", num_hidden_layers=1)
    plan = full_plan(optimizer=kind, optimizer_bits=bits)
    model = load_model(a_config(folder, "full"), plan, cache=tmp_path)
    optimizer, _ = build_host_optimizer(model, SCHEDULE, plan)
    for group in optimizer.param_groups:
        for each in group["params"]:
            found = trained_blocks.state_kinds(optimizer, each.shape, group)
            real = trained_blocks._first_states(optimizer, each.shape, group, "cpu")
            assert found == {key: (tuple(value.shape), value.dtype) for key, value in real.items()}
            assert found and each not in optimizer.state


def test_opening_makes_no_zeros_of_a_weights_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved("llama", tmp_path / "model", num_hidden_layers=1)
    for bits in (32, 8):
        plan = full_plan(optimizer_bits=bits)
        model = load_model(a_config(folder, "full"), plan, cache=tmp_path)
        optimizer, _ = build_host_optimizer(model, SCHEDULE, plan)
        usual, made = torch.zeros, []

        def zeros(*arguments: Any, usual: Any = usual, made: Any = made, **named: Any) -> torch.Tensor:
            made.append(usual(*arguments, **named))
            return made[-1]  # type: ignore[no-any-return]

        with monkeypatch.context() as patched:
            patched.setattr(torch, "zeros", zeros)
            trained_blocks._state_kinds(optimizer)
        assert made and max(each.nbytes for each in made if not each.is_meta) <= 8
