"""The search for the fastest plan that fits: families of plans, and in each as much speed as memory allows.

A family is a way to make a run fit (a low-bit optimizer, states in RAM, streaming, several cards). Inside one, memory
grows with the micro-batch and falls with every block that is recomputed or streamed, so the best is found by halving.
One micro-batch for the whole step is apart: no gradient waits for another, which can save more than it costs.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, Final, Literal

from vramfit.config import RunConfig
from vramfit.hardware.devices import Device, Machine
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import DESIGNED, ENGINE, Abilities, missing
from vramfit.planning.memory import LeastMemory, estimate_memory, least_memory
from vramfit.planning.plan import MemoryEstimate, Plan, SpeedEstimate, Workload, without_graphs
from vramfit.planning.speed import estimate_speed
from vramfit.planning.standing import slot_bytes_of
from vramfit.planning.start import Start, checkpoints_at_end, sequences_of_step, start
from vramfit.planning.stored import stored
from vramfit.planning.wishes import refused

_MOST_TOKENS_PER_PASS: Final = 2**17
_NEARLY_AS_FAST: Final = 1.02
_WORTH_ROUNDING: Final = 1.1
_WORTH_LOOKING: Final = 0.02
"""Of the budget: fewer gradients that wait are not looked at."""
_WITH_HOLES: Final = 1.5
"""What a byte that waits costs at most, with what the allocator cannot fill."""
_CHANGES_BASE: Final = ("pissa", "olora")

FamilyName = Literal[
    "on the device",
    "8-bit optimizer",
    "block inputs in RAM",
    "optimizer in RAM",
    "streaming from RAM",
    "streaming from disk",
    "shared by the cards (DDP)",
    "split among the cards (FSDP)",
]


@dataclass(frozen=True, kw_only=True)
class Family:
    """A way to make a run fit, as what it changes in a plan."""

    name: FamilyName
    changes: dict[str, Any] = field(default_factory=dict)

    @property
    def streams(self) -> bool:
        return "weights_tier" in self.changes

    @property
    def rounds(self) -> bool:
        """Whether it changes the numbers of a run, a little."""
        return "optimizer_bits" in self.changes


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan of a family with its two estimates, and the RAM and disk it may take. How fast it is is worked out when it
    is asked for: most of those that are looked at for a refusal only have to fit."""

    family: Family
    plan: Plan
    memory: MemoryEstimate
    timed: Callable[[], SpeedEstimate] = field(repr=False, compare=False)
    ram_bytes: int
    disk_bytes: int

    @cached_property
    def speed(self) -> SpeedEstimate:
        return self.timed()

    @property
    def fits(self) -> bool:
        return self.fits_device and self.fits_ram and self.fits_disk

    @property
    def fits_device(self) -> bool:
        return self.memory.device_bytes <= self.plan.budget_bytes

    @property
    def fits_disk(self) -> bool:
        """With all checkpoints, the result, and what lives there during the run."""
        return self.memory.disk_bytes <= self.disk_bytes

    @property
    def fits_ram(self) -> bool:
        """RAM that others use may become free; what is not there does not."""
        return self.plan.device == "cpu" or self.memory.host_bytes <= self.ram_bytes


