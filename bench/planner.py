"""How long the planner takes, for every model of the catalogue: python bench/planner.py [--json]

It runs at every change in the form, so the goal is 100 ms for the slowest, without what earlier plans left in a cache.
A search does the same work every time, so what takes longer the first time is the machine's: the slowest twenty are
measured four times more, and the median counts.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.config import RunConfig
from vramfit.errors import WontFit
from vramfit.hardware.catalogue import find, machine_with
from vramfit.models import catalogue
from vramfit.planning.block import block_memory
from vramfit.planning.memory import walks
from vramfit.planning.operations import block_work
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.stored import stored_as

CARDS = ("RTX 3060", "RTX 4090", "A100 80GB")
METHODS = ("full", "lora", "qlora")
WORKLOAD = Workload(sequences=10_000, mean_tokens=700, longest_tokens=2048)
GOAL_MS = 100.0
LOOKED_AT_AGAIN = 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    took = {
        (name, card, method): seconds(name, card, method)
        for name in catalogue.known()
        for card in CARDS
        for method in METHODS
    }
    for again in sorted(took, key=lambda key: took[key], reverse=True)[:LOOKED_AT_AGAIN]:
        took[again] = statistics.median([took[again], *(seconds(*again) for _ in range(4))])
    slowest = max(took, key=lambda key: took[key])
    figures = [
        {"name": "plans", "value": len(took), "goal": None, "met": None},
        {"name": "median ms", "value": 1000 * statistics.median(took.values()), "goal": None, "met": None},
        {
            "name": f"slowest ms ({', '.join(slowest)})",
            "value": 1000 * took[slowest],
            "goal": GOAL_MS,
            "met": 1000 * took[slowest] <= GOAL_MS,
        },
    ]
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for figure in figures:
        print(f"{figure['name']:<70}{figure['value']:>10.1f}")


def seconds(name: str, card: str, method: str) -> float:
    """Process time of one plan, or of finding out that none fits."""
    architecture, found = catalogue.find(name), find(card)
    assert architecture is not None and found is not None
    config = RunConfig.parse({"method": method, "model": {"source": name}})
    for known in (block_memory, block_work, walks, stored_as):
        known.cache_clear()
    began = time.process_time()
    with contextlib.suppress(WontFit):
        forecast_run(config, architecture=architecture, machine=machine_with(found), workload=WORKLOAD)
    return time.process_time() - began


if __name__ == "__main__":
    main()
