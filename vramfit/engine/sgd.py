"""Stochastic gradient descent with momentum, as torch's own class computes it, chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vramfit.engine.chunked import StateSpec, Weight

MOMENTUM = "momentum_buffer"


class Sgd:
    """g = g + decay w; m = momentum m + g; w = w - lr m. Group: lr, momentum, weight_decay."""

    by_number: Final = True
    states: Final = (StateSpec(MOMENTUM, signed=True),)

    def step(self, weight: Weight, group: Mapping[str, Any]) -> None:
        for part in weight.chunks():
            values, momentum = weight.weights(part), weight.read(MOMENTUM, part)
            momentum.mul_(group["momentum"]).add_(weight.gradient(part)).add_(values, alpha=group["weight_decay"])
            weight.keep_weights(part, values.sub_(momentum, alpha=group["lr"]))
            weight.keep(MOMENTUM, part, momentum)
