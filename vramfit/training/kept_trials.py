"""What trials on this machine found, kept as JSON in the cache: a file a trial, an entry for each kind of run."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

from vramfit import scratch
from vramfit.json_text import load_json


def remembered(place: Path, kind: str) -> Any:
    """What was kept under `kind`; None when nothing was, or it cannot be read."""
    return _all(place).get(kind)


def remember(place: Path, kind: str, found: dict[str, Any]) -> None:
    """Keep `found`. Where that cannot be written, it will be tried again."""
    with contextlib.suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        beside = scratch.beside(place)
        beside.write_text(json.dumps({**_all(place), kind: found}, indent=1), encoding="utf-8")
        beside.replace(place)


def _all(place: Path) -> dict[str, Any]:
    try:
        values = load_json(place.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
