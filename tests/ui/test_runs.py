"""The list of runs, and which of them can be gone on from."""

from __future__ import annotations

from collections.abc import Callable

from jobs.store import Store
from ui.runs import exports, runs_view
from ui.texts import texts_of
from vramfit.config import RunConfig

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
