"""Inputs of recomputed blocks wait in RAM: sent while the block computes, fetched back before backward needs them.

Copies go through page-locked memory on a stream of their own. Backward takes the inputs in reverse order, so while one
block is recomputed the input of the block before is on its way. On a device without streams copies are made in place;
on a CPU the same code keeps plain copies, which saves nothing and lets it be tested.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vramfit.engine.accelerators import backend_of


class HostInputs:
    """The inputs of one model's blocks. `waiting_bytes` is what lies in RAM now."""

    def __init__(self) -> None:
        self._last: weakref.ref[_HostInput] | None = None
        self._copies: dict[torch.device, torch.Stream] = {}
        self._waiting: weakref.WeakSet[_HostInput] = weakref.WeakSet()

    @property
    def waiting_bytes(self) -> int:
        return sum(one.nbytes for one in self._waiting)

    def sending(self, hidden: Tensor) -> contextlib.AbstractContextManager[Any]:
        """Inside, what autograd saves of `hidden` waits in RAM; everything else stays where it is."""
        storage = hidden.untyped_storage()._cdata

        def pack(tensor: Tensor) -> Tensor | _HostInput:
            return self._send(tensor) if tensor.untyped_storage()._cdata == storage else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def _send(self, tensor: Tensor) -> _HostInput:
        sent = _HostInput(tensor, self._stream(tensor.device), self._last)
        self._last = weakref.ref(sent)
        self._waiting.add(sent)
        return sent

    def _stream(self, device: torch.device) -> torch.Stream | None:
        """The stream for copies; None where there are none."""
        if not backend_of(device).streams:
            return None
        if device not in self._copies:
            self._copies[device] = torch.Stream(device=device)
        return self._copies[device]


class _HostInput:
    """One input in RAM. The graph that needs it holds it; when that is freed, so is this."""

    def __init__(self, tensor: Tensor, copies: torch.Stream | None, before: weakref.ref[_HostInput] | None) -> None:
        self._device, self._copies, self._before = tensor.device, copies, before
        self._fetched: Tensor | None = None
        pinned = backend_of(tensor.device).pinned
        self._host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned)
        self._run(lambda: self._host.copy_(tensor, non_blocking=pinned), reads=tensor)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def fetch(self) -> None:
        """Begin to bring it to the device."""
        if self._fetched is None:
            fetched = torch.empty(self._host.shape, dtype=self._host.dtype, device=self._device)
            self._run(lambda: fetched.copy_(self._host, non_blocking=True), reads=fetched)
            self._fetched = fetched

    def arrived(self) -> Tensor:
        """The input on the device. The one before it is on its way from now on."""
        self.fetch()
        fetched, self._fetched = self._fetched, None
        assert fetched is not None
        if self._copies is not None:
            current = torch.accelerator.current_stream(self._device)
            current.wait_stream(self._copies)
            fetched.record_stream(current)
        before = self._before() if self._before is not None else None
        if before is not None:
            before.fetch()
        return fetched

    def _run(self, copy: Callable[[], Any], *, reads: Tensor) -> None:
        """A copy on the stream for copies, after all that the device has been given so far. `reads` is not reused
        before it is done."""
        if self._copies is None:
            copy()
            return
        self._copies.wait_stream(torch.accelerator.current_stream(self._device))
        with self._copies:
            copy()
        reads.record_stream(self._copies)


def _unpack(packed: Tensor | _HostInput) -> Tensor:
    return packed.arrived() if isinstance(packed, _HostInput) else packed
