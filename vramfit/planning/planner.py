"""The one planner: the fastest plan that fits a wish and a machine, with a reason for each decision; or WontFit.

Pure: no torch, no clock, no network. The panel's preview, the command line and the training process all call it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vramfit.config import Precision, RunConfig
from vramfit.errors import ConfigError, DataError, Problem, WontFit
from vramfit.hardware.devices import Device, Machine
from vramfit.models.architecture import Architecture
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Choice, Forecast, MemoryEstimate, Plan, SpeedEstimate, Workload
from vramfit.planning.speed import estimate_speed
from vramfit.units import GIB, MIB, format_bytes

USUAL_LENGTH: Final = 2048
"""Tokens a sequence may have when nobody says: long enough for nearly all conversations, short enough for any card."""

_CHUNK_ENTRIES: Final = 2**24  # logits alive at once: 64 MiB in fp32
_MOST_TOKENS_PER_PASS: Final = 2**17
_NEARLY_AS_FAST: Final = 1.02
_ROUND_LENGTH: Final = 8

Loss = Literal["fused", "chunked", "full"]


def length_limit(config: RunConfig, architecture: Architecture) -> int:
    """Tokens a sequence may have before the data is known: the wish, or the model's positions, at most 2,048.

    Raises ConfigError when the wish is more than a table of learned positions has.
    """
    if config.data.max_length == "auto":
        return min(architecture.max_position, USUAL_LENGTH)
    if architecture.position == "learned" and config.data.max_length > architecture.max_position:
        raise _refused(
            "data.max_length",
            f"{config.data.max_length} tokens are more than the {architecture.max_position} positions of "
            f"{architecture.name}",
            f"Set it to {architecture.max_position} or less.",
        )
    return config.data.max_length


def forecast_run(config: RunConfig, *, architecture: Architecture, machine: Machine, workload: Workload) -> Forecast:
    """The fastest plan that fits, what it needs and how long it takes.

    Raises ConfigError (a wish this device or model cannot honour), HardwareError (no such device), DataError (0
    sequences), WontFit (with the number that breaks, in device memory, RAM or disk, and changes that would help, each
    checked).
    """
    if workload.sequences < 1:
        raise DataError("There are 0 sequences to train on", "Give data with at least one row that can be used.")
    search = _Search.of(config, architecture, machine, workload)
    found = search.best()
    if found is None:
        raise search.wont_fit(lambda changed: _try(changed, architecture, machine, workload))
    forecast = search.forecast(found)
    _check_host_and_disk(config, architecture, machine, forecast)
    return forecast


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


def chunk_tokens(vocab_size: int) -> int:
    """Rows of logits alive at once: a power of two, about 64 MiB in fp32, at least 16."""
    rows = max(16, _CHUNK_ENTRIES // vocab_size)
    return 1 << (rows.bit_length() - 1)


@dataclass(frozen=True, kw_only=True)
class _Candidate:
    """A plan with its two estimates."""

    plan: Plan
    memory: MemoryEstimate
    speed: SpeedEstimate

    @property
    def fits(self) -> bool:
        return self.memory.device_bytes <= self.plan.budget_bytes


@dataclass(frozen=True, kw_only=True)
class _Search:
    """One wish on one device: the decisions that do not depend on each other made, the others searched."""

    config: RunConfig
    architecture: Architecture
    device: Device
    workload: Workload
    base: Plan
    budget_reason: str

    @classmethod
    def of(cls, config: RunConfig, architecture: Architecture, machine: Machine, workload: Workload) -> _Search:
        device = machine.device(config.device)
        compute = _compute(config, device)
        budget, budget_reason = _budget(config, device)
        loss = _loss(config, architecture)
        rows = 0 if loss == "full" else chunk_tokens(architecture.vocab_size)
        base = Plan(
            method=config.method,
            device=device.torch_device,
            budget_bytes=budget,
            compute=compute,
            weight_format=_weight_format(config, device, compute),
            max_length=_max_length(config, architecture, workload),
            micro_batch=1,
            accumulation=_sequences(config, workload),
            recompute=architecture.layers,
            loss=loss,
            loss_chunk_tokens=rows,
            packing=workload.packed or config.data.packing is True,
            lora_rank=config.adapter.rank if config.trains_adapter else 0,
            lora_targets=_targets(config),
            lora_dropout=config.adapter.dropout if config.trains_adapter else 0.0,
        )
        _check_targets(config, architecture, base)
        return cls(
            config=config,
            architecture=architecture,
            device=device,
            workload=workload,
            base=base,
            budget_reason=budget_reason,
        )

    def candidate(self, micro_batch: int, recompute: int) -> _Candidate:
        sequences = _sequences(self.config, self.workload)
        plan = dataclasses.replace(
            self.base,
            micro_batch=micro_batch,
            accumulation=math.ceil(sequences / micro_batch),
            recompute=recompute,
        )
        memory = estimate_memory(
            self.architecture, plan, self.workload, keep_checkpoints=self.config.output.keep_checkpoints
        )
        speed = estimate_speed(self.architecture, plan, self.device, self.workload, sequences_per_step=sequences)
        return _Candidate(plan=plan, memory=memory, speed=speed)

    def best(self) -> _Candidate | None:
        """The fastest that fits; of those nearly as fast, the one that needs least."""
        fitting = [candidate for candidate in self.candidates() if candidate.fits]
        if not fitting:
            return None
        fastest = min(candidate.speed.step_seconds for candidate in fitting)
        quick = [candidate for candidate in fitting if candidate.speed.step_seconds <= fastest * _NEARLY_AS_FAST]
        return min(quick, key=lambda candidate: candidate.memory.device_bytes)

    def candidates(self) -> Iterator[_Candidate]:
        """Each micro-batch size, with as few blocks recomputed as fit it. Larger sizes stop where nothing fits."""
        for size in self.micro_batches():
            least = self.fewest_recomputed(size)
            if least is None:
                return
            yield least

    def fewest_recomputed(self, size: int) -> _Candidate | None:
        """Recompute costs time, so as little as fits: none, else halve the distance to all."""
        if self.config.memory.activations != "auto":
            layers = 0 if self.config.memory.activations == "keep" else self.architecture.layers
            only = self.candidate(size, layers)
            return only if only.fits else None
        none = self.candidate(size, 0)
        if none.fits:
            return none
        best, low, high = self.candidate(size, self.architecture.layers), 0, self.architecture.layers
        if not best.fits:
            return None
        while high - low > 1:
            middle = (low + high) // 2
            tried = self.candidate(size, middle)
            if tried.fits:
                best, high = tried, middle
            else:
                low = middle
        return best

    def micro_batches(self) -> list[int]:
        """Sizes to try, small to large: those that cut the step's sequences evenly, or as evenly as can be."""
        sequences = _sequences(self.config, self.workload)
        if self.config.memory.micro_batch != "auto":
            return [min(self.config.memory.micro_batch, sequences)]
        most = max(1, min(sequences, _MOST_TOKENS_PER_PASS // max(1, self.base.max_length)))
        wanted = {1 << power for power in range(most.bit_length())} | {most}
        even = {math.ceil(sequences / math.ceil(sequences / size)) for size in wanted}
        return sorted(size for size in even if size <= most)

    def least(self) -> _Candidate:
        """The plan that needs the least memory: the smallest micro-batch, all blocks recomputed unless kept by wish."""
        keep = self.config.memory.activations == "keep"
        return self.candidate(self.micro_batches()[0], 0 if keep else self.architecture.layers)

    def forecast(self, found: _Candidate) -> Forecast:
        """What is known of a candidate, with the reasons for its decisions."""
        steps = total_steps(self.config, self.workload)
        return Forecast(
            plan=dataclasses.replace(found.plan, reasons=tuple(self.reasons(found))),
            memory=found.memory,
            speed=found.speed,
            workload=self.workload,
            steps=steps,
            seconds=steps * found.speed.step_seconds,
        )

    def wont_fit(self, again: Callable[[RunConfig], _Candidate | None]) -> WontFit:
        """The least memory this wish can do with, and which changes would make it fit."""
        least = self.least()
        needed, budget = least.memory.device_bytes, self.base.budget_bytes
        phase = least.memory.peak.name
        suggestions = list(_helpful(self.config, self.base, again))[:3]
        suggestions.append(f"A device with {format_bytes(needed)} free would do.")
        return WontFit(
            f"{self.architecture.name} with {self.config.method} needs {format_bytes(needed)} at its peak ({phase}), "
            f"and {format_bytes(budget)} of {self.device.name} are available",
            needed_bytes=needed,
            available_bytes=budget,
            phase=phase,
            suggestions=suggestions,
            forecast=dataclasses.replace(self.forecast(least), plan=least.plan),  # its reasons assume that it fits
        )

    def reasons(self, found: _Candidate) -> Iterator[Choice]:
        """Every decision in plain words."""
        plan, config = found.plan, self.config
        yield Choice(
            setting="memory budget",
            value=format_bytes(plan.budget_bytes),
            reason=self.budget_reason,
            fixed=config.memory.budget_gib != "auto",
        )
        yield _precision_choice(plan, self.device, fixed=config.memory.precision != "auto")
        yield _length_choice(config, plan, self.architecture, self.workload)
        yield _batch_choice(config, found, self.workload)
        yield _recompute_choice(config, found, self.architecture)
        yield _loss_choice(config, plan, self.architecture, self.workload)
        yield _weights_choice(plan)


def _try(config: RunConfig, architecture: Architecture, machine: Machine, workload: Workload) -> _Candidate | None:
    """The least a changed wish can do with, when that fits; None when it does not or is itself refused."""
    try:
        least = _Search.of(config, architecture, machine, workload).least()
    except ConfigError:
        return None
    return least if least.fits else None


def _helpful(config: RunConfig, base: Plan, again: Callable[[RunConfig], _Candidate | None]) -> Iterator[str]:
    """Changes that were planned anew and fit, nearest to the wish first, as sentences with their need."""
    for changed, words in _changes(config, base):
        found = again(changed)
        if found is not None:
            yield f"{words} would need {format_bytes(found.memory.device_bytes)}."


def _changes(config: RunConfig, base: Plan) -> Iterator[tuple[RunConfig, str]]:
    wishes = config.memory
    for field in ("micro_batch", "activations", "loss", "precision", "budget_gib"):
        if getattr(wishes, field) != "auto":
            memory = wishes.model_copy(update={field: "auto"})
            yield config.model_copy(update={"memory": memory}), f"Leaving memory.{field} to auto"
    if config.method == "full":
        yield config.model_copy(update={"method": "lora"}), "LoRA instead of full fine-tuning"
    if config.method in ("full", "lora"):
        yield config.model_copy(update={"method": "qlora"}), "QLoRA (a 4-bit base)"
    for length in _shorter(base.max_length):
        data = config.data.model_copy(update={"max_length": length})
        yield config.model_copy(update={"data": data}), f"Sequences of at most {length} tokens"


def _shorter(length: int) -> Iterator[int]:
    for divisor in (2, 4, 8):
        if length // divisor >= 64:
            yield length // divisor


def _check_host_and_disk(config: RunConfig, architecture: Architecture, machine: Machine, found: Forecast) -> None:
    """RAM beside a card, and the disk that takes checkpoints and result. Raises WontFit before anything is loaded."""
    needed, free = found.memory.host_bytes, machine.ram_free_bytes
    if (
        found.plan.device != "cpu" and needed > machine.ram_bytes
    ):  # what is not free may make room; what is not there not
        raise WontFit(
            f"{architecture.name} with {config.method} needs {format_bytes(needed)} of RAM beside the card, and this "
            f"machine has {format_bytes(machine.ram_bytes)}, {format_bytes(free)} of it free",
            needed_bytes=needed,
            available_bytes=machine.ram_bytes,
            tier="host",
            phase="load",
            suggestions=("Choose a smaller model, or add RAM.",),
            forecast=found,
        )
    needed, free = found.memory.disk_bytes, machine.disk_free_bytes
    if needed > free:
        raise WontFit(
            f"Checkpoints and result of {architecture.name} with {config.method} need {format_bytes(needed)} of disk, "
            f"and {format_bytes(free)} are free",
            needed_bytes=needed,
            available_bytes=free,
            tier="disk",
            phase="save",
            suggestions=tuple(_less_disk(config, architecture, found, free)),
            forecast=found,
        )


def _less_disk(config: RunConfig, architecture: Architecture, found: Forecast, free: int) -> Iterator[str]:
    """What would need less disk, as sentences."""
    if config.output.keep_checkpoints > 1:
        one = estimate_memory(
            architecture, found.plan, Workload(sequences=1, mean_tokens=1, longest_tokens=1), keep_checkpoints=1
        )
        if one.disk_bytes <= free:
            yield f"Keeping 1 checkpoint (output.keep_checkpoints) would need {format_bytes(one.disk_bytes)}."
    if config.method == "full":
        yield "LoRA instead of full fine-tuning saves the adapters only."
    yield "Free some space, or choose a data folder on another disk."


# --- decisions that stand alone --------------------------------------------------------------------------------------


def _refused(field: str, what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=field, what=what, remedy=remedy)])


