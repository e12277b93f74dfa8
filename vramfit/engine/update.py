"""The end of a step: accumulated gradients become new weights, or are refused."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from vramfit.engine.precision import COLLAPSED_LOSS_SCALE


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a step. `loss_sum` is over tokens; the rest as in StepResult."""

    loss_sum: float
    grad_norm: float
    skipped: bool
    loss_scale: float | None
    problem: str


def finish_step(
    optimizer: torch.optim.Optimizer,
    *,
    parameters: Sequence[nn.Parameter],
    scaler: torch.amp.GradScaler | None,
    max_grad_norm: float,
    losses: Sequence[Tensor],
    gradient_factor: float = 1.0,
) -> Finish:
    """From accumulated gradients to new weights: unscale, norm, clip, step, clear.

    Gradients are multiplied by `gradient_factor` first. The weights stay as they were when the loss or the gradient is
    not finite. The device is waited for once.
    """
    if scaler is not None:
        scaler.unscale_(optimizer)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradient_factor != 1.0:
        torch._foreach_mul_(gradients, gradient_factor)
    norm = nn.utils.get_total_norm(gradients)
    loss_sum, grad_norm = _together(losses, norm)
    finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
    if finite:
        if max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
        if scaler is not None:
            scaler.step(optimizer)
        else:
            optimizer.step()
    scale = None
    if scaler is not None:
        scaler.update()
        scale = scaler.get_scale()
    optimizer.zero_grad(set_to_none=True)
    return Finish(
        loss_sum=loss_sum,
        grad_norm=grad_norm,
        skipped=not finite,
        loss_scale=scale,
        problem=_problem(loss_sum, grad_norm, scale),
    )


def _together(losses: Sequence[Tensor], norm: Tensor) -> tuple[float, float]:
    """The sum of the losses and the norm, fetched from the device in one transfer; summed in double precision."""
    *parts, last = torch.stack([*(loss.float() for loss in losses), norm.float()]).tolist()
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan, last


def _problem(loss_sum: float, grad_norm: float, scale: float | None) -> str:
    if not math.isfinite(loss_sum):
        return "The loss is not a finite number, so the step was refused"
    if scale is not None and scale < COLLAPSED_LOSS_SCALE:
        return f"fp16's loss scale has fallen to {scale:g}, below {COLLAPSED_LOSS_SCALE:g}: the gradients stay infinite"
    if not math.isfinite(grad_norm) and scale is None:
        return "The gradient is not finite, so the step was refused"
    return ""
