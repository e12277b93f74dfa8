"""Lion (Chen et al. 2023, "Symbolic discovery of optimization algorithms"), chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vramfit.engine.chunked import StateSpec, Weight

MOMENTUM = "exp_avg"


class Lion:
    """w = (1 - lr decay) w - lr sign(b1 m + (1 - b1) g); then m = b2 m + (1 - b2) g.

    Every number of a weight moves by the whole rate: choose it 3 to 10 times smaller than AdamW's. Group: lr, betas,
    weight_decay.
    """

    by_number: Final = True
    states: Final = (StateSpec(MOMENTUM, signed=True),)

    def step(self, weight: Weight, group: Mapping[str, Any]) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        for part in weight.chunks():
            gradient, values, momentum = weight.gradient(part), weight.weights(part), weight.read(MOMENTUM, part)
            direction = momentum.lerp(gradient, 1 - beta1).sign_()
            values.mul_(1 - rate * group["weight_decay"]).sub_(direction, alpha=rate)
            weight.keep_weights(part, values)
            momentum.lerp_(gradient, 1 - beta2)
            del gradient, direction, values
            weight.keep(MOMENTUM, part, momentum)
