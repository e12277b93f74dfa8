"""`docs/accuracy.md` and its scatter plot, from what `estimator_accuracy.py` found."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, Protocol

_INK, _GRID, _FAINT = "#1f2937", "#e5e7eb", "#6b7280"
_COLOURS: Final = ("#2563eb", "#dc2626", "#059669", "#d97706", "#7c3aed", "#0891b2", "#be185d", "#4d7c0f", "#9ca3af")
_SIZE, _LEFT, _TOP, _LEGEND = 520, 64, 44, 190


_ASSUMED_MACHINE: Final = (
    "",
    '''The speed of one source's 3090s rests on an assumption: its text says "older motherboard and slow PCI lanes"''',
    "and 280 W a card, and PCIe 3.0 x8 (6.4 GB/s) is what is made of that. Of its 70B that streams (QLoRA, parameters",
    "in RAM, two cards) the estimate is 12 % below the published tokens/s so, and 24 % above with the catalogue's link",
    "and power. On two 4090s, as the catalogue has them, it is 18 % below. Reserved memory of both is 16 % below.",
)
"""What `reference_speed.MACHINES` makes of a source's words, and what that is worth; a test has the figures."""


_CAPPED_C: Final = (
    "Rows of quality C are not held to that. ms-swift's are the most its allocator ever *reserved* in a run over rows",
    "of all lengths without padding: each new length leaves blocks that fit no other, so the figure climbs towards the",
    "card and says little of what a run needs; its targets and optimizer are inferred, and it has no record here.",
    "Unsloth's are outputs saved in notebooks, some older than the code above them, whose real lengths nobody knows.",
    "",
)
"""Why the goal is for A and B, from what the rows' own notes say."""


class Compared(Protocol):
    """A row of the comparison, as `estimator_accuracy.Compared` is."""

    @property
    def source(self) -> str: ...
    @property
    def program(self) -> str: ...
    @property
    def quality(self) -> str: ...
    @property
    def capped(self) -> bool: ...
    @property
    def judged(self) -> bool: ...
    @property
    def weight(self) -> float: ...
    @property
    def measured_gib(self) -> float: ...
    @property
    def predicted_gib(self) -> float: ...
    @property
    def error(self) -> float: ...
    @property
    def stand_in(self) -> str: ...


def write_page(folder: Path, found: dict[str, Any], rows: Sequence[Compared]) -> None:
    """Write accuracy.md and accuracy.svg into `folder`."""
    (folder / "accuracy.svg").write_text(scatter([row for row in rows if row.judged]), encoding="utf-8", newline="\n")
    (folder / "accuracy.md").write_text("\n".join(_page(found, rows)) + "\n", encoding="utf-8", newline="\n")


# --- the page --------------------------------------------------------------------------------------------------------


def _page(found: dict[str, Any], rows: Sequence[Compared]) -> Iterator[str]:
    yield from (
        "# How accurate the estimate is",
        "",
        "Predicted against published measurements; `python bench/estimator_accuracy.py ROWS.csv --oom OOM.csv`",
        "writes this page. Errors are relative. Memory allocated is derived, nothing in it fitted: a program's",
        "record says what it keeps and makes, and the same formulas hold for all. Three numbers are not derived: how",
        "much more sharded frozen blocks fragment than the replay says (1.5, from 22 completed runs), the 0.55 GiB",
        "that driver and libraries take of a card at least (an A100's context, read off two of these rows), and the",
        "overhead the planner adds per phase (from replays of our own program). Copies of one measurement count",
        "once; in the second line every source weighs the same.",
        "",
        "![Predicted against measured memory, both axes logarithmic](accuracy.svg)",
        "",
        "| what | rows | median | 90th percentile | goal |",
        "|---|---:|---:|---:|---|",
    )
    yield _line("allocated, quality A", found["allocated_A"], "2 % / 6 %")
    yield _line("allocated or reserved, quality A and B", found["all_AB"], "5 % / 20 %")
    yield ""
    yield from _fits(found)
    yield from _ASSUMED_MACHINE
    for field in ("program", "method", "recompute", "metric", "source"):
        yield from ("", f"## By {field}", "", f"| {field} | rows | median | 90th percentile |", "|---|---:|---:|---:|")
        yield from (_line(_short(name), value) for name, value in found["by"][field].items())
    yield from _capped([row for row in rows if row.capped])
    yield from _stand_ins(rows)
    yield from _skipped(found["skipped"])


