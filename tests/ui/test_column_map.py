"""The control for columns: filled, marked as a guess where it is one, folded where nothing is to be done."""

from __future__ import annotations

from ui.column_map import column_map, kind_of
from ui.texts import texts_of

COLUMNS = {"Frage": "Was ist das?", "<b>": "Ein Haus. " * 9}
GUESS = {"prompt": "Frage", "completion": "<b>"}


def test_unknown_columns_are_open_and_marked_as_a_guess() -> None:
    for language in ("en", "zh"):
        shown = column_map(COLUMNS, GUESS, texts_of(language), guessed=True, wrong=True)
        assert '<details class="vf-map" open>' in shown
        assert texts_of(language)["map.guess"] in shown
        assert 'data-part="prompt" data-needed><option value="Frage" selected>Frage — Was ist das?</option>' in shown
        assert '<option value="&lt;b&gt;" selected>' in shown
        assert "<b>" not in shown
        assert "data-forget" not in shown


def test_known_columns_are_folded_and_named() -> None:
    shown = column_map(COLUMNS, GUESS, texts_of("en"), chosen=True)
    assert '<details class="vf-map">' in shown
    assert "<span>Frage · &lt;b&gt;</span>" in shown
    assert "vf-note" not in shown
    assert "data-forget" in shown


def test_the_kind_is_that_of_the_mapping() -> None:
    assert kind_of({"messages": "m", "tools": "t"}).name == "messages"
    assert kind_of({"instruction": "i", "output": "o"}).name == "instruction"
    assert kind_of({}).name == "prompt"
    shown = column_map(COLUMNS, {"text": "Frage"}, texts_of("en"))
    assert '<option value="text" selected>' in shown
    assert shown.count(" hidden>") == 3
    assert column_map({}, {}, texts_of("en")) == ""
