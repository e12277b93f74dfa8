"""Alerts: where they are posted to, what was not delivered, and what an open page shows. Drawn by assets/alerts.js."""

from __future__ import annotations

import time
from typing import Any, Final

from jobs.alert import MOST_TRIES, TOLD, Alert
from jobs.store import Store
from jobs.webhook import checked_address, post, shown_address
from ui.texts import Texts
from vramfit.errors import UserError

SHOWN_TROUBLES: Final = 5


def alerts_view(store: Store, texts: Texts, *, after: int | None) -> dict[str, Any]:
    """Where alerts go to (without what is secret of it), which could not be delivered, and those with a number above
    `after`, oldest first, as a notification shows them; None: no one was told yet, and nothing old is news."""
    newest = store.alerts(limit=1)
    news = store.alerts(after=after) if after is not None else []
    return {
        "webhook": shown_address(store.webhook),
        "last": newest[0].id if newest else 0,
        "alerts": [_notice(found, texts) for found in reversed(news)],
        "troubles": [_trouble(found, texts) for found in store.alerts(troubled=True, limit=SHOWN_TROUBLES)],
    }


def set_webhook(store: Store, address: str, texts: Texts) -> None:
    """Post alerts from now on to this address, with "" to nobody, in the page's language. Raises UserError."""
    store.set_webhook(checked_address(address) if address.strip() else "", language=texts.language)


def try_webhook(store: Store, address: str, texts: Texts) -> dict[str, Any]:
    """Post a test to the address, or with "" to the one that is set, and say what came back. Raises UserError."""
    address = checked_address(address) if address.strip() else store.webhook
    if not address:
        raise UserError("There is no address to send a test to", "Type the webhook's address first.")
    said = texts["alerts.test.text"]
    answer = post(address, {"kind": "test", "time": time.time(), "text": said, "content": said})
    return {
        "ok": answer.ok,
        "said": texts["alerts.test.ok" if answer.ok else "alerts.test.bad"].format(said=answer.said),
    }


def _notice(found: Alert, texts: Texts) -> dict[str, Any]:
    body = found.body
    why = [texts.said(body[part]) for part in TOLD if body[part]]
    if body["final_loss"] is not None and found.kind == "finished":
        why.append(texts["alerts.loss"].format(loss=f"{body['final_loss']:.4g}"))
    return {
        "id": found.id,
        "job": found.job,
        "kind": found.kind,
        "title": texts[f"alerts.{found.kind}"].format(id=found.job, name=body["name"]),
        "text": texts.speech.space.join(why),
    }


def _trouble(found: Alert, texts: Texts) -> str:
    title = texts[f"alerts.{found.kind}"].format(id=found.job, name=found.body["name"])
    key = "alerts.waits" if found.next_try_at is not None else "alerts.given_up"
    return texts[key].format(alert=title, tries=found.tries, most=MOST_TRIES, error=found.error)
