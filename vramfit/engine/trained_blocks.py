"""Weights that train although they only visit the device: where their numbers live, and how one of them is stepped.

Beside the weights a tier has, for each of them, its optimizer's states, an fp32 copy where the weight has 16 bits, and
a place for its gradient. The processor steps one weight after another where it lies, while the next one is read; where
a tier lends copies only, memory holds the numbers of one weight and those of the next. An optimizer that looks at each
number alone steps a weight in stretches: its gradient is clipped in the processor's cache, on the way to the step.

The optimizer knows each weight by a stand-in of its shape, which is given the weight's numbers for its step only.
Weights outside the blocks stay on the device; their states are on the tier like all others.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.engine.blocks import Layout
from vramfit.engine.chunked import ChunkedOptimizer
from vramfit.engine.later import Later
from vramfit.engine.optimizer_state import MASTER
from vramfit.engine.step_in_backward import step_one
from vramfit.engine.tiers import Shelf
from vramfit.engine.visiting import VisitedBlocks
from vramfit.engine.waits import Spans
from vramfit.errors import CheckpointError

MakeShelf = Callable[[Sequence[Layout], str], Shelf]
"""(layouts, what for) -> a tier of the run's own."""


@dataclass(frozen=True, kw_only=True)
class Where:
    """A trained weight: its name in the model, its block (None: outside) and its name there."""

    name: str
    block: int | None
    local: str


Clip = Callable[[Where, Tensor, Tensor], Tensor]
"""(a weight, a stretch of its gradient, fp32 room of that shape) -> the stretch in fp32, clipped. It may be in the
room; the gradient stays as it is."""

STRETCH: Final = 2**19
"""Numbers of a weight stepped at once: 8 MB with gradient and states, and long enough for the calls not to count. A
multiple of what kernels of the processor work on at once, so that the numbers do not depend on it."""


@dataclass(kw_only=True)
class _Numbers:
    """All of one weight for its step, on the CPU."""

    weight: Tensor
    states: dict[str, Tensor]
    gradient: Tensor


