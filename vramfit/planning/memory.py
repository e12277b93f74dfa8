"""Device memory of a plan, phase by phase: closed form, in milliseconds, from what the program does.

T = micro-batch x length (tokens), h hidden, V vocabulary rows, L blocks, P parameters. The peak is the largest phase,
never their sum:

    load        weights as they come
    loss        states + kept activations of all blocks + logits and their gradient
    backward    states + kept activations of the blocks before + one block's backward + gradients made so far
    embedding   states + all gradients + the embedding's dense gradient beside the one it is added to
    step        states + all gradients + the optimizer's temporaries
    evaluation  states + one block's forward + logits, nothing kept

states = weights + adapters + optimizer. Under accumulation the gradients of the micro-batches before are there in every
phase. What a block keeps and needs is walked operation by operation in `block.py`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from vramfit.models.architecture import Architecture, Linear
from vramfit.planning.block import BlockMemory, Formats, block_memory
from vramfit.planning.plan import MEMORY_KINDS, MemoryEstimate, MemoryKind, PhaseMemory, Plan, Workload
from vramfit.units import GIB, MIB

_Value = TypeVar("_Value")

BYTES: Final = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "nf4": 0.5 + 1 / 64 + 4 / 16384}
"""Bytes per stored weight. nf4, doubly quantised: 4 bits, an 8-bit scale per 64 weights, an fp32 per 256 scales."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """Facts of the program that trains. Bytes per parameter unless the name says otherwise.

    `step_temporary` is what the optimizer step allocates on top (4 for foreach AdamW in fp32, 0 for the fused kernel);
    `caches_casts` whether autocast keeps 16-bit copies of all weights until forward ends; `context_bytes` what the
    driver takes on a card before the first tensor; `process_bytes` what interpreter and libraries take of RAM.
    """

    name: str
    gradient: float
    moments: float
    step_temporary: float
    caches_casts: bool
    context_bytes: int
    process_bytes: int


OURS: Final = Program(
    name="vramfit",
    gradient=4.0,
    moments=8.0,
    step_temporary=0.0,
    caches_casts=True,
    context_bytes=int(0.6 * GIB),
    process_bytes=int(0.55 * GIB),
)
"""Our engine: trained weights fp32, AdamW's two fp32 moments, fused kernel, autocast with its cache.

