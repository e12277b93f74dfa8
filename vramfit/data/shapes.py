"""What the columns mean: Alpaca, ShareGPT, OpenAI messages, prompt and completion, question and answer, plain text.

A Shape turns a Row into a Conversation or a Document, or says in one short reason why it cannot (Dropped). Nothing here
raises for a row, whatever it holds.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from vramfit.data.mapping import PARTS, guess_mapping
from vramfit.data.rows import Bytes, NumberText, Row, parse_json, plain
from vramfit.errors import DataError

Role = Literal["system", "user", "assistant", "tool"]
Kind = Literal["alpaca", "sharegpt", "messages", "prompt/completion", "question/answer", "text"]

ROLES: Final[dict[str, Role]] = {
    "system": "system",
    "developer": "system",
    "human": "user",
    "user": "user",
    "prompter": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "chatgpt": "assistant",
    "function_call": "assistant",
    "tool_call": "assistant",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
    "function_response": "tool",
    "tool_response": "tool",
    "ipython": "tool",
}
CALL_ROLES: Final = ("function_call", "tool_call")
LEAST_WEIGHT: Final = 1e-6
MOST_WEIGHT: Final = 100.0
"""An answer that is learned weighs between these: what lies outside is a mistake, or would drown all others."""
SHOWN_CHARS: Final = 80
"""So much of a column's first value is shown where a person is to say what the column is."""

_LIST_COLUMNS: Final = ("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat")
_ALSO_CALLED: Final = {"system": ("system_prompt", "system_message"), "tools": ("functions",)}
_REASONING: Final = ("reasoning_content", "reasoning", "thinking")
_TEXT_COLUMNS: Final = ("text", "content", "document", "body", "story", "raw_content")
_PAIRS: Final[tuple[tuple[Kind, str, str], ...]] = (
    ("prompt/completion", "prompt", "completion"),
    ("prompt/completion", "prompt", "response"),
    ("prompt/completion", "prompt", "output"),
    ("prompt/completion", "prompt", "chosen"),
    ("prompt/completion", "source", "target"),
    ("question/answer", "question", "answer"),
    ("question/answer", "question", "response"),
    ("question/answer", "question", "answers"),
    ("question/answer", "query", "response"),
    ("question/answer", "query", "answer"),
    ("question/answer", "q", "a"),
    ("question/answer", "user", "assistant"),
    ("question/answer", "problem", "solution"),
    ("question/answer", "input", "output"),
    ("question/answer", "input", "target"),
)


# None of these is changed once it is made. They are not declared frozen because there are millions of them, and a
# frozen one takes three times as long to make.
@dataclass(slots=True)
class Turn:
    """One turn. `calls` are an assistant's tool calls ({"name", "arguments"}); `weight` is what the data set multiplies
    the loss of this answer by, 0 where it is not learned."""

    role: Role
    text: str
    calls: tuple[dict[str, Any], ...] = ()
    weight: float = 1.0

    @property
    def says_something(self) -> bool:
        return bool(self.calls or self.text.strip())


@dataclass(slots=True)
class Conversation:
    """Turns in order, and the tools the assistant may call, as JSON schemas."""

    turns: tuple[Turn, ...]
    tools: tuple[dict[str, Any], ...] = ()


@dataclass(slots=True)
class Document:
    """Text to be learned as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class Dropped:
    """Why a row cannot be used. `reason` is the same for rows of one kind, so that they can be counted by it."""

    reason: str


class ColumnsError(DataError):
    """What the columns mean is open or said wrong. `columns` are the file's, each with a value of its first rows to
    recognise it by (""  where none is text); `guess` is a mapping that may be meant, see mapping.py."""

    def __init__(
        self,
        what: str,
        remedy: str,
        *,
        columns: Mapping[str, str],
        guess: Mapping[str, str],
        path: Path | None = None,
    ) -> None:
        super().__init__(what, remedy, path=path)
        self.columns, self.guess = dict(columns), dict(guess)


class UnknownColumns(ColumnsError):
    """The columns are none that are known and no mapping was given."""


class WrongMapping(ColumnsError):
    """The user's mapping names what is not there, or not enough."""


