"""Walks of tapes small enough to work out by hand. Sizes are bytes per token."""

from __future__ import annotations

from vramfit.planning.tape import Tape


def test_a_storage_saved_twice_counts_once() -> None:
    tape = Tape()
    start = tape.input(4, grad=True)
    first = tape.operation("a", (start,), 4, saves=(start,), trains=True)
    tape.operation("b", (first,), 4, saves=(start, first), trains=True)

    assert tape.saved() == 8
    assert tape.saved(without=(start,)) == 4


def test_nothing_is_saved_where_no_gradient_is_needed() -> None:
    tape = Tape()
    start = tape.input(4, grad=False)
    frozen = tape.operation("frozen", (start,), 4, saves=(start,))
    tape.operation("trained", (frozen,), 4, saves=(frozen,), trains=True)

    assert tape.saved() == 4


def test_backward_holds_what_is_saved_and_two_gradients() -> None:
    """Of three linears 4 -> 4 the last one's backward is the worst: 3 inputs saved, gradient in, gradient out."""
    tape = Tape()
    value = tape.input(4, grad=True)
    for name in "abc":
        value = tape.operation(name, (value,), 4, saves=(value,), trains=True)

    assert tape.saved() == 12
    assert tape.backward_peak() == 12 + 4 + 4


def test_an_addition_hands_its_gradient_on_without_a_copy() -> None:
    tape = Tape()
    start = tape.input(4, grad=True)
    other = tape.operation("square", (start,), 4, saves=(start,))
    tape.operation("add", (start, other), 4, passes=True)

    # At "square": input saved 4, gradient that waits for the input 4 (the same buffer), its other part 4.
    assert tape.backward_peak() == 12


def test_forward_without_keeping_frees_what_was_used() -> None:
    tape = Tape()
    value = tape.input(4, grad=True)
    for name in "abcd":
        value = tape.operation(name, (value,), 4, saves=(value,), trains=True)

    assert tape.forward_peak(keeps=False) == 8
    assert tape.forward_peak() == 20
