"""Device memory of a plan, phase by phase: closed form, in milliseconds, from what the program does.

T = micro-batch x length (tokens), h hidden, V vocabulary rows, L blocks, P parameters, N cards. All figures are of one
card. The peak is the largest phase, never their sum:

    load        weights as they come
    forward     states + root + inputs of the recomputed blocks + one block's forward that keeps nothing
    loss        states + root + kept activations of all blocks + final norm + logits and their gradient
    backward    states + root + gathered blocks + what the blocks before keep + one block's backward, operation by
                operation, with the gradients made so far
    embedding   states + root + all gradients + the embedding's dense gradient beside the one it is added to
    step        states + all gradients + the optimizer's temporaries
    evaluation  states + root + one block's forward, or logits: nothing kept
    calibration where the run compares itself with fp32: the loss and backward of one micro-batch in fp32, with all
                gradients, and the fp32 copies of 16-bit weights that backward needs

states = weights + adapters + optimizer, each its share of N cards. The root is what sharding gathers outside the blocks
(embedding, head), from the first forward to the end of backward. Under accumulation the gradients of the micro-batches
before are there in every phase. What a block keeps and needs is walked operation by operation in `block.py`; where
programs differ is in `program.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from vramfit.models.architecture import Architecture
from vramfit.models.families import MASK_OF_ALL_POSITIONS
from vramfit.planning.block import BlockMemory, Formats, block_memory
from vramfit.planning.plan import MEMORY_KINDS, MemoryEstimate, MemoryKind, PhaseMemory, Plan, Workload
from vramfit.planning.program import OURS, Program
from vramfit.planning.slots import SplitBlock, groups_of, slot_bytes, together
from vramfit.planning.stored import (
    BYTES,
    QUANTISED,
    Stored,
    adapted_linears,
    experts_in_one,
    head_trains,
    stored,
)
from vramfit.planning.tape import Moment
from vramfit.units import GIB

COMMUNICATION_BYTES: Final = GIB
"""Buffers of NCCL on one card: 0.5 to 1.5 GiB."""

STREAM_SLOTS: Final = 2
"""Blocks on the device at once while streaming: one computes, one arrives."""


def estimate_memory(
    architecture: Architecture,
    plan: Plan,
    workload: Workload,
    *,
    program: Program = OURS,
    checkpoints: int = 2,
    merged: bool = False,
) -> MemoryEstimate:
    """Predicted device memory of `plan`: its phases, what the device shows, the interval, RAM and disk.

    Lengths are the longest a micro-batch can have: max_length when rows are packed, else the longest sequence.
    `checkpoints` is how many there will be at the end; `merged`: adapters are exported with their base.
    """
    work = Work.of(architecture, plan, workload, program)
    phases = (
        work.phase("load"),
        work.forward_phase(),
        work.loss_phase(),
        *work.backward_phases(),
        work.embedding_phase(),
        work.step_phase(),
        work.evaluation_phase(),
        *(work.calibration_phases(workload) if plan.calibrates else ()),
    )
    peak = max(phases, key=lambda phase: phase.total_bytes)
    device = _device_bytes(peak, plan, program)
    spread = 0.04 if plan.device == "cpu" and plan.compute in ("fp32", "tf32") else 0.08
    moving = peak.total_bytes - work.states
    return MemoryEstimate(
        phases=phases,
        device_bytes=device,
        low_bytes=int(peak.total_bytes - spread * peak.total_bytes - (0 if workload.exact else 0.3 * moving)),
        high_bytes=int(peak.total_bytes * (1 + spread)),
        host_bytes=work.host_bytes(device),
        disk_bytes=work.disk_bytes(checkpoints=checkpoints, merged=merged),
        written_per_step_bytes=int(work.written_per_step),
        written_per_checkpoint_bytes=int(work.checkpoint),
        save_copy_bytes=0 if work.trains_visitors else int(work.checkpoint),
    )


@dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """Bytes below which a plan cannot be: of the device, of RAM beside it, and of disk. `waiting_bytes` of the device
    are gradients that wait for the step's other micro-batches: none where a step is one."""

    device_bytes: int
    waiting_bytes: int
    host_bytes: int
    disk_bytes: int


def least_memory(
    architecture: Architecture, plan: Plan, workload: Workload, *, checkpoints: int = 2, merged: bool = False
) -> LeastMemory:
    """What `estimate_memory` can never be below, by a phase that needs no walk of a block: the optimizer's step. RAM
    beside a card and disk are whole."""
    work = Work.of(architecture, plan, workload, OURS)
    device = _device_bytes(work.step_phase(), plan, OURS)
    return LeastMemory(
        device_bytes=device,
        waiting_bytes=int(work.held),
        host_bytes=work.host_bytes(device),
        disk_bytes=work.disk_bytes(checkpoints=checkpoints, merged=merged),
    )


def _device_bytes(peak: PhaseMemory, plan: Plan, program: Program) -> int:
    """What the device must have: tensors, what the allocator cannot fill, the driver's or the process's own part."""
    if plan.device == "cpu":
        return peak.total_bytes + program.process_bytes + int(0.03 * peak.total_bytes)
    return peak.total_bytes + outside_bytes(plan, program) + fragmentation(peak, plan)


def head_visits(plan: Plan) -> bool:
    """Whether a frozen head comes from its file when logits are made, and goes: where RAM is the device, it may be as
    large as several blocks, and takes no part in theirs."""
    in_fp32 = plan.compute in ("fp32", "tf32")  # else it may be raised to fp32, which takes a copy
    return plan.weights_tier == "disk" and plan.device == "cpu" and plan.lora_rank > 0 and in_fp32


