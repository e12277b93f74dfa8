"""The job store's speed: python bench/store.py [--rows 1000000]

Writes a run of that many steps as the trainer would (batches of 200), then opens its curves, follows them, and times
the small calls that supervisor, trainer and page make all day. Prints one line a measurement.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.training.metrics import StepMetrics, Telemetry

BATCH = 200


def step_row(step: int) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=1.0e9 + step,
        loss=10.0 / step,
        learning_rate=1e-4,
        grad_norm=1.0,
        tokens=4096,
        tokens_per_s=2000.0,
        step_seconds=2.0,
        epoch=step / 1e5,
        allocated_bytes=20 * 2**30 + step,
        reserved_bytes=22 * 2**30,
        resident_bytes=4 * 2**30,
    )


def reading(second: int) -> Telemetry:
    return Telemetry(
        time=1.0e9 + second,
        device_bytes=2**34,
        host_bytes=2**32,
        utilisation=0.9,
        power_watts=400.0,
        temperature_c=70.0,
    )


def timed(what: str, call: Callable[[], object], *, times: int = 1) -> None:
    """Print the best and mean milliseconds of `times` calls."""
    took = []
    for _ in range(times):
        began = time.perf_counter()
        call()
        took.append(1000 * (time.perf_counter() - began))
    print(f"{what:<58} best {min(took):9.3f} ms   mean {sum(took) / len(took):9.3f} ms   n={times}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=int, default=1_000_000)
    rows = parser.parse_args().rows
    with tempfile.TemporaryDirectory() as folder, Store(Path(folder)) as store:
        run = store.add_job(RunConfig())
        store.take_lease(SUPERVISOR_LEASE, owner="bench", alive=lambda *_: True)
        timed("claim", lambda: store.claim_next("bench"))
        store.begin_attempt(run, attempt=1, owner="bench")
        for first in range(1, rows + 1, BATCH):
            batch = [step_row(step) for step in range(first, min(first + BATCH, rows + 1))]
            if first + BATCH > rows:
                timed(f"write the last batch of {len(batch)} steps", lambda: store.record(run, attempt=1, steps=batch))  # noqa: B023
            else:
                store.record(run, attempt=1, steps=batch)
        store.record(run, attempt=1, telemetry=[reading(second) for second in range(rows // 10)])
        print(f"{rows:,} steps, file {store.path.stat().st_size / 2**20:.0f} MiB")
        timed("open its curves", lambda: store.series(run), times=3)
        timed("open its telemetry", lambda: store.telemetry(run), times=3)
        known = store.series(run)
        follow = {"after": known.cursor, "stride": known.stride, "revision": known.revision}
        timed("follow its curves, nothing new", lambda: store.series(run, **follow), times=200)
        timed("read the job", lambda: store.job(run), times=200)
        timed("trainer asks whether to stop", lambda: store.stopping(run, attempt=1), times=200)
        timed("trainer's heartbeat", lambda: store.heartbeat(run, attempt=1), times=200)
        timed("supervisor asks for active jobs", store.active_jobs, times=200)
        for _ in range(199):
            store.add_job(RunConfig())
        timed("list 200 jobs", store.jobs, times=20)
        timed("open the store", lambda: Store(Path(folder)).close(), times=20)


if __name__ == "__main__":
    main()
