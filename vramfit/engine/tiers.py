"""The tiers blocks come from: a model's own files, RAM, or a file of the run's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from vramfit.engine.blocks import Layout
from vramfit.engine.mapped import MappedFile
from vramfit.errors import CheckpointError, OutOfDisk
from vramfit.places import NO_ROOM
from vramfit.positioned import PositionedFile
from vramfit.units import format_bytes


class Source(Protocol):
    """Where a tensor can be read from, converted to the format of the tensor it is read into."""

    def read_into(self, into: Tensor) -> int: ...


class Shelf(Protocol):
    """A tier whose tensors are taken and put back one by one.

    `take` is for reading. What `lend` gives is the tensor where it lies, or a copy where it cannot be had there; it may
    be changed where that was said, and is given back by `put`, or by `done` where it is as it was. `in_memory`: what is
    taken or lent is the tensor itself, and takes no time. `written_bytes` is what wears a drive.
    """

    layouts: Sequence[Layout]
    in_memory: bool

    @property
    def written_bytes(self) -> int: ...

    def take(self, block: int, name: str) -> Tensor: ...

    def lend(self, block: int, name: str, *, changes: bool) -> Tensor: ...

    def done(self, block: int, name: str) -> None: ...

    def put(self, block: int, name: str, tensor: Tensor) -> None: ...


class FilesTier:
    """Frozen blocks in the model's own files: nothing is copied, whatever the model's size.

    `stored` are the layouts of the blocks in the formats of the files.
    """

    def __init__(
        self, layouts: Sequence[Layout], sources: Sequence[Mapping[str, Source]], stored: Sequence[Layout]
    ) -> None:
        self.layouts, self._sources, self.stored = layouts, sources, stored

    def read(self, block: int, into: Tensor) -> int:
        views = self.layouts[block].views(into)
        return sum(self._sources[block][name].read_into(view) for name, view in views.items())

    def read_stored(self, block: int, into: Tensor) -> int:
        views = self.stored[block].views(into)
        return sum(self._sources[block][name].read_into(view) for name, view in views.items())

    def resident(self, block: int) -> Tensor | None:
        return None

    def lies(self, block: int) -> Tensor | None:
        return None

    def present(self, block: int) -> None:
        pass

    def leave(self, block: int) -> None:
        pass


class RamTier:
    """Blocks in RAM, one flat buffer each: pinned where a card copies from them."""

    in_memory = True
    written_bytes = 0

    def __init__(self, layouts: Sequence[Layout], *, pinned: bool) -> None:
        self.layouts = layouts
        self.flats = [torch.empty(layout.nbytes, dtype=torch.uint8, pin_memory=pinned) for layout in layouts]

    def read(self, block: int, into: Tensor) -> int:
        into.copy_(self.flats[block])
        return self.layouts[block].nbytes

    def resident(self, block: int) -> Tensor | None:
        return self.flats[block]

    def lies(self, block: int) -> Tensor | None:
        return self.flats[block]

    def present(self, block: int) -> None:
        pass

    def leave(self, block: int) -> None:
        pass

    def write(self, block: int, flat: Tensor) -> None:
        self.flats[block].copy_(flat)

    def take(self, block: int, name: str) -> Tensor:
        """The tensor itself: what is changed in it is changed here."""
        return self.layouts[block].places[name].view(self.flats[block])

    def lend(self, block: int, name: str, *, changes: bool) -> Tensor:
        return self.take(block, name)

    def done(self, block: int, name: str) -> None:
        pass

    def put(self, block: int, name: str, tensor: Tensor) -> None:
        place = self.take(block, name)
        if place.data_ptr() != tensor.data_ptr():
            place.copy_(tensor)


class DiskTier:
    """Blocks one after another in a file of the run's own, which is made anew: it holds nothing a resume needs.

    Where the system can, tensors are lent as they lie in the file: no byte of them is copied. `leaves`: what was given
    back is no longer in the process's memory, at the price of finding it there again.
    """

    in_memory = False

    def __init__(self, layouts: Sequence[Layout], path: Path, *, leaves: bool = False) -> None:
        self.layouts, self.path, self._leaves = layouts, path, leaves
        self._starts = [0]
        for layout in layouts:
            self._starts.append(self._starts[-1] + layout.nbytes)
        self.written_bytes = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = PositionedFile(path, write=True, vanishes=True)
        try:
            self._file.reserve(self._starts[-1])  # a disk that is too small is known before step 1
        except OSError as error:
            self._file.close()
            raise self._no_room(error) from error
        self._mapped = MappedFile.of(self._file, self._starts[-1])

    def read(self, block: int, into: Tensor) -> int:
        view = into[: self.layouts[block].nbytes].numpy().data
        self._read(block, 0, view)
        return len(view)

    def resident(self, block: int) -> Tensor | None:
        return None

    def lies(self, block: int) -> Tensor | None:
        start = self._starts[block]
        return None if self._mapped is None else self._mapped.part(start, self.layouts[block].nbytes)

    def present(self, block: int) -> None:
        """Raises CheckpointError."""
        self._presented(self._starts[block], self.layouts[block].nbytes, changes=False)

    def leave(self, block: int) -> None:
        if self._mapped is not None and self._leaves:
            self._mapped.leave(self._starts[block], self.layouts[block].nbytes)

    def write(self, block: int, flat: Tensor) -> None:
        """Write a whole block. Raises OutOfDisk, CheckpointError."""
        nbytes = self.layouts[block].nbytes
        self._write(self._starts[block], flat[:nbytes].numpy().data)
        self.written_bytes += nbytes

    def take(self, block: int, name: str) -> Tensor:
        """A copy of one tensor of a block. Raises CheckpointError."""
        place = self.layouts[block].places[name]
        found = torch.empty(place.shape, dtype=place.dtype)
        view = found.view(-1).view(torch.uint8).numpy().data
        self._read(block, place.offset, view)
        return found

    def lend(self, block: int, name: str, *, changes: bool) -> Tensor:
        """Raises CheckpointError, OutOfDisk."""
        if self._mapped is None:
            return self.take(block, name)
        place = self.layouts[block].places[name]
        found = self._presented(self._starts[block] + place.offset, place.nbytes, changes=changes)
        return found.view(place.dtype).view(place.shape)

    def _presented(self, start: int, nbytes: int, *, changes: bool) -> Tensor:
        """Bytes of the file where they lie. Raises CheckpointError, and OutOfDisk where they are to be changed."""
        assert self._mapped is not None
        try:
            return self._mapped.present(start, nbytes, changes=changes)
        except OSError as error:
            # A page that cannot be had is one error, whatever the reason.
            full = self._file.lacks_room(start, nbytes) if changes else None
            if full is not None:
                raise self._no_room(full) from error
            raise self._failed(error) from error

    def done(self, block: int, name: str) -> None:
        if self._mapped is not None and self._leaves:
            place = self.layouts[block].places[name]
            self._mapped.leave(self._starts[block] + place.offset, place.nbytes)

    def _read(self, block: int, offset: int, view: memoryview) -> None:
        try:
            read = self._file.read_into(self._starts[block] + offset, view)
        except OSError as error:
            raise self._failed(error) from error
        if read < len(view):
            raise self._cut_off(block)

    def put(self, block: int, name: str, tensor: Tensor) -> None:
        """Write one tensor of a block, in the format it has here; one that was lent is there. Raises OutOfDisk,
        CheckpointError."""
        place = self.layouts[block].places[name]
        self.written_bytes += place.nbytes
        start = self._starts[block] + place.offset
        if self._mapped is not None and self._mapped.is_at(start, tensor):
            self.done(block, name)
            return
        flat = tensor.detach().to(device="cpu", dtype=place.dtype).contiguous().view(-1).view(torch.uint8)
        self._write(start, flat.numpy().data)

    def _write(self, start: int, view: memoryview) -> None:
        try:
            self._file.write_from(start, view)
        except OSError as error:
            raise (self._no_room(error) if error.errno in NO_ROOM else self._failed(error, "written")) from error

    def _cut_off(self, block: int) -> CheckpointError:
        return CheckpointError(
            f"{self.path} has been cut off: block {block} is no longer whole",
            "Resume the run: the file is made anew from its last checkpoint.",
        )

    def _failed(self, error: OSError, done: str = "read") -> CheckpointError:
        return CheckpointError(
            f"{self.path} cannot be {done} ({error.strerror or error})", "Check the drive, then resume the run."
        )

    def _no_room(self, error: OSError) -> OutOfDisk:
        return OutOfDisk(
            f"{self.path.parent} has no room for {format_bytes(self._starts[-1])} of blocks ({error.strerror})",
            "Free some space, or put the data folder on a larger disk.",
        )


class FrozenBeforeTrained:
    """Two tiers as one: blocks before `turn` are frozen and stay in the model's own files, the others train in a tier
    that can be written, which is what `take` and `put` mean."""

    def __init__(self, frozen: FilesTier, trained: DiskTier, *, turn: int) -> None:
        self.layouts = frozen.layouts
        self._frozen, self._trained, self._turn = frozen, trained, turn
        self.in_memory = trained.in_memory

    @property
    def written_bytes(self) -> int:
        return self._trained.written_bytes

    def read(self, block: int, into: Tensor) -> int:
        return self._of(block).read(block, into)

    def resident(self, block: int) -> Tensor | None:
        return self._of(block).resident(block)

    def lies(self, block: int) -> Tensor | None:
        return self._of(block).lies(block)

    def present(self, block: int) -> None:
        self._of(block).present(block)

    def leave(self, block: int) -> None:
        self._of(block).leave(block)

    def take(self, block: int, name: str) -> Tensor:
        return self._trained.take(block, name)

    def lend(self, block: int, name: str, *, changes: bool) -> Tensor:
        return self._trained.lend(block, name, changes=changes)

    def done(self, block: int, name: str) -> None:
        self._trained.done(block, name)

    def put(self, block: int, name: str, tensor: Tensor) -> None:
        self._trained.put(block, name, tensor)

    def _of(self, block: int) -> FilesTier | DiskTier:
        return self._frozen if block < self._turn else self._trained