def _sequences(config: RunConfig, workload: Workload) -> int:
    """Sequences of a whole step: an epoch that has fewer is one step of them."""
    return min(config.schedule.sequences_per_step, max(1, workload.sequences))


def _compute(config: RunConfig, device: Device) -> Precision:
    wish = config.memory.precision
    if wish == "auto":
        if device.kind == "cpu":
            return "fp32"
        return "bf16" if device.bf16 else ("fp16" if device.fp16 else "fp32")
    supported = {"fp32": True, "bf16": device.bf16, "fp16": device.fp16}[wish]
    if device.kind != "cpu" and not supported:
        raise _refused("memory.precision", f"{device.name} cannot compute in {wish}", "Set the precision to auto.")
    return wish


def _budget(config: RunConfig, device: Device) -> tuple[int, str]:
    """Bytes the run may use, and why: what is free less a reserve, or the wish as far as it is free."""
    reserve = _reserve(device)
    free = max(0, device.free_bytes - reserve)
    place = "RAM" if device.kind == "cpu" else f"{device.name}'s memory"
    there = (
        f"{format_bytes(device.free_bytes)} of {place} are free, less {format_bytes(reserve)} kept in reserve for "
        "everything else that runs"
    )
    if config.memory.budget_gib == "auto":
        return free, there
    wish = int(config.memory.budget_gib * GIB)
    if wish > device.memory_bytes:
        raise _refused(
            "memory.budget_gib",
            f"A budget of {format_bytes(wish)} is more than the {format_bytes(device.memory_bytes)} that {device.name} "
            "has",
            "Set it to auto or to less.",
        )
    if wish > device.free_bytes:
        return free, f"You asked for {format_bytes(wish)}, but only {there}"
    return wish, "You set it"


