"""Cross-entropy fused with the head by other people's kernels: torch's own, and Liger's where that is installed.

Both give the plain cross-entropy of unweighted tokens alone; `why_not_fused` says when the chunked loss takes over.
"""

from __future__ import annotations

import functools
import importlib.util
from typing import Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor

from vramfit.config import Precision
from vramfit.engine.accelerators import backend_of
from vramfit.engine.head import Head, LogitChange
from vramfit.engine.objective import Objective
from vramfit.engine.precision import DTYPES

_MOST_APART: Final = {"fp32": 1e-3, "tf32": 1e-2, "bf16": 5e-2}
"""Of loss and gradients: what the formats' rounding alone makes is a fifth of that."""


def fused_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    chunk_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Plain `chunked_sum` by torch's own kernel (torch >= 2.13). It does not follow autocast: cast by hand."""
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=chunk_tokens or None)
    total: Tensor = F.linear_cross_entropy(
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        linear_bias=None if bias is None else bias.to(dtype),
        reduction="sum",
        options=options,
    )
    return total.float()


def liger_sum(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, *, cap: float, dtype: torch.dtype
) -> Tensor:
    """Plain `chunked_sum` by Liger's kernel, for cards. It chooses its own chunks and sums gradients in fp32."""
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction

    offset = None if bias is None else bias.to(dtype)
    total: Tensor = LigerFusedLinearCrossEntropyFunction.apply(
        hidden.to(dtype),
        weight.to(dtype),
        targets,
        offset,
        None,  # weights of words
        -100,
        0.0,  # z-loss
        0.0,  # label smoothing
        "sum",
        cap or None,
        False,  # the z-loss beside the loss
        torch.float32,
    )[0]
    return total.float()


def has_fused() -> bool:
    """Whether this torch has `F.linear_cross_entropy` with chunks (2.13 and newer)."""
    return hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


@functools.cache
def has_liger() -> bool:
    return importlib.util.find_spec("liger_kernel") is not None and importlib.util.find_spec("triton") is not None


def uses_liger(head: Head, compute: Precision, device: torch.device) -> bool:
    """Whether Liger's kernel computes what this head gives: on a card, in bf16 or fp32 (its gradients of fp16 logits
    cannot be scaled), from one matrix, with no change of the logits but a cap."""
    alone = len(head.weights) == 1 and head.change == LogitChange(cap=head.change.cap)
    return alone and compute != "fp16" and backend_of(device).streams and has_liger()


@functools.cache
def liger_problem(compute: Precision, device: torch.device, *, cap: float) -> str:
    """What is wrong with Liger's kernel here, by a small try: "" when loss and gradients are those of whole logits.

    It is a package of others for many devices: what its version does with this one is seen before it trains anything.
    """
    dtype = DTYPES[compute]
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (0.3 * torch.randn(rows, 64, generator=generator).to(device, dtype) for rows in (48, 160))
    targets = torch.randint(160, (48,), generator=generator).to(device)
    sides = []
    try:
        for by_liger in (False, True):
            rows, words = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
            if by_liger:
                loss = liger_sum(rows, words, None, targets, cap=cap, dtype=dtype)
            else:
                logits = LogitChange(cap=cap).applied((rows @ words.t()).float())
                loss = F.cross_entropy(logits, targets, reduction="sum")
            sides.append([loss.detach(), *torch.autograd.grad(loss, (rows, words))])
    except Exception as error:  # the package's own, its compiler's, of many classes
        return f"failed here ({type(error).__name__}: {(str(error).splitlines() or [''])[0]})"
    pairs = [(one.float(), other.float()) for one, other in zip(*sides, strict=True)]
    apart = max(float((one - other).norm() / one.norm()) for one, other in pairs)
    return "" if apart <= _MOST_APART[compute] else f"is off by {apart:.1g} here"


def why_not_fused(head: Head, compute: Precision, objective: Objective, device: torch.device) -> str:
    """Why the chunked loss takes the fused one's place, "" where it does not."""
    if not objective.is_plain:
        return "fused kernels give plain cross-entropy alone, so the chunked loss is used: it adds the other terms"
    if uses_liger(head, compute, device):
        problem = liger_problem(compute, device, cap=head.change.cap)
        return f"Liger's kernel {problem}, so the chunked loss is used" if problem else ""
    if len(head.weights) != 1:
        return "F.linear_cross_entropy takes one matrix as its head, so the chunked loss is used"
    if head.change != LogitChange():
        return "F.linear_cross_entropy takes logits as they are, so the chunked loss is used: it caps and scales them"
    if not has_fused():
        return f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has), so the chunked loss is used"
    if compute == "bf16":
        return "F.linear_cross_entropy rounds its loss to bf16, so the chunked loss is used: it sums in fp32"
    if compute == "fp16":
        return "F.linear_cross_entropy cannot scale the gradients of fp16 logits, so the chunked loss is used: it does"
    return ""
