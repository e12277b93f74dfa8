"""Weights in 8 bits: whole numbers from -127 to 127 and a scale for each row, as bitsandbytes' int8 modules store them.

Only the weight is rounded: it is restored for each product, which is computed in the run's own format. (LLM.int8 rounds
what goes into the product, too.)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import torch
from torch import Tensor

_MOST: Final = 127

PARTS: Final = ("codes", "scales")
"""What a weight in 8 bits is made of: `codes` int8 of its own shape, `scales` fp32, one a row."""


def part_shapes(shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and format of each part of a weight of `shape`, [rows, columns] or [E, rows, columns]."""
    return {"codes": (tuple(shape), torch.int8), "scales": (tuple(shape[:-1]), torch.float32)}


def quantise(weight: Tensor) -> dict[str, Tensor]:
    """A matrix in 8 bits, on its device."""
    numbers = weight.detach().float()
    scales = numbers.abs().amax(dim=-1) / _MOST
    codes = (numbers / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(-1)).round_()
    return {"codes": codes.clamp_(-_MOST, _MOST).to(torch.int8), "scales": scales}


def dequantise(parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of `shape` in `dtype`: products in fp32, rounded once."""
    made = torch.empty(tuple(shape), dtype=dtype, device=parts["codes"].device)
    torch.mul(parts["codes"], parts["scales"].unsqueeze(-1), out=made)
    return made