def _reserve(device: Device) -> int:
    """RAM is shared with the whole machine; a card with the desktop, whose needs change while a run is on."""
    if device.kind == "cpu":
        return int(max(1 * GIB, 0.1 * device.memory_bytes))
    return int(max(256 * MIB, 0.02 * device.memory_bytes))


def _weight_format(config: RunConfig, device: Device, compute: Precision) -> Literal["fp32", "bf16", "fp16", "nf4"]:
    """Trained weights are fp32. A frozen base is stored as it is computed with, or in 4 bits for QLoRA."""
    if config.method in ("pretrain", "full"):
        return "fp32"
    return "nf4" if config.method == "qlora" else compute


def _max_length(config: RunConfig, architecture: Architecture, workload: Workload) -> int:
    """What the data needs, rounded up to eighths, within what is allowed; a wish is kept as it is."""
    limit = length_limit(config, architecture)
    if config.data.max_length != "auto":
        return limit
    needed = math.ceil(workload.longest_tokens / _ROUND_LENGTH) * _ROUND_LENGTH
    return max(_ROUND_LENGTH, min(limit, needed))


def _loss(config: RunConfig, architecture: Architecture) -> Loss:
    wish = config.memory.loss
    if not architecture.plain_logits:
        if wish in ("fused", "chunked"):
            raise _refused(
                "memory.loss",
                f"{architecture.name} ({architecture.family}) changes its logits after the head, so a {wish} loss "
                "would compute something else",
                "Set the loss to auto or full.",
            )
        return "full"
    return "chunked" if wish == "auto" else wish


