"""Which numbers a step computes in: fp32, tf32, or bf16 / fp16 autocast, and fp16's loss scaling.

Weights keep their own format; tf32 rounds what goes into products of fp32 numbers to 10 bits of mantissa, and autocast
computes matrix products in 16 bits and leaves reductions in fp32. What a device computes in is asked of
`vramfit.engine.accelerators`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vramfit.config import Precision
from vramfit.engine.accelerators import has_hardware, product_settings
from vramfit.errors import ConfigError, Problem

DTYPES: dict[str, torch.dtype] = {
    "fp32": torch.float32,
    "tf32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}

FIRST_LOSS_SCALE = 2.0**16
COLLAPSED_LOSS_SCALE = 2.0**-6
"""Below this scale sixteen more halvings would reach the smallest fp16 number: the gradients are not finite at all."""


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """What a step computes in, and why, for the page."""

    compute: Precision
    reason: str


def choose_precision(device: str | torch.device) -> PrecisionChoice:
    """The compute format that suits a device when nobody planned one: fp32 on the CPU, 16 bits on a card."""
    if torch.device(device).type == "cpu":
        return PrecisionChoice(compute="fp32", reason="CPUs without 16-bit units are many times slower in bf16")
    if has_hardware(device, "bf16"):
        return PrecisionChoice(compute="bf16", reason="this card computes in bf16, which needs no loss scaling")
    return PrecisionChoice(compute="fp16", reason="this card has no bf16, so fp16 with loss scaling is used")


def check_precision(device: str | torch.device, compute: Precision) -> None:
    """Raises ConfigError for tf32 on a device that has none: it would silently be fp32."""
    if compute == "tf32" and not has_hardware(device, "tf32"):
        raise ConfigError(
            [
                Problem(
                    field="memory.precision",
                    what=f"{device} has no tf32: it would compute in fp32",
                    remedy="Choose fp32, or auto.",
                )
            ]
        )


@contextlib.contextmanager
def fp32_products(compute: Precision) -> Iterator[None]:
    """Around forward and backward: products of fp32 numbers in tf32 where `compute` says so, else in fp32 whatever
    the process was set to; afterwards as before.

    By the word that sets both of torch's interfaces: after `torch.backends.cuda.matmul.fp32_precision = "tf32"` alone
    the compiler cannot read the older one any more and fails (2.13).
    """
    wanted = "high" if compute == "tf32" else "highest"
    matmul = product_settings()
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:  # the user's program has used the newer interface alone
        newer = matmul.fp32_precision
        matmul.fp32_precision = "tf32" if compute == "tf32" else "ieee"
        try:
            yield
        finally:
            matmul.fp32_precision = newer
        return
    if before != wanted:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        if before != wanted:
            torch.set_float32_matmul_precision(before)


def autocast(device: str | torch.device, compute: Precision) -> contextlib.AbstractContextManager[Any]:
    """The context for one forward pass."""
    if DTYPES[compute] == torch.float32:
        return contextlib.nullcontext()
    return torch.autocast(torch.device(device).type, dtype=DTYPES[compute])


def loss_scaler(
    device: str | torch.device, compute: Precision, *, trained: list[torch.nn.Parameter]
) -> torch.amp.GradScaler | None:
    """The scaler that fp16 needs, None otherwise. Raises ConfigError when trained weights are fp16 themselves.

    fp16 weights cannot be trained with scaling: their gradients are fp16 too, so undoing the scale underflows again.
    """
    if compute != "fp16":
        return None
    if any(parameter.dtype == torch.float16 for parameter in trained):
        raise ConfigError(
            [
                Problem(
                    field="memory.precision",
                    what="The trained weights are fp16, and fp16 loss scaling needs trained weights in fp32",
                    remedy="Load the model in fp32 (autocast still computes in fp16), or choose bf16.",
                )
            ]
        )
    scaler = torch.amp.GradScaler(torch.device(device).type, init_scale=FIRST_LOSS_SCALE)
    # It makes its scale when it first scales something; we put the scale into the loss's divisor ourselves.
    scaler.scale(torch.zeros((), device=device))
    return scaler


def described(compute: Precision, weights: str) -> str:
    """What a run computes in, as one sentence. `weights` is the format that they are stored in."""
    products = {
        "fp32": "Products are computed in fp32",
        "tf32": "Products are computed in tf32 (fp32 numbers with 10 bits of mantissa)",
        "bf16": "Products are computed in bf16",
        "fp16": "Products are computed in fp16 with dynamic loss scaling",
    }[compute]
    return f"{products}, the loss and sums in fp32; weights are stored in {weights}."
