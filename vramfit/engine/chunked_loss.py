"""Cross-entropy from hidden states and a head, a piece of the logits at a time, each piece's gradient taken at once.

Logits are cut by rows (tokens), and by columns too where the head comes in parts or 16 rows of all words are still too
many. Cut by columns they are made twice: the sum over all words has to be known before any gradient.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

from vramfit.engine.head import Head, LogitChange
from vramfit.engine.objective import PLAIN, Objective, SummedLoss

CHUNK_ENTRIES: Final = 2**24
"""Logits alive at once when nobody planned a chunk: 64 MiB in fp32."""

LEAST_ROWS: Final = 16

PIECE_NUMBERS: Final = 2**20
"""Of a 16-bit gradient widened at once on a processor: 4 MiB in fp32."""


_UNCHANGED: Final = LogitChange()


def chunk_rows(vocab_size: int) -> int:
    """Rows of logits per chunk when nobody planned them: a power of two, about 64 MiB in fp32, at least 16."""
    rows = CHUNK_ENTRIES // vocab_size
    return LEAST_ROWS if rows < LEAST_ROWS else 1 << rows.bit_length() - 1


def chunked_sum(
    hidden: Tensor,
    weight: Tensor | Sequence[Tensor],
    bias: Tensor | Sequence[Tensor | None] | None,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    chunk_tokens: int = 0,
    chunk_words: int = 0,
    dtype: torch.dtype = torch.float32,
    gradient_scale: float = 1.0,
    objective: Objective = PLAIN,
    change: LogitChange = _UNCHANGED,
) -> SummedLoss:
    """The sums from `hidden @ weight.T + bias`, holding `chunk_tokens` rows of `chunk_words` logits at a time.

    hidden [N, H], weight [V, H], bias [V] or None; or several of them, which are parts of the vocabulary one after
    another. targets [N] without ignored ones, weights [N] fp32 by which each row's loss is multiplied. `change` is what
    the family does to the product. Products are computed in `dtype`, everything else in fp32. 0 chunks: as many as 64
    MiB hold. `gradient_scale` as in `TokenLoss`. Can be differentiated once.
    """
    matrices = (weight,) if isinstance(weight, Tensor) else tuple(weight)
    offsets = (bias,) * len(matrices) if bias is None or isinstance(bias, Tensor) else tuple(bias)
    vocab_size = sum(matrix.shape[0] for matrix in matrices)
    settings = _Settings(
        targets=targets,
        weights=weights,
        rows=chunk_tokens or chunk_rows(vocab_size),
        words=chunk_words or max(1, CHUNK_ENTRIES // LEAST_ROWS),
        vocab_size=vocab_size,
        dtype=dtype,
        scale=gradient_scale,
        objective=objective,
        change=change,
        needs_gradient=torch.is_grad_enabled(),
    )
    apply: Any = _ChunkedSum.apply
    return SummedLoss(*apply(settings, hidden, *matrices, *offsets))


def module_chunked_sum(
    hidden: Tensor,
    head: Head,
    targets: Tensor,
    *,
    weights: Tensor | None = None,
    chunk_tokens: int = 0,
    gradient_scale: float = 1.0,
    objective: Objective = PLAIN,
) -> SummedLoss:
    """The same for a head that only its module can compute (adapters on it, a quantised one), in rows alone.

    The module runs once on each chunk, in the autocast around it; autograd takes the chunk's gradient back through it.
    """
    settings = _Settings(
        targets=targets,
        weights=weights,
        rows=chunk_tokens or chunk_rows(head.words),
        words=head.words,
        vocab_size=head.words,
        dtype=hidden.dtype,
        scale=gradient_scale,
        objective=objective,
        change=head.change,
        needs_gradient=torch.is_grad_enabled(),
    )
    apply: Any = _ModuleChunkedSum.apply
    return SummedLoss(*apply(settings, head.module, hidden, *_trained(head.module)))


def _trained(module: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in module.parameters() if parameter.requires_grad]


@dataclass(frozen=True, kw_only=True)
class _Settings:
    """What both ways are told. `rows` of `words` logits are alive at once."""

    targets: Tensor
    weights: Tensor | None
    rows: int
    words: int
    vocab_size: int
    dtype: torch.dtype
    scale: float
    objective: Objective
    change: LogitChange
    needs_gradient: bool

    def chunks(self) -> Iterator[_Chunk]:
        for start in range(0, self.targets.shape[0], self.rows):
            part = slice(start, start + self.rows)
            shares = None if self.weights is None else self.weights[part].unsqueeze(1)
            yield _Chunk(settings=self, part=part, targets=self.targets[part].unsqueeze(1), shares=shares)


class _Chunk:
    """Some rows, whose logits are seen one part of the vocabulary after another: all for the sums, then again for the
    gradient. All that is kept of them is [rows, 1]."""

    def __init__(self, *, settings: _Settings, part: slice, targets: Tensor, shares: Tensor | None) -> None:
        self.settings, self.part, self.targets, self.shares = settings, part, targets, shares
        self._normaliser: Tensor | None = None
        self._picked: Tensor | None = None
        self._total: Tensor | None = None
        self._are_logarithms = False

    def see(self, logits: Tensor, start: int) -> None:
        """Take in the logits of the words from `start` on. They may become logarithms of probabilities meanwhile."""
        picked = self._pick(logits, start)
        total = logits.sum(dim=1, keepdim=True) if self.settings.objective.label_smoothing else None
        if self._can_be_logarithms(logits):
            # One kernel that goes over each row in cache, instead of five over all of them: half their time.
            torch.log_softmax(logits, dim=1, out=logits)
            normaliser = picked - logits.gather(1, self.targets)
            self._are_logarithms = True
        else:
            normaliser = logits.logsumexp(dim=1, keepdim=True)
        if self._normaliser is None or self._picked is None:
            self._normaliser, self._picked, self._total = normaliser, picked, total
            return
        self._normaliser = torch.logaddexp(self._normaliser, normaliser)
        self._picked = self._picked + picked
        self._total = None if self._total is None or total is None else self._total + total

    def sums(self) -> tuple[Tensor, Tensor]:
        """(objective, cross-entropy) of these rows, once all their logits were seen."""
        assert self._normaliser is not None and self._picked is not None
        terms = self.settings.objective
        entropies = self._normaliser - self._picked
        losses = entropies
        if self._total is not None:
            losses = losses + terms.label_smoothing * (self._picked - self._total / self.settings.vocab_size)
        if terms.z_loss:
            losses = losses + terms.z_loss * self._normaliser.square()
        return self._sum(losses), self._sum(entropies)

    def gradient_(self, logits: Tensor, start: int) -> Tensor:
        """d objective / d product in the memory of `logits`, times the scale: what the logits came from."""
        assert self._normaliser is not None
        settings, terms = self.settings, self.settings.objective
        slope = settings.change.slope(logits)
        if not self._are_logarithms:
            logits.sub_(self._normaliser)
        gradient = logits.exp_()  # softmax: the logits are not needed again
        if terms.z_loss:
            gradient.mul_(1.0 + 2.0 * terms.z_loss * self._normaliser)
        if terms.label_smoothing:
            gradient.sub_(terms.label_smoothing / settings.vocab_size)
        self._subtract_wanted_(gradient, start)
        if not isinstance(slope, float) or slope != 1.0:
            gradient.mul_(slope)
        if settings.scale != 1.0:
            gradient.mul_(settings.scale)
        return gradient if self.shares is None else gradient.mul_(self.shares)

    def _can_be_logarithms(self, logits: Tensor) -> bool:
        """Whether they are all words', used as they are, and on the CPU, whose kernel may write where it reads."""
        whole = logits.shape[1] == self.settings.vocab_size
        return whole and logits.device.type == "cpu" and self.settings.change == _UNCHANGED

    def _pick(self, logits: Tensor, start: int) -> Tensor:
        """The right word's logit, 0 where the word is in another part."""
        if logits.shape[1] == self.settings.vocab_size:
            return logits.gather(1, self.targets)
        words = self.targets - start
        inside = (words >= 0) & (words < logits.shape[1])
        return logits.gather(1, words.clamp(0, logits.shape[1] - 1)) * inside

    def _subtract_wanted_(self, gradient: Tensor, start: int) -> None:
        wanted = gradient.new_full((), self.settings.objective.label_smoothing - 1.0).expand_as(self.targets)
        if gradient.shape[1] == self.settings.vocab_size:
            gradient.scatter_add_(1, self.targets, wanted)
            return
        words = self.targets - start
        inside = (words >= 0) & (words < gradient.shape[1])
        gradient.scatter_add_(1, words.clamp(0, gradient.shape[1] - 1), wanted * inside)

    def _sum(self, losses: Tensor) -> Tensor:
        return (losses if self.shares is None else losses * self.shares).sum()


