"""Causes of death, and what may go on by itself."""

from __future__ import annotations

import pytest

from jobs.death import cause_of


@pytest.mark.parametrize(
    ("code", "kills", "other_boot", "state", "again", "part"),
    [
        (-9, (3, 3), False, "interrupted", True, "ended from outside (SIGKILL)"),
        (-9, (None, None), False, "interrupted", True, "ended from outside (SIGKILL)"),
        (-9, (3, 4), False, "interrupted", True, "ran out of memory (RAM)"),
        (None, (3, 4), False, "interrupted", True, "ran out of memory (RAM)"),
        (-15, (3, 4), False, "interrupted", True, "ended from outside (SIGTERM)"),
        (-11, (3, 3), False, "interrupted", True, "crashed (SIGSEGV)"),
        (7, (3, 4), False, "failed", False, "exit code 7"),
        (0, (3, 3), False, "failed", False, "exit code 0"),
        (None, (3, 3), False, "interrupted", True, "without a word"),
        (None, (9, 0), True, "interrupted", True, "machine was started again"),
    ],
)
def test_every_death_has_a_cause(
    code: int | None,
    kills: tuple[int | None, int | None],
    other_boot: bool,
    state: str,
    again: bool,
    part: str,
) -> None:
    death = cause_of(code=code, kills_before=kills[0], kills_now=kills[1], other_boot=other_boot)
    assert (death.state, death.again) == (state, again)
    assert part in death.cause


def test_memory_has_a_remedy_of_its_own() -> None:
    assert "micro-batch" in cause_of(code=-9, kills_before=0, kills_now=1, other_boot=False).remedy
