"""Counts over the rows of a file, or of a part of one: `tally_of`. Tallies of parts add up to the file's.

Imports little, because processes that only do this start for one survey (crew.py).
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Final

from vramfit.data.rows import BadRow, Layout, Row, rows_in
from vramfit.data.shapes import Conversation, Document, Dropped, Shape
from vramfit.data.sources import CHUNK_BYTES, open_bytes
from vramfit.data.threads import Threads

LISTED_BAD_ROWS: Final = 100
MAX_HASHED_ROWS: Final = 8_000_000  # 12 bytes each, 8 more while duplicates are counted: 153 MiB


@dataclass(frozen=True, kw_only=True)
class Part:
    """A file to tally, or the lines of one from byte `start` up to `end` (None: the file's end)."""

    path: Path
    layout: Layout
    shape: Shape
    threads: Threads | None = None
    start: int = 0
    end: int | None = None


def may_be_split(part: Part) -> bool:
    """Whether each line is a row by itself wherever one begins to read: JSONL, not packed, in UTF-8."""
    with part.path.open("rb") as file:
        packed = file.read(2) == b"\x1f\x8b"
    return not packed and part.layout.format == "jsonl" and part.layout.codec in _SPLIT and part.threads is None


_SPLIT: Final = ("utf-8", "utf-8-sig")


def split(part: Part, size_bytes: int) -> list[Part]:
    """The same lines as parts of about `size_bytes`, each ending where a line does."""
    if not may_be_split(part):
        return [part]
    parts: list[Part] = []
    rest = part
    with part.path.open("rb") as file:
        while (end := _line_end(file, rest.start + size_bytes)) is not None:
            parts.append(replace(rest, end=end))
            # A byte order mark is one at the file's beginning only.
            rest = replace(rest, start=end, layout=replace(rest.layout, codec="utf-8"))
    return [*parts, rest]


def _line_end(file: IO[bytes], start: int) -> int | None:
    """Where the first line after byte `start` begins; None where there is none."""
    file.seek(start)
    while chunk := file.read(CHUNK_BYTES):
        found = chunk.find(b"\n") + 1
        if found:
            return start + found
        start += len(chunk)
    return None


def tally_of(part: Part) -> Tally:
    """Read all of it. Raises DataError where the rest cannot be read."""
    tally = Tally()
    layout = replace(part.layout, note=tally.notes.append)
    with open_bytes(part.path) as stream:
        whole = part.start == 0 and part.end is None
        lines = None if whole else _Span(stream, part.start, part.end)
        rows = rows_in(lines or stream, part.path, layout)  # type: ignore[arg-type]
        for item in rows if part.threads is None else part.threads.conversations(rows):
            tally.add(item, part.shape)
        tally.lines = lines.newlines if lines else 0
    return tally


class _Span:
    """The bytes of a stream from `start` to `end`, and how many line ends were read of them."""

    def __init__(self, stream: IO[bytes], start: int, end: int | None) -> None:
        stream.seek(start)
        self._stream = stream
        self._left = None if end is None else end - start
        self.newlines = 0

    def read(self, size: int) -> bytes:
        data = self._stream.read(size if self._left is None else min(size, self._left))
        if self._left is not None:
            self._left -= len(data)
        self.newlines += data.count(b"\n")
        return data


class Tally:
    """Counts over rows. Its memory is bounded: 8 bytes a row for duplicates and 4 for lengths, both up to a limit.

    `lines` are the line ends of a part that is followed by another. `hashes` are of one seed within a process.
    """

    def __init__(self) -> None:
        self.rows = self.bad_rows = self.turns = self.text_bytes = self.trained_bytes = self.lines = 0
        self.bad: list[BadRow] = []
        self.dropped: Counter[str] = Counter()
        self.dropped_rows: list[tuple[str, int, str]] = []
        self.roles: Counter[str] = Counter()
        self.notes: list[str] = []
        self.hashes = array("q")
        self.sizes = array("I")

    def add(self, item: Row | BadRow, shape: Shape) -> None:
        """Count one row."""
        if isinstance(item, BadRow):
            self.bad_rows += 1
            if len(self.bad) < LISTED_BAD_ROWS:
                self.bad.append(item)
            return
        content = shape.convert(item)
        if isinstance(content, Dropped):
            self.dropped[content.reason] += 1
            if len(self.dropped_rows) < LISTED_BAD_ROWS:
                self.dropped_rows.append((item.path.name, item.line, content.reason))
            return
        self._add_content(content)

    def _add_content(self, content: Conversation | Document) -> None:
        # This runs for every row of gigabytes: one loop over the turns, and no text is encoded that is ASCII.
        self.rows += 1
        if isinstance(content, Document):
            size = trained = _bytes_of(content.text)
            what: object = content.text
        else:
            size = trained = 0
            whole: list[object] = []
            for turn in content.turns:
                text, role = turn.text, turn.role
                part = len(text) if text.isascii() else _bytes_of(text)
                whole += (role, text)
                if turn.calls:
                    calls = str(turn.calls)
                    part += len(calls)
                    whole.append((calls,))
                size += part
                if role == "assistant":
                    trained += part
                self.roles[role] += 1
            if content.tools:
                tools = str(content.tools)
                size += len(tools)
                whole.append((None, tools))
            self.turns += len(content.turns)
            what = tuple(whole)
        self.text_bytes += size
        self.trained_bytes += trained
        if len(self.hashes) < MAX_HASHED_ROWS:
            self.hashes.append(hash(what))
            self.sizes.append(min(size, 2**32 - 1))

    def extend(self, more: Tally, *, lines: int) -> None:
        """Add what was counted behind this, in a part that begins after so many `lines` of its file."""
        self.rows += more.rows
        self.bad_rows += more.bad_rows
        self.turns += more.turns
        self.text_bytes += more.text_bytes
        self.trained_bytes += more.trained_bytes
        self.dropped.update(more.dropped)
        self.roles.update(more.roles)
        self.notes += more.notes
        bad = more.bad[: LISTED_BAD_ROWS - len(self.bad)]
        self.bad += [replace(row, line=None if row.line is None else row.line + lines) for row in bad]
        dropped = more.dropped_rows[: LISTED_BAD_ROWS - len(self.dropped_rows)]
        self.dropped_rows += [(name, line + lines, reason) for name, line, reason in dropped]
        room = MAX_HASHED_ROWS - len(self.hashes)
        self.hashes.extend(more.hashes if len(more.hashes) <= room else more.hashes[:room])
        self.sizes.extend(more.sizes if len(more.sizes) <= room else more.sizes[:room])


def _bytes_of(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))


def total(parts: list[Part], tallies: Iterator[Tally]) -> Tally:
    """The tallies of these parts, in their order, as one."""
    whole = Tally()
    lines = 0
    for part, tally in zip(parts, tallies, strict=True):
        lines = 0 if part.start == 0 else lines
        whole.extend(tally, lines=lines)
        lines += tally.lines
    return whole
