"""Which column is which, where the names are none that are known: what a mapping may name, and the best guess at one.

A guess is only ever shown, marked as one, for a person to take or change; nothing is trained on it unasked.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from vramfit.data.rows import NumberText, Row, parse_json

PARTS: Final = (
    "text", "messages", "instruction", "input", "output", "system", "history", "tools", "prompt", "completion",
)  # fmt: skip
"""What a column can be mapped to, see DataChoice.columns."""


@dataclass(frozen=True, kw_only=True)
class MappedKind:
    """A kind of rows that columns can be mapped to: the parts it needs, and those it may have."""

    name: str
    needs: tuple[str, ...]
    may_have: tuple[str, ...] = ()

    @property
    def parts(self) -> tuple[str, ...]:
        return (*self.needs, *self.may_have)


MAPPED_KINDS: Final = (
    MappedKind(name="prompt", needs=("prompt", "completion"), may_have=("system", "history", "tools")),
    MappedKind(name="instruction", needs=("instruction", "output"), may_have=("input", "system", "history", "tools")),
    MappedKind(name="messages", needs=("messages",), may_have=("system", "tools")),
    MappedKind(name="text", needs=("text",)),
)
"""In the order a person is offered them."""

_NAMES: Final[Mapping[str, tuple[str, ...]]] = {
    "prompt": (
        "prompt", "question", "instruction", "query", "request", "ask", "problem", "user", "human", "source", "task",
        "title", "q", "src", "in", "问题", "提问", "指令", "质问", "質問", "题目",
    ),
    "completion": (
        "completion", "answer", "response", "output", "reply", "solution", "target", "assistant", "bot", "summary",
        "result", "chosen", "translation", "label", "a", "tgt", "out", "回答", "答案", "回复", "输出", "応答", "答え",
    ),
    "input": ("context", "passage", "input", "background", "evidence", "reference", "上下文", "背景"),
    "system": ("system", "persona", "role", "character", "系统"),
    "history": ("history", "previous", "历史"),
    "tools": ("tools", "tool", "functions", "function", "apis"),
    "text": ("text", "content", "body", "document", "article", "story", "passage", "正文", "文本", "内容"),
}  # fmt: skip
_ROLE_KEYS: Final = ("role", "from")
_TEXT_KEYS: Final = ("content", "value", "text")
_LIKE: Final = 0.8
"""Two words this much alike, by difflib's ratio, are taken for one misspelt or bent."""
_SAMPLE_CHARS: Final = 2000


def guess_mapping(columns: Sequence[str], rows: Sequence[Row]) -> dict[str, str]:
    """The best guess at which part each column is, from the columns' names and what these rows hold; {} when there is
    none. It names parts of one of MAPPED_KINDS, all that this kind needs among them."""
    values = {name: [row.values.get(name) for row in rows] for name in columns}
    turns = next((name for name in columns if _most(values[name], _is_turns)), None)
    if turns is not None:
        rest = [name for name in columns if name != turns]
        return {"messages": turns, **_named(rest, values, "system", "tools")}
    texts = [name for name in columns if _most(values[name], _is_text)]
    prose = _prose(texts, values)
    if not prose:
        return {}
    if len(prose) == 1:
        return {"text": prose[0]}
    return _pair(columns, prose, values)


def _pair(columns: Sequence[str], prose: list[str], values: Mapping[str, list[Any]]) -> dict[str, str]:
    """Which of several columns of text is asked and which answered: by name, else the longest is the answer."""
    answer = _best("completion", prose)
    asked = _best("prompt", [name for name in prose if name != answer])
    text = _best("text", prose)
    if answer is None and asked is None and text is not None:
        return {"text": text}
    by_length = sorted(prose, key=lambda name: -_mean_chars(values[name]))
    answer = answer or next(name for name in by_length if name != asked)
    # People write what is asked before its answer; of several columns in front the first.
    asked = asked or next(name for name in prose if name != answer)
    rest = [name for name in columns if name not in (asked, answer)]
    extra = _named(rest, values, "system", "history", "tools")
    context = _best("input", [name for name in rest if name in prose and name not in extra.values()])
    if context is not None:
        return {"instruction": asked, "input": context, "output": answer, **extra}
    return {"prompt": asked, "completion": answer, **extra}