class TrainedBlocks:
    """The trained weights of `visits.model`, whose blocks that train are in `weights`, a tier that can be written.

    `optimizer` steps `stand_ins` (by the weights' names in the model), which are fp32 and on the CPU.
    """

    def __init__(
        self,
        visits: VisitedBlocks,
        weights: Shelf,
        optimizer: torch.optim.Optimizer,
        stand_ins: Mapping[str, nn.Parameter],
        make_shelf: MakeShelf,
    ) -> None:
        self.visits, self.optimizer = visits, optimizer
        self._weights, self._stand_ins = weights, dict(stand_ins)
        self._outside = dict(_outside(visits))
        self.places = list(_places(visits, self._stand_ins))
        self._kinds = _state_kinds(optimizer)
        self._states = make_shelf(self._state_layouts(), "states")
        self._gradients = make_shelf(self._gradient_layouts(), "gradients")
        self._begun: set[str] = set()
        self._sent: set[str] = set()
        self._room = torch.empty(min(STRETCH, max((each.numel() for each in self._stand_ins.values()), default=0)))
        self.in_memory = all(shelf.in_memory for shelf in self._shelves)
        """Whether nothing of a weight has to be read or written."""
        self.at_tier = Spans()
        """When `send` and `step` read and wrote what is not in memory: who waits for them waits for the tier then."""
        self.waited_seconds = 0.0
        """What steps waited for the tier since the run began."""

    @property
    def written_bytes(self) -> int:
        return sum(shelf.written_bytes for shelf in self._shelves)

    @property
    def _shelves(self) -> tuple[Shelf, ...]:
        return self._weights, self._states, self._gradients

    def outside(self, where: Where) -> nn.Parameter:
        return self._outside[where.name]

    # --- gradients ---------------------------------------------------------------------------------------------------

    def forget(self) -> None:
        """What was sent is not to be stepped."""
        self._sent.clear()
        for parameter in self._outside.values():
            parameter.grad = None

    def send(self, where: Where, gradient: Tensor) -> None:
        """Keep a weight's gradient on the tier until `step_sent`."""
        assert where.block is not None
        with self._at_tier():
            self._gradients.put(where.block, where.local, gradient)
        self._sent.add(where.name)

    # --- steps -------------------------------------------------------------------------------------------------------

    def step_sent(self, clip: Clip) -> None:
        """Step every weight whose gradient was sent, and those outside that have one."""
        waiting = [where for where in self.places if where.name in self._sent or self._has_gradient(where)]
        with _Ahead(self._take, waiting, at_once=self.in_memory) as taken, _Behind(self._put) as put:
            for where, numbers in taken:
                put(where, self._stepped(where, numbers, clip))
        if not self.in_memory:
            self.waited_seconds += taken.waited_seconds + put.waited_seconds
        self.forget()

    def step(self, where: Where, gradient: Tensor, clip: Clip) -> None:
        """Step one weight now, with a gradient on the CPU."""
        with self._at_tier():
            numbers = self._take(where, gradient)
        numbers = self._stepped(where, numbers, clip)
        with self._at_tier():
            self._put(where, numbers)

    def _at_tier(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.in_memory else self.at_tier.during()

    def renew(self) -> None:
        """What is on the device of the blocks that train is of before the step."""
        for block in sorted({where.block for where in self.places if where.block is not None}):
            self.visits.stream.forget(block)

    def _has_gradient(self, where: Where) -> bool:
        return where.block is None and self._outside[where.name].grad is not None

    @torch.no_grad()
    def _stepped(self, where: Where, numbers: _Numbers, clip: Clip) -> _Numbers:
        group, states = self._kinds[self._stand_ins[where.name]].group, numbers.states
        master = states.pop(MASTER, None)
        if master is None and numbers.weight.dtype != torch.float32:
            master = numbers.weight.float()
        values = numbers.weight if master is None else master
        if states and values.is_contiguous() and _goes_by_number(self.optimizer, group):
            self._step_in_stretches(where, values, numbers.gradient, states, clip)
        else:
            room = torch.empty(values.shape, dtype=torch.float32)
            states = self._step_of(where, values, clip(where, numbers.gradient, room), states)
        if master is not None:
            numbers.weight.copy_(master)
            states[MASTER] = master
        return _Numbers(weight=numbers.weight, states=states, gradient=numbers.gradient)

    def _step_in_stretches(
        self, where: Where, values: Tensor, gradient: Tensor, states: MutableMapping[str, Tensor], clip: Clip
    ) -> None:
        """Step `values` and change `states`, in place."""
        flat, slopes = values.view(-1), gradient.reshape(-1)
        along = {key: value.view(-1) for key, value in states.items() if value.shape == values.shape}
        once = {key: value for key, value in states.items() if key not in along}
        for start in range(0, flat.numel(), STRETCH):
            part = slice(start, min(start + STRETCH, flat.numel()))
            clipped = clip(where, slopes[part], self._room[: part.stop - part.start])
            own = {key: value[part] for key, value in along.items()}
            # How many steps a weight has had counts once, however many stretches it has.
            counted = {key: value.clone() for key, value in once.items()}
            after = self._step_of(where, flat[part], clipped, {**own, **counted})
            states.update({key: after[key] for key in once})

    def _step_of(
        self, where: Where, values: Tensor, gradient: Tensor, states: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Step `values` by the optimizer of this weight; its states afterwards."""
        stand_in, optimizer = self._stand_ins[where.name], self.optimizer
        empty, stand_in.data = stand_in.data, values
        stand_in.grad = gradient
        try:
            if states:
                optimizer.state[stand_in] = dict(states)
            step_one(optimizer, stand_in, self._kinds[stand_in].group)
            return dict(optimizer.state.pop(stand_in, {}))
        finally:
            stand_in.data, stand_in.grad = empty, None

    def _take(self, where: Where, gradient: Tensor | None = None) -> _Numbers:
        states = self._taken_states(where) if where.name in self._begun else {}
        if where.block is None:
            parameter = self._outside[where.name]
            sent = parameter.grad if gradient is None else gradient
            assert sent is not None
            return _Numbers(weight=parameter.detach().cpu(), states=states, gradient=sent.cpu())
        if gradient is None:
            gradient = self._gradients.lend(where.block, where.local, changes=False)
        weight = self._weights.lend(where.block, where.local, changes=True)
        return _Numbers(weight=weight, states=states, gradient=gradient)

    def _put(self, where: Where, numbers: _Numbers) -> None:
        if where.block is None:
            parameter = self._outside[where.name]
            if parameter.data_ptr() != numbers.weight.data_ptr():
                with torch.no_grad():
                    parameter.copy_(numbers.weight)
            parameter.grad = None
        else:
            self._weights.put(where.block, where.local, numbers.weight)
            if where.name in self._sent:
                self._gradients.done(where.block, where.local)
        self._put_states(where, numbers.states)

    def _taken_states(self, where: Where) -> dict[str, Tensor]:
        return {key: self._states.lend(*self._at(where, key), changes=True) for key in self._keys(where)}

    def _put_states(self, where: Where, states: Mapping[str, Tensor]) -> None:
        for key, value in states.items():
            self._states.put(*self._at(where, key), value)
        self._begun.add(where.name)

    # --- where it lies -----------------------------------------------------------------------------------------------

    def _at(self, where: Where, key: str) -> tuple[int, str]:
        """The place of a state; those of weights outside lie behind the last block's."""
        return len(self.visits.blocks) if where.block is None else where.block, f"{where.local}:{key}"

    def _keys(self, where: Where) -> list[str]:
        own = list(self._kinds[self._stand_ins[where.name]].states)
        return [*own, MASTER] if self._has_master(where) else own

    def _has_master(self, where: Where) -> bool:
        return self._dtype(where) != torch.float32

    def _dtype(self, where: Where) -> torch.dtype:
        if where.block is None:
            return self._outside[where.name].dtype
        return self._weights.layouts[where.block].places[where.local].dtype

    def _state_layouts(self) -> list[Layout]:
        tensors: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{} for _ in range(len(self.visits.blocks) + 1)]
        for where in self.places:
            stand_in = self._stand_ins[where.name]
            kinds = dict(self._kinds[stand_in].states)
            if self._has_master(where):
                kinds[MASTER] = (tuple(stand_in.shape), torch.float32)
            for key, kind in kinds.items():
                block, name = self._at(where, key)
                tensors[block][name] = kind
        return [Layout(each) for each in tensors]

    def _gradient_layouts(self) -> list[Layout]:
        tensors: list[dict[str, tuple[tuple[int, ...], torch.dtype]]] = [{} for _ in self.visits.blocks]
        for where in self.places:
            if where.block is not None:
                shape = tuple(self._stand_ins[where.name].shape)
                tensors[where.block][where.local] = shape, self._dtype(where)
        return [Layout(each) for each in tensors]

    # --- what a checkpoint keeps -------------------------------------------------------------------------------------

    def stored_weights(self) -> dict[str, Later]:
        """The blocks' weights by their names in the model."""
        return {
            where.name: _on_shelf(self._weights, where.block, where.local)
            for where in self.places
            if where.block is not None
        }

    def stored_states(self) -> dict[str, Later]:
        """States by "weight's name.state's name"; as far as there are any."""
        return {
            f"{where.name}.{key}": _on_shelf(self._states, *self._at(where, key))
            for where in self.places
            for key in (self._keys(where) if where.name in self._begun else ())
        }

    def load(self, weights: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        """Put back what `stored_weights` and `stored_states` gave, one tensor at a time. Raises CheckpointError."""
        self.forget()
        self._begun.clear()
        for where in self.places:
            self._load_weight(where, weights)
            self._load_states(where, weights, states)
        self.renew()

    def _load_weight(self, where: Where, weights: Mapping[str, Tensor]) -> None:
        if where.block is not None:
            weight = _of_shape(weights, where.name, self._stand_ins[where.name])
            self._weights.put(where.block, where.local, weight)
        elif where.name not in weights:
            raise _lacks(where.name)

    def _load_states(self, where: Where, weights: Mapping[str, Tensor], states: Mapping[str, Tensor]) -> None:
        """A table's states are as large as the table: never more than one of them is in memory."""
        stored = {key: f"{where.name}.{key}" for key in self._keys(where)}
        there = [key for key, name in stored.items() if name in states]
        if not there:
            return
        for key, name in stored.items():
            if key in there:
                self._states.put(*self._at(where, key), states[name])
            elif key == MASTER:  # of a run whose weights were trained themselves
                self._states.put(*self._at(where, key), weights[where.name].float())
            else:
                raise _lacks(name)
        self._begun.add(where.name)

    def all_finite(self) -> bool:
        """Whether the blocks' weights are numbers. One pass over them."""
        return all(_is_finite(each) for each in self.stored_weights().values())


def _is_finite(later: Later) -> bool:
    with later.lent() as tensor:
        return bool(torch.linalg.vector_norm(tensor, ord=float("inf"), dtype=torch.float32).isfinite())


def _on_shelf(shelf: Shelf, block: int, name: str) -> Later:
    place = shelf.layouts[block].places[name]
    return Later(
        shape=place.shape,
        dtype=place.dtype,
        read=lambda: shelf.take(block, name),
        lend=lambda: shelf.lend(block, name, changes=False),
        done=lambda: shelf.done(block, name),
    )


class _Ahead:
    """Items with what `take` gives for each, of which the next is taken while one is worked on."""

    def __init__(self, take: Callable[[Where], _Numbers], items: Sequence[Where], *, at_once: bool) -> None:
        self._take, self._items, self._at_once = take, items, at_once
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")
        self.waited_seconds = 0.0

    def __enter__(self) -> _Ahead:
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)

    def __iter__(self) -> Iterator[tuple[Where, _Numbers]]:
        if self._at_once:
            yield from ((item, self._take(item)) for item in self._items)
            return
        coming: Future[_Numbers] | None = None
        for item, following in zip(self._items, [*self._items[1:], None], strict=True):
            began = time.perf_counter()
            numbers = self._take(item) if coming is None else coming.result()
            self.waited_seconds += time.perf_counter() - began
            coming = None if following is None else self._thread.submit(self._take, following)
            yield item, numbers


class _Behind:
    """Puts results back while the next is worked on; never more than one waits."""

    def __init__(self, put: Callable[[Where, _Numbers], None]) -> None:
        self._put = put
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="writes")
        self._going: Future[None] | None = None
        self.waited_seconds = 0.0

    def __enter__(self) -> _Behind:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self._wait()
        finally:
            self._thread.shutdown(wait=True, cancel_futures=True)

    def __call__(self, where: Where, numbers: _Numbers) -> None:
        self._wait()
        self._going = self._thread.submit(self._put, where, numbers)

    def _wait(self) -> None:
        going, self._going = self._going, None
        if going is not None:
            began = time.perf_counter()
            going.result()
            self.waited_seconds += time.perf_counter() - began


