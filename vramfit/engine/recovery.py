"""Out of memory inside a step: the same step is done again in smaller pieces, as if nothing had happened.

The loss is summed over tokens and divided by the step's tokens, so cutting a micro-batch does not change the gradient.
Before the second attempt all that the first one changed is put back: gradients, random states, buffers such as a
normalisation's running means, optimizer states that were just made, fp16's loss scaler. What cannot be put back is a
weight that was already changed; the step then ends with a sentence and the last checkpoint stands.
"""

from __future__ import annotations

import contextlib
import gc
import random
import re
import sys
import time
from collections.abc import Callable, Iterator
from typing import Final, TypeVar

import torch
from torch import Tensor, nn

from vramfit.engine.accelerators import OUT_OF_MEMORY_WORDS, empty_cache, memory_of
from vramfit.engine.randomness import random_state, restart_rounding, set_random_state
from vramfit.errors import WontFit
from vramfit.units import format_bytes

Made = TypeVar("Made")
Finished = TypeVar("Finished")

LARGEST_COPY_BYTES: Final = 2**26
_ASKED: Final = re.compile(r"tried to allocate ([\d.]+) *(bytes|[KMGT]iB)?", re.IGNORECASE)
_UNITS: Final = {"bytes": 0, "kib": 1, "mib": 2, "gib": 3, "tib": 4}


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory ran out, on whatever device. Not all of torch's are of the class for it."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error).lower() for words in OUT_OF_MEMORY_WORDS)


def release_memory(device: torch.device) -> None:
    """Give cached memory back after a failed attempt, so that smaller pieces find room in one piece."""
    gc.collect()
    empty_cache(device)


def attempt(work: Callable[[], Made], device: torch.device) -> tuple[Made | None, str]:
    """(what `work` gives, ""), or (None, why memory ran out), when what it had made is freed again. Raises what else
    `work` raises."""
    try:
        return work(), ""
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        failure = str(error) or type(error).__name__
    # Outside the except block: while it lasts, the traceback keeps the failed attempt's tensors alive.
    release_memory(device)
    return None, failure


def halves(rows: int) -> tuple[int, int]:
    """Two parts of `rows`, the larger first. One row cannot be halved: (1, 0)."""
    return (rows + 1) // 2, rows // 2


def asked_bytes(failure: str) -> int:
    """How much was asked for when memory ran out, from torch's message; 0 when it does not say."""
    found = _ASKED.search(failure)
    return int(float(found[1]) * 1024 ** _UNITS[(found[2] or "bytes").lower()]) if found else 0


