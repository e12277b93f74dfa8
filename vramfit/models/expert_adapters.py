"""LoRA beside each expert of a mixture whose experts are kept in one tensor, without ever making W + B A.

peft can put adapters on such tensors, but makes the sum of weights and adapters in every forward: a copy of all experts
of a block. Here each expert's rows go through its weights and through its A and B, each a grouped product
(`engine.grouped`).
"""

from __future__ import annotations

import math
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from vramfit.engine.grouped import (
    ALIGNED,
    compute_grouped,
    grouped_product,
    has_known_layout,
    modules_of_experts,
    up_name,
)
from vramfit.engine.packed import compute_format
from vramfit.errors import ModelError

_PLACE: Final = "lora_experts"


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

    @property
    def weights(self) -> tuple[nn.Parameter, ...]:
        return self.A, self.B

    def forward(self, rows: Tensor, ends: Tensor, weights: tuple[Tensor, ...] = ()) -> Tensor:
        """Rows [S, in], sorted by expert, to [S, out]; `ends` [E] is where each expert's rows end. `weights` are those
        of the experts there, where that is not all."""
        own_a, own_b = weights or self.weights
        compute = compute_format(rows, own_a.dtype)
        # Zeros beside a rank that the kernels cannot read; their gradient is cut off again.
        padding = -own_a.shape[1] % ALIGNED
        down = functional.pad(own_a.to(compute), (0, 0, 0, padding)).transpose(1, 2)
        up = functional.pad(own_b.to(compute), (0, padding)).transpose(1, 2)
        low = grouped_product(self.dropout(rows.to(compute)), down, ends)
        return grouped_product(low, up, ends) * self.scale

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """`weight` with the adapters added in: each sum in fp32, stored in the weight's format."""
        made = torch.empty_like(weight)
        for expert in range(len(weight)):
            delta = (self.scale * self.B[expert] @ self.A[expert]).to(weight.device)
            made[expert] = (weight[expert].float() + (delta.T if self.transposed else delta)).to(weight.dtype)
        return made


def attach_expert_adapters(model: nn.Module, *, rank: int, scale: float, dropout: float) -> int:
    """Put adapters beside every expert of `model` and return how many modules of experts there were.

    Raises ModelError where there are none, or where they are laid out in a way that is not known.
    """
    found = list(modules_of_experts(model))
    if not found:
        raise ModelError("The model has 0 experts to put adapters beside", "Set the adapters of experts to off.")
    for name, experts in found:
        _check_layout(name, experts)
    for _, experts in found:
        transposed = bool(experts.is_transposed)
        adapters = {
            kind: ExpertAdapter(weight, transposed=transposed, rank=rank, scale=scale, dropout=dropout)
            for kind, weight in (("up", getattr(experts, up_name(experts))), ("down", experts.down_proj))
        }
        setattr(experts, _PLACE, nn.ModuleDict(adapters))
        compute_grouped(experts, expert_adapters)
    return len(found)


def expert_adapters(module: nn.Module) -> dict[str, ExpertAdapter]:
    """The adapters beside a module of experts, by the name of the tensor they belong to; {} for any other module."""
    if not hasattr(module, _PLACE):
        return {}
    both: Any = getattr(module, _PLACE)
    return {up_name(module): both["up"], "down_proj": both["down"]}


def _check_layout(name: str, experts: nn.Module) -> None:
    if not has_known_layout(experts):
        raise ModelError(
            f"{name} ({type(experts).__name__}) lays out its experts in a way VRAMFit has no adapters for",
            "Set the adapters of experts to off: the other linears get theirs.",
        )
