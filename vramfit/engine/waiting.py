"""Blocks' inputs, from forward to their backward: on the device, in RAM or in a file."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from vramfit.engine.accelerators import backend_of
from vramfit.planning.plan import Tier
from vramfit.positioned import PositionedFile

Key = tuple[int, ...]
"""(block, micro-batch) of an input; a third number for what else of a block waits."""


class WaitingInputs:
    """Hidden states by block and micro-batch, each with the random state it was computed with, or None."""

    def __init__(self, tier: Tier, device: torch.device) -> None:
        # Where nothing is copied from locked pages the device's memory is RAM itself: a processor's, Apple silicon's.
        self.tier = "device" if tier == "host" and not backend_of(device).pinned else tier
        self.device = device
        self._there: dict[Key, tuple[Any, dict[str, Tensor] | None]] = {}
        self._file: PositionedFile | None = None
        self._end = 0

    def put(self, key: Key, hidden: Tensor, drawn: dict[str, Tensor] | None) -> None:
        """Keep `hidden`; the caller does not change it afterwards."""
        kept: Any = hidden
        if self.tier == "host":
            kept = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
            kept.copy_(hidden, non_blocking=True)
        elif self.tier == "disk":
            kept = self._written(hidden)
        self._there[key] = kept, drawn

    def take(self, key: Key) -> tuple[Tensor, dict[str, Tensor] | None]:
        """(the hidden state on the device, the random state), which wait no longer."""
        found = self.look(key)
        del self._there[key]
        return found

    def look(self, key: Key) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The same, and it goes on waiting."""
        kept, drawn = self._there[key]
        if self.tier == "host":
            kept = kept.to(self.device, non_blocking=True)
        elif self.tier == "disk":
            kept = self._read(*kept).to(self.device)
        return kept, drawn

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(kept.nbytes for kept, _ in self._there.values()) if self.tier == "device" else 0

    def clear(self) -> None:
        """What an attempt that failed has left."""
        self._there.clear()
        self._end = 0

    def _written(self, hidden: Tensor) -> tuple[int, torch.Size, torch.dtype]:
        if self._file is None:
            handle, name = tempfile.mkstemp(prefix="vramfit-inputs-")
            os.close(handle)
            self._file = PositionedFile(Path(name), write=True, vanishes=True)
        place = self._end
        flat = hidden.detach().contiguous().cpu().view(-1).view(torch.uint8)
        self._file.write_from(place, flat.numpy().data)
        self._end = place + flat.numel()
        return place, hidden.shape, hidden.dtype

    def _read(self, place: int, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        found = torch.empty(shape, dtype=dtype)
        assert self._file is not None
        self._file.read_into(place, found.view(-1).view(torch.uint8).numpy().data)
        return found
