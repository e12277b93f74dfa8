"""States kept by bitsandbytes: paged ones, and in 8 bits on a card its kernel, which reads and writes each number once.

Our own 8-bit states (`low_bit.py`) take some forty operations a chunk, each of which moves the chunk through memory: on
a card bitsandbytes is the faster one where it is installed. It rounds bf16 weights to the nearest, so those are ours.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from vramfit.engine.accelerators import backend_of
from vramfit.engine.chunked import SMALL
from vramfit.errors import ConfigError, Problem

_CLASSES: Final = {
    ("adamw", 32, True): "PagedAdamW32bit",
    ("adamw", 8, True): "PagedAdamW8bit",
    ("adamw", 8, False): "AdamW8bit",
    ("lion", 32, True): "PagedLion32bit",
    ("lion", 8, True): "PagedLion8bit",
    ("lion", 8, False): "Lion8bit",
}
_TABLES: Final = ("qmap1", "qmap2")
"""Parts of a state that are the same for all weights, and not saved."""


def has_kernel(device: str, kind: str) -> bool:
    """Whether `kind` in 8 bits is bitsandbytes' work on `device`: a card it has a kernel for, and it is installed."""
    backend = backend_of(device)
    if backend.kind == "cpu" or ("adamw" != kind != "lion") or importlib.util.find_spec("bitsandbytes") is None:
        return False
    supported: set[str] = getattr(_library(), "supported_torch_devices", set())
    return backend.streams and backend.kind in supported


def check_paged(device: str, kind: str, bits: int, weights: torch.dtype) -> None:
    """Raise ConfigError where states cannot be paged, saying why."""
    if not backend_of(device).paged:
        raise _refused(f"The driver of {device} moves no memory to RAM", "Choose auto, or host.")
    if (kind, bits, True) not in _CLASSES:
        raise _refused(f"{kind} in {bits} bits has no paged states", "Choose adamw or lion in 32 or 8 bits.")
    if weights != torch.float32:
        raise _refused(
            "Paged states are bitsandbytes', which rounds bf16 weights to the nearest and so loses small updates",
            "Set the trained weights to fp32, or the place of the states to device.",
        )
    if importlib.util.find_spec("bitsandbytes") is None:
        raise _refused(
            "Paged states need bitsandbytes, which is not installed", "Install it: pip install bitsandbytes."
        )


def build(
    groups: list[dict[str, Any]], *, kind: str, bits: Literal[32, 8], paged: bool, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """bitsandbytes' optimizer of this kind. `options` are betas and, for adamw, eps."""
    optimizer: torch.optim.Optimizer = getattr(_library().optim, _CLASSES[kind, bits, paged])(
        groups, lr=0.0, min_8bit_size=SMALL, **options
    )
    return optimizer


def is_ours(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `build` made it."""
    return type(optimizer).__name__ in _CLASSES.values()


def saved(state: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint keeps of one weight's state."""
    return {name: value for name, value in state.items() if name not in _TABLES}


def restore(optimizer: Any, parameter: nn.Parameter, values: Mapping[str, Tensor | int]) -> None:
    """Make the state of one weight where it belongs (paged memory, tables of levels), then fill it."""
    places = [
        (group, group_place, place)
        for group_place, group in enumerate(optimizer.param_groups)
        for place, held in enumerate(group["params"])
        if held is parameter
    ]
    optimizer.init_state(places[0][0], parameter, *places[0][1:])
    state = optimizer.state[parameter]
    for name, value in values.items():
        if isinstance(value, Tensor):
            state[name].copy_(value)
        else:
            state[name] = value


def _library() -> Any:
    import bitsandbytes

    return bitsandbytes


def _refused(what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field="memory.optimizer_place", what=what, remedy=remedy)])
