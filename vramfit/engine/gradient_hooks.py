"""Gradients handed over as soon as each is whole, while backward goes on: to be measured, sent away or stepped."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn


class GradientTaker:
    """Gives the number of each of `parameters` whose gradient is there to a function, which is to free the gradient.

    Only inside `taking`, which goes around the last backward of a step: a gradient of several micro-batches is whole
    after the last. A weight that is used in several places (a tied head) is given once, when all its parts are summed:
    autograd counts them.
    """

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._take: Callable[[int], None] | None = None
        for place, parameter in enumerate(self.parameters):
            parameter.register_post_accumulate_grad_hook(self._hook(place))  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def taking(self, take: Callable[[int], None]) -> Iterator[None]:
        """Inside, each gradient is given to `take` once; at the end those that this backward did not touch."""
        self._take = take
        try:
            yield
        finally:
            self._take = None
        # Such as an expert's to which only earlier micro-batches sent tokens.
        for place, parameter in enumerate(self.parameters):
            if parameter.grad is not None:
                take(place)

    def _hook(self, place: int) -> Callable[[Tensor], None]:
        def gradient_is_there(_: Tensor) -> None:
            if self._take is not None:
                with torch.no_grad():
                    self._take(place)

        return gradient_is_there
