"""In which formats a block's tensors are under a plan."""

from __future__ import annotations

from vramfit.models.architecture import Architecture
from vramfit.planning.block import Formats
from vramfit.planning.plan import Plan
from vramfit.planning.program import OURS, Program
from vramfit.planning.stored import BYTES, QUANTISED, adapted_linears


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
