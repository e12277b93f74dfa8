"""The queue from the page: order, what waits for what, changing a waiting run, holding all of it, pause and resume."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from jobs.store import Store
from vramfit.starter.recipe import starter_run

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

STEPS = 2000  # more than are done before the test ends
ORDER = "[...document.querySelectorAll('.vf-row[data-run]')].map((row) => row.dataset.run).join()"


def _add(panel: object, *names: str) -> None:
    recipe = starter_run()
    schedule = recipe.schedule.model_copy(update={"max_steps": STEPS})
    output = recipe.output.model_copy(update={"sample_tokens": 8})
    with Store(panel.data_dir) as store:
        store.hold_queue(True)
        for name in names:
            store.add_job(recipe.model_copy(update={"name": name, "schedule": schedule, "output": output}))


def test_waiting_runs_are_moved_linked_changed_and_copied(page: Page, fresh: object, see: Callable[..., None]) -> None:
    _add(fresh, "one", "two")
    page.goto(fresh.url + "?view=runs")
    see(f"{ORDER} === '1,2'")
    expect(page.locator(".vf-held")).to_contain_text("The queue is held")
    row = page.locator(".vf-row[data-run='2']")
    row.get_by_text("Earlier").click()
    see(f"{ORDER} === '2,1'")
    expect(row.get_by_text("Earlier")).to_be_disabled()
    row.locator("select").select_option("1")
    expect(row.locator(".vf-row-waits-for")).to_have_text("Waits for run 1 (queued).")
    row.get_by_text("also if that one fails").click()
    see("document.querySelector(\".vf-row[data-run='2'] input[type=checkbox]\").checked")
    row.get_by_text("Change").click()
    expect(page.locator("#editing")).to_contain_text("You are changing run 2 (two)")
    page.locator("#field-name :is(textarea, input)").fill("second")
    page.wait_for_timeout(800)
    expect(page.locator("#start")).to_have_text("Save the changes")
    page.click("#start")
    expect(row.locator(".vf-cell-run")).to_have_text("2  second")
    row.get_by_text("Duplicate").last.click()
    see(f"{ORDER} === '2,1,3'")
    with Store(fresh.data_dir) as store:
        job = store.job(2)
        assert (job.after, job.after_anyway, job.config.schedule.max_steps) == (1, True, STEPS)
        assert store.job(3).config == job.config
        assert [store.job(id_).state for id_ in (1, 2, 3)] == ["queued"] * 3


def test_a_paused_run_goes_on_where_it_was(page: Page, fresh: object, see: Callable[..., None]) -> None:
    _add(fresh, "one")
    page.goto(fresh.url + "?view=runs")
    page.get_by_text("Let the queue go on").click()
    page.locator(".vf-row[data-run='1'] .vf-cell-run").click()
    see("Number(document.querySelector('.vf-grid')?.dataset.lastStep ?? 0) >= 5", seconds=240)
    page.locator("[data-act=pause]").dblclick()
    badge = page.locator(".vf-runhead .vf-badge")
    expect(badge).to_have_text("paused, can go on", timeout=120_000)
    with Store(fresh.data_dir) as store:
        reached = store.job(1).step
        assert 5 <= reached < STEPS
        assert store.job(1).owner is None, "no process holds its memory"
    page.get_by_role("button", name="Resume").click()
    see(f"Number(document.querySelector('.vf-grid')?.dataset.lastStep ?? 0) >= {reached + 5}", seconds=240)
    drawn = page.evaluate("document.querySelector('[data-chart=loss] .vf-plot').data[0].x")
    assert drawn == list(range(1, len(drawn) + 1)), "no step is missing and none is doubled"
    with Store(fresh.data_dir) as store:
        assert (store.job(1).attempt, store.job(1).resumes) == (2, 0)
