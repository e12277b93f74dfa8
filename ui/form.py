"""Widgets <-> RunConfig. The form is derived from RunConfig's fields: one FieldSpec each, no list to keep in step.

Every number is a text box, so that `2e-4` and `auto` can be typed and nothing typed is lost when it is wrong. What a
widget holds is a plain string (`texts` below); `read` turns all of them into a RunConfig or into every problem at once.
"""

from __future__ import annotations

import json
import math
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ui.texts import Texts
from vramfit.config import RunConfig
from vramfit.errors import ConfigError, Problem

Kind = Literal["text", "number", "choice", "lines", "pairs"]

SIMPLE: Final = (
    "model.source",
    "data.paths",
    "device",
    "method",
    "data.max_length",
    "schedule.epochs",
    "schedule.max_steps",
    "schedule.learning_rate",
    "schedule.sequences_per_step",
    "name",
)
"""What the simple mode shows, in reading order. Every other field is folded under Advanced."""

HIDDEN: Final = ("version",)

SHOWN_LETTERS: Final = 60
"""A problem repeats so much of what was typed."""

GROUPS: Final = ("schedule", "adapter", "memory", "loss", "health", "data", "output", "run")
"""The groups of the advanced fields, in order: the parts of RunConfig; `run` takes what belongs to none."""

_YES_NO: Final = {"yes": True, "no": False}


@dataclass(frozen=True, kw_only=True)
class FieldSpec:
    """One setting and the widget it gets. `blank` is what an emptied widget means; `required` when it means nothing."""

    path: str
    kind: Kind
    choices: tuple[str, ...] = ()
    blank: Any = None
    required: bool = False
    whole: bool = False

    @property
    def simple(self) -> bool:
        return self.path in SIMPLE

    @property
    def group(self) -> str:
        """The advanced group this field is folded under: the first part of its path, or `run`."""
        head, _, rest = self.path.partition(".")
        return head if rest and head in GROUPS else "run"


def field_specs() -> tuple[FieldSpec, ...]:
    """A FieldSpec for every leaf of RunConfig but HIDDEN ones, in the order RunConfig declares them."""
    return tuple(_spec(path, info) for path, info in _leaves(RunConfig) if path not in HIDDEN)


def show(config: RunConfig) -> dict[str, str]:
    """The text of every widget for `config`, by path. The inverse of `read`."""
    values = config.model_dump(mode="json")
    return {spec.path: _shown(spec, _get(values, spec.path)) for spec in field_specs()}


def read(texts: Mapping[str, str | None], words: Texts) -> RunConfig:
    """The RunConfig that widgets holding `texts` ask for; absent paths keep their defaults.

    Raises ConfigError with every problem, each at its field's path and in the reader's words.
    """
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for spec in field_specs():
        if spec.path not in texts:
            continue
        try:
            _put(values, spec.path, _value(spec, texts[spec.path] or "", words))
        except ConfigError as error:
            problems.extend(error.problems)
    try:
        config = RunConfig.parse(values)
    except ConfigError as error:
        known = {problem.field for problem in problems}
        problems.extend(_worded(problem, words) for problem in error.problems if problem.field not in known)
    if problems:
        raise ConfigError(problems)
    return config


def field_of(path: str) -> str:
    """The form's field a problem belongs to: `data.paths.0` is shown at `data.paths`. "" when no field is at fault."""
    paths = {spec.path for spec in field_specs()}
    while path and path not in paths:
        path = path.rpartition(".")[0]
    return path


