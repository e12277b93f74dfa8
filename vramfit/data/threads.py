"""Conversations whose turns are rows that name their parent: an id column, a parent column, and one turn or exchange.

Each row without replies ends one conversation, read from its root down. An answer that several conversations share is
learned in the first of them only. All rows of a file are held in memory, which is why their number is limited.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Final

from vramfit.data.rows import BadRow, Row
from vramfit.data.shapes import Conversation, Dropped, Shape, UnknownColumns, recognise
from vramfit.errors import DataError

MOST_ROWS: Final = 2_000_000
_PAIRS: Final = (("id", "parent_id"), ("message_id", "parent_id"), ("message_id", "parent_message_id"))
_ROLES: Final = ("role", "from")
_TEXTS: Final = ("text", "content", "value", "message")
_SHOWN_IDS: Final = 5

THREAD_SHAPE: Final = Shape(kind="messages", columns={"messages": "messages", "tools": "tools"})
"""What the rows given by `Threads.conversations` are."""


@dataclass(frozen=True, kw_only=True)
class Threads:
    """Which columns hold a row's id, its parent's, and its turn: `role` and `text`, or what `exchange` makes of it."""

    id: str
    parent: str
    role: str | None = None
    text: str | None = None
    exchange: Shape | None = None

    def conversations(self, items: Iterable[Row | BadRow]) -> Iterator[Row | BadRow]:
        """One row with "messages" per conversation, and a BadRow for each row without a whole way up to a root."""
        tree = _Tree(self)
        for item in items:
            if isinstance(item, BadRow):
                yield item
            elif (bad := tree.add(item)) is not None:
                yield bad
        yield from tree.conversations()

    def turns(self, row: Row) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """The row's turns as messages, and its tools. Raises ValueError with a short reason."""
        if self.exchange is None:
            return [{"role": row.values.get(self.role or ""), "content": row.values.get(self.text or "")}], []
        content = self.exchange.convert(row)
        if isinstance(content, Dropped):
            raise ValueError(content.reason)
        if not isinstance(content, Conversation):
            raise ValueError("the row is no exchange")
        return [{"role": turn.role, "content": turn.text} for turn in content.turns], list(content.tools)


def find_threads(rows: Iterable[Row]) -> Threads | None:
    """The columns of id, parent and turn in these rows; None where they name no parent or no known turn."""
    sample = list(rows)
    columns = list(dict.fromkeys(name for row in sample for name in row.values))
    folded = {name.strip().lower(): name for name in reversed(columns)}
    for name, parent in _PAIRS:
        if name in folded and parent in folded:
            role = next((folded[one] for one in _ROLES if one in folded), None)
            text = next((folded[one] for one in _TEXTS if one in folded), None)
            if role is not None and text is not None:
                return Threads(id=folded[name], parent=folded[parent], role=role, text=text)
            return _of_exchanges(sample, folded[name], folded[parent])
    return None


def _of_exchanges(sample: list[Row], name: str, parent: str) -> Threads | None:
    try:
        shape = recognise(sample)
    except UnknownColumns:
        return None
    exchanges = shape.kind in ("alpaca", "prompt/completion", "question/answer")
    return Threads(id=name, parent=parent, exchange=shape) if exchanges else None


class _Tree:
    """The rows of one file by id."""

    def __init__(self, threads: Threads) -> None:
        self._threads = threads
        self._rows: dict[str, Row] = {}
        self._parents: dict[str, str] = {}
        self._learned: set[str] = set()

    def add(self, row: Row) -> BadRow | None:
        """Keep a row; a BadRow for one without an id, or with one that occurred before."""
        if len(self._rows) >= MOST_ROWS:
            raise DataError(
                f"Rows that name their parents are held in memory, and there are more than {MOST_ROWS:,}",
                "Write whole conversations as rows, or split the file by conversation.",
                path=row.path,
                line=row.line,
            )
        name = _name(row.values.get(self._threads.id))
        if not name:
            return BadRow(row.path, row.line, None, f"the column {self._threads.id!r} is empty")
        if name in self._rows:
            first = self._rows[name].line
            return BadRow(row.path, row.line, None, f"the id {name!r} occurs twice, first in line {first}")
        self._rows[name] = row
        self._parents[name] = _name(row.values.get(self._threads.parent))
        return None

    def conversations(self) -> Iterator[Row | BadRow]:
        faults = self._faults()
        answered = set(self._parents.values())
        for name, row in self._rows.items():
            if name in faults:
                yield BadRow(row.path, row.line, None, faults[name])
            elif name not in answered:
                yield self._conversation(name)

    def _faults(self) -> dict[str, str]:
        """Why rows have no whole way up, by id. Every row is visited once, so this ends whatever the parents are."""
        faults: dict[str, str] = {}
        sound: set[str] = set()
        for start in self._rows:
            way: dict[str, None] = {}
            name = start
            while name and name in self._rows and name not in way and name not in sound and name not in faults:
                way[name] = None
                name = self._parents[name]
            fault = self._fault(name, list(way)) if name and name not in sound else None
            if fault is None:
                sound.update(way)
            else:
                faults.update(dict.fromkeys(way, fault))
        return faults

    def _fault(self, name: str, way: list[str]) -> str | None:
        """Why the way up, which stopped at `name`, reaches no root."""
        if name not in self._rows:
            return f"the parent {name!r} of {way[-1]!r} is missing"
        if name in way:
            circle = [*way[way.index(name) :], name]
            shown = " -> ".join(map(repr, circle[:_SHOWN_IDS]))
            more = f" and {len(circle) - _SHOWN_IDS:,} more" if len(circle) > _SHOWN_IDS else ""
            return f"the parents go round in a circle: {shown}{more}"
        return f"its thread goes up to {name!r}, which has no root"

    def _conversation(self, leaf: str) -> Row | BadRow:
        way = [leaf]
        while parent := self._parents[way[-1]]:
            way.append(parent)
        messages: list[dict[str, Any]] = []
        tools: list[dict[str, Any]] = []
        for name in reversed(way):
            try:
                turns, tools = self._threads.turns(self._rows[name])
            except ValueError as reason:
                row = self._rows[name]
                return BadRow(row.path, row.line, None, str(reason))
            if messages:  # a system column says the same in every row
                turns = [turn for turn in turns if turn["role"] != "system" or self._threads.exchange is None]
            if name in self._learned:
                turns = [{**turn, "weight": 0} for turn in turns]
            messages += turns
        self._learned.update(way)
        row = self._rows[leaf]
        return Row({"messages": messages, "tools": tools}, row.path, row.line)


def _name(value: Any) -> str:
    return "" if value is None else str(value).strip()
