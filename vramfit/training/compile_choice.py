"""Whether a run's blocks are compiled: as asked for, or as a trial on this machine has shown, which is remembered."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from torch import nn

from vramfit.config import RunConfig
from vramfit.engine.compiling import (
    CompiledBlocks,
    Trial,
    first_pass,
    launches_of,
    launches_told,
    plain_pass,
    trial,
)
from vramfit.engine.randomness import draws
from vramfit.engine.recovery import attempt, halves
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.engine.visiting import VisitedBlocks
from vramfit.errors import ConfigError, Problem
from vramfit.planning.plan import Plan
from vramfit.training.kept_trials import remember, remembered
from vramfit.training.memory_care import Note

FILE: Final = "compile_trials.json"
LEAST_RUN_S: Final = 1800.0
"""A trial takes a minute or two, most of it the compiler: a shorter run would not win them back."""


def compiled_blocks(
    config: RunConfig, plan: Plan, model: nn.Module, *, run_s: float, visits: VisitedBlocks | None = None
) -> CompiledBlocks | None:
    """The blocks of `model` made ready for a compiler, to be called before the executor is made; None where they stay
    as they are. `visits`: they are those, whose weights come and go.

    Without a wish there is a trial on a card, for a run that is predicted to take half an hour; never on a CPU, where
    compiling took longer than anything it won. Raises ConfigError for a wish that blocks that visit cannot have.
    """
    automatic = config.memory.compile == "auto" and plan.device != "cpu" and run_s >= LEAST_RUN_S
    if not plan.compiled and not automatic:
        return None
    if visits is not None and (draws(model) or visits.split):
        if plan.compiled:
            raise ConfigError([_cannot(model, visits)])
        return None
    return CompiledBlocks(model, plan.compile_mode, visits=visits)


def _cannot(model: nn.Module, visits: VisitedBlocks) -> Problem:
    if visits.split:
        what, remedy = f"has {len(visits.split)} blocks that come in parts, whose forward stops between them", ""
    else:
        what = "drops out activations, and a compiler would not drop the same ones in a step's two forward passes"
        remedy = "dropout to 0, "
    return Problem(
        field="memory.compile",
        what=f"Blocks that visit the device cannot be compiled here: {type(model).__name__} {what}",
        remedy=f"Set compile to auto or off, {remedy}or give the run more memory.",
    )


Fewer = Callable[[int, str], Note]
"""(sequences at once, where memory ran out) -> what is told of it, once that is the run's limit."""


def settle(
    blocks: CompiledBlocks,
    executor: ResidentExecutor,
    piece: Piece,
    *,
    wish: str,
    folder: Path,
    kind: str,
    passes: int,
    fewer: Fewer,
) -> Iterator[Note]:
    """Compile before the first step, and say what came of it. `kind` names runs for which one trial stands; `piece` is
    what goes through the model at once, and a step has so many `passes`.

    Where memory runs out, blocks stay as they are if they then fit and nobody wished for a compiler, else there are
    `fewer` sequences at a time. What a single sequence has no room for, the first step says with its numbers.
    """
    while True:
        notes, failure = attempt(
            lambda piece=piece, passes=passes: list(  # type: ignore[misc]
                _settled(blocks, executor, piece, wish=wish, folder=folder, kind=kind, passes=passes)
            ),
            executor.device,
        )
        if notes is not None:
            yield from notes
            return
        where = f"when blocks were compiled, with {piece.rows} sequences at a time"
        fits = wish == "auto" and _fits_plainly(blocks, executor, piece)
        if fits or piece.rows == 1:
            blocks.on = False
            yield Note(
                level="info" if fits else "warning",
                kind="compile",
                message=f"Blocks are not compiled: memory ran out {where} ({failure.splitlines()[0]}).",
            )
            return
        rows = halves(piece.rows)[0]
        blocks.on = True
        yield fewer(rows, where)
        passes *= math.ceil(piece.rows / rows)
        piece = piece.part(0, rows)


def _fits_plainly(blocks: CompiledBlocks, executor: ResidentExecutor, piece: Piece) -> bool:
    _, failure = attempt(lambda: plain_pass(executor, blocks, piece), executor.device)
    return not failure


def _settled(
    blocks: CompiledBlocks, executor: ResidentExecutor, piece: Piece, *, wish: str, folder: Path, kind: str, passes: int
) -> Iterator[Note]:
    about: dict[str, Any] = {"device": executor.device, "passes": passes}
    if wish != "auto":
        seconds = first_pass(executor, blocks, piece)
        if blocks.on:
            told = launches_told(launches_of(executor, blocks, piece), **about)
            message = f"Blocks compiled ({blocks.mode}) in {seconds:.0f} s. {told}"
            yield Note(level="info", kind="compile", message=message)
        else:
            yield _failed(blocks)
        return
    kind = f"{kind} | {blocks.mode}"
    known = _remembered(folder, kind)
    if known is not None:
        blocks.on = known.pays
        yield _told(known, "an earlier trial on this machine", **about)
        if blocks.on:
            first_pass(executor, blocks, piece)
    else:
        made = trial(executor, blocks, piece)
        if made is not None:
            remember(folder / FILE, kind, asdict(made))
            yield _told(made, "a trial", **about)
    if blocks.problem:
        yield _failed(blocks)


def _told(made: Trial, source: str, **about: Any) -> Note:
    done = "Blocks are compiled" if made.pays else "Blocks are not compiled"
    launches = launches_told(made.launches, **about)
    return Note(level="info", kind="compile", message=f"{done}: in {source} that was {made}. {launches}")


def _failed(blocks: CompiledBlocks) -> Note:
    return Note(
        level="warning", kind="compile", message=f"The compiler failed, so blocks run as they are: {blocks.problem}."
    )


def _remembered(folder: Path, kind: str) -> Trial | None:
    values = remembered(folder / FILE, kind)
    try:
        before, after = values["launches"]
        seconds = {name: float(values[name]) for name in ("eager_s", "compiled_s", "first_s")}
        return Trial(launches=(int(before), int(after)), **seconds)
    except (TypeError, KeyError, ValueError, OverflowError):
        return None
