from __future__ import annotations

import pytest
import torch

from vramfit.engine.adamw import AdamW
from vramfit.engine.chunked import ChunkedOptimizer
from vramfit.engine.stochastic_rounding import RoundingNoise, round_stochastically


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_the_mean_is_the_number_and_every_result_one_of_its_two_neighbours(sign):
    below, step = 1.5, 2.0**-7  # bf16's step between 1 and 2
    for share in (0.01, 0.3, 0.5, 0.97):
        value = sign * (below + share * step)
        found = round_stochastically(torch.full((400_000,), value), generator()).double()
        assert set(found.tolist()) == {sign * below, sign * (below + step)}
        deviation = step * (share * (1 - share) / len(found)) ** 0.5
        assert abs(found.mean().item() - value) < 5 * deviation  # one time in two million by chance


def test_what_bf16_holds_is_kept_and_so_are_infinities():
    exact = torch.cat([torch.randn(10_000, generator=generator()).bfloat16().float(), torch.tensor([0.0, -0.0])])
    assert torch.equal(round_stochastically(exact, generator()).float(), exact)
    infinite = torch.tensor([torch.inf, -torch.inf])
    assert torch.equal(round_stochastically(infinite, generator()).float(), infinite)
    assert round_stochastically(torch.tensor([torch.nan]), generator()).isnan().all()


def test_updates_far_below_bf16s_step_arrive_where_rounding_to_the_nearest_keeps_the_weight_where_it_is():
    """A constant gradient makes AdamW move by the rate each step: 1e-4 at a weight of 1, where bf16's step is 2**-7."""
    rate, steps = 1e-4, 100
    weight = torch.nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    optimizer = ChunkedOptimizer(
        [{"params": [weight], "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "lr": rate}],
        rules={"adamw": AdamW()},
    )
    nearest = torch.ones(100, 100, dtype=torch.bfloat16)
    for _ in range(steps):
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        nearest = (nearest.float() - rate).bfloat16()
    assert torch.equal(nearest, torch.ones_like(nearest))
    true_value = 1 - rate * steps
    assert weight.detach().double().mean().item() == pytest.approx(true_value, abs=2e-4)


def test_the_noise_is_that_of_seed_weight_and_step_alone():
    noise, again = RoundingNoise(7), RoundingNoise(7)
    values = torch.rand(1000, generator=generator(1))

    def rounded(source: RoundingNoise, weight: int, step: int) -> torch.Tensor:
        return round_stochastically(values, source.generator(values.device, weight=weight, step=step))

    first = rounded(noise, 3, 5)
    others = [rounded(noise, 3, 6), rounded(noise, 4, 5), rounded(noise, 5, 3), rounded(RoundingNoise(8), 3, 5)]
    assert torch.equal(rounded(again, 3, 5), first)
    assert not any(torch.equal(first, other) for other in others)
