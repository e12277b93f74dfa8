"""Rows by their number: the same rows as reading all of them in order, in every format."""

from __future__ import annotations

import gzip
import json
import random
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.data import numbered as module
from vramfit.data.numbered import JsonlRows, ParquetRows, RowsInOrder, numbered
from vramfit.data.read import ReadOptions, Source, open_sources, source_rows
from vramfit.data.rows import Row

ROWS = [{"prompt": f"p {n} 你好", "completion": "c" * (n % 40)} for n in range(100)]
LINES = [json.dumps(row, ensure_ascii=False) for row in ROWS]


def _source(path: Path, **options: Any) -> Source:
    return open_sources([path], ReadOptions(**options))[0]


def _agrees(source: Source) -> None:
    everything = list(source_rows(source))
    rows = numbered(source)
    order = list(range(len(everything)))
    random.Random(4).shuffle(order)
    assert [rows.at(number) for number in order] == [everything[number] for number in order]
    assert rows.at(-1) is None
    assert rows.at(len(everything)) is None
    assert rows.count == len(everything)
    for start in (0, 1, 15, 16, 17, len(everything) - 1, len(everything)):
        assert list(islice(rows.walk(start), 40)) == everything[start : start + 40]


def _write(folder: Path, name: str, text: str, encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "gb18030", "utf-16"])
def test_jsonl_with_blank_lines_and_bad_rows(tmp_path: Path, encoding: str) -> None:
    mixed = [*LINES[:20], "", "  \t", "\u3000", "{bad", *LINES[20:90], "", " " * 9000, "", *LINES[90:], "7", ""]
    source = _source(_write(tmp_path, "a.jsonl", "\r\n".join(mixed), encoding), encoding=encoding)
    assert isinstance(numbered(source), RowsInOrder if encoding == "utf-16" else JsonlRows)
    _agrees(source)


def test_a_line_across_chunks_is_one_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_CHUNK_BYTES", 7)
    _agrees(_source(_write(tmp_path, "a.jsonl", "\n\n".join(LINES) + "\n")))


@settings(max_examples=60)
@given(
    st.lists(
        st.sampled_from([*LINES[:3], "", " ", "\t", "{", "1", "\x0c", "\x0b{}", " {}", "\ufeff", "\ufeff{}"]),
        max_size=60,
    ),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(min_value=1, max_value=80),
)
def test_any_lines_in_any_chunks(tmp_path_factory: Any, lines: list[str], end: str, chunk: int) -> None:
    source = _source(_write(tmp_path_factory.mktemp("lines"), "a.jsonl", end.join([*LINES[:2], *lines])))
    everything = list(source_rows(source))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_CHUNK_BYTES", chunk)
        rows = numbered(source)
    assert isinstance(rows, JsonlRows)
    assert list(rows.walk(0)) == everything
    assert [rows.at(number) for number in range(len(everything) + 1)] == [*everything, None]


def test_many_doubtful_lines_are_read_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_DOUBTFUL", 10)
    source = _source(_write(tmp_path, "a.jsonl", "\n ".join(LINES)))
    assert isinstance(numbered(source), RowsInOrder)
    _agrees(source)


def test_parquet_of_several_groups(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path, row_group_size=23)
    source = _source(path)
    assert isinstance(numbered(source), ParquetRows)
    _agrees(source)


@pytest.mark.parametrize(
    ("name", "text", "options"),
    [
        ("a.json", json.dumps(ROWS, indent=1), {}),
        ("a.csv", "prompt,completion\n" + "".join(f'"p\n{n}",c\n' for n in range(60)) + "one\n", {}),
        ("a.txt", "\n\n".join(f"document {n}\nof two lines" for n in range(50)), {"documents": "blank lines"}),
        (
            "tree.jsonl",
            "\n".join(
                json.dumps({"id": f"{n}", "parent_id": f"{n - 1}" if n % 3 else None, "role": role, "text": "hi"})
                for n, role in enumerate(["user", "assistant", "user"] * 9)
            ),
            {},
        ),
    ],
)
def test_other_formats_in_order(tmp_path: Path, name: str, text: str, options: dict[str, str]) -> None:
    source = _source(_write(tmp_path, name, text), **options)
    assert isinstance(numbered(source), RowsInOrder)
    _agrees(source)


def test_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(LINES).encode()))
    _agrees(_source(path))


def test_a_row_back_is_kept_and_further_back_is_read_again(tmp_path: Path) -> None:
    rows = RowsInOrder(_source(_write(tmp_path, "a.json", json.dumps(ROWS))))
    far = rows.at(80)
    assert isinstance(far, Row)
    kept = rows.at(70)
    assert kept is rows.at(70)
    assert rows.at(2) == Row(ROWS[2], tmp_path / "a.json", 1)
    assert rows.at(80) == far
