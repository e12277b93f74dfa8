"""A tensor that is read when it is asked for: what is written from more than memory holds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Later:
    """`read` gives the tensor; shape and format are known before."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
