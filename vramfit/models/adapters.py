"""LoRA adapters on a frozen model, through peft."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from vramfit.errors import ModelError

ALL_LINEAR = "all-linear"


def attach_adapters(
    model: nn.Module,
    *,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] | str = ALL_LINEAR,
    seed: int,
) -> nn.Module:
    """Freeze `model` and put LoRA (W + alpha / rank * B A) beside the target linears; adapters are fp32.

    `targets` are names such as q_proj, or "all-linear": every linear but the head and the experts that are kept in one
    tensor (peft would add the adapters to a copy of all their weights, in every block). `seed` decides the random start
    of A (B starts at zero, so the model's output does not change). Raises ModelError when a target matches nothing.
    """
    check_targets(model, targets)
    quiet_bitsandbytes()
    import peft

    torch.manual_seed(seed)
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=rank,
        lora_alpha=alpha,
        lora_dropout=dropout,
        target_modules=_all_linears(model) if targets == ALL_LINEAR else list(targets),
    )
    with warnings.catch_warnings():
        # peft 0.21 reads a name that transformers 5.24 has renamed. Nothing a user could act on.
        warnings.filterwarnings("ignore", message=".*is_gradient_checkpointing", category=FutureWarning)
        adapted: nn.Module = peft.get_peft_model(model, config)
    return adapted


def _all_linears(model: nn.Module) -> str | list[str]:
    """What to call all linears for peft: its own word, or where there are experts their full names, because peft takes
    a name's ending for the experts' too."""
    has_experts = any(parameter.ndim == 3 for parameter in model.parameters())
    if not has_experts:
        return ALL_LINEAR
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    whole: Any = model
    head = whole.get_output_embeddings() if hasattr(whole, "get_output_embeddings") else None
    names = dict(model.named_modules())
    config = peft.LoraConfig(target_modules=[name for name in linear_names(model) if names[name] is not head])
    # Beside some families' experts (DeepSeek, GLM), peft takes gate_proj, up_proj and down_proj of a shared expert or a
    # dense block for the experts', by whole names too, and does so again when a saved adapter is loaded. It says which.
    convert_peft_config_for_transformers(config, model, None)
    return sorted(config.target_modules or ())


def check_targets(model: nn.Module, targets: Sequence[str] | str) -> None:
    """Raise ModelError unless every target names at least one linear of `model`, by its whole name or its ending."""
    names = linear_names(model)
    if targets == ALL_LINEAR:
        if not names:
            raise ModelError("The model has 0 linear layers to adapt", "Choose full instead of lora.")
        return
    chosen = [targets] if isinstance(targets, str) else list(targets)
    wrong = [target for target in chosen if not any(f".{name}".endswith(f".{target}") for name in names)]
    if wrong or not chosen:
        endings = sorted({name.rpartition(".")[2] for name in names})
        raise ModelError(
            f"The adapter target {wrong[0] if wrong else ''!r} matches 0 of the model's {len(names)} linear layers",
            f"Choose all-linear, or from: {', '.join(endings)}.",
        )


def linear_names(model: nn.Module) -> list[str]:
    """Full names of the linear layers of `model`, the output head included."""
    # GPT-2's Conv1D is a linear with its weight transposed.
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]


def merged_state(model: Any) -> dict[str, torch.Tensor]:
    """Tensors of the base model with the adapters added in, under the base model's own names; `model` stays as it is.

    Sums are made in fp32 and stored in the base's format (4-bit bases: in the adapters' input format, bf16 or wider).
    """
    state: dict[str, torch.Tensor] = {}
    for name, module in model.get_base_model().named_modules():
        if ".lora_" in name or ".base_layer" in name:
            continue
        base = module.base_layer if hasattr(module, "get_delta_weight") else module
        for key, tensor in _own_tensors(base).items():
            if key == "weight" and base is not module:
                delta = sum(module.get_delta_weight(adapter).float() for adapter in module.active_adapters)
                tensor = (tensor.float() + delta).to(tensor.dtype)
            state[f"{name}.{key}".removeprefix(".")] = tensor.detach()
    return state


def _own_tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(recurse=False))
    skipped = module._non_persistent_buffers_set
    tensors |= {name: buffer for name, buffer in module.named_buffers(recurse=False) if name not in skipped}
    quantised: Any = getattr(module, "weight", None)
    if getattr(quantised, "quant_state", None) is not None:
        from bitsandbytes.functional import dequantize_4bit

        module.state_dict()  # turns a layout that some CPUs compute in back into the ordinary one
        tensors["weight"] = dequantize_4bit(quantised.data, quantised.quant_state)
    return tensors


def quiet_bitsandbytes() -> None:
    """Importing peft imports bitsandbytes, which warns about an optional kernel package on machines without a card."""
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