class _Verdict(Exception):
    """Raised inside a conversion, becomes Dropped."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The recognised meaning of a file's columns: part ("instruction", "messages", ...) to column name."""

    kind: Kind
    columns: dict[str, str]

    def convert(self, row: Row) -> Conversation | Document | Dropped:
        """The row as the model is to see it, or why it is dropped. Never raises for what a row holds."""
        parts = {part: row.values.get(column) for part, column in self.columns.items()}
        try:
            return _CONVERTERS[self.kind](parts, self.columns)
        except _Verdict as verdict:
            return Dropped(str(verdict))


def recognise(rows: Iterable[Row], mapping: Mapping[str, str] | None = None) -> Shape:
    """The shape of a file, from its first rows and the user's mapping of parts to columns. Raises DataError."""
    sample = list(rows)
    columns = list(dict.fromkeys(name for row in sample for name in row.values))
    if mapping:
        return _mapped(dict(mapping), columns, sample)
    folded = {name.strip().lower(): name for name in reversed(columns)}
    shape = _list_shape(folded, sample) or _alpaca(folded) or _pair(folded) or _text(folded, sample)
    if shape is None:
        shown = ", ".join(repr(name) for name in columns[:12]) or "none"
        raise UnknownColumns(
            f"The columns ({shown}) are none that are known",
            f"Say which column is which: map {', '.join(PARTS)} to your columns.",
            columns=columns_shown(sample),
            guess=guess_mapping(columns, sample),
            path=sample[0].path if sample else None,
        )
    return shape


def columns_shown(rows: Iterable[Row]) -> dict[str, str]:
    """Every column of these rows, with the beginning of its first text that is not blank."""
    shown: dict[str, str] = {}
    for row in rows:
        for name, value in row.values.items():
            text = "" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            shown[name] = shown.get(name) or " ".join(text[: 2 * SHOWN_CHARS].split())[:SHOWN_CHARS]
    return shown


def _mapped(mapping: dict[str, str], columns: list[str], sample: list[Row]) -> Shape:
    unknown = [part for part in mapping if part not in PARTS]
    missing = [column for column in mapping.values() if column not in columns]
    if unknown:
        raise _wrong(
            f"{unknown[0]!r} is nothing a column can be mapped to", f"The parts are: {', '.join(PARTS)}.", sample
        )
    if missing:
        raise _wrong(
            f"The data has no column {missing[0]!r}, it has: {', '.join(map(repr, columns[:12])) or 'none'}",
            "Map the parts to columns it has.",
            sample,
        )
    kinds: tuple[tuple[Kind, set[str]], ...] = (
        ("messages", {"messages"}),
        ("alpaca", {"instruction", "output"}),
        ("prompt/completion", {"prompt", "completion"}),
        ("alpaca", {"input", "output"}),
        ("text", {"text"}),
    )
    kind = next((kind for kind, needed in kinds if needed <= mapping.keys()), None)
    if kind is None:
        raise _wrong(
            f"A mapping of {', '.join(mapping)} is not enough",
            "Map text, or messages, or instruction and output, or prompt and completion.",
            sample,
        )
    if kind == "alpaca" and "instruction" not in mapping:
        mapping["instruction"] = mapping.pop("input")
    return Shape(kind=kind, columns=mapping)


def _wrong(what: str, remedy: str, sample: list[Row]) -> WrongMapping:
    columns = columns_shown(sample)
    return WrongMapping(what, remedy, columns=columns, guess=guess_mapping(list(columns), sample))


def _list_shape(folded: dict[str, str], sample: list[Row]) -> Shape | None:
    column = next((folded[name] for name in _LIST_COLUMNS if name in folded), None)
    if column is None:
        return None
    first = next((item for row in sample for item in _peek_items(row.values.get(column))), None)
    if first is None:
        return None
    kind: Kind = "sharegpt" if "from" in first else "messages"
    extra = _present(folded, "system", "tools")
    return Shape(kind=kind, columns={"messages": column, **extra})


def _peek_items(value: Any) -> list[dict[str, Any]]:
    """The objects of a list column for recognition; a printed list counts as one message so that rows get verdicts."""
    if isinstance(value, str) and value.lstrip().startswith("["):
        try:
            value = parse_json(value)
        except ValueError:
            return [{"role": ""}]
    return [item for item in value if isinstance(item, dict)] if isinstance(value, list) else []


