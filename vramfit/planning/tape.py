"""What one block keeps for backward and needs while it runs, by walking its operations.

A tape is the list of a block's operations as PyTorch's autograd sees them; sizes are bytes per token of a micro-batch.
Walking it forward gives what is saved (a storage counts once, however many operations save it); walking it backward
gives, operation by operation, the saved storages, live gradients and temporaries, and which weights have their gradient
by then. The block's input is never counted: who keeps it depends on what happens around the block. Nothing here knows
what a model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Value:
    """A tensor on the tape: `storage` is shared by views, `size` its bytes per token, `grad` whether it needs one."""

    number: int
    storage: int
    size: float
    grad: bool


@dataclass(frozen=True)
class Operation:
    """One operation. `saves` are storages kept for its backward; the temporaries live only while it runs.

    `passes` is True when its inputs' gradients are its output's gradient itself (an addition, a view). `weights` are
    the numbers of the matrix it multiplies with, `trained` those of its parameters that get a gradient.
    """

    name: str
    inputs: tuple[Value, ...]
    output: Value
    saves: tuple[int, ...]
    forward_temporary: float
    backward_temporary: float
    passes: bool
    weights: int = 0
    trained: int = 0


@dataclass(frozen=True)
class Moment:
    """What is alive while one operation runs.

    `per_token` bytes per token; `made` parameters whose gradient was complete before, `making` those of this operation;
    `weights` numbers of the matrix it uses, which a quantised base must unpack.
    """

    per_token: float
    made: int = 0
    making: int = 0
    weights: int = 0

    def covers(self, other: Moment) -> bool:
        """Whether no number of `other` is larger, so that it can never be the peak."""
        return (
            self.per_token >= other.per_token
            and self.made + self.making >= other.made + other.making
            and self.making >= other.making
            and self.weights >= other.weights
        )


def highest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Those moments that can be the peak, for some number of tokens and some size of a gradient."""
    found: list[Moment] = []
    for moment in moments:
        if not any(other.covers(moment) for other in found):
            found = [other for other in found if not moment.covers(other)] + [moment]
    return tuple(found)


@dataclass
class Tape:
    """Records operations in forward order; `input` makes the value a block is given."""

    operations: list[Operation] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    _values: int = 0
    _start: int = -1

    def input(self, size: float, *, grad: bool) -> Value:
        self._start = self._storage(0.0)
        return self._value(self._start, size, grad=grad)

    def operation(
        self,
        name: str,
        inputs: Sequence[Value],
        size: float,
        *,
        saves: Iterable[Value] = (),
        saves_output: bool = False,
        saves_new: float = 0.0,
        trained: int = 0,
        weights: int = 0,
        forward_temporary: float = 0.0,
        backward_temporary: float = 0.0,
        passes: bool = False,
        view: bool = False,
    ) -> Value:
        """Append an operation and return its output of `size` bytes per token.

        Nothing is saved unless an input needs a gradient or a parameter is `trained`. `saves_new` is a copy made for
        backward alone; a `view` shares its first input's storage.
        """
        grad = trained > 0 or any(value.grad for value in inputs)
        storage = inputs[0].storage if view else self._storage(size)
        output = self._value(storage, size, grad=grad)
        kept: list[int] = []
        if grad:
            kept = [value.storage for value in saves]
            kept += [storage] if saves_output else []
            kept += [self._storage(saves_new)] if saves_new else []
        self.operations.append(
            Operation(
                name=name,
                inputs=tuple(inputs),
                output=output,
                saves=tuple(kept),
                forward_temporary=forward_temporary,
                backward_temporary=backward_temporary,
                passes=passes or view,
                weights=weights,
                trained=trained,
            )
        )
        return output

    @property
    def saved(self) -> float:
        """Bytes per token kept from forward to backward, each storage once."""
        return self._total({storage for operation in self.operations for storage in operation.saves})

    def forward(self, *, keeps: bool = True) -> Iterator[Moment]:
        """Moments of forward: outputs still to be used, and with `keeps` what backward will need."""
        last_use = {
            value.storage: index for index, operation in enumerate(self.operations) for value in operation.inputs
        }
        last_use[self.operations[-1].output.storage] = len(self.operations)
        saved: set[int] = set()
        alive: set[int] = set()
        for index, operation in enumerate(self.operations):
            saved |= set(operation.saves) if keeps else set()
            alive.add(operation.output.storage)
            yield Moment(self._total(alive | saved) + operation.forward_temporary, weights=operation.weights)
            alive = {storage for storage in alive if last_use.get(storage, -1) > index}

    def backward(self) -> Iterator[Moment]:
        """Moments of backward, from all saved to none, beginning with the gradient of the block's output."""
        remaining: dict[int, int] = {}
        for operation in self.operations:
            for storage in set(operation.saves):
                remaining[storage] = remaining.get(storage, 0) + 1
        walk = _Gradients()
        walk.give(self.operations[-1].output, walk.new(self.operations[-1].output.size))
        made = 0
        for operation in reversed(self.operations):
            if not operation.output.grad:
                continue
            saved = self._total(remaining)
            alive = walk.pass_back(operation) + operation.backward_temporary
            yield Moment(saved + alive, made, operation.trained, operation.weights)
            made += operation.trained
            for storage in set(operation.saves):
                remaining[storage] -= 1
                if not remaining[storage]:
                    del remaining[storage]

    def _total(self, storages: Iterable[int]) -> float:
        return sum(self.sizes[storage] for storage in storages)

    def _storage(self, size: float) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _value(self, storage: int, size: float, *, grad: bool) -> Value:
        self._values += 1
        return Value(self._values, storage, size, grad)


class _Gradients:
    """Gradient buffers alive during the walk back. A buffer handed on unchanged is one buffer with two owners."""

    def __init__(self) -> None:
        self._sizes: dict[int, float] = {}
        self._owner: dict[int, int] = {}
        self._next = 0

    def new(self, size: float) -> int:
        self._next += 1
        self._sizes[self._next] = size
        return self._next

    def give(self, value: Value, buffer: int) -> None:
        self._owner[value.number] = buffer

    def pass_back(self, operation: Operation) -> float:
        """Run one operation's backward; the bytes alive at its worst moment."""
        incoming = self._owner.pop(operation.output.number, None)
        if incoming is None:
            return self._alive()
        peak = self._alive() + self._sizes[incoming]
        for value in dict.fromkeys(operation.inputs):
            if not value.grad:
                continue
            buffer = incoming if operation.passes else self.new(value.size)
            if value.number in self._owner:  # a second consumer: their sum is made beside both
                peak = max(peak, self._alive(buffer, incoming))
                continue
            self.give(value, buffer)
        return max(peak, self._alive(incoming))

    def _alive(self, *more: int) -> float:
        buffers = {*self._owner.values(), *more}
        return sum(self._sizes[buffer] for buffer in buffers)
