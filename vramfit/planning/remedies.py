"""What would help when nothing fits: changes of the wish that were planned anew and do fit, nearest first."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator

from vramfit.config import MemoryWishes, RunConfig
from vramfit.errors import ConfigError, HardwareError, WontFit
from vramfit.hardware.catalogue import IDLE_BYTES, Card, cards, machine_with
from vramfit.hardware.devices import Device
from vramfit.planning.abilities import ENGINE, missing
from vramfit.planning.plan import Forecast
from vramfit.planning.search import Candidate, Search, quickest
from vramfit.planning.start import memory_for
from vramfit.sentences import Sentence, say
from vramfit.units import format_bytes, format_needed, format_there

_SUGGESTED = 3
_LEAST_LENGTH = 64


def helpful(search: Search) -> list[Sentence]:
    """The three nearest changes that would make it fit, as sentences with their need, and a device that would do."""
    here = list(_room_here(search))
    return [*here, *_helpful_few(search), *_designed(search), *([] if here else _other_device(search))]


def _helpful_few(search: Search) -> list[Sentence]:
    return list(itertools.islice(_helpful(search), _SUGGESTED))


def _room_here(search: Search) -> Iterator[Sentence]:
    """What this machine has, were it not held by other programs, and its other cards."""
    device = search.device
    alone = dataclasses.replace(device, free_bytes=device.memory_bytes - IDLE_BYTES)
    held = alone.free_bytes - device.free_bytes
    if held > 0 and _possible(_on(search, alone), plainly=True):
        what = "RAM" if device.kind == "cpu" else device.name
        yield say("help.others", held=format_bytes(held), place=say("place.host") if what == "RAM" else what)
    for other in search.machine.devices:
        if (
            other.kind != "cpu"
            and other.torch_device != device.torch_device
            and _possible(_on(search, other), plainly=True)
        ):
            free = format_bytes(other.free_bytes)
            yield say("help.beside", name=other.name, device=other.torch_device, free=free)


def _on(search: Search, device: Device) -> Search:
    """The same search on `device` alone."""
    config = search.config.model_copy(update={"device": device.torch_device})
    return dataclasses.replace(search, config=config, machine=dataclasses.replace(search.machine, devices=(device,)))


def _helpful(search: Search) -> Iterator[Sentence]:
    """Changes of one thing, then shorter sequences, by the wish's own method and by QLoRA; where none of them is
    enough, those with everything left to the planner. Then what RAM would do."""
    config, named = search.config, False
    for changed, words in _changes(config):
        found = _possible(dataclasses.replace(search, config=changed))
        if found is not None:
            named = True
            yield _would_need(words, found)
    for changed, key in _methods(config):
        for sentence in _shortened(search, changed, key):
            named = True
            yield sentence
    if not named:
        wishes = MemoryWishes(budget_gib=config.memory.budget_gib, adapt=config.memory.adapt)
        free = config.model_copy(update={"memory": wishes})
        if free != config:
            for changed, key in _methods(free):
                yield from _shortened(search, changed, f"{key}.auto")
    yield from _more_ram(search)


def _would_need(change: Sentence, found: Candidate) -> Sentence:
    return say("help.change", change=change, needs=_needs(found))


def _needs(found: Candidate) -> str:
    needed = format_needed(found.memory.device_bytes)
    if found.plan.device == "cpu" or found.family.name == "on the device":
        return needed
    return say("help.needs", device=needed, ram=format_needed(found.memory.host_bytes), way=found.family.name)


def _possible(search: Search, *, plainly: bool = False) -> Candidate | None:
    """The plainest way to do a changed wish, with the least it can do with; None when none fits device, RAM and disk,
    or the wish is itself refused. `plainly`: without streaming and the like."""
    try:
        again = Search.of(search.config, search.architecture, search.machine, search.workload)
    except (ConfigError, HardwareError):
        return None
    ways = (way for family in again.families[: 1 if plainly else None] for way in again.ways(family))
    tried = (again.least(way) for way in ways if not again.is_hopeless(way))
    return next((found for found in tried if found.fits), None)


def _more_ram(search: Search) -> Iterator[Sentence]:
    """The way that lacks least RAM and nothing else."""
    tried = [search.least(family) for family in search.families if search.device.kind != "cpu"]
    short = [found for found in tried if found.fits_device and found.fits_disk and not found.fits_ram]
    if short:
        least = min(short, key=lambda found: found.memory.host_bytes)
        needed, there = format_needed(least.memory.host_bytes), format_there(search.machine.ram_bytes)
        yield say("help.more_ram", needed=needed, there=there, way=least.family.name)


def _changes(config: RunConfig) -> Iterator[tuple[RunConfig, Sentence]]:
    """One thing changed: a fixed wish, or the method."""
    wishes = config.memory
    for field in MemoryWishes.model_fields:
        if field != "adapt" and getattr(wishes, field) != "auto":
            memory = wishes.model_copy(update={field: "auto"})
            yield config.model_copy(update={"memory": memory}), say("change.auto", setting=f"memory.{field}")
    if config.method == "full":
        yield _by(config, "lora"), say("change.lora")
    if config.method in ("full", "lora"):
        yield _by(config, "qlora"), say("change.qlora")


def _by(config: RunConfig, method: str) -> RunConfig:
    return config.model_copy(update={"method": method, "train_last_blocks": None})


def _methods(config: RunConfig) -> Iterator[tuple[RunConfig, str]]:
    """Whose sequences may be shorter, and the sentence that says it."""
    yield config, "change.length"
    if config.method in ("full", "lora"):
        yield _by(config, "qlora"), "change.qlora.length"


def _shortened(search: Search, config: RunConfig, key: str) -> Iterator[Sentence]:
    """The longest of ever halved sequences that fit: memory grows with their length, so the shortest is tried first and
    the rest by halving the distance."""
    lengths = list(_shorter(search.start.plan.max_length))
    best: tuple[int, Candidate] | None = None
    low, high, place = 0, len(lengths), len(lengths) - 1
    while low < high:
        data = config.data.model_copy(update={"max_length": lengths[place]})
        changed = config.model_copy(update={"data": data})
        found = _possible(dataclasses.replace(search, config=changed))
        if found is None:
            low = place + 1
        else:
            best, high = (lengths[place], found), place
        place = (low + high) // 2
    if best is not None:
        yield _would_need(say(key, count=best[0]), best[1])


def _shorter(length: int) -> Iterator[int]:
    while (length := length // 2) >= _LEAST_LENGTH:
        yield length


def _other_device(search: Search) -> Iterator[Sentence]:
    """The smallest card that would do, or what a device would have to have; nothing where this one would do, were it
    not for a budget that was wished for."""
    free = _of_any_budget(search.config)
    if free == search.config or _possible(dataclasses.replace(search, config=free)) is None:
        yield _smallest_card(search) or _device_that_would_do(search)


def _of_any_budget(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"memory": config.memory.model_copy(update={"budget_gib": "auto"})})


def _device_that_would_do(search: Search) -> Sentence:
    """With what has to be there beside it, for all the run's blocks on it."""
    least = search.least()
    memory = least.memory
    beside = {
        "ram": "" if least.fits_ram else format_needed(memory.host_bytes),
        "disk": "" if least.fits_disk else format_needed(memory.disk_bytes),
    }
    key = "help.host" if least.plan.device == "cpu" else "help.device"
    key += "".join(f".{name}" for name, amount in beside.items() if amount)
    return say(key, needed=format_needed(memory_for(memory.device_bytes, search.device)), **beside)


