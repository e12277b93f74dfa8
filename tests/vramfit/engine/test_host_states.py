from __future__ import annotations

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine.host_states import HostStates
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.models.adapters import attach_adapters

HOST = {"optimizer_tier": "host"}


def executor_for(model, tiny, *, max_grad_norm=0.5, **plan) -> ResidentExecutor:
    made = tiny.plan(**plan)
    return ResidentExecutor(
        model, plan=made, optimizer=build_optimizer(model, ScheduleChoice(), made), max_grad_norm=max_grad_norm
    )


def run(model, tiny, *, micro_batches=1, **plan):
    executor = executor_for(model, tiny, **plan)
    results = [
        executor.step([tiny.pad(tiny.sequences(9, 17, seed=10 * step + n)) for n in range(micro_batches)], 1e-2)
        for step in range(3)
    ]
    return results, {name: value.detach().clone() for name, value in model.named_parameters()}, executor


def same(left, right) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(
    "optimizer", [{}, {"optimizer_bits": 8}, {"optimizer_bits": 4}, {"optimizer": "lion"}, {"optimizer": "muon"}]
)
@pytest.mark.parametrize("compute", ["fp32", "fp16"])
def test_the_weights_are_those_of_states_on_the_device_bit_for_bit(tiny, optimizer, micro_batches, compute):
    """Clipped. Here the device is the processor, so that all is computed by the same kernels."""
    small = {"hidden_size": 16, "intermediate_size": 16} if compute == "fp16" else {"tie_word_embeddings": True}
    wanted, values, _ = run(
        tiny.build("llama", **small), tiny, micro_batches=micro_batches, compute=compute, **optimizer
    )
    found, own_values, executor = run(
        tiny.build("llama", **small), tiny, micro_batches=micro_batches, compute=compute, **optimizer, **HOST
    )
    assert found == wanted and same(own_values, values) and min(result.grad_norm for result in wanted) > 0.5
    assert isinstance(executor.optimizer, HostStates)


def test_adapters_too(tiny):
    models = [attach_adapters(tiny.build("llama"), rank=4, alpha=8, dropout=0.1, seed=0) for _ in range(2)]
    torch.manual_seed(1)
    wanted, values, _ = run(models[0], tiny, recompute=2)
    torch.manual_seed(1)
    found, own_values, _ = run(models[1], tiny, recompute=2, **HOST)
    assert found == wanted and same(own_values, values)


def test_gradients_leave_the_device_while_backward_goes_on(tiny):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **HOST)
    together = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda _: together.append(sum(each.grad is not None for each in model.parameters()))
        )
    executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2)
    assert max(together) <= 1


def test_bf16_weights_have_fp32_masters_that_lose_nothing(tiny):
    """The weights are the masters rounded to the nearest; the masters move as fp32 weights do."""
    small = {"hidden_size": 16, "intermediate_size": 16}
    plan = {"compute": "bf16", "trained_format": "bf16", "weight_format": "bf16"}
    _, values, executor = run(tiny.build("llama", **small).bfloat16(), tiny, **plan, **HOST)
    moved = 0
    for name, parameter in executor.model.named_parameters():
        master = executor.optimizer.master(parameter)
        assert master.dtype == torch.float32 and torch.equal(master.bfloat16(), values[name])
        moved += int((master != values[name].float()).sum())
    assert moved > 0


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_changes_nothing(tiny, where):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, **HOST)
    if where == "loss":
        with torch.no_grad():
            model.model.norm.weight[0] = torch.inf
    else:
        model.get_input_embeddings().weight.register_hook(lambda gradient: gradient * torch.nan)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    result = executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2)
    assert result.skipped and where in result.problem
    assert same({name: value.detach() for name, value in model.named_parameters()}, before)
    assert not executor.optimizer.state


def test_out_of_memory_repeats_the_step_and_steps_no_gradient_of_the_first_attempt(tiny):
    batch = tiny.pad(tiny.sequences(9, 17, 5, 30))
    wanted, model = tiny.build("llama"), tiny.build("llama")
    executor_for(wanted, tiny).step([batch], 1e-2)
    executor = executor_for(model, tiny, **HOST)
    original = model.model.layers[0].mlp.forward

    def limited(hidden):
        made = original(hidden)
        if hidden.shape[0] > 2:  # in backward, when the head's gradient has been sent
            made.register_hook(
                lambda gradient: (_ for _ in ()).throw(torch.OutOfMemoryError("tried to allocate 2 GiB"))
            )
        return made

    model.model.layers[0].mlp.forward = limited
    assert "repeated with 2" in executor.step([batch], 1e-2).recovered
    for name, value in model.named_parameters():
        torch.testing.assert_close(value, dict(wanted.named_parameters())[name], rtol=1e-3, atol=1e-4)


def test_the_optimizers_own_step_takes_gradients_from_the_device(tiny):
    """As somebody calls it who knows nothing of executors."""
    model, other = tiny.build("llama"), tiny.build("llama")
    optimizers = [
        build_optimizer(each, ScheduleChoice(), tiny.plan(**plan)) for each, plan in ((model, {}), (other, HOST))
    ]
    for each, optimizer in zip((model, other), optimizers, strict=True):
        optimizer.param_groups[0]["lr"] = 1e-2
        each(input_ids=torch.arange(20).view(2, 10), labels=torch.arange(20).view(2, 10)).loss.backward()
        optimizer.step()
    assert same(model.state_dict(), other.state_dict())
