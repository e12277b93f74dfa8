"""The New run page's handlers, called as gradio calls them: a dict of widgets and what they hold."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gradio as gr
import pytest

from jobs.store import Store
from ui import new_run
from ui.new_run import OWN_FILES, NewRun, keep_upload
from ui.preview import PLAN_PREFIX, Preview, Previewer
from ui.samples import Sample
from ui.texts import texts_of
from vramfit.config import RunConfig
from vramfit.errors import HardwareError, JobError, UserError
from vramfit.hardware.catalogue import cards
from vramfit.planning.cost import COMPARED
from vramfit.starter.recipe import starter_run

STEPS = starter_run().schedule.max_steps
SESSION = SimpleNamespace(session_hash="tab-1")


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Where a supervisor was asked for; none is started."""
    asked: list[Path] = []
    monkeypatch.setattr(new_run, "ensure_running", asked.append)
    return asked


@pytest.fixture
def page(store: Store, started: list[Path], in_loop: Callable[..., Any]) -> NewRun:
    previewer = Previewer(store.data_dir, patience_s=30)

    def make() -> NewRun:
        with gr.Blocks(analytics_enabled=False):
            return NewRun(store=store, previewer=previewer, texts=texts_of("en"), guard=lambda handler, _: handler)

    return in_loop(make)


def _values(page: NewRun, **changes: Any) -> dict[Any, Any]:
    """What the untouched form holds, with changes by path (dots as __)."""
    values = {widget: widget.value for widget in page.inputs}
    for name, value in changes.items():
        path = name.replace("__", ".")
        values[page.data_choice if path == "data" else page.widgets[path]] = value
    return values


def test_the_untouched_form_is_the_starters_recipe(page: NewRun) -> None:
    config, card = page._config(_values(page))
    assert config == starter_run()
    assert card == "auto"


def test_start_adds_the_job_with_its_forecast_and_opens_it(page: NewRun, store: Store, started: list[Path]) -> None:
    answer = page.on_start(_values(page), SESSION)[page.answer]
    job = store.jobs()[0]
    assert job.config == starter_run()
    assert job.forecast["steps"] == STEPS
    assert f'data-open="{job.id}"' in answer
    assert started == [store.data_dir]


def test_a_double_click_starts_one_run(page: NewRun, store: Store) -> None:
    first = page.on_start(_values(page), SESSION)[page.answer]
    second = page.on_start(_values(page), SESSION)[page.answer]
    assert len(store.jobs()) == 1
    assert first != second  # or the page would not notice the second answer


def test_other_settings_or_another_tab_are_another_run(page: NewRun, store: Store) -> None:
    page.on_start(_values(page), SESSION)
    page.on_start(_values(page, seed="7"), SESSION)
    page.on_start(_values(page), SimpleNamespace(session_hash="tab-2"))
    assert len(store.jobs()) == 3


def test_a_waiting_run_is_changed_in_its_place(page: NewRun, store: Store, started: list[Path]) -> None:
    first = store.add_job(RunConfig(name="first"))
    run = store.add_job(RunConfig(name="second", seed=7))
    store.move(run, later=False)
    updates = page.on_edit(run)
    assert (updates[page.editing], updates[page.widgets["seed"]]) == (str(run), "7")
    assert f"You are changing run {run} (second)" in updates[page.editing_note]
    assert updates[page.start]["value"] == "Save the changes"
    answer = page.on_start({**_values(page, seed="8"), page.editing: str(run)}, SESSION)
    assert 'data-go="runs"' in answer[page.answer]
    assert (answer[page.editing], answer[page.editing_note], answer[page.start]["value"]) == ("", "", "Start")
    assert (store.job(run).config.seed, store.queue(), len(store.jobs())) == (8, [run, first], 2)
    assert store.job(run).forecast["steps"] == STEPS


def test_a_run_that_began_while_it_was_changed_keeps_its_settings(page: NewRun, store: Store) -> None:
    run = store.add_job(RunConfig(seed=7))
    store.claim_next("test:1")
    answer = page.on_start({**_values(page, seed="8"), page.editing: str(run)}, SESSION)
    assert f"Run {run} has begun" in answer[page.answer]
    assert answer[page.editing] == ""
    assert store.job(run).config.seed == 7
    with pytest.raises(JobError, match="has begun"):
        page.on_edit(run)


