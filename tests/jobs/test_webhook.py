"""The webhook against a real receiver: answers, hangs, back-off on a clock moved by hand, death between tries."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest

from jobs import processes
from jobs.alert import MOST_TRIES, wait_s
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.webhook import Sender, checked_address, post, shown_address
from tests.jobs.test_store import running
from tests.receiver import HANG, receiving
from vramfit.errors import UserError

OWNER = "test:1"


class Clock:
    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def timed(data_dir: Path, clock: Clock) -> Iterator[Store]:
    """A store whose clock is moved by hand."""
    with Store(data_dir, clock=clock) as opened:
        yield opened


def failed_run(store: Store) -> int:
    job = running(store)
    store.transition(job.id, expected=("running",), state="failed", attempt=1, failure="Why.", remedy="What to do.")
    assert store.take_lease(SUPERVISOR_LEASE, owner=OWNER, alive=lambda *_: False)
    return job.id


def sender(store: Store, said: list[str] | None = None, *, timeout_s: float = 5.0) -> Sender:
    return Sender(store, owner=OWNER, say=(said if said is not None else []).append, timeout_s=timeout_s, poll_s=0.01)


def test_an_alert_goes_out_once_as_json(timed: Store) -> None:
    with receiving(204) as receiver:
        timed.set_webhook(receiver.url)
        id_ = failed_run(timed)
        said: list[str] = []
        posts = sender(timed, said)
        assert posts.send_next()
        assert not posts.send_next()
    (got,) = receiver.got
    assert (got["alert"], got["job"], got["state"], got["failure"]) == (1, id_, "failed", "Why.")
    assert (got["remedy"], got["final_loss"], got["time"]) == ("What to do.", None, Clock.now)
    assert receiver.paths == ["POST /hook/sesame?key=open"]
    (found,) = timed.alerts()
    assert (found.sent_at, found.next_try_at, found.error, found.tries) == (Clock.now, None, None, 1)
    assert "It answered 204 No Content." in said[0]
    assert "sesame" not in said[0] and "open" not in said[0]


def test_an_error_then_silence_then_success_with_waits_that_double(timed: Store, clock: Clock) -> None:
    with receiving(500, HANG, 200) as receiver:
        timed.set_webhook(receiver.url)
        failed_run(timed)
        posts = sender(timed, timeout_s=0.3)
        assert posts.send_next()
        assert timed.alerts()[0].error == "It answered 500 Internal Server Error."
        for wait, error in ((5, "It gave no answer within 0.3 s."), (10, None)):
            clock.now += wait - 0.1
            assert not posts.send_next(), "too early"
            clock.now += 0.1
            assert posts.send_next()
            assert timed.alerts()[0].error == error
        assert timed.alerts()[0].sent_at == clock.now == Clock.now + 15
        clock.now += 10 * 3600
        assert not posts.send_next()
    assert len(receiver.got) == 3
    assert len(set(receiver.keys)) == 1, "each try bears the same key"


def test_after_twelve_tries_it_is_given_up_and_stays_in_sight(timed: Store, clock: Clock) -> None:
    with receiving(503) as receiver:
        timed.set_webhook(receiver.url)
        failed_run(timed)
        posts, times = sender(timed), []
        while timed.alerts_wait():
            clock.now = timed.alerts()[0].next_try_at or 0.0
            assert posts.send_next()
            times.append(clock.now)
        clock.now += 1e6
        assert not posts.send_next()
    waits = [after - before for before, after in pairwise(times)]
    assert waits == [wait_s(tries) for tries in range(1, MOST_TRIES)]
    assert len(receiver.got) == MOST_TRIES
    (found,) = timed.alerts(troubled=True)
    assert found.given_up
    assert found.error == "It answered 503 Service Unavailable."


def test_a_sender_that_died_in_mid_post_is_followed_by_one_that_tries_again(data_dir: Path, clock: Clock) -> None:
    with receiving(500, 200) as receiver:
        with Store(data_dir, clock=clock) as store:
            store.set_webhook(receiver.url)
            failed_run(store)
            assert sender(store).send_next()
            clock.now += 5
            assert store.claim_alert(OWNER) is not None  # and here it dies, before it posts
        with Store(data_dir, clock=clock) as store:
            posts = sender(store)
            assert not posts.send_next(), "the dead one may only be slow"
            clock.now += 100
            assert posts.send_next()
            assert [(each.tries, each.error, each.sent_at) for each in store.alerts()] == [(3, None, clock.now)]
    assert len(receiver.got) == 2


def test_only_the_holder_of_the_lease_sends(timed: Store) -> None:
    with receiving(200) as receiver:
        timed.set_webhook(receiver.url)
        failed_run(timed)
        assert timed.take_lease(SUPERVISOR_LEASE, owner="other", alive=lambda *_: False)
        assert not sender(timed).send_next()
        assert timed.take_lease(SUPERVISOR_LEASE, owner=OWNER, alive=lambda *_: False)
        assert sender(timed).send_next()
    assert len(receiver.got) == 1


def test_a_clock_set_back_a_day_holds_no_alert_up(timed: Store, clock: Clock) -> None:
    with receiving(500, 200) as receiver:
        timed.set_webhook(receiver.url)
        failed_run(timed)
        posts = sender(timed)
        assert posts.send_next()
        clock.now -= 86_400
        assert posts.send_next()
        assert timed.alerts()[0].sent_at == clock.now
    assert len(receiver.got) == 2


def test_what_was_answered_with_success_is_not_sent_again_when_the_database_was_locked(
    timed: Store, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jobs import schema

    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.05)
    locker = schema.connect(timed.path)
    with receiving(200) as receiver:
        timed.set_webhook(receiver.url)
        failed_run(timed)
        timed.close()  # reopened with the short patience
        posts, real = sender(timed), timed.claim_alert

        def claim_then_lock(owner: str) -> object:
            found = real(owner)
            locker.execute("BEGIN IMMEDIATE")
            return found

        monkeypatch.setattr(timed, "claim_alert", claim_then_lock)
        for _ in range(2):
            with pytest.raises(UserError, match="locked"):
                posts.send_next()
        monkeypatch.setattr(timed, "claim_alert", real)
        locker.execute("ROLLBACK")
        clock.now += 1000
        assert not posts.send_next()
        assert timed.alerts()[0].sent_at == clock.now
    locker.close()
    assert len(receiver.got) == 1


def test_a_receiver_that_hangs_holds_up_neither_the_queue_nor_the_end(
    store: Store, drive: Callable[..., object], eventually: Callable[..., None]
) -> None:
    from tests.jobs.test_supervisor import HASTY, add

    with receiving(HANG) as receiver:
        store.set_webhook(receiver.url)
        driven = drive(HASTY)
        with Sender(store, owner=processes.own_identity(), say=lambda _: None, timeout_s=20, poll_s=0.01) as posts:
            driven.until_over(add(store, steps=3))
            eventually(lambda: len(receiver.got) == 1)
            second = add(store, steps=3)
            driven.until_over(second)
            assert store.job(second).state == "succeeded"
            assert receiver.got[0]["kind"] == "finished"
        assert posts.is_alive(), "it is left in its post"
        receiver.let_go()
        posts.join(10)


def test_a_supervisor_of_its_own_delivers_what_was_left_and_then_leaves(store: Store) -> None:
    with receiving(200) as receiver:
        store.set_webhook(receiver.url)
        failed_run(store)
        store.release_lease(SUPERVISOR_LEASE, owner=OWNER)
        command = [sys.executable, "-m", "jobs.supervisor", "--data-dir", str(store.data_dir), "--idle", "0.2"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr
    assert [got["kind"] for got in receiver.got] == ["failed"]
    assert not store.alerts_wait(), "it left only then"
    assert "It answered 200 OK." in done.stdout
    assert "sesame" not in done.stdout + done.stderr


def test_an_order_to_ask_elsewhere_is_not_followed() -> None:
    with receiving(302, 200) as receiver:
        answer = post(receiver.url, {"a": 1})
    assert (answer.ok, answer.said) == (False, "It answered 302 Found.")
    assert len(receiver.got) == 1


def test_nobody_there_is_a_sentence_without_the_address() -> None:
    with receiving(200) as receiver:
        url = receiver.url
    answer = post(url, {})
    assert (answer.status, answer.said) == (None, "It could not be reached: Connection refused.")


def test_an_answer_that_is_no_http_is_a_sentence() -> None:
    import socket

    with socket.create_server(("127.0.0.1", 0)) as listener:

        def answer() -> None:
            taken, _ = listener.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(b"220 mail.example.org ESMTP\r\n")

        thread = threading.Thread(target=answer)
        thread.start()
        said = post(f"http://127.0.0.1:{listener.getsockname()[1]}/sesame", {}).said
        thread.join()
    assert said == "It gave no answer that can be read: BadStatusLine."


@pytest.mark.parametrize(
    ("address", "what"),
    [
        ("", "does not begin with http"),
        ("ftp://host/x", "does not begin with http"),
        ("file:///etc/passwd", "does not begin with http"),
        ("javascript:alert(1)", "does not begin with http"),
        ("hooks.example.org/sesame", "does not begin with http"),
        ("http:///sesame", "cannot be used"),
        ("http://host:99999/sesame", "cannot be used|does not begin"),
        ("http://host:port/sesame", "cannot be used|does not begin"),
        ("http://[::1/sesame", "cannot be used|does not begin"),
        ("http://host/ses ame", "cannot be used"),
        ("http://host/sesame\r\nX: y", "cannot be used"),
        ("http://host/sésame", "cannot be used"),
        ("http://me:sesame@host/", "user name or password"),
        ("http://host/" + "sesame" * 400, "has 2,412 characters; 2,000 are allowed"),
    ],
)
def test_an_address_that_cannot_be_posted_to_is_refused_without_being_quoted(address: str, what: str) -> None:
    with pytest.raises(UserError, match=what) as caught:
        checked_address(address)
    assert caught.value.remedy
    assert "sesame" not in str(caught.value)


def test_only_scheme_and_host_are_shown() -> None:
    assert checked_address("  https://hooks.example.org/a?b=c ") == "https://hooks.example.org/a?b=c"
    assert shown_address("https://hooks.example.org:8443/sesame?key=open") == "https://hooks.example.org:8443/…"
    assert shown_address("") == ""
