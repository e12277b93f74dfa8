"""The planner's words: what a run asks of a machine (Workload), what was decided (Plan), what will happen (Forecast).

Plain frozen data. Bytes are int, times are seconds, rates are per second. No torch, no files, no clock.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

from vramfit.config import Method, Precision

MemoryKind = Literal[
    "weights",
    "adapters",
    "gradients",
    "optimizer",
    "kept",
    "working",
    "logits",
    "dequantised",
    "slots",
    "buckets",
    "overhead",
]
"""The parts every memory breakdown is given in, in the order they are stacked: activations kept for backward and those
alive while an operation runs, weights unpacked from 4 bits, places for streamed blocks, buffers of several cards."""

MEMORY_KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)


@dataclass(frozen=True, kw_only=True)
class Choice:
    """One decision and why: `setting` in the config's or plan's words, `value` as shown, `reason` one sentence.

    `fixed` is True when the user decided it.
    """

    setting: str
    value: str
    reason: str
    fixed: bool = False


@dataclass(frozen=True, kw_only=True)
class Workload:
    """How much there is to train: sequences and tokens of one epoch, after cutting to `max_length`.

    `mean_tokens` and `longest_tokens` are per sequence, padding excluded; `trained_share` is the share of tokens that
    carry loss; `packed` whether a sequence holds several documents, kept apart by a mask; `exact` is False while the
    lengths are a guess and not read from the tokenised data.
    """

    sequences: int
    mean_tokens: float
    longest_tokens: int
    trained_share: float = 1.0
    packed: bool = False
    exact: bool = False


Tier = Literal["device", "host", "disk"]
"""Where bytes live: on the card, in RAM, in a file."""

InputTier = Literal["device", "host", "disk"]
"""Where inputs of recomputed blocks wait. On disk only those of blocks that visit, once a step: each pass over a model
at rest would write its own."""

WeightFormat = Literal["fp32", "bf16", "fp16", "int8", "nf4", "nf4-plain", "gptq-int4", "gptq-int4-whole", "gptq-int8"]
"""Formats of a base. nf4 is doubly quantised, nf4-plain is not; GPTQ bases, in groups of 128 or whole columns, are read
by other programs than ours."""

CompileMode = Literal["default", "max-autotune", "max-autotune-no-cudagraphs", "reduce-overhead"]
"""torch.compile's words."""

_WITHOUT_GRAPHS: Final[dict[CompileMode, CompileMode | None]] = {
    "max-autotune": "max-autotune-no-cudagraphs",
    "reduce-overhead": None,
}

