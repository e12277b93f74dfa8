"""The page of faults: figures are counted from the outcomes, and what did not hold cannot be overlooked."""

from __future__ import annotations

from pathlib import Path

import pytest
import reliability

from tests.faults.scenario import ALL, Outcome
from vramfit.faults import KINDS, POINTS


def outcome(point: str, kind: str, *violations: str, seed: int = 0) -> Outcome:
    found = Outcome(point=point, kind=kind, seed=seed, struck=True, first_state="paused", attempts=2, seconds=7.4)
    found.violations += violations
    return found


def test_what_held_and_what_was_not_tried_is_told() -> None:
    outcomes = [outcome(POINTS[0], kind) for kind in KINDS]
    page = reliability.page([*outcomes, outcome(POINTS[0], "kill", seed=1)])
    assert "| seeds | 2, of the kinds" in page
    assert f"| points | 1 of {len(POINTS)} |" in page
    assert f"| faults tried | {len(KINDS) + 1} of {len(ALL)} |" in page
    assert f"| trainers started | {2 * len(KINDS) + 2} |" in page
    assert f"| seconds of a fault, median of {len(KINDS) + 1} | 7 |" in page
    assert "| **violations** | **0** |" in page
    assert f"| {POINTS[0]} | paused, 2; paused, 2 | paused, 2 | paused, 2 |" in page
    assert f"| {POINTS[1]} | not tried | not tried | not tried | not tried |" in page
    assert "## Violations" not in page


def test_the_section_that_people_write_outlives_a_new_page() -> None:
    section = "\n## Cases\n\n| case |\n|---|\n| 80 |\n"
    first = reliability.page([outcome(POINTS[0], kind) for kind in KINDS]) + section
    assert reliability.cases(first) == section
    again = reliability.page([outcome(POINTS[0], "kill", "left behind: x")]) + reliability.cases(first)
    assert again.endswith(section)
    assert again.count("## Cases") == 1
    assert reliability.cases("a page without it\n") == ""
    assert "\n## Cases\n" in reliability.PAGE.read_text(encoding="utf-8")


def test_a_violation_is_counted_marked_and_told() -> None:
    page = reliability.page([outcome(POINTS[0], "kill", "a loss is another", "left behind: x")])
    assert "| **violations** | **2** |" in page
    assert f"| {POINTS[0]} | paused, 2 **!** | not tried |" in page
    assert f"- {POINTS[0]}, kill, seed 0: a loss is another; left behind: x" in page


def test_what_was_kept_is_not_tried_again_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def go_through(point: str, kind: str, seed: int, **_: object) -> Outcome:
        tried.append((point, kind, seed))
        return outcome(point, kind, seed=seed)

    for name, stub in (("go_through", go_through), ("make_model", None), ("undisturbed", None), ("config_of", None)):
        monkeypatch.setattr(reliability, name, stub or (lambda *_: None))
    keep = tmp_path / "kept.jsonl"
    assert reliability.kept(keep) == {}
    first = reliability.gone_through(list(ALL[:3]), keep=keep)
    assert sorted(tried) == sorted(ALL[:3])
    assert reliability.kept(keep) == {(each.point, each.kind, each.seed): each for each in first}
    assert len(first) == 3
    assert reliability.gone_through(list(ALL[:3]), keep=keep, until=-1.0) == []
