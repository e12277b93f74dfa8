"""The control that says which column is which: filled with what was recognised, or with a guess that is marked as one.

Pure functions. assets/panel.js reads the choice out of it and hands it to the form's field `data.columns`.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Final

from ui.texts import Texts
from vramfit.data.mapping import MAPPED_KINDS, MappedKind

SHOWN_CHARS: Final = 40


def column_map(
    columns: Mapping[str, str],
    mapping: Mapping[str, str],
    texts: Texts,
    *,
    chosen: bool = False,
    guessed: bool = False,
    wrong: bool = False,
) -> str:
    """The control for a file's `columns` (each with a value of its first rows), filled with `mapping` (part to column).

    `chosen`: the form has a mapping of its own, which can be forgotten. `guessed`: this one is only a guess. `wrong`:
    nothing can be read with what the form has now, so the control is open.
    """
    if not columns:
        return ""
    kind = kind_of(mapping)
    kinds = "".join(_option(one.name, texts["map.kind." + one.name], one is kind) for one in MAPPED_KINDS)
    parts = "".join(
        _parts(one, columns, mapping if one is kind else {}, texts, shown=one is kind) for one in MAPPED_KINDS
    )
    note = f'<p class="vf-note">{_esc(texts["map.guess"])}</p>' if guessed else ""
    forget = f'<button type="button" data-forget>{_esc(texts["map.forget"])}</button>' if chosen else ""
    summary = "" if wrong else f"<span>{_esc(' · '.join(mapping.values()))}</span>"
    return (
        f'<details class="vf-map"{" open" if wrong else ""}><summary>{_esc(texts["map.title"])} {summary}</summary>'
        f'{note}<div class="vf-map-kind"><label><span>{_esc(texts["map.kind"])}</span>'
        f"<select data-kind>{kinds}</select></label></div>{parts}"
        f'<div class="vf-map-do"><button type="button" data-use>{_esc(texts["map.use"])}</button>{forget}</div>'
        "</details>"
    )


def kind_of(mapping: Mapping[str, str]) -> MappedKind:
    """The kind of rows a mapping is for; the first one where it is for none."""
    return next((kind for kind in MAPPED_KINDS if set(kind.needs) <= set(mapping)), MAPPED_KINDS[0])


def _parts(
    kind: MappedKind, columns: Mapping[str, str], mapping: Mapping[str, str], texts: Texts, *, shown: bool
) -> str:
    rows = []
    for part in kind.parts:
        needed = part in kind.needs
        none = "" if needed and mapping.get(part) else _option("", texts["map.none"], part not in mapping)
        options = "".join(
            _option(name, _named(name, value), mapping.get(part) == name) for name, value in columns.items()
        )
        rows.append(
            f"<label><span>{_esc(texts['map.part.' + part])}</span>"
            f'<select data-part="{part}"{" data-needed" if needed else ""}>{none}{options}</select></label>'
        )
    return f'<div class="vf-map-parts" data-for="{kind.name}"{"" if shown else " hidden"}>{"".join(rows)}</div>'


def _named(name: str, value: str) -> str:
    """A column by its name, and by a value of it."""
    text = f"{value[:SHOWN_CHARS]}…" if len(value) > SHOWN_CHARS else value
    return f"{name} — {text}" if text else name


def _option(value: str, label: str, selected: bool) -> str:
    return f'<option value="{_esc(value)}"{" selected" if selected else ""}>{_esc(label)}</option>'


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
