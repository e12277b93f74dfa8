"""Random weights made part by part: of one seed the same numbers, wherever the parts are made, and in any order.

A part is a block, or all that is not a block; its random numbers come from the run's seed and the part's name. So a
model that is larger than any memory begins as one that stays on the device does, to the same bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.engine.activations import find_blocks
from vramfit.errors import ModelError

OUTSIDE: Final = ""
"""The name of the part that is not a block."""

_HOLLOW_WRITTEN: Final = "single memory location"  # torch's words where a parameter that is hollow is written


def make_start(model: nn.Module, seed: int) -> None:
    """Random weights for `model`, a `transformers` model on the CPU, in place. Raises ModelError."""
    start = Start(model, seed)
    for part in start.parts:
        start.make(part)


def random_sources(model: nn.Module, seed: int) -> dict[str, RandomSource]:
    """A source for every parameter of a hollow `model`, by the parameter's name; tied ones once.

    A part is made, whole, when its first parameter is read, and each number kept until it is read: at most one part
    beside what is read into. Reading may raise ModelError.
    """
    start = Start(model, seed)
    return {
        name: RandomSource(name=name, part=part)
        for part in (_Part(start=start, name=each) for each in start.parts)
        for name in start.parts[part.name]
    }


class Start:
    """How a model begins: `parts` are the names of each part's parameters."""

    def __init__(self, model: nn.Module, seed: int) -> None:
        self.model, self._seed = model, seed
        self._blocks = _blocks_by_name(model)
        # What is outside first: should a family's own way reach into its blocks from there, those are made afterwards.
        self.parts: dict[str, list[str]] = {OUTSIDE: [], **{name: [] for name in self._blocks}}
        depth = max((name.count(".") + 1 for name in self._blocks), default=0)
        for name, _ in model.named_parameters():
            block = ".".join(name.split(".")[:depth])
            self.parts[block if block in self._blocks else OUTSIDE].append(name)

    def make(self, part: str) -> None:
        """Fill a part's parameters, which are real, with its random numbers; no other random number is drawn."""
        parameters = {name: self.model.get_parameter(name) for name in self.parts[part]}
        before = torch.default_generator.get_state()
        torch.default_generator.manual_seed(self._seed_of(part))
        try:
            with torch.no_grad():
                for parameter in parameters.values():
                    parameter.fill_(torch.nan)  # found below where nothing else comes
                for owner, module in self._modules(part):
                    owner._init_weights(module)
        except RuntimeError as error:
            if _HOLLOW_WRITTEN not in str(error):
                raise
            raise _no_start(self.model, f"changes its blocks when {part or 'what is outside them'} begins") from error
        finally:
            torch.default_generator.set_state(before)
        for name, parameter in parameters.items():
            if bool(parameter.detach().isnan().any()):
                raise _no_start(self.model, f"does not say how {name} begins")

    def _seed_of(self, part: str) -> int:
        return int.from_bytes(hashlib.sha256(f"{self._seed} {part}".encode()).digest()[:7], "little")

    def _modules(self, part: str) -> Iterator[tuple[Any, nn.Module]]:
        """A part's modules, what is below another before it, each with the model whose way of beginning is theirs."""
        inside = {id(block): name for name, block in self._blocks.items()}

        def below(module: nn.Module, owner: Any, at: str) -> Iterator[tuple[Any, nn.Module]]:
            owner = module if hasattr(module, "_init_weights") else owner
            for child in module.children():
                yield from below(child, owner, inside.get(id(child), at))
            if at == part:
                yield owner, module

        yield from below(self.model, self.model, OUTSIDE)


@dataclass(kw_only=True)
class _Part:
    """A part of a hollow model, made when the first of its numbers is asked for."""

    start: Start
    name: str
    made: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str) -> Tensor:
        if name not in self.made:
            self.made = self._make()
        return self.made.pop(name)

    def _make(self) -> dict[str, Tensor]:
        parameters = {name: self.start.model.get_parameter(name) for name in self.start.parts[self.name]}
        hollow = {name: each.data for name, each in parameters.items()}
        try:
            for each in parameters.values():
                each.data = torch.empty(each.shape, dtype=each.dtype)
            self.start.make(self.name)
            return {name: each.data for name, each in parameters.items()}
        finally:
            for name, each in parameters.items():
                each.data = hollow[name]


@dataclass(frozen=True, kw_only=True)
class RandomSource:
    """Where a parameter's first numbers come from."""

    name: str
    part: _Part

    def read_into(self, into: Tensor) -> int:
        """Fill a CPU tensor of the parameter's shape, converted to its format. Returns the bytes read: none."""
        into.copy_(self.part.take(self.name))
        return 0


def _blocks_by_name(model: nn.Module) -> dict[str, nn.Module]:
    """None where nobody knows the model's blocks: it does not stream, and begins as one part."""
    try:
        blocks = find_blocks(model)
    except ModelError:
        return {}
    prefix = next(name for name, module in model.named_modules() if module is blocks)
    return {f"{prefix}.{index}": block for index, block in enumerate(blocks)}


def _no_start(model: nn.Module, what: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__} {what}, so it cannot be trained from random weights",
        "Choose a model of another family, or start from trained weights.",
    )
