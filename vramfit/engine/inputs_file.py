"""Inputs of blocks in a file of the run's own: written behind the computation, read ahead of it.

One thread writes and reads. An input is written while its block computes with it, and the next one is taken once that
is done, so that no more than one is held for it; on the way back the next one to be asked for is read while a block
computes. Nothing in the file outlives its step: it is written over from its start in each, and gone with the process.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from vramfit.engine.accelerators import backend_of
from vramfit.engine.waits import Gaps, marks_on
from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.places import NO_ROOM
from vramfit.positioned import PositionedFile
from vramfit.units import format_bytes

Key = tuple[int, ...]
"""(block, micro-batch) of an input; a third number for what else of a block waits."""


class _Place(NamedTuple):
    """Where in the file a tensor is."""

    start: int
    shape: torch.Size
    dtype: torch.dtype


class InputsFile:
    """Tensors of `device` by key, put in the order in which a step passes the blocks, and asked for from the last block
    to the first. `written_bytes` is what wears the drive, `waited_seconds` when nothing was computed for it."""

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self.device = path, device
        self.written_bytes, self.waited_seconds = 0, 0.0
        self.gaps = Gaps(self._has_waited, mark=marks_on(device))
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = PositionedFile(path, write=True, vanishes=True)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="vramfit-inputs")
        self._places: dict[Key, _Place] = {}
        self._end = self._reserved = 0
        self._being_written: Future[None] | None = None
        self._coming: tuple[Key, Future[Tensor]] | None = None
        self._after: dict[Key, Key] = {}

    def reserve(self, nbytes: int) -> None:
        """Room for all of a step's inputs, before it begins. Raises OutOfDisk."""
        if nbytes <= self._reserved:
            return
        try:
            self._file.reserve(nbytes)
        except OSError as error:
            raise self._no_room(nbytes, error) from error
        self._reserved = nbytes

    def put(self, key: Key, hidden: Tensor) -> None:
        """Keep `hidden`, which the caller does not change. Raises OutOfDisk, CheckpointError for the one before."""
        self._be_written()
        place = _Place(self._end, hidden.shape, hidden.dtype)
        self._end += hidden.nbytes
        self._places[key] = place
        self._after.clear()
        self._being_written = self._worker.submit(self._write, place, *self._in_ram(hidden.detach()))

    def get(self, key: Key) -> Tensor:
        """What was put, on the device. Raises OutOfDisk, CheckpointError."""
        self._be_written()
        if self._coming is not None and self._coming[0] == key:
            coming, self._coming = self._coming[1], None
        else:
            coming = self._worker.submit(self._read, self._places[key])
        with self.gaps.around():
            found = coming.result()
        self._read_ahead(key)
        return found.to(self.device, non_blocking=True)

    def forget(self, key: Key) -> None:
        """It is not asked for again."""
        del self._places[key]

    def clear(self) -> None:
        """What an attempt that failed has left; how its writes ended is of no interest any more."""
        for under_way in (self._being_written, None if self._coming is None else self._coming[1]):
            if under_way is not None:
                under_way.exception()
        self._being_written = self._coming = None
        self._places.clear()
        self._after.clear()
        self._end = 0

    # --- inside ------------------------------------------------------------------------------------------------------

    def _be_written(self) -> None:
        """Wait for the last one put."""
        if self._being_written is not None:
            with self.gaps.around():
                last, self._being_written = self._being_written, None
                last.result()

    def _in_ram(self, hidden: Tensor) -> tuple[Tensor, torch.Event | None]:
        """(the tensor in RAM, when it will have come there; None: it has)."""
        backend = backend_of(self.device)
        if self.device.type == "cpu":
            return hidden.contiguous(), None
        copy = torch.empty(hidden.shape, dtype=hidden.dtype, pin_memory=backend.pinned)
        copy.copy_(hidden, non_blocking=backend.pinned)
        return copy, torch.accelerator.current_stream(self.device).record_event() if backend.streams else None

    def _read_ahead(self, key: Key) -> None:
        """Begin to read what is asked for after `key`, unless something is on its way."""
        if not self._after:
            ordered = sorted(self._places, key=lambda each: (-each[0], *each[1:]))
            self._after = dict(itertools.pairwise(ordered))
        ahead = self._after.get(key)
        if self._coming is None and ahead in self._places:
            self._coming = ahead, self._worker.submit(self._read, self._places[ahead])

    def _write(self, place: _Place, tensor: Tensor, arrived: torch.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        with self._told("written"):
            self._file.write_from(place.start, _bytes_of(tensor))
        self.written_bytes += tensor.nbytes

    def _read(self, place: _Place) -> Tensor:
        pinned = self.device.type != "cpu" and backend_of(self.device).pinned
        found = torch.empty(place.shape, dtype=place.dtype, pin_memory=pinned)
        with self._told("read"):
            there = self._file.read_into(place.start, _bytes_of(found))
        if there < found.nbytes:
            raise CheckpointError(f"{self.path} has been cut off", "Resume the run: the file is made anew.")
        return found

    @contextlib.contextmanager
    def _told(self, done: str) -> Iterator[None]:
        """What the drive refuses, as an error that says what to do."""
        try:
            yield
        except OSError as error:
            if error.errno in NO_ROOM:
                raise self._no_room(max(self._reserved, self._end), error) from error
            raise CheckpointError(
                f"{self.path} cannot be {done} ({error.strerror or error})", "Check the drive, then resume the run."
            ) from error

    def _no_room(self, nbytes: int, error: OSError) -> OutOfDisk:
        return OutOfDisk(
            f"{self.path.parent} has no room for {format_bytes(nbytes)} of blocks' inputs ({error.strerror})",
            "Free some space, put the data folder on a larger disk, or take fewer sequences per step.",
        )

    def _has_waited(self, began: float, ended: float) -> None:
        self.waited_seconds += ended - began


def _bytes_of(tensor: Tensor) -> memoryview:
    return tensor.view(-1).view(torch.uint8).numpy().data
