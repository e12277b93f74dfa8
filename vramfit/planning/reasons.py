"""Every decision of a plan in plain words, with who made it; and why the other ways were not taken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vramfit.config import RunConfig
from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import missing
from vramfit.planning.idle_wishes import idle_choices
from vramfit.planning.plan import Alternative, Choice, Plan, Workload
from vramfit.planning.rates import rates_of
from vramfit.planning.search import Candidate, Search
from vramfit.planning.start import USUAL_LENGTH, sequences_of_step
from vramfit.planning.stored import stored
from vramfit.sentences import Sentence, say
from vramfit.units import format_bytes, format_needed, format_there

ASSUMED: Final = "assumed"
"""The setting under which `reasons` gives what was assumed."""

DRIVE_RATED_BYTES: Final = 2_400 * 10**12
"""What makers of consumer drives of 4 TB vouch for: bytes written in a drive's life."""


def reasons(search: Search, found: Candidate) -> Iterator[Choice]:
    """Every decision, in the order a person asks for them."""
    plan, config = found.plan, search.config
    yield Choice(
        setting="memory budget",
        value=format_bytes(plan.budget_bytes),
        reason=search.start.budget_reason,
        fixed=config.memory.budget_gib != "auto",
    )
    yield _precision_choice(plan, search.device, fixed=config.memory.precision != "auto")
    yield _length_choice(config, plan, search.architecture, search.workload)
    yield _batch_choice(config, found, search.workload)
    yield from _last_blocks_choice(plan, search.architecture)
    yield _recompute_choice(config, found, search.architecture)
    yield _loss_choice(config, plan, search.architecture, search.workload)
    yield _weights_choice(plan)
    yield from _optimizer_choices(config, plan)
    yield from _place_choices(plan, search.architecture)
    yield from _wear_choice(found)
    yield _save_choice(found)
    yield from idle_choices(config, plan)
    yield from assumptions(search)


def assumptions(search: Search) -> Iterator[Choice]:
    """What nobody said, so that it was assumed: the answer changes with it."""
    shape = search.architecture
    if shape.counted:
        yield assumed("model", say("model.counted", family=shape.family, count=f"{shape.params:,}"))
    yield from (assumed("model", note) for note in shape.notes)
    yield from (assumed("machine", note) for note in search.machine.notes)
    device, compute = search.device, search.start.plan.compute
    rates = rates_of(device, compute)
    if rates.source == "assumed":
        note = device.rates_note or say(
            "assumed.card",
            name=device.name,
            flops=f"{rates.dense / 1e12:.3g}",
            format=compute,
            bandwidth=f"{rates.bandwidth / 1e9:.0f}",
        )
        yield assumed("speed", note)


def assumed(what: str, note: str) -> Choice:
    """An assumption as a reason beside the others."""
    return Choice(setting=ASSUMED, value=what, reason=note)


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


def _why_not(found: Candidate, chosen: Candidate | None) -> Sentence:
    """Why another family was not taken."""
    if found.memory.device_bytes > found.plan.budget_bytes:
        return say(
            "other.device",
            needed=format_needed(found.memory.device_bytes),
            phase=found.memory.peak.name,
            available=format_there(found.plan.budget_bytes),
        )
    if not found.fits_ram:
        needed, there = format_needed(found.memory.host_bytes), format_there(found.ram_bytes)
        return say("other.ram", needed=needed, available=there)
    if not found.fits_disk:
        needed, there = format_needed(found.memory.disk_bytes), format_there(found.disk_bytes)
        return say("other.disk", needed=needed, available=there)
    if chosen is None:
        return say("other.fits", size=format_bytes(found.memory.device_bytes))
    slower = found.speed.step_seconds / chosen.speed.step_seconds - 1
    if slower <= 0:
        return say("other.lacks", needs=missing(found.plan)) if missing(found.plan) else say("other.memory")
    return say("other.slower", share=f"{slower:.0%}")


