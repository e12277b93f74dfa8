"""What one block keeps for backward and needs while it runs, by walking its operations.

A tape is the list of a block's operations as PyTorch's autograd sees them; sizes are bytes per token of a micro-batch.
Walking it forward gives what is saved (a storage counts once, however many operations save it); walking it backward
gives, operation by operation, the saved storages, live gradients and temporaries, and which weights have their gradient
by then. The block's input is never counted: who keeps it depends on what happens around the block. Nothing here knows
what a model is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from operator import ge
from typing import Final, NamedTuple


class Value(NamedTuple):
    """A tensor on the tape: `storage` is shared by views, `size` its bytes per token, `grad` whether it needs one."""

    number: int
    storage: int
    size: float
    grad: bool


EIGHT_BITS: Final = 1.0 + 4 / 128
"""Bytes of a number kept in 8 bits: an fp32 scale is for 128."""

_SHARES_A_SCALE: Final = 128
PIECE: Final = 2**22
"""Numbers that go to 8 bits, or come back, at once: their fp32 copies are never more."""

PACKING: Final = 8
"""Bytes of a number on its way to 8 bits: an fp32 copy, and as much noise."""

RESTORING: Final = 4
"""Bytes of one on its way back, beside the tensor it goes to."""


@dataclass(frozen=True)
class Given:
    """What a linear keeps of its input: in `storage`, `width` numbers of `size` bytes per token, made from value
    `source`, itself or a copy."""

    source: int
    width: int
    size: float
    storage: int = -1


class Operation(NamedTuple):
    """One operation. `saves` are storages kept for its backward; the temporaries live only while it runs.

    `passes` is True when its inputs' gradients are its output's gradient itself (an addition, a view). `weights` are
    the numbers of the matrix it multiplies with, `trained` those of its parameters that get a gradient. `holds` are
    values that variables of the program keep alive until it is done. `given` is what a linear keeps of its input;
    `packs` numbers per token it puts into 8 bits, `restores` numbers that its backward takes out of them.
    """

    name: str
    inputs: tuple[Value, ...]
    output: Value
    saves: tuple[int, ...]
    forward_temporary: float
    backward_temporary: float
    passes: bool
    weights: int = 0
    unpacks: int = 0
    trained: int = 0
    holds: tuple[Value, ...] = ()
    given: Given | None = None
    packs: int = 0
    restores: int = 0


class Moment(NamedTuple):
    """What is alive while one operation runs.

    `per_token` bytes per token; `made` parameters whose gradient was complete before, `making` those of this operation;
    `weights` numbers of the matrix it uses, which a quantised base must unpack. `pieces`: numbers per token that go to
    8 bits or come from them, in fp32 copies of `piece_bytes` a number, a piece at a time.
    """

    per_token: float
    made: int = 0
    making: int = 0
    weights: int = 0
    pieces: int = 0
    piece_bytes: int = 0

    def alive(self, tokens: int) -> float:
        """Bytes of `tokens` tokens."""
        return self.per_token * tokens + self.piece_bytes * min(PIECE, self.pieces * tokens)

    @property
    def numbers(self) -> tuple[float, ...]:
        """What makes it high: a moment none of whose numbers is larger than another's can never be the peak."""
        made = self.made + self.making
        return self.per_token, made, self.making, self.weights, self.pieces * self.piece_bytes


def highest(moments: Iterable[Moment]) -> tuple[Moment, ...]:
    """Those moments that can be the peak, for some number of tokens and some size of a gradient."""
    listed = list(moments)
    ranked = sorted([(moment.numbers, -at) for at, moment in enumerate(listed)], reverse=True)
    fronts: list[tuple[float, ...]] = []
    found: list[int] = []
    for numbers, before in ranked:  # none that comes later here has no number below those of one that came
        for front in fronts:
            if all(map(ge, front, numbers)):
                break
        else:
            fronts.append(numbers)
            found.append(-before)
    return tuple([listed[at] for at in sorted(found)])


class Change(NamedTuple):
    """`size` bytes per token of buffer `number` are made, or freed where it is negative. Storages count from 0 up,
    gradients from `GRADIENT` down."""

    number: int
    size: float


GRADIENT: Final = -1
"""The buffer of the gradient of the block's output."""


