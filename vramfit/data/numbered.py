"""Rows by their number: any row of a file without reading all that is before it, where the file's format allows that.

Rows count from 0 within their file, good and bad ones alike, in the order in which `source_rows` gives them. Of a JSONL
file the bytes say where rows begin, of a Parquet file its own table of contents. All other files are read up to the
row, going on from where the last one was, so that one row after another costs nothing again.
"""

from __future__ import annotations

import codecs
import io
from bisect import bisect_right
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from vramfit.data.read import Source, source_rows
from vramfit.data.rows import BLANK, BadRow, Row, rows_in
from vramfit.data.sources import open_bytes

STRIDE: Final = 16
"""The place of every 16th row is kept: 1 byte a row, and half of 16 rows to read for one."""
KEPT_BEHIND: Final = 16
"""So many rows behind the last one are kept where a file can only be read forward."""
MOST_DOUBTFUL: Final = 100_000
"""Lines that begin with a space may be blank, and so no rows. They are looked at one by one, up to this number."""
LINE_END_CODECS: Final = (
    "utf-8", "utf-8-sig", "ascii", "gb18030", "gbk", "gb2312", "cp932", "cp949", "shift_jis", "big5", "euc_jp",
    "euc_kr", "cp1250", "cp1251", "cp1252", "iso8859-1", "iso8859-15", "koi8-r",
)  # fmt: skip
"""Encodings in which the byte of a line end is never a part of another character."""
_CHUNK_BYTES: Final = 4 * 1024 * 1024
_LINE_END: Final = 10

Item = Row | BadRow


class NumberedRows(Protocol):
    """The rows of one file. `count` is None until it is known."""

    count: int | None

    def at(self, number: int) -> Item | None:
        """The row of that number, counted from 0; None where there are not so many. Raises DataError."""

    def walk(self, start: int) -> Iterator[Item]:
        """All rows from that one on. Raises DataError."""


def numbered(source: Source) -> NumberedRows:
    """The quickest way to this file's rows. Raises DataError for a file that cannot be read."""
    plain = not source.scan.gzipped and source.threads is None
    if plain and source.layout.format == "parquet":
        return ParquetRows(source)
    if plain and source.layout.format == "jsonl" and codecs.lookup(source.layout.codec).name in LINE_END_CODECS:
        starts = find_starts(source.path, source.layout.codec)
        if starts is not None:
            return JsonlRows(source, starts)
    return RowsInOrder(source)


@dataclass(frozen=True, kw_only=True)
class Starts:
    """Where rows begin: byte offset and line (from 0) of every STRIDE-th; how many rows there are; the file's bytes."""

    offsets: NDArray[np.int64]
    lines: NDArray[np.int64]
    rows: int
    size: int


def find_starts(path: Path, codec: str) -> Starts | None:
    """The places of a JSONL file's rows by its line ends; None where too many lines may be blank. Raises DataError."""
    offsets: list[NDArray[np.int64]] = []
    lines: list[NDArray[np.int64]] = []
    rows = line = base = doubtful = 0
    fresh = True  # a line begins where the next chunk does
    with open_bytes(path) as stream, path.open("rb") as looking:
        while chunk := stream.read(_CHUNK_BYTES):
            data = np.frombuffer(chunk, dtype=np.uint8)
            begins = np.flatnonzero(data == _LINE_END) + 1
            ended = bool(len(begins) and begins[-1] == len(data))
            begins = np.concatenate([[0] if fresh else [], begins[:-1] if ended else begins]).astype(np.int64)
            fresh = ended
            first = data[begins]
            blank = first == _LINE_END
            in_doubt = np.flatnonzero(((first <= 32) & ~blank) | (first >= 128))
            doubtful += len(in_doubt)
            if doubtful > MOST_DOUBTFUL:
                return None
            for index in in_doubt.tolist():
                blank[index] = _is_blank(looking, base + int(begins[index]), codec)
            here = np.flatnonzero(~blank)
            kept = here[-rows % STRIDE :: STRIDE]
            offsets.append(begins[kept] + base)
            lines.append(kept + line)
            rows, line, base = rows + len(here), line + len(begins), base + len(chunk)
    empty = np.zeros(0, dtype=np.int64)
    return Starts(
        offsets=np.concatenate([empty, *offsets]), lines=np.concatenate([empty, *lines]), rows=rows, size=base
    )