Context 0.5-0.8 GiB on NVIDIA cards (mechanisms); process: 0.40 GiB measured after torch, transformers, peft and
a tiny step, and 0.15 for tokenizer and data.
"""


def adapter_params(architecture: Architecture, *, rank: int, targets: tuple[str, ...]) -> int:
    """Parameters of LoRA: rank x (inputs + outputs) for each adapted linear of each block."""
    return sum(
        _by_kind(
            architecture,
            lambda layer: sum(
                rank * (linear.inputs + linear.outputs) for linear in adapted_linears(architecture, layer, targets)
            ),
        )
    )


def adapted_linears(architecture: Architecture, layer: int, targets: tuple[str, ...]) -> tuple[Linear, ...]:
    """The linears of block `layer` that get adapters. ("all-linear",) takes every linear module of the block.

    A target may be more than a name: `self_attn.q_proj` is a q_proj.
    """
    everything = targets == ("all-linear",)
    names = {target.rpartition(".")[2] for target in targets}
    return tuple(
        linear for linear in architecture.linears(layer) if linear.module and (everything or linear.name in names)
    )


def trained_params(architecture: Architecture, plan: Plan) -> int:
    """Parameters with a gradient."""
    if plan.lora_rank:
        return adapter_params(architecture, rank=plan.lora_rank, targets=plan.lora_targets)
    return architecture.params


def estimate_memory(
    architecture: Architecture, plan: Plan, workload: Workload, *, program: Program = OURS, keep_checkpoints: int = 2
) -> MemoryEstimate:
    """Predicted device memory of `plan`: its phases, what the device shows, the interval, RAM and disk.

    Lengths are the longest a micro-batch can have: max_length when rows are packed, else the longest sequence.
    """
    work = _Work.of(architecture, plan, workload, program)
    phases = (
        work.phase("load"),
        work.loss_phase(),
        *work.backward_phases(),
        work.phase("embedding", gradients=work.gradients + work.embedding_temporary, activations=work.stream),
        work.phase("step", gradients=work.gradients, optimizer_extra=program.step_temporary * work.trained),
        work.evaluation_phase(),
    )
    peak = max(phases, key=lambda phase: phase.total_bytes)
    device = _device_bytes(peak, plan, program)
    on_cpu = plan.device == "cpu"
    spread = 0.04 if on_cpu and plan.compute == "fp32" else 0.08
    moving = peak.total_bytes - work.states
    return MemoryEstimate(
        phases=phases,
        device_bytes=device,
        low_bytes=int(peak.total_bytes - spread * peak.total_bytes - (0 if workload.exact else 0.3 * moving)),
        high_bytes=int(peak.total_bytes * (1 + spread)),
        host_bytes=device if on_cpu else int(3 * GIB + work.weights / 8),
        disk_bytes=_disk_bytes(architecture, plan, work.trained, keep_checkpoints),
    )


def _device_bytes(peak: PhaseMemory, plan: Plan, program: Program) -> int:
    """What the device must have for it: tensors, what the allocator cannot fill, the driver's or process's own part.

    Slack: about 5 % of what comes and goes; 20 % when whole logits do, whose blocks are the largest and differ with
    every length (reserved / allocated 1.03-1.07 with fixed lengths and a chunked loss, 1.2-1.35 with whole logits).
    """
    if plan.device == "cpu":
        return peak.total_bytes + program.process_bytes + int(0.03 * peak.total_bytes)
    moving = peak.parts["activations"] + peak.parts["logits"] + peak.parts["gradients"]
    share = 0.2 if plan.loss == "full" else 0.05
    return peak.total_bytes + program.context_bytes + int(share * moving) + 32 * MIB


def _disk_bytes(architecture: Architecture, plan: Plan, trained: int, keep_checkpoints: int) -> int:
    """Checkpoints kept (weights and moments of what trains, one more while the next is written) and the export."""
    export = trained * 4 if plan.lora_rank else architecture.params * BYTES[plan.trained_format]
    return int((keep_checkpoints + 1) * trained * 12 + export)


@dataclass(frozen=True, kw_only=True)
class _Work:
    """The quantities all phases are made of, in bytes; `blocks` and `tokens` say what scales with the micro-batch."""

    architecture: Architecture
    plan: Plan
    program: Program
    tokens: int
    length: int
    formats: Formats
    weights: float
    adapters: float
    trained: int
    optimizer: float
    blocks: tuple[BlockMemory, ...]
    block_trained: tuple[int, ...]
    casts: tuple[float, ...]
    dequantised: float

    @classmethod
    def of(cls, architecture: Architecture, plan: Plan, workload: Workload, program: Program) -> _Work:
        length = plan.max_length if plan.packing else min(plan.max_length, workload.longest_tokens)
        formats = formats_of(architecture, plan)
        trained = trained_params(architecture, plan)
        frozen = bool(plan.lora_rank)
        return cls(
            architecture=architecture,
            plan=plan,
            program=program,
            tokens=plan.micro_batch * length,
            length=length,
            formats=formats,
            weights=weight_bytes(architecture, plan),
            adapters=4.0 * trained if frozen else 0.0,
            trained=trained,
            optimizer=program.moments * trained,
            blocks=tuple(_blocks(architecture, formats, frozen=frozen)),
            block_trained=_by_kind(architecture, lambda layer: _block_trained(architecture, layer, plan)),
            casts=_by_kind(architecture, lambda layer: _cast_bytes(architecture, layer, plan, formats)),
            dequantised=formats.compute * _largest_linear(architecture) if plan.weight_format == "nf4" else 0.0,
        )

    @property
    def states(self) -> float:
        return self.weights + self.adapters + self.optimizer

    @property
    def gradients(self) -> float:
        """All gradients."""
        return self.program.gradient * self.trained

    @property
    def held(self) -> float:
        """Gradients there at the start of a micro-batch that is not the step's first."""
        return self.gradients if self.plan.accumulation > 1 else 0.0

    @property
    def stream(self) -> float:
        """One hidden state of the micro-batch, in the residual's format."""
        return float(self.formats.residual * self.architecture.hidden_size * self.tokens)

    @property
    def head_trains(self) -> bool:
        return not self.plan.lora_rank

    @property
    def head_gradient(self) -> float:
        return self.program.gradient * self.architecture.head_params if self.head_trains else 0.0

    @property
    def embedding_temporary(self) -> float:
        """The embedding's gradient is made whole, then added to the one there is (tied head, accumulation)."""
        if not self.head_trains:
            return 0.0
        dense = self.program.gradient * self.architecture.embedding_params
        beside = self.plan.accumulation > 1
        return dense * (int(beside) + (1 if self.architecture.tied_embeddings else 0))

    @property
    def linear_temporary(self) -> float:
        """The gradient of one linear before it is added to the one that is there, and its 16-bit form."""
        largest = _largest_linear(self.architecture) if self.head_trains else 0
        cast = self.formats.compute if self.formats.casts else 0
        return float(largest * (cast + (4 if self.plan.accumulation > 1 else 0)))

    def phase(
        self,
        name: str,
        *,
        gradients: float = 0.0,
        activations: float = 0.0,
        logits: float = 0.0,
        weights_extra: float = 0.0,
        optimizer_extra: float = 0.0,
    ) -> PhaseMemory:
        parts: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        parts["weights"] = int(self.weights + weights_extra)
        parts["adapters"] = int(self.adapters)
        parts["gradients"] = int(gradients)
        parts["optimizer"] = int((self.optimizer if name != "load" else 0.0) + optimizer_extra)
        parts["activations"] = int(activations)
        parts["logits"] = int(logits)
        return PhaseMemory(name=name, parts=parts)

    def kept(self, layer: int) -> float:
        """Bytes block `layer` keeps from forward to its backward, its input included."""
        block = self.blocks[layer]
        if layer < self.plan.recompute:
            return block.input * self.tokens
        return (block.input + block.saved + block.per_token_and_length * self.length) * self.tokens

    def kept_before(self, layer: int) -> float:
        """What the blocks before `layer` keep."""
        return sum(self.kept(index) for index in range(layer))

    @property
    def final_norm(self) -> float:
        """After the blocks: the last hidden state, its normalised copy, and the rows picked for the loss."""
        normal = 4.0 * self.architecture.hidden_size * self.tokens if self.head_trains else 0.0
        copy = 4.0 * self.architecture.hidden_size * self.tokens if self.formats.residual < 4 else 0.0
        return 2 * self.stream + normal + copy

    def loss_phase(self) -> PhaseMemory:
        casts = sum(self.casts) if self.program.caches_casts else sum(self.casts[self.plan.recompute :])
        logits, gradients = self.logits()
        return self.phase(
            "loss",
            gradients=self.held + gradients,
            activations=self.kept_before(self.architecture.layers) + self.final_norm,
            logits=logits,
            weights_extra=casts + self.head_cast,
        )

    @property
    def head_cast(self) -> float:
        """The head's weight in the compute format, when it is stored in another."""
        stored = BYTES[self.plan.trained_format] if self.head_trains else self.formats.residual
        return float(self.formats.compute * self.architecture.head_params) if stored != self.formats.compute else 0.0

    def logits(self) -> tuple[float, float]:
        """(logits with all that is made of them, gradients made with them) at the worst moment of the loss.

        full: log-softmax 4, the gradient of the picked entries 4, the gradient of the logits 4 = 12 bytes per entry.
        chunked: logits 4 and a temporary of logsumexp 4 per entry of a chunk; fused: one buffer of 4. Both with the
        hidden state's gradient, and the head's when it trains. A family that changes its logits makes them for all
        positions in its own way.
        """
        vocab, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        if self.plan.loss == "full":
            extra = 8.0 if self.architecture.logit_softcap else 0.0
            return (12.0 + extra) * self.tokens * vocab, 0.0
        rows = min(self.tokens, self.plan.loss_chunk_tokens or self.tokens)
        picked = float(self.formats.residual * hidden * self.tokens)
        entry = 8.0
        if self.plan.loss == "fused" and self.plan.compute == "fp32":  # torch's own kernel; in 16 bits we chunk
            entry = 4.0
        return entry * rows * vocab + picked, self.head_gradient

    def backward_phases(self) -> tuple[PhaseMemory, ...]:
        """At the last block, at the last recomputed one, and at the first: between them memory changes linearly."""
        last = self.architecture.layers - 1
        layers = sorted({last, max(0, self.plan.recompute - 1), 0}, reverse=True)
        return tuple(self.backward_phase(layer) for layer in layers)

    def backward_phase(self, layer: int) -> PhaseMemory:
        block = self.blocks[layer]
        above = self.program.gradient * sum(self.block_trained[layer:])
        gradients = self.held + (self.head_gradient if self.plan.accumulation > 1 else 0.0)
        if self.plan.accumulation == 1:
            gradients = self.head_gradient + above
        elif not self.architecture.tied_embeddings:
            gradients = self.held
        working = (block.backward + block.per_token_and_length * self.length) * self.tokens
        kept_casts = sum(self.casts[self.plan.recompute : layer]) + self.casts[layer]
        return self.phase(
            f"backward of block {layer + 1}",
            gradients=gradients + self.linear_temporary,
            activations=self.kept_before(layer) + working,
            weights_extra=kept_casts + self.dequantised,
        )

    def evaluation_phase(self) -> PhaseMemory:
        """Forward without gradients: nothing is kept, logits are made a chunk at a time unless they are made whole."""
        vocab = self.architecture.vocab_size
        rows = self.tokens if self.plan.loss == "full" else min(self.tokens, self.plan.loss_chunk_tokens or self.tokens)
        block = max(block.evaluation for block in self.blocks) * self.tokens
        logits = 8.0 * rows * vocab
        return self.phase(
            "evaluation",
            activations=max(block, 2 * self.stream),
            logits=logits,
            weights_extra=(sum(self.casts) if self.program.caches_casts else max(self.casts)) + self.head_cast,
        )


