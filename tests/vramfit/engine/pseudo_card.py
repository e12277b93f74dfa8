"""A card made of RAM for tests: it counts storages as they come and go, and raises the real out-of-memory class.

What it does not see is what a kernel makes and frees by itself. Everything that follows from running out, the engine's
own code does.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PseudoCard(TorchDispatchMode):
    """`budget_bytes` for all that is made inside and for `resident`, what already lies there (0: no limit).

    `allocations` counts storages made so far; those whose number is in `failing` raise whatever the budget, once each.
    `peak_bytes` is the most since `forget_peak`.
    """

    def __init__(self, *resident: torch.nn.Module, budget_bytes: int = 0, failing: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.budget_bytes, self.failing = budget_bytes, set(failing)
        self.allocated = self.peak_bytes = self.allocations = self.raised = 0
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}
        for module in resident:
            for tensor in (*module.parameters(), *module.buffers()):
                self._follow(tensor.untyped_storage())
        self.allocations = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        return result

    def forget_peak(self) -> int:
        """The peak since the last call, in bytes."""
        peak, self.peak_bytes = self.peak_bytes, self.allocated
        return peak

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        self.allocations += 1
        size = storage.nbytes()
        fails = self.allocations in self.failing or 0 < self.budget_bytes < self.allocated + size
        if fails:
            self.failing.discard(self.allocations)
            self.raised += 1
            raise torch.OutOfMemoryError(
                f"pseudo-card out of memory. Tried to allocate {size} bytes. "
                f"{self.allocated} of {self.budget_bytes} bytes are allocated."
            )
        self._storages[key] = weakref.ref(storage, lambda _: self._end(key, size))
        self.allocated += size
        self.peak_bytes = max(self.peak_bytes, self.allocated)

    def _end(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.allocated -= size
