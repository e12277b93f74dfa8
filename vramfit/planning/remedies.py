"""What would help when nothing fits: changes of the wish that were planned anew and do fit, nearest first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

from vramfit.config import RunConfig
from vramfit.errors import ConfigError, HardwareError, WontFit
from vramfit.hardware.catalogue import IDLE_BYTES, cards, machine_with
from vramfit.hardware.devices import Device
from vramfit.planning.abilities import missing
from vramfit.planning.plan import Forecast, Plan
from vramfit.planning.search import Candidate, Search, quickest
from vramfit.units import format_bytes

_SUGGESTED = 3


def helpful(search: Search) -> list[str]:
    """The three nearest changes that would make it fit, as sentences with their need, and a device that would do."""
    here = list(_room_here(search))
    return [*here, *_helpful_few(search), *_designed(search), *([] if here else [_other_device(search)])]


def _helpful_few(search: Search) -> list[str]:
    return list(itertools.islice(_helpful(search), _SUGGESTED))


def _room_here(search: Search) -> Iterator[str]:
    """What this machine has, were it not held by other programs, and its other cards."""
    device = search.device
    alone = dataclasses.replace(device, free_bytes=device.memory_bytes - IDLE_BYTES)
    held = alone.free_bytes - device.free_bytes
    if held > 0 and _possible(_on(search, alone), plainly=True):
        what = "RAM" if device.kind == "cpu" else device.name
        yield f"Other programs hold {format_bytes(held)} of {what}: without them it would fit."
    for other in search.machine.devices:
        if (
            other.kind != "cpu"
            and other.torch_device != device.torch_device
            and _possible(_on(search, other), plainly=True)
        ):
            yield f"{other.name} ({other.torch_device}) has {format_bytes(other.free_bytes)} free, enough for it."


def _on(search: Search, device: Device) -> Search:
    """The same search on `device` alone."""
    config = search.config.model_copy(update={"device": device.torch_device})
    return dataclasses.replace(search, config=config, machine=dataclasses.replace(search.machine, devices=(device,)))


def _helpful(search: Search) -> Iterator[str]:
    for changed, words in _changes(search.config, search.start.plan):
        found = _possible(dataclasses.replace(search, config=changed))
        if found is not None:
            yield f"{words} would need {_needs(found)}."
    yield from _more_ram(search)


def _needs(found: Candidate) -> str:
    needed = format_bytes(found.memory.device_bytes)
    if found.plan.device == "cpu" or found.family.name == "on the device":
        return needed
    return f"{needed} and {format_bytes(found.memory.host_bytes)} of RAM ({found.family.name})"


def _possible(search: Search, *, plainly: bool = False) -> Candidate | None:
    """The plainest way to do a changed wish, with the least it can do with; None when none fits device, RAM and disk,
    or the wish is itself refused. `plainly`: without streaming and the like."""
    try:
        again = Search.of(search.config, search.architecture, search.machine, search.workload)
    except (ConfigError, HardwareError):
        return None
    tried = (again.least(family) for family in again.families()[: 1 if plainly else None])
    return next((found for found in tried if found.fits), None)


def _more_ram(search: Search) -> Iterator[str]:
    """The way that lacks least RAM and nothing else."""
    tried = [search.least(family) for family in search.families() if search.device.kind != "cpu"]
    short = [found for found in tried if found.fits_device and found.fits_disk and not found.fits_ram]
    if short:
        least = min(short, key=lambda found: found.memory.host_bytes)
        yield (
            f"With {format_bytes(least.memory.host_bytes)} of RAM, of which this machine has "
            f"{format_bytes(search.machine.ram_bytes)}, it would fit ({least.family.name})."
        )


def _changes(config: RunConfig, base: Plan) -> Iterator[tuple[RunConfig, str]]:
    wishes = config.memory
    for field in ("micro_batch", "activations", "loss", "precision", "budget_gib"):
        if getattr(wishes, field) != "auto":
            memory = wishes.model_copy(update={field: "auto"})
            yield config.model_copy(update={"memory": memory}), f"Leaving memory.{field} to auto"
    adapted = config.model_copy(update={"method": "lora", "train_last_blocks": None})
    if config.method == "full":
        yield adapted, "LoRA instead of full fine-tuning"
    if config.method in ("full", "lora"):
        yield adapted.model_copy(update={"method": "qlora"}), "QLoRA (a 4-bit base)"
    for length in _shorter(base.max_length):
        data = config.data.model_copy(update={"max_length": length})
        yield config.model_copy(update={"data": data}), f"Sequences of at most {length} tokens"
    if config.method in ("full", "lora"):
        for length in _shorter(base.max_length):
            data = config.data.model_copy(update={"max_length": length})
            both = config.model_copy(update={"method": "qlora", "data": data})
            yield both, f"QLoRA with sequences of at most {length} tokens"


def _shorter(length: int) -> Iterator[int]:
    for divisor in (2, 4, 8, 16, 32):
        if length // divisor >= 64:
            yield length // divisor


def _other_device(search: Search) -> str:
    """The smallest card that would do, or what it would have to have."""
    needed = search.least().memory.device_bytes
    return _smallest_card(search) or f"A device with {format_bytes(needed)} free would do."


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


def _smallest_card(search: Search) -> str | None:
    """The catalogue's card with the least memory on which the wish as it stands fits, with this machine's RAM and
    disk."""
    for card in sorted(cards(), key=lambda card: (card.memory_bytes, card.price_usd)):
        there = machine_with(card, ram_gib=search.machine.ram_bytes / 2**30)
        there = dataclasses.replace(there, disk_free_bytes=search.machine.disk_free_bytes)
        wishes = search.config.memory.model_copy(update={"budget_gib": "auto"})
        config = search.config.model_copy(update={"device": "auto", "memory": wishes})
        found = _possible(dataclasses.replace(search, config=config, machine=there))
        if found is not None:
            return f"The smallest card that would do is {card.name} ({card.memory_gib:g} GiB), with {_needs(found)}."
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
            suggestions=(*_helpful_few(search), "Choose a smaller model, or add RAM."),
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
            suggestions=tuple(_less_disk(search)),
            forecast=found,
        )


def _on_disk(found: Forecast) -> str:
    if found.plan.optimizer_tier == "disk":
        return "Blocks and optimizer states that live on disk, checkpoints and result"
    if found.plan.weights_tier == "disk":
        return "Blocks that live on disk in the format they train beside, checkpoints and result"
    return "Checkpoints and result"


def _less_disk(search: Search) -> Iterator[str]:
    """What would need less disk, each planned anew, as sentences."""
    for changed, words in _saving_less(search.config):
        found = _possible(dataclasses.replace(search, config=changed))
        if found is not None:
            yield f"{words} would need {format_bytes(found.memory.disk_bytes)}."
    yield "Free some space, or choose a data folder on another disk."


def _saving_less(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    output = config.output

    def saving(**changes: object) -> RunConfig:
        return config.model_copy(update={"output": output.model_copy(update=changes)})

    if output.keep_every:
        yield saving(keep_every=0), "Keeping no checkpoints for good (output.keep_every 0)"
    if output.keep_checkpoints > 1:
        yield saving(keep_checkpoints=1), "Keeping 1 checkpoint (output.keep_checkpoints)"
    if output.keep_checkpoints + output.keep_every > 1:
        least = saving(keep_checkpoints=1, keep_every=0, keep_best=False)
        yield least, "Keeping only the newest checkpoint (output.keep_checkpoints, keep_every, keep_best)"
    if output.export == "merged":
        yield saving(export="adapter"), "Exporting the adapter alone (output.export)"
    if config.method == "full":
        yield config.model_copy(update={"method": "lora"}), "LoRA instead of full fine-tuning"
