"""The simulated allocator: constants and rules of torch's own, and what must hold for any sequence."""

from __future__ import annotations

import importlib.util
import re
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.planning import allocator
from vramfit.planning.allocator import Allocator, Block, Event, OutOfMemory, completes, live_peak, replay, smallest_cap
from vramfit.units import GIB, MIB


def torch_constants() -> dict[str, int]:
    """Those of the installed torch, read from its headers without importing it."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    header = Path(spec.origin).parent / "include" / "c10" / "core" / "AllocatorConfig.h"
    if not header.is_file():
        pytest.skip("this torch comes without headers")
    found = re.findall(r"constexpr size_t (k\w+) = (\d+);", header.read_text(encoding="utf-8"))
    return {name: int(value) for name, value in found}


def test_constants_are_those_of_the_installed_torch() -> None:
    constants = torch_constants()

    assert constants["kMinBlockSize"] == allocator.BLOCK_BYTES
    assert constants["kSmallSize"] == allocator.SMALL_REQUEST_BYTES
    assert constants["kSmallBuffer"] == allocator.SMALL_SEGMENT_BYTES
    assert constants["kMinLargeAlloc"] == allocator.OWN_SEGMENT_BYTES
    assert constants["kRoundLarge"] == allocator.ROUND_SEGMENT_BYTES


@pytest.mark.parametrize(
    ("request_bytes", "reserved", "allocated"),
    [
        (1, 2 * MIB, 512),
        (513, 2 * MIB, 1024),
        (MIB, 2 * MIB, MIB),
        (MIB + 1, 20 * MIB, MIB + 512),
        (10 * MIB - 512, 20 * MIB, 10 * MIB - 512),
        (10 * MIB, 10 * MIB, 10 * MIB),
        (11 * MIB, 12 * MIB, 12 * MIB),  # the rest is not more than 1 MiB, so it is not cut off
    ],
)
def test_a_first_request_takes_the_segment_of_its_size(request_bytes: int, reserved: int, allocated: int) -> None:
    found = Allocator()
    found.allocate(request_bytes)

    assert (found.reserved, found.allocated) == (reserved, allocated)


def test_the_smallest_block_that_fits_is_taken() -> None:
    found = Allocator()
    large, small = found.allocate(100 * MIB), found.allocate(40 * MIB)
    found.free(large)
    found.free(small)

    assert found.allocate(30 * MIB).address == small.address
    assert found.reserved == 140 * MIB


def test_neighbours_merge_and_serve_a_larger_request() -> None:
    found = Allocator()
    whole = found.allocate(60 * MIB)
    found.free(whole)
    parts = [found.allocate(20 * MIB) for _ in range(3)]
    for part in (parts[0], parts[2], parts[1]):
        found.free(part)

    found.allocate(60 * MIB)

    assert found.reserved == 60 * MIB


def test_what_another_stream_freed_cannot_be_used() -> None:
    found = Allocator()
    found.free(found.allocate(64 * MIB, 1))
    found.allocate(64 * MIB)

    assert found.reserved == 128 * MIB


def test_a_segment_of_which_a_part_is_in_use_is_not_returned() -> None:
    """Two segments of 40 MiB, 12 in use in each: 76 MiB are free under the cap, and yet 50 fit only where pages are
    returned one by one."""
    events = [Event(1, 40 * MIB), Event(2, 40 * MIB), Event(1, 0), Event(2, 0)]
    events += [Event(3, 12 * MIB), Event(4, 28 * MIB), Event(5, 12 * MIB), Event(6, 28 * MIB)]
    events += [Event(4, 0), Event(6, 0), Event(7, 50 * MIB)]

    assert not completes(events, cap=100 * MIB)
    assert completes(events, cap=100 * MIB, expandable=True)


def test_cached_segments_are_returned_before_memory_runs_out() -> None:
    found = Allocator(cap=100 * MIB)
    found.free(found.allocate(60 * MIB))
    found.allocate(80 * MIB)

    assert (found.reserved, found.peak_reserved) == (80 * MIB, 80 * MIB)


def test_out_of_memory_tells_its_numbers() -> None:
    found = Allocator(cap=GIB)
    found.allocate(600 * MIB)

    with pytest.raises(OutOfMemory, match=r"500 MiB requested, 600 MiB allocated, 600 MiB reserved, cap 1\.0 GiB"):
        found.allocate(500 * MIB)


sizes = st.one_of(st.integers(1, 2 * MIB), st.integers(1, 64 * MIB))
actions = st.lists(st.tuples(st.booleans(), sizes, st.integers(0, 1), st.integers(0, 99)), max_size=80)


@given(actions, st.booleans())
def test_blocks_never_overlap_and_everything_comes_back(
    steps: list[tuple[bool, int, int, int]], expandable: bool
) -> None:
    cap = 300 * MIB
    found, live = Allocator(cap=cap, expandable=expandable), list[tuple[Block, int]]()
    for frees, size, stream, which in steps:
        if frees and live:
            found.free(live.pop(which % len(live))[0])
            continue
        try:
            live.append((found.allocate(size, stream), size))
        except OutOfMemory:
            continue
        spans = sorted((block.address, block.address + block.size) for block, _ in live)
        assert all(end <= start for (_, end), (start, _) in pairwise(spans))
        assert all(block.size >= asked for block, asked in live)
        assert sum(block.size for block, _ in live) == found.allocated <= found.reserved <= cap

    for block, _ in live:
        found.free(block)
    assert found.allocated == 0
    assert found.fragmentation == found.reserved
    found.release()
    assert found.reserved == 0


def events_of(steps: list[tuple[bool, int, int, int]]) -> tuple[Event, ...]:
    events, live = list[Event](), list[int]()
    for number, (frees, size, stream, which) in enumerate(steps):
        if frees and live:
            events.append(Event(live.pop(which % len(live)), 0))
        else:
            events.append(Event(number, size, stream))
            live.append(number)
    return tuple(events)


@given(actions, st.booleans())
def test_the_smallest_cap_completes_and_lies_between_both_peaks(
    steps: list[tuple[bool, int, int, int]], expandable: bool
) -> None:
    events = events_of(steps)
    free_run = replay(events, expandable=expandable)
    cap = smallest_cap(events, expandable=expandable, precision=MIB)

    assert live_peak(events) <= free_run.peak_allocated <= cap <= free_run.peak_reserved
    assert completes(events, cap=cap, expandable=expandable)
    assert replay(events, expandable=expandable).peak_reserved == free_run.peak_reserved
