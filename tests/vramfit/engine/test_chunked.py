"""Each optimizer against torch's own class or its paper's formula: in chunks, in fp32 and bf16, with few bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from vramfit.engine.adafactor import Adafactor
from vramfit.engine.adamw import AdamW
from vramfit.engine.chunked import SMALL, ChunkedOptimizer, Rule
from vramfit.engine.lion import Lion
from vramfit.engine.muon import Muon, orthogonal
from vramfit.engine.peak import _highest_rise
from vramfit.engine.sgd import Sgd

RATE, DECAY, STEPS = 1e-2, 0.1, 20
ADAMW = {"betas": (0.9, 0.95), "eps": 1e-8}
SHAPES = [(48, 100), (7,), (3, 20, 30)]
RULES: dict[str, tuple[Rule, dict[str, object]]] = {
    "adamw": (AdamW(), ADAMW),
    "lion": (Lion(), {"betas": (0.9, 0.99)}),
    "sgd": (Sgd(), {"momentum": 0.9}),
    "adafactor": (Adafactor(), {"decay_power": -0.8}),
}


def weights(shapes=SHAPES, *, seed: int = 0, dtype=torch.float32) -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]


def gradients(step: int, shapes=SHAPES) -> list[Tensor]:
    """Of different sizes from step to step and row to row, as real ones are."""
    generator = torch.Generator().manual_seed(1000 + step)
    sizes = 10 ** (2 * torch.rand(len(shapes), generator=generator) - 2)
    return [torch.randn(shape, generator=generator) * size for shape, size in zip(shapes, sizes, strict=True)]


def own(parameters, name: str, **options) -> ChunkedOptimizer:
    rule, values = RULES[name]
    return ChunkedOptimizer(
        [{"params": parameters, "lr": RATE, "weight_decay": DECAY, **values}], rules={name: rule}, **options
    )


def train(parameters, optimizer, steps: int = STEPS, *, first: int = 0, shapes=SHAPES) -> list[Tensor]:
    for step in range(first, first + steps):
        for parameter, gradient in zip(parameters, gradients(step, shapes), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
        optimizer.step()
    return [parameter.detach() for parameter in parameters]


def lion_by_the_paper(parameters: list[Tensor]) -> list[Tensor]:
    """Chen et al. 2023, program 1, in double precision."""
    found, momenta = [each.detach().double() for each in parameters], [torch.zeros_like(each) for each in parameters]
    for step in range(STEPS):
        for place, gradient in enumerate(gradients(step)):
            momentum, gradient = momenta[place].double(), gradient.double()
            direction = (0.9 * momentum + 0.1 * gradient).sign()
            found[place] = found[place] - RATE * (direction + DECAY * found[place])
            momenta[place] = 0.99 * momentum + 0.01 * gradient
    return [each.float() for each in found]


def by_torch(make: Callable[[list[Tensor]], torch.optim.Optimizer]) -> Callable[[list[Tensor]], list[Tensor]]:
    def reference(parameters: list[Tensor]) -> list[Tensor]:
        copies = [torch.nn.Parameter(each.detach().clone()) for each in parameters]
        return train(copies, make(copies))

    return reference


REFERENCES: dict[str, Callable[[list[Tensor]], list[Tensor]]] = {
    "adamw": by_torch(lambda held: torch.optim.AdamW(held, lr=RATE, weight_decay=DECAY, **ADAMW)),
    "lion": lion_by_the_paper,
    "sgd": by_torch(lambda held: torch.optim.SGD(held, lr=RATE, weight_decay=DECAY, momentum=0.9)),
    # A least scale of 1 and a rate below 1 / sqrt(t) turn off what makes its rate another quantity. The least mean of
    # squares is the paper's 1e-30, which torch gives as a root.
    "adafactor": by_torch(lambda held: torch.optim.Adafactor(held, lr=RATE, weight_decay=DECAY, eps=(1e-15, 1.0))),
}


@pytest.mark.parametrize("chunk_numbers", [0, 256])
@pytest.mark.parametrize("name", RULES)
def test_twenty_steps_are_the_references(name, chunk_numbers):
    scale = 1e-2 if name == "adafactor" else 1.0  # its reference scales by sizes above 1
    parameters = [torch.nn.Parameter(each.detach() * scale) for each in weights()]
    wanted = REFERENCES[name](parameters)
    for found, value in zip(train(parameters, own(parameters, name, chunk_numbers=chunk_numbers)), wanted, strict=True):
        torch.testing.assert_close(found, value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("shape", [(48, 100), (100, 48), (32, 32)])
def test_muon_is_torchs_own(shape):
    """Bit for bit up to the order of sums, in bf16 as torch computes it; torch has it for matrices alone."""
    parameters, copies = weights([shape]), weights([shape])
    options = {"lr": RATE, "weight_decay": DECAY, "momentum": 0.95}
    rule = Muon(torch.bfloat16)
    found = train(
        parameters, ChunkedOptimizer([{"params": parameters, **options}], rules={"muon": rule}), shapes=[shape]
    )
    wanted = train(copies, torch.optim.Muon(copies, adjust_lr_fn="match_rms_adamw", **options), shapes=[shape])
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-6, atol=1e-6)


def test_muon_steps_a_stack_of_matrices_one_by_one():
    stack, single = weights([(3, 20, 30)]), weights([(3, 20, 30)])[0].detach()
    alone = [torch.nn.Parameter(each.clone()) for each in single]
    options = {"lr": RATE, "weight_decay": DECAY, "momentum": 0.95}
    together = ChunkedOptimizer([{"params": stack, **options}], rules={"muon": Muon(torch.float32)})
    apart = ChunkedOptimizer([{"params": alone, **options}], rules={"muon": Muon(torch.float32)})
    gradient = torch.randn(3, 20, 30)
    stack[0].grad = gradient
    for parameter, own_gradient in zip(alone, gradient, strict=True):
        parameter.grad = own_gradient.clone()
    together.step()
    apart.step()
    assert torch.equal(stack[0].detach(), torch.stack([each.detach() for each in alone]))


def test_orthogonal_brings_all_singular_values_near_one():
    matrix = torch.randn(40, 90, generator=torch.Generator().manual_seed(0)).double()
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    found = orthogonal(matrix)
    assert values.max() / values.min() > 3
    inside = left.t() @ found @ right.t()  # diagonal where it has the same singular vectors
    assert inside.diagonal().min() > 0.6 and inside.diagonal().max() < 1.3
    torch.testing.assert_close(inside - inside.diagonal().diag(), torch.zeros(40, 40).double(), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize("bits", [8, 4])
def test_chunks_do_not_change_what_low_bit_states_become(name, bits):
    shapes = [(64, 100), (4096,), (50, 7)]
    whole, parts = weights(shapes), weights(shapes)
    one = own(whole, name, bits=bits, chunk_numbers=2**20)
    other = own(parts, name, bits=bits, chunk_numbers=512)
    for found, wanted in zip(train(parts, other, 3, shapes=shapes), train(whole, one, 3, shapes=shapes), strict=True):
        assert torch.equal(found, wanted)
    for left, right in zip(whole, parts, strict=True):
        assert all(torch.equal(one.state[left][key], other.state[right][key]) for key in one.state[left])


@pytest.mark.parametrize("bits", [8, 4])
def test_only_matrices_of_some_size_have_low_bit_states(bits):
    shapes = [(64, 64), (64, 63), (2 * SMALL,)]
    parameters = weights(shapes)
    optimizer = own(parameters, "adamw", bits=bits)
    train(parameters, optimizer, 1, shapes=shapes)
    large, small, vector = (set(optimizer.state[each]) for each in parameters)
    assert large == {"step", "exp_avg_codes", "exp_avg_scales", "exp_avg_sq_codes", "exp_avg_sq_scales"}
    assert small == vector == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize(("bits", "most"), [(8, 0.03), (4, 0.25)])
def test_low_bit_adamw_moves_weights_as_32_bit_adamw_does(bits, most):
    """How far apart after 20 steps, relative to how far they went."""
    shapes = [(128, 128)]
    exact, rounded, start = weights(shapes), weights(shapes), weights(shapes)[0].detach()
    wanted = train(exact, own(exact, "adamw"), shapes=shapes)[0]
    found = train(rounded, own(rounded, "adamw", bits=bits), shapes=shapes)[0]
    assert 0 < (found - wanted).norm() / (wanted - start).norm() < most


@pytest.mark.parametrize("name", RULES)
def test_bf16_weights_follow_fp32_ones_and_are_rounded_by_chance(name):
    shapes = [(300, 300)]
    exact, rounded = weights(shapes, dtype=torch.bfloat16), weights(shapes, dtype=torch.bfloat16)
    exact = [torch.nn.Parameter(each.detach().float()) for each in exact]
    moved = []
    for held in (exact, rounded):
        before = held[0].detach().float().clone()
        optimizer = own(held, name)
        optimizer.param_groups[0]["lr"] = 1e-4
        torch.manual_seed(0)
        for step in range(5):
            gradient = gradients(step, shapes)[0].bfloat16()
            held[0].grad = gradient.to(held[0].dtype)
            optimizer.step()
        moved.append((held[0].detach().float() - before).double())
    assert rounded[0].dtype == torch.bfloat16
    # Sums over rows: the rounding's noise goes with the root of their number.
    alike = torch.nn.functional.cosine_similarity(moved[0].flatten(), moved[1].flatten(), dim=0)
    assert alike > 0.05 and moved[1].mean().item() == pytest.approx(moved[0].mean().item(), abs=3e-5)


def test_what_lies_in_memory_in_another_order_is_stepped_too():
    straight = weights([(40, 30)])
    turned = [torch.nn.Parameter(straight[0].detach().t().contiguous().t())]
    assert not turned[0].is_contiguous()
    shapes = [(40, 30)]
    wanted = train(straight, own(straight, "adamw"), 3, shapes=shapes)[0]
    assert torch.equal(train(turned, own(turned, "adamw"), 3, shapes=shapes)[0], wanted)


def test_a_step_is_seen_by_who_watches_for_changes():
    parameters = weights()
    before = [parameter._version for parameter in parameters]
    train(parameters, own(parameters, "adamw"), 1)
    assert all(parameter._version > version for parameter, version in zip(parameters, before, strict=True))


@pytest.mark.parametrize(
    ("name", "bits", "dtype"),
    [
        ("adamw", 8, torch.float32),
        ("adamw", 4, torch.bfloat16),
        ("adamw", 32, torch.bfloat16),
        ("lion", 8, torch.bfloat16),
        ("sgd", 32, torch.bfloat16),
        ("adafactor", 32, torch.bfloat16),
    ],
)
def test_what_a_step_takes_beside_the_states_does_not_grow_with_the_weight(name, bits, dtype):
    """At most 32 bytes a number of a chunk, whatever there is beside it."""
    chunk, most = 2**13, []
    for rows in (64, 512):
        shapes = [(rows, 1024)]
        parameters = weights(shapes, dtype=dtype)
        optimizer = own(parameters, name, bits=bits, chunk_numbers=chunk)
        train(parameters, optimizer, 1, shapes=shapes)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            optimizer.step()
        most.append(_highest_rise(profile))
    rows_and_columns = 2 * 4 * (512 + 1024) if name == "adafactor" else 0
    assert 0 < most[1] <= most[0] + rows_and_columns and most[0] < 32 * chunk
