"""Rows out of one file: JSON, JSONL, CSV, TSV, Parquet and plain text, one row at a time, every value the text it was.

No types are inferred. JSON numbers keep their source text (`1e5`, `007` in a CSV, `2024-01-05`), so a column that holds
text in one row and a bare number in another is still a column of text. What cannot be read becomes a BadRow; what makes
the rest of a file unreadable is a DataError.
"""

from __future__ import annotations

import csv
import gzip
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any, Final, Literal

from vramfit.data.encodings import MARK
from vramfit.data.sources import open_bytes, text_stream
from vramfit.errors import DataError

Format = Literal["json", "jsonl", "csv", "tsv", "parquet", "text"]
TextSplit = Literal["whole", "lines", "blank lines", "marks"]

MAX_ROW_CHARS: Final = 64 * 1024 * 1024
MAX_DEPTH: Final = 64
MAX_COLUMNS: Final = 1000
MAX_KEYS: Final = 100_000
MAX_COMMAS: Final = 2_000_000
"""Of a row. A book of MAX_ROW_CHARS has a million commas; values take up to thirty times the room of their text."""
_LONG_CHARS: Final = 1024 * 1024  # shorter text is harmless whatever it holds
DOCUMENT_MARK: Final = "<|endoftext|>"
_WINDOW_CHARS: Final = 256 * 1024


class NumberText(str):
    """A JSON number as its source text. `plain` gives back the number."""

    __slots__ = ()


@dataclass(slots=True)
class Row:
    """One row: column name to value (text, None, bool, NumberText, or lists and dicts of these). `line` is where it
    begins in `path`, counted from 1 (for Parquet: the row's number). Not changed once made (see shapes.Turn)."""

    values: dict[str, Any]
    path: Path
    line: int


@dataclass(frozen=True, slots=True)
class BadRow:
    """A row that cannot be read: where it begins and why. Lines and columns count from 1."""

    path: Path
    line: int | None
    column: int | None
    reason: str

    def error(self) -> DataError:
        remedy = 'Correct that row, or set bad rows to "skip".'
        return DataError(self.reason, remedy, path=self.path, line=self.line, column=self.column)


def _to_nobody(_sentence: str) -> None:
    """Where sentences go that nobody asked for. (Unlike a lambda it can be pickled.)"""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a file is laid out: its format, and what that format leaves open."""

    format: Format
    codec: str = "utf-8"
    encoding: str = "utf-8"
    delimiter: str = ","
    split: TextSplit = "whole"
    mark: str = DOCUMENT_MARK
    note: Callable[[str], None] = _to_nobody


class Bytes(dict[str, Any]):
    """Bytes that are no text, such as a picture's: a value like any other until a row is to be learned from it."""


class _Unreadable(ValueError):
    """Inside a JSON decode: what is wrong with a value that is valid JSON by syntax."""


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(pairs) > MAX_COLUMNS:
        raise _Unreadable(f"an object has {len(pairs):,} keys, more than {MAX_COLUMNS:,}")
    values = dict(pairs)
    if len(values) != len(pairs):
        raise _Unreadable(f"the key {_short(_first_double(name for name, _ in pairs))} occurs twice in one object")
    return values


