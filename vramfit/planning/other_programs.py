"""The same run in other programs: what each needs of a card and how fast it is, from its record (`program.py`).

A plan of ours is turned into what the other program would do: its own loss and formats, everything on the device (none
of the records streams), and all blocks recomputed or none, as their switch has it. Of micro-batches it gets ours or the
largest half, quarter ... of it that fits, so that a step has the same sequences.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, Final

from vramfit.config import Method
from vramfit.errors import ConfigError, Problem
from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import InputTier, MemoryEstimate, Plan, SpeedEstimate, Workload
from vramfit.planning.program import OURS, PROGRAMS, Program
from vramfit.planning.speed import estimate_speed
from vramfit.planning.stored import QUANTISED

COMPARED: Final = (
    "transformers",
    "transformers+liger",
    "peft",
    "unsloth",
    "fms/foak",
    "torchtune",
    "torchtitan",
    "litgpt",
    "deepspeed",
    "megatron",
    "answerai fsdp_qlora",
)
"""Programs that people have; the other records are of scripts for one model, and of versions."""

_ADAPTERS_IN_FEW_BITS: Final = {
    "litgpt": "litgpt-quantised",
    "fms": "fms-quantised",
    "fms/foak": "fms/foak-quantised",
}
DEEPSPEED_BUCKET: Final = 5e8
COLOSSAL_BUCKET: Final = 12 * 2**20
ZERO3_LIVE: Final = 1e9
"""Numbers in a bucket by default, and parameters ZeRO-3 keeps gathered at most."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """What is trained and on what, whoever does it: `sequences` are those of a step, `ram_bytes` all there is."""

    architecture: Architecture
    device: Device
    workload: Workload
    sequences: int
    ram_bytes: int


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A run as a program would do it: its plan, what that needs, how fast it is, whether it fits device and RAM."""

    program: str
    plan: Plan
    memory: MemoryEstimate
    speed: SpeedEstimate
    fits: bool


def record_of(name: str, plan: Plan) -> Program:
    """The record called `name`, or the one of it that this plan takes. Raises ConfigError: nobody wrote one of that
    name, or it has no such method."""
    if name not in PROGRAMS:
        what = f"There is no record of a program called {name[:60]!r} among {len(PROGRAMS)}"
        raise ConfigError([Problem(field="", what=what, remedy=f"Choose from: {', '.join(PROGRAMS)}.")])
    program = PROGRAMS[_variant(name, plan)]
    if plan.method not in program.methods:
        what = f"The record of {name} is of {len(program.methods)} methods, and {plan.method} is none of them"
        raise ConfigError([Problem(field="", what=what, remedy=f"Choose {' or '.join(program.methods)}.")])
    return program


def _variant(name: str, plan: Plan) -> str:
    if plan.lora_rank and plan.weight_format in QUANTISED:
        return _ADAPTERS_IN_FEW_BITS.get(name, name)
    if name == "litgpt" and plan.lora_rank and plan.sharding == "fsdp":
        return "litgpt/fsdp"
    if name == "peft" and plan.dora:
        return "peft/dora"
    return "torchtune/compiled" if name == "torchtune" and plan.compiled else name


def has_method(name: str, method: Method) -> bool:
    """Whether the program does that at all."""
    return method in PROGRAMS[name].methods


def shape_for(architecture: Architecture, program: Program) -> Architecture:
    """The model as that program has it: libraries of these records had a module for each expert; a head that is tied
    to the embedding may be a matrix of its own."""
    if program.name == OURS.name:
        return architecture
    if architecture.experts:
        architecture = replace(architecture, experts=replace(architecture.experts, modules=True))
    return replace(architecture, tied_embeddings=False) if program.unties_head else architecture


