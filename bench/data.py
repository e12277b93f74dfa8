"""Reading and tokenising on a JSONL made for it: python bench/data.py [--megabytes 200] [--models starter FOLDER]

Each measurement is a process of its own, so that its peak memory is its own. Where the package `datasets` is installed,
its `map` does the same work for comparison: load the file, chat template, token ids. (No loss mask: ours makes one
besides.) The two are measured in turn, in pairs, so that what else the machine does falls on both.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from vramfit.config import STARTER_MODEL, DataChoice, ModelChoice
from vramfit.data import rendering
from vramfit.starter.corpus import corpus_rows

POOL_ROWS = 4000
ANSWER_LETTERS = 240

Work = Callable[[Path, str, Path], tuple[Callable[[], int], str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200, help="size of the file that is read (10^6 bytes)")
    parser.add_argument("--token-megabytes", type=int, default=20, help="size of the file that is tokenised")
    parser.add_argument(
        "--models", nargs="+", default=[STARTER_MODEL], help="whose tokenizers (default: the starter's)"
    )
    parser.add_argument("--pairs", type=int, default=3, help="how often each tokenising is measured")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", nargs=4, metavar=("WHAT", "FILE", "MODEL", "CACHE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        what, path, model, cache = options.one
        print(json.dumps(measured(MEASUREMENTS[what], Path(path), model, Path(cache))))
        return
    with tempfile.TemporaryDirectory() as folder:
        found = measure_all(Path(folder), options)
    print(json.dumps(found) if options.json else described(found))


def measure_all(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    """Every measurement by name."""
    large, small = folder / "large.jsonl", folder / "small.jsonl"
    found: dict[str, Any] = {}
    if options.megabytes:
        write_rows(large, options.megabytes)
        found["survey"] = in_child("survey", large, STARTER_MODEL, folder / "cache")
        large.unlink()
    write_rows(small, options.token_megabytes)
    names = ["prepare", *(["datasets", "datasets, 2 processes"] if find_spec("datasets") else [])]
    for model in options.models:
        rounds: list[dict[str, Any]] = []
        for _ in range(options.pairs):
            with tempfile.TemporaryDirectory(dir=folder) as cache:
                rounds.append({name: in_child(name, small, model, Path(cache)) for name in names})
                again = in_child("prepare", small, model, Path(cache))
        for name in names:
            found[f"{model}: {name}"] = median_of([one[name] for one in rounds])
        found[f"{model}: prepare, second time"] = again
        for name in names[1:]:
            found[f"{model}: prepare against {name}"] = {
                kind: median(one[name][kind] / one["prepare"][kind] for one in rounds)
                for kind in ("seconds", "cpu_seconds")
            }
    return found


def median_of(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """The one of median time."""
    return sorted(measurements, key=lambda one: float(one["seconds"]))[len(measurements) // 2]


def write_rows(path: Path, megabytes: int) -> None:
    """A question and an answer of some 400 bytes a row, each row another text; the same file every time."""
    rng = random.Random(7)
    stories = [
        row["text"] for _, row in zip(range(POOL_ROWS), corpus_rows("starter:stories"), strict=False) if "text" in row
    ]
    left, number = megabytes * 1_000_000, 0
    with path.open("w", encoding="utf-8", newline="\n") as file:
        while left > 0:
            story = rng.choice(stories)
            at = rng.randrange(max(len(story) - ANSWER_LETTERS, 1))
            row = {
                "instruction": f"Go on with story {number}: {story[:at][-60:]}",
                "input": "",
                "output": story[at:][:ANSWER_LETTERS],
            }
            line = json.dumps(row, ensure_ascii=False) + "\n"
            file.write(line)
            left -= len(line.encode())
            number += 1


def in_child(what: str, path: Path, model: str, cache: Path) -> dict[str, Any]:
    """One measurement in a process of its own."""
    command = [sys.executable, __file__, "--one", what, str(path), model, str(cache)]
    surroundings = {**os.environ, "HF_HOME": str(cache / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=surroundings, encoding="utf-8")
    values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return values


def measured(work: Work, path: Path, model: str, cache: Path) -> dict[str, Any]:
    """What the work takes, its imports and tokenizer loaded before, and what it counts a second."""
    run, unit = work(path, model, cache)
    wall, cpu, before = time.perf_counter(), cpu_seconds(), peak_bytes()
    count = run()
    seconds = time.perf_counter() - wall
    rendering.stop()  # the process that renders counts when it has ended
    return {
        "seconds": seconds,
        "cpu_seconds": cpu_seconds() - cpu,
        unit: count,
        f"{unit}_per_s": count / seconds,
        "megabytes_per_s": path.stat().st_size / 1e6 / seconds,
        "peak_bytes_before": before,
        "peak_bytes": peak_bytes(),
        "child_peak_bytes": peak_bytes(children=True),
    }


def cpu_seconds() -> float:
    """Of this process and of its children that have ended."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system


