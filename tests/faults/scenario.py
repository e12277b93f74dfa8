"""One fault, from the queue to the result: a real supervisor and trainer, the fault, a new supervisor, the proof.

    python -m tests.faults.scenario supervise DATA_DIR      what the scenarios start as a process

A run of five steps of a model with two blocks of 16 learns from 24 rows; two jobs are in the data folder, of which one
waits aside as a draft and must stay as it is. A seed draws at which arrival at its point the fault strikes: the first,
the last, or one between; where a job is claimed, whether another one was before. The supervisor that met the fault is
ended by SIGKILL; the next one has no fault. What is done by hand is only what Resume does: a job that ended is put back
into the queue.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import psutil

from jobs.job import RESUMABLE
from jobs.store import Store
from jobs.supervisor import Patience, Supervisor, loop, signal_flag
from vramfit.config import RunConfig
from vramfit.errors import VramfitError
from vramfit.faults import KINDS, POINTS, VARIABLE
from vramfit.training import checkpoint

ROOT: Final = Path(__file__).resolve().parent.parent.parent
STEPS: Final = 5
SECONDS: Final = 120.0
RESUMES: Final = 3  # by hand; more would be a job that does not come through
REACHED: Final = {
    "save: before the files": 3,
    "save: tensors written": 3,
    "save: manifest written": 3,
    "save: renamed": 3,
    "save: rotating": 2,
    "export: weights written": 1,
    "export: before the move": 1,
    "trainer: loading": 1,
    "resume: checkpoint read": 1,
    "trainer: before a step": STEPS,
    "trainer: in a step": STEPS,
    "trainer: after a step": STEPS,
    "trainer: after an evaluation": 2,
    "trainer: before the end is noted": 1,
    "claim: before the spawn": 2,  # the first is of another job, which ends at once
    "claim: after the spawn": 2,
    "supervisor: adopting": 1,
    "supervisor: burying": 1,
    "supervisor: going on": 1,
    "recorder: flush": 6,  # and more, by the clock
}
"""How often an undisturbed run arrives at a point; where `BEFORE` has one, after that."""

_DEATH: Final = "trainer: in a step:kill:5"  # the save of step 4 has waited for that of step 2: it goes on from one
BEFORE: Final = {
    "resume: checkpoint read": _DEATH,
    "supervisor: burying": _DEATH,
    "supervisor: going on": _DEATH,
}
"""The faults that lead to points at which an undisturbed run does not arrive. A supervisor adopts what another one,
which was killed as soon as it had started it, has left."""

USUAL: Final = {
    "save: before the files": 2,
    "save: tensors written": 2,
    "save: manifest written": 2,
    "save: renamed": 2,
    "trainer: in a step": 3,
    "trainer: after a step": 3,
    "trainer: after an evaluation": 2,
    "recorder: flush": 4,
}
"""At which arrival a fault of seed 0 strikes: mostly where an older checkpoint is there. The others: at the first."""

SEEDS: Final = 3
SEEDED: Final = ("kill", "error", "enospc")
"""The kinds that are tried with further seeds."""

Fault = tuple[str, str, int]
"""Point, kind and seed."""

CHOSEN: Final[tuple[Fault, ...]] = (
    ("save: before the files", "eio", 1),
    ("save: tensors written", "edquot", 0),
    ("save: manifest written", "kill", 2),
    ("save: renamed", "kill", 2),
    ("save: rotating", "kill", 0),
    ("export: weights written", "enospc", 0),
    ("export: before the move", "error", 0),
    ("trainer: loading", "edquot", 0),
    ("resume: checkpoint read", "kill", 0),
    ("trainer: before a step", "kill", 1),
    ("trainer: in a step", "enospc", 2),
    ("trainer: after a step", "kill", 0),
    ("trainer: after an evaluation", "error", 1),
    ("trainer: before the end is noted", "kill", 0),
    ("claim: before the spawn", "kill", 0),
    ("claim: before the spawn", "emfile", 1),
    ("claim: after the spawn", "error", 0),
    ("supervisor: adopting", "kill", 0),
    ("supervisor: burying", "emfile", 0),
    ("supervisor: going on", "error", 0),
    ("recorder: flush", "kill", 2),
)
"""What is tried where all would take too long: each point, each kind and each seed."""


def arrival_of(point: str, seed: int) -> int | None:
    """At which arrival the fault of a seed strikes, from 1: another one for each. None: there are no more."""
    usual = USUAL.get(point, 1)
    others = [number for number in range(1, REACHED[point] + 1) if number != usual]
    random.Random(point).shuffle(others)
    drawn = [usual, *others]
    return drawn[seed] if seed < len(drawn) else None


ALL: Final[tuple[Fault, ...]] = tuple(
    (point, kind, seed)
    for seed in range(SEEDS)
    for kind in (SEEDED if seed else KINDS)
    for point in POINTS
    if arrival_of(point, seed) is not None
)


@dataclass
class Outcome:
    """What happened, and every invariant that did not hold. `first_state` is how the job stood after the fault."""

    point: str
    kind: str
    seed: int = 0
    struck: bool = False
    first_state: str = ""
    attempts: int = 0
    seconds: float = 0.0
    violations: list[str] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Reference:
    """An undisturbed run: its losses by step, its evaluations, the hash of its weights, and the cache to start with."""

    losses: dict[int, float]
    evaluations: dict[int, float]
    weights: str
    cache: Path


def make_model(folder: Path, cache: Path) -> Path:
    """A config with two blocks of 16 and the starter's tokenizer: pretraining begins from random weights."""
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    from vramfit.starter.shape import architecture
    from vramfit.starter.tokenizer import tokenizer_folder

    PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(cache)).save_pretrained(folder)
    LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=architecture().vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=None,
        eos_token_id=0,
    ).save_pretrained(folder)
    return folder


