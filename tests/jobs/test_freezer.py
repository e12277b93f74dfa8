"""Queued jobs get marks of what they are made from, and a job whose data changed meanwhile asks before it starts."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from jobs import freezer as freezer_module
from jobs import run_job
from jobs.attempt import Attempt
from jobs.freezer import Freezer
from jobs.run_job import Train, check_hub, check_inputs, run
from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.training.inputs import Marks
from vramfit.training.metrics import RunResult


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a"}\n', encoding="utf-8")
    return path


@pytest.fixture(autouse=True)
def terminated() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def config_of(rows: Path, if_changed: str = "ask") -> RunConfig:
    return RunConfig.parse({"data": {"paths": [str(rows)]}, "output": {"if_changed": if_changed}})


def trained(session: Attempt, resume: bool) -> RunResult:
    """What the trainer does before it trains, and nothing else."""
    job = session.job
    check_inputs(session, "go on" if job.accepted else job.config.output.if_changed)
    return RunResult(
        steps=1, total_steps=1, stopped=False, final_loss=1.0, eval_loss=None, peak_allocated_bytes=0, export=None
    )


def attempt(store: Store, id_: int, train: Train = trained) -> None:
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    claimed = store.claim_next("me")
    assert claimed is not None and claimed.id == id_
    run(store, id_, attempt=claimed.attempt, train=train)


def test_each_waiting_job_is_marked_once_and_again_when_its_settings_change(store: Store, rows: Path) -> None:
    first, aside = store.add_job(config_of(rows)), store.add_job(config_of(rows), draft=True)
    freezer = Freezer(store)
    assert [freezer.freeze_next() for _ in range(3)] == [True, True, False]
    marks = store.job(first).frozen
    assert marks is not None and list(marks["data"]) == [str(rows)]
    assert store.job(aside).frozen == marks
    rows.write_text('{"text": "b"}\n', encoding="utf-8")
    assert not freezer.freeze_next()
    store.replace_config(first, config_of(rows, "refuse"))
    assert store.job(first).frozen is None
    store.freeze(first, config=config_of(rows), marks=marks)  # taken of the settings before: too late
    assert store.job(first).frozen is None
    assert freezer.freeze_next()
    assert store.job(first).frozen != marks


def test_a_thread_marks_what_is_queued(store: Store, rows: Path, eventually: object) -> None:
    assert callable(eventually)
    with Freezer(store, poll_s=0.01):
        id_ = store.add_job(config_of(rows))
        eventually(lambda: store.job(id_).frozen is not None)


def test_data_that_changed_in_the_queue_pauses_the_run_until_it_is_resumed(store: Store, rows: Path) -> None:
    id_ = store.add_job(config_of(rows))
    Freezer(store).freeze_next()
    rows.write_text('{"text": "b"}\n', encoding="utf-8")
    attempt(store, id_)
    job = store.job(id_)
    assert job.state == "paused"
    assert job.failure == f"The data changed since the run was queued: {rows} has changed."
    assert "resume as it is" in (job.remedy or "")
    assert job.resumable and not job.accepted
    store.enqueue(id_)
    assert store.job(id_).accepted
    assert store.job(id_).frozen is None
    attempt(store, id_)
    assert store.job(id_).state == "succeeded"
    assert store.job(id_).frozen is not None


class Hub:
    """A cache of the hub's, made by hand, and a trainer that loads what main is while it does."""

    def __init__(self, folder: Path) -> None:
        self.place = folder / "models--someone--tiny" / "refs" / "main"
        self.place.parent.mkdir(parents=True)
        self.loads = ""

    def has(self, letter: str) -> None:
        self.place.write_text(letter * 40, encoding="ascii")

    def train(self, session: Attempt, resume: bool) -> RunResult:
        if_changed = "go on" if session.job.accepted else session.job.config.output.if_changed
        marks = check_inputs(session, if_changed)
        if self.loads:
            self.has(self.loads)
        check_hub(session, if_changed, told=marks)
        return RunResult(
            steps=1, total_steps=2, stopped=True, final_loss=1.0, eval_loss=None, peak_allocated_bytes=0, export=None
        )


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    return Hub(tmp_path)


def on_the_hub(rows: Path, if_changed: str) -> RunConfig:
    values = {"model": {"source": "someone/tiny"}, "method": "lora", "data": {"paths": [str(rows)]}}
    return RunConfig.parse({**values, "output": {"if_changed": if_changed}})


NAME = "someone/tiny (main)"
MOVED = f"The model changed since the run was queued: {NAME} was commit {'a' * 40}, is commit {'b' * 40}."