class _ChunkedSum(torch.autograd.Function):
    """Forward takes the gradient too, chunk by chunk, so that logits never wait for backward."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, hidden: Tensor, *head: Any) -> Any:
        count = len(head) // 2
        needs = [settings.needs_gradient and need for need in ctx.needs_input_grad[1:]]
        matrices = [_Matrix(head[index], head[count + index], settings.dtype) for index in range(count)]
        for index, matrix in enumerate(matrices):
            matrix.hold_gradients(needs[1 + index], needs[1 + count + index])
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        starts = itertools.accumulate((matrix.size for matrix in matrices), initial=0)
        parts = [
            part
            for matrix, start in zip(matrices, starts, strict=False)
            for part in matrix.parts(start, settings.words)
        ]
        objective, entropy = (torch.zeros((), device=hidden.device) for _ in range(2))
        for chunk in settings.chunks():
            rows = hidden[chunk.part].to(settings.dtype)
            for part in parts:
                logits = None  # or they would live until the next ones have been made
                logits = settings.change.apply_(part.product(rows))
                chunk.see(logits, part.start)
            for total, value in zip((objective, entropy), chunk.sums(), strict=True):
                total += value
            if any(needs):
                logits = logits if len(parts) == 1 else None
                _take_gradient(chunk, rows, parts, logits, grad_hidden)
        ctx.scale = settings.scale
        ctx.gradients = [grad_hidden, *(matrix.weight_gradient for matrix in matrices)]
        ctx.gradients += [matrix.bias_gradient for matrix in matrices]
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> Any:
        return None, *_scaled(ctx, upstream)


class _ModuleChunkedSum(torch.autograd.Function):
    """The same through a module: only the gradient of its product is ours."""

    @staticmethod
    def forward(ctx: Any, settings: _Settings, head: nn.Module, hidden: Tensor, *trained: Tensor) -> Any:
        needs = [settings.needs_gradient and need for need in ctx.needs_input_grad[2:]]
        grad_hidden = torch.empty_like(hidden) if needs[0] else None
        sums = [
            torch.zeros_like(one, dtype=torch.float32) if need else None
            for one, need in zip(trained, needs[1:], strict=True)
        ]
        objective, entropy = (torch.zeros((), device=hidden.device) for _ in range(2))
        for chunk in settings.chunks():
            rows = hidden[chunk.part].detach().requires_grad_(needs[0])
            with torch.set_grad_enabled(any(needs)):
                product = head(rows)
            logits = settings.change.apply_(product.detach().to(torch.float32, copy=True))
            chunk.see(logits, 0)
            for total, value in zip((objective, entropy), chunk.sums(), strict=True):
                total += value
            if any(needs):
                gradient = chunk.gradient_(logits, 0).to(product.dtype)
                wanted = [one for one, need in zip((rows, *trained), needs, strict=True) if need]
                found = iter(torch.autograd.grad(product, wanted, gradient))
                if grad_hidden is not None:
                    grad_hidden[chunk.part] = next(found)
                for held in sums:
                    if held is not None:
                        held += next(found)
            del rows, product, logits
        ctx.scale = settings.scale
        ctx.gradients = [grad_hidden]
        ctx.gradients += [None if held is None else held.to(one.dtype) for held, one in zip(sums, trained, strict=True)]
        ctx.mark_non_differentiable(entropy)
        return objective, entropy

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> Any:
        return None, None, *_scaled(ctx, upstream)


def _scaled(ctx: Any, upstream: Tensor) -> list[Tensor | None]:
    """The gradients of forward times what comes from above, in place: a second copy of the head's gradient is what all
    this exists to avoid."""
    if ctx.gradients is None:
        raise RuntimeError("the chunked loss can be differentiated once: its gradients are used up")
    factor = upstream / ctx.scale
    gradients = [None if gradient is None else gradient.mul_(factor) for gradient in ctx.gradients]
    ctx.gradients = None
    return gradients


def _take_gradient(
    chunk: _Chunk, rows: Tensor, parts: Sequence[_Part], logits: Tensor | None, grad_hidden: Tensor | None
) -> None:
    """Add one chunk's gradients, from its `logits` where they are still there, else part by part anew."""
    own = None
    for part in parts:
        made = chunk.settings.change.apply_(part.product(rows)) if logits is None else logits
        gradient = chunk.gradient_(made, part.start)
        part.add_bias_gradient(gradient)
        narrow = gradient.to(chunk.settings.dtype)
        del made, gradient
        if grad_hidden is not None:
            product = narrow @ part.weight
            own = product if own is None else own.float() + product
        part.add_weight_gradient(narrow, rows)
        del narrow
    if grad_hidden is not None and own is not None:
        grad_hidden[chunk.part] = own


