from __future__ import annotations

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import ConfigError, WontFit
from vramfit.models.adapters import attach_adapters

TWO = {"optimizer_in_backward": True, "clip_passes": 2}
ONE = {"optimizer_in_backward": True, "clip_passes": 1}


def executor_for(model, tiny, *, max_grad_norm=0.5, **plan) -> ResidentExecutor:
    made = tiny.plan(**plan)
    return ResidentExecutor(
        model, plan=made, optimizer=build_optimizer(model, ScheduleChoice(), made), max_grad_norm=max_grad_norm
    )


def weights(executor) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in executor.model.named_parameters()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def steps(executor, tiny, count=3, *, micro_batches=1):
    results = []
    for step in range(count):
        batches = [tiny.pad(tiny.sequences(9, 17, seed=10 * step + number)) for number in range(micro_batches)]
        results.append(executor.step(batches, 1e-2))
    return results


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("optimizer", [{}, {"optimizer_bits": 8}, {"optimizer": "muon"}, {"optimizer": "adafactor"}])
def test_two_passes_are_the_ordinary_step_bit_for_bit(tiny, optimizer, recompute, micro_batches):
    """Dropout is on: the second pass must meet the first one's random numbers. The gradients are clipped."""

    def run(**plan):
        torch.manual_seed(3)
        model = tiny.build("llama", attention_dropout=0.2)
        executor = executor_for(model, tiny, recompute=recompute, **optimizer, **plan)
        return executor, steps(executor, tiny, micro_batches=micro_batches), torch.get_rng_state()

    (ordinary, wanted, random), (in_backward, found, own_random) = run(), run(**TWO)
    assert found == wanted and min(result.grad_norm for result in wanted) > 0.5
    assert same(weights(in_backward), weights(ordinary)) and torch.equal(random, own_random)


def test_one_pass_without_clipping_is_the_ordinary_step_bit_for_bit(tiny):
    ordinary = executor_for(tiny.build("llama"), tiny, max_grad_norm=0.0)
    in_backward = executor_for(tiny.build("llama"), tiny, max_grad_norm=0.0, **ONE)
    assert steps(in_backward, tiny) == steps(ordinary, tiny)
    assert same(weights(in_backward), weights(ordinary))


def test_bf16_weights_are_rounded_as_in_an_ordinary_step(tiny):
    found = []
    for plan in ({}, TWO):
        model = tiny.build("llama", hidden_size=16, intermediate_size=16).bfloat16()
        executor = executor_for(model, tiny, compute="bf16", trained_format="bf16", weight_format="bf16", **plan)
        steps(executor, tiny, 2)
        found.append(weights(executor))
    assert same(*found) and all(value.dtype == torch.bfloat16 for value in found[0].values())


def test_one_pass_clips_by_the_norm_of_the_step_before_and_at_first_each_weight_by_its_own(tiny):
    """SGD moves by the rate times the gradient, so that the gradient can be read off."""
    limit, rate = 0.25, 1.0
    batch = tiny.pad(tiny.sequences(9, 17))

    def moved(executor):
        before = weights(executor)
        result = executor.step([batch], rate)
        return {name: before[name] - value for name, value in weights(executor).items()}, result

    def fresh(limit, **plan):
        model = tiny.build("llama")
        made = tiny.plan(optimizer="sgd", **plan)
        schedule = ScheduleChoice(weight_decay=0.0, beta1=0.0)
        optimizer = build_optimizer(model, schedule, made)
        return ResidentExecutor(model, plan=made, optimizer=optimizer, max_grad_norm=limit)

    gradients, _ = moved(fresh(0.0))
    executor = fresh(limit, **ONE)
    first, told = moved(executor)
    for name, value in first.items():
        norm = gradients[name].norm()
        torch.testing.assert_close(
            value, gradients[name] * min(1.0, limit / (norm.item() + 1e-6)), rtol=1e-4, atol=1e-7
        )
    unclipped = fresh(0.0)
    unclipped.model.load_state_dict(executor.model.state_dict())
    gradients, _ = moved(unclipped)
    second, _ = moved(executor)
    assert told.grad_norm > limit
    for name, value in second.items():
        torch.testing.assert_close(value, gradients[name] * (limit / told.grad_norm), rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("plan", [TWO, ONE])
def test_a_tied_weight_is_stepped_once_with_both_parts_of_its_gradient(tiny, plan):
    ordinary = executor_for(tiny.build("llama", tie_word_embeddings=True), tiny, max_grad_norm=0.0)
    in_backward = executor_for(tiny.build("llama", tie_word_embeddings=True), tiny, max_grad_norm=0.0, **plan)
    assert steps(in_backward, tiny) == steps(ordinary, tiny)
    assert same(weights(in_backward), weights(ordinary))
    embedding = in_backward.model.get_input_embeddings().weight
    assert int(in_backward.optimizer.state[embedding]["step"]) == 3


@pytest.mark.parametrize("plan", [TWO, ONE])
def test_adapters_are_stepped_and_nothing_else(tiny, plan):
    def run(**own):
        executor = executor_for(
            attach_adapters(tiny.build("llama"), rank=4, alpha=8, seed=0), tiny, max_grad_norm=0.0, recompute=1, **own
        )
        return steps(executor, tiny), weights(executor)

    (wanted, values), (found, own_values) = run(), run(**plan)
    assert found == wanted and same(own_values, values)


@pytest.mark.parametrize("plan", [TWO, ONE])
def test_gradients_are_never_there_together(tiny, plan):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **plan)
    together = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: together.append(sum(each.grad is not None for each in model.parameters()))
        )
    steps(executor, tiny, 1)
    assert max(together) <= 1 and len(together) >= len(list(model.parameters()))


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_two_passes_leave_the_weights_alone_when_something_is_not_finite(tiny, where):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **TWO)
    if where == "loss":
        with torch.no_grad():
            model.model.norm.weight[0] = torch.inf
    else:  # of the weight whose gradient comes last
        model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * torch.nan)
    before = weights(executor)
    result = executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2)
    assert result.skipped and where in result.problem and same(weights(executor), before)
    assert not executor.optimizer.state and all(parameter.grad is None for parameter in model.parameters())


