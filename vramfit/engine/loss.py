"""Cross-entropy that never holds all logits.

Logits cost 6 to 12 bytes per token and vocabulary entry, more than all else in a small model. Three things avoid it:
only positions that carry loss are projected; they are projected a chunk at a time; and a chunk's gradient is taken at
once, so that no logits wait for backward.

The loss is a *sum* over tokens in fp32, each times its weight where the data gives weights. Dividing it by the tokens
(by the sum of the weights) of the whole optimizer step makes the gradient independent of how the step was cut into
micro-batches, whatever their lengths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

from vramfit.config import Precision
from vramfit.engine.evaluation import evaluation_mode
from vramfit.engine.precision import DTYPES

IGNORED = -100
"""The label of a token that carries no loss."""

LossKind = Literal["fused", "chunked", "full"]

_CHUNK_ENTRIES = 2**24  # logits alive at once when nobody planned a chunk: 64 MiB in fp32
_CHANGED_LOGITS = {  # config fields of families that do more to logits than the projection, and their neutral value
    "final_logit_softcapping": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
}


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
    """The summed cross-entropy of a causal language model, in the way the plan asks for where the model allows it.

    `kind` is what is really done and `reason` why it differs from what was asked, or "". torch's fused kernel takes no
    weights: targets that have some are computed by the chunked loss.
    """

    def __init__(self, model: nn.Module, *, kind: LossKind, chunk_tokens: int = 0, compute: Precision = "fp32") -> None:
        self.compute, self.chunk_tokens = compute, chunk_tokens
        self.model: Any = model
        base: Any = base_model(model)
        self._decoder: Any
        self._head: Any
        self._decoder, self._head, self.reason = _split_model(base)
        self.kind: LossKind = kind
        if self._decoder is None or type(self._head) is not nn.Linear:
            self.kind = "full"
        elif kind == "fused":
            self.reason = _why_not_fused(compute)
            self.kind = "chunked" if self.reason else "fused"

    def __call__(self, inputs: dict[str, Tensor], targets: Targets, *, gradient_scale: float = 1.0) -> Tensor:
        """The weighted loss summed over `targets`, an fp32 scalar. `targets` and `inputs` are on the model's device.

        `gradient_scale` is what the caller will multiply the loss by before backward: known here, it keeps 16-bit
        gradients of the logits from underflowing. It does not change the result.
        """
        if self._decoder is None:
            logits = self.model(**inputs, use_cache=False).logits.flatten(0, 1)[targets.positions]
            return _whole_sum(logits, targets)
        output = self._decoder(**inputs, use_cache=False)
        hidden = output.last_hidden_state.flatten(0, 1).index_select(0, targets.positions)
        if self.kind == "full":
            return _whole_sum(self._head(hidden), targets)
        weight, bias = self._head.weight, self._head.bias
        if self.kind == "fused" and targets.weights is None:
            return fused_sum(
                hidden, weight, bias, targets.tokens, chunk_tokens=self.chunk_tokens, dtype=DTYPES[self.compute]
            )
        return chunked_sum(
            hidden,
            weight,
            bias,
            targets.tokens,
            weights=targets.weights,
            chunk_tokens=self.chunk_tokens,
            dtype=DTYPES[self.compute],
            gradient_scale=gradient_scale if DTYPES[self.compute] != torch.float32 else 1.0,
        )


def _whole_sum(logits: Tensor, targets: Targets) -> Tensor:
    if targets.weights is None:
        return F.cross_entropy(logits.float(), targets.tokens, reduction="sum")
    return (F.cross_entropy(logits.float(), targets.tokens, reduction="none") * targets.weights).sum()


def chunked_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    chunk_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
    gradient_scale: float = 1.0,
) -> Tensor:
    """Cross-entropy of `hidden @ weight.T + bias` summed over rows, holding `chunk_tokens` rows of logits at a time.

    hidden [N, H], weight [V, H], bias [V] or None, targets [N] without ignored ones, weights [N] fp32 by which each
    row's loss is multiplied. Products are computed in `dtype`, the loss and sums in fp32. Works with torch >= 2.11.
    Can be differentiated once.
    """
    rows = chunk_tokens or chunk_rows(weight.shape[0])
    needs_gradient = torch.is_grad_enabled()
    apply: Any = _ChunkedSum.apply
    loss: Tensor = apply(hidden, weight, bias, targets, weights, rows, dtype, gradient_scale, needs_gradient)
    return loss


def chunk_rows(vocab_size: int) -> int:
    """Rows of logits per chunk when nobody planned them: a power of two, about 64 MiB in fp32, at least 16."""
    return int(max(16, 1 << (_CHUNK_ENTRIES // vocab_size).bit_length() - 1)) if vocab_size < _CHUNK_ENTRIES else 16


def fused_sum(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    *,
    chunk_tokens: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The same as `chunked_sum` by torch's own kernel (torch >= 2.13). It does not follow autocast: cast by hand."""
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


