"""How fast and how small the engine is: against transformers' Trainer, and each technique with and without it.

    python bench/engine.py [--json] [--only WORDS ...] [--device cpu] [--size usual|tiny|card] [--write]

Each side of a comparison is a process of its own (bench/engine_side.py); they take steps in turns, A B A B, so that
what else the machine does falls on both. A speed is the median of the pairs' ratios; memory is of one step, above the
weights. `--json` prints one object per figure: name, value, goal, met. `--write` puts the tables into
docs/benchmarks.md; of a part (`--part`, `--only`) it puts those lines in their places. Takes about 40 minutes on two
cores; `--size tiny` some minutes, and says nothing about speed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, Self

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

from engine_page import Figure, Row, figure_line, page, row_line, write_page, written
from engine_techniques import TECHNIQUES, Technique
from engine_works import Work, data_note, smollm_folder, works

from vramfit.errors import VramfitError

MIB: Final = 2**20
SAME_LOSS: Final = 1e-4
WARM_STEPS: Final = 2


class Refused(Exception):
    """A side could not do what it was asked to."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Where and how much is measured."""

    device: str = "cpu"
    size: str = "usual"
    compute: str = "fp32"
    pairs: int = 5
    threads: int = 2
    scratch: Path = Path()


class Side:
    """A child process that takes steps when told to."""

    def __init__(self, setting: Setting, work: Work, side: str, options: dict[str, Any], compute: str = "") -> None:
        order = {
            "work": work.to_json(),
            "device": setting.device,
            "side": side,
            "options": options,
            "scratch": str(setting.scratch),
            "compute": compute or setting.compute,
        }
        environment = {**os.environ, "OMP_NUM_THREADS": str(setting.threads), "TOKENIZERS_PARALLELISM": "false"}
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115 - closed in close
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "engine_side.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            encoding="utf-8",
            env=environment,
        )
        self.seconds: list[float] = []
        self.cpu: list[float] = []
        self.losses: list[float] = []
        self.tokens: list[float] = []
        self.memory: dict[str, int] = {}
        try:
            self.about = self._ask(order)
        except Refused:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def steps(self, count: int, *, counts: bool = True) -> tuple[float, float]:
        """(seconds, processor seconds) a step, the mean of `count`."""
        answer = self._ask({"steps": count})
        self.losses += answer["losses"]
        if counts:
            self.seconds += answer["seconds"]
            self.cpu += answer["cpu"]
            self.tokens += answer["tokens"]
        return statistics.fmean(answer["seconds"]), statistics.fmean(answer["cpu"])

    def measure_memory(self, steps: int = 1) -> None:
        for what in ("resident", "allocated"):
            self.memory |= self._ask({"memory": what, "steps": steps})

    @property
    def tokens_per_s(self) -> float:
        return sum(self.tokens) / sum(self.seconds) if self.seconds else 0.0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._complaints.close()

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        answer: dict[str, Any] = json.loads(line) if line.startswith("{") else {"refused": self._last_words()}
        if "refused" in answer:
            raise Refused(answer["refused"])
        return answer

    def _last_words(self) -> str:
        self._complaints.seek(0)
        lines = [line for line in self._complaints.read().splitlines() if line.strip()]
        return lines[-1] if lines else "it ended without a word"


@dataclass
class Comparison:
    """Two sides after some pairs of steps."""

    first: Side
    second: Side
    ratios: list[float] = field(default_factory=list)
    cpu_ratios: list[float] = field(default_factory=list)

    @property
    def faster(self) -> float:
        """How many times as many tokens a second the first has, the median over pairs."""
        return statistics.median(self.ratios)

    @property
    def spread(self) -> str:
        """How the pairs' ratios lie, and the one of processor time, which others on the machine lengthen less."""
        apart = f"{min(self.ratios):.2f} to {max(self.ratios):.2f} in {len(self.ratios)} pairs"
        return f"{apart}; {statistics.median(self.cpu_ratios):.2f} by processor time"

    def smaller(self, what: str) -> float:
        """The first's peak as a share of the second's, above the weights."""
        return self.first.memory[what] / max(1, self.second.memory[what])

    def loss_difference(self) -> float:
        """The largest relative difference of the losses of the same steps."""
        pairs = zip(self.first.losses, self.second.losses, strict=False)
        return max(abs(one - other) / abs(other) for one, other in pairs)


