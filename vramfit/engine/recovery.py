"""Out of memory inside a step: recognised, the work halved, the same step done again.

The loss is summed over tokens and divided by the step's tokens, so cutting a micro-batch does not change the gradient.
"""

from __future__ import annotations

import gc

import torch

from vramfit.engine.accelerators import empty_cache

_CPU_MESSAGES = ("can't allocate memory", "not enough memory", "Cannot allocate memory", "bad allocation")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device. On the CPU torch raises a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(message in str(error) for message in _CPU_MESSAGES)


def release_memory(device: torch.device) -> None:
    """Give cached memory back after a failed attempt, so that smaller pieces find room in one piece."""
    gc.collect()
    empty_cache(device)


def halves(rows: int) -> tuple[int, int]:
    """Two parts of `rows`, the larger first. One row cannot be halved: (1, 0)."""
    return (rows + 1) // 2, rows // 2