def _is_blank(file: Any, offset: int, codec: str) -> bool:
    """Whether the line that begins at `offset` is blank as the reader means it."""
    file.seek(offset)
    decode = codecs.getincrementaldecoder(codec)("replace").decode
    while part := file.readline(4096):
        if decode(part).strip(BLANK):
            return False
        if part.endswith(b"\n"):
            break
    return True


class JsonlRows:
    """The rows of a JSONL file, each found by the place of one of the 16 around it."""

    def __init__(self, source: Source, starts: Starts) -> None:
        self._source, self._starts = source, starts
        self.count: int | None = starts.rows

    def at(self, number: int) -> Item | None:
        if not 0 <= number < self._starts.rows:
            return None
        block, skipped = divmod(number, STRIDE)
        ends = [*self._starts.offsets[block : block + 2].tolist(), self._starts.size]
        with open_bytes(self._source.path) as stream:
            stream.seek(ends[0])
            data = stream.read(ends[1] - ends[0])
        return next(islice(self._from(io.BytesIO(data), block), skipped, None), None)

    def walk(self, start: int) -> Iterator[Item]:
        block, skipped = divmod(start, STRIDE)
        if start < self._starts.rows:
            with open_bytes(self._source.path) as stream:
                stream.seek(int(self._starts.offsets[block]))
                yield from islice(self._from(stream, block), skipped, None)

    def _from(self, stream: Any, block: int) -> Iterator[Item]:
        line = int(self._starts.lines[block])
        for item in rows_in(stream, self._source.path, self._source.layout):
            yield replace(item, line=(item.line or 0) + line)


class ParquetRows:
    """The rows of a Parquet file, read by its row groups, of which the last one used is kept."""

    def __init__(self, source: Source) -> None:
        import pyarrow.parquet

        self._source, self._parquet = source, pyarrow.parquet
        with source.path.open("rb") as stream:
            found = pyarrow.parquet.ParquetFile(stream).metadata
            sizes = [found.row_group(index).num_rows for index in range(found.num_row_groups)]
        self._ends = list(accumulate(sizes))
        self.count: int | None = self._ends[-1] if self._ends else 0
        self._kept: tuple[int, Any] | None = None

    def at(self, number: int) -> Item | None:
        return next(self._of_group(number, number + 1), None) if 0 <= number < (self.count or 0) else None

    def walk(self, start: int) -> Iterator[Item]:
        while start < (self.count or 0):
            end = self._ends[bisect_right(self._ends, start)]
            yield from self._of_group(start, min(end, start + 1000))
            start = min(end, start + 1000)

    def _of_group(self, first: int, end: int) -> Iterator[Item]:
        """Rows `first` to `end` (left out), which lie in one group: as a file of their own, read as every other is."""
        group = bisect_right(self._ends, first)
        before = self._ends[group - 1] if group else 0
        if self._kept is None or self._kept[0] != group:
            with self._source.path.open("rb") as stream:
                self._kept = group, self._parquet.ParquetFile(stream).read_row_group(group)
        part = io.BytesIO()
        self._parquet.write_table(self._kept[1].slice(first - before, end - first), part)
        part.seek(0)
        for item in rows_in(part, self._source.path, self._source.layout):
            yield replace(item, line=(item.line or 0) + first)


class RowsInOrder:
    """The rows of a file that can only be read from its beginning. Going back far begins anew."""

    def __init__(self, source: Source) -> None:
        self._source = source
        self.count: int | None = None
        self._begin()

    def _begin(self) -> None:
        self._rows = source_rows(self._source)
        self._next = 0
        self._behind: deque[Item] = deque(maxlen=KEPT_BEHIND)

    def at(self, number: int) -> Item | None:
        if number < 0 or (self.count is not None and number >= self.count):
            return None
        if number < self._next - len(self._behind):
            self._begin()
        while self._next <= number:
            item = next(self._rows, None)
            if item is None:
                self.count = self._next
                return None
            self._behind.append(item)
            self._next += 1
        return self._behind[number - self._next]

    def walk(self, start: int) -> Iterator[Item]:
        number = start
        while (item := self.at(number)) is not None:
            yield item
            number += 1
