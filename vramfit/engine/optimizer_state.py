"""An optimizer's states as tensors and plain values, and back, bit for bit: what a checkpoint keeps of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.engine import bitsandbytes_states
from vramfit.engine.chunked import ChunkedOptimizer
from vramfit.engine.host_states import HostStates
from vramfit.errors import CheckpointError

MASTER: Final = "master"


def optimizer_state(
    optimizer: torch.optim.Optimizer, trained: Mapping[str, nn.Parameter]
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(live tensors by "weight's name.state's name", values for JSON)."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, int] = {}
    for name, parameter in trained.items():
        for key, value in bitsandbytes_states.saved(optimizer.state.get(parameter, {})).items():
            if isinstance(value, Tensor):
                tensors[f"{name}.{key}"] = value.detach()
            else:
                numbers[f"{name}.{key}"] = value
        if isinstance(optimizer, HostStates) and parameter.dtype != torch.float32:
            tensors[f"{name}.{MASTER}"] = optimizer.master(parameter)
    return tensors, {"kind": kind_of(optimizer), "numbers": numbers}


def load_optimizer_state(
    optimizer: torch.optim.Optimizer,
    trained: Mapping[str, nn.Parameter],
    tensors: Mapping[str, Tensor],
    values: Mapping[str, Any],
) -> None:
    """Put the result of `optimizer_state` back; the weights themselves are back already.

    Raises CheckpointError when it is of another optimizer.
    """
    check_kind(optimizer, values)
    numbers = dict(values.get("numbers", {}))
    keys: dict[str, list[str]] = {}
    for whole in [*tensors, *numbers]:
        name, _, key = whole.rpartition(".")
        keys.setdefault(name, []).append(key)
    optimizer.state.clear()
    if isinstance(optimizer, HostStates):
        optimizer.copy_masters()
    for name, own in keys.items():  # one weight's states at a time: more need not be in memory twice
        state = {
            key: numbers[f"{name}.{key}"] if f"{name}.{key}" in numbers else tensors[f"{name}.{key}"] for key in own
        }
        _put_back(optimizer, trained[name], state)


def check_kind(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError when states are of another optimizer."""
    kind, saved_kind = kind_of(optimizer), values.get("kind")
    if saved_kind not in (None, kind):
        raise CheckpointError(
            f"The checkpoint's optimizer states are those of {saved_kind}, this run's optimizer is {kind}",
            "Resume with the optimizer and the bits of its states that the run was started with.",
        )


def _put_back(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, Any]) -> None:
    master = state.pop(MASTER, None)
    if master is not None:  # what is trained; where that is the weight itself, it takes its place
        (optimizer.master(parameter) if isinstance(optimizer, HostStates) else parameter.detach()).copy_(master)
    if bitsandbytes_states.is_ours(optimizer):
        bitsandbytes_states.restore(optimizer, parameter, state)
    elif state:
        optimizer.state[parameter] = {
            key: value.to(_place(optimizer, parameter, key), copy=True) for key, value in state.items()
        }


def kind_of(optimizer: torch.optim.Optimizer) -> str:
    """What decides the form of the states: optimizer and bits; not where they live."""
    if isinstance(optimizer, HostStates):
        return kind_of(optimizer.inner)
    if isinstance(optimizer, ChunkedOptimizer):
        return optimizer.kind
    name = type(optimizer).__name__.lower()
    return f"{name} of bitsandbytes" if bitsandbytes_states.is_ours(optimizer) else f"{name} in 32 bits"


def _place(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, key: str) -> torch.device:
    """Where a state lives. torch keeps the step count on the CPU unless its kernel reads it on the device."""
    if isinstance(optimizer, HostStates):
        return torch.device("cpu")
    on_device = any(group.get("fused") or group.get("capturable") for group in optimizer.param_groups)
    return parameter.device if key != "step" or on_device else torch.device("cpu")
