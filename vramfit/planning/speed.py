"""How long an optimizer step takes: arithmetic, memory traffic, kernel launches and the optimizer, from a plan.

FLOPs per token that passes the model, with N the numbers in matrix products a token passes (active parameters without
the embedding look-up): forward 2N, gradient of the input 2N, gradient of the weights 2N. So full training 6N, LoRA 4N
(plus 6 times the adapters), and 2N more for blocks that are recomputed. Attention adds, forward and causal,
2 x layers x query width x length per token, twice that backward. The head counts only for tokens that carry loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.memory import adapter_params, formats_of, trained_params, usual_block
from vramfit.planning.plan import Plan, SpeedEstimate, Workload
from vramfit.units import MIB


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """How much of a device's dense rate matrix products reach, and its small costs.

    best x tokens / (tokens + half_tokens) x width / (width + half_width): a product needs rows to fill all units, and
    width to amortise reading them. `launch_seconds` is what one kernel costs the host; `cache_bytes`, on a CPU, what
    of a block's weights its caches hold.
    """

    best: float
    half_tokens: float
    half_width: float
    launch_seconds: float
    overlaps_launches: bool
    cache_bytes: float = 0.0


RateSource = Literal["catalogue", "measured", "assumed"]

CARD: Final = Efficiency(best=0.8, half_tokens=256, half_width=256, launch_seconds=7e-6, overlaps_launches=True)
"""Cards: 72 % of the dense rate is the best known of a whole training on a 4090 (7B, fused kernels); large products
alone reach about 80 %. Launches: an eager PyTorch operation costs the host 5 to 10 microseconds."""

CPU: Final = Efficiency(
    best=0.82, half_tokens=16, half_width=8, launch_seconds=20e-6, overlaps_launches=False, cache_bytes=4 * MIB
)
"""CPU: element-wise work is folded in. An operation costs 20 microseconds beside its work: the starter's step of four
sequences, cut in turn into passes of 4, 2 and 1 in one run, took 36.9, 42.1 and 53.3 ms. A block whose weights leave
the cache is read from RAM again and again, and products then reach up to 40 % less. Three measurements on two cores
agree within a third: the starter (2 x 128 wide) about 70 GFLOP/s, an 18.7 M Llama 50 (483 tokens/s), LoRA of
SmolLM2-135M 45 (79 tokens/s), where products reach 90."""

ASSUMED_FLOPS: Final = {"fp32": 10e12, "bf16": 25e12, "fp16": 25e12}
ASSUMED_BANDWIDTH: Final = 300e9
"""A card nobody has facts about is taken for the smallest of the catalogue."""

ASSUMED_RAM_BANDWIDTH: Final = 12e9
SLOW_16_BIT_ON_CPU: Final = 18.0
"""How much slower bf16 and fp16 are on a CPU without units for them, measured."""

OPTIMIZER_BYTES: Final = 28.0
"""AdamW reads weight, gradient and two moments and writes weight and moments: 7 fp32 numbers a parameter."""

KERNELS_FORWARD: Final = 45
KERNELS_BACKWARD: Final = 85
"""Operations of one Llama block written in Python, counted with torch's profiler; LoRA adds 5 and 8 per linear."""


def estimate_speed(
    architecture: Architecture, plan: Plan, device: Device, workload: Workload, *, sequences_per_step: int | None = None
) -> SpeedEstimate:
    """Seconds per optimizer step and trained tokens/s of `plan` on `device`.

    `bounds` are seconds of the step: compute, memory (element-wise traffic), launch (what kernels wait for beyond
    that), optimizer. They add up to `step_seconds`.
    """
    sequences = sequences_per_step or plan.micro_batch * plan.accumulation
    efficiency = CPU if device.kind == "cpu" else CARD
    padded = padded_length(plan, workload)
    tokens = sequences * padded
    flops = tokens * flops_per_token(architecture, plan, length=padded, trained_share=workload.trained_share)
    per_pass = plan.micro_batch * padded
    rate, source = dense_rate(plan, device)
    compute = flops / (rate * _achieved(efficiency, per_pass, architecture))
    memory = 0.0 if device.kind == "cpu" else tokens * _traffic_per_token(architecture, plan) / _bandwidth(device)
    launches = plan.accumulation * _kernels(architecture, plan) * efficiency.launch_seconds
    if efficiency.overlaps_launches:
        launches = max(0.0, launches - compute - memory)
    optimizer = OPTIMIZER_BYTES * trained_params(architecture, plan) / _bandwidth(device)
    bounds = {"compute": compute, "memory": memory, "launch": launches, "optimizer": optimizer}
    step = sum(bounds.values())
    trained = sequences * workload.mean_tokens * workload.trained_share
    return SpeedEstimate(
        step_seconds=step, tokens_per_s=trained / step, bounds=bounds, flops_per_step=flops, rate_source=source
    )


