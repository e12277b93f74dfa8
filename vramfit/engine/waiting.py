"""Blocks' inputs, from forward to their backward: on the device, in RAM or in a file."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from vramfit.engine.accelerators import backend_of
from vramfit.engine.inputs_file import InputsFile, Key
from vramfit.planning.plan import InputTier


class WaitingInputs:
    """Hidden states by block and micro-batch, each with the random state it was computed with, or None.

    `path` is of the file that is made where they wait on disk.
    """

    def __init__(self, tier: InputTier, device: torch.device, path: Path | None = None) -> None:
        # Where nothing is copied from locked pages the device's memory is RAM itself: a processor's, Apple silicon's.
        self.tier = "device" if tier == "host" and not backend_of(device).pinned else tier
        self.device = device
        self._drawn: dict[Key, dict[str, Tensor] | None] = {}
        self._there: dict[Key, Tensor] = {}
        self._file: InputsFile | None = None
        if self.tier == "disk":
            if path is None:
                raise ValueError("inputs that wait on disk need the path of a file")
            self._file = InputsFile(path, device)

    def expect(self, nbytes: int) -> None:
        """So many bytes will be put before any is taken. Raises OutOfDisk where there is no room for them."""
        if self._file is not None:
            self._file.reserve(nbytes)

    def put(self, key: Key, hidden: Tensor, drawn: dict[str, Tensor] | None) -> None:
        """Keep `hidden`; the caller does not change it afterwards."""
        self._drawn[key] = drawn
        if self._file is not None:
            self._file.put(key, hidden)
        elif self.tier == "host":
            copy = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=True)
            self._there[key] = copy.copy_(hidden, non_blocking=True)
        else:
            self._there[key] = hidden

    def take(self, key: Key) -> tuple[Tensor, dict[str, Tensor] | None]:
        """(the hidden state on the device, the random state), which wait no longer."""
        found = self.look(key)
        del self._drawn[key]
        if self._file is not None:
            self._file.forget(key)
        else:
            del self._there[key]
        return found

    def look(self, key: Key) -> tuple[Tensor, dict[str, Tensor] | None]:
        """The same, and it goes on waiting."""
        drawn = self._drawn[key]
        if self._file is not None:
            return self._file.get(key), drawn
        kept = self._there[key]
        return kept.to(self.device, non_blocking=True) if self.tier == "host" else kept, drawn

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return sum(kept.nbytes for kept in self._there.values()) if self.tier == "device" else 0

    def waited(self) -> tuple[float, int]:
        """(seconds in which nothing was computed for the drive, bytes written there) since the run began."""
        if self._file is None:
            return 0.0, 0
        self._file.gaps.read()
        return self._file.waited_seconds, self._file.written_bytes

    def clear(self) -> None:
        """What an attempt that failed has left."""
        self._drawn.clear()
        self._there.clear()
        if self._file is not None:
            self._file.clear()
