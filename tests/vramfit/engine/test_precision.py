from __future__ import annotations

import pytest
import torch

from vramfit.engine.precision import (
    autocast,
    check_precision,
    choose_precision,
    described,
    fp32_products,
    loss_scaler,
)
from vramfit.errors import ConfigError


def test_the_cpu_computes_in_fp32():
    choice = choose_precision("cpu")
    assert choice.compute == "fp32" and choice.reason


@pytest.mark.parametrize(("has_bf16", "compute"), [(True, "bf16"), (False, "fp16")])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_card_computes_in_bf16_when_it_can(monkeypatch, kind, has_bf16, compute):
    monkeypatch.setattr(f"torch.{kind}.is_bf16_supported", lambda *args, **kwargs: has_bf16)
    assert choose_precision(f"{kind}:0").compute == compute


@pytest.mark.parametrize(("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_products_in_the_planned_format(compute, dtype):
    layer = torch.nn.Linear(4, 4)
    with autocast("cpu", compute):
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_only_fp16_has_a_scaler(compute):
    assert loss_scaler("cpu", compute, trained=[]) is None
    assert loss_scaler("cpu", "fp16", trained=[]).is_enabled()


def test_case_094_fp16_weights_with_fp16_scaling_are_refused():
    weights = list(torch.nn.Linear(2, 2).half().parameters())
    with pytest.raises(ConfigError, match="fp32") as caught:
        loss_scaler("cpu", "fp16", trained=weights)
    assert caught.value.problems[0].field == "memory.precision"


@pytest.fixture
def products():
    """The process-wide setting, put back after the test. It works without a card: a card's kernels read it."""
    yield torch.backends.cuda.matmul
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("before", ["highest", "high"])
def test_tf32_is_set_around_a_step_and_only_there(products, before):
    torch.set_float32_matmul_precision(before)
    with fp32_products("tf32"):
        assert products.fp32_precision == "tf32"
        assert torch.get_float32_matmul_precision() == "high"  # the compiler asks in this way
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.parametrize("compute", ["fp32", "bf16", "fp16"])
def test_what_is_said_to_be_fp32_is_fp32_whatever_the_process_was_set_to(products, compute):
    torch.set_float32_matmul_precision("high")
    with pytest.raises(KeyError), fp32_products(compute):
        assert products.fp32_precision != "tf32"
        raise KeyError
    assert torch.get_float32_matmul_precision() == "high"


def test_a_program_that_used_the_newer_interface_alone_gets_its_setting_back(products):
    products.fp32_precision = "tf32"
    with fp32_products("fp32"):
        assert products.fp32_precision == "ieee"
    assert products.fp32_precision == "tf32"
    with fp32_products("tf32"):
        assert products.fp32_precision == "tf32"


def test_a_step_in_tf32_computes_so_forward_and_backward(tiny, products):
    from vramfit.config import ScheduleChoice
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.resident import ResidentExecutor

    found = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            found.append(("forward", products.fp32_precision))
            return hidden

        @staticmethod
        def backward(ctx, gradient):
            found.append(("backward", products.fp32_precision))
            return gradient

    model, plan = tiny.build("llama"), tiny.plan(compute="tf32")
    model.model.norm.register_forward_hook(lambda module, args, output: Watched.apply(output))
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    found.clear()
    batch = tiny.pad(tiny.sequences(6))
    executor.step([batch], 1e-3)
    executor.evaluate([batch])
    assert found == [("forward", "tf32"), ("backward", "tf32"), ("forward", "tf32")]
    assert torch.get_float32_matmul_precision() == "highest"


def test_tf32_is_refused_where_there_is_none():
    check_precision("cpu", "fp32")
    with pytest.raises(ConfigError, match="has no tf32"):
        check_precision("cpu", "tf32")


def test_what_a_run_computes_in_is_one_sentence():
    said = described("fp16", "fp32")
    assert said.startswith("Products are computed in fp16 with dynamic loss scaling, the loss and sums in fp32; ")
    assert said.endswith("weights are stored in fp32.")


def test_the_scale_grows_and_backs_off_as_torch_documents_it():
    """Twice after 2,000 steps without an overflow in a row, half at each one with."""
    scaler = loss_scaler("cpu", "fp16", trained=[])
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([weight], lr=0.0)
    assert scaler.get_scale() == 2.0**16

    def step(gradient: float) -> float:
        weight.grad = torch.full((1,), gradient)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.get_scale()

    assert step(float("inf")) == 2.0**15
    assert [step(1.0) for _ in range(2000)][-2:] == [2.0**15, 2.0**16]


def test_a_wrapped_loop_refuses_tf32_where_there_is_none():
    import vramfit

    model = torch.nn.Linear(2, 1)
    with pytest.raises(ConfigError, match="has no tf32"):
        vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), precision="tf32")


@pytest.mark.parametrize(("compute", "within"), [("bf16", 0.03), ("fp16", 0.004)])
def test_accumulation_in_16_bits_is_that_of_one_batch(tiny, compute, within):
    """Eight uneven sequences one by one and at once: the loss to rounding, the gradient's norm within the format's.

    fp16's scale is in the divisor of the step, so it may not depend on how the step is cut either.
    """
    from vramfit.config import ScheduleChoice
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.resident import ResidentExecutor

    sequences, found = tiny.sequences(9, 17, 5, 30, 12, 8, 21, 3), []
    for batches in ([tiny.pad(sequences)], [tiny.pad([one]) for one in sequences]):
        plan = tiny.plan(compute=compute)
        model = tiny.build("llama")
        executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
        found.append(executor.step(batches, 0.0))
    whole, cut = found
    assert cut.tokens == whole.tokens and not cut.skipped
    assert cut.loss == pytest.approx(whole.loss, rel=1e-3)
    assert cut.grad_norm == pytest.approx(whole.grad_norm, rel=within)
