"""Slices of a mixture's experts that visit the device: in which order they come.

A block whose experts are more than a slot holds comes in parts: what is not an expert as any block does, and its
experts as slices of whole ones, through slots of their own. The experts of a block come in the order of their numbers
on the way down, too: in that order a token's sums are made, whatever the slices are.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vramfit.engine.blocks import BlockStream, Direction, Tier, Traffic


@dataclass(frozen=True)
class Slice:
    """Experts `first` to `last` (that one left out) of a block."""

    block: int
    first: int
    last: int


class SliceStream(BlockStream):
    """Brings `slices`, which `tier` has in the same order, ahead of need; those of the blocks in `stay` stay."""

    def __init__(
        self, tier: Tier, device: torch.device, slices: Sequence[Slice], *, stay: Collection[int], traffic: Traffic
    ) -> None:
        self.slices = list(slices)
        self._of: dict[int, list[int]] = {}
        for at, each in enumerate(self.slices):
            self._of.setdefault(each.block, []).append(at)
        self._blocks = sorted(self._of)
        super().__init__(tier, device, resident=self._all_of(stay), traffic=traffic)

    @property
    def blocks(self) -> Sequence[int]:
        """Those that come in slices."""
        return self._blocks

    def of(self, block: int) -> Sequence[int]:
        """The places of a block's slices."""
        return self._of[block]

    def stay_with(self, blocks: Collection[int]) -> None:
        """Change the blocks whose slices stay, between two steps."""
        self.stay(self._all_of(blocks))

    def whole(self, block: int) -> dict[str, Tensor]:
        """All experts of a block, in RAM."""
        parts = [self.tier.layouts[at].views(self._whole(at)) for at in self._of[block]]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _all_of(self, blocks: Collection[int]) -> list[int]:
        return [at for at, each in enumerate(self.slices) if each.block in blocks]

    def _ahead_of(self, block: int, direction: Direction) -> int | None:
        """Of the slice at `block`: what is left of its own block, then the blocks after it on the way. Where the way
        turns it goes on with the block at the turn."""
        return next((at for at in self._following(block, direction) if at not in self._resident), None)

    def _following(self, at: int, direction: Direction) -> Iterator[int]:
        own, lowest, highest = self.slices[at].block, self._blocks[0], self._blocks[-1]
        yield from range(at + 1, self._of[own][-1] + 1)
        up = direction == "up"
        for block in self._blocks if up else reversed(self._blocks):
            if block > own if up else block < own:
                yield from self._of[block]
        yield from self._of[highest if up else lowest]