def test_a_branch_of_the_hub_that_moved_on_in_the_queue_asks(store: Store, rows: Path, hub: Hub) -> None:
    hub.has("a")
    id_ = store.add_job(on_the_hub(rows, "ask"))
    Freezer(store).freeze_next()
    hub.has("b")
    attempt(store, id_, hub.train)
    assert (store.job(id_).state, store.job(id_).failure) == ("paused", MOVED)
    store.enqueue(id_)
    attempt(store, id_, hub.train)
    assert store.job(id_).frozen["model"] == {NAME: f"commit {'b' * 40}"}  # type: ignore[index]


@pytest.mark.parametrize(("choice", "state"), [("ask", "paused"), ("go on", "cancelled"), ("refuse", "failed")])
def test_a_branch_that_moves_on_while_it_is_loaded_is_noticed_once(
    store: Store, rows: Path, hub: Hub, choice: str, state: str
) -> None:
    hub.has("a")
    id_ = store.add_job(on_the_hub(rows, choice))
    Freezer(store).freeze_next()
    hub.loads = "b"
    attempt(store, id_, hub.train)
    told = [event.message for event in store.events(id_) if event.kind == "changed"]
    assert store.job(id_).state == state
    assert (told if choice == "go on" else [store.job(id_).failure]) == [MOVED]


def test_what_was_fetched_first_by_the_run_is_compared_when_it_goes_on(store: Store, rows: Path, hub: Hub) -> None:
    id_ = store.add_job(on_the_hub(rows, "ask"))
    Freezer(store).freeze_next()
    assert store.job(id_).frozen["model"] == {}  # type: ignore[index]
    hub.loads = "a"
    attempt(store, id_, hub.train)
    assert (store.job(id_).state, store.events(id_)) == ("cancelled", [])
    assert store.job(id_).frozen["model"] == {NAME: f"commit {'a' * 40}"}  # type: ignore[index]
    hub.loads = "b"
    store.enqueue(id_)
    attempt(store, id_, hub.train)
    assert (store.job(id_).state, store.job(id_).failure) == ("paused", MOVED)


@pytest.mark.parametrize(("choice", "state"), [("go on", "succeeded"), ("refuse", "failed")])
def test_the_config_may_say_what_is_done(store: Store, rows: Path, choice: str, state: str) -> None:
    id_ = store.add_job(config_of(rows, choice))
    Freezer(store).freeze_next()
    rows.unlink()
    attempt(store, id_)
    assert store.job(id_).state == state
    told = f"The data changed since the run was queued: {rows} is gone."
    if choice == "go on":
        assert [event.message for event in store.events(id_) if event.kind == "changed"] == [told]
    else:
        assert store.job(id_).failure == told


def test_nothing_changed_is_nothing_said(store: Store, rows: Path) -> None:
    id_ = store.add_job(config_of(rows, "refuse"))
    Freezer(store).freeze_next()
    attempt(store, id_)
    assert store.job(id_).state == "succeeded"
    assert store.events(id_) == []


def test_the_real_trainer_looks_before_it_trains(store: Store, rows: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    id_ = store.add_job(config_of(rows, "refuse"))
    Freezer(store).freeze_next()
    rows.write_text('{"text": "c"}\n', encoding="utf-8")
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    assert store.claim_next("me") is not None
    assert run(store, id_, attempt=1, train=run_job._train) == 2
    assert "has changed" in (store.job(id_).failure or "")


def test_settings_that_an_earlier_version_wrote_in_other_words_are_marked_too(store: Store, rows: Path) -> None:
    """It knew fewer settings, so its text lacks some that have their usual value now."""
    id_ = store.add_job(config_of(rows))
    store._db.execute("UPDATE jobs SET config = json_remove(config, '$.output.if_changed', '$.health')")
    freezer = Freezer(store)
    assert [freezer.freeze_next(), freezer.freeze_next()] == [True, False]
    marks = store.job(id_).frozen
    assert marks is not None and list(marks["data"]) == [str(rows)]


def test_a_job_whose_marks_cannot_be_taken_holds_up_no_other(
    store: Store, rows: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = store.add_job(config_of(rows, "refuse")), store.add_job(config_of(rows))
    said: list[str] = []
    freezer, real = Freezer(store, say=said.append), freezer_module.marks_of

    def marks(config: RunConfig) -> Marks:
        if config.output.if_changed == "refuse":
            raise RuntimeError("nobody foresaw this")
        return real(config)

    monkeypatch.setattr(freezer_module, "marks_of", marks)
    assert [freezer.freeze_next() for _ in range(3)] == [True, True, False]
    assert store.job(first).frozen == {}
    assert list((store.job(second).frozen or {})["data"]) == [str(rows)]
    assert said == [f"Of what job {first} is made from no marks could be taken: changes of it are not noticed."]
    attempt(store, first)
    assert store.job(first).state == "succeeded"