def compare(first: Side, second: Side, *, pairs: int, steps: int = 1) -> Comparison:
    """Warm both, measure both's memory, then take `steps` in turns."""
    for side in (first, second):
        side.steps(WARM_STEPS, counts=False)
        side.measure_memory(steps)
    made = Comparison(first, second)
    for _ in range(pairs):
        one, other = first.steps(steps), second.steps(steps)
        made.ratios.append(other[0] / one[0])
        made.cpu_ratios.append(other[1] / max(one[1], 1e-9))
    return made


def _asked_for(name: str, only: Sequence[str]) -> bool:
    return not only or any(words in name for words in only)


# --- against the Trainer ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Rival:
    """What is asked of both sides of a comparison with the Trainer."""

    name: str
    work: Literal["full", "lora"] = "full"
    ours: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)
    speed_goal: float | None = None
    memory_goal: float | None = None


RIVALS: Final = (
    Rival(name="fast", work="full", speed_goal=1.25),
    Rival(name="small", work="full", ours={"memory": {"micro_batch": 2}}, speed_goal=1.0, memory_goal=0.5),
    Rival(name="fast", work="lora", ours={"packing": True}, speed_goal=1.5),
    Rival(
        name="small",
        work="lora",
        ours={"packing": True, "memory": {"micro_batch": 1}},
        speed_goal=1.0,
        memory_goal=0.5,
    ),
    Rival(name="against 2 rows at a time", work="full", trainer={"micro_batch": 2}),
    Rival(name="against 2 rows at a time", work="lora", ours={"packing": True}, trainer={"micro_batch": 2}),
)


def against_trainer(setting: Setting, only: Sequence[str] = ()) -> Iterator[Figure]:
    """Speed and memory against transformers' Trainer, which takes the same rows in the same steps."""
    full, lora = works(setting.size)
    for rival in RIVALS:
        work = full if rival.work == "full" else lora
        if not _asked_for(f"{work.name}, {rival.name}", only):
            continue
        with Side(setting, work, "ours", rival.ours) as ours, Side(setting, work, "trainer", rival.trainer) as theirs:
            made = compare(ours, theirs, pairs=setting.pairs)
            name = f"{work.name}, {rival.name}"
            speeds = f"{ours.tokens_per_s:.0f} against {theirs.tokens_per_s:.0f} trained tokens/s, {made.spread}"
            yield Figure(
                name=f"{name}: speed",
                value=made.faster,
                unit="x",
                goal=rival.speed_goal,
                note=f"{speeds}; {data_note(work)}; {when()}",
            )
            yield from _memory_figures(name, made, rival.memory_goal)
            yield Figure(
                name=f"{name}: loss difference",
                value=made.loss_difference(),
                unit="relative",
                goal=SAME_LOSS,
                at_most=True,
            )


def _memory_figures(name: str, made: Comparison, goal: float | None) -> Iterator[Figure]:
    for what, words in (
        ("allocated", "peak above the weights, allocator"),
        ("resident", "peak above the weights, resident set"),
    ):
        if not made.second.memory[what]:
            continue
        sizes = f"{made.first.memory[what] / MIB:.0f} against {made.second.memory[what] / MIB:.0f} MiB"
        yield Figure(name=f"{name}: {words}", value=made.smaller(what), unit="x", goal=goal, at_most=True, note=sizes)


# --- by itself -------------------------------------------------------------------------------------------------------


