"""Messages have what, number and remedy; the tree can be caught at its root."""

from __future__ import annotations

from pathlib import Path

import pytest

from vramfit import errors
from vramfit.errors import ConfigError, DataError, Problem, UserError, VramfitError, WontFit


def test_every_exception_hangs_on_the_tree_its_docstring_draws() -> None:
    assert errors.__doc__ is not None
    classes = [item for item in vars(errors).values() if isinstance(item, type) and issubclass(item, Exception)]
    for item in classes:
        assert issubclass(item, VramfitError)
        assert item.__name__ in errors.__doc__


def test_the_message_is_what_then_remedy() -> None:
    assert str(UserError("The disk has 1 GiB free.", "Free 2 GiB.")) == "The disk has 1 GiB free. Free 2 GiB."
    assert str(UserError("Only what")) == "Only what"


def test_data_errors_name_file_line_and_column() -> None:
    error = DataError("a comma is missing", "Add it.", path=Path("x/rows.jsonl"), line=3, column=14)
    assert str(error) == "rows.jsonl, line 3, column 14: a comma is missing. Add it."


def test_config_errors_carry_every_problem() -> None:
    error = ConfigError(
        [
            Problem(field="seed", what="got -1, the least is 0", remedy="Change it."),
            Problem(field="name", what="has 130 characters, the limit is 120", remedy="Change it."),
        ]
    )
    assert str(error) == "seed: got -1, the least is 0; name: has 130 characters, the limit is 120. Change it."
    with pytest.raises(AssertionError):
        ConfigError([])


def test_wont_fit_carries_the_numbers() -> None:
    error = WontFit("Needs 27 GiB, has 23 GiB", needed_bytes=27, available_bytes=23, suggestions=["Choose QLoRA."])
    assert (error.needed_bytes, error.available_bytes, error.tier) == (27, 23, "device")
    assert str(error) == "Needs 27 GiB, has 23 GiB. Choose QLoRA."