def test_filling_the_form_from_another_run_ends_the_change(page: NewRun, store: Store) -> None:
    updates = page.on_copy(store.add_job(RunConfig()))
    assert (updates[page.editing], updates[page.editing_note], updates[page.start]["value"]) == ("", "", "Start")
    assert set(updates) <= set(page.outputs)


def test_start_with_wrong_fields_adds_nothing_and_names_them(page: NewRun, store: Store) -> None:
    updates = page.on_start(_values(page, schedule__epochs="x", seed=""), SESSION)
    assert store.jobs() == []
    assert updates[page.estimate].count("vf-problem-item") == 2
    assert set(updates) == {page.estimate, page.answer}  # no field is touched


def test_the_estimate_follows_the_form(page: NewRun) -> None:
    small = page.on_change(_values(page, data__max_length="64"))[page.estimate]
    large = page.on_change(_values(page, data__max_length="192"))[page.estimate]
    assert "vf-bar" in small
    assert small != large


def test_the_estimate_follows_how_many_of_the_last_blocks_train(page: NewRun) -> None:
    full = {"model__source": "meta-llama/Llama-3.2-1B", "method": "full", "device": PLAN_PREFIX + "RTX 4090"}
    found = [page.on_change(_values(page, **full, train_last_blocks=count))[page.estimate] for count in ("2", "6", "")]
    assert "the last 2 of 16 blocks" in found[0] and "the last 6 of 16 blocks" in found[1]
    assert "of 16 blocks" not in found[2].split("trained weights")[-1][:60]
    assert len(set(found)) == 3


def test_planning_for_another_card_turns_start_off_and_says_why(page: NewRun, store: Store) -> None:
    card = PLAN_PREFIX + cards()[0].name
    updates = page.on_change(_values(page, device=card))
    assert updates[page.start]["interactive"] is False
    assert "Start is off" in updates[page.estimate]
    page.on_start(_values(page, device=card), SESSION)
    assert store.jobs() == []
    download = page.on_download(_values(page, device=card))[page.answer]
    assert 'data-download="First stories.yaml"' in download
    assert f"max_steps: {STEPS}" in download


@pytest.mark.parametrize(("name", "count"), COMPARED)
def test_a_setup_of_several_cards_is_planned_with_all_of_them_and_not_started(
    page: NewRun, store: Store, name: str, count: int
) -> None:
    choice = next(value for text, value in page._cards() if text == f"Plan only: {count} x {name}")
    updates = page.on_change(_values(page, device=choice))
    assert updates[page.start]["interactive"] is False
    said = page.texts["estimate.plan_several"].format(name=f"{count} x {name}")
    assert said in updates[page.estimate]
    refused = page.on_start(_values(page, device=choice), SESSION)
    assert said in refused[page.estimate]
    assert store.jobs() == []
    with pytest.raises(HardwareError):  # not in the list, so it is a card's name, and none is called so
        page.previewer.machine_of(f"{PLAN_PREFIX}3 x {name}")


def test_a_model_too_large_says_by_how_much_and_what_would_help(page: NewRun, store: Store) -> None:
    card = next(card for card in cards() if "4090" in card.name)
    large = {"model__source": "meta-llama/Llama-3.1-70B", "method": "full", "device": PLAN_PREFIX + card.name}
    updates = page.on_change(_values(page, **large))
    assert "Does not fit" in updates[page.estimate]
    assert "vf-suggestions" in updates[page.estimate]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"data": OWN_FILES}, "data.paths"),
        ({"data": OWN_FILES, "data__paths": "/nowhere/at/all.jsonl"}, "data.paths"),
        ({"model__source": "no/such/folder", "method": "lora"}, "model.source"),
        ({"method": "lora"}, "method"),
        ({"train_last_blocks": "2"}, "train_last_blocks"),
        (
            {"model__source": "meta-llama/Llama-3.2-1B", "method": "full", "train_last_blocks": "17"},
            "train_last_blocks",
        ),
    ],
)
def test_an_error_lies_at_the_field_that_caused_it(page: NewRun, changes: dict[str, str], field: str) -> None:
    assert f'data-field="{field}"' in page.on_change(_values(page, **changes))[page.estimate]


