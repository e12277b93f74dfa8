"""python -m vramfit plan: the fastest settings that fit, each with its reason."""

from __future__ import annotations

import argparse

from vramfit.commands import wish
from vramfit.commands.estimate import describe, print_json, refusal, values_of
from vramfit.errors import WontFit
from vramfit.planning.reasons import ASSUMED

add_arguments = wish.add_arguments


def run(options: argparse.Namespace) -> None:
    """Print the plan as text or JSON. Raises UserError, WontFit with what would help."""
    try:
        forecast = wish.forecast_from(options)
    except WontFit as error:
        if options.json:
            print_json(refusal(error))
        raise
    if options.json:
        print_json(values_of(forecast))
        return
    for choice in forecast.plan.reasons:
        if choice.setting == ASSUMED:  # told below, with the estimate
            continue
        chosen_by = "you" if choice.fixed else "auto"
        print(f"{choice.setting:<20} {choice.value:<16} ({chosen_by}) {choice.reason}")
    if forecast.alternatives:
        print("\nOther ways")
    for other in forecast.alternatives:
        later = f" Not in this version: {', '.join(other.needs)}." if other.needs else ""
        print(f"  {other.name:<28} {other.reason}.{later}")
    print()
    print(describe(forecast))
