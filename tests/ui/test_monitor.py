"""What a reader of the Monitor page gets: everything once, then only what is new."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.store import Store
from ui.monitor import SERIES_POINTS, Cursor, choose_run, job_values, resume, run_view, short_model, stop
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import JobError
from vramfit.training.metrics import DriftCheck, StepMetrics

EN = texts_of("en")
SeedRun = Callable[..., int]


def _view(store: Store, run: int, cursor: Cursor | None = None) -> dict[str, object]:
    return run_view(store, run, cursor or Cursor(), EN, with_log=False)


def test_an_empty_store_shows_no_run(store: Store) -> None:
    assert _view(store, 0)["job"] is None


def test_without_a_wish_the_run_at_work_is_shown_else_the_newest(store: Store, seed_run: SeedRun) -> None:
    first = seed_run()
    second = seed_run(state="running")
    third = store.add_job(RunConfig(name="waiting"))
    assert choose_run(store, 0).id == second
    stop(store, third)
    assert choose_run(store, first).id == first


def test_a_run_that_does_not_exist_is_one_sentence(store: Store) -> None:
    with pytest.raises(JobError, match="77"):
        _view(store, 77)


def test_a_second_look_brings_only_what_is_new(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(steps=30)
    first = _view(store, run)
    series, telemetry = first["series"], first["telemetry"]
    assert series["columns"]["step"] == list(range(1, 31))
    assert series["reset"]
    assert len(first["samples"]) == 2
    again = _view(
        store,
        run,
        Cursor(
            series_after=series["cursor"],
            series_stride=series["stride"],
            telemetry_after=telemetry["cursor"],
            telemetry_stride=telemetry["stride"],
            revision=series["revision"],
            events_after=first["events"][-1]["id"],
            samples_known=2,
        ),
    )
    assert again["series"]["columns"]["step"] == []
    assert not again["series"]["reset"]
    assert again["telemetry"]["columns"]["time"] == []
    assert again["events"] == []
    assert again["samples"] is None


def test_a_hundred_thousand_steps_come_thinned(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(steps=100_000)
    view = _view(store, run)
    steps = view["series"]["columns"]["step"]
    assert SERIES_POINTS / 2 < len(steps) <= SERIES_POINTS
    assert steps[-1] == 100_000
    assert _view(store, run)["series"] == view["series"]  # deterministic: a second tab draws the same


def test_a_run_without_a_card_says_so_and_has_no_reserved_memory(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(config=RunConfig(device="cpu"))
    view = _view(store, run)
    assert view["job"]["has_card"] is False
    assert [figure["key"] for figure in view["figures"]][-1] == "use"


def test_stop_of_a_waiting_run_cancels_it(store: Store) -> None:
    run = store.add_job(RunConfig())
    stop(store, run)
    assert store.job(run).state == "cancelled"


def test_a_run_without_a_checkpoint_cannot_be_resumed(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(state="failed")
    with pytest.raises(JobError, match="checkpoint"):
        resume(store, run)


def test_a_run_with_a_checkpoint_goes_back_into_the_queue(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(state="failed")
    checkpoint = store.job(run).checkpoints / "step-00000020"
    checkpoint.mkdir(parents=True)
    (checkpoint / "manifest.json").write_text("{}", encoding="utf-8")
    resume(store, run)
    assert store.job(run).state == "queued"


def test_models_have_short_names(tmp_path: Path) -> None:
    assert short_model("org/model") == "org/model"
    assert short_model(str(tmp_path / "0003-stories" / "export")) == "0003-stories"
    assert short_model(str(tmp_path / "my model")) == "my model"


def test_a_result_that_was_deleted_is_not_offered(store: Store, seed_run: SeedRun) -> None:
    job = store.job(seed_run(export="export"))
    export = job.folder / "export"
    export.mkdir()
    shown = job_values(job, EN)
    assert (shown["export"], shown["tunable"]) == (str(export), True)
    export.rmdir()
    gone = job_values(job, EN)
    assert (gone["export"], gone["tunable"]) == (None, False)


# ---- precision ------------------------------------------------------------------------------------------------------


def _at_work(store: Store, seed_run: SeedRun) -> tuple[int, int]:
    run = seed_run(state="running")
    return run, store.job(run).attempt


def _drift(step: int, loss: float) -> DriftCheck:
    return DriftCheck(step=step, time=0.0, loss=loss, grad_norm=2 * loss)


def test_the_drift_has_a_chart_once_there_is_one_and_comes_from_a_cursor_on(store: Store, seed_run: SeedRun) -> None:
    run, attempt = _at_work(store, seed_run)
    before = _view(store, run)
    assert "drift" not in [figure["key"] for figure in before["figures"]]
    assert before["drift"]["columns"]["step"] == []
    store.record(run, attempt=attempt, drifts=[_drift(10, 0.001), _drift(20, float("inf"))])
    first = _view(store, run)
    assert first["figures"][-1]["key"] == "drift"
    assert first["drift"]["columns"] == {"step": [10, 20], "loss": [0.001, None], "grad_norm": [0.002, None]}
    store.record(run, attempt=attempt, drifts=[_drift(30, 0.002)])
    cursor = Cursor(
        drift_after=first["drift"]["cursor"],
        drift_stride=first["drift"]["stride"],
        revision=first["series"]["revision"],
    )
    again = _view(store, run, cursor)["drift"]
    assert (again["columns"]["step"], again["reset"]) == ([30], False)


def test_skipped_steps_and_the_scale_are_shown(store: Store, seed_run: SeedRun) -> None:
    run, attempt = _at_work(store, seed_run)
    assert _view(store, run)["job"]["skipped_steps"] == 0
    row = StepMetrics(
        step=21, time=0.0, loss=1.0, learning_rate=0.1, grad_norm=1.0, tokens=1, tokens_per_s=1.0, step_seconds=1.0,
        epoch=0.0, allocated_bytes=1, reserved_bytes=1, resident_bytes=1, loss_scale=2.0**15, skipped=True,
    )  # fmt: skip
    store.record(run, attempt=attempt, steps=[row])
    view = _view(store, run)
    assert view["job"]["skipped_steps"] == 1
    assert view["series"]["columns"]["loss_scale"][-1] == 2.0**15
    assert "scale" not in [figure["key"] for figure in view["figures"]]
    store._db.execute("UPDATE jobs SET forecast = ? WHERE id = ?", ['{"plan": {"compute": "fp16"}}', run])
    assert "scale" in [figure["key"] for figure in _view(store, run)["figures"]]
