"""The data card in a browser: what is in the files, any row as the model sees it, columns, and rows left out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
See = Callable[..., None]


@pytest.fixture
def choose(page: Page, seeded: object) -> Callable[[Path], None]:
    """Opens the New run page and names a file of one's own."""
    page.goto(seeded.url)
    expect(page.locator("#data-card")).to_contain_text("6,000")  # the starter's stories
    page.locator("#field-data-choice input").click()
    page.locator("[role=option]", has_text="My own files").click()
    return lambda path: page.locator("#field-data-paths textarea").fill(str(path))


def _write(path: Path, rows: list[Any], *more: str) -> Path:
    path.write_text("\n".join([*map(json.dumps, rows), *more]), encoding="utf-8")
    return path


def test_any_row_is_shown_as_the_model_sees_it(page: Page, choose: Callable[[Path], None], tmp_path: Path) -> None:
    rows = [
        {"question": f"Who is {n}?", "answer": f"<b>Number</b> {n}.{' long' * 90 * (n == 17)}"} for n in range(3000)
    ]
    choose(_write(tmp_path / "mine.jsonl", rows, '{"question": "half'))
    card = page.locator("#data-card")
    expect(card).to_contain_text("question/answer")
    expect(card.locator(".vf-data-bad-rows")).to_contain_text("line 3001")
    learned, title, number = (
        card.locator(".vf-row-view mark"),
        card.locator(".vf-row-title"),
        card.locator("[data-row]"),
    )
    expect(learned.first).to_contain_text("<b>Number</b> 0.")
    expect(card).to_contain_text("1,000 rows drawn evenly")
    expect(card.locator(".vf-hist i")).not_to_have_count(0)
    expect(card.locator("[data-turn='-1']")).to_be_disabled()
    card.locator("[data-turn='1']").click()
    expect(learned.first).to_contain_text("Number</b> 1.")
    expect(title).to_contain_text("line 2 ·")
    number.fill("2345")
    number.press("Enter")
    expect(learned.first).to_contain_text("Number</b> 2344.")
    number.fill("18")
    number.press("Enter")
    page.locator("#field-data-max_length :is(textarea, input)").fill("64")
    expect(card.locator(".vf-row-view s").first).to_contain_text("long")  # the same row, now cut
    expect(number).to_have_value("18")
    card.locator("[data-find='left_out']").click()
    expect(card.locator(".vf-row-lost")).to_contain_text("Left out:")
    expect(title).to_contain_text("line 3001")
    expect(number).to_have_value("3001")
    expect(card.locator("[data-turn='1']")).to_be_disabled()
    card.locator("[data-find='random']").click()
    expect(title).not_to_contain_text("line 3001")


def test_a_wrong_file_is_one_sentence_and_no_card(page: Page, choose: Callable[[Path], None], tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_bytes(b"PK\x03\x04" + b"\0" * 100)
    choose(wrong)
    expect(page.locator("#field-data-paths .vf-field-problem")).to_contain_text("wrong.jsonl")
    expect(page.locator("#data-card")).to_be_hidden()
    expect(page.locator("#field-columns")).to_be_hidden()


def test_unknown_columns_are_mapped_with_one_press(page: Page, choose: Callable[[Path], None], tmp_path: Path) -> None:
    rows = [{"Nr": n, "Antwort": f"Das sind {n} kleine Häuser.", "Frage": f"Was ist {n}?"} for n in range(40)]
    choose(_write(tmp_path / "fragen.jsonl", rows))
    columns = page.locator("#field-columns")
    expect(columns.locator("details")).to_have_attribute("open", "")
    expect(columns).to_contain_text("This is a guess")
    expect(columns.locator(".vf-field-problem")).to_contain_text("'Frage'")
    expect(columns.locator("select[data-part='prompt']:visible")).to_have_value("Frage")
    columns.locator("select[data-kind]").select_option("text")
    columns.locator("select[data-part='text']").select_option("Antwort")
    columns.locator("[data-use]").click()
    card = page.locator("#data-card")
    expect(card.locator(".vf-row-view mark").first).to_contain_text("s sind 0 kleine")
    expect(page.locator("#estimate .vf-estimate > .vf-bar")).to_be_visible()
    expect(page.locator(".vf-field-problem")).to_have_count(0)
    columns.locator("summary").click()
    columns.locator("[data-forget]").click()
    expect(columns).to_contain_text("This is a guess")
    columns.locator("[data-use]").click()
    expect(card).to_contain_text("prompt/completion")
    expect(columns.locator("details")).not_to_have_attribute("open", "")
    expect(card.locator(".vf-row-view pre")).to_contain_text("Was ist 0?")


def test_start_is_refused_until_someone_agrees_to_lose_rows(
    page: Page, choose: Callable[[Path], None], tmp_path: Path
) -> None:
    rows = [{"question": f"Who is {n}?", "answer": f"Number {n}." if n % 3 else None} for n in range(60)]
    choose(_write(tmp_path / "lossy.jsonl", rows))
    agree = page.locator(".vf-agree")
    expect(agree).to_contain_text("20 of 60 rows (33.3%)")
    page.locator("#field-schedule-max_steps :is(textarea, input)").fill("1")
    expect(page.locator("#estimate .vf-estimate > .vf-bar")).to_be_visible()
    page.click("#start")
    expect(page.locator("#estimate .vf-problem-item")).to_contain_text("20 of 60 rows")
    expect(agree.locator(".vf-field-problem")).to_contain_text("Train on the rest")
    assert "run=" not in page.url
    agree.locator("input").click()
    expect(page.locator("#estimate .vf-estimate > .vf-bar")).to_be_visible()
    expect(page.locator(".vf-agree input")).to_be_checked()
    page.click("#start")
    page.wait_for_url("**run=*")
    expect(page.locator(".vf-runhead .vf-badge")).to_have_text("succeeded", timeout=240_000)