def test_an_empty_data_set_is_one_sentence(page: NewRun, tmp_path: Path) -> None:
    (tmp_path / "empty.jsonl").touch()
    changes = {"data": OWN_FILES, "data__paths": str(tmp_path / "empty.jsonl")}
    assert 'data-field="data.paths"' in page.on_change(_values(page, **changes))[page.estimate]


def test_uploads_are_kept_and_named_in_the_form(page: NewRun, store: Store, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "hello there"}\n' * 9, encoding="utf-8")
    values = {**_values(page, data=OWN_FILES), page.upload: [str(file)]}
    updates = page.on_upload(values)
    kept = store.data_dir / "uploads" / "mine.jsonl"
    assert updates[page.widgets["data.paths"]] == str(kept)
    assert kept.is_file()
    assert "vf-bar" in updates[page.estimate]


def test_an_upload_never_replaces_another_file(tmp_path: Path) -> None:
    places = []
    for text in ("one", "two"):
        file = tmp_path / "data.txt"
        file.write_text(text, encoding="utf-8")
        places.append(keep_upload(file, tmp_path / "kept"))
    assert [place.name for place in places] == ["data.txt", "data-2.txt"]
    assert [place.read_text(encoding="utf-8") for place in places] == ["one", "two"]


def test_another_model_gets_the_usual_settings_but_keeps_what_was_changed(page: NewRun) -> None:
    chosen = _values(page, model__source="meta-llama/Llama-3.1-8B", schedule__sequences_per_step="12")
    updates = page.on_model(chosen)
    assert updates[page.widgets["method"]] == "lora"
    assert updates[page.widgets["schedule.learning_rate"]] == ""  # auto
    assert page.widgets["schedule.sequences_per_step"] not in updates
    assert page.widgets["model.source"] not in updates
    config, _ = page._config({**chosen, **updates})
    assert config.learning_rate == 2e-4
    assert config.schedule.sequences_per_step == 12
    back = {**chosen, **updates, page.widgets["model.source"]: "starter"}
    again = {**back, **page.on_model(back), page.widgets["schedule.sequences_per_step"]: "4"}
    assert page._config(again)[0] == starter_run()


def test_a_preset_fills_model_method_length_and_steps_and_the_next_one_takes_them_back(page: NewRun) -> None:
    untouched = _values(page, device="plan:GeForce RTX 4090", seed="7")
    taste = {**untouched, **page.on_preset(untouched, SimpleNamespace(goal="quick taste"))}
    config, card = page._config(taste)
    found = page.presets.get("quick taste", card)
    assert found is not None
    assert (config.model.source, config.method, config.data.max_length) == (found.model, "lora", 512)
    assert (config.schedule.max_steps, config.seed) == (100, 7)
    assert config.schedule.learning_rate == "auto"  # the starter's rate would ruin it
    biggest = {**taste, **page.on_preset(taste, SimpleNamespace(goal="biggest model"))}
    config, _ = page._config(biggest)
    assert (config.method, config.data.max_length, config.schedule.max_steps) == ("qlora", 1024, None)


def test_a_preset_for_a_card_that_holds_nothing_says_so(page: NewRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page.presets, "get", lambda goal, card: None)
    with pytest.raises(UserError, match="No model fits"):
        page.on_preset(_values(page), SimpleNamespace(goal="best quality"))


def test_another_card_has_other_presets(page: NewRun) -> None:
    values = _values(page, device="plan:GeForce RTX 4090")
    assert "plan:GeForce RTX 4090" in page.on_card(values)[page.preset_row]


