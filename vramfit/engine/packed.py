"""Frozen weights in few bits: unpacked for each product, forward and backward, and never kept as numbers.

A module whose weights are packed holds them under `packed`, by the name the weight has: a linear its `weight`, experts
in one tensor each of theirs. The weight itself is hollow, and says in which shape and format it would be.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

from vramfit.engine import int8, nf4

PackedFormat = Literal["nf4", "int8"]
Parts = Mapping[str, Tensor]


class _Codec(Protocol):
    """How a format packs a matrix [rows, columns], and unpacks one or a stack of them [E, rows, columns]."""

    PARTS: tuple[str, ...]

    def part_shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]: ...

    def quantise(self, weight: Tensor) -> dict[str, Tensor]: ...

    def dequantise(self, parts: Parts, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor: ...


_CODECS: Final[dict[PackedFormat, Any]] = {"nf4": nf4, "int8": int8}


class Packed(nn.Module):
    """A weight of `shape`, [rows, columns] or a stack [E, rows, columns], whose parts are buffers set from outside."""

    def __init__(self, shape: tuple[int, ...], kind: PackedFormat) -> None:
        super().__init__()
        self.shape, self.kind = tuple(shape), kind
        self._codec: _Codec = _CODECS[kind]
        for part in self._codec.PARTS:
            self.register_buffer(part, None, persistent=False)

    @property
    def places(self) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and format of each part."""
        return self._codec.part_shapes(self.shape)

    @property
    def parts(self) -> dict[str, Tensor]:
        return {part: getattr(self, part) for part in self._codec.PARTS}

    def quantised(self, weight: Tensor, device: torch.device) -> dict[str, Tensor]:
        """`weight` as parts on `device`, where one matrix of it is at a time."""
        if weight.ndim == 2:
            return self._codec.quantise(weight.to(device))
        each = [self._codec.quantise(one.to(device)) for one in weight]
        return {part: torch.stack([one[part] for one in each]) for part in self._codec.PARTS}

    def take(self, parts: Parts) -> None:
        """Hold these parts."""
        for part, tensor in parts.items():
            setattr(self, part, tensor)

    @property
    def whole(self) -> Stretch:
        return Stretch(self._codec, self.parts, self.shape)

    def stretch(self, first: int, last: int) -> Stretch:
        """Matrices `first` to `last` (that one left out) of a stack."""
        parts = {part: tensor[first:last] for part, tensor in self.parts.items()}
        return Stretch(self._codec, parts, (last - first, *self.shape[1:]))


class Stretch:
    """A weight in few bits, or some matrices of a stack, as it is now: what backward holds of it."""

    def __init__(self, codec: _Codec, parts: Parts, shape: tuple[int, ...]) -> None:
        self._codec, self._parts, self.shape = codec, parts, shape

    def unpacked(self, dtype: torch.dtype) -> Tensor:
        """All of it as numbers."""
        return self._codec.dequantise(self._parts, self.shape, dtype)


def packed_weights(module: nn.Module) -> Mapping[str, Packed]:
    """The weights of `module` itself that are in few bits, by their names; {} where it has none."""
    found: Any = module._modules.get("packed")
    if type(found) is not nn.ModuleDict:
        return {}
    both: Any = found
    return dict(both.items())


class PackedLinear(nn.Linear):
    """A frozen linear in few bits. `weight` [outputs, inputs] is hollow.

    `transposed`: the checkpoint has the weight as [inputs, outputs], as GPT-2's.
    """

    packed: nn.ModuleDict
    transposed: bool

    @classmethod
    def of(cls, linear: Any, kind: PackedFormat) -> PackedLinear:
        """In place of `linear`, an nn.Linear or GPT-2's Conv1D with a hollow weight; its bias is kept."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.transposed = not isinstance(linear, nn.Linear)
        weight = linear.weight.detach().t() if made.transposed else linear.weight.detach()
        made.out_features, made.in_features = weight.shape
        made.weight, made.bias = nn.Parameter(weight, requires_grad=False), linear.bias
        made.packed = nn.ModuleDict({"weight": Packed((made.out_features, made.in_features), kind)})
        return made

    @classmethod
    def of_library(cls, linear: Any, dtype: torch.dtype) -> PackedLinear:
        """In place of bitsandbytes' 4-bit linear, with the same bits, computed in `dtype` as they are restored here."""
        state, device = linear.weight.quant_state, linear.weight.device
        hollow = torch.zeros((), dtype=dtype, device=device).expand(linear.out_features, linear.in_features)
        made = cls.of(nn.Linear(1, 1, bias=False), "nf4")
        made.in_features, made.out_features, made.bias = linear.in_features, linear.out_features, linear.bias
        made.weight = nn.Parameter(hollow, requires_grad=False)
        packed = Packed(tuple(hollow.shape), "nf4")
        scales = {"scales": state.absmax, "scale_scales": state.state2.absmax, "offset": state.offset.view(1)}
        packed.take({"codes": linear.weight.data.view(-1), **scales})
        made.packed = nn.ModuleDict({"weight": packed})
        return made

    def unpacked(self) -> Tensor:
        """The weight [outputs, inputs] as numbers."""
        return packed_weights(self)["weight"].whole.unpacked(self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        dtype = compute_format(input)
        apply: Any = _Product.apply
        bias = None if self.bias is None else self.bias.to(dtype)
        result: Tensor = apply(input.to(dtype), packed_weights(self)["weight"].whole, bias)
        return result


def compute_format(rows: Tensor, otherwise: torch.dtype | None = None) -> torch.dtype:
    """The format a product of `rows` is computed in: autocast's where it is on (it does not reach what torch has no
    rule for), else `otherwise`, or that of the rows."""
    kind = rows.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else otherwise or rows.dtype


class _Product(torch.autograd.Function):
    """rows @ weight.T + bias, with the weight unpacked anew in backward: it is never kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Stretch, bias: Tensor | None) -> Tensor:
        ctx.stretch = weight
        return F.linear(rows, weight.unpacked(rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return upstream @ ctx.stretch.unpacked(upstream.dtype), None, None
