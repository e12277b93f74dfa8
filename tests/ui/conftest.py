"""A store with runs in it, made through the store's own doors."""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

import pytest

from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.training.metrics import Evaluation, Event, PhaseProgress, StepMetrics, Telemetry, TextSample

OWNER = "test:1"
SeedRun = Callable[..., int]


@pytest.fixture(scope="session")
def in_loop() -> Callable[[Callable[[], Any]], Any]:
    """Calls a function inside an event loop: outside of one gradio makes loops of its own and never closes them."""

    def call(make: Callable[[], Any]) -> Any:
        async def inside() -> Any:
            return make()

        return asyncio.run(inside())

    return call


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with Store(tmp_path / "data") as opened:
        opened.take_lease(SUPERVISOR_LEASE, owner=OWNER, alive=lambda *_: True)
        yield opened


@pytest.fixture
def seed_run(store: Store) -> SeedRun:
    """Records a run of `steps` steps and leaves it in `state`; returns its number."""

    def seed(*, steps: int = 20, state: str = "succeeded", config: RunConfig | None = None, **ending: object) -> int:
        run = store.add_job(config or RunConfig(name="Stories"))
        job = store.claim_next(OWNER)
        assert job is not None
        assert job.id == run
        store.begin_attempt(run, attempt=job.attempt, owner=OWNER)
        with store.recorder(run, job.attempt) as recorder:
            recorder.phase(PhaseProgress(name="training"))
            recorder.steps([_step(number, steps) for number in range(1, steps + 1)])
            recorder.evaluation(Evaluation(step=steps, time=time.time(), loss=1.5, tokens=100))
            recorder.sample(TextSample(step=0, stage="before", prompt="Once", text="ra bo"))
            recorder.sample(TextSample(step=steps, stage="after", prompt="Once", text="upon a time"))
            recorder.event(Event(time=time.time(), level="info", kind="note", message="It began.", step=1))
            recorder.telemetry(_reading())
        if state != "running":
            store.transition(run, expected=("running",), state=state, attempt=job.attempt, **ending)
        return run

    return seed


def _step(number: int, steps: int) -> StepMetrics:
    return StepMetrics(
        step=number,
        time=1_700_000_000.0 + number,
        loss=1 + math.exp(-number / steps),
        learning_rate=1e-3,
        grad_norm=0.5,
        tokens=100,
        tokens_per_s=1000.0 + number,
        step_seconds=0.1,
        epoch=number / steps,
        allocated_bytes=2**20 * number,
        reserved_bytes=0,
        resident_bytes=2**29,
    )


def _reading() -> Telemetry:
    return Telemetry(
        time=1_700_000_001.0,
        device_bytes=None,
        host_bytes=2**29,
        utilisation=None,
        power_watts=None,
        temperature_c=None,
        cpu_utilisation=0.5,
    )
