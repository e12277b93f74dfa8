"""Every exception VRAMFit raises on purpose, as one tree.

    VramfitError                  catch this to catch everything below
    |-- UserError                 the user's input or machine is the cause; the command line exits with 2
    |   |-- ConfigError           one or more fields of a RunConfig; carries every problem, not the first
    |   |-- DataError             a data set cannot be read or holds nothing to train on; may name file, line, column
    |   |-- ModelError            a model folder, hub id, tokenizer or adapter cannot be used
    |   |-- WontFit               no plan fits; carries the number that breaks and what would help
    |   |-- OutOfDisk             a write needs more room than there is
    |   |-- HardwareError         a device that was asked for is absent or was lost
    |   |-- JobError              a job that does not exist or cannot make the asked-for change of state
    |   `-- CheckpointError       no usable checkpoint, or a damaged one
    |       |-- Unwritable        a run's folder that takes no writes, which a person can cure
    |       `-- Changed           data or model are others than those a run belongs to, and somebody has to say go on
    `-- InternalError             our own fault; the command line exits with 1

A message has three parts: what (the setting or file), the limit with the actual number, and the remedy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from vramfit.sentences import joined

if TYPE_CHECKING:
    from vramfit.planning.plan import Forecast


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One thing that is wrong, in the three parts every message has.

    `field` is the dotted path of the setting (`schedule.learning_rate`), or "" when no setting is at fault.
    """

    field: str
    what: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.what.rstrip('.')}. {self.remedy}".strip()


class VramfitError(Exception):
    """Base of all exceptions raised on purpose: `what` (with the number) and `remedy`, each one sentence."""

    def __init__(self, what: str, remedy: str = "") -> None:
        super().__init__(f"{what.rstrip('.')}. {remedy}".strip() if remedy else what)
        self.what = what
        self.remedy = remedy


class UserError(VramfitError):
    """The user's input or machine is the cause, and the user can mend it."""


class ConfigError(UserError):
    """One or more settings are wrong; `problems` holds all of them."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        if not problems:
            raise AssertionError("a ConfigError needs at least one problem")
        self.problems = tuple(problems)
        super().__init__(
            "; ".join(_named(problem) for problem in problems),
            " ".join(dict.fromkeys(problem.remedy for problem in problems if problem.remedy)),
        )


def _named(problem: Problem) -> str:
    what = problem.what.rstrip(".")
    return what if not problem.field or what.startswith(problem.field) else f"{problem.field}: {what}"


class DataError(UserError):
    """A data set cannot be read or used. Lines and columns count from 1; `None` where they do not apply."""

    def __init__(
        self,
        what: str,
        remedy: str = "",
        *,
        path: Path | None = None,
        line: int | None = None,
        column: int | None = None,
    ) -> None:
        self.path, self.line, self.column = path, line, column
        place = [path.name] if path is not None else []
        place += [f"line {line}"] if line is not None else []
        place += [f"column {column}"] if column is not None else []
        super().__init__(f"{', '.join(place)}: {what}" if place else what, remedy)


class ModelError(UserError):
    """A model, tokenizer or adapter cannot be found, read or used."""


class WontFit(UserError):
    """No plan fits.

    `needed_bytes` and `available_bytes` are the two numbers that do not agree, `tier` where (device, host or
    disk), `phase` when, `suggestions` what would help, each a full sentence. `forecast` is the plan that needs the
    least, to show what takes the room.
    """

    def __init__(
        self,
        what: str,
        *,
        needed_bytes: int,
        available_bytes: int,
        tier: str = "device",
        phase: str = "",
        suggestions: Sequence[str] = (),
        forecast: Forecast | None = None,
    ) -> None:
        self.forecast = forecast
        self.needed_bytes, self.available_bytes = needed_bytes, available_bytes
        self.tier, self.phase = tier, phase
        self.suggestions = tuple(suggestions)
        super().__init__(what, joined(*self.suggestions))


class OutOfDisk(UserError):
    """A write needs more room than the disk has."""


class HardwareError(UserError):
    """A device that was asked for is absent, or was lost while in use."""


class JobError(UserError):
    """A job that does not exist, or a change of state it cannot make."""


class CheckpointError(UserError):
    """A checkpoint is missing, incomplete or damaged."""


class Unwritable(CheckpointError):
    """A run's folder takes no writes (its drive is read-only, or its rights forbid it), which a person can cure."""


class Changed(CheckpointError):
    """Data or model are others than when the run was queued or saved, and somebody has to say whether it goes on."""


class InternalError(VramfitError):
    """Our own fault. The log has the details."""