def _fits(found: dict[str, Any]) -> Iterator[str]:
    oom, completed, speed = found["oom"], found["completed"], found["speed"]
    if oom["n"]:
        yield f"Of {oom['n']} runs that ran out of memory, {oom['caught']} are predicted not to fit (goal: 95 %)."
    yield (
        f"Of {completed['n']} runs that completed on a card of known size, {completed['false_alarms']} are predicted "
        "not to fit (goal: at most 2 %)."
    )
    if speed["n"]:
        order = f"{100 * speed['pair_order']:.0f} %" if speed["pair_order"] is not None else "-"
        yield (
            f"Tokens/s of {speed['n']} runs: median error {100 * speed['median']:.1f} % (goal: 20 %), "
            f"order of two runs of one source right in {order} (goal: 93 %)."
        )
    if speed["A"]["n"]:
        median = f"{100 * speed['A']['median']:.1f}"
        yield f"Of these, {speed['A']['n']} are of quality A: median error {median} % (goal: 15 %)."


def _capped(rows: Sequence[Compared]) -> Iterator[str]:
    """Rows whose samples were shorter than the length: the estimate at the cap may be above, never below by 5 %."""
    if not rows:
        return
    yield from (
        "",
        "## Lengths known only as a cap",
        "",
        "Real samples were shorter. The estimate at the cap must be at least what was measured less 5 %.",
        "",
        *(_CAPPED_C if any(row.quality == "C" for row in rows) else ()),
        "| program | quality | rows | at or above | lowest |",
        "|---|---|---:|---:|---:|",
    )
    for program, quality in sorted({(row.program, row.quality) for row in rows}):
        errors = [row.error for row in rows if (row.program, row.quality) == (program, quality)]
        reached = sum(error >= -0.05 for error in errors)
        yield f"| {program} | {quality} | {len(errors)} | {reached} | {100 * min(errors):+.1f} % |"


def _stand_ins(rows: Sequence[Compared]) -> Iterator[str]:
    """Programs nobody wrote a record for, and which was taken."""
    taken = Counter((row.program, row.stand_in) for row in rows if row.stand_in)
    if taken:
        yield from (
            "",
            "## Programs without a record",
            "",
            "What their columns say is taken for another program's.",
            "",
        )
        yield from (f"- {program} ({count} rows): {record}" for (program, record), count in sorted(taken.items()))


def _skipped(skipped: Sequence[dict[str, str]]) -> Iterator[str]:
    if skipped:
        yield from ("", "## Left out", "")
        yield from (f"- {row['id']}: {row['reason']}" for row in skipped)


def _line(name: str, value: dict[str, Any], goal: str | None = None) -> str:
    figures = " | ".join("-" if value[key] is None else f"{100 * value[key]:.1f} %" for key in ("median", "p90"))
    return f"| {name} | {value['n']} | {figures} |" + (f" {goal} |" if goal else "")


def _short(name: str) -> str:
    """An address without its scheme, host and branch."""
    parts = name.split("/")
    return "/".join((*parts[3:5], parts[-1])) if name.startswith("https://") and len(parts) > 5 else name


# --- the plot --------------------------------------------------------------------------------------------------------


