"""AdamW (Loshchilov and Hutter 2019, "Decoupled weight decay regularization"), chunk by chunk."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from vramfit.engine.chunked import StateSpec, Weight

FIRST, SECOND = "exp_avg", "exp_avg_sq"


class AdamW:
    """m = b1 m + (1 - b1) g; v = b2 v + (1 - b2) g^2; w = (1 - lr decay) w - lr m' / (sqrt(v') + eps).

    m' and v' are m and v over 1 - b1^t and 1 - b2^t. The weights move by the moments as they are before those go back
    to few bits. Group: lr, betas, eps, weight_decay.
    """

    by_number: Final = True
    states: Final = (StateSpec(FIRST, signed=True), StateSpec(SECOND, signed=False))

    def step(self, weight: Weight, group: Mapping[str, Any]) -> None:
        rate, (beta1, beta2) = group["lr"], group["betas"]
        step_size = rate / (1 - beta1**weight.count)
        correction = (1 - beta2**weight.count) ** 0.5
        for part in weight.chunks():
            gradient, values = weight.gradient(part), weight.weights(part)
            first, second = weight.read(FIRST, part), weight.read(SECOND, part)
            first.lerp_(gradient, 1 - beta1)
            second.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            del gradient
            divisor = second.sqrt().div_(correction).add_(group["eps"])
            weight.keep(SECOND, part, second)
            values.mul_(1 - rate * group["weight_decay"]).addcdiv_(first, divisor, value=-step_size)
            del divisor, second
            weight.keep_weights(part, values)
            del values
            weight.keep(FIRST, part, first)
