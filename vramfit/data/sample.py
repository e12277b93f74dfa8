"""What a model makes of a data set, without reading all of it: an even draw of its rows in tokens, and any row shown.

Rows are numbered from 0 through all files, those that cannot be read or used among them. sample_worker.py is the
process that does this work for the panel.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from vramfit.config import DataChoice
from vramfit.data.conversations import Content, Encoder, Example
from vramfit.data.numbered import NumberedRows, RowsInOrder, numbered
from vramfit.data.prepare import data_paths
from vramfit.data.read import ReadOptions, open_sources, source_rows
from vramfit.data.rows import BadRow, Row, plain
from vramfit.data.shapes import Conversation, Document, Dropped, columns_shown

SAMPLE_ROWS: Final = 1000
ENCODE_SECONDS: Final = 1.5
READ_SECONDS: Final = 6.0
"""Files that can only be read in order are read for so long: about 400 MB of JSON or CSV on an idle machine."""
SEARCH_SECONDS: Final = 5.0
LONGEST_CHARS: Final = 200_000
"""A document is encoded up to here; its length is then reckoned from the part."""
DRAWN_CHARS: Final = 32 * 1024 * 1024
"""A draw from a file that is read in order is thinned when it holds more than that."""
SHOWN_TOKENS: Final = 4000
SHOWN_CHARS: Final = 4000
"""Of a row that is left out, and so has no tokens, so much of its text is shown."""
NOTHING_LEARNED: Final = "no token of it is to be learned"
_BATCH: Final = 50
_LOOK_EVERY: Final = 64


@dataclass(slots=True)
class Drawn:
    """One row of a draw: its file, its number in that file, and its content; `scale` is how many times longer than
    this content the whole row is. A row that cannot be read has no content."""

    source: int
    number: int
    content: Content | Dropped | None
    scale: float = 1.0

    @property
    def chars(self) -> int:
        if isinstance(self.content, Document):
            return len(self.content.text)
        return sum(len(turn.text) for turn in self.content.turns) if isinstance(self.content, Conversation) else 0


class DataSet:
    """The files of a choice, open, and the encoder of one tokenizer. Raises DataError, also later: see rows.py."""

    def __init__(self, choice: DataChoice, *, tokenizer: Any, cache: Path) -> None:
        self.sources = open_sources(data_paths(choice, cache), ReadOptions.of(choice))
        self.files: list[NumberedRows] = [numbered(source) for source in self.sources]
        self.tokenizer = tokenizer
        self._encoder = Encoder(
            tokenizer,
            trained_on=choice.trained_on,
            conversations=any(source.shape.kind != "text" for source in self.sources),
        )

    # ---- a draw -------------------------------------------------------------------------------------------------

    def sample(
        self, *, rows: int = SAMPLE_ROWS, read_s: float = READ_SECONDS, encode_s: float = ENCODE_SECONDS
    ) -> dict[str, Any]:
        """Token counts of about `rows` rows, drawn evenly from all files, as far as they are read in `read_s` and
        encoded in `encode_s` seconds.

        `lengths` are tokens per row before any cutting, `numbers` which rows these are; `trained` lists per row where
        learned tokens begin and end, in turns. `refused` are [number, reason] of drawn rows that could be read and used
        but for this model. `whole`: every row was drawn, and the numbers are exact; `even`: the draw went through all
        files, not only the beginning; `total`: how many rows there are, if that is known.
        """
        drawn, even = self.draw(rows, until=time.monotonic() + read_s)
        until = time.monotonic() + encode_s
        found: list[tuple[int, int, list[int]]] = []
        refused: list[tuple[int, str]] = []
        done = 0
        count = max(-(-len(drawn) // _BATCH), 1)
        # Each batch is a thin draw of its own: the time may be up after any of them.
        for batch in (drawn[first::count] for first in range(count)):
            if done and time.monotonic() > until:
                break
            done += len(batch)
            self._encode(batch, found, refused)
        found.sort()
        counts = [file.count for file in self.files]
        total = None if any(count is None for count in counts) else sum(count or 0 for count in counts)
        return {
            **self._described(),
            "whole": done == total and all(row.scale == 1 for row in drawn),
            "even": even,
            "total": total,
            "numbers": [number for number, _, _ in found],
            "lengths": [length for _, length, _ in found],
            "trained": [edges for _, _, edges in found],
            "refused": sorted(refused),
            "notes": self._encoder.notes(),
        }

    def draw(self, rows: int, *, until: float) -> tuple[list[Drawn], bool]:
        """About `rows` rows, drawn evenly, and whether the draw went through all files to their ends."""
        read: dict[int, list[Drawn]] = {}
        counts: list[int] = []
        even = True
        for index, file in enumerate(self.files):
            if isinstance(file, RowsInOrder):
                read[index], seen, even = self._read_through(index, most=rows, until=until)
                counts.append(seen)
                if not even:
                    break
                file.count = seen
            else:
                counts.append(file.count or 0)
        total = max(sum(counts), 1)
        drawn: list[Drawn] = []
        for index, count in enumerate(counts):
            wanted = count if total <= rows else max(round(rows * count / total), 1)
            if index in read:
                drawn += [read[index][place] for place in _spread(len(read[index]), wanted)]
            else:
                drawn += [self._drawn(index, place, self.files[index].at(place)) for place in _spread(count, wanted)]
        return drawn, even

    def _read_through(self, index: int, *, most: int, until: float) -> tuple[list[Drawn], int, bool]:
        """An even draw of `most` to twice as many rows of a file, whose number is not known before; the rows read; and
        whether these were all. Whenever there are too many, every second one is given up, and so of those to come."""
        kept: list[Drawn] = []
        step, chars, seen = 1, 0, 0
        for item in source_rows(self.sources[index]):
            if seen % step == 0:
                kept.append(self._drawn(index, seen, item))
                chars += kept[-1].chars
                if len(kept) > 2 * most or (chars > DRAWN_CHARS and len(kept) > 1):
                    kept, step = kept[::2], step * 2
                    chars = sum(row.chars for row in kept)
            seen += 1
            if seen % _LOOK_EVERY == 0 and time.monotonic() > until:
                return kept, seen, False
        return kept, seen, True

    def _drawn(self, index: int, number: int, item: Row | BadRow | None) -> Drawn:
        if not isinstance(item, Row):
            return Drawn(index, number, None)
        content, scale = _shortened(self.sources[index].shape.convert(item))
        return Drawn(index, number, content, scale)

    def _encode(
        self, batch: list[Drawn], found: list[tuple[int, int, list[int]]], refused: list[tuple[int, str]]
    ) -> None:
        """Add to `found` number, length and learned places of each row, to `refused` number and reason."""
        usable = [row for row in batch if isinstance(row.content, Conversation | Document)]
        results = self._encoder.encode([(0, row.content) for row in usable])  # type: ignore[misc]
        for row, result in zip(usable, results, strict=True):
            number = self._before(row.source) + row.number
            reason = _refusal(result)
            if reason is not None:
                refused.append((number, reason))
            elif isinstance(result, Example):
                length = round(len(result) * row.scale)
                found.append((number, length, _edges(result, length)))

    def _before(self, index: int) -> int:
        """How many rows lie in the files before that one, all of which have been counted."""
        return sum(file.count or 0 for file in self.files[:index])

    def _described(self) -> dict[str, Any]:
        """What is known without reading on; `columns` are the first file's, each with a value of its first rows."""
        joined = self.sources[0].threads is not None
        items = () if joined else islice(source_rows(self.sources[0]), _LOOK_EVERY)
        first = [item for item in items if isinstance(item, Row)]
        return {
            "format": _joined(source.layout.format + (".gz" if source.scan.gzipped else "") for source in self.sources),
            "encoding": _joined(source.layout.encoding for source in self.sources),
            "shape": _joined(source.shape.kind for source in self.sources),
            "several": len(self.sources) > 1,
            "columns": columns_shown(first),  # of rows that were joined there is nothing to map
        }

    # ---- one row ------------------------------------------------------------------------------------------------

    def view(self, number: int) -> dict[str, Any] | None:
        """That row as the model sees it, or None where there are not so many.

        `pieces` are [text, learned 0/1, tokens, special 0/1] of its beginning, `tokens` its length before any cutting.
        A row that cannot be read or used has `left_out`, why, and as one piece its own text where it can be read.
        """
        place = self._place(number)
        if place is None:
            return None
        index, item = place
        view: dict[str, Any] = {
            "number": number,
            "file": self.sources[index].path.name,
            "line": item.line,
            "tokens": 0,
            "about": False,
            "left_out": "",
            "pieces": [],
        }
        if isinstance(item, BadRow):
            return {**view, "column": item.column, "left_out": item.reason}
        content, scale = _shortened(self.sources[index].shape.convert(item))
        result = content if isinstance(content, Dropped) else self._encoder.encode([(0, content)])[0]
        if isinstance(result, Dropped):
            return {**view, "left_out": result.reason, "pieces": [[_as_it_stands(item), 0, 0, 0]]}
        ids, learned = result.input_ids[:SHOWN_TOKENS].tolist(), result.trained[:SHOWN_TOKENS].tolist()
        view |= {"left_out": _refusal(result) or "", "about": scale != 1, "tokens": round(len(result) * scale)}
        return {**view, "pieces": pieces(ids, learned, self.tokenizer)}

    def next_left_out(self, after: int, *, seconds: float = SEARCH_SECONDS) -> dict[str, Any]:
        """The number of the next row behind `after` that cannot be read or used, None where there is none among those
        looked at; `looked` is the last of these. Rows that only the model's template refuses are not found."""
        until, number = time.monotonic() + seconds, after
        for number, (index, item) in enumerate(self._walk(after + 1), after + 1):
            if isinstance(item, BadRow) or isinstance(self.sources[index].shape.convert(item), Dropped):
                return {"number": number, "looked": number}
            if number % _LOOK_EVERY == 0 and time.monotonic() > until:
                break
        return {"number": None, "looked": number}

    def _place(self, number: int) -> tuple[int, Row | BadRow] | None:
        """The file and the row of that number."""
        if number < 0:
            return None
        for index, file in enumerate(self.files):
            item = file.at(number) if file.count is None or number < file.count else None
            if item is not None:
                return index, item
            number -= file.count or 0
        return None

    def _walk(self, start: int) -> Iterator[tuple[int, Row | BadRow]]:
        for index, file in enumerate(self.files):
            if file.count is None:
                file.at(start)  # counts the rows where it has not so many
            if file.count is None or start < file.count:
                yield from ((index, item) for item in file.walk(start))
            start = max(start - (file.count or 0), 0)