def has_fused() -> bool:
    """Whether this torch has `F.linear_cross_entropy` with chunks (2.13 and newer)."""
    return hasattr(F, "linear_cross_entropy") and hasattr(torch.nn, "LinearCrossEntropyOptions")


class _ChunkedSum(torch.autograd.Function):
    """Forward takes the gradient too, chunk by chunk, so that logits are made once and never wait for backward."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        weights: Tensor | None,
        rows: int,
        dtype: torch.dtype,
        scale: float,
        needs_gradient: bool,
    ) -> Tensor:
        need_hidden, need_weight, need_bias = (needs_gradient and need for need in ctx.needs_input_grad[:3])
        cast_weight = weight.to(dtype)
        grad_hidden = torch.empty_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=torch.float32) if need_weight else None
        grad_bias = torch.zeros_like(weight[:, 0], dtype=torch.float32) if need_bias else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, hidden.shape[0], rows):
            part = slice(start, start + rows)
            chunk = hidden[part].to(dtype)
            logits = F.linear(chunk, cast_weight, None if bias is None else bias.to(dtype)).float()
            normaliser = logits.logsumexp(dim=1, keepdim=True)
            picked = targets[part].unsqueeze(1)
            shares = None if weights is None else weights[part].unsqueeze(1)
            losses = normaliser - logits.gather(1, picked)
            total += (losses if shares is None else losses * shares).sum()
            if grad_hidden is None and grad_weight is None and grad_bias is None:
                continue
            gradient = logits.sub_(normaliser).exp_()  # softmax, in place: the logits are not needed again
            gradient.scatter_add_(1, picked, gradient.new_full((), -1.0).expand_as(picked))
            if scale != 1.0:
                gradient.mul_(scale)
            if shares is not None:
                gradient.mul_(shares)
            if grad_bias is not None:
                grad_bias += gradient.sum(dim=0)
            narrow = gradient.to(dtype)
            if grad_hidden is not None:
                grad_hidden[part] = narrow @ cast_weight
            if grad_weight is not None:
                _add_product(grad_weight, narrow, chunk)
            del logits, gradient, narrow  # or they would live until the next chunk's have been made
        ctx.scale = scale
        ctx.gradients = (
            grad_hidden,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None or bias is None else grad_bias.to(bias.dtype),
        )
        return total

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        if ctx.gradients is None:
            raise RuntimeError("the chunked loss can be differentiated once: its gradients are used up")
        factor = upstream / ctx.scale
        # In place, because a second copy of the head's gradient is what this class exists to avoid.
        gradients = [None if gradient is None else gradient.mul_(factor) for gradient in ctx.gradients]
        ctx.gradients = None
        return (*gradients, None, None, None, None, None, None)


def _add_product(total: Tensor, gradient: Tensor, chunk: Tensor) -> None:
    """total [V, H] += gradient [N, V]^T @ chunk [N, H], summed in fp32."""
    if gradient.dtype == total.dtype:
        total.addmm_(gradient.t(), chunk)
    else:
        total.add_(gradient.t() @ chunk)


def base_model(model: Any) -> Any:
    """The model itself, out of the wrapper that adapters put around it."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def _split_model(base: Any) -> tuple[Any, Any, str]:
    """(decoder, head, "") when logits are exactly head(decoder(tokens)); (None, None, why not) otherwise."""
    name = type(base).__name__
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    decoder = base.get_decoder() if hasattr(base, "get_decoder") else None
    if head is None or decoder is None or decoder is base:
        return None, None, f"{name} does not say what its decoder and its head are, so its own forward makes the logits"
    for field, neutral in _CHANGED_LOGITS.items():
        value = getattr(base.config, field, neutral)
        if value is not None and value != neutral:
            return None, None, f"{name} changes its logits ({field} = {value}), so its own forward makes them"
    if not _is_plain(base, decoder, head):
        return None, None, f"{name} does more to its logits than project, so its own forward makes them"
    reason = "" if type(head) is nn.Linear else f"the head is a {type(head).__name__}, so it projects whole logits"
    return decoder, head, reason


def _is_plain(base: Any, decoder: Any, head: Any) -> bool:
    """Try it on three tokens: the same kernels on the same numbers must give the same bits."""
    tokens = torch.arange(3, device=next(base.parameters()).device).unsqueeze(0)
    with evaluation_mode(base):
        whole = base(input_ids=tokens, use_cache=False).logits
        output = decoder(input_ids=tokens, use_cache=False)
        hidden = getattr(output, "last_hidden_state", None)
        if hidden is None or hidden.shape[-1] != getattr(head, "in_features", hidden.shape[-1]):
            return False
        return torch.equal(whole, head(hidden))


def _why_not_fused(compute: Precision) -> str:
    if not has_fused():
        return f"torch {torch.__version__} has no F.linear_cross_entropy (2.13 has), so the chunked loss is used"
    if compute == "bf16":
        return "F.linear_cross_entropy rounds its loss to bf16, so the chunked loss is used: it sums in fp32"
    if compute == "fp16":
        return "F.linear_cross_entropy cannot scale the gradients of fp16 logits, so the chunked loss is used: it does"
    return ""
