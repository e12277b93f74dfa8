"""What a config.json means that lacks a key: each family's defaults, nulls and old names (`config_defaults.json`)."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final

_FILE: Final = Path(__file__).with_name("config_defaults.json")
_SHOWN: Final = 40

ACTIVATIONS: Final = frozenset(
    [
        *("gelu", "gelu_10", "gelu_accurate", "gelu_fast", "gelu_new", "gelu_python", "gelu_python_tanh"),
        *("gelu_pytorch_tanh", "hardswish", "laplace", "leaky_relu", "linear", "mish", "prelu", "quick_gelu", "relu"),
        *("relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh", "xielu"),
    ]
)
"""The names of activations that `transformers` has."""


@dataclass(frozen=True, kw_only=True)
class KnownKeys:
    """The keys that `transformers` has for a family: their defaults, which may be null, and other names of them."""

    defaults: Mapping[str, Any]
    nullable: frozenset[str]
    names: Mapping[str, str]

    def needs_value(self, key: str) -> bool:
        """Whether null means nothing under `key`. Keys the family's class does not have are not judged."""
        return key in self.defaults and key not in self.nullable

    def renamed(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """`values` with the keys as they are read: another name counts where the key itself is not there."""
        found = dict(values)
        for other, key in self.names.items():
            if other in values and key not in values:
                found[key] = values[other]
        return found


@cache
def known_keys(family_name: str) -> KnownKeys:
    """Of one row of `families.FAMILIES`."""
    row = _rows()[family_name]
    return KnownKeys(defaults=row["defaults"], nullable=frozenset(row["nullable"]), names=row["names"])


@cache
def _rows() -> dict[str, dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = json.loads(_FILE.read_text(encoding="utf-8"))
    return rows


def tidy(value: object) -> str:
    """A value of a config.json as a message shows it: as JSON has it, and not too long."""
    if isinstance(value, str):
        text = repr(value)
    elif isinstance(value, int) and not isinstance(value, bool):
        text = _number(value)
    elif value is None or isinstance(value, bool):
        text = json.dumps(value)
    else:
        text = reprlib.repr(value)  # bounded: lists may be long, deep, and hold numbers of any length
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _number(value: int) -> str:
    """All digits of one that a person would read, else its size: Python has no float of more than 308 digits."""
    if abs(value) < 10**20:
        return str(value)
    return f"{value:.3g}" if abs(value) < 10**300 else "a number of more than 300 digits"
