"""Alerts from the page: a webhook is tried and saved; a run that fails is told there and to a tab in the background.

The browser's own notifications are made for real; a subclass notes what was asked of them.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from playwright.sync_api import Page, expect

from jobs import processes
from jobs.store import Store
from tests.receiver import receiving
from vramfit.config import RunConfig
from vramfit.training.metrics import Event

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

NOTE_NOTIFICATIONS = """
window.told = [];
window.Notification = class extends window.Notification {
  constructor(title, options) { super(title, options); window.told.push(`${title}: ${options.body}`); }
};
"""
LOOK_AWAY = """
Object.defineProperty(document, "hidden", { get: () => true });
document.dispatchEvent(new Event("visibilitychange"));
"""


def test_alerts_reach_the_webhook_and_a_tab_in_the_background(
    page: Page, fresh: object, see: Callable[..., None]
) -> None:
    page.add_init_script(NOTE_NOTIFICATIONS)
    with receiving(200) as receiver:
        page.goto(fresh.url + "?view=runs")
        alerts = page.locator(".vf-alerts")
        alerts.locator("summary").click()
        field = alerts.get_by_label("Webhook")
        field.fill(receiver.url)
        alerts.get_by_role("button", name="Send a test").click()
        expect(alerts.get_by_role("status")).to_have_text("The test arrived. It answered 200 OK.")
        alerts.get_by_role("button", name="Save").click()
        expect(alerts.get_by_role("status")).to_have_text("Saved. Alerts go there from now on.")
        expect(field).to_have_value("")
        expect(field).to_have_attribute("placeholder", receiver.url.partition("/hook")[0] + "/…")
        assert page.evaluate("Notification.permission") != "granted", "nothing is asked for before a click"
        page.context.grant_permissions(["notifications"])
        with page.expect_response(lambda answer: "/vramfit/data/alerts" in answer.url):
            alerts.get_by_label("Notifications of this browser").check()
        page.evaluate(LOOK_AWAY)
        with Store(fresh.data_dir) as store:
            job = store.begin_foreground(RunConfig(name="Night"), owner=processes.own_identity())
            spike = Event(time=1.0, level="warning", kind="loss-spike", message="The loss jumped to 9.", step=3)
            store.record(job.id, attempt=1, events=[spike])
            store.transition(job.id, expected=("running",), state="failed", attempt=1, failure="It broke.")
        see("window.told.length === 2")
        assert page.evaluate("window.told") == [
            "Run 1 (Night) is not well: The loss jumped to 9.",
            "Run 1 (Night) failed: It broke.",
        ]
        page.wait_for_timeout(100)
        for _ in range(200):
            if len(receiver.got) >= 3:
                break
            page.wait_for_timeout(100)
    assert [got["kind"] for got in receiver.got] == ["test", "unhealthy", "failed"]
