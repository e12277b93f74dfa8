"""A model whose blocks' weights visit: its own forward, with the blocks taken out and put back in.

Nothing of a model is rewritten. What its forward does before the blocks (embedding, masks, rotary tables) is done by
letting the blocks catch what they are called with; what it does after them, by letting the last block give back what
was computed in the meantime. Between the two, one block at a time does all micro-batches of a step.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from vramfit.engine.activations import find_blocks
from vramfit.engine.blocks import BlockStream, Direction
from vramfit.engine.expert_slices import SliceStream
from vramfit.engine.later import Later
from vramfit.engine.split_blocks import Bounds, SplitExperts
from vramfit.errors import ModelError

Mode = Literal["run", "catch", "give"]


@dataclass(frozen=True, kw_only=True)
class Call:
    """What a block was called with, beside the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass(kw_only=True)
class Caught:
    """What a forward pass gave the blocks: the first hidden state, and each block's call."""

    hidden: Tensor
    calls: list[Call] = field(default_factory=list)


class VisitingTable:
    """A frozen table outside the blocks that is in memory only while it is needed: `read` gives its numbers."""

    def __init__(self, table: nn.Parameter, read: Callable[[], Tensor]) -> None:
        self._table, self._read, self._depth = table, read, 0

    @contextlib.contextmanager
    def present(self) -> Iterator[None]:
        """Backward belongs inside, too: what autograd keeps of the table is the table."""
        if self._depth == 0:
            self._absent, self._table.data = self._table.data, self._read()
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self._table.data = self._absent

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """`forward` with the table there."""

        def with_table(*args: Any, **kwargs: Any) -> Any:
            with self.present():
                return forward(*args, **kwargs)

        return with_table