def overhead(setting: Setting, _: Sequence[str] = ()) -> Iterator[Figure]:
    """The engine against a loop by hand with the same techniques, and how much of the device's products it reaches."""
    work, _ = works(setting.size)
    with Side(setting, work, "ours", {"memory": {"activations": "keep"}}) as ours:
        plan = ours.about["plan"]
        options = {"micro_batch": plan["micro_batch"], "chunk": plan["loss_chunk_tokens"]}
        with Side(setting, work, "hand", options) as by_hand:
            made = compare(ours, by_hand, pairs=3 * setting.pairs)
            yield Figure(
                name="engine over a loop by hand",
                value=100.0 * (1.0 / made.faster - 1.0),
                unit="%",
                goal=2.0,
                at_most=True,
                note=f"by hand over engine {made.spread}; losses apart {made.loss_difference():.1g}; {when()}",
            )
            step = statistics.median(ours.seconds)
    with Side(setting, work, "products", {}) as rate:
        flops = useful_flops(work)
        yield Figure(
            name="share of the measured rate of products",
            value=100.0 * flops / step / rate.about["flops"],
            unit="%",
            note=f"{flops / step / 1e9:.0f} of {rate.about['flops'] / 1e9:.0f} GFLOP/s in {setting.compute}; {when()}",
        )
    yield reporting(step)


def useful_flops(work: Work) -> float:
    """FLOPs of one step without anything done twice: 6 a weight and token, and attention as far as it is causal."""
    from vramfit.models.architecture import from_config

    assert work.shape is not None
    shape = from_config(work.shape, work.name)
    tokens = work.rows_per_step * work.length
    attention = 6 * shape.layers * work.shape["hidden_size"] * work.length
    return float(tokens * (6 * shape.params + attention))


def reporting(step_seconds: float) -> Figure:
    """Metrics and telemetry, as the real recorder does them, as a share of a step's time on one core."""
    from jobs.attempt import TELEMETRY_S
    from jobs.recorder import FLUSH_S, StoreRecorder
    from jobs.store import Store
    from vramfit.config import RunConfig
    from vramfit.hardware.devices import probe
    from vramfit.hardware.telemetry import Sampler
    from vramfit.training.metrics import PhaseProgress

    with tempfile.TemporaryDirectory() as folder:
        machine = probe(Path(folder))
        with Store(Path(folder)) as store:
            job = store.add_job(RunConfig())
            recorder = StoreRecorder(store, job, attempt=0)
            sampler = Sampler(machine.device("auto"))

            def each_step(number: int) -> None:
                recorder.steps([_metrics(number)])
                recorder.phase(PhaseProgress(name="training", done=number, total=10_000, unit="steps"))

            reported = _processor_seconds(each_step, 500)
            written = _processor_seconds(lambda number: (each_step(number), recorder.flush()), 50)
            sampled = _processor_seconds(lambda _: recorder.telemetry(sampler.read(os.getpid())), 50)
            recorder.close()
    often = step_seconds / FLUSH_S
    a_step = reported + min(1.0, often) * written + step_seconds / TELEMETRY_S * sampled
    return Figure(
        name="metrics and telemetry",
        value=100.0 * a_step / step_seconds,
        unit="% of a step",
        goal=1.0,
        at_most=True,
        note=f"reported {1e3 * reported:.2f} ms, written {1e3 * written:.2f} ms, a reading {1e3 * sampled:.2f} ms; "
        f"{when()}",
    )


def _processor_seconds(work: Callable[[int], object], times: int) -> float:
    began = time.process_time()
    for number in range(times):
        work(number)
    return (time.process_time() - began) / times


def _metrics(step: int) -> Any:
    from vramfit.training.metrics import StepMetrics

    return StepMetrics(
        step=step + 1,
        time=time.time(),
        loss=2.0,
        learning_rate=1e-4,
        grad_norm=1.0,
        tokens=2048,
        tokens_per_s=2000.0,
        step_seconds=1.0,
        epoch=0.1,
        allocated_bytes=2**30,
        reserved_bytes=0,
        resident_bytes=2**30,
    )


# --- each technique --------------------------------------------------------------------------------------------------


def techniques(setting: Setting, only: Sequence[str] = ()) -> Iterator[Row]:
    full, lora = works(setting.size)
    for technique in TECHNIQUES:
        if _asked_for(technique.name, only):
            yield _row(setting, technique, technique.work_of(full, lora))


