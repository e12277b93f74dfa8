"""The loss of a causal language model, over trained tokens alone and without ever holding all logits.

Logits cost 6 to 12 bytes per token and vocabulary entry, more than all else in a small model. Three things avoid it:
only positions that carry loss are projected; they are projected a chunk at a time; and a chunk's gradient is taken at
once, so that no logits wait for backward.

The loss is a *sum* over tokens in fp32, each times its weight where the data gives weights. Dividing it by the tokens
(by the sum of the weights) of the whole optimizer step makes the gradient independent of how the step was cut into
micro-batches, whatever their lengths.

What is reported, in training and evaluation, is the cross-entropy alone: a z-loss or label smoothing changes what is
minimised, not what the curves mean.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vramfit.config import Precision
from vramfit.engine.chunked_loss import chunked_sum, module_chunked_sum
from vramfit.engine.fused_loss import fused_sum, liger_sum, uses_liger, why_not_fused
from vramfit.engine.head import Head, logits_way
from vramfit.engine.objective import PLAIN, Objective, SummedLoss, whole_sum
from vramfit.engine.precision import DTYPES

IGNORED = -100
"""The label of a token that carries no loss."""

LossKind = Literal["fused", "chunked", "full"]


class Batch(Protocol):
    """What is needed of a micro-batch. All tensors [B, S]; a label of -100 carries no loss.

    `position_ids` restart at 0 where a new sequence begins in a packed row; `attention_mask` is 1 on real tokens.
    `weights` are fp32, each label's share in the loss; a weight of 0 carries none, and without weights all are 1.
    """

    @property
    def input_ids(self) -> Tensor: ...
    @property
    def labels(self) -> Tensor: ...
    @property
    def attention_mask(self) -> Tensor | None: ...
    @property
    def position_ids(self) -> Tensor | None: ...
    @property
    def weights(self) -> Tensor | None: ...


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Which positions of a flattened [B * S] batch are projected, and the token each must predict, both [N].

    `weights` [N] fp32 are above 0; None means that all are 1, and costs nothing.
    """

    positions: Tensor
    tokens: Tensor
    weights: Tensor | None = None

    @property
    def count(self) -> int:
        return self.tokens.numel()

    @property
    def weight(self) -> float:
        """The sum of the weights: what the summed loss is divided by."""
        return float(self.count) if self.weights is None else self.weights.sum(dtype=torch.float64).item()


def targets_of(batch: Batch) -> Targets:
    """The trained positions of a batch, on the device its labels are on.

    The causal shift happens here, once for padded and packed rows: position t predicts the label of t + 1, the last
    position of a row predicts nothing, nor does the last token of a sequence that another follows in the same row.
    """
    shifted = torch.full_like(batch.labels, IGNORED)
    shifted[:, :-1] = batch.labels[:, 1:]
    if batch.position_ids is not None:
        starts = batch.position_ids[:, 1:] == 0
        shifted[:, :-1].masked_fill_(starts, IGNORED)
    flat = shifted.flatten()
    if batch.weights is None:
        positions = (flat != IGNORED).nonzero().squeeze(1)
        return Targets(positions=positions, tokens=flat[positions])
    ahead = torch.zeros_like(batch.weights, dtype=torch.float32)
    ahead[:, :-1] = batch.weights[:, 1:]
    positions = ((flat != IGNORED) & (ahead.flatten() != 0)).nonzero().squeeze(1)
    weights = ahead.flatten()[positions]
    return Targets(positions=positions, tokens=flat[positions], weights=None if (weights == 1).all() else weights)


def model_inputs(batch: Batch, device: torch.device) -> dict[str, Tensor]:
    """The arguments of a decoder's forward, on `device`.

    A mask that only hides padding at the ends of rows is left out: under causal attention no real token can see what
    comes after it, and attention without a mask has the faster kernels.
    """
    inputs = {"input_ids": batch.input_ids}
    mask, positions = batch.attention_mask, batch.position_ids
    if mask is not None and not (positions is None and mask.ndim == 2 and _only_ends_hidden(mask)):
        inputs["attention_mask"] = mask
    if positions is not None:
        inputs["position_ids"] = positions
    return {name: tensor.to(device, non_blocking=True) for name, tensor in inputs.items()}


