"""What a person waits for: the panel's start, the page, the estimate, Start to phase line, first point and the end.

    python bench/first_light.py [--json] [--no-training]

Starts app.py on an empty data folder, drives it in Chromium and trains the starter with nothing else touched. Prints
one figure a line (or one JSON object each in a list): name, value, unit, goal, met. Takes about five minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))

from jobs import processes
from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.training.metrics import StepMetrics

ROOT = Path(__file__).parent.parent
CHROMIUM = os.environ.get("VRAMFIT_CHROMIUM", "/usr/bin/chromium")
FLAGS = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
LONG_RUN_STEPS = 100_000
CHANGES = 20


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One measured number. `goal` is what it should at most be; None where there is none."""

    name: str
    value: float
    unit: str
    goal: float | None = None

    @property
    def met(self) -> bool | None:
        return None if self.goal is None else self.value <= self.goal


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-training", action="store_true", help="stop after the form")
    options = parser.parse_args()
    figures = []
    for figure in measure(training=not options.no_training):
        figures.append(figure)
        if not options.json:
            verdict = "" if figure.goal is None else f"goal {figure.goal:g}: {'met' if figure.met else 'NOT met'}"
            print(f"{figure.name:<40}{figure.value:>10.2f} {figure.unit:<12}{verdict}", flush=True)
    if options.json:
        print(json.dumps([{**asdict(figure), "met": figure.met} for figure in figures], indent=1))


def measure(*, training: bool) -> Iterator[Figure]:
    """The figures, in the order in which a person meets them."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        began = time.perf_counter()
        with panel(Path(folder)) as address:
            yield Figure(name="command to address", value=time.perf_counter() - began, unit="s")
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900}, locale="en-US")
            yield Figure(name="first page load", value=load(page, address), unit="s", goal=3.0)
            yield Figure(name="second page load", value=load(page, address), unit="s", goal=3.0)
            yield from estimate(page)
            if training:
                load(page, address)
                yield from start(page, Path(folder))
            yield open_long_run(page, address, Path(folder))
            browser.close()


@contextmanager
def panel(data_dir: Path) -> Iterator[str]:
    """app.py as a person starts it; at the end the panel, the supervisor and any trainer are ended."""
    command = [sys.executable, "app.py", "--no-browser", "--port", "0", "--data-dir", str(data_dir)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, encoding="utf-8") as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "http://" in line)
            yield f"http://{line.split('http://')[1].split('/')[0]}/"
        finally:
            process.kill()
            with Store(data_dir) as store:
                lease = store.lease(SUPERVISOR_LEASE)
                owners = [lease[0]] if lease else []
                owners += [job.owner for job in store.active_jobs() if job.owner]
            for owner in owners:
                processes.end(owner, grace_s=2)


def load(page: Page, address: str) -> float:
    """Seconds until Start can be clicked and the estimate is drawn."""
    began = time.perf_counter()
    page.goto(address)
    page.wait_for_selector("#start:enabled")
    page.wait_for_selector("#estimate .vf-bar")
    return time.perf_counter() - began


def estimate(page: Page) -> Iterator[Figure]:
    """From a keystroke to the redrawn bar, by the page's own clock."""
    page.wait_for_timeout(2000)
    page.evaluate("document.addEventListener('input', () => { window.typedAt = performance.now(); }, true)")
    took = []
    for number in range(CHANGES):
        page.evaluate("window.VF.estimateShownAt = 0")
        page.fill("#field-data-max_length textarea, #field-data-max_length input", str(64 + 8 * number))
        page.wait_for_function("window.VF.estimateShownAt > 0", polling=20)
        took.append(page.evaluate("window.VF.estimateShownAt - window.typedAt"))
    yield Figure(name="estimate after a change, median", value=statistics.median(took), unit="ms", goal=200)
    yield Figure(name="estimate after a change, worst", value=max(took), unit="ms", goal=200)


def start(page: Page, data_dir: Path) -> Iterator[Figure]:
    """Start with nothing else touched, to the end."""
    page.wait_for_timeout(2000)
    clicked = time.perf_counter()
    page.click("#start")
    page.wait_for_function("document.querySelector('.vf-phase')?.innerText", polling=20)
    yield Figure(name="click to phase line", value=time.perf_counter() - clicked, unit="s", goal=1.0)
    drawn = "Number(document.querySelector('.vf-grid')?.dataset.points ?? 0) > 0"
    page.wait_for_function(drawn, polling=50, timeout=300_000)
    yield Figure(name="click to the first point of the loss", value=time.perf_counter() - clicked, unit="s", goal=15.0)
    page.wait_for_selector(".vf-sample-after p", timeout=1_200_000)
    yield Figure(name="click to the trained model's text", value=time.perf_counter() - clicked, unit="s")
    with Store(data_dir) as store:
        (job,) = store.jobs()
        metrics = store.series(job.id).columns
        yield Figure(name="training, first to last step", value=metrics["time"][-1] - metrics["time"][0], unit="s")
        yield Figure(name="tokens/s, median", value=statistics.median(metrics["tokens_per_s"]), unit="tokens/s")
        yield Figure(name="held-out loss", value=job.eval_loss or float("nan"), unit="nats/token")


def open_long_run(page: Page, address: str, data_dir: Path) -> Figure:
    """From the click on a run of 100,000 steps in the list to all of its charts drawn."""
    with Store(data_dir) as store:
        job = store.begin_foreground(RunConfig(name="Long run"), owner=processes.own_identity())
        with store.recorder(job.id, job.attempt) as recorder:
            for first in range(1, LONG_RUN_STEPS + 1, 5000):
                recorder.steps([made_up(step) for step in range(first, first + 5000)])
        store.transition(job.id, expected=("running",), state="succeeded", attempt=job.attempt)
    page.goto(f"{address}?view=runs")
    page.wait_for_selector(f".vf-row[data-run='{job.id}']")
    page.wait_for_function("!!window.Plotly")
    began = time.perf_counter()
    page.click(f".vf-row[data-run='{job.id}']")
    page.wait_for_function(f"document.querySelector('.vf-grid')?.dataset.lastStep == '{LONG_RUN_STEPS}'", polling=20)
    return Figure(name="open a run of 100,000 steps", value=time.perf_counter() - began, unit="s", goal=1.0)


def made_up(step: int) -> StepMetrics:
    """Rows to draw; only their number matters here."""
    return StepMetrics(
        step=step,
        time=time.time(),
        loss=1.2 + 6 / (1 + step / 5000),
        learning_rate=1e-3,
        grad_norm=0.5 + step % 7 / 10,
        tokens=100,
        tokens_per_s=5000.0 + step % 13,
        step_seconds=0.01,
        epoch=step / LONG_RUN_STEPS,
        allocated_bytes=9 * 2**30,
        reserved_bytes=10 * 2**30,
        resident_bytes=2**30,
    )


if __name__ == "__main__":
    main()
