"""A stand-in for the NVIDIA driver's library, which no test machine has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from vramfit.units import GIB


@dataclass
class FakeCard:
    """What the driver says of one card; a name in `broken` is a question it answers with an error."""

    name: str = "NVIDIA GeForce RTX 4090"
    uuid: str = "GPU-aaaa0000"
    total: int = 24 * GIB
    free: int = 23 * GIB
    capability: tuple[int, int] = (8, 9)
    cores: int = 16384
    clocks: int = 0x4  # bits of what holds the clocks down: the power limit
    broken: set[str] = field(default_factory=set)


class FakeNvml:
    """The functions of `pynvml` that are asked. `slices` are parts of cards (MIG), which have no index of their own."""

    class NVMLError(Exception):
        pass

    NVML_CLOCK_SM = 1

    def __init__(self, *cards: FakeCard, fails: str = "", slices: Sequence[FakeCard] = ()) -> None:
        self.cards, self.fails, self.slices = list(cards), fails, list(slices)

    def nvmlInit(self) -> None:  # noqa: N802 - the driver's names
        if self.fails:
            raise self.NVMLError(self.fails)

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        return len(self.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> FakeCard:  # noqa: N802
        if "handle" in self.cards[index].broken:
            raise self.NVMLError("GPU is lost")
        return self.cards[index]

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> FakeCard:  # noqa: N802
        for card in (*self.cards, *self.slices):
            if card.uuid == uuid:
                return card
        raise self.NVMLError("Not Found")

    def __getattr__(self, name: str) -> Any:
        answers = {
            "nvmlDeviceGetName": lambda card: card.name,
            "nvmlDeviceGetUUID": lambda card: card.uuid.encode(),
            "nvmlDeviceGetMemoryInfo": lambda card: SimpleNamespace(
                total=card.total, free=card.free, used=card.total - card.free
            ),
            "nvmlDeviceGetCudaComputeCapability": lambda card: card.capability,
            "nvmlDeviceGetNumGpuCores": lambda card: card.cores,
            "nvmlDeviceGetMaxClockInfo": lambda card, kind: 2500,
            "nvmlDeviceGetEnforcedPowerLimit": lambda card: 450_000,
            "nvmlDeviceGetUtilizationRates": lambda card: SimpleNamespace(gpu=87, memory=40),
            "nvmlDeviceGetPowerUsage": lambda card: 312_500,
            "nvmlDeviceGetTemperature": lambda card, sensor: 64,
            "nvmlDeviceGetCurrentClocksEventReasons": lambda card: card.clocks,
            "nvmlDeviceGetCurrentClocksThrottleReasons": lambda card: card.clocks,
        }
        if name not in answers:
            raise AttributeError(name)

        def ask(card: FakeCard, *arguments: Any) -> Any:
            if name in card.broken:
                raise self.NVMLError("GPU is lost")
            return answers[name](card, *arguments)

        return ask


@pytest.fixture
def driver() -> type[FakeNvml]:
    return FakeNvml


@pytest.fixture
def card() -> type[FakeCard]:
    return FakeCard
