"""Weights in 4 bits: NormalFloat with double quantisation (QLoRA, Dettmers et al. 2023), in bitsandbytes' layout.

64 weights share a scale; 256 scales, less their mean, are 8-bit numbers that share one of their own. Where bitsandbytes
is installed its kernels do the work, so that a base is the same as in a run that stays on the device; plain torch
unpacks the same bits, and packs all but a few scales (those near a tie) the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor, nn

BLOCK: Final = 64
SCALES_BLOCK: Final = 256

_NF4: Final = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""Quantiles of a normal distribution, scaled to [-1, 1], with an exact zero."""

PARTS: Final = ("codes", "scales", "scale_scales", "offset")
"""What a weight in 4 bits is made of; the names of a linear's buffers."""


@dataclass(frozen=True, kw_only=True)
class Quantised:
    """A weight of N numbers: `codes` [N / 2] uint8, the first of two in the high half; `scales` [N / 64] uint8;
    `scale_scales` [N / 64 / 256] fp32; `offset` [1] fp32."""

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor
    offset: Tensor


def part_shapes(numbers: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and format of each part of a weight of `numbers` numbers."""
    blocks = -(-numbers // BLOCK)
    return {
        "codes": ((-(-numbers // 2),), torch.uint8),
        "scales": ((blocks,), torch.uint8),
        "scale_scales": ((-(-blocks // SCALES_BLOCK),), torch.float32),
        "offset": ((1,), torch.float32),
    }


def quantise(weight: Tensor) -> Quantised:
    """A matrix in 4 bits, on its device."""
    library = _library()
    if library is not None and weight.shape[-1] % BLOCK == 0:
        options: dict[str, Any] = {"blocksize": BLOCK, "compress_statistics": True, "quant_type": "nf4"}
        codes, state = library.quantize_4bit(weight.detach(), **options)
        return Quantised(
            codes=codes.view(-1), scales=state.absmax, scale_scales=state.state2.absmax, offset=state.offset.view(1)
        )
    return quantise_plainly(weight)


def quantise_plainly(weight: Tensor) -> Quantised:
    """The same in plain torch."""
    flat = weight.detach().reshape(-1).float()
    padded = F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)
    scales = padded.abs().amax(dim=1)
    normal = padded / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    levels = torch.tensor(_NF4, device=flat.device)
    codes = torch.bucketize(normal.view(-1), (levels[1:] + levels[:-1]) / 2)[: flat.numel()].to(torch.uint8)
    codes = F.pad(codes, (0, flat.numel() % 2)).view(-1, 2)
    offset = scales.mean().view(1)
    narrow, scale_scales = _narrow_scales(scales - offset)
    return Quantised(codes=(codes[:, 0] << 4) | codes[:, 1], scales=narrow, scale_scales=scale_scales, offset=offset)


def dequantise(parts: Quantised, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The weight of `shape` in `dtype`."""
    library = _library()
    # bitsandbytes 0.50 takes the wrong scales on the CPU where a row is no whole number of blocks.
    if library is not None and shape[1] % BLOCK == 0:
        return _by_library(library, parts, shape, dtype)
    return dequantise_plainly(parts, shape, dtype)


def dequantise_plainly(parts: Quantised, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    scales = wide_scales(parts)
    pairs = _pairs(str(parts.codes.device)).index_select(0, parts.codes.int()).view(-1)
    numbers = shape[0] * shape[1]
    whole = F.pad(pairs[:numbers], (0, -numbers % BLOCK)).view(-1, BLOCK) * scales.unsqueeze(1)
    return whole.view(-1)[:numbers].view(shape).to(dtype)


def wide_scales(parts: Quantised) -> Tensor:
    """The fp32 scale of every 64 weights."""
    table = _dynamic_map(str(parts.scales.device))
    values = F.pad(table[parts.scales.int()], (0, -parts.scales.numel() % SCALES_BLOCK)).view(-1, SCALES_BLOCK)
    wide = (values * parts.scale_scales.unsqueeze(1)).view(-1)[: parts.scales.numel()]
    return wide + parts.offset


def _narrow_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes of `scales` in the dynamic map, and the largest of every 256."""
    blocks = F.pad(scales, (0, -scales.numel() % SCALES_BLOCK)).view(-1, SCALES_BLOCK)
    largest = blocks.abs().amax(dim=1)
    normal = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    table = _dynamic_map(str(scales.device))
    codes = torch.bucketize(normal.view(-1), (table[1:] + table[:-1]) / 2)
    return codes[: scales.numel()].to(torch.uint8), largest


@cache
def _pairs(device: str) -> Tensor:
    """The two weights that each byte of codes stands for, [256, 2] fp32."""
    levels = torch.tensor(_NF4)
    byte = torch.arange(256)
    return torch.stack([levels[byte >> 4], levels[byte & 15]], dim=1).to(device)


@cache
def _dynamic_map(device: str) -> Tensor:
    """The 256 values of 8-bit dynamic quantisation (Dettmers et al. 2022), ascending: a sign, an exponent of tens in as
    many leading zeros as it needs, and what is left of the seven bits as fractions between 0.1 and 1."""
    values = [0.0, 1.0]
    for exponent in range(7):
        edges = torch.linspace(0.1, 1, 2**exponent + 1)
        middles = (10.0 ** (exponent - 6)) * (edges[:-1] + edges[1:]) / 2.0
        values += middles.tolist() + (-middles).tolist()
    return torch.tensor(sorted(values)).to(device)


@cache
def _library() -> Any:
    """bitsandbytes' functions where they are installed, else None."""
    try:
        from vramfit.models.adapters import quiet_bitsandbytes

        quiet_bitsandbytes()
        from bitsandbytes import functional
    except ImportError:
        return None
    return functional


def _by_library(library: Any, parts: Quantised, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    device = str(parts.codes.device)
    scales = library.QuantState(
        absmax=parts.scale_scales, code=_dynamic_map(device), blocksize=SCALES_BLOCK, dtype=torch.float32
    )
    state = library.QuantState(
        absmax=parts.scales,
        shape=torch.Size(shape),
        code=torch.tensor(_NF4, device=device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
        offset=parts.offset,
        state2=scales,
    )
    found: Tensor = library.dequantize_4bit(parts.codes.view(-1, 1), state)
    return found


class Nf4Linear(nn.Linear):
    """A frozen linear whose weight comes in 4 bits, as buffers that are set from outside. `weight` is hollow.

    `transposed`: the checkpoint has the weight as [inputs, outputs], as GPT-2's.
    """

    codes: Tensor
    scales: Tensor
    scale_scales: Tensor
    offset: Tensor
    transposed: bool

    @classmethod
    def of(cls, linear: Any) -> Nf4Linear:
        """In place of `linear`, an nn.Linear or GPT-2's Conv1D with a hollow weight; its bias is kept."""
        made = cls.__new__(cls)
        nn.Module.__init__(made)
        made.transposed = not isinstance(linear, nn.Linear)
        weight = linear.weight.detach().t() if made.transposed else linear.weight.detach()
        made.out_features, made.in_features = weight.shape
        made.weight, made.bias = nn.Parameter(weight, requires_grad=False), linear.bias
        for name in PARTS:
            made.register_buffer(name, None, persistent=False)
        return made

    @classmethod
    def of_library(cls, linear: Any, dtype: torch.dtype) -> Nf4Linear:
        """In place of bitsandbytes' linear with the same 4 bits, computed as `dequantise` does."""
        state = linear.weight.quant_state
        made = cls.of(nn.Linear(1, 1, bias=False))
        made.in_features, made.out_features, made.bias = linear.in_features, linear.out_features, linear.bias
        hollow = torch.empty((), dtype=dtype, device=linear.weight.device).expand(made.out_features, made.in_features)
        made.weight = nn.Parameter(hollow, requires_grad=False)
        made.codes, made.scales = linear.weight.data.view(-1), state.absmax
        made.scale_scales, made.offset = state.state2.absmax, state.offset.view(1)
        return made

    def unpacked(self) -> Tensor:
        """The weight [outputs, inputs] as numbers."""
        parts = Quantised(**{name: getattr(self, name) for name in PARTS})
        return dequantise(parts, (self.out_features, self.in_features), self.weight.dtype)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name for it
        parts = Quantised(**{name: getattr(self, name) for name in PARTS})
        dtype = torch.get_autocast_dtype(input.device.type) if torch.is_autocast_enabled(input.device.type) else None
        apply: Any = _Product.apply
        shape = (self.out_features, self.in_features)
        bias = None if self.bias is None else self.bias.to(dtype or input.dtype)
        result: Tensor = apply(input.to(dtype or input.dtype), parts, shape, bias)
        return result


class _Product(torch.autograd.Function):
    """rows @ weight.T + bias, with the weight unpacked anew in backward: it is never kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, parts: Quantised, shape: tuple[int, int], bias: Tensor | None) -> Tensor:
        ctx.parts, ctx.shape = parts, shape
        return F.linear(rows, dequantise(parts, shape, rows.dtype), bias)

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> Any:
        weight = dequantise(ctx.parts, ctx.shape, upstream.dtype)
        return upstream @ weight, None, None, None
