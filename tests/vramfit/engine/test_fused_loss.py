from __future__ import annotations

import importlib.util
import inspect

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from vramfit.engine import fused_loss
from vramfit.engine.fused_loss import fused_sum, has_fused, has_liger, why_not_fused
from vramfit.engine.head import Head, LogitChange
from vramfit.engine.loss import TokenLoss
from vramfit.engine.objective import PLAIN, Objective

CPU = torch.device("cpu")

UNCHANGED = LogitChange()
CPU, CARD = torch.device("cpu"), torch.device("cuda:0")


def head(change: LogitChange = UNCHANGED, parts: int = 1) -> Head:
    weights = tuple(torch.randn(8, 4) for _ in range(parts))
    return Head(module=torch.nn.Linear(4, 8), words=8 * parts, change=change, weights=weights, biases=(None,) * parts)


@pytest.mark.skipif(not has_fused(), reason="this torch has no F.linear_cross_entropy")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_the_kernel_gives_what_whole_logits_give(chunk, bias):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    offset = torch.randn(300, requires_grad=True) if bias else None
    leaves = [hidden, weight] + ([offset] if bias else [])
    targets = torch.randint(300, (50,))
    wanted = F.cross_entropy(F.linear(hidden, weight, offset), targets, reduction="sum")
    found = fused_sum(hidden, weight, offset, targets, chunk_tokens=chunk)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for mine, theirs in zip(
        torch.autograd.grad(found / 50, leaves), torch.autograd.grad(wanted / 50, leaves), strict=True
    ):
        assert (mine - theirs).norm() <= 2e-6 * theirs.norm()


@pytest.mark.parametrize(
    ("change", "parts", "objective", "words"),
    [
        (LogitChange(), 1, Objective(z_loss=0.1), "plain cross-entropy alone"),
        (LogitChange(), 1, Objective(label_smoothing=0.1), "plain cross-entropy alone"),
        (LogitChange(), 2, PLAIN, "one matrix"),
        (LogitChange(cap=30.0), 1, PLAIN, "caps and scales"),
    ],
)
def test_what_the_kernels_do_not_do_is_chunked_and_told(change, parts, objective, words):
    assert words in why_not_fused(head(change, parts), "fp32", objective, CPU)


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_sixteen_bit_losses_are_chunked_and_say_why(tiny, compute):
    loss = TokenLoss(tiny.build("llama"), device=CPU, kind="fused", compute=compute)
    assert loss.kind == "chunked" and loss.reason


def test_without_the_kernel_the_loss_is_chunked(tiny, monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    loss = TokenLoss(tiny.build("llama"), device=CPU, kind="fused")
    assert loss.kind == "chunked" and "2.13" in loss.reason


@pytest.mark.parametrize(
    ("change", "parts", "compute", "device", "used"),
    [
        (LogitChange(), 1, "bf16", CARD, True),
        (LogitChange(cap=30.0), 1, "bf16", CARD, True),
        (LogitChange(times=0.5), 1, "bf16", CARD, False),
        (LogitChange(), 2, "bf16", CARD, False),
        (LogitChange(), 1, "fp16", CARD, False),
        (LogitChange(), 1, "fp32", CPU, False),
    ],
)
def test_liger_is_used_on_a_card_for_what_it_computes(monkeypatch, change, parts, compute, device, used):
    monkeypatch.setattr(fused_loss, "has_liger", lambda: True)
    monkeypatch.setattr(fused_loss, "liger_problem", lambda *_, **__: "")
    reason = why_not_fused(head(change, parts), compute, PLAIN, device)
    assert fused_loss.uses_liger(head(change, parts), compute, device) is used
    assert not used or reason == ""


def whole_sum(hidden, weight, bias, targets, *, cap, dtype):
    """What Liger's kernel stands for."""
    logits = LogitChange(cap=cap).applied(F.linear(hidden.to(dtype), weight.to(dtype), bias).float())
    return F.cross_entropy(logits, targets, reduction="sum")


@pytest.fixture
def fresh_tries():
    fused_loss.liger_problem.cache_clear()
    yield
    fused_loss.liger_problem.cache_clear()


@pytest.mark.usefixtures("fresh_tries")
@pytest.mark.parametrize(
    ("factor", "error", "told"),
    [
        (1.0, None, ""),
        (1.3, None, "is off by 0.3 here"),
        (1.0, TypeError("takes 12\nand more"), "TypeError: takes 12)"),
    ],
)
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("cap", [0.0, 5.0])
def test_ligers_kernel_is_tried_before_it_trains_anything(monkeypatch, factor, error, told, compute, cap):
    """A version of it with other arguments, or one that computes something else, is done without, and said so."""

    def liger(*arguments, **options):
        if error is not None:
            raise error
        return factor * whole_sum(*arguments, **options)

    monkeypatch.setattr(fused_loss, "liger_sum", liger)
    monkeypatch.setattr(fused_loss, "uses_liger", lambda *_: True)
    assert fused_loss.liger_problem(compute, CPU, cap=cap).endswith(told)
    reason = why_not_fused(head(LogitChange(cap=cap)), compute, PLAIN, CPU)
    assert (reason == "") == (told == "") and (not told or "so the chunked loss is used" in reason)


@pytest.mark.parametrize(("kind", "leaves"), [("chunked", True), ("fused", False), ("full", False)])
def test_a_run_knows_that_ligers_kernel_is_there_and_not_taken(tiny, monkeypatch, kind, leaves):
    from vramfit.config import ScheduleChoice
    from vramfit.engine import loss
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.resident import ResidentExecutor

    for module in (loss, fused_loss):
        monkeypatch.setattr(module, "uses_liger", lambda *_: True)
    monkeypatch.setattr(fused_loss, "liger_problem", lambda *_, **__: "")
    model, plan = tiny.build("llama"), tiny.plan(loss=kind)
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    assert executor.leaves_liger is leaves


def test_where_liger_is_missing_it_is_not_used():
    if importlib.util.find_spec("liger_kernel") is None:
        assert not has_liger() and not fused_loss.uses_liger(head(), "bf16", CARD)


def test_ligers_function_takes_what_we_give_it():
    """Its kernels need a card; that its arguments are where the adapter puts them does not."""
    pytest.importorskip("triton", reason="liger needs triton")
    liger = pytest.importorskip("liger_kernel.ops.fused_linear_cross_entropy", reason="liger is not installed")
    names = list(inspect.signature(liger.LigerFusedLinearCrossEntropyFunction.forward).parameters)
    assert names[:13] == [
        "ctx", "_input", "weight", "target", "bias", "ce_weight", "ignore_index", "lse_square_scale",
        "label_smoothing", "reduction", "softcap", "return_z_loss", "accum_dtype",
    ]  # fmt: skip
