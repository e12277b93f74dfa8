from __future__ import annotations

import pytest
import torch

from vramfit.engine.low_bit import BLOCK, Codebook, LowBit, dynamic_levels, levels
from vramfit.planning.optimizer_memory import STATE_BYTES

CPU = torch.device("cpu")
KINDS = [(8, True), (8, False), (4, True), (4, False)]


def numbers(count: int, *, signed: bool, seed: int = 0) -> torch.Tensor:
    """Of all sizes a moment's quotients have: evenly over eight powers of ten, and normal ones."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 10 ** (-8 * torch.rand(count // 2, generator=generator))
    normal = torch.randn(count - count // 2, generator=generator).clamp(-1, 1)
    found = torch.cat([sizes * torch.where(torch.rand(len(sizes), generator=generator) < 0.5, -1.0, 1.0), normal])
    return found if signed else found.abs()


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_codes_are_those_of_the_nearest_level_found_by_searching(bits, signed):
    book = Codebook(bits, signed=signed, device=CPU)
    between = (book.levels[1:] + book.levels[:-1]) / 2
    edges = [between, torch.nextafter(between, torch.tensor(2.0)), torch.nextafter(between, torch.tensor(-2.0))]
    values = torch.cat([numbers(200_000, signed=signed), *edges, book.levels, torch.tensor([0.0, -0.0, 1.0])])
    assert torch.equal(book.encode(values), torch.bucketize(values, between).to(torch.uint8))
    assert torch.equal(book.decode(book.encode(book.levels)), book.levels)


@pytest.mark.parametrize(("bits", "signed"), KINDS)
def test_the_levels_are_as_many_as_codes_and_without_a_sign_above_zero(bits, signed):
    found = levels(bits, signed=signed)
    assert len(set(found)) == 2**bits and found == sorted(found) and max(found) == 1.0
    assert min(found) > 0 if not signed else 0.0 in found


def test_the_roots_of_4_bit_levels_without_a_sign_are_even():
    roots = torch.tensor(levels(4, signed=False)).sqrt()
    torch.testing.assert_close(roots.diff(), torch.full((15,), 1 / 16))


@pytest.mark.parametrize("signed", [True, False])
def test_the_dynamic_levels_are_bitsandbytes_own(signed):
    functional = pytest.importorskip("bitsandbytes.functional")
    wanted = functional.create_dynamic_map(signed=signed)
    torch.testing.assert_close(torch.tensor(dynamic_levels(8, signed=signed)), wanted, rtol=0, atol=1e-7)


@pytest.mark.parametrize(("bits", "signed"), KINDS)
@pytest.mark.parametrize("count", [1, 127, 128, 256, 1000, 4097])
def test_numbers_come_back_as_their_nearest_levels_whole_and_in_parts(bits, signed, count):
    form = LowBit.on(CPU, bits, signed=signed)
    values = numbers(count, signed=signed) * 37.0
    codes, scales = form.zeros(count, device=CPU)
    assert torch.equal(form.read(codes, scales, 0, count), torch.zeros(count))
    half = count // 2 // form.block * form.block
    form.write(values[:half].clone(), codes, scales, 0)
    form.write(values[half:].clone(), codes, scales, half)
    found = form.read(codes, scales, 0, count)
    for start in range(0, count, form.block):
        block = values[start : start + form.block]
        largest = block.abs().max()
        wanted = form.codebook.levels[(block.unsqueeze(1) / largest - form.codebook.levels).abs().argmin(dim=1)]
        torch.testing.assert_close(found[start : start + form.block], wanted * largest, rtol=1e-6, atol=0)
    assert torch.equal(form.read(codes, scales, half, count), found[half:])


@pytest.mark.parametrize("bits", [8, 4])
def test_the_error_of_normal_numbers_is_that_of_their_bits(bits):
    """Relative to the root mean square: 8-bit dynamic levels about 1 %, 4-bit ones about 10 %."""
    form = LowBit.on(CPU, bits, signed=True)
    values = torch.randn(2**16, generator=torch.Generator().manual_seed(3))
    codes, scales = form.zeros(len(values), device=CPU)
    form.write(values.clone(), codes, scales, 0)
    error = (form.read(codes, scales, 0, len(values)) - values).norm() / values.norm()
    assert error < {8: 0.015, 4: 0.2}[bits]


@pytest.mark.parametrize("bits", [8, 4])
def test_the_bytes_are_those_the_planner_reckons_with(bits):
    codes, scales = LowBit.on(CPU, bits, signed=True).zeros(BLOCK[bits] * 100, device=CPU)
    assert codes.nbytes + scales.nbytes == STATE_BYTES[bits] * BLOCK[bits] * 100
