"""The data card: what is shown, what is reckoned from a sample, and that a file's text is never markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ui.data_card import data_card, histogram, reading_card, totals
from ui.samples import Example, Sample
from ui.texts import texts_of
from vramfit.config import DataChoice
from vramfit.data.read import Survey, guess_workload, survey

EVIL = '<img src=x onerror="alert(1)">'


@pytest.fixture
def found(tmp_path: Path) -> Survey:
    path = tmp_path / "mine.jsonl"
    rows = [json.dumps({"question": f"q {n}", "answer": EVIL}) for n in range(9)]
    path.write_text("\n".join([*rows, rows[0], '{"question": "' + EVIL]), encoding="utf-8")
    return survey([path])


def _sample(*, whole: bool = True, **changes: Any) -> Sample:
    values: dict[str, Any] = {
        "lengths": (10, 20, 40, 100),
        "trained": ((5, 10), (5, 10, 15, 20), (30, 40), (50, 100)),
        "notes": (),
        "examples": (
            Example(file="a", line=1, tokens=4, pieces=(("ask ", False, 1), (EVIL, True, 2), ("end", True, 1))),
            Example(file="a", line=2, tokens=900, pieces=(("long", True, 1),)),
        ),
    }
    return Sample(whole=whole, **{**values, **changes})


def test_every_row_is_in_the_histogram_and_the_limit_in_sight() -> None:
    drawn = histogram([1, 2, 3, 400], 10, bars=5)
    assert sum(drawn.counts) == 4
    assert drawn.counts[-1] == 1
    assert histogram([90, 100], 120).top > 120
    assert histogram([90, 100], 2048).top < 2048


@pytest.mark.parametrize(("how", "trained"), [("cut", 5 + 10 + 10 + 0), ("drop", 5 + 10 + 10), ("split", 75)])
def test_trained_tokens_follow_what_happens_to_long_rows(found: Survey, how: str, trained: int) -> None:
    choice = DataChoice(paths=("x",), too_long=how)
    assert totals(_sample(), found, choice, 40).trained == trained
    assert totals(_sample(), found, choice, 40).too_long_share == 0.25
    assert totals(_sample(whole=False), found, choice, 40).trained == round(trained * found.rows / 4)


def test_a_row_is_learned_where_its_tokens_are() -> None:
    assert [_sample().trained_tokens(1, limit) for limit in (0, 7, 12, 18, None)] == [0, 2, 5, 8, 10]
    assert _sample().trained_share == 80 / 170 - 5 / 170


def test_the_card_says_it_all_and_no_text_is_markup(found: Survey) -> None:
    for language in ("en", "zh"):
        card = data_card(found, texts_of(language), choice=DataChoice(paths=("x",)), limit=40, sample=_sample())
        assert "<img" not in card
        assert "&lt;img src=x" in card
        for shown in ("JSONL", "UTF-8", "question/answer", "11", ">10<", ">1<", "25.0%"):
            assert shown in card, shown
        assert card.count('class="vf-row-view"') == 2
        assert card.count("</button>") == 2


def test_learned_tokens_are_marked_and_those_beyond_the_limit_struck(found: Survey) -> None:
    choice = DataChoice(paths=("x",))
    card = data_card(found, texts_of("en"), choice=choice, limit=3, sample=_sample())
    assert "ask <mark>&lt;img" in card
    assert "</mark><s>end</s>" in card
    assert "<mark>long</mark> …" in card  # more tokens than were sent


def test_without_a_sample_it_says_why_or_asks_again(found: Survey) -> None:
    choice = DataChoice(paths=("x",))
    card = data_card(found, texts_of("en"), choice=choice, limit=None, trouble="There is <no> folder.")
    assert "There is &lt;no&gt; folder." in card
    assert "data-again" not in card
    waiting = data_card(found, texts_of("en"), choice=choice, limit=None, ask_again=7)
    assert 'data-again="7"' in waiting
    assert "data-measured" not in waiting
    assert 'data-again="8"' in reading_card(texts_of("en"), ask_again=8)


def test_a_sample_without_a_usable_row_is_no_error(found: Survey) -> None:
    empty = _sample(lengths=(), trained=(), examples=(), notes=("No luck.",))
    assert "No luck." in data_card(found, texts_of("en"), choice=DataChoice(paths=("x",)), limit=40, sample=empty)


def test_measured_lengths_replace_the_guess(found: Survey) -> None:
    measured = guess_workload(found, 64, measured=(10, 20, 40, 100), trained_share=0.25)
    assert (measured.mean_tokens, measured.longest_tokens, measured.trained_share) == (
        (10 + 20 + 40 + 64) / 4,
        64,
        0.25,
    )
    assert measured.sequences == found.rows
    assert guess_workload(found, 64).mean_tokens != measured.mean_tokens


def test_a_bad_row_is_told_with_its_place(found: Survey) -> None:
    page = data_card(found, texts_of("en"), choice=DataChoice(paths=("x",)), limit=40)
    column = 1 + len('{"question": "<img src=x onerror="')
    assert f"<b>line 11, column {column}:</b> expecting" in page
