"""Check precisely: the plan of an estimate, traced operation by operation in a child process, against the estimate.

The child also replays the allocator for the traced peak: from tensors to the memory that a card must have.

The panel loads no torch. It remembers what each shown estimate would ask the child, under a token of the settings: the
page asks by that token, so an answer never belongs to other settings than those in sight.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import html
import json
import os
import subprocess
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from ui.estimate import notice_card
from ui.texts import Texts
from vramfit.config import STARTER_MODEL, ModelChoice
from vramfit.errors import InternalError, UserError, VramfitError
from vramfit.models.catalogue import architecture_of
from vramfit.models.config_json import config_values
from vramfit.places import is_folder, typed_path
from vramfit.planning.abilities import untraced
from vramfit.planning.plan import Forecast
from vramfit.starter.shape import MODEL_CONFIG
from vramfit.units import GIB, format_bytes

KEPT: Final = 64
LIMIT_S: Final = 240.0
"""A trace takes 5 to 60 seconds; one that is still at it after this long is given up."""
_COMMAND: Final = (sys.executable, "-m", "vramfit.engine.trace")
_ROOT: Final = Path(__file__).parent.parent


@dataclass
class _Check:
    """What is asked, and how far it is. `answer` is the child's last line, `error` why there is none."""

    request: dict[str, Any]
    forecast: Forecast
    begun: float = 0.0
    ended: float = 0.0
    answer: dict[str, Any] | None = None
    error: VramfitError | None = None
    running: bool = False
    given_up: bool = False
    worker: subprocess.Popen[str] | None = field(default=None, repr=False)


class Checks:
    """The checks that the page may ask for. Thread-safe; one child at a time, a new one ends the one before."""

    def __init__(self, command: tuple[str, ...] = _COMMAND) -> None:
        self._command = command
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Check] = OrderedDict()

    def offer(self, model: ModelChoice, forecast: Forecast) -> str:
        """The token under which this plan can be checked; "" for a plan that no trace follows, and for a model that
        cannot be built here."""
        if untraced(forecast.plan) is not None:
            return ""
        try:
            values = model_config(model)
        except VramfitError:
            return ""
        plan, work = dataclasses.asdict(forecast.plan), forecast.workload
        length = plan["max_length"] if plan["packing"] else min(plan["max_length"], work.longest_tokens)
        request = {
            "config": values,
            "plan": {**plan, "reasons": ()},
            "length": length,
            "trained_share": work.trained_share,
            "workload": dataclasses.asdict(work),
            "name": model.source,
        }
        token = hashlib.sha256(json.dumps(request, sort_keys=True).encode()).hexdigest()[:20]
        with self._lock:
            if token not in self._known:
                self._known[token] = _Check(request, forecast)
            self._known.move_to_end(token)
            while len(self._known) > KEPT:
                _, old = self._known.popitem(last=False)
                _end(old)
        return token

    def start(self, token: str) -> None:
        """Begin the check, unless it was. Ends the one under way: its settings are no longer in sight."""
        with self._lock:
            check = self._check(token)
            if check.running or check.answer is not None:
                return
            for other in self._known.values():
                _end(other)
            check.running, check.given_up, check.error, check.begun = True, False, None, time.monotonic()
        threading.Thread(target=self._trace, args=(check,), name="check", daemon=True).start()

    def view(self, token: str, texts: Texts) -> dict[str, Any]:
        """How it stands: `state`, HTML, and when it is done the timeline. Raises UserError for a token nobody knows."""
        with self._lock:
            check = self._check(token)
            running, answer, error = check.running, check.answer, check.error
            seconds = (time.monotonic() if running else check.ended) - check.begun
        if running:
            return {"state": "running", "html": _waiting(seconds, texts)}
        if error is not None:
            return {"state": "failed", "html": notice_card(error, texts)}
        if answer is None:
            return {"state": "idle", "html": ""}
        found = answer["trace"]
        return {
            "state": "done",
            "html": compared_html(check.forecast, found, texts, seconds=seconds),
            "figure": timeline_figure(found, texts),
        }

    def end(self) -> None:
        """The panel closes."""
        with self._lock:
            for check in self._known.values():
                _end(check)

    def _check(self, token: str) -> _Check:
        check = self._known.get(token)
        if check is None:
            raise UserError("These settings were not estimated since the panel was started", "Change any setting.")
        return check

    def _trace(self, check: _Check) -> None:
        try:
            outcome: tuple[dict[str, Any] | None, VramfitError | None] = (self._asked(check), None)
        except VramfitError as error:
            outcome = (None, error)
        with self._lock:
            check.answer, check.error = (None, None) if check.given_up else outcome
            check.running, check.ended, check.worker = False, time.monotonic(), None

    def _asked(self, check: _Check) -> dict[str, Any]:
        """The child's answer. Raises VramfitError with its reason, or ours."""
        try:
            worker = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                cwd=_ROOT,
                encoding="utf-8",
                errors="replace",
                env={**os.environ, "PYTHONUTF8": "1", "CUDA_VISIBLE_DEVICES": ""},
            )
        except OSError as error:
            raise InternalError(f"The check could not be started: {error.strerror or error}") from error
        with worker:
            with self._lock:
                check.worker = worker
                if check.given_up:  # before there was anything to end
                    worker.kill()
            try:
                said, complaint = worker.communicate(json.dumps(check.request), timeout=LIMIT_S)
            except subprocess.TimeoutExpired:
                worker.kill()
                raise UserError(
                    f"The check took more than {LIMIT_S:.0f} seconds and was given up",
                    "Try a smaller model or a shorter sequence.",
                ) from None
        return _answer(said, complaint)