def _first_double(names: Iterable[str]) -> str | None:
    """The first name that has occurred before."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    return None


def _constant(name: str) -> Any:
    raise _Unreadable(f"{name} is no JSON number")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=NumberText, parse_float=NumberText, parse_constant=_constant
)
_scan_once: Final[Callable[[str, int], tuple[Any, int]]] = _DECODER.scan_once  # type: ignore[attr-defined]


# Finds where a value ends that _DECODER refuses.
_ANYTHING: Final = json.JSONDecoder(parse_int=NumberText, parse_float=NumberText)


def _short(text: object, limit: int = 40) -> str:
    shown = repr(str(text)[: limit + 1]).encode("utf-8", "backslashreplace").decode("utf-8")
    return shown if len(str(text)) <= limit else f"{shown[: limit - 3]}...'"


def plain(value: Any) -> Any:
    """The value with numbers as int and float, as a chat template or a JSON writer wants them."""
    if isinstance(value, NumberText):
        try:
            number: int | float = int(value) if value.lstrip("-").isdigit() and len(value) < 400 else float(value)
        except ValueError:
            return str(value)
        return number if number == number and abs(number) != float("inf") else str(value)
    if isinstance(value, list):
        return [plain(item) for item in value]
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return value


def parse_json(text: str) -> Any:
    """JSON text inside a column. Raises ValueError with a short reason."""
    _check_crowd(text)
    try:
        value = _DECODER.decode(text)
    except json.JSONDecodeError as error:
        raise ValueError(_json_reason(error)) from None
    except RecursionError:
        raise ValueError(f"values are nested more than {MAX_DEPTH} deep") from None
    _check_value(text, value)
    return value


def _decoded(text: str) -> Any:
    """What `_DECODER.decode` gives, sooner for text that is one value and nothing else. Raises ValueError."""
    _check_crowd(text)
    try:
        value, end = _scan_once(text, 0)
    except StopIteration:
        end = -1
    return value if end == len(text) else _DECODER.decode(text)


def _check_crowd(text: str) -> None:
    """Raises ValueError for text whose values would take far more room than it does, before they are made."""
    if len(text) < _LONG_CHARS:
        return
    if text.count(",") > MAX_COMMAS:
        raise ValueError(f"there are more than {MAX_COMMAS:,} commas in one row")
    if next(islice(_KEY_END.finditer(text), MAX_KEYS, None), None) is not None:
        raise ValueError(f"there are more than {MAX_KEYS:,} keys in one row")


_KEY_END: Final = re.compile(r'"\s*:')


def _json_reason(error: json.JSONDecodeError) -> str:
    after = error.doc[error.pos : error.pos + 1]
    comma_before = error.doc[max(0, error.pos - 50) : error.pos].rstrip().endswith(",")
    if "trailing comma" in error.msg or (comma_before and after in ("}", "]")):  # Python 3.13 has its own words for it
        return "a comma before a closing bracket"
    if error.msg.startswith("Unterminated string"):
        return "a string begins here and does not end"
    if error.msg.startswith("Invalid control character"):
        return "a tab, line end or other control character stands bare in a string"
    return error.msg[:1].lower() + error.msg[1:]


def _check_value(source: str, value: Any) -> None:
    """Depth, lone surrogates and NUL, which JSON syntax allows and nothing after it can bear. Raises ValueError."""
    if source.count("{") + source.count("[") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError(f"values are nested more than {MAX_DEPTH} deep")
    if "\\" not in source or "\\u" not in source:
        return
    if re.search(r"\\u[dD][89a-fA-F]", source) and _holds(value, _SURROGATE):
        raise ValueError("a \\u escape is half of a surrogate pair, which is no character")
    if "\\u0000" in source and _holds(value, _NUL):
        raise ValueError("a \\u0000 escape is a NUL character, which is no text")


def _depth(value: Any) -> int:
    depth, level = 0, [value]
    while level:
        nested: list[Any] = [item for item in level if isinstance(item, (list, dict))]
        if not nested or depth > MAX_DEPTH:
            return depth
        depth += 1
        level = [child for item in nested for child in (item.values() if isinstance(item, dict) else item)]
    return depth


_SURROGATE: Final = re.compile("[\ud800-\udfff]")
_NUL: Final = re.compile("\0")


def _holds(value: Any, wanted: re.Pattern[str]) -> bool:
    """Whether any text in a JSON value, keys included, has what is wanted."""
    if isinstance(value, str):
        return wanted.search(value) is not None
    if isinstance(value, dict):
        return any(_holds(key, wanted) or _holds(item, wanted) for key, item in value.items())
    return isinstance(value, list) and any(_holds(item, wanted) for item in value)


def rows_of(path: Path, layout: Layout) -> Iterator[Row | BadRow]:
    """Every row of the file, in order, good and bad. Raises DataError when the rest of the file cannot be read."""
    with open_bytes(path) as stream:
        yield from rows_in(stream, path, layout)


def rows_in(stream: IO[bytes], path: Path, layout: Layout) -> Iterator[Row | BadRow]:
    """`rows_of` for a file's unpacked bytes; lines count from where the stream begins."""
    if layout.format == "parquet":
        return _parquet_rows(path, stream)
    text = text_stream(stream, layout.codec)
    if layout.format == "jsonl":
        return _jsonl_rows(path, text, layout)
    if layout.format == "json":
        return _JsonFile(path, text, layout).rows()
    if layout.format == "text":
        return _text_rows(path, text, layout)
    return _csv_rows(path, text, layout)


