"""Adafactor (Shazeer and Stern 2018): a matrix's squares as a row and a column, which takes next to no memory.

Without the parts that make the learning rate another quantity than AdamW's (no relative step, no scaling by the
weight's own size) and without momentum: it takes AdamW's rates.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor

from vramfit.engine.chunked import StateSpec, Weight

ROWS, COLUMNS, WHOLE = "row_var", "col_var", "variance"
FLOOR: Final = 1e-30
"""The least mean of squares: the paper's first epsilon."""


class Adafactor:
    """With s = t^decay_power, for every row and column of a matrix: r = (1 - s) r + s mean(g^2), c likewise;
    u = g / sqrt(r c / mean(r)); w = (1 - lr decay) w - lr u / max(1, rms(u)). A vector keeps the whole mean.

    A stack of matrices (experts) has rows and columns for each; rms is of the whole weight. Chunks are whole rows, and
    u is made twice, because rms must be known before the first row is changed. Group: lr, decay_power, weight_decay.
    """

    by_number: Final = False
    states: Final[tuple[StateSpec, ...]] = ()

    def step(self, weight: Weight, group: Mapping[str, Any]) -> None:
        share = weight.count ** group["decay_power"]
        if len(weight.shape) < 2:
            self._average(weight, share)
        else:
            _average_rows_and_columns(weight, share)
        squares = torch.zeros((), device=weight.device)
        for part in _parts(weight):
            squares += _direction(weight, part).square_().sum()
        # On the device: fetching a number for each weight would wait for it each time.
        factor = (squares / math.prod(weight.shape)).sqrt_().clamp_(min=1.0).reciprocal_().mul_(-group["lr"])
        for part in _parts(weight):
            values = weight.weights(part)
            values.mul_(1 - group["lr"] * group["weight_decay"]).add_(_direction(weight, part).mul_(factor))
            weight.keep_weights(part, values)

    def _average(self, weight: Weight, share: float) -> None:
        if WHOLE not in weight.state:
            weight.state[WHOLE] = torch.zeros(weight.shape, device=weight.device)
        for part in weight.chunks():
            weight.read(WHOLE, part).lerp_(weight.gradient(part).square(), share)


def _average_rows_and_columns(weight: Weight, share: float) -> None:
    stack, rows, columns = _as_matrices(weight)
    if ROWS not in weight.state:
        weight.state[ROWS] = torch.zeros(stack, rows, device=weight.device)
        weight.state[COLUMNS] = torch.zeros(stack, columns, device=weight.device)
    of_rows = torch.empty(stack * rows, device=weight.device)
    of_columns = torch.zeros(stack, columns, device=weight.device)
    for part in _parts(weight):
        squares = weight.gradient(part).square().view(-1, columns)
        first = part.start // columns
        of_rows[first : first + len(squares)] = squares.mean(dim=1)
        of_columns[first // rows] += squares.sum(dim=0)
    weight.state[ROWS].lerp_(of_rows.view(stack, rows), share)
    weight.state[COLUMNS].lerp_(of_columns.div_(rows), share)


def _direction(weight: Weight, part: slice) -> Tensor:
    """u of whole rows of one matrix, or of a stretch of a vector; flat."""
    gradient = weight.gradient(part)
    if WHOLE in weight.state:
        return weight.read(WHOLE, part).clamp(min=FLOOR).rsqrt_().mul_(gradient)
    _, rows, columns = _as_matrices(weight)
    first = part.start // columns
    matrix, row = divmod(first, rows)
    of_rows = weight.state[ROWS][matrix]
    own = of_rows[row : row + len(gradient) // columns]
    # Each root by itself: the product of two means of squares can be too small for fp32.
    row_factor = (own / of_rows.mean().clamp(min=FLOOR)).clamp_(min=FLOOR).rsqrt_()
    column_factor = weight.state[COLUMNS][matrix].clamp(min=FLOOR).rsqrt_()
    made: Tensor = gradient.view(-1, columns) * column_factor
    made.mul_(row_factor.unsqueeze(1))
    return made.view(-1)


def _parts(weight: Weight) -> Iterator[slice]:
    """Whole rows of one matrix at a time, as many as a chunk holds, and at least one; a vector's chunks."""
    if len(weight.shape) < 2:
        yield from weight.chunks()
        return
    stack, rows, columns = _as_matrices(weight)
    height = max(1, weight.chunk_numbers // columns)
    for matrix in range(stack):
        for row in range(0, rows, height):
            first, last = matrix * rows + row, matrix * rows + min(rows, row + height)
            yield slice(first * columns, last * columns)


def _as_matrices(weight: Weight) -> tuple[int, int, int]:
    """(matrices, rows, columns) of the weight's shape."""
    *stack, rows, columns = weight.shape
    return math.prod(stack), rows, columns
