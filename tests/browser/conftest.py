"""The real panel as a process of its own, and Chromium to look at it. What a test starts, its fixture ends."""

from __future__ import annotations

import math
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, Playwright, expect, sync_playwright
from playwright.sync_api import TimeoutError as NeverSeen

from jobs import processes
from jobs.store import SUPERVISOR_LEASE, Store
from vramfit.config import RunConfig
from vramfit.training.metrics import Evaluation, StepMetrics, Telemetry, TextSample

ROOT = Path(__file__).parents[2]
CHROMIUM = os.environ.get("VRAMFIT_CHROMIUM", "/usr/bin/chromium")
FLAGS = [
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
STARTING_S = 90.0
PATIENCE_S = 60.0  # a machine busy with other work is slow, not wrong
expect.set_options(timeout=1000 * PATIENCE_S)

_TOLD = """() => JSON.stringify({
  address: location.href,
  shown: document.body.innerText.slice(0, 3000),
  fields: Object.fromEntries([...document.querySelectorAll("[id^=field-]")].map(
    (field) => [field.id.slice(6), field.querySelector("textarea, input")?.value])),
})"""
"""What a person could read, for a test that waited in vain."""
LONG_RUN_STEPS = 100_000
WAITS = {"link_seconds": 0.001, "optimizer_seconds": 0.002, "disk_seconds": 0.003, "written_bytes": 2**30}


class Panel:
    """`app.py` on a free port. `start` may be called again after `kill`; `end` also ends the runs and the queue."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    def start(self) -> Panel:
        command = [sys.executable, "app.py", "--no-browser", "--port", str(self.port), "--data-dir", str(self.data_dir)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, encoding="utf-8"
        )
        self.port = int(self._announced().split("http://127.0.0.1:")[1].split("/")[0])
        return self

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def kill(self) -> None:
        """As the power button would: no goodbye."""
        assert self.process is not None
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(10)
        if self.process.stdout:
            self.process.stdout.close()

    def end(self) -> None:
        if self.process is not None:
            self.kill()
        with Store(self.data_dir) as store:
            lease = store.lease(SUPERVISOR_LEASE)
            owners = [lease[0]] if lease else []
            owners += [job.owner for job in store.active_jobs() if job.owner]
        for owner in owners:
            processes.end(owner, grace_s=2)

    def _announced(self) -> str:
        """The line with the address. A thread reads, because a pipe cannot be read with a time limit everywhere."""
        assert self.process is not None
        lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=_read_lines, args=(self.process, lines), daemon=True).start()
        said, deadline = "", time.monotonic() + STARTING_S
        while "http://" not in said:
            said += lines.get(timeout=max(0.1, deadline - time.monotonic()))
        return said


def _read_lines(process: subprocess.Popen[str], lines: queue.Queue[str]) -> None:
    assert process.stdout is not None
    try:
        for line in process.stdout:
            lines.put(line)
    except ValueError:  # closed while it was read
        pass


PANELS = {"fresh", "seeded"}  # the fixtures that start one


@pytest.fixture(scope="module")  # not the session: its event loop would be in the way of every later test
def _playwright() -> Iterator[Playwright]:
    with sync_playwright() as opened:
        yield opened


@pytest.fixture(scope="module")
def browser(_playwright: Playwright) -> Iterator[Browser]:
    # Debian's Chromium is there where the tests run; a missing one is a failure, never a skip.
    opened = _playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
    yield opened
    opened.close()


@pytest.fixture
def page(browser: Browser, request: pytest.FixtureRequest) -> Iterator[Page]:
    """A fresh tab, whose log of trouble must be empty at the end: no console error, no request to another host."""
    for panel in PANELS & set(request.fixturenames):
        request.getfixturevalue(panel)  # begun before the tab, so ended after it: an open tab notes a panel that goes
    context = browser.new_context(viewport={"width": 1400, "height": 900}, locale="en-US")
    context.set_default_timeout(1000 * PATIENCE_S)
    tab = context.new_page()
    trouble: list[str] = []
    tab.on("console", lambda message: trouble.append(message.text) if message.type == "error" else None)
    tab.on("pageerror", lambda error: trouble.append(str(error)))
    tab.on("request", lambda request: trouble.append(request.url) if _is_outside(request.url) else None)
    tab.trouble = trouble
    yield tab
    context.close()
    assert trouble == []


def _is_outside(url: str) -> bool:
    return not url.startswith(("http://127.0.0.1:", "data:", "blob:"))


@pytest.fixture(scope="session")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Panel]:
    """A panel on a folder of finished runs: 1 of 100,000 steps on a card, 2 of 200 on the CPU, 3 streams from disk."""
    folder = tmp_path_factory.mktemp("seeded") / "a folder 数据"
    with Store(folder) as store:
        store.take_lease(SUPERVISOR_LEASE, owner="seed", alive=lambda *_: True)
        _finished(store, RunConfig(name="Long run", device="cuda:0"), steps=LONG_RUN_STEPS, on_card=True)
        _finished(store, RunConfig(name="Short run", device="cpu"), steps=200, on_card=False)
        _finished(store, RunConfig(name="Streamed run", device="cpu"), steps=40, on_card=False, **WAITS)
        store.release_lease(SUPERVISOR_LEASE, owner="seed")
    panel = Panel(folder)
    try:
        yield panel.start()
    finally:
        panel.end()


@pytest.fixture
def fresh(tmp_path: Path) -> Iterator[Panel]:
    """A panel on an empty folder, as after the first start."""
    panel = Panel(tmp_path / "data")
    try:
        yield panel.start()
    finally:
        panel.end()


@pytest.fixture
def see(page: Page) -> Callable[..., None]:
    """Waits until a JavaScript expression is true in the page, and says what the page told where it never is."""

    def wait(expression: str, *, seconds: float = PATIENCE_S) -> None:
        try:
            page.wait_for_function(expression, timeout=seconds * 1000, polling=50)
        except NeverSeen as error:
            raise AssertionError(f"Not in {seconds:g} s: {expression}. The page: {page.evaluate(_TOLD)}") from error

    return wait


def _finished(store: Store, config: RunConfig, *, steps: int, on_card: bool, **waits: float) -> None:
    run = store.add_job(config)
    job = store.claim_next("seed", ("cuda:0", "cpu"))
    assert job is not None
    store.begin_attempt(run, attempt=job.attempt, owner="seed")
    with store.recorder(run, job.attempt) as recorder:
        for first in range(1, steps + 1, 5000):
            recorder.steps([_step(step, steps, **waits) for step in range(first, min(first + 5000, steps + 1))])
        recorder.evaluation(Evaluation(step=steps, time=time.time(), loss=1.4, tokens=1000))
        recorder.telemetry(_reading(on_card))
        recorder.sample(TextSample(step=0, stage="before", prompt="Once", text="zzk oof"))
        recorder.sample(TextSample(step=steps, stage="after", prompt="Once", text="there was a fox."))
    store.transition(run, expected=("running",), state="succeeded", attempt=job.attempt, final_loss=1.25)


def _step(step: int, steps: int, **waits: float) -> StepMetrics:
    return StepMetrics(
        step=step,
        time=time.time() + step * 0.01,
        loss=1.2 + 6 * math.exp(-5 * step / steps),
        learning_rate=1e-3,
        grad_norm=0.5 + step % 7 / 10,
        tokens=100,
        tokens_per_s=5000.0 + step % 13,
        step_seconds=0.01,
        epoch=step / steps,
        allocated_bytes=9 * 2**30,
        reserved_bytes=10 * 2**30,
        resident_bytes=2**30,
        **waits,
    )


def _reading(on_card: bool) -> Telemetry:
    return Telemetry(
        time=time.time(),
        device_bytes=10 * 2**30 if on_card else None,
        host_bytes=2**30,
        utilisation=0.9 if on_card else None,
        power_watts=300.0 if on_card else None,
        temperature_c=60.0 if on_card else None,
        cpu_utilisation=0.5,
    )
