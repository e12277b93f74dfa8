"""Explore in the browser: the map, a cell that is pressed, the curve; a preset and a precise check on New run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from vramfit.planning.presets import TASTES

pytestmark = [pytest.mark.browser, pytest.mark.long]
See = Callable[..., None]


def test_explore_shows_map_curve_and_cost_and_follows_a_cell(page: Page, seeded: object, see: See) -> None:
    page.goto(seeded.url)
    page.click(".vf-nav [data-page=explore]")
    page.select_option("[name=card]", "plan:GeForce RTX 4090")
    expect(page.locator(".vf-heat td.vf-cell-fits").first).to_be_visible()
    expect(page.locator(".vf-costs tbody tr")).to_have_count(8)
    page.click(".vf-heat [data-model='Qwen/Qwen3-32B'][data-method=lora]")
    expect(page.locator("[data-chosen] [data-model='Qwen/Qwen3-32B']")).to_be_visible()
    expect(page.locator(".vf-said")).to_contain_text("streaming from")
    assert page.input_value("[name=model]") == "Qwen/Qwen3-32B"
    see("document.querySelector('[data-part=lengths] .js-plotly-plot')?.data?.length === 3")
    page.fill("[name=length]", "rubbish")
    expect(page.locator("[data-part=map] .vf-notice")).to_contain_text("rubbish")


def test_a_preset_fills_the_form_and_the_plan_can_be_checked(page: Page, fresh: object, see: See) -> None:
    page.goto(fresh.url)
    expect(page.locator("#start")).to_be_enabled()
    page.wait_for_timeout(800)  # the page's own first answers
    page.locator("[data-goal='quick taste']").hover()
    page.mouse.down()
    page.evaluate("VF.askPresets()")  # figures that arrive under a press do not take it away
    page.mouse.up()
    lengths, _, steps = ({str(each) for each in column} for column in zip(*TASTES, strict=True))
    see(f"{sorted(lengths)}.includes(document.querySelector('#field-data-max_length :is(textarea, input)').value)")
    see(f"{sorted(steps)}.includes(document.querySelector('#field-schedule-max_steps :is(textarea, input)').value)")
    see("document.querySelector('#field-model-source input').value.includes('/')")
    see("document.querySelector('.vf-estimate')?.dataset.state === 'fits'")
    page.wait_for_timeout(1500)  # the estimate is drawn again when the rows' lengths are counted
    page.click("[data-check]")
    expect(page.locator(".vf-checked tbody tr")).to_have_count(7, timeout=240_000)  # phases, and what is beside tensors
    see("!!document.querySelector('.vf-timeline.js-plotly-plot')")
    page.locator("#field-data-max_length :is(textarea, input)").fill("64")  # no taste is so short
    expect(page.locator(".vf-checked")).to_have_count(0)  # it was about other settings