def _present(folded: dict[str, str], *parts: str) -> dict[str, str]:
    names = {part: (part, *_ALSO_CALLED.get(part, ())) for part in parts}
    found = {part: next((name for name in names[part] if name in folded), None) for part in parts}
    return {part: folded[name] for part, name in found.items() if name is not None}


def _alpaca(folded: dict[str, str]) -> Shape | None:
    output = next((name for name in ("output", "response", "answer", "completion") if name in folded), None)
    if "instruction" not in folded or output is None:
        return None
    columns = {"instruction": folded["instruction"], "output": folded[output]}
    columns |= _present(folded, "input", "system", "history", "tools")
    if "input" not in columns and "context" in folded:
        columns["input"] = folded["context"]
    return Shape(kind="alpaca", columns=columns)


def _pair(folded: dict[str, str]) -> Shape | None:
    for kind, first, second in _PAIRS:
        if first in folded and second in folded:
            extra = _present(folded, "system", "history", "tools")
            return Shape(kind=kind, columns={"prompt": folded[first], "completion": folded[second], **extra})
    return None


def _text(folded: dict[str, str], sample: list[Row]) -> Shape | None:
    if "role" in folded:  # each row is a turn of a conversation, and no document
        return None
    column = next((folded[name] for name in _TEXT_COLUMNS if name in folded), None)
    if column is None and len(folded) == 1:
        only = next(iter(folded.values()))
        # One number or switch under some name is a settings file.
        column = only if any(type(row.values.get(only)) is str for row in sample) else None
    return None if column is None else Shape(kind="text", columns={"text": column})


def _from_alpaca(parts: dict[str, Any], columns: dict[str, str]) -> Conversation:
    asked = _needed(parts, columns, "instruction", may_be_empty=True)
    extra = _optional(parts, columns, "input")
    if extra.strip():
        asked = f"{asked}\n{extra}" if asked.strip() else extra
    elif not asked.strip():
        raise _Verdict(f"{columns['instruction']!r} is empty")
    return _exchange(parts, columns, asked, _needed(parts, columns, "output"))


def _from_pair(parts: dict[str, Any], columns: dict[str, str]) -> Conversation:
    answer = parts.get("completion")
    if isinstance(answer, list) and answer and isinstance(answer[0], str):
        parts = {**parts, "completion": answer[0]}  # several accepted answers: the first one is learned
    if isinstance(parts.get("prompt"), list):  # prompt and completion as lists of messages
        both = [*_list(parts["prompt"]), *_list(parts.get("completion") or [])]
        return _from_list({**parts, "messages": both}, {**columns, "messages": columns["prompt"]})
    prompt = _needed(parts, columns, "prompt")
    return _exchange(parts, columns, prompt, _needed(parts, columns, "completion"))


def _exchange(parts: dict[str, Any], columns: dict[str, str], asked: str, answer: str) -> Conversation:
    """System turn, earlier exchanges, this exchange."""
    exchange = (Turn("user", asked), Turn("assistant", answer))
    if "tools" not in parts and "history" not in parts and "system" not in parts:
        return Conversation(exchange)  # as nearly all rows are
    system = _optional(parts, columns, "system")
    before = [Turn("system", system)] if system.strip() else []
    return Conversation((*before, *_history(parts.get("history")), *exchange), _tools(parts.get("tools")))


def _history(value: Any) -> list[Turn]:
    """Earlier exchanges as pairs [question, answer]."""
    if isinstance(value, str) and not isinstance(value, NumberText) and value.strip():
        try:
            value = parse_json(value)
        except ValueError:
            raise _Verdict("the history is text, not a list of pairs") from None
    if value is None or value in ("", []) or (isinstance(value, str) and not value.strip()):
        return []
    turns = []
    for pair in _list(value):
        if not isinstance(pair, list) or len(pair) != 2 or not all(isinstance(text, str) for text in pair):
            raise _Verdict("the history is not a list of pairs of texts")
        turns += [Turn("user", pair[0]), Turn("assistant", pair[1], weight=1.0 if pair[1].strip() else 0.0)]
    return turns


