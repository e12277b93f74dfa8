"""Several documents in one sequence of at most `max_length` tokens, none of them cut.

Documents are kept whole because each is attended to on its own: a document cut in two would lose the context of its
second half, while keeping all whole leaves little room: 0.7 % of blocks of 1,024 tokens for alpaca_en, 2.0 % for
glaive_toolcall (SmolLM2's tokenizer). Documents longer than a sequence were cut or split before. The last, partly
filled sequence is kept like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from vramfit.data.conversations import Example


def pack(examples: Sequence[Example], max_length: int) -> list[Example]:
    """Pack by best fit, longest first. Deterministic; every example is in exactly one sequence.

    Raises ValueError for an example longer than `max_length`, which is a mistake of the caller.
    """
    return [_joined([examples[index] for index in block]) for block in best_fit([len(e) for e in examples], max_length)]


def best_fit(lengths: Sequence[int], size: int) -> list[list[int]]:
    """Groups of indices whose lengths sum to at most `size`, each put where it leaves the least room.

    O(n log size): the groups are kept by the room they have left.
    """
    if any(length > size for length in lengths):
        raise ValueError(f"an example is longer than {size} tokens")
    blocks: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(size + 1)]
    occupied = _RoomIndex(size)
    for index in sorted(range(len(lengths)), key=lambda at: (-lengths[at], at)):
        length = lengths[index]
        room = occupied.smallest_at_least(length)
        if room is None:
            room, block = size, len(blocks)
            blocks.append([])
        else:
            block = by_room[room].pop()
            if not by_room[room]:
                occupied.remove(room)
        blocks[block].append(index)
        left = room - length
        if not by_room[left]:
            occupied.add(left)
        by_room[left].append(block)
    return [sorted(block) for block in blocks]


class _RoomIndex:
    """A set of integers 0..size as the bits of one int: the smallest member from a bound on is a few big-int steps."""

    def __init__(self, size: int) -> None:
        self._bits = 0
        self._size = size

    def add(self, room: int) -> None:
        self._bits |= 1 << room

    def remove(self, room: int) -> None:
        self._bits &= ~(1 << room)

    def smallest_at_least(self, bound: int) -> int | None:
        above = self._bits >> bound
        return None if not above else bound + (above & -above).bit_length() - 1


def _joined(examples: list[Example]) -> Example:
    if len(examples) == 1:
        return examples[0]
    weighted = any(example.weights is not None for example in examples)
    return Example(
        np.concatenate([example.input_ids for example in examples]),
        np.concatenate([example.trained for example in examples]),
        examples[0].row,
        tuple(len(example) for example in examples),
        tuple(example.row for example in examples),
        np.concatenate([example.token_weights() for example in examples]) if weighted else None,
    )
