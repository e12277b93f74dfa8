"""What a run does about memory while it is on: its governor, and the limits this machine has shown.

The loop asks it after each step and tells what it answers. All decisions are made in `vramfit.engine`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from vramfit import __version__
from vramfit.config import RunConfig
from vramfit.engine.activations import find_blocks, planned_modes
from vramfit.engine.governor import Action, Reading, StepCost, build_governor, build_stay_governor
from vramfit.engine.memory_limits import Limit, MemoryLimits, run_kind
from vramfit.engine.resident import ResidentExecutor, StepResult
from vramfit.engine.streaming import StreamingExecutor
from vramfit.errors import ModelError
from vramfit.hardware.devices import Machine
from vramfit.models.architecture import Architecture
from vramfit.planning.plan import Forecast


@dataclass(frozen=True, kw_only=True)
class Note:
    """One thing to tell, in an event's words."""

    kind: Literal["governor", "out-of-memory", "compile", "rows"]
    message: str
    level: Literal["info", "warning"] = "info"


@dataclass(kw_only=True)
class MemoryCare:
    """For one run: `kind` is what its limits are kept under, in the file of `limits`. `micro_batch` are the sequences
    of a micro-batch, and `limited` is whether memory ran out in a run of the kind before."""

    executor: ResidentExecutor
    limits: MemoryLimits
    kind: str
    limited: bool = False
    micro_batch: int = field(init=False)
    _reach: int = field(init=False)

    def __post_init__(self) -> None:
        self.micro_batch = self.executor.plan.micro_batch
        self._reach = self.executor.plan.budget_bytes

    def heed_limits(self, *, resumed: bool) -> Iterator[Note]:
        """Begin with no more sequences at once, and blocks that hold no more, than this machine bore last time.

        A resumed run goes on as it was, or its last bits would change; unless that is what ended it.
        """
        plan, recovery = self.executor.plan, self.executor.recovery
        limit = self.limits.find(self.kind, budget_bytes=plan.budget_bytes, recomputed=plan.recompute)
        self.limited = limit is not None
        if limit is None or (resumed and not limit.ended_run):
            return
        now = self._rows
        day = time.strftime("%Y-%m-%d", time.localtime(limit.time))
        ran_out = f"On {day} memory ran out on this device in a run of the same kind"
        if 0 < limit.rows < now:
            recovery.most_rows = limit.rows
            yield Note(
                kind="out-of-memory",
                message=f"{ran_out}, and {limit.rows} sequences at a time fitted: this one begins with {limit.rows}, "
                f"not {now}. The gradient is the same.",
            )
        governor = self.executor.governor
        if limit.notch and self._rows >= limit.notch_rows and governor is not None:
            begun = governor.begin_at(limit.notch)
            if begun:
                yield Note(
                    kind="out-of-memory", message=f"{ran_out}: this one begins with {begun}, as that one went on."
                )

    @property
    def _rows(self) -> int:
        """Sequences that go through the model at once."""
        return self.executor.recovery.most_rows or self.micro_batch

    def after_step(self, step: int, result: StepResult, seconds: float) -> tuple[Reading, list[Note]]:
        """What memory was in the step, and what there is to tell."""
        reading, told = self.executor.reading(), []
        self._reach = reading.reach or self._reach
        if result.recovered:
            self._remember(ended_run=False)
            told.append(Note(kind="out-of-memory", level="warning", message=f"{result.recovered}."))
        if self.executor.governor is not None:
            cost = StepCost(
                step=step, seconds=seconds, tokens=result.padded_tokens, largest_tokens=result.largest_tokens
            )
            told += map(_note, self.executor.governor.after_step(reading, cost))
        return reading, told

    def fewer_rows(self, rows: int, where: str) -> Note:
        """Memory ran out in a trial before step 1: at most `rows` at once, now and in later runs of this kind."""
        self.executor.recovery.most_rows = rows
        self._remember(ended_run=False)
        return Note(
            kind="out-of-memory",
            level="warning",
            message=f"Memory ran out {where}, before step 1: the run begins with {rows} sequences at a time. The "
            "gradient is the same.",
        )

    def ran_out(self) -> None:
        """The run ends because memory ran out: its next attempt must not do the same."""
        self._remember(ended_run=True)

    def end(self, step: int) -> list[Note]:
        """The run is over: what was done and not yet told."""
        return [_note(action) for action in self.executor.governor.end(step)] if self.executor.governor else []

    def _remember(self, *, ended_run: bool) -> None:
        plan, rows, governor = self.executor.plan, self.executor.recovery.most_rows, self.executor.governor
        notch = governor.relieved_to if governor is not None else ""
        if not rows and not notch:
            return
        limit = Limit(
            rows=rows,
            bytes=min(plan.budget_bytes, self._reach),
            time=time.time(),
            ended_run=ended_run,
            notch=notch,
            notch_rows=self._rows if notch else 0,
        )
        self.limits.remember(self.kind, limit, recomputed=plan.recompute)


def care_for(
    executor: ResidentExecutor,
    forecast: Forecast,
    *,
    config: RunConfig,
    architecture: Architecture,
    machine: Machine,
    cache: Path,
) -> MemoryCare:
    """Memory care as `config` wishes: with a governor, unless the run is not to adapt."""
    import torch

    plan = forecast.plan
    if config.memory.adapt and isinstance(executor, StreamingExecutor):
        executor.govern(
            build_stay_governor(
                executor.stays,
                device=executor.device,
                apply=executor.set_stays,
                budget_bytes=plan.budget_bytes,
                expected_bytes=forecast.memory.peak_bytes,
                most_tokens=plan.micro_batch * plan.accumulation * forecast.workload.longest_tokens,
            )
        )
    elif config.memory.adapt:
        modes = executor.activations or planned_modes(plan, _blocks_of(executor))
        executor.govern(
            build_governor(
                modes,
                device=executor.device,
                apply=executor.set_activations,
                budget_bytes=plan.budget_bytes,
                may_compress=plan.compress > 0,
                fixed=config.memory.activations != "auto",
                first=plan.first_trained(len(modes)),
                expected_bytes=forecast.memory.peak_bytes,
                most_tokens=plan.micro_batch * forecast.workload.longest_tokens,
            )
        )
    kind = run_kind(
        plan,
        architecture,
        card=machine.device(plan.device).name,
        longest_tokens=forecast.workload.longest_tokens,
        versions=f"vramfit {__version__}, torch {torch.__version__}",
    )
    return MemoryCare(executor=executor, limits=MemoryLimits(cache), kind=kind)


def _blocks_of(executor: ResidentExecutor) -> int:
    try:
        return len(find_blocks(executor.model))
    except ModelError:
        return 0


def _note(action: Action) -> Note:
    return Note(kind="governor", message=action.message, level=action.level)
