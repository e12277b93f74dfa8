"""Strict YAML: nothing is changed or dropped without a word, and hostile text ends at once."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.yaml_text import YamlProblem, dump_yaml, load_yaml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1:30", "1:30"),
        ("010", "010"),
        ("0x10", "0x10"),
        ("2024-01-05", "2024-01-05"),
        ("2024-13-45", "2024-13-45"),
        ("12", 12),
        ("-3", -3),
        ("2.5", 2.5),
        ("2.0e-05", 2e-5),
        ("true", True),
        ("null", None),
        ("[a, 1]", ["a", 1]),
        ('{"a": {"b": 1}}', {"a": {"b": 1}}),
        ("a: &x {r: 4}\nb: *x", {"a": {"r": 4}, "b": {"r": 4}}),
    ],
)
def test_values_are_what_was_written(text: str, value: Any) -> None:
    assert load_yaml(text) == value


@pytest.mark.parametrize(
    ("text", "reason", "line"),
    [
        ("seed: 1\nseed: 2", "'seed' is given twice", 2),
        ('{"a": {"b": 1,\n "b": 2}}', "'b' is given twice", 2),
        ("a:\n\tb: 1", "cannot start any token", 2),
        ("a: [1", "expected", 1),
        ("*x", "undefined alias", 1),
        ("!!python/object/apply:os.system [ls]", "could not determine", 1),
        ("? [a]\n: 1", "unhashable", 1),
        ("a: " + "[" * 100_000, "nested more than 32 deep", 1),
        ('{"a":' * 20_000, "nested more than 32 deep", 1),
        ("a: " + "9" * 5000, "4300 digits", None),
        ("a: \x00", r"U\+0000", None),
        ("a: \ud800", r"U\+D800", None),
    ],
)
def test_what_cannot_be_taken_as_written_is_refused(text: str, reason: str, line: int | None) -> None:
    with pytest.raises(YamlProblem, match=reason) as caught:
        load_yaml(text)
    assert caught.value.line == line
    assert "\n" not in caught.value.reason


@given(
    st.text()
    | st.sampled_from(["1:30", "010", "089", "1e5", "2024-01-05", "on", "~", "1_0", "0x1", "a\x85b", ".inf", "<<"])
)
def test_every_text_that_was_dumped_comes_back(text: str) -> None:
    assert load_yaml(dump_yaml({"name": text})) == {"name": text}
