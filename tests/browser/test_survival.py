"""The panel is killed in mid-run; the run does not notice, and a new panel shows all of it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from jobs.store import Store

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

STEPS = 150
ENOUGH_S = 420.0


def test_a_killed_panel_loses_no_step_and_doubles_none(page: Page, fresh: object, see: Callable[..., None]) -> None:
    _start_a_short_run(page, fresh)
    see("Number(document.querySelector('.vf-grid')?.dataset.lastStep ?? 0) >= 5", seconds=240)
    _cancel_a_waiting_run(page, fresh)
    fresh.kill()
    with Store(fresh.data_dir) as store:
        job = store.job(1)
        assert job.step < STEPS  # it was killed in the middle
        deadline = time.monotonic() + ENOUGH_S
        while not store.job(1).final and time.monotonic() < deadline:
            time.sleep(0.5)
        assert store.job(1).state == "succeeded"
    fresh.start()  # at the same port, so the open page comes back by itself
    see(f"document.querySelector('.vf-grid')?.dataset.lastStep === '{STEPS}'")
    expect(page.locator(".vf-runhead .vf-badge")).to_have_text("succeeded")
    drawn = page.evaluate("document.querySelector('[data-chart=loss] .vf-plot').data[0].x")
    assert drawn == list(range(1, STEPS + 1))
    page.reload()
    see(f"document.querySelector('.vf-grid')?.dataset.lastStep === '{STEPS}'")
    assert page.evaluate("document.querySelector('[data-chart=loss] .vf-plot').data[0].x") == drawn
    page.trouble.clear()  # the browser notes that nobody answered for a while


def _start_a_short_run(page: Page, panel: object) -> None:
    page.goto(panel.url)
    expect(page.locator("#start")).to_be_enabled()
    page.wait_for_timeout(800)
    page.locator("#field-schedule-max_steps :is(textarea, input)").fill(str(STEPS))
    page.get_by_text("Advanced: every setting").click()
    page.locator("#field-output-sample_tokens :is(textarea, input)").fill("8")
    page.click("#start")
    expect(page.locator(".vf-phase")).to_be_visible()


def _cancel_a_waiting_run(page: Page, panel: object) -> None:
    """A second run waits behind the first; Cancel on the Runs page takes it out of the queue."""
    with Store(panel.data_dir) as store:
        waiting = store.add_job(store.job(1).config)
    page.click(".vf-nav [data-page=runs]")
    row = page.locator(f".vf-row[data-run='{waiting}']")
    expect(row).to_contain_text("queued")
    row.get_by_text("Cancel").click()
    expect(row).to_contain_text("cancelled")
    page.locator(".vf-row[data-run='1']").click()
