"""The Runs page: the queue and the history. Drawn by assets/runs.js from what `runs_view` returns."""

from __future__ import annotations

import time
from typing import Any, Final

from jobs.store import Store
from ui.monitor import job_values
from ui.texts import Texts

SHOWN: Final = 200


def runs_view(store: Store, texts: Texts) -> dict[str, Any]:
    """The newest SHOWN runs, newest first, as plain JSON values."""
    return {"time": time.time(), "runs": [job_values(job, texts) for job in store.jobs(limit=SHOWN)]}


def exports(store: Store, texts: Texts) -> list[tuple[str, str]]:
    """(label, folder) of every finished run whose export is still there, newest first: models to go on from."""
    return [
        (texts["new.model.run"].format(id=job.id, name=job.name or job.id), str(job.folder / job.export))
        for job in store.jobs(limit=SHOWN)
        if job.export and (job.folder / job.export / "config.json").is_file()
    ]
