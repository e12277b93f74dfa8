"""python -m vramfit train RUN.yaml: one run in the foreground, with a progress bar, recorded where the panel looks."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Never

from tqdm import tqdm

from vramfit.config import RunConfig
from vramfit.engine.accelerators import prepare_allocator
from vramfit.places import cache_folder, default_data_folder, open_data_folder
from vramfit.planning.plan import Forecast
from vramfit.training.metrics import (
    DriftCheck,
    Evaluation,
    Event,
    PhaseProgress,
    Recorder,
    StepMetrics,
    Telemetry,
    TextSample,
    Unstored,
)
from vramfit.units import format_bytes


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `train`."""
    parser.add_argument("config", type=Path, metavar="RUN.yaml", help="settings, as exported from the panel")
    parser.add_argument("--data-dir", type=Path, default=None, help="where runs are kept (default: ~/vramfit)")


def run(options: argparse.Namespace) -> None:
    """Train and record. Ctrl-C saves a checkpoint and ends. Raises UserError."""
    prepare_allocator()  # before the loop imports torch
    # The one place where the library's command line reaches up to the job store: a run started here is to be seen in
    # the panel. Nothing that a user's script imports comes this way.
    from jobs.foreground import foreground_job
    from vramfit.training.loop import train

    config = RunConfig.from_file(options.config)
    data_folder = open_data_folder(options.data_dir or default_data_folder())
    stop = _StopOnInterrupt()
    with foreground_job(data_folder, config) as job:
        bar = ProgressBar(job.recorder)
        with bar:
            result = train(
                config,
                folder=job.folder,
                cache=cache_folder(data_folder),
                recorder=bar,
                should_stop=lambda: stop.asked or job.stop_requested(),
            )
        job.finish(result)
    print(f"{'Stopped' if result.stopped else 'Finished'} at step {result.steps} of {result.total_steps}.")
    if result.eval_loss is not None:
        print(f"Evaluation loss {result.eval_loss:.4f}.")
    print(f"Peak {format_bytes(result.peak_allocated_bytes)} allocated.")
    print(f"The result is in {result.export}." if result.export else f"The run is in {job.folder}.")


class _StopOnInterrupt:
    """The first Ctrl-C asks for a checkpoint and an end; the second interrupts at once."""

    def __init__(self) -> None:
        self.asked = False
        signal.signal(signal.SIGINT, self._interrupt)

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True


class ProgressBar:
    """A Recorder that draws a bar on stderr and passes everything on to another one."""

    def __init__(self, target: Recorder) -> None:
        self._target = target
        self._bar: tqdm[Never] | None = None
        self._phase = ""

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exception: object) -> None:
        self._close()

    def phase(self, progress: PhaseProgress) -> None:
        self._target.phase(progress)
        kind = "training" if progress.unit == "steps" else progress.name  # one bar through evaluations and saves
        if kind != self._phase:
            self._close()
            self._phase = kind
            self._bar = tqdm(desc=progress.name, unit=f" {progress.unit}", file=sys.stderr, mininterval=0.2)
        if self._bar is not None:
            self._bar.total = progress.total or None
            self._bar.set_description_str(" ".join(filter(None, [progress.name, progress.detail])), refresh=False)
            self._bar.update(progress.done - self._bar.n)

    def forecast(self, forecast: Forecast) -> None:
        self._target.forecast(forecast)

    def steps(self, metrics: Sequence[StepMetrics]) -> None:
        self._target.steps(metrics)
        if self._bar is not None and metrics:
            last = metrics[-1]
            self._bar.set_postfix(loss=f"{last.loss:.3f}", tokens_s=f"{last.tokens_per_s:.0f}", refresh=False)

    def evaluation(self, evaluation: Evaluation) -> None:
        self._target.evaluation(evaluation)

    def drift(self, check: DriftCheck) -> None:
        self._target.drift(check)

    def sample(self, sample: TextSample) -> None:
        self._target.sample(sample)

    def event(self, event: Event) -> None:
        self._target.event(event)
        if event.level != "info":
            tqdm.write(f"{event.level}: {event.message}", file=sys.stderr)

    def telemetry(self, reading: Telemetry) -> None:
        self._target.telemetry(reading)

    def unstored(self) -> list[Unstored]:
        return self._target.unstored()

    def restore(self, rows: Sequence[Unstored]) -> None:
        self._target.restore(rows)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