def _answer(said: str, complaint: str) -> dict[str, Any]:
    lines = [line for line in said.splitlines() if line.strip()]
    try:
        found = json.loads(lines[-1])
    except (IndexError, ValueError):
        last = complaint.strip().splitlines()
        reason = last[-1][:300] if last else "it was ended before it answered"
        raise InternalError(f"The check did not come to an end: {reason}") from None
    if "error" in found:
        raise UserError(str(found["error"]["what"]), str(found["error"]["remedy"]))
    return dict(found)


def _end(check: _Check) -> None:
    """Give up a check under way; it can be asked for again."""
    check.given_up = check.running
    if check.worker is not None:
        with contextlib.suppress(OSError):
            check.worker.kill()


def model_config(model: ModelChoice) -> Mapping[str, Any]:
    """config.json of a model: the starter's, a folder's own, or made for the catalogue's shape. Raises ModelError."""
    if model.source == STARTER_MODEL:
        return MODEL_CONFIG
    architecture = architecture_of(model)  # what is wrong with a folder is said by this
    folder = typed_path(model.source)
    if is_folder(folder):
        values: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8-sig"))
        return values
    return config_values(architecture)


def _waiting(seconds: float, texts: Texts) -> str:
    said = html.escape(texts["check.running"].format(seconds=f"{seconds:.0f}"))
    return f'<div class="vf-progress-bar vf-moving"></div><div class="vf-sub">{said}</div>'


def compared_html(forecast: Forecast, found: Mapping[str, Any], texts: Texts, *, seconds: float) -> str:
    """The traced peak against the estimate, the same phase by phase, and what the device must have for it."""
    estimated = estimated_phases(forecast)
    peak, traced = forecast.memory.peak_bytes, int(found["peak_bytes"])
    said = texts["check.found"].format(
        traced=format_bytes(traced), estimated=format_bytes(peak), off=f"{(peak - traced) / traced:+.1%}"
    )
    rows = "".join(
        f"<tr><th>{html.escape(texts.phase(name))}</th><td>{_size(estimated.get(name))}</td>"
        f"<td>{_size(size)}</td><td>{_off(estimated.get(name), size)}</td></tr>"
        for name, size in found["phases"].items()
        if size or name in estimated
    )
    heads = _heads(("estimated", "traced", "off"), texts)
    how = texts["check.how"].format(
        blocks=found["traced_blocks"], operations=f"{found['operations']:,}", seconds=f"{seconds:.0f}"
    )
    return (
        f"<p><b>{html.escape(said)}</b></p>"
        f'<table class="vf-reasons vf-checked"><thead><tr><th></th>{heads}</tr></thead>'
        f"<tbody>{rows}</tbody></table>{_needs_html(forecast, found.get('needs'), texts)}"
        f'<div class="vf-plot vf-timeline"></div><p class="vf-sub">{html.escape(how)}</p>'
    )


