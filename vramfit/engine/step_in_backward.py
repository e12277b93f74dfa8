"""Each weight's step as soon as its gradient is there, and the gradient freed at once: never all gradients together.

To clip by the norm of all gradients one must know them all first. So `TwoPasses` runs the step's forward and backward
twice: the first pass only measures, the second, with the same random numbers, steps; its weights are those of an
ordinary step, at about twice the time. `OnePass` clips by the norm of the step before.

A step of several micro-batches keeps the sum of their gradients until the last one, as an ordinary step does: the same
weights, but nothing is saved.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from vramfit.engine.gradient_hooks import GradientTaker
from vramfit.engine.randomness import random_state, set_random_state
from vramfit.engine.update import Around, Finish, Made, Trained, fetch, norms_of, problem_of, total_norm
from vramfit.errors import ConfigError, Problem


def step_one(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, group: dict[str, Any], *, watched: Sequence[Tensor] = ()
) -> None:
    """One weight's step, by any optimizer: for the time of it the optimizer holds that weight alone.

    The weight counts as changed from here on, also for kernels that write where autograd does not see it: who would
    repeat the step (recovery) must know.
    """
    torch.autograd.graph.increment_version([parameter, *watched])
    whole, optimizer.param_groups = optimizer.param_groups, [{**group, "params": [parameter]}]
    try:
        optimizer.step()
    finally:
        optimizer.param_groups = whole


def refused_fp16() -> ConfigError:
    """fp16's scaler must be able to refuse a whole step, and in one pass some weights have moved by then."""
    return ConfigError(
        [
            Problem(
                field="memory.optimizer_step",
                what="A step in backward in one pass cannot be taken back, and fp16 must refuse steps whose gradients "
                "overflow",
                remedy="Choose in backward (two passes), or bf16 or fp32.",
            )
        ]
    )


class GradientNorms:
    """Norms of gradients that are not there together, in the order of the weights. Undoes fp16's scale on the way."""

    def __init__(self, parameters: Sequence[nn.Parameter], scaler: torch.amp.GradScaler | None) -> None:
        self._parameters, self._scaler = parameters, scaler
        self._found: dict[int, Tensor] = {}
        self._inverse_scale = 1.0

    def begin(self) -> None:
        """A pass begins, at the scale there is now."""
        self._found.clear()
        self._inverse_scale = 1.0 / self._scaler.get_scale() if self._scaler is not None else 1.0

    def add(self, place: int) -> Tensor:
        """Unscale and measure this weight's gradient. Returns its norm."""
        gradient = self.unscale(place)
        self._found[place] = norms_of([gradient])[0]
        return self._found[place]

    def unscale(self, place: int) -> Tensor:
        """This weight's gradient, with fp16's scale undone in place."""
        gradient = self._parameters[place].grad
        assert gradient is not None
        return gradient.mul_(self._inverse_scale) if self._scaler is not None else gradient

    @property
    def total(self) -> Tensor:
        return total_norm([self._found[place] for place in sorted(self._found)])

    def update_scale(self, norm: Tensor) -> float | None:
        """Let the scaler grow or fall by whether the step's norm is finite. Returns fp16's new scale."""
        if self._scaler is None:
            return None
        # It learns of infinite gradients by looking at an optimizer's: give it one whose only gradient is the norm.
        witness = nn.Parameter(torch.zeros_like(norm))
        witness.grad = norm.clone()
        self._scaler.unscale_(torch.optim.SGD([witness], lr=0.0))
        self._scaler.update()
        return self._scaler.get_scale()


