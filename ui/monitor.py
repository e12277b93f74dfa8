"""The Monitor page: what one run looks like now. The page is drawn by assets/monitor.js from what `run_view` returns.

Nothing here owns a run: it reads rows and asks the store to stop. A reader passes the cursors of its last answer and
gets only what is new, so a tick costs a few hundred bytes however long the run is.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from jobs import processes
from jobs.job import UNSUCCESSFUL, Job, Saves, Series, Streamed
from jobs.store import SUPERVISOR_LEASE, Store
from jobs.supervisor import LEASE_STALE_S
from ui.charts import (
    DRIFT_COLUMNS,
    SERIES_COLUMNS,
    TELEMETRY_COLUMNS,
    WAIT_COLUMNS,
    columns,
    drift_figure,
    figures,
    loss_scale_figure,
    waits_figure,
    with_compute,
)
from ui.texts import Texts
from vramfit.config import STARTER_MODEL
from vramfit.errors import JobError
from vramfit.places import is_folder
from vramfit.training.wear import share_of_drive
from vramfit.units import format_bytes, format_percent, format_terabytes

SERIES_POINTS: Final = 1200
TELEMETRY_POINTS: Final = 600
DRIFT_POINTS: Final = 600
LOG_LINES: Final = 200


@dataclass(frozen=True, kw_only=True)
class Cursor:
    """How far a reader has come. Zero and None: nothing yet, send the whole (thinned) history."""

    series_after: int = 0
    series_stride: int | None = None
    telemetry_after: int = 0
    telemetry_stride: int | None = None
    drift_after: int = 0
    drift_stride: int | None = None
    revision: int | None = None
    events_after: int = 0
    samples_known: int = -1


@dataclass(frozen=True, kw_only=True)
class Queue:
    """Why the queue starts nothing now, because it is held or because its supervisor is `unheard`, and why nothing that
    needs a card, each "" where it does; and the devices there are, () while nobody looked."""

    held: str
    unheard: str
    silent: str
    devices: Sequence[str]


def choose_run(store: Store, wanted: int) -> Job | None:
    """The run `wanted`; with 0 the one at work, else the newest, else None.

    Raises JobError when the wanted one does not exist.
    """
    if wanted:
        return store.job(wanted)
    active = store.active_jobs()
    if active:
        return active[0]
    newest = store.jobs(limit=1)
    return newest[0] if newest else None


def run_view(store: Store, wanted: int, cursor: Cursor, texts: Texts, *, with_log: bool) -> dict[str, Any]:
    """Everything the page needs about one run, from `cursor` on. Plain JSON values. Raises JobError."""
    job = choose_run(store, wanted)
    if job is None:
        return {"job": None, "time": time.time()}
    drifts, streamed = _drifts(store, job, cursor), store.streamed(job.id)
    return {
        "time": time.time(),
        "job": {
            **job_values(job, texts, queue_of(store, texts)),
            "skipped_steps": store.skipped_steps(job.id),
        },
        "figures": _figures(job, texts, checked=drifts.rows > 0, streams=streamed.steps > 0),
        "notes": {
            "waits": written_text(job, streamed, texts),
            "speed": waited_text(store.saves(job.id), texts),
        },
        "series": _series(store, job, cursor, streams=streamed.steps > 0),
        "telemetry": _telemetry(store, job, cursor),
        "drift": _source(drifts, DRIFT_COLUMNS),
        "evaluations": [{"step": found.step, "loss": found.loss} for found in store.evaluations(job.id)],
        "samples": _samples(store, job, cursor),
        "events": [_event(event) for event in store.events(job.id, after=cursor.events_after)],
        "log": store.log_tail(job.id, LOG_LINES) if with_log else None,
    }


def job_values(job: Job, texts: Texts, queue: Queue | None = None) -> dict[str, Any]:
    """A job as the pages show it; Runs and Monitor use the same words for it. `queue`: what holds up those that
    wait."""
    config = job.config
    # Someone may have moved or deleted the result; then there is nothing to go on from.
    export = job.folder / job.export if job.export and is_folder(job.folder / job.export) else None
    return {
        "id": job.id,
        "name": job.name or texts["run.untitled"].format(id=job.id),
        "state": job.state,
        "active": job.active,
        "foreground": job.foreground,
        "final": job.final,
        "attempt": job.attempt,
        "phase": _phase(job),
        "step": job.step,
        "total_steps": job.total_steps,
        "created_at": job.created_at,
        "started_at": job.started_at,
        "finished_at": job.finished_at,
        "heartbeat_at": job.heartbeat_at,
        "final_loss": job.final_loss,
        "eval_loss": job.eval_loss,
        "peak_allocated_bytes": job.peak_allocated_bytes,
        "export": str(export) if export else None,
        "tunable": export is not None and config.model.source == STARTER_MODEL,
        "failure": job.failure and texts.said(job.failure),
        "remedy": job.remedy and texts.said(job.remedy),
        "stop_requested": job.stop_requested,
        "resumable": job.resumable,
        "waits": "" if queue is None else waits_text(job, texts, queue),
        "folder": str(job.folder),
        "method": texts.value("method", config.method),
        "model": short_model(config.model.source),
        "device": _device(job),
        "has_card": has_card(job),
        "predicted_bytes": _forecast(job, "memory", "peak_bytes"),
    }


def without_device(job: Job, devices: Sequence[str]) -> bool:
    """Whether a queued job waits for a device that the machine does not have now."""
    if job.state != "queued" or not devices or job.awaited_device in ("auto", *devices):
        return False
    return job.config.device != "auto" or all(name == "cpu" for name in devices)


def waits_text(job: Job, texts: Texts, queue: Queue) -> str:
    """Why a queued job does not start though it may be its turn; "" when nothing holds it up."""
    if job.blocked:
        ended = job.after_state in UNSUCCESSFUL
        state = texts[f"state.{job.after_state}"]
        return texts["runs.waits.ended" if ended else "runs.waits"].format(id=job.after, state=state)
    if job.state != "queued":
        return ""
    if queue.unheard:
        return queue.unheard
    if queue.silent and job.config.device != "cpu":
        return queue.silent
    if without_device(job, queue.devices):
        there = texts["list.comma"].join(queue.devices)
        return texts["runs.waits.device"].format(device=job.awaited_device, there=there)
    return queue.held


def queue_of(store: Store, texts: Texts) -> Queue:
    """What holds waiting jobs up now."""
    why, since = store.queue_waits, store.driver_silent_since
    held = texts.said(why) if why is not None else texts["runs.held"] if store.queue_held else ""
    at = time.strftime("%Y-%m-%d %H:%M", time.localtime(since))
    silent = "" if since is None else texts["runs.silent"].format(time=at)
    return Queue(held=held, unheard=unheard_text(store, texts), silent=silent, devices=store.devices)


def unheard_text(store: Store, texts: Texts) -> str:
    """What is said of a supervisor that lives and does not work: stopped, or in a call of the system that does not
    return. "" of one that works; one that is dead is replaced by the panel, one of another boot after a while."""
    lease = store.lease(SUPERVISOR_LEASE)
    if lease is None:
        return ""
    who, beat = lease
    seconds = store.clock() - beat
    if seconds < LEASE_STALE_S or not processes.alive(who):
        return ""
    return texts["runs.unheard"].format(seconds=f"{seconds:.0f}", pid=processes.pid_of(who))


def has_card(job: Job) -> bool:
    """False when the run trains on the CPU. Known from the forecast; before there is one, from the config."""
    device = _device(job)
    return device not in ("cpu", "")


def short_model(source: str) -> str:
    """A model's name without its folders: the last part of a path, a hub id or "starter" as they are."""
    path = Path(source)
    if not path.is_absolute():
        return source
    # A finished run's export lies in DIR/runs/0003-name/export: its run's folder says more than "export".
    return path.parent.name if path.name == "export" else path.name


