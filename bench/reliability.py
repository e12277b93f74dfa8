"""`docs/reliability.md`: every point x kind x seed, gone through: python bench/reliability.py [--chosen] [--json]

Takes half an hour: each starts two supervisors and two trainers. `--chosen` tries those that the tests try. Further
seeds come last; `--minutes` begins no fault after so many, and the page says how many were left out; `--keep FILE` adds
each outcome to a file, and tries none again that is in it.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.faults.scenario import (  # noqa: E402
    ALL,
    CHOSEN,
    SEEDED,
    STEPS,
    Fault,
    Outcome,
    config_of,
    go_through,
    make_model,
    make_rows,
    undisturbed,
)
from vramfit.faults import KINDS, POINTS  # noqa: E402

PAGE = ROOT / "docs" / "reliability.md"
AT_ONCE = 2
MEANING = {
    "kill": "SIGKILL: the process is gone without a word, as after a power cut",
    "error": "an exception nobody foresaw (RuntimeError)",
    "enospc": "the disk is full (ENOSPC)",
    "edquot": "the quota of the disk is used up (EDQUOT)",
    "eio": "the disk fails (EIO)",
    "emfile": "the process may open no further file (EMFILE)",
}
CASES = "\n## Cases\n"
HEAD = """# Reliability: what was struck, and what was left

Written by `python bench/reliability.py`, never by hand, save for the section Cases at the end, which it leaves as it
is. A run of {steps} steps goes through a real supervisor and a real trainer; a fault strikes at a named point
(`vramfit/faults.py`), at an arrival that a seed draws; the supervisor is killed; a second one, without the fault, takes
over; a run that ended is put back into the queue, as Resume does. Then it must hold that

- no job is lost or doubled, and the one that waits aside is as it was;
- the job succeeds, at once or from a state that Resume takes, with a cause and a remedy told;
- never are two trainers alive on the data folder;
- right after the fault the newest complete checkpoint loads, every tensor, and none is damaged;
- a full disk, or a quota that is used up, leaves the run paused, if it ends it; where no trainer can be started for it,
  or for want of files, the queue waits, says why and goes on by itself;
- every step is on record exactly once; losses, evaluations and final weights are those of an undisturbed run, bit for
  bit;
- nothing unfinished is left in the run's folder, and no process; the database passes its check.

A job that is `starting` or `running` after the fault was put back by the supervisor itself, or never ended.

"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Go through the pairs and write the page. Exit code 1 when an invariant did not hold."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--chosen", action="store_true", help="only those that the tests try; writes no page")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON; writes no page")
    parser.add_argument("--minutes", type=float, default=math.inf, help="begin no fault after so many")
    parser.add_argument("--keep", type=Path, help="a file of outcomes, a line each, that is gone on with")
    options = parser.parse_args(arguments)
    known = kept(options.keep)
    left = [fault for fault in (CHOSEN if options.chosen else ALL) if fault not in known]
    found = gone_through(left, until=time.monotonic() + 60 * options.minutes, keep=options.keep)
    outcomes = [*known.values(), *found]
    if options.json:
        print(json.dumps([dataclasses.asdict(outcome) for outcome in outcomes], indent=1))
    elif not options.chosen:
        written = page(outcomes) + cases(PAGE.read_text(encoding="utf-8"))
        PAGE.write_text(written, encoding="utf-8")
    return 1 if any(outcome.violations for outcome in outcomes) else 0