def make_rows(path: Path) -> Path:
    lines = [json.dumps({"text": f"The fox number {n} found {n + 2} berries by the river."}) for n in range(24)]
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def config_of(model: Path, rows: Path) -> RunConfig:
    return RunConfig.parse(
        {
            "name": "under fault",
            "method": "pretrain",
            "device": "cpu",
            "model": {"source": str(model)},
            "data": {"paths": [str(rows)], "max_length": 24, "eval_share": 0.1},
            "schedule": {"max_steps": STEPS, "sequences_per_step": 2, "learning_rate": 3e-3},
            "output": {
                "prompts": [],
                "sample_tokens": 0,
                "evaluate_every": 2,
                "checkpoint_every": 2,
                "keep_checkpoints": 1,
            },
        }
    )


def undisturbed(config: RunConfig, folder: Path) -> Reference:
    """Run it once without a fault."""
    outcome = Outcome(point="", kind="")
    with Store(folder) as store:
        id_ = store.add_job(config)
        with _Supervised(folder, None, outcome) as supervised:
            supervised.until(lambda: store.job(id_).final)
        job = store.job(id_)
        assert job.state == "succeeded", (job.failure, store.log_tail(id_, lines=30))
        assert not outcome.violations, outcome.violations
        return Reference(
            losses=_losses(store, id_),
            evaluations={each.step: each.loss for each in store.evaluations(id_)},
            weights=_weights(job.folder),
            cache=folder / "cache",
        )


def go_through(point: str, kind: str, seed: int, *, config: RunConfig, folder: Path, reference: Reference) -> Outcome:
    """Meet one fault, start again without it, resume as the page would, and check what must hold."""
    began, outcome = time.monotonic(), Outcome(point=point, kind=kind, seed=seed)
    folder.mkdir(parents=True)
    shutil.copytree(reference.cache, folder / "cache")
    try:
        _strike_and_take_up(outcome, config=config, folder=folder, reference=reference)
    finally:
        for process in _trainers(folder):  # only after a violation: none may be left behind by the tests, too
            process.kill()
    outcome.seconds = time.monotonic() - began
    return outcome


