"""The same micro-batch in fp32: what differs is measured, raised where asked, and training does not notice."""

from __future__ import annotations

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine.drift import Calibrator
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.models.adapters import attach_adapters


def executor_for(model, tiny, **plan):
    plan = tiny.plan(**plan)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))


def calibrator_for(executor, *, limit=0.003, may_raise=False):
    return Calibrator(executor, limit=limit, may_raise=may_raise)


def plain_drift(tiny, compute, batch) -> tuple[float, float]:
    """The same by torch alone: autocast against fp32, `.backward()`, `.grad`."""
    found = []
    for enabled in (True, False):
        model = tiny.build("llama")
        with torch.autocast("cpu", dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[compute], enabled=enabled):
            logits = model(input_ids=batch.input_ids).logits.float()
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=-100
        )
        (loss * (2**16 if compute == "fp16" and enabled else 1)).backward()
        norm = torch.nn.utils.get_total_norm([value.grad for value in model.parameters()])
        found.append((loss.item(), norm.item() / (2**16 if compute == "fp16" and enabled else 1)))
    return tuple(abs(one - other) / other for one, other in zip(*found, strict=True))


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_the_drift_is_the_relative_difference_from_fp32(tiny, compute):
    batch = tiny.pad(tiny.sequences(9, 17))
    executor = executor_for(tiny.build("llama"), tiny, compute=compute, loss="full")
    [drift] = calibrator_for(executor).check(batch).drifts
    loss, grad_norm = plain_drift(tiny, compute, batch)
    assert drift.raised == ()
    assert drift.loss == pytest.approx(loss, rel=0.05, abs=1e-6)
    assert drift.grad_norm == pytest.approx(grad_norm, rel=0.05, abs=1e-6)
    assert 0 < drift.worst < 0.1


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("recompute", [0, 2])
def test_training_with_checks_is_training_without_bit_for_bit(tiny, compute, adapters, recompute):
    """Dropout is on, so a random number more or less would show."""

    def trained(checks: bool):
        torch.manual_seed(5)
        model = tiny.build("llama", attention_dropout=0.1)
        model = attach_adapters(model, rank=4, alpha=8, dropout=0.1, seed=0) if adapters else model
        executor = executor_for(model, tiny, compute=compute, recompute=recompute)
        calibrator = calibrator_for(executor)
        for step in range(3):
            batches = [tiny.pad(tiny.sequences(9, 17, seed=step)), tiny.pad(tiny.sequences(5, seed=-step - 1))]
            if checks:
                [drift] = calibrator.check(batches[0]).drifts
                assert 0 < drift.worst < 0.3
                assert all(value.grad is None for value in model.parameters())
            executor.step(batches, 1e-2)
        return executor.state()

    (with_checks, values), (without, wanted) = trained(True), trained(False)
    assert values == wanted
    assert with_checks.keys() == without.keys()
    assert all(torch.equal(with_checks[name], without[name]) for name in without)


def test_dropout_is_the_same_in_both_passes(tiny):
    """Dropout of a half would differ by far more than rounding does."""
    model = attach_adapters(tiny.build("llama", attention_dropout=0.5), rank=4, alpha=8, dropout=0.5, seed=0)
    [drift] = calibrator_for(executor_for(model, tiny, compute="bf16")).check(tiny.pad(tiny.sequences(9, 17))).drifts
    assert drift.worst < 0.05


def spoil(module, part: float) -> None:
    """In 16 bits this module's output is off by a part of itself, in fp32 it is right."""
    usual = module.forward

    def spoiled(hidden):
        output = usual(hidden)
        return output * (1 + part) if torch.is_autocast_enabled("cpu") else output

    module.forward = spoiled


@pytest.mark.parametrize(
    ("spoilt", "raised"),
    [
        ("lm_head", [(), ("head",)]),
        ("model.norm", [(), ("head",), ("head", "norms")]),
        ("model.layers.0.mlp.down_proj", [(), ("head",), ("head", "norms"), ("head", "norms", "all")]),
    ],
)
def test_parts_are_raised_in_order_until_the_drift_is_gone(tiny, spoilt, raised):
    model = tiny.build("llama")
    spoil(model.get_submodule(spoilt), 3.0)
    executor = executor_for(model, tiny, compute="bf16", loss="full")
    calibrator = calibrator_for(executor, limit=0.05, may_raise=True)
    check = calibrator.check(tiny.pad(tiny.sequences(9, 17)))
    assert [drift.raised for drift in check.drifts] == raised
    assert all(drift.worst > 0.05 for drift in check.drifts[:-1])
    assert check.drifts[-1].worst <= 0.05
    assert executor.raised.now == raised[-1]
    assert calibrator.possible == ("all" not in raised[-1])
    [after] = calibrator.check(tiny.pad(tiny.sequences(9, 17))).drifts
    assert after == check.drifts[-1]


