"""Which stored tensors make each parameter of a model: by its own name, by another, or put together from several.

Checkpoints name and cut tensors as the library did that wrote them (one matrix for each expert, where the module has
one tensor for all). `transformers` knows the ways; here they are applied to one block at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from vramfit.errors import ModelError
from vramfit.models.stored import StoredTensor, stored_tensors


class Source(Protocol):
    """Where a parameter's numbers are read from."""

    def read_into(self, into: Tensor) -> int:
        """Fill a CPU tensor of the parameter's shape, converted to its format. Returns the bytes read."""


@dataclass(kw_only=True)
class _Together:
    """Stored tensors that `transformers` turns into one or several parameters."""

    first: str
    converter: Any
    model: Any
    stored: list[tuple[str, str, StoredTensor]] = field(default_factory=list)
    _made: dict[str, Tensor] = field(default_factory=dict)

    def take(self, name: str) -> Tensor:
        """The parameter `name`. What was made beside it waits until it is asked for, too."""
        if name not in self._made:
            converter = deepcopy(self.converter)
            for pattern, key, tensor in self.stored:
                converter.add_tensor(self.first, key, pattern, tensor.read())
            made = converter.convert(self.first, model=self.model, config=self.model.config)
            self._made = {key: value[0] if isinstance(value, list) else value for key, value in made.items()}
        if name not in self._made:
            raise ModelError(
                f"The weights of {type(self.model).__name__} hold no {name}", "Download the model again, completely."
            )
        return self._made.pop(name)

    def some(self, experts: int, first: int, last: int) -> _Together | None:
        """The same of some experts, where every pattern has one tensor for each of `experts`."""
        patterns = Counter(pattern for pattern, _, _ in self.stored)
        if set(patterns.values()) != {experts}:
            return None
        of_pattern = {name: [each for each in self.stored if each[0] == name] for name in patterns}
        few = [each for several in of_pattern.values() for each in several[first:last]]
        return _Together(first=self.first, converter=self.converter, model=self.model, stored=few)

    def one_by_one(self, experts: int) -> list[_Together]:
        """The same of each expert, where every pattern has one tensor for each of `experts`. None where other
        parameters are made in the same go, which would be made anew for each."""
        if experts < 2 or len(self.converter.target_patterns) > 1:
            return []
        alone = [self.some(experts, expert, expert + 1) for expert in range(experts)]
        return [group for group in alone if group is not None]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for _, _, tensor in self.stored)


@dataclass(frozen=True, kw_only=True)
class _Converted:
    name: str
    group: _Together

    def read_into(self, into: Tensor) -> int:
        """Expert by expert, where each has tensors of its own: all of a block, stored and put together, would be held
        beside `into` twice."""
        alone = self.group.one_by_one(into.shape[0])
        for expert, group in enumerate(alone):
            into[expert : expert + 1].copy_(group.take(self.name))
        if not alone:
            into.copy_(self.group.take(self.name))
        return self.group.nbytes


@dataclass(frozen=True, kw_only=True)
class _Some:
    """Entries of a source along the first side, where they cannot be made without the others."""

    whole: Source
    shape: tuple[int, ...]
    first: int
    last: int

    def read_into(self, into: Tensor) -> int:
        made = torch.empty(self.shape, dtype=into.dtype)
        read = self.whole.read_into(made)
        into.copy_(made[self.first : self.last])
        return read


def some_experts(source: Source, shape: tuple[int, ...], first: int, last: int) -> Source:
    """Of a source of `shape` [E, ...] the experts `first` to `last` (that one left out). The others are not read where
    each expert has tensors of its own, or lies in one piece."""
    if isinstance(source, StoredTensor):
        return source.stretch(first, last)
    if isinstance(source, _Converted):
        few = source.group.some(shape[0], first, last)
        if few is not None:
            return _Converted(name=source.name, group=few)
    return _Some(whole=source, shape=shape, first=first, last=last)


def weight_sources(model: nn.Module, folder: Path) -> dict[str, Source]:
    """A source for every parameter of `model`, a `transformers` model, by the parameter's name; tied ones once. Buffers
    that the files have are among them.

    Raises ModelError naming what is missing or has another shape, before anything is read.
    """
    stored = stored_tensors(folder)
    found = _by_rules(model, stored)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    missing = sorted(shapes.keys() - found.keys())
    if missing:
        raise ModelError(
            f"{len(missing)} tensors are missing from the weights in {folder}, the first is {missing[0]}",
            "Download the model again, completely.",
        )
    for name, shape in shapes.items():
        source = found[name]
        if isinstance(source, StoredTensor) and source.shape != shape:
            raise ModelError(
                f"{name} has shape {list(source.shape)} in {folder}, and config.json describes {list(shape)}",
                "Use a config.json and weights that belong together.",
            )
    buffers = [name for name, _ in model.named_buffers() if name in found]
    return {name: found[name] for name in (*shapes, *buffers)}


def _by_rules(model: Any, stored: Mapping[str, StoredTensor]) -> dict[str, Source]:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: rule for rule in converters for pattern in rule.source_patterns}
    known = model.state_dict()
    found: dict[str, Source] = {}
    groups: dict[str, _Together] = {}
    for key in sorted(stored, key=_naturally):
        prefix = model.base_model_prefix
        name, pattern = rename_source_key(key, renamings, converters, prefix, known)
        if name not in known and key in known:
            name, pattern = key, None
        if pattern is None:
            found[name] = stored[key]
            continue
        group = groups.setdefault(name, _Together(first=name, converter=by_pattern[pattern], model=model))
        group.stored.append((pattern, key, stored[key]))
        for target in _targets_of(group, pattern, key, name):
            found[target] = _Converted(name=target, group=group)
    return found


def _targets_of(group: _Together, pattern: str, key: str, name: str) -> list[str]:
    """All parameters a group makes: the first is known by name, the others differ in the pattern's last part."""
    targets = list(group.converter.target_patterns)
    first = next((target for target in targets if target in name), None)
    return [name] if first is None else [name.replace(first, target) for target in targets]


def _naturally(key: str) -> list[Any]:
    """Experts in the order of their numbers: 2 before 10."""
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in key.split(".")]
