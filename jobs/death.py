"""How a trainer died that did not note its own end, and whether its job goes on by itself. Pure: no SQL, no process."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from jobs import processes
from jobs.job import Job

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
        return Death(state="interrupted", cause="The machine was started again while it trained.")
    if starved and code in (None, -9):
        return Death(
            state="interrupted",
            cause="The machine ran out of memory (RAM) and the system ended the trainer (SIGKILL).",
            remedy="Close other programs, or set a smaller micro-batch or maximum length.",
        )
    if code is None:
        return Death(
            state="interrupted",
            cause="The trainer ended without a word; why is not known, as the supervisor that started it was gone.",
        )
    if code >= 0:
        return Death(
            state="failed",
            cause=f"The trainer ended with exit code {code} before it could say how the run went.",
            again=False,
        )
    name = processes.signal_name(-code)
    if name in CRASHES:
        return Death(state="interrupted", cause=f"The trainer crashed ({name}).")
    return Death(state="interrupted", cause=f"The trainer was ended from outside ({name}).")


def obstacle(job: Job) -> str | None:
    """Why a job whose trainer was ended from outside does not go on by itself, as a sentence ("": it was not to);
    None when it does."""
    most = job.config.output.automatic_resumes
    if job.lost_folder:
        return f"{job.lost_folder}."
    if job.losses >= MOST_LOSSES:
        return (
            f"The supervisor of the queue died {job.losses} times over this run, so it is parked and starts again only "
            "when you resume it."
        )
    if most == 0 or job.foreground:
        return ""
    if not job.progressed:
        done = "no step was done" if not job.step else f"the start before had come to step {job.step_before or 0:,} too"
        return f"It does not go on by itself, because {done}."
    if job.resumes >= most:
        times = "once" if job.resumes == 1 else f"{job.resumes} times"
        return f"It went on by itself {times}, which is the most that was set (automatic resumes), so it waits for you."
    return None