class _Matrix:
    """One of the head's matrices in the format products are computed in, and its gradients in fp32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> None:
        self.weight, self.bias = weight.to(dtype), None if bias is None else bias.to(dtype)
        self._stored = weight.dtype, None if bias is None else bias.dtype
        self.weight_sum: Tensor | None = None
        self.bias_sum: Tensor | None = None

    @property
    def size(self) -> int:
        return self.weight.shape[0]

    def hold_gradients(self, of_weight: bool, of_bias: bool) -> None:
        self.weight_sum = torch.zeros_like(self.weight, dtype=torch.float32) if of_weight else None
        self.bias_sum = torch.zeros_like(self.weight[:, 0], dtype=torch.float32) if of_bias else None

    def parts(self, start: int, words: int) -> list[_Part]:
        """Itself in parts of at most `words` rows; its first row is word `start`."""
        return [_Part(self, start, slice(first, first + words)) for first in range(0, self.size, words)]

    @property
    def weight_gradient(self) -> Tensor | None:
        return None if self.weight_sum is None else self.weight_sum.to(self._stored[0])

    @property
    def bias_gradient(self) -> Tensor | None:
        return None if self.bias_sum is None else self.bias_sum.to(self._stored[1])


class _Part:
    """Rows `rows` of a matrix: the words from `start` on."""

    def __init__(self, matrix: _Matrix, start: int, rows: slice) -> None:
        self.start = start + rows.start
        self.weight = matrix.weight[rows]
        self.bias = None if matrix.bias is None else matrix.bias[rows]
        self._weight_sum = None if matrix.weight_sum is None else matrix.weight_sum[rows]
        self._bias_sum = None if matrix.bias_sum is None else matrix.bias_sum[rows]

    def product(self, rows: Tensor) -> Tensor:
        """rows @ weight.T + bias, in fp32."""
        return F.linear(rows, self.weight, self.bias).float()

    def add_bias_gradient(self, gradient: Tensor) -> None:
        if self._bias_sum is not None:
            self._bias_sum += gradient.sum(dim=0)

    def add_weight_gradient(self, gradient: Tensor, rows: Tensor) -> None:
        """[V, H] += gradient [N, V]^T @ rows [N, H], summed in fp32."""
        if self._weight_sum is None:
            return
        if gradient.dtype == torch.float32:
            self._weight_sum.addmm_(gradient.t(), rows)
        else:
            _add_narrow_(self._weight_sum, gradient.t() @ rows)


def _add_narrow_(total: Tensor, part: Tensor) -> None:
    """total [V, H] fp32 += part [V, H] of another format. A processor's kernel widens its whole input first, a table's
    size in fp32: there some rows at a time."""
    rows = max(1, PIECE_NUMBERS // total.shape[1]) if total.device.type == "cpu" else total.shape[0]
    for some, added in zip(torch.split(total, rows), torch.split(part, rows), strict=True):
        some.add_(added)
