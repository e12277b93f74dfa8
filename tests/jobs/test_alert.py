"""What becomes an alert: in the same transaction as what it tells of, once an attempt, with its text made then."""

from __future__ import annotations

from pathlib import Path

import pytest

from jobs.alert import LONGEST_TEXT, MOST_TRIES, kind_of, wait_s
from jobs.attempt import explain
from jobs.death import cause_of
from jobs.job import Job
from jobs.store import Store
from tests.jobs.test_store import running
from vramfit.errors import JobError, WontFit
from vramfit.sentences import Sentence, joined, say
from vramfit.speech import CHINESE
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


def test_causes_and_remedies_are_told_in_the_language_of_the_address(store: Store) -> None:
    store.set_webhook(HOOK, language="zh")
    job = running(store)
    death = cause_of(code=-9, kills_before=0, kills_now=1, other_boot=False)
    cause = joined(death.cause, say("stays.no_step"))
    end(store, job, "interrupted", failure=cause, remedy=joined(death.remedy, say("next.again.log")))
    body = store.alerts()[0].body
    assert body["failure"] == cause, "a program reads the same in every language"
    assert body["text"] == (
        f"训练 {job.id}（{job.name}）中断：机器的内存用尽，系统结束了训练进程（SIGKILL）。"
        "它不会自动继续，因为一步也没有完成。"
        "请关闭其他程序，或减小微批或最大长度。请重新开始；日志里有详情。"
    )
    kept = store.job(job.id)
    assert CHINESE.said(kept.failure or "") + CHINESE.said(kept.remedy or "") == body["text"].partition("：")[2]
    store.set_webhook(HOOK, language="en")
    end(store, job := running(store), "failed", failure=cause, remedy="Look at it.")
    assert store.alerts()[0].body["text"] == f"Run {job.id} ({job.name}) failed: {cause} Look at it."


def test_what_an_address_in_chinese_gets_of_a_refusal_is_chinese_and_a_text_without_a_name_stays(store: Store) -> None:
    store.set_webhook(HOOK, language="zh")
    wont = say("wont.disk", what=say("wont.disk.result"), model="M", method="lora", needed="9 GiB", free="1 GiB")
    error = WontFit(wont, needed_bytes=9, available_bytes=1, suggestions=(say("help.space"), "Or wait."))
    failure = explain(error)
    end(store, running(store), "failed", failure=failure.what, remedy=failure.remedy)
    said = store.alerts()[0].body["text"].partition("：")[2]
    assert (
        said
        == "M 用 lora 训练时，检查点和结果需要磁盘 9 GiB，而空闲 1 GiB。"
        + "请腾出一些空间，或把数据文件夹放到另一个磁盘。Or wait."
    )
    assert failure.what == f"{wont}."


def test_what_is_not_well_is_told_in_the_language_of_the_address(store: Store) -> None:
    store.set_webhook(HOOK, language="zh")
    job = running(store)
    rows = say("rows.more", names="1, 2", more="7")
    message = say("health.refused", problem=say("health.refused.gradient"), rows=rows)
    store.record(job.id, attempt=job.attempt, events=[event("not-finite", message=message)])
    body = store.alerts()[0].body
    assert body["text"].endswith("：梯度不是有限的数，这一步没有采用（数据第 1, 2 行和另外 7 行）。")
    assert body["message"] == store.events(job.id)[0].message
    assert body["message"] == "The gradient is not finite, so the step was refused (rows 1, 2 and 7 more of the data)."


def test_a_text_that_another_version_wrote_over_is_told_as_it_is(store: Store) -> None:
    end(store, job := running(store), "failed", failure=say("death.never"))
    assert isinstance(store.job(job.id).failure, Sentence)
    store._db.execute("UPDATE jobs SET failure = 'Something else.'")
    assert store.job(job.id).failure == "Something else."
    assert not isinstance(store.job(job.id).failure, Sentence)


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