def _leaves(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _leaves(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", info


def _spec(path: str, info: FieldInfo) -> FieldSpec:
    """Widget and meaning from the annotation: `int | Literal["auto"]` is a number whose blank means "auto"."""
    members = _members(info.annotation)
    words = [word for member in members if _origin(member) is Literal for word in typing.get_args(member)]
    blank: Any = "auto" if "auto" in words else words[0] if words else None
    optional = type(None) in members
    if bool in members:
        return FieldSpec(path=path, kind="choice", choices=(*words, "yes", "no"), blank=blank)
    if int in members or float in members:
        required = not words and not optional
        return FieldSpec(path=path, kind="number", blank=blank, required=required, whole=float not in members)
    filled = any(getattr(bound, "min_length", 0) for bound in info.metadata)
    if any(_origin(member) is tuple for member in members):
        return FieldSpec(path=path, kind="lines", blank=blank if words else [], required=filled)
    if any(_origin(member) is dict for member in members):
        return FieldSpec(path=path, kind="pairs", blank={})
    if words:
        return FieldSpec(path=path, kind="choice", choices=tuple(str(word) for word in words), blank=info.default)
    return FieldSpec(path=path, kind="text", blank=None if optional else info.default, required=filled)


def _members(annotation: Any) -> list[Any]:
    """The members of a union, `Annotated` unwrapped: `Annotated[int, ...] | Literal["auto"]` -> [int, Literal]."""
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return [found for member in typing.get_args(annotation) for found in _members(member)]
    return [annotation]


def _origin(annotation: Any) -> Any:
    return typing.get_origin(annotation)


def _value(spec: FieldSpec, text: str, words: Texts) -> Any:
    """A widget's text as RunConfig wants it. Raises ConfigError for what is no number or no `name: column` line."""
    text = text if spec.kind in ("lines", "pairs") else text.strip()
    if not text.strip():
        if spec.required:
            raise _problem(spec, words, "empty" if spec.kind == "number" else "blank")
        return spec.blank
    if spec.kind == "number":
        return _number(spec, text, words)
    if spec.kind == "lines":
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return lines[0] if lines == [spec.blank] else lines
    if spec.kind == "pairs":
        return dict(_pair(spec, line, words) for line in text.splitlines() if line.strip())
    return _YES_NO.get(text, text) if {"yes", "no"} <= set(spec.choices) else text


def _number(spec: FieldSpec, text: str, words: Texts) -> int | float | str:
    if text == "auto" and spec.blank == "auto":
        return text
    try:
        return int(text)
    except ValueError:
        pass
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):  # `1e309` is infinite, and no setting is
        raise _problem(spec, words, "not_number", text)
    if spec.whole and number.is_integer():
        return int(number)
    if spec.whole:
        raise _problem(spec, words, "not_whole", text)
    return number


def _pair(spec: FieldSpec, line: str, words: Texts) -> tuple[str, str]:
    name, colon, column = line.partition(":")
    if not colon or not name.strip() or not column.strip():
        raise _problem(spec, words, "not_pair", line.strip())
    return name.strip(), _unquoted(column.strip())


def pairs_text(pairs: Mapping[str, str]) -> str:
    """Names and columns as a `pairs` widget holds them, one a line. A column's name that a line would change is quoted
    as in JSON."""
    return "\n".join(f"{name}: {_quoted(column)}" for name, column in pairs.items())


def _quoted(column: str) -> str:
    plain = column == column.strip() and len(column.splitlines()) == 1 and not column.startswith('"')
    return column if plain else json.dumps(column, ensure_ascii=True)


def _unquoted(column: str) -> str:
    if not column.startswith('"'):
        return column
    try:
        value = json.loads(column)
    except ValueError:
        return column
    return value if isinstance(value, str) else column


def _problem(spec: FieldSpec, words: Texts, kind: str, text: str = "") -> ConfigError:
    shown = text if len(text) <= SHOWN_LETTERS else f"{text[:SHOWN_LETTERS]}…"
    what = words[f"problem.{kind}"].format(label=words.label(spec.path), text=shown)
    return ConfigError([Problem(field=spec.path, what=what, remedy=words[f"problem.{kind}.remedy"])])


def _worded(problem: Problem, words: Texts) -> Problem:
    """RunConfig speaks of `schedule.epochs`; the page of "Epochs"."""
    field = field_of(problem.field)
    if not field or not problem.what.startswith(problem.field):
        return problem
    return Problem(
        field=problem.field, what=words.label(field) + problem.what[len(problem.field) :], remedy=problem.remedy
    )


def _shown(spec: FieldSpec, value: Any) -> str:
    if value is None or (spec.kind in ("number", "lines") and value == spec.blank):
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if spec.kind == "lines":
        return "\n".join(value)
    if spec.kind == "pairs":
        return pairs_text(value)
    return str(value)


def _get(values: Mapping[str, Any], path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    for section in sections:
        values = values.setdefault(section, {})
    values[name] = value