def flops_per_token(architecture: Architecture, plan: Plan, *, length: float, trained_share: float = 1.0) -> float:
    """FLOPs of forward and backward for one token of a sequence of `length` tokens (derivation above)."""
    head = architecture.head_params
    outside = architecture.embedding_params + (0 if architecture.tied_embeddings else head)
    blocks = max(0, architecture.active_params - outside - architecture.learned_positions * architecture.hidden_size)
    recomputed = plan.recompute / architecture.layers
    passes = 4.0 if plan.lora_rank else 6.0
    adapters = 0
    if plan.lora_rank:
        adapters = adapter_params(architecture, rank=plan.lora_rank, targets=plan.lora_targets)
    attention = 2.0 * architecture.layers * architecture.q_width * _attended(architecture, length)
    return (
        (passes + 2 * recomputed) * blocks
        + (6 + 2 * recomputed) * adapters
        + passes * head * trained_share
        + (3 + recomputed) * attention
    )


def _attended(architecture: Architecture, length: float) -> float:
    """Twice the mean number of positions a token looks at: the length when causal, less with a sliding window."""
    window = architecture.sliding_window
    return length if window is None else min(length, 2.0 * window)


def padded_length(plan: Plan, workload: Workload) -> float:
    """Tokens a sequence takes in its micro-batch, padding included.

    The n sequences of a step are sorted by length and cut into micro-batches of m, each padded to its longest. With
    lengths spread evenly around the mean, the expected longest of n is mean + (longest - mean) (n - 1) / (n + 3), and
    the mean padding of a micro-batch (m - 1) / (n - 1) of that distance.
    """
    longest = min(plan.max_length, workload.longest_tokens)
    mean = min(workload.mean_tokens, longest)
    if plan.packing:
        return mean
    sequences = plan.micro_batch * plan.accumulation
    return mean + (longest - mean) * (plan.micro_batch - 1) / (sequences + 3)


def dense_rate(plan: Plan, device: Device) -> tuple[float, RateSource]:
    """(dense FLOP/s in the plan's compute format, where it comes from). Without facts, those of a small card."""
    known = device.flops.get(plan.compute, 0.0)
    if known:
        return known, device.rates
    if device.kind == "cpu":
        return device.flops.get("fp32", ASSUMED_FLOPS["fp32"] / 100) / SLOW_16_BIT_ON_CPU, "assumed"
    return ASSUMED_FLOPS[plan.compute], "assumed"


def _bandwidth(device: Device) -> float:
    if device.memory_bandwidth:
        return 0.8 * device.memory_bandwidth  # what streaming kernels reach of the data sheet
    return ASSUMED_RAM_BANDWIDTH if device.kind == "cpu" else ASSUMED_BANDWIDTH


def _achieved(efficiency: Efficiency, tokens: float, architecture: Architecture) -> float:
    width, block = architecture.hidden_size, 4.0 * architecture.block_params
    outside = 0.4 * block / (block + efficiency.cache_bytes) if efficiency.cache_bytes else 0.0
    filled = tokens / (tokens + efficiency.half_tokens) * width / (width + efficiency.half_width)
    return efficiency.best * (1 - outside) * filled


def _traffic_per_token(architecture: Architecture, plan: Plan) -> float:
    """Bytes element-wise operations move: each kept tensor is written and read once forward, and about three times
    backward (itself, its gradient in and out); recompute repeats the forward. nf4 weights are unpacked in each pass.
    """
    block = usual_block(architecture, formats_of(architecture, plan))
    return 5.0 * architecture.layers * block.saved + 2.0 * plan.recompute * block.saved


def _kernels(architecture: Architecture, plan: Plan) -> float:
    """Operations of one micro-batch."""
    adapters = 0
    if plan.lora_rank:
        adapters = sum(linear.module for linear in architecture.linears(architecture.layers - 1))
    forward, backward = KERNELS_FORWARD + 5 * adapters, KERNELS_BACKWARD + 8 * adapters
    return architecture.layers * (forward + backward) + plan.recompute * forward + 60.0