def fragmentation(peak: PhaseMemory, plan: Plan) -> int:
    """Bytes the allocator must have beside the peak's tensors, because what is free lies in pieces.

    Holes are as large as what moves while something stays. In backward that is the working memory of a block, between
    it the gradients that stay and, where weights train, what the blocks before keep: 0.4 of the one, a quarter of the
    others, and all of an unpacked matrix. At the loss the last step's blocks have left holes of about four times what
    the final norm needs, and where whole logits and all weights' gradients come together a fifth of the logits. The
    optimizer's few large tensors leave none: 2 % for rounding, as everywhere.

    The shares are those of 540 replays of our program on the simulated allocator (`cap.py`): 7 models of 135M to 9B,
    all methods, 512 to 16,384 tokens. Against the smallest cap of the replay this is 2.4 % more in the median, between
    2 % less and 6 % more in nine of ten.
    """
    parts, trains = peak.parts, not plan.lora_rank
    if peak.name == "loss":
        whole = trains and plan.loss == "full"
        holes = 4.0 * parts["working"] + (0.2 if whole else 0.03) * parts["logits"]
        holes += (0.02 if trains else 0.04) * parts["kept"] + (0.05 if trains else 0.5) * parts["gradients"]
    elif peak.name == "embedding" or peak.name.startswith("backward"):
        holes = 0.4 * parts["working"] + parts["dequantised"] + 0.25 * parts["gradients"]
        holes += (0.2 if trains else 0.03) * parts["kept"]
    else:
        holes = 0.0
    return int(holes + 0.02 * peak.total_bytes)


