"""A model without its weights: all modules, names and shapes, and no memory. For weights that come and go.

Every parameter is one number spread over its shape, on the CPU: unlike on torch's meta device, adapters and anything
else can be put beside such a model as beside any other, and meet the same random numbers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vramfit.errors import ModelError


def hollow_model(shape: Any, *, dtype: torch.dtype, attention: str) -> nn.Module:
    """The causal language model of a `transformers` config with hollow parameters; its buffers are real.

    Raises ModelError where `transformers` cannot build it.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(
                shape, dtype=dtype, attn_implementation=attention, trust_remote_code=False
            )
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"transformers cannot build this model: {reason}", "Check its config.json.") from error
    _fill_buffers(model)
    empty_parameters(model)
    return model  # type: ignore[no-any-return]


def hollow(like: Tensor, device: torch.device | str = "cpu") -> Tensor:
    """A tensor of the shape and format of `like` that takes four bytes or fewer."""
    return torch.zeros((), dtype=like.dtype, device=device).expand(like.shape)


def is_hollow(tensor: Tensor) -> bool:
    return tensor.is_meta or (tensor.numel() > 1 and tensor.untyped_storage().nbytes() <= tensor.element_size())


def empty_parameters(module: nn.Module) -> None:
    """Make every parameter in and below `module` hollow; tied ones stay tied."""
    made: dict[int, nn.Parameter] = {}
    for each in module.modules():
        for name, parameter in each._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                made[id(parameter)] = nn.Parameter(hollow(parameter), requires_grad=parameter.requires_grad)
            each._parameters[name] = made[id(parameter)]


def _fill_buffers(model: Any) -> None:
    """Tables that a model computes when it is made (rotary frequencies, masks): no file has them."""
    owners = [module for module in model.modules() if any(value is not None for value in module._buffers.values())]
    for module in owners:
        for name, value in module._buffers.items():
            if value is not None and value.is_meta:
                module._buffers[name] = torch.empty_like(value, device="cpu")
        model._init_weights(module)
