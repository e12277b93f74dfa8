"""The highest device memory of the steps since one last asked.

A card's allocator keeps the two numbers itself. Without a card, "allocated" is the trainer's own tensors: what lies
there between steps (weights, optimizer states) plus the most that torch's CPU allocator handed out inside a step
(gradients, activations, logits, temporaries). Following the allocator costs time, so it is done only for the first two
steps and whenever a step's micro-batch is larger than any before: its peak is then the largest so far.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Set
from typing import Any, Literal

import torch
from torch import nn

from vramfit.engine.accelerators import backend_of, memory_of, peak_of, reset_peak
from vramfit.engine.heap import give_back_freed_memory

# The profiler's library prints a line at each start and stop unless told not to. It reads this on first use.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")


class PeakMeter:
    """Peaks of one model and its optimizer on `device`, in bytes."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> None:
        self._model, self._optimizer, self._device = model, optimizer, device
        self._steps = 0
        self._largest_tokens = 0
        self._cpu_peak = self._at_rest = 0
        reset_peak(device)  # what loading took is not a step's

    @contextlib.contextmanager
    def watch(self, tokens: int) -> Iterator[None]:
        """Around one step whose largest micro-batch has `tokens` tokens, padding included."""
        self._steps += 1
        if self._device.type != "cpu" or torch._C._autograd._profiler_enabled():
            yield
            return
        # Twice, because the optimizer's states only exist from the second step on.
        if self._steps > 2 and tokens <= self._largest_tokens:
            yield
            return
        self._largest_tokens = max(tokens, self._largest_tokens)
        before = self._at_rest = self._live_bytes()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield
        self._cpu_peak = max(self._cpu_peak, before + _highest_rise(profile))
        del profile
        give_back_freed_memory()  # the records of a step can take more than the step

    def measure_again(self) -> None:
        """What a step needs has changed: without a card, follow the next one."""
        self._steps, self._largest_tokens, self._cpu_peak = min(self._steps, 1), 0, 0

    def around(self) -> tuple[int, int]:
        """(bytes of tensors between steps, most bytes that the process could have now), for the step just read."""
        memory = memory_of(self._device)
        if backend_of(self._device).statistics:
            return memory.allocated, memory.reserved + memory.free
        return self._at_rest, self._at_rest + memory.free

    def read(self) -> tuple[int, int]:
        """(allocated, reserved) peaks in bytes since the last call. Without a card reserved is 0."""
        if self._device.type == "cpu":
            return self._cpu_peak, 0
        peaks = peak_of(self._device)
        reset_peak(self._device)
        return peaks

    def _live_bytes(self) -> int:
        """Bytes of weights, buffers, gradients and optimizer states, shared storage counted once."""
        tensors = [*self._model.parameters(), *self._model.buffers()]
        tensors += [parameter.grad for parameter in self._model.parameters() if parameter.grad is not None]
        for state in self._optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        storages = {
            storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in tensors)
        }
        return sum(nbytes for place, nbytes in storages.items() if place not in self._elsewhere())

    def _elsewhere(self) -> Set[int]:
        """Where storages begin that are counted in another way."""
        return frozenset()


class VisitsPeak(PeakMeter):
    """For blocks that visit: all visits are alike, so of each part of a step one micro-batch is followed instead of
    the whole step, whose records alone would take more memory than the step may have.

    `places` are the buffers that blocks visit, by where they begin, with their bytes; `waiting` is what the inputs of
    blocks take.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        *,
        places: Callable[[], dict[int, int]],
        waiting: Callable[[], int],
    ) -> None:
        super().__init__(model, optimizer, device)
        self._places, self._waiting = places, waiting
        self._wanted: set[str] = set()

    @contextlib.contextmanager
    def watch(self, tokens: int) -> Iterator[None]:
        self._steps += 1
        follow = self._device.type == "cpu" and (self._steps <= 2 or tokens > self._largest_tokens)
        self._wanted = {"head", "block", "experts", "embedding"} if follow else set()
        self._largest_tokens = max(tokens, self._largest_tokens)
        yield

    @contextlib.contextmanager
    def visit(self, part: Literal["head", "block", "experts", "embedding"]) -> Iterator[None]:
        """Around one micro-batch's part of a step; the first of each part is followed."""
        if part not in self._wanted or torch._C._autograd._profiler_enabled():
            yield
            return
        self._wanted.discard(part)
        self._at_rest = self._live_bytes() + sum(self._places().values()) + self._waiting()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            yield
        self._cpu_peak = max(self._cpu_peak, self._at_rest + _highest_rise(profile))

    def _elsewhere(self) -> Set[int]:
        return self._places().keys()


def _highest_rise(profile: torch.profiler.profile) -> int:
    """The most bytes alive at once among those allocated inside the profile, from the allocator's own records."""
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    if results is None:
        return 0
    events: list[Any] = list(results.events())
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    alive = highest = 0
    for _, change in changes:
        alive += change
        highest = max(highest, alive)
    return highest