def _named(columns: Sequence[str], values: Mapping[str, list[Any]], *parts: str) -> dict[str, str]:
    """Columns that by name and content are these optional parts."""
    fits = {"system": _is_text, "history": _is_list, "tools": _is_list}
    found: dict[str, str] = {}
    for part in parts:
        free = [name for name in columns if name not in found.values() and _most(values[name], fits[part])]
        name = _best(part, free)
        if name is not None:
            found[part] = name
    return found


def _best(part: str, columns: Sequence[str]) -> str | None:
    """The column whose name is most like one of the part's usual names, the first of equals; None when none is."""
    scores = [(_likeness(name, _NAMES[part]), -place) for place, name in enumerate(columns)]
    best = max(scores, default=(0.0, 0))
    return columns[-best[1]] if best[0] else None


def _likeness(column: str, names: tuple[str, ...]) -> float:
    """How much a column's name is like one of `names`, 0 to 1. Usual names come first, and count a little more."""
    best = 0.0
    words = _words(column)
    for place, name in enumerate(names):
        for word in words:
            same = 1.0 if word == name or word == name + "s" else 0.0
            if not same and len(name) > 3 and len(word) > 3:
                ratio = difflib.SequenceMatcher(None, word, name).ratio()
                same = ratio if ratio >= _LIKE else 0.0
            elif not same and not name.isascii() and name in word:
                same = 0.9
            best = max(best, same * (1 - place / 1000) * (1 - (len(words) - 1) / 50))
    return best


def _words(column: str) -> list[str]:
    """`userQuestion_text` -> user, question, text."""
    return [word.lower() for word in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[^\W\d_a-zA-Z]+", column)]


def _prose(texts: Sequence[str], values: Mapping[str, list[Any]]) -> list[str]:
    """The columns to learn from: no numbers, dates, links, ids or words of a small set where others are there."""
    return [name for name in texts if _is_prose(values[name])] or [
        name for name in texts if any(_likeness(name, names) for names in _NAMES.values())
    ]


def _is_prose(values: list[Any]) -> bool:
    texts = [value[:_SAMPLE_CHARS] for value in values if isinstance(value, str) and value.strip()]
    if not texts:
        return False
    several_words = sum(_has_words(text) for text in texts)
    repeated = len(texts) >= 20 and len(set(texts)) * 5 < len(texts)
    return several_words * 2 > len(texts) and not repeated


def _has_words(text: str) -> bool:
    """Two words with letters in them, or four letters of a script that writes no spaces."""
    if re.match(r"\s*(https?://|www\.)\S*\s*$", text):
        return False
    return len(re.findall(r"[^\W\d_]{2,}", text)) >= 2 or len(re.findall(r"[\u3040-\u30ff\u3400-\u9fff]", text)) >= 4


def _mean_chars(values: list[Any]) -> float:
    texts = [len(value) for value in values if isinstance(value, str)]
    return sum(texts) / max(len(texts), 1)


def _most(values: list[Any], holds: Callable[[Any], bool]) -> bool:
    """Whether most of the values that are there are such."""
    there = [value for value in values if value not in (None, "", [])]
    return bool(there) and sum(map(holds, there)) * 2 > len(there)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and not isinstance(value, NumberText) and not _is_list(value)


def _is_list(value: Any) -> bool:
    if isinstance(value, str):
        return not isinstance(value, NumberText) and isinstance(_unprinted(value), list)
    return isinstance(value, list)


def _is_turns(value: Any) -> bool:
    """Whether a value is a conversation: objects with a role and a text, as a list or as its JSON text."""
    items = _unprinted(value) if isinstance(value, str) else value
    if not isinstance(items, list) or not items:
        return False
    return all(
        isinstance(item, dict)
        and any(key in item for key in _ROLE_KEYS)
        and any(key in item for key in (*_TEXT_KEYS, "tool_calls"))
        for item in items
    )


def _unprinted(text: str) -> Any:
    """The list that a text is JSON of, else None."""
    if not text.lstrip().startswith("["):
        return None
    try:
        return parse_json(text)
    except ValueError:
        return None
