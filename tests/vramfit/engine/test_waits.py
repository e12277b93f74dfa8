"""What is counted as waiting: by the clock on a processor, between two events on a card, which is played here."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from vramfit.engine.waits import Gaps, Mark, Spans, marks_on


class Card:
    """A card and its host: `now` by the host's clock, and when the card is done with what it was given."""

    def __init__(self) -> None:
        self.now = self.done = 0.0

    def compute(self, seconds: float) -> None:
        self.done = max(self.now, self.done) + seconds

    def wait_for(self, moment: float) -> None:
        """As `Stream.wait_event`: what is given from now on begins then at the earliest."""
        self.done = max(self.done, moment)

    def mark(self) -> Mark:
        return _Passed(self, max(self.now, self.done))


@dataclass(frozen=True)
class _Passed:
    card: Card
    at: float

    def query(self) -> bool:
        return self.card.now >= self.at

    def elapsed_time(self, later: Mark) -> float:
        assert isinstance(later, _Passed)
        return 1e3 * (later.at - self.at)


def gaps_on(card: Card, found: list[tuple[float, float]]) -> Gaps:
    return Gaps(lambda *gap: found.append(gap), mark=card.mark, clock=lambda: card.now)


@pytest.mark.parametrize(("arrives", "gap"), [(3.0, 2.0), (1.5, 0.5), (0.4, 0.0)])
def test_a_card_waits_from_the_end_of_what_it_has_to_do_until_a_block_arrives(arrives: float, gap: float) -> None:
    """The host does not wait at all: it has given the copy and the next computation long before."""
    card, found = Card(), list[tuple[float, float]]()
    gaps = gaps_on(card, found)
    card.compute(1.0)
    with gaps.around():
        card.wait_for(arrives)
    card.compute(1.0)

    card.now = 0.3
    gaps.read()
    assert found == [], "the card has not come there"
    card.now = 5.0
    gaps.read()
    gaps.read()
    assert [ended - began for began, ended in found] == [pytest.approx(gap)]


def test_a_cards_own_backward_is_no_wait_for_what_takes_its_gradients_away() -> None:
    """The host waits from 1 to 7; the card computes until 5, so it stands still for two seconds of these six."""
    card, found = Card(), list[tuple[float, float]]()
    gaps = gaps_on(card, found)
    card.now = 1.0
    card.compute(4.0)
    with gaps.around():
        card.now = 7.0
    gaps.read()

    assert found == [(pytest.approx(5.0), 7.0)]


def test_gaps_are_read_in_their_order_and_none_that_is_not_over() -> None:
    card, found = Card(), list[tuple[float, float]]()
    gaps = gaps_on(card, found)
    for arrives in (1.0, 3.0, 8.0):
        with gaps.around():
            card.wait_for(arrives)
    card.now = 4.0
    gaps.read()

    assert [ended - began for began, ended in found] == pytest.approx([1.0, 2.0])
    card.now = 8.0
    gaps.read()
    assert sum(ended - began for began, ended in found) == pytest.approx(8.0)


def test_a_processor_waits_by_the_clock_also_when_what_it_waits_for_fails() -> None:
    found: list[tuple[float, float]] = []
    moments = iter([2.0, 5.0, 6.0, 6.5])
    gaps = Gaps(lambda *gap: found.append(gap), mark=marks_on(torch.device("cpu")), clock=lambda: next(moments))
    with gaps.around():
        pass
    with pytest.raises(OSError, match="gone"), gaps.around():
        raise OSError("gone")

    assert found == [(2.0, 5.0), (6.0, 6.5)]


def test_of_a_wait_what_the_disk_took() -> None:
    moments = iter([1.0, 2.0, 4.0, 7.0, 9.0, 10.0])
    spans = Spans(lambda: next(moments))
    for _ in range(3):
        with spans.during():
            pass

    assert spans.within(0.0, 20.0) == pytest.approx(5.0)
    assert spans.within(1.5, 5.0) == pytest.approx(1.5)
    assert spans.within(2.0, 4.0) == 0.0
    assert spans.within(5.0, 6.0) == pytest.approx(1.0)
