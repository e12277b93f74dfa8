"""The data card in a browser: what is in the files, rows as the model sees them, and one sentence for a wrong file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
See = Callable[..., None]


def test_own_files_show_their_rows_as_the_model_sees_them(page: Page, seeded: object, tmp_path: Path) -> None:
    lines = [json.dumps({"question": f"Who is {n}?", "answer": f"<b>Number</b> {n}."}) for n in range(40)]
    good, wrong = tmp_path / "mine.jsonl", tmp_path / "wrong.jsonl"
    good.write_text("\n".join([*lines, '{"question": "half']), encoding="utf-8")
    wrong.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    page.goto(seeded.url)
    expect(page.locator("#data-card")).to_contain_text("6,000", timeout=30_000)  # the starter's stories
    page.locator("#field-data-choice input").click()
    page.locator("[role=option]", has_text="My own files").click()
    page.locator("#field-data-paths textarea").fill(str(good))
    card = page.locator("#data-card")
    expect(card).to_contain_text("question/answer", timeout=30_000)
    expect(card.locator(".vf-data-bad-rows")).to_contain_text("line 41")
    first = card.locator(".vf-row-view:visible")
    expect(first.locator("mark")).to_contain_text("<b>Number</b> 0.", timeout=60_000)
    expect(card.locator(".vf-hist i")).not_to_have_count(0)
    card.locator("[data-turn='1']").click()
    expect(card.locator(".vf-row-view:visible mark")).to_contain_text("Number</b> 1.")
    expect(card.locator(".vf-row-title")).to_contain_text("line 2")
    page.locator("#field-data-paths textarea").fill(str(wrong))
    expect(page.locator("#field-data-paths .vf-field-problem")).to_contain_text("wrong.jsonl")
    expect(card).to_be_hidden()
