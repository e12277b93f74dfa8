"""What would help when nothing fits: changes of the wish that were planned anew and do fit, nearest first."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from vramfit.config import RunConfig
from vramfit.errors import ConfigError, HardwareError, WontFit
from vramfit.hardware.catalogue import IDLE_BYTES, cards, machine_with
from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import missing
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Forecast, Plan, Workload
from vramfit.planning.search import Candidate, Search, quickest
from vramfit.units import format_bytes

_SUGGESTED = 3


def helpful(search: Search) -> list[str]:
    """The three nearest changes that would make it fit, as sentences with their need, and a device that would do."""
    here = list(_room_here(search))
    found = [sentence for _, sentence in zip(range(_SUGGESTED), _helpful(search), strict=False)]
    return [*here, *found, *_designed(search), *([] if here else [_other_device(search)])]


def _room_here(search: Search) -> Iterator[str]:
    """What this machine has, were it not held by other programs, and its other cards."""
    device = search.device
    alone = dataclasses.replace(device, free_bytes=device.memory_bytes - IDLE_BYTES)
    held = alone.free_bytes - device.free_bytes
    if held > 0 and _least(_on(search, alone)) is not None:
        what = "RAM" if device.kind == "cpu" else device.name
        yield f"Other programs hold {format_bytes(held)} of {what}: without them it would fit."
    for other in search.machine.devices:
        if other.kind != "cpu" and other.torch_device != device.torch_device and _least(_on(search, other)):
            yield f"{other.name} ({other.torch_device}) has {format_bytes(other.free_bytes)} free, enough for it."


def _on(search: Search, device: Device) -> Search:
    """The same search on `device` alone."""
    config = search.config.model_copy(update={"device": device.torch_device})
    return dataclasses.replace(search, config=config, machine=dataclasses.replace(search.machine, devices=(device,)))


def _helpful(search: Search) -> Iterator[str]:
    for changed, words in _changes(search.config, search.start.plan):
        least = _least(dataclasses.replace(search, config=changed))
        if least is not None:
            yield f"{words} would need {format_bytes(least.memory.device_bytes)}."


def _least(search: Search) -> Candidate | None:
    """The least a changed wish can do with, when that fits; None when it does not or is itself refused."""
    try:
        again = Search.of(search.config, search.architecture, search.machine, search.workload)
    except ConfigError:
        return None
    least = again.least()
    return least if least.fits else None


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


def _other_device(search: Search) -> str:
    """The smallest card that would do, or what it would have to have."""
    needed = search.least().memory.device_bytes
    return _smallest_card(search, needed) or f"A device with {format_bytes(needed)} free would do."


def _designed(search: Search) -> Iterator[str]:
    """What the design holds and this version's engine does not do yet, when it would fit this machine."""
    families = search.families()
    best = quickest([found for found in search.designed.bests if found.fits and found.family not in families])
    if best is not None:
        name = best.family.name
        yield (
            f"{name[0].upper()}{name[1:]} would need {format_bytes(best.memory.device_bytes)} of the device and "
            f"{format_bytes(best.memory.host_bytes)} of RAM ({', '.join(missing(best.plan))}: not in this version)."
        )


def _smallest_card(search: Search, needed: int) -> str | None:
    """The catalogue's card with the least memory on which the wish as it stands fits."""
    for card in sorted(cards(), key=lambda card: (card.memory_bytes, card.price_usd)):
        if card.memory_bytes < needed:
            continue
        there = machine_with(card, ram_gib=search.machine.ram_bytes / 2**30)
        wishes = search.config.memory.model_copy(update={"budget_gib": "auto"})
        config = search.config.model_copy(update={"device": "auto", "memory": wishes})
        try:
            least = Search.of(config, search.architecture, there, search.workload).least()
        except (ConfigError, HardwareError):
            continue
        if least.fits:
            needed_there = format_bytes(least.memory.device_bytes)
            return f"The smallest card that would do is {card.name} ({card.memory_gib:g} GiB), with {needed_there}."
    return None


def wont_fit(search: Search, forecast: Forecast) -> WontFit:
    """The least memory this wish can do with, and which changes would make it fit."""
    least, device = search.least(), search.device
    needed, budget = least.memory.device_bytes, search.start.plan.budget_bytes
    return WontFit(
        f"{search.architecture.name} with {search.config.method} needs {format_bytes(needed)} at its peak "
        f"({least.memory.peak.name}), and {format_bytes(budget)} of {device.name} are available",
        needed_bytes=needed,
        available_bytes=budget,
        phase=least.memory.peak.name,
        suggestions=tuple(helpful(search)),
        forecast=forecast,
    )


def check_host_and_disk(search: Search, found: Forecast) -> None:
    """RAM beside a card, and the disk that takes checkpoints and result. Raises WontFit before anything is loaded."""
    architecture, config, machine = search.architecture, search.config, search.machine
    needed, free = found.memory.host_bytes, machine.ram_free_bytes
    if found.plan.device != "cpu" and needed > machine.ram_bytes:  # what is not free may make room
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
            f"{_on_disk(found)} of {architecture.name} with {config.method} need {format_bytes(needed)} of disk, and "
            f"{format_bytes(free)} are free",
            needed_bytes=needed,
            available_bytes=free,
            tier="disk",
            phase="save",
            suggestions=tuple(_less_disk(config, architecture, found, free)),
            forecast=found,
        )


def _on_disk(found: Forecast) -> str:
    trains_there = found.plan.optimizer_tier == "disk"
    return (
        "Blocks and optimizer states that live on disk, checkpoints and result"
        if trains_there
        else "Checkpoints and result"
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
