"""Watches memory between steps, and lets blocks hold less of their activations, or more again.

A block is on one of four notches: it keeps its activations, keeps them in 8 bits, recomputes them from its input, or
does that with the input in RAM. Where blocks stream, they are recomputed anyway, and there are two notches: a block
stays on the device, or it visits. Above the high watermark one block goes one notch further after each step, those at
the lowest notch first and among them the first blocks, whose activations are held longest. Below the low watermark one
goes back. Nothing changes inside a step: compiled graphs and the step's replay rely on that.

What is compared with the watermarks is the highest allocated memory of the step, with what the run may have: its
budget, or less where other programs have taken the rest. A plan that was expected to need more than the high watermark
is trusted so far: it acts only above what was expected. Going back is decided on what the longest micro-batch would
need, and a notch that had to be taken again after it was given up waits twice as long the next time.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final, Literal, TypeAlias, get_args

import torch

from vramfit.engine.accelerators import backend_of, empty_cache
from vramfit.engine.activations import MODES, Mode
from vramfit.units import format_bytes

HIGH, LOW = 0.80, 0.70
TRUSTED: Final = 0.97
"""Of what the run may have: above it even an expected peak is too near the end."""
UNUSED_SHARE: Final = 0.15
"""Reserved beyond allocated, at the peaks of a step, as a share of what the run may have: more is fragmentation."""
CALM_STEPS: Final = 8
MOST_CALM_STEPS: Final = 1024
STEPS_REMEMBERED: Final = 5

Stay = Literal["stay", "visit"]
"""Whether a block's weights stay on the device or visit it."""

Notch: TypeAlias = Mode | Stay
NOTCHES: Final[tuple[Notch, ...]] = (*MODES, *get_args(Stay))

_DOES: Final[dict[Notch, str]] = {
    "keep": "keeps its activations",
    "compress": "keeps its activations in 8 bits",
    "recompute": "recomputes its activations",
    "offload": "recomputes its activations and keeps its input in RAM",
    "stay": "stays on the device",
    "visit": "visits the device",
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Memory around one step, in bytes. `allocated` and `reserved` are the step's highest (reserved 0: no allocator
    counts it), `at_rest` is allocated between steps, `reach` all that the run could have now: what it holds and what is
    free."""

    allocated: int
    reserved: int
    at_rest: int
    reach: int


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """What a step was: its number, its seconds, its tokens with padding, and the tokens of the largest part of it that
    went through the model at once, whose activations are what lies there together."""

    step: int
    seconds: float
    tokens: int
    largest_tokens: int


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something the governor did or found, for the page: one sentence."""

    step: int
    message: str
    level: Literal["info", "warning"] = "info"


@dataclass(kw_only=True)
class _Move:
    """A block's last move, while what it did is being measured."""

    step: int
    block: int
    before: Notch
    after: Notch
    why: str
    activations: int  # bytes above rest, before
    largest_tokens: int
    token_seconds: float
    now_activations: int = -1
    now_tokens: int = 0


