"""What a run stores whatever its micro-batch is: base weights, what trains of them and beside them, optimizer states.

Numbers are of parameters, sizes in bytes of all cards together. One record of a plan's is worked out once for all
micro-batches, counts of recomputed and of resident blocks that a search tries with it (`stored`).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter
from typing import Any, Final, TypeVar

from vramfit.models.architecture import Architecture, Linear
from vramfit.planning.optimizer_memory import Weight, state_bytes, step_bytes
from vramfit.planning.plan import Plan
from vramfit.planning.program import OURS, Program
from vramfit.planning.slots import SplitBlock, split_block

_Value = TypeVar("_Value")

BYTES: Final = {
    "fp32": 4.0,
    "tf32": 4.0,
    "bf16": 2.0,
    "fp16": 2.0,
    "int8": 1.0 + 4 / 4096,
    "nf4": 0.5 + 1 / 64 + 4 / 16384,
    "nf4-plain": 0.5 + 4 / 64,
    "gptq-int4": 0.5 + 2.5 / 128,
    "gptq-int4-whole": 0.5,
    "gptq-int8": 1.0 + 3 / 128,
}
"""Bytes per stored weight. int8: an fp32 scale per row of 4,096. nf4, doubly quantised: 4 bits, an 8-bit scale per 64
weights, an fp32 per 256 scales; plain: an fp32 scale per 64. GPTQ in groups of 128: a 16-bit scale and a packed zero
each; whole: one for a column, which is nothing beside the rest."""


QUANTISED: Final = frozenset({"int8", "nf4", "nf4-plain", "gptq-int4", "gptq-int4-whole", "gptq-int8"})


def adapter_params(
    architecture: Architecture, *, rank: int, targets: tuple[str, ...], dora: bool = False, experts: bool = False
) -> int:
    """Parameters of LoRA: rank x (inputs + outputs) for each adapted linear of each block. DoRA has a length for each
    output, too; `experts` are those beside each expert of a mixture."""

    def of_block(layer: int) -> int:
        return sum(adapter_sizes(architecture, layer, rank=rank, targets=targets, dora=dora, experts=experts))

    return sum(architecture.by_kind(of_block))


def adapter_sizes(
    architecture: Architecture,
    layer: int,
    *,
    rank: int,
    targets: tuple[str, ...],
    dora: bool = False,
    experts: bool = False,
) -> tuple[int, ...]:
    """Numbers of every tensor of the adapters of block `layer`."""
    weights = _adapter_weights(architecture, layer, rank=rank, targets=targets, dora=dora, experts=experts)
    return tuple(weight.numbers for weight in weights)


def _adapter_weights(
    architecture: Architecture, layer: int, *, rank: int, targets: tuple[str, ...], dora: bool, experts: bool
) -> Iterator[Weight]:
    for linear in adapted_linears(architecture, layer, targets):
        for side in (linear.inputs, linear.outputs):
            yield Weight(rank * side * linear.copies, (rank + side) * linear.copies, copies=linear.copies)
        if dora:
            yield Weight(linear.outputs * linear.copies)
    for inputs, outputs in expert_sides(architecture, layer) if experts else ():
        yield from (Weight(rank * side, rank + side) for side in (inputs, outputs))


def outside_weights(architecture: Architecture, plan: Plan) -> Iterator[Weight]:
    """Weights that train outside the blocks, an embedding first; vectors together."""
    shape = architecture
    matrix = Weight(shape.embedding_params, shape.vocab_size + shape.hidden_size, inside=False)
    if plan.lora_rank:
        yield from (matrix for _ in plan.saved_modules)
        return
    if plan.last_blocks:
        head = 0 if shape.tied_embeddings else shape.head_params
        if head:
            yield Weight(head, shape.vocab_size + shape.hidden_size, inside=False)
        yield Weight(shape.after_params - head, inside=False)
        return
    head = 0 if shape.tied_embeddings else shape.head_params
    positions = shape.learned_positions * shape.hidden_size
    yield matrix
    if positions:
        yield Weight(positions, shape.learned_positions + shape.hidden_size, inside=False)
    if head:
        yield Weight(head, shape.vocab_size + shape.hidden_size, inside=False)
    yield Weight(shape.outside_params - matrix.numbers - positions - head, inside=False)


def block_weights(architecture: Architecture, layer: int, plan: Plan) -> Iterator[Weight]:
    """Weights of block `layer` that train; vectors together where all train. A block before the last ones has none."""
    if layer < plan.first_trained(architecture.layers):
        return
    if plan.lora_rank:
        yield from _adapter_weights(
            architecture,
            layer,
            rank=plan.lora_rank,
            targets=plan.lora_targets,
            dora=plan.dora,
            experts=plan.lora_experts,
        )
        return
    left = architecture.params_of_block(layer)
    for linear in architecture.linears(layer):
        there = min(left, linear.weights)  # a counted block may have fewer parameters than its shape says
        left -= there
        yield Weight(there, (linear.inputs + linear.outputs) * linear.copies, copies=linear.copies)
    yield Weight(left)


def expert_sides(architecture: Architecture, layer: int) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of all experts of block `layer` together, for each tensor they are kept in: what makes the gate
    and what makes its factor lie in one."""
    own = experts_in_one(architecture, layer)
    if not own:
        return ()
    *ups, down = own
    up = ups[0].inputs * ups[0].copies, sum(linear.outputs * linear.copies for linear in ups)
    return up, (down.inputs * down.copies, down.outputs * down.copies)