def test_one_pass_takes_a_gradient_that_is_not_finite_for_none_and_says_so(tiny):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **ONE)
    steps(executor, tiny, 1)
    embedding = model.get_input_embeddings().weight
    handle = embedding.register_hook(lambda gradient: gradient * torch.nan)
    result = executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2)
    assert "gradient" in result.problem and not result.skipped
    assert all(value.isfinite().all() for value in weights(executor).values())
    handle.remove()
    assert not executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2).problem


def test_one_pass_changes_nothing_when_the_loss_is_not_finite(tiny):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **ONE)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.inf
    before = weights(executor)
    result = executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2)
    assert result.skipped and "loss" in result.problem and same(weights(executor), before)


def test_two_passes_with_fp16_skip_and_scale_as_an_ordinary_step(tiny):
    found = []
    for plan in ({}, TWO):
        model = tiny.build("llama", hidden_size=16, intermediate_size=16)
        executor = executor_for(model, tiny, compute="fp16", **plan)
        results = steps(executor, tiny, 1)
        executor._scaler.load_state_dict({**executor._scaler.state_dict(), "scale": 2.0**40})
        results += steps(executor, tiny, 1)
        executor._scaler.load_state_dict({**executor._scaler.state_dict(), "scale": 2.0**10})
        results += steps(executor, tiny, 1)
        # the norm of a step that overflowed may be infinite or no number
        found.append(([(r.loss, r.skipped, r.loss_scale, r.problem) for r in results], weights(executor)))
    (wanted, values), (own, own_values) = found
    assert own == wanted and [skipped for _, skipped, _, _ in own] == [False, True, False]
    assert same(own_values, values)


def test_one_pass_with_fp16_is_refused(tiny):
    with pytest.raises(ConfigError, match="two passes"):
        executor_for(tiny.build("llama"), tiny, compute="fp16", **ONE)


def fail_once(module, *, at_call: int, in_backward: bool) -> None:
    """Raise the real out-of-memory class at the given call of a module's forward, or in that call's backward."""
    original, calls = module.forward, []

    def limited(*args, **kwargs):
        calls.append(1)
        made = original(*args, **kwargs)
        if len(calls) != at_call:
            return made
        if not in_backward:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        made.register_hook(lambda gradient: (_ for _ in ()).throw(torch.OutOfMemoryError("tried to allocate 2 GiB")))
        return made

    module.forward = limited


@pytest.mark.parametrize("at_call", [1, 2])
def test_memory_that_runs_out_before_any_weight_moved_repeats_the_step(tiny, at_call):
    """In the first pass, or in the second one's forward."""
    batch = tiny.pad(tiny.sequences(9, 17, 5, 30))
    wanted = executor_for(tiny.build("llama"), tiny)
    wanted.step([batch], 1e-2)
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **TWO)
    fail_once(model.model.layers[0].mlp, at_call=at_call, in_backward=False)
    result = executor.step([batch], 1e-2)
    assert "Memory ran out with 4 sequences" in result.recovered
    for name, value in weights(executor).items():
        torch.testing.assert_close(value, dict(wanted.model.named_parameters())[name].detach(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(("plan", "at_call"), [(ONE, 1), (TWO, 2)])
def test_memory_that_runs_out_when_weights_have_moved_ends_the_run_with_a_sentence(tiny, plan, at_call):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **plan)
    fail_once(model.model.layers[0].mlp, at_call=at_call, in_backward=True)  # the head has moved by then
    with pytest.raises(WontFit, match=r"already changed.*last checkpoint"):
        executor.step([tiny.pad(tiny.sequences(9, 17, 5, 30))], 1e-2)
    assert all(parameter.grad is None for parameter in model.parameters())
