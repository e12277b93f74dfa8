"""Ten thousand queued jobs: what claims, lists and shows them does about as much work as with a hundred.

Work is counted in steps of SQLite's own machine, never in seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs.job import Job
from jobs.store import SUPERVISOR_LEASE, Store
from ui.runs import SHOWN, runs_view
from ui.texts import texts_of
from vramfit.config import RunConfig

FEW, MANY = 300, 10_000
CARDS = ("cuda:0", "cuda:1", "cpu")


def filled(folder: Path, count: int) -> Store:
    """Two that have ended, then `count` queued ones for cuda:0, then one for the CPU. Copied by SQL: it is quicker."""
    store = Store(folder)
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    for _ in range(2):
        store.request_stop(store.add_job(RunConfig(device="cuda:0")))
    store.add_job(RunConfig(device="cuda:0"))
    columns = "name, state, config, folder, created_at"
    with store._write(durable=False) as db:
        db.execute(
            f"WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {count - 1}) "
            f"INSERT INTO jobs ({columns}, position) SELECT {columns}, 100 + i FROM jobs, n WHERE id = 3"
        )
    store.add_job(RunConfig(device="cpu"))
    return store


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[tuple[Store, Store]]:
    with filled(tmp_path / "few", FEW) as few, filled(tmp_path / "many", MANY) as many:
        yield few, many


def work(store: Store, call: Callable[[Store], object]) -> int:
    """Steps of SQLite's machine, in tens."""
    counted = [0]

    def count() -> int:
        counted[0] += 1
        return 0

    store._db.conn.set_progress_handler(count, 10)
    try:
        call(store)
    finally:
        store._db.conn.set_progress_handler(None, 10)
    return counted[0]


def claim(store: Store, *, held: tuple[str, ...]) -> Job | None:
    return store.claim_next("me", CARDS, held=held)


LOOKS: dict[str, Callable[[Store], object]] = {
    "nothing may start": lambda store: claim(store, held=("cuda:0", "cpu")),
    "the last of all is claimed": lambda store: claim(store, held=("cuda:0",)),
    "the first is claimed": lambda store: claim(store, held=()),
    "a job goes later": lambda store: store.move(5, later=True),
    "the queue": lambda store: store.queued_jobs(limit=SHOWN),
    "what has ended": lambda store: store.jobs_at_rest(limit=SHOWN),
    "what is at work": lambda store: store.active_jobs(),
    "what has no marks yet": lambda store: store.next_unfrozen(),
    "whether to leave": lambda store: store.retire(SUPERVISOR_LEASE, owner="me"),
}


def test_claims_and_lists_cost_the_same_however_many_wait(stores: tuple[Store, Store]) -> None:
    few, many = stores
    costs = {name: (work(few, look), work(many, look)) for name, look in LOOKS.items()}
    assert {name: cost for name, cost in costs.items() if cost[1] > 2 * cost[0] + 20} == {}
    assert [job.asked_config.device for job in many.active_jobs()] == ["cuda:0", "cpu"]
    assert many.active_jobs()[0].id == 3


def test_the_page_shows_the_first_that_wait_all_counts_and_what_has_ended(stores: tuple[Store, Store]) -> None:
    few, many = stores
    page = runs_view(many, texts_of("en"))
    assert [run["id"] for run in page["runs"]] == [*range(3, 3 + SHOWN), 2, 1]
    assert any(f"{MANY:d}" in line and "cuda:0" in line for line in page["devices"]), page["devices"]
    costs = [work(store, lambda store: runs_view(store, texts_of("en"))) for store in (few, many)]
    # Counting what waits for each device goes through an index, a few steps for each entry, and nothing else does.
    assert costs[1] - costs[0] < (MANY - FEW) * 20 / 10
