"""The page of faults: figures are counted from the outcomes, and what did not hold cannot be overlooked."""

from __future__ import annotations

import reliability

from tests.faults.scenario import ALL, Outcome
from vramfit.faults import KINDS, POINTS


def outcome(point: str, kind: str, *violations: str, seed: int = 0) -> Outcome:
    return Outcome(
        point=point, kind=kind, seed=seed, struck=True, first_state="paused", attempts=2, violations=list(violations)
    )


def test_what_held_and_what_was_not_tried_is_told() -> None:
    outcomes = [outcome(POINTS[0], kind) for kind in KINDS]
    page = reliability.page([*outcomes, outcome(POINTS[0], "kill", seed=1)], seconds=7.4)
    assert "| seeds | 2, of the kinds" in page
    assert f"| points | 1 of {len(POINTS)} |" in page
    assert f"| faults tried | {len(KINDS) + 1} of {len(ALL)} |" in page
    assert f"| trainers started | {2 * len(KINDS) + 2} |" in page
    assert "| seconds | 7 |" in page
    assert "| **violations** | **0** |" in page
    assert f"| {POINTS[0]} | paused, 2; paused, 2 | paused, 2 | paused, 2 |" in page
    assert f"| {POINTS[1]} | not tried | not tried | not tried | not tried |" in page
    assert "## Violations" not in page


def test_the_section_that_people_write_outlives_a_new_page() -> None:
    section = "\n## Cases\n\n| case |\n|---|\n| 80 |\n"
    first = reliability.page([outcome(POINTS[0], kind) for kind in KINDS], seconds=1) + section
    assert reliability.cases(first) == section
    again = reliability.page([outcome(POINTS[0], "kill", "left behind: x")], seconds=1) + reliability.cases(first)
    assert again.endswith(section)
    assert again.count("## Cases") == 1
    assert reliability.cases("a page without it\n") == ""
    assert "\n## Cases\n" in reliability.PAGE.read_text(encoding="utf-8")


def test_a_violation_is_counted_marked_and_told() -> None:
    page = reliability.page([outcome(POINTS[0], "kill", "a loss is another", "left behind: x")], seconds=1)
    assert "| **violations** | **2** |" in page
    assert f"| {POINTS[0]} | paused, 2 **!** | not tried |" in page
    assert f"- {POINTS[0]}, kill, seed 0: a loss is another; left behind: x" in page
