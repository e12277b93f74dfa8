"""Which modules of a model get adapters: found by their type, in any family, and never more than what was named."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from vramfit.engine.activations import find_blocks
from vramfit.errors import ModelError

ALL_LINEAR = "all-linear"


def adapted_names(model: nn.Module, targets: Sequence[str] | str) -> list[str]:
    """Full names of the modules that `targets` mean, in the model's order.

    "all-linear" is every linear of every block: not the head, not the embedding, no router. Other targets are whole
    names or endings of names (q_proj, self_attn.q_proj) of linears anywhere. Experts that are kept in one tensor are no
    modules: no target means them. Raises ModelError when a target matches nothing.
    """
    names = linear_names(model)
    if targets == ALL_LINEAR:
        found = _linears_of_blocks(model)
        if not found:
            raise ModelError("The model's blocks have 0 linear layers to adapt", "Choose full instead of lora.")
        return found
    chosen = [targets] if isinstance(targets, str) else list(targets)
    wrong = [target for target in chosen if not any(_is_meant(name, target) for name in names)]
    if wrong or not chosen:
        endings = sorted({name.rpartition(".")[2] for name in names})
        raise ModelError(
            f"The adapter target {wrong[0] if wrong else ''!r} matches 0 of the model's {len(names)} linear layers",
            f"Choose all-linear, or from: {', '.join(endings)}.",
        )
    return [name for name in names if any(_is_meant(name, target) for target in chosen)]


def linear_names(model: nn.Module) -> list[str]:
    """Full names of the linear layers of `model`, the output head included, routers not."""
    return [name for name, module in model.named_modules() if is_linear(module)]


def is_linear(module: nn.Module) -> bool:
    """Whether a module is a matrix product that an adapter can be put beside: bitsandbytes' linears are torch's, with
    packed weights, and GPT-2's Conv1D is one with its weight transposed. A router is one by its class in some families
    (Phi-3.5-MoE), but returns a choice of experts."""
    if type(module).__name__.endswith("Router"):
        return False
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def moved_to_experts(model: nn.Module, names: Sequence[str]) -> set[str]:
    """Those of `names` that plain peft would take for the experts' when it is given them as targets.

    Some families (DeepSeek, GLM, Qwen-MoE) had a linear per expert and projection until 2025, named like those of
    their dense blocks and shared experts. peft 0.21 rewrites these names to the tensors that hold all experts, by their
    ending alone, whenever an adapter is attached or loaded.
    """
    import peft
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    moved = set()
    for ending in {name.rpartition(".")[2] for name in names}:
        alike = [name for name in names if name.rpartition(".")[2] == ending]
        config = peft.LoraConfig(target_modules=alike)
        try:
            whole: Any = model
            convert_peft_config_for_transformers(config, whole, None)
        except ValueError:  # it takes gate_proj for half of what it would have to move, and refuses
            moved |= set(alike)
            continue
        moved |= set(alike) - set(config.target_modules or ())
    return moved


def _linears_of_blocks(model: nn.Module) -> list[str]:
    blocks = find_blocks(model)
    inside = {id(module) for module in blocks.modules()}
    return [name for name, module in model.named_modules() if id(module) in inside and is_linear(module)]


def _is_meant(name: str, target: str) -> bool:
    return f".{name}".endswith(f".{target}")
