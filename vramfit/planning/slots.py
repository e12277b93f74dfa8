"""How much of a streamed model is on its way at once: the size of the places that blocks visit.

Small blocks come several at a time: each that comes alone costs the host a message between threads and the link a
start. A mixture's block can be many GiB (5.5 of DeepSeek-V3 in 4 bits, 21 in 16), of which a token needs a few experts.
Where it is more than a place may take, it is split: what is not an expert comes as any block does, its experts come
some at a time through two places of their own.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from vramfit.units import GIB, MIB

LARGEST_SLOT: Final = 2 * GIB
AT_ONCE: Final = 512 * MIB
"""What comes together is to have: large enough that a link's latency is nothing beside it."""

BUDGET_SHARE: Final = 8
"""A place takes no more than this part of the budget."""

GROUP_SHARE: Final = 32
"""One for several blocks no more than this."""


@dataclass(frozen=True, kw_only=True)
class SplitBlock:
    """A block in parts: bytes of all of it, of what is not an expert, of its largest slice of experts, and how many
    slices there are."""

    whole: float
    shared: float
    slice: float
    slices: int

    @classmethod
    def undivided(cls, size: float) -> SplitBlock:
        """One that comes whole."""
        return cls(whole=size, shared=size, slice=0.0, slices=0)


def slot_bytes(largest_block: float, budget_bytes: int) -> int:
    """Bytes that a place for blocks is to have at most: where one for the largest block would be too large, or has room
    for several; else 0."""
    most = min(LARGEST_SLOT, budget_bytes // BUDGET_SHARE)
    if largest_block > most:
        return min(AT_ONCE, most)
    group = min(AT_ONCE, budget_bytes // GROUP_SHARE)
    return group if 2 * largest_block <= group else 0


def together(parts: Collection[float], slot_bytes: int, *, splits: bool) -> int:
    """Bytes of blocks, of so many each, that come together: what a place may have; where blocks are split, no more than
    the largest of what is left of them takes anyway."""
    return int(max(parts, default=0.0)) if splits else slot_bytes


def groups_of(sizes: Mapping[int, float], together: int, *, turn: int = 0) -> list[tuple[int, ...]]:
    """Blocks, in the order of `sizes`, of which those that follow each other come together as long as they have no more
    than so many bytes. Those before `turn` come once a step, and none of them with one that comes twice."""
    found: list[tuple[int, ...]] = []
    room = 0.0
    for block, size in sizes.items():
        if found and size <= room and (found[-1][0] < turn) == (block < turn):
            found[-1] = (*found[-1], block)
        else:
            found.append((block,))
            room = float(together)
        room -= size
    return found


def experts_at_once(one: float, experts: int, slot_bytes: int) -> int:
    """How many of a block's `experts`, of `one` byte count each, make a slice."""
    return min(experts, max(1, int(slot_bytes // one)))


def split_block(block: float, of_experts: float, experts: int, slot_bytes: int) -> SplitBlock | None:
    """The parts of a block of so many bytes, of which `of_experts` are of `experts` that can be taken one by one; None
    where it comes whole."""
    if not slot_bytes or not experts or block <= slot_bytes:
        return None
    one = of_experts / experts
    at_once = experts_at_once(one, experts, slot_bytes)
    slices = math.ceil(experts / at_once)
    return SplitBlock(whole=block, shared=block - of_experts, slice=at_once * one, slices=slices)
