"""fp32 to bf16 by chance: up or down with the probability that makes the mean exact.

bf16 keeps 8 significant bits, so a weight rounded to the nearest only moves when its update is larger than 1/512 of it;
at fine-tuning rates most are not. Rounded by chance, an update of a hundredth of a step moves the weight one time in a
hundred, and nothing is lost in the mean (Zamirai et al. 2020, "Revisiting BFloat16 training").
"""

from __future__ import annotations

import torch
from torch import Tensor

_LOWER_HALF = 2**16


def round_stochastically(values: Tensor, generator: torch.Generator) -> Tensor:
    """fp32 `values` in bf16. A bf16 number lies in the upper half of an fp32 one: add noise to the lower, then cut it.

    Exact for what bf16 can hold; infinities stay. `generator` is on the device of `values`.
    """
    noise = torch.randint(_LOWER_HALF, values.shape, dtype=torch.int32, device=values.device, generator=generator)
    rounded = noise.add_(values.view(torch.int32)).bitwise_and_(-_LOWER_HALF)
    return rounded.view(torch.float32).to(torch.bfloat16)


class RoundingNoise:
    """The noise of every rounding of a run, as a function of (seed, weight, step) alone.

    So it does not matter in which order weights are stepped, nor how often a step is done again, and a resumed run
    meets the noise it would have met.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def generator(self, device: torch.device, *, weight: int, step: int) -> torch.Generator:
        """The generator for the weight with this number in this step, at its beginning."""
        if device not in self._generators:
            self._generators[device] = torch.Generator(device)
        # CPU generators read 32 bits of a seed: those that depend on all of the three.
        return self._generators[device].manual_seed(_mixed(_mixed(_mixed(self._seed) + weight) + step) >> 32)


def _mixed(number: int) -> int:
    """64 bits of which each depends on every bit of `number` (Steele, Lea and Flood 2014, SplitMix64)."""
    number = (number + 0x9E3779B97F4A7C15) % 2**64
    number = (number ^ (number >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
    number = (number ^ (number >> 27)) * 0x94D049BB133111EB % 2**64
    return number ^ (number >> 31)
