"""Parts of a model computed in fp32 while the rest computes in 16 bits: the head, the norms, or all of it.

A raised module runs outside autocast, on inputs and weights cast to fp32 as it runs; what is stored stays as it is, so
nothing is to be undone but the way it computes. Modules are changed one by one, because backward runs blocks again in
threads of its own, which know no mode that is set around the step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from vramfit.config import Precision
from vramfit.engine.loss import TokenLoss
from vramfit.engine.packed import packed_weights
from vramfit.engine.precision import DTYPES

Part = Literal["head", "norms", "all"]
PARTS: Final[tuple[Part, ...]] = ("head", "norms", "all")
"""In the order in which they are raised: what costs least first."""

_SIXTEEN_BITS: Final = (torch.float16, torch.bfloat16)


class RaisedParts:
    """Which parts of one executor's model compute in fp32. `now` are those, in the order of PARTS.

    `possible` are the parts that can be raised: none in fp32, and of a tf32 run only all.
    """

    def __init__(self, model: nn.Module, loss: TokenLoss, planned: Precision) -> None:
        self._model, self._loss, self._planned = model, loss, planned
        self.now: tuple[Part, ...] = ()
        possible: dict[Precision, tuple[Part, ...]] = {"fp32": (), "tf32": ("all",)}
        self.possible = possible.get(planned, PARTS)

    @property
    def compute(self) -> Precision:
        """What the model computes in outside its raised parts."""
        return "fp32" if "all" in self.now else self._planned

    @property
    def next(self) -> Part | None:
        """What would be raised next; None when there is nothing left."""
        return next((part for part in self.possible if part not in self.now), None)

    def set(self, parts: Iterable[str]) -> None:
        """From now on exactly `parts` compute in fp32."""
        wanted = set(parts)
        self.now = tuple(part for part in self.possible if part in wanted)
        self._loss.compute = "fp32" if {"head", "all"} & set(self.now) else self._planned
        if DTYPES[self._planned] == torch.float32:  # without autocast there is nothing to keep a module out of
            return
        raised = set(map(id, self._modules()))
        for module in self._model.modules():
            if id(module) in raised:
                _raise(module)
            else:
                _lower(module)

    @contextlib.contextmanager
    def exactly(self, *parts: Part) -> Iterator[None]:
        """`set(parts)` inside, then what it was before."""
        before = self.now
        self.set(parts)
        try:
            yield
        finally:
            self.set(before)

    def _modules(self) -> Iterator[nn.Module]:
        if "all" in self.now:
            yield from filter(_has_weights, self._model.modules())
            return
        if "head" in self.now:
            model: Any = self._model  # peft's wrapper passes the question on
            head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
            yield from filter(_has_weights, head.modules() if head is not None else ())
        if "norms" in self.now:
            yield from filter(is_norm, self._model.modules())


def is_norm(module: nn.Module) -> bool:
    """Whether this is a normalisation, of torch or of any family: its class says so, and it has but scales of its own.

    `LlamaRMSNorm`, `Gemma2RMSNorm`, `CohereLayerNorm` and torch's own all end so; a block's list of norms does not.
    """
    own = [value for value in module._parameters.values() if value is not None]
    return type(module).__name__.lower().endswith("norm") and bool(own) and not any(module.children())


def _has_weights(module: nn.Module) -> bool:
    return any(value is not None for value in module._parameters.values())


def _raise(module: nn.Module) -> None:
    if not _is_raised(module):
        module.forward = functools.partial(_run_in_fp32, module.forward, module)


def _lower(module: nn.Module) -> None:
    if not _is_raised(module):
        return
    before = module.__dict__.pop("forward").args[0]
    if getattr(before, "__self__", None) is not module:  # somebody else had shadowed it first: give that back
        module.forward = before


def _is_raised(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "func", None) is _run_in_fp32


def _run_in_fp32(forward: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    kind = tensors[0].device.type if tensors else next(module.parameters()).device.type
    with torch.autocast(kind, enabled=False), _weights_in_fp32(module):
        return forward(*map(_widened, args), **{name: _widened(value) for name, value in kwargs.items()})


def _widened(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in _SIXTEEN_BITS else value


@contextlib.contextmanager
def _weights_in_fp32(module: nn.Module) -> Iterator[None]:
    """A module's own 16-bit weights as fp32 ones made of them, through which gradients flow to them; and of a module
    that unpacks its weights into a format (bitsandbytes' 4-bit linears), that format."""
    few = packed_weights(module)  # unpacked into the format of what they are multiplied with
    own = {
        name: value
        for name, value in module._parameters.items()
        if value is not None and value.dtype in _SIXTEEN_BITS and name not in few and not hasattr(value, "quant_state")
    }
    holder: Any = module
    unpacked = getattr(module, "compute_dtype", None)
    module._parameters.update({name: value.float() for name, value in own.items()})  # type: ignore[misc]
    if isinstance(unpacked, torch.dtype):
        holder.compute_dtype = torch.float32
    try:
        yield
    finally:
        module._parameters.update(own)
        if isinstance(unpacked, torch.dtype):
            holder.compute_dtype = unpacked