@dataclass(frozen=True, kw_only=True)
class Search:
    """One wish on one device, or on all cards of its kind, within what an engine can do."""

    config: RunConfig
    architecture: Architecture
    machine: Machine
    device: Device
    workload: Workload
    start: Start
    abilities: Abilities
    _known: dict[FamilyName, Candidate] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def of(
        cls,
        config: RunConfig,
        architecture: Architecture,
        machine: Machine,
        workload: Workload,
        *,
        abilities: Abilities = ENGINE,
    ) -> Search:
        """Raises ConfigError and HardwareError for a wish that this machine or model cannot honour."""
        device = machine.device(config.device)
        begun = start(config, architecture, device, workload)
        lacking = missing(begun.plan, abilities)
        if lacking:
            raise refused("memory", f"This version cannot do: {', '.join(lacking)}", "Leave that to auto.")
        return cls(
            config=config,
            architecture=architecture,
            machine=machine,
            device=device,
            workload=workload,
            start=begun,
            abilities=abilities,
        )

    @cached_property
    def designed(self) -> Search:
        """The same search with everything that is designed."""
        return self if self.abilities == DESIGNED else dataclasses.replace(self, abilities=DESIGNED)

    @cached_property
    def sequences(self) -> int:
        return sequences_of_step(self.config, self.workload)

    @cached_property
    def checkpoints(self) -> int:
        return checkpoints_at_end(self.config, self.workload)

    @property
    def cards(self) -> int:
        """Cards that can share the run: all of the device's name."""
        return sum(device.name == self.device.name and device.kind != "cpu" for device in self.machine.devices)

    @property
    def trained_layers(self) -> int:
        """How many blocks have a backward, so that their activations cost something."""
        return self.start.plan.trained_layers(self.architecture.layers)

    def _visiting(self, **changes: Any) -> dict[str, Any]:
        """What a family changes whose blocks visit: how much of them comes at once is decided here."""
        plan = dataclasses.replace(self.start.plan, **changes)
        length = plan.max_length if plan.packing else min(plan.max_length, self.workload.longest_tokens)
        slots = slot_bytes_of(self.architecture, plan, self.sequences * length)
        if plan.compiled and any(stored(self.architecture, dataclasses.replace(plan, slot_bytes=slots)).split):
            slots = 0  # a block that stops between its parts cannot be compiled
        if plan.records_graphs:  # weights that visit have no place of their own; what else the mode does stays
            changes = {**changes, "compile_mode": without_graphs(plan.compile_mode)}
        return {**changes, "slot_bytes": slots} if slots else changes

    # --- families ----------------------------------------------------------------------------------------------------

    @cached_property
    def families(self) -> tuple[Family, ...]:
        """Those within the abilities, the plainest first."""
        return tuple(family for family in self._families() if not missing(self._plan(family, 1), self.abilities))

    def _families(self) -> Iterator[Family]:
        yield Family(name="on the device")
        wishes = self.config.memory
        keep = wishes.activations in ("keep", "compress")
        trains_all = not self.start.plan.lora_rank
        may_leave = not trains_all or wishes.optimizer_place in ("auto", "host")
        if self._needs_compiled_at_rest or (not trains_all and self.config.adapter.start in _CHANGES_BASE):
            keep = True  # blocks that visit are not changed, nor always compiled
        if self.device.kind == "cpu":
            if not keep:
                there = {"optimizer_tier": "disk"} if trains_all else {}
                yield Family(name="streaming from disk", changes=self._visiting(weights_tier="disk", **there))
            return
        adamw = trains_all and self.start.plan.optimizer == "adamw"
        if adamw and wishes.optimizer_bits == "auto":
            yield Family(name="8-bit optimizer", changes={"optimizer_bits": 8})
        if wishes.activations == "auto":
            yield Family(name="block inputs in RAM", changes={"input_tier": "host"})
        if trains_all and wishes.optimizer_place == "auto" and not self.start.plan.optimizer_in_backward:
            yield Family(name="optimizer in RAM", changes={"optimizer_tier": "host"})
        if self.cards > 1:
            yield Family(name="shared by the cards (DDP)", changes={"cards": self.cards, "sharding": "ddp"})
            yield Family(name="split among the cards (FSDP)", changes={"cards": self.cards, "sharding": "fsdp"})
        if not keep and may_leave:
            # Blocks visit in the 16 bits they are computed with; the fp32 weights stay with the states.
            narrow = trains_all and self.start.plan.compute == "bf16" and wishes.trained_weights != "fp32"
            visit = {"trained_format": "bf16", "weight_format": "bf16"} if narrow else {}
            states = {"optimizer_tier": "host", **visit} if trains_all else {}
            changes = self._visiting(weights_tier="host", input_tier="host", **states)
            yield Family(name="streaming from RAM", changes=changes)
            states = {"optimizer_tier": "disk", **visit} if trains_all else {}
            changes = self._visiting(weights_tier="disk", input_tier="host", **states)
            yield Family(name="streaming from disk", changes=changes)

    @property
    def _needs_compiled_at_rest(self) -> bool:
        """Whether a compiler was asked for that blocks that visit cannot have: CUDA graphs keep weights' places (a mode
        that does more goes without them), and of what is dropped out a compiler would not drop the same in a step's two
        forward passes."""
        wish = self.config.memory.compile
        if wish == "auto" or wish == "off":
            return False
        adapters_drop = bool(self.start.plan.lora_rank) and self.config.adapter.dropout > 0
        return without_graphs(wish) is None or self.architecture.drops_out or adapters_drop

    def is_hopeless(self, family: Family) -> bool:
        """Whether what lies there at the least is more than device, RAM or disk have: known without walking a block."""
        plan = self._least_plan(family)
        least = self._least_memory(plan)
        if not self._is_beyond(plan, least):
            return False
        if not least.waiting_bytes or least.device_bytes - _WITH_HOLES * least.waiting_bytes > plan.budget_bytes:
            return True
        whole = self._least_plan(family, whole_step=True)
        return self._is_beyond(whole, self._least_memory(whole))

    def _least_memory(self, plan: Plan) -> LeastMemory:
        return least_memory(self.architecture, plan, self.workload, checkpoints=self.checkpoints, merged=self._merged)

    def _is_beyond(self, plan: Plan, least: LeastMemory) -> bool:
        return (
            least.device_bytes > plan.budget_bytes
            or (plan.device != "cpu" and least.host_bytes > self.machine.ram_bytes)
            or least.disk_bytes > self.machine.disk_free_bytes
        )

    def ways(self, family: Family) -> Iterator[Family]:
        """`family`, and where its blocks' inputs are what makes it too large, the same with those on disk."""
        yield family
        if family.streams and "disk" in self.abilities.inputs and self._inputs_are_too_much(family):
            yield dataclasses.replace(family, changes={**family.changes, "input_tier": "disk"})

    def _inputs_are_too_much(self, family: Family) -> bool:
        """Whether RAM, or a device that is RAM, is too small by no more than the inputs that wait there."""
        plan = self._least_plan(family)
        least, short = self._least_memory(plan), 0
        if plan.device != "cpu":
            short = least.host_bytes - self.machine.ram_bytes
        elif least.device_bytes <= plan.budget_bytes:
            short = self._candidate_of(family, plan).memory.device_bytes - plan.budget_bytes
        return 0 < short <= _WITH_HOLES * least.inputs_bytes

    @property
    def _merged(self) -> bool:
        return self.config.output.export == "merged"

    # --- candidates --------------------------------------------------------------------------------------------------

    def _plan(self, family: Family, micro_batch: int, **changes: int) -> Plan:
        cards = family.changes.get("cards", 1)
        return dataclasses.replace(
            self.start.plan,
            micro_batch=micro_batch,
            accumulation=math.ceil(self.sequences / (micro_batch * cards)),
            **{**family.changes, **changes},
        )

    def candidate(self, family: Family, micro_batch: int, **changes: int) -> Candidate:
        """A plan of `family` with its estimates; `changes` are recompute and resident_blocks."""
        return self._candidate_of(family, self._plan(family, micro_batch, **changes))

    def _candidate_of(self, family: Family, plan: Plan) -> Candidate:
        memory = estimate_memory(
            self.architecture,
            plan,
            self.workload,
            checkpoints=self.checkpoints,
            merged=self._merged,
        )
        timed = partial(
            estimate_speed, self.architecture, plan, self.device, self.workload, sequences_per_step=self.sequences
        )
        return Candidate(
            family=family,
            plan=plan,
            memory=memory,
            timed=timed,
            ram_bytes=self.machine.ram_bytes,
            disk_bytes=self.machine.disk_free_bytes,
        )

    @cached_property
    def bests(self) -> tuple[Candidate, ...]:
        """Of each family the best that fits, or the least it can do with."""
        return tuple(self._best_of(family) for family in self.families)

    def _best_of(self, family: Family) -> Candidate:
        if family.name not in self._known:  # shared with the same search of other abilities
            self._known[family.name] = self._best_way(family)
        return self._known[family.name]

    def _best_way(self, family: Family) -> Candidate:
        """The quickest that fits of its first way that has one, or the least that its last can do with."""
        way = family
        for way in self.ways(family):
            best = None if self.is_hopeless(way) else quickest(self.fitting(way))
            if best is not None:
                return best
        return self.least(way)

    def best(self) -> Candidate | None:
        """The fastest that fits of all families; of those nearly as fast, the one that needs least.

        One that rounds its numbers has to be a tenth faster than all that do not.
        """
        fitting = [candidate for candidate in self.bests if candidate.fits]
        fastest = quickest(fitting)
        exact = quickest([candidate for candidate in fitting if not candidate.family.rounds])
        if fastest is None or exact is None:
            return fastest
        return exact if exact.speed.step_seconds <= _WORTH_ROUNDING * fastest.speed.step_seconds else fastest

    def fitting(self, family: Family) -> list[Candidate]:
        """For each micro-batch size the quickest of `family` that fits it. Where one size does not fit larger ones are
        not tried, but for the whole step at once."""
        found = []
        sizes = self.micro_batches(family)
        for size in sizes:
            one = self._quickest_of(family, size)
            if one is None:
                break
            found.append(one)
        if len(found) < len(sizes) - 1 and self._gains_by_one_pass(family):
            whole = self._quickest_of(family, sizes[-1])
            found += [whole] if whole is not None else []
        return found

    def _quickest_of(self, family: Family, size: int) -> Candidate | None:
        """Of one micro-batch size, where any fits."""
        return self._most_resident(family, size) if family.streams else self._fewest_recomputed(family, size)

    def _gains_by_one_pass(self, family: Family) -> bool:
        """Whether so many gradients wait for the step's other micro-batches that one for all of it may need less."""
        whole = self._least_plan(family, whole_step=True)
        if whole.accumulation > 1:
            return False
        waiting = self._least_memory(self._least_plan(family)).waiting_bytes
        return waiting > _WORTH_LOOKING * whole.budget_bytes and not self._is_beyond(whole, self._least_memory(whole))

    def _fewest_recomputed(self, family: Family, size: int) -> Candidate | None:
        """Recompute costs time, so as little as fits: none, else what a straight line between too few and enough says,
        which is nearly always right at once, and every third time half of what is left."""
        layers, wish = self.trained_layers, self.config.memory.activations
        keeps = wish in ("keep", "compress")
        in_ram = "input_tier" in family.changes  # where nothing is recomputed no input waits anywhere
        if wish != "auto" or in_ram:
            only = self.candidate(family, size, recompute=0 if keeps else layers)
            return only if only.fits else None
        none = self.candidate(family, size, recompute=0)
        if none.fits:
            return none
        short, best = none, self.candidate(family, size, recompute=layers)
        if not best.fits:
            return None
        halves = itertools.cycle((False, False, True))
        while best.plan.recompute - short.plan.recompute > 1:
            middle = (short.plan.recompute + best.plan.recompute) // 2 if next(halves) else _between(short, best)
            tried = self.candidate(family, size, recompute=middle)
            short, best = (short, tried) if tried.fits else (tried, best)
        return best

    def _most_resident(self, family: Family, size: int) -> Candidate | None:
        """Every block that stays on the device need not be brought, so as many as fit: memory is linear in them."""
        layers, again = self.architecture.layers, self.trained_layers
        none = self.candidate(family, size, recompute=again, resident_blocks=0)
        if not none.fits:
            return None
        left = none.plan.budget_bytes - none.memory.device_bytes
        each = (self.candidate(family, size, recompute=again, resident_blocks=1).memory.device_bytes) - (
            none.memory.device_bytes
        )
        for count in (min(layers, int(left // each) if each > 0 else layers), 0):
            tried = self.candidate(family, size, recompute=again, resident_blocks=count)
            if tried.fits:
                return tried
        return none

    def micro_batches(self, family: Family) -> list[int]:
        """Sizes to try, small to large: those that cut a card's share of the step evenly, or as evenly as can be."""
        share = math.ceil(self.sequences / family.changes.get("cards", 1))
        if self.config.memory.micro_batch != "auto":
            return [min(self.config.memory.micro_batch, share)]
        if self.start.plan.optimizer_in_backward and not family.streams:
            return [share]  # a gradient that waits for a second micro-batch cannot be used up at once
        most = max(1, min(share, _MOST_TOKENS_PER_PASS // max(1, self.start.plan.max_length)))
        wanted = {1 << power for power in range(most.bit_length())} | {most}
        even = {math.ceil(share / math.ceil(share / size)) for size in wanted}
        return sorted(size for size in even if size <= most)

    def least(self, family: Family | None = None) -> Candidate:
        """What needs the least memory, all blocks recomputed unless kept by wish: by the smallest micro-batch, or where
        that does not fit perhaps by one for the whole step."""
        chosen = family or self.families[0]
        small = self._candidate_of(chosen, self._least_plan(chosen))
        if small.fits or not self._gains_by_one_pass(chosen):
            return small
        whole = self._candidate_of(chosen, self._least_plan(chosen, whole_step=True))
        return whole if whole.fits or whole.memory.device_bytes < small.memory.device_bytes else small

    def _least_plan(self, family: Family, *, whole_step: bool = False) -> Plan:
        keep = self.config.memory.activations in ("keep", "compress")
        size = self.micro_batches(family)[-1 if whole_step else 0]
        return self._plan(family, size, recompute=0 if keep else self.trained_layers)


def _between(short: Candidate, enough: Candidate) -> int:
    """How many blocks to recompute for the budget, were memory a straight line between two plans; neither's number."""
    low, high = short.plan.recompute, enough.plan.recompute
    saved = short.memory.device_bytes - enough.memory.device_bytes
    missing_bytes = short.memory.device_bytes - short.plan.budget_bytes
    share = missing_bytes / saved if saved > 0 else 0.5
    return min(high - 1, max(low + 1, low + math.ceil(share * (high - low))))


def quickest(fitting: list[Candidate]) -> Candidate | None:
    """The fastest; of those nearly as fast, the one that needs least of the device."""
    if not fitting:
        return None
    fastest = min(candidate.speed.step_seconds for candidate in fitting)
    quick = [candidate for candidate in fitting if candidate.speed.step_seconds <= fastest * _NEARLY_AS_FAST]
    return min(quick, key=lambda candidate: candidate.memory.device_bytes)