def experts_in_one(architecture: Architecture, layer: int) -> tuple[Linear, ...]:
    """The matrices of a block whose experts lie in one tensor, of which any can be taken."""
    return tuple(each for each in architecture.linears(layer) if each.part == "expert" and not each.module)


def adapted_linears(architecture: Architecture, layer: int, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """The linears of block `layer` that get adapters. ("all-linear",) takes every linear module of the block.

    A target may be more than a name: `self_attn.q_proj` is a q_proj.
    """
    everything = targets[:1] == ("all-linear",)
    names = {target.rpartition(".")[2] for target in targets}
    return tuple(
        linear for linear in architecture.linears(layer) if linear.module and (everything or linear.name in names)
    )


def trained_params(architecture: Architecture, plan: Plan) -> int:
    """Parameters with a gradient."""
    if plan.lora_rank:
        adapters = adapter_params(
            architecture, rank=plan.lora_rank, targets=plan.lora_targets, dora=plan.dora, experts=plan.lora_experts
        )
        return adapters + len(plan.saved_modules) * architecture.embedding_params
    return trained_outside(architecture, plan) + sum(
        _of_blocks(architecture, plan, lambda layer: _block_trained(architecture, layer, plan), 0)
    )


def trained_outside(architecture: Architecture, plan: Plan) -> int:
    """Parameters with a gradient that are in no block."""
    if plan.lora_rank:
        return len(plan.saved_modules) * architecture.embedding_params
    return architecture.after_params if plan.last_blocks else architecture.outside_params


def head_trains(architecture: Architecture, plan: Plan) -> bool:
    """Whether the matrix that makes logits does."""
    if plan.lora_rank:
        return "head" in plan.saved_modules
    return not (plan.last_blocks and architecture.tied_embeddings)


def _of_blocks(
    architecture: Architecture, plan: Plan, value: Callable[[int], _Value], frozen: _Value
) -> tuple[_Value, ...]:
    """`value` of every block that has a backward, worked out once for each kind, and `frozen` for those before them."""
    first = plan.first_trained(architecture.layers)
    return (*[frozen] * first, *architecture.by_kind(value, first=first))


def moment_bytes(architecture: Architecture, plan: Plan) -> float:
    """Bytes of the optimizer's states of all that trains, without copies of weights."""

    def of_block(layer: int) -> float:
        return sum(state_bytes(plan, weight) for weight in block_weights(architecture, layer, plan))

    outside = sum(state_bytes(plan, weight) for weight in outside_weights(architecture, plan))
    return outside + sum(_of_blocks(architecture, plan, of_block, 0.0))


def weight_bytes(architecture: Architecture, plan: Plan, program: Program = OURS) -> float:
    """Bytes of the base weights: a quantised format for the blocks' linears and experts, all else as computed with."""
    if not plan.lora_rank:
        return BYTES[plan.trained_format] * architecture.params
    if plan.weight_format not in QUANTISED:
        return BYTES[plan.weight_format] * architecture.params
    blocks = sum(architecture.by_kind(lambda layer: _block_weight_bytes(architecture, layer, plan, program)))
    return BYTES[plan.compute] * architecture.outside_params + blocks


def _block_weight_bytes(architecture: Architecture, layer: int, plan: Plan, program: Program) -> float:
    """Stored bytes of one block's base weights."""
    params = architecture.params_of_block(layer)
    if not plan.lora_rank:
        return BYTES[plan.trained_format] * params
    if plan.weight_format not in QUANTISED:
        return BYTES[plan.weight_format] * params
    packed = sum(linear.weights for linear in architecture.linears(layer) if program.kernels.packs(linear))
    linears = min(params, packed)  # a counted block may have fewer parameters than its shape says
    return BYTES[plan.weight_format] * linears + BYTES[plan.compute] * (params - linears)


def _block_trained(architecture: Architecture, layer: int, plan: Plan) -> int:
    if not plan.lora_rank:
        return architecture.params_of_block(layer)
    return sum(sizes_of_block(architecture, layer, plan))


def sizes_of_block(architecture: Architecture, layer: int, plan: Plan) -> tuple[int, ...]:
    """Numbers of every tensor of the adapters that `plan` has in block `layer`."""
    return adapter_sizes(
        architecture,
        layer,
        rank=plan.lora_rank,
        targets=plan.lora_targets,
        dora=plan.dora,
        experts=plan.lora_experts,
    )


@dataclass(frozen=True)
class Stored:
    """What of a model trains, and what lies there of it, under a plan."""

    architecture: Architecture
    plan: Plan
    program: Program

    @cached_property
    def trained(self) -> int:
        """Parameters with a gradient."""
        return trained_params(self.architecture, self.plan)

    @cached_property
    def trained_outside(self) -> int:
        """Those that are in no block."""
        return trained_outside(self.architecture, self.plan)

    @cached_property
    def block_trained(self) -> tuple[int, ...]:
        """Those of each block."""
        return _of_blocks(self.architecture, self.plan, lambda at: _block_trained(self.architecture, at, self.plan), 0)

    @cached_property
    def trained_after(self) -> tuple[int, ...]:
        """Those of all blocks behind each."""
        return tuple(itertools.accumulate(self.block_trained[:0:-1], initial=0))[::-1]

    @cached_property
    def adapter_params(self) -> int:
        """Those of adapters."""
        plan = self.plan
        if not plan.lora_rank:
            return 0
        return adapter_params(
            self.architecture,
            rank=plan.lora_rank,
            targets=plan.lora_targets,
            dora=plan.dora,
            experts=plan.lora_experts,
        )

    @cached_property
    def weight_bytes(self) -> float:
        """The base's weights."""
        return weight_bytes(self.architecture, self.plan, self.program)

    @cached_property
    def block_bytes(self) -> tuple[float, ...]:
        """The base's weights in each block."""
        return self.architecture.by_kind(
            lambda layer: _block_weight_bytes(self.architecture, layer, self.plan, self.program)
        )

    @cached_property
    def split(self) -> tuple[SplitBlock | None, ...]:
        """Of each block its parts, None where it comes whole."""
        shape, plan = self.architecture, self.plan
        if not plan.slot_bytes or not plan.lora_rank:
            return (None,) * shape.layers

        def of_block(layer: int) -> SplitBlock | None:
            own = experts_in_one(shape, layer)
            packed = BYTES[plan.weight_format] * sum(linear.weights for linear in own)
            return split_block(self.block_bytes[layer], packed, own[0].copies if own else 0, plan.slot_bytes)

        return shape.by_kind(of_block)

    @cached_property
    def parts(self) -> tuple[SplitBlock, ...]:
        """Those of every block, one part where it comes whole."""
        pairs = zip(self.split, self.block_bytes, strict=True)
        return tuple([split or SplitBlock.undivided(whole) for split, whole in pairs])

    @cached_property
    def states_between(self) -> tuple[int, ...]:
        """Hidden states of each block that wait for its backward when it is recomputed: its input, and where it is
        split the answer of its experts."""
        return tuple([1 if each is None else 2 for each in self.split])

    @cached_property
    def largest_blocks(self) -> tuple[float, ...]:
        """Of so many of the largest blocks together, from none to all."""
        return tuple(itertools.accumulate(sorted(self.block_bytes, reverse=True), initial=0.0))

    @cached_property
    def computed_bytes(self) -> tuple[float, ...]:
        """Each block in the format it is computed with."""
        each = int(BYTES[self.plan.compute])
        return self.architecture.by_kind(lambda layer: float(each * self.architecture.params_of_block(layer)))

    @cached_property
    def casts(self) -> tuple[float, ...]:
        """16-bit copies that autocast makes of each block's trained fp32 matrices."""
        return _of_blocks(self.architecture, self.plan, self._cast_bytes, 0.0)

    @cached_property
    def passing_cast(self) -> float:
        """The 16-bit copy of the largest matrix of a block that is only passed forward."""
        first, each = self.plan.first_trained(self.architecture.layers), int(BYTES[self.plan.compute])
        if not first or not self.program.autocast or each == 4 or self.plan.trained_format != "fp32":
            return 0.0
        return float(
            each * max(linear.weights for layer in range(first) for linear in self.architecture.linears(layer))
        )

    @cached_property
    def moments(self) -> float:
        """The optimizer's states, without copies of weights."""
        return moment_bytes(self.architecture, self.plan)

    @cached_property
    def step_chunk(self) -> float:
        """What our own optimizers make beside one weight in its step on the device."""
        if not self.program.own_optimizers or self.plan.optimizer_tier != "device":
            return 0.0
        shape, plan = self.architecture, self.plan
        bf16 = (self.program.adapter if plan.lora_rank else BYTES[plan.trained_format]) < 4
        of_block = lambda layer: step_bytes(plan, block_weights(shape, layer, plan), bf16=bf16)  # noqa: E731
        of_blocks = _of_blocks(shape, plan, of_block, 0.0)
        return max(step_bytes(plan, outside_weights(shape, plan), bf16=bf16), *of_blocks)

    @cached_property
    def largest_table(self) -> int:
        """Numbers of the largest weight outside the blocks that trains."""
        return max((weight.numbers for weight in outside_weights(self.architecture, self.plan)), default=0)

    @cached_property
    def scales(self) -> float:
        """A 4-bit base's scales where sharding leaves them out, so that every card has them all."""
        if not self.program.sharding.keeps_scales or not self.plan.lora_rank:
            return 0.0
        each = BYTES[self.plan.weight_format] - 0.5 if self.plan.weight_format in ("nf4", "nf4-plain") else 0.0
        linears = (linear for layer in range(self.architecture.layers) for linear in self.architecture.linears(layer))
        return each * sum(linear.weights for linear in linears if self.program.kernels.packs(linear))

    def _cast_bytes(self, layer: int) -> float:
        plan, each = self.plan, int(BYTES[self.plan.compute])
        if each == 4 or not self.program.autocast:
            return 0.0
        if plan.lora_rank:
            wide = int(self.program.adapter) > 2
            return float(each * _block_trained(self.architecture, layer, plan)) if wide else 0.0
        if plan.trained_format != "fp32" or plan.sharding in ("zero3", "fsdp"):
            return 0.0
        return float(each * sum(linear.weights for linear in self.architecture.linears(layer)))


_MOVES: Final[dict[str, Any]] = {
    "budget_bytes": 0,
    "resident_blocks": 0,
    "max_length": 1,
    "micro_batch": 1,
    "accumulation": 1,
    "recompute": 0,
    "selective": False,
    "input_tier": "device",
    "compress": 0,
    "loss": "full",
    "loss_chunk_tokens": 0,
    "attention": "sdpa",
    "packing": False,
    "optimizer_in_backward": False,
    "clip_passes": 1,
    "compiled": False,
    "compile_mode": "default",
    "calibrates": False,
    "reasons": (),
}
"""Of a plan, what changes nothing of what is stored, at one value each."""


_STAYS: Final = tuple(each.name for each in dataclasses.fields(Plan) if each.name not in _MOVES)
_stays: Final = attrgetter(*_STAYS)


def stored(architecture: Architecture, plan: Plan, program: Program = OURS) -> Stored:
    """What `plan` stores of a model, known already where another plan stored the same."""
    return stored_as(architecture.shape, _stays(plan), program)


@lru_cache(maxsize=256)
def stored_as(architecture: Architecture, stays: tuple[Any, ...], program: Program) -> Stored:
    """The record of a shape and of all plans that have these values of what changes it."""
    return Stored(architecture, Plan(**_MOVES, **dict(zip(_STAYS, stays, strict=True))), program)