def _place_choices(plan: Plan, architecture: Architecture) -> Iterator[Choice]:
    """Where things live, wherever that is not the device."""
    if plan.cards > 1:
        reason = say("cards.fsdp" if plan.sharding == "fsdp" else "cards.ddp")
        yield Choice(setting="cards", value=f"{plan.cards} ({plan.sharding.upper()})", reason=reason)
    if plan.weights_tier != "device":
        place, visitors = say(f"place.{plan.weights_tier}"), architecture.layers - plan.resident_blocks
        yield Choice(
            setting="streaming",
            value=say("streaming.blocks", count=visitors, layers=architecture.layers),
            reason=say("streaming" if visitors else "streaming.stay", place=place),
        )
        yield from _split_choice(plan, architecture)
    if plan.optimizer_tier != "device":
        place = say(f"place.{plan.optimizer_tier}")
        yield Choice(setting="optimizer states", value=place, reason=say("optimizer.place", place=place))
    if plan.input_tier == "disk":
        yield Choice(
            setting="block inputs", value=say("place.disk"), reason=say("inputs.disk", place=say("place.host"))
        )
    elif plan.input_tier == "host" and plan.weights_tier == "device":
        yield Choice(setting="block inputs", value=say("place.host"), reason=say("inputs.host"))


def _split_choice(plan: Plan, architecture: Architecture) -> Iterator[Choice]:
    """Experts of a large block that come some at a time."""
    found = [each for each in stored(architecture, plan).split if each is not None]
    if found and plan.resident_blocks < architecture.layers:
        value = say("split.slices", count=found[0].slices, size=format_bytes(found[0].slice))
        yield Choice(setting="expert slices", value=value, reason=say("split", size=format_bytes(found[0].whole)))