class Recovery:
    """Does the steps of one model and optimizer, and remembers what memory bears.

    `most_rows` go through the model at once (0: not yet known to be limited). `rows_are` is what a row is called.
    `relieve` makes room in another way when a single row is too much, and says what it did; "" when it cannot. With
    `relieves_first` it is asked before rows are halved.
    `budget_bytes` is what the run may use (0: nobody said; then what the device has).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        device: torch.device,
        scaler: torch.amp.GradScaler | None = None,
        rows_are: str = "rows",
        budget_bytes: int = 0,
    ) -> None:
        self.optimizer, self.device, self.rows_are, self.budget_bytes = optimizer, device, rows_are, budget_bytes
        self.most_rows = 0
        self.relieve: Callable[[], str] = lambda: ""
        self.relieves_first = False
        self._scaler = scaler
        self._model, self._buffers = model, _Buffers(model)

    def put_buffers_back(self) -> None:
        """As they were when the step began: its forward is about to run again."""
        self._buffers.put_back()

    @contextlib.contextmanager
    def buffers_kept(self) -> Iterator[None]:
        """Passes inside are only looked at: what they move of the model's buffers is put back."""
        buffers = _Buffers(self._model)
        buffers.note()
        try:
            yield
        finally:
            buffers.put_back()

    def run(
        self,
        accumulate: Callable[[int], Made],
        finish: Callable[[Made, str], Finished],
        *,
        rows: int,
        largest: str = "a single row",
    ) -> Finished:
        """`finish(accumulate(most rows at once), what happened on the way)`, again and again until memory bears it.

        The first leaves a whole step's gradients in `.grad`, the second makes new weights of them. `rows` is the most
        rows that come together, `largest` names the largest single row. Raises WontFit with the numbers when a single
        row, or the optimizer, finds no room, or when weights had already changed.
        """
        try:
            before = _Before(self.optimizer, self.device, self._buffers)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            raise self._wont_fit(
                "Memory ran out before the step began, when the model's buffers were copied",
                str(error),
                "End other programs that use this memory, or use a smaller micro-batch.",
            ) from error
        watching = self.optimizer.register_step_post_hook(lambda *_: before.note_step())
        try:
            return self._repeat(before, accumulate, finish, rows, largest)
        finally:
            watching.remove()

    def _repeat(
        self,
        before: _Before,
        accumulate: Callable[[int], Made],
        finish: Callable[[Made, str], Finished],
        rows: int,
        largest: str,
    ) -> Finished:
        began, story, repeated_finish = time.perf_counter(), _Story(self.rows_are), False
        while True:
            size = min(self.most_rows or rows, rows)
            made: Made | None = None
            try:
                made = accumulate(size)
                return finish(made, story.told())
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure, in_finish = str(error), made is not None
            # Outside the except block: while it lasts, the traceback keeps the failed attempt's tensors alive.
            made = None
            self._put_back(before, failure, size)
            release_memory(self.device)
            if in_finish:  # smaller pieces do not help, but what the failed attempt had cached may
                if repeated_finish or not _is_watched(self.optimizer):
                    raise self._no_room_for_optimizer(failure)
                repeated_finish = True
                story.add("in the optimizer's step", "", began)
                continue
            how = self.relieve() if size == 1 or self.relieves_first else ""
            story.add(f"with {size} {self.rows_are} at a time", how or self.shrink(size, failure, largest), began)

    def shrink(self, size: int, failure: str, largest: str = "a single row") -> str:
        """From now on half of `size` rows at once. Returns it in words, or raises WontFit where that is one."""
        remedy = "Use shorter ones, recompute activations, or train less of the model (lora, qlora)."
        self.most_rows = self.smaller(size, failure, f"with {largest} at a time", remedy)
        return f"with {self.most_rows}"

    def smaller(self, size: int, failure: str, how: str, remedy: str) -> int:
        """Half of `size` rows; raises WontFit where that is one."""
        release_memory(self.device)
        if size == 1:
            raise self._wont_fit(f"Memory ran out {how}", failure, remedy)
        return halves(size)[0]

    def _put_back(self, before: _Before, failure: str, size: int) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        changed = before.changed_weights()
        if changed:
            self.most_rows = halves(size)[0]  # for the next attempt of the run
            raise self._wont_fit(
                f"Memory ran out when {changed} had already changed, so the step cannot be repeated",
                failure,
                "Resume from the last checkpoint with a smaller micro-batch.",
            )
        before.put_back()
        if self._scaler is not None:
            self._scaler.update(self._scaler.get_scale())  # the same scale; forgets that gradients were unscaled

    def _no_room_for_optimizer(self, failure: str) -> WontFit:
        return self._wont_fit(
            "Memory ran out in the optimizer's step, which makes its states at the first one",
            failure,
            "End other programs that use this memory, or choose lora or qlora, which train far less.",
        )

    def _wont_fit(self, what: str, failure: str, suggestion: str) -> WontFit:
        memory = memory_of(self.device)
        available = self.budget_bytes or memory.total
        asked = asked_bytes(failure)
        first_line = failure.splitlines()[0] if failure else "out of memory"
        return WontFit(
            f"{what} ({first_line}). The run may use {format_bytes(available)}, {format_bytes(memory.free)} are free",
            needed_bytes=max(available, memory.allocated) + asked,
            available_bytes=available,
            phase="step",
            suggestions=(suggestion,),
        )