@dataclass(kw_only=True)
class Governor:
    """Decides at step boundaries for one run.

    `modes` is the notch of each block; those before `first` are left alone: nothing of them trains, so they have
    nothing to hold. `allowed` are the notches that may be used (8 bits are inexact, RAM is of use only beside a card),
    `least` how far back each may go. `apply` makes a list of modes true, `empty_cache` gives cached
    memory back. `budget_bytes` is what the run may use, `expected_bytes` the peak that was planned (0: none was) and
    `most_tokens` the tokens of the largest micro-batch to come (0: the largest seen).
    """

    modes: list[Notch]
    apply: Callable[[Sequence[Any]], object]
    empty_cache: Callable[[], None]
    budget_bytes: int
    expected_bytes: int = 0
    most_tokens: int = 0
    allowed: tuple[Notch, ...] = ("keep", "recompute")
    least: Sequence[Notch] = ()
    first: int = 0
    high: float = HIGH
    low: float = LOW
    _calm: int = 0
    _patience: dict[str, int] = field(default_factory=dict)
    _given_up: set[str] = field(default_factory=set)
    _needed: set[Notch] = field(default_factory=set)  # taken when memory ran out: not given up again in this run
    _freed: dict[str, int] = field(default_factory=dict)
    _moves: list[_Move] = field(default_factory=list)
    _seconds: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_REMEMBERED))
    _ended: bool = False
    _emptied_at: int = 0
    _empty_every: int = CALM_STEPS

    def after_step(self, reading: Reading, cost: StepCost) -> list[Action]:
        """Measure what the last move did, and decide on the next. Call it once a step, when the step is over."""
        self.most_tokens = max(self.most_tokens, cost.largest_tokens)
        self._measure(reading, cost)
        limit = min(self.budget_bytes, reading.reach) if reading.reach else self.budget_bytes
        high = min(max(self.high * limit, self.expected_bytes), TRUSTED * limit)
        moved = [*self._close_gaps(reading, limit, cost.step)]
        if reading.allocated > high:
            self._calm = 0
            moved += self._further(reading, cost, limit)
        elif self._at_longest(reading, cost) < self.low * limit:
            self._calm += 1
            self._back(reading, cost, limit, high)
        else:
            self._calm = 0
        told = self._told(cost)
        self._seconds.append(cost.seconds / max(1, cost.tokens))
        return [*told, *moved]

    def relieve(self) -> str:
        """Memory ran out inside a step that is about to be repeated: every block at the lowest notch goes one further.

        Returns what was done in words, "" when nothing is left to do.
        """
        lowest = min(self._ranks, default=len(self.allowed))
        if lowest + 1 >= len(self.allowed):
            return ""
        following = self.allowed[lowest + 1]
        return f"after {self._hold_at_most(following)} blocks went on to another way: each {_DOES[following]}"

    @property
    def relieved_to(self) -> Notch | Literal[""]:
        """The notch that every block has had to go on to because memory ran out; "" where it did not."""
        return max(self._needed, key=NOTCHES.index, default="")

    def begin_at(self, notch: str) -> str:
        """Every block begins no higher than `notch`, which relieved an earlier run (`relieved_to`), and stays there.

        Returns what was done in words, "" where that is not among the notches allowed or all are there already.
        """
        if notch not in self.allowed:
            return ""
        count = self._hold_at_most(notch)
        return f"{count} blocks, each of which {_DOES[notch]}" if count else ""

    def _hold_at_most(self, notch: Notch) -> int:
        """Blocks that hold more go to `notch`, which is not given up again in this run. Returns how many did."""
        least = self.allowed.index(notch)
        blocks = [index for index, rank in enumerate(self._ranks, start=self.first) if rank < least]
        for index in blocks:
            self.modes[index] = notch
        self._needed.add(notch)
        self._moves.clear()
        self._calm = 0
        if blocks:
            self.apply(self.modes)
        return len(blocks)

    def end(self, step: int) -> list[Action]:
        """The run ends: what was done and not yet told."""
        told = [
            Action(step=step, message=f"{_done(move)}. The run ended before it was measured.") for move in self._moves
        ]
        self._moves.clear()
        return told

    def state(self) -> dict[str, Any]:
        """What a resume needs, as plain values."""
        return {
            "modes": list(self.modes),
            "calm": self._calm,
            "patience": dict(self._patience),
            "given_up": sorted(self._given_up),
            "needed": sorted(self._needed),
            "freed": dict(self._freed),
            "moves": [asdict(move) for move in self._moves],
            "seconds": list(self._seconds),
            "ended": self._ended,
            "emptied_at": self._emptied_at,
            "empty_every": self._empty_every,
            "most_tokens": self.most_tokens,
        }

    def load_state(self, values: Mapping[str, Any], *, modes: Sequence[Notch]) -> None:
        """The inverse of `state`, for blocks that are in `modes` now (none given: as they were). A state of another
        model is left alone."""
        self.modes = list(modes or self.modes)
        if not values or len(values["modes"]) != len(self.modes):
            return
        if not set(values["modes"]) <= set(get_args(Stay) if "visit" in self.allowed else MODES):
            return  # of a run whose model lay elsewhere
        self._calm, self._patience = values["calm"], dict(values["patience"])
        self._given_up, self._needed = set(values["given_up"]), set(values["needed"])
        self._freed = dict(values["freed"])
        self._moves = [_Move(**move) for move in values["moves"]]
        self._seconds = deque(values["seconds"], maxlen=STEPS_REMEMBERED)
        self._ended = values["ended"]
        self._emptied_at, self._empty_every = values["emptied_at"], values["empty_every"]
        self.most_tokens = values["most_tokens"]

    # ---- decisions ----

    def _further(self, reading: Reading, cost: StepCost, limit: float) -> list[Action]:
        """One block, the first at the lowest notch, one notch further."""
        ranks = self._ranks
        lowest = min(ranks, default=len(self.allowed))
        share = f"{reading.allocated / limit:.0%} of {format_bytes(limit)}"
        if lowest + 1 >= len(self.allowed):
            if self._ended:
                return []
            self._ended = True
            message = f"Memory is at {share}, and no block can hold less: what needs more will go in smaller pieces."
            return [Action(step=cost.step, message=message, level="warning")]
        notch = self.allowed[lowest + 1]
        if notch in self._given_up:  # it was given up too early: be slower to do so again
            self._given_up.discard(notch)
            self._patience[notch] = min(2 * self._patience.get(notch, CALM_STEPS), MOST_CALM_STEPS)
        self._move(self.first + ranks.index(lowest), notch, f"Memory was at {share}", reading, cost)
        return []

    def _back(self, reading: Reading, cost: StepCost, limit: float, high: float) -> None:
        """One block, the last at the highest notch, one notch back, when it has been calm for long enough."""
        governed = range(self.first, len(self.modes))
        movable = [index for index in governed if self._previous(index, self.modes[index]) is not None]
        if not movable:
            return
        highest = max(self.allowed.index(self._nearest(self.modes[index])) for index in movable)
        notch = self.allowed[highest]
        expected = self._at_longest(reading, cost) + self._freed.get(notch, 0)
        if notch in self._needed or self._calm < self._patience.get(notch, CALM_STEPS) or expected >= high:
            return
        block = max(index for index in movable if self._nearest(self.modes[index]) == notch)
        before = self._previous(block, notch)
        assert before is not None
        self._given_up.add(notch)
        self._ended = False
        self._calm = 0
        self._move(
            block, before, f"Memory was at {reading.allocated / limit:.0%} of {format_bytes(limit)}", reading, cost
        )

    def _previous(self, block: int, notch: Notch) -> Notch | None:
        """Where a block would go back to; None where it is as far back as it may be."""
        rank = self.allowed.index(self._nearest(notch))
        least = NOTCHES.index(self.least[block]) if self.least else 0
        if rank == 0 or NOTCHES.index(self.allowed[rank - 1]) < least:
            return None
        return self.allowed[rank - 1]

    @property
    def _ranks(self) -> list[int]:
        """The notch of each block that is governed, by its place among those allowed."""
        return [self.allowed.index(self._nearest(notch)) for notch in self.modes[self.first :]]

    def _nearest(self, notch: Notch) -> Notch:
        """The notch itself, or where it is not among those allowed the next lower one that is."""
        return max((one for one in self.allowed if NOTCHES.index(one) <= NOTCHES.index(notch)), key=NOTCHES.index)

    def _move(self, block: int, notch: Notch, why: str, reading: Reading, cost: StepCost) -> None:
        before = self.modes[block]
        self.modes[block] = notch
        self.apply(self.modes)
        self._moves.append(
            _Move(
                step=cost.step,
                block=block,
                before=before,
                after=notch,
                why=why,
                activations=reading.allocated - reading.at_rest,
                largest_tokens=cost.largest_tokens,
                token_seconds=statistics.median([*self._seconds, cost.seconds / max(1, cost.tokens)]),
            )
        )

    def _close_gaps(self, reading: Reading, limit: float, step: int) -> list[Action]:
        """Empty the allocator's cache where it holds much that no tensor can use. Where that helps little it is done
        more and more rarely: making segments again costs time."""
        unused = reading.reserved - reading.allocated
        if unused <= UNUSED_SHARE * limit or reading.reserved <= self.high * limit:
            return []
        if self._emptied_at and step - self._emptied_at < self._empty_every:
            return []
        if self._emptied_at:
            self._empty_every = min(2 * self._empty_every, MOST_CALM_STEPS)
        self._emptied_at = step
        self.empty_cache()
        message = (
            f"The allocator held {format_bytes(reading.reserved)} for {format_bytes(reading.allocated)} of tensors: "
            f"{format_bytes(unused)} in gaps were given back."
        )
        return [Action(step=step, message=message)]

    # ---- measurements ----

    def _at_longest(self, reading: Reading, cost: StepCost) -> float:
        """What the longest micro-batch would need: activations grow with its tokens."""
        longer = self.most_tokens / max(1, cost.largest_tokens)
        return reading.at_rest + (reading.allocated - reading.at_rest) * max(1.0, longer)

    def _measure(self, reading: Reading, cost: StepCost) -> None:
        for move in self._moves:
            if move.now_activations < 0:
                move.now_activations, move.now_tokens = reading.allocated - reading.at_rest, cost.largest_tokens
                freed = _freed(move)
                self._freed[move.after if freed > 0 else move.before] = abs(freed)

    def _told(self, cost: StepCost) -> list[Action]:
        """Moves whose memory is known. Their time is that of the second step after them: in the first one a compiler
        may work. When another move came first, the first step's has to do."""
        told = []
        for move in list(self._moves):
            if move.now_activations < 0 or (cost.step < move.step + 2 and move is self._moves[-1]):
                continue
            self._moves.remove(move)
            told.append(Action(step=cost.step, message=_sentence(move, cost)))
        return told