def outside_bytes(plan: Plan, program: Program) -> int:
    """What a card gives away beside tensors: the driver's context and, among several cards, NCCL's buffers."""
    return program.context_bytes + (COMMUNICATION_BYTES if plan.cards > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Work:
    """The quantities all phases are made of, in bytes on one card; `blocks` and `tokens` say what scales with the
    micro-batch. `weights` are of the frozen base or of all that trains, `weight` and `gradient` bytes per trained
    parameter. `first` is the first block that has a backward; `casts` are those that wait for it."""

    architecture: Architecture
    plan: Plan
    program: Program
    tokens: int
    last_tokens: float
    length: int
    formats: Formats
    stored: Stored
    weight: float
    gradient: float
    first: int

    @classmethod
    def of(cls, architecture: Architecture, plan: Plan, workload: Workload, program: Program) -> Work:
        length = plan.max_length if plan.packing else min(plan.max_length, workload.longest_tokens)
        formats = formats_of(architecture, plan, program, length=length)
        weight = program.adapter if plan.lora_rank else BYTES[plan.trained_format]
        return cls(
            architecture=architecture,
            plan=plan,
            program=program,
            tokens=plan.micro_batch * length,
            last_tokens=plan.micro_batch * min(length, workload.mean_tokens),
            length=length,
            formats=formats,
            stored=stored(architecture, plan, program),
            weight=weight,
            gradient=weight if program.gradient is None else program.gradient,
            first=plan.first_trained(architecture.layers),
        )

    @cached_property
    def blocks(self) -> tuple[BlockMemory, ...]:
        """Every block's walk. Where what comes before them is frozen the first block with a backward differs: its
        input needs no gradient."""
        shape, formats, layers = self.architecture.shape, self.formats, self.architecture.layers
        own = None if self.plan.trains_all or self.program.input_grads else self.first
        kept = walks(shape, formats, own, compressed=False)
        if not self.plan.compress:
            return kept
        few = walks(shape, formats, own, compressed=True)
        return tuple(few[layer] if compresses(self.plan, layer, layers) else kept[layer] for layer in range(layers))

    # --- states ------------------------------------------------------------------------------------------------------

    @cached_property
    def head_trains(self) -> bool:
        return head_trains(self.architecture, self.plan)

    @cached_property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return self.stored.trained

    @cached_property
    def block_trained(self) -> tuple[int, ...]:
        """Those of each block."""
        return self.stored.block_trained

    @cached_property
    def shares_weights(self) -> bool:
        return self.plan.sharding in ("zero3", "fsdp")

    @cached_property
    def streams(self) -> bool:
        """Whether blocks visit the device one by one, from RAM or disk."""
        return self.plan.weights_tier != "device"

    @cached_property
    def trains_visitors(self) -> bool:
        """Whether the blocks that visit train: their gradients leave with them, and they are stepped on their tier."""
        return self.streams and not self.plan.lora_rank and not self.shares_weights

    @cached_property
    def weights(self) -> float:
        """The base's weights on this card."""
        whole = self.stored.weight_bytes
        if self.shares_weights:
            scales = self.stored.scales
            return scales + (0.0 if self.streams else (whole - scales) / self.plan.cards)
        if not self.streams:
            return whole
        stay = self.stored.largest_blocks[min(self.plan.resident_blocks, self.architecture.layers)]
        if self.trains_visitors and self.plan.trains_all:
            return stay + self._stored_outside * self.architecture.outside_params
        # The embedding is looked up where it lives; the head stays, whole, unless it visits.
        return stay + (0.0 if head_visits(self.plan) else self.visiting_head)

    @cached_property
    def visiting_head(self) -> float:
        """A head that is brought when logits are made."""
        return self._stored_outside * self.architecture.head_params

    @cached_property
    def buffers(self) -> float:
        """What a model holds beside parameters that is of size: masks over all positions it can have."""
        where = MASK_OF_ALL_POSITIONS.get(self.architecture.family)
        copies = {"blocks": self.architecture.layers, "model": 1}.get(where or "", 0)
        return float(copies * self.architecture.max_position**2)

    @cached_property
    def shards_in_ram(self) -> bool:
        """Whether each card's shares, with their gradients and optimizer, wait in RAM (FSDP's CPU offload)."""
        return self.shares_weights and self.streams

    @cached_property
    def _stored_outside(self) -> float:
        """Bytes per weight outside the blocks."""
        if not self.plan.lora_rank:
            return BYTES[self.plan.trained_format]
        return BYTES[self.plan.compute if self.plan.weight_format in QUANTISED else self.plan.weight_format]

    @cached_property
    def caches_casts(self) -> bool:
        """Whether 16-bit copies of all weights stay until forward ends: not where blocks only visit."""
        return self.program.caches_casts and not self.streams

    @cached_property
    def slots(self) -> float:
        """All places for the blocks that visit."""
        return sum(self.slot_sizes)

    @cached_property
    def slot_sizes(self) -> tuple[float, ...]:
        """Places for the blocks that visit, with those for their gradients where they train; for slices of experts."""
        if not self.streams or self.shares_weights or self.plan.resident_blocks >= self.architecture.layers:
            return ()
        gradients = 0.0 if self.plan.lora_rank else self.gradient * max(self.block_trained)
        parts = self.stored.parts
        stay = self.plan.staying(self.architecture.layers)
        visit = {layer: each.shared for layer, each in enumerate(parts) if layer not in stay}
        room = together(visit.values(), self.plan.slot_bytes, splits=any(each.slices for each in parts))
        groups = groups_of(visit, room, turn=self.first)
        block = max(sum(visit[layer] for layer in group) for group in groups)
        of_experts = max(each.slice for each in parts)
        return (block + gradients,) * STREAM_SLOTS + (of_experts,) * (STREAM_SLOTS if of_experts else 0)

    @property
    def split(self) -> tuple[SplitBlock | None, ...]:
        """Of each block its parts, None where it comes whole."""
        return self.stored.split

    def sent(self, layer: int, *, back: bool) -> float:
        """What waits between the parts of a split block, of all micro-batches: what its experts are given and their
        sums; on the way back the gradient of their answer and sums of gradients. Sums are fp32."""
        if self.split[layer] is None:
            return 0.0
        each = self.tokens * _sent_of_token(self.architecture, self.formats.residual, back=back)
        return self.micro_batches_at_once * each

    @cached_property
    def adapters(self) -> float:
        if not self.plan.lora_rank or self.shards_in_ram:
            return 0.0
        saved = 2.0 * len(self.plan.saved_modules) * self.architecture.embedding_params
        adapters = self.trained - len(self.plan.saved_modules) * self.architecture.embedding_params
        return (self.weight * adapters + saved) / (self.plan.cards if self.shares_adapters else 1)

    @cached_property
    def shares_adapters(self) -> bool:
        """Whether adapters are split with the weights, too."""
        return self.shares_weights and not (self.plan.lora_rank and self.program.sharding.replicates_adapters)

    @cached_property
    def optimizer_states(self) -> float:
        """All states of all cards' parameters, and their fp32 copy where there is one."""
        # States in RAM have copies there; weights that are there themselves need one only where they are narrow.
        copies = self.program.own_optimizers and not self.streams
        apart = self.plan.optimizer_tier != "device" and (self.weight < 4 or copies)
        master = self.program.host_master if apart else self.program.master
        return self.stored.moments + master * self.trained

    @cached_property
    def optimizer_share(self) -> float:
        splits = self.plan.sharding in ("zero1", "zero2") or self.shares_adapters
        return 1.0 / self.plan.cards if splits else 1.0

    @cached_property
    def optimizer(self) -> float:
        return self.optimizer_states * self.optimizer_share if self.plan.optimizer_tier == "device" else 0.0

    @cached_property
    def host_states(self) -> float:
        """What lives in RAM: states, gradients on their way to them, and the blocks that stream."""
        gradients = self.gradient * self.trained if self.program.own_optimizers else 0.0
        if self.trains_visitors:
            gradients = self.gradients_on_tier
        states = self.optimizer_states + gradients if self.plan.optimizer_tier == "host" else 0.0
        return states + (self.stored.weight_bytes if self.plan.weights_tier == "host" else 0.0)

    def host_bytes(self, device_bytes: int) -> int:
        """RAM: the process, a share of the weights while they pass, and what lives there; where RAM is the device, what
        the device needs."""
        if self.plan.device == "cpu":
            return device_bytes
        return int(3 * GIB + self.weights / 8 + self.host_states + self.waiting)

    def disk_bytes(self, *, checkpoints: int, merged: bool) -> int:
        """All checkpoints and one that is being written, the result, and what lives there during the run."""
        return int((checkpoints + 1) * self.checkpoint + self.export(merged=merged) + self.disk_states)

    @cached_property
    def checkpoint(self) -> float:
        """What is saved to go on from: weights that train and all states. One more is there while it is written."""
        return self.weight * self.trained + self.optimizer_states

    def export(self, *, merged: bool) -> float:
        """The result: adapters, or all weights in the format they train or are merged in."""
        if not self.plan.lora_rank:
            return BYTES[self.plan.trained_format] * self.architecture.params
        merged_weights = self._stored_outside * self.architecture.params if merged else 0.0
        return merged_weights or self.weight * self.trained

    @cached_property
    def gradients_on_tier(self) -> float:
        """Gradients of blocks that wait for the norm of all; none where each is stepped at once."""
        at_once = self.plan.optimizer_in_backward and self.plan.clip_passes == 1
        return 0.0 if at_once or not self.trains_visitors else self.gradient * sum(self.block_trained)

    @cached_property
    def weights_on_disk(self) -> float:
        """A file of the run's own with the blocks' weights: where they train, or have another format than the model's
        own files, which are read where they are."""
        if self.plan.weights_tier != "disk" or self.shares_weights:
            return 0.0
        own_file = self.trains_visitors or self.plan.weight_format in QUANTISED
        return sum(self.stored.block_bytes[self.first :]) if own_file else 0.0

    @cached_property
    def disk_states(self) -> float:
        """What a run has on disk to read or to write in every step."""
        on_disk = self.plan.optimizer_tier == "disk"
        return self.weights_on_disk + (self.optimizer_states + self.gradients_on_tier if on_disk else 0.0)

    @cached_property
    def written_per_step(self) -> float:
        """Bytes a step writes to disk: states that live there, and weights that train there. Frozen ones are read."""
        on_disk = self.plan.optimizer_tier == "disk"
        states = self.optimizer_states + self.gradients_on_tier if on_disk else 0.0
        return states + (self.weights_on_disk if self.trains_visitors else 0.0)

    @cached_property
    def states(self) -> float:
        return self.weights + self.buffers + self.adapters + self.optimizer

    @cached_property
    def gradient_share(self) -> float:
        return 1.0 / self.plan.cards if self.plan.sharding == "zero2" or self.shares_adapters else 1.0

    @cached_property
    def gradients(self) -> float:
        """All gradients of this card, once a micro-batch is done."""
        if self.uses_up_gradients or self.shards_in_ram:
            return 0.0
        return self.gradient * self.trained * self.gradient_share

    @cached_property
    def uses_up_gradients(self) -> bool:
        """Whether each gradient is stepped with, or sent to RAM, when it comes: one that waits for other micro-batches
        is not."""
        sends = self.plan.optimizer_tier == "host" and self.program.own_optimizers
        at_once = (self.plan.optimizer_in_backward or sends) and self.plan.accumulation == 1
        return at_once or (self.streams and not self.plan.lora_rank)

    @cached_property
    def outside_gradient(self) -> float:
        """Gradients of what is not a block, which wait on the device for the end of the step."""
        return self.gradient * self.stored.trained_outside

    @cached_property
    def numbers_in_step(self) -> float:
        """Weights that visit are stepped one after another. At most in RAM, beside a tier on disk: the states of a
        weight outside the blocks; or weight, gradient and states of one of a block's, of the next, and of the last."""
        if self.plan.optimizer_tier != "disk":
            return 0.0
        states = self.optimizer_states / max(1, self.trained)
        largest = max(
            linear.weights for layer in range(self.architecture.layers) for linear in self.architecture.linears(layer)
        )
        inside = 3.0 * largest * (self.weight + self.gradient + states)
        return max(inside, states * self.stored.largest_table)

    @cached_property
    def head_waits(self) -> float:
        """A tied head's gradient, which is whole only when the embedding's is there."""
        return self.head_gradient if self.architecture.tied_embeddings and not self.shares_weights else 0.0

    @cached_property
    def buckets(self) -> float:
        """Buffers that are there all the time: DDP's buckets, a second place for every gradient; a program's own."""
        if self.plan.cards == 1:
            return 0.0
        copies = self.gradient * self.trained if self.plan.sharding == "ddp" else 0.0
        return self.program.sharding.bucket_bytes + copies

    @cached_property
    def held(self) -> float:
        """Gradients there at the start of a micro-batch that is not the step's first."""
        return self.gradients if self.plan.accumulation > 1 else 0.0

    @cached_property
    def whole_gradient(self) -> float:
        """Bytes per parameter of a gradient before it is shared out: in the format it was computed in."""
        return float(self.formats.compute) if self.shares_adapters else self.gradient

    @cached_property
    def root(self) -> float:
        """What sharding gathers outside the blocks."""
        if not self.shares_weights:
            return 0.0
        matrices = 1 if self.architecture.tied_embeddings else 2
        return float(self.formats.compute * matrices * self.architecture.embedding_params)

    def gathered(self, layer: int) -> float:
        """Blocks gathered while block `layer` runs backward: itself, and the next where that is fetched ahead."""
        if not self.shares_weights:
            return 0.0
        if self.program.sharding.keeps_gathered and self.plan.lora_rank:
            return sum(self.gathered_bytes[layer:])
        ahead = self.gathered_bytes[layer - 1] if self.fetches_ahead(layer) else 0.0
        return self.gathered_bytes[layer] + ahead

    def fetches_ahead(self, layer: int) -> bool:
        """Whether the block before `layer` is gathered while this one runs backward: not at the last one, and not
        where a reentrant checkpoint has kept from the sharding that the block before will be needed again."""
        reentrant = self.program.holds_output and layer - 1 < self.plan.recompute
        return 0 < layer < self.architecture.layers - 1 and not reentrant

    @cached_property
    def gathered_bytes(self) -> tuple[float, ...]:
        """Bytes of a gathered block: quantised as stored, everything else as it is computed with."""
        packed = self.plan.lora_rank and self.plan.weight_format in QUANTISED
        return self.stored.block_bytes if packed else self.stored.computed_bytes

    # --- what comes and goes -----------------------------------------------------------------------------------------

    @cached_property
    def stream(self) -> float:
        """One hidden state of the micro-batch, in the residual's format."""
        return float(self.formats.residual * self.architecture.hidden_size * self.tokens)

    @cached_property
    def head_gradient(self) -> float:
        return self.whole_gradient * self.architecture.head_params if self.head_trains else 0.0

    def phase(self, name: str, **parts: float) -> PhaseMemory:
        """A phase: states and what `parts` add by kind."""
        found = dict(self._always)
        copies = 2 if self.program.copies_buffers and name != "load" else 1
        found["weights"] = int(self.weights + copies * self.buffers + parts.pop("weights", 0.0))
        found["optimizer"] = int((self.optimizer if name != "load" else 0.0) + parts.pop("optimizer", 0.0))
        for kind, value in parts.items():
            found[kind] += int(value)  # type: ignore[index]
        return PhaseMemory(name=name, parts=found)

    @cached_property
    def _always(self) -> dict[MemoryKind, int]:
        """What every phase has as much of, and nothing of all other kinds."""
        there: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        return there | {"adapters": int(self.adapters), "slots": int(self.slots), "buckets": int(self.buckets)}

    @cached_property
    def _kept(self) -> tuple[float, ...]:
        """Bytes each block keeps from forward to its backward, its input included where something needs it."""
        first, behind = self.first, self.first + self.plan.recompute
        on_device, products = self.plan.input_tier == "device", self.keeps_products
        again = [
            (
                (block.input * self.stored.states_between[layer] if on_device else 0.0)
                + (block.selected if products else 0.0)
            )
            * self.tokens
            for layer, block in enumerate(self.blocks[first:behind], start=first)
        ]
        once = [
            ((block.input if block.input_saved else 0.0) + block.saved) * self.tokens for block in self.blocks[behind:]
        ]
        return (*[0.0] * first, *again, *once)

    def recomputes(self, layer: int) -> bool:
        """Whether block `layer` runs again in backward."""
        return self.plan.recomputes(layer, self.architecture.layers)

    @cached_property
    def keeps_products(self) -> bool:
        return self.plan.selective and self.program.selective == "every other product"

    def kept_before(self, layer: int) -> float:
        """What the blocks before `layer` keep; inputs that wait in RAM have two places on the device."""
        elsewhere = 2 * self.stream if self.plan.recompute and self.plan.input_tier != "device" else 0.0
        return self.micro_batches_at_once * sum(self._kept[:layer]) + elsewhere

    @cached_property
    def micro_batches_at_once(self) -> int:
        """Blocks that visit do all micro-batches of the step before the next one comes: all their inputs wait."""
        return self.plan.accumulation if self.streams and not self.shares_weights else 1

    @cached_property
    def waiting(self) -> float:
        """Inputs of recomputed blocks that wait in RAM, of all micro-batches of the step while blocks stream."""
        if self.plan.input_tier == "device":
            return 0.0
        passes = self.plan.accumulation if self.streams else 1
        return passes * sum(self.stored.states_between[self.first : self.first + self.plan.recompute]) * self.stream

    @cached_property
    def final_norm(self) -> float:
        """After the blocks: the last hidden state, its normalised copy, and what the norm keeps."""
        norm = self.formats.kernels.norm
        if self.architecture.norm != "rmsnorm" or norm in ("fused", "recomputed"):
            return 2 * self.stream
        width = self.architecture.hidden_size * self.tokens
        normal = float((4 if norm == "fp32" else self.formats.residual) * width) if self.formats.trains else 0.0
        copy = 4.0 * width if self.formats.residual < 4 else 0.0
        return 2 * self.stream + normal + copy

    @cached_property
    def mask(self) -> float:
        """Attention's mask, one for all blocks of its kind. Eager attention adds it to the scores; others get yes or
        no, a byte per pair of positions, unless ALiBi's distances of every head are in it."""
        shape, length = self.architecture, self.length
        kinds = len(set(shape.windows))
        if self.formats.attention == "eager":
            return float(kinds * self.formats.residual * length * self.tokens)
        if shape.position == "alibi":
            return float(self.formats.residual * shape.heads * length * self.tokens)
        if not self.formats.masked and not self.formats.window:
            return 0.0
        return float((kinds if self.formats.masked else 1) * length * self.tokens)

    @cached_property
    def held_mask(self) -> float:
        """The mask after forward: blocks that run again are given it again, and attention keeps ALiBi's."""
        alibi = self.architecture.position == "alibi" and self.formats.attention != "eager"
        return self.mask if alibi or self.plan.recompute else 0.0

    def forward_phase(self) -> PhaseMemory:
        """The last recomputed block's forward, which keeps nothing; a block that keeps is highest in its backward."""
        last = min(self.first + self.plan.recompute, self.architecture.layers) - 1
        layers = {self.first - 1, last} if self.first else {last}
        found = [self._forward_of(layer) for layer in layers if layer >= 0]
        return max(found, key=lambda phase: phase.total_bytes, default=self.phase("forward", gradients=self.held))

    def _forward_of(self, layer: int) -> PhaseMemory:
        """The forward of a block that keeps nothing but perhaps its input."""
        block, before = self.blocks[layer], self.blocks[layer - 1].returned if layer else 0.0
        casts = sum(self.stored.casts) if self.caches_casts else max(self.stored.casts)
        passed = layer < self.first  # its input is nobody's; casts of weights without a gradient do not stay
        if passed:
            casts = self.stored.passing_cast
        moment = self._highest(block.evaluation)
        return self.phase(
            "forward",
            gradients=self.held,
            kept=self.kept_before(layer + 1) + self.mask + self.sent(layer, back=False),
            working=(moment.per_token + before + (block.input if passed else 0.0)) * self.tokens,
            weights=self.root + casts,
            dequantised=self._unpacked_at(moment),
        )

    def _highest(self, moments: tuple[Moment, ...]) -> Moment:
        """Of a forward that keeps nothing the moment that needs most."""
        return max(moments, key=lambda moment: moment.per_token * self.tokens + self._unpacked_at(moment))

    def loss_phase(self) -> PhaseMemory:
        casts = sum(self.stored.casts) if self.caches_casts else 0.0
        logits, gradients = self.logits()
        return self.phase(
            "loss",
            gradients=self.held + gradients,
            kept=self.kept_before(self.architecture.layers) + self._last_graph + self.held_mask,
            working=self.final_norm,
            logits=logits,
            weights=self.root + casts + self.head_cast + (self.visiting_head if head_visits(self.plan) else 0.0),
        )

    @cached_property
    def _last_graph(self) -> float:
        """What the graph of the micro-batch before still holds while the variable of its loss does: inputs of frozen
        4-bit linears. Its rows are of the mean length."""
        if not self.program.keeps_last_loss:
            return 0.0
        return self.last_tokens * sum(block.frozen_inputs for block in self.blocks)

    @cached_property
    def head_cast(self) -> float:
        """The head's weight in the compute format, when it is stored in another."""
        if self.shares_weights:
            return 0.0
        trains = self.head_trains or self.plan.trains_base
        stored = BYTES[self.plan.trained_format] if trains else self.formats.residual
        return float(self.formats.compute * self.architecture.head_params) if stored != self.formats.compute else 0.0

    def logits(self) -> tuple[float, float]:
        """(logits with all that is made of them, gradients made with them) at the worst moment of the loss.

        Whole logits: the program's bytes per entry, and one number more where the family caps them after the head. In
        chunks: of the rows of one chunk, with the hidden state's gradient, and the head's when it trains.
        """
        vocab, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        entry = self.logit_bytes
        if self.plan.loss == "full":
            # A soft cap keeps its tanh, in the format the head computes in.
            extra = float(self.formats.compute) if self.architecture.logit_softcap else 0.0
            return (entry + extra) * self.tokens * vocab, 0.0
        rows = min(self.tokens, self.plan.loss_chunk_tokens or self.tokens)
        picked = float(self.formats.residual * hidden * self.tokens)
        if self.plan.loss == "fused" and self.plan.compute not in ("fp32", "tf32"):
            entry = self._chunk_bytes
        if self.program.own_optimizers and self.head_gradient:
            # A chunk's part of the head's gradient is a 16-bit product beside its logits' gradient; their sum is fp32
            # and at last goes to the weight's format.
            narrow, head = self.formats.compute, self.architecture.head_params
            product = narrow * (rows * vocab + head) if narrow < 4 else 0.0
            copy = self.head_gradient if self.whole_gradient < 4 else 0.0
            return max(entry * rows * vocab, product, copy) + picked, 4.0 * head
        if not self.program.logits_kept:
            return entry * rows * vocab + picked, self.head_gradient
        # All chunks' losses run before any head's backward, which adds one chunk's gradient of the head to the others'.
        gradients = 2.0 * self.head_gradient
        kept = self.program.logits_kept * self.tokens * vocab
        return kept + max(0.0, entry * rows * vocab - gradients) + picked, gradients

    @cached_property
    def logit_bytes(self) -> float:
        """Bytes per token and vocabulary entry of the plan's loss."""
        if self.plan.loss == "chunked":
            return self._chunk_bytes
        narrow = self.program.logits_in_compute and self.formats.compute < 4
        return self.program.logits[self.plan.loss] * (0.5 if narrow else 1.0)

    @cached_property
    def _chunk_bytes(self) -> float:
        """The same in chunks. A CPU writes logarithms over logits that the family leaves as they are: fp32 beside the
        narrow ones they come from, or go back to."""
        if self.plan.device == "cpu" and self.architecture.plain_logits and not self.program.logits_kept:
            return 4.0 + (self.formats.compute if self.formats.compute < 4 else 0)
        narrow = self.program.logits_in_compute and self.formats.compute < 4
        return self.program.logits["chunked"] * (0.5 if narrow else 1.0)

    @cached_property
    def held_logits(self) -> float:
        """Logits a variable keeps through backward."""
        narrow = self.program.logits_in_compute and self.formats.compute < 4
        held = self.program.logits_held * (0.5 if narrow else 1.0) * self.tokens * self.architecture.vocab_size
        return held if self.plan.loss == "full" or self.program.logits_kept else 0.0

    def backward_phases(self) -> tuple[PhaseMemory, ...]:
        """At the last block, at the last of each kind, and at the first: between them memory changes linearly."""
        last, first = self.architecture.layers - 1, self.first
        again = first + self.plan.recompute
        compressed = min(last, max(first, again + self.plan.compress - 1))
        layers = sorted({last, max(first, again - 1), compressed, first}, reverse=True)
        if self.shares_weights and last > first + 1:
            layers.insert(1, last - 1)  # where the next block is fetched ahead
        return tuple(self.backward_phase(layer) for layer in dict.fromkeys(layers))

    def backward_phase(self, layer: int) -> PhaseMemory:
        """The worst moment of block `layer`'s backward, or of the forward that comes before it."""
        block, again = self.blocks[layer], self.recomputes(layer)
        gradients = self._gradients_in(layer)

        def moving(moment: Moment) -> float:
            return moment.alive(self.tokens) + gradients(moment) + self._unpacked_at(moment)

        moment = max(block.forward, key=moving)
        beside = self.stream if again else 0.0  # forward runs again beside the gradient of the block's output
        highest = max(block.backward, key=moving, default=moment)
        if moving(highest) >= moving(moment) + beside:
            moment = highest
            beside = beside if self.program.holds_output else 0.0
        own_input = block.input * self.tokens if again or block.input_saved else 0.0
        own_input += block.beyond * self.tokens if again and self.keeps_products else 0.0
        kept_casts = (each for at, each in enumerate(self.stored.casts[:layer]) if not self.recomputes(at))
        casts = self.stored.casts[layer] + (sum(kept_casts) if self.caches_casts else 0.0)
        return self.phase(
            f"backward of block {layer + 1}",
            gradients=gradients(moment),
            kept=self.kept_before(layer)
            + own_input
            + self._held_inputs(layer)
            + self.held_mask
            + self._other_gradients
            + self.sent(layer, back=True),
            working=moment.alive(self.tokens) + beside,
            logits=self.held_logits,
            weights=self.root + self.gathered(layer) + casts,
            dequantised=self._unpacked_at(moment),
        )

    @cached_property
    def _other_gradients(self) -> float:
        """Gradients of the hidden states of the step's other micro-batches."""
        return (self.micro_batches_at_once - 1) * self.stream

    def _unpacked_at(self, moment: Moment) -> float:
        """The matrix in use, unpacked from a quantised base to 16 bits."""
        quantised = self.plan.weight_format in QUANTISED and self.plan.lora_rank
        return 2.0 * moment.weights if quantised else 0.0

    def _gradients_in(self, layer: int) -> Callable[[Moment], float]:
        """Gradients there while an operation of block `layer` runs backward, by the moment of that operation."""
        plan, whole = self.plan, self.whole_gradient
        each_cast = float(self.formats.compute) if self.formats.casts else 0.0
        if self.trains_visitors:  # the block's own are counted with the places of blocks; what is added to them is not
            added = whole if plan.accumulation > 1 else 0.0
            return lambda moment: self.head_gradient + max(added, each_cast) * moment.making
        if self.uses_up_gradients:
            in_step = self.stored.step_chunk if plan.optimizer_in_backward else 0.0
            return lambda moment: self.head_waits + whole * moment.making + max(each_cast * moment.making, in_step)
        if plan.accumulation > 1:
            return lambda moment: self.held + self.head_waits + (whole + each_cast) * moment.making
        above = self.head_gradient + self.gradient * self.gradient_share * self.stored.trained_after[layer]
        return lambda moment: above + whole * moment.made + (whole + each_cast) * moment.making

    def _held_inputs(self, layer: int) -> float:
        """Inputs and their gradients of frozen blocks that sharding does not let go (see `Sharding`): inputs of the
        blocks from the next on, gradients from the one after it on, as the next one's is this block's own."""
        holds = self.program.sharding.holds_frozen_inputs and self.shares_weights and self.plan.cards > 1
        if not holds or not self.plan.lora_rank or not self.plan.recompute:
            return 0.0
        later = self.architecture.layers - 1 - layer
        return (later + max(0, later - 1)) * self.stream

    def embedding_phase(self) -> PhaseMemory:
        """The embedding's gradient is made whole, then added to the one there is (tied head, accumulation)."""
        dense = 0.0
        if self.plan.last_blocks:  # nothing comes before the first of them
            return self.phase("embedding", gradients=self.gradients + (self.outside_gradient if self.streams else 0.0))
        if not self.plan.lora_rank:
            whole = self.whole_gradient * self.architecture.embedding_params
            tied = 1 if self.architecture.tied_embeddings else 0
            dense = whole * (int(self.plan.accumulation > 1) + tied)
            if self.shares_weights:
                dense = self.root
        if self.trains_visitors:
            # A tied table's parts are summed apart: what there is of it, and the one that is made.
            made = whole if tied or self.plan.accumulation > 1 else 0.0
            dense = self.outside_gradient + made
        elif self.uses_up_gradients and not self.plan.lora_rank and not self.shares_weights:
            dense = self.whole_gradient * self.architecture.embedding_params + max(
                self.head_waits, self.stored.step_chunk
            )
        return self.phase("embedding", gradients=self.gradients + dense, kept=self.stream, weights=self.root)

    def step_phase(self) -> PhaseMemory:
        """All gradients, and what the optimizer makes beside them: fused and low-bit kernels nothing. Some programs
        cast the gradients to fp32 first."""
        plan, share = self.plan, self.trained * self.optimizer_share
        if self.trains_visitors:
            at_work = self.numbers_in_step if plan.device == "cpu" else 0.0
            return self.phase("step", gradients=self.outside_gradient, optimizer=at_work)
        if plan.optimizer_tier != "device" or self.uses_up_gradients:
            return self.phase("step", gradients=self.gradients)
        if self.program.own_optimizers:
            return self.phase("step", gradients=self.gradients, optimizer=self.stored.step_chunk)
        extra = self.program.step_temporary * self.weight * share if plan.optimizer_bits >= 16 else 0.0
        return self.phase("step", gradients=self.gradients + self.program.step_gradient * share, optimizer=extra)

    def evaluation_phase(self) -> PhaseMemory:
        """Forward without gradients: nothing is kept. The highest is a block's forward, or the logits."""
        casts = sum(self.stored.casts) if self.caches_casts else max(self.stored.casts)
        blocks = {id(block): (layer, block) for layer, block in enumerate(self.blocks)}.values()
        in_blocks = [
            self.phase(
                "evaluation",
                working=(block.input + block.returned + moment.per_token) * self.tokens,
                kept=self.mask + self.sent(layer, back=False),
                weights=casts + self.root,
                dequantised=self._unpacked_at(moment),
            )
            for layer, block in blocks
            for moment in (self._highest(block.evaluation),)
        ]
        at_head = self.phase(
            "evaluation",
            working=2 * self.stream,
            logits=self.evaluated_logits,
            weights=casts + self.head_cast + self.root + (self.visiting_head if head_visits(self.plan) else 0.0),
        )
        return max(*in_blocks, at_head, key=lambda phase: phase.total_bytes)

    def calibration_phases(self, workload: Workload) -> tuple[PhaseMemory, ...]:
        """One micro-batch in fp32 before a step (`vramfit.engine.drift`): nothing is held of others, all gradients are
        made, and stay until their norm is known.

        What moves is that of a plan in fp32; what lies there is this plan's. Weights that are stored in 16 bits are
        widened one module at a time, and backward needs the copies: of each block that is not recomputed from its
        forward to its backward, of one that is during its own, and of the head.
        """
        frozen16 = self.plan.weight_format in ("bf16", "fp16") and bool(self.plan.lora_rank)
        wide = dataclasses.replace(
            self.plan,
            compute="fp32",
            weight_format="fp32" if frozen16 else self.plan.weight_format,
            accumulation=1,
            optimizer_in_backward=False,
        )
        exact = Work.of(self.architecture, wide, workload, self.program)
        narrow = frozen16 or self.plan.trained_format in ("bf16", "fp16")
        last, again = self.architecture.layers - 1, self.plan.recompute
        found = []
        layers = sorted({last, max(0, again - 1), 0}, reverse=True)
        for layer, phase in ((last, exact.loss_phase()), *((layer, exact.backward_phase(layer)) for layer in layers)):
            there = range(again, layer + 1) if layer >= again else range(layer, layer + 1)
            copies = 4.0 * sum(map(self.architecture.params_of_block, there)) if narrow else 0.0
            if phase.name == "loss":
                copies += 4.0 * self.architecture.head_params if narrow else 0.0
                copies -= 4.0 * self.architecture.params_of_block(layer) if narrow and layer < again else 0.0
            moved = phase.parts["weights"] - int(exact.weights) + int(self.weights) + int(copies)
            found.append(PhaseMemory(name="calibration", parts={**phase.parts, "weights": moved}))
        return tuple(found)

    @cached_property
    def evaluated_logits(self) -> float:
        """Whole logits, in the format they are computed in too, and their log-softmax; in chunks what a chunk takes."""
        vocab = self.architecture.vocab_size
        if self.plan.loss == "full":
            first = float(self.formats.compute) if self.formats.compute < 4 else 0.0
            return min(8.0 + first, self.program.logits["full"]) * self.tokens * vocab
        rows = min(self.tokens, self.plan.loss_chunk_tokens or self.tokens)
        return min(self._chunk_bytes or 8.0, self.program.logits["full"]) * rows * vocab


def formats_of(architecture: Architecture, plan: Plan, program: Program = OURS, *, length: int = 0) -> Formats:
    """In which formats a block's tensors are.

    Trained weights in fp32 give an fp32 residual stream, and autocast casts what enters a matrix product; a frozen base
    in 16 bits, and 16-bit training without autocast, a 16-bit stream. Sharded fp32 weights are gathered in the compute
    format.
    """
    compute = int(BYTES[plan.compute])
    adapted: frozenset[str] = frozenset()
    if plan.lora_rank:
        residual = compute if plan.weight_format in QUANTISED else int(BYTES[plan.weight_format])
        names = {
            linear.name
            for layer in {0, architecture.layers - 1}
            for linear in adapted_linears(architecture, layer, plan.lora_targets)
        }
        adapted = frozenset(names)
    else:
        sharded = plan.sharding in ("zero3", "fsdp")
        residual = compute if sharded else int(BYTES[plan.trained_format])
    attention = "math" if plan.attention == "sdpa" and _needs_scores(architecture, plan) else plan.attention
    window = plan.attention == "sdpa" and 0 < (architecture.sliding_window or 0) <= length
    in_memory = attention in ("eager", "math") or plan.packing or window
    return Formats(
        residual=residual,
        compute=compute,
        trains=not plan.lora_rank,
        autocast=program.autocast and compute < 4,
        adapted=adapted,
        dora=plan.dora,
        adapts_experts=plan.lora_experts,
        rank=plan.lora_rank,
        adapter=int(program.adapter),
        quantised=bool(plan.lora_rank) and plan.weight_format in QUANTISED,
        dropout_mask=(4 if plan.device == "cpu" else 1) if plan.lora_dropout > 0 else 0,
        branch_mask=residual if plan.device == "cpu" else 1,
        attention=attention,
        masked=plan.packing,
        window=window,
        length=length if in_memory else 0,
        softmax=4 if program.autocast and plan.device != "cpu" else compute,
        kernels=program.kernels.compiled() if plan.compiled else program.kernels,
    )


def _needs_scores(architecture: Architecture, plan: Plan) -> bool:
    """Whether SDPA has no fused kernel for these heads: one key head for all queries; on CPUs, values of another width
    than the keys."""
    latent = architecture.latent
    uneven = latent is not None and latent.value_dim != latent.nope_dim + latent.rope_dim
    return architecture.spreads_heads or (uneven and plan.device == "cpu")


def _sent_of_token(architecture: Architecture, size: float, *, back: bool) -> float:
    """Bytes of a token that wait between the parts of a split block, with hidden states of `size` bytes a number."""
    return architecture.hidden_size * (4.0 + size * (2 if back else 1))


def slot_bytes_of(architecture: Architecture, plan: Plan, tokens: int, program: Program = OURS) -> int:
    """`Plan.slot_bytes` of a plan whose blocks visit, with so many tokens a step: 0 where each block may come alone and
    whole, or has to, or what a split one keeps of the tokens is more than it saves."""
    blocks = stored(architecture, plan, program).block_bytes
    wanted = slot_bytes(max(blocks), plan.budget_bytes)
    if wanted > max(blocks):  # several together: what crosses no link gains nothing by it
        return wanted if plan.device != "cpu" else 0
    if not plan.lora_rank or not any(architecture.by_kind(lambda layer: bool(experts_in_one(architecture, layer)))):
        return 0
    parts = stored(architecture, dataclasses.replace(plan, slot_bytes=wanted), program).parts
    left = max(each.shared for each in parts) + max(each.slice for each in parts)
    keeps = tokens * _sent_of_token(architecture, BYTES[plan.compute], back=True)
    return wanted if STREAM_SLOTS * (max(blocks) - left) > keeps else 0


@lru_cache(maxsize=256)
def walks(shape: Architecture, formats: Formats, own: int | None, *, compressed: bool) -> tuple[BlockMemory, ...]:
    """Every block's walk; the input of block `own` needs no gradient."""
    usual = shape.by_kind(
        lambda layer: block_memory(shape, layer, formats, compressed=compressed), windows=formats.window
    )
    if own is None:
        return usual
    first = block_memory(shape, own, formats, input_grad=False, compressed=compressed)
    return (*usual[:own], first, *usual[own + 1 :])


def compresses(plan: Plan, layer: int, layers: int) -> bool:
    """Whether block `layer` of `layers` keeps its linears' inputs in 8 bits."""
    first = plan.first_trained(layers) + plan.recompute
    return first <= layer < first + plan.compress


def usual_block(architecture: Architecture, formats: Formats) -> BlockMemory:
    """The walk of the last block, which is like most."""
    return block_memory(architecture.shape, architecture.layers - 1, formats)
