"""Which format a file has, by its content: JSON, JSONL, CSV, TSV, Parquet or plain text. The name only breaks ties."""

from __future__ import annotations

import codecs
import csv
import json
import re
from collections.abc import Callable
from typing import Final, Literal

from vramfit.data.encodings import Encoding, detect, wished
from vramfit.data.rows import DOCUMENT_MARK, Layout, TextSplit
from vramfit.data.sources import HEAD_BYTES, Scan
from vramfit.errors import DataError

# Of two brackets the second opens a list, too, unless it is the link of a wiki.
_JSON_ARRAY: Final = re.compile(r'\s*\[\s*(\[\s*([\[{"\]-]|\d|$)|[{"\]]|-?\d|true\b|false\b|null\b)')
_JSON_OBJECT: Final = re.compile(r"\s*\{\s*(\"|'|\})")
_DELIMITERS: Final = (",", "\t", ";", "|")
_NAMED_DELIMITER: Final = re.compile(r'"?sep=([^\w\s"]|\t)"?\r?\n', re.IGNORECASE)  # the first line spreadsheets write
_LONG_LINE_CHARS: Final = 400
MOST_BLANK_LINES: Final = 1_000_000
_CSV_SAMPLE_ROWS: Final = 200
SPLITS: Final = ("whole", "blank lines", "lines")
"""Named ways to split a text file; any other word is the mark between its documents."""


def layout_of(
    scan: Scan,
    *,
    encoding: str = "auto",
    split: str = "auto",
    note: Callable[[str], None] = lambda _sentence: None,
) -> Layout:
    """How the scanned file is laid out; sentences a person should know go to `note`. Raises DataError.

    `split` is where a text file is split into documents: "auto", "whole", "blank lines", "lines", or a mark.
    """
    if scan.parquet:
        return Layout(format="parquet", codec="binary", encoding="binary", note=note)
    if scan.blank_lines > MOST_BLANK_LINES:
        raise DataError(
            f"There are {scan.blank_lines:,} blank lines in a file of {scan.lines:,}", "Remove them.", path=scan.path
        )
    found = wished(encoding, scan) if encoding != "auto" else detect(scan)
    if found.guessed:
        note(f"{scan.path.name} names no encoding; {found.name} was guessed. Set the encoding if the text looks wrong.")
    head = head_text(scan, found)
    shared = {"codec": found.codec, "encoding": found.name, "note": note}
    named_json = _suffix(scan.path.name) in ("json", "jsonl", "ndjson")
    if _JSON_ARRAY.match(head) and (named_json or not _is_bracketed_prose(head)):
        return Layout(format="jsonl" if _is_lists(head) else "json", **shared)  # type: ignore[arg-type]
    if _JSON_OBJECT.match(head):
        return Layout(format="jsonl" if _is_lines(head, scan) else "json", **shared)  # type: ignore[arg-type]
    # What is named JSON and does not begin like it is JSON Lines with bad rows, and no text to be learned.
    named_json = named_json and split == "auto"
    if named_json and re.search(r"^\s*[{\[]", head, re.MULTILINE):
        return Layout(format="jsonl", **shared)  # type: ignore[arg-type]
    complete = scan.unpacked_bytes <= HEAD_BYTES
    delimiter = _delimiter(head, scan.path.name, complete=complete)
    # Who says where documents are split says that it is text, unless the file is named a table.
    if delimiter is not None and (split == "auto" or _is_named_table(scan.path.name)):
        kind: Literal["csv", "tsv"] = "tsv" if delimiter == "\t" else "csv"
        return Layout(format=kind, delimiter=delimiter, **shared)  # type: ignore[arg-type]
    if named_json:
        return Layout(format="jsonl", **shared)  # type: ignore[arg-type]
    if split == "auto" and complete and _is_scalar(head):
        raise DataError(
            "The file holds one JSON value and no rows",
            'Give a file with rows. If it is text to be learned, set where documents are split to "whole".',
            path=scan.path,
        )
    if split not in SPLITS and split != "auto":
        return Layout(format="text", split="marks", mark=split, **shared)  # type: ignore[arg-type]
    chosen = _text_split(head) if split == "auto" else split
    return Layout(format="text", split=chosen, **shared)  # type: ignore[arg-type]


def head_text(scan: Scan, encoding: Encoding) -> str:
    """The beginning of the file as text; a character that the end of the head cuts is left out."""
    whole = scan.unpacked_bytes <= len(scan.head)
    return codecs.getincrementaldecoder(encoding.codec)("replace").decode(scan.head, whole).lstrip("\ufeff")