def build_governor(
    modes: Sequence[Mode],
    *,
    device: torch.device,
    apply: Callable[[Sequence[Any]], object],
    budget_bytes: int,
    may_compress: bool = False,
    fixed: bool = False,
    first: int = 0,
    expected_bytes: int = 0,
    most_tokens: int = 0,
) -> Governor:
    """The governor of a model on `device` whose blocks are in `modes` now (none: it has no blocks); `first` is the
    first one that trains.

    `may_compress` lets it use 8 bits. `fixed` is whether a person chose how activations are held: then blocks go
    further when they must, and back no more than to that.
    """
    unwanted = set() if may_compress else {"compress"}
    if not backend_of(device).pinned:
        unwanted.add("offload")  # the device's memory is RAM already
    return Governor(
        modes=list(modes),
        apply=apply,
        empty_cache=lambda: empty_cache(device),
        budget_bytes=budget_bytes,
        expected_bytes=expected_bytes,
        most_tokens=most_tokens,
        allowed=tuple(mode for mode in MODES if mode not in unwanted),
        least=tuple(modes) if fixed else (),
        first=first,
    )


def build_stay_governor(
    stays: Sequence[Stay],
    *,
    device: torch.device,
    apply: Callable[[Sequence[Any]], object],
    budget_bytes: int,
    expected_bytes: int = 0,
    most_tokens: int = 0,
) -> Governor:
    """The governor of a model whose blocks stay on `device` or visit it, as `stays` says."""
    return Governor(
        modes=list(stays),
        apply=apply,
        empty_cache=lambda: empty_cache(device),
        budget_bytes=budget_bytes,
        expected_bytes=expected_bytes,
        most_tokens=most_tokens,
        allowed=get_args(Stay),
    )


def _freed(move: _Move) -> int:
    """Bytes that a move freed (negative: that it took), for a micro-batch as large as the one after it."""
    scaled = move.activations * move.now_tokens / max(1, move.largest_tokens)
    return int(scaled - move.now_activations)


def _sentence(move: _Move, cost: StepCost) -> str:
    freed = _freed(move)
    before, after = move.token_seconds * cost.tokens, cost.seconds
    what = f"freed {format_bytes(freed)}" if freed >= 0 else f"took {format_bytes(-freed)}"
    return f"{_done(move)}. That {what}; a step as long as the last took {before:.3g} s before and {after:.3g} s after."


def _done(move: _Move) -> str:
    return f"{move.why} at step {move.step}: block {move.block + 1} now {_DOES[move.after]}"
