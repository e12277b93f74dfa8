"""Survey and sample -> HTML: what the data is, how long its rows are, and any row of it as the model sees it.

Pure functions. Everything that comes out of a file is escaped.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from ui.samples import Sample
from ui.texts import Texts
from vramfit.config import DataChoice
from vramfit.data.read import Survey, bad_row_list
from vramfit.data.report import agreed_share
from vramfit.units import format_count

BARS: Final = 28
LISTED: Final = 5
"""So many bad rows and warnings are shown."""
UNASKED_SHARE: Final = DataChoice().most_dropped_share


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


def totals(sample: Sample, rows: int, choice: DataChoice, limit: int) -> Totals:
    """Learned tokens of `rows` usable rows as `too_long` leaves them (a text's documents are spread, never cut)."""
    how = "split" if sample.spread and choice.too_long == "cut" else choice.too_long
    kept = [row for row, length in enumerate(sample.lengths) if how != "drop" or length <= limit]
    trained = sum(sample.trained_tokens(row, limit if how == "cut" else None) for row in kept)
    drawn = len(sample.lengths)
    scale = 1.0 if sample.whole else rows / (drawn + len(sample.refused))
    return Totals(trained=round(trained * scale), too_long_share=sum(n > limit for n in sample.lengths) / drawn)


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """Rows that can be read and would not be trained on, by reason, of `rows` that can be read; `about` where they were
    reckoned from a part."""

    reasons: Counter[str]
    rows: int
    about: bool = False

    @property
    def count(self) -> int:
        return self.reasons.total()

    @property
    def share(self) -> float:
        return self.count / max(self.rows, 1)


def left_out(survey: Survey, sample: Sample | None, choice: DataChoice, limit: int | None) -> LeftOut:
    """What is left out for what rows hold, counted in all of them, and for what a model makes of them, in a sample."""
    reasons = Counter(survey.dropped)
    rows = survey.rows + reasons.total()
    if sample is None or not (sample.lengths or sample.refused):
        return LeftOut(reasons=reasons, rows=rows)
    scale = 1.0 if sample.whole else survey.rows / (len(sample.lengths) + len(sample.refused))
    found = {reason: round(count * scale) for reason, count in sample.left_out(choice, limit).items()}
    return LeftOut(reasons=reasons + Counter(found), rows=rows, about=bool(found) and not sample.whole)


def reading_card(texts: Texts, *, ask_again: int) -> str:
    """The data is being read. The number must be another one each time, or nothing changes in the page."""
    return f'<div class="vf-data vf-data-waiting"><p>{_esc(texts["data.reading"])}</p>{_again(ask_again)}</div>'


def data_card(
    survey: Survey | None,
    texts: Texts,
    *,
    choice: DataChoice,
    limit: int | None,
    sample: Sample | None = None,
    trouble: str = "",
    ask_again: int | None = None,
) -> str:
    """The whole card. What is not known yet is left open: the survey while all rows are being read, the sample while a
    tokenizer counts, or why there is none (`trouble`)."""
    counted = sample if sample is not None and sample.lengths else None
    lost = left_out(survey, sample, choice, limit) if survey is not None else None
    body = [_head(survey, sample, texts), _facts(survey, counted, lost, texts, choice=choice, limit=limit)]
    if survey is not None and lost is not None:
        body += [_bad_rows(survey, texts), _agreement(lost, choice, texts)]
    body.append(_warnings(_notes(survey, sample, lost, texts)))
    if counted is not None:
        body.append(_lengths(counted, texts, limit))
    elif trouble:
        body.append(f'<p class="vf-sub">{_esc(texts["data.no_tokens"])} {_esc(trouble)}</p>')
    elif ask_again is not None:
        body.append(f'<p class="vf-sub vf-data-counting">{_esc(texts["data.counting"])}</p>')
    if sample is not None:
        body.append(_preview(survey, sample, choice, limit, texts))
    body.append("" if ask_again is None else _again(ask_again))
    return f'<div class="vf-data"{_measured(survey, counted)}>{"".join(body)}</div>'


def _measured(survey: Survey | None, sample: Sample | None) -> str:
    """What changes when the estimate has to be made again."""
    if survey is None or sample is None:
        return ""
    return f' data-measured="{survey.content_hash[:12]}-{sample.token}"'


def _head(survey: Survey | None, sample: Sample | None, texts: Texts) -> str:
    seen: Any = survey or sample
    kinds = (seen.format.upper(), seen.encoding.upper(), seen.shape) if seen is not None else ()
    badges = "".join(f'<span class="vf-badge">{_esc(kind)}</span>' for kind in dict.fromkeys(kinds))
    return f'<div class="vf-data-head"><h3>{_esc(texts["data.title"])}</h3>{badges}</div>'


def _facts(
    survey: Survey | None,
    sample: Sample | None,
    lost: LeftOut | None,
    texts: Texts,
    *,
    choice: DataChoice,
    limit: int | None,
) -> str:
    open_ = texts["data.open"]
    if survey is None or lost is None:
        total = sample.total if sample is not None else None
        facts = [("data.rows", open_ if total is None else _count(total), "")]
        facts += [("data.bad", open_, ""), ("data.duplicates", open_, "")]
    else:
        facts = [
            ("data.rows", _count(survey.rows), ""),
            ("data.bad", _count(survey.bad_rows), "bad" if survey.bad_rows else ""),
            ("data.duplicates", _count(survey.duplicates), ""),
        ]
        if lost.count:
            facts.append(("data.left_out", ("≈ " if lost.about else "") + _count(lost.count), "bad"))
    if sample is not None:
        about = "" if sample.whole else "≈ "
        rows = survey.rows if survey is not None else sample.total
        if limit is not None and rows is not None:
            found = totals(sample, rows, choice, limit)
            facts.append(("data.trained", about + format_count(found.trained), ""))
            how = "data.too_long." + ("split" if sample.spread and choice.too_long == "cut" else choice.too_long)
            facts.append((how, f"{about if found.too_long_share else ''}{found.too_long_share:.1%}", ""))
        ordered = sorted(sample.lengths)
        facts.append(("data.median", about + _count(ordered[(len(ordered) - 1) // 2]), ""))
    items = "".join(
        f'<div><dt>{_esc(texts[key])}</dt><dd class="vf-data-{mark}">{_esc(value)}</dd></div>'
        for key, value, mark in facts
    )
    return f'<dl class="vf-data-facts">{items}</dl>'


def _agreement(lost: LeftOut, choice: DataChoice, texts: Texts) -> str:
    """The tick without which Start refuses to leave out that many rows."""
    if lost.share <= UNASKED_SHARE:
        return ""
    about = "≈ " if lost.about else ""
    values = {"count": about + _count(lost.count), "rows": _count(lost.rows), "share": f"{lost.share:.1%}"}
    reasons = "".join(f"<li>{about}{_count(n)}: {_esc(why)}</li>" for why, n in lost.reasons.most_common(LISTED))
    ticked = " checked" if lost.share <= choice.most_dropped_share else ""
    rest = texts["data.agree"].format(count=about + _count(lost.rows - lost.count))
    return (
        f'<div class="vf-agree" id="field-agree"><b>{_esc(texts["data.lost"].format(**values))}</b>'
        f'<ul>{reasons}</ul><label><input type="checkbox" data-set="data.most_dropped_share" '
        f'data-on="{agreed_share(lost.share):g}" data-off="{UNASKED_SHARE:g}"{ticked}> {_esc(rest)}</label></div>'
    )


def _notes(survey: Survey | None, sample: Sample | None, lost: LeftOut | None, texts: Texts) -> list[str]:
    """Sentences of the survey and the sample, without what stands in the card anyway."""
    notes: list[str] = []
    if survey is not None:
        listed = (" cannot be read, the first in ", *([" rows are left out: "] if _asks(lost) else []))
        notes += [note for note in survey.warnings if not any(part in note for part in listed)]
        if lost is not None and not _asks(lost):
            more = lost.reasons - Counter(survey.dropped)
            about = "About " if lost.about else ""
            notes += [
                f"{about}{count:,} row{'' if count == 1 else 's'} left out: {reason}."
                for reason, count in more.most_common()
            ]
    return [*notes, *(_of_drawn(note, sample, texts) for note in (sample.notes if sample is not None else ()))]


def _of_drawn(note: str, sample: Sample | None, texts: Texts) -> str:
    """A sentence of the sample; one that counts rows says that these are only the drawn ones."""
    if sample is None or sample.whole or not any(char.isdigit() for char in note):
        return note
    return texts["data.of_drawn"].format(count=_count(len(sample.lengths)), note=note)


def _asks(lost: LeftOut | None) -> bool:
    return lost is not None and lost.share > UNASKED_SHARE


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


def _lengths(sample: Sample, texts: Texts, limit: int | None) -> str:
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
    key = "data.all_rows" if sample.whole else "data.even_rows" if sample.even else "data.first_rows"
    label = texts[key].format(count=_count(len(sample.lengths)))
    top = f"{_count(found.top)}{'+' if max(sample.lengths) > found.top else ''}"
    return (
        f'<div class="vf-lengths"><div class="vf-data-line"><b>{_esc(title)}</b><span>{_esc(label)}</span></div>'
        f'<div class="vf-hist">{bars}{line}</div>'
        f'<div class="vf-data-line vf-data-axis"><span>0</span><span>{_esc(top)}</span></div></div>'
    )


def _preview(survey: Survey | None, sample: Sample, choice: DataChoice, limit: int | None, texts: Texts) -> str:
    """The place for one row and the ways to choose it; assets/panel.js asks for it (row_view.py) and puts it in."""
    total = sample.total
    if survey is not None:
        total = survey.rows + survey.bad_rows + sum(survey.dropped.values())
    how = "split" if sample.spread and choice.too_long == "cut" else choice.too_long
    jumps = ["random", "longest"] if sample.lengths else []
    jumps += ["too_long"] if limit is not None and any(length > limit for length in sample.lengths) else []
    if survey is None or survey.bad_rows or survey.dropped or sample.refused:
        jumps.append("left_out")
    buttons = "".join(
        f'<button type="button" data-find="{one}">{_esc(texts["data.find." + one])}</button>' for one in jumps
    )
    most = "" if total is None else f' max="{total}"'
    of = "" if total is None else f"<span>{_esc(texts['data.of'].format(count=_count(total)))}</span>"
    return (
        f'<div class="vf-examples" data-token="{_esc(sample.token)}" data-limit="{"" if limit is None else limit}" '
        f'data-how="{how}"><div class="vf-data-line"><b>{_esc(texts["data.preview"])}</b>'
        f'<span class="vf-row-title"></span></div><div class="vf-row-tools"><span class="vf-turn">'
        f'<button type="button" data-turn="-1" aria-label="{_esc(texts["data.previous"])}">‹</button>'
        f'<label>{_esc(texts["data.row_number"])}<input type="number" min="1"{most} value="1" data-row></label>{of}'
        f'<button type="button" data-turn="1" aria-label="{_esc(texts["data.next"])}">›</button></span>'
        f'<span class="vf-jumps">{buttons}</span></div>'
        f'<div class="vf-row-view"><p class="vf-sub">{_esc(texts["data.row_comes"])}</p></div></div>'
    )


def _again(number: int) -> str:
    return f'<i hidden data-again="{number}"></i>'


def _count(number: int) -> str:
    return f"{number:,}"


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