def _from_text(parts: dict[str, Any], columns: dict[str, str]) -> Document:
    return Document(_needed(parts, columns, "text"))


def _from_list(parts: dict[str, Any], columns: dict[str, str]) -> Conversation:
    value = parts.get("messages")
    if value is None:
        raise _Verdict(f"{columns['messages']!r} is null")
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError:
            raise _Verdict(f"{columns['messages']!r} holds a printed list that is not JSON") from None
    turns = [_turn(item) for item in _list(value)]
    system = _optional(parts, columns, "system")
    if system.strip() and not (turns and turns[0].role == "system"):
        turns.insert(0, Turn("system", system))
    if not turns:
        raise _Verdict("the conversation is empty")
    if not any(turn.role == "assistant" for turn in turns):
        raise _Verdict("no turn is the assistant's")
    if not any(turn.role == "assistant" and turn.says_something for turn in turns):
        raise _Verdict("the assistant's turns are empty")
    return Conversation(tuple(turns), _tools(parts.get("tools")))


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise _Verdict(f"the conversation is {_kind(value)}, not a list of turns")
    return value


def _turn(item: Any) -> Turn:
    if not isinstance(item, dict):
        raise _Verdict(f"a turn is {_kind(item)}, not an object")
    name = item.get("role", item.get("from"))
    if not isinstance(name, str) or not name.strip():
        raise _Verdict("a turn has no role")
    role = ROLES.get(name.strip().lower())
    if role is None:
        raise _Verdict(f"unknown role {name[:40]!r} (known: {', '.join(ROLES)})")
    text = _content(item.get("content", item.get("value", item.get("text"))))
    calls = _calls(item.get("tool_calls") or item.get("function_call")) if role == "assistant" else ()
    if name.strip().lower() in CALL_ROLES:
        written = _written_calls(text)
        text, calls = ("", written) if written else (text, ())
    if role != "assistant":
        return Turn(role, text)
    weight = _weight(item) * bool(calls or text.strip())  # to say nothing is not to be learned
    return Turn(role, _with_reasoning(item, text), calls, weight)


def _with_reasoning(item: dict[str, Any], text: str) -> str:
    """The answer after what was thought before it, where a data set holds that apart: between the tags that templates
    look for in an answer."""
    thought = next((item[key] for key in _REASONING if isinstance(item.get(key), str) and item[key].strip()), None)
    if thought is None or "</think>" in text:
        return text
    bare, answer = thought.strip("\n"), text.lstrip("\n")
    return f"<think>\n{bare}\n</think>\n\n{answer}"


def _weight(item: dict[str, Any]) -> float:
    """What an answer weighs in the loss: 1 unless the data says otherwise, 0 where it is not learned."""
    for key in ("loss_weight", "weight", "train", "trainable"):
        value = item.get(key)
        if value is None:
            continue
        try:
            weight = float(value)
        except (TypeError, ValueError, OverflowError):
            raise _Verdict(f"the {key!r} of a turn is no number") from None
        if weight and not LEAST_WEIGHT <= weight <= MOST_WEIGHT:  # nor is NaN between them
            raise _Verdict(f"the {key!r} of an answer is {weight:g}, and must be 0 to {MOST_WEIGHT:g}")
        return weight
    return 1.0


def _content(value: Any) -> str:
    """A turn's text: text, null (a turn that only calls tools), or a list of parts with "text" or "value"."""
    if value is None:
        return ""
    if isinstance(value, str):
        return str(value)
    if isinstance(value, list):
        return "".join(_part_text(part) for part in value)
    raise _Verdict(f"a turn's content is {_kind(value)}, not text")


def _part_text(part: Any) -> str:
    if isinstance(part, str):
        return str(part)
    if not isinstance(part, dict):
        raise _Verdict(f"a part of a turn is {_kind(part)}, not text")
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text"):
        raise _Verdict(f"a part of a turn is of type {str(kind)[:40]!r}; only text can be learned")
    value = next((part[key] for key in ("text", "value", "content") if part.get(key) is not None), "")
    if not isinstance(value, str):
        raise _Verdict(f"a part of a turn is {_kind(value)}, not text")
    return str(value)


