"""Rows: how they are put, and what their columns become and are made of: numbers, JSON, sentences, settings."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from jobs.alert import TOLD, Alert
from jobs.job import State
from vramfit.config import RunConfig
from vramfit.errors import ConfigError
from vramfit.planning.plan import Forecast
from vramfit.sentences import Sentence, packed, unpacked


def put_rows(db: Any, table: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Insert rows of equal columns; a row with the same primary key is replaced."""
    if not rows:
        return
    names = list(rows[0])
    marks = ", ".join("?" * len(names))
    db.conn.executemany(
        f"INSERT OR REPLACE INTO {table} ({', '.join(names)}) VALUES ({marks})",
        [[finite(row[name]) for name in names] for row in rows],
    )


def finite(value: Any) -> Any:
    """NaN and infinities become NULL: no chart draws them and JSON has no word for them."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def in_states(states: Sequence[State]) -> str:
    return "(" + ", ".join(f"'{state}'" for state in states) + ")"


def as_json(values: Any) -> str | None:
    return None if values is None else json.dumps(values, ensure_ascii=False)


def forecast_values(forecast: Forecast | Mapping[str, Any] | None) -> dict[str, Any] | None:
    if forecast is None:
        return None
    return forecast.to_json() if isinstance(forecast, Forecast) else dict(forecast)


def alert_of(row: Mapping[str, Any]) -> Alert:
    values = dict(row)
    body = json.loads(values.pop("body"))
    return Alert(**values | {"body": {**body, **revived(body, values.pop("said"), *TOLD)}})


def said_of(texts: Mapping[str, Any], *names: str) -> str | None:
    """Those of the texts that any language can say, as JSON; None where none is one."""
    found = {name: packed(text) for name in names if isinstance(text := texts.get(name), Sentence)}
    return as_json(found or None)


def revived(texts: Mapping[str, Any], said: str | None, *names: str) -> dict[str, str | None]:
    """The texts with these names, as sentences where `said` (from `said_of`) tells how to say just that text."""
    known = {name: unpacked(found) for name, found in json.loads(said or "{}").items()}
    return {name: known[name] if name in known and known[name] == texts[name] else texts[name] for name in names}


@lru_cache(maxsize=512)
def config_of(text: str) -> tuple[RunConfig, ConfigError | None]:
    return RunConfig.from_stored(text)
