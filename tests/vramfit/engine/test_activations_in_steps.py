"""Modes of blocks and terms of the loss inside real optimizer steps: replays, resumes, changes between steps."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from vramfit.config import LossChoice, ScheduleChoice
from vramfit.engine.activations import activation_modes, find_blocks
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.models.adapters import attach_adapters

WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 3, "initializer_range": 0.05}
PLANS = {
    "recompute": {"recompute": 3},
    "offload": {"recompute": 3, "input_tier": "host"},
    "mixed": {"recompute": 1, "input_tier": "host", "compress": 1},
    "compress": {"compress": 3},
}


def executor_for(tiny, *, family="llama", adapters=False, terms=None, changes=None, **plan):
    model = tiny.build(family, **{**WIDE, "attention_dropout": 0.1, **(changes or {})})
    if adapters:
        model = attach_adapters(model, rank=4, alpha=8, dropout=0.2, seed=0)
    plan = tiny.plan(**plan)
    optimizer = build_optimizer(model, ScheduleChoice(), plan)
    return ResidentExecutor(model, plan=plan, optimizer=optimizer, loss=terms or LossChoice())


def step(executor, tiny, number, *, packed=False):
    make = tiny.pack if packed else tiny.pad
    return executor.step([make(tiny.sequences(9, 17, 30, 4, seed=number)), make(tiny.sequences(5, seed=-number))], 1e-2)


def limit_rows(executor, most: int) -> None:
    """The real out-of-memory class from inside the last block when more rows than `most` come at once."""
    block = find_blocks(executor.model)[-1]
    inner = block.mlp.forward

    def limited(hidden, *args, **kwargs):
        if hidden.shape[0] > most:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return inner(hidden, *args, **kwargs)

    block.mlp.forward = limited


@pytest.mark.parametrize("kind", ["recompute", "offload"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_steps_with_recompute_and_offload_are_those_of_kept_blocks(tiny, kind, adapters, packed, family):
    """Accumulation, dropout, grouped heads and experts, tied embeddings."""
    found = []
    for plan in ({}, PLANS[kind]):
        executor = executor_for(tiny, family=family, adapters=adapters, changes={"tie_word_embeddings": True}, **plan)
        torch.manual_seed(3)
        results = [step(executor, tiny, number, packed=packed) for number in (1, 2)]
        found.append((results, executor.model.state_dict()))
    (kept, weights), (other, others) = found
    assert [one.loss for one in kept] == [one.loss for one in other] and kept[0].grad_norm == other[0].grad_norm
    assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("kind", PLANS)
@pytest.mark.parametrize("adapters", [False, True])
def test_a_step_repeated_in_smaller_pieces_is_the_step_that_began_small(tiny, kind, adapters):
    """Random numbers, those for rounding too, are put back before the second attempt."""
    results = []
    for known in (True, False):
        executor = executor_for(tiny, adapters=adapters, **PLANS[kind])
        torch.manual_seed(3)
        if known:
            executor.recovery.most_rows = 2
        else:
            limit_rows(executor, 2)
        result = step(executor, tiny, 1)
        assert bool(result.recovered) is not known
        results.append((result.loss, result.grad_norm, executor.model.state_dict()))
    (loss, norm, weights), (other_loss, other_norm, other_weights) = results
    assert (loss, norm) == (other_loss, other_norm)
    assert all(torch.equal(weights[name], other_weights[name]) for name in weights)


@pytest.mark.parametrize("kind", ["mixed", "compress", "offload"])
def test_a_resumed_run_is_the_same_bit_for_bit(tiny, kind):
    def run(first, last, state=None):
        executor = executor_for(tiny, adapters=True, terms=LossChoice(z_loss=1e-3), **PLANS[kind])
        if state is not None:
            executor.load_state(*state)
        for number in range(first, last):
            step(executor, tiny, number)
        return executor

    torch.manual_seed(5)
    whole = run(1, 5)
    torch.manual_seed(5)
    tensors, values = run(1, 3).state()
    kept = load(save({name: tensor.contiguous() for name, tensor in tensors.items()})), json.loads(json.dumps(values))
    torch.manual_seed(99)
    resumed = run(3, 5, kept)
    wanted, found = whole.state()[0], resumed.state()[0]
    assert ("random.rounding" in wanted) and wanted.keys() == found.keys()
    assert all(torch.equal(wanted[name], found[name]) for name in wanted)


def test_a_resume_goes_on_with_what_needs_less_of_what_was_and_what_is_planned(tiny):
    first = executor_for(tiny, compress=2)
    first.set_activations(["offload", "compress", "keep"])
    second = executor_for(tiny, recompute=2)
    second.load_state(*first.state())
    assert second.activations == ("offload", "recompute", "keep") == activation_modes(second.model)


def test_modes_change_between_steps_of_a_run(tiny):
    executor = executor_for(tiny)
    other = executor_for(tiny)
    assert executor.activations == ()
    torch.manual_seed(3)
    wanted = [step(other, tiny, number).loss for number in (1, 2, 3)]
    torch.manual_seed(3)
    found = []
    for number, modes in ((1, ["recompute"] * 3), (2, ["offload", "keep", "recompute"]), (3, ["keep"] * 3)):
        executor.set_activations(modes)
        found.append(step(executor, tiny, number).loss)
    assert found == wanted


@pytest.mark.parametrize("kind", ["full", "chunked", "fused"])
def test_steps_minimise_the_whole_objective_and_report_the_cross_entropy(tiny, kind):
    plain, other = (
        executor_for(tiny, terms=terms, changes={"attention_dropout": 0.0}, recompute=1, loss=kind)
        for terms in (LossChoice(), LossChoice(z_loss=0.5, label_smoothing=0.3))
    )
    batches = [tiny.pad(tiny.sequences(9, 17))]
    wanted = plain.evaluate(batches)
    assert other.evaluate(batches) == pytest.approx(wanted, rel=1e-6)
    without, with_terms = plain.step(batches, 1e-3), other.step(batches, 1e-3)
    assert with_terms.loss == pytest.approx(without.loss, rel=1e-6) == pytest.approx(wanted[0], rel=1e-6)
    assert with_terms.grad_norm != pytest.approx(without.grad_norm, rel=0.01)
    for _ in range(20):
        with_terms = other.step(batches, 1e-3)
    logits = other.model.eval()(input_ids=batches[0].input_ids).logits
    before = tiny.build("llama", **WIDE)(input_ids=batches[0].input_ids).logits
    assert logits.logsumexp(-1).square().mean() < before.logsumexp(-1).square().mean() / 4  # what a z-loss is for