def _goes_by_number(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a weight may be stepped in stretches: by torch's one kernel for AdamW, and by rules of ours."""
    if isinstance(optimizer, ChunkedOptimizer):
        return optimizer.goes_by_number(group)
    return isinstance(optimizer, torch.optim.AdamW) and bool(group.get("fused"))


def _outside(visits: VisitedBlocks) -> Iterator[tuple[str, nn.Parameter]]:
    inside = {id(each) for block in visits.blocks for each in block.parameters()}
    for name, parameter in visits.model.named_parameters():
        if parameter.requires_grad and id(parameter) not in inside:
            yield name, parameter


def _places(visits: VisitedBlocks, trained: Iterable[str]) -> Iterator[Where]:
    """Where each trained weight is, in the model's order: in that order norms are summed."""
    inside = {
        id(each): (at, local) for at, block in enumerate(visits.blocks) for local, each in block.named_parameters()
    }
    wanted = set(trained)
    for name, parameter in visits.model.named_parameters():
        if name in wanted:
            block, local = inside.get(id(parameter), (None, name))
            yield Where(name=name, block=block, local=local)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """How a weight is stepped: its group, and name, shape and format of its states."""

    group: dict[str, Any]
    states: Mapping[str, tuple[tuple[int, ...], torch.dtype]]


def _state_kinds(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, _Kind]:
    """States are found by a step without numbers, once for each shape in a group."""
    found: dict[nn.Parameter, _Kind] = {}
    for group in optimizer.param_groups:
        by_shape: dict[torch.Size, _Kind] = {}
        for stand_in in group["params"]:
            if stand_in.shape not in by_shape:
                by_shape[stand_in.shape] = _Kind(group=group, states=state_kinds(optimizer, stand_in.shape, group))
            found[stand_in] = by_shape[stand_in.shape]
    return found


def state_kinds(
    optimizer: torch.optim.Optimizer, shape: torch.Size, group: dict[str, Any]
) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and format of the states that `optimizer`, ours or torch's AdamW, keeps for an fp32 weight of `shape`.

    Zeros of that shape, their gradient and their states would be 16 bytes a number: for a table of tokens more than all
    else in memory. Ours steps a weight of the meta device. Torch's fused kernel does not, but its states have the
    weight's shape or are single numbers, which a weight of one number shows.
    """
    if isinstance(optimizer, ChunkedOptimizer):
        usual, optimizer.chunk_numbers = optimizer.chunk_numbers, shape.numel()  # nothing to do in pieces
        try:
            found = _first_states(optimizer, shape, group, "meta")
        finally:
            optimizer.chunk_numbers = usual
        return {key: (tuple(each.shape), each.dtype) for key, each in found.items()}
    assert isinstance(optimizer, torch.optim.AdamW)
    one = torch.Size([1] * max(1, len(shape)))
    found = _first_states(optimizer, one, group, "cpu")
    return {key: (tuple(shape if each.shape == one else each.shape), each.dtype) for key, each in found.items()}


def _first_states(
    optimizer: torch.optim.Optimizer, shape: torch.Size, group: dict[str, Any], device: str
) -> dict[str, Tensor]:
    """After one step on zeros that nobody keeps."""
    probe = nn.Parameter(torch.zeros(shape, device=device))
    probe.grad = torch.zeros(shape, device=device)
    step_one(optimizer, probe, group)
    return dict(optimizer.state.pop(probe, {}))


def _lacks(name: str) -> CheckpointError:
    return CheckpointError(f"The checkpoint has no {name}", "Resume with the settings the run was started with.")


def _of_shape(tensors: Mapping[str, Tensor], name: str, like: Tensor) -> Tensor:
    if name not in tensors:
        raise _lacks(name)
    found = tensors[name]
    if found.shape != like.shape:
        raise CheckpointError(
            f"The checkpoint's {name} has shape {list(found.shape)}, the model's {list(like.shape)}",
            "Resume with the settings the run was started with.",
        )
    return found
