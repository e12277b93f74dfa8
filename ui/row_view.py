"""One row as the model sees it, as HTML: what the page puts into the data card for a number, or for a wish.

Everything that comes out of a file is escaped.
"""

from __future__ import annotations

import html
from itertools import groupby
from typing import Any, Final, Literal

from ui.samples import RowView, Sample, Samples
from ui.texts import Texts
from vramfit.errors import UserError

LINE_END: Final = "↵"
Find = Literal["", "longest", "too_long", "left_out"]


def row_view(
    samples: Samples, texts: Texts, *, token: str, number: int, limit: int | None, how: str, find: Find
) -> dict[str, Any]:
    """The row `number`, counted from 1, of the data that a sample's token stands for, or the one that `find` finds from
    there: the longest of those drawn, the next of these that is too long, the next that is left out. Raises UserError.
    """
    sample = samples.sample(token)
    found, looked = _found(samples, sample, number - 1, limit, find)
    if found is None:
        return {"number": number, "note": texts["data.none_found"].format(number=f"{looked + 1:,}")}
    return row_shown(samples.row(token, found), texts, limit=limit, how=how, files=sample.several)


def _found(samples: Samples, sample: Sample, now: int, limit: int | None, find: Find) -> tuple[int | None, int]:
    """The number from 0 of the row that is wanted, if there is one, and the last that was looked at."""
    if find == "longest" and sample.lengths:
        return max(zip(sample.lengths, sample.numbers, strict=True))[1], now
    if find == "too_long" and limit is not None:
        places = [at for at, length in zip(sample.numbers, sample.lengths, strict=True) if length > limit]
        return next((at for at in places if at > now), places[0] if places else None), now
    if find == "left_out":
        read, looked = samples.next_left_out(sample.token, now)
        refused = next((at for at, _ in sample.refused if at > now), None)
        known = [at for at in (read, refused) if at is not None]
        return min(known, default=None), looked
    if find:
        raise UserError("There is no such way to choose a row", "Reload the page.")
    return now, now


def row_shown(view: RowView, texts: Texts, *, limit: int | None, how: str, files: bool) -> dict[str, Any]:
    """What the page puts into the card for one row: its number from 1, a title, and the row as HTML. `how` is what
    happens beyond the limit: cut, drop or split; `files` whether the title names the file."""
    place = [view.file] if files else []
    if view.line is not None:
        key = "data.place.column" if view.column else "data.place"
        place.append(texts[key].format(line=view.line, column=view.column))
    if view.tokens:
        tokens = ("≈ " if view.about else "") + _count(view.tokens)
        place.append(texts["data.tokens"].format(count=tokens))
    why = view.left_out
    if not why and limit is not None and view.tokens > limit and how == "drop":
        why = texts["data.longer"].format(limit=_count(limit))
    note = f'<p class="vf-row-lost"><b>{_esc(texts["data.row_lost"])}</b> {_esc(why)}</p>' if why else ""
    text = f"<pre>{_pieces(view, limit, how, texts)}</pre>" if view.pieces else ""
    return {
        "number": view.number + 1,
        "title": " · ".join(place),
        "html": f"{note}{text}{_legend(view, limit, how, texts)}",
    }


def _legend(view: RowView, limit: int | None, how: str, texts: Texts) -> str:
    marks = []
    if any(piece.learned for piece in view.pieces):
        marks.append(f"<mark>{_esc(texts['data.learned'])}</mark>")
    if any(piece.special for piece in view.pieces):
        marks.append(f"<b>{_esc(texts['data.special'])}</b>")
    if limit is not None and how == "cut" and view.tokens > limit:
        marks.append(f"<s>{_esc(texts['data.cut'])}</s>")
    return f'<div class="vf-sub vf-legend-row">{" ".join(marks)}</div>' if marks else ""


def _pieces(view: RowView, limit: int | None, how: str, texts: Texts) -> str:
    """The row's text: learned tokens marked, special ones bold, line ends in sight, what is cut off struck, and a line
    where it is split."""
    at, marked = 0, []
    for piece in view.pieces:
        part = at // limit if limit is not None and how in ("cut", "split") else 0
        struck = part > 0 and how == "cut"
        marked.append(((0 if how == "cut" else part, piece.learned and not struck, piece.special, struck), piece.text))
        at += piece.tokens
    drawn: list[str] = []
    now = 0
    for (part, learned, special, struck), run in groupby(marked, key=lambda item: item[0]):
        text = _esc("".join(text for _, text in run)).replace("\n", f"<i>{LINE_END}</i>\n")
        text = f"<b>{text}</b>" if special else text
        text = f"<s>{text}</s>" if struck else f"<mark>{text}</mark>" if learned else text
        drawn.append(("<hr>" if part != now else "") + text)
        now = part
    more = view.tokens - at
    rest = f" <em>{_esc(texts['data.more_tokens'].format(count=_count(more)))}</em>" if more > 0 else ""
    return "".join(drawn) + rest


def _count(number: int) -> str:
    return f"{number:,}"


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
