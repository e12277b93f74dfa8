"""An optimizer's states as tensors and plain values, and back, bit for bit: what a checkpoint keeps of it.

States of the same optimizer in other bits are converted on the way back: read as fp32, and rounded to the new levels.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.engine import bitsandbytes_states
from vramfit.engine.chunked import ChunkedOptimizer
from vramfit.engine.host_states import HostStates
from vramfit.engine.low_bit import LowBit
from vramfit.errors import CheckpointError

MASTER: Final = "master"
_KIND: Final = re.compile(r"(?P<rules>\S+) in (?P<bits>32|8|4) bits")
_CODES, _SCALES = "_codes", "_scales"
_UNSIGNED: Final = "exp_avg_sq"


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

    States of other bits than this optimizer's are converted. Raises CheckpointError when they are of another one.
    """
    bits = other_bits(optimizer, values)
    if not bits:
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
        if bits:
            state = _converted(optimizer, trained[name], state, bits)
        _put_back(optimizer, trained[name], state)


def other_bits(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> int:
    """The bits of a checkpoint's states where they are this optimizer's but for that, and can be converted; else 0."""
    now, then = _KIND.fullmatch(kind_of(optimizer)), _KIND.fullmatch(str(values.get("kind")))
    same = now is not None and then is not None and now["rules"] == then["rules"]
    return int(then["bits"]) if same and then is not None and now is not None and now["bits"] != then["bits"] else 0


@torch.no_grad()
def _converted(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter, state: dict[str, Any], bits: Any
) -> dict[str, Any]:
    """One weight's states of `bits` bits in the optimizer's own format, by way of fp32."""
    wide = {key: value for key, value in state.items() if not key.endswith((_CODES, _SCALES))}
    for key in [key.removesuffix(_CODES) for key in state if key.endswith(_CODES)]:
        codes, scales = state[key + _CODES], state[key + _SCALES]
        stored = LowBit.on(codes.device, bits, signed=key != _UNSIGNED)
        wide[key] = stored.read(codes, scales, 0, parameter.numel()).view(parameter.shape)
    inner = optimizer.inner if isinstance(optimizer, HostStates) else optimizer
    if not isinstance(inner, ChunkedOptimizer):
        return wide
    for key, own in inner.formats_by_state(parameter).items():
        if key in wide:
            codes, scales = own.zeros(parameter.numel(), device=own.codebook.levels.device)
            own.write(wide.pop(key).to(codes.device, torch.float32, copy=True).view(-1), codes, scales, 0)
            wide |= {key + _CODES: codes, key + _SCALES: scales}
    return wide


def check_kind(optimizer: torch.optim.Optimizer, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError when states are of another optimizer."""
    kind, saved_kind = kind_of(optimizer), values.get("kind")
    if saved_kind not in (None, kind):
        raise CheckpointError(
            f"The checkpoint's optimizer states are those of {saved_kind}, this run's optimizer is {kind}",
            "Resume with the optimizer and the bits of its states that the run was started with (memory.optimizer, "
            "memory.optimizer_bits).",
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