def written_text(job: Job, streamed: Streamed, texts: Texts) -> str:
    """What the run has written to disk, and what that makes of a drive's life at its end; "" where it wrote nothing.

    Steps that were done again after a resume count once.
    """
    if not streamed.written_bytes:
        return ""
    each = streamed.written_bytes / streamed.steps
    ended = job.state == "succeeded" or job.step >= job.total_steps
    whole = streamed.written_bytes + (0 if ended else each * (job.total_steps - job.step))
    return texts["monitor.written.ended" if ended else "monitor.written"].format(
        so_far=format_bytes(streamed.written_bytes),
        steps=f"{streamed.steps:,}",
        each=format_bytes(each),
        all=f"{job.total_steps:,}",
        whole=format_terabytes(whole),
        share=format_percent(share_of_drive(whole)),
    )


def waited_text(saves: Saves, texts: Texts) -> str:
    """How long checkpoints held the training up; "" before there was one."""
    if not saves.checkpoints:
        return ""
    return texts["monitor.saves"].format(
        count=f"{saves.checkpoints:,}", seconds=f"{saves.seconds:.1f}", each=f"{saves.seconds / saves.checkpoints:.2f}"
    )


def stop(store: Store, run: int) -> None:
    """Ask a run to save and end; a queued one is cancelled. Raises JobError."""
    store.request_stop(run)


