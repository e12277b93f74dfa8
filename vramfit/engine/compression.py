"""What linears of a block keep for backward, in 8 bits: inputs of matrix products alone, rounded by chance.

A block's 128 consecutive numbers share a scale, their largest magnitude; each is then one of 255 even levels (int8) or
one of fp8's. Rounding goes up or down with the probability that makes the mean exact, so a weight's gradient is right
in the mean (Chen et al. 2021, "ActNN"; Liu et al. 2022, "GACT"). Forward computes with the numbers as they are.

Everything else stays as it is: weights, what attention keeps, what norms and activations keep. An input that attention
keeps anyway would only cost more as a copy, and one that several linears have in common is compressed once.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from vramfit.engine.accelerators import DeviceLike, has_hardware
from vramfit.engine.randomness import rounding_generator

Codec = Literal["int8", "fp8"]

BLOCK: Final = 128
"""Numbers that share a scale."""

_SLICE: Final = 2**22  # numbers in work at once: 32 MiB of fp32 copies and noise
_FP8: Final = torch.float8_e4m3fn
_LEVELS: Final[dict[Codec, float]] = {"int8": 127.0, "fp8": torch.finfo(_FP8).max}
_CUT: Final = 2**20  # fp8 keeps 3 of fp32's 23 bits behind the point


@dataclass(frozen=True, kw_only=True)
class Compressed:
    """Numbers of a tensor of `shape` and `dtype`: `codes` [n, 128] of one byte, an fp32 scale [n, 1] per row."""

    codes: Tensor
    scales: Tensor
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes

    @classmethod
    def of(cls, tensor: Tensor, codec: Codec = "int8") -> Compressed:
        """`tensor` rounded stochastically; 0 stays 0, and NaN and infinite numbers spoil their 128, not the others."""
        flat = tensor.reshape(-1)
        rows = -(-flat.numel() // BLOCK)
        codes = flat.new_empty((rows, BLOCK), dtype=torch.int8 if codec == "int8" else _FP8)
        scales = flat.new_empty((rows, 1), dtype=torch.float32)
        generator = rounding_generator(flat.device)
        for start in range(0, rows, _SLICE // BLOCK):
            part = slice(start, start + _SLICE // BLOCK)
            numbers = flat[start * BLOCK : (start + _SLICE // BLOCK) * BLOCK].to(torch.float32, copy=True)
            if numbers.numel() % BLOCK:
                numbers = F.pad(numbers, (0, -numbers.numel() % BLOCK))
            numbers = numbers.view(-1, BLOCK)
            least, most = numbers.aminmax(dim=1, keepdim=True)
            scales[part] = torch.maximum(most, least.neg_()) / _LEVELS[codec]
            # A scale of 0 has only zeros: whatever they are divided by.
            numbers.div_(scales[part].clamp_min(torch.finfo(torch.float32).tiny))
            codes[part] = _ROUNDED[codec](numbers, generator)
        return cls(codes=codes, scales=scales, shape=tensor.shape, dtype=tensor.dtype)

    def shaped(self, shape: torch.Size) -> Compressed:
        """The same numbers as a tensor of another shape."""
        return self if shape == self.shape else replace(self, shape=shape)

    def restored(self) -> Tensor:
        """The tensor again, but for the rounding."""
        out = self.codes.new_empty(self.codes.shape, dtype=self.dtype)
        for start in range(0, self.codes.shape[0], _SLICE // BLOCK):
            part = slice(start, start + _SLICE // BLOCK)
            out[part] = self.codes[part].to(torch.float32).mul_(self.scales[part])
        return out.view(-1)[: self.shape.numel()].view(self.shape)


def _to_int8(numbers: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.rand(numbers.shape, generator=generator, device=numbers.device)
    return numbers.add_(noise).floor_().clamp_(-127, 127)


def _to_fp8(numbers: Tensor, generator: torch.Generator) -> Tensor:
    """Noise added to the bits that are cut off. Below 2^-6, where fp8 is even, it is rounded to the nearest instead."""
    noise = torch.randint(_CUT, numbers.shape, generator=generator, device=numbers.device, dtype=torch.int32)
    rounded = noise.add_(numbers.view(torch.int32)).bitwise_and_(-_CUT).view(torch.float32)
    return rounded.clamp_(-_LEVELS["fp8"], _LEVELS["fp8"])


_ROUNDED: Final[dict[Codec, Callable[[Tensor, torch.Generator], Tensor]]] = {"int8": _to_int8, "fp8": _to_fp8}


def codec_for(device: DeviceLike) -> Codec:
    """fp8 where the device, which must be here, computes in it: its activations' heavy tails keep more of their small
    numbers that way (see docs/log.md). Else int8. Both take the same bytes."""
    return "fp8" if has_hardware(device, "fp8") else "int8"


def described(codec: Codec, device: DeviceLike) -> str:
    """The format as one sentence."""
    why = "computes in fp8" if codec == "fp8" else "does not compute in fp8"
    return f"What compressed blocks keep is in {codec}: {device} {why}."


class InputCompressor:
    """Runs a block so that its linears' inputs wait for backward in 8 bits.

    Hooks on the linears say which of them is running and on what, so that of all that autograd saves their inputs are
    known, also as the copies that autocast makes of them. `close` takes the hooks off.
    """

    def __init__(self, block: nn.Module, codec: Codec = "int8") -> None:
        self._codec = codec
        self._runs = False
        self._linear: nn.Module | None = None
        self._input: Tensor | None = None
        self._stays: set[int] = set()  # storages that wait as they are
        self._known: dict[tuple[int, torch.dtype], _Known] = {}
        self._sources: dict[int, Tensor] = {}  # of a linear inside an adapter: what its copy was made of
        self._handles = [handle for module in block.modules() for handle in self._watch(module)]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()

    def run(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._runs = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack):
                return forward(*args, **kwargs)
        finally:
            self._runs = False
            self._linear = self._input = None
            self._stays.clear()
            self._known.clear()
            self._sources.clear()

    def _watch(self, module: nn.Module) -> list[Any]:
        if _is_linear(module):
            return [
                module.register_forward_pre_hook(self._enter, with_kwargs=True),
                module.register_forward_hook(self._leave, always_call=True),
            ]
        if hasattr(module, "lora_A") and hasattr(module, "lora_dropout"):
            return [module.register_forward_pre_hook(self._enter_adapter)]
        return []

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else next(iter(kwargs.values()), None)
        if self._runs and isinstance(given, Tensor) and given.is_floating_point():
            self._linear, self._input = module, given

    def _leave(self, module: nn.Module, args: Any, result: Any) -> None:
        self._linear = self._input = None

    def _enter_adapter(self, module: Any, args: tuple[Any, ...]) -> None:
        """Adapters beside a linear get a copy of its input in their own format, each one anew: the same numbers."""
        if not (self._runs and args and isinstance(args[0], Tensor)):
            return
        for name, linear in module.lora_A.items():
            same = not module.training or name not in module.lora_dropout
            if same or getattr(module.lora_dropout[name], "p", 0.0) == 0.0:
                self._sources[id(linear)] = args[0]

    def _pack(self, tensor: Tensor) -> Tensor | Compressed:
        if self._linear is None or self._input is None:
            self._stays.add(_storage(tensor))
            return tensor
        if not self._is_input(tensor, self._linear, self._input):
            return tensor
        # Too narrow for a scale of its own row, or kept by attention anyway: then a copy would come on top.
        if tensor.shape[-1] < BLOCK or _storage(tensor) in self._stays:
            return tensor
        source = self._sources.get(id(self._linear), self._input)
        source = source if source.shape == self._input.shape else self._input
        known = self._known.get((id(source), tensor.dtype))
        if known is None or not known.is_of(source):
            known = _Known(source, Compressed.of(tensor, self._codec))
            self._known[id(source), tensor.dtype] = known
        return known.numbers.shaped(tensor.shape)

    @staticmethod
    def _is_input(tensor: Tensor, linear: nn.Module, given: Tensor) -> bool:
        """Whether what a linear saves is what it was given, or a copy of it, and not its weight."""
        weight: Any = linear.weight
        if _storage(tensor) == _storage(weight) or tensor.numel() != given.numel():
            return False
        if tensor.shape[-1] != given.shape[-1]:
            return False  # the weight, transposed
        # As many tokens as features in and out: a weight's cast is the one that lies transposed.
        square: bool = tensor.shape == weight.shape == weight.t().shape and _storage(tensor) != _storage(given)
        return not square or bool(isinstance(linear, nn.Linear) and tensor.is_contiguous())


class _Known:
    """An input that was compressed, valid while it is the same tensor, unchanged."""

    def __init__(self, source: Tensor, numbers: Compressed) -> None:
        self.numbers = numbers
        self._source, self._version = weakref.ref(source), source._version

    def is_of(self, source: Tensor) -> bool:
        return self._source() is source and source._version == self._version


def _unpack(packed: Tensor | Compressed) -> Tensor:
    return packed.restored() if isinstance(packed, Compressed) else packed


def _is_linear(module: nn.Module) -> bool:
    """torch's linears, and GPT-2's with the transposed weight. Quantised ones keep no input."""
    plain = isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    weight = getattr(module, "weight", None)
    return plain and isinstance(weight, Tensor) and weight.ndim == 2


def _storage(tensor: Tensor) -> int:
    """The same number for all views of one memory, as long as it is held."""
    return int(tensor.untyped_storage()._cdata)
