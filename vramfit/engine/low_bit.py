"""Numbers in 8 or 4 bits: codes into a table of levels, and one fp32 scale per block of consecutive numbers.

A block is divided by its largest magnitude and each quotient stored as the number of the nearest level. The tables are
those of the papers: dynamic levels (Dettmers et al. 2022, "8-bit optimizers via block-wise quantization"), even inside
each power of ten, for what has a sign and, in 8 bits, for what has none. Levels without a sign leave 0 out (Li et al.
2023, "Memory efficient optimizers with 4-bit states"): they hold an average of squares that is divided by, and a 0
there beside a first moment that is none would make a step without bound. In 4 bits their roots are even, where that
paper has the levels themselves even: what is divided by is the root, and training keeps closer to 32 bits
(docs/log.md).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

Bits = Literal[8, 4]

BLOCK: Final[dict[int, int]] = {8: 256, 4: 128}
"""Numbers that share a scale, by bits."""

_DECADES: Final[dict[int, int]] = {8: 7, 4: 3}
_TINY: Final = torch.finfo(torch.float32).tiny


class Codebook:
    """The levels of `bits`-bit numbers with or without a sign, in [-1, 1], on `device`.

    Looking for the nearest of 256 levels by halving takes 70 ns and more a number on a CPU core. Here the upper 16 bits
    of an fp32 number say which level it has, or the one below: no two of these tables' boundaries lie so close that
    both share them. One comparison with the boundary decides.
    """

    def __init__(self, bits: Bits, *, signed: bool, device: torch.device) -> None:
        self.levels = torch.tensor(levels(bits, signed=signed), dtype=torch.float32, device=device)
        # Above the last level there is no boundary: NaN compares as no.
        between = (self.levels[1:] + self.levels[:-1]) / 2
        self._boundaries = torch.cat([between, torch.full_like(between[:1], math.nan)])
        upper_halves = torch.arange(-(2**15), 2**15, dtype=torch.int32, device=device)
        # The cell's end that is nearest to minus infinity: for a negative number the one with all lower bits set.
        lowest = (upper_halves << 16) | torch.where(upper_halves < 0, 0xFFFF, 0).to(torch.int32)
        self._lowest_code = torch.bucketize(lowest.view(torch.float32).nan_to_num_(), between).to(torch.uint8)

    def encode(self, values: Tensor) -> Tensor:
        """uint8 codes of the levels nearest to fp32 `values`, which are in [-1, 1]; of two as near the lower."""
        cells = (values.view(torch.int32) >> 16).add_(2**15)
        codes = self._lowest_code.index_select(0, cells)
        return codes.add_(values > self._boundaries.index_select(0, codes.int()))

    def decode(self, codes: Tensor) -> Tensor:
        """The fp32 levels of `codes`."""
        return self.levels.index_select(0, codes.int())


def levels(bits: Bits, *, signed: bool) -> list[float]:
    """The levels in ascending order: 2**bits of them."""
    if bits == 4 and not signed:
        return [(code / 16) ** 2 for code in range(1, 17)]
    found = dynamic_levels(bits, signed=signed)
    if not signed:
        found[0] = found[1] / 2  # the 0
    return found


def dynamic_levels(bits: Bits, *, signed: bool) -> list[float]:
    """0, 1 and between them decades: below 1 each one tenth of the last, with half as many levels.

    In decade k, counted from the smallest, 2**k levels (without a sign twice as many) are the middles of as many equal
    parts of [0.1, 1], scaled. A sign mirrors them all except 0 and 1, which have one code each.
    """
    count = _DECADES[bits]
    positive = []
    for decade in range(count):
        parts = 2 ** (decade if signed else decade + 1)
        scale = 10.0 ** (decade - count + 1)
        positive += [scale * (0.1 + 0.9 * (part + 0.5) / parts) for part in range(parts)]
    negative = [-level for level in positive] if signed else []
    return sorted([*negative, 0.0, *positive, 1.0])


@dataclass(frozen=True)
class LowBit:
    """A format: how fp32 numbers become codes and scales, and back. All tensors are flat."""

    bits: Bits
    codebook: Codebook

    @classmethod
    def on(cls, device: torch.device, bits: Bits, *, signed: bool) -> LowBit:
        return cls(bits, Codebook(bits, signed=signed, device=device))

    @property
    def block(self) -> int:
        return BLOCK[self.bits]

    def zeros(self, count: int, *, device: torch.device) -> tuple[Tensor, Tensor]:
        """(codes, scales) of `count` zeros: a scale of 0 makes any code 0."""
        blocks = -(-count // self.block)
        codes = torch.zeros(self._bytes(count), dtype=torch.uint8, device=device)
        return codes, torch.zeros(blocks, dtype=torch.float32, device=device)

    def read(self, codes: Tensor, scales: Tensor, start: int, stop: int) -> Tensor:
        """Numbers `start` to `stop` (of the whole tensor) in fp32; `start` is where a block begins."""
        part = codes[self._bytes(start) : self._bytes(stop)]
        if self.bits == 4:
            part = torch.stack([part & 15, part >> 4], dim=1).flatten()[: stop - start]
        values = self.codebook.decode(part)
        own = scales[start // self.block : -(-stop // self.block)]
        whole = len(values) - len(values) % self.block
        values[:whole].view(-1, self.block).mul_(own[: whole // self.block].unsqueeze(1))
        values[whole:].mul_(own[whole // self.block :])
        return values

    def write(self, values: Tensor, codes: Tensor, scales: Tensor, start: int) -> None:
        """Put fp32 `values` in place of the numbers from `start` on, which is where a block begins.

        They end with a block or with the tensor. `values` are scaled in place: they are of no use afterwards.
        """
        count = len(values)
        missing = -count % self.block
        blocks = (F.pad(values, (0, missing)) if missing else values).view(-1, self.block)
        largest = torch.linalg.vector_norm(blocks, ord=math.inf, dim=1)
        scales[start // self.block :][: len(largest)] = largest
        new = self.codebook.encode(blocks.div_(largest.clamp_(min=_TINY).unsqueeze(1)).flatten())[:count]
        if self.bits == 4:
            new = F.pad(new, (0, count % 2))
            new = new[0::2] | (new[1::2] << 4)
        codes[self._bytes(start) : self._bytes(start + count)] = new

    def _bytes(self, count: int) -> int:
        return count if self.bits == 8 else (count + 1) // 2
