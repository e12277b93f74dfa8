"""Blocks whose experts come in slices: a block in three parts, each done for all micro-batches before the next.

Before the experts, the experts slice by slice, after them. The block's own forward is called for the first and for the
last part; in the first it ends where the experts would begin, in the last the experts' answer is given to it. So a
slice comes twice a step, however many micro-batches there are. Backward has the answer, which waited as the block's
input did, and asks first for its gradient, then goes back through the slices, and then through the block, at whose
experts the gradients that the slices gave are handed on.

What is around the experts is computed twice on each way. A token's rows are summed in the order of its experts, as
`grouped.py` does, so that the bits are those of the unsplit block.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vramfit.engine.grouped import Beside, Routes, beside_of, routed, through_experts
from vramfit.engine.randomness import set_random_state
from vramfit.engine.waiting import WaitingInputs

Bounds = tuple[int, int]
"""(first expert, last one, left out) of a slice."""

Compute = Callable[[], Tensor]
"""The block's own forward of one micro-batch."""


class _EnoughError(Exception):
    """What the experts are given is known: the rest of the block's forward need not run."""


@dataclass(kw_only=True)
class Sent:
    """What a block sends to its experts for one micro-batch, and what has come back: `hidden` [T, h], `shares` [T, k];
    `made` [T, h] is the answer so far, `upstream` [T, h] its gradient, `back` and `shares_back` those of what was sent.
    """

    hidden: Tensor
    routes: Routes
    shares: Tensor
    made: Tensor | None = None
    kind: torch.dtype | None = None
    upstream: Tensor | None = None
    back: Tensor | None = None
    shares_back: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        there = (self.hidden, self.shares, self.made, self.upstream, self.back, self.shares_back)
        return sum(each.nbytes for each in there if each is not None)

    def rows(self, part: Routes) -> tuple[Tensor, Tensor]:
        """(hidden states, shares) of the rows of some experts."""
        return self.hidden[part.tokens], self.shares.reshape(-1)[part.where]

    def add(self, part: Routes, weighted: Tensor) -> None:
        if self.made is None:
            self.kind = weighted.dtype
            self.made = _zeros(self.hidden, weighted.dtype)
        _add_rows(self.made, part.tokens, weighted)

    def add_back(self, part: Routes, rows: Tensor, shares: Tensor) -> None:
        if self.back is None or self.shares_back is None:
            self.back = _zeros(self.hidden, self.hidden.dtype)
            self.shares_back = torch.zeros_like(self.shares)
        _add_rows(self.back, part.tokens, rows)
        self.shares_back.view(-1)[part.where] = shares

    @property
    def answer(self) -> Tensor:
        """The experts' answer, as the block gets it."""
        made = torch.zeros_like(self.hidden) if self.made is None else self.made
        return made.to(self.kind or made.dtype).to(self.hidden.dtype)


def _zeros(like: Tensor, kind: torch.dtype) -> Tensor:
    """Sums of 16-bit numbers are made in fp32, and rounded once."""
    return torch.zeros(like.shape, dtype=torch.promote_types(kind, torch.float32), device=like.device)


def _add_rows(into: Tensor, tokens: Tensor, rows: Tensor) -> None:
    """One after another in the order of the rows. On a card an index_add is not: an index_put sorts first."""
    if into.device.type == "cpu":
        into.index_add_(0, tokens, rows.to(into.dtype))
    else:
        into.index_put_((tokens,), rows.to(into.dtype), accumulate=True)


