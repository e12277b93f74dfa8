"""Random states of the CPU and of the device: read, put back, borrowed. What a replay and a resume need."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping

import torch


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators' states as uint8 tensors on the CPU: `cpu`, and `device` where the device has its own."""
    states = {"cpu": torch.get_rng_state()}
    if device.type == "mps":
        states["device"] = torch.mps.get_rng_state()
    elif device.type != "cpu":
        states["device"] = torch.get_device_module(device).get_rng_state(device)
    return states


def set_random_state(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Put `random_state`'s result back. A state of another kind of device is left alone."""
    torch.set_rng_state(states["cpu"].cpu())
    if "device" not in states or device.type == "cpu":
        return
    if device.type == "mps":
        torch.mps.set_rng_state(states["device"].cpu())
    else:
        torch.get_device_module(device).set_rng_state(states["device"].cpu(), device)


@contextlib.contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside; afterwards the run's own go on as if nothing had been drawn."""
    before = random_state(device)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(device, before)
