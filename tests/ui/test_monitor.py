"""What a reader of the Monitor page gets: everything once, then only what is new."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.job import Streamed
from jobs.store import Store
from tests.jobs.test_store import copy_first_step
from ui.monitor import (
    SERIES_POINTS,
    Cursor,
    choose_run,
    job_values,
    pause,
    resume,
    run_view,
    short_model,
    stop,
    written_text,
)
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
    run = seed_run(steps=1)
    copy_first_step(store, run, 100_000)
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


def test_a_run_whose_folder_was_deleted_is_told_by_name(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(state="interrupted")
    folder = store.job(run).folder
    shutil.rmtree(folder)
    assert store.job(run).resumable, "so that it can be asked for"
    with pytest.raises(JobError) as caught:
        resume(store, run)
    assert caught.value.what == f"The folder of run {run}, {folder}, is gone, and with it its checkpoints up to step 20"
    assert store.job(run).state == "interrupted"


def test_pause_twice_and_resume_twice_are_pause_and_resume(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(state="running")
    pause(store, run)
    pause(store, run)
    assert store.job(run).state == "pausing"
    resume(store, run)
    resume(store, run)
    store.transition(run, expected=("pausing",), state="paused")
    assert store.job(run).state == "queued", "asked for while it was still pausing"
    pause(store, run)
    assert job_values(store.job(run), EN)["resumable"], "from its start, as it has no checkpoint"
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


# ---- streaming ------------------------------------------------------------------------------------------------------


def _streamed(step: int, written_bytes: int) -> StepMetrics:
    return StepMetrics(
        step=step, time=0.0, loss=1.0, learning_rate=0.1, grad_norm=1.0, tokens=1, tokens_per_s=1.0, step_seconds=10.0,
        epoch=0.0, allocated_bytes=1, reserved_bytes=1, resident_bytes=1, link_seconds=1.0, optimizer_seconds=2.0,
        disk_seconds=3.0, written_bytes=written_bytes,
    )  # fmt: skip


def test_where_a_steps_time_goes_is_shown_once_the_model_streams(store: Store, seed_run: SeedRun) -> None:
    run, attempt = _at_work(store, seed_run)
    before = _view(store, run)
    assert "waits" not in [figure["key"] for figure in before["figures"]]
    assert "compute_seconds" not in before["series"]["columns"]
    store.record(run, attempt=attempt, steps=[_streamed(21, 0)])
    view = _view(store, run)
    assert view["figures"][-1]["key"] == "waits"
    sent = {name: values[-2:] for name, values in view["series"]["columns"].items() if name.endswith("_seconds")}
    assert sent == {
        "step_seconds": [0.1, 10.0],
        "compute_seconds": [None, 4.0],
        "link_seconds": [None, 1.0],
        "optimizer_seconds": [None, 2.0],
        "disk_seconds": [None, 3.0],
    }
    assert view["notes"]["waits"] == ""  # a model that is only read


def test_a_thinned_run_has_the_same_parts_and_so_has_the_bucket_that_fills(store: Store, seed_run: SeedRun) -> None:
    run = seed_run(steps=1, state="running")
    rows = [_streamed(step, 0) for step in range(1, 2 * SERIES_POINTS)]
    store.record(run, attempt=store.job(run).attempt, steps=rows)
    series = _view(store, run)["series"]
    assert series["stride"] == 2
    assert set(series["columns"]["compute_seconds"]) == {4.0}
    assert series["last"]["compute_seconds"] == [4.0]


def test_what_was_written_is_told_with_what_the_whole_run_makes_of_a_drive(store: Store, seed_run: SeedRun) -> None:
    run, attempt = _at_work(store, seed_run)
    store._db.execute("UPDATE jobs SET total_steps = 2000 WHERE id = ?", [run])
    store.record(run, attempt=attempt, steps=[_streamed(21, 2 * 2**30), _streamed(22, 4 * 2**30)])
    assert _view(store, run)["notes"]["waits"] == (  # 6 GiB and 1,978 times 3 GiB
        "6.0 GiB written to disk in 2 steps, 3.0 GiB a step. All 2,000 steps make 6.4 TB: that is 0.27 % of what a "
        "4 TB consumer drive is rated for."
    )
    chinese = run_view(store, run, Cursor(), texts_of("zh"), with_log=False)["notes"]["waits"]
    assert all(number in chinese for number in ("6.0 GiB", "3.0 GiB", "2,000", "6.4 TB", "0.27 %"))


def test_a_run_at_its_end_is_not_projected(store: Store, seed_run: SeedRun) -> None:
    job = replace(store.job(seed_run()), total_steps=2000)
    said = written_text(job, Streamed(20, 20 * 2**30), EN)
    assert said == (
        "20.0 GiB written to disk in 20 steps, 1.0 GiB a step: that is < 0.01 % of what a 4 TB consumer drive is rated "
        "for."
    )
    assert "All 2,000 steps make 2.1 TB" in written_text(replace(job, state="failed"), Streamed(20, 20 * 2**30), EN)


def test_what_checkpoints_held_up_is_told_under_the_speed(store: Store, seed_run: SeedRun) -> None:
    run, attempt = _at_work(store, seed_run)
    assert _view(store, run)["notes"]["speed"] == ""
    rows = [replace(_streamed(step, 0), save_seconds=seconds) for step, seconds in ((21, 0.5), (22, 1.0))]
    store.record(run, attempt=attempt, steps=rows)
    note = "Checkpoints so far: 2. Training waited 1.5 s for them, 0.75 s each."
    assert _view(store, run)["notes"]["speed"] == note
