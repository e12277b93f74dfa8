"""Every named point x kind of fault: the run comes through with the numbers of an undisturbed one, and nothing is left.

The pairs are gone through two at a time. VRAMFIT_ALL_FAULTS=1 tries every pair of point and kind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.scenario import ALL, CHOSEN, Outcome, config_of, go_through, make_model, make_rows, undisturbed
from vramfit.faults import KINDS, POINTS, VARIABLE, parse, reach

PAIRS = ALL if os.environ.get("VRAMFIT_ALL_FAULTS") else CHOSEN
AT_ONCE = 2

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a process cannot kill itself without a trace on Windows")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[tuple[str, str], Future[Outcome]]]:
    """All scenarios, begun; each test waits for its own."""
    folder = tmp_path_factory.mktemp("faults")
    config = config_of(make_model(folder / "model", folder / "cache"), make_rows(folder / "rows.jsonl"))
    reference = undisturbed(config, folder / "undisturbed")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            (point, kind): pool.submit(
                go_through, point, kind, config=config, folder=folder / f"{number}", reference=reference
            )
            for number, (point, kind) in enumerate(PAIRS)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize(("point", "kind"), PAIRS)
def test_the_run_comes_through(outcomes: dict[tuple[str, str], Future[Outcome]], point: str, kind: str) -> None:
    outcome = outcomes[point, kind].result()
    assert outcome.violations == [], outcome
    assert outcome.struck


def test_each_point_and_each_kind_is_among_the_chosen() -> None:
    assert {point for point, _ in CHOSEN} == set(POINTS)
    assert {kind for _, kind in CHOSEN} == set(KINDS)
    assert set(CHOSEN) <= set(ALL)


def test_without_the_variable_a_point_does_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    for point in POINTS:
        reach(point)


def test_a_fault_strikes_once_at_its_point_and_arrival(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "save: renamed:eio:2")
    reach("save: renamed")
    reach("save: rotating")
    with pytest.raises(OSError, match="Input/output error"):
        reach("save: renamed")
    reach("save: renamed")


@pytest.mark.parametrize("text", ["", "save: renamed", "save: renamed:burn", "nowhere:kill", "save: renamed:kill:0"])
def test_a_variable_that_names_no_fault_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="names no fault"):
        parse(text)
