"""What a block's activations cost in memory: keep them for backward, or recompute them from the block's input.

Recompute (Chen et al. 2016, "Training deep nets with sublinear memory cost") keeps one hidden state per block and runs
the block's forward again in backward: about a third more compute, and bit-exactly the same gradients.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vramfit.errors import ModelError


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The list of transformer blocks of any decoder: its largest ModuleList, by parameters, that is not inside another.

    Hugging Face families call it `model.layers`, `transformer.h`, `gpt_neox.layers` and so on; a block may itself hold
    lists (experts), which are never larger than the list of all blocks. Raises ModelError when there is none.
    """
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module)]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of blocks, so its activations cannot be recomputed",
            "Set activations to keep.",
        )
    return max(lists, key=_size)  # max keeps the first of equals: the outermost


def recompute_blocks(model: nn.Module, count: int) -> int:
    """Recompute the first `count` blocks of `model` in backward and keep the others. Returns how many there are now.

    Calling it again changes the number; 0 keeps all. The first blocks are the ones to recompute: their activations
    would be held longest.
    """
    if count == 0 and not _is_changed(model):
        return 0
    blocks = find_blocks(model)
    for index, block in enumerate(blocks):
        _restore(block)
        if index < count:
            _recompute(block)
    return min(count, len(blocks))


def _recompute(block: nn.Module) -> None:
    """Shadow the block's `forward` on the instance: the class, its state_dict and its name stay as they were."""
    block.forward = functools.partial(_run_recomputed, block.forward)


def _restore(block: nn.Module) -> None:
    if not _is_recomputed(block):
        return
    before = block.__dict__.pop("forward").args[0]
    if getattr(before, "__self__", None) is not block:  # somebody else had shadowed it first: give that back
        block.forward = before


def _is_recomputed(module: nn.Module) -> bool:
    return getattr(module.__dict__.get("forward"), "func", None) is _run_recomputed


def _is_changed(model: nn.Module) -> bool:
    return any(_is_recomputed(module) for module in model.modules())


def _run_recomputed(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    # Non-reentrant: works when only adapters inside the block need gradients and its input does not.
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