def _strike_and_take_up(outcome: Outcome, *, config: RunConfig, folder: Path, reference: Reference) -> None:
    arrival = arrival_of(outcome.point, outcome.seed)
    with Store(folder) as store:
        front = refused_job(store, config) if outcome.point.startswith("claim") and arrival == 2 else None
        id_ = store.add_job(config)
        aside = store.add_job(config.model_copy(update={"name": "aside"}), draft=True)
        before = BEFORE.get(outcome.point)
        fault = ";".join([f"{outcome.point}:{outcome.kind}:{arrival}", *([before] if before else [])])
        attempts = 2 if outcome.point.startswith("resume") else 1
        if outcome.point == "supervisor: adopting":
            with _Supervised(folder, "claim: after the spawn:kill", outcome) as starter:
                starter.until(lambda: not starter.alive)
        with _Supervised(folder, fault, outcome) as first:
            first.until(lambda: store.job(id_).final or not first.alive or store.job(id_).attempt > attempts)
        outcome.struck = f"fault: {outcome.kind} at {outcome.point}" in _logs(folder)
        outcome.first_state = store.job(id_).state
        if not outcome.struck:
            outcome.violations.append("the fault did not strike")
        _check_after_the_fault(store, id_, outcome)
        with _Supervised(folder, None, outcome) as second:
            for _ in range(RESUMES + 1):
                second.until(lambda: store.job(id_).final)
                job = store.job(id_)
                if job.state == "succeeded":
                    break
                if job.state not in RESUMABLE or not job.failure or not job.remedy:
                    outcome.violations.append(f"it ended {job.state} ({job.failure}; {job.remedy})")
                store.enqueue(id_)
        outcome.attempts = store.job(id_).attempt
        others = {aside: "draft"} if front is None else {aside: "draft", front: "failed"}
        _check_the_end(store, id_, others, reference, outcome)


def refused_job(store: Store, config: RunConfig) -> int:
    """A job that ends before torch is loaded: its data is not what was marked, and that is to be refused."""
    output = config.output.model_copy(update={"if_changed": "refuse"})
    changed = config.model_copy(update={"name": "in front", "output": output})
    id_ = store.add_job(changed)
    store.freeze(id_, config=changed, marks={"data": {"other.jsonl": "1 2"}})
    return id_


class _Supervised:
    """A supervisor as a process of its own. At the end it is killed as a power cut would; trainers go on."""

    def __init__(self, folder: Path, fault: str | None, outcome: Outcome) -> None:
        self._folder, self._outcome = folder, outcome
        variables = {key: value for key, value in os.environ.items() if key != VARIABLE}
        threads = {"OMP_NUM_THREADS": "1"}  # two scenarios at a time share two cores, and sums keep their order
        with (folder / "supervisor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.faults.scenario", "supervise", str(folder)],
                cwd=ROOT,
                env={**variables, **threads, **({VARIABLE: fault} if fault else {})},
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    def __enter__(self) -> _Supervised:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(20)

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def until(self, reached: object) -> None:
        """Wait, and look all the time that no two trainers are at work on the data folder."""
        assert callable(reached)
        deadline, looked = time.monotonic() + SECONDS, 0.0
        while not reached():
            if time.monotonic() > deadline:
                raise AssertionError(f"{self._outcome.point}, {self._outcome.kind}: {_logs(self._folder)[-3000:]}")
            if time.monotonic() - looked > 0.3:
                looked = time.monotonic()
                found = _trainers(self._folder)
                if len(found) > 1:
                    self._outcome.violations.append(f"{len(found)} trainers at once")
            time.sleep(0.05)


