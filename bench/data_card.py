"""From a path typed on New run to its data card: python bench/data_card.py [--megabytes 100] [--model FOLDER] [--json]

A JSONL made for it is given to the page in Chromium, once the page shows the card of what it begins with; panel, its
processes and the browser share this machine. Then another file.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.data import write_rows
from bench.first_light import CHROMIUM, FLAGS, Figure, load, panel
from vramfit.config import STARTER_MODEL

GOAL_S = 2.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=int, default=100, help="size of the file (10^6 bytes)")
    parser.add_argument("--model", default=STARTER_MODEL, help="whose tokenizer (default: the starter's)")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    figures = list(measure(options.megabytes, options.model))
    if options.json:
        print(json.dumps([{**asdict(figure), "met": figure.met} for figure in figures], indent=1))
        return
    for figure in figures:
        print(f"{figure.name:<56}{figure.value:>8.2f} {figure.unit}  goal {figure.goal}: {figure.met}")


def measure(megabytes: int, model: str) -> Iterator[Figure]:
    """Seconds to the card with its rows, and to the whole one."""
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        place = Path(folder)
        files = [place / "first.jsonl", place / "second.jsonl"]
        for number, path in enumerate(files):
            write_rows(path, megabytes + number)  # another size is another file
        with panel(place / "data") as address:
            browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
            page = browser.new_page(viewport={"width": 1400, "height": 900}, locale="en-US")
            load(page, address)
            if model != STARTER_MODEL:
                page.locator("#field-model-source input").fill(model)
                page.keyboard.press("Enter")
                page.wait_for_timeout(2000)
            page.wait_for_selector(".vf-data:not(:has([data-again])) .vf-row-view:not(:empty)")  # of the starter's data
            page.locator("#field-data-choice input").click()
            page.locator("[role=option]", has_text="My own files").click()
            for name, path in zip(("first file", "next file"), files, strict=True):
                yield from shown(page, path, name)
            browser.close()


def shown(page: Page, path: Path, name: str) -> Iterator[Figure]:
    with path.open("rb") as file:
        rows = f"{sum(1 for _ in file):,}"
    began = time.perf_counter()
    page.locator("#field-data-paths textarea").fill(str(path))
    page.wait_for_selector(f".vf-data:not(.vf-data-waiting):has-text('{rows}')", timeout=120_000)
    yield Figure(name=f"{name}: path to its rows", value=time.perf_counter() - began, unit="s", goal=GOAL_S)
    whole = f".vf-data:has-text('{rows}'):not(:has([data-again])) .vf-row-view:not(:empty)"
    page.wait_for_selector(whole, timeout=120_000)
    yield Figure(name=f"{name}: path to tokens and a row", value=time.perf_counter() - began, unit="s", goal=GOAL_S)


if __name__ == "__main__":
    main()
