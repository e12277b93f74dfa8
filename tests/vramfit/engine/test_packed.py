"""Weights in few bits: what is restored of them, and products that never keep them."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from torch import nn

from vramfit.engine import int8, nf4
from vramfit.engine.packed import Packed, PackedLinear, packed_weights

CPU = torch.device("cpu")
SHAPES = [(24, 128), (7, 65), (3, 8, 192), (2, 5, 33)]


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def held(weight: torch.Tensor, kind: Any) -> Packed:
    packed = Packed(tuple(weight.shape), kind)
    packed.take(packed.quantised(weight, CPU))
    return packed


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("shape", SHAPES)
def test_parts_have_the_planned_shapes_and_formats(kind: Any, shape: tuple[int, ...]) -> None:
    packed = held(numbers(*shape), kind)
    assert {name: (tuple(part.shape), part.dtype) for name, part in packed.parts.items()} == packed.places


@pytest.mark.parametrize("shape", SHAPES)
def test_8_bits_are_within_half_a_level_of_each_row(shape: tuple[int, ...]) -> None:
    weight = numbers(*shape)
    restored = held(weight, "int8").whole.unpacked(torch.float32)
    level = weight.abs().amax(dim=-1, keepdim=True) / 127
    assert ((restored - weight).abs() <= level / 2 * 1.0001).all()
    assert (restored != weight).any()


def test_8_bits_of_numbers_on_the_levels_are_exact_and_zeros_stay_zeros() -> None:
    weight = torch.arange(-127, 128).float() / 64
    rows = torch.stack([weight, torch.zeros_like(weight)])
    assert torch.equal(held(rows, "int8").whole.unpacked(torch.float32), rows)
    before = rows.clone()
    int8.quantise(rows)
    assert torch.equal(rows, before)


@pytest.mark.parametrize("shape", SHAPES)
def test_4_bits_are_within_half_the_widest_gap_of_each_64(shape: tuple[int, ...]) -> None:
    weight = numbers(*shape)
    packed = held(weight, "nf4")
    restored = packed.whole.unpacked(torch.float32)
    each = weight.reshape(-1, shape[-2] * shape[-1]) if len(shape) == 3 else weight.reshape(1, -1)
    mine = restored.reshape(each.shape)
    for one, other in zip(each, mine, strict=True):
        for start in range(0, len(one), 64):
            part, back = one[start : start + 64], other[start : start + 64]
            # Half the widest gap between two levels is 0.152 of the scale; the scale itself is off by up to 1 %.
            assert (part - back).abs().max() <= 0.17 * part.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(24, 128), (3, 8, 192), (4, 16, 64)])
def test_the_library_and_plain_torch_restore_the_same_bits(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if importlib.util.find_spec("bitsandbytes") is None:
        pytest.skip("bitsandbytes is not installed")
    parts = held(numbers(*shape), "nf4").parts
    assert torch.equal(nf4.dequantise(parts, shape, dtype), nf4.dequantise_plainly(parts, shape, dtype))


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("shape", [(5, 8, 192), (5, 3, 33)])
def test_a_stretch_of_a_stack_is_that_part_of_it(kind: Any, shape: tuple[int, ...]) -> None:
    packed = held(numbers(*shape), kind)
    whole = packed.whole.unpacked(torch.float32)
    assert torch.equal(packed.stretch(1, 4).unpacked(torch.float32), whole[1:4])
    alone = held(numbers(*shape)[2], kind)
    assert torch.equal(alone.whole.unpacked(torch.float32), whole[2])


@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize("transposed", [False, True])
def test_a_packed_linear_is_one_with_the_restored_weights(kind: Any, transposed: bool) -> None:
    from transformers.pytorch_utils import Conv1D

    torch.manual_seed(1)
    linear: Any = Conv1D(40, 96) if transposed else nn.Linear(96, 40)
    packed = PackedLinear.of(linear, kind)
    weight = linear.weight.detach().t().contiguous() if transposed else linear.weight.detach()
    inner = packed_weights(packed)["weight"]
    inner.take(inner.quantised(weight, CPU))
    rows = numbers(6, 96).requires_grad_()
    plain = nn.functional.linear(rows, packed.unpacked(), linear.bias)

    made = packed(rows)

    assert torch.equal(made, plain)
    gradients = [torch.autograd.grad(each.square().sum(), rows)[0] for each in (made, plain)]
    torch.testing.assert_close(*gradients, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert packed(rows).dtype == torch.bfloat16


def test_backward_keeps_no_weight() -> None:
    packed = PackedLinear.of(nn.Linear(64, 64), "nf4")
    inner = packed_weights(packed)["weight"]
    inner.take(inner.quantised(numbers(64, 64), CPU))
    kept: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda each: kept.append(each.numel()) or each, lambda each: each):
        packed(numbers(3, 64).requires_grad_()).sum()
    assert not [count for count in kept if count >= 64 * 64]
