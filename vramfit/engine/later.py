"""A tensor that is read when it is asked for: what is written from more than memory holds."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Later:
    """`read` gives the tensor; shape and format are known before. `lend` gives it where it lies, for reading, until
    `done` is called: for what lies nowhere there is none."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]
    lend: Callable[[], Tensor] | None = None
    done: Callable[[], None] | None = None

    @contextmanager
    def lent(self) -> Iterator[Tensor]:
        """The tensor where it lies, or a copy that goes afterwards."""
        try:
            yield (self.lend or self.read)()
        finally:
            if self.done is not None:
                self.done()
