"""The one visible loop: load, plan, resume, then step after step [train, report, evaluate? save? stop?], finish.

Read it top to bottom: things happen in this order and nowhere else. It knows nothing of queues or pages: it reports to
a Recorder and asks `should_stop` once a step.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from vramfit import scratch
from vramfit.config import RunConfig
from vramfit.data.batches import StepOrder
from vramfit.data.prepare import prepare
from vramfit.errors import UserError
from vramfit.faults import reach
from vramfit.hardware.devices import Machine, probe
from vramfit.models.export import export_run
from vramfit.models.load import check_weights, read_architecture
from vramfit.models.tokenizer import load_tokenizer
from vramfit.planning.plan import Forecast
from vramfit.planning.planner import forecast_run
from vramfit.planning.start import length_limit
from vramfit.training import checkpoint
from vramfit.training.inputs import IfChanged
from vramfit.training.memory_care import care_for
from vramfit.training.metrics import (
    PhaseProgress,
    Recorder,
    RunResult,
)
from vramfit.training.opening import open_executor
from vramfit.training.run import ADAPTER_START, CHECKPOINTS, EXPORT, Run
from vramfit.training.samples import prompt_ids
from vramfit.training.saver import Saver
from vramfit.training.vocabulary import with_known_tokens
from vramfit.units import format_count


def train(
    config: RunConfig,
    *,
    folder: Path,
    cache: Path,
    recorder: Recorder,
    should_stop: Callable[[], bool] = lambda: False,
    resume: bool = False,
    if_changed: IfChanged | None = None,
    machine: Machine | None = None,
    opened: Callable[[], None] = lambda: None,
) -> RunResult:
    """Train one run and leave its checkpoints and result in `folder`.

    Stops at the next step boundary, with a checkpoint, once `should_stop()` is true. With `resume` it goes on from the
    newest complete checkpoint in `folder`; `if_changed` (None: the config's) is what to do where that is of other data
    or another base. `opened` is called once the model is loaded, when what came from the hub is known; what it raises
    ends the run. Raises UserError (WontFit, DataError, ModelError, ...) before step 1 when
    the run cannot work; CheckpointError where, without `resume`, the folder holds another run's checkpoints.
    """
    if not resume:
        checkpoint.refuse_another_run(folder / CHECKPOINTS)
    scratch.sweep(cache)
    recorder.phase(PhaseProgress(name="loading", detail="the tokenizer"))
    machine = machine or probe(folder)
    architecture = read_architecture(config.model)
    check_weights(config)  # by their headers, before minutes go into the data
    tokenizer = load_tokenizer(config.model, cache)

    data = prepare(
        config.data,
        tokenizer=tokenizer,
        max_length=length_limit(config, architecture),
        seed=config.seed,
        cache=cache,
        progress=lambda done, total: recorder.phase(
            PhaseProgress(name="tokenising", done=done, total=total, unit="rows")
        ),
    )
    data = with_known_tokens(data, architecture, tokenizer, prompt_ids(config, data, tokenizer))
    recorder.phase(PhaseProgress(name="planning"))
    goes_on = resume and (folder / CHECKPOINTS).is_dir()
    bits = _saved_bits(folder / CHECKPOINTS) if goes_on else 0
    forecast = _forecast(config, bits, architecture=architecture, machine=machine, workload=data.workload)
    recorder.forecast(forecast)
    plan = forecast.plan
    order = StepOrder(
        [len(example.input_ids) for example in data.train],
        sequences_per_step=config.schedule.sequences_per_step,
        seed=config.seed,
        epochs=config.schedule.epochs,
        max_steps=config.schedule.max_steps,
    )

    recorder.phase(PhaseProgress(name="loading", detail=f"the model, {format_count(architecture.params)} parameters"))
    executor = open_executor(
        config, forecast, cache=cache, folder=folder, start_file=folder / ADAPTER_START, resumed=goes_on
    )
    opened()
    care = care_for(executor, forecast, config=config, architecture=architecture, machine=machine, cache=cache)
    run = Run(
        config=config,
        plan=plan,
        data=data,
        order=order,
        executor=executor,
        care=care,
        recorder=recorder,
        folder=folder,
        saver=Saver(copies=forecast.memory.saves_aside, needs=lambda: still_needed(forecast)),
        should_stop=should_stop,
    )
    run.report_preparation(forecast, architecture)
    run.check_adapters(architecture)

    run.tidy()
    done = run.resume(if_changed or config.output.if_changed) if resume else 0
    run.tell(care.heed_limits(resumed=done > 0), step=done)
    if done == 0 and run.tries_rows(forecast.seconds):
        run.try_rows(forecast.memory, cache=cache, step=done)
    if executor.compiled is not None and done < order.total_steps:
        run.compile(executor.compiled, cache=cache, step=done)
    if done == 0:
        run.warn_of_wear(forecast)
        run.start_adapters()
        run.write_samples(tokenizer, step=0, stage="before", run_s=forecast.seconds)
        if run.evaluate_every and config.method != "pretrain":
            run.evaluate(0)  # what fine-tuning has to improve on; random weights tell nothing
    elif run.owes_evaluation:
        run.evaluate(done)

    recorder.phase(PhaseProgress(name="training", done=done, total=order.total_steps, unit="steps"))
    stopped = should_stop()
    with run.saver:  # whatever ends the run, a checkpoint that is on its way is completed
        while done < order.total_steps and not stopped and not run.improves_no_more:
            done += 1
            reach("trainer: before a step")
            if run.is_due(done, run.calibrate_every):
                run.calibrate(done)
            run.step(done)
            reach("trainer: after a step")
            run.tell_saved()
            better = run.is_due(done, run.evaluate_every) and run.evaluate(done)
            stopped = should_stop()
            if stopped or run.improves_no_more or run.saves_after(done) or (better and run.keeps_best):
                run.save(done)
                stopped = stopped or should_stop()  # one that came meanwhile finds this step saved
            recorder.phase(PhaseProgress(name="training", done=done, total=order.total_steps, unit="steps"))
        run.wait_until_saved(done)

    if stopped and done < order.total_steps:
        return run.result(done, stopped=True, export=None)
    run.tell(care.end(done), step=done)
    exported = run.take_best(done) if run.keeps_best else done
    run.check_weights(done)
    recorder.phase(PhaseProgress(name="exporting"))
    export = export_run(executor.model, tokenizer, config, folder / EXPORT, parts=executor.parts)
    run.tell_rounding(done)
    run.write_samples(tokenizer, step=exported, stage="after", run_s=forecast.seconds)
    return run.result(done, stopped=False, export=export)


def _saved_bits(checkpoints: Path) -> int:
    """Bits of the optimizer states in the newest checkpoint; 0 where nobody knows."""
    bits = checkpoint.peek(checkpoints).get("optimizer_bits", 0)
    return bits if bits in (32, 8, 4) else 0


def _forecast(config: RunConfig, saved_bits: int, **about: Any) -> Forecast:
    """The plan of a run: one that goes on keeps the bits of its optimizer's states, where it is ours to choose them and
    they still fit. Else they are converted."""
    if saved_bits and config.memory.optimizer_bits == "auto":
        wish = config.memory.model_copy(update={"optimizer_bits": str(saved_bits)})
        with contextlib.suppress(UserError):
            return forecast_run(config.model_copy(update={"memory": wish}), **about)
    return forecast_run(config, **about)


def still_needed(forecast: Forecast) -> int:
    """RAM that steps will ask for beyond what the process has now, bytes: where RAM is the device, what was planned."""
    if forecast.plan.device != "cpu":
        return 0
    return forecast.memory.device_bytes - psutil.Process().memory_info().rss
