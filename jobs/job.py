"""What the store hands out: a job as it is now, and its curves thinned for a chart. Frozen data, no SQL."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from vramfit.config import RunConfig
from vramfit.training import checkpoint
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


@dataclass(frozen=True, kw_only=True)
class Job:
    """One run in the queue or the history. Times are Unix seconds, sizes bytes; None: not (yet) known.

    `attempt` counts how often a trainer was started for it. `step` is the last step on record, `total_steps` 0 while
    unknown. `failure` is one sentence, `remedy` what to do about it. `owner` names the trainer's process. `position`
    orders the queue. `revision` changes whenever recorded rows were taken back (a resume), see Series.
    """

    id: int
    name: str
    state: State
    attempt: int
    revision: int
    position: float
    foreground: bool
    config: RunConfig
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
    def has_checkpoint(self) -> bool:
        """There is a complete checkpoint; whether its bytes are unharmed is for the resume to verify."""
        return bool(checkpoint.steps(self.checkpoints))

    @property
    def resumable(self) -> bool:
        """May be resumed from a checkpoint: what a page offers as Resume."""
        return self.state in RESUMABLE and self.has_checkpoint


@dataclass(frozen=True, kw_only=True)
class JobEvent(Event):
    """An event with its number, the cursor for `Store.events(after=...)`."""

    id: int


class Streamed(NamedTuple):
    """How many steps of a run streamed their model, and the bytes that these wrote to disk."""

    steps: int
    written_bytes: int


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
