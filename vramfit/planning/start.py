"""Where the search for a plan starts: every decision that does not depend on how much memory there is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from vramfit.config import Precision, RunConfig
from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.idle_wishes import calibrates, check_calibration
from vramfit.planning.plan import Plan, WeightFormat, Workload
from vramfit.planning.wishes import refused, trained_layers, wished
from vramfit.sentences import say
from vramfit.units import GIB, MIB, format_bytes

USUAL_LENGTH: Final = 2048
"""Tokens a sequence may have when nobody says: long enough for nearly all conversations, short enough for any card."""

AUTOMATIC_CADENCES: Final = 10
"""Evaluations and checkpoints a run, when the user leaves the choice to us."""

_CHUNK_ENTRIES: Final = 2**24  # logits alive at once: 64 MiB in fp32
_ROUND_LENGTH: Final = 8

LIGERS: Final = frozenset({"cuda", "rocm", "xpu"})
"""Kinds of devices that Liger's kernels run on, where it is installed."""

Loss = Literal["fused", "chunked", "full"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """The plan with one sequence at a time and every block recomputed, and why its budget is what it is."""

    plan: Plan
    budget_reason: str


def start(config: RunConfig, architecture: Architecture, device: Device, workload: Workload) -> Start:
    """The decisions that stand alone. Raises ConfigError for a wish this device or model cannot honour."""
    compute = compute_format(config, device)
    check_calibration(config, compute)
    budget, budget_reason = _budget(config, device)
    loss = _loss(config, architecture, device)
    plan = Plan(
        method=config.method,
        device=device.torch_device,
        budget_bytes=budget,
        compute=compute,
        weight_format=_weight_format(config, compute),
        max_length=_max_length(config, architecture, workload),
        micro_batch=1,
        accumulation=sequences_of_step(config, workload),
        recompute=trained_layers(config, architecture),
        loss=loss,
        loss_chunk_tokens=0 if loss == "full" else chunk_tokens(architecture.vocab_size),
        packing=workload.packed or config.data.packing is True,
        lora_rank=config.adapter.rank if config.trains_adapter else 0,
        lora_targets=_targets(config),
        lora_dropout=config.adapter.dropout if config.trains_adapter else 0.0,
        calibrates=calibrates(config, compute),
        **wished(config, architecture, device, compute),
    )
    _check_targets(architecture, plan)
    return Start(plan=plan, budget_reason=budget_reason)


def length_limit(config: RunConfig, architecture: Architecture) -> int:
    """Tokens a sequence may have before the data is known: the wish, or the model's positions, at most 2,048.

    Raises ConfigError when the wish is more than a table of learned positions has.
    """
    if config.data.max_length == "auto":
        return min(architecture.max_position, USUAL_LENGTH)
    if architecture.position == "learned" and config.data.max_length > architecture.max_position:
        raise refused(
            "data.max_length",
            f"{config.data.max_length} tokens are more than the {architecture.max_position} positions of "
            f"{architecture.name}",
            f"Set it to {architecture.max_position} or less.",
        )
    return config.data.max_length


def chunk_tokens(vocab_size: int) -> int:
    """Rows of logits alive at once: a power of two, about 64 MiB in fp32, at least 16."""
    rows = max(16, _CHUNK_ENTRIES // vocab_size)
    return 1 << (rows.bit_length() - 1)


def sequences_of_step(config: RunConfig, workload: Workload) -> int:
    """Sequences of a whole step: an epoch that has fewer is one step of them."""
    return min(config.schedule.sequences_per_step, max(1, workload.sequences))


def total_steps(config: RunConfig, workload: Workload) -> int:
    """Optimizer steps, counted as `data.batches.StepOrder` does.

    The last step of an epoch takes what is left; a part of an epoch is its first steps; max_steps decides instead.
    """
    schedule = config.schedule
    if schedule.max_steps is not None:
        return schedule.max_steps
    whole, part = divmod(schedule.epochs, 1.0)
    per_epoch = math.ceil(workload.sequences / schedule.sequences_per_step)
    return max(1, int(whole) * per_epoch + math.ceil(part * workload.sequences / schedule.sequences_per_step - 1e-9))


def checkpoints_at_end(config: RunConfig, workload: Workload) -> int:
    """How many checkpoints a run leaves: the newest ones, those that stay for good, and that of the best evaluation."""
    output, steps = config.output, total_steps(config, workload)
    for_good = steps // output.keep_every if output.keep_every else 0
    return output.keep_checkpoints + for_good + (1 if output.keep_best and output.evaluate_every != 0 else 0)


def checkpoint_cadence(config: RunConfig, steps: int) -> int:
    """Steps between checkpoints of a run of `steps`."""
    wish = config.output.checkpoint_every
    return max(1, steps // AUTOMATIC_CADENCES) if wish == "auto" else wish


def checkpoints_written(config: RunConfig, steps: int) -> int:
    """How many a run of `steps` writes: by its cadence, those that stay for good, and the last step's. One that an
    evaluation calls for comes on top."""
    every, for_good = checkpoint_cadence(config, steps), config.output.keep_every
    found = steps // every + (steps // for_good - steps // math.lcm(every, for_good) if for_good else 0)
    at_end = steps % every == 0 or (for_good > 0 and steps % for_good == 0)
    return found + (0 if at_end else 1)


def compute_format(config: RunConfig, device: Device) -> Precision:
    wish = config.memory.precision
    if wish == "auto":
        if device.kind == "cpu":
            return "fp32"
        return "bf16" if device.bf16 else ("fp16" if device.fp16 else "fp32")
    # Tensor cores that know bf16 know tf32; nothing else does.
    supported = {"fp32": True, "tf32": device.kind == "cuda" and device.bf16, "bf16": device.bf16, "fp16": device.fp16}
    if (device.kind != "cpu" or wish == "tf32") and not supported[wish]:
        raise refused("memory.precision", f"{device.name} cannot compute in {wish}", "Set the precision to auto.")
    return wish


def _budget(config: RunConfig, device: Device) -> tuple[int, str]:
    """Bytes the run may use, and why: what is free less a reserve, or the wish as far as it is free."""
    reserve = _reserve(device)
    free = max(0, device.free_bytes - reserve)
    place = say("place.host") if device.kind == "cpu" else say("budget.card", name=device.name)
    there = say("budget.free", free=format_bytes(device.free_bytes), place=place, reserve=format_bytes(reserve))
    if config.memory.budget_gib == "auto":
        return free, there
    wish = int(config.memory.budget_gib * GIB)
    if wish > device.memory_bytes:
        raise refused(
            "memory.budget_gib",
            f"A budget of {format_bytes(wish)} is more than the {format_bytes(device.memory_bytes)} that {device.name} "
            "has",
            "Set it to auto or to less.",
        )
    if wish > device.free_bytes:
        return free, say("budget.short", wish=format_bytes(wish), free=there)
    return wish, say("you")


def _reserve(device: Device) -> int:
    """RAM is shared with the whole machine; a card with the desktop, whose needs change while a run is on."""
    least, share = _reserved(device)
    return int(max(least, share * device.memory_bytes))


def _reserved(device: Device) -> tuple[int, float]:
    """(bytes that are kept in any case, share of a device's memory that is kept of a large one)."""
    return (1 * GIB, 0.1) if device.kind == "cpu" else (256 * MIB, 0.02)


def memory_for(budget_bytes: int, device: Device) -> int:
    """Bytes that a device of this kind must have, all free, to give a run that budget."""
    least, share = _reserved(device)
    return max(budget_bytes + least, math.ceil(budget_bytes / (1 - share)) + 1)


def _weight_format(config: RunConfig, compute: Precision) -> WeightFormat:
    """Trained weights are fp32 unless bf16 is wished for. A frozen base is stored as it is computed with, or in few
    bits for QLoRA."""
    if config.method in ("pretrain", "full"):
        return "bf16" if config.memory.trained_weights == "bf16" else "fp32"
    if config.method == "qlora":
        return "nf4" if config.memory.base_weights == "auto" else config.memory.base_weights
    return "fp32" if compute == "tf32" else compute


def _max_length(config: RunConfig, architecture: Architecture, workload: Workload) -> int:
    """What the data needs, rounded up to eighths, within what is allowed; a wish is kept as it is."""
    limit = length_limit(config, architecture)
    if config.data.max_length != "auto":
        return limit
    needed = math.ceil(workload.longest_tokens / _ROUND_LENGTH) * _ROUND_LENGTH
    return min(limit, max(_ROUND_LENGTH, needed))


def _loss(config: RunConfig, architecture: Architecture, device: Device) -> Loss:
    """The wish where the family allows it, else in chunks: the fused kernels are for those who choose them (see
    docs/speed.md). Whether Liger is installed is not asked, so that a plan is the same wherever it is made; without it,
    what only its kernel does is done in chunks, and the run says so."""
    wish, whose = config.memory.loss, f"{architecture.name} ({architecture.family})"
    if not architecture.chunked_logits:
        if wish in ("fused", "chunked"):
            raise refused(
                "memory.loss",
                f"{whose} makes its logits in a way of its own, so a {wish} loss would compute something else",
                "Set the loss to auto or full.",
            )
        return "full"
    if wish == "fused" and architecture.scales_logits:
        raise refused(
            "memory.loss",
            f"{whose} scales its logits after the head, which the fused kernels do not",
            "Set the loss to auto or chunked.",
        )
    if wish == "fused" and architecture.logit_softcap and device.kind not in LIGERS:
        raise refused(
            "memory.loss",
            f"{whose} caps its logits at {architecture.logit_softcap:g}, which of the fused kernels Liger's alone "
            f"does, and that does not run on {device.name}",
            "Set the loss to auto or chunked.",
        )
    if wish == "fused" and (config.loss.z_loss or config.loss.label_smoothing):
        raise refused(
            "memory.loss",
            f"The fused kernel adds neither a z-loss ({config.loss.z_loss:g}) nor label smoothing "
            f"({config.loss.label_smoothing:g})",
            "Set the loss to auto or chunked.",
        )
    return "chunked" if wish == "auto" else wish


def _targets(config: RunConfig) -> tuple[str, ...]:
    if not config.trains_adapter:
        return ()
    return ("all-linear",) if config.adapter.targets == "all-linear" else config.adapter.targets


def _check_targets(architecture: Architecture, base: Plan) -> None:
    """Adapter targets are module names or their endings; each that matches nothing is refused."""
    if not base.lora_rank or base.lora_targets == ("all-linear",):
        return
    linears = (linear for layer in range(architecture.layers) for linear in architecture.linears(layer))
    names = {linear.name for linear in linears if linear.module}
    wrong = [name for name in base.lora_targets if name.rpartition(".")[2] not in names]
    if wrong or not base.lora_targets:
        raise refused(
            "adapter.targets",
            f"{', '.join(wrong) or 'An empty list'} matches 0 of the linear layers of {architecture.name}'s blocks",
            f"Choose all-linear, or from: {', '.join(sorted(names))}.",
        )
