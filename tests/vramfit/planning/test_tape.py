"""Walks of tapes small enough to work out by hand. Sizes are bytes per token."""

from __future__ import annotations

from collections.abc import Iterable

from hypothesis import given
from hypothesis import strategies as st

from vramfit.planning.tape import Moment, Tape, highest


def worst(moments: Iterable[Moment]) -> float:
    """The most bytes per token alive at any of them."""
    return max(moment.per_token for moment in moments)


def test_a_storage_saved_twice_counts_once() -> None:
    tape = Tape()
    start = tape.input(4, grad=True)
    first = tape.operation("a", (start,), 4, saves=(start,), trained=1)
    tape.operation("b", (first,), 4, saves=(start, first), trained=1)

    assert tape.saved == 4  # the block's input is kept by whoever runs the block


def test_nothing_is_saved_where_no_gradient_is_needed() -> None:
    tape = Tape()
    start = tape.input(4, grad=False)
    frozen = tape.operation("frozen", (start,), 4, saves=(start,))
    tape.operation("trained", (frozen,), 4, saves=(frozen,), trained=1)

    assert tape.saved == 4


def test_backward_holds_what_is_saved_and_two_gradients() -> None:
    """Of three linears 4 -> 4 the last one's backward is the worst: 2 inputs saved, gradient in, gradient out."""
    tape = Tape()
    value = tape.input(4, grad=True)
    for name in "abc":
        value = tape.operation(name, (value,), 4, saves=(value,), trained=1)

    assert tape.saved == 8
    assert worst(tape.backward()) == 8 + 4 + 4


def test_an_addition_hands_its_gradient_on_without_a_copy() -> None:
    tape = Tape()
    start = tape.input(4, grad=True)
    other = tape.operation("square", (start,), 4, saves=(start,))
    tape.operation("add", (start, other), 4, passes=True)

    # At "square": the gradient that waits for the input 4 (the same buffer), its other part 4.
    assert worst(tape.backward()) == 8


def test_forward_without_keeping_frees_what_was_used() -> None:
    tape = Tape()
    value = tape.input(4, grad=True)
    for name in "abcd":
        value = tape.operation(name, (value,), 4, saves=(value,), trained=1)

    assert worst(tape.forward(keeps=False)) == 8
    assert worst(tape.forward()) == 16


def test_gradients_of_weights_are_made_one_operation_after_another() -> None:
    tape = Tape()
    value = tape.input(4, grad=True)
    for parameters in (10, 20, 30):
        value = tape.operation("linear", (value,), 4, saves=(value,), trained=parameters)

    assert [(moment.made, moment.making) for moment in tape.backward()] == [(0, 30), (30, 20), (50, 10)]


@given(
    st.lists(
        st.tuples(*(st.integers(0, 20) for _ in range(4))).map(lambda numbers: Moment(*numbers)),
        min_size=1,
        max_size=12,
    ),
    st.tuples(*(st.integers(0, 9) for _ in range(4))),
)
def test_pruned_moments_hold_the_peak_for_any_sizes(moments: list[Moment], sizes: tuple[int, ...]) -> None:
    tokens, made, making, weights = sizes

    def size(moment: Moment) -> float:
        complete = made * (moment.made + moment.making)
        return tokens * moment.per_token + complete + making * moment.making + weights * moment.weights

    assert max(map(size, highest(moments))) == max(map(size, moments))


def test_moments_of_forward_are_those_of_its_steps() -> None:
    """The walk that only wants heights, and the one that names every buffer, see the same."""
    tape = Tape()
    start = tape.input(4, grad=True)
    wide = tape.operation("wide", (start,), 16, saves=(start,), trained=1, forward_temporary=3)
    view = tape.operation("view", (wide,), 16, view=True)
    copy = tape.operation("copy", (view,), 8, saves=(view,), saves_new=2)
    tape.operation("add", (copy, start), 4, passes=True, holds=(wide,))

    for keeps in (True, False):
        alive, heights = 0.0, []
        for step in tape.forward_steps(keeps=keeps):
            heights.append(step.highest(alive))
            alive += step.change
        assert [moment.per_token for moment in tape.forward(keeps=keeps)] == heights
    assert heights == [19, 16, 24, 28]
