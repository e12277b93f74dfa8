"""An alert: what is told of a run outside of its page, and when it is tried again. Pure: no SQL, no network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from jobs.job import State
from vramfit.speech import speech_of

Kind = Literal["finished", "failed", "interrupted", "unhealthy", "held"]

WORDS: Final[Mapping[str, Mapping[str, str]]] = {
    "en": {
        "finished": "Run {job} ({name}) has finished",
        "failed": "Run {job} ({name}) failed",
        "interrupted": "Run {job} ({name}) was interrupted",
        "unhealthy": "Run {job} ({name}) is not well",
        "held": "Run {job} ({name}) could not be started",
        "loss": "final loss {loss}",
        "why": "{what}: {why}",
        "end": "{what}.",
    },
    "zh": {
        "finished": "训练 {job}（{name}）已完成",
        "failed": "训练 {job}（{name}）失败",
        "interrupted": "训练 {job}（{name}）中断",
        "unhealthy": "训练 {job}（{name}）状态不佳",
        "held": "训练 {job}（{name}）无法启动",
        "loss": "最终损失 {loss}",
        "why": "{what}：{why}",
        "end": "{what}。",
    },
}
"""What is posted for people, by language. Causes and remedies are said in it where they are sentences that it knows
(vramfit/sentences.py), else in the words of whoever found them: English."""

TOLD: Final = ("message", "failure", "remedy")
"""What in an alert's body is text for people, besides the whole of it."""

MOST_TRIES: Final = 12
"""After so many tries without an answer of success an alert is given up: about two and a half hours."""
FIRST_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 3600.0
LONGEST_TEXT: Final = 1900
"""Characters of a text for people; Discord refuses more than 2,000."""
LONGEST_TRY_S: Final = 60.0
"""A try that has not told how it went after so long died with its supervisor."""


@dataclass(frozen=True, kw_only=True)
class Alert:
    """One alert as it is now. Times are Unix seconds; `next_try_at` None: not to be sent (any more).

    `about` is the kind of the event behind an unhealthy one, else "". `body` is what is sent, made when it arose.
    `error` says what came of the last try that failed.
    """

    id: int
    job: int
    kind: Kind
    about: str
    body: dict[str, Any]
    created_at: float
    tries: int
    next_try_at: float | None
    sent_at: float | None
    error: str | None

    @property
    def given_up(self) -> bool:
        return self.sent_at is None and self.tries >= MOST_TRIES


def kind_of(state: State, failure: str | None) -> Kind | None:
    """The alert that a change to `state` makes; None: a person asked for it, or the run goes on.

    A run that paused by itself (a full disk) says why in `failure`, and counts as interrupted.
    """
    if state == "succeeded":
        return "finished"
    if state == "failed" or state == "interrupted":
        return state
    return "interrupted" if state == "paused" and failure else None


def wait_s(tries: int) -> float:
    """Seconds from a try that failed to the next one, after `tries` of them: 5, doubling, at most an hour."""
    return float(min(FIRST_WAIT_S * 2 ** (tries - 1), LONGEST_WAIT_S))


def body_of(
    *,
    job: int,
    name: str,
    state: str,
    kind: Kind,
    time: float,
    failure: str | None,
    remedy: str | None,
    final_loss: float | None,
    language: str = "en",
    message: str | None = None,
    step: int | None = None,
) -> dict[str, Any]:
    """What is posted, as JSON values. `text` and `content` say the same for people: chats show one or the other
    (Slack and Mattermost `text`, Discord `content`), in `language` where there are WORDS for it."""
    words, speech = WORDS.get(language, WORDS["en"]), speech_of(language)
    loss = words["loss"].format(loss=f"{final_loss:.4g}") if kind == "finished" and final_loss is not None else ""
    why = speech.space.join(speech.said(part) for part in (message, failure, remedy, loss) if part)
    text = words["why" if why else "end"].format(what=words[kind].format(job=job, name=name), why=why)
    if len(text) > LONGEST_TEXT:
        text = f"{text[:LONGEST_TEXT]}…"
    return {
        "job": job,
        "name": name,
        "kind": kind,
        "state": state,
        "failure": failure,
        "remedy": remedy,
        "final_loss": final_loss,
        "message": message,
        "step": step,
        "time": time,
        "text": text,
        "content": text,
    }
