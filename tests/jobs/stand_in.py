"""Stand-ins run as real processes by the tests: a trainer without torch, and a supervisor that starts it.

stand_in.py train ID DATA_DIR ATTEMPT       what it does is told by the job's name: "steps=50 delay=0.01 ..."
    save=10 saves every 10 steps; die_at=15,25 ends attempt 1 at step 15 and attempt 2 at step 25, by=SIGKILL (or by
    exit, or by card: it is lost)
    save_s=3 takes 3 seconds for the checkpoint of a stop, which grows meanwhile; step_s=20 is what a step says it took
    linger=5 stays 5 seconds after attempt 1 has ended; noise=10 writes 10 MB to stderr before the first step
stand_in.py supervise DATA_DIR IDLE_S
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from jobs import attempt, recorder
from jobs.attempt import Attempt
from jobs.run_job import run
from jobs.store import Store
from jobs.supervisor import Patience, Supervisor, loop, signal_flag
from vramfit.console import lose_what_is_not_taken
from vramfit.errors import DataError
from vramfit.training import checkpoint
from vramfit.training.metrics import PhaseProgress, RunResult, StepMetrics


def metrics(step: int, *, seconds: float = 0.1) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=time.time(),
        loss=1.0 / step,
        learning_rate=0.1,
        grad_norm=1.0,
        tokens=8,
        tokens_per_s=80.0,
        step_seconds=seconds,
        epoch=step / 100,
        allocated_bytes=1000 + step,
        reserved_bytes=0,
        resident_bytes=2000,
    )


def train(session: Attempt, resume: bool) -> RunResult:
    """Steps without a model. Saves what a checkpoint's manifest needs, so that resuming knows the step."""
    wishes = dict(word.split("=") for word in session.job.name.split())
    total, delay = int(wishes.get("steps", 20)), float(wishes.get("delay", 0.005))
    every, deaths = int(wishes.get("save", 0)), [0, *map(int, wishes.get("die_at", "0").split(","))]
    die_at = deaths[session.job.attempt] if session.job.attempt < len(deaths) else 0
    mishap(session, wishes)
    for number in range(int(wishes.get("noise", 0)) * 10_000):
        print(f"{number:08d} {'x' * 90}", file=sys.stderr)
    done = max(checkpoint.steps(session.job.checkpoints), default=0) if resume else 0
    session.recorder.phase(PhaseProgress(name="training", done=done, total=total))
    while done < total and not session.should_stop():
        done += 1
        time.sleep(delay)
        session.recorder.steps([metrics(done, seconds=float(wishes.get("step_s", 0.1)))])
        print(f"step {done}", flush=True)
        if every and done % every == 0:
            save(session, done)
        if done == die_at:
            session.recorder.flush()
            if wishes.get("by") == "exit":
                os._exit(7)
            if wishes.get("by") == "card":
                raise RuntimeError("CUDA error: GPU is lost")
            os.kill(os.getpid(), signal.Signals[wishes.get("by", "SIGKILL")])
    stopped = done < total
    if stopped:
        save(session, done, seconds=float(wishes.get("save_s", 0)))
    return RunResult(
        steps=done,
        total_steps=total,
        stopped=stopped,
        final_loss=1.0 / max(done, 1),
        eval_loss=None,
        peak_allocated_bytes=1000 + done,
        export=None,
    )


def save(session: Attempt, step: int, *, seconds: float = 0.0) -> None:
    folder = session.job.checkpoints / f"step-{step:08d}"
    folder.mkdir(parents=True, exist_ok=True)
    if seconds:
        session.recorder.phase(PhaseProgress(name="saving", done=step))
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with (folder / checkpoint.TENSORS).open("ab") as file:
            file.write(bytes(100))
        time.sleep(0.01)
    (folder / checkpoint.MANIFEST).write_text("{}", encoding="utf-8")


