"""Experts kept in one tensor: tokens sorted by expert, each expert's rows through its own matrix, a grouped product.

`transformers` 5 keeps a block's experts as gate_up_proj [E, 2 i, h] and down_proj [E, h, i] (GPT-OSS: transposed, with
biases), and its own forward knows them as numbers alone. This one takes them in few bits as well, some experts unpacked
at a time, and adds what lies beside them (adapters).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from vramfit.engine.packed import Packed, PackedFormat, Stretch, compute_format, packed_weights
from vramfit.errors import ModelError
from vramfit.planning.block import UNPACKED_AT_ONCE

ALIGNED: Final = 8
"""Grouped kernels want rows of 16 bytes: 8 numbers of 16 bits."""

Beside = Callable[[Tensor, Tensor], Tensor]
"""What is added to the product of rows [S, in], sorted by expert and ending at `ends` [E]: [S, out]."""


def modules_of_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that hold a three-dimensional weight of their own, with their names."""
    for name, module in model.named_modules():
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            yield name, module


_LAYOUT: Final = ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")
"""What `transformers` writes on a module whose experts its own grouped products know."""


def has_known_layout(experts: Any) -> bool:
    known = all(hasattr(experts, each) for each in _LAYOUT) and hasattr(experts, up_name(experts))
    return known and not getattr(experts, "has_post_expert_norm", False)


def up_name(experts: Any) -> str:
    """The tensor that makes gate and up, or up alone."""
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"


def pack_experts(name: str, experts: Any, kind: PackedFormat) -> None:
    """Both tensors of `experts`, hollow ones, come in few bits from now on. Raises ModelError for an unknown layout."""
    if not has_known_layout(experts):
        raise ModelError(
            f"{name} ({type(experts).__name__}) lays out its experts in a way VRAMFit cannot keep in few bits",
            "Choose the method lora, which keeps them as numbers.",
        )
    both = {leaf: Packed(tuple(getattr(experts, leaf).shape), kind) for leaf in (up_name(experts), "down_proj")}
    experts.packed = nn.ModuleDict(both)
    compute_grouped(experts)


def compute_grouped(experts: Any, beside: Callable[[Any], Mapping[str, Beside]] | None = None) -> None:
    """Compute `experts` as this module does; `beside` of them is what is added to each tensor's product."""
    experts.forward = functools.partial(_forward, experts, beside or _nothing)


def _nothing(_: Any) -> Mapping[str, Beside]:
    return {}


