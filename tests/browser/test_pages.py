"""The pages as a person opens them: quick, quiet, the same in every tab."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Browser, Page, expect

pytestmark = pytest.mark.browser
See = Callable[..., None]

DRAWN = "document.querySelector('.vf-grid')?.dataset.lastStep === '{step}'"


def test_everything_on_the_pages_comes_from_this_machine(page: Page, seeded: object, see: See) -> None:
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for view in ("?view=new", "?view=monitor&run=2", "?view=runs", "?lang=zh"):
        page.goto(seeded.url + view)
        page.wait_for_load_state("networkidle")
    assert any("plotly.min.js" in url for url in asked)
    assert [url for url in asked if not url.startswith((seeded.url, "data:", "blob:"))] == []


def test_no_footer_and_no_links_to_the_toolkits_pages(page: Page, seeded: object) -> None:
    page.goto(seeded.url)
    expect(page.locator("#start")).to_be_visible()
    assert not page.locator("footer").is_visible()


def test_a_run_of_a_hundred_thousand_steps_opens_thinned(page: Page, seeded: object, see: See) -> None:
    page.goto(seeded.url + "?view=runs")
    page.wait_for_selector(".vf-row[data-run='1']")
    see("!!window.Plotly")  # fetched in the background of the first page
    page.click(".vf-row[data-run='1']")
    see(DRAWN.format(step=100_000))
    assert 500 < int(page.get_attribute(".vf-grid", "data-points")) <= 1200
    assert page.locator(".vf-chart:visible").count() == 8
    assert "run=1" in page.url


def test_reload_and_second_tab_show_the_same_picture(page: Page, seeded: object, see: See, browser: Browser) -> None:
    def curves(tab: Page) -> list[object]:
        tab.wait_for_function(DRAWN.format(step=100_000))
        return tab.evaluate(
            "[...document.querySelectorAll('.vf-plot')].map((plot) => plot.data.map((trace) => [trace.x, trace.y]))"
        )

    page.goto(seeded.url + "?run=1")
    first = curves(page)
    page.reload()
    assert curves(page) == first
    with browser.new_context(locale="en-US") as context:
        other = context.new_page()
        other.goto(seeded.url + "?run=1")
        assert curves(other) == first


def test_a_tick_sends_only_what_is_new_and_leaves_a_zoom_alone(page: Page, seeded: object, see: See) -> None:
    sizes: list[int] = []
    page.on("response", lambda answer: sizes.append(len(answer.body())) if "/data/run/" in answer.url else None)
    page.goto(seeded.url + "?run=1")
    see(DRAWN.format(step=100_000))
    page.evaluate("Plotly.relayout(document.querySelector('[data-chart=loss] .vf-plot'), {'xaxis.range': [500, 600]})")
    with page.expect_response("**/data/run/**"):  # a finished run is asked about every three seconds
        pass
    page.wait_for_timeout(300)
    ranged = "document.querySelector('[data-chart=loss] .vf-plot')._fullLayout.xaxis.range.map(Math.round)"
    assert page.evaluate(ranged) == [500, 600]
    assert len(sizes) >= 2
    assert sizes[0] > 50_000
    assert max(sizes[1:]) < 8_000


def test_without_a_card_the_page_says_what_memory_means(page: Page, seeded: object, see: See) -> None:
    page.goto(seeded.url + "?run=2")
    see(DRAWN.format(step=200))
    expect(page.locator(".vf-note", has_text="No card in this run")).to_be_visible()
    expect(page.locator("[data-chart=memory]")).to_contain_text("trainer's tensors")
    assert page.locator("[data-chart=power]").count() == 0


def test_a_streamed_run_shows_where_a_steps_time_goes_and_what_it_wrote(page: Page, seeded: object, see: See) -> None:
    page.goto(seeded.url + "?run=3")
    see(DRAWN.format(step=40))
    chart = page.locator("[data-chart=waits]")
    expect(chart.locator("header b")).to_have_text("0.0100 s")
    expect(chart.locator(".vf-sub")).to_contain_text("40.0 GiB written to disk in 40 steps, 1.0 GiB a step")
    # As drawn: each part begins where the one before ends, and the last reaches the step's 10 ms.
    top = "document.querySelector('[data-chart=waits] .vf-plot').calcdata.map((trace) => +trace[0].y.toFixed(6))"
    assert page.evaluate(top) == [0.004, 0.005, 0.007, 0.01]
    page.goto(seeded.url + "?run=2")
    see(DRAWN.format(step=200))
    assert page.locator("[data-chart=waits]").count() == 0
    assert page.locator(".vf-chart .vf-sub:visible").count() == 0


def test_text_before_and_after_stand_side_by_side(page: Page, seeded: object) -> None:
    page.goto(seeded.url + "?run=2")
    expect(page.locator(".vf-sample-before")).to_contain_text("Once zzk oof")
    expect(page.locator(".vf-sample-after")).to_contain_text("Once there was a fox.")
    left, right = (page.locator(f".vf-sample-{name}").bounding_box() for name in ("before", "after"))
    assert left["y"] == right["y"]
    assert left["x"] < right["x"]


def test_a_run_that_does_not_exist_is_one_sentence(page: Page, seeded: object) -> None:
    page.goto(seeded.url + "?run=77")
    expect(page.locator("#page-monitor .vf-offline")).to_contain_text("77")
    page.close()  # it goes on asking, and the browser notes each 404
    page.trouble.clear()


@pytest.mark.parametrize("view", ["?view=new", "?run=2", "?view=runs"])
def test_on_a_phone_there_is_one_column_and_nothing_is_wider(browser: Browser, seeded: object, view: str) -> None:
    with browser.new_context(viewport={"width": 390, "height": 844}, is_mobile=True, has_touch=True) as context:
        tab = context.new_page()
        tab.goto(seeded.url + view)
        tab.wait_for_selector("#start, .vf-monitor-body, .vf-row[data-run]", state="attached")
        tab.wait_for_timeout(800)
        assert tab.evaluate("document.documentElement.scrollWidth") <= 390
        parts = tab.locator("#field-model-source:visible, .vf-chart:visible, .vf-row[data-run]:visible").all()
        assert parts
        assert all(part.bounding_box()["width"] > 300 for part in parts)  # one column


def test_chinese(page: Page, seeded: object) -> None:
    page.goto(seeded.url + "?lang=zh")
    expect(page.locator("#start")).to_have_text("开始")
    expect(page.locator("#estimate")).to_contain_text("权重")
    page.click(".vf-nav [data-page=runs]")
    expect(page.locator(".vf-row[data-run='2']")).to_contain_text("成功")
