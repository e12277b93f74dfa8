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
from typing import Any, Final, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from vramfit.engine.packed import Packed, PackedFormat, Stretch, compute_format, packed_weights
from vramfit.errors import ModelError
from vramfit.planning.block import UNPACKED_AT_ONCE

ALIGNED: Final = 8
"""Grouped kernels want rows of 16 bytes: 8 numbers of 16 bits."""


class Beside(Protocol):
    """What is added to the product of rows [S, in], sorted by expert and ending at `ends` [E]: [S, out]. `weights` are
    what it trains, each [E, ...]; others may be given in their place, of some of the experts."""

    @property
    def weights(self) -> tuple[nn.Parameter, ...]: ...

    def __call__(self, rows: Tensor, ends: Tensor, weights: tuple[Tensor, ...] = ()) -> Tensor: ...


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


def beside_of(experts: Any) -> Callable[[Any], Mapping[str, Beside]]:
    """What `compute_grouped` was given; nothing where the library computes these experts."""
    forward = experts.__dict__.get("forward")
    known = isinstance(forward, functools.partial) and forward.func is _forward
    found: Callable[[Any], Mapping[str, Beside]] = forward.args[1] if known else _nothing
    return found


def _nothing(_: Any) -> Mapping[str, Beside]:
    return {}


def _forward(
    experts: Any, beside: Callable[[Any], Mapping[str, Beside]], hidden: Tensor, chosen: Tensor, shares: Tensor
) -> Tensor:
    """hidden [T, h], the experts chosen for each token [T, k] and their shares [T, k] to the weighted sum [T, h]."""
    routes, shares = routed(chosen, shares, experts.num_experts, known=bool(packed_weights(experts)))
    gather: Any = _Gathered.apply
    out = through_experts(experts, gather(hidden, routes), routes, beside(experts))
    weighted = out * shares.reshape(-1)[routes.where].unsqueeze(-1)
    return routes.summed(weighted).to(hidden.dtype)


@dataclass(frozen=True)
class Routes:
    """Which of S = T k rows, sorted by expert, goes where: its expert `by_expert` [S], its place `where` [S] among all
    tokens' choices, of which each token has `each`. Each expert's rows end at `ends` [E]: `stops`, as the host knows
    them, where it has to ask for them."""

    by_expert: Tensor
    where: Tensor
    each: int
    ends: Tensor
    stops: list[int]

    @property
    def tokens(self) -> Tensor:
        """The token of each row."""
        return self.where // self.each

    def summed(self, rows: Tensor) -> Tensor:
        """[S, n] to [T, n]: of each token's rows the sum, in the order of their experts."""
        back = torch.empty_like(self.where)
        back.scatter_(0, self.where, torch.arange(len(back), device=back.device))
        return rows[back].view(-1, self.each, rows.shape[1]).sum(dim=1)

    def bounds(self, first: int, last: int) -> tuple[int, int]:
        """Where the rows of experts `first` to `last` (that one left out) begin and end."""
        return (self.stops[first - 1] if first else 0), self.stops[last - 1]

    def part(self, first: int, last: int) -> Routes:
        """The same for the rows of these experts alone, who are still called by their own numbers."""
        start, stop = self.bounds(first, last)
        return Routes(
            self.by_expert[start:stop],
            self.where[start:stop],
            self.each,
            self.ends[first:last] - start,
            [each - start for each in self.stops[first:last]],
        )


def routed(chosen: Tensor, shares: Tensor, experts: int, *, known: bool) -> tuple[Routes, Tensor]:
    """(routes, shares [T, k]) for the experts chosen for each token [T, k]; each token's choices are in the order of
    their numbers from here on. `known`: the host knows where each expert's rows end."""
    chosen, places = chosen.sort(dim=1)
    order = torch.sort(chosen.reshape(-1), stable=True)
    kind = order.values.dtype
    ends = torch.searchsorted(order.values, torch.arange(1, experts + 1, device=chosen.device, dtype=kind))
    ends = ends.to(torch.int32)
    routes = Routes(order.values, order.indices, chosen.shape[1], ends, ends.tolist() if known else [])
    return routes, shares.gather(1, places)


class _Gathered(torch.autograd.Function):
    """Tokens [T, h] as rows [S, h]. The gradient of a token is summed in the order of its experts, where an index's own
    would be in whatever order threads come."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, routes: Routes) -> Tensor:
        ctx.routes = routes
        return hidden[routes.tokens]

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        return ctx.routes.summed(upstream), None


def through_experts(experts: Any, rows: Tensor, routes: Routes, beside: Mapping[str, Beside]) -> Tensor:
    """Each of rows [S, h] through its expert: [S, h]. The weights there may be of some experts: those of `routes`."""
    up = _product(experts, up_name(experts), rows, routes, beside)
    active = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    return _product(experts, "down_proj", active, routes, beside)


def _product(experts: Any, name: str, rows: Tensor, routes: Routes, beside: Mapping[str, Beside]) -> Tensor:
    """Each row through its expert's weights, bias and what lies beside them."""
    result = _through(experts, name, rows, routes)
    if experts.has_bias:
        result = result + getattr(experts, f"{name}_bias")[routes.by_expert]
    if name in beside:
        result = (result + beside[name](rows, routes.ends)).to(result.dtype)
    return result


def _through(experts: Any, name: str, rows: Tensor, routes: Routes) -> Tensor:
    packed = packed_weights(experts).get(name)
    if packed is None:
        weight = getattr(experts, name)
        matrices = weight if experts.is_transposed else weight.transpose(1, 2)
        return grouped_product(rows.to(weight.dtype), matrices, routes.ends)
    apply: Any = _PackedProduct.apply
    result: Tensor = apply(rows.to(compute_format(rows)), _Groups(packed, experts.is_transposed, routes.stops))
    return result


class _Groups:
    """Some experts at a time: their packed matrices, and which rows are theirs. `stops` [E] is where each one's end."""

    def __init__(self, packed: Packed, transposed: bool, stops: list[int]) -> None:
        count, matrix = len(stops), packed.shape[1:]
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
