"""What a card must have for a run: the smallest cap on its tensors at which the run completes, by replaying it.

The allocator is simulated with the events of the run. Beside it the driver takes its context and, with several cards,
the communication library its buffers; neither is the allocator's.

Where the simulation falls short: it knows sizes and the order of operations, not every kernel's order of buffers. Where
frozen blocks are sharded and their inputs held until backward ends (`Sharding.holds_frozen_inputs`), each block leaves
two tensors in the middle of its working memory, and every such difference stays as a hole. Published runs of that kind
with memory to spare reserved 1.2 to 2.5 times the simulated fragmentation, 1.5 in the median (22 runs of
fms-acceleration on 2 and 4 cards: `nvidia-smi` less allocated, less 1.45 GiB of context and NCCL); on one card 0.7 to
1.5 times, 0.9 in the median (17 runs). So 1.5 times is asked for there. It is a measured factor, not a derived one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Final

from vramfit.models.architecture import Architecture
from vramfit.planning.allocator import Event, OutOfMemory, live_peak, replay, smallest_cap
from vramfit.planning.events import training_events
from vramfit.planning.memory import estimate_memory, outside_bytes
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS, Program
from vramfit.units import GIB

HELD_FRAGMENTATION: Final = 1.5
"""Fragmentation against the simulated where frozen inputs are held, measured; see above."""

LEAST_OUTSIDE_BYTES: Final = int(0.55 * GIB)
"""What others than the allocator take of a card at least: one process's context on an A100, by `nvidia-smi` less
reserved where the simulated reserved figure is the published one (read off two published rows and not derived, which
docs/accuracy.md says). NCCL adds 0.1 GiB over PCIe and about 1 GiB over NVLink. That a run does not fit should be said
without counting on more than this."""


_SIMULATED: Final = ("cuda", "xpu")
"""Kinds of devices whose allocator is the simulated one: torch calls AMD's cards cuda, and XPU's has the same rules."""


@dataclass(frozen=True, kw_only=True)
class Needs:
    """From tensors to a device, in bytes: `tensors` alive at the peak; `reserved` by the allocator on that device (None
    where it is none that is simulated); `outside`, which others take beside it; and `smallest`, the least memory
    with which the run completes."""

    tensors: int
    reserved: int | None
    outside: int
    smallest: int


def needs_of(architecture: Architecture, plan: Plan, workload: Workload, *, tensors: int, device_bytes: int) -> Needs:
    """What a run of our engine with a peak of `tensors` bytes, as traced, needs of a device that leaves it
    `device_bytes`.

    A card's allocator is simulated. A processor has none that keeps what is freed, and that of Apple's chips has other
    rules: for both what the closed form adds to its own peak is added to this one.
    """
    if plan.device.partition(":")[0] in _SIMULATED:
        run = CapOfRun(architecture, plan, workload, tensors=tensors)
        return Needs(
            tensors=tensors,
            reserved=run.reserved_bytes(device_bytes),
            outside=run.outside,
            smallest=run.smallest_bytes,
        )
    memory = estimate_memory(architecture, plan, workload)
    added = memory.device_bytes - memory.peak_bytes
    return Needs(tensors=tensors, reserved=None, outside=added, smallest=tensors + added)


class CapOfRun:
    """Replays of one run. Bytes on one card; `expandable` says that its allocator uses expandable segments; `outside`
    is what others than the allocator take of the card, and `tensors` what is alive at the peak, where that is known
    better than `outside_bytes` and the closed form do."""

    def __init__(
        self,
        architecture: Architecture,
        plan: Plan,
        workload: Workload,
        *,
        program: Program = OURS,
        evaluates: bool = True,
        expandable: bool = False,
        outside: int | None = None,
        tensors: int | None = None,
    ) -> None:
        self.plan, self.program, self.expandable = plan, program, expandable
        self.outside = outside_bytes(plan, program) if outside is None else outside
        if tensors is None:
            tensors = estimate_memory(architecture, plan, workload, program=program).peak_bytes
        self._peak = tensors
        self._run = architecture, plan, workload
        self._evaluates = evaluates

    @cached_property
    def events(self) -> tuple[Event, ...]:
        return training_events(*self._run, program=self.program, evaluates=self._evaluates)

    @cached_property
    def reserved_without_cap(self) -> int:
        """Peak of reserved where memory is no limit."""
        return replay(self.events, expandable=self.expandable).peak_reserved

    @cached_property
    def fragmentation(self) -> int:
        """Bytes that must be there beside the peak's tensors, because what is free lies in pieces."""
        found = smallest_cap(self.events, expandable=self.expandable) - live_peak(self.events)
        return int(found * (HELD_FRAGMENTATION if self._holds_inputs else 1.0))

    @property
    def smallest_bytes(self) -> int:
        """The least memory of a card, context and communication included, on which the run completes."""
        return self._peak + self.fragmentation + self.outside

    def completes(self, card_bytes: float) -> bool:
        """Whether the run completes on a card with `card_bytes`, all of them its own."""
        room = card_bytes - self.outside - self._untold
        if self._peak > card_bytes - self.outside:
            return False
        if self._holds_inputs:
            return self.smallest_bytes <= card_bytes
        return self.reserved_without_cap <= room or self._reserved(room) is not None

    def reserved_bytes(self, card_bytes: float) -> int:
        """What the allocator shows as its peak of reserved on a card with `card_bytes`. Where the run does not
        complete there, what it would take to complete."""
        found = self._reserved(card_bytes - self.outside - self._untold)
        return self.smallest_bytes - self.outside if found is None else found + self._untold

    @cached_property
    def _untold(self) -> int:
        """What the closed form knows of and the events do not tell."""
        return max(0, self._peak - live_peak(self.events))

    @property
    def _holds_inputs(self) -> bool:
        plan, sharding = self.plan, self.program.sharding
        shares = plan.cards > 1 and plan.sharding in ("zero3", "fsdp")
        return sharding.holds_frozen_inputs and shares and plan.lora_rank > 0 and plan.recompute > 0

    def _reserved(self, cap: float) -> int | None:
        """Peak of reserved under a cap, None where it is not enough."""
        try:
            return replay(self.events, cap=cap, expandable=self.expandable).peak_reserved
        except OutOfMemory:
            return None