def scatter(rows: Sequence[Compared]) -> str:
    """Predicted against measured GiB, log-log, as SVG: a dot a row, filled for quality A, coloured by program; the band
    is 10 % to both sides."""
    values = [value for row in rows for value in (row.measured_gib, row.predicted_gib)] or [1.0, 10.0]
    low, high = math.log(min(values) * 0.9), math.log(max(values) * 1.1)
    families = list(dict.fromkeys(_family(row.program) for row in rows))

    def place(gib: float) -> float:
        return _SIZE * (math.log(gib) - low) / (high - low)

    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_LEFT + _SIZE + _LEGEND} {_TOP + _SIZE + 60}" '
        'font-family="system-ui, sans-serif" font-size="13">',
        f'<rect width="100%" height="100%" fill="#ffffff"/><text x="{_LEFT}" y="24" fill="{_INK}" font-size="16">'
        "Predicted against measured peak memory</text>",
        f'<g transform="translate({_LEFT} {_TOP})">',
        *_axes(place, math.exp(low), math.exp(high)),
        *(_dot(row, place, _COLOURS[families.index(_family(row.program)) % len(_COLOURS)]) for row in rows),
        *_legend(families),
        "</g></svg>",
    ]
    return "\n".join(lines) + "\n"


def _axes(place: Any, low: float, high: float) -> Iterator[str]:
    """Grid, diagonal with its band, labels."""
    ticks = [tick for tick in (1, 2, 5, 10, 20, 50, 100, 200) if low <= tick <= high]
    shift = place(1.1 * low)  # 10 % on a logarithmic axis, wherever it is
    yield f'<clipPath id="inside"><rect width="{_SIZE}" height="{_SIZE}"/></clipPath>'
    yield (
        f'<polygon clip-path="url(#inside)" fill="#f3f4f6" points="0,{_SIZE + shift:.1f} {_SIZE},{shift:.1f} '
        f'{_SIZE},{-shift:.1f} 0,{_SIZE - shift:.1f}"/>'
    )
    for tick in ticks:
        at = place(tick)
        yield f'<path d="M{at:.1f} 0V{_SIZE}M0 {_SIZE - at:.1f}H{_SIZE}" stroke="{_GRID}" fill="none"/>'
        yield f'<text x="{at:.1f}" y="{_SIZE + 20}" text-anchor="middle" fill="{_FAINT}">{tick}</text>'
        yield f'<text x="-10" y="{_SIZE - at + 4:.1f}" text-anchor="end" fill="{_FAINT}">{tick}</text>'
    yield f'<path d="M0 {_SIZE}L{_SIZE} 0" stroke="{_FAINT}" stroke-dasharray="4 4"/>'
    yield f'<rect width="{_SIZE}" height="{_SIZE}" fill="none" stroke="{_FAINT}"/>'
    middle = _SIZE / 2
    yield f'<text x="{middle}" y="{_SIZE + 44}" text-anchor="middle" fill="{_INK}">measured, GiB</text>'
    place_of_label = f'transform="translate(-44 {middle}) rotate(-90)" text-anchor="middle"'
    yield f'<text {place_of_label} fill="{_INK}">predicted, GiB</text>'


def _dot(row: Compared, place: Any, colour: str) -> str:
    fill = colour if row.quality == "A" else "none"
    x, y = place(row.measured_gib), _SIZE - place(row.predicted_gib)
    title = f"{row.program}: {row.measured_gib:.2f} GiB measured, {row.predicted_gib:.2f} predicted ({row.error:+.1%})"
    return (
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{fill}" fill-opacity="0.7" stroke="{colour}">'
        f"<title>{escape(title)}</title></circle>"
    )


def _legend(families: Iterable[str]) -> Iterator[str]:
    at = 8
    for number, name in enumerate(families):
        colour = _COLOURS[number % len(_COLOURS)]
        yield f'<circle cx="{_SIZE + 18}" cy="{at}" r="4" fill="{colour}"/>'
        yield f'<text x="{_SIZE + 30}" y="{at + 4}" fill="{_INK}">{escape(name)}</text>'
        at += 20
    for text, fill in (("quality A", _FAINT), ("quality B", "none")):
        yield f'<circle cx="{_SIZE + 18}" cy="{at + 10}" r="4" fill="{fill}" stroke="{_FAINT}"/>'
        yield f'<text x="{_SIZE + 30}" y="{at + 14}" fill="{_INK}">{text}</text>'
        at += 20


def _family(program: str) -> str:
    return program.partition("/")[0].partition("+")[0]