class _InBackward:
    """What one pass and two have in common."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        *,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float,
    ) -> None:
        self._optimizer, self._parameters = optimizer, list(parameters)
        self._max_grad_norm = max_grad_norm
        self._taker = GradientTaker(self._parameters)
        self._norms = GradientNorms(self._parameters, scaler)
        self._groups = {parameter: group for group in optimizer.param_groups for parameter in group["params"]}

    def _step_one(self, place: int) -> None:
        parameter = self._parameters[place]
        step_one(self._optimizer, parameter, self._groups[parameter])
        parameter.grad = None

    def _drop(self, place: int) -> None:
        self._parameters[place].grad = None

    def _finish(self, losses: Sequence[Tensor], norm: Tensor, *, refused: bool) -> Finish:
        loss_sum, grad_norm = fetch(losses, norm)
        scale = self._norms.update_scale(norm)
        return Finish(
            loss_sum=loss_sum,
            grad_norm=grad_norm,
            skipped=refused,
            loss_scale=scale,
            problem=problem_of(loss_sum, grad_norm, scale),
        )


class TwoPasses(_InBackward):
    """Exact: the weights of an ordinary step, or none changed where the loss or the gradient is not finite."""

    def passes(self, run: Callable[[Around], Made[Trained]]) -> Made[Trained]:
        device = self._parameters[0].device
        before = random_state(device)
        self._norms.begin()
        made = run(lambda losses: self._taker.taking(self._measure))
        self._total = self._norms.total
        self._finite = all(map(math.isfinite, fetch(made[0], self._total)))
        if self._finite:
            set_random_state(device, before)
            run(lambda losses: self._taker.taking(self._clip_and_step))
        return made

    def finish(self, losses: Sequence[Tensor]) -> Finish:
        return self._finish(losses, self._total, refused=not self._finite)

    def values(self) -> dict[str, Any]:
        return {}

    def load_values(self, values: dict[str, Any]) -> None:
        pass

    def _measure(self, place: int) -> None:
        self._norms.add(place)
        self._drop(place)

    def _clip_and_step(self, place: int) -> None:
        self._norms.unscale(place)
        if self._max_grad_norm > 0:
            nn.utils.clip_grads_with_norm_(self._parameters[place], self._max_grad_norm, self._total)
        self._step_one(place)


class OnePass(_InBackward):
    """At the time of an ordinary step, with two differences.

    Gradients are clipped by the norm of the step before; in the first step each by its own. And a gradient that is not
    finite is found when others have already been stepped: the weight whose gradient it is takes the step of a gradient
    of 0, the step is told as refused in the end. A loss that is not finite stops the step before any weight changes.
    Raises ConfigError with fp16, whose scaler must be able to refuse a whole step.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        parameters: Sequence[nn.Parameter],
        *,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float,
    ) -> None:
        if scaler is not None:
            raise refused_fp16()
        super().__init__(optimizer, parameters, scaler=None, max_grad_norm=max_grad_norm)
        self._norm_before: float | None = None
        self._refused = False

    def passes(self, run: Callable[[Around], Made[Trained]]) -> Made[Trained]:
        self._norms.begin()
        return run(self._around)

    def finish(self, losses: Sequence[Tensor]) -> Finish:
        finish = self._finish(losses, self._norms.total, refused=self._refused)
        if math.isfinite(finish.grad_norm) and not self._refused:
            self._norm_before = finish.grad_norm
        return finish

    def values(self) -> dict[str, Any]:
        return {"norm_before": self._norm_before}

    def load_values(self, values: dict[str, Any]) -> None:
        self._norm_before = values.get("norm_before")

    @contextlib.contextmanager
    def _around(self, losses: Sequence[Tensor]) -> Iterator[None]:
        self._refused = not math.isfinite(sum(loss.item() for loss in losses))
        with self._taker.taking(self._measure_and_drop if self._refused else self._clip_and_step):
            yield

    def _measure_and_drop(self, place: int) -> None:
        self._norms.add(place)
        self._drop(place)

    def _clip_and_step(self, place: int) -> None:
        norm, parameter = self._norms.add(place), self._parameters[place]
        gradient = parameter.grad
        assert gradient is not None
        # Without fetching the norm, which would make the device wait at every weight.
        gradient.nan_to_num_(0.0, 0.0, 0.0).mul_(norm.isfinite())
        if self._max_grad_norm > 0:
            known = norm if self._norm_before is None else torch.full_like(norm, self._norm_before)
            nn.utils.clip_grads_with_norm_(parameter, self._max_grad_norm, known.nan_to_num(0.0, 0.0, 0.0))
        self._step_one(place)