def _calls(value: Any) -> tuple[dict[str, Any], ...]:
    """OpenAI's tool_calls (or the older function_call), arguments as an object when they are JSON."""
    if not value:
        return ()
    found = []
    for item in value if isinstance(value, list) else [value]:
        call = item.get("function", item) if isinstance(item, dict) else None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise _Verdict("a tool call has no function name")
        found.append({"name": str(call["name"]), "arguments": _arguments(call.get("arguments"))})
    return tuple(found)


def _arguments(value: Any) -> Any:
    """A call's arguments; text that is JSON becomes the object it is, because templates write it as JSON again."""
    if isinstance(value, str) and not isinstance(value, NumberText):
        try:
            parsed = parse_json(value)
        except ValueError:
            return str(value)
        return plain(parsed) if isinstance(parsed, dict) else str(value)
    return {} if value is None else plain(value)


def _written_calls(text: str) -> tuple[dict[str, Any], ...]:
    """The calls a function_call turn writes as JSON; none when it is not JSON and so is learned as it stands."""
    try:
        value = parse_json(text)
        return _calls(value)
    except (ValueError, _Verdict):
        return ()


def _tools(value: Any) -> tuple[dict[str, Any], ...]:
    """The tools column: a list of schemas or its JSON text; blank, null and [] mean there are none."""
    if isinstance(value, str):
        if not value.strip():
            return ()
        try:
            value = parse_json(value)
        except ValueError as error:
            raise _Verdict(f"the tools are not JSON: {error}") from None
    if not value:
        return ()
    items = [value] if isinstance(value, dict) else value
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _Verdict("the tools are not a list of objects")
    return tuple(_as_schema(plain(item)) for item in items)


def _as_schema(tool: dict[str, Any]) -> dict[str, Any]:
    """Templates expect {"type": "function", "function": {...}}; data sets often hold the inner object alone."""
    return tool if "function" in tool else {"type": "function", "function": tool}


def _needed(parts: Mapping[str, Any], columns: Mapping[str, str], part: str, *, may_be_empty: bool = False) -> str:
    value = parts.get(part)
    if value is None:
        raise _Verdict(f"{columns[part]!r} is null or missing")
    text = value if type(value) is str else _text_value(value, columns[part])
    if not may_be_empty and not text.strip():
        raise _Verdict(f"{columns[part]!r} is empty")
    return text


def _optional(parts: Mapping[str, Any], columns: Mapping[str, str], part: str) -> str:
    value = parts.get(part)
    if value is None:
        return ""
    return value if type(value) is str else _text_value(value, columns[part])


def _text_value(value: Any, name: str) -> str:
    if isinstance(value, str):
        return str(value)
    if isinstance(value, bool):
        return "true" if value else "false"
    raise _Verdict(f"{name!r} must be text, it is {_kind(value)}")


def _kind(value: Any) -> str:
    names: tuple[tuple[type, str], ...] = (
        (Bytes, "bytes that are no text"),
        (NumberText, "a number"),
        (str, "text"),
        (bool, "true or false"),
        (list, "a list"),
        (dict, "an object"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")


_CONVERTERS: Final[dict[Kind, Callable[[dict[str, Any], dict[str, str]], Conversation | Document]]] = {
    "alpaca": _from_alpaca,
    "sharegpt": _from_list,
    "messages": _from_list,
    "prompt/completion": _from_pair,
    "question/answer": _from_pair,
    "text": _from_text,
}


def merge_turns(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Neighbouring turns of one role as one, joined by a blank line; one that says nothing goes without a trace.

    It has the least of their weights: what has weight 0 is never learned.
    """
    merged: list[Turn] = []
    for turn in turns:
        last = merged[-1] if merged and merged[-1].role == turn.role else None
        if last is None:
            merged.append(turn)
        elif not last.says_something:
            merged[-1] = turn
        elif turn.says_something:
            text = "\n\n".join(piece for piece in (last.text, turn.text) if piece)
            weight = min(last.weight, turn.weight)
            merged[-1] = replace(last, text=text, calls=last.calls + turn.calls, weight=weight)
    return tuple(merged)
