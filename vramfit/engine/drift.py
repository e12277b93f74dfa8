"""How far a run's precision strays from fp32: the same micro-batch in both, its loss and its gradient norm compared.

Training goes on as if nothing had happened: gradients are returned, not accumulated, both passes begin with the same
random state (so dropout is the same), and it is put back. What the passes needed is freed before the step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from vramfit.engine.accelerators import empty_cache
from vramfit.engine.loss import Batch, targets_of
from vramfit.engine.raised import Part, RaisedParts
from vramfit.engine.randomness import random_state, set_random_state
from vramfit.engine.recovery import halves, is_out_of_memory, release_memory
from vramfit.engine.resident import Piece, ResidentExecutor

_LOWER_SCALES = 6  # fp16's scale is tried down to a millionth where the gradient overflows


@dataclass(frozen=True, kw_only=True)
class Drift:
    """|run's - fp32's| / |fp32's| of a micro-batch's mean loss and gradient norm, while `raised` computed in fp32.

    Infinite where only fp32 gives finite numbers.
    """

    loss: float
    grad_norm: float
    raised: tuple[Part, ...]

    @property
    def worst(self) -> float:
        return max(self.loss, self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class Check:
    """One comparison: a drift, and one more for each part that was raised. `rows` is how many were compared of the
    micro-batch's. `skipped` says why there is none, as a clause; `may_pass` whether another time there may be one."""

    drifts: list[Drift] = field(default_factory=list)
    rows: int = 0
    skipped: str = ""
    may_pass: bool = False


class Calibrator:
    """Checks an executor's precision. Above `limit`, with `may_raise`, it raises head, then norms, then all, until the
    drift is below; what is raised stays so, and is in the executor's state."""

    def __init__(self, executor: ResidentExecutor, *, limit: float, may_raise: bool) -> None:
        self._executor, self._limit, self._may_raise = executor, limit, may_raise

    @property
    def possible(self) -> bool:
        """Whether the run computes in anything but fp32."""
        return self._executor.raised.compute != "fp32"

    def check(self, batch: Batch) -> Check:
        """Compare on one micro-batch, on as many of its rows as fit memory in fp32. Never raises."""
        with self._executor.recovery.buffers_kept():
            return self._check(self._executor.pieces(batch)[0])

    def _check(self, piece: Piece) -> Check:
        before = random_state(self._executor.device)
        while True:
            try:
                return self._compared(piece)
            except Exception as error:  # watching must not end what it watches
                no_room = is_out_of_memory(error)
                failure = next(iter(str(error).splitlines()), "") or type(error).__name__
            finally:
                set_random_state(self._executor.device, before)
                empty_cache(self._executor.device)
            # Outside the except block: while it lasts, the traceback keeps the failed attempt's tensors alive.
            if not no_room:
                return Check(skipped=f"it cannot be computed in fp32 ({failure})")
            if piece.rows == 1:
                return Check(skipped=f"a single sequence of {piece.input_ids.shape[1]} tokens has no room in fp32")
            release_memory(self._executor.device)
            piece = piece.part(0, halves(piece.rows)[0])

    def _compared(self, piece: Piece) -> Check:
        raised: RaisedParts = self._executor.raised
        if targets_of(piece).count == 0:
            return Check(skipped="the micro-batch has no trained tokens", may_pass=True)
        start = random_state(self._executor.device)
        with raised.exactly("all"):
            exact = self._executor.measure(piece)
        if not all(map(math.isfinite, exact)):
            return Check(skipped="fp32 gives no finite numbers either", may_pass=True)
        drifts = []
        while True:
            drifts.append(_drift(self._measured(piece, start), exact, raised.now))
            part = raised.next
            if drifts[-1].worst <= self._limit or not self._may_raise or part is None:
                return Check(drifts=drifts, rows=piece.rows)
            raised.set((*raised.now, part))

    def _measured(self, piece: Piece, start: dict[str, Tensor]) -> tuple[float, float]:
        """The run's own loss and gradient norm. Where fp16's scale is too large just now, with a smaller one: that is
        the scaler's to mend, and no drift."""
        scale = self._executor.loss_scale
        found = math.nan, math.nan
        for _ in range(_LOWER_SCALES if scale > 1 else 1):
            set_random_state(self._executor.device, start)
            found = self._executor.measure(piece, scale=scale)
            if all(map(math.isfinite, found)):
                break
            scale = max(1.0, scale / 16)
        return found


def _drift(found: tuple[float, float], exact: tuple[float, float], raised: tuple[Part, ...]) -> Drift:
    loss, grad_norm = (_relative(one, other) for one, other in zip(found, exact, strict=True))
    return Drift(loss=loss, grad_norm=grad_norm, raised=raised)


def _relative(found: float, exact: float) -> float:
    if found == exact:
        return 0.0
    return abs(found - exact) / abs(exact) if math.isfinite(found) and exact else math.inf
