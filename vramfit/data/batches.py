"""Which rows make which step, and their tensors. The order is a pure function of the step, so resume needs its number.

A step is `sequences_per_step` rows; the last step of an epoch takes what is left, and its loss is divided by its own
tokens, so nothing is dropped and nothing weighs double.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from vramfit.data.conversations import Example

IGNORED: Final = -100


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """Sequences of one forward pass, padded on the right. All int64; B sequences, S the longest one's tokens.

    `labels` [B, S] are the `input_ids` where trained and -100 elsewhere, not shifted: logits at s - 1 predict labels
    at s. The first token of every document is -100. `attention_mask` is None: with causal attention no real token sees
    the padding behind it, and kernels are faster without a mask. `position_ids` [B, S] is None unless sequences are
    packed; then they restart at 0 with every document, and from the restarts (call the model with `use_cache=False`)
    transformers separates the documents' attention. `rows` are the examples' row numbers. `trained_tokens` counts
    the labels that are not -100. `weights` [B, S] fp32 are each label's share in the loss, None where all are 1.
    """

    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None
    position_ids: torch.Tensor | None
    rows: tuple[int, ...]
    trained_tokens: int
    weights: torch.Tensor | None = None


class StepOrder:
    """Rows of every optimizer step, shuffled anew for each epoch from (seed, epoch) alone. Steps count from 1.

    `max_steps`, when given, decides instead of `epochs` and goes through as many epochs as it needs. A part of an
    epoch (`epochs=1.5`) is its first steps.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        sequences_per_step: int,
        seed: int,
        epochs: float = 1.0,
        max_steps: int | None = None,
    ) -> None:
        if not lengths or sequences_per_step < 1:
            raise ValueError("a step order needs at least one sequence, and at least one sequence per step")
        self._count = len(lengths)
        self._per_step = sequences_per_step
        self._seed = seed
        self.steps_per_epoch = math.ceil(self._count / sequences_per_step)
        self.total_steps = max_steps if max_steps is not None else self._steps_of(epochs)
        self._permutation = lru_cache(maxsize=2)(self._shuffled)

    def _steps_of(self, epochs: float) -> int:
        whole, part = divmod(epochs, 1.0)
        # The tiny number taken off keeps 0.1 * 30 = 3.0000000000000004 from becoming four steps.
        partial = math.ceil(part * self._count / self._per_step - 1e-9)
        return max(int(whole) * self.steps_per_epoch + partial, 1)

    def rows(self, step: int) -> tuple[int, ...]:
        """Indices of the sequences of `step`. Raises ValueError outside 1..total_steps."""
        if not 1 <= step <= self.total_steps:
            raise ValueError(f"step {step} is outside 1..{self.total_steps}")
        epoch, position = divmod(step - 1, self.steps_per_epoch)
        first = position * self._per_step
        return tuple(self._permutation(epoch)[first : first + self._per_step].tolist())

    def epoch(self, step: int) -> float:
        """Epochs completed after `step`, as 2.5 for the middle of the third."""
        return step / self.steps_per_epoch

    def _shuffled(self, epoch: int) -> NDArray[np.int64]:
        # NumPy promises that a bit generator's raw stream never changes, which it does not of permutation().
        keys = np.random.Philox(key=np.array([self._seed, epoch], dtype=np.uint64)).random_raw(self._count)
        return np.argsort(keys, kind="stable")


def split(examples: Sequence[Example], micro_batch: int, pad_id: int, *, pad_to_multiple: int = 1) -> list[MicroBatch]:
    """A step's examples as micro-batches of at most `micro_batch` sequences, similar lengths together, longest first.

    The step's gradient does not depend on the grouping, because losses are summed over tokens and divided by the
    step's count. The longest first: what does not fit memory fails at once.
    """
    order = sorted(range(len(examples)), key=lambda index: (-len(examples[index]), index))
    groups = [order[at : at + micro_batch] for at in range(0, len(order), micro_batch)]
    return [collate([examples[index] for index in group], pad_id, pad_to_multiple=pad_to_multiple) for group in groups]


def collate(examples: Sequence[Example], pad_id: int, *, pad_to_multiple: int = 1) -> MicroBatch:
    """Pad to the longest example (rounded up to `pad_to_multiple` tokens; 8 suits tensor cores)."""
    longest = max(len(example) for example in examples)
    shape = (len(examples), -(-longest // pad_to_multiple) * pad_to_multiple)
    ids = np.full(shape, pad_id, dtype=np.int64)
    labels = np.full(shape, IGNORED, dtype=np.int64)
    packed = any(example.parts for example in examples)
    positions = np.zeros(shape, dtype=np.int64) if packed else None
    weighted = any(example.weights is not None for example in examples)
    weights = np.zeros(shape, dtype=np.float32) if weighted else None
    for index, example in enumerate(examples):
        length = len(example)
        ids[index, :length] = example.input_ids
        labels[index, :length] = np.where(_predicted(example), example.input_ids, IGNORED)
        if weights is not None:
            weights[index, :length] = example.token_weights()
        if positions is not None:
            # Padding keeps position 0: every padding token is then a document of its own, attended to by no other.
            positions[index, :length] = np.concatenate([np.arange(part) for part in example.parts or (length,)])
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        labels=torch.from_numpy(labels),
        attention_mask=None,
        position_ids=None if positions is None else torch.from_numpy(positions),
        rows=tuple(example.row for example in examples),
        trained_tokens=int((labels != IGNORED).sum()),
        weights=None if weights is None else torch.from_numpy(weights),
    )


def _predicted(example: Example) -> NDArray[np.bool_]:
    """Trained tokens that have something before them in their own document."""
    predicted = example.trained.copy()
    starts = np.cumsum([0, *example.parts[:-1]]) if example.parts else np.array([0])
    predicted[starts] = False
    return predicted
