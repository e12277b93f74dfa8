"""What stands through a step, in bytes on one card: weights, adapters, gradients, optimizer states, places for blocks
that visit; and what lies in RAM and on disk. None of it needs a walk of a block."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Final, Self

from vramfit.models.architecture import Architecture
from vramfit.models.families import MASK_OF_ALL_POSITIONS
from vramfit.planning.block import Formats
from vramfit.planning.formats import formats_of
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS, Program
from vramfit.planning.slots import SplitBlock, groups_of, slot_bytes, together
from vramfit.planning.stored import BYTES, QUANTISED, Stored, experts_in_one, head_trains, stored
from vramfit.units import GIB

STREAM_SLOTS: Final = 2
"""Blocks on the device at once while streaming: one computes, one arrives."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What of a step does not depend on which operation runs, in bytes on one card. `tokens` are those of a
    micro-batch, `weights` of the frozen base or of all that trains, `weight` and `gradient` bytes per trained
    parameter. `first` is the first block that has a backward."""

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
    def of(cls, architecture: Architecture, plan: Plan, workload: Workload, program: Program) -> Self:
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
        return int(3 * GIB + self.weights / 8 + self.host_states + self.waiting_in_ram)

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
        states = self.optimizer_states + self.gradients_on_tier if on_disk else 0.0
        return self.weights_on_disk + states + self.waiting_on_disk

    @cached_property
    def written_per_step(self) -> float:
        """Bytes a step writes to disk: states that live there, weights that train there, and inputs that wait there.
        Frozen weights are read."""
        on_disk = self.plan.optimizer_tier == "disk"
        states = self.optimizer_states + self.gradients_on_tier if on_disk else 0.0
        return states + (self.weights_on_disk if self.trains_visitors else 0.0) + self.waiting_on_disk

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
        is not, nor one that recorded launches add to, which needs its place before it comes."""
        if self.plan.records_graphs:
            return False
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
        """Gradients there at the start of a micro-batch that is not the step's first; of each, behind recorded
        launches."""
        return self.gradients if self.plan.accumulation > 1 or self.plan.records_graphs else 0.0

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

    @cached_property
    def stream(self) -> float:
        """One hidden state of the micro-batch, in the residual's format."""
        return float(self.formats.residual * self.architecture.hidden_size * self.tokens)

    @cached_property
    def head_gradient(self) -> float:
        return self.whole_gradient * self.architecture.head_params if self.head_trains else 0.0

    @cached_property
    def micro_batches_at_once(self) -> int:
        """Blocks that visit do all micro-batches of the step before the next one comes: all their inputs wait."""
        return self.plan.accumulation if self.streams and not self.shares_weights else 1

    @cached_property
    def waiting(self) -> float:
        """Inputs of recomputed blocks that wait for their backward, of all micro-batches of the step while blocks
        stream."""
        passes = self.plan.accumulation if self.streams else 1
        return passes * sum(self.stored.states_between[self.first : self.first + self.plan.recompute]) * self.stream

    @cached_property
    def waiting_in_ram(self) -> float:
        """Those of them in RAM beside a device; on their way to disk or back, one in use and one that comes."""
        if self.plan.input_tier == "disk":
            return 2 * self.stream
        return self.waiting if self.plan.input_tier == "host" else 0.0

    @cached_property
    def waiting_on_disk(self) -> float:
        return self.waiting if self.plan.input_tier == "disk" else 0.0


def head_visits(plan: Plan) -> bool:
    """Whether a frozen head comes from its file when logits are made, and goes: where RAM is the device, it may be as
    large as several blocks, and takes no part in theirs."""
    in_fp32 = plan.compute in ("fp32", "tf32")  # else it may be raised to fp32, which takes a copy
    return plan.weights_tier == "disk" and plan.device == "cpu" and plan.lora_rank > 0 and in_fp32


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