def formats_of(architecture: Architecture, plan: Plan) -> Formats:
    """In which formats a block's tensors are.

    Trained weights are fp32, so the embedding's output and with it the residual stream are fp32; autocast casts what
    enters a matrix product. A frozen 16-bit base gives a 16-bit stream.
    """
    compute = int(BYTES[plan.compute])
    adapted: frozenset[str] = frozenset()
    residual = 4
    if plan.lora_rank:
        residual = compute if plan.weight_format == "nf4" else int(BYTES[plan.weight_format])
        names = {
            linear.name
            for layer in {0, architecture.layers - 1}
            for linear in adapted_linears(architecture, layer, plan.lora_targets)
        }
        adapted = frozenset(names)
    return Formats(
        residual=residual,
        compute=compute,
        trains=not plan.lora_rank,
        autocast=compute < 4,
        adapted=adapted,
        rank=plan.lora_rank,
        dropout_mask=(4 if plan.device == "cpu" else 1) if plan.lora_dropout > 0 else 0,
        attention=plan.attention,
        masked=plan.packing,
    )


def weight_bytes(architecture: Architecture, plan: Plan) -> float:
    """Bytes of the base weights: nf4 only for the blocks' linears, the rest is stored as it is computed with."""
    if not plan.lora_rank:
        return BYTES[plan.trained_format] * architecture.params
    if plan.weight_format != "nf4":
        return BYTES[plan.weight_format] * architecture.params
    linears = sum(
        _by_kind(
            architecture,
            lambda layer: sum(linear.weights for linear in architecture.linears(layer) if linear.module),
        )
    )
    return BYTES["nf4"] * linears + BYTES[plan.compute] * (architecture.params - linears)