def _only_ends_hidden(mask: Tensor) -> bool:
    return bool((mask[:, 0] == 1).all() and (mask[:, 1:] <= mask[:, :-1]).all())


class TokenLoss:
    """The summed loss of a causal language model, in the way the plan asks for where the model allows it.

    `device` is where the model computes. `kind` is what is really done and `reason` why it differs from what was asked,
    or "". Fused kernels take no weights: targets that have some are computed by the chunked loss. `may_be_ligers` is
    whether Liger's kernel is there for it, taken or not.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        device: torch.device,
        kind: LossKind,
        chunk_tokens: int = 0,
        compute: Precision = "fp32",
        objective: Objective = PLAIN,
    ) -> None:
        self.compute, self.chunk_tokens, self.objective = compute, chunk_tokens, objective
        self.model: Any = model
        self._device = device
        way = logits_way(model, device)
        self._decoder, self._head, self.reason = way.decoder, way.head, way.reason
        self.kind: LossKind = kind
        head = self._head
        self.may_be_ligers = head is not None and objective.is_plain and uses_liger(head, compute, self._device)
        if self._head is None:
            self.kind = "full"
        elif kind == "fused":
            self.reason = why_not_fused(self._head, compute, objective, self._device)
            self.kind = "chunked" if self.reason else "fused"

    def __call__(self, inputs: dict[str, Tensor], targets: Targets, *, gradient_scale: float = 1.0) -> Tensor:
        """What is minimised, weighted and summed over `targets`, an fp32 scalar: the `objective` of `sums`."""
        return self.sums(inputs, targets, gradient_scale=gradient_scale).objective

    def sums(self, inputs: dict[str, Tensor], targets: Targets, *, gradient_scale: float = 1.0) -> SummedLoss:
        """(what is minimised, the cross-entropy in it), weighted and summed over `targets`, fp32 scalars.

        `targets` and `inputs` are on `device`. `gradient_scale` is what the caller will multiply the loss by before
        backward: known here, it keeps 16-bit gradients of the logits from underflowing. It does not change the result.
        """
        if self._decoder is None or self._head is None:
            logits = self.model(**inputs, use_cache=False).logits.flatten(0, 1)[targets.positions]
            return whole_sum(logits.float(), targets.tokens, targets.weights, self.objective)
        output = self._decoder(**inputs, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, targets.positions)
        if self.kind == "full":
            return whole_sum(self._head.logits(hidden), targets.tokens, targets.weights, self.objective)
        if self.kind == "fused" and targets.weights is None:
            loss = self._fused(self._head, hidden, targets)
            return SummedLoss(loss, loss.detach())
        return self._chunked(self._head, hidden, targets, gradient_scale)

    def _fused(self, head: Head, hidden: Tensor, targets: Targets) -> Tensor:
        weight, bias, dtype = head.weights[0], head.biases[0], DTYPES[self.compute]
        if uses_liger(head, self.compute, self._device):
            with _by_hand(hidden):
                return liger_sum(hidden, weight, bias, targets.tokens, cap=head.change.cap, dtype=dtype)
        return fused_sum(hidden, weight, bias, targets.tokens, chunk_tokens=self.chunk_tokens, dtype=dtype)

    def _chunked(self, head: Head, hidden: Tensor, targets: Targets, gradient_scale: float) -> SummedLoss:
        dtype = DTYPES[self.compute]
        options: dict[str, Any] = {
            "weights": targets.weights,
            "chunk_tokens": self.chunk_tokens,
            "gradient_scale": gradient_scale if dtype != torch.float32 else 1.0,
            "objective": self.objective,
        }
        if not head.weights:
            return module_chunked_sum(hidden, head, targets.tokens, **options)
        with _by_hand(hidden):
            return chunked_sum(
                hidden, head.weights, head.biases, targets.tokens, dtype=dtype, change=head.change, **options
            )


def _by_hand(hidden: Tensor) -> torch.autocast:
    """No autocast around what casts by itself: it would undo that where the head is raised to fp32 and nothing else."""
    return torch.autocast(hidden.device.type, enabled=False)