class VisitedBlocks:
    """The blocks of a model, each bound to its weights only while it is present. Those of `trains` have gradients.

    `owners` says for each tensor of a block's layout which module it belongs to and by which name. Of the blocks in
    `experts` all but the experts is in `stream`; they are blocks in parts (`split_blocks.py`).
    """

    def __init__(
        self,
        model: nn.Module,
        stream: BlockStream,
        *,
        trains: Collection[int] = (),
        experts: SliceStream | None = None,
    ) -> None:
        self.model, self.stream, self.trains, self._experts = model, stream, trains, experts
        found = find_blocks(model)
        self.blocks = list(found)
        whole: Any = model
        base: Any = whole.get_base_model() if hasattr(model, "get_base_model") else model
        self.prefix = next(name for name, module in base.named_modules() if module is found)
        self.looked_up: dict[str, Later] = {}
        """Tables outside the blocks that are not on the device, by their names."""
        self.head: VisitingTable | None = None
        self.mode: Mode = "run"
        self.direction: Direction = "up"
        self.own: list[Callable[..., Any]] = [block.forward for block in self.blocks]
        """How each block computes: its own forward, or what a compiler made of it."""
        self._owners = [_owners(block, stream.tier.layouts[at].places) for at, block in enumerate(self.blocks)]
        self.split: dict[int, SplitExperts] = {}
        for at in experts.blocks if experts is not None else ():
            self._split(at)
        self._absent = [
            {name: getattr(module, leaf) for name, (module, leaf, _) in owners.items()} for owners in self._owners
        ]
        self._caught: Caught | None = None
        self._given: Tensor | None = None
        self._tuples = False
        self._last: Tensor | None = None
        for index, block in enumerate(self.blocks):
            block.forward = functools.partial(self._called, index)

    # --- a step's three parts ----------------------------------------------------------------------------------------

    def catch(self, forward: Callable[[], Any]) -> Caught:
        """What `forward`, a call of the model or its decoder, gives the blocks; they compute nothing meanwhile."""
        self._caught, self._last = None, None
        with self._as("catch"):
            forward()
        caught, self._caught, self._last = self._caught, None, None
        if caught is None or len(caught.calls) != len(self.blocks):
            seen = 0 if caught is None else len(caught.calls)
            raise ModelError(
                f"{type(self.model).__name__} called {seen} of its {len(self.blocks)} blocks, so they cannot be "
                "streamed one by one",
                "Choose a model of an ordinary decoder family, or a plan without streaming.",
            )
        return caught

    def compute(self, block: int, hidden: Tensor, call: Call) -> Tensor:
        """The block itself, with whatever weights are bound now."""
        result = self.own[block](hidden, *call.args, **call.kwargs)
        end: Tensor = result[0] if isinstance(result, tuple) else result
        return end

    @contextlib.contextmanager
    def given(self, hidden: Tensor) -> Iterator[None]:
        """Inside, the model's forward takes `hidden` for what its blocks computed."""
        self._given = hidden
        try:
            with self._as("give"):
                yield
        finally:
            self._given = None

    @contextlib.contextmanager
    def present(self, block: int, direction: Direction, tensors: Mapping[str, Tensor] | None = None) -> Iterator[None]:
        """The block's weights on the device and bound to its modules; `tensors` are bound instead of some of them."""
        found = self.stream.bring(block, direction)
        self._bind(block, {**found, **self._none_of(block), **(tensors or {})})
        try:
            yield
        finally:
            self._bind(block, self._absent[block])

    def slices(self, block: int, direction: Direction) -> Iterator[Bounds]:
        """Of a block that comes in parts and is present the experts, some at a time, bound as long as they are it."""
        assert self._experts is not None
        for at in self._experts.of(block):
            self._bind(block, self._experts.bring(at, direction))
            yield self._experts.slices[at].first, self._experts.slices[at].last
        self._bind(block, self._none_of(block))

    @contextlib.contextmanager
    def whole(self, block: int) -> Iterator[None]:
        """The block with all it has at once: experts that come in slices are put together in RAM."""
        there = self._experts.whole(block) if self._experts is not None and block in self.split else None
        with self.present(block, "up", there):
            yield

    @property
    def places(self) -> dict[int, int]:
        """What visitors take of the device: buffers by where they begin, with their bytes."""
        return self.stream.places | (self._experts.places if self._experts is not None else {})

    @property
    def staying_bytes(self) -> int:
        """What the blocks that stay take of the device."""
        return self.stream.staying_bytes + (self._experts.staying_bytes if self._experts is not None else 0)

    def read_gaps(self) -> None:
        """Count what the device has waited for visitors so far."""
        self.stream.gaps.read()
        if self._experts is not None:
            self._experts.gaps.read()

    def stay(self, blocks: Collection[int]) -> None:
        """Change which blocks stay on the device, between two steps."""
        self.stream.stay(blocks)
        if self._experts is not None:
            self._experts.stay_with(blocks)

    def gradients(self, block: int) -> dict[str, Tensor]:
        """What backward has left at the weights of a block that is present, by the layout's names."""
        weights = {
            name: module._parameters[leaf]
            for name, (module, leaf, is_parameter) in self._owners[block].items()
            if is_parameter
        }
        return {name: each.grad for name, each in weights.items() if each is not None and each.grad is not None}

    # --- inside ------------------------------------------------------------------------------------------------------

    def _split(self, block: int) -> None:
        """From now on this block's experts come in slices."""
        assert self._experts is not None
        names = self._experts.tier.layouts[self._experts.of(block)[0]].places
        owners = _owners(self.blocks[block], names)
        self._owners[block] |= owners
        paths = {name.partition(".packed.")[0] if ".packed." in name else name.rpartition(".")[0] for name in names}
        (path,) = paths
        experts = self.blocks[block].get_submodule(path)
        self.split[block] = SplitExperts(experts, lambda: self.slices(block, self.direction))

    def _none_of(self, block: int) -> dict[str, Tensor]:
        """Nothing for each tensor of a block's experts that come in slices: hollow ones look as if they were there."""
        if self._experts is None or block not in self.split:
            return {}
        places = self._experts.tier.layouts[self._experts.of(block)[0]].places.values()
        return {place.name: torch.empty(0, dtype=place.dtype, device=self.stream.device) for place in places}

    @contextlib.contextmanager
    def _as(self, mode: Mode) -> Iterator[None]:
        before, self.mode = self.mode, mode
        try:
            yield
        finally:
            self.mode = before

    def _called(self, index: int, *args: Any, **kwargs: Any) -> Any:
        """Stands in for the block's forward."""
        if self.mode == "run":
            with self.present(index, "up"):
                result = self.own[index](*args, **kwargs)
            self._tuples = isinstance(result, tuple)
            return result
        hidden, call = _split_call(args, kwargs)
        if self.mode == "give":
            last = index == len(self.blocks) - 1
            hidden = self._given if last and self._given is not None else hidden
        else:
            self._catch(index, hidden, call)
        return (hidden,) if self._tuples else hidden

    def _catch(self, index: int, hidden: Tensor, call: Call) -> None:
        if index == 0:
            self._caught = Caught(hidden=hidden)
        elif self._last is not None and not _is_same(hidden, self._last):
            raise ModelError(
                f"{type(self.model).__name__} changes what block {index - 1} gives before block {index} gets it, so "
                "its blocks cannot be streamed one by one",
                "Choose a model of an ordinary decoder family, or a plan without streaming.",
            )
        assert self._caught is not None
        self._caught.calls.append(call)
        self._last = hidden

    def head_present(self) -> contextlib.AbstractContextManager[None]:
        """Inside, the head is there, if it does not stay."""
        return contextlib.nullcontext() if self.head is None else self.head.present()

    def _bind(self, block: int, tensors: Mapping[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            module, leaf, is_parameter = self._owners[block][name]
            if is_parameter:
                # A plain tensor would do for computing, and be no parameter for whoever lists them.
                trains = tensor.requires_grad or block in self.trains
                module._parameters[leaf] = (
                    tensor if isinstance(tensor, nn.Parameter) else nn.Parameter(tensor, requires_grad=trains)
                )
            else:
                module._buffers[leaf] = tensor

    def check(self, forward: Callable[[], Any]) -> None:
        """Raise ModelError when a block's call depends on what the blocks before computed: then they cannot be taken
        apart. `forward` is a call on a few tokens."""
        plain = self.catch(forward)
        changed = self._with_other_hidden(forward)
        for index, (one, other) in enumerate(zip(plain.calls, changed.calls, strict=True)):
            if not _same_call(one, other):
                raise ModelError(
                    f"Block {index} of {type(self.model).__name__} is given more of the blocks before it than their "
                    "hidden state, so its blocks cannot be streamed one by one",
                    "Choose a model of an ordinary decoder family, or a plan without streaming.",
                )

    def _with_other_hidden(self, forward: Callable[[], Any]) -> Caught:
        first = self.blocks[0]
        usual = first.forward

        def doubled(*args: Any, **kwargs: Any) -> Any:
            hidden, call = _split_call(args, kwargs)
            return usual(hidden * 2, *call.args, **call.kwargs)

        first.forward = doubled
        try:
            return self.catch(forward)
        finally:
            first.forward = usual


def _split_call(args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Tensor, Call]:
    if args:
        return args[0], Call(args=tuple(args[1:]), kwargs=dict(kwargs))
    others = dict(kwargs)
    return others.pop("hidden_states"), Call(args=(), kwargs=others)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (one.data_ptr() == other.data_ptr() and one.shape == other.shape)


def _same_call(one: Call, other: Call) -> bool:
    first, _ = tree_flatten((one.args, one.kwargs))
    second, _ = tree_flatten((other.args, other.kwargs))
    pairs = zip(first, second, strict=True)
    return all(torch.equal(a, b) for a, b in pairs if isinstance(a, Tensor) and isinstance(b, Tensor))


def _owners(block: nn.Module, names: Mapping[str, Any]) -> dict[str, tuple[nn.Module, str, bool]]:
    """For each tensor of a layout the module that has it, its name there, and whether it is a parameter.

    Adapters stand between a linear and its name: what was `q_proj.weight` is `q_proj.base_layer.weight` now.
    """
    found = {}
    for name in names:
        path, _, leaf = name.rpartition(".")
        module: Any = block
        for part in path.split(".") if path else ():
            module = getattr(module, part)
            module = getattr(module, "base_layer", module)
        if leaf in module._parameters:
            found[name] = (module, leaf, True)
        elif leaf in module._buffers:
            found[name] = (module, leaf, False)
        else:
            raise ModelError(f"{type(block).__name__} has no tensor {name}", "Choose another model.")
    return found