def _is_lines(head: str, scan: Scan) -> bool:
    """Whether text that begins with an object is one object per line. A damaged first line is still a line."""
    lines = [line.strip() for line in head.split("\n", 50) if line.strip()]
    if len(lines) == 1:
        # One object: the reader of JSON files finds the rows in it, or takes it as one row. A first line longer than
        # the head is one of several when another begins behind it.
        return scan.unpacked_bytes > HEAD_BYTES and scan.lines > 1
    if lines[0].endswith("}"):
        return True
    try:
        return isinstance(json.loads(lines[1]), dict)
    except (ValueError, RecursionError):
        return False


def _is_scalar(text: str) -> bool:
    """Whether the whole text is one number, one quoted text, true, false or null: nothing a person writes to learn."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _is_bracketed_prose(head: str) -> bool:
    """Whether a text that begins like a list of numbers or words is none: "[1] Introduction", "[ ] to do"."""
    text = head.strip()
    if re.match(r"\[\s*[\[{]", text) or _is_lists(head):
        return False
    try:
        _, end = _LISTS.raw_decode(text)
    except json.JSONDecodeError as error:
        # Where the head or a broken file cuts a list, the fault is at the end, or a text that has none.
        return not error.msg.startswith("Unterminated") and error.pos <= len(text) - len("false")
    except RecursionError:
        return False
    return end < len(text)


_LISTS: Final = json.JSONDecoder(parse_int=str)  # int() refuses long numbers


def _is_lists(head: str) -> bool:
    """Whether a text that begins with [ is one value per line, the first a whole list, and no list of rows."""
    lines = [line.strip() for line in head.split("\n", 5) if line.strip()]
    if len(lines) < 2 or not lines[0].endswith("]") or lines[1][0] not in "[{":
        return False
    try:
        return isinstance(json.loads(lines[0]), list)
    except (ValueError, RecursionError):
        return False


def _delimiter(head: str, name: str, *, complete: bool) -> str | None:
    """The delimiter of a table with a header, or None for running text.

    A table has the same number of fields in (nearly) every record and a header of short, different names. The ending
    .csv or .tsv decides only what the content leaves open, such as a table of one column.
    """
    if (said := _NAMED_DELIMITER.match(head)) is not None:
        return said.group(1)
    is_named = _is_named_table(name)
    for delimiter in _DELIMITERS:
        records = _sample_records(head, delimiter, complete=complete)
        if len(records) < 2 or not _is_header(records[0], strict=not is_named):
            continue
        same = sum(len(record) == len(records[0]) for record in records)
        if same >= (0.5 if is_named else 0.95) * len(records):
            return delimiter
    if is_named:
        return "," if _suffix(name) == "csv" else "\t"
    return None


def _is_named_table(name: str) -> bool:
    return _suffix(name) in ("csv", "tsv", "tab")


def _suffix(name: str) -> str:
    return name.lower().removesuffix(".gz").rpartition(".")[2]


def _sample_records(head: str, delimiter: str, *, complete: bool) -> list[list[str]]:
    lines = head.splitlines(keepends=True)
    records = []
    reader = csv.reader(iter(lines), delimiter=delimiter)
    try:
        for record in reader:
            if record:
                records.append(record)
            if len(records) > _CSV_SAMPLE_ROWS:
                break
    except csv.Error:
        return []
    return records if complete or len(records) > _CSV_SAMPLE_ROWS else records[:-1]


def _is_header(names: list[str], *, strict: bool) -> bool:
    named = [name for name in names if name.strip()]
    if len(named) < 2 or len(set(named)) != len(named) or (strict and len(named) < len(names)):
        return False
    longest = max(map(len, names))
    # ", " inside a first line is prose, as is "<|" a mark; names of columns are single words or short phrases.
    prose = longest > 32 or any(name.startswith((" ", ">")) or name.endswith("<") for name in names)
    return longest <= 64 and not (strict and prose)


def _text_split(head: str) -> TextSplit:
    """Where one document ends in a text file: at marks, at every (long) line, at blank lines, or nowhere."""
    if DOCUMENT_MARK in head:
        return "marks"
    lines = head.splitlines()
    if any(not line.strip() for line in lines[1:-1]):
        return "blank lines"
    lengths = sorted(len(line) for line in lines)
    return "lines" if len(lines) > 1 and lengths[len(lengths) // 2] >= _LONG_LINE_CHARS else "whole"
