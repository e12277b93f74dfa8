"""The gradient of a table that is embedding and head at once, summed in the order in which a resident run sums it.

There each micro-batch adds the head's part and the embedding's together. Block by block, all heads' parts come before
the first of the embedding's; so for the rows that embeddings have a part in, the heads' are kept apart until then.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class TiedGradient:
    """For one step: `add_head` after each micro-batch's head, `add_embedding` after each one's embedding, in the same
    order; then `finish` leaves the whole gradient at `weight` [vocabulary, hidden]. `tokens` are all of the step's."""

    def __init__(self, weight: nn.Parameter, tokens: list[Tensor]) -> None:
        self._weight = weight
        self._rows = torch.unique(torch.cat([each.reshape(-1) for each in tokens])).to(weight.device)
        self._heads: list[Tensor] = []
        self._whole: Tensor | None = None
        self._sum: Tensor | None = None

    @torch.no_grad()
    def add_head(self) -> None:
        gradient = self._taken()
        self._heads.append(gradient[self._rows])
        self._whole = gradient if self._whole is None else self._whole.add_(gradient)

    @torch.no_grad()
    def add_embedding(self) -> None:
        both = self._heads.pop(0).add_(self._taken()[self._rows])
        self._sum = both if self._sum is None else self._sum.add_(both)

    @torch.no_grad()
    def finish(self) -> None:
        assert self._whole is not None and self._sum is not None
        self._whole[self._rows] = self._sum
        self._weight.grad = self._whole

    @property
    def nbytes(self) -> int:
        """What it holds on the device."""
        held = [*self._heads, *(each for each in (self._whole, self._sum) if each is not None)]
        return sum(each.nbytes for each in held)

    def _taken(self) -> Tensor:
        gradient, self._weight.grad = self._weight.grad, None
        assert gradient is not None
        return gradient
