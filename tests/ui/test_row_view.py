"""One row in the data card: what is learned, special, cut and split is in sight, no text is markup; rows found."""

from __future__ import annotations

from typing import Any

import pytest

from ui.row_view import row_shown, row_view
from ui.samples import Piece, RowView, Sample
from ui.texts import texts_of
from vramfit.errors import UserError

EVIL = '<img src=x onerror="alert(1)">'
TEXTS = texts_of("en")


def _view(*pieces: tuple[str, bool, int, bool], **changes: Any) -> RowView:
    values: dict[str, Any] = {
        "number": 6, "file": "a.jsonl", "line": 9, "tokens": sum(count for _, _, count, _ in pieces), "about": False,
        "left_out": "",
    }  # fmt: skip
    return RowView(pieces=tuple(Piece(*piece) for piece in pieces), **{**values, **changes})


ROW = _view(("<|im|>", False, 1, True), ("ask\n", False, 1, False), (EVIL, True, 2, False), ("end", True, 1, False))


def _shown(view: RowView, *, limit: int | None = None, how: str = "cut", files: bool = False) -> dict[str, Any]:
    return row_shown(view, TEXTS, limit=limit, how=how, files=files)


def test_learned_special_and_line_ends_are_in_sight_and_no_text_is_markup() -> None:
    shown = _shown(ROW)
    assert shown["number"] == 7
    assert shown["title"] == "line 9 · 5 tokens"
    assert (
        "<pre><b>&lt;|im|&gt;</b>ask<i>↵</i>\n<mark>&lt;img src=x onerror=&quot;alert(1)&quot;&gt;end</mark></pre>"
        in (shown["html"])
    )
    assert "<img" not in shown["html"]
    assert "<s>" not in shown["html"]


def test_what_is_cut_is_struck_and_not_learned() -> None:
    shown = _shown(ROW, limit=4)["html"]
    assert "</mark><s>end</s></pre>" in shown
    assert "<s>cut off</s>" in shown


def test_a_split_row_shows_where() -> None:
    shown = _shown(_view(*[("a", True, 1, False)] * 5), limit=2, how="split")["html"]
    assert "<pre><mark>aa</mark><hr><mark>aa</mark><hr><mark>a</mark></pre>" in shown


def test_a_row_that_is_left_out_says_why() -> None:
    assert "it is longer than 4 tokens" in _shown(ROW, limit=4, how="drop")["html"]
    shown = _shown(_view(line=3, column=8, left_out=f"no {EVIL}"))
    assert shown["title"] == "line 3, column 8"
    assert "<b>Left out:</b> no &lt;img" in shown["html"]
    assert "<pre>" not in shown["html"]


def test_the_file_is_named_where_there_are_several_and_the_rest_is_counted() -> None:
    shown = _shown(_view(("a", True, 1, False), tokens=1234, about=True), files=True)
    assert shown["title"] == "a.jsonl · line 9 · ≈ 1,234 tokens"
    assert "… and 1,233 more tokens" in shown["html"]


class Rows:
    """In the place of Samples: two rows that cannot be read, and a sample of four."""

    found = Sample(
        lengths=(5, 90, 20, 70), trained=((),) * 4, numbers=(0, 3, 6, 9), refused=((5, "no"),), whole=False, token="t"
    )

    def sample(self, token: str) -> Sample:
        assert token == "t"
        return self.found

    def row(self, token: str, number: int) -> RowView:
        return _view(number=number)

    def next_left_out(self, token: str, after: int) -> tuple[int | None, int]:
        return next((number for number in (2, 7) if number > after), None), 11


@pytest.mark.parametrize(
    ("find", "now", "row"),
    [
        ("", 5, 5), ("longest", 1, 4), ("too_long", 1, 4), ("too_long", 4, 10), ("too_long", 10, 4),
        ("left_out", 1, 3), ("left_out", 3, 6), ("left_out", 6, 8),
    ],
)  # fmt: skip
def test_rows_are_found(find: Any, now: int, row: int) -> None:
    assert row_view(Rows(), TEXTS, token="t", number=now, limit=50, how="cut", find=find)["number"] == row


def test_nothing_found_is_said_with_how_far_was_looked() -> None:
    found = row_view(Rows(), TEXTS, token="t", number=9, limit=50, how="cut", find="left_out")
    assert found == {"number": 9, "note": "None found up to row 12."}
    with pytest.raises(UserError):
        row_view(Rows(), TEXTS, token="t", number=9, limit=50, how="cut", find="nonsense")
