"""Every reported case about data, labels, tokenizers, templates, packing and seeds is a test named after its number.

The cases are a table beside the repository (../shared/data/reference/cases.csv); a test that is of one or several of
them is called test_case_NNN_..., or test_case_NNN_NNN_..., and lies with the tests of the file that it is about.
"""

from __future__ import annotations

import ast
import csv
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
CASES = ROOT.parent / "shared" / "data" / "reference" / "cases.csv"
KINDS = ("dataset", "labels", "template", "tokenizer", "packing", "seed", "accumulation", "scheduler", "config/length",
         "export/container", "export/template", "environment/spawn", "resume/order", "resume/boundary")  # fmt: skip


def named_cases() -> Iterator[int]:
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and (found := re.match(r"test_case((?:_\d{3})+)_", node.name)):
                yield from map(int, found.group(1).split("_")[1:])


def listed_cases() -> dict[int, str]:
    """Number and title of the cases of these kinds."""
    if not CASES.is_file():
        pytest.skip(f"{CASES} is not here")
    with CASES.open(encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 104
    return {int(row["n"]): row["title"] for row in rows if row["kind"].startswith(KINDS)}


def test_every_case_of_these_kinds_is_a_test() -> None:
    done = set(named_cases())
    missing = {number: title for number, title in listed_cases().items() if number not in done}
    assert not missing


def test_no_test_is_named_after_a_case_that_does_not_exist() -> None:
    listed_cases()
    with CASES.open(encoding="utf-8-sig", newline="") as file:
        numbers = {int(row["n"]) for row in csv.DictReader(file)}
    assert set(named_cases()) <= numbers
