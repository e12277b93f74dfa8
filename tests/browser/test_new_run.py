"""The form in a browser: the estimate follows, what is wrong is said where it is wrong, nothing typed is lost."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser
See = Callable[..., None]


@pytest.fixture
def form(page: Page, seeded: object) -> Page:
    page.goto(seeded.url)
    expect(page.locator("#start")).to_be_enabled()
    page.wait_for_timeout(800)  # the page's own first answers
    return page


def _type(page: Page, field: str, text: str) -> None:
    page.locator(f"#field-{field} :is(textarea, input)").fill(text)


def _pick(page: Page, field: str, text: str) -> None:
    """Choose from a dropdown as a person does: open it, type where it can be searched, click the entry."""
    box = page.locator(f"#field-{field} input")
    box.click()
    if box.get_attribute("readonly") is None:
        box.fill(text)
    page.locator("[role=option]", has_text=text).first.click()


def test_the_bar_and_the_numbers_change_with_the_form(form: Page) -> None:
    before = form.inner_text("#estimate")
    _type(form, "data-max_length", "64")
    expect(form.locator("#estimate")).not_to_have_text(before)
    expect(form.locator("#estimate .vf-estimate > .vf-bar .vf-part").first).to_be_visible()
    for part in ("Weights", "Gradients", "Optimizer", "Overhead"):
        expect(form.locator("#estimate .vf-estimate > .vf-legend")).to_contain_text(part)


def test_a_wrong_field_says_one_sentence_at_its_place_and_keeps_what_was_typed(form: Page) -> None:
    _type(form, "schedule-epochs", "soon")
    _type(form, "data-max_length", "3")
    expect(form.locator("#field-schedule-epochs .vf-field-problem")).to_have_text(
        "Epochs is 'soon', which is not a number. Type a number."
    )
    expect(form.locator("#field-data-max_length .vf-field-problem")).to_contain_text("8")
    expect(form.locator("#estimate .vf-problem-item")).to_have_count(2)
    form.click("#start")
    expect(form.locator("#estimate .vf-problem-item")).to_have_count(2)
    assert form.locator("#field-schedule-epochs :is(textarea, input)").input_value() == "soon"
    assert "run=" not in form.url
    _type(form, "schedule-epochs", "1")
    _type(form, "data-max_length", "128")
    expect(form.locator(".vf-field-problem")).to_have_count(0)
    expect(form.locator("#estimate .vf-estimate > .vf-bar")).to_be_visible()


def test_another_card_is_planned_for_and_start_says_why_it_is_off(form: Page) -> None:
    _pick(form, "device", "4090")
    expect(form.locator("#estimate")).to_contain_text("Start is off")
    expect(form.locator("#estimate")).to_contain_text("4090")
    expect(form.locator("#start")).to_be_disabled()
    with form.expect_download() as download:
        form.click("#download")
    text = Path(download.value.path()).read_text(encoding="utf-8")
    assert text.startswith("version: 1")
    assert "max_steps" in text


def test_choosing_a_trained_model_sets_lora_and_automatic_learning_rate(form: Page) -> None:
    _pick(form, "model-source", "Llama-3.1-8B")
    expect(form.locator("#field-method input")).to_have_value("LoRA adapter")
    expect(form.locator("#field-schedule-learning_rate :is(textarea, input)")).to_have_value("")


def test_a_model_that_cannot_fit_says_the_numbers_and_what_would_help(form: Page) -> None:
    _pick(form, "device", "4090")
    _pick(form, "model-source", "Llama-3.1-70B")
    _pick(form, "method", "Full fine-tuning")
    expect(form.locator("#estimate .vf-badge-wontfit")).to_be_visible()
    expect(form.locator("#estimate .vf-suggestions li").first).to_be_visible()
    assert "GiB needed of disk" in form.inner_text("#estimate")


def test_an_unknown_model_is_one_sentence_at_the_model(form: Page) -> None:
    box = form.locator("#field-model-source input")
    box.fill("no/such/folder")
    box.press("Enter")
    box.blur()
    _pick(form, "method", "LoRA adapter")
    expect(form.locator("#field-model-source .vf-field-problem")).to_contain_text("no/such/folder")
    box.fill("nobody/nothing")  # may be a hub id: the run will find out, so Start stays on
    box.press("Enter")
    box.blur()
    expect(form.locator("#estimate .vf-badge-later")).to_be_visible()
    expect(form.locator("#start")).to_be_enabled()


def test_missing_and_empty_files_are_one_sentence_at_the_files(form: Page, tmp_path: Path) -> None:
    _pick(form, "data-choice", "My own files")
    expect(form.locator("#field-data-paths")).to_be_visible()
    _type(form, "data-paths", str(tmp_path / "none.jsonl"))
    expect(form.locator("#field-data-paths .vf-field-problem")).to_contain_text("none.jsonl")
    (tmp_path / "empty.jsonl").touch()
    _type(form, "data-paths", str(tmp_path / "empty.jsonl"))
    expect(form.locator("#field-data-paths .vf-field-problem")).to_contain_text("empty.jsonl")


def test_an_uploaded_file_is_kept_and_estimated(form: Page, tmp_path: Path, seeded: object) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "A fox went home."}\n' * 50, encoding="utf-8")
    _pick(form, "data-choice", "My own files")
    form.set_input_files("input[type=file] >> nth=0", str(file))
    expect(form.locator("#field-data-paths textarea")).to_have_value(str(seeded.data_dir / "uploads" / "mine.jsonl"))
    expect(form.locator("#estimate .vf-estimate > .vf-bar")).to_be_visible()


def test_old_settings_can_be_used_again(page: Page, seeded: object) -> None:
    page.goto(seeded.url + "?run=2")
    page.click("[data-act=copy]")
    expect(page.locator("#field-name :is(textarea, input)")).to_have_value("Short run")
    expect(page.locator("#start")).to_be_visible()