def _targets(config: RunConfig) -> tuple[str, ...]:
    if not config.trains_adapter:
        return ()
    return ("all-linear",) if config.adapter.targets == "all-linear" else config.adapter.targets


def _check_targets(config: RunConfig, architecture: Architecture, base: Plan) -> None:
    """Adapter targets are module names or their endings; each that matches nothing is refused."""
    if not base.lora_rank or base.lora_targets == ("all-linear",):
        return
    names = {linear.name for layer in range(architecture.layers) for linear in architecture.linears(layer)}
    wrong = [name for name in base.lora_targets if name.rpartition(".")[2] not in names]
    if wrong or not base.lora_targets:
        raise _refused(
            "adapter.targets",
            f"{', '.join(wrong) or 'An empty list'} matches 0 of the linear layers of {architecture.name}'s blocks",
            f"Choose all-linear, or from: {', '.join(sorted(names))}.",
        )


# --- reasons ---------------------------------------------------------------------------------------------------------


def _precision_choice(plan: Plan, device: Device, *, fixed: bool) -> Choice:
    if fixed:
        slow = device.kind == "cpu" and plan.compute != "fp32"
        reason = "You set it" + ("; without 16-bit units a CPU is about 18 times slower in it" if slow else "")
    elif device.kind == "cpu":
        reason = "CPUs without 16-bit units are many times slower in bf16"
    elif plan.compute == "bf16":
        reason = "The card computes in bf16, twice as fast as fp32 and without loss scaling"
    elif plan.compute == "fp16":
        reason = "The card has no bf16, so fp16 with loss scaling is used"
    else:
        reason = "The device computes in fp32 only"
    return Choice(setting="precision", value=plan.compute, reason=reason, fixed=fixed)