def peak_bytes(*, children: bool = False) -> int:
    """The process's highest resident set, or that of the largest of its children that have ended; 0 where the system
    does not tell (Windows)."""
    try:
        import resource
    except ImportError:
        return 0
    scale = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_CHILDREN if children else resource.RUSAGE_SELF).ru_maxrss * scale


def reads(path: Path, model: str, cache: Path) -> tuple[Callable[[], int], str]:
    """The survey of the data card."""
    from vramfit.data.read import survey

    return lambda: survey([path]).rows, "rows"


def prepares(path: Path, model: str, cache: Path) -> tuple[Callable[[], int], str]:
    """What a run does: two passes, template, token ids, mask, and the result on disk."""
    from vramfit.data.prepare import prepare
    from vramfit.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(ModelChoice(source=model), cache)
    choice = DataChoice(paths=(str(path),), eval_share=0.0)

    def run() -> int:
        made = prepare(choice, tokenizer=tokenizer, max_length=2048, seed=1, cache=cache)
        return sum(len(example) for example in made.train)

    return run, "tokens"


def maps(path: Path, model: str, cache: Path, processes: int | None = None) -> tuple[Callable[[], int], str]:
    """`datasets.map`, in batches of 1,000 rows."""
    import datasets

    from vramfit.data.conversations import Encoder
    from vramfit.models.tokenizer import load_tokenizer

    datasets.disable_progress_bars()
    datasets.disable_caching()  # or the second measurement finds the first one's result
    tokenizer = load_tokenizer(ModelChoice(source=model), cache)
    Encoder(tokenizer)  # gives a tokenizer without chat template ours

    def encode(batch: dict[str, list[str]]) -> dict[str, Any]:
        turns = [
            [{"role": "user", "content": asked}, {"role": "assistant", "content": answer}]
            for asked, answer in zip(batch["instruction"], batch["output"], strict=True)
        ]
        texts = tokenizer.apply_chat_template(turns, tokenize=False)
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    def run() -> int:
        rows = datasets.load_dataset("json", data_files=str(path), split="train")
        made = rows.map(encode, batched=True, remove_columns=rows.column_names, num_proc=processes)
        return sum(len(ids) for batch in made.iter(1000) for ids in batch["input_ids"])

    return run, "tokens"


MEASUREMENTS: dict[str, Work] = {
    "survey": reads,
    "prepare": prepares,
    "datasets": maps,
    "datasets, 2 processes": lambda path, model, cache: maps(path, model, cache, 2),
}


def described(found: dict[str, Any]) -> str:
    """One line each."""
    lines = []
    for name, values in found.items():
        if "peak_bytes" not in values:
            lines.append(f"{name}: {values['seconds']:.2f} times as fast ({values['cpu_seconds']:.2f} by CPU-s)")
            continue
        unit = "rows" if "rows" in values else "tokens"
        lines.append(
            f"{name}: {values['seconds']:.1f} s ({values['cpu_seconds']:.1f} CPU-s), "
            f"{values['megabytes_per_s']:.1f} MB/s, "
            f"{values[unit]:,} {unit}, {values[unit + '_per_s']:,.0f} {unit}/s, "
            f"peak {values['peak_bytes'] / 2**20:.0f} MiB (before {values['peak_bytes_before'] / 2**20:.0f}), "
            f"largest child {values['child_peak_bytes'] / 2**20:.0f} MiB"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
