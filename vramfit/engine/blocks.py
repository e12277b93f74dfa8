"""Blocks that visit the device: where their bytes live, the places they come to, and the traffic between.

A block's tensors lie in one flat buffer, in the order of its layout. A few slots on the device receive blocks in turn
while the block before is computed, several small ones together; some blocks may stay for good. What is fetched next is
known: forward goes up, backward comes down, and the next step goes up again. So the slot given up is always the one
whose block is needed last, and the blocks at the turning points need not be fetched twice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Final, Literal, Protocol

import torch
from torch import Tensor

from vramfit.engine.accelerators import backend_of
from vramfit.engine.waits import Gaps, marks_on
from vramfit.planning.slots import groups_of

ALIGNMENT: Final = 256
"""Bytes a tensor of a block begins at a multiple of: what copies and kernels of cards like."""

Direction = Literal["up", "down"]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where one tensor lies in a block's flat buffer."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int

    @property
    def nbytes(self) -> int:
        return int(torch.Size(self.shape).numel()) * self.dtype.itemsize

    def view(self, flat: Tensor) -> Tensor:
        return flat[self.offset : self.offset + self.nbytes].view(self.dtype).view(self.shape)


class Layout:
    """How the tensors of a block lie one after another in its flat buffer of `nbytes` bytes."""

    def __init__(self, tensors: Mapping[str, tuple[tuple[int, ...], torch.dtype]]) -> None:
        self.places: dict[str, Place] = {}
        end = 0
        for name, (shape, dtype) in tensors.items():
            place = Place(name=name, shape=tuple(shape), dtype=dtype, offset=end)
            self.places[name] = place
            end += -(-place.nbytes // ALIGNMENT) * ALIGNMENT
        self.nbytes = end

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """The tensors in `flat`, a uint8 buffer of at least `nbytes`."""
        return {name: place.view(flat) for name, place in self.places.items()}


class Tier(Protocol):
    """Where blocks live when they are not on the device."""

    layouts: Sequence[Layout]

    def read(self, block: int, into: Tensor) -> int:
        """Copy a block into a flat CPU buffer. Returns the bytes read. May raise ModelError."""

    def resident(self, block: int) -> Tensor | None:
        """The block's flat buffer where it lies in RAM, ready to be copied from; None where it has to be read."""

    def lies(self, block: int) -> Tensor | None:
        """The block's flat buffer where it lies, if the processor can compute with it there once it is `present`."""

    def present(self, block: int) -> None:
        """Have a block that lies in reach in memory. May raise CheckpointError."""

    def leave(self, block: int) -> None:
        """It is not computed with any more."""


class StoredTier(Tier, Protocol):
    """A tier that keeps its numbers in fewer bytes than the device computes with."""

    stored: Sequence[Layout]

    def read_stored(self, block: int, into: Tensor) -> int:
        """Copy a block into a flat CPU buffer as it is stored, by `stored`. Returns the bytes read."""


@dataclass(kw_only=True)
class Traffic:
    """What came to the device since the run began: bytes, blocks, and seconds the computation waited for them."""

    moved_bytes: int = 0
    visits: int = 0
    waited_seconds: float = 0.0
    read_seconds: float = 0.0

    def has_waited(self, began: float, ended: float) -> None:
        self.waited_seconds += ended - began


class _Slot:
    """A buffer on the device, the blocks that visit it and the parts of it they are in, and when it may be used or
    overwritten: a new one once the device has passed `left`, because what it was given before may be in that memory.
    Blocks that are computed with where they lie visit it in name only: their parts are elsewhere."""

    def __init__(self, nbytes: int, device: torch.device, left: torch.Event | None) -> None:
        self.flat = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.blocks: tuple[int, ...] = ()
        self.parts: Sequence[Tensor] = ()
        self.arriving: Future[float] | None = None
        self.arrived: torch.Event | None = None
        self.left = left

    def clear(self) -> None:
        """What is in it is of no use."""
        self.blocks, self.parts = (), ()


@dataclass(kw_only=True)
class _Staging:
    """A buffer in RAM that blocks are read into on their way to a card, and when what was last in it has left."""

    flat: Tensor
    sent: torch.Event | None = None