ShardingKind = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp"]
"""How several cards share a run: ddp nothing, zero1 the optimizer's states, zero2 gradients too, the others all."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Every memory decision of a run.

    `max_length` tokens per sequence; `micro_batch` sequences per forward pass and card; `accumulation` of them make one
    optimizer step. `recompute` is the number of blocks whose activations are recomputed in backward (the first ones);
    0 keeps all; `selective` keeps some results of those, too; `input_tier` is where the inputs of those wait.
    `compress` is how many of the other blocks keep copies in 8 bits. `loss_chunk_tokens` is rows of logits at once
    (0: all).

    `optimizer_bits` are of one state of one parameter; `optimizer_tier` where states live; `optimizer_in_backward`
    steps a parameter as soon as its gradient is there, `clip_passes` is 2 where the gradient's norm is found in a pass
    of its own before that; `optimizer_paged` lets the driver move states to RAM. `weights_tier` other than device
    streams the blocks through two slots, all but `resident_blocks` that stay. `slot_bytes` other than 0 is the most
    that a slot is to have: blocks of less come several at a time, a mixture's block of more in parts, its experts some
    at a time. `saved_modules`
    ("embedding", "head") are trained whole beside adapters. `dora` trains lengths of columns beside LoRA;
    `lora_experts` has adapters beside each expert. `last_blocks` other than 0: of the weights only those of so many
    blocks train, the last ones, and of what comes after them, but for a head that is the embedding's table. Blocks
    before them are frozen: nothing of them is kept or recomputed, and the first blocks of `recompute` and `compress`
    are the first of those that train. `compiled`: a compiler fuses what lies between matrix products, in torch's
    `compile_mode`. `calibrates`: now and then a micro-batch is computed in fp32, too.
    """

    method: Method
    device: str
    budget_bytes: int
    compute: Precision
    weight_format: WeightFormat
    weights_tier: Tier = "device"
    resident_blocks: int = 0
    slot_bytes: int = 0
    trained_format: Literal["fp32", "bf16", "fp16"] = "fp32"
    optimizer: Literal["adamw", "adafactor", "lion", "muon", "sgd"] = "adamw"
    optimizer_bits: Literal[32, 16, 8, 4] = 32
    optimizer_tier: Tier = "device"
    optimizer_in_backward: bool = False
    optimizer_paged: bool = False
    clip_passes: Literal[1, 2] = 1
    max_length: int
    micro_batch: int
    accumulation: int
    recompute: int
    selective: bool = False
    input_tier: InputTier = "device"
    compress: int = 0
    loss: Literal["fused", "chunked", "full"]
    loss_chunk_tokens: int = 0
    attention: Literal["sdpa", "eager", "flash"] = "sdpa"
    packing: bool = False
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    lora_dropout: float = 0.0
    lora_experts: bool = False
    dora: bool = False
    saved_modules: tuple[Literal["embedding", "head"], ...] = ()
    last_blocks: int = 0
    cards: int = 1
    sharding: ShardingKind = "none"
    compiled: bool = False
    compile_mode: CompileMode = "default"
    calibrates: bool = False
    reasons: tuple[Choice, ...] = ()

    @property
    def trains_base(self) -> bool:
        """Whether weights of the model itself train, all of them or those of the last blocks."""
        return not self.lora_rank

    @property
    def trains_all(self) -> bool:
        """Whether all of the model's weights train, its embedding included."""
        return not self.lora_rank and not self.last_blocks

    @property
    def records_graphs(self) -> bool:
        """Whether compiled blocks are recorded and replayed: their gradients then lie there from the first pass on."""
        return self.compiled and records_graphs(self.compile_mode)

    def first_trained(self, layers: int) -> int:
        """The first of `layers` blocks with a gradient: those before it are only passed forward."""
        return max(0, layers - self.last_blocks) if self.last_blocks else 0

    def trained_layers(self, layers: int) -> int:
        """How many of `layers` blocks have a backward."""
        return layers - self.first_trained(layers)

    def recomputes(self, layer: int, layers: int) -> bool:
        """Whether block `layer` of `layers` is computed again in backward."""
        first = self.first_trained(layers)
        return first <= layer < first + self.recompute

    def staying(self, layers: int) -> tuple[int, ...]:
        """The blocks that stay on the device while others visit: first those that would come twice a step."""
        first = self.first_trained(layers)
        return tuple(sorted([*range(first, layers), *range(first)][: self.resident_blocks]))


def records_graphs(mode: CompileMode) -> bool:
    """Whether torch records what blocks launch on a card, to replay it (torch._inductor.list_mode_options says which
    modes do): they hold for one shape and for weights that stay in place, and write where they wrote before."""
    return mode in _WITHOUT_GRAPHS


def without_graphs(mode: CompileMode) -> CompileMode | None:
    """The mode that does all else and records nothing; None where recording is all that it does."""
    return _WITHOUT_GRAPHS.get(mode, mode)


