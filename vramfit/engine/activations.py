"""What a block's activations cost in memory: kept for backward, kept in 8 bits, or recomputed from the block's input.

Recompute (Chen et al. 2016, "Training deep nets with sublinear memory cost") keeps one hidden state per block and runs
the block's forward again in backward: about a third more compute, and bit-exactly the same gradients, wherever the
hidden state waits. Buffers move once (see `moving_buffers.py`), and no cache of keys and values gets anything.
Compression changes gradients a little (see `compression.py`) and computes nothing again.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vramfit.engine.compression import Codec, InputCompressor, codec_for
from vramfit.engine.moving_buffers import MovingBuffers
from vramfit.engine.offload import HostInputs
from vramfit.engine.randomness import rounding_generator
from vramfit.errors import ModelError
from vramfit.planning.plan import Plan

Mode = Literal["keep", "compress", "recompute", "offload"]
"""How a block holds what backward needs: all of it; its linears' inputs in 8 bits; nothing but its input; or that in
RAM."""

MODES: Final[tuple[Mode, ...]] = get_args(Mode)
"""From the most memory to the least."""


def tighter(one: Mode, other: Mode) -> Mode:
    """The one of two modes that needs less memory."""
    return max(one, other, key=MODES.index)


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


def planned_modes(plan: Plan, blocks: int) -> tuple[Mode, ...]:
    """The mode of each of `blocks` blocks: the first ones that train are recomputed, the next compressed, the others
    kept. Those before the first one that trains have nothing to keep.

    The first blocks' activations would be held longest.
    """
    recompute: Mode = "recompute" if plan.input_tier == "device" else "offload"
    modes: list[Mode] = ["keep"] * plan.first_trained(blocks)
    modes += [recompute] * min(plan.recompute, blocks - len(modes))
    modes += ["compress"] * min(plan.compress, blocks - len(modes))
    return _padded(modes, blocks)


def plan_activations(model: nn.Module, plan: Plan) -> tuple[Mode, ...]:
    """Set the modes of `plan` and return them; () for a model without blocks whose activations are all kept."""
    if not plan.recompute and not plan.compress and not is_changed(model):
        return ()
    return set_activations(model, planned_modes(plan, len(find_blocks(model))))


def set_activations(model: nn.Module, modes: Sequence[Mode], *, codec: Codec | None = None) -> tuple[Mode, ...]:
    """From the next forward on, block i of `model` is in `modes[i]`; blocks beyond `modes` are kept. Returns all modes.

    May be called between any two steps. `codec` is the format of compressed blocks, None: the one that suits their
    device. Raises ModelError when there are no blocks.
    """
    blocks = find_blocks(model)
    if codec is None:
        codec = codec_for(next(blocks.parameters()).device) if "compress" in modes else "int8"
    host = next((found.host for block in blocks if (found := _changed(block))), None) or HostInputs()
    for block, mode in zip(blocks, _padded(modes, len(blocks)), strict=True):
        _set(block, mode, codec, host)
    return activation_modes(model)


def activation_modes(model: nn.Module) -> tuple[Mode, ...]:
    """The mode of each block."""
    return tuple(mode_of(block) for block in find_blocks(model))


def waiting_bytes(model: nn.Module) -> int:
    """Bytes of block inputs that wait in RAM just now."""
    changed = next((found for module in model.modules() if (found := _changed(module))), None)
    return changed.host.waiting_bytes if changed else 0


def mode_of(block: nn.Module) -> Mode:
    """The mode of one block."""
    found = _changed(block)
    return found.mode if found else "keep"


def recompute_blocks(model: nn.Module, count: int) -> int:
    """Recompute the first `count` blocks of `model` in backward and keep the others. Returns how many there are now.

    Calling it again changes the number; 0 keeps all, of a model without blocks too.
    """
    if count == 0 and not is_changed(model):
        return 0
    return set_activations(model, ["recompute"] * count).count("recompute")


def is_changed(model: nn.Module) -> bool:
    """Whether any block does something else than keep its activations."""
    return any(_changed(module) for module in model.modules())


class _Changed:
    """A block's `forward` in another mode, put on the instance: the class, its state_dict and its name stay."""

    def __init__(self, block: nn.Module, host: HostInputs) -> None:
        self.forward: Callable[..., Any] = block.forward
        self.mode: Mode = "keep"
        self.host = host
        self.compressor: InputCompressor | None = None
        self._block = weakref.ref(block)
        self._buffers: MovingBuffers | None = None  # made anew with each mode: modules may have been put in between

    def set(self, mode: Mode, codec: Codec) -> None:
        if self.compressor is not None:
            self.compressor.close()
        block = self._block()
        assert block is not None
        self.mode = mode
        self.compressor = InputCompressor(block, codec) if mode == "compress" else None
        self._buffers = MovingBuffers(block) if mode in ("recompute", "offload") else None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.mode == "keep" or not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        if self.compressor is not None:
            return self.compressor.run(self.forward, *args, **kwargs)
        args, kwargs = _without_cache(self._block(), args, kwargs)
        if self.mode == "recompute":
            return self._again(self.forward, args, kwargs)
        return self._offloaded(args, kwargs)

    def _again(self, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        assert self._buffers is not None
        noted = self._buffers.note()
        # Non-reentrant: works when only adapters inside the block need gradients and its input does not.
        result = checkpoint(
            forward, *args, use_reentrant=False, context_fn=lambda: (contextlib.nullcontext(), noted), **kwargs
        )
        self._buffers.learn(noted)
        return result

    def _offloaded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Recomputed from an input that waits in RAM. Only what is given by position can wait elsewhere."""
        forward = self.forward
        if not args:
            name = next(name for name, value in kwargs.items() if isinstance(value, Tensor))
            args = (kwargs.pop(name),)
            forward = functools.partial(_by_name, forward, name)
        hidden = next(value for value in args if isinstance(value, Tensor))
        with self.host.sending(hidden):
            return self._again(forward, args, kwargs)


def _without_cache(block: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A cache of keys and values would get them a second time when the block is computed again, and training has no use
    for one: transformers' blocks take None for it. Blocks that only read one say so."""
    if getattr(block, "_can_checkpoint_with_cache", False):
        return args, kwargs
    kept = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
    if kept.get("use_cache"):
        kept["use_cache"] = False
    return tuple(None if _is_cache(value) else value for value in args), kept


def _is_cache(value: Any) -> bool:
    return any(kind.__name__ == "Cache" for kind in type(value).__mro__)


def _by_name(forward: Callable[..., Any], name: str, hidden: Tensor, **kwargs: Any) -> Any:
    return forward(**{name: hidden}, **kwargs)


def _set(block: nn.Module, mode: Mode, codec: Codec, host: HostInputs) -> None:
    changed = _changed(block)
    if changed is None:
        if mode == "keep":
            return
        changed = _Changed(block, host)
        block.forward = changed
    if mode == "compress":  # the stream is there before anybody notes where it stands
        rounding_generator(next(block.parameters()).device)
    changed.set(mode, codec)
    if mode == "keep" and block.__dict__["forward"] is changed:
        del block.__dict__["forward"]
        if getattr(changed.forward, "__self__", None) is not block:  # somebody else had changed it first
            block.forward = changed.forward


def _changed(module: nn.Module) -> _Changed | None:
    """Ours, also below what somebody put over it later."""
    forward = module.__dict__.get("forward")
    while isinstance(forward, functools.partial) and forward.args:
        forward = forward.args[0]
    return forward if isinstance(forward, _Changed) else None


def _padded(modes: Sequence[Mode], blocks: int) -> tuple[Mode, ...]:
    rest: list[Mode] = ["keep"] * (blocks - len(modes))
    return (*modes[:blocks], *rest)


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
