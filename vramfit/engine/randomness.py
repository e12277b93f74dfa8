"""Random states of the CPU and of the device: read, put back, borrowed. What a replay and a resume need.

Beside torch's own streams there is one more on each device, for rounding by chance: what is drawn from it leaves the
others, and so the model's dropout, as they are.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from vramfit.engine.accelerators import generator_state, set_generator_state
from vramfit.engine.head import base_model

_ROUNDING: dict[torch.device, torch.Generator] = {}


def draws(model: nn.Module) -> bool:
    """Whether a forward in training draws random numbers: by a module for it, or by functions that the config rules."""
    config: dict[str, Any] = base_model(model).config.to_dict()
    named = [value for key, value in config.items() if "drop" in key or "jitter" in key]
    modules = any(isinstance(module, nn.Dropout) and module.p > 0 for module in model.modules())
    return modules or any(isinstance(value, float) and value > 0 for value in named)


def rounding_generator(device: torch.device) -> torch.Generator:
    """The stream for rounding on `device`. It begins with the seed that torch was given last."""
    if device not in _ROUNDING:
        restart_rounding(device)
    return _ROUNDING[device]


def restart_rounding(device: torch.device) -> None:
    """Let the stream for rounding begin anew, with the seed that torch was given last."""
    _ROUNDING.setdefault(device, torch.Generator(device)).manual_seed(torch.initial_seed() % 2**63)


def random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The generators' states as uint8 tensors on the CPU: `cpu`, and where there are such, the `device`'s own and the
    one for `rounding`."""
    states = {"cpu": torch.get_rng_state()}
    own = generator_state(device)
    if own is not None:
        states["device"] = own
    if device in _ROUNDING:
        states["rounding"] = _ROUNDING[device].get_state()
    return states


def set_random_state(device: torch.device, states: Mapping[str, torch.Tensor]) -> None:
    """Put `random_state`'s result back. A state of another kind of device is left alone."""
    torch.set_rng_state(states["cpu"].cpu())
    if "device" in states:
        set_generator_state(device, states["device"])
    if "rounding" in states:
        rounding_generator(device).set_state(states["rounding"].cpu())


@contextlib.contextmanager
def own_randomness(device: torch.device, seed: int) -> Iterator[None]:
    """Random numbers from `seed` inside; afterwards the run's own go on as if nothing had been drawn."""
    before = random_state(device)
    torch.manual_seed(seed)
    try:
        yield
    finally:
        set_random_state(device, before)
