"""The New run page: the form, the estimate beside it, Start. Thin handlers: read the form, ask one thing, answer."""

from __future__ import annotations

import html
import itertools
import shutil
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import gradio as gr

from jobs.store import Store
from jobs.supervisor import ensure_running
from ui import form
from ui.checks import Checks
from ui.column_map import column_map
from ui.data_card import data_card, left_out, reading_card
from ui.estimate import error_card, forecast_card, later_card, notice_card, problems_card
from ui.form import FieldSpec
from ui.preset_buttons import Presets, waiting
from ui.preview import PLAN_PREFIX, Preview, Previewer, cards_together, setup_name
from ui.runs import exports
from ui.samples import Sample
from ui.texts import Texts
from vramfit.config import STARTER_MODEL, STARTER_QUESTIONS, STARTER_STORIES, RunConfig
from vramfit.data.read import ReadOptions, Survey
from vramfit.data.report import TooManyDropped, check_dropped
from vramfit.data.shapes import ColumnsError
from vramfit.errors import ConfigError, DataError, HardwareError, JobError, ModelError, Problem, UserError, VramfitError
from vramfit.hardware.catalogue import cards
from vramfit.models.catalogue import known
from vramfit.places import is_folder, uploads_folder
from vramfit.planning.cost import COMPARED
from vramfit.starter.recipe import questions_run, starter_run

Values = Mapping[Any, Any]
Updates = dict[Any, Any]

OWN_FILES: Final = "own"
NAME_BYTES: Final = 200
"""An uploaded file's name is cut to this; file systems take 255."""
DOUBLE_CLICK_S: Final = 3.0
"""Two presses of Start with the same settings within this time are one."""

_OF_DATA: Final = ("model.source", "model.revision", "data.")
"""Beginnings of the fields that decide what the data card shows."""

_CHOSEN_APART: Final = ("model.source", "data.paths", "device")
_SET_BY_PRESET: Final = ("model.source", "method", "data.max_length", "schedule.max_steps")
_SET_BY_CARD: Final = ("data.columns", "data.most_dropped_share")
"""Fields that the controls in the data card set."""

_FIELD_OF_ERROR: Final = (
    (ColumnsError, "data.columns", "map.remedy"),
    (TooManyDropped, "data.most_dropped_share", "data.agree.remedy"),
    (DataError, "data.paths", ""),
    (ModelError, "model.source", ""),
    (HardwareError, "device", ""),
)
"""Where an error is told, and the page's own remedy for it where it has a better one."""


