"""Alerts in the page: the address is kept and never shown whole, a test says what came back, news come once."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi.testclient import TestClient

from jobs.alert import MOST_TRIES
from jobs.store import SUPERVISOR_LEASE, Store
from tests.receiver import receiving
from ui.alerts import alerts_view, set_webhook
from ui.panel import build
from ui.texts import LANGUAGES, texts_of
from vramfit.errors import UserError

EN, ZH = texts_of("en"), texts_of("zh")
HOOK = "https://hooks.example.org/sesame"


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, in_loop: Callable[..., Any]) -> Iterator[TestClient]:
    folder: Path = tmp_path_factory.mktemp("data") / "data"
    built = in_loop(lambda: build(folder, only_host="127.0.0.1"))
    with TestClient(built, base_url="http://127.0.0.1") as opened:
        yield opened
    built.state.services.store.close()


def test_an_address_is_kept_whole_and_shown_without_its_secret(client: TestClient) -> None:
    store = client.app.state.services.store
    answer = client.post("/vramfit/data/webhook", json={"address": f" {HOOK}\n"})
    assert answer.json()["webhook"] == "https://hooks.example.org/…"
    assert store.webhook == HOOK
    for path in ("/vramfit/data/alerts", "/vramfit/data/runs", "/en/"):
        assert "sesame" not in client.get(path).text
    assert client.post("/vramfit/data/webhook", json={"address": ""}).json()["webhook"] == ""
    assert store.webhook == ""


@pytest.mark.parametrize("path", ["webhook", "webhook/test"])
def test_an_address_that_cannot_be_is_two_sentences(client: TestClient, path: str) -> None:
    answer = client.post(f"/vramfit/data/{path}", json={"address": "ftp://host/sesame"})
    assert answer.status_code == 404
    assert "http://" in answer.json()["error"]["what"]
    assert answer.json()["error"]["remedy"]
    assert "sesame" not in answer.text
    assert client.app.state.services.store.webhook == ""


def test_another_site_cannot_set_the_address(client: TestClient) -> None:
    answer = client.post("/vramfit/data/webhook", json={"address": HOOK}, headers={"origin": "http://evil.example"})
    assert answer.status_code == 403
    assert client.app.state.services.store.webhook == ""


def test_a_test_says_what_came_back_in_the_readers_language(client: TestClient) -> None:
    with receiving(200, 404) as receiver:
        good = client.post("/vramfit/data/webhook/test?lang=zh", json={"address": receiver.url}).json()
        client.post("/vramfit/data/webhook", json={"address": receiver.url})
        bad = client.post("/vramfit/data/webhook/test", json={"address": ""}).json()
    gone = client.post("/vramfit/data/webhook/test", json={"address": ""}).json()
    client.post("/vramfit/data/webhook", json={"address": ""})
    assert good == {"ok": True, "said": "测试已送达。It answered 200 OK."}
    assert bad == {"ok": False, "said": "The test was not taken. It answered 404 Not Found."}
    assert gone == {"ok": False, "said": "The test was not taken. It could not be reached: Connection refused."}
    assert [got["kind"] for got in receiver.got] == ["test", "test"]
    assert receiver.got[0]["text"] == ZH["alerts.test.text"]
    none = client.post("/vramfit/data/webhook/test", json={"address": ""})
    assert none.json()["error"]["what"] == "There is no address to send a test to"


def test_news_come_once_and_nothing_old_is_news(store: Store, seed_run: Callable[..., int]) -> None:
    first = alerts_view(store, EN, after=None)
    assert (first["last"], first["alerts"]) == (0, [])
    done = seed_run(final_loss=1.25)
    broken = seed_run(state="failed", failure="The card was lost.", remedy="Resume it.")
    assert alerts_view(store, EN, after=None) == {**first, "last": 2}
    news = alerts_view(store, EN, after=0)
    assert news["alerts"] == [
        {"id": 1, "job": done, "kind": "finished", "title": f"Run {done} (Stories) has finished",
         "text": "Final loss 1.25."},
        {"id": 2, "job": broken, "kind": "failed", "title": f"Run {broken} (Stories) failed",
         "text": "The card was lost. Resume it."},
    ]  # fmt: skip
    assert alerts_view(store, ZH, after=1)["alerts"][0]["title"] == f"训练 {broken}（Stories）失败"
    assert alerts_view(store, EN, after=2)["alerts"] == []
    json.dumps(news)


def test_what_is_not_delivered_is_shown_until_the_address_is_saved_again(
    store: Store, seed_run: Callable[..., int]
) -> None:
    set_webhook(store, HOOK, EN)
    run = seed_run(state="failed")
    assert alerts_view(store, EN, after=None)["troubles"] == []

    def trouble(tries: int) -> str:
        store._db.execute("UPDATE alerts SET tries = ?, next_try_at = 0", [tries - 1])
        owner = (store.lease(SUPERVISOR_LEASE) or ("", 0))[0]
        assert store.claim_alert(owner) is not None
        store.note_alert(1, tries=tries, error="It answered 500.")
        (said,) = alerts_view(store, EN, after=None)["troubles"]
        return str(said)

    assert trouble(3) == f"Alert not delivered yet, try 3 of 12: Run {run} (Stories) failed. It answered 500."
    assert trouble(MOST_TRIES).startswith(f"Alert given up after 12 tries: Run {run} (Stories) failed. It answered")
    set_webhook(store, HOOK, EN)
    assert alerts_view(store, EN, after=None)["troubles"] == []
    with pytest.raises(UserError):
        set_webhook(store, "nonsense", EN)


def test_every_kind_of_alert_has_words() -> None:
    from typing import get_args

    from jobs.alert import WORDS, Kind

    assert {f"alerts.{kind}" for kind in get_args(Kind)} <= EN.words.keys()
    assert WORDS.keys() == LANGUAGES.keys()
    assert all(words.keys() == {*get_args(Kind), "loss", "why", "end"} for words in WORDS.values())


def test_alerts_are_posted_in_the_language_of_the_page_that_set_the_address(
    store: Store, seed_run: Callable[..., int]
) -> None:
    set_webhook(store, HOOK, ZH)
    failed = seed_run(state="failed")
    text = store.alerts()[0].body["text"]
    assert text == (f"训练 {failed}（Stories）失败。")
    set_webhook(store, HOOK, EN)
    again = seed_run(state="failed")
    assert store.alerts()[0].body["text"] == f"Run {again} (Stories) failed."
