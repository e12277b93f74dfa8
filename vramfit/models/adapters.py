"""LoRA, rsLoRA and DoRA on a frozen model: through peft beside linears, our own beside experts in one tensor."""

from __future__ import annotations

import contextlib
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import torch
from torch import nn

from vramfit.engine.packed import PackedLinear, packed_weights
from vramfit.errors import ModelError
from vramfit.models.adapter_targets import ALL_LINEAR, adapted_names
from vramfit.models.dora import row_lengths, use_short_dora
from vramfit.models.expert_adapters import attach_expert_adapters, expert_adapters

Variant = Literal["lora", "rslora", "dora"]

NAME = "default"
"""What peft calls the one adapter a run trains."""


def attach_adapters(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] | str = ALL_LINEAR,
    variant: Variant = "lora",
    experts: bool = False,
    seed: int,
) -> nn.Module:
    """Freeze `model` and put LoRA (W + scale B A) beside the linears that `targets` mean; adapters are fp32.

    `scale` is alpha / rank, with rslora alpha / sqrt(rank); dora trains the lengths of the rows, too. `experts` puts
    adapters beside each expert of a mixture as well. `seed` decides the random start of A (B starts at zero, so the
    model's output does not change). Raises ModelError when a target matches nothing or experts cannot have any.
    """
    if experts and variant == "dora":
        raise ModelError("DoRA has no form for experts in one tensor", "Choose lora or rslora, or leave experts out.")
    names = adapted_names(model, targets)
    quiet_bitsandbytes()
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=names,
        use_rslora=variant == "rslora",
        use_dora=variant == "dora",
    )
    with warnings.catch_warnings(), _targets_as_named():
        # peft 0.21 reads a name that transformers 5.24 has renamed. Nothing a user could act on.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        # It sets what GPT-2's transposed weights need, and tells.
        warnings.filterwarnings("ignore", message=".*fan_in_fan_out is set to False")
        adapted: nn.Module = peft.get_peft_model(model, config)
    if variant == "dora":
        use_short_dora(adapted)
    if experts:
        attach_expert_adapters(model, rank=rank, scale=scale_of(variant, rank, alpha), dropout=dropout)
    return adapted


def scale_of(variant: Variant, rank: int, alpha: float) -> float:
    """What B A is multiplied by."""
    return alpha / math.sqrt(rank) if variant == "rslora" else alpha / rank


def adapted_layers(model: Any) -> Iterator[tuple[str, Any]]:
    """peft's layers of an adapted model, with the name the base model knows each by."""
    for name, module in model.get_base_model().named_modules():
        if NAME in getattr(module, "lora_A", {}):
            yield name, module


def modules_of_experts(model: Any) -> Iterator[tuple[str, nn.Module]]:
    """Modules whose experts have adapters, with the name the base model knows each by."""
    for name, module in model.get_base_model().named_modules():
        if expert_adapters(module):
            yield name, module


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of the base model with the adapters added in, under the base model's own names; `model` stays as it is.

    Sums are made in fp32 and stored in the base's format (4-bit bases: in the adapters' input format, bf16 or wider).
    """
    return merged_tensors(model.get_base_model())


def merged_tensors(whole: nn.Module, *, without: str = "") -> dict[str, torch.Tensor]:
    """The same of a part of the base model, such as a block, by its own names; not of what is under `without`."""
    state: dict[str, torch.Tensor] = {}
    for name, module in whole.named_modules():
        if ".lora_" in name or ".base_layer" in name or (without and name.startswith(f"{without}.")):
            continue
        base = module.base_layer if hasattr(module, "get_delta_weight") else module
        beside = expert_adapters(module)
        for key, tensor in _own_tensors(base).items():
            if key in beside:
                tensor = beside[key].merged(tensor)
            elif key == "weight" and base is not module:
                tensor = _merged(module, tensor)
            if key == "weight" and isinstance(base, PackedLinear) and base.transposed:
                tensor = tensor.t().contiguous()
            state[f"{name}.{key}".removeprefix(".")] = tensor.detach()
    return state


@torch.no_grad()
def _merged(layer: Any, weight: torch.Tensor) -> torch.Tensor:
    """The weights of one adapted linear, with its adapter."""
    whole: torch.Tensor = weight.float() + layer.get_delta_weight(NAME).float()
    if NAME in layer.lora_magnitude_vector:
        factor = layer.lora_magnitude_vector[NAME].weight / row_lengths(layer, NAME)
        whole = whole * (factor if layer.fan_in_fan_out else factor.unsqueeze(1))
    return whole.to(weight.dtype)


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
    skipped = module._non_persistent_buffers_set
    tensors |= {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in skipped}
    tensors |= {name: packed.whole.unpacked(tensors[name].dtype) for name, packed in packed_weights(module).items()}
    quantised: Any = getattr(module, "weight", None)
    if getattr(quantised, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        module.state_dict()  # turns a layout that some CPUs compute in back into the ordinary one
        tensors["weight"] = dequantize_4bit(quantised.data, quantised.quant_state)
    return tensors


@contextlib.contextmanager
def _targets_as_named() -> Iterator[None]:
    """peft rewrites some names of linears to tensors of experts (see `adapter_targets.moved_to_experts`), of which it
    would then copy all. While we attach, a name means the module that has it."""
    from peft.utils import transformers_weight_conversion as conversion

    before = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *args, **kwargs: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = before


def quiet_bitsandbytes() -> None:
    """Importing peft imports bitsandbytes, which warns about an optional kernel package on machines without a card."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
