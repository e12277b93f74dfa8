"""Every named point x kind of fault: the run comes through with the numbers of an undisturbed one, and nothing is left.

They are gone through two at a time. VRAMFIT_ALL_FAULTS=1 tries every point, kind and seed.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.faults.scenario import (
    ALL,
    CHOSEN,
    REACHED,
    SEEDS,
    Fault,
    Outcome,
    arrival_of,
    config_of,
    go_through,
    make_model,
    make_rows,
    undisturbed,
)
from vramfit.faults import KINDS, POINTS, VARIABLE, parse, reach

FAULTS = ALL if os.environ.get("VRAMFIT_ALL_FAULTS") else CHOSEN
AT_ONCE = 2

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(os.name == "nt", reason="a process cannot kill itself without a trace on Windows"),
]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[Fault, Future[Outcome]]]:
    """All scenarios, begun; each test waits for its own."""
    folder = tmp_path_factory.mktemp("faults")
    config = config_of(make_model(folder / "model", folder / "cache"), make_rows(folder / "rows.jsonl"))
    reference = undisturbed(config, folder / "undisturbed")
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            fault: pool.submit(go_through, *fault, config=config, folder=folder / f"{number}", reference=reference)
            for number, fault in enumerate(FAULTS)
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: "-".join(map(str, fault)))
def test_the_run_comes_through(outcomes: dict[Fault, Future[Outcome]], fault: Fault) -> None:
    outcome = outcomes[fault].result()
    assert outcome.violations == [], outcome
    assert outcome.struck


def test_each_point_each_kind_and_each_seed_is_among_the_chosen() -> None:
    assert {point for point, _, _ in CHOSEN} == set(POINTS)
    assert {kind for _, kind, _ in CHOSEN} == set(KINDS)
    assert {seed for _, _, seed in CHOSEN} == set(range(SEEDS))
    assert len({(point, kind) for point, kind, _ in ALL}) == len(POINTS) * len(KINDS)


def test_one_fault_may_lead_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "supervisor: burying:error;save: renamed:eio:2")
    reach("save: renamed")
    with pytest.raises(RuntimeError, match="supervisor: burying"):
        reach("supervisor: burying")
    with pytest.raises(OSError, match="Input/output error"):
        reach("save: renamed")


def test_seeds_strike_at_different_arrivals_always_the_same_ones() -> None:
    for point in POINTS:
        drawn = [arrival_of(point, seed) for seed in range(REACHED[point])]
        assert sorted(drawn) == list(range(1, REACHED[point] + 1))
        assert arrival_of(point, REACHED[point]) is None
        assert drawn == [arrival_of(point, seed) for seed in range(REACHED[point])]


@pytest.fixture(autouse=True)
def _nothing_was_reached(monkeypatch: pytest.MonkeyPatch) -> None:
    """Arrivals are counted in each process: here in each test."""
    monkeypatch.setattr("vramfit.faults._arrivals", Counter())


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