def test_an_old_runs_settings_fill_the_form(page: NewRun, store: Store) -> None:
    config = RunConfig.parse(
        {"method": "lora", "model": {"source": "org/model"}, "data": {"paths": ["a.txt", "b.txt"]}, "seed": 9}
    )
    updates = page.on_copy(store.add_job(config))
    filled = {**_values(page), page.data_choice: updates[page.data_choice]}
    filled |= {widget: updates[widget] for widget in page.widgets.values()}
    filled[page.widgets["model.source"]] = updates[page.widgets["model.source"]]["value"]
    assert page._config(filled)[0].model_copy(update={"name": ""}) == config


def test_a_trained_starter_can_be_fine_tuned_on(page: NewRun, store: Store, seed_run: Callable[..., int]) -> None:
    run = seed_run(export="export")
    with pytest.raises(UserError, match="no longer in"):
        page.on_tune(run)
    (store.job(run).folder / "export").mkdir()
    updates = page.on_tune(run)
    assert updates[page.widgets["model.source"]]["value"] == str(store.job(run).folder / "export")
    assert updates[page.widgets["method"]] == "lora"
    with pytest.raises(UserError):
        page.on_tune(store.add_job(RunConfig()))


def test_a_hub_id_can_be_started_without_an_estimate(page: NewRun, store: Store) -> None:
    chosen = _values(page, model__source="nobody/nothing", method="lora")
    shown = page.on_change(chosen)[page.estimate]
    assert "config.json" in shown
    assert "data-again" not in shown
    page.on_start(chosen, SESSION)
    assert store.jobs()[0].config.model.source == "nobody/nothing"
    assert store.jobs()[0].forecast is None


def test_the_page_asks_again_while_the_data_is_read(page: NewRun) -> None:
    page.previewer.preview = lambda config, card: Preview(
        forecast=None, device=page.previewer.machine().device("auto"), here=True, missing="data"
    )
    first, second = (page.on_change(_values(page))[page.estimate] for _ in range(2))
    assert "data-again" in first
    assert first != second


@pytest.mark.parametrize(
    "name", ["two\nlines\x07.txt", "n" * 240 + ".jsonl", "数" * 80 + ".txt", ".hidden", "a" * 200 + "." + "b" * 40]
)
def test_an_uploads_name_is_one_short_line(tmp_path: Path, name: str) -> None:
    kept = []
    for number in range(2):
        file = tmp_path / str(number) / name
        file.parent.mkdir()
        file.touch()
        kept.append(keep_upload(file, tmp_path / "kept"))
    assert kept[0] != kept[1]
    assert all(place.is_file() and place.name.isprintable() for place in kept)
    assert kept[0].suffix == Path(name).suffix[:20]


def test_an_upload_that_cannot_be_kept_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "kept").touch()
    with pytest.raises(UserError, match=r"mine\.txt cannot be kept"):
        keep_upload(tmp_path / "mine.txt", tmp_path / "kept")


def test_the_data_card_is_hidden_for_wrong_data_and_asks_while_it_reads(page: NewRun, tmp_path: Path) -> None:
    wrong = _values(page, data=OWN_FILES, data__paths=str(tmp_path / "none.jsonl"))
    assert page.on_data(wrong)[page.data_card] == ""
    asked: list[RunConfig] = []
    page.previewer.samples.ask = lambda config: asked.append(config)
    page.previewer.survey = lambda config: None
    assert "data-again" in page.on_data(_values(page))[page.data_card]
    assert len(asked) == 1  # beside the survey, not after it


def test_the_data_card_says_why_no_tokens_are_counted(page: NewRun, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"text": "one <b>two</b>"}\n' * 20, encoding="utf-8")

    def refuse(config: RunConfig) -> None:
        raise UserError("There is no <tokenizer>", "Find one.")

    page.previewer.samples.ask = refuse
    card = page.on_data(_values(page, data=OWN_FILES, data__paths=str(file)))[page.data_card]
    assert "There is no &lt;tokenizer&gt;. Find one." in card
    assert "data-again" not in card
    assert "19" in card  # duplicates


UNKNOWN = [
    {"Frage": f"Was ist das, Nummer {n}?", "Antwort": f"Das ist ein kleines Haus, Nummer {n}."} for n in range(30)
]