def _wear_choice(found: Candidate) -> Iterator[Choice]:
    """What the run writes to a drive that does not last for ever."""
    written = found.memory.written_per_step_bytes
    if written:
        value = say("disk.value", size=format_bytes(written))
        steps = max(1, DRIVE_RATED_BYTES // written)
        yield Choice(setting="disk writes", value=value, reason=say("disk.wear", steps=f"{steps:,}"))


def _save_choice(found: Candidate) -> Choice:
    """Whether training goes on while a checkpoint is written."""
    memory = found.memory
    if memory.saves_aside:
        key, value = "saves.copy", "saves.aside"
    else:
        key, value = "saves.no_room" if memory.save_copy_bytes else "saves.tier", "saves.wait"
    reason = say(key, size=format_bytes(memory.save_copy_bytes))
    return Choice(setting="checkpoints", value=say(value), reason=reason)


def _optimizer_choices(config: RunConfig, plan: Plan) -> Iterator[Choice]:
    """The optimizer, wherever it is not AdamW in 32 bits after backward; and compiled blocks."""
    wishes = config.memory
    name = {"adamw": "AdamW", "sgd": "SGD"}.get(plan.optimizer, plan.optimizer.capitalize())
    if plan.optimizer != "adamw" or plan.optimizer_bits < 32:
        fixed = wishes.optimizer != "auto" or wishes.optimizer_bits != "auto"
        reason = say({8: "optimizer.quarter", 4: "optimizer.eighth"}.get(plan.optimizer_bits, "you"))
        yield Choice(setting="optimizer", value=f"{plan.optimizer_bits}-bit {name}", reason=reason, fixed=fixed)
    if plan.optimizer_paged:
        yield Choice(setting="optimizer states", value="paged", reason=say("optimizer.paged"), fixed=True)
    if plan.optimizer_in_backward:
        way = say("optimizer.backward.two" if plan.clip_passes == 2 else "optimizer.backward.one")
        yield Choice(setting="optimizer step", value=way, reason=say("optimizer.backward"), fixed=True)
    if plan.compiled:
        fixed = wishes.compile != "auto"
        changed = fixed and plan.compile_mode != wishes.compile
        told = say("compile.no_graphs" if changed else "you")
        yield Choice(setting="compile", value=plan.compile_mode, reason=told if fixed else "", fixed=fixed)


def _precision_choice(plan: Plan, device: Device, *, fixed: bool) -> Choice:
    if fixed:
        slow = device.kind == "cpu" and plan.compute != "fp32"
        reason = say("precision.slow" if slow else "you")
    elif device.kind == "cpu":
        reason = say("precision.cpu")
    else:
        reason = say(f"precision.{plan.compute if plan.compute in ('bf16', 'fp16') else 'fp32'}")
    return Choice(setting="precision", value=plan.compute, reason=reason, fixed=fixed)


def _length_choice(config: RunConfig, plan: Plan, architecture: Architecture, workload: Workload) -> Choice:
    fixed = config.data.max_length != "auto"
    if fixed:
        beyond = plan.max_length > architecture.max_position
        reason = say("length.beyond", positions=architecture.max_position) if beyond else say("you")
    elif plan.max_length >= workload.longest_tokens:
        reason = say("length.longest", count=workload.longest_tokens)
    elif plan.max_length == architecture.max_position:
        reason = say("length.positions")
    else:
        reason = say("length.cut", count=USUAL_LENGTH)
    value = say("length.tokens", count=plan.max_length)
    return Choice(setting="max length", value=value, reason=reason, fixed=fixed)


def _batch_choice(config: RunConfig, found: Candidate, workload: Workload) -> Choice:
    plan = found.plan
    sequences = sequences_of_step(config, workload)
    fixed = config.memory.micro_batch != "auto"
    value = f"{plan.micro_batch} x {plan.accumulation}"
    if fixed and config.memory.micro_batch != plan.micro_batch:
        reason = say("batch.fewer", wish=config.memory.micro_batch, sequences=sequences)
    elif not fixed and plan.accumulation == 1:
        reason = say("batch.all", sequences=sequences)
    else:
        key = "batch.set" if fixed else "batch.parts"
        reason = say(key, size=plan.micro_batch, times=plan.accumulation, sequences=sequences)
    if sequences < config.schedule.sequences_per_step:
        reason = say("batch.cut", reason=reason, sequences=sequences, wish=config.schedule.sequences_per_step)
    return Choice(setting="micro-batch", value=value, reason=reason, fixed=fixed)


def _last_blocks_choice(plan: Plan, architecture: Architecture) -> Iterator[Choice]:
    """Which weights train, where not all do."""
    if plan.last_blocks:
        value = say("trains.blocks", count=plan.last_blocks, layers=architecture.layers)
        reason = say("trains.tied" if architecture.tied_embeddings else "trains.head")
        yield Choice(setting="trained weights", value=value, reason=reason, fixed=True)


def _recompute_choice(config: RunConfig, found: Candidate, architecture: Architecture) -> Choice:
    plan, layers = found.plan, found.plan.trained_layers(architecture.layers)
    fixed = config.memory.activations != "auto"
    if fixed:
        reason = say("you")
    elif plan.recompute == 0:
        reason = say("activations.fit")
    elif plan.recompute == layers:
        reason = say("activations.none")
    else:
        reason = say("activations.some", count=layers - plan.recompute)
    if plan.recompute and not plan.compress:
        value = say("activations.recompute", count=plan.recompute, layers=layers)
    else:
        value = say("activations.compress" if plan.compress else "activations.keep")
    return Choice(setting="activations", value=value, reason=reason, fixed=fixed)


def _loss_choice(config: RunConfig, plan: Plan, architecture: Architecture, workload: Workload) -> Choice:
    fixed = config.memory.loss != "auto"
    tokens = plan.micro_batch * min(plan.max_length, workload.longest_tokens)
    whole = format_bytes(12.0 * tokens * architecture.vocab_size)
    if fixed:
        reason = say("you")
    elif plan.loss == "full":
        reason = say("loss.full", family=architecture.family, size=whole)
    elif tokens <= plan.loss_chunk_tokens:
        reason = say("loss.one")
    else:
        reason = say("loss.chunks", rows=plan.loss_chunk_tokens, size=whole)
    return Choice(setting="loss", value=plan.loss, reason=reason, fixed=fixed)


def _weights_choice(plan: Plan) -> Choice:
    if plan.weight_format in ("nf4", "int8"):
        key = f"weights.{plan.weight_format}"
    elif plan.lora_rank:
        key = "weights.frozen" if plan.weight_format == "fp32" else "weights.frozen16"
    else:
        rounded = "weights.bf16" if plan.optimizer_tier == "device" else "weights.copies"
        key = "weights.fp32" if plan.weight_format == "fp32" else rounded
    return Choice(setting="weights", value=plan.weight_format, reason=say(key))
