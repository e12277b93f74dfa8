"""How long the planner takes, for every model of the catalogue: python bench/planner.py [--json] [--every 8]

It runs at every change in the form, so the goal is 100 ms for the slowest, without what earlier plans left in a cache.
A search does the same work every time, so what takes longer the first time is the machine's: of each kind of wish the
slowest are measured four times more, and the median counts. Kinds of wishes: the usual one on three cards; on all
cards; the longest sequences; eight cards that share a run; and wishes that were fixed and fit nowhere, which cost most,
as what would help is planned too.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.config import RunConfig
from vramfit.errors import ConfigError, WontFit
from vramfit.hardware.catalogue import cards, machine_with
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import ENGINE, SEVERAL_CARDS, Abilities
from vramfit.planning.block import block_memory
from vramfit.planning.memory import walks
from vramfit.planning.operations import block_work
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.stored import stored_as

METHODS = ("full", "lora", "qlora")
GOAL_MS = 100.0
LOOKED_AT_AGAIN = 5
LONG = 131_072


@dataclass(frozen=True, kw_only=True)
class Kind:
    """Wishes of a kind: the cards they are for and how many of each, tokens of a sequence, and what is fixed."""

    name: str
    cards: tuple[str, ...]
    count: int = 1
    length: int = 2048
    fixed: dict[str, Any] = field(default_factory=dict)

    @property
    def abilities(self) -> Abilities:
        return SEVERAL_CARDS if self.count > 1 else ENGINE


KINDS = (
    Kind(name="usual", cards=("RTX 3060", "RTX 4090", "A100 80GB")),
    Kind(name="all cards", cards=tuple(card.name for card in cards())),
    Kind(name="131,072 tokens", cards=("RTX 4090",), length=LONG),
    Kind(name="8 cards", cards=("RTX 4090",), count=8),
    Kind(name="fixed, and too large", cards=("RTX 4090",), length=LONG, fixed={"memory": {"activations": "keep"}}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="one model in N; the usual wishes: all")
    options = parser.parse_args()
    figures = [figure for kind in KINDS for figure in measured(kind, 1 if kind.name == "usual" else options.every)]
    if options.json:
        print(json.dumps(figures, indent=1))
        return
    for figure in figures:
        print(f"{figure['name']:<90}{figure['value']:>10.1f}")


def measured(kind: Kind, every: int) -> list[dict[str, Any]]:
    """How many plans, their median, and the slowest."""
    names = [name for name in catalogue.known()[::every] if _shape(name).max_position >= kind.length]
    wishes = list(itertools.product(names, kind.cards, METHODS))
    found = {wish: seconds(kind, *wish) for wish in wishes}
    took = {wish: cost for wish, (cost, _) in found.items()}
    for again in sorted(took, key=lambda wish: took[wish], reverse=True)[:LOOKED_AT_AGAIN]:
        took[again] = statistics.median([took[again], *(seconds(kind, *again)[0] for _ in range(4))])
    slowest = max(took, key=lambda wish: took[wish])
    refused = sum(not fits for _, fits in found.values())
    worst = 1000 * took[slowest]
    return [
        {"name": f"{kind.name}: plans", "value": len(took), "goal": None, "met": None},
        {"name": f"{kind.name}: of them refused", "value": refused, "goal": None, "met": None},
        {"name": f"{kind.name}: median ms", "value": 1e3 * statistics.median(took.values()), "goal": None, "met": None},
        {
            "name": f"{kind.name}: slowest ms ({', '.join(slowest)})",
            "value": worst,
            "goal": GOAL_MS,
            "met": worst <= GOAL_MS,
        },
    ]


def seconds(kind: Kind, name: str, card: str, method: str) -> tuple[float, bool]:
    """(process time of one plan, or of finding out that none fits; whether one does)."""
    architecture = _shape(name)
    wish = {"method": method, "model": {"source": name}, "data": {"max_length": kind.length}, **kind.fixed}
    mean = kind.length if kind.length == LONG else 700
    work = Workload(sequences=10_000, mean_tokens=mean, longest_tokens=kind.length)
    machine = machine_with(card, count=kind.count, ram_gib=512 if kind.count > 1 else None)
    config = RunConfig.parse(wish)
    for known in (block_memory, block_work, walks, stored_as):
        known.cache_clear()
    began = time.process_time()
    try:
        forecast_run(config, architecture=architecture, machine=machine, workload=work, abilities=kind.abilities)
    except (WontFit, ConfigError):
        return time.process_time() - began, False
    return time.process_time() - began, True


def _shape(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


if __name__ == "__main__":
    main()