def _needs_html(forecast: Forecast, needs: Mapping[str, Any] | None, texts: Texts) -> str:
    """From the traced tensors to the device: what its allocator reserves, what others take, the least with which the
    run completes, and the budget."""
    if needs is None:
        return ""
    memory, budget = forecast.memory, forecast.plan.budget_bytes
    kind = _kind(forecast)
    rows = [("tensors", memory.peak_bytes, int(needs["tensors"]))]
    if needs["reserved"] is not None:
        shown = int(needs["reserved"]) + int(needs["outside"])
        rows += [("reserved", None, int(needs["reserved"])), ("shown", None, shown)]
    rows.append(("least" if kind == "card" else f"least.{kind}", memory.device_bytes, int(needs["smallest"])))
    body = "".join(
        f"<tr><th>{html.escape(texts[f'check.{key}'])}</th><td>{_size(estimated)}</td><td>{_size(size)}</td></tr>"
        for key, estimated, size in rows
    )
    heads = _heads(("estimated", "checked"), texts)
    said = texts["check.completes" if needs["smallest"] <= budget else "check.short"].format(
        least=format_bytes(int(needs["smallest"])), budget=format_bytes(budget)
    )
    return (
        f"<p><b>{html.escape(said)}</b></p>"
        f'<table class="vf-reasons vf-checked"><thead><tr><th></th>{heads}</tr></thead>'
        f'<tbody>{body}</tbody></table><p class="vf-sub">{html.escape(texts[f"check.allocator.{kind}"])}</p>'
    )


def _kind(forecast: Forecast) -> str:
    """Whose memory it is: a processor's, of Apple's chips, or a card's, whose allocator is simulated."""
    return {"cpu": "cpu", "mps": "mps"}.get(forecast.plan.device.partition(":")[0], "card")


def _heads(keys: Iterable[str], texts: Texts) -> str:
    return "".join(f"<th>{html.escape(texts[f'check.{key}'])}</th>" for key in keys)


def estimated_phases(forecast: Forecast) -> dict[str, int]:
    """The estimate in the phases of a trace: those of single blocks and of the embedding are one backward."""
    found: dict[str, int] = {}
    for phase in forecast.memory.phases:
        name = "backward" if phase.name.startswith("backward") or phase.name == "embedding" else phase.name
        found[name] = max(found.get(name, 0), phase.total_bytes)
    return found


def _size(size: int | None) -> str:
    return "–" if size is None else format_bytes(size)


def _off(estimated: int | None, traced: int) -> str:
    return "–" if estimated is None or not traced else f"{(estimated - traced) / traced:+.1%}"


def timeline_figure(found: Mapping[str, Any], texts: Texts) -> dict[str, Any]:
    """Bytes alive, operation by operation, of the deepest trace: one line, coloured by nothing, phases on hover."""
    points = found["timeline"]
    top = max((point[1] for point in points), default=0)
    unit, name = (GIB, "GiB") if top >= GIB else (2**20, "MiB")
    return {
        "x": [point[0] for point in points],
        "y": [point[1] / unit for point in points],
        "text": [texts.phase(point[2]) for point in points],
        "unit": name,
        "title": texts["check.timeline"].format(blocks=found["traced_blocks"]),
    }