def _trainers(folder: Path) -> list[psutil.Process]:
    """Living processes of the trainer's module on this data folder."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            line = process.cmdline()
            if "jobs.run_job" in line and str(folder) in line and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
    return found


def _check_after_the_fault(store: Store, id_: int, outcome: Outcome) -> None:
    """The disk as the fault left it: the newest complete checkpoint loads, every tensor, and none is damaged."""
    job = store.job(id_)
    if job.final and job.state != "succeeded" and not (job.failure and job.remedy):
        outcome.violations.append(f"it ended {job.state} without a cause and a remedy")
    if outcome.kind in ("enospc", "edquot") and job.final and job.state not in ("paused", "succeeded"):
        outcome.violations.append(f"a full disk left it {job.state}, not paused")
    said = [event.message for event in store.events(id_) if event.kind == "queued"]
    waits = outcome.point == "claim: before the spawn" and outcome.kind in ("enospc", "edquot", "emfile")
    if waits and (len(said) != 1 or not said[0].startswith("The queue waits")):
        outcome.violations.append(f"why no trainer was started is told in {said}")
    try:
        found = checkpoint.newest(job.checkpoints)
    except VramfitError as error:
        outcome.violations.append(f"no checkpoint loads: {error}")
        return
    if found is not None:
        for name in found.checkpoint.tensors:
            found.checkpoint.tensors[name]
        outcome.violations += [f"damaged: {name}" for name in found.damaged]


def _check_the_end(store: Store, id_: int, others: dict[int, str], reference: Reference, outcome: Outcome) -> None:
    """`others` are the states in which the other jobs have to be."""
    job, wrong = store.job(id_), outcome.violations
    if job.state != "succeeded":
        wrong.append(f"it never succeeded: {job.state}, {job.failure}")
    states = {each.id: each.state for each in store.jobs()}
    if states != {id_: job.state, **others}:
        wrong.append(f"the jobs are {states}")
    if store.series(id_).columns["step"] != list(range(1, STEPS + 1)):
        wrong.append(f"the steps on record are {store.series(id_).columns['step']}")
    if _losses(store, id_) != reference.losses:
        wrong.append(f"the losses are {_losses(store, id_)}, not {reference.losses}")
    if {each.step: each.loss for each in store.evaluations(id_)} != reference.evaluations:
        wrong.append("the evaluations are others")
    if job.state == "succeeded" and _weights(job.folder) != reference.weights:
        wrong.append("the final weights are others")
    if checkpoint.steps(job.checkpoints) != [STEPS]:
        wrong.append(f"the checkpoints are {checkpoint.steps(job.checkpoints)}")
    stray = [path.name for path in job.folder.rglob("*") if path.name.endswith((".partial", ".old"))]
    stray += [path.name for path in checkpoint.leftovers(job.checkpoints)]
    if stray:
        wrong.append(f"left behind: {stray}")
    if len(list((store.data_dir / "runs").iterdir())) != len(states):
        wrong.append("there is not one folder for each job")
    with suppress(AssertionError):
        _wait_until_gone(store.data_dir)
    if _trainers(store.data_dir):
        wrong.append("a trainer is left behind")
    try:
        store.check()
    except VramfitError as error:
        wrong.append(str(error))


def _wait_until_gone(folder: Path) -> None:
    deadline = time.monotonic() + 15
    while _trainers(folder):
        assert time.monotonic() < deadline
        time.sleep(0.1)


def _losses(store: Store, id_: int) -> dict[int, float]:
    columns = store.series(id_).columns
    return dict(zip(columns["step"], columns["loss"], strict=True))  # type: ignore[arg-type]


def _weights(folder: Path) -> str:
    return hashlib.sha256((folder / "export" / "model.safetensors").read_bytes()).hexdigest()


def _logs(folder: Path) -> str:
    return "\n".join(
        path.read_text(encoding="utf-8", errors="replace")
        for path in (folder / "supervisor.log", *folder.glob("runs/*/trainer.log"))
        if path.is_file()
    )


def supervise(folder: Path) -> None:
    """The real supervisor with the real trainer's command; only it waits less for a trainer that never comes."""
    with Store(folder) as store:
        store.check()
        supervisor = Supervisor(store, patience=Patience(start=8.0, idle=600.0))
        if supervisor.start(wait=time.sleep):
            loop(supervisor, asked=signal_flag())


if __name__ == "__main__":
    assert sys.argv[1] == "supervise"
    supervise(Path(sys.argv[2]))