def kept(path: Path | None) -> dict[Fault, Outcome]:
    """The outcomes in a file, by their faults; none where there is no file yet."""
    if path is None or not path.is_file():
        return {}
    found = [Outcome(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return {(outcome.point, outcome.kind, outcome.seed): outcome for outcome in found}


def gone_through(faults: Sequence[Fault], *, until: float = math.inf, keep: Path | None = None) -> list[Outcome]:
    """The outcome of each, in order, AT_ONCE of them at a time; of those that would begin after `until` none. Each is
    added to the file `keep`."""
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(AT_ONCE) as pool:
        folder = Path(scratch).resolve()
        config = config_of(make_model(folder / "model", folder / "cache"), make_rows(folder / "rows.jsonl"))
        reference = undisturbed(config, folder / "undisturbed")

        def one(number: int, fault: Fault) -> Outcome | None:
            if time.monotonic() > until:
                return None
            outcome = go_through(*fault, config=config, folder=folder / str(number), reference=reference)
            told = f"{outcome.first_state}, {outcome.violations or 'holds'}"
            print(f"{', '.join(map(str, fault))}: {told}", file=sys.stderr, flush=True)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(dataclasses.asdict(outcome)) + "\n")
            if not outcome.violations:  # what is left of the others is looked at
                shutil.rmtree(folder / str(number), ignore_errors=True)
            return outcome

        begun = [pool.submit(one, number, fault) for number, fault in enumerate(faults)]
        return [outcome for each in begun if (outcome := each.result()) is not None]


def page(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as Markdown: the figures, then a row for each point and a column for each kind."""
    struck = sum(outcome.struck for outcome in outcomes)
    wrong = [outcome for outcome in outcomes if outcome.violations]
    states = Counter(outcome.first_state for outcome in outcomes)
    timed = [outcome.seconds for outcome in outcomes if outcome.seconds] or [0.0]
    found = defaultdict[tuple[str, str], list[Outcome]](list)
    for outcome in outcomes:
        found[outcome.point, outcome.kind].append(outcome)
    lines = [
        HEAD.format(steps=STEPS),
        f"Date: {time.strftime('%Y-%m-%d')}. Machine: {platform.system()} {platform.machine()}, Python "
        f"{platform.python_version()}, the run on the CPU in fp32.",
        "",
        "| figure | value |",
        "|---|---:|",
        f"| points | {len({outcome.point for outcome in outcomes})} of {len(POINTS)} |",
        f"| kinds | {len({outcome.kind for outcome in outcomes})} of {len(KINDS)} |",
        f"| seeds | {len({outcome.seed for outcome in outcomes})}, of the kinds {', '.join(SEEDED)} |",
        f"| faults tried | {len(outcomes)} of {len(ALL)} |",
        f"| faults that struck | {struck} |",
        f"| trainers started | {sum(outcome.attempts for outcome in outcomes)} |",
        f"| seconds of a fault, median of {len(timed)} | {statistics.median(timed):.0f} |",
        f"| **violations** | **{sum(len(outcome.violations) for outcome in outcomes)}** |",
        "",
        "How the job stood after the fault: "
        + ", ".join(f"{state} {count}" for state, count in states.most_common())
        + ". In each cell: that state, and how many attempts the run took, for each seed (a point that is arrived at "
        "once has one).",
        "",
        *(f"- `{kind}`: {meaning}" for kind, meaning in MEANING.items()),
        "",
        f"| point | {' | '.join(KINDS)} |",
        f"|---|{'---|' * len(KINDS)}",
    ]
    for point in POINTS:
        cells = ["; ".join(map(_cell, found[point, kind])) or "not tried" for kind in KINDS]
        lines.append(f"| {point} | {' | '.join(cells)} |")
    lines += ["", "## Violations", "", *(_told(outcome) for outcome in wrong)] if wrong else []
    return "\n".join(lines) + "\n"


def cases(before: str) -> str:
    """The section Cases of the page as it was, which a person writes, with an empty line before it; "" without one."""
    _, heading, rest = before.partition(CASES)
    return heading + rest


def _cell(outcome: Outcome) -> str:
    return f"{outcome.first_state}, {outcome.attempts}" + (" **!**" if outcome.violations else "")


def _told(outcome: Outcome) -> str:
    return f"- {outcome.point}, {outcome.kind}, seed {outcome.seed}: {'; '.join(outcome.violations)}"


if __name__ == "__main__":
    sys.exit(main())
