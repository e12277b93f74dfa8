"""Every decision of a plan in plain words, with who made it; and why the other ways were not taken."""

from __future__ import annotations

from collections.abc import Iterator

from vramfit.config import RunConfig
from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import missing
from vramfit.planning.plan import Alternative, Choice, Plan, Workload
from vramfit.planning.search import Candidate, Search
from vramfit.planning.start import USUAL_LENGTH, sequences_of_step
from vramfit.units import format_bytes


def reasons(search: Search, found: Candidate) -> Iterator[Choice]:
    """Every decision, in the order a person asks for them."""
    plan, config = found.plan, search.config
    if search.architecture.counted:
        yield Choice(
            setting="model",
            value=f"{search.architecture.params:,} parameters",
            reason=f"VRAMFit does not know the family {search.architecture.family!r}: its parameters were counted, and "
            "its blocks are taken for a Llama's of the same widths",
        )
    yield Choice(
        setting="memory budget",
        value=format_bytes(plan.budget_bytes),
        reason=search.start.budget_reason,
        fixed=config.memory.budget_gib != "auto",
    )
    yield _precision_choice(plan, search.device, fixed=config.memory.precision != "auto")
    yield _length_choice(config, plan, search.architecture, search.workload)
    yield _batch_choice(config, found, search.workload)
    yield _recompute_choice(config, found, search.architecture)
    yield _loss_choice(config, plan, search.architecture, search.workload)
    yield _weights_choice(plan)
    yield from _optimizer_choices(config, plan)
    yield from _place_choices(plan, search.architecture)


def alternatives(search: Search, chosen: Candidate | None) -> Iterator[Alternative]:
    """Every other family, also those this version cannot run: the next best first, then what was rejected and why."""
    others = [found for found in search.designed.bests if chosen is None or found.family != chosen.family]
    for found in sorted(others, key=lambda found: (not found.fits, found.speed.step_seconds)):
        yield Alternative(
            name=found.family.name,
            fits=found.fits,
            needs=missing(found.plan),
            device_bytes=found.memory.device_bytes,
            host_bytes=found.memory.host_bytes,
            step_seconds=found.speed.step_seconds,
            tokens_per_s=found.speed.tokens_per_s,
            reason=_why_not(found, chosen),
        )


def _why_not(found: Candidate, chosen: Candidate | None) -> str:
    """Why another family was not taken."""
    if found.memory.device_bytes > found.plan.budget_bytes:
        return (
            f"It needs {format_bytes(found.memory.device_bytes)} on the device at its peak "
            f"({found.memory.peak.name}), and {format_bytes(found.plan.budget_bytes)} are available"
        )
    if not found.fits_ram:
        needed, there = format_bytes(found.memory.host_bytes), format_bytes(found.ram_bytes)
        return f"It needs {needed} of RAM, and there are {there}"
    if chosen is None:
        return f"It would fit in {format_bytes(found.memory.device_bytes)}"
    slower = found.speed.step_seconds / chosen.speed.step_seconds - 1
    if slower <= 0:
        return (
            f"This version cannot run it: it needs {', '.join(missing(found.plan))}"
            if missing(found.plan)
            else ("It is as fast, and needs more memory")
        )
    return f"It fits, and a step takes {slower:.0%} longer"


def _place_choices(plan: Plan, architecture: Architecture) -> Iterator[Choice]:
    """Where things live, wherever that is not the device."""
    places = {"host": "RAM", "disk": "a file"}
    if plan.cards > 1:
        reason = (
            "Weights, gradients and states are split, and each block is gathered when it is needed"
            if plan.sharding == "fsdp"
            else "Each card holds everything and takes its part of the step; gradients are summed"
        )
        yield Choice(setting="cards", value=f"{plan.cards} ({plan.sharding.upper()})", reason=reason)
    if plan.weights_tier != "device":
        yield Choice(
            setting="streaming",
            value=f"{architecture.layers - plan.resident_blocks} of {architecture.layers} blocks",
            reason=f"They live in {places[plan.weights_tier]} and visit the device one by one; the others stay",
        )
    if plan.optimizer_tier != "device":
        reason = f"States live in {places[plan.optimizer_tier]}, and the step is done by the CPU"
        yield Choice(setting="optimizer states", value=places[plan.optimizer_tier], reason=reason)
    if plan.input_tier != "device" and plan.weights_tier == "device":
        reason = "What a block is given waits in RAM for its backward, and comes back ahead of it"
        yield Choice(setting="block inputs", value="RAM", reason=reason)


def _optimizer_choices(config: RunConfig, plan: Plan) -> Iterator[Choice]:
    """The optimizer, wherever it is not AdamW in 32 bits after backward; and compiled blocks."""
    wishes = config.memory
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(plan.optimizer, plan.optimizer.capitalize())
    if plan.optimizer != "adamw" or plan.optimizer_bits < 32:
        fixed = wishes.optimizer != "auto" or wishes.optimizer_bits != "auto"
        share = {8: "a quarter", 4: "an eighth"}.get(plan.optimizer_bits)
        reason = f"States in blocks with a scale each take {share} of the memory" if share else "You set it"
        yield Choice(setting="optimizer", value=f"{plan.optimizer_bits}-bit {name}", reason=reason, fixed=fixed)
    if plan.optimizer_paged:
        reason = "You set it: the driver moves states to RAM when the card runs short"
        yield Choice(setting="optimizer states", value="paged", reason=reason, fixed=True)
    if plan.optimizer_in_backward:
        norm = "the gradient's norm is found in a pass before it" if plan.clip_passes == 2 else "one pass"
        reason = "You set it: each gradient is used up as soon as it is there, so they never all exist"
        yield Choice(setting="optimizer step", value=f"in backward, {norm}", reason=reason, fixed=True)
    if plan.compiled:
        fixed = wishes.compile != "auto"
        yield Choice(setting="compile", value=plan.compile_mode, reason="You set it" if fixed else "", fixed=fixed)


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


def _batch_choice(config: RunConfig, found: Candidate, workload: Workload) -> Choice:
    plan = found.plan
    sequences = sequences_of_step(config, workload)
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


def _recompute_choice(config: RunConfig, found: Candidate, architecture: Architecture) -> Choice:
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
    value = (
        "keep in 8 bits"
        if plan.compress
        else "keep"
        if plan.recompute == 0
        else f"recompute {plan.recompute} of {architecture.layers} blocks"
    )
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
    if plan.weight_format == "bf16" and not plan.lora_rank:
        reason = "You set it: rounded stochastically, so that small updates are not lost on average"
    return Choice(setting="weights", value=plan.weight_format, reason=reason)
