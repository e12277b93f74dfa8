"""A data folder with an awkward name, a supervisor driven by hand, and proof that no process is left behind."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from jobs import processes
from jobs.device_watch import Found
from jobs.job import Job
from jobs.store import Store
from jobs.supervisor import Patience, Supervisor

STAND_IN = Path(__file__).with_name("stand_in.py")


@pytest.fixture
def data_dir(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "data мир 数据"
    yield folder
    left = [process for process in psutil.process_iter(["cmdline"]) if str(folder) in (process.info["cmdline"] or [])]
    for process in left:
        process.kill()
    psutil.wait_procs(left, timeout=5)
    assert not left, f"left behind: {left}"


@pytest.fixture
def store(data_dir: Path) -> Iterator[Store]:
    with Store(data_dir) as opened:
        yield opened


def stand_in_command(job: Job, data_dir: Path) -> list[str]:
    return [sys.executable, "-W", "error", str(STAND_IN), "train", str(job.id), str(data_dir), str(job.attempt)]


class Driven:
    """A supervisor in this process whose rounds the test makes; its clock is moved by hand."""

    def __init__(self, store: Store, patience: Patience) -> None:
        self.store, self.now = store, 0.0
        self.devices: tuple[str, ...] = ("cpu",)
        self.silent_since: float | None = None
        self.looked_at: float | None = None  # when the devices were looked for, by `now`
        self.supervisor = Supervisor(
            store,
            command=stand_in_command,
            patience=patience,
            devices=lambda: Found(self.devices, self.silent_since, self.looked_at),
        )
        assert self.supervisor.start()

    def until(self, reached: Callable[[], bool], *, seconds: float = 20.0) -> None:
        """Make rounds, each a tenth of a second on the supervisor's clock and a hundredth on the wall's."""
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline, [(job.state, job.failure) for job in self.store.jobs()]
            self.supervisor.step(self.now)
            self.now += 0.1
            time.sleep(0.01)

    def until_over(self, id_: int) -> Job:
        """Until the job has ended and its process is gone. (Private, but the only sign of the latter.)"""
        self.until(lambda: self.store.job(id_).final and id_ not in self.supervisor._trainers)
        return self.store.job(id_)


@pytest.fixture
def drive(store: Store, drive_on: Callable[..., Driven]) -> Callable[..., Driven]:
    """Makes a driven supervisor of the test's store."""
    return functools.partial(drive_on, store)


@pytest.fixture
def drive_on() -> Iterator[Callable[..., Driven]]:
    """Makes a driven supervisor of any store; whatever it still runs at the end of the test is ended."""
    made: list[Driven] = []

    def make(store: Store, patience: Patience = Patience()) -> Driven:  # noqa: B008
        made.append(Driven(store, patience))
        return made[-1]

    yield make
    for driven in made:
        for trainer in driven.supervisor._trainers.values():
            if trainer.who is not None:
                processes.kill(trainer.who)
                if trainer.process is not None:
                    trainer.process.wait(5)


@pytest.fixture
def eventually() -> Callable[..., None]:
    def wait(reached: Callable[[], bool], *, seconds: float = 20.0) -> None:
        deadline = time.monotonic() + seconds
        while not reached():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    return wait