def _designed(search: Search) -> Iterator[Sentence]:
    """What the design holds and this version's engine does not do yet, when it would fit this machine."""
    families = search.families
    # Of several cards together a run cannot stream, though this version streams on one: that is not lacking.
    engine = search.abilities if search.cards == 1 else ENGINE
    others = [found for found in search.designed.bests if found.fits and found.family not in families]
    best = quickest([found for found in others if missing(found.plan, engine)])
    if best is not None:
        yield say(
            "help.designed",
            way=best.family.name,
            device=format_needed(best.memory.device_bytes),
            ram=format_needed(best.memory.host_bytes),
            needs=missing(best.plan, engine),
        )


def _smallest_card(search: Search) -> Sentence | None:
    """The catalogue's card with the least memory on which the wish as it stands fits, with this machine's RAM and
    disk."""
    config = _of_any_budget(search.config).model_copy(update={"device": "auto"})

    def on(card: Card) -> Candidate | None:
        there = machine_with(card, ram_gib=search.machine.ram_bytes / 2**30)
        there = dataclasses.replace(there, disk_free_bytes=search.machine.disk_free_bytes)
        return _possible(dataclasses.replace(search, config=config, machine=there))

    firsts = [first for alike in _alike() if (first := _first_that_fits(alike, on)) is not None]
    if not firsts:
        return None
    card, found = min(firsts, key=lambda each: (each[0].memory_bytes, each[0].price_usd))
    return say("help.card", name=card.name, size=f"{card.memory_gib:g} GiB", needs=_needs(found))


