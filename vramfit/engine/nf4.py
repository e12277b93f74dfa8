"""Weights in 4 bits: NormalFloat with double quantisation (QLoRA, Dettmers et al. 2023), in bitsandbytes' layout.

64 weights share a scale; 256 scales, less their mean, are 8-bit numbers that share one of their own. Where bitsandbytes
is installed its kernels do the work, so that a base is the same as in a run that stays on the device; plain torch
unpacks the same bits, and packs all but a few scales (those near a tie) the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, Final

import torch
import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor

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
"""What a weight in 4 bits is made of. Of N numbers: `codes` [N / 2] uint8, the first of two in the high half; `scales`
[N / 64] uint8; `scale_scales` [N / 64 / 256] fp32; `offset` [1] fp32. A stack of E matrices has E of each."""


def part_shapes(shape: Sequence[int]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and format of each part of a weight of `shape`, [rows, columns] or [E, rows, columns]."""
    *stack, rows, columns = shape
    numbers, many = rows * columns, tuple(stack)
    blocks = -(-numbers // BLOCK)
    return {
        "codes": ((*many, -(-numbers // 2)), torch.uint8),
        "scales": ((*many, blocks), torch.uint8),
        "scale_scales": ((*many, -(-blocks // SCALES_BLOCK)), torch.float32),
        "offset": ((*many, 1), torch.float32),
    }


def quantise(weight: Tensor) -> dict[str, Tensor]:
    """A matrix in 4 bits, on its device."""
    library = _library()
    if library is not None and weight.shape[-1] % BLOCK == 0:
        options: dict[str, Any] = {"blocksize": BLOCK, "compress_statistics": True, "quant_type": "nf4"}
        codes, state = library.quantize_4bit(weight.detach(), **options)
        parts = (codes.view(-1), state.absmax, state.state2.absmax, state.offset.view(1))
        return dict(zip(PARTS, parts, strict=True))
    return quantise_plainly(weight)


def quantise_plainly(weight: Tensor) -> dict[str, Tensor]:
    """A matrix in plain torch."""
    flat = weight.detach().reshape(-1).float()
    padded = _in_blocks(flat, BLOCK)
    scales = padded.abs().amax(dim=1)
    normal = padded / scales.clamp_min(torch.finfo(torch.float32).tiny).unsqueeze(1)
    levels = _levels(str(flat.device))
    codes = torch.bucketize(normal.view(-1), (levels[1:] + levels[:-1]) / 2)[: flat.numel()].to(torch.uint8)
    codes = F.pad(codes, (0, flat.numel() % 2)).view(-1, 2)
    offset = scales.mean().view(1)
    narrow, scale_scales = _narrow_scales(scales - offset)
    parts = ((codes[:, 0] << 4) | codes[:, 1], narrow, scale_scales, offset)
    return dict(zip(PARTS, parts, strict=True))


def dequantise(parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The weight of `shape` in `dtype`."""
    library = _library()
    # bitsandbytes 0.50 takes the wrong scales on the CPU where a row is no whole number of blocks.
    if library is not None and shape[-1] % BLOCK == 0:
        return _by_library(library, parts, shape, dtype)
    return dequantise_plainly(parts, shape, dtype)


def dequantise_plainly(parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The same in plain torch."""
    numbers = shape[-2] * shape[-1]
    codes = parts["codes"]
    pairs = _pairs(str(codes.device)).index_select(0, codes.reshape(-1).int()).view(*codes.shape[:-1], -1)
    blocks = _in_blocks(pairs[..., :numbers], BLOCK) * wide_scales(parts).unsqueeze(-1)
    return blocks.flatten(-2)[..., :numbers].reshape(*shape).to(dtype)


def wide_scales(parts: Mapping[str, Tensor]) -> Tensor:
    """The fp32 scale of every 64 weights."""
    narrow = parts["scales"]
    blocks = _in_blocks(_dynamic_map(str(narrow.device))[narrow.int()], SCALES_BLOCK)
    wide = (blocks * parts["scale_scales"].unsqueeze(-1)).flatten(-2)[..., : narrow.shape[-1]]
    return wide + parts["offset"]


def _in_blocks(numbers: Tensor, size: int) -> Tensor:
    """[..., N] as [..., N / size, size], filled up with zeros."""
    padded = F.pad(numbers, (0, -numbers.shape[-1] % size))
    return padded.reshape(*padded.shape[:-1], -1, size)


def _narrow_scales(scales: Tensor) -> tuple[Tensor, Tensor]:
    """8-bit codes of `scales` in the dynamic map, and the largest of every 256."""
    blocks = _in_blocks(scales, SCALES_BLOCK)
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


def _by_library(library: Any, parts: Mapping[str, Tensor], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A stack is one matrix with all rows: blocks of 64 do not know where a matrix ends, only scales of scales do."""
    codes = parts["codes"]
    device, rows = str(codes.device), shape[:-1]
    state = library.QuantState(
        absmax=parts["scales"],
        shape=torch.Size((math.prod(rows), shape[-1])),
        code=_levels(device),
        blocksize=BLOCK,
        quant_type="nf4",
        dtype=dtype,
    )
    if len(shape) == 2:
        state.nested, state.offset = True, parts["offset"]
        state.state2 = library.QuantState(
            absmax=parts["scale_scales"], code=_dynamic_map(device), blocksize=SCALES_BLOCK, dtype=torch.float32
        )
    else:
        state.absmax = wide_scales(parts).view(-1)
    found: Tensor = library.dequantize_4bit(codes.view(-1, 1), state)
    return found.view(*shape)


@cache
def _levels(device: str) -> Tensor:
    return torch.tensor(_NF4, device=device)