class BlockStream:
    """Brings blocks to the device, ahead of need. For one thread; another one fetches.

    `resident` blocks are brought once and stay; what has changed of one comes ahead of need, too. `slots` buffers of
    the largest other block's size take the rest in turns, or as many of them together as have `together` bytes; with
    fewer than two nothing is fetched ahead. The way down turns at block `turn`: those before it are only passed on the
    way up.

    Where the device is the processor and a tier has a block in its reach, nothing is copied: "brought" then means that
    the block's bytes are in memory. It is counted like any other.
    """

    def __init__(
        self,
        tier: Tier,
        device: torch.device,
        *,
        resident: Collection[int] = (),
        slots: int = 2,
        turn: int = 0,
        together: int = 0,
        traffic: Traffic | None = None,
    ) -> None:
        self.tier, self.device, self.turn, self._together = tier, device, turn, together
        self.traffic = traffic or Traffic()
        self._count = len(tier.layouts)
        self._resident: dict[int, Tensor] = {}
        self._stale: dict[int, torch.Event | None] = {}
        self._renewing: dict[int, Future[torch.Event | None]] = {}
        self._fetcher = ThreadPoolExecutor(max_workers=1, thread_name_prefix="fetch")
        self._copies = torch.Stream(device=device) if backend_of(device).streams else None
        self.gaps = Gaps(self.traffic.has_waited, mark=marks_on(device))
        for block in sorted(resident):
            self._resident[block] = self._brought(block)
        self._wanted_slots = slots
        self._slots: list[_Slot] = []
        self._group_of: dict[int, tuple[int, ...]] = {}
        self._staging: list[_Staging] = []
        self._current: _Slot | None = None
        self._make_slots()

    @property
    def resident(self) -> frozenset[int]:
        return frozenset(self._resident)

    @property
    def places(self) -> dict[int, int]:
        """What the stream takes of the device: buffers by where they begin, with their bytes."""
        flats = [*self._resident.values(), *(slot.flat for slot in self._slots)]
        found = {flat.untyped_storage().data_ptr(): flat.nbytes for flat in flats if flat.nbytes}
        for block, part in (each for slot in self._slots for each in zip(slot.blocks, slot.parts, strict=True)):
            if self._in_place(block):  # parts of one file begin where the file does
                start = part.untyped_storage().data_ptr()
                found[start] = found.get(start, 0) + part.nbytes
        return found

    def bring(self, block: int, direction: Direction) -> dict[str, Tensor]:
        """The tensors of `block` on the device, ready for the current stream; the next one is fetched meanwhile.

        They may be used until the next call.
        """
        self._leave()
        if block in self._resident:
            self._await_renewed(block)
            self._renew_ahead(block)
            self._fetch_ahead(block, direction)
            return self.tier.layouts[block].views(self._resident[block])
        slot = self._slot_of(block) or self._fetch(block, direction)
        self._await(slot)
        self._current = slot
        self._renew_ahead(block)
        self._fetch_ahead(slot.blocks[-1 if direction == "up" else 0], direction)
        return self.tier.layouts[block].views(slot.parts[slot.blocks.index(block)])

    def forget(self, block: int) -> None:
        """The tier's copy has changed: what is on the device of it is old."""
        if block in self._resident and self._in_ram(block) is None:
            self._stale[block] = self._now()
            if not self._renewing:
                self._renew_ahead(-1)  # the next step needs it first
        slot = self._slot_of(block)
        if slot is not None:
            self._await(slot)
            slot.clear()

    @property
    def staying_bytes(self) -> int:
        """What the blocks that stay take of the device."""
        return sum(flat.nbytes for flat in self._resident.values())

    def stay(self, blocks: Collection[int]) -> None:
        """Change which blocks stay on the device, between two steps."""
        for slot in self._slots:
            self._await(slot)
        for block in list(self._renewing):
            self._await_renewed(block)
        for block in [block for block in self._resident if block not in blocks]:
            del self._resident[block]
            self._stale.pop(block, None)
        for block in sorted(set(blocks) - self._resident.keys()):
            self._resident[block] = self._brought(block)
        self._make_slots()

    def _make_slots(self) -> None:
        """Room for the largest of the groups that visit; what there is stays, with what is in it, where it will do."""
        visiting = {block: self._nbytes(block) for block in range(self._count) if block not in self._resident}
        groups = groups_of(visiting, self._together, turn=self.turn)
        self._group_of = {block: group for group in groups for block in group}
        sizes = [sum(self._nbytes(block) for block in group if not self._in_place(block)) for group in groups]
        count, nbytes = min(self._wanted_slots, len(groups)), max(sizes, default=0)
        if len(self._slots) == count and all(slot.flat.nbytes >= nbytes for slot in self._slots):
            return
        self._current = None
        self._slots = []  # their memory first
        self._slots = [_Slot(nbytes, self.device, self._now()) for _ in range(count)]
        self._staging = self._staging_buffers(nbytes)

    def close(self) -> None:
        """Wait for what is under way and end the fetching thread."""
        self._fetcher.shutdown(wait=True, cancel_futures=True)

    # --- coming and going --------------------------------------------------------------------------------------------

    def _nbytes(self, block: int) -> int:
        return self.tier.layouts[block].nbytes

    def _in_place(self, block: int) -> bool:
        return self.device.type == "cpu" and self.tier.lies(block) is not None

    def _slot_of(self, block: int) -> _Slot | None:
        return next((slot for slot in self._slots if block in slot.blocks), None)

    def _fetch_ahead(self, block: int, direction: Direction) -> None:
        """Begin to bring the next block that does not stay, unless every slot holds something needed sooner."""
        ahead = self._ahead_of(block, direction)
        if ahead is not None and self._slot_of(ahead) is None and len(self._slots) > 1:
            self._fetch(ahead, direction)

    def _ahead_of(self, block: int, direction: Direction) -> int | None:
        """The next block that does not stay; None where the way turns, and what comes next is there. It is not where
        the way down turns before the first block: the next step begins with that one."""
        step, lowest = (1, 0) if direction == "up" else (-1, self.turn)
        ahead = block + step
        while ahead in self._resident and ahead >= lowest:
            ahead += step
        if ahead >= lowest:
            return ahead if ahead < self._count else None
        return next((each for each in range(self.turn) if each not in self._resident), None)

    def _fetch(self, block: int, direction: Direction) -> _Slot:
        """With the blocks that come together with it, into the slot whose blocks are needed last of all: the farthest
        behind. Never into the one computed with."""
        free = [slot for slot in self._slots if not slot.blocks]
        used = [slot for slot in self._slots if slot.blocks and slot is not self._current]
        farthest = min if direction == "up" else max
        slot = free[0] if free else farthest(used, key=lambda slot: slot.blocks[0])
        self._await(slot)
        for left in filter(self._in_place, slot.blocks):
            self.tier.leave(left)
        slot.blocks = self._group_of[block]
        slot.parts = self._parts_in(slot.flat, slot.blocks)
        self.traffic.visits += len(slot.blocks)
        self.traffic.moved_bytes += sum(map(self._nbytes, slot.blocks))
        slot.arriving = self._fetcher.submit(self._fill, slot, slot.blocks)
        return slot

    def _fill(self, slot: _Slot, blocks: tuple[int, ...]) -> float:
        """On the fetching thread: the blocks' bytes into the slot. Returns the seconds it took."""
        began = time.perf_counter()
        slot.arrived = self._send(blocks, slot.parts, slot.left)
        return time.perf_counter() - began

    def _send(self, blocks: Sequence[int], parts: Sequence[Tensor], left: torch.Event | None) -> torch.Event | None:
        """On the fetching thread: the blocks' bytes into `parts`, once the device has passed `left`. Returns when they
        will have come; None: they have."""
        if self.device.type == "cpu":
            for block, part in zip(blocks, parts, strict=True):
                if self._in_place(block) and block not in self._resident:
                    self.tier.present(block)
                else:
                    self._read(block, part)
            return None
        sources, staging = self._sources(blocks)
        if self._copies is None:
            for part, source in zip(parts, sources, strict=True):
                part.copy_(source)
            return None
        with self._copies:
            if left is not None:
                self._copies.wait_event(left)
            for part, source in zip(parts, sources, strict=True):
                part.copy_(source, non_blocking=True)
            arrived = self._copies.record_event()
        if staging is not None:
            staging.sent = arrived
        return arrived

    def _parts_in(self, flat: Tensor, blocks: tuple[int, ...]) -> list[Tensor]:
        """Where each of these blocks is when it has come: where it lies, else one after another in `flat`."""
        copied = [block for block in blocks if not self._in_place(block)]
        found = dict(zip(copied, self._parts_of(flat, copied), strict=True))
        lying = {block: self.tier.lies(block) for block in blocks if block not in found}
        found |= {block: part for block, part in lying.items() if part is not None}
        return [found[block] for block in blocks]

    def _sources(self, blocks: Sequence[int]) -> tuple[Sequence[Tensor], _Staging | None]:
        """(the blocks in RAM, the buffer they were read into where they do not lie there)."""
        lying = [each for each in map(self.tier.resident, blocks) if each is not None]
        if len(lying) == len(blocks):
            return [flat[: self._nbytes(block)] for block, flat in zip(blocks, lying, strict=True)], None
        staging = self._next_staging(sum(map(self._nbytes, blocks)))
        found = self._parts_of(staging.flat, blocks)
        for block, part in zip(blocks, found, strict=True):
            self._read(block, part)
        return found, staging

    def _next_staging(self, nbytes: int) -> _Staging:
        """Two buffers in turn: while one is on its way to the device the next blocks are read into the other."""
        if not self._staging:  # nothing visits, and all that stay are read again
            self._staging = self._staging_buffers(nbytes)
        self._staging.reverse()
        staging = self._staging[0]
        if staging.sent is not None:
            staging.sent.synchronize()
        if staging.flat.nbytes < nbytes:  # a block that stays may be larger than all that visit
            staging.flat = torch.empty(nbytes, dtype=torch.uint8, pin_memory=backend_of(self.device).pinned)
        return staging

    def _parts_of(self, flat: Tensor, blocks: Sequence[int]) -> list[Tensor]:
        """Where each of these blocks lies, one after another."""
        ends = list(accumulate(map(self._nbytes, blocks)))
        return [flat[end - self._nbytes(block) : end] for block, end in zip(blocks, ends, strict=True)]

    def _read(self, block: int, into: Tensor) -> None:
        source = self.tier.resident(block)
        if source is not None:
            into.copy_(source[: into.numel()])
        else:
            self.tier.read(block, into)

    def _await(self, slot: _Slot) -> None:
        if slot.arriving is None:
            return
        arriving, slot.arriving = slot.arriving, None
        with self.gaps.around():
            try:
                self.traffic.read_seconds += arriving.result()
            except BaseException:
                slot.clear()
                raise
            if slot.arrived is not None:
                torch.accelerator.current_stream(self.device).wait_event(slot.arrived)

    def _renew_ahead(self, block: int) -> None:
        """Begin to bring what has changed of the block that stays and is needed next: one for each block computed with,
        because visitors would wait for all of them if they were asked for at once."""
        if self._stale:
            self._renew(min(self._stale, key=lambda each: (each <= block, each)))

    def _renew(self, block: int) -> None:
        left = self._stale.pop(block)
        self.traffic.visits += 1
        self.traffic.moved_bytes += self._nbytes(block)
        self._renewing[block] = self._fetcher.submit(self._send, (block,), (self._resident[block],), left)

    def _await_renewed(self, block: int) -> None:
        """What has changed of a block that stays has come. Where it cannot, it is old whoever asks again."""
        if block in self._stale:
            self._renew(block)
        if block not in self._renewing:
            return
        with self.gaps.around():
            arrived = self._renewing[block].result()
            if arrived is not None:
                torch.accelerator.current_stream(self.device).wait_event(arrived)
        del self._renewing[block]

    def _leave(self) -> None:
        """What is computed with the block that was brought last must be done before its slot is overwritten."""
        if self._current is not None:
            self._current.left = self._now()
        self._current = None

    def _now(self) -> torch.Event | None:
        """When the device has done what it was given so far; None where nothing is copied beside that."""
        return None if self._copies is None else torch.accelerator.current_stream(self.device).record_event()

    def _brought(self, block: int) -> Tensor:
        self.traffic.visits += 1
        self.traffic.moved_bytes += self.tier.layouts[block].nbytes
        if self.device.type != "cpu":
            source = self.tier.resident(block)
            return (self._whole(block) if source is None else source).to(self.device, copy=True)
        there = self._in_ram(block)
        return self._whole(block) if there is None else there

    def _in_ram(self, block: int) -> Tensor | None:
        """A block that stays there anyway, where the processor computes with it."""
        return self.tier.resident(block) if self._in_place(block) else None

    def _whole(self, block: int) -> Tensor:
        flat = torch.empty(self.tier.layouts[block].nbytes, dtype=torch.uint8)
        self._read(block, flat)
        return flat

    def _staging_buffers(self, nbytes: int) -> list[_Staging]:
        if self.device.type == "cpu" or all(self.tier.resident(block) is not None for block in range(self._count)):
            return []
        pinned = backend_of(self.device).pinned
        return [_Staging(flat=torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)) for _ in range(2)]