class _Story:
    """What happened in a step, in one sentence."""

    def __init__(self, rows_are: str) -> None:
        self._where, self._how, self._began, self._lost_s = "", "", 0.0, 0.0

    def add(self, where: str, how: str, began: float) -> None:
        self._where = self._where or where
        self._how = how or self._how
        self._lost_s = time.perf_counter() - began

    def told(self) -> str:
        if not self._where:
            return ""
        how = f" {self._how}" if self._how else ""
        return f"Memory ran out {self._where}; the step was repeated{how} ({self._lost_s:.1f} s were lost)"


class _Before:
    """What a step changes, as it was when the step began."""

    def __init__(self, optimizer: torch.optim.Optimizer, device: torch.device, buffers: _Buffers) -> None:
        self._optimizer, self._device, self._buffers = optimizer, device, buffers
        self._random = random_state(device)
        self._python_random = random.getstate()
        numpy = sys.modules.get("numpy")  # a person's own loss may draw from it
        self._numpy_random = numpy.random.get_state() if numpy is not None else None
        self._states = set(optimizer.state)
        self._stepped = False
        self._versions = [(tensor, _version(tensor)) for tensor in [*self._changing(), *buffers.note()]]

    def note_step(self) -> None:
        """The optimizer has taken a step. torch's fused kernels do not count that as a change of weights (2.13)."""
        self._stepped = True

    def changed_weights(self) -> str:
        """What of weights and optimizer states has changed since, in words; "" when nothing has."""
        if self._stepped:
            return "weights"
        changed = sum(_version(tensor) != version for tensor, version in self._versions)
        return f"{changed} of {len(self._versions)} tensors of weights and optimizer states" if changed else ""

    def put_back(self) -> None:
        for parameter in self._optimizer.state.keys() - self._states:
            del self._optimizer.state[parameter]
        self._buffers.put_back()
        set_random_state(self._device, self._random)
        if "rounding" not in self._random:  # it may have begun in the failed attempt
            restart_rounding(self._device)
        random.setstate(self._python_random)
        if self._numpy_random is not None:
            sys.modules["numpy"].random.set_state(self._numpy_random)

    def _changing(self) -> list[Tensor]:
        found = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        for state in self._optimizer.state.values():
            found += [value for value in state.values() if isinstance(value, Tensor)]
        return found


class _Buffers:
    """A model's buffers as they were at the last `note`. Copied each time: batch normalisation moves its running means
    without counting that as a change."""

    def __init__(self, model: nn.Module) -> None:
        self._places = [module._buffers for module in model.modules()]  # walking the modules each step costs more
        self._live: list[Tensor] = []
        self._copies: list[Tensor] = []

    def note(self) -> list[Tensor]:
        """Copy the small ones. Returns the large ones: weights that somebody stores as buffers."""
        buffers = [buffer for place in self._places if place for buffer in place.values() if buffer is not None]
        small = [buffer for buffer in buffers if buffer.nbytes <= LARGEST_COPY_BYTES]
        if not _are_the_same(small, self._live):
            self._live, self._copies = small, [buffer.detach().clone() for buffer in small]
        elif small:
            torch._foreach_copy_(self._copies, self._live)
        return [buffer for buffer in buffers if buffer.nbytes > LARGEST_COPY_BYTES]

    def put_back(self) -> None:
        if self._live:
            with torch.no_grad():
                torch._foreach_copy_(self._live, self._copies)


def _are_the_same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(a is b for a, b in zip(left, right, strict=True))


def _version(tensor: Tensor) -> int:
    """How often it was changed in place. Tensors made in inference mode do not count that."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch sees every change this optimizer makes. Others write through pointers: no version counts those."""
    return type(optimizer).__module__.partition(".")[0] in ("torch", "vramfit")
