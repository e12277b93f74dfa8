"""Saving while training goes on: what the next step changes is copied to RAM, and a thread writes the copy.

A step then waits for the copy alone. Where RAM has no room for one, or what is saved is read tensor by tensor from
where it lies, the step waits for the disk as well, and why is told. At most one checkpoint is on its way: the next one
waits.
"""

from __future__ import annotations

import contextlib
import copy
import math
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import torch
from torch import Tensor

from vramfit.engine.later import Later
from vramfit.engine.recovery import is_out_of_memory
from vramfit.hardware.devices import free_ram_bytes
from vramfit.training import checkpoint
from vramfit.units import format_bytes

SPARE_BYTES: Final = 512 * 2**20
"""RAM that stays free beside a copy, for everything else that runs."""

FROM_ITS_PLACE: Final = "the weights that train are read from where they lie, one by one"
NOT_PLANNED: Final = "the plan has no RAM for a copy"


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that is complete. `wrote_seconds` is how long its files took; `in_one_go` why training waited for
    them, "" where it went on meanwhile."""

    step: int
    wrote_seconds: float
    in_one_go: str


@dataclass(kw_only=True)
class Saver:
    """Use as a context manager: its end waits for what is on its way.

    `copies` says whether the plan has RAM for a copy; `needs` how much the training itself will still ask for, bytes.
    An error of the writing thread is raised in the training's, by the next call of `finished`, `wait` or `save`.
    """

    copies: bool = True
    needs: Callable[[], int] = lambda: 0
    free: Callable[[], int] = free_ram_bytes
    _writer: threading.Thread | None = None
    _error: BaseException | None = None
    _done: deque[Saved] = field(default_factory=deque)
    _waited: float = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self._wait()
        elif self._writer is not None:
            self._writer.join()
        if self._error is not None:  # what ends the run already is told; this goes to the log
            traceback.print_exception(self._error)

    @property
    def busy(self) -> bool:
        """A checkpoint is on its way."""
        return self._writer is not None and self._writer.is_alive()

    def save(
        self,
        root: Path,
        *,
        step: int,
        tensors: Mapping[str, Tensor | Later],
        values: Mapping[str, Any],
        keep: int,
        best: int | None = None,
        keep_every: int = 0,
    ) -> None:
        """As `checkpoint.save`, from the tensors and values as they are now. Returns as soon as these may change."""
        with self.waiting():
            self._wait()
            copied, reason = self._copied(tensors)
            kept = copy.deepcopy(dict(values))

            def write() -> None:
                start = time.monotonic()
                checkpoint.save(
                    root,
                    step=step,
                    tensors=tensors if copied is None else copied,
                    values=kept,
                    keep=keep,
                    best=best,
                    keep_every=keep_every,
                )
                self._done.append(Saved(step=step, wrote_seconds=time.monotonic() - start, in_one_go=reason))

            if copied is None:
                write()
            else:
                self._writer = threading.Thread(target=self._run, args=(write,), name="saver", daemon=True)
                self._writer.start()

    def finished(self) -> list[Saved]:
        """The checkpoints that were completed since this was last asked. Never waits. Raises what a writer raised."""
        if not self.busy:
            self._wait()
        return [self._done.popleft() for _ in range(len(self._done))]  # the writer may add to it meanwhile

    def wait(self) -> None:
        """Until nothing is on its way. Raises what the writer raised."""
        with self.waiting():
            self._wait()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """What is done inside holds training up for the sake of a checkpoint: it is counted by `take_waited`."""
        began = time.monotonic()
        try:
            yield
        finally:
            self._waited += time.monotonic() - began

    def take_waited(self) -> float:
        """Seconds that the training waited for checkpoints since this was last asked."""
        waited, self._waited = self._waited, 0.0
        return waited

    def _wait(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except BaseException as error:
            self._error = error

    def _copied(self, tensors: Mapping[str, Tensor | Later]) -> tuple[dict[str, Tensor | Later] | None, str]:
        """(the tensors as they are now, in RAM of their own, ""), or (None, why there is no copy)."""
        if any(isinstance(tensor, Later) for tensor in tensors.values()):
            return None, FROM_ITS_PLACE
        if not self.copies:
            return None, NOT_PLANNED
        size = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
        needed, free = size + max(0, self.needs()) + SPARE_BYTES, self.free()
        if free < needed:
            return None, f"a copy and the next step need {format_bytes(needed)} of RAM, {format_bytes(free)} are free"
        copied: dict[str, Tensor | Later] = {}
        try:
            for name, tensor in tensors.items():
                assert isinstance(tensor, Tensor)
                copied[name] = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor.detach())
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            return None, f"memory ran out while {format_bytes(size)} were copied"
        return copied, ""
