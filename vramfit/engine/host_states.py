"""Optimizer states in RAM: the card keeps weights and activations, the processor takes the step.

Each weight has an fp32 copy in RAM, which is what is trained, beside its states. A gradient is sent there on a stream
of its own as soon as it is whole, while backward goes on, and is freed; when all are there their norm is known, and the
processor clips, steps and sends each weight back. With fp32 weights the numbers are those of the same optimizer on the
device, bit for bit where both are the processor.

RAM per trained number: the copy 4 bytes, the gradient in the weight's format 4 (2 for bf16), and the states. Copy and
gradient are page-locked where the device has use for that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.engine.accelerators import backend_of
from vramfit.engine.gradient_hooks import GradientTaker
from vramfit.engine.step_in_backward import GradientNorms, step_one
from vramfit.engine.update import Around, Finish, Made, Trained, fetch, problem_of

SLAB_BYTES: Final = 2**30
_ALIGNED: Final = 256


class HostStates(torch.optim.Optimizer):
    """`build(groups)` makes the optimizer of the copies in RAM; its states are this one's, by the device's weights.

    `master(parameter)` is a weight's fp32 copy.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], build: Callable[[list[dict[str, Any]]], torch.optim.Optimizer]
    ) -> None:
        own = list(groups)
        parameters = [parameter for group in own for parameter in group["params"]]
        device = parameters[0].device
        whole = sum(each.numel() * (4 + each.element_size()) for each in parameters)
        memory = _HostMemory(whole, pinned=backend_of(device).pinned)
        self._masters = {each: nn.Parameter(memory.empty(each.shape, torch.float32)) for each in parameters}
        self._gradients = {each: memory.empty(each.shape, each.dtype) for each in parameters}
        self.copy_masters()
        self.inner = build([{**group, "params": [self._masters[each] for each in group["params"]]} for group in own])
        super().__init__(own, {"lr": 0.0})
        self._groups = {
            parameter: (group, inner)
            for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True)
            for parameter in group["params"]
        }
        self._side = torch.Stream(device=device) if backend_of(device).streams else None
        self._sent: dict[nn.Parameter, torch.Event | None] = {}

    def master(self, parameter: nn.Parameter) -> Tensor:
        return self._masters[parameter].detach()

    @torch.no_grad()
    def copy_masters(self) -> None:
        """Make the copies those of the device's weights as they are now."""
        for parameter, master in self._masters.items():
            master.copy_(parameter)

    @torch.no_grad()
    def send(self, parameter: nn.Parameter) -> None:
        """Begin to send this weight's gradient to RAM, and free it on the device."""
        gradient = parameter.grad
        assert gradient is not None
        if self._side is None:
            self._gradients[parameter].copy_(gradient)
            self._sent[parameter] = None
        else:
            self._side.wait_stream(torch.accelerator.current_stream(gradient.device))
            with self._side:
                self._gradients[parameter].copy_(gradient, non_blocking=True)
            gradient.record_stream(self._side)  # its memory may be given away once the copy is done, not before
            self._sent[parameter] = self._side.record_event()
        parameter.grad = None

    def forget(self) -> None:
        """Gradients that were sent are not to be stepped."""
        self._sent.clear()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None, *, norm: Tensor | None = None, most: float = 0.0) -> None:  # type: ignore[override]
        """Step the weights whose gradients were sent, and those that have one on the device.

        Where `most` is above 0 gradients are clipped by it; `norm` is that of all.
        """
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self.send(parameter)
        for parameter, arrived in self._sent.items():
            if arrived is not None:
                arrived.synchronize()
            self._step_one(parameter, norm=norm, most=most)
        self.forget()

    def _step_one(self, parameter: nn.Parameter, *, norm: Tensor | None, most: float) -> None:
        master, (group, inner) = self._masters[parameter], self._groups[parameter]
        master.grad = self._gradients[parameter].float()
        if most > 0 and norm is not None:
            nn.utils.clip_grads_with_norm_(master, most, norm)
        self.inner.state[master] = self.state[parameter]
        step_one(self.inner, master, {**inner, "lr": group["lr"]}, watched=[parameter])
        master.grad = None
        parameter.copy_(master, non_blocking=True)


class StepOnHost:
    """The end of a step whose states are in RAM: exact clipping in one pass, because no weight moves before the last
    gradient is there."""

    def __init__(
        self,
        optimizer: HostStates,
        parameters: Sequence[nn.Parameter],
        *,
        scaler: torch.amp.GradScaler | None,
        max_grad_norm: float,
    ) -> None:
        self._optimizer, self._parameters, self._max_grad_norm = optimizer, list(parameters), max_grad_norm
        self._taker = GradientTaker(self._parameters)
        self._norms = GradientNorms(self._parameters, scaler)

    def passes(self, run: Callable[[Around], Made[Trained]]) -> Made[Trained]:
        self._optimizer.forget()
        self._norms.begin()
        return run(lambda losses: self._taker.taking(self._measure_and_send))

    def finish(self, losses: Sequence[Tensor]) -> Finish:
        norm = self._norms.total
        loss_sum, grad_norm = fetch(losses, norm)
        finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
        if finite:
            self._optimizer.step(norm=norm.cpu(), most=self._max_grad_norm)
        self._optimizer.forget()
        scale = self._norms.update_scale(norm)
        return Finish(
            loss_sum=loss_sum,
            grad_norm=grad_norm,
            skipped=not finite,
            loss_scale=scale,
            problem=problem_of(loss_sum, grad_norm, scale),
        )

    def values(self) -> dict[str, Any]:
        return {}

    def load_values(self, values: dict[str, Any]) -> None:
        pass

    def _measure_and_send(self, place: int) -> None:
        self._norms.add(place)
        self._optimizer.send(self._parameters[place])


class _HostMemory:
    """Tensors of `whole_bytes` together in RAM. Page-locked memory comes in powers of two, which would waste a third of
    it: smaller tensors share slabs of such a size."""

    def __init__(self, whole_bytes: int, *, pinned: bool) -> None:
        self._pinned, self._slab, self._used = pinned, torch.empty(0, dtype=torch.uint8), 0
        self._slab_bytes = min(SLAB_BYTES, 1 << (2 * whole_bytes).bit_length())

    def empty(self, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        size = math.prod(shape) * dtype.itemsize
        if not self._pinned:
            return torch.empty(shape, dtype=dtype)
        if size > self._slab_bytes // 2:
            return torch.empty(shape, dtype=dtype, pin_memory=True)
        if self._used + size > len(self._slab):
            self._slab, self._used = torch.empty(self._slab_bytes, dtype=torch.uint8, pin_memory=True), 0
        part = self._slab[self._used : self._used + size]
        self._used += -(-size // _ALIGNED) * _ALIGNED
        return part.view(dtype).view(shape)