class WideningStream(BlockStream):
    """For a device that is the processor and computes with more bytes than are stored (fp32 from bf16).

    The next block is read as it is stored, beside the one slot it is widened into when its turn comes: a quarter less
    memory than two slots, for a pass over the block's bytes at each visit.
    """

    def __init__(
        self, tier: StoredTier, device: torch.device, *, resident: Collection[int] = (), turn: int = 0
    ) -> None:
        super().__init__(tier, device, resident=resident, slots=1, turn=turn)
        self._stored = tier
        self._narrow = self._narrow_place()
        self._narrow_block: int | None = None
        self._coming: Future[float] | None = None

    @property
    def places(self) -> dict[int, int]:
        return super().places | {self._narrow.data_ptr(): self._narrow.nbytes}

    def stay(self, blocks: Collection[int]) -> None:
        self._arrive()
        super().stay(blocks)
        narrow = self._narrow_place()
        if narrow.nbytes != self._narrow.nbytes:
            self._narrow, self._narrow_block = narrow, None

    def _narrow_place(self) -> Tensor:
        visiting = [layout.nbytes for block, layout in enumerate(self._stored.stored) if block not in self._resident]
        return torch.empty(max(visiting, default=0), dtype=torch.uint8)

    def forget(self, block: int) -> None:
        super().forget(block)
        if self._narrow_block == block:
            self._arrive()
            self._narrow_block = None

    def _fetch(self, block: int, direction: Direction) -> _Slot:
        slot = self._slots[0]
        if self._narrow_block != block:
            self._read_ahead(block)
        self._arrive()
        narrow, wide = self._stored.stored[block].views(self._narrow), self.tier.layouts[block].views(slot.flat)
        for name, tensor in wide.items():
            tensor.copy_(narrow[name])
        slot.blocks, slot.parts, self._narrow_block = (block,), (slot.flat,), None
        return slot

    def _fetch_ahead(self, block: int, direction: Direction) -> None:
        ahead = self._ahead_of(block, direction)
        if ahead is not None and self._narrow_block != ahead and self._slots and ahead not in self._slots[0].blocks:
            self._read_ahead(ahead)

    def _read_ahead(self, block: int) -> None:
        self._arrive()
        self._narrow_block = block
        self.traffic.visits += 1
        self.traffic.moved_bytes += self._stored.stored[block].nbytes
        self._coming = self._fetcher.submit(self._read_narrow, block)

    def _read_narrow(self, block: int) -> float:
        began = time.perf_counter()
        self._stored.read_stored(block, self._narrow)
        return time.perf_counter() - began

    def _arrive(self) -> None:
        if self._coming is None:
            return
        coming, self._coming = self._coming, None
        with self.gaps.around():
            try:
                self.traffic.read_seconds += coming.result()
            except BaseException:
                self._narrow_block = None
                raise
