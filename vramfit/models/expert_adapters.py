"""LoRA beside each expert of a mixture whose experts are kept in one tensor, without ever making W + B A.

`transformers` 5 keeps a block's experts as gate_up_proj [E, 2 i, h] and down_proj [E, h, i] (GPT-OSS: transposed, with
biases). peft can put adapters on such tensors, but makes the sum of weights and adapters in every forward: a copy of
all experts of a block. Here tokens are sorted by expert, as the library does, and each expert's rows go through its
weights and through its A and B, each a grouped product.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from vramfit.errors import ModelError

_PLACE: Final = "lora_experts"
_ALIGNED: Final = 8  # grouped kernels want rows of 16 bytes: 8 numbers of 16 bits


class ExpertAdapter(nn.Module):
    """scale * B A for the experts of one tensor: A [E, r, in] begins as nn.Linear does, B [E, out, r] at zero; fp32."""

    def __init__(self, weight: Tensor, *, transposed: bool, rank: int, scale: float, dropout: float) -> None:
        super().__init__()
        experts, *sides = weight.shape
        inputs, outputs = sides if transposed else reversed(sides)
        self.transposed, self.scale = transposed, scale
        self.dropout = nn.Dropout(dropout) if dropout else nn.Identity()
        self.A = nn.Parameter(torch.empty(experts, rank, inputs, device=weight.device, dtype=torch.float32))
        self.B = nn.Parameter(torch.zeros(experts, outputs, rank, device=weight.device, dtype=torch.float32))
        nn.init.uniform_(self.A, -1.0 / math.sqrt(inputs), 1.0 / math.sqrt(inputs))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        """Rows [S, in], sorted by expert, to [S, out]; `ends` [E] is where each expert's rows end."""
        compute = _compute_format(rows.device, self.A.dtype)
        # Zeros beside a rank that the kernels cannot read; their gradient is cut off again.
        padding = -self.A.shape[1] % _ALIGNED
        down = functional.pad(self.A.to(compute), (0, 0, 0, padding)).transpose(1, 2)
        up = functional.pad(self.B.to(compute), (0, padding)).transpose(1, 2)
        low = grouped_product(self.dropout(rows.to(compute)), down, ends)
        return grouped_product(low, up, ends) * self.scale

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """`weight` with the adapters added in: each sum in fp32, stored in the weight's format."""
        made = torch.empty_like(weight)
        for expert in range(len(weight)):
            delta = self.scale * self.B[expert] @ self.A[expert]
            made[expert] = (weight[expert].float() + (delta.T if self.transposed else delta)).to(weight.dtype)
        return made


def attach_expert_adapters(model: nn.Module, *, rank: int, scale: float, dropout: float) -> int:
    """Put adapters beside every expert of `model` and return how many modules of experts there were.

    Raises ModelError where there are none, or where they are laid out in a way that is not known.
    """
    found = list(_modules_of_experts(model))
    if not found:
        raise ModelError("The model has 0 experts to put adapters beside", "Set the adapters of experts to off.")
    for name, experts in found:
        _check_layout(name, experts)
    for _, experts in found:
        transposed = bool(experts.is_transposed)
        adapters = {
            kind: ExpertAdapter(weight, transposed=transposed, rank=rank, scale=scale, dropout=dropout)
            for kind, weight in (("up", _up_weight(experts)), ("down", experts.down_proj))
        }
        setattr(experts, _PLACE, nn.ModuleDict(adapters))
        experts.forward = functools.partial(_adapted_forward, experts)
    return len(found)


def expert_adapters(module: nn.Module) -> dict[str, ExpertAdapter]:
    """The adapters beside a module of experts, by the name of the tensor they belong to; {} for any other module."""
    if not hasattr(module, _PLACE):
        return {}
    both: Any = getattr(module, _PLACE)
    return {_up_name(module): both["up"], "down_proj": both["down"]}