def chunk_rows(program: Program, loss: str, architecture: Architecture, *, micro_batch: int, tokens: int) -> int:
    """Rows of logits alive at once in a micro-batch of `tokens`: 0 is all. Fused with the head, so many that a chunk's
    logits are about as large as the hidden states (Liger's rule); LitGPT has 128 of each sequence, torchtune eight
    chunks."""
    if loss == "full":
        return 0
    if loss == "fused":
        return 1 << max(0, int(tokens * architecture.hidden_size / architecture.vocab_size) - 1).bit_length()
    return 128 * micro_batch if program.name.startswith("litgpt") else -(-tokens // 8)


def with_buckets(program: Program, plan: Plan, architecture: Architecture) -> Program:
    """With the buffers that ZeRO holds all the time: two 16-bit buckets to reduce gradients; ZeRO-3 one to prefetch,
    and its live parameters. Adapters are too few for any."""
    if not program.master or not plan.sharding.startswith("zero"):
        return program
    buckets = 2 * 2 * min(DEEPSPEED_BUCKET, architecture.params)
    if plan.sharding == "zero3":
        buckets += 2 * min(ZERO3_LIVE, architecture.params)
    if program.name == "colossalchat":
        buckets = 2 * 2 * COLOSSAL_BUCKET
    elif plan.lora_rank:
        buckets = 0.0
    return replace(program, sharding=replace(program.sharding, bucket_bytes=buckets))


def plan_in(program: Program, plan: Plan, architecture: Architecture, workload: Workload, **changes: Any) -> Plan:
    """Our `plan` as `program` would carry it out. `changes` are micro_batch, accumulation, recompute, cards ..."""
    if program.name == OURS.name:
        return replace(plan, **changes)
    found = replace(
        plan,
        **_formats(program, plan),
        weights_tier="device",
        resident_blocks=0,
        slot_bytes=0,
        optimizer_tier="device",
        optimizer_in_backward=False,
        compress=0,
        loss=program.loss,
        calibrates=False,
        **changes,
    )
    length = found.max_length if found.packing else min(found.max_length, workload.longest_tokens)
    size = found.micro_batch
    rows = chunk_rows(program, program.loss, architecture, micro_batch=size, tokens=size * length)
    waits: InputTier = "host" if program.inputs_in_ram and found.recompute else "device"
    return replace(found, loss_chunk_tokens=rows, input_tier=waits)


def _formats(program: Program, plan: Plan) -> dict[str, Any]:
    """Programs without autocast train in the format they compute with, and so are AdamW's moments where no fp32 copy of
    the weights is kept. With autocast weights are fp32 unless bf16 was wished for."""
    narrow = "fp32" if plan.compute == "tf32" else plan.compute
    kept16 = plan.trained_format != "fp32" and plan.weights_tier == "device"
    trained = narrow if kept16 or not program.autocast else "fp32"
    in_16_bits = program.adapter < 4 if plan.lora_rank else trained != "fp32"
    bits = 16 if in_16_bits and narrow != "fp32" and not program.master else 32
    formats: dict[str, Any] = {"optimizer_bits": bits if plan.optimizer_bits == 32 else plan.optimizer_bits}
    return formats if plan.lora_rank else {**formats, "trained_format": trained, "weight_format": trained}


def elsewhere(
    name: str, plan: Plan, run: Run, *, keeps_micro_batch: bool = False, keeps_recompute: bool = False
) -> Elsewhere:
    """The run of `plan` as the program called `name` would do it: the quickest way that fits the plan's budget, else
    the one that needs least. What the user fixed is kept. Raises ConfigError as `record_of`."""
    program = with_buckets(record_of(name, plan), plan, run.architecture)
    shape = shape_for(run.architecture, program)
    every = plan.trained_layers(shape.layers)
    counts = (every if plan.recompute else 0,) if keeps_recompute else (0, every)
    sizes = (plan.micro_batch,) if keeps_micro_batch else tuple(_halves(plan.micro_batch))
    found = []
    for size, recompute in itertools.product(sizes, counts):
        parts = math.ceil(run.sequences / (size * plan.cards))
        way = plan_in(program, plan, shape, run.workload, micro_batch=size, accumulation=parts, recompute=recompute)
        found.append(_estimated(name, program, way, dataclasses.replace(run, architecture=shape)))
    fitting = [each for each in found if each.fits]
    if fitting:
        return min(fitting, key=lambda each: each.speed.step_seconds)
    return min(found, key=lambda each: each.memory.device_bytes)


def _halves(size: int) -> Iterator[int]:
    while size:
        yield size
        size //= 2


def _estimated(name: str, program: Program, plan: Plan, run: Run) -> Elsewhere:
    memory = estimate_memory(run.architecture, plan, run.workload, program=program)
    in_ram = plan.device == "cpu" or memory.host_bytes <= run.ram_bytes
    return Elsewhere(
        program=name,
        plan=plan,
        memory=memory,
        fits=in_ram and memory.device_bytes <= plan.budget_bytes,
        speed=estimate_speed(
            run.architecture, plan, run.device, run.workload, sequences_per_step=run.sequences, program=program
        ),
    )
