"""What bench/engine.py says: figures with their goals, techniques with and without, their part of the benchmarks."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from engine_techniques import TECHNIQUES
from engine_works import ROOT

PAGE: Final = ROOT / "docs" / "benchmarks.md"
HEADING: Final = "## The engine"
ABOUT: Final = (
    "Ratios are medians of steps taken in turns by two processes; memory is one step's, above the weights. The",
    "Trainer has fused AdamW, SDPA, no logging, the whole step as one batch padded to its longest row,",
    "`group_by_length` off (the rows of a step are given); and the same threads, rows, learning rate and clipping.",
    "Lines carry their day and the machine's load: one that is measured alone is put in its place, the others stay.",
)
FIGURES: Final = ("| what | measured | goal | |", "|---|---|---|---|")
ROWS: Final = (
    "| technique | speed | tokens/s | MiB, allocator | MiB, resident set | losses apart | |",
    "|---|---|---|---|---|---|---|",
)


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number; None where it could not be measured, and `note` says why. `at_most`: the goal is an upper limit."""

    name: str
    value: float | None
    unit: str
    goal: float | None = None
    at_most: bool = False
    note: str = ""

    @property
    def met(self) -> bool | None:
        if self.goal is None or self.value is None:
            return None
        return self.value <= self.goal if self.at_most else self.value >= self.goal

    @property
    def measured(self) -> str:
        return "not measured" if self.value is None else f"{self.value:.3g} {self.unit}"

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "goal": self.goal,
            "met": self.met,
            "note": self.note,
        }


@dataclass(frozen=True, kw_only=True)
class Row:
    """A technique with and without it: trained tokens/s and MiB above the weights; or why it was not run."""

    name: str
    faster: float = 0.0
    tokens_per_s: tuple[float, float] = (0.0, 0.0)
    allocated: tuple[float, float] = (0.0, 0.0)
    resident: tuple[float, float] = (0.0, 0.0)
    loss_difference: float = 0.0
    same_loss: float | None = None
    why_not: str = ""
    note: str = ""

    @property
    def as_expected(self) -> bool:
        return bool(self.why_not) or self.same_loss is None or self.loss_difference <= self.same_loss

    def figures(self) -> Iterator[Figure]:
        """Its numbers one by one. Only that losses are the same is a goal: what a technique costs is not promised."""
        if self.why_not:
            yield Figure(name=f"{self.name}: speed", value=None, unit="x", note=f"not run: {self.why_not}")
            return
        with_, without = self.tokens_per_s
        speeds = f"{with_:.0f} against {without:.0f} trained tokens/s; {self.note}"
        yield Figure(name=f"{self.name}: speed", value=self.faster, unit="x", note=speeds)
        for what, (one, other) in (("allocator", self.allocated), ("resident set", self.resident)):
            if other:
                sizes = f"{one:.0f} against {other:.0f} MiB"
                name = f"{self.name}: peak above the weights, {what}"
                yield Figure(name=name, value=one / other, unit="x", note=sizes)
        yield Figure(
            name=f"{self.name}: loss difference",
            value=self.loss_difference,
            unit="relative",
            goal=self.same_loss,
            at_most=True,
        )


def figure_line(figure: Figure) -> str:
    verdict = "" if figure.goal is None else f"  goal {figure.goal:g}: {'met' if figure.met else 'NOT met'}"
    return f"{figure.name:<66} {figure.measured:>14}{verdict}  {figure.note}"


def row_line(row: Row) -> str:
    if row.why_not:
        return f"{row.name:<36} not run: {row.why_not}"
    mark = "" if row.as_expected else "  LOSS DIFFERS"
    speeds = f"{row.faster:6.2f} x  {row.tokens_per_s[0]:8.0f} / {row.tokens_per_s[1]:.0f} tokens/s"
    sizes = f"{row.allocated[0]:8.0f} / {row.allocated[1]:.0f} MiB"
    return f"{row.name:<36}{speeds}  {sizes}  losses apart {row.loss_difference:.1g}{mark}  {row.note}"


def page(figures: Sequence[Figure], rows: Sequence[Row], notes: Sequence[str], *, before: str = "") -> str:
    """The engine's part of docs/benchmarks.md. Of `before`, the part as it was, lines stay that were not measured."""
    lines = [HEADING, "", f"`python bench/engine.py --write`: {notes[0]}; at the end: {notes[-1]}.", *ABOUT]
    kept = _lines_by_name(before)
    shown = {figure.name: _figure_cells(figure) for figure in figures}
    lines += ["", *FIGURES, *_together(kept.get(FIGURES[0], {}), shown)]
    known = {technique.name for technique in TECHNIQUES}
    kept_rows = {name: line for name, line in kept.get(ROWS[0], {}).items() if name in known}
    lines += ["", "Each technique with and without it, on the same work:", ""]
    lines += [*ROWS, *_together(kept_rows, {row.name: _row_cells(row) for row in rows})]
    return "\n".join(lines) + "\n"


def _figure_cells(figure: Figure) -> str:
    sign = "<=" if figure.at_most else ">="
    goal = "" if figure.goal is None else f"{sign} {figure.goal:g}: {'met' if figure.met else '**not met**'}"
    return f"| {figure.name} | {figure.measured} | {goal} | {figure.note} |"


def _row_cells(row: Row) -> str:
    if row.why_not:
        return f"| {row.name} | not run: {row.why_not} | | | | | |"
    pairs = (f"{one:.0f} / {other:.0f}" for one, other in (row.tokens_per_s, row.allocated, row.resident))
    apart = f"{row.loss_difference:.1g}" + ("" if row.as_expected else " **more than allowed**")
    return f"| {row.name} | {row.faster:.2f} x | {' | '.join(pairs)} | {apart} | {row.note} |"


def _lines_by_name(text: str) -> dict[str, dict[str, str]]:
    """The tables of a page by their first line: each line by what its first cell says."""
    tables: dict[str, dict[str, str]] = {}
    lines: dict[str, str] = {}
    for line in text.splitlines():
        if line in (FIGURES[0], ROWS[0]):
            lines = tables.setdefault(line, {})
        elif line.startswith("| "):
            lines[line.split(" | ")[0].removeprefix("| ")] = line
    return tables


def _together(kept: dict[str, str], measured: dict[str, str]) -> list[str]:
    return list({**kept, **measured}.values())


_PART: Final = re.compile(rf"^{re.escape(HEADING)}$.*?(?=^## |\Z)", re.MULTILINE | re.DOTALL)


def written() -> str:
    """The engine's part as it is on the page; "" where it has none."""
    found = _PART.search(PAGE.read_text(encoding="utf-8"))
    return found[0] if found else ""


def write_page(text: str) -> None:
    """Put the engine's part in place of the old one, or at the end."""
    whole = PAGE.read_text(encoding="utf-8")
    if _PART.search(whole):
        whole = _PART.sub(lambda _: text + "\n", whole, count=1)
    else:
        whole = whole.rstrip("\n") + "\n\n" + text
    PAGE.write_text(whole.rstrip("\n") + "\n", encoding="utf-8")
