"""Which kernel computes attention: as planned, and refused before anything is loaded where it is not installed."""

from __future__ import annotations

import importlib.util
from typing import Final

from vramfit.errors import ConfigError, Problem
from vramfit.planning.plan import Plan

_NAMES: Final = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}
_WORDS: Final = {
    "sdpa": "torch's scaled_dot_product_attention, which picks the device's fastest kernel and makes no scores",
    "eager": "written out, with all scores in memory",
    "flash": "FlashAttention 2",
}
FLASH_PACKAGE: Final = "flash_attn"


def implementation(plan: Plan) -> str:
    """transformers' word for `plan.attention`. Raises ConfigError for flash without its package."""
    if plan.attention == "flash" and importlib.util.find_spec(FLASH_PACKAGE) is None:
        raise ConfigError(
            [
                Problem(
                    field="memory.attention",
                    what=f"FlashAttention 2 needs the package {FLASH_PACKAGE}, which is not installed",
                    remedy="Choose sdpa, torch's own kernel of that kind; or install flash-attn for your torch.",
                )
            ]
        )
    return _NAMES[plan.attention]


def described(plan: Plan) -> str:
    """The kernel in words, for the log."""
    return f"{plan.attention}: {_WORDS[plan.attention]}"