class NewRun:
    """Builds the page inside an open `gr.Blocks` and answers its events. One for each language."""

    def __init__(
        self,
        *,
        store: Store,
        previewer: Previewer,
        texts: Texts,
        guard: Callable[..., Callable[..., Updates]],
        presets: Presets | None = None,
        checks: Checks | None = None,
    ) -> None:
        self.store, self.previewer, self.texts = store, previewer, texts
        self.presets, self.checks = presets or Presets(previewer), checks or Checks()
        self.widgets: dict[str, Any] = {}
        self._started: dict[tuple[str, str], tuple[float, int]] = {}
        self._lock = threading.Lock()
        self._number = itertools.count(1)
        self._guard = guard
        self._build()

    # ---- the widgets ------------------------------------------------------------------------------------------

    def _build(self) -> None:
        texts, start = form.show(starter_run()), self.texts
        specs = {spec.path: spec for spec in form.field_specs()}
        with gr.Row(elem_classes="vf-new", equal_height=False):
            with gr.Column(elem_classes="vf-form", scale=3, min_width=320):
                gr.HTML(
                    f"<h1>{_esc(start['new.title'])}</h1><p>{_esc(start['new.lead'])}</p>",
                    elem_classes="vf-lead",
                    apply_default_css=False,
                )
                self.preset_row = gr.HTML(
                    waiting("auto", self.texts),
                    elem_id="presets",
                    apply_default_css=False,
                    js_on_load="window.VF.mount('Presets', element, watch, trigger)",
                )
                with gr.Column(elem_classes="vf-fields vf-simple"):
                    for path in form.SIMPLE:
                        self._simple(specs[path], texts[path])
                with gr.Accordion(start["new.advanced"], open=False, elem_classes="vf-advanced"):
                    for group in form.GROUPS:
                        self._group(group, [spec for spec in specs.values() if spec.group == group], texts)
            with gr.Column(elem_classes="vf-side", scale=2, min_width=320):
                self.estimate = gr.HTML(
                    self._safe_estimate(starter_run(), "auto"),
                    elem_classes="vf-estimate-box",
                    elem_id="estimate",
                    apply_default_css=False,
                    js_on_load="window.VF.mount('Estimate', element, watch, trigger)",
                )
                # The waiting run whose settings the form holds; "": none. (A gr.State would keep a connection open.)
                self.editing = gr.Textbox("", visible=False)
                self.editing_note = gr.HTML(
                    "",
                    elem_id="editing",
                    apply_default_css=False,
                    js_on_load="window.VF.mount('Editing', element, trigger)",
                )
                self.start = gr.Button(start["new.start"], variant="primary", elem_id="start", size="lg")
                self.download = gr.Button(start["new.download"], elem_id="download", size="sm")
                self.answer = gr.HTML(
                    "",
                    elem_id="answer",
                    apply_default_css=False,
                    js_on_load="window.VF.mount('Answer', element, watch)",
                )
        self._listen()

    def _simple(self, spec: FieldSpec, text: str) -> None:
        if spec.path == "data.paths":
            self._data(spec)
        elif spec.path == "model.source":
            self.widgets[spec.path] = self._dropdown(spec, self._models(), text, allow_custom_value=True)
        elif spec.path == "device":
            self.widgets[spec.path] = self._dropdown(spec, self._cards(), "auto", filterable=True)
        else:
            self._field(spec, text)

    def _data(self, spec: FieldSpec) -> None:
        texts = self.texts
        choices = [
            (texts["new.data.stories"], STARTER_STORIES),
            (texts["new.data.questions"], STARTER_QUESTIONS),
            (texts["new.data.own"], OWN_FILES),
        ]
        self.data_choice = gr.Dropdown(
            choices,
            value=STARTER_STORIES,
            label=texts["new.data"],
            info=texts["new.data.help"],
            elem_id="field-data-choice",
            filterable=False,
        )
        with gr.Column(visible=False, elem_classes="vf-own vf-wide") as self.own:
            self.widgets[spec.path] = gr.Textbox(
                "",
                label=texts.label(spec.path),
                info=texts.help(spec.path),
                lines=2,
                max_lines=6,
                elem_id=_field_id(spec.path),
            )
            self.upload = gr.UploadButton(texts["new.upload"], file_count="multiple", size="sm", elem_id="upload")
        self.columns = gr.HTML(
            "",
            elem_id="field-columns",
            elem_classes="vf-wide",
            apply_default_css=False,
            js_on_load="window.VF.mount('Columns', element, watch, trigger)",
        )
        self.data_card = gr.HTML(
            self._reading(),  # the page asks for the rest as soon as it is drawn
            elem_id="data-card",
            elem_classes="vf-wide",
            apply_default_css=False,
            js_on_load="window.VF.mount('Data', element, watch, trigger)",
        )

    def _group(self, group: str, specs: list[FieldSpec], shown: Mapping[str, str]) -> None:
        specs = [spec for spec in specs if not spec.simple]
        if not specs:
            return
        gr.HTML(f"<h3>{_esc(self.texts.groups[group])}</h3>", elem_classes="vf-group", apply_default_css=False)
        with gr.Column(elem_classes="vf-fields"):
            for spec in specs:
                self._field(spec, shown[spec.path])

    def _field(self, spec: FieldSpec, text: str) -> None:
        if spec.kind == "choice":
            choices = [(self.texts.value(spec.path, choice), choice) for choice in spec.choices]
            self.widgets[spec.path] = self._dropdown(spec, choices, text, filterable=False)
            return
        tall = spec.kind in ("lines", "pairs")
        self.widgets[spec.path] = gr.Textbox(
            text,
            label=self.texts.label(spec.path),
            info=self.texts.help(spec.path),
            placeholder="auto" if spec.blank == "auto" else "",
            lines=2 if tall else 1,
            max_lines=6 if tall else 1,
            elem_id=_field_id(spec.path),
        )

    def _dropdown(self, spec: FieldSpec, choices: list[tuple[str, str]], value: str, **options: Any) -> gr.Dropdown:
        return gr.Dropdown(
            choices,
            value=value,
            label=self.texts.label(spec.path),
            info=self.texts.help(spec.path),
            elem_id=_field_id(spec.path),
            **options,
        )

    def _models(self) -> list[tuple[str, str]]:
        trained = exports(self.store, self.texts)
        return [(self.texts["new.model.starter"], STARTER_MODEL), *trained, *((name, name) for name in known())]

    def _cards(self) -> list[tuple[str, str]]:
        devices = self.previewer.machine().devices
        here = [(self.texts["new.card.here"].format(name=device.name), device.torch_device) for device in devices]
        best = (self.texts["new.card.auto"].format(name=devices[0].name), "auto")
        plans = [(self.texts["new.card.plan"].format(name=card.name), PLAN_PREFIX + card.name) for card in cards()]
        several = [setup_name(*setup) for setup in COMPARED]
        together = [(self.texts["new.card.several"].format(name=name), PLAN_PREFIX + name) for name in several]
        return [best, *here, *plans, *together]

    # ---- the events -------------------------------------------------------------------------------------------

    @property
    def inputs(self) -> set[Any]:
        """Every widget that says something about the run."""
        return {*self.widgets.values(), self.data_choice, self.editing}

    @property
    def outputs(self) -> list[Any]:
        """What filling the form from a config may change."""
        fields = [*self.widgets.values(), self.data_choice, self.own]
        return [*fields, self.estimate, self.start, self.editing, self.editing_note, self.answer]

    def _listen(self) -> None:
        quick: dict[str, Any] = {"queue": False, "show_progress": "hidden", "api_visibility": "private"}
        # `change` and not `input`: a text box's `input` is only sent for keys, not for a paste with the mouse.
        changes = [widget.change for widget in (*self.widgets.values(), self.data_choice)]
        gr.on(
            [*changes, self.estimate.click],  # assets/panel.js asks again so long as the estimate is not ready
            self._guard(self.on_change, self.answer),
            inputs=self.inputs,
            outputs=[self.estimate, self.start, self.own],
            trigger_mode="always_last",
            **quick,
        )
        of_data = [widget.change for path, widget in self.widgets.items() if path.startswith(_OF_DATA)]
        gr.on(
            [*of_data, self.data_choice.change, self.data_card.click],
            self._guard(self.on_data, self.answer),
            inputs=self.inputs,
            outputs=[self.data_card, self.columns],
            trigger_mode="always_last",
            **quick,
        )
        for control in (self.columns, self.data_card):
            control.submit(
                self._guard(self.on_set, self.answer),
                outputs=[*(self.widgets[path] for path in _SET_BY_CARD), self.answer],
                **quick,
            )
        self.widgets["model.source"].input(
            self._guard(self.on_model, self.answer),
            inputs=self.inputs,
            outputs=[*self.widgets.values(), self.answer],
            **quick,
        )
        self.widgets["device"].change(
            self._guard(self.on_card, self.answer),
            inputs=self.inputs,
            outputs=[self.preset_row],
            trigger_mode="always_last",
            **quick,
        )
        self.preset_row.submit(
            self._guard(self.on_preset, self.answer),
            inputs=self.inputs,
            outputs=[*self.widgets.values(), self.answer],
            **quick,
        )
        self.start.click(
            self._guard(self.on_start, self.answer),
            inputs=self.inputs,
            outputs=[self.estimate, self.editing, self.editing_note, self.start, self.answer],
            trigger_mode="once",
            **quick,
        )
        self.editing_note.click(
            self._guard(self._no_editing, self.answer),
            outputs=[self.editing, self.editing_note, self.start, self.answer],
            **quick,
        )
        self.download.click(
            self._guard(self.on_download, self.answer),
            inputs=self.inputs,
            outputs=[self.estimate, self.answer],
            **quick,
        )
        self.upload.upload(
            self._guard(self.on_upload, self.answer),
            inputs={self.upload, *self.inputs},
            outputs=[self.widgets["data.paths"], self.estimate, self.start, self.own, self.answer],
            **quick,
        )

    def on_load(self) -> Updates:
        """A page was opened: the finished runs and the machine's memory may have changed since the form was built."""
        return {
            self.widgets["model.source"]: gr.update(choices=self._models()),
            self.widgets["device"]: gr.update(choices=self._cards()),
            self.estimate: self._safe_estimate(starter_run(), "auto"),
        }

    def on_change(self, values: Values) -> Updates:
        """The estimate for what the form says now, or every problem it has."""
        own = self.data_choice in values and values[self.data_choice] == OWN_FILES
        planning = str(values[self.widgets["device"]]).startswith(PLAN_PREFIX)
        return {
            self.estimate: self._estimate_html(values),
            self.start: gr.update(interactive=not planning),
            self.own: gr.update(visible=own),
        }

    def on_data(self, values: Values) -> Updates:
        """What the chosen data is and what the chosen model makes of it, as far as that is known by now."""
        try:
            config, _ = self._config(values)
            survey = self.previewer.survey(config)
        except ColumnsError as error:
            return {self.data_card: "", self.columns: self._open_columns(error, config)}
        except VramfitError:
            return {self.data_card: "", self.columns: ""}  # the estimate says it, at the field
        limit, sample, trouble = None, None, ""
        try:
            limit = self.previewer.limit(config)
            sample = self.previewer.samples.ask(config)  # begins beside the survey, on another core
        except VramfitError as error:
            trouble = str(Problem(field="", what=error.what, remedy=error.remedy))
        if survey is None and sample is None:
            return {self.data_card: self._reading()}
        waits = survey is None or (sample is None and not trouble)
        card = data_card(
            survey,
            self.texts,
            choice=config.data,
            limit=limit,
            sample=sample,
            trouble=trouble,
            ask_again=next(self._number) if waits else None,
        )
        return {self.data_card: card, self.columns: self._folded_columns(config, survey, sample)}

    def _open_columns(self, error: ColumnsError, config: RunConfig) -> str:
        own = {part: column for part, column in config.data.columns.items() if column in error.columns}
        return column_map(
            error.columns,
            own or error.guess,
            self.texts,
            chosen=bool(config.data.columns),
            guessed=not own and bool(error.guess),
            wrong=True,
        )

    def _folded_columns(self, config: RunConfig, survey: Survey | None, sample: Sample | None) -> str:
        """The recognised columns, where there are any and they are known by now."""
        if survey is None or sample is None or sample.spread or config.data.paths[0].startswith("starter:"):
            return ""
        return column_map(sample.columns, survey.columns, self.texts, chosen=bool(config.data.columns))

    def on_set(self, event: gr.EventData) -> Updates:
        """A control in the data card sets a field of the form; the answers to the change follow by themselves."""
        path, value = str(event.field), event.value
        if path not in _SET_BY_CARD:
            raise UserError(f"{path} is no field that the data card sets", "Reload the page.")
        text = form.pairs_text(value) if isinstance(value, dict) else str(value)
        return {self.widgets[path]: text}

    def _reading(self) -> str:
        return reading_card(self.texts, ask_again=next(self._number))

    def on_model(self, values: Values) -> Updates:
        """Another model was chosen: what still stands as the starter's recipe set it makes way for the usual values.

        The starter's learning rate would ruin a trained model, and it has no text of its own to be prompted with. What
        the person changed stays. Choosing the starter again brings its recipe back in the same way.
        """
        recipe, usual = form.show(starter_run()), form.show(RunConfig(method="lora"))
        starter = values[self.widgets["model.source"]] == STARTER_MODEL
        old, new = (usual, recipe) if starter else (recipe, usual)
        return {
            widget: new[path]
            for path, widget in self.widgets.items()
            if path not in _CHOSEN_APART and old[path] != new[path] and _text(values[widget]) == old[path]
        }

    def on_card(self, values: Values) -> Updates:
        """Another card: its presets are other ones."""
        return {self.preset_row: waiting(_text(values[self.widgets["device"]]) or "auto", self.texts)}

    def on_preset(self, values: Values, event: gr.EventData) -> Updates:
        """Fill the form for a goal on the chosen card. Data and everything that no preset decides stay."""
        goal = str(event.goal)
        found = self.presets.get(goal, _text(values[self.widgets["device"]]) or "auto")
        if found is None:
            raise UserError(self.texts["preset.none"], self.texts["preset.none.remedy"])
        updates = self.on_model({**values, self.widgets["model.source"]: found.model})
        shown = form.show(found.config())
        return {**updates, **{self.widgets[path]: shown[path] for path in _SET_BY_PRESET}, self.answer: ""}

    def on_start(self, values: Values, request: gr.Request) -> Updates:
        """Queue the run and open it; or say what is wrong and keep everything as typed."""
        try:
            config, card = self._config(values)
            if card.startswith(PLAN_PREFIX):
                raise UserError(self._why_not_here(card.removeprefix(PLAN_PREFIX), cards=cards_together(card)))
            preview = self.previewer.preview(config, card)
            self._check_rows(config)
        except VramfitError as error:
            return {self.estimate: self._error_html(error), self.answer: ""}
        if edited := int(values[self.editing] or 0):
            return self._replace(edited, config, preview)
        run = self._add_once(config, preview, session=str(request.session_hash))
        ensure_running(self.store.data_dir)
        return {self.estimate: self._forecast_html(config, preview), self.answer: self._order("open", str(run))}

    def _replace(self, run: int, config: RunConfig, preview: Preview) -> Updates:
        """Put the form's settings into the place of those of a waiting run, or say that it has begun meanwhile."""
        try:
            self.store.replace_config(run, config, forecast=preview.forecast)
        except JobError as error:
            return {**self._no_editing(), self.answer: notice_card(error, self.texts)}
        return {**self._no_editing(), self.answer: self._order("go", "runs")}

    def _no_editing(self) -> Updates:
        """Start queues a new run again."""
        return {self.editing: "", self.editing_note: "", self.start: gr.update(value=self.texts["new.start"])}

    def _check_rows(self, config: RunConfig) -> None:
        """Raises DataError for rows that cannot be read and TooManyDropped for those that would be left out, as far as
        that is known by now: what the run would stop at when it has counted all of them."""
        survey, sample = self.previewer.survey(config), self.previewer.samples.known(config)
        if survey is None:
            return
        if survey.bad and (refused := ReadOptions.of(config.data).refusal(survey.bad_rows, survey.bad[0])) is not None:
            raise refused
        lost = left_out(survey, sample, config.data, self.previewer.limit(config))
        check_dropped(lost.reasons, rows=lost.rows, choice=config.data, about=lost.about)

    def on_download(self, values: Values) -> Updates:
        """The form as a YAML file for `python -m vramfit train`. The card is left to that machine."""
        try:
            config, _ = self._config(values)
        except ConfigError as error:
            return {self.estimate: problems_card(error.problems, self.texts), self.answer: ""}
        name = f"{config.name or 'run'}.yaml"
        return {self.answer: f"{self._order('download', name, text=config.to_yaml())}"}

    def on_upload(self, values: Values) -> Updates:
        """Keep the uploaded files in the data folder and name them in the form."""
        paths = self.widgets["data.paths"]
        kept = [str(keep_upload(Path(name), uploads_folder(self.store.data_dir))) for name in values[self.upload] or []]
        text = "\n".join([*filter(None, (values[paths] or "").splitlines()), *kept])
        return {paths: text, **self.on_change({**values, paths: text}), self.answer: ""}

    def on_fill(self, config: RunConfig) -> Updates:
        """Put `config` into the form and show the page."""
        shown = form.show(config)
        starter = config.data.paths[0] if config.data.paths[0].startswith("starter:") else OWN_FILES
        updates: Updates = {widget: shown[path] for path, widget in self.widgets.items()}
        updates[self.widgets["data.paths"]] = shown["data.paths"] if starter == OWN_FILES else ""
        updates[self.data_choice] = starter
        updates[self.widgets["model.source"]] = gr.update(choices=self._models(), value=config.model.source)
        updates[self.own] = gr.update(visible=starter == OWN_FILES)
        updates |= self._no_editing()
        updates[self.start] = gr.update(interactive=True, value=self.texts["new.start"])
        updates[self.estimate] = self._safe_estimate(config, config.device)
        updates[self.answer] = self._order("go", "new")
        return updates

    def on_copy(self, run: int) -> Updates:
        """The settings of an old run, to start it again or change a little."""
        return self.on_fill(self.store.job(run).config)

    def on_edit(self, run: int) -> Updates:
        """The settings of a run that waits, to be changed in its place. Raises JobError when it waits no longer."""
        job = self.store.job(run)
        if job.state != "queued" or job.step:
            raise JobError(f"Run {run} has begun, so its settings stay as they are", "Use them for a new run.")
        note = _esc(self.texts["new.editing"].format(id=run, name=job.name))
        leave = _esc(self.texts["new.leave"])
        button = f'<button type="button" class="vf-button vf-button-small" data-leave>{leave}</button>'
        return {
            **self.on_fill(job.config),
            self.editing: str(run),
            self.editing_note: f'<div class="vf-editing"><p>{note}</p>{button}</div>',
            self.start: gr.update(interactive=True, value=self.texts["new.change"]),
        }

    def on_tune(self, run: int) -> Updates:
        """Go on from a run's result: LoRA on questions about the stories."""
        job = self.store.job(run)
        if not job.export:
            raise UserError(f"Run {run} has no exported model", "Choose a run that has finished.")
        if not is_folder(job.folder / job.export):
            raise UserError(f"The result of run {run} is no longer in {job.folder / job.export}", "Choose another run.")
        return self.on_fill(questions_run(str(job.folder / job.export)))

    # ---- what they share --------------------------------------------------------------------------------------

    def _config(self, values: Values) -> tuple[RunConfig, str]:
        """The form's RunConfig and the card it is for. Raises ConfigError with every problem."""
        typed = {path: _text(values[widget]) for path, widget in self.widgets.items()}
        card = typed["device"]
        if card.startswith(PLAN_PREFIX):
            typed["device"] = "auto"
        choice = values[self.data_choice]
        if choice != OWN_FILES:
            typed["data.paths"] = choice
        return form.read(typed, self.texts), card

    def _estimate_html(self, values: Values) -> str:
        try:
            config, card = self._config(values)
            return self._forecast_html(config, self.previewer.preview(config, card))
        except VramfitError as error:
            return self._error_html(error)

    def _safe_estimate(self, config: RunConfig, card: str) -> str:
        try:
            return self._forecast_html(config, self.previewer.preview(config, card))
        except VramfitError as error:
            return self._error_html(error)

    def _forecast_html(self, config: RunConfig, preview: Preview) -> str:
        name = preview.name
        if preview.forecast is None:
            ask_again = next(self._number) if preview.missing == "data" else None
            return later_card(f"estimate.later.{preview.missing}", self.texts, device_name=name, ask_again=ask_again)
        check = self.checks.offer(config.model, preview.forecast)
        off = "" if preview.here else self._why_not_here(name, cards=preview.cards)
        return forecast_card(preview.forecast, self.texts, device_name=name, off=off, check=check)

    def _why_not_here(self, name: str, *, cards: int) -> str:
        """Why Start is off where a run is planned for what is not in this machine."""
        return self.texts["estimate.plan_several" if cards > 1 else "estimate.plan_only"].format(name=name)

    def _error_html(self, error: VramfitError) -> str:
        if isinstance(error, ConfigError):
            return problems_card(error.problems, self.texts)
        for kind, field, own in _FIELD_OF_ERROR:
            if isinstance(error, kind):
                what, remedy = self.texts.said(error.what), self.texts[own] if own else self.texts.said(error.remedy)
                return problems_card([Problem(field=field, what=what, remedy=remedy)], self.texts)
        return error_card(error, self.texts)

    def _add_once(self, config: RunConfig, preview: Preview, *, session: str) -> int:
        """Add the job; the same settings from the same page within DOUBLE_CLICK_S are the job added before."""
        key = (session, config.to_json())
        with self._lock:
            now = time.monotonic()
            self._started = {old: entry for old, entry in self._started.items() if now - entry[0] < DOUBLE_CLICK_S}
            if key not in self._started:
                self._started[key] = (now, self.store.add_job(config, forecast=preview.forecast))
            return self._started[key][1]

    def _order(self, what: str, value: str, *, text: str = "") -> str:
        """A hidden element that assets/panel.js obeys. Numbered, because an answer that is the same changes nothing."""
        return f'<i hidden data-{what}="{_esc(value)}" data-text="{_esc(text)}" data-number="{next(self._number)}"></i>'


def keep_upload(file: Path, folder: Path) -> Path:
    """Move an uploaded file into `folder` under its own name, or `name-2.ext` when that is taken by another file.

    The form lists one path a line, so a name gets no line end, and stays short enough for `-2`. Raises UserError.
    """
    name = " ".join("".join(letter if letter.isprintable() else " " for letter in file.name).split()) or "data"
    ending = Path(name).suffix[:20]
    stem = name.removesuffix(ending).encode()[: NAME_BYTES - len(ending.encode())].decode(errors="ignore").rstrip()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number in itertools.count(1):
            place = folder / (f"{stem}{ending}" if number == 1 else f"{stem}-{number}{ending}")
            if not place.exists():
                shutil.move(file, place)
                return place
    except OSError as error:
        raise UserError(
            f"{name} cannot be kept in {folder}: {error.strerror or error}",
            "Free some room on that disk or check the folder's permissions, or type the file's own path.",
        ) from error
    raise AssertionError("itertools.count ended")


def _text(value: Any) -> str:
    return "" if value is None else str(value)


def _field_id(path: str) -> str:
    return "field-" + path.replace(".", "-")


def _esc(text: str) -> str:
    return html.escape(text, quote=True)