def _length_choice(config: RunConfig, plan: Plan, architecture: Architecture, workload: Workload) -> Choice:
    fixed = config.data.max_length != "auto"
    if fixed:
        reason = "You set it"
        if plan.max_length > architecture.max_position:
            reason += (
                f", beyond the {architecture.max_position} positions the model was made for: expect poor text there"
            )
    elif plan.max_length >= workload.longest_tokens:
        reason = f"The longest sequence has {workload.longest_tokens} tokens"
    elif plan.max_length == architecture.max_position:
        reason = "The model has no more positions"
    else:
        reason = f"Longer sequences are cut: {USUAL_LENGTH} tokens keep the memory of a step small"
    return Choice(setting="max length", value=f"{plan.max_length} tokens", reason=reason, fixed=fixed)


def _batch_choice(config: RunConfig, found: _Candidate, workload: Workload) -> Choice:
    plan = found.plan
    sequences = _sequences(config, workload)
    fixed = config.memory.micro_batch != "auto"
    value = f"{plan.micro_batch} x {plan.accumulation}"
    if fixed and config.memory.micro_batch != plan.micro_batch:
        reason = f"You set it to {config.memory.micro_batch}, and a step has {sequences} sequences"
    elif fixed:
        reason = (
            f"You set the micro-batch to {plan.micro_batch}; {plan.accumulation} of them make a step of {sequences}"
        )
    elif plan.accumulation == 1:
        reason = f"All {sequences} sequences of a step fit at once, which is fastest"
    else:
        reason = (
            f"{plan.micro_batch} at a time, {plan.accumulation} times, make a step of {sequences} sequences: more at a "
            "time would not fit, or be less than 2 % faster"
        )
    return Choice(setting="micro-batch", value=value, reason=reason, fixed=fixed)


def _recompute_choice(config: RunConfig, found: _Candidate, architecture: Architecture) -> Choice:
    plan = found.plan
    fixed = config.memory.activations != "auto"
    if fixed:
        reason = "You set it"
    elif plan.recompute == 0:
        reason = "All activations fit, and keeping them is fastest"
    elif plan.recompute == architecture.layers:
        reason = "Activations of all blocks do not fit, so each block is computed again in backward: a third more work"
    else:
        reason = f"Activations of {architecture.layers - plan.recompute} blocks fit; the others are computed again"
    value = "keep" if plan.recompute == 0 else f"recompute {plan.recompute} of {architecture.layers} blocks"
    return Choice(setting="activations", value=value, reason=reason, fixed=fixed)


def _loss_choice(config: RunConfig, plan: Plan, architecture: Architecture, workload: Workload) -> Choice:
    fixed = config.memory.loss != "auto"
    tokens = plan.micro_batch * min(plan.max_length, workload.longest_tokens)
    whole = format_bytes(12.0 * tokens * architecture.vocab_size)
    if fixed:
        reason = "You set it"
    elif plan.loss == "full":
        reason = f"{architecture.family} changes its logits after the head, so its own forward makes them: {whole}"
    elif tokens <= plan.loss_chunk_tokens:
        reason = "All logits of a micro-batch are one small chunk, whose gradient is taken at once"
    else:
        reason = f"At most {plan.loss_chunk_tokens} rows of logits are there at once, instead of {whole} for all"
    return Choice(setting="loss", value=plan.loss, reason=reason, fixed=fixed)


def _weights_choice(plan: Plan) -> Choice:
    reasons = {
        "nf4": "The frozen base is stored in 4 bits, adapters are trained in fp32",
        "fp32": "Trained weights stay in fp32: in 16 bits most small updates would be rounded away",
        "bf16": "The frozen base is stored as it is computed with, adapters are trained in fp32",
        "fp16": "The frozen base is stored as it is computed with, adapters are trained in fp32",
    }
    reason = reasons[plan.weight_format]
    if plan.weight_format == "fp32" and plan.lora_rank:
        reason = "The frozen base is stored as it is computed with"
    return Choice(setting="weights", value=plan.weight_format, reason=reason)
