"""The table of cases in docs/reliability.md: every reported case of its areas is there, and its tests are."""

from __future__ import annotations

import ast
import csv
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "reliability.md"
AREAS = (
    "checkpoint", "resume", "queue", "worker", "disk", "gpu", "scheduler", "accumulation", "precision", "export",
    "adapter",
)  # fmt: skip


class Row(NamedTuple):
    """One line of the table. `tests` are file::name; `note` says what they leave out, or why there is none."""

    number: int
    area: str
    tests: tuple[str, ...]
    note: str


def rows() -> list[Row]:
    _, heading, section = PAGE.read_text(encoding="utf-8").partition("\n## Cases\n")
    assert heading, "docs/reliability.md has lost its section Cases"
    found = re.findall(r"^\| (\d+) \| (\S+) \| (.*?) \| (.*?) ?\|$", section, flags=re.MULTILINE)
    return [Row(int(n), area, tuple(re.findall(r"`([^`]+::[^`]+)`", tests)), note) for n, area, tests, note in found]


@cache
def functions_of(path: str) -> frozenset[str]:
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    return frozenset(node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def test_every_reported_case_of_these_areas_is_in_the_table(reference_data: Path) -> None:
    with (reference_data / "reference" / "cases.csv").open(encoding="utf-8-sig", newline="") as file:
        reported = {int(row["n"]): row["kind"] for row in csv.DictReader(file)}
    wanted = {number: kind for number, kind in reported.items() if kind.partition("/")[0] in AREAS}
    assert len(wanted) == 37
    assert {row.number: row.area for row in rows()} == wanted


def test_a_case_has_one_line_with_tests_or_a_reason() -> None:
    assert rows()
    assert [number for number, lines in Counter(row.number for row in rows()).items() if lines > 1] == []
    assert [row.number for row in rows() if not row.tests and not row.note] == []


@pytest.mark.parametrize("row", rows(), ids=lambda row: str(row.number))
def test_the_tests_of_a_case_are_there_and_bear_its_number(row: Row) -> None:
    for test in row.tests:
        path, _, name = test.partition("::")
        assert name in functions_of(path)
        assert f"_{row.number:03d}_" in name.removeprefix("test_case")
