"""What a run reports and to whom. The loop talks to a Recorder: the job store, the progress bar and tests are ones.

Bytes, seconds and tokens; times are Unix seconds. Plain data: nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol, TypedDict

from vramfit.planning.plan import Forecast

CHECKPOINT: Final = "checkpoint"
"""The kind of an event that tells of checkpoints: at level info that one is complete, of the event's step."""

RESUME: Final = "resume"
"""The kind of an event that tells from where a run goes on: with a step, from the checkpoint of that step."""


@dataclass(frozen=True, kw_only=True)
class StepMetrics:
    """One optimizer step. Tokens are trained tokens, padding excluded.

    `allocated_bytes` is live tensors and `reserved_bytes` what the allocator holds, both the peak within the step, on
    the device. Without a card allocated is the trainer's own tensors and reserved is 0. `resident_bytes` is the
    process's resident set. `loss_scale` is fp16's, None otherwise; `skipped` is True when it refused the step.
    Where the model streams, `link_seconds`, `optimizer_seconds` and `disk_seconds` are what the step waited for each,
    parts of `step_seconds`, and `written_bytes` what it wrote to disk; None where the model stays on the device.
    `save_seconds` is what training waited for a checkpoint between the step before and this one, None for none.
    """

    step: int
    time: float
    loss: float
    learning_rate: float
    grad_norm: float
    tokens: int
    tokens_per_s: float
    step_seconds: float
    epoch: float
    allocated_bytes: int
    reserved_bytes: int
    resident_bytes: int
    loss_scale: float | None = None
    skipped: bool = False
    link_seconds: float | None = None
    optimizer_seconds: float | None = None
    disk_seconds: float | None = None
    written_bytes: int | None = None
    save_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class PhaseProgress:
    """What the run is doing besides steps. `done` of `total` in `unit`; a total of 0 is unknown."""

    name: Literal["starting", "loading", "tokenising", "planning", "training", "evaluating", "saving", "exporting"]
    done: float = 0
    total: float = 0
    unit: str = ""
    detail: str = ""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Mean loss over the trained tokens of the held-out share, after `step` optimizer steps."""

    step: int
    time: float
    loss: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class DriftCheck:
    """A micro-batch before `step` in the run's precision against fp32: |difference| / fp32's, of mean loss and gradient
    norm, infinite where only fp32 gives finite numbers. `raised` are the parts that computed in fp32 meanwhile
    ("head, norms"); a check that raises some is recorded once before and once after each.
    """

    step: int
    time: float
    loss: float
    grad_norm: float
    raised: str = ""


@dataclass(frozen=True, kw_only=True)
class TextSample:
    """Generated text. `stage` is "before" (the model as it came) or "after" (as it is at `step`)."""

    step: int
    stage: Literal["before", "after"]
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Event:
    """Something a person should know: `kind` is a short machine word, `message` a full sentence."""

    time: float
    level: Literal["info", "warning", "error"]
    kind: str
    message: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Telemetry:
    """One reading of the machine: what the driver shows. None where it has no such sensor or there is no card.

    Utilisation is 0..1; `device_bytes` is memory in use on the card by everyone; `host_bytes` the trainer's resident
    set. `slowed_by_heat` is True while the driver holds the clocks down because the card is too hot.
    """

    time: float
    device_bytes: int | None
    host_bytes: int
    utilisation: float | None
    power_watts: float | None
    temperature_c: float | None
    cpu_utilisation: float | None = None
    slowed_by_heat: bool | None = None


class Unstored(TypedDict):
    """A reported row that is not known to be stored, as plain values: which attempt made it, of which kind it is, and
    its fields."""

    attempt: int
    kind: Literal["steps", "evaluations", "drifts", "samples", "events"]
    values: dict[str, Any]


class Recorder(Protocol):
    """Where a run reports. Calls are cheap, never raise for want of a listener, and come from one thread.

    What `unstored` returns goes into a checkpoint, and back into `restore` when a run goes on from that: rows of steps
    that are not done again must not be lost with the process.
    """

    def phase(self, progress: PhaseProgress) -> None: ...
    def forecast(self, forecast: Forecast) -> None: ...
    def steps(self, metrics: Sequence[StepMetrics]) -> None: ...
    def evaluation(self, evaluation: Evaluation) -> None: ...
    def drift(self, check: DriftCheck) -> None: ...
    def sample(self, sample: TextSample) -> None: ...
    def event(self, event: Event) -> None: ...
    def telemetry(self, reading: Telemetry) -> None: ...
    def unstored(self) -> list[Unstored]: ...
    def restore(self, rows: Sequence[Unstored]) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended. `stopped` is True when it was asked to stop and saved a checkpoint at `steps`."""

    steps: int
    total_steps: int
    stopped: bool
    final_loss: float | None
    eval_loss: float | None
    peak_allocated_bytes: int
    export: str | None