def _alike() -> list[list[Card]]:
    """The catalogue's cards that compute in the same formats, each kind from the least memory to the most."""
    kinds: dict[tuple[str, bool, bool], list[Card]] = {}
    for card in sorted(cards(), key=lambda card: (card.memory_bytes, card.price_usd)):
        device = machine_with(card).devices[0]
        kinds.setdefault((device.kind, device.bf16, device.fp16), []).append(card)
    return list(kinds.values())


def _first_that_fits(alike: list[Card], on: Callable[[Card], Candidate | None]) -> tuple[Card, Candidate] | None:
    """Of cards that differ in their memory the first with a plan: what fits one fits those with more."""
    low, high = 0, len(alike)
    best: tuple[Card, Candidate] | None = None
    while low < high:
        middle = (low + high) // 2
        found = on(alike[middle])
        if found is None:
            low = middle + 1
        else:
            best, high = (alike[middle], found), middle
    return best


def wont_fit(search: Search, forecast: Forecast) -> WontFit:
    """The least memory this wish can do with, and which changes would make it fit."""
    least, device = search.least(), search.device
    needed, budget = least.memory.device_bytes, search.start.plan.budget_bytes
    return WontFit(
        say(
            "wont.device",
            model=search.architecture.name,
            method=search.config.method,
            needed=format_needed(needed),
            phase=least.memory.peak.name,
            available=format_there(budget),
            device=device.name,
        ),
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
            say(
                "wont.ram",
                model=architecture.name,
                method=config.method,
                needed=format_needed(needed),
                there=format_there(machine.ram_bytes),
                free=format_there(free),
            ),
            needed_bytes=needed,
            available_bytes=machine.ram_bytes,
            tier="host",
            phase="load",
            suggestions=(*_helpful_few(search), say("help.smaller")),
            forecast=found,
        )
    needed, free = found.memory.disk_bytes, machine.disk_free_bytes
    if needed > free:
        raise WontFit(
            say(
                "wont.disk",
                what=_on_disk(found),
                model=architecture.name,
                method=config.method,
                needed=format_needed(needed),
                free=format_there(free),
            ),
            needed_bytes=needed,
            available_bytes=free,
            tier="disk",
            phase="save",
            suggestions=tuple(_less_disk(search, found)),
            forecast=found,
        )


def _on_disk(found: Forecast) -> Sentence:
    if found.plan.optimizer_tier == "disk":
        others = say("wont.disk.states")
    else:
        others = say("wont.disk.blocks" if found.plan.weights_tier == "disk" else "wont.disk.result")
    return say("wont.disk.inputs", others=others) if found.plan.input_tier == "disk" else others


def _less_disk(search: Search, found: Forecast) -> Iterator[Sentence]:
    """What would need less disk, each planned anew, as sentences. Where it is blocks' inputs that need it, what would
    need fewer of them comes first, another method among it."""
    inputs_there = found.plan.input_tier == "disk"
    if inputs_there:
        yield from _helpful_few(search)
    for changed, words in _saving_less(search.config):
        if inputs_there and changed.method != search.config.method:
            continue
        possible = _possible(dataclasses.replace(search, config=changed))
        if possible is not None:
            yield say("help.change", change=words, needs=format_needed(possible.memory.disk_bytes))
    yield say("help.space")


def _saving_less(config: RunConfig) -> Iterator[tuple[RunConfig, Sentence]]:
    output = config.output

    def saving(**changes: object) -> RunConfig:
        return config.model_copy(update={"output": output.model_copy(update=changes)})

    if output.keep_every:
        yield saving(keep_every=0), say("change.keep_every")
    if output.keep_checkpoints > 1:
        yield saving(keep_checkpoints=1), say("change.keep_one")
    if output.keep_checkpoints + output.keep_every > 1:
        yield saving(keep_checkpoints=1, keep_every=0, keep_best=False), say("change.keep_newest")
    if output.export == "merged":
        yield saving(export="adapter"), say("change.adapter")
    if config.method == "full":
        yield config.model_copy(update={"method": "lora"}), say("change.lora")
