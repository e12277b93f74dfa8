"""What could be trained: models x methods on a card, one model on all cards, memory against length. All of it planned.

Each cell is a search like any run's. What this version's engine can run is told apart from what the design holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Literal

from vramfit.config import Method, RunConfig
from vramfit.errors import ConfigError
from vramfit.hardware.catalogue import cards, machine_with
from vramfit.hardware.devices import Machine
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import ENGINE, missing
from vramfit.planning.other_programs import COMPARED, Elsewhere, Run, elsewhere, has_method
from vramfit.planning.plan import Workload
from vramfit.planning.program import OURS
from vramfit.planning.search import Candidate, Search, quickest

Verdict = Literal["fits", "streams", "needs", "no"]
"""fits: it runs on the device. streams: its blocks visit the device one by one. needs: it fits with something else that
this version lacks. no: nothing helps on this machine."""

METHODS: Final[tuple[Method, ...]] = ("full", "lora", "qlora")
LENGTHS: Final = (512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One wish on one machine: bytes of the device and of RAM at the peak, trained tokens/s.

    `least_bytes` is what this version needs of the device at the least, with the smallest and slowest plan. `needs` is
    what of the plan this version lacks; `limit` says which number breaks where nothing fits. `on_cpu`: the device is
    the CPU, and its memory is RAM."""

    model: str
    method: Method
    card: str
    length: int
    verdict: Verdict
    way: str
    device_bytes: int
    host_bytes: int
    tokens_per_s: float
    needs: tuple[str, ...]
    limit: str = ""
    least_bytes: int = 0
    on_cpu: bool = False


def heat_map(
    machine: Machine, models: Iterable[Architecture], *, length: int = 2048, methods: Iterable[Method] = METHODS
) -> list[Outcome]:
    """Every model with every method on the machine's first device."""
    chosen = tuple(methods)
    return [outcome(machine, model, method, length=length) for model in models for method in chosen]


def across_cards(
    model: Architecture, method: Method, *, length: int = 2048, ram_gib: float | None = None
) -> list[Outcome]:
    """One model on every card of the catalogue."""
    return [outcome(machine_with(card, ram_gib=ram_gib), model, method, length=length) for card in cards()]


def over_lengths(
    machine: Machine, model: Architecture, method: Method, lengths: Iterable[int] = LENGTHS
) -> list[Outcome]:
    """Memory and speed as sequences grow, up to the positions the model was made for."""
    return [
        outcome(machine, model, method, length=length) for length in lengths if length <= max(model.max_position, 512)
    ]


def outcome(machine: Machine, model: Architecture, method: Method, *, length: int = 2048) -> Outcome:
    """The best that can be done with a model and a method on a machine, sequences all `length` tokens long."""
    try:
        search = _search(machine, model, method, length)
    except ConfigError as refusal:
        return _refused(machine, model, method, length, refusal.what)
    here = search.best()
    found = here or quickest([candidate for candidate in search.designed.bests if candidate.fits])
    if found is not None:
        return _outcome(search, found, _verdict(found))
    least = min(search.designed.bests, key=lambda candidate: candidate.memory.device_bytes)
    return _outcome(search, least, "no")


def across_programs(machine: Machine, model: Architecture, method: Method, *, length: int = 2048) -> list[Elsewhere]:
    """The run that is best here as other programs would do it; ours first, then what fits, the fastest first.

    Raises ConfigError for a method this model cannot have."""
    search = _search(machine, model, method, length)
    found = search.best() or search.least()
    run = Run(
        architecture=model,
        device=search.device,
        workload=search.workload,
        sequences=search.sequences,
        ram_bytes=machine.ram_bytes,
    )
    ours = Elsewhere(program=OURS.name, plan=found.plan, memory=found.memory, speed=found.speed, fits=found.fits)
    others = [elsewhere(name, found.plan, run) for name in COMPARED if has_method(name, method)]
    return [ours, *sorted(others, key=lambda other: (not other.fits, -other.speed.tokens_per_s))]


def shared_outcome(machine: Machine, model: Architecture, method: Method, *, length: int = 2048) -> Outcome:
    """The fastest of all that is designed, on all cards of the machine: what a whole setup of cards would reach.

    Unlike `outcome` it does not prefer what this version can run; `needs` says what is missing for it."""
    search = _search(machine, model, method, length).designed
    found = quickest([candidate for candidate in search.bests if candidate.fits])
    if found is not None:
        return _outcome(search, found, _verdict(found))
    return _outcome(search, min(search.bests, key=lambda candidate: candidate.memory.device_bytes), "no")


def _search(machine: Machine, model: Architecture, method: Method, length: int) -> Search:
    work = Workload(sequences=10_000, mean_tokens=length, longest_tokens=length)
    config = RunConfig.parse({"method": method, "model": {"source": model.name}, "data": {"max_length": length}})
    return Search.of(config, model, machine, work)


def _verdict(found: Candidate) -> Verdict:
    if found.family.streams:
        return "streams"
    return "needs" if missing(found.plan, ENGINE) else "fits"


def _outcome(search: Search, found: Candidate, verdict: Verdict) -> Outcome:
    limit = ""
    if verdict == "no":
        if not found.fits_device and search.device.kind != "cpu":
            limit = "device memory"
        else:
            limit = "disk" if found.fits_device and found.fits_ram else "RAM"
    return Outcome(
        model=search.architecture.name,
        method=search.config.method,
        card=search.device.name,
        length=found.plan.max_length,
        verdict=verdict,
        way=found.family.name,
        device_bytes=found.memory.device_bytes,
        host_bytes=found.memory.host_bytes,
        tokens_per_s=found.speed.tokens_per_s if verdict != "no" else 0.0,
        needs=missing(found.plan, ENGINE),
        limit=limit,
        least_bytes=min(search.least(family).memory.device_bytes for family in search.families),
        on_cpu=search.device.kind == "cpu",
    )


def _refused(machine: Machine, model: Architecture, method: Method, length: int, why: str) -> Outcome:
    return Outcome(
        model=model.name,
        method=method,
        card=machine.devices[0].name,
        length=length,
        verdict="no",
        way="",
        device_bytes=0,
        host_bytes=0,
        tokens_per_s=0.0,
        needs=(),
        limit=why,
        on_cpu=machine.devices[0].kind == "cpu",
    )