class SplitExperts:
    """Stands in for the forward of one block's experts, whose weights `bring` binds slice by slice."""

    def __init__(self, experts: Any, bring: Callable[[], Iterator[Bounds]]) -> None:
        self.experts, self._bring = experts, bring
        self._beside = beside_of(experts)
        self._way: Callable[..., Tensor] = self._whole
        self._sent: Sent | None = None
        experts.forward = self._called

    def trained(self) -> list[nn.Parameter]:
        """What lies beside the experts and trains."""
        return [weight for each in self._beside(self.experts).values() for weight in each.weights]

    def sent(self, compute: Compute) -> Sent:
        """What the block sends to its experts."""
        with self._as(self._note), contextlib.suppress(_EnoughError):
            compute()
        return self._taken()

    def given(self, answer: Tensor, compute: Compute) -> Tensor:
        """The block's result, with the experts' answer known."""
        with self._as(lambda *_: answer):
            return compute()

    def asked(self, answer: Tensor, compute: Compute, upstream: Tensor) -> Sent:
        """What the block sends, with the gradient of the answer in `upstream`. What comes before the experts is
        computed without a graph."""
        leaf = answer.detach().requires_grad_()

        def follow(hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
            self._remember(hidden, chosen, shares)
            torch.set_grad_enabled(True)
            return leaf

        with torch.no_grad(), self._as(follow):
            end = compute()
        sent = self._taken()
        sent.upstream = torch.autograd.grad(end, leaf, upstream)[0]
        return sent

    def through(self, sent: Sent, answer: Tensor, compute: Compute, weights: Mapping[nn.Parameter, Tensor]) -> Tensor:
        """The block's result with its graph, in which the experts give back what their slices have found; for
        `weights` their gradients."""

        def hand_on(hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
            ordered = routed(chosen, shares, self.experts.num_experts, known=False)[1]
            given: Any = _Given.apply
            result: Tensor = given(hidden, ordered, (answer, sent, list(weights.values())), *weights)
            return result

        with self._as(hand_on):
            return compute()

    @torch.no_grad()
    def forward(self, sent: Sent, slice_: Bounds) -> None:
        """Add what the experts of a slice, which is there, make of their rows."""
        part = sent.routes.part(*slice_)
        if len(part.where):
            first, last = slice_
            beside = self._some(lambda weight: weight[first:last])
            sent.add(part, self._weighted(*sent.rows(part), part, beside))

    def backward(
        self,
        sent: Sent,
        slice_: Bounds,
        weights: Mapping[nn.Parameter, Tensor],
        computing: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        """Add the gradients that come back through the experts of a slice; those of `weights` to their values."""
        part = sent.routes.part(*slice_)
        if not len(part.where):
            return
        first, last = slice_
        leaves: list[tuple[Tensor, Tensor]] = []

        def leaf(weight: nn.Parameter) -> Tensor:
            made = weight.detach()[first:last].requires_grad_()
            leaves.append((made, weights[weight][first:last]))
            return made

        rows, shares = (each.detach().requires_grad_() for each in sent.rows(part))
        assert sent.upstream is not None
        with torch.enable_grad(), computing():
            weighted = self._weighted(rows, shares, part, self._some(leaf))
        torch.autograd.backward(weighted, sent.upstream.to(weighted.dtype)[part.tokens])
        assert rows.grad is not None and shares.grad is not None
        sent.add_back(part, rows.grad, shares.grad)
        for made, whole in leaves:
            if made.grad is not None:
                whole.add_(made.grad)

    # --- inside ------------------------------------------------------------------------------------------------------

    def _called(self, *args: Any) -> Tensor:
        return self._way(*args)

    @contextlib.contextmanager
    def _as(self, way: Callable[..., Tensor]) -> Iterator[None]:
        before, self._way = self._way, way
        try:
            yield
        finally:
            self._way = before

    @torch.no_grad()
    def _whole(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """Where nothing is trained: all slices for one call."""
        self._remember(hidden, chosen, shares)
        sent = self._taken()
        for each in self._bring():
            self.forward(sent, each)
        return sent.answer

    def _note(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        self._remember(hidden, chosen, shares)
        raise _EnoughError

    def _remember(self, hidden: Tensor, chosen: Tensor, shares: Tensor) -> None:
        routes, ordered = routed(chosen, shares, self.experts.num_experts, known=True)
        self._sent = Sent(hidden=hidden.detach(), routes=routes, shares=ordered.detach())

    def _taken(self) -> Sent:
        sent, self._sent = self._sent, None
        assert sent is not None
        return sent

    def _some(self, weight: Callable[[nn.Parameter], Tensor]) -> dict[str, Beside]:
        """What lies beside the experts, with `weight` of each of its weights."""
        return {
            name: functools.partial(each, weights=tuple(map(weight, each.weights)))  # type: ignore[misc]
            for name, each in self._beside(self.experts).items()
        }

    def _weighted(self, rows: Tensor, shares: Tensor, part: Routes, beside: Mapping[str, Beside]) -> Tensor:
        """[S, h]: rows through their experts, times their shares. By the module's forward: whoever has put something
        around it (fp32) has it around this, too."""

        def compute(rows: Tensor, shares: Tensor) -> Tensor:
            return through_experts(self.experts, rows, part, beside) * shares.unsqueeze(-1)

        with self._as(compute):
            result: Tensor = self.experts.forward(rows, shares)
            return result


class _Given(torch.autograd.Function):
    """The experts' answer, known beforehand, as a function of what was sent to them, with gradients known as well."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, shares: Tensor, known: Any, *weights: Tensor) -> Tensor:
        answer, ctx.sent, ctx.of_weights = known
        return answer.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> Any:
        sent: Sent = ctx.sent
        if sent.back is None or sent.shares_back is None:  # no rows
            return torch.zeros_like(sent.hidden), torch.zeros_like(sent.shares), None, *ctx.of_weights
        return sent.back.to(sent.hidden.dtype), sent.shares_back, None, *ctx.of_weights


class SplitBlocks:
    """A step's visits of the blocks that come in parts. `computing` is the mode a step computes in; `drawn` the random
    state where a step draws any; `follow` goes around a micro-batch's part and measures its memory."""

    def __init__(
        self,
        visits: Any,
        waiting: WaitingInputs,
        *,
        computing: Callable[[], contextlib.AbstractContextManager[Any]],
        drawn: Callable[[], dict[str, Tensor] | None],
        follow: Callable[[Any, int, int], contextlib.AbstractContextManager[None]],
    ) -> None:
        self._visits, self._waiting = visits, waiting
        self._computing, self._drawn, self._follow = computing, drawn, follow
        self._sent: list[Sent] = []
        self._drawn_in: dict[tuple[int, int, int], dict[str, Tensor]] = {}

    @property
    def nbytes(self) -> int:
        """Bytes on the device that wait between the parts of a block."""
        return sum(each.nbytes for each in self._sent)

    def forward(self, block: int, hidden: list[Tensor], calls: Sequence[Any], *, keep: bool) -> None:
        """`hidden` [micro-batches] through a block that is present. With `keep` its inputs and its experts' answers
        wait for backward."""
        experts: SplitExperts = self._visits.split[block]
        states = []
        self._sent = []
        for index, call in enumerate(calls):
            states.append(self._drawn())
            if keep:
                self._waiting.put((block, index), hidden[index], states[-1])
            with self._computing():
                self._sent.append(experts.sent(self._own(block, hidden[index], call)))
        for slice_ in self._visits.slices(block, "up"):
            for index, sent in enumerate(self._sent):
                if keep:
                    self._note_draws((block, index, slice_[0]))
                with self._computing():
                    experts.forward(sent, slice_)
        after = self._drawn()
        for index, call in enumerate(calls):
            answer = self._sent[index].answer
            if keep:
                self._waiting.put((block, index, 1), answer, None)
            self._draw_from(states[index])
            with self._computing():
                hidden[index] = experts.given(answer, self._own(block, hidden[index], call))
        self._draw_from(after)
        self._sent = []

    def backward(
        self,
        block: int,
        upstream: list[Tensor],
        calls: Sequence[Any],
        around: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """`upstream` [micro-batches] of a block that is present becomes the gradient of its inputs. `around` goes
        around what makes the adapters' gradients whole."""
        experts: SplitExperts = self._visits.split[block]
        weights = {weight: torch.zeros_like(weight) for weight in experts.trained()}
        self._sent = []
        for index, call in enumerate(calls):
            start, drawn = self._waiting.look((block, index))
            answer, _ = self._waiting.look((block, index, 1))
            self._draw_from(drawn)
            with self._computing():
                self._sent.append(experts.asked(answer, self._own(block, start, call), upstream[index]))
        last = len(calls) - 1
        for slice_ in self._visits.slices(block, "down"):
            for index, sent in enumerate(self._sent):
                self._draw_from(self._drawn_in.pop((block, index, slice_[0]), None))
                with self._follow("experts", index, len(calls)):
                    experts.backward(sent, slice_, weights, self._computing)
        for index, call in enumerate(calls):
            with around() if index == last else contextlib.nullcontext():
                self._backward_of(block, index, upstream, call, weights if index == last else {})
        self._sent = []

    def _backward_of(
        self, block: int, index: int, upstream: list[Tensor], call: Any, weights: Mapping[nn.Parameter, Tensor]
    ) -> None:
        """One micro-batch through what is not an expert, forward again and back."""
        experts: SplitExperts = self._visits.split[block]
        start, drawn = self._waiting.take((block, index))
        answer, _ = self._waiting.take((block, index, 1))
        self._draw_from(drawn)
        start = start.detach().requires_grad_()
        with self._follow("block", index, len(upstream)):
            with torch.enable_grad(), self._computing():
                end = experts.through(self._sent[index], answer, self._own(block, start, call), weights)
            torch.autograd.backward(end, upstream[index])
        assert start.grad is not None
        upstream[index] = start.grad

    def _own(self, block: int, hidden: Tensor, call: Any) -> Compute:
        return lambda: self._visits.compute(block, hidden, call)

    def _note_draws(self, place: tuple[int, int, int]) -> None:
        drawn = self._drawn()
        if drawn is not None:
            self._drawn_in[place] = drawn

    def _draw_from(self, state: dict[str, Tensor] | None) -> None:
        if state is not None:
            set_random_state(self._visits.stream.device, state)
