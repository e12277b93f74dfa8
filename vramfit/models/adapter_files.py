"""An adapter as plain peft reads it: tensors by peft's names, and its settings. It fits the base as it was published.

A start that took a part out of the base (PiSSA, OLoRA) is written as s (B A - B0 A0), an adapter of twice the rank.
Adapters of experts become what peft calls target parameters; so do linears whose names peft would take for the experts'
when it loads them (their tensors' names are the same).
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.errors import ModelError
from vramfit.models.adapter_start import taken_from_base
from vramfit.models.adapter_targets import moved_to_experts
from vramfit.models.adapters import NAME, adapted_layers, modules_of_experts
from vramfit.models.expert_adapters import ExpertAdapter, expert_adapters

_WEIGHTS: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."


def write_adapter(model: Any, folder: Path, *, base: str) -> None:
    """Write adapter_model.safetensors and adapter_config.json; `base` is what peft will load the base from."""
    from safetensors.torch import save_file

    check_writable(model)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in adapter_tensors(model).items()}
    save_file(tensors, folder / _WEIGHTS, metadata={"format": "pt"})
    settings = adapter_settings(model)
    settings.base_model_name_or_path = base
    settings.inference_mode = True
    settings.save_pretrained(str(folder))


def check_writable(model: Any) -> None:
    """Raise ModelError where peft has no form for an adapter: DoRA on linears it takes for the experts'."""
    if model.peft_config[NAME].use_dora and _moved(model):
        name = sorted(_moved(model))[0]
        raise ModelError(
            f"peft takes {name} for the experts' when it loads an adapter, where it knows no DoRA",
            "Set the export to merged, or choose lora or rslora, or name other targets.",
        )


@torch.no_grad()
def adapter_tensors(model: Any) -> dict[str, Tensor]:
    """The adapter's tensors by the names peft saves them under."""
    tensors: dict[str, Tensor] = {}
    taken = taken_from_base(model)
    for name, layer in adapted_layers(model):
        a, b = layer.lora_A[NAME].weight.detach(), layer.lora_B[NAME].weight.detach()
        if name in taken:
            a = torch.cat([a, taken[name].a.to(a)])
            b = torch.cat([b, -taken[name].b.to(b)], dim=1)
        tensors[f"{_PREFIX}{name}.lora_A.weight"] = a
        tensors[f"{_PREFIX}{name}.lora_B.weight"] = b
        if NAME in layer.lora_magnitude_vector:
            tensors[f"{_PREFIX}{name}.lora_magnitude_vector"] = layer.lora_magnitude_vector[NAME].weight.detach()
    for name, experts in modules_of_experts(model):
        tensors |= _expert_tensors(f"{_PREFIX}{name}", experts)
    return tensors


def adapter_settings(model: Any) -> Any:
    """The peft.LoraConfig that belongs to `adapter_tensors`."""
    settings = copy.copy(model.peft_config[NAME])
    names, moved = {name for name, _ in adapted_layers(model)}, _moved(model)
    parameters = {f"{name}.weight" for name in moved}
    for name, experts in modules_of_experts(model):
        parameters |= {f"{name}.{weight}" for weight in expert_adapters(experts)}
    settings.target_modules = names - moved
    settings.target_parameters = sorted(parameters) or None
    if parameters:  # peft refuses dropout beside these, which only matters in training
        settings.lora_dropout = 0.0
    if taken_from_base(model):
        scale = next(layer.scaling[NAME] for _, layer in adapted_layers(model))
        settings.r = 2 * settings.r
        settings.lora_alpha, settings.use_rslora = scale * settings.r, False
    return settings


def _moved(model: Any) -> set[str]:
    return moved_to_experts(model.get_base_model(), [name for name, _ in adapted_layers(model)])


def _expert_tensors(name: str, experts: nn.Module) -> dict[str, Tensor]:
    """peft wraps the module once for each tensor, in their order: the first is the innermost.

    Its A is [E r, in], expert by expert, its B [out, r E], the experts side by side within each of r.
    """
    beside = expert_adapters(experts)
    order = [key for key, _ in experts.named_parameters(recurse=False) if key in beside]
    tensors = {}
    for depth, key in enumerate(reversed(order)):
        place = ".base_layer" * depth
        tensors[f"{name}{place}.lora_A.weight"] = _flat_a(beside[key])
        tensors[f"{name}{place}.lora_B.weight"] = _flat_b(beside[key])
    return tensors


def _flat_a(adapter: ExpertAdapter) -> Tensor:
    return adapter.A.detach().flatten(0, 1)


def _flat_b(adapter: ExpertAdapter) -> Tensor:
    return adapter.B.detach().permute(1, 2, 0).flatten(1, 2)
