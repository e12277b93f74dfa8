"""The end of a step whose weights visit: each block's gradients leave it when its backward is done.

`AfterLastBlock` is exact: gradients wait on the tier until the norm of all is known, then every weight is stepped; no
weight moves before. `BesideBackward` steps a block while the device computes the next one and clips by the norm of the
step before; nothing waits, and a third less is written. Both, and what they do with numbers that are not finite, are as
in `step_in_backward.py`.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from vramfit.engine.accelerators import backend_of
from vramfit.engine.step_in_backward import refused_fp16
from vramfit.engine.trained_blocks import TrainedBlocks, Where
from vramfit.engine.update import Around, Finish, Made, Trained, fetch, norms_of, problem_of, total_norm
from vramfit.engine.waits import Gaps, marks_on


class _OfBlocks:
    """What both have in common: norms by weight, and a thread that takes gradients away while backward goes on."""

    def __init__(self, blocks: TrainedBlocks, *, scaler: torch.amp.GradScaler | None, max_grad_norm: float) -> None:
        self._blocks, self._scaler, self._max_grad_norm = blocks, scaler, max_grad_norm
        self._by_block: dict[int | None, list[Where]] = {}
        for where in blocks.places:
            self._by_block.setdefault(where.block, []).append(where)
        self._norms: dict[str, Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="gradients")
        # On a stream of its own: in the usual one a copy would wait for the next block's backward.
        device = blocks.visits.stream.device
        self._side = torch.Stream(device=device) if backend_of(device).streams else None
        self._room = torch.empty(0, dtype=torch.uint8)
        self._going: Future[None] | None = None
        self.gaps = Gaps(self._has_waited, mark=marks_on(device))
        self.waited_seconds = 0.0
        """In which backward, or the next step, waited for gradients to be taken away or weights to be stepped."""

    def passes(self, run: Callable[[Around], Made[Trained]]) -> Made[Trained]:
        self.settle()
        self._blocks.forget()
        self._norms.clear()
        made = run(self._around)
        self.settle()
        return made

    def block_is_done(self, block: int, gradients: Mapping[str, Tensor]) -> None:
        """All micro-batches' gradients of a block, on the device; they belong to this from here on."""
        found = [(where, gradients[where.local]) for where in self._by_block.get(block, ()) if where.local in gradients]
        for where, gradient in found:
            self._measure(where, gradient)
        arrived = _now(found[0][1].device) if found else None
        self.settle()  # one block's gradients are on their way, never two
        self._going = self._thread.submit(self._take_away, found, arrived)

    def values(self) -> dict[str, Any]:
        return {}

    def load_values(self, values: dict[str, Any]) -> None:
        pass

    def _around(self, losses: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def _take_away(self, found: Sequence[tuple[Where, Tensor]], arrived: torch.Event | None) -> None:
        if arrived is not None:
            arrived.synchronize()
        with self._side or contextlib.nullcontext():
            self._hand_over(found)

    def _hand_over(self, found: Sequence[tuple[Where, Tensor]]) -> None:
        raise NotImplementedError

    def _in_ram(self, gradient: Tensor) -> Tensor:
        """A gradient on the CPU, until the next one is asked for; from a card into locked pages, which is faster."""
        if self._side is None:
            return gradient.cpu()
        if self._room.nbytes < gradient.nbytes:
            self._room = torch.empty(gradient.nbytes, dtype=torch.uint8, pin_memory=backend_of(gradient.device).pinned)
        there = self._room[: gradient.nbytes].view(gradient.dtype).view(gradient.shape)
        there.copy_(gradient, non_blocking=True)
        self._side.synchronize()
        return there

    def _measure(self, where: Where, gradient: Tensor) -> None:
        if self._scaler is not None:
            gradient.mul_(1.0 / self._scaler.get_scale())
        self._norms[where.name] = norms_of([gradient])[0]

    def _measure_outside(self) -> Tensor:
        """The norm of all gradients, those of weights outside the blocks included."""
        for where in self._by_block.get(None, ()):
            gradient = self._blocks.outside(where).grad
            if gradient is not None:
                self._measure(where, gradient)
        return total_norm([self._norms[where.name] for where in self._blocks.places if where.name in self._norms])

    def settle(self) -> None:
        """Wait until no thread works on gradients or weights."""
        going, self._going = self._going, None
        if going is not None:
            with self.gaps.around():
                going.result()

    def _has_waited(self, began: float, ended: float) -> None:
        self.waited_seconds += ended - began
        self._blocks.waited_seconds += self._blocks.at_tier.within(began, ended)

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """After backward, when the device has nothing left to do."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.waited_seconds += time.perf_counter() - began

    def _finished(self, loss_sum: float, grad_norm: float, *, skipped: bool) -> Finish:
        scale = None
        if self._scaler is not None:
            witness = nn.Parameter(torch.zeros(()))
            witness.grad = torch.tensor(grad_norm)
            self._scaler.unscale_(torch.optim.SGD([witness], lr=0.0))
            self._scaler.update()
            scale = self._scaler.get_scale()
        return Finish(
            loss_sum=loss_sum,
            grad_norm=grad_norm,
            skipped=skipped,
            loss_scale=scale,
            problem=problem_of(loss_sum, grad_norm, scale),
        )


class AfterLastBlock(_OfBlocks):
    """Exact: the weights of an ordinary step, or none changed where the loss or the gradient is not finite."""

    def finish(self, losses: Sequence[Tensor]) -> Finish:
        norm = self._measure_outside()
        loss_sum, grad_norm = fetch(losses, norm)
        finite = math.isfinite(loss_sum) and math.isfinite(grad_norm)
        if finite:
            factor = _factor(norm.cpu(), self._max_grad_norm)
            with self._waiting():
                self._blocks.step_sent(lambda _, gradient, room: _times(gradient, factor, room))
            self._blocks.renew()
        self._blocks.forget()
        return self._finished(loss_sum, grad_norm, skipped=not finite)

    def _hand_over(self, found: Sequence[tuple[Where, Tensor]]) -> None:
        for where, gradient in found:
            self._blocks.send(where, gradient if self._blocks.in_memory else self._in_ram(gradient))


class BesideBackward(_OfBlocks):
    """Each block's step while the block before it is in backward; clipped by the norm of the step before."""

    def __init__(self, blocks: TrainedBlocks, *, scaler: torch.amp.GradScaler | None, max_grad_norm: float) -> None:
        if scaler is not None:
            raise refused_fp16()
        super().__init__(blocks, scaler=None, max_grad_norm=max_grad_norm)
        self._norm_before: float | None = None
        self._refused = False

    def values(self) -> dict[str, Any]:
        return {"norm_before": self._norm_before}

    def load_values(self, values: dict[str, Any]) -> None:
        self._norm_before = values.get("norm_before")

    def finish(self, losses: Sequence[Tensor]) -> Finish:
        norm = self._measure_outside()
        loss_sum, grad_norm = fetch(losses, norm)
        if self._refused:
            self._blocks.forget()
        else:
            with self._waiting():
                self._blocks.step_sent(self._clip)
            self._blocks.renew()
            if math.isfinite(grad_norm):
                self._norm_before = grad_norm
        return self._finished(loss_sum, grad_norm, skipped=self._refused)

    @contextlib.contextmanager
    def _around(self, losses: Sequence[Tensor]) -> Iterator[None]:
        self._refused = not math.isfinite(sum(loss.item() for loss in losses))
        yield

    def _hand_over(self, found: Sequence[tuple[Where, Tensor]]) -> None:
        if self._refused:
            return
        for where, gradient in found:
            self._blocks.step(where, self._in_ram(gradient), self._clip)

    def _clip(self, where: Where, gradient: Tensor, room: Tensor) -> Tensor:
        norm = self._norms[where.name].cpu()
        room.copy_(gradient).nan_to_num_(0.0, 0.0, 0.0).mul_(norm.isfinite())
        known = norm if self._norm_before is None else torch.full_like(norm, self._norm_before)
        return _times(room, _factor(known.nan_to_num(0.0, 0.0, 0.0), self._max_grad_norm), room)


def _factor(norm: Tensor, most: float) -> Tensor | None:
    """What gradients of that norm are multiplied by, as `torch.nn.utils.clip_grads_with_norm_` does it; None where they
    stay what they are."""
    if most <= 0:
        return None
    factor = torch.clamp(most / (norm + 1e-6), max=1.0)
    return None if factor.item() == 1.0 else factor


def _times(gradient: Tensor, factor: Tensor | None, room: Tensor) -> Tensor:
    """fp32, in `room` where it is not the gradient itself."""
    if factor is None:
        return gradient.float()
    if gradient.dtype == torch.float32:
        return torch.mul(gradient, factor, out=room)
    return room.copy_(gradient).mul_(factor)


def _now(device: torch.device) -> torch.Event | None:
    """When what was asked of a card so far is done; None where it is, or a copy waits for it."""
    return torch.accelerator.current_stream(device).record_event() if backend_of(device).streams else None