def pause(store: Store, run: int) -> None:
    """Ask a run to save, give its memory back and wait to be resumed. Raises JobError."""
    store.request_pause(run)


def resume(store: Store, run: int) -> None:
    """Put a stopped or broken run back into the queue, to go on from its checkpoint. Raises JobError.

    One that is just ending as asked goes back once it has; asked twice it is queued once.
    """
    job = store.job(run)
    if job.lost_folder and job.final:
        raise JobError(job.lost_folder, "Put the folder back, or use its settings for a new run.")
    if job.final and not job.resumable:
        raise JobError(f"Run {run} is {job.state} and has no checkpoint to go on from", "Start it again as a new run.")
    store.enqueue(run)


def _series(store: Store, job: Job, cursor: Cursor, *, streams: bool) -> dict[str, Any]:
    found = store.series(
        job.id,
        after=cursor.series_after,
        stride=cursor.series_stride,
        revision=cursor.revision,
        max_points=SERIES_POINTS,
    )
    wanted = (*SERIES_COLUMNS, *WAIT_COLUMNS) if streams else SERIES_COLUMNS
    return {
        "columns": columns(with_compute(found.columns), wanted),
        "last": columns(with_compute(found.tail), wanted),
        "cursor": found.cursor,
        "stride": found.stride,
        "revision": found.revision,
        "reset": found.reset,
    }


def _telemetry(store: Store, job: Job, cursor: Cursor) -> dict[str, Any]:
    found = store.telemetry(
        job.id,
        after=cursor.telemetry_after,
        stride=cursor.telemetry_stride,
        revision=cursor.revision,
        max_points=TELEMETRY_POINTS,
    )
    return _source(found, TELEMETRY_COLUMNS)


def _drifts(store: Store, job: Job, cursor: Cursor) -> Series:
    return store.drifts(
        job.id,
        after=cursor.drift_after,
        stride=cursor.drift_stride,
        revision=cursor.revision,
        max_points=DRIFT_POINTS,
    )


def _source(found: Series, wanted: Sequence[str]) -> dict[str, Any]:
    return {
        "columns": columns(found.columns, wanted),
        "cursor": found.cursor,
        "stride": found.stride,
        "reset": found.reset,
    }


def _samples(store: Store, job: Job, cursor: Cursor) -> list[dict[str, Any]] | None:
    """All samples, or None when the reader has them already (there are few, and none ever changes)."""
    found = store.samples(job.id)
    if len(found) == cursor.samples_known:
        return None
    return [
        {"step": sample.step, "stage": sample.stage, "prompt": sample.prompt, "text": sample.text} for sample in found
    ]


def _event(event: Any) -> dict[str, Any]:
    return {
        "id": event.id,
        "time": event.time,
        "level": event.level,
        "kind": event.kind,
        "message": event.message,
        "step": event.step,
    }


def _figures(job: Job, texts: Texts, *, checked: bool, streams: bool) -> list[dict[str, Any]]:
    """The charts of this run: waits where its model `streams`, a loss scale where it computes in fp16, the drift once
    it was `checked` against fp32."""
    found = figures(
        has_card=has_card(job),
        predicted_bytes=_forecast(job, "memory", "peak_bytes"),
        budget_bytes=_forecast(job, "plan", "budget_bytes"),
        texts=texts,
    )
    waits = [waits_figure(texts)] if streams else []
    scale = [loss_scale_figure(texts)] if _forecast(job, "plan", "compute") == "fp16" else []
    drift = [drift_figure(job.config.health.drift_limit, texts)] if checked else []
    return [*found, *waits, *scale, *drift]


def _phase(job: Job) -> dict[str, Any] | None:
    if job.phase is None:
        return None
    phase = job.phase
    return {"name": phase.name, "done": phase.done, "total": phase.total, "unit": phase.unit, "detail": phase.detail}


def _device(job: Job) -> str:
    """What torch calls the run's device; "" while it is not decided."""
    planned = _forecast(job, "plan", "device")
    return str(planned or ("" if job.config.device == "auto" else job.config.device))


def _forecast(job: Job, part: str, name: str) -> Any:
    return job.forecast.get(part, {}).get(name) if job.forecast else None
