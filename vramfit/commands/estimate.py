"""python -m vramfit estimate: VRAM, RAM, disk, time and tokens/s of a run, before it starts."""

from __future__ import annotations

import argparse
import json
from typing import Any

from vramfit.commands import wish
from vramfit.errors import WontFit
from vramfit.planning.plan import Forecast
from vramfit.planning.reasons import ASSUMED
from vramfit.units import format_bytes, format_count, format_duration

add_arguments = wish.add_arguments


def run(options: argparse.Namespace) -> None:
    """Print the estimate as text or JSON. Raises UserError; WontFit after printing what the least plan would need."""
    try:
        forecast = wish.forecast_from(options)
    except WontFit as error:
        if options.json:
            print_json({**(error.forecast.to_json() if error.forecast else {}), **refusal(error)})
        elif error.forecast is not None:
            print(describe(error.forecast))
        raise
    if options.json:
        print_json(forecast.to_json())
    else:
        print(describe(forecast))


def print_json(values: dict[str, Any]) -> None:
    print(json.dumps(values, ensure_ascii=False, indent=1))


def refusal(error: WontFit) -> dict[str, Any]:
    """What `--json` says where nothing fits: the numbers that do not agree, and what would help."""
    return {
        "fits": False,
        "message": str(error),
        "needed_bytes": error.needed_bytes,
        "available_bytes": error.available_bytes,
        "tier": error.tier,
        "phase": str(error.phase),
        "suggestions": [str(suggestion) for suggestion in error.suggestions],
    }


def describe(forecast: Forecast) -> str:
    """The estimate in a few lines of text."""
    memory, speed, plan = forecast.memory, forecast.speed, forecast.plan
    workload, where = forecast.workload, "RAM" if plan.device == "cpu" else "Device memory"
    lines = [
        f"Data            {workload.sequences:,} sequences of {workload.mean_tokens:,.0f} tokens on average, "
        f"the longest {workload.longest_tokens:,}{'' if workload.exact else ' (estimated)'}",
        f"{where:<16}{format_bytes(memory.device_bytes)} of {format_bytes(plan.budget_bytes)} "
        f"({'fits' if forecast.fits else 'does not fit'})",
        f"  peak          {format_bytes(memory.peak_bytes)} allocated, in the phase {memory.peak.name} "
        f"({format_bytes(memory.low_bytes)} to {format_bytes(memory.high_bytes)})",
    ]
    lines += [f"    {kind:<12}{format_bytes(size)}" for kind, size in memory.peak.parts.items() if size]
    lines += [
        *([] if plan.device == "cpu" else [f"Host RAM        {format_bytes(memory.host_bytes)}"]),
        f"Disk            {format_bytes(memory.disk_bytes)}",
        f"Speed           {format_count(speed.tokens_per_s)} tokens/s, {speed.step_seconds:.2f} s a step "
        f"(rates: {speed.rate_source})",
        f"Time            {format_duration(forecast.seconds)} for {forecast.steps} steps",
    ]
    lines += [f"Assumed         {choice.reason.rstrip('.')}" for choice in plan.reasons if choice.setting == ASSUMED]
    return "\n".join(lines)
