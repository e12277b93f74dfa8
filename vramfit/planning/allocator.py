"""PyTorch's caching allocator, simulated: how much a card must have for a sequence of tensors.

Tensors alone never tell whether a run fits. The allocator rounds sizes, takes memory from the driver in segments, cuts
them up, and can give back only a segment of which nothing is in use; what lies free between two tensors in use serves
nobody who asks for more. Rules and constants are those of `c10/core/AllocatorConfig.h` and of the native CUDA backend
of torch 2.11, with its default settings or with `expandable_segments:True`:

    size            rounded up to 512 bytes
    pools           small (up to 1 MiB) and large, one of each per stream: what one stream frees no other can use
    segment         2 MiB in the small pool; 20 MiB for requests under 10 MiB, else the request rounded up to 2 MiB
    fit             the smallest free block that is large enough, of equal ones that at the lowest address
    split           when 512 bytes (small pool) or more than 1 MiB (large pool) remain
    free            merges with free neighbours of the segment
    no room         wholly free segments are returned to the driver, then one more try, then out of memory

Expandable segments are one address range per pool and stream, backed page by page: what lies free in whole pages can be
returned whoever uses the rest.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import Final, NamedTuple

from vramfit.units import MIB, format_bytes

BLOCK_BYTES: Final = 512
SMALL_REQUEST_BYTES: Final = MIB
SMALL_SEGMENT_BYTES: Final = 2 * MIB
LARGE_SEGMENT_BYTES: Final = 20 * MIB
OWN_SEGMENT_BYTES: Final = 10 * MIB
ROUND_SEGMENT_BYTES: Final = 2 * MIB
_ADDRESS_RANGE: Final = LARGE_SEGMENT_BYTES << 26  # whole pages of both sizes


class OutOfMemory(Exception):
    """The simulated card has no room: `requested` bytes beside `allocated` of `reserved` under a `cap`."""

    def __init__(self, *, requested: int, allocated: int, reserved: int, cap: float) -> None:
        self.requested, self.allocated, self.reserved, self.cap = requested, allocated, reserved, cap
        super().__init__(
            f"{format_bytes(requested)} requested, {format_bytes(allocated)} allocated, "
            f"{format_bytes(reserved)} reserved, cap {format_bytes(cap)}"
        )


class Event(NamedTuple):
    """A tensor is made (`size` bytes, on a stream) or freed (`size` 0). `tensor` names it while it lives."""

    tensor: int
    size: int
    stream: int = 0


class Block:
    """A piece of a segment, in use or free; `before` and `after` are its neighbours in the segment."""

    __slots__ = ("address", "after", "before", "mapped", "pool", "size", "used")

    def __init__(self, address: int, size: int, pool: _Pool) -> None:
        self.address, self.size, self.pool = address, size, pool
        self.before: Block | None = None
        self.after: Block | None = None
        self.used, self.mapped = False, True


class _Pool:
    """The free blocks of one stream and kind, smallest first; the unbacked ones of an expandable segment by address."""

    __slots__ = ("free", "page", "small", "split_above", "unmapped")

    def __init__(self, *, small: bool, expandable: bool) -> None:
        self.small = small
        self.page = SMALL_SEGMENT_BYTES if small else LARGE_SEGMENT_BYTES
        self.split_above = BLOCK_BYTES - 1 if small or expandable else SMALL_REQUEST_BYTES
        self.free: list[tuple[int, int, Block]] = []
        self.unmapped: list[tuple[int, Block]] = []

    def add(self, block: Block) -> None:
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]


class Allocator:
    """One card with `cap` bytes for tensors. Figures in bytes: `allocated`, `reserved` and the peaks of both.

    `allocated` counts blocks in use at the size they have, as `torch.cuda.memory_allocated` does.
    """

    def __init__(self, *, cap: float = math.inf, expandable: bool = False) -> None:
        self.cap, self.expandable = cap, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._pools: dict[tuple[bool, int], _Pool] = {}
        self._next_address = 0

    @property
    def fragmentation(self) -> int:
        """Bytes reserved and not in use."""
        return self.reserved - self.allocated

    def allocate(self, size: int, stream: int = 0) -> Block:
        """A block of at least `size` (> 0) bytes. Raises OutOfMemory."""
        size = -(-size // BLOCK_BYTES) * BLOCK_BYTES
        pool = self._pool(size, stream)
        at = bisect_left(pool.free, (size,))
        block = pool.free.pop(at)[2] if at < len(pool.free) else self._new(size, pool)
        remaining = block.size - size
        if remaining > pool.split_above:
            self._split(block, size)
        block.used = True
        self.allocated += block.size
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Give `block` back to its pool, merged with free neighbours."""
        block.used = False
        self.allocated -= block.size
        block.pool.add(self._merged(block))

    def release(self) -> None:
        """Return to the driver what can be returned, as `torch.cuda.empty_cache` does."""
        for pool in self._pools.values():
            if self.expandable:
                self._unmap_free(pool)
                continue
            kept = [entry for entry in pool.free if entry[2].before or entry[2].after]
            self.reserved -= sum(size for size, _, _ in pool.free) - sum(size for size, _, _ in kept)
            pool.free = kept

    def _pool(self, size: int, stream: int) -> _Pool:
        key = size <= SMALL_REQUEST_BYTES, stream
        pool = self._pools.get(key)
        if pool is None:
            pool = self._pools[key] = _Pool(small=key[0], expandable=self.expandable)
        return pool

    def _new(self, size: int, pool: _Pool) -> Block:
        """A free block from the driver that is in no list."""
        block = self._from_driver(size, pool)
        if block is None:
            self.release()
            block = self._from_driver(size, pool)
        if block is None:
            raise OutOfMemory(requested=size, allocated=self.allocated, reserved=self.reserved, cap=self.cap)
        return block

    def _from_driver(self, size: int, pool: _Pool) -> Block | None:
        if self.expandable:
            return self._expand(size, pool)
        segment = segment_bytes(size)
        if not self._reserve(segment):
            return None
        block = Block(self._next_address, segment, pool)
        self._next_address += segment
        return block

    def _reserve(self, size: int) -> bool:
        if self.reserved + size > self.cap:
            return False
        self.reserved += size
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _split(self, block: Block, size: int) -> Block:
        """Cut `block` behind `size` bytes; the rest, free or unmapped as `block` was, joins its list."""
        rest = Block(block.address + size, block.size - size, block.pool)
        rest.before, rest.after, rest.mapped = block, block.after, block.mapped
        if block.after is not None:
            block.after.before = rest
        block.after, block.size = rest, size
        if rest.mapped:
            block.pool.add(rest)
        else:
            insort(block.pool.unmapped, (rest.address, rest))
        return rest

    def _merged(self, block: Block) -> Block:
        """`block` with those neighbours that are as free and as mapped as it is, which leave their list."""
        for other in (block.before, block.after):
            if other is None or other.used or other.mapped != block.mapped:
                continue
            if other.mapped:
                other.pool.remove(other)
            else:
                other.pool.unmapped.remove((other.address, other))
            block.size += other.size
            if other is block.before:
                block.address, block.before = other.address, other.before
                if block.before is not None:
                    block.before.after = block
            else:
                block.after = other.after
                if block.after is not None:
                    block.after.before = block
        return block

    # --- expandable segments -----------------------------------------------------------------------------------------

    def _expand(self, size: int, pool: _Pool) -> Block | None:
        """Back as many pages behind the first free block with room behind it as `size` needs. None: over the cap."""
        if not pool.unmapped:
            space = Block(self._next_address, _ADDRESS_RANGE, pool)
            space.mapped = False
            self._next_address += _ADDRESS_RANGE
            pool.unmapped.append((space.address, space))
        block = self._room(size, pool)
        while not block.mapped or block.size < size:
            gap = block if not block.mapped else block.after
            assert gap is not None
            have = block.size if block.mapped else 0
            pages = min(gap.size, -(-(size - have) // pool.page) * pool.page)
            if not self._reserve(pages):
                return None
            pool.unmapped.remove((gap.address, gap))
            if gap.size > pages:
                self._split(gap, pages)
            gap.mapped = True
            block = self._merged(gap)
            pool.add(block)
        pool.remove(block)
        return block

    @staticmethod
    def _room(size: int, pool: _Pool) -> Block:
        """The first unbacked block, or the free one before it, behind which `size` bytes are free or unbacked."""
        for _, gap in pool.unmapped:
            first = gap.before if gap.before is not None and not gap.before.used else gap
            block: Block | None = first
            room = 0
            while block is not None and not block.used and room < size:
                room, block = room + block.size, block.after
            if room >= size:
                return first
        raise AssertionError("an address range is larger than any card")

    def _unmap_free(self, pool: _Pool) -> None:
        """Return the whole pages of free blocks."""
        for _, _, block in tuple(pool.free):
            begin = -(-block.address // pool.page) * pool.page
            pages = (block.address + block.size) // pool.page * pool.page - begin
            if pages <= 0:
                continue
            pool.remove(block)
            if begin > block.address:
                head, block = block, self._split(block, begin - block.address)
                pool.add(head)
                pool.remove(block)
            if block.size > pages:
                self._split(block, pages)
            block.mapped = False
            self.reserved -= pages
            block = self._merged(block)
            insort(pool.unmapped, (block.address, block))


def segment_bytes(size: int) -> int:
    """What is taken from the driver for a request of `size` rounded bytes."""
    if size <= SMALL_REQUEST_BYTES:
        return SMALL_SEGMENT_BYTES
    if size < OWN_SEGMENT_BYTES:
        return LARGE_SEGMENT_BYTES
    return -(-size // ROUND_SEGMENT_BYTES) * ROUND_SEGMENT_BYTES


def live_peak(events: Iterable[Event]) -> int:
    """The most bytes of tensors alive at once, as they were asked for: no rounding, no segments."""
    sizes: dict[int, int] = {}
    alive = peak = 0
    for tensor, size, _ in events:
        if size:
            sizes[tensor] = size
            alive += size
            peak = max(peak, alive)
        else:
            alive -= sizes.pop(tensor)
    return peak


def replay(events: Iterable[Event], *, cap: float = math.inf, expandable: bool = False) -> Allocator:
    """The allocator after `events`, with its peaks. Raises OutOfMemory when they do not fit into `cap` bytes."""
    allocator = Allocator(cap=cap, expandable=expandable)
    allocate, free = allocator.allocate, allocator.free
    live: dict[int, Block] = {}
    for tensor, size, stream in events:
        if size:
            live[tensor] = allocate(size, stream)
        else:
            free(live.pop(tensor))
    return allocator


def completes(events: Iterable[Event], *, cap: float, expandable: bool = False) -> bool:
    """Whether `events` fit into `cap` bytes of segments."""
    try:
        replay(events, cap=cap, expandable=expandable)
    except OutOfMemory:
        return False
    return True


def smallest_cap(events: tuple[Event, ...], *, expandable: bool = False, precision: int = 64 * MIB) -> int:
    """The least bytes of segments with which `events` complete, to `precision` bytes.

    Searched by halving between the peak of allocated and that of reserved without a cap. A larger cap can in rare
    cases fail where a smaller one does not (it keeps other segments), so the result is one border, not a proof.
    """
    free_run = replay(events, expandable=expandable)
    low, high = free_run.peak_allocated, free_run.peak_reserved
    if completes(events, cap=low, expandable=expandable):
        return low
    while high - low > precision:
        middle = (low + high) // 2
        if completes(events, cap=middle, expandable=expandable):
            high = middle
        else:
            low = middle
    return high