class Step(NamedTuple):
    """An operation with what it makes and frees, in that order; `temporary` is there all the while."""

    operation: Operation
    changes: tuple[Change, ...]
    temporary: float

    @property
    def change(self) -> float:
        """Bytes per token more, or fewer, when it is done."""
        return sum([change.size for change in self.changes])

    def highest(self, alive: float) -> float:
        """Bytes per token at its worst moment, `alive` before it."""
        return alive + self.temporary + max(accumulate([change.size for change in self.changes], initial=0.0))


@dataclass
class Tape:
    """Records operations in forward order; `input` makes the value a block is given."""

    operations: list[Operation] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    _values: int = 0
    _start: int = -1
    _start_value: int = -1

    def input(self, size: float, *, grad: bool) -> Value:
        self._start = self._storage(0.0)
        value = self._value(self._start, size, grad=grad)
        self._start_value = value.number
        return value

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
        unpacks: int | None = None,
        forward_temporary: float = 0.0,
        backward_temporary: float = 0.0,
        passes: bool = False,
        view: bool = False,
        holds: Sequence[Value] = (),
        given: Given | None = None,
    ) -> Value:
        """Append an operation and return its output of `size` bytes per token.

        Nothing is saved unless an input needs a gradient or a parameter is `trained`. `saves_new` is a copy made for
        backward alone; a `view` shares its first input's storage. `given` says which input of a linear it saves, last.
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
                unpacks=weights if unpacks is None else unpacks,
                trained=trained,
                holds=tuple(holds),
                given=replace(given, storage=kept[-1]) if given and kept else None,
            )
        )
        return output

    def in_eight_bits(self) -> Tape:
        """The tape of the same block where inputs of linears wait in 8 bits: those wide enough for a scale that no
        other operation has kept before. Copies of one input in one format are one. Every backward that needs one
        restores it for itself."""
        small = Tape([], list(self.sizes), self._values, self._start, self._start_value)
        stay, operations = set[int](), list[Operation]()
        packed: dict[tuple[int, float], int] = {}
        for operation in self.operations:
            given = operation.given
            if given is None or given.width < _SHARES_A_SCALE or given.storage in stay:
                stay.update(operation.saves if given is None else ())
                operations.append(operation)
                continue
            key = given.source, given.size / given.width
            known = key in packed
            if not known:
                packed[key] = small._storage(EIGHT_BITS * given.width)
            operations.append(
                operation._replace(
                    saves=(*operation.saves[:-1], packed[key]),
                    backward_temporary=operation.backward_temporary + given.size,
                    packs=0 if known else given.width,
                    restores=given.width,
                )
            )
        small.operations = operations
        return small

    @property
    def saved(self) -> float:
        """Bytes per token kept from forward to backward, each storage once."""
        return self.total({storage for operation in self.operations for storage in operation.saves})

    @property
    def end(self) -> int:
        """The storage of the block's output."""
        return self.operations[-1].output.storage

    def forward(self, *, keeps: bool = True) -> Iterator[Moment]:
        """Moments of forward: outputs still to be used, and with `keeps` what backward will need."""
        alive = 0.0
        for operation, made, freed in self._lifetimes(keeps=keeps):
            alive += self.total(made)
            packs = operation.packs if keeps else 0
            temporary = operation.forward_temporary
            yield Moment(alive + temporary, weights=operation.unpacks, pieces=packs, piece_bytes=PACKING)
            alive -= self.total(freed)

    def backward(self) -> Iterator[Moment]:
        """Moments of backward, from all saved to none, beginning with the gradient of the block's output."""
        alive, made = self.saved + self.operations[-1].output.size, 0
        for step in self.backward_steps()[0]:
            operation = step.operation
            yield Moment(step.highest(alive), made, operation.trained, operation.unpacks, operation.restores, RESTORING)
            alive += step.change
            made += operation.trained

    def forward_steps(self, *, keeps: bool = True) -> Iterator[Step]:
        """What the operations of forward make and free. At the end the output is there, and with `keeps` what is
        saved; the input is never theirs."""
        for operation, made, freed in self._lifetimes(keeps=keeps):
            changes = [Change(storage, self.sizes[storage]) for storage in made]
            changes += [Change(storage, -self.sizes[storage]) for storage in freed]
            yield Step(operation, tuple(changes), operation.forward_temporary)

    def _lifetimes(self, *, keeps: bool) -> Iterator[tuple[Operation, list[int], list[int]]]:
        """Every operation of forward, the storages it makes, and those that nothing needs once it is done."""
        last_use = {
            value.storage: index
            for index, operation in enumerate(self.operations)
            for value in (*operation.inputs, *operation.holds)
        }
        last_use[self.end] = len(self.operations)
        used_up: dict[int, list[int]] = {}
        for storage, index in last_use.items():
            used_up.setdefault(index, []).append(storage)
        saved, passing = {self._start}, set[int]()
        for index, operation in enumerate(self.operations):
            made = []
            for storage in (operation.output.storage, *operation.saves) if keeps else (operation.output.storage,):
                if storage not in saved and storage not in passing:
                    made.append(storage)
                    passing.add(storage)
            if keeps:
                saved.update(operation.saves)
                passing.difference_update(operation.saves)
            ending = {*used_up.get(index, ()), *[storage for storage in made if storage not in last_use]}
            freed = sorted(ending & passing)
            passing.difference_update(freed)
            yield operation, made, freed

    def backward_steps(self, *, shared: bool = False) -> tuple[list[Step], int]:
        """What the operations of backward make and free, and which gradient is left at the end, the input's (0: none).

        What is saved and the output's gradient, the buffer `GRADIENT`, are there at the start. `shared`: others hold
        that gradient too, so that nothing is added to it in place and it is not freed here.
        """
        remaining: dict[int, int] = {}
        for operation in self.operations:
            for storage in set(operation.saves) - {self._start}:
                remaining[storage] = remaining.get(storage, 0) + 1
        walk, steps = _Gradients(self.operations[-1].output, shared=shared), []
        for operation in reversed(self.operations):
            if not operation.output.grad:
                continue
            freed = []
            for storage in sorted(set(operation.saves) - {self._start}):
                remaining[storage] -= 1
                if not remaining[storage]:
                    freed.append(Change(storage, -self.sizes[storage]))
            made = walk.pass_back(operation)
            in_place = operation.backward_temporary < 0  # gradients are written over what was saved
            changes = (*freed, *made) if in_place else (*made, *freed)
            steps.append(Step(operation, changes, max(0.0, operation.backward_temporary)))
        return steps, walk.of(self._start_value)

    def total(self, storages: Iterable[int]) -> float:
        """Bytes per token of these storages."""
        return sum([self.sizes[storage] for storage in storages])

    def _storage(self, size: float) -> int:
        self.sizes.append(size)
        return len(self.sizes) - 1

    def _value(self, storage: int, size: float, *, grad: bool) -> Value:
        self._values += 1
        return Value(self._values, storage, size, grad)