class _Lines:
    """Lines of bounded length with their numbers; `too_long` is set for a line that was cut."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.number = 0

    def __iter__(self) -> Iterator[str]:
        while line := self._stream.readline(MAX_ROW_CHARS):
            self.number += 1
            yield line
            while len(line) >= MAX_ROW_CHARS and not line.endswith(("\n", "\r")):
                line = self._stream.readline(MAX_ROW_CHARS)  # the rest of a line that is refused anyway


def _line_problem(line: str, layout: Layout) -> tuple[str, int | None] | None:
    """Why a line cannot be used whatever it says, and the column."""
    if len(line) >= MAX_ROW_CHARS:
        return f"the line is longer than {MAX_ROW_CHARS // 2**20} million characters", None
    if not line.isascii() and MARK in line:
        return f"there are bytes that are not {layout.encoding}", line.index(MARK) + 1
    return None


def _jsonl_rows(path: Path, stream: IO[str], layout: Layout) -> Iterator[Row | BadRow]:
    # newline="" also ends lines at a lone \r, which JSON allows between values; only \n separates rows here.
    stream.reconfigure(newline="\n")  # type: ignore[attr-defined]
    lines = _Lines(stream)
    for line in lines:
        problem = _line_problem(line, layout)
        if problem:
            yield BadRow(path, lines.number, problem[1], problem[0])
        elif line.strip(BLANK):
            yield _json_row(path, lines.number, line)


def _json_row(path: Path, number: int, line: str) -> Row | BadRow:
    text = line.strip(BLANK)
    try:
        value = _decoded(text)
        _check_value(text, value)
    except json.JSONDecodeError as error:
        return BadRow(path, number, error.pos + 1 + line.index(text[0]), _json_reason(error))
    except RecursionError:
        return BadRow(path, number, None, f"values are nested more than {MAX_DEPTH} deep")
    except ValueError as error:
        return BadRow(path, number, None, str(error))
    return _row_or_bad(path, number, value)


def _row_or_bad(path: Path, number: int, value: Any) -> Row | BadRow:
    if isinstance(value, dict):
        return Row(value, path, number)
    kind = {list: "a list", str: "text", NumberText: "a number", type(None): "null"}.get(type(value), "true or false")
    return BadRow(path, number, None, f"the row is {kind}, not an object with named columns")


class _JsonFile:
    """A JSON array of objects, an object that holds one, or objects one after another (pretty-printed rows), read
    through a moving window of text.

    A value that the window cuts off is read again with twice the text, so the work stays linear in the file's size and
    memory bounded by the longest row.
    """

    def __init__(self, path: Path, stream: IO[str], layout: Layout) -> None:
        self._path, self._stream, self._layout = path, stream, layout
        self._buffer = ""
        self._at = 0
        self._ended = False
        self._line, self._column = 1, 1  # of `_counted`, a place in the buffer
        self._counted = 0

    def rows(self) -> Iterator[Row | BadRow]:
        first = self._peek()
        if first == "[":
            yield from self._array()
        elif first == "{":
            while self._peek() == "{":
                yield from self._object()
        else:
            raise self._error("a JSON file begins with [ or {")
        if self._peek():
            raise self._error("there is more text after the end of the JSON value")

    def _array(self) -> Iterator[Row | BadRow]:
        self._at += 1
        if self._peek() == "]":
            self._at += 1
            return
        while True:
            self._peek()
            line, _ = self._place(self._at)
            value = self._value()
            yield value if isinstance(value, BadRow) else _row_or_bad(self._path, line, value)
            closing = self._peek()
            if closing not in (",", "]"):
                raise self._error("a comma or the closing ] is missing" if closing else "the file ends inside a list")
            self._at += 1
            if closing == "]":
                return
            if self._peek() == "]":
                raise self._error("a comma before a closing bracket")

    def _object(self) -> Iterator[Row | BadRow]:
        """Rows of the first list of objects under any key; an object that holds none is itself one row."""
        kept: dict[str, Any] = {}
        line, _ = self._place(self._at)
        found: str | None = None
        bad: BadRow | None = None
        self._at += 1
        while self._peek() != "}":
            key = self._new_key(kept, found)
            if found is None and self._starts_list_of_rows(key):
                found = key
                yield from self._array()
            else:
                kept[key] = self._value()
                bad = bad or (kept[key] if isinstance(kept[key], BadRow) else None)
                if found is not None and _is_list_of_objects(kept[key]):
                    self._layout.note(
                        f"{self._path.name} holds several lists; {_short(found)} is read, "
                        f"{_short(key)} with {len(kept[key]):,} rows is not."
                    )
            if self._peek() == ",":
                self._at += 1
                if self._peek() == "}":
                    raise self._error("a comma before a closing bracket")
            elif self._peek() != "}":
                raise self._error("a comma or the closing } is missing" if self._peek() else "the file ends too early")
        self._at += 1
        if found is None:
            yield bad or Row(kept, self._path, line)

    def _new_key(self, kept: dict[str, Any], found: str | None) -> str:
        key = self._key()
        if key in kept or key == found:
            raise self._error(f"the key {_short(key)} occurs twice in one object")
        if len(kept) >= MAX_COLUMNS:
            raise self._error(f"an object has more than {MAX_COLUMNS:,} keys")
        return key

    def _key(self) -> str:
        if self._peek() != '"':
            raise self._error("a property name in double quotes is missing")
        key = self._value()
        if isinstance(key, BadRow):
            raise self._error(f"in a property name, {key.reason}")
        if self._peek() != ":":
            raise self._error("a colon is missing")
        self._at += 1
        self._peek()
        return str(key)

    def _starts_list_of_rows(self, key: str) -> bool:
        """Whether a list of objects begins here, and not the turns or tools of an object that is itself one row."""
        if self._peek() != "[":
            return False
        while (found := _FIRST_KEY.match(self._buffer, self._at)) is None and self._fill():
            pass
        if found is None or found.group(1) is None:
            return False
        return not (key.lower() in _INNER_LISTS and found.group(1) in _INNER_KEYS)

    def _peek(self) -> str:
        """The next character that is no space, or "" at the end."""
        while True:
            match = _SPACES.match(self._buffer, self._at)
            self._at = match.end() if match else self._at
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._fill():
                return ""

    def _value(self) -> Any:
        """The next value, or a BadRow for one that is valid JSON and yet unusable. Raises DataError for bad syntax."""
        self._peek()
        while True:
            try:
                value, end = self._decoded()
            except json.JSONDecodeError as error:
                if self._may_be_cut(error) and self._fill():
                    continue
                if error.pos >= len(self._buffer.rstrip()):
                    raise self._error("the file ends inside a value", error.pos) from None
                raise self._error(_json_reason(error), error.pos) from None
            except RecursionError:
                raise self._error(f"values are nested more than {MAX_DEPTH} deep") from None
            if end == len(self._buffer) and not isinstance(value, (dict, list)) and self._fill():
                continue  # a number may go on in the text that was not read yet
            return self._checked(value, end)

    def _decoded(self) -> tuple[Any, int]:
        """The value that begins here and where it ends. One that is valid by syntax alone is an _Unreadable."""
        try:
            return _DECODER.raw_decode(self._buffer, self._at)
        except _Unreadable as error:
            return error, _ANYTHING.raw_decode(self._buffer, self._at)[1]

    def _checked(self, value: Any, end: int) -> Any:
        start, self._at = self._at, end
        self._count_to(start)
        line = self._line
        if isinstance(value, _Unreadable):
            return BadRow(self._path, line, self._column, str(value))
        source = self._buffer[start:end]
        if len(source) >= MAX_ROW_CHARS:
            reason = f"the value is longer than {MAX_ROW_CHARS // 2**20} million characters"
            return BadRow(self._path, line, None, reason)
        if not source.isascii() and MARK in source:
            line, column = self._place(start + source.index(MARK))
            return BadRow(self._path, line, column, f"there are bytes that are not {self._layout.encoding}")
        try:
            _check_value(source, value)
        except ValueError as error:
            return BadRow(self._path, line, None, str(error))
        return value

    def _may_be_cut(self, error: json.JSONDecodeError) -> bool:
        return not self._ended and (error.msg.startswith("Unterminated") or error.pos > len(self._buffer) - 16)

    def _fill(self) -> bool:
        """Forget what was used, read as much again as is waiting. At the end of the file: False, and no change."""
        waiting = len(self._buffer) - self._at
        if waiting >= MAX_ROW_CHARS:
            raise self._error(f"the value that begins here is longer than {MAX_ROW_CHARS // 2**20} million characters")
        try:
            _check_crowd(self._buffer if self._at == 0 else self._buffer[self._at :])
        except ValueError as error:
            raise self._error(f"in the value that begins here, {error}") from None
        more = "" if self._ended else self._stream.read(max(_WINDOW_CHARS, waiting))
        if not more:
            self._ended = True
            return False
        self._count_to(self._at)
        self._buffer, self._at, self._counted = self._buffer[self._at :] + more, 0, 0
        return True

    def _place(self, position: int) -> tuple[int, int]:
        lines = self._buffer.count("\n", self._counted, position)
        if not lines:
            return self._line, self._column + position - self._counted
        return self._line + lines, position - self._buffer.rfind("\n", 0, position)

    def _count_to(self, position: int) -> None:
        """Remember the place of `position`, before which none will be asked for: counting stays linear."""
        self._line, self._column = self._place(position)
        self._counted = position

    def _error(self, reason: str, position: int | None = None) -> DataError:
        line, column = self._place(self._at if position is None else position)
        return DataError(reason, "Correct the file there.", path=self._path, line=line, column=column)


BLANK: Final = " \t\r\n\ufeff"  # byte order marks, too: they stand inside where files were joined
_SPACES: Final = re.compile(f"[{BLANK}]*")
_FIRST_KEY: Final = re.compile(r'\[\s*(?:\{\s*"([^"\\]*)"|[^\s{]|\{\s*[^\s"]|\{\s*"[^"\\]*\\)')
_INNER_LISTS: Final = (
    *("messages", "conversations", "conversation", "dialogue", "dialog", "turns", "chat", "tools", "functions"),
    *("prompt", "completion", "chosen", "rejected"),
)
_INNER_KEYS: Final = ("role", "from", "content", "value", "type", "function", "name", "loss_weight", "weight")


def _is_list_of_objects(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], dict)


def _csv_rows(path: Path, stream: IO[str], layout: Layout) -> Iterator[Row | BadRow]:
    """Records of a CSV or TSV file with a header. Every field is text, an empty one is empty text."""
    csv.field_size_limit(MAX_ROW_CHARS)  # global to the process; the default of 128 KiB is shorter than documents are
    reader = csv.reader(_csv_lines(path, stream, layout.delimiter), delimiter=layout.delimiter, strict=True)
    header = _csv_header(path, reader)
    while True:
        line = reader.line_num + 1
        try:
            fields = next(reader, None)
        except csv.Error as error:
            if "unexpected end" in str(error) or "limit" in str(error):
                raise DataError(
                    "a quotation mark opens here and never closes", "Close it, or double it.", path=path, line=line
                ) from None
            yield BadRow(path, line, None, _csv_reason(error))
            continue
        if fields is None:
            return
        if fields:
            yield _csv_row(path, line, header, fields, layout)


def _csv_lines(path: Path, stream: IO[str], delimiter: str) -> Iterator[str]:
    """Lines for csv.reader. Raises DataError for one that is no row and would fill the memory with fields."""
    lines = _Lines(stream)
    for line in lines:
        if len(line) >= MAX_ROW_CHARS:
            reason = f"the line is longer than {MAX_ROW_CHARS // 2**20} million characters"
            raise DataError(reason, "Correct the file there.", path=path, line=lines.number)
        if len(line) >= _LONG_CHARS and line.count(delimiter) > MAX_COMMAS:
            reason = f"the line has more than {MAX_COMMAS:,} fields"
            raise DataError(reason, "Correct the file there.", path=path, line=lines.number)
        yield line


def _csv_header(path: Path, reader: Any) -> list[str]:
    try:
        header: list[str] = next((fields for fields in reader if fields and not _names_delimiter(fields)), [])
    except csv.Error as error:
        raise DataError(
            f"the header cannot be read: {_csv_reason(error)}", "Correct line 1.", path=path, line=1
        ) from None
    if len(header) <= MAX_COLUMNS and sum(not name.strip() for name in header) > 1:
        # Spreadsheets write empty columns, too.
        header = [name if name.strip() else f"column {place}" for place, name in enumerate(header, start=1)]
    _check_columns(path, header)
    return header


def _names_delimiter(fields: list[str]) -> bool:
    """Whether a record is the line "sep=;" that spreadsheets put before the header."""
    return fields[0].lower().startswith("sep=") and len("".join(fields)) <= len("sep=;")


def _csv_reason(error: csv.Error) -> str:
    if "expected after" in str(error):
        return "after a closing quotation mark the field goes on (a mark inside a field is to be doubled)"
    return str(error)


def _check_columns(path: Path, names: list[str]) -> None:
    if len(names) > MAX_COLUMNS:
        raise DataError(
            f"the header names {len(names):,} columns, more than {MAX_COLUMNS:,}",
            "Keep the columns that are to be learned.",
            path=path,
            line=1,
        )
    double = _first_double(names)
    if double is not None:
        raise DataError(f"the header names the column {_short(double)} twice", "Rename one of them.", path=path, line=1)


def _csv_row(path: Path, line: int, header: list[str], fields: list[str], layout: Layout) -> Row | BadRow:
    fields[0] = fields[0].removeprefix("\ufeff")  # it stands inside where files were joined
    if fields == header:
        return BadRow(path, line, None, "the header stands here again")
    if len(fields) != len(header):
        return BadRow(path, line, None, f"the row has {len(fields)} fields, the header has {len(header)}")
    for field in fields:
        if not field.isascii() and MARK in field:
            return BadRow(path, line, None, f"there are bytes that are not {layout.encoding}")
    return Row(dict(zip(header, fields, strict=True)), path, line)


def _parquet_rows(path: Path, stream: IO[bytes]) -> Iterator[Row | BadRow]:
    """Rows of a Parquet file. It is typed, so numbers and dates become text the way they are usually written."""
    arrow, parquet = _pyarrow()
    try:
        with _seekable(stream) as file:
            number = 0
            table = parquet.ParquetFile(file)
            _check_columns(path, table.schema_arrow.names)
            for batch in table.iter_batches(batch_size=1000):
                columns = {name: _column_values(arrow, batch.column(name)) for name in batch.schema.names}
                for index in range(batch.num_rows):
                    number += 1
                    yield _parquet_row(path, number, {name: values[index] for name, values in columns.items()})
    except (arrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise  # the disk's fault, not the file's
        reason = "".join(char if char.isprintable() else "?" for char in str(error).partition("\n")[0])
        raise DataError(f"is no sound Parquet file: {reason}", "Write the file again.", path=path) from None


def _pyarrow() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DataError("Parquet files need the package pyarrow", "Install it: pip install pyarrow") from None
    return pyarrow, pyarrow.parquet


@contextmanager
def _seekable(stream: IO[bytes]) -> Iterator[IO[bytes]]:
    """Parquet is read from its end; a compressed one is unpacked to a temporary file first."""
    if not isinstance(stream, gzip.GzipFile):
        yield stream
        return
    with tempfile.TemporaryFile() as unpacked:
        shutil.copyfileobj(stream, unpacked, 1024 * 1024)
        unpacked.seek(0)
        yield unpacked


def _column_values(arrow: Any, column: Any) -> list[Any]:
    """A column as Python values, damaged text as the error it gives; dates and times through Arrow's own text, which
    needs no pandas for nanoseconds."""
    import numpy as np  # here, because it takes longer to load than all the rest, and only this needs it

    kind = column.type
    if arrow.types.is_temporal(kind):
        column = column.cast(arrow.string())
    elif arrow.types.is_dictionary(kind):
        return _column_values(arrow, column.dictionary_decode())
    elif arrow.types.is_float32(kind):
        return [None if value is None else np.float32(value) for value in column.to_pylist()]  # 0.1 is to be written so
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_one_value(value) for value in column]


def _one_value(value: Any) -> Any:
    try:
        return value.as_py()
    except UnicodeDecodeError as error:
        return error


def _parquet_row(path: Path, number: int, values: dict[str, Any]) -> Row | BadRow:
    damaged = next((name for name, value in values.items() if isinstance(value, UnicodeDecodeError)), None)
    if damaged is not None:
        return BadRow(path, number, None, f"the column {_short(damaged)} holds text that is not UTF-8")
    return Row({name: _as_text(value) for name, value in values.items()}, path, number)


def _as_text(value: Any) -> Any:
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError:
            return Bytes(bytes=f"{len(value):,}")
    if isinstance(value, (list, tuple)):  # tuples are the entries of a map
        return [_as_text(item) for item in value]
    if value != value:  # NaN is how tables write that there is no value
        return None
    if isinstance(value, dict):
        return {str(key): _as_text(item) for key, item in value.items()}
    return NumberText(value)


def _text_rows(path: Path, stream: IO[str], layout: Layout) -> Iterator[Row | BadRow]:
    """Documents of a plain text file as rows with the one column "text". Line ends become \\n."""
    start, pieces, size, marked = 0, list[str](), 0, False
    lines = _Lines(stream)
    for line in lines:
        problem = _line_problem(line, layout)
        if problem:
            yield BadRow(path, lines.number, problem[1], problem[0])
            continue
        marked = marked or layout.mark in line
        for piece, ended in _pieces(line, layout):
            if pieces or piece.strip():  # blank lines before a document are not part of it
                start = start if pieces else lines.number
                pieces.append(piece)
                size += len(piece)
            _check_document_size(path, start, size)
            if ended:
                yield from _document(path, start, pieces)
                pieces, size = [], 0
    yield from _document(path, start, pieces)
    if layout.split == "marks" and not marked:
        layout.note(f"The mark {_short(layout.mark)} is nowhere in {path.name}, so it is one document.")


def _check_document_size(path: Path, start: int, size: int) -> None:
    if size > MAX_ROW_CHARS:
        raise DataError(
            f"the document that begins here is longer than {MAX_ROW_CHARS // 2**20} million characters",
            "Split the text at blank lines, at lines, or into several files.",
            path=path,
            line=start,
        )


def _pieces(line: str, layout: Layout) -> list[tuple[str, bool]]:
    """The line as pieces of documents, each with whether a document ends after it."""
    line = line.rstrip("\r\n") + "\n" if line.endswith(("\n", "\r")) else line
    split = layout.split
    if split == "marks" and layout.mark in line:
        *ends, rest = line.split(layout.mark)
        return [(piece, True) for piece in ends] + [(rest, False)]
    return [(line, split == "lines" or (split == "blank lines" and not line.strip()))]


def _document(path: Path, line: int, pieces: list[str]) -> Iterator[Row]:
    text = "".join(pieces).strip("\n")
    if text.strip():
        yield Row({"text": text}, path, line)