def test_without_leave_nothing_is_raised(tiny):
    model = tiny.build("llama")
    spoil(model.lm_head, 0.5)
    executor = executor_for(model, tiny, compute="bf16", loss="full")
    [drift] = calibrator_for(executor, limit=0.05).check(tiny.pad(tiny.sequences(9, 17))).drifts
    assert drift.worst > 0.05 and executor.raised.now == ()


def test_a_scale_that_is_too_large_just_now_is_no_drift(tiny):
    executor = executor_for(tiny.build("llama"), tiny, compute="fp16")
    executor._scaler.load_state_dict({**executor._scaler.state_dict(), "scale": 2.0**36})
    [drift] = calibrator_for(executor).check(tiny.pad(tiny.sequences(6))).drifts
    assert drift.worst < 0.1
    assert executor.loss_scale == 2.0**36


def test_numbers_that_only_fp32_can_hold_are_an_infinite_drift(tiny):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.layers[0].mlp.down_proj.weight.mul_(1e6)
    executor = executor_for(model, tiny, compute="fp16")
    [drift] = calibrator_for(executor).check(tiny.pad(tiny.sequences(6))).drifts
    assert drift.worst == float("inf")


def test_weights_that_are_no_numbers_are_nothing_to_compare(tiny):
    model = tiny.build("llama")
    with torch.no_grad():
        model.model.norm.weight.fill_(torch.nan)
    check = calibrator_for(executor_for(model, tiny, compute="bf16")).check(tiny.pad(tiny.sequences(6)))
    assert check.drifts == [] and "finite" in check.skipped


def limit_rows_in_fp32(model, most: int) -> None:
    """The real out-of-memory class where more rows than `most` come at once in fp32."""
    usual = model.model.forward

    def limited(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu") and kwargs["input_ids"].shape[0] > most:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return usual(*args, **kwargs)

    model.model.forward = limited


@pytest.mark.parametrize(("most", "rows"), [(3, 2), (1, 1), (0, 0)])
def test_what_has_no_room_in_fp32_is_halved_and_then_skipped(tiny, most, rows):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, compute="bf16")
    limit_rows_in_fp32(model, most)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check = calibrator_for(executor).check(tiny.pad(tiny.sequences(9, 17, 5, 12)))
    assert check.rows == rows
    assert bool(check.skipped) == (rows == 0) == (not check.drifts)
    assert executor.raised.now == () and torch.equal(torch.get_rng_state(), before)
    assert not any("forward" in module.__dict__ for module in model.model.layers.modules())


def test_what_cannot_be_computed_is_said_and_not_raised(tiny):
    model = tiny.build("llama")
    usual = model.model.forward

    def only_16_bits(*args, **kwargs):
        if not torch.is_autocast_enabled("cpu"):
            raise RuntimeError("this kernel knows Half only\nand more")
        return usual(*args, **kwargs)

    executor = executor_for(model, tiny, compute="bf16")
    model.model.forward = only_16_bits
    check = calibrator_for(executor).check(tiny.pad(tiny.sequences(9)))
    assert check.drifts == [] and "this kernel knows Half only" in check.skipped


def test_fp32_has_nothing_to_compare(tiny):
    assert not calibrator_for(executor_for(tiny.build("llama"), tiny)).possible
    assert calibrator_for(executor_for(tiny.build("llama"), tiny, compute="tf32")).possible


def test_quantised_weights_are_compared_too(tiny):
    """4-bit linears unpack into fp32 for the check, and into their own format afterwards."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    torch.manual_seed(0)
    model = tiny.build("llama", hidden_size=64, head_dim=16)
    for block in model.model.layers:
        for parent in (block.mlp, block.self_attn):
            for name, linear in list(parent.named_children()):
                if isinstance(linear, torch.nn.Linear):
                    four = bitsandbytes.nn.Linear4bit(
                        linear.in_features, linear.out_features, bias=False, compute_dtype=torch.bfloat16,
                        quant_type="nf4",
                    )  # fmt: skip
                    four.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
                    four.support_avx512bf16_for_cpu = False  # it repacks weights at an evaluation: no gradient then
                    setattr(parent, name, four.to("cpu"))
    model = attach_adapters(model, rank=4, alpha=8, seed=0)
    executor = executor_for(model, tiny, compute="bf16", weight_format="nf4", method="qlora")
    [drift] = calibrator_for(executor).check(tiny.pad(tiny.sequences(9, 17))).drifts
    assert 0 < drift.worst < 0.1
    executor.raised.set(["all"])
    [exact] = calibrator_for(executor).check(tiny.pad(tiny.sequences(9, 17))).drifts
    assert exact.worst == 0
    executor.raised.set([])
    linears = [module for module in model.modules() if isinstance(module, bitsandbytes.nn.Linear4bit)]
    assert len(linears) == 14 and {module.compute_dtype for module in linears} == {torch.bfloat16}