def _write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "mine.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_unknown_columns_are_guessed_and_the_guess_is_a_run(page: NewRun, store: Store, tmp_path: Path) -> None:
    page.previewer.samples.ask = lambda config: None
    values = _values(page, data=OWN_FILES, data__paths=_write(tmp_path, UNKNOWN))
    shown = page.on_data(values)
    assert shown[page.data_card] == ""
    assert texts_of("en")["map.guess"] in shown[page.columns]
    page.on_start(values, SESSION)
    assert store.jobs() == []
    assert 'data-field="data.columns"' in page.on_change(values)[page.estimate]
    order = SimpleNamespace(field="data.columns", value={"prompt": "Frage", "completion": "Antwort"})
    updates = page.on_set(order)
    assert updates == {page.widgets["data.columns"]: "prompt: Frage\ncompletion: Antwort"}
    mapped = {**values, **updates}
    assert "vf-bar" in page.on_change(mapped)[page.estimate]
    page.on_start(mapped, SESSION)
    config = store.jobs()[0].config
    assert config.data.columns == order.value
    filled = page.on_copy(store.jobs()[0].id)
    assert filled[page.widgets["data.columns"]] == "prompt: Frage\ncompletion: Antwort"


def test_a_mapping_of_another_file_is_told_at_the_columns_and_can_be_forgotten(page: NewRun, tmp_path: Path) -> None:
    path = _write(tmp_path, UNKNOWN)
    values = _values(page, data=OWN_FILES, data__paths=path, data__columns="text: poem")
    assert "data-forget" in page.on_data(values)[page.columns]
    estimate = page.on_change(values)[page.estimate]
    assert 'data-field="data.columns"' in estimate
    assert "no column &#x27;poem&#x27;" in estimate
    assert page.on_set(SimpleNamespace(field="data.columns", value={})) == {page.widgets["data.columns"]: ""}


def test_known_columns_are_folded_beside_the_card(page: NewRun, tmp_path: Path) -> None:
    found = Sample(
        lengths=(9,), trained=((1, 9),), whole=True, total=1, format="jsonl", columns={"question": "q", "answer": "a"}
    )
    page.previewer.samples.ask = lambda config: found
    path = _write(tmp_path, [{"question": "q", "answer": "a"}])
    shown = page.on_data(_values(page, data=OWN_FILES, data__paths=path))
    assert '<details class="vf-map">' in shown[page.columns]
    assert "question · answer" in shown[page.columns]
    page.previewer.samples.ask = lambda config: replace(found, format="text")
    assert page.on_data(_values(page, data=OWN_FILES, data__paths=path))[page.columns] == ""


def test_start_refuses_to_leave_out_many_rows_until_someone_agrees(page: NewRun, store: Store, tmp_path: Path) -> None:
    rows = [{"question": f"q {n}", "answer": "a" if n % 4 else None} for n in range(40)]
    values = _values(page, data=OWN_FILES, data__paths=_write(tmp_path, rows))
    refused = page.on_start(values, SESSION)[page.estimate]
    assert store.jobs() == []
    assert 'data-field="data.most_dropped_share"' in refused
    assert "10 of 40 rows (25.0%) would be left out" in refused
    assert "Train on the rest" in refused
    agreed = {**values, **page.on_set(SimpleNamespace(field="data.most_dropped_share", value="0.3"))}
    page.on_start(agreed, SESSION)
    assert store.jobs()[0].config.data.most_dropped_share == 0.3


def test_start_refuses_a_row_that_the_run_would_stop_at(page: NewRun, store: Store, tmp_path: Path) -> None:
    path = Path(_write(tmp_path, [{"question": "q", "answer": "a"}] * 30))
    path.write_text(path.read_text(encoding="utf-8") + "\n{bad", encoding="utf-8")
    values = _values(page, data=OWN_FILES, data__paths=str(path))
    assert "line 31" in page.on_start(values, SESSION)[page.estimate]
    assert store.jobs() == []
    page.on_start({**values, page.widgets["data.bad_rows"]: "skip"}, SESSION)
    assert len(store.jobs()) == 1


def test_the_card_sets_no_other_field(page: NewRun) -> None:
    with pytest.raises(UserError):
        page.on_set(SimpleNamespace(field="model.source", value="x"))
