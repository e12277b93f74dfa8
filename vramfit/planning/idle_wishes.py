"""Wishes that change nothing in what was chosen: refused where they ask for something, told where they only idle."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from vramfit.config import AdapterChoice, HealthChoice, Precision, RunConfig, ScheduleChoice
from vramfit.errors import ConfigError, Problem
from vramfit.planning.plan import Choice, Plan
from vramfit.sentences import Sentence, say

IDLE: Final = "idle"
"""The key of the value of a setting that changes nothing."""

_WITHOUT_BETAS: Final = {"sgd": ("beta2",), "adafactor": ("beta1", "beta2")}


def check_calibration(config: RunConfig, compute: Precision) -> None:
    """Raise ConfigError where precision is to be raised when it drifts, and nobody looks whether it does."""
    if config.health.raise_precision and not calibrates(config, compute):
        why = (
            "computes in fp32" if compute == "fp32" else f"computes in {compute}, where it is never compared with fp32"
        )
        remedy = "Turn raise_precision off." if compute == "fp32" else "Set calibrate_every to a number of steps: 10."
        what = f"health.raise_precision has nothing to go by: this run {why}"
        raise ConfigError([Problem(field="health.raise_precision", what=what, remedy=remedy)])


def calibrates(config: RunConfig, compute: Precision) -> bool:
    """Whether a run that computes so compares micro-batches with fp32."""
    every = config.health.calibrate_every
    return compute == "fp16" if every == "auto" else every > 0 and compute != "fp32"


def idle_choices(config: RunConfig, plan: Plan) -> Iterator[Choice]:
    """What was set and changes nothing, each with why."""
    for field, reason in _idle(config, plan):
        yield Choice(setting=field, value=say(IDLE), reason=reason, fixed=True)


def is_idle(choice: Choice) -> bool:
    return isinstance(choice.value, Sentence) and choice.value.key == IDLE


def _idle(config: RunConfig, plan: Plan) -> Iterator[tuple[str, Sentence]]:
    schedule, data, health, output = config.schedule, config.data, config.health, config.output
    if not config.trains_adapter:
        changed = [name for name, value in AdapterChoice() if getattr(config.adapter, name) != value]
        yield from ((f"adapter.{name}", say("idle.adapter", method=config.method)) for name in changed)
    if config.model.revision is not None and config.model.source == "starter":
        yield "model.revision", say("idle.revision")
    if schedule.max_steps is not None and schedule.epochs != ScheduleChoice().epochs:
        yield "schedule.epochs", say("idle.epochs", steps=f"{schedule.max_steps:,}")
    for name in _WITHOUT_BETAS.get(plan.optimizer, ()):
        if getattr(schedule, name) != getattr(ScheduleChoice(), name):
            yield f"schedule.{name}", say("idle.beta", optimizer=plan.optimizer)
    if schedule.shape == "constant" and schedule.final_rate_share:
        yield "schedule.final_rate_share", say("idle.final_rate")
    if data.most_bad_rows is not None and data.bad_rows == "stop":
        yield "data.most_bad_rows", say("idle.bad_rows")
    if output.prompts and output.sample_tokens == 0:
        yield "output.prompts", say("idle.prompts")
    if not calibrates(config, plan.compute):
        if health.calibrate_every not in ("auto", 0):
            yield "health.calibrate_every", say("idle.calibrate")
        elif health.drift_limit != HealthChoice().drift_limit:
            yield "health.drift_limit", say("idle.drift_limit")
