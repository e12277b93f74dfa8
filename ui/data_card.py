"""Survey and sample -> HTML: what the data is, how long its rows are, and any of the first rows as the model sees it.

Pure functions. Everything that comes out of a file is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Final

from ui.samples import Example, Sample
from ui.texts import Texts
from vramfit.config import DataChoice
from vramfit.data.read import Survey, bad_row_list
from vramfit.units import format_count

BARS: Final = 28
LISTED: Final = 5
"""So many bad rows and warnings are shown."""


@dataclass(frozen=True, kw_only=True)
class Histogram:
    """Rows by length: `counts` of equal steps from 0 to `top` tokens; the last also holds all longer rows."""

    counts: tuple[int, ...]
    top: int

    @property
    def step(self) -> float:
        return self.top / len(self.counts)


def histogram(lengths: Sequence[int], limit: int | None, *, bars: int = BARS) -> Histogram:
    """A scale that shows most rows well: up to the longest, but at most three times what nine in ten rows stay under,
    and up to the limit where that is not far beyond."""
    ordered = sorted(lengths)
    p90 = ordered[(9 * (len(ordered) - 1)) // 10]
    top = min(ordered[-1], 3 * max(p90, 1))
    if limit is not None and limit <= 2 * top:
        top = max(top, round(limit * 1.08))
    top = max(top, bars)
    counts = [0] * bars
    for length in ordered:
        counts[min(int(length * bars / top), bars - 1)] += 1
    return Histogram(counts=tuple(counts), top=top)


@dataclass(frozen=True, kw_only=True)
class Totals:
    """What the sample says of all rows: learned tokens, and the share of rows longer than the limit."""

    trained: int
    too_long_share: float


def totals(sample: Sample, survey: Survey, choice: DataChoice, limit: int) -> Totals:
    """Learned tokens as `too_long` leaves them (a text file's documents are never cut, they are spread)."""
    rows = range(len(sample.lengths))
    how = "split" if survey.format.startswith("text") and choice.too_long == "cut" else choice.too_long
    kept = [row for row in rows if how != "drop" or sample.lengths[row] <= limit]
    trained = sum(sample.trained_tokens(row, limit if how == "cut" else None) for row in kept)
    scale = 1.0 if sample.whole else survey.rows / len(sample.lengths)
    longer = sum(length > limit for length in sample.lengths)
    return Totals(trained=round(trained * scale), too_long_share=longer / len(sample.lengths))


def reading_card(texts: Texts, *, ask_again: int) -> str:
    """The data is being read. The number must be another one each time, or nothing changes in the page."""
    return f'<div class="vf-data vf-data-waiting"><p>{_esc(texts["data.reading"])}</p>{_again(ask_again)}</div>'


def data_card(
    survey: Survey,
    texts: Texts,
    *,
    choice: DataChoice,
    limit: int | None,
    sample: Sample | None = None,
    trouble: str = "",
    ask_again: int | None = None,
) -> str:
    """The whole card. Without a sample: what is known without a tokenizer, and why there is none (`trouble`)."""
    counted = sample if sample is not None and sample.lengths else None
    body = [_head(survey, texts), _facts(survey, counted, texts, choice=choice, limit=limit)]
    body.append(_bad_rows(survey, texts))
    notes = [note for note in survey.warnings if " cannot be read, the first in " not in note]  # listed just above
    body.append(_warnings([*notes, *(sample.notes if sample else ())]))
    if counted is not None:
        body.append(_lengths(counted, survey, texts, limit))
        body.append(_examples(counted.examples, texts, limit=limit, cut=choice.too_long == "cut"))
    elif trouble:
        body.append(f'<p class="vf-sub">{_esc(texts["data.no_tokens"])} {_esc(trouble)}</p>')
    elif ask_again is not None:
        body.append(f'<p class="vf-sub vf-data-counting">{_esc(texts["data.counting"])}</p>')
    body.append("" if ask_again is None else _again(ask_again))
    measured = "" if counted is None else f' data-measured="{survey.content_hash[:12]}-{sum(counted.lengths)}"'
    return f'<div class="vf-data"{measured}>{"".join(body)}</div>'


def _head(survey: Survey, texts: Texts) -> str:
    kinds = (survey.format.upper(), survey.encoding.upper(), survey.shape)
    badges = "".join(f'<span class="vf-badge">{_esc(kind)}</span>' for kind in dict.fromkeys(kinds))
    return f'<div class="vf-data-head"><h3>{_esc(texts["data.title"])}</h3>{badges}</div>'


def _facts(survey: Survey, sample: Sample | None, texts: Texts, *, choice: DataChoice, limit: int | None) -> str:
    facts = [
        ("data.rows", _count(survey.rows), ""),
        ("data.bad", _count(survey.bad_rows), "bad" if survey.bad_rows else ""),
        ("data.duplicates", _count(survey.duplicates), ""),
    ]
    if survey.dropped:
        facts.append(("data.left_out", _count(sum(survey.dropped.values())), "bad"))
    if sample is not None:
        about = "" if sample.whole else "≈ "
        if limit is not None:
            found = totals(sample, survey, choice, limit)
            facts.append(("data.trained", about + format_count(found.trained), ""))
            how = "data.too_long." + choice.too_long
            facts.append((how, f"{about if found.too_long_share else ''}{found.too_long_share:.1%}", ""))
        ordered = sorted(sample.lengths)
        facts.append(("data.median", about + _count(ordered[(len(ordered) - 1) // 2]), ""))
    items = "".join(
        f'<div><dt>{_esc(texts[key])}</dt><dd class="vf-data-{mark}">{_esc(value)}</dd></div>'
        for key, value, mark in facts
    )
    return f'<dl class="vf-data-facts">{items}</dl>'


def _bad_rows(survey: Survey, texts: Texts) -> str:
    several = len(survey.files) > 1
    rows = []
    for row in bad_row_list(survey)[:LISTED]:
        known = "data.column" if row["column"] else "data.line"
        place = texts[known].format(line=row["line"], column=row["column"]) if row["line"] else ""
        place = " · ".join(filter(None, [row["file"] if several else "", place]))
        rows.append(f"<li><b>{_esc(place)}</b> {_esc(row['reason'])}</li>")
    if not rows:
        return ""
    hidden = survey.bad_rows + sum(survey.dropped.values()) - len(rows)
    more = f"<li>{_esc(texts['data.more'].format(count=_count(hidden)))}</li>" if hidden > 0 else ""
    return f'<ul class="vf-data-bad-rows">{"".join(rows)}{more}</ul>'


def _warnings(warnings: Sequence[str]) -> str:
    shown = list(dict.fromkeys(warnings))[:LISTED]
    return "".join(f'<p class="vf-note">{_esc(warning)}</p>' for warning in shown)


def _lengths(sample: Sample, survey: Survey, texts: Texts, limit: int | None) -> str:
    found = histogram(sample.lengths, limit)
    most = max(found.counts)
    bars = "".join(
        f'<i style="height:{max(count / most, 0.03 if count else 0):.1%}"'
        f"{' data-over' if limit is not None and index * found.step >= limit else ''}"
        f' title="{_count(round(index * found.step))}–{_count(round((index + 1) * found.step))}: {_count(count)}"></i>'
        for index, count in enumerate(found.counts)
    )
    line = ""
    if limit is not None and limit <= found.top:
        line = f'<u style="left:{limit / found.top:.2%}" title="{_count(limit)}"></u>'
    key = "data.lengths" if limit is not None else "data.lengths.open"
    title = texts[key].format(limit="" if limit is None else _count(limit))
    key = "data.all_rows" if sample.whole else "data.first_rows"
    label = texts[key].format(count=_count(len(sample.lengths)))
    top = f"{_count(found.top)}{'+' if max(sample.lengths) > found.top else ''}"
    return (
        f'<div class="vf-lengths"><div class="vf-data-line"><b>{_esc(title)}</b><span>{_esc(label)}</span></div>'
        f'<div class="vf-hist">{bars}{line}</div>'
        f'<div class="vf-data-line vf-data-axis"><span>0</span><span>{_esc(top)}</span></div></div>'
    )


def _examples(examples: Sequence[Example], texts: Texts, *, limit: int | None, cut: bool) -> str:
    if not examples:
        return ""
    rows = []
    for index, example in enumerate(examples):
        title = texts["data.row"].format(line=example.line, tokens=_count(example.tokens))
        hidden = " hidden" if index else ""
        rows.append(
            f'<div class="vf-row-view" data-title="{_esc(title)}"{hidden}>'
            f"<pre>{_pieces(example, limit if cut else None)}</pre></div>"
        )
    struck = cut and limit is not None and any(example.tokens > limit for example in examples)
    legend = f" <s>{_esc(texts['data.cut'])}</s>" if struck else ""
    first = texts["data.row"].format(line=examples[0].line, tokens=_count(examples[0].tokens))
    return (
        f'<div class="vf-examples"><div class="vf-data-line"><b>{_esc(texts["data.preview"])}</b>'
        f'<span class="vf-row-title">{_esc(first)}</span><span class="vf-turn">'
        f'<button type="button" data-turn="-1" aria-label="{_esc(texts["data.previous"])}">‹</button>'
        f'<button type="button" data-turn="1" aria-label="{_esc(texts["data.next"])}">›</button></span></div>'
        f"{''.join(rows)}"
        f'<div class="vf-sub"><mark>{_esc(texts["data.learned"])}</mark>'
        f"{legend}</div></div>"
    )


def _pieces(example: Example, limit: int | None) -> str:
    """The row's text: learned tokens marked, those beyond the limit struck."""
    at, marked = 0, []
    for text, learned, count in example.pieces:
        beyond = limit is not None and at >= limit
        marked.append(((learned and not beyond, beyond), text))
        at += count
    drawn = []
    for (learned, beyond), run in groupby(marked, key=lambda item: item[0]):
        text = _esc("".join(text for _, text in run))
        drawn.append(f"<s>{text}</s>" if beyond else f"<mark>{text}</mark>" if learned else text)
    return "".join(drawn) + ("" if at >= example.tokens else " …")


def _again(number: int) -> str:
    return f'<i hidden data-again="{number}"></i>'


def _count(number: int) -> str:
    return f"{number:,}"


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
