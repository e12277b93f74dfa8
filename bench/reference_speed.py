"""Predicted against published speed: which machine ran a row, and how well rates and order are met.

Tokens/s of the reference rows are of the whole run, all cards together, in every source: fms and answer.ai print them
for the run (two cards show about twice one card's), the others were multiplied out when the rows were collected
(torchtitan prints them per card: 8 x 5,762 = 46,096).
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from reference_rows import Row, Unusable, measured, run_of

from vramfit.hardware import catalogue as cards
from vramfit.hardware.devices import Device, power_share
from vramfit.planning.plan import SpeedEstimate
from vramfit.planning.speed import estimate_speed

TIE: Final = 0.05

MACHINES: Final = {
    # Their text: two 3090 without NVLink on "an older motherboard and slow PCI lanes", limited to 280 W each. A board
    # that holds two cards halves its PCIe 3.0 lanes: 8 each, 6.4 GB/s. (The 4090s: full PCIe 4 x16, the catalogue's.)
    ("answerai fsdp_qlora", "RTX 3090"): {"link_bandwidth": 6.4e9, "power_watts": 280.0},
}
"""What a source says of its machine, where it is not the card as sold."""


def device_of(row: Row) -> Device:
    """The card that ran a row. Raises Unusable when the catalogue has none of that name."""
    card = cards.find(row["gpu_model"])
    if card is None:
        raise Unusable(f"the catalogue has no {row['gpu_model'] or 'card without a name'}")
    device = cards.machine_with(card).devices[0]
    said = MACHINES.get((row["program"], row["gpu_model"]), {})
    slowed = power_share(said.get("power_watts", 0.0), card.power_watts)
    flops = {dtype: slowed * rate for dtype, rate in device.flops.items()}
    return dataclasses.replace(device, flops=flops, **said)  # type: ignore[arg-type]


def predict_speed(row: Row) -> SpeedEstimate:
    """The estimate of a row. Raises Unusable."""
    device = device_of(row)
    run = run_of(row)
    return estimate_speed(run.architecture, run.plan, device, run.workload, program=run.program)


@dataclass(frozen=True, kw_only=True)
class Speed:
    """One row's outcome, in tokens/s of all cards."""

    id: str
    source: str
    program: str
    method: str
    card: str
    quality: str
    measured: float
    predicted: float
    bound: str
    mfu: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def compare_speed(row: Row) -> Speed:
    """Predicted against measured. Raises Unusable."""
    found = predict_speed(row)
    return Speed(
        id=row["id"],
        source=row["source_url"],
        program=row["program"],
        method=row["method"],
        card=row["gpu_model"],
        quality=row["quality"],
        measured=measured(row, "tokens_per_s"),
        predicted=found.tokens_per_s,
        bound=found.bound_by,
        mfu=found.mfu,
    )


def speed_summary(rows: Iterable[Speed]) -> dict[str, Any]:
    """n, median absolute relative error, and the share of pairs of one source whose order is right."""
    chosen = list(rows)
    right, pairs = 0, 0
    for index, one in enumerate(chosen):
        for other in chosen[:index]:
            if one.source != other.source or _ties(one.measured, other.measured):
                continue
            pairs += 1
            right += (one.measured > other.measured) == (one.predicted > other.predicted)
    return {
        "n": len(chosen),
        "median": statistics.median(abs(row.error) for row in chosen) if chosen else None,
        "pairs": pairs,
        "pair_order": right / pairs if pairs else None,
    }


def _ties(one: float, other: float) -> bool:
    return abs(one - other) < TIE * max(one, other)
