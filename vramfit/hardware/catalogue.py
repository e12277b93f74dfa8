"""Graphics cards and their physical facts (`cards.json` beside this file): to plan for cards that are not here, too."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from vramfit.errors import HardwareError
from vramfit.hardware.devices import Device, DeviceKind, Machine
from vramfit.sentences import say
from vramfit.units import GIB, format_bytes

_FILE = Path(__file__).with_name("cards.json")
_VENDOR_WORDS = frozenset({"nvidia", "geforce", "amd", "radeon", "intel", "graphics", "gpu", "rtx", "arc", "rx"})
IDLE_BYTES = int(0.35 * GIB)
"""What a card of the shop loses before any program starts: firmware and the driver's own tables."""

ASSUMED_RAM_GIB = 64
ASSUMED_DISK_GIB = 500
"""RAM of a machine one only plans for, when nobody says, and free disk. Shown as assumptions."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card as sold. Bytes/s, dense FLOP/s by compute dtype with fp32 accumulation, watts, US dollars.

    `names` are what drivers and people call it, `price_note` says what the price is and when it was seen, and
    `rent_usd` is an hour of one in a cloud (0: hardly offered). `reach`, `attention_reach`, `units` and
    `peer_bandwidth` as of `Device`.
    """

    name: str
    kind: DeviceKind
    names: tuple[str, ...]
    memory_gib: float
    memory_bandwidth: float
    flops: dict[str, float]
    link_bandwidth: float
    power_watts: float
    bf16: bool
    fp8: bool
    price_usd: float
    price_note: str
    reach: float
    attention_reach: float
    units: int
    peer_bandwidth: float
    rent_usd: float
    rent_note: str

    @property
    def memory_bytes(self) -> int:
        return int(self.memory_gib * GIB)


@cache
def cards() -> tuple[Card, ...]:
    """All cards of the catalogue, in its order."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    return tuple(Card(**{**row, "names": tuple(row["names"])}) for row in rows)


def find(name: str, *, memory_bytes: int | None = None) -> Card | None:
    """The card that a driver or a person calls `name`.

    A variant with another suffix (Laptop, Ti, SUPER, D) is another card, and so is one whose `memory_bytes`, when
    given, is not within 15 % of the catalogue's.
    """
    card = _index().get(_words(name))
    if card and memory_bytes is not None and abs(memory_bytes / card.memory_bytes - 1) > 0.15:
        return None
    return card


def get(name: str) -> Card:
    """The card called `name`. Raises HardwareError, naming all there are."""
    card = find(name)
    if card is None:
        names = ", ".join(item.name for item in cards())
        raise HardwareError(
            say("hardware.no_card", count=len(cards()), name=name), say("hardware.choose_card", names=names)
        )
    return card


def machine_with(card: Card | str, count: int = 1, ram_gib: float | None = None) -> Machine:
    """A machine one does not have: `count` of `card`, `ram_gib` of RAM (64 when not said), nine tenths of it free.

    Raises HardwareError when no card of the catalogue is called so.
    """
    known = card if isinstance(card, Card) else get(card)
    ram = int((ram_gib or ASSUMED_RAM_GIB) * GIB)
    devices = tuple(_device(known, index) for index in range(count))
    disk = format_bytes(ASSUMED_DISK_GIB * GIB)
    told = say("assumed.disk", disk=disk) if ram_gib else say("assumed.ram", ram=format_bytes(ram), disk=disk)
    return Machine(
        devices=devices,
        ram_bytes=ram,
        ram_free_bytes=int(ram * 0.9),
        disk_free_bytes=ASSUMED_DISK_GIB * GIB,
        cpu_cores=8,
        notes=(told,),
    )


def _device(card: Card, index: int) -> Device:
    torch_kind = "xpu" if card.kind == "xpu" else "cuda"  # torch calls AMD's cards cuda too
    return Device(
        kind=card.kind,
        name=card.name,
        torch_device=f"{torch_kind}:{index}",
        identity=f"catalogue:{card.name}:{index}",
        memory_bytes=card.memory_bytes,
        free_bytes=card.memory_bytes - IDLE_BYTES,
        bf16=card.bf16,
        fp16=True,
        fp8=card.fp8,
        flops=dict(card.flops),
        memory_bandwidth=card.memory_bandwidth,
        link_bandwidth=card.link_bandwidth,
        power_watts=card.power_watts,
        reach=card.reach,
        attention_reach=card.attention_reach,
        units=card.units,
        peer_bandwidth=card.peer_bandwidth,
        rates="catalogue",
    )


@cache
def _index() -> dict[tuple[str, ...], Card]:
    return {_words(name): card for card in cards() for name in (card.name, *card.names)}


def _words(name: str) -> tuple[str, ...]:
    """A name without trademark signs, vendor words and punctuation, so that spelling does not matter."""
    plain = re.sub(r"\((r|tm|c)\)", " ", name.lower())
    plain = re.sub(r"\b(rtx|rx)(\d)", r"\1 \2", plain)
    plain = re.sub(r"(\d)\s+(gb|gib)\b", r"\1gb", plain)
    words = re.findall(r"[a-z0-9]+", plain)
    return tuple(sorted(word for word in words if word not in _VENDOR_WORDS))
