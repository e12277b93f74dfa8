"""What the store hands out: a job as it is now, and its curves thinned for a chart. Frozen data, no SQL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from vramfit.config import RunConfig
from vramfit.errors import ConfigError
from vramfit.sentences import say
from vramfit.training import checkpoint
from vramfit.training.inputs import Marks
from vramfit.training.metrics import Event, PhaseProgress

State = Literal[
    "draft",
    "queued",
    "starting",
    "running",
    "pausing",
    "stopping",
    "paused",
    "succeeded",
    "failed",
    "cancelled",
    "interrupted",
]

ACTIVE: Final[tuple[State, ...]] = ("starting", "running", "pausing", "stopping")
"""A trainer owns the job."""

FINAL: Final[tuple[State, ...]] = ("paused", "succeeded", "failed", "cancelled", "interrupted")
"""Nothing owns the job and nothing will happen to it by itself."""

RESUMABLE: Final[tuple[State, ...]] = ("paused", "cancelled", "failed", "interrupted")
"""May be put back into the queue; it goes on from its last checkpoint, or from the start when it has none."""


UNSUCCESSFUL: Final[tuple[State, ...]] = ("failed", "cancelled", "interrupted")
"""Ended, and not as wished: what a job that comes after is told of."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run in the queue or the history. Times are Unix seconds, sizes bytes; None: not (yet) known.

    `attempt` counts how often a trainer was started for it. `step` is the last step on record, `total_steps` 0 while
    unknown. `failure` is one sentence, `remedy` what to do about it. `owner` names the trainer's process. `position`
    orders the queue. `revision` changes whenever recorded rows were taken back (a resume), see Series.

    `resumes` counts how often it went on by itself since a person last asked for it, `losses` how often its supervisor
    died over it. `step_before` and `checkpoint_before` are the last step on record and the newest checkpoint when the
    last attempt began, None while it has not. `after` is the job that has to succeed first, with `after_anyway` only to
    end; `after_state` is the state of that one. `go_on`: once it has ended as asked, it goes back into the queue.
    `config_error`: why `config` is not what was written, where another version wrote it.
    `frozen` are the marks of what it is made from, as that was when it was queued. `accepted`: it was paused because
    something had changed, and somebody resumed it. `device` is where its last attempt was started, by torch's name.
    `again`: what ended it may be gone the next time, and the supervisor puts it back into the queue.
    """

    id: int
    name: str
    state: State
    attempt: int
    revision: int
    position: float
    foreground: bool
    config: RunConfig
    config_error: ConfigError | None
    forecast: dict[str, Any] | None
    phase: PhaseProgress | None
    step: int
    total_steps: int
    created_at: float
    claimed_at: float | None
    started_at: float | None
    finished_at: float | None
    heartbeat_at: float | None
    final_loss: float | None
    eval_loss: float | None
    peak_allocated_bytes: int | None
    export: str | None
    failure: str | None
    remedy: str | None
    folder: Path
    owner: str | None
    stop_requested: bool
    resumes: int
    losses: int
    step_before: int | None
    checkpoint_before: int | None
    after: int | None
    after_anyway: bool
    after_state: State | None
    go_on: bool
    frozen: Marks | None
    accepted: bool
    device: str | None
    again: bool

    @property
    def active(self) -> bool:
        return self.state in ACTIVE

    @property
    def final(self) -> bool:
        return self.state in FINAL

    @property
    def log(self) -> Path:
        return self.folder / "trainer.log"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def newest_checkpoint(self) -> int:
        """The step of the newest complete checkpoint; whether its bytes are unharmed is for the resume to verify."""
        return max(checkpoint.steps(self.checkpoints), default=0)

    @property
    def has_checkpoint(self) -> bool:
        return self.newest_checkpoint > 0

    @property
    def progressed(self) -> bool:
        """The last attempt came further than the one before: in steps on record, or with its newest checkpoint."""
        if self.step_before is None or self.checkpoint_before is None:
            return False
        return self.step > self.step_before or self.newest_checkpoint > self.checkpoint_before

    @property
    def resumable(self) -> bool:
        """What a page offers as Resume: there is a checkpoint, it was paused before its first one, or its folder is
        gone, which is told by name when it is asked for (`lost_folder`)."""
        if self.state not in RESUMABLE:
            return False
        return self.state == "paused" or self.has_checkpoint or bool(self.lost_folder)

    @property
    def blocked(self) -> bool:
        """It waits for another job, which has not ended in the way that this one needs."""
        if self.state != "queued" or self.after is None or self.after_state == "succeeded":
            return False
        return not (self.after_anyway and self.after_state in UNSUCCESSFUL)

    @property
    def asked_config(self) -> RunConfig:
        """The settings with "auto" replaced by the device that the queue gave it."""
        return self.config if self.device is None else self.config.model_copy(update={"device": self.device})

    @property
    def awaited_device(self) -> str:
        """The device it cannot start without: the one that it names, or any card where it goes on by itself from one,
        and is then told by the name of that; "auto" where any device will do."""
        from_card = self.resumes > 0 and self.device not in (None, "cpu")
        return self.device if self.config.device == "auto" and from_card and self.device else self.config.device

    @property
    def lost_folder(self) -> str:
        """What is said when the folder of a run that did steps is gone; "" while it is there."""
        if self.folder.is_dir() or not self.step:
            return ""
        return say("gone.folder", job=self.id, folder=str(self.folder), step=f"{self.step:,}")


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """An event with its number, the cursor for `Store.events(after=...)`."""

    id: int


class Streamed(NamedTuple):
    """How many steps of a run streamed their model, and the bytes that these wrote to disk."""

    steps: int
    written_bytes: int


class Saves(NamedTuple):
    """How many checkpoints steps of a run came after, and how long training waited for these."""

    checkpoints: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Series:
    """Curves of one job, thinned to at most about `max_points`, the same for every reader.

    Each point stands for `stride` consecutive rows (a power of two decided by the number of the last row): means of
    rates and losses, maxima of bytes and temperatures, the last time. Buckets lie at fixed row numbers, so a point
    never changes once its bucket is full. `columns` maps a name to one value per point; all are the same length.

    To follow a live job pass `after=cursor, stride=stride, revision=revision` of the last answer: only new points come
    back. `reset` says that the stride or the revision changed (or that the caller had none), so `columns` is the whole
    history and replaces what was drawn. `tail` holds the bucket that is still filling (no or one row per column); it
    is not covered by `cursor` and is replaced by the next answer. With `stride` 1 there is never a tail.
    """

    columns: dict[str, list[float | int | None]]
    tail: dict[str, list[float | int | None]]
    cursor: int
    stride: int
    revision: int
    reset: bool
    rows: int

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))