@dataclass(frozen=True, kw_only=True)
class PhaseMemory:
    """Device bytes alive in one phase, by kind. `name` is load, loss, backward, step, evaluation ..."""

    name: str
    parts: dict[MemoryKind, int]

    @property
    def total_bytes(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Predicted device memory. The peak is the largest phase, never the sum of phases.

    `peak_bytes` is allocated (tensors); `device_bytes` adds what the driver and allocator take, and is what must fit
    the budget; `low_bytes` to `high_bytes` is where the measured allocated peak is expected. `host_bytes` and
    `disk_bytes` are what the run takes from RAM and disk; the written bytes are what wears a drive. `save_copy_bytes`
    is a copy of what trains, in RAM, from which a checkpoint is written while training goes on (0: what trains is
    written from its tier). A forecast has `saves_aside` where there is room for it, and counts it in `host_bytes`;
    elsewhere a step waits until a checkpoint is written.
    """

    phases: tuple[PhaseMemory, ...]
    device_bytes: int
    low_bytes: int
    high_bytes: int
    host_bytes: int
    disk_bytes: int
    written_per_step_bytes: int = 0
    written_per_checkpoint_bytes: int = 0
    save_copy_bytes: int = 0
    saves_aside: bool = False

    @property
    def peak(self) -> PhaseMemory:
        return max(self.phases, key=lambda phase: phase.total_bytes)

    @property
    def peak_bytes(self) -> int:
        return self.peak.total_bytes

    @property
    def breakdown(self) -> dict[MemoryKind, int]:
        """`device_bytes` by kind: the peak phase's tensors, and as overhead what driver and allocator add."""
        return {**self.peak.parts, "overhead": self.peak.parts["overhead"] + self.device_bytes - self.peak_bytes}


@dataclass(frozen=True, kw_only=True)
class SpeedEstimate:
    """Predicted speed. `bounds` splits one optimizer step into seconds by what takes them (compute, link, ...).

    Tokens/s counts trained tokens, padding excluded. `mfu` is useful FLOPs against the dense rate of all cards,
    recompute left out; `watts` what the cards may draw (0: unknown).
    """

    step_seconds: float
    tokens_per_s: float
    bounds: dict[str, float]
    flops_per_step: float
    rate_source: Literal["catalogue", "measured", "assumed"]
    mfu: float = 0.0
    watts: float = 0.0

    @property
    def steps_per_s(self) -> float:
        return 1.0 / self.step_seconds

    @property
    def bound_by(self) -> str:
        """What takes most of a step."""
        return max(self.bounds, key=lambda name: self.bounds[name], default="")

    @property
    def step_joules(self) -> float:
        """Energy of one step, at most: all cards at their power limit."""
        return self.watts * self.step_seconds


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way to do the run: what its best plan needs and how fast it would be, or why it does not fit.

    `needs` is what this version's engine cannot do yet (empty: it could be run).
    """

    name: str
    fits: bool
    needs: tuple[str, ...]
    device_bytes: int
    host_bytes: int
    step_seconds: float
    tokens_per_s: float
    reason: str


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """What the form shows beside Start, and what the child checks again before step 1.

    `checkpoints` is how many will be written, by their cadence; `model` and `card` are what it is about, by name.
    """

    plan: Plan
    memory: MemoryEstimate
    speed: SpeedEstimate
    workload: Workload
    steps: int
    seconds: float
    alternatives: tuple[Alternative, ...] = ()
    checkpoints: int = 0
    model: str = ""
    card: str = ""

    @property
    def fits(self) -> bool:
        return self.memory.device_bytes <= self.plan.budget_bytes

    @property
    def kwh(self) -> float:
        """Energy of the run, at most: all cards at their power limit all the time (0: unknown)."""
        return self.steps * self.speed.step_joules / 3.6e6

    @property
    def written_bytes(self) -> int:
        """Bytes the whole run writes to disk, its result left out."""
        memory = self.memory
        return self.steps * memory.written_per_step_bytes + self.checkpoints * memory.written_per_checkpoint_bytes

    def to_json(self) -> dict[str, Any]:
        """Plain values for `--json` and the store, derived figures included."""
        values = dataclasses.asdict(self)
        values["memory"]["peak_bytes"] = self.memory.peak_bytes
        values["memory"]["peak_phase"] = self.memory.peak.name
        values["memory"]["breakdown"] = dict(self.memory.breakdown)
        values["speed"]["steps_per_s"] = self.speed.steps_per_s
        values["speed"]["bound_by"] = self.speed.bound_by
        values["speed"]["step_joules"] = self.speed.step_joules
        values["kwh"] = self.kwh
        values["written_bytes"] = self.written_bytes
        values["fits"] = self.fits
        return values
