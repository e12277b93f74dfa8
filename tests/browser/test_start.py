"""First light: Start, with nothing else touched, trains a real model. How fast: bench/first_light.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(1500)]

TRAINED_S = 1200
AWAY_S = 30


def test_start_untouched_trains_the_starter_to_the_end(page: Page, fresh: object, see: Callable[..., None]) -> None:
    page.goto(fresh.url)
    expect(page.locator("#start")).to_be_enabled()
    page.wait_for_timeout(3000)
    page.dblclick("#start")
    phase = page.locator(".vf-phase")
    expect(phase).to_be_visible()
    expect(phase).not_to_have_text("")
    see("Number(document.querySelector('.vf-grid')?.dataset.points ?? 0) > 0", seconds=120)
    before = int(page.get_attribute(".vf-grid", "data-last-step"))
    page.wait_for_timeout(3000)
    assert int(page.get_attribute(".vf-grid", "data-last-step")) > before  # the curves move
    badge = page.locator(".vf-runhead .vf-badge")
    for _ in range(TRAINED_S // AWAY_S):  # with the page closed it trains on, and faster
        page.goto("about:blank")
        page.wait_for_timeout(1000 * AWAY_S)
        page.goto(f"{fresh.url}?run=1")
        expect(badge).to_be_visible()
        if badge.inner_text() == "succeeded":
            break
    expect(badge).to_have_text("succeeded")
    expect(page.locator(".vf-sample-after").first).to_be_visible()
    words = page.locator(".vf-sample-after p").first.inner_text().split()
    assert len(words) > 30
    assert float(page.locator("[data-tile=loss] dd").inner_text()) < 2.0
    expect(page.locator(".vf-export code")).to_contain_text("export")
    page.click(".vf-nav [data-page=runs]")
    expect(page.locator(".vf-row[data-run]")).to_have_count(1)  # the double click made one run
