"""The end of a step: accumulated gradients become new weights, or are refused.

`StepEnd` is what the executor asks for it; here is the usual one, which steps all weights when backward is over. Others
step or send away each weight's gradient while backward goes on (`step_in_backward.py`, `host_states.py`).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from vramfit.engine.precision import COLLAPSED_LOSS_SCALE
from vramfit.sentences import say

Around: TypeAlias = Callable[[Sequence[Tensor]], contextlib.AbstractContextManager[None]]
"""(losses of the step, all of them) -> what goes around the step's last backward."""

Trained = TypeVar("Trained")
Made: TypeAlias = tuple[list[Tensor], Trained]
"""(summed losses of the pieces, how much they are the loss of): what the executor makes in a pass."""


@dataclass(frozen=True, kw_only=True)
class Finish:
    """The end of a step. `loss_sum` is over tokens; the rest as in StepResult."""

    loss_sum: float
    grad_norm: float
    skipped: bool
    loss_scale: float | None
    problem: str


class StepEnd(Protocol):
    """How gradients become weights.

    `passes` has the executor run the step's forward and backward passes and returns what the first gave; `finish` says
    what became of it. `values` are what a resume needs, for JSON.
    """

    def passes(self, run: Callable[[Around], Made[Trained]]) -> Made[Trained]: ...

    def finish(self, losses: Sequence[Tensor]) -> Finish: ...

    def values(self) -> dict[str, Any]: ...

    def load_values(self, values: dict[str, Any]) -> None: ...


@dataclass(kw_only=True)
class AfterBackward:
    """All weights at once, when all gradients are there."""

    optimizer: torch.optim.Optimizer
    parameters: Sequence[nn.Parameter]
    scaler: torch.amp.GradScaler | None
    max_grad_norm: float

    def passes(self, run: Callable[[Around], Made[Trained]]) -> Made[Trained]:
        return run(lambda losses: contextlib.nullcontext())

    def finish(self, losses: Sequence[Tensor]) -> Finish:
        return finish_step(
            self.optimizer,
            parameters=self.parameters,
            scaler=self.scaler,
            max_grad_norm=self.max_grad_norm,
            losses=losses,
        )

    def values(self) -> dict[str, Any]:
        return {}

    def load_values(self, values: dict[str, Any]) -> None:
        pass


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
    norm = total_norm(norms_of(gradients))
    loss_sum, grad_norm = fetch(losses, norm)
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
        problem=problem_of(loss_sum, grad_norm, scale),
    )


def norms_of(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The norm of each, in fp32 whatever their format: bf16 would keep three digits of it."""
    if not gradients:
        return []
    return list(torch._foreach_norm(list(gradients), 2, dtype=torch.float32))


def total_norm(norms: Sequence[Tensor]) -> Tensor:
    """The norm of all gradients from each one's. 0 when there is none."""
    return torch.linalg.vector_norm(torch.stack(list(norms))) if norms else torch.zeros(())


def fetch(losses: Sequence[Tensor], norm: Tensor) -> tuple[float, float]:
    """The sum of the losses and the norm, fetched from the device in one transfer; summed in double precision."""
    *parts, last = torch.stack([*(loss.float() for loss in losses), norm.float()]).tolist()
    return math.fsum(parts) if all(map(math.isfinite, parts)) else math.nan, last


def problem_of(loss_sum: float, grad_norm: float, scale: float | None) -> str:
    """What was wrong with a step, as one sentence; "" when nothing was. `scale` is fp16's after the step."""
    if not math.isfinite(loss_sum):
        return say("health.refused.loss")
    if scale is not None and scale < COLLAPSED_LOSS_SCALE:
        return say("health.refused.scale", scale=f"{scale:g}", least=f"{COLLAPSED_LOSS_SCALE:g}")
    if not math.isfinite(grad_norm) and scale is None:
        return say("health.refused.gradient")
    return ""
