"""Random states of the CPU and of the device: read, put back, borrowed. What a replay and a resume need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch

from vramfit.engine.accelerators import generator_state, set_generator_state


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators' states as uint8 tensors on the CPU: `cpu`, and `device` where the device has its own."""
    states = {"cpu": torch.get_rng_state()}
    own = generator_state(device)
    return states if own is None else {**states, "device": own}


def set_random_state(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Put `random_state`'s result back. A state of another kind of device is left alone."""
    torch.set_rng_state(states["cpu"].cpu())
    if "device" in states:
        set_generator_state(device, states["device"])


@contextlib.contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside; afterwards the run's own go on as if nothing had been drawn."""
    before = random_state(device)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(device, before)