def _forward(
    experts: Any, beside: Callable[[Any], Mapping[str, Beside]], hidden: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """hidden [T, h], the experts chosen for each token [T, k] and their shares [T, k] to the weighted sum [T, h]."""
    added = beside(experts)
    tokens, each = chosen.shape
    order = torch.sort(chosen.reshape(-1), stable=True)
    by_expert, where = order.values, order.indices
    ends = torch.searchsorted(
        by_expert, torch.arange(1, experts.num_experts + 1, device=chosen.device, dtype=by_expert.dtype)
    ).to(torch.int32)

    routed = _Routed(by_expert, ends, ends.tolist() if packed_weights(experts) else [])
    up = _product(experts, up_name(experts), hidden[where // each], routed, added)
    active = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    out = _product(experts, "down_proj", active, routed, added)
    weighted = out * shares.reshape(-1)[where].unsqueeze(-1)
    back = torch.empty_like(where).scatter_(0, where, torch.arange(where.numel(), device=where.device))
    summed: Tensor = weighted[back].view(tokens, each, out.shape[1]).sum(dim=1)
    return summed.to(hidden.dtype)


@dataclass(frozen=True)
class _Routed:
    """Which expert each of the S sorted rows goes to, and where each expert's rows end: `stops` are `ends` as the host
    knows them, where it has to ask for them."""

    by_expert: Tensor
    ends: Tensor
    stops: list[int]


def _product(experts: Any, name: str, rows: Tensor, routed: _Routed, beside: Mapping[str, Beside]) -> Tensor:
    """Each row through its expert's weights, bias and what lies beside them."""
    result = _through(experts, name, rows, routed)
    if experts.has_bias:
        result = result + getattr(experts, f"{name}_bias")[routed.by_expert]
    if name in beside:
        result = (result + beside[name](rows, routed.ends)).to(result.dtype)
    return result


def _through(experts: Any, name: str, rows: Tensor, routed: _Routed) -> Tensor:
    packed = packed_weights(experts).get(name)
    if packed is None:
        weight = getattr(experts, name)
        matrices = weight if experts.is_transposed else weight.transpose(1, 2)
        return grouped_product(rows.to(weight.dtype), matrices, routed.ends)
    apply: Any = _PackedProduct.apply
    result: Tensor = apply(rows.to(compute_format(rows)), _Groups(packed, experts.is_transposed, routed.stops))
    return result


class _Groups:
    """Some experts at a time: their packed matrices, and which rows are theirs. `stops` [E] is where each one's end."""

    def __init__(self, packed: Packed, transposed: bool, stops: list[int]) -> None:
        count, *matrix = packed.shape
        at_once = max(1, UNPACKED_AT_ONCE // (matrix[0] * matrix[1]))
        self.transposed, self.outputs = transposed, matrix[1] if transposed else matrix[0]
        starts = [0, *stops]
        self.groups: list[tuple[Stretch, int, list[int]]] = []
        for first in range(0, count, at_once):
            last = min(count, first + at_once)
            if starts[first] < starts[last]:  # no rows, nothing to unpack
                own = [stop - starts[first] for stop in stops[first:last]]
                self.groups.append((packed.stretch(first, last), starts[first], own))

    def through(self, rows: Tensor, outputs: int, *, back: bool) -> Tensor:
        """rows [S, in] to [S, outputs], by the matrices or, for a gradient, back through them."""
        made = rows.new_empty(len(rows), outputs)
        for stretch, start, stops in self.groups:
            matrices = stretch.unpacked(rows.dtype)
            turned = matrices if self.transposed != back else matrices.transpose(1, 2)
            ends = torch.tensor(stops, device=rows.device, dtype=torch.int32)
            stop = start + stops[-1]
            made[start:stop] = grouped_product(rows[start:stop], turned, ends)
        return made


class _PackedProduct(torch.autograd.Function):
    """Each row times its expert's matrix, with the matrices unpacked anew in backward: they are never kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, groups: _Groups) -> Tensor:
        ctx.groups, ctx.inputs = groups, rows.shape[1]
        return groups.through(rows, groups.outputs, back=False)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return ctx.groups.through(upstream.contiguous(), ctx.inputs, back=True), None


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows[ends[e - 1] : ends[e]] @ matrices[e] for every e: [S, in], [E, in, out] -> [S, out]."""
    if _has_kernel(rows.device, rows.dtype) and _is_aligned(rows, matrices):
        product: Tensor = functional.grouped_mm(rows, matrices, offs=ends)
        return product
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    # unbind: its gradient is one stack, where each [e] would make a tensor of all experts
    return torch.cat([rows[a:b] @ one for a, b, one in zip(starts, stops, matrices.unbind(), strict=True)])


@lru_cache(maxsize=16)
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has a grouped product for numbers of this kind: asked of the device itself."""
    if not hasattr(functional, "grouped_mm"):
        return False
    with torch.no_grad():
        rows = torch.zeros(ALIGNED, ALIGNED, device=device, dtype=dtype)
        ends = torch.tensor([ALIGNED], device=device, dtype=torch.int32)
        try:
            functional.grouped_mm(rows, rows.unsqueeze(0), offs=ends)
        except (RuntimeError, NotImplementedError):
            return False
    return True


def _is_aligned(rows: Tensor, matrices: Tensor) -> bool:
    """Whether every row of both is a multiple of 16 bytes, as the kernels want it."""
    return all(side * rows.element_size() % 16 == 0 for side in (rows.shape[1], *matrices.shape[1:]))