def _row(setting: Setting, technique: Technique, work: Work) -> Row:
    lacking = technique.lacking(setting.device)
    if lacking:
        return Row(name=technique.name, why_not=lacking)
    try:
        with (
            Side(setting, work, "ours", technique.with_, technique.compute) as one,
            Side(setting, work, "ours", technique.without, technique.compute) as other,
        ):
            made = compare(one, other, pairs=max(3, setting.pairs - 2), steps=technique.steps)
    except Refused as refusal:
        return Row(name=technique.name, why_not=str(refusal).splitlines()[0])
    return Row(
        name=technique.name,
        faster=made.faster,
        tokens_per_s=(one.tokens_per_s, other.tokens_per_s),
        allocated=(one.memory["allocated"] / MIB, other.memory["allocated"] / MIB),
        resident=(one.memory["resident"] / MIB, other.memory["resident"] / MIB),
        loss_difference=made.loss_difference(),
        same_loss=technique.same_loss,
        note=_row_note(technique, made),
    )


def _row_note(technique: Technique, made: Comparison) -> str:
    starts = [side.about["start_s"] for side in (made.first, made.second)]
    told = f"ready after {starts[0]:.1f} / {starts[1]:.1f} s; " if technique.tells_start else ""
    return f"{told}{made.spread}; {when()}"


# --- what is shown ---------------------------------------------------------------------------------------------------


def when() -> str:
    """Day and load, as every figure has to carry them."""
    load = f", load {os.getloadavg()[0]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{datetime.now(UTC).date()}{load}"


def machine_note(setting: Setting) -> str:
    """Day, load, machine and libraries."""
    import torch
    import transformers

    card = setting.device if setting.device == "cpu" else torch.cuda.get_device_name(setting.device)
    cores = f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, {setting.threads} threads"
    libraries = f"torch {torch.__version__}, transformers {transformers.__version__}"
    return f"{when()}, {card} ({cores}), {setting.compute}, {libraries}"


def main() -> None:
    options = _options()
    figures: list[Figure] = []
    rows: list[Row] = []
    if options.size == "usual" and options.part != "overhead":
        smollm_folder()  # before half an hour is spent on what needs no model
    with tempfile.TemporaryDirectory() as scratch:
        setting = _setting(options, Path(scratch))
        notes = [machine_note(setting)]
        say = (lambda line: None) if options.json else (lambda line: print(line, flush=True))
        say(notes[0])
        for part, measure in (("trainer", against_trainer), ("overhead", overhead)):
            if options.part in (None, part):
                for figure in measure(setting, options.only):
                    figures.append(figure)
                    say(figure_line(figure))
        if options.part in (None, "techniques"):
            for row in techniques(setting, options.only):
                rows.append(row)
                say(row_line(row))
        notes.append(machine_note(setting))
    if options.json:
        each = [*figures, *(figure for row in rows for figure in row.figures())]
        print(json.dumps([figure.to_json() for figure in each], indent=1))
    if options.write:
        write_page(page(figures, rows, notes, before=written() if options.part or options.only else ""))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one object per figure")
    parser.add_argument("--part", choices=("trainer", "overhead", "techniques"), help="only this part")
    parser.add_argument("--only", nargs="+", default=(), help="techniques and rivals whose name has one of these in it")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--size", choices=("usual", "tiny", "card"), default="usual")
    parser.add_argument("--compute", choices=("fp32", "bf16", "fp16"), default="fp32")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--threads", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--write", action="store_true", help="write the tables into docs/benchmarks.md")
    return parser.parse_args()


def _setting(options: argparse.Namespace, scratch: Path) -> Setting:
    return Setting(
        device=options.device,
        size=options.size,
        compute=options.compute,
        pairs=options.pairs,
        threads=options.threads,
        scratch=scratch,
    )


if __name__ == "__main__":
    try:
        main()
    except (Refused, VramfitError) as refusal:
        raise SystemExit(str(refusal)) from None
