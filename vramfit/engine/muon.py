"""Muon (Jordan et al. 2024): momentum whose singular values are all made about 1, for the matrices inside the blocks.

Embeddings, the head and vectors are no such matrices: AdamW steps them, in the same optimizer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vramfit.engine.chunked import StateSpec, Weight

MOMENTUM = "momentum_buffer"
_COEFFICIENTS: Final = (3.4445, -4.7750, 2.0315)
_ITERATIONS: Final = 5
_LEAST_NORM: Final = 1e-7


class Muon:
    """m = momentum m + (1 - momentum) g; u = orthogonal(g lerp m); w = (1 - lr decay) w - 0.2 sqrt(max side) lr u.

    The factor makes the root mean square of a step that of AdamW's (Liu et al. 2025, "Muon is scalable for LLM
    training"), so that it takes AdamW's rates and decay. A stack of matrices (experts) is stepped one by one. The
    products are in bf16 on cards; CPUs without 16-bit units are faster in fp32. Beside the momentum a number of the
    largest matrix takes 14 bytes for a time, 20 where the products are in fp32. Group: lr, momentum, weight_decay.
    """

    by_number: Final = False
    states: Final = (StateSpec(MOMENTUM, signed=True),)

    def __init__(self, product: torch.dtype) -> None:
        self._product = product

    def step(self, weight: Weight, group: Mapping[str, Any]) -> None:
        *stack, rows, columns = weight.shape
        rate, size = group["lr"], rows * columns
        for matrix in range(math.prod(stack)):
            part = slice(matrix * size, (matrix + 1) * size)
            gradient, momentum = weight.gradient(part), weight.read(MOMENTUM, part)
            momentum.lerp_(gradient, 1 - group["momentum"])
            ahead = gradient.lerp(momentum, group["momentum"]).to(self._product)
            del gradient
            direction = orthogonal(ahead.view(rows, columns))
            values = weight.weights(part)
            values.mul_(1 - rate * group["weight_decay"])
            values.view(rows, columns).sub_(direction, alpha=0.2 * math.sqrt(max(rows, columns)) * rate)
            weight.keep_weights(part, values)


def orthogonal(matrix: Tensor) -> Tensor:
    """U V^T of a matrix U S V^T, nearly: its singular values come to lie about 1 (0.7 to 1.2).

    Five Newton-Schulz iterations with a quintic polynomial, x <- a x + (b x x^T + c (x x^T)^2) x.
    """
    a, b, c = _COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    found = matrix.t() if tall else matrix
    found = found / found.norm().clamp(min=_LEAST_NORM)
    for _ in range(_ITERATIONS):
        gram = found @ found.t()
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    return found.t() if tall else found
