"""The best guess at unknown columns: by their names where these say something, else by what they hold."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vramfit.data.mapping import MAPPED_KINDS, PARTS, guess_mapping
from vramfit.data.rows import NumberText, Row
from vramfit.data.shapes import Conversation, Document, UnknownColumns, WrongMapping, recognise

LONG = "The mountain is two thousand metres high, and from its top one sees the sea on a clear day."
SHORT = "How high is it?"
TURNS = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello there"}]


def _rows(*values: dict[str, Any]) -> list[Row]:
    return [Row(row, Path("some.jsonl"), line) for line, row in enumerate(values, 1)]


def _guess(**values: Any) -> dict[str, str]:
    rows = _rows(*[values] * 3)
    return guess_mapping(list(values), rows)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"user_question": SHORT, "botAnswer": LONG}, {"prompt": "user_question", "completion": "botAnswer"}),
        ({"Antwort": LONG, "Frage": SHORT}, {"prompt": "Frage", "completion": "Antwort"}),
        ({"the_questoin": LONG, "the_anwser": SHORT}, {"prompt": "the_questoin", "completion": "the_anwser"}),
        (
            {"问题内容": "山有多高呢？", "回答内容": "这座山有两千米高。"},
            {"prompt": "问题内容", "completion": "回答内容"},
        ),
        (
            {"task": SHORT, "passage": LONG, "summary": "It is high up."},
            {"instruction": "task", "input": "passage", "output": "summary"},
        ),
        ({"dlg": TURNS, "note": LONG}, {"messages": "dlg"}),
        ({"dlg": json.dumps(TURNS), "persona": LONG}, {"messages": "dlg", "system": "persona"}),
        (
            {"ask": SHORT, "reply": LONG, "functions": [{"name": "f"}]},
            {"prompt": "ask", "completion": "reply", "tools": "functions"},
        ),
        ({"poem": LONG, "id": NumberText("7"), "url": "https://a.b/c d"}, {"text": "poem"}),
        ({"id": NumberText("7"), "score": NumberText("0.5")}, {}),
        ({"date": "2024-01-05", "code": "x17"}, {}),
        ({}, {}),
    ],
)
def test_names_and_content_decide(values: dict[str, Any], expected: dict[str, str]) -> None:
    assert _guess(**values) == expected


def test_a_column_of_few_different_values_is_no_text_to_learn() -> None:
    rows = _rows(*({"kind": "of great use", "body_of_it": f"{LONG} {n}"} for n in range(40)))
    assert guess_mapping(["kind", "body_of_it"], rows) == {"text": "body_of_it"}


@given(
    st.dictionaries(
        st.text(max_size=12),
        st.one_of(st.text(max_size=60), st.none(), st.booleans(), st.lists(st.text(max_size=4), max_size=3)),
        max_size=6,
    )
)
def test_a_guess_can_always_be_taken(values: dict[str, Any]) -> None:
    rows = _rows(*[values] * 3)
    guess = guess_mapping(list(values), rows)
    assert set(guess.values()) <= set(values)
    assert len(set(guess.values())) == len(guess)
    if guess:
        assert any(set(kind.needs) <= set(guess) <= set(kind.parts) for kind in MAPPED_KINDS)
        recognise(rows, guess)


def test_what_is_offered_can_be_mapped() -> None:
    for kind in MAPPED_KINDS:
        assert set(kind.parts) <= set(PARTS)
        shape = recognise(_rows(dict.fromkeys(kind.needs, "x")), {name: name for name in kind.needs})
        assert shape.columns


def test_unknown_columns_come_with_the_guess_and_it_works() -> None:
    rows = _rows({"Frage": SHORT, "Antwort": LONG, "n": NumberText("1")})
    with pytest.raises(UnknownColumns) as caught:
        recognise(rows)
    assert caught.value.columns == {"Frage": SHORT, "Antwort": LONG[:80].strip(), "n": "1"}
    found = recognise(rows, caught.value.guess).convert(rows[0])
    assert isinstance(found, Conversation)
    assert [turn.text for turn in found.turns] == [SHORT, LONG]


@pytest.mark.parametrize("mapping", [{"text": "nowhere"}, {"prompt": "Frage"}, {"title": "Frage"}])
def test_a_wrong_mapping_comes_with_the_columns(mapping: dict[str, str]) -> None:
    with pytest.raises(WrongMapping) as caught:
        recognise(_rows({"Frage": SHORT, "Antwort": LONG}), mapping)
    assert list(caught.value.columns) == ["Frage", "Antwort"]
    assert caught.value.guess == {"prompt": "Frage", "completion": "Antwort"}


def test_a_text_column_is_a_document() -> None:
    rows = _rows({"poem": LONG, "id": "7"})
    assert isinstance(recognise(rows, guess_mapping(["poem", "id"], rows)).convert(rows[0]), Document)