def mishap(session: Attempt, wishes: dict[str, str]) -> None:
    """What the job's name asks to go wrong."""
    match wishes.get("mishap"):
        case "user":
            raise DataError("The data set holds 0 rows", "Choose another file.")
        case "bug":
            raise ValueError("seven is not a colour")
        case "memory":
            raise MemoryError
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "crash":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            os._exit(7)
        case "loading":
            time.sleep(600)
        case "hang":  # deaf to Stop and to TERM, with two children that are as deaf
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            deaf = "import signal,time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); "
            command_line = [sys.executable, "-c", f"{deaf} time.sleep(600)"]
            children = [subprocess.Popen(command_line, stdout=subprocess.PIPE, text=True) for _ in range(2)]
            for child in children:
                assert child.stdout is not None
                child.stdout.readline()
            (session.job.folder / "child.pid").write_text(
                " ".join(str(each.pid) for each in children), encoding="utf-8"
            )
            session.recorder.steps([metrics(1)])
            time.sleep(600)
        case "locked":  # asked to stop, it stands still in the middle of a write
            session.recorder.steps([metrics(1)])
            session.recorder.flush()
            while not session.should_stop():
                time.sleep(0.01)
            with session.store._write(durable=True):
                (session.job.folder / "locked").touch()
                os.kill(os.getpid(), signal.SIGSTOP)
        case "native":  # in a call that gives neither signals nor other threads a turn, and never returns
            session.recorder.steps([metrics(1)])
            session._over.set()  # so that no thread is in the middle of a write when all stand still
            session.recorder.flush()
            sum(itertools.repeat(0))
        case "full":  # the database grows no more, by SQLite's own limit; what is wrong is a long sentence
            hasten(session)
            session.recorder.steps([metrics(1)])
            session.recorder.flush()
            for connection in session.store._connections.values():
                connection.execute("PRAGMA max_page_count = 1")  # as many as there are
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a long name" * 250)
        case "fill":  # the disk of the data folder, to the last byte
            hasten(session)
            with (session.store.data_dir / "filler").open("wb", buffering=0) as file:
                while file.write(bytes(512)):
                    pass
        case "held":  # another program has the database, from now to the end of this one
            hasten(session)
            session.recorder.flush()
            for connection in session.store._connections.values():
                connection.execute("PRAGMA busy_timeout = 50")
            kept.append(sqlite3.connect(session.store.path, isolation_level=None))
            kept[0].execute("BEGIN IMMEDIATE")
        case "orphan":  # leaves a child behind
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (session.job.folder / "child.pid").write_text(str(child.pid), encoding="utf-8")
            child.returncode = 0  # not waited for, on purpose


kept: list[sqlite3.Connection] = []


def hasten(session: Attempt) -> None:
    """Give up writing after a moment instead of a minute."""
    attempt.INSIST_S = recorder.CLOSE_S = 0.5  # type: ignore[misc]


def command(id_: int, data_dir: Path, number: int) -> list[str]:
    return [sys.executable, "-W", "error", __file__, "train", str(id_), str(data_dir), str(number)]


def main(arguments: list[str]) -> int:
    if arguments[0] == "train":
        with Store(Path(arguments[2])) as store:
            code = run(store, int(arguments[1]), attempt=int(arguments[3]), train=train)
            wishes = dict(word.split("=") for word in store.job(int(arguments[1])).name.split())
            time.sleep(float(wishes.get("linger", 0)) if arguments[3] == "1" else 0)
            return code
    with Store(Path(arguments[1])) as store:
        supervisor = Supervisor(
            store,
            command=lambda job, data_dir: command(job.id, data_dir, job.attempt),
            patience=Patience(idle=float(arguments[2])),
        )
        if not supervisor.start(wait=time.sleep):
            print("another one works here", flush=True)
            return 0
        print("started", flush=True)
        loop(supervisor, asked=signal_flag())
    return 0


if __name__ == "__main__":
    lose_what_is_not_taken()
    sys.exit(main(sys.argv[1:]))
