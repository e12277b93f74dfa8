"""The data card: what is shown, what is reckoned from a sample, and that a file's text is never markup."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ui.data_card import data_card, histogram, left_out, reading_card, totals
from ui.samples import Sample
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
        "numbers": (0, 2, 4, 9),
        "token": "t0k",
        "format": "jsonl",
        "encoding": "utf-8",
        "shape": "text",
        "total": 11,
    }
    return Sample(whole=whole, **{**values, **changes})


def test_every_row_is_in_the_histogram_and_the_limit_in_sight() -> None:
    drawn = histogram([1, 2, 3, 400], 10, bars=5)
    assert sum(drawn.counts) == 4
    assert drawn.counts[-1] == 1
    assert histogram([90, 100], 120).top > 120
    assert histogram([90, 100], 2048).top < 2048


@pytest.mark.parametrize(("how", "trained"), [("cut", 5 + 10 + 10 + 0), ("drop", 5 + 10 + 10), ("split", 75)])
def test_trained_tokens_follow_what_happens_to_long_rows(how: str, trained: int) -> None:
    choice = DataChoice(paths=("x",), too_long=how)
    assert totals(_sample(), 10, choice, 40).trained == trained
    assert totals(_sample(), 10, choice, 40).too_long_share == 0.25
    assert totals(_sample(whole=False), 10, choice, 40).trained == round(trained * 10 / 4)
    refused = _sample(whole=False, refused=((7, "no"),))
    assert totals(refused, 10, choice, 40).trained == round(trained * 10 / 5)
    assert totals(_sample(format="text"), 10, choice, 40).trained == (25 if how == "drop" else 75)


def test_a_row_is_learned_where_its_tokens_are() -> None:
    assert [_sample().trained_tokens(1, limit) for limit in (0, 7, 12, 18, None)] == [0, 2, 5, 8, 10]
    assert _sample().trained_share == 80 / 170 - 5 / 170


def test_the_card_says_it_all_and_no_text_is_markup(found: Survey) -> None:
    for language in ("en", "zh"):
        sample = _sample(notes=(EVIL,))
        card = data_card(found, texts_of(language), choice=DataChoice(paths=("x",)), limit=40, sample=sample)
        assert "<img" not in card
        assert "&lt;img src=x" in card
        for shown in ("JSONL", "UTF-8", "question/answer", "11", ">10<", ">1<", "25.0%"):
            assert shown in card, shown
        assert 'data-token="t0k" data-limit="40" data-how="cut"' in card
        assert 'max="11"' in card
        found_by = [name for name in ("random", "longest", "too_long", "left_out") if f'data-find="{name}"' in card]
        assert found_by == ["random", "longest", "too_long", "left_out"]


@pytest.mark.parametrize(
    ("changes", "label"),
    [
        ({"whole": True}, "all 4 rows"),
        ({"whole": False}, "4 rows drawn evenly"),
        ({"whole": False, "even": False}, "from the first 4 rows"),
    ],
)
def test_the_card_says_what_the_numbers_stand_for(found: Survey, changes: dict[str, bool], label: str) -> None:
    card = data_card(found, texts_of("en"), choice=DataChoice(paths=("x",)), limit=40, sample=_sample(**changes))
    assert label in card
    assert ("≈" in card) != changes["whole"]


def test_counts_of_a_part_are_called_that(found: Survey) -> None:
    notes = ("In 3 rows a turn was merged.", "The model has no chat template.")
    for whole in (True, False):
        sample = _sample(whole=whole, notes=notes)
        card = data_card(found, texts_of("en"), choice=DataChoice(paths=("x",)), limit=40, sample=sample)
        assert (">Of the 4 rows drawn: In 3 rows" in card) != whole
        assert ">The model has no chat template." in card


def test_before_all_rows_are_read_it_shows_what_the_sample_saw() -> None:
    card = data_card(None, texts_of("en"), choice=DataChoice(paths=("x",)), limit=40, sample=_sample(), ask_again=3)
    for shown in ("JSONL", "UTF-8", ">11<", ">…<", 'data-again="3"', "vf-hist", 'data-token="t0k"'):
        assert shown in card, shown
    assert "data-measured" not in card


def test_without_a_sample_it_says_why_or_asks_again(found: Survey) -> None:
    choice = DataChoice(paths=("x",))
    card = data_card(found, texts_of("en"), choice=choice, limit=None, trouble="There is <no> folder.")
    assert "There is &lt;no&gt; folder." in card
    assert "data-again" not in card
    waiting = data_card(found, texts_of("en"), choice=choice, limit=None, ask_again=7)
    assert 'data-again="7"' in waiting
    assert "data-measured" not in waiting
    assert 'data-again="8"' in reading_card(texts_of("en"), ask_again=8)


@pytest.fixture
def lossy(tmp_path: Path) -> Survey:
    path = tmp_path / "lossy.jsonl"
    rows = [{"question": f"q {n}", "answer": "a" if n % 4 else None} for n in range(40)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return survey([path])


def test_rows_that_are_left_out_are_counted_and_reckoned(lossy: Survey) -> None:
    choice = DataChoice(paths=("x",))
    lost = left_out(lossy, None, choice, 40)
    assert (lost.count, lost.rows, lost.share, lost.about) == (10, 40, 0.25, False)
    part = _sample(whole=False, refused=((7, "no"), (8, "no")))
    assert left_out(lossy, part, choice, 40).reasons == {"'answer' is null or missing": 10, "no": 10, BEYOND: 5}
    assert left_out(lossy, part, choice, 40).about
    exact = _sample(refused=((7, "no"),))
    assert left_out(lossy, exact, choice, None).reasons == {"'answer' is null or missing": 10, "no": 1}
    assert not left_out(lossy, exact, choice, None).about


BEYOND = "what is to be learned lies beyond the maximum length of 40 tokens"


def test_many_rows_left_out_ask_for_a_tick(found: Survey, lossy: Survey) -> None:
    texts = texts_of("en")
    card = data_card(lossy, texts, choice=DataChoice(paths=("x",)), limit=40)
    assert "10 of 40 rows (25.0%) would be left out:" in card
    assert "Train on the rest (30 rows)" in card
    assert 'data-on="0.3" data-off="0.05">' in card
    assert card.count("is null or missing") == 1 + 5  # the reason once, and the rows that are listed
    agreed = data_card(lossy, texts, choice=DataChoice(paths=("x",), most_dropped_share=0.3), limit=40)
    assert 'data-off="0.05" checked>' in agreed
    assert "vf-agree" not in data_card(found, texts, choice=DataChoice(paths=("x",)), limit=40)


def test_a_sample_without_a_usable_row_is_no_error(found: Survey) -> None:
    empty = _sample(lengths=(), trained=(), numbers=(), notes=("No luck.",))
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
