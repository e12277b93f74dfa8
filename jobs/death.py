"""How a trainer died that did not note its own end, and whether its job goes on by itself. Pure: no SQL, no process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from jobs import processes
from jobs.job import Job
from vramfit.sentences import ended, say

MOST_LOSSES: Final = 2
"""A job over which its supervisor died so often is parked: only a person starts it again."""

CRASHES: Final = ("SIGSEGV", "SIGABRT", "SIGBUS", "SIGILL", "SIGFPE", "SIGSYS", "SIGTRAP")


@dataclass(frozen=True, kw_only=True)
class Death:
    """Where it leaves the job, and the cause in one sentence. `again`: the cause may be gone the next time."""

    state: Literal["failed", "interrupted"]
    cause: str
    again: bool = True
    remedy: str = ""


def cause_of(*, code: int | None, kills_before: int | None, kills_now: int | None, other_boot: bool) -> Death:
    """The death of a trainer from its exit code (negative: a signal; None: another supervisor started it), the counts
    of the out-of-memory killer around its life, and whether the machine was started again since."""
    starved = kills_before is not None and kills_now is not None and kills_now > kills_before
    if other_boot:
        return Death(state="interrupted", cause=say("death.boot"))
    if starved and code in (None, -9):
        return Death(
            state="interrupted",
            cause=say("death.memory"),
            remedy=say("cure.memory"),
        )
    if code is None:
        return Death(state="interrupted", cause=say("death.silent"))
    if code >= 0:
        return Death(state="failed", cause=say("death.code", code=code), again=False)
    name = processes.signal_name(-code)
    if name in CRASHES:
        return Death(state="interrupted", cause=say("death.crash", signal=name))
    return Death(state="interrupted", cause=say("death.outside", signal=name))


def obstacle(job: Job) -> str | None:
    """Why a job whose trainer was ended from outside does not go on by itself, as a sentence ("": it was not to);
    None when it does."""
    most = job.config.output.automatic_resumes
    if job.lost_folder:
        return ended(job.lost_folder)
    if job.losses >= MOST_LOSSES:
        return say("stays.parked", times=job.losses)
    if most == 0 or job.foreground:
        return ""
    if not job.progressed:
        return say("stays.no_further", step=f"{job.step_before or 0:,}") if job.step else say("stays.no_step")
    if job.resumes >= most:
        return say("stays.once") if job.resumes == 1 else say("stays.often", times=job.resumes)
    return None
