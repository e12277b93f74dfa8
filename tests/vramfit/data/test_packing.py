from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.data.conversations import Example
from vramfit.data.packing import best_fit, pack


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, 64), max_size=80), size=st.integers(64, 200))
def test_every_document_is_in_one_block_that_holds_it(lengths: list[int], size: int) -> None:
    blocks = best_fit(lengths, size)
    assert sorted(index for block in blocks for index in block) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in block) <= size for block in blocks)
    # Any two blocks hold more than one block's worth, or best fit would have put them together.
    sums = sorted(sum(lengths[index] for index in block) for block in blocks)
    assert len(sums) < 2 or sums[0] + sums[1] > size


def example(row: int, length: int) -> Example:
    return Example(np.full(length, row, dtype=np.int32), np.arange(length) > 0, row)


def test_packed_examples_know_their_parts() -> None:
    packed = pack([example(0, 3), example(1, 5), example(2, 2)], 8)
    assert [(block.parts, block.rows) for block in packed] == [((3, 5), (0, 1)), ((), ())]
    assert packed[0].input_ids.tolist() == [0] * 3 + [1] * 5
    assert packed[0].trained.tolist() == [False, True, True, False, True, True, True, True]


def test_a_document_longer_than_a_block_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="longer than 4 tokens"):
        pack([example(0, 5)], 4)


def test_case_037_the_last_partial_block_is_kept() -> None:
    assert [len(block) for block in pack([example(row, 20) for row in range(5)], 2048)] == [100]


def test_packed_examples_keep_their_weights() -> None:
    weights = np.array([0, 0.5, 2], dtype=np.float32)
    weighted = Example(np.zeros(3, dtype=np.int32), weights > 0, 0, weights=weights)
    [packed] = pack([weighted, example(1, 2)], 5)
    assert packed.weights is not None
    assert packed.weights.tolist() == [0, 0.5, 2, 0, 1]
    assert pack([example(0, 3), example(1, 2)], 5)[0].weights is None
