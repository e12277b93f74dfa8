"""The Runs page: the queue and the history. Drawn by assets/runs.js from what `runs_view` returns."""

from __future__ import annotations

import time
from collections import Counter
from typing import Any, Final

from jobs.store import Store
from ui.monitor import job_values, pause, queue_of, resume, stop, without_device
from ui.texts import Texts
from vramfit.errors import UserError

SHOWN: Final = 200


def runs_view(store: Store, texts: Texts) -> dict[str, Any]:
    """What is at work, then what waits in its order, then the newest SHOWN of the others, as plain JSON values."""
    queue, queued = queue_of(store, texts), store.queued_jobs(limit=SHOWN)
    runs = [job_values(job, texts, queue) for job in (*store.active_jobs(), *store.jobs_at_rest(limit=SHOWN))]
    waiting = [
        {
            **job_values(job, texts, queue),
            "place": place,
            "changeable": job.step == 0,
            "after": job.after,
            "after_anyway": job.after_anyway,
            "blocked": job.blocked or without_device(job, queue.devices),
        }
        for place, job in enumerate(queued, start=1)
    ]
    at_work = sum(run["active"] for run in runs)
    return {
        "time": time.time(),
        "held": queue.held,
        "silent": queue.silent,
        "unheard": queue.unheard,
        "devices": devices_text(store, texts),
        "runs": [*runs[:at_work], *waiting, *runs[at_work:]],
    }


def devices_text(store: Store, texts: Texts) -> list[str]:
    """For each device that has work or waits for some: what runs there, and how many runs wait for it."""
    active = {job.device or job.config.device: job.id for job in store.active_jobs()}
    waits = Counter(store.waiting_by_device())
    told = []
    for name in dict.fromkeys((*store.devices, *active, *sorted(waits))):
        if name not in active and not waits[name]:
            continue
        shown = texts["runs.device.auto"] if name == "auto" else name
        busy = texts["runs.device.runs"].format(id=active[name]) if name in active else texts["runs.device.free"]
        if name == "auto" or (store.devices and name not in store.devices):
            busy = "" if name == "auto" else texts["runs.device.gone"]
        some = texts["runs.device.waiting"].format(count=waits[name]) if waits[name] else ""
        told.append(
            texts["runs.device"].format(device=shown, what=texts["list.comma"].join(filter(None, (busy, some))))
        )
    return told


def act(store: Store, action: str, run: int, *, after: int = 0, anyway: bool = False) -> None:
    """What a button of the Runs or Monitor page asks for. Raises JobError, and UserError for an unknown action."""
    match action:
        case "stop":
            stop(store, run)
        case "pause":
            pause(store, run)
        case "resume":
            resume(store, run)
        case "up" | "down":
            store.move(run, later=action == "down")
        case "duplicate":
            store.duplicate(run)
        case "after":
            store.set_after(run, after or None, anyway=anyway)
        case "hold" | "release":
            store.hold_queue(action == "hold")
        case _:
            raise UserError(f"The page asks for {action!r}, which this version does not know", "Reload the page.")


def exports(store: Store, texts: Texts) -> list[tuple[str, str]]:
    """(label, folder) of every finished run whose export is still there, newest first: models to go on from."""
    return [
        (texts["new.model.run"].format(id=job.id, name=job.name or job.id), str(job.folder / job.export))
        for job in store.jobs_at_rest(limit=SHOWN)
        if job.export and (job.folder / job.export / "config.json").is_file()
    ]
