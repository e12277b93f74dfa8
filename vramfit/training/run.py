"""What a run does, verb by verb, and the little it remembers: a step, an evaluation, a checkpoint, what is told.

The order they come in is the loop's (`training.loop`).
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil

from vramfit.config import RunConfig
from vramfit.data.batches import MicroBatch, StepOrder, split
from vramfit.data.conversations import Example
from vramfit.data.prepare import PreparedData
from vramfit.engine.compiling import CompiledBlocks
from vramfit.engine.compression import codec_for
from vramfit.engine.compression import described as described_codec
from vramfit.engine.drift import Calibrator, Check
from vramfit.engine.governor import HIGH
from vramfit.engine.precision import COLLAPSED_LOSS_SCALE, described
from vramfit.engine.reach import check_gradients_reach
from vramfit.engine.recovery import attempt
from vramfit.engine.resident import ResidentExecutor, StepResult
from vramfit.engine.schedule import learning_rate_at
from vramfit.errors import Changed, CheckpointError, DataError, ModelError, UserError, WontFit
from vramfit.faults import reach
from vramfit.models.adapter_start import rounded_away, start_from_inputs
from vramfit.models.architecture import Architecture
from vramfit.models.attention import described as described_attention
from vramfit.models.attention import kernel_of
from vramfit.models.export import export_kind
from vramfit.models.generate import generate
from vramfit.models.load import weights_fingerprint
from vramfit.models.tokenizer import local_folder
from vramfit.planning.idle_wishes import is_idle
from vramfit.planning.plan import Forecast, MemoryEstimate, Plan
from vramfit.planning.start import AUTOMATIC_CADENCES, checkpoint_cadence
from vramfit.sentences import say
from vramfit.training import checkpoint
from vramfit.training.adapted_share import adapted_share
from vramfit.training.compile_choice import settle
from vramfit.training.health import NAMED_ROWS, Evaluations, Health, Refusals, Watches, named_rows, row_numbers
from vramfit.training.inputs import IfChanged, changes, settle_changes, versions
from vramfit.training.memory_care import MemoryCare, Note
from vramfit.training.metrics import (
    CHECKPOINT,
    RESUME,
    DriftCheck,
    Evaluation,
    Event,
    PhaseProgress,
    Recorder,
    RunResult,
    StepMetrics,
    TextSample,
)
from vramfit.training.rows_choice import LEAST_RUN_S, Room, fastest_rows
from vramfit.training.samples import Prompt, TextTime, sample_prompts, seconds_of_a_text
from vramfit.training.saver import FROM_ITS_PLACE, NOT_PLANNED, Saver
from vramfit.training.wear import wear_warning
from vramfit.units import format_bytes

CHECKPOINTS, EXPORT, ADAPTER_START = "checkpoints", "export", "adapter-start.safetensors"
CARD_MULTIPLE = 8  # tokens: rows of 16-bit numbers then begin where tensor cores read, at most seven of padding
EVA_SEQUENCES = 16  # whose activations say where adapters begin
MOST_EVALUATION_SHARE = 0.1  # of a run's work, where the cadence is ours to choose
CALIBRATE_FP16_EVERY = 10  # steps
MOST_CARRIED = 50_000  # rows in a checkpoint, about 30 MB: more than an hour of ten steps a second
TELLING_ROUNDING = 1e-4  # of the weights: fp32's is a thousandth of it


class _Stopped(Exception):
    """A stop came in an evaluation."""


@dataclass(kw_only=True)
class Run:
    """The loop's small verbs, and the little they remember."""

    config: RunConfig
    plan: Plan
    data: PreparedData
    order: StepOrder
    executor: ResidentExecutor
    care: MemoryCare
    recorder: Recorder
    folder: Path
    saver: Saver
    final_loss: float | None = None
    eval_loss: float | None = None
    peak_allocated_bytes: int = 0
    micro_batch: int = field(init=False)
    health: Health = field(init=False)
    base: str = field(init=False)  # as it was loaded: a branch of the hub may move on meanwhile
    calibrate_every: int = field(init=False)
    told_to_wait: bool = False
    should_stop: Callable[[], bool] = lambda: False
    owes_evaluation: bool = False  # one was due after the last step, and a stop came before its end
    _process: psutil.Process = field(default_factory=psutil.Process)

    def __post_init__(self) -> None:
        self.micro_batch = self.plan.micro_batch
        self.base = weights_fingerprint(self.config)
        choice = self.config.health
        self.health = Health(
            refusals=Refusals(choice.refused_steps),
            evaluations=Evaluations(choice.patience),
            watches=Watches.of_steps(
                self.order.total_steps,
                peak_rate=self.config.learning_rate,
                where=f"{self.care.kind} | {self.micro_batch} rows",
            ),
        )
        usual = CALIBRATE_FP16_EVERY if self.plan.compute == "fp16" else 0
        self.calibrate_every = usual if choice.calibrate_every == "auto" else choice.calibrate_every

    def warn_of_wear(self, forecast: Forecast) -> None:
        """Tell what all steps will write to a drive, where that is much of what it lasts for."""
        message = wear_warning(forecast.memory.written_per_step_bytes, steps=self.order.total_steps)
        if message:
            self._say("warning", "disk", message)

    def check_adapters(self, architecture: Architecture) -> None:
        """Tell what they train of a mixture, and refuse those that no gradient reaches, before anybody waits for them
        to learn."""
        if self.config.trains_adapter:
            if (told := adapted_share(architecture, self.plan)) is not None:
                self._say(told[0], "adapters", told[1])
            unknown = check_gradients_reach(self.executor, (self._alone(row) for row in self.order.rows(1)))
            if unknown:
                self._say("warning", "adapters", unknown)

    def start_adapters(self) -> None:
        """Where adapters begin as the data says: run some of it through the model."""
        if not self.config.trains_adapter or self.config.adapter.start != "eva":
            return
        rows = (row for step in range(1, self.order.total_steps + 1) for row in self.order.rows(step))
        batches = [self._alone(row) for row in itertools.islice(rows, EVA_SEQUENCES)]
        self.recorder.phase(PhaseProgress(name="loading", detail=f"the adapters, from {len(batches)} sequences"))
        start_from_inputs(self.executor.model, lambda: self.executor.evaluate(batches))
        self.executor.weights_were_changed()

    def step(self, step: int) -> None:
        """One optimizer step over the rows that belong to it, and its metrics."""
        began = time.perf_counter()
        rows = self.order.rows(step)
        rate = learning_rate_at(
            step, total_steps=self.order.total_steps, schedule=self.config.schedule, peak=self.config.learning_rate
        )
        try:
            result = self.executor.step(self._micro_batches(rows), rate)
        except DataError as error:
            self._log_rows(step)
            raise DataError(f"{error.what} (step {step}: {self._named(rows)})", error.remedy) from error
        except WontFit:
            self.care.ran_out()
            raise
        reach("trainer: in a step")
        now = self._report_step(step, result, rate=rate, seconds=time.perf_counter() - began)
        self._check_health(now, result)

    def calibrate(self, step: int) -> None:
        """How far loss and gradient norm of the step's first micro-batch are from fp32's, before the step is taken."""
        choice = self.config.health
        calibrator = Calibrator(self.executor, limit=choice.drift_limit, may_raise=choice.raise_precision)
        if not calibrator.possible:
            self.calibrate_every = 0
            if not self.executor.raised.now:  # else it was told when the last part was raised
                self._say("info", "drift", "The run computes in fp32: there is no drift from it to check.", step=step)
            return
        check = calibrator.check(self._micro_batches(self.order.rows(step))[0])
        for drift in check.drifts:
            raised = ", ".join(drift.raised)
            self.recorder.drift(
                DriftCheck(step=step, time=time.time(), loss=drift.loss, grad_norm=drift.grad_norm, raised=raised)
            )
        self._tell_drift(step, check)

    def compile(self, blocks: CompiledBlocks, *, cache: Path, step: int) -> None:
        """Before the first step, on the rows that it begins with."""
        self.recorder.phase(PhaseProgress(name="loading", detail="compiling the blocks"))
        batches = self._micro_batches(self.order.rows(step + 1))
        pieces = [piece for batch in batches for piece in self.executor.pieces(batch)]
        notes = settle(
            blocks,
            self.executor,
            pieces[0],
            wish=self.config.memory.compile,
            folder=cache,
            kind=self.care.kind,
            passes=len(pieces) * self.plan.clip_passes,
            fewer=self.care.fewer_rows,
        )
        self.tell(notes, step=step)

    def try_rows(self, memory: MemoryEstimate, *, cache: Path, step: int) -> None:
        """Before the first step on a card: are fewer sequences at a time faster, or more where `memory` was reckoned
        too high?"""
        self.recorder.phase(PhaseProgress(name="loading", detail="trying micro-batches"))
        examples = [self.data.train[row] for row in self.order.rows(step + 1)]
        most = min(self.micro_batch, self.executor.recovery.most_rows or self.micro_batch, len(examples))
        for found in fastest_rows(
            self.executor,
            lambda rows: self._split(examples, rows),
            most=most,
            of=len(examples),
            room=self._room(memory),
            folder=cache,
            kind=self.care.kind,
            fewer=self.care.fewer_rows,
        ):
            if isinstance(found, int):
                self.micro_batch = self.care.micro_batch = found
            else:
                self.tell([found], step=step)

    def tries_rows(self, run_s: float) -> bool:
        """Whether there is something to try on a card, in a run that is long enough to win it back."""
        plan, wish = self.plan, self.config.memory.micro_batch
        worth = self.config.schedule.sequences_per_step > 1 and run_s >= LEAST_RUN_S
        return wish == "auto" and worth and plan.device != "cpu" and not plan.optimizer_in_backward

    def _room(self, memory: MemoryEstimate) -> Room | None:
        """For more sequences at once than planned; None where memory has shown to bear no more, or blocks visit."""
        if self.care.limited or self.plan.weights_tier != "device":
            return None
        states = max(phase.parts.get("optimizer", 0) for phase in memory.phases)
        beside = memory.device_bytes - memory.peak_bytes
        return Room(
            bytes=int(HIGH * min(self.plan.budget_bytes, self.executor.reading().reach)),
            to_come_bytes=states + 2 * beside,
            longest_tokens=self.data.workload.longest_tokens,
        )

    def evaluate(self, step: int) -> bool:
        """Mean loss over the held-out share. Returns whether it is the best so far.

        A stop ends it, save after the last step, of which it tells the result; a resume makes up for it.
        """
        if not self.data.held_out:
            return False
        self.owes_evaluation = True
        try:
            loss, tokens = self.executor.evaluate(self._held_out(step))
        except _Stopped:
            return False
        self.owes_evaluation = False
        self._tell_evaluation(step)
        self.eval_loss = loss
        self.recorder.evaluation(Evaluation(step=step, time=time.time(), loss=loss, tokens=tokens))
        reach("trainer: after an evaluation")
        # What training has to improve on; or weights that a refused step has left, and that are not saved.
        if step == 0 or self.health.refusals.in_a_row:
            return False
        evaluations = self.health.evaluations
        better = evaluations.hear(step, loss)
        if evaluations.enough:
            self._say(
                "info",
                "early-stop",
                f"{evaluations.without_better} tests in a row were not better than {evaluations.best_loss:.4f} at step "
                f"{evaluations.best_step}: the run ends here.",
                step=step,
            )
        return better

    def _held_out(self, step: int) -> Iterator[MicroBatch]:
        """The held-out share, while nobody stops the run, and how far its evaluation is."""
        batches = self._split(self.data.held_out, self.micro_batch)
        for number, batch in enumerate(batches):
            if step < self.order.total_steps and self.should_stop():
                raise _Stopped
            detail = f"{number} / {len(batches)}" if number else ""
            self.recorder.phase(
                PhaseProgress(name="evaluating", done=step, total=self.order.total_steps, unit="steps", detail=detail)
            )
            yield batch

    def _tell_evaluation(self, step: int) -> None:
        if self.executor.evaluation_recovered:
            self._say("warning", "out-of-memory", f"{self.executor.evaluation_recovered}.", step=step)

    @property
    def improves_no_more(self) -> bool:
        """So many evaluations without a better loss that the run ends, as the config says."""
        return self.health.evaluations.enough

    @property
    def keeps_best(self) -> bool:
        """Whether the state of the best evaluation is what the run is for."""
        return self.config.output.keep_best

    def save(self, step: int) -> None:
        """A checkpoint from which `resume` goes on exactly. After bad steps none: the last good ones stay.

        It is complete once `tell_saved` says so; what is wrong with the disk may be raised only there.
        """
        with self.saver.waiting():
            good = not self.health.refusals.in_a_row and self.executor.has_finite_weights()
        if not good:
            message = "No checkpoint was saved after a step without finite numbers; the last good one is kept."
            self._say("warning", CHECKPOINT, message, step=step)
            return
        self._show_saving(step)
        unstored = self.recorder.unstored()
        if len(unstored) > MOST_CARRIED:
            message = (
                f"No checkpoint was saved: {len(unstored):,} rows wait for the job database, and a checkpoint carries "
                f"{MOST_CARRIED:,} at most; the last one is kept. See to it that the database can be written."
            )
            self._say("warning", CHECKPOINT, message, step=step)
            return
        with self.saver.waiting():
            tensors, values = self.executor.state()
        self.saver.save(
            self.folder / CHECKPOINTS,
            step=step,
            tensors=tensors,
            values={
                "executor": values,
                "identity": self._identity(),
                "versions": versions(),
                "micro_batch": self.micro_batch,
                "planned_micro_batch": self.plan.micro_batch,
                "optimizer_bits": self.plan.optimizer_bits,
                "final_loss": self.final_loss,
                "eval_loss": self.eval_loss,
                "peak_allocated_bytes": self.peak_allocated_bytes,
                "evaluations": self.health.evaluations.state(),
                "health": self.health.state(),
                "unstored": unstored,
                "owes_evaluation": self.owes_evaluation,
            },
            **self._kept(),
        )
        self.tell_saved()

    def _show_saving(self, step: int) -> None:
        """Rows so far are stored before the checkpoint that counts on them, as far as the database can be written: that
        is waited for, and counted."""
        with self.saver.waiting():
            self.recorder.phase(PhaseProgress(name="saving", done=step, total=self.order.total_steps, unit="steps"))

    def _kept(self) -> dict[str, Any]:
        """Which checkpoints are to stay."""
        output = self.config.output
        best = self.health.evaluations.best_step if self.keeps_best else None
        return {"keep": output.keep_checkpoints, "best": best, "keep_every": output.keep_every}

    def tell_saved(self) -> None:
        """The checkpoints that were completed meanwhile. Raises what went wrong with one (OutOfDisk, ...)."""
        for saved in self.saver.finished():
            if saved.in_one_go and not self.told_to_wait:
                self.told_to_wait = True
                level: Literal["info", "warning"] = (
                    "info" if saved.in_one_go in (FROM_ITS_PLACE, NOT_PLANNED) else "warning"
                )
                message = f"Training waits while a checkpoint is written: {saved.in_one_go}."
                self._say(level, CHECKPOINT, message, step=saved.step)
            self._say("info", CHECKPOINT, f"Checkpoint saved at step {saved.step}.", step=saved.step)

    def wait_until_saved(self, done: int) -> None:
        """Until the checkpoint that is on its way, if any, is complete. Raises as `tell_saved`."""
        if self.saver.busy:
            self._show_saving(done)
            self.saver.wait()
        self.tell_saved()

    def tidy(self) -> None:
        """Remove or set aside what a crash has left of checkpoints, and tell it."""
        for message in checkpoint.tidy(self.folder / CHECKPOINTS):
            self._say("warning", CHECKPOINT, message)

    def resume(self, if_changed: IfChanged) -> int:
        """Load the newest complete checkpoint and return its step; 0 when the run has none yet."""
        found = checkpoint.newest(self.folder / CHECKPOINTS)
        if found is None:
            self._say("info", RESUME, "There is no checkpoint yet: the run starts from the beginning.")
            return 0
        for reason in found.damaged:
            self._say("warning", RESUME, f"A newer checkpoint was passed over: {reason}.")
        saved = found.checkpoint
        reach("resume: checkpoint read")
        try:
            self._check_identity(saved.values["identity"], if_changed, step=saved.step)
            self._check_versions(saved.values.get("versions"), if_changed, step=saved.step)
            self.executor.load_state(saved.tensors, saved.values["executor"])
            self.final_loss, self.eval_loss = saved.values.get("final_loss"), saved.values["eval_loss"]
            self.peak_allocated_bytes = saved.values.get("peak_allocated_bytes", 0)
            self.health.evaluations.load_state(saved.values.get("evaluations", {}))
            self.health.load_state(saved.values.get("health", {}))
            self.recorder.restore(saved.values.get("unstored", []))
            self.owes_evaluation = bool(saved.values.get("owes_evaluation"))
            # Memory that is free now must not change the last bits, nor the dropout: only less of it makes fewer rows.
            was = saved.values.get("micro_batch", self.micro_batch)
            as_planned = self.plan.micro_batch >= saved.values.get("planned_micro_batch", math.inf)
            self.micro_batch = self.care.micro_batch = was if as_planned else min(self.micro_batch, was)
        except (KeyError, TypeError, AttributeError) as error:  # whole by its hashes, and yet not what `save` writes
            raise CheckpointError(
                f"{saved.path.name} does not hold what this run saves ({type(error).__name__}: {error})",
                "Remove that folder if an older checkpoint is there, or start a new run.",
            ) from error
        checkpoint.rotate(self.folder / CHECKPOINTS, step=saved.step, **self._kept())
        self._say("info", RESUME, f"Resumed at step {saved.step}.", step=saved.step)
        if saved.step >= self.order.total_steps or self.improves_no_more:
            self._say("info", RESUME, "Nothing was left to train; only the result is written.", step=saved.step)
        bits = saved.values.get("optimizer_bits", self.plan.optimizer_bits)
        if bits != self.plan.optimizer_bits:
            self._say(
                "warning",
                RESUME,
                f"The optimizer's states were converted from {bits} to {self.plan.optimizer_bits} bits: the run goes "
                "on a little differently than it would have.",
                step=saved.step,
            )
        return saved.step

    def take_best(self, done: int) -> int:
        """Put the state of the best evaluation back, for the export. Returns the step it is of."""
        best, loss = self.health.evaluations.best_step, self.health.evaluations.best_loss
        if best is None or best == done:
            return done
        try:
            saved = checkpoint.load(self.folder / CHECKPOINTS, best)
        except CheckpointError as error:
            self._say("warning", "best", f"The last state is exported, not the best: {error.what}.", step=done)
            return done
        self.executor.load_state(saved.tensors, saved.values["executor"])
        last, self.eval_loss = self.eval_loss, loss
        message = f"Step {best} is exported: its test was the best, {loss:.4f}; the last gave {last:.4f}."
        self._say("info", "best", message, step=done)
        return best

    def tell_rounding(self, step: int) -> None:
        """An adapter for the base as it was published is off by what that base lost when it was rounded anew."""
        share = rounded_away(self.executor.model)
        if export_kind(self.config) == "adapter" and share > TELLING_ROUNDING:
            message = (
                f"The start {self.config.adapter.start} took a part out of the base's weights, and what was left was "
                f"rounded to {self.plan.weight_format}: with the published base this adapter gives weights that differ "
                f"by {_percent(share)} from those that were trained. Exporting merged has no such difference."
            )
            self._say("warning", "export", message, step=step)

    def check_weights(self, step: int) -> None:
        """Refuse to export what no longer holds numbers. Raises UserError."""
        if not self.executor.has_finite_weights():
            raise UserError(
                f"After step {step} the weights are not finite numbers, so nothing is exported",
                "Lower the learning rate and start anew; the last good checkpoint is kept.",
            )

    @property
    def checkpoint_every(self) -> int:
        """Steps between checkpoints."""
        return checkpoint_cadence(self.config, self.order.total_steps)

    def saves_after(self, step: int) -> bool:
        """Whether a checkpoint is due after `step`: by its cadence, or as one that stays for good."""
        return self.is_due(step, self.checkpoint_every) or self.is_due(step, self.config.output.keep_every)

    @property
    def evaluate_every(self) -> int:
        """Steps between evaluations, 0 for never.

        Automatic ones are rarer where the held-out share is large: forward alone is a third of a training step's work,
        and evaluation is to take no more than MOST_EVALUATION_SHARE of the run.
        """
        wish = self.config.output.evaluate_every
        if wish != "auto":
            return wish
        step_tokens = self.data.workload.mean_tokens * self.config.schedule.sequences_per_step
        work_in_steps = sum(map(len, self.data.held_out)) / (3 * step_tokens)
        return math.ceil(max(1, self.order.total_steps / AUTOMATIC_CADENCES, work_in_steps / MOST_EVALUATION_SHARE))

    def is_due(self, step: int, every: int) -> bool:
        """Whether something with this cadence happens after `step`. The last step is always one; 0 turns it off."""
        return every > 0 and (step % every == 0 or step == self.order.total_steps)

    def write_samples(self, tokenizer: Any, *, step: int, stage: Literal["before", "after"], run_s: float) -> None:
        """Text of the model as it is now: what the run is for, in a form a person can judge. A stop ends it, and so
        does its time, which is a share of the run's predicted `run_s`."""
        prompts = sample_prompts(self.config, self.data, tokenizer)
        for prompt in prompts:
            left = TextTime(seconds_of_a_text(run_s, len(prompts)))
            try:
                text, failure = attempt(
                    lambda prompt=prompt, left=left: self._written(tokenizer, prompt, left, stage),  # type: ignore[misc]
                    self.executor.device,
                )
            except ModelError as error:
                if stage == "before":
                    raise
                self._say("warning", "sample", str(error), step=step)  # the result is already there
                return
            if text is None:
                what = f"No text was written {stage} training: memory ran out ({failure.splitlines()[0]})."
                self._say("warning", "sample", what, step=step)
                return
            if self.should_stop():
                return
            self.recorder.sample(TextSample(step=step, stage=stage, prompt=prompt.text, text=text))
            most = self.config.output.sample_tokens
            if left.over and left.tokens < most:
                what = f"A text {stage} training ends after {left.tokens} of {most} tokens: one takes "
                what += f"{left.took / left.tokens:.1f} s here, and a text has {left.seconds:.0f} s."
                self._say("info", "sample", what, step=step)

    def _written(self, tokenizer: Any, prompt: Prompt, left: TextTime, stage: str) -> str:
        """The text, or its beginning where a stop came."""
        most = self.config.output.sample_tokens

        def go_on(tokens: int) -> bool:
            detail = f"text {stage} training"
            self.recorder.phase(PhaseProgress(name="evaluating", done=tokens, total=most, unit="tokens", detail=detail))
            return left.go_on(tokens) and not self.should_stop()

        if self.should_stop() or not go_on(0):
            return ""
        return generate(
            self.executor.model,
            tokenizer,
            prompt.text if prompt.tokens is None else prompt.tokens,
            self.config.output.sample_tokens,
            self.config.seed,
            device=self.executor.device,
            as_chat=prompt.as_chat,
            compute=self.plan.compute,
            go_on=go_on,
        )

    def _alone(self, row: int) -> MicroBatch:
        """One sequence, which needs no padding."""
        return split([self.data.train[row]], 1, self.data.pad_id)[0]

    def _micro_batches(self, rows: Sequence[int]) -> list[MicroBatch]:
        examples = [self.data.train[row] for row in rows]
        return self._split(examples, self.micro_batch)

    def _split(self, examples: Sequence[Example], rows: int) -> list[MicroBatch]:
        multiple = 1 if self.plan.device == "cpu" else CARD_MULTIPLE
        return split(examples, rows, self.data.pad_id, pad_to_multiple=multiple)

    def _report_step(self, step: int, result: StepResult, *, rate: float, seconds: float) -> StepMetrics:
        memory, notes = self.care.after_step(step, result, seconds)
        self.peak_allocated_bytes = max(self.peak_allocated_bytes, memory.allocated)
        self.final_loss = result.loss
        waited = self.saver.take_waited()
        now = StepMetrics(
            step=step,
            time=time.time(),
            loss=result.loss,
            learning_rate=rate,
            grad_norm=result.grad_norm,
            tokens=result.tokens,
            tokens_per_s=result.tokens / seconds,
            step_seconds=seconds,
            epoch=self.order.epoch(step),
            allocated_bytes=memory.allocated,
            reserved_bytes=memory.reserved,
            resident_bytes=self._process.memory_info().rss,
            loss_scale=result.loss_scale,
            skipped=result.skipped,
            save_seconds=waited or None,
            **({} if result.waits is None else result.waits._asdict()),
        )
        self.recorder.steps([now])
        self.tell(notes, step=step)
        return now

    def tell(self, notes: Iterable[Note], *, step: int) -> None:
        """What was done about memory."""
        for note in notes:
            self._say(note.level, note.kind, note.message, step=step)

    def _check_health(self, now: StepMetrics, result: StepResult) -> None:
        """A step that could not be taken is told; several in a row end the run, and its last good checkpoint stays."""
        rows = self._named(self.order.rows(now.step)) if result.problem else ""
        if result.problem:
            self._say("warning", "not-finite", say("health.refused", problem=result.problem, rows=rows), step=now.step)
            self._log_rows(now.step)
        collapsed = result.loss_scale is not None and result.loss_scale < COLLAPSED_LOSS_SCALE
        self.health.refusals.count(now.step, result.problem, rows=rows, collapsed=collapsed)
        for found in self.health.watches.step(now):
            self._say(found.level, found.kind, found.message, step=now.step)

    def _log_rows(self, step: int) -> None:
        """All rows of a step, where the sentence about it names some: for the run's log, to look each of them up."""
        rows = row_numbers([self.data.train[row] for row in self.order.rows(step)])
        if len(rows) > NAMED_ROWS:
            print(f"step {step} held rows {', '.join(map(str, rows))} of the data", flush=True)

    def _tell_drift(self, step: int, check: Check) -> None:
        """Warn once of a drift above the limit, tell each part that is raised, and why there is nothing to tell."""
        if check.skipped:
            self._say("info", "drift", f"The drift from fp32 was not measured: {check.skipped}.", step=step)
            self.calibrate_every = self.calibrate_every if check.may_pass else 0
        if not check.drifts:
            return
        limit, first, last = self.config.health.drift_limit, check.drifts[0], check.drifts[-1]
        if self.health.drifting.sees(wrong=first.worst > limit, right=first.worst <= limit / 2):
            message = say(
                "health.drift",
                format=self.plan.compute,
                loss=_percent(first.loss),
                norm=_percent(first.grad_norm),
                limit=_percent(limit),
            )
            self._say("warning", "drift", message, step=step)
        if last.raised != first.raised:
            now = f"{_percent(last.loss)} of the loss and {_percent(last.grad_norm)} of the gradient norm"
            parts = ", ".join(last.raised)
            self._say("info", "drift", f"Computed in fp32 from now on: {parts}; the drift is {now}.", step=step)

    def _named(self, rows: Sequence[int]) -> str:
        return named_rows([self.data.train[row] for row in rows])

    def _identity(self) -> dict[str, Any]:
        """What a checkpoint belongs to: going on with other data or another step would train something else."""
        return {
            "data": self.data.fingerprint,
            "sequences": len(self.data.train),
            "sequences_per_step": self.config.schedule.sequences_per_step,
            "total_steps": self.order.total_steps,
            "seed": self.config.seed,
            "base": self.base,
        }

    def _check_identity(self, saved: dict[str, Any], if_changed: IfChanged, *, step: int) -> None:
        """Other settings are refused. Other data or another base: as `if_changed` says, while steps are left."""
        now = self._identity()
        changed = [name for name in now if saved.get(name) != now[name]]
        if "base" in changed and not saved.get("base"):  # of an earlier version, which noted no commit of the hub
            changed.remove("base")
        if not changed:
            return
        told = "; ".join(f"{name} was {saved.get(name)}, is {now[name]}" for name in changed)
        follows = {"data": {"data", "sequences", "total_steps"}, "base": {"base"}}
        parts = {part for part in follows if part in changed}
        allowed = set().union(*(follows[part] for part in parts))
        if set(changed) <= allowed and if_changed == "ask":
            raise Changed(
                f"The checkpoint belongs to another run: {told}",
                "Restore what it was started with and resume, or resume as it is: then it goes on with what is there.",
            )
        if not set(changed) <= allowed or if_changed == "refuse":
            raise CheckpointError(
                f"The checkpoint belongs to another run: {told}",
                "Restore the data and settings it was started with, or start a new run.",
            )
        if step >= self.order.total_steps:
            raise CheckpointError(
                f"The checkpoint is of step {step:,}, and the data that is there now makes {self.order.total_steps:,} "
                "steps, so none is left to train",
                "Restore the data it was started with, set more steps, or start a new run.",
            )
        self._say("warning", "changed", f"It goes on with what changed since step {step:,}: {told}.", step=step)

    def _check_versions(self, saved: dict[str, str] | None, if_changed: IfChanged, *, step: int) -> None:
        """Other libraries compute other last bits."""
        found = changes({} if saved is None else {"versions": saved}, {"versions": versions()})
        for message in settle_changes(found, if_changed, since=f"the checkpoint of step {step:,}"):
            self._say("warning", "changed", message, step=step)

    def _say(
        self, level: Literal["info", "warning", "error"], kind: str, message: str, *, step: int | None = None
    ) -> None:
        print(message, flush=True)
        self.recorder.event(Event(time=time.time(), level=level, kind=kind, message=message, step=step))

    def report_preparation(self, forecast: Forecast, architecture: Architecture) -> None:
        """What the data holds and what was decided, with reasons: warnings for the page, all of it for the log."""
        report = self.data.report
        print(
            f"data: {report.rows} rows, {report.rows_used} used, {len(self.data.train)} sequences to train on, "
            f"{len(self.data.held_out)} held out, {report.trained_tokens} trained tokens",
            flush=True,
        )
        for note in dict.fromkeys([*self.data.survey.warnings, *report.notes]):
            self._say("info", "data", note)
        for told in self._idle_in_this_data():
            self._say("warning", "settings", told)
        if self.executor.loss_reason:
            self._say("info", "loss", f"Loss {self.executor.loss_kind}: {self.executor.loss_reason}.")
        if self.executor.leaves_liger and self.config.memory.loss == "auto":
            self._say(
                "info",
                "loss",
                "Loss chunked: Liger is installed and could compute it (memory.loss fused). It is not taken by itself, "
                "because what it wins over chunks has not been measured.",
            )
        if self.executor.loss_kind == "fused" and any(example.weights is not None for example in self.data.train):
            self._say("info", "loss", "Loss chunked where answers have weights: the fused kernel takes none.")
        self._say("info", "precision", described(self.plan.compute, self._stored_as()))
        kernel = kernel_of(self.plan, architecture)
        slow = kernel.makes_scores and self.plan.attention == "sdpa" and self.plan.device != "cpu"
        self._say("warning" if slow else "info", "attention", described_attention(self.plan, kernel))
        if self.plan.compress:
            self._say("info", "activations", described_codec(codec_for(self.plan.device), self.plan.device))
        for choice in forecast.plan.reasons:
            if is_idle(choice):
                self._say("warning", "settings", f"{choice.setting} has {choice.value}: {choice.reason}.")
                continue
            print(f"{choice.setting} = {choice.value}: {choice.reason}", flush=True)
        print(
            f"predicted peak {format_bytes(forecast.memory.peak_bytes)} of {format_bytes(self.plan.budget_bytes)}, "
            f"{forecast.speed.tokens_per_s:.0f} tokens/s",
            flush=True,
        )

    def _idle_in_this_data(self) -> Iterator[str]:
        """Wishes that change nothing with this data and model; the planner has told those that never do."""
        output, patience = self.config.output, self.config.health.patience
        wanting = {"output.keep_best": output.keep_best, "health.patience": patience > 0}
        wanting["output.evaluate_every"] = output.evaluate_every not in ("auto", 0)
        if not self.data.held_out:
            for name in (name for name, wanted in wanting.items() if wanted):
                yield f"{name} has no effect: 0 sequences are held out. Give more data, or a larger data.eval_share."
        elif patience and patience >= math.ceil(self.order.total_steps / self.evaluate_every):
            evaluations = math.ceil(self.order.total_steps / self.evaluate_every)
            yield (
                f"health.patience has no effect: the run has {evaluations} evaluations, and {patience} without a "
                "better one would end it."
            )
        if self.config.model.revision is not None and local_folder(self.config.model) is not None:
            yield "model.revision has no effect: a folder has no revisions."

    def _stored_as(self) -> str:
        adapters = f", adapters in {self.plan.trained_format}" if self.config.trains_adapter else ""
        return f"{self.plan.weight_format}{adapters}"

    def result(self, step: int, *, stopped: bool, export: Path | None) -> RunResult:
        return RunResult(
            steps=step,
            total_steps=self.order.total_steps,
            stopped=stopped,
            final_loss=self.final_loss,
            eval_loss=self.eval_loss,
            peak_allocated_bytes=self.peak_allocated_bytes,
            export=str(export) if export else None,
        )


def _percent(share: float) -> str:
    """To two figures: a drift is often a thousandth of a per cent."""
    return f"{100 * share:.2g}%"