def grouped_product(rows: Tensor, matrices: Tensor, ends: Tensor) -> Tensor:
    """rows[ends[e - 1] : ends[e]] @ matrices[e] for every e: [S, in], [E, in, out] -> [S, out]."""
    if _has_kernel(rows.device, rows.dtype) and _is_aligned(rows, matrices):
        product: Tensor = functional.grouped_mm(rows, matrices, offs=ends)
        return product
    stops = ends.tolist()
    starts = [0, *stops[:-1]]
    # unbind: its gradient is one stack, where each [e] would make a tensor of all experts
    return torch.cat([rows[a:b] @ one for a, b, one in zip(starts, stops, matrices.unbind(), strict=True)])


def _adapted_forward(experts: Any, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
    """hidden [T, h], the experts chosen for each token [T, k] and their shares [T, k] to the weighted sum [T, h]."""
    adapters = expert_adapters(experts)
    tokens, each = chosen.shape
    order = torch.sort(chosen.reshape(-1), stable=True)
    by_expert, where = order.values, order.indices
    ends = torch.searchsorted(
        by_expert, torch.arange(1, experts.num_experts + 1, device=chosen.device, dtype=by_expert.dtype)
    ).to(torch.int32)

    up = _product(experts, _up_name(experts), hidden[where // each], by_expert, ends, adapters)
    active = experts._apply_gate(up) if experts.has_gate else experts.act_fn(up)
    out = _product(experts, "down_proj", active, by_expert, ends, adapters)
    weighted = out * shares.reshape(-1)[where].unsqueeze(-1)
    back = torch.empty_like(where).scatter_(0, where, torch.arange(where.numel(), device=where.device))
    summed: Tensor = weighted[back].view(tokens, each, -1).sum(dim=1)
    return summed.to(hidden.dtype)


def _product(
    experts: Any, name: str, rows: Tensor, by_expert: Tensor, ends: Tensor, adapters: dict[str, ExpertAdapter]
) -> Tensor:
    """Each row through its expert's weights, bias and adapter."""
    weight = getattr(experts, name)
    matrices = weight if experts.is_transposed else weight.transpose(1, 2)
    result = grouped_product(rows.to(weight.dtype), matrices, ends)
    if experts.has_bias:
        result = result + getattr(experts, f"{name}_bias")[by_expert]
    adapted: Tensor = (result + adapters[name](rows, ends)).to(result.dtype)
    return adapted


def _modules_of_experts(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Modules that hold a three-dimensional weight of their own."""
    for name, module in model.named_modules():
        if any(parameter.ndim == 3 for parameter in module.parameters(recurse=False)):
            yield name, module


_LAYOUT: Final = ("num_experts", "has_gate", "has_bias", "is_transposed", "down_proj")
"""What `transformers` writes on a module whose experts its own grouped products know."""


def _check_layout(name: str, experts: nn.Module) -> None:
    known = all(hasattr(experts, each) for each in _LAYOUT) and hasattr(experts, _up_name(experts))
    if not known or getattr(experts, "has_post_expert_norm", False):
        raise ModelError(
            f"{name} ({type(experts).__name__}) lays out its experts in a way VRAMFit has no adapters for",
            "Set the adapters of experts to off: the other linears get theirs.",
        )


def _up_name(experts: Any) -> str:
    return "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"


def _up_weight(experts: Any) -> Tensor:
    weight: Tensor = getattr(experts, _up_name(experts))
    return weight


def _compute_format(device: torch.device, otherwise: torch.dtype) -> torch.dtype:
    """Autocast does not reach grouped products."""
    return torch.get_autocast_dtype(device.type) if torch.is_autocast_enabled(device.type) else otherwise


@lru_cache(maxsize=16)
def _has_kernel(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this device has a grouped product for numbers of this kind: asked of the device itself."""
    if not hasattr(functional, "grouped_mm"):
        return False
    with torch.no_grad():
        rows = torch.zeros(_ALIGNED, _ALIGNED, device=device, dtype=dtype)
        ends = torch.tensor([_ALIGNED], device=device, dtype=torch.int32)
        try:
            functional.grouped_mm(rows, rows.unsqueeze(0), offs=ends)
        except (RuntimeError, NotImplementedError):
            return False
    return True


def _is_aligned(rows: Tensor, matrices: Tensor) -> bool:
    """Whether every row of both is a multiple of 16 bytes, as the kernels want it."""
    return all(side * rows.element_size() % 16 == 0 for side in (rows.shape[1], *matrices.shape[1:]))
