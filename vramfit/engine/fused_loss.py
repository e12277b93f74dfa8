"""Cross-entropy fused with the head by other people's kernels: torch's own, and Liger's where that is installed.

Both give the plain cross-entropy of unweighted tokens alone; `why_not_fused` says when the chunked loss takes over.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor

from vramfit.config import Precision
from vramfit.engine.accelerators import backend_of
from vramfit.engine.head import Head, LogitChange
from vramfit.engine.objective import Objective


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


def why_not_fused(head: Head, compute: Precision, objective: Objective, device: torch.device) -> str:
    """Why the chunked loss takes the fused one's place, "" where it does not."""
    if not objective.is_plain:
        return "fused kernels give plain cross-entropy alone, so the chunked loss is used: it adds the other terms"
    if uses_liger(head, compute, device):
        return ""
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
