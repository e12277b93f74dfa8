"""Bytes of optimizers: states of each weight by its shape and the optimizer's kind, and what a step makes beside them.

Matrices of at least 4,096 numbers have states in few bits where those are planned; vectors and small ones have them in
fp32. Muon steps the matrices inside blocks with one state, everything else as AdamW; Adafactor has a row and a column
of each matrix. Our own steps work on a weight a chunk at a time (`engine/chunked.py`), so what they make beside it does
not grow with it; Muon's works on a whole matrix.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from vramfit.planning.plan import Plan

STATE_BYTES: Final = {32: 4.0, 16: 2.0, 8: 1.0 + 4 / 256, 4: 0.5 + 4 / 128}
"""Bytes of one optimizer state by its bits: low-bit states have an fp32 scale per block (of 256, and of 128)."""

STATES: Final = {"adamw": 2, "lion": 1, "muon": 1, "sgd": 1, "adafactor": 0}
"""States of a number. Adafactor's are a row and a column of each matrix, which is nothing beside the rest."""

SMALL: Final = 4096
"""Matrices of fewer numbers, and all vectors, have 32-bit states."""

CHUNK_ON_CPU: Final = 2**17
CHUNK_ON_CARD: Final = 2**21
"""Numbers of a weight that are stepped at once."""

_IN_STEP: Final = {
    ("adamw", False): (0.0, 10.0),
    ("adamw", True): (25.0, 29.0),
    ("lion", False): (4.0, 18.0),
    ("lion", True): (17.0, 22.0),
    ("sgd", False): (0.0, 10.0),
    ("adafactor", False): (8.0, 12.0),
}
"""Bytes made beside a number of a chunk of fp32 and bf16 weights, measured, by kind and whether states are in few
bits."""

_ROUNDING: Final = 6.0
"""Bytes made while an fp32 number is rounded to bf16 by chance."""


@dataclass(frozen=True)
class Weight:
    """A weight that trains: its numbers, those of its rows and columns (0: it is a vector), and whether it is inside a
    block. A stack of `copies` matrices is one weight."""

    numbers: int
    sides: int = 0
    inside: bool = True
    copies: int = 1


def state_bytes(plan: Plan, weight: Weight) -> float:
    """Bytes of all states of one weight."""
    if plan.optimizer == "adafactor":
        return 4.0 * (weight.sides or weight.numbers)
    if plan.optimizer == "muon":
        return 4.0 * weight.numbers * (STATES["muon"] if _is_muons(weight) else STATES["adamw"])
    few = plan.optimizer_bits < 16 and (not weight.sides or weight.numbers < SMALL)
    return STATES[plan.optimizer] * STATE_BYTES[32 if few else plan.optimizer_bits] * weight.numbers


def step_bytes(plan: Plan, weights: Iterable[Weight], *, bf16: bool) -> float:
    """Most bytes that a step of our own makes beside one of `weights`, which are fp32 or `bf16`."""
    return max((_beside(plan, weight, bf16=bf16) for weight in weights), default=0.0)


def _beside(plan: Plan, weight: Weight, *, bf16: bool) -> float:
    if plan.optimizer == "muon" and _is_muons(weight):
        return _orthogonalised(plan, weight, bf16=bf16)
    kind = "adamw" if plan.optimizer == "muon" else plan.optimizer
    few = plan.optimizer_bits < 16 and weight.sides > 0 and weight.numbers >= SMALL
    chunk = CHUNK_ON_CPU if plan.device == "cpu" else CHUNK_ON_CARD
    return _IN_STEP[kind, few and kind in ("adamw", "lion")][bf16] * min(chunk, weight.numbers)


def _orthogonalised(plan: Plan, weight: Weight, *, bf16: bool) -> float:
    """Muon's step of one matrix: the mean of gradient and momentum in fp32 and the products' format; then in that the
    mean, an iteration's argument, its result and two squares of the shorter side; at last result and new weights."""
    numbers = weight.numbers / weight.copies
    product = 4 if plan.device == "cpu" else 2
    sides = weight.sides / weight.copies
    shorter = (sides - math.sqrt(max(0.0, sides**2 - 4 * numbers))) / 2  # of rows + columns and rows x columns
    first = (4.0 if bf16 else 0.0) + 4.0 + (product if product < 4 else 0.0)
    last = 2.0 * product + (4.0 + _ROUNDING if bf16 else 0.0)
    return max(first * numbers, product * (3 * numbers + 2 * shorter**2), last * numbers)


def _is_muons(weight: Weight) -> bool:
    return weight.inside and weight.sides > 0