def _joined(names: Iterator[str]) -> str:
    return " + ".join(dict.fromkeys(names))


def _spread(count: int, wanted: int) -> Sequence[int]:
    """`wanted` of the numbers below `count`, at equal distances; all of them where there are no more."""
    if wanted >= count:
        return range(count)
    return [(2 * place + 1) * count // (2 * wanted) for place in range(wanted)]


def _shortened(content: Content | Dropped) -> tuple[Content | Dropped, float]:
    """The content, a very long document only its beginning, and how many times longer the whole is."""
    if isinstance(content, Document) and len(content.text) > LONGEST_CHARS:
        return replace(content, text=content.text[:LONGEST_CHARS]), len(content.text) / LONGEST_CHARS
    return content, 1.0


def _refusal(result: Example | Dropped) -> str | None:
    """Why a row that could be read is not trained on, whatever the maximum length."""
    if isinstance(result, Dropped):
        return result.reason
    return None if result.trained_tokens else NOTHING_LEARNED


def _as_it_stands(row: Row) -> str:
    """The row's own text, for one that has no other."""
    values = ((name, value if isinstance(value, str) else plain(value)) for name, value in row.values.items())
    lines = (f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in values)
    return "\n".join(lines)[:SHOWN_CHARS]


def _edges(example: Example, length: int) -> list[int]:
    """Where runs of learned tokens begin and end, in turns; what was not encoded goes on as its beginning ended."""
    flags = np.concatenate([[False], example.trained, [False]])
    edges: list[int] = np.flatnonzero(flags[1:] != flags[:-1]).tolist()
    if edges and length != len(example) and edges[-1] == len(example):
        edges[-1] = length
    return edges


def pieces(ids: list[int], learned: list[bool], tokenizer: Any) -> list[tuple[str, int, int, int]]:
    """(text, learned, tokens, special) for each token; tokens that only together make a character are one piece.

    Each is decoded behind the piece before it, because some tokenizers drop the space in front of a first word.
    """
    decode = _decoder(tokenizer)
    special = {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}
    found: list[tuple[str, int, int, int]] = []
    before: list[int] = []
    waiting: list[int] = []
    for index, token in enumerate(ids):
        waiting.append(token)
        ahead = decode(before)
        text = decode([*before, *waiting])[len(ahead) :]
        last = index + 1 == len(ids) or learned[index + 1] != learned[index] or ids[index + 1] in special
        if text.endswith("\ufffd") and not last and len(waiting) < 8:
            continue
        found.append((text, int(learned[index]), len(waiting), int(token in special)))
        before, waiting = waiting, []
    return found


def _decoder(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda ids: tokenizer.decode(ids) if ids else ""
    return lambda ids: backend.decode(ids, skip_special_tokens=False) if ids else ""
