"""The list of runs, and which of them can be gone on from."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from jobs import processes
from jobs.store import SUPERVISOR_LEASE, Store
from ui.runs import act, exports, runs_view
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import JobError, UserError

EN = texts_of("en")


def test_the_newest_run_comes_first_with_state_and_final_loss(store: Store, seed_run: Callable[..., int]) -> None:
    done = seed_run(final_loss=1.25)
    waiting = store.add_job(RunConfig(name="Next"))
    shown = runs_view(store, EN)["runs"]
    assert [(run["id"], run["state"]) for run in shown] == [(waiting, "queued"), (done, "succeeded")]
    assert shown[1]["final_loss"] == 1.25
    assert shown[1]["method"] == "Train from scratch"


def test_an_export_is_offered_as_a_model_while_it_is_there(store: Store, seed_run: Callable[..., int]) -> None:
    run = seed_run(export="export")
    folder = store.job(run).folder / "export"
    assert exports(store, EN) == []
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    assert exports(store, EN) == [(f"Run {run}: Stories", str(folder))]


def test_what_is_at_work_comes_first_then_the_queue_in_its_order(store: Store, seed_run: Callable[..., int]) -> None:
    done, at_work = seed_run(), seed_run(state="running")
    first, second = (store.add_job(RunConfig(name=name)) for name in ("a", "b"))
    act(store, "up", second)
    shown = runs_view(store, EN)["runs"]
    assert [run["id"] for run in shown] == [at_work, second, first, done]
    assert [run.get("place") for run in shown] == [None, 1, 2, None]
    act(store, "down", second)
    assert store.queue() == [first, second]


def test_a_waiting_run_says_what_it_waits_for(store: Store) -> None:
    first, second = (store.add_job(RunConfig(name=name)) for name in ("a", "b"))
    act(store, "after", second, after=first)

    def waits() -> str:
        return next(run["waits"] for run in runs_view(store, EN)["runs"] if run["id"] == second)

    assert waits() == f"Waits for run {first} (queued)."
    act(store, "stop", first)
    assert waits() == (
        f"Run {first}, which it comes after, is cancelled. Resume that one, or let this one start all the same."
    )
    act(store, "after", second, after=first, anyway=True)
    assert waits() == ""
    with pytest.raises(JobError, match="itself waits"):
        act(store, "after", second, after=second)
    act(store, "after", second)
    assert store.job(second).after is None


def test_a_supervisor_that_lives_and_is_not_heard_is_told_with_what_to_do(store: Store) -> None:
    """Stopped, or in a call that does not return: its lease stays, and so does everything that waits."""
    waits, moment = store.add_job(RunConfig()), store.clock()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as stuck:
        who = processes.identity(stuck.pid)
        assert who is not None
        store.take_lease(SUPERVISOR_LEASE, owner=who, alive=lambda *_: False)
        told = {}
        for seconds in (29, 75):
            store.clock = lambda seconds=seconds: moment + seconds
            told[seconds] = runs_view(store, EN)
        store.clock = lambda: moment - 86_400
        assert runs_view(store, EN)["unheard"] == "", "a clock set back"
        store.clock = lambda: moment + 75
        assert runs_view(store, texts_of("zh"))["unheard"].startswith(f"队列管理进程（进程 {stuck.pid}）")
        stuck.kill()
    assert (told[29]["unheard"], told[29]["runs"][0]["waits"]) == ("", "")
    assert told[75]["unheard"].startswith(
        f"The queue's supervisor (process {stuck.pid}) lives and has not been heard for 75 s: nothing is started"
    )
    assert f"kill -9 {stuck.pid}" in told[75]["unheard"]
    assert told[75]["runs"][0]["id"] == waits and told[75]["runs"][0]["waits"] == told[75]["unheard"]
    assert runs_view(store, EN)["unheard"] == "", "one that is dead is replaced by the panel"


def test_a_held_queue_is_shown_and_let_go(store: Store) -> None:
    run = store.add_job(RunConfig(name="a"))
    act(store, "hold", 0)
    shown = runs_view(store, EN)
    assert shown["held"]
    assert shown["runs"][0]["waits"].startswith("The queue is held")
    act(store, "release", 0)
    shown = runs_view(store, EN)
    assert (shown["held"], shown["runs"][0]["waits"], shown["runs"][0]["id"]) == ("", "", run)


def test_a_run_can_be_duplicated_whatever_became_of_it(store: Store, seed_run: Callable[..., int]) -> None:
    act(store, "duplicate", seed_run(config=RunConfig(name="a", seed=5)))
    shown = runs_view(store, EN)["runs"]
    assert [(run["state"], run["name"]) for run in shown] == [("queued", "a"), ("succeeded", "a")]
    assert store.job(shown[0]["id"]).config.seed == 5


def test_an_action_that_does_not_exist_is_one_sentence(store: Store) -> None:
    with pytest.raises(UserError, match="'dance'"):
        act(store, "dance", 1)