def _by_kind(architecture: Architecture, value: Callable[[int], _Value]) -> tuple[_Value, ...]:
    """`value` of every block, worked out once for those without experts and once for those with."""
    experts = architecture.experts
    found: dict[bool, _Value] = {}
    kinds = [bool(experts and experts.at(layer)) for layer in range(architecture.layers)]
    for layer, kind in enumerate(kinds):
        if kind not in found:
            found[kind] = value(layer)
    return tuple(found[kind] for kind in kinds)


def _blocks(architecture: Architecture, formats: Formats, *, frozen: bool) -> Iterator[BlockMemory]:
    """Every block's walk. The first block of a frozen model differs: nothing before it needs a gradient."""
    shape = _shape_only(architecture)
    usual = _by_kind(architecture, lambda layer: block_memory(shape, layer, formats))
    if frozen:
        usual = (block_memory(shape, 0, formats, input_grad=False), *usual[1:])
    yield from usual


def _shape_only(architecture: Architecture) -> Architecture:
    """Without its name, so that equal shapes share one walk."""
    return dataclasses.replace(architecture, name="", published_params=None)


def _block_trained(architecture: Architecture, layer: int, plan: Plan) -> int:
    if not plan.lora_rank:
        return architecture.params_of_block(layer)
    adapted = adapted_linears(architecture, layer, plan.lora_targets)
    return sum(plan.lora_rank * (linear.inputs + linear.outputs) for linear in adapted)


def _cast_bytes(architecture: Architecture, layer: int, plan: Plan, formats: Formats) -> float:
    """16-bit copies autocast makes of a block's trained fp32 matrices."""
    if formats.compute == 4:
        return 0.0
    if plan.lora_rank:
        return float(formats.compute * _block_trained(architecture, layer, plan))
    return float(formats.compute * sum(linear.weights for linear in architecture.linears(layer)))


def _largest_linear(architecture: Architecture) -> int:
    return max(
        linear.inputs * linear.outputs
        for layer in {0, architecture.layers - 1}
        for linear in architecture.linears(layer)
    )


def usual_block(architecture: Architecture, formats: Formats) -> BlockMemory:
    """The walk of the last block, which is like most."""
    return block_memory(_shape_only(architecture), architecture.layers - 1, formats)