class _Gradients:
    """Gradient buffers alive during the walk back. A buffer handed on unchanged is one buffer with two owners."""

    def __init__(self, output: Value, *, shared: bool) -> None:
        self._sizes: dict[int, float] = {GRADIENT: output.size}
        self._owner: dict[int, int] = {output.number: GRADIENT}
        self._next, self._shared = GRADIENT, shared

    def of(self, value: int) -> int:
        """The buffer of a value's gradient, 0 when it has none."""
        return self._owner.get(value, 0)

    def pass_back(self, operation: Operation) -> list[Change]:
        """Run one operation's backward."""
        incoming = self._owner.pop(operation.output.number, None)
        if incoming is None:
            return []
        changes: list[Change] = []
        for value in dict.fromkeys(operation.inputs):
            if not value.grad:
                continue
            buffer = incoming if operation.passes else self._new(value.size, changes)
            waiting = self._owner.get(value.number)
            if waiting is None:
                self._owner[value.number] = buffer
                continue
            # A second consumer: their sum is made in place of the first, unless others hold that.
            if waiting == GRADIENT and self._shared:
                self._owner[value.number] = self._new(value.size, changes)
            if buffer != incoming:
                self._free(buffer, changes)
        self._free(incoming, changes)
        return changes

    def _new(self, size: float, changes: list[Change]) -> int:
        self._next -= 1
        self._sizes[self._next] = size
        changes.append(Change(self._next, size))
        return self._next

    def _free(self, buffer: int, changes: list[Change]) -> None:
        """Free a buffer that nobody owns."""
        if buffer not in self._owner.values() and not (self._shared and buffer == GRADIENT):
            changes.append(Change(buffer, -self._sizes[buffer]))
