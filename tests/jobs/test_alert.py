"""What becomes an alert: in the same transaction as what it tells of, once an attempt, with its text made then."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.alert import LONGEST_TEXT, MOST_TRIES, kind_of, wait_s
from jobs.job import Job
from jobs.store import Store
from tests.jobs.test_store import running
from vramfit.errors import JobError
from vramfit.training import health
from vramfit.training.health import UNHEALTHY
from vramfit.training.metrics import Event

HOOK = "https://hooks.example.org/secret"


def event(kind: str, *, level: str = "warning", message: str = "It jumped.") -> Event:
    return Event(time=5.0, level=level, kind=kind, message=message, step=7)  # type: ignore[arg-type]


def end(store: Store, job: Job, state: str, **values: object) -> None:
    store.transition(job.id, expected=("running",), state=state, attempt=job.attempt, **values)  # type: ignore[arg-type]


def test_waits_double_from_five_seconds_to_an_hour() -> None:
    waits = [wait_s(tries) for tries in range(1, MOST_TRIES)]
    assert waits == [5, 10, 20, 40, 80, 160, 320, 640, 1280, 2560, 3600]


@pytest.mark.parametrize(
    ("state", "failure", "kind"),
    [
        ("succeeded", None, "finished"),
        ("failed", "It broke.", "failed"),
        ("interrupted", "It was ended.", "interrupted"),
        ("paused", "The disk is full.", "interrupted"),
        ("paused", None, None),
        ("cancelled", "It was ended late.", None),
        ("queued", None, None),
        ("running", None, None),
    ],
)
def test_what_a_person_asked_for_is_no_alert(state: str, failure: str | None, kind: str | None) -> None:
    assert kind_of(state, failure) == kind  # type: ignore[arg-type]


def test_a_failed_run_is_an_alert_with_cause_and_remedy(store: Store) -> None:
    job = running(store)
    end(store, job, "failed", failure="The card was lost.", remedy="Resume it.")
    (found,) = store.alerts()
    assert (found.job, found.kind, found.tries, found.sent_at, found.next_try_at) == (job.id, "failed", 0, None, None)
    body = found.body
    assert (body["state"], body["failure"], body["remedy"]) == ("failed", "The card was lost.", "Resume it.")
    assert body["text"] == body["content"] == f"Run {job.id} ({job.name}) failed: The card was lost. Resume it."


def test_a_finished_run_tells_its_loss_and_one_without_a_number_none(store: Store) -> None:
    end(store, running(store), "succeeded", final_loss=1.23456)
    end(store, running(store), "succeeded", final_loss=float("nan"))
    second, first = store.alerts()
    assert (first.body["final_loss"], first.body["text"].partition(": ")[2]) == (1.23456, "final loss 1.235")
    assert (second.body["final_loss"], second.body["text"][-13:]) == (None, "has finished.")


def test_a_text_for_people_is_cut_where_a_chat_would_refuse_it_and_the_cause_is_whole(store: Store) -> None:
    end(store, running(store), "failed", failure="why " * 1000)
    (found,) = store.alerts()
    assert len(found.body["content"]) == LONGEST_TEXT + 1
    assert found.body["failure"] == "why " * 1000


def test_a_change_that_is_refused_makes_no_alert(store: Store) -> None:
    job = running(store)
    with pytest.raises(JobError):
        store.transition(job.id, expected=("running",), state="failed", attempt=job.attempt + 1)
    assert store.alerts() == []


def test_warnings_of_health_are_alerts_once_an_attempt_and_kind(store: Store) -> None:
    job = running(store)
    store.record(job.id, attempt=job.attempt, events=[event("loss-spike"), event("loss-spike"), event("heat")])
    store.add_event(job.id, event("loss-spike"))
    store.add_event(job.id, event("drift", level="info"))
    store.add_event(job.id, event("checkpoint"))
    found = store.alerts()
    assert [(each.kind, each.about) for each in found] == [("unhealthy", "heat"), ("unhealthy", "loss-spike")]
    assert (found[0].body["message"], found[0].body["step"], found[0].body["state"]) == ("It jumped.", 7, "running")
    assert len(store.events(job.id)) == 6, "the events are all there"


def test_every_kind_that_is_listed_is_told_somewhere() -> None:
    """Read as text: the loop imports torch."""
    folder = Path(health.__file__).parent
    lines = [line for name in ("health.py", "run.py") for line in (folder / name).read_text("utf-8").splitlines()]
    told = "".join(line for line in lines if not line.startswith("UNHEALTHY"))
    assert [kind for kind in sorted(UNHEALTHY) if f'"{kind}"' not in told] == []


def test_an_alert_waits_only_where_there_is_an_address(store: Store) -> None:
    end(store, running(store), "failed")
    assert not store.alerts_wait()
    store.set_webhook(HOOK)
    assert store.webhook == HOOK
    assert not store.alerts_wait(), "what was before is no news"
    end(store, running(store), "failed")
    assert store.alerts_wait()
    store.set_webhook("")
    assert store.webhook == ""
    assert not store.alerts_wait()


def test_an_interruption_that_nobody_heard_of_is_dropped_when_the_run_goes_on(store: Store) -> None:
    store.set_webhook(HOOK)
    job = running(store)
    end(store, job, "interrupted", failure="The system went down.")
    assert store.alerts_wait()
    store.go_on(job.id, attempt=job.attempt)
    assert not store.alerts_wait()


def test_a_new_address_is_tried_at_once_and_clears_what_was_given_up(store: Store) -> None:
    store.set_webhook(HOOK)
    end(store, running(store), "failed")
    store.take_lease("supervisor", owner="o", alive=lambda *_: False)
    assert store.claim_alert("o") is not None
    assert store.claim_alert("o") is None, "its next try is later"
    store.note_alert(1, tries=1, error="It answered 500.")
    assert [each.error for each in store.alerts(troubled=True)] == ["It answered 500."]
    store.set_webhook(HOOK + "2")
    found, address = store.claim_alert("o") or (None, "")
    assert found is not None
    assert (found.tries, address) == (2, HOOK + "2")
    store._db.execute("UPDATE alerts SET next_try_at = NULL")
    assert len(store.alerts(troubled=True)) == 1
    store.set_webhook(HOOK)
    assert store.alerts(troubled=True) == []


def test_an_answer_to_an_older_try_changes_nothing(store: Store) -> None:
    store.set_webhook(HOOK)
    end(store, running(store), "failed")
    store.take_lease("supervisor", owner="o", alive=lambda *_: False)
    assert store.claim_alert("o") is not None
    before = store.alerts()
    store.note_alert(1, tries=7, error="late")
    assert store.alerts() == before
    store.note_alert(1, tries=1, error=None)
    assert store.alerts()[0].sent_at is not None
    sent = store.alerts()[0]
    store.note_alert(1, tries=1, error="late")
    assert store.alerts() == [sent]
