from __future__ import annotations

import csv
import gzip
import io
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramfit.data import rows as rows_module
from vramfit.data.layouts import layout_of
from vramfit.data.rows import BadRow, Layout, NumberText, Row, parse_json, plain, rows_of
from vramfit.data.sources import scan
from vramfit.errors import DataError


def read(path: Path, **wishes: Any) -> list[Row | BadRow]:
    return list(rows_of(path, layout_of(scan(path), **wishes)))


def values(path: Path, **wishes: Any) -> list[dict[str, Any]]:
    items = read(path, **wishes)
    assert all(isinstance(item, Row) for item in items), items
    return [item.values for item in items if isinstance(item, Row)]


def write(folder: Path, text: str, name: str = "data", encoding: str = "utf-8") -> Path:
    path = folder / name
    path.write_bytes(text.encode(encoding))
    return path


TEXT = st.text(
    alphabet=st.characters(exclude_categories=["Cs"], exclude_characters="\x00\ufeff"), max_size=30
) | st.sampled_from(["007", "NA", "null", "nan", "2024-01-05", "1e5", "", " ", "True", "a,b", 'say "hi"', "two\nlines"])
TABLES = st.lists(st.fixed_dictionaries({"instruction": TEXT, "output": TEXT}), min_size=1, max_size=6)
ENCODINGS = ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "gb18030", "gbk", "shift_jis", "cp1252", "latin-1"]


def _jsonl(table: list[dict[str, str]]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table)


def _table(table: list[dict[str, str]], delimiter: str) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, ["instruction", "output"], delimiter=delimiter, quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(table)
    return out.getvalue()


WRITERS = {
    "json": lambda table: json.dumps(table, ensure_ascii=False, indent=1),
    "wrapped": lambda table: json.dumps({"version": "1", "data": table, "more": {}}, ensure_ascii=False),
    "jsonl": _jsonl,
    "csv": lambda table: _table(table, ","),
    "tsv": lambda table: _table(table, "\t"),
}


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(table=TABLES, kind=st.sampled_from(sorted(WRITERS)), encoding=st.sampled_from(ENCODINGS), packed=st.booleans())
def test_every_format_and_encoding_gives_back_the_same_text(
    table: list[dict[str, str]], kind: str, encoding: str, packed: bool
) -> None:
    # What an encoding has no character for is left out before writing; everything else must come back.
    kept = [{key: text.encode(encoding, "ignore").decode(encoding) for key, text in row.items()} for row in table]
    content = WRITERS[kind](kept).encode(encoding)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes(gzip.compress(content) if packed else content)
        wish = "auto" if encoding in ("utf-8", "utf-8-sig", "utf-16") else encoding
        assert values(path, encoding=wish) == kept


@settings(max_examples=40, deadline=None)
@given(table=TABLES, packed=st.booleans())
def test_parquet_gives_back_the_same_text(table: list[dict[str, str]], packed: bool) -> None:
    import pyarrow
    import pyarrow.parquet

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(table), path)
        if packed:
            path.write_bytes(gzip.compress(path.read_bytes()))
        assert values(path) == table


@settings(max_examples=60, deadline=None)
@given(
    paragraphs=st.lists(
        st.text(alphabet=st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"], exclude_characters="\ufeff\x85"),
                min_size=1, max_size=40).filter(str.strip),
        min_size=1, max_size=5,
    ),
    end=st.sampled_from(["\n", "\r\n"]),
)  # fmt: skip
def test_paragraphs_of_a_text_are_documents(paragraphs: list[str], end: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data"
        path.write_bytes((end * 2).join(paragraphs).encode())
        found = list(rows_of(path, Layout(format="text", split="blank lines")))
    assert [item.values["text"] for item in found if isinstance(item, Row)] == paragraphs


def test_json_arrays_are_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "_WINDOW_CHARS", 7)
    table = [{"a": "x" * n, "b": [{"c": n}], "d": 'é\\"\n'} for n in range(40)]
    for text in (json.dumps(table), json.dumps({"first": [1, 2], "rows": table, "last": None}, indent=2)):
        path = write(tmp_path, text)
        assert [plain(row) for row in values(path)] == table


def test_rows_know_their_lines(tmp_path: Path) -> None:
    array = write(tmp_path, '[\n {"a": "1"},\n\n {"a":\n "2"},\n {"a": "3"}]')
    assert [item.line for item in read(array)] == [2, 4, 6]
    lines = write(tmp_path, '{"a": "1"}\n\n{"a": "2"}\r\n{"a": "\u2028"}\n')
    assert [item.line for item in read(lines)] == [1, 3, 4]
    table = write(tmp_path, 'a,b\n1,"x\ny"\n2,z\n')
    assert [item.line for item in read(table)] == [2, 4]


def test_one_object_is_one_row_or_holds_the_rows(tmp_path: Path) -> None:
    one = {"messages": [{"role": "user", "content": "x"}], "tools": [{"name": "f"}]}
    assert values(write(tmp_path, json.dumps(one))) == [one]
    assert values(write(tmp_path, json.dumps({"conversations": [one, one]}))) == [one, one]
    assert values(write(tmp_path, json.dumps({"rows": [], "a": "1"}))) == [{"rows": [], "a": "1"}]


def test_the_other_list_of_an_object_is_told(tmp_path: Path) -> None:
    notes: list[str] = []
    path = write(tmp_path, '{"train": [{"a": "1"}], "test": [{"a": "2"}, {"a": "3"}]}')
    assert len(values(path, note=notes.append)) == 1
    assert notes == ["data holds several lists; 'train' is read, 'test' with 2 rows is not."]


@pytest.mark.parametrize(
    ("text", "line", "column", "reason"),
    [
        ('[{"a": "1"},\n {"a": "2",}]', 2, 12, "a comma before a closing bracket"),
        ('[{"a": "1"},\n]', 2, 1, "a comma before a closing bracket"),
        ('[{"a": "1"}\n {"a": "2"}]', 2, 2, "a comma or the closing ] is missing"),
        ('[{"a": "1"},\n {"a": "2"', None, None, "ends"),
        ('[{"a": "1"}]\nxyz', 2, 1, "more text after the end"),
        ('{"data": [{"a": "1"}], "x": tru}', 1, 29, "expecting value"),
        ('{"a": "1"}{"a": "2"} ]', 1, 22, "more text after the end"),
    ],
)
def test_broken_json_names_line_and_column(
    tmp_path: Path, text: str, line: int | None, column: int | None, reason: str
) -> None:
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, text))
    assert reason in str(caught.value)
    if line is not None:
        assert (caught.value.line, caught.value.column) == (line, column)


@pytest.mark.parametrize(
    ("line", "column", "reason"),
    [
        ('{"a": "x",}', 11, "a comma before a closing bracket"),
        ('{"a": }', 7, "expecting value"),
        ('{"a": "x\ty"}', 9, "a tab, line end or other control character stands bare in a string"),
        ("{'a': 1}", 2, "double quotes"),
        ('{"a": Infinity}', None, "Infinity is no JSON number"),
        ('{"a": 1, "a": 2}', None, "'a' occurs twice"),
        ('["a"]', None, "the row is a list"),
        ("12", None, "the row is a number"),
        ("null", None, "the row is null"),
        ('{"a": "\\ud83d"}', None, "surrogate"),
        ('{"a": ' + "[" * 70 + "]" * 70 + "}", None, "nested more than 64 deep"),
        ('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}", None, "nested more than 64 deep"),
        ("{" + ",".join(f'"{n}": 0' for n in range(1001)) + "}", None, "1,001 keys"),
    ],
)
def test_a_bad_line_is_named_and_the_others_are_read(
    tmp_path: Path, line: str, column: int | None, reason: str
) -> None:
    items = read(write(tmp_path, f'{{"a": "1"}}\n{line}\n{{"a": "3"}}\n'))
    assert [type(item) for item in items] == [Row, BadRow, Row]
    bad = items[1]
    assert isinstance(bad, BadRow)
    assert reason in bad.reason
    assert (bad.line, bad.column) == (2, column)
    assert "data, line 2" in str(bad.error())


@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ('{"a": NaN}', "NaN is no JSON number"),
        ('{"a": [1, -Infinity]}', "-Infinity is no JSON number"),
        ('{"a": "1", "a": "2"}', "the key 'a' occurs twice in one object"),
        ('{"a": {"b": {"c": 1, "c": 2}}}', "the key 'c' occurs twice in one object"),
        ("{" + ",".join(f'"{n}": 0' for n in range(1001)) + "}", "an object has 1,001 keys, more than 1,000"),
        ('{"a": "\\ud83d"}', "a \\u escape is half of a surrogate pair, which is no character"),
        ('{"a": [{"b": "x\\u0000y"}]}', "a \\u0000 escape is a NUL character, which is no text"),
        ('{"\\u0000": "x"}', "a \\u0000 escape is a NUL character, which is no text"),
        ("[1]", "the row is a list, not an object with named columns"),
    ],
)
@pytest.mark.parametrize("window", [3, 1000])
def test_a_bad_row_of_an_array_is_named_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: str, reason: str, window: int
) -> None:
    monkeypatch.setattr(rows_module, "_WINDOW_CHARS", window)
    items = read(write(tmp_path, f'[{{"a": "1"}},\n {bad},\n {{"a": "3"}}]', "data.json"))
    assert [type(item) for item in items] == [Row, BadRow, Row]
    assert isinstance(items[1], BadRow)
    assert (items[1].line, items[1].reason) == (2, reason)


def test_objects_one_after_another_are_rows(tmp_path: Path) -> None:
    table = [{"question": f"q{n}", "answer": ["a", {"b": str(n)}]} for n in range(3)]
    for text in ("\n".join(json.dumps(row, indent=2) for row in table), "".join(map(json.dumps, table))):
        assert values(write(tmp_path, text, "data.jsonl")) == table
    items = read(write(tmp_path, "\n".join(json.dumps(row, indent=1) for row in table)))
    assert [item.line for item in items] == [1, 10, 19]
    assert values(write(tmp_path, "\r".join(map(json.dumps, table)), "old.jsonl")) == table


def test_the_turns_of_one_row_are_no_rows(tmp_path: Path) -> None:
    turns = [{"content": "q", "role": "user"}, {"content": "a", "role": "assistant"}]
    for key in ("messages", "chosen", "prompt"):
        assert values(write(tmp_path, json.dumps({key: turns, "id": "1"}))) == [{key: turns, "id": "1"}]
    functions = {"messages": turns, "functions": [{"name": "f", "parameters": {}}]}
    assert values(write(tmp_path, json.dumps(functions))) == [functions]


def test_deep_nesting_in_an_array_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nested more than 64 deep"):
        read(write(tmp_path, '[{"a": ' + "[" * 100_000))


def test_bad_bytes_are_a_bad_row(tmp_path: Path) -> None:
    good = '{"a": "你好"}\n'.encode()
    path = tmp_path / "data"
    path.write_bytes(good * 20 + b'{"a": "\xff"}\n' + good)
    bad = [item for item in read(path) if isinstance(item, BadRow)]
    assert [(item.line, item.column, item.reason) for item in bad] == [(21, 8, "there are bytes that are not utf-8")]
    path.write_bytes(b"[" + b",\n".join([good.strip()] * 20 + [b'{"a": "\xff"}']) + b"]")
    items = read(path)
    assert len(items) == 21
    assert isinstance(items[20], BadRow)
    assert (items[20].line, items[20].column) == (21, 8)


def test_a_line_without_end_is_refused_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_ROW_CHARS", 1000)
    path = write(tmp_path, '{"a": "1"}\n{"a": "' + "x" * 5000 + '"}\n{"a": "3"}\n')
    items = read(path)
    assert [(type(item), item.line) for item in items] == [(Row, 1), (BadRow, 2), (Row, 3)]
    assert isinstance(read(write(tmp_path, '[{"a": "' + "x" * 5000 + '"}]'))[0], BadRow)
    monkeypatch.setattr(rows_module, "_WINDOW_CHARS", 100)
    with pytest.raises(DataError, match="longer than"):
        read(write(tmp_path, '[{"a": "' + "x" * 5000 + '"}]'))
    with pytest.raises(DataError, match="longer than"):
        read(write(tmp_path, "word\n" * 1000), split="whole")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("q,a\n1,2,3\n4,5\n", "3 fields, the header has 2"),
        ("q,a\n1\n4,5\n", "1 fields, the header has 2"),
        ('q,a\n"x"y,2\n4,5\n', "after a closing quotation mark the field goes on"),
        ('q,a\n"x \\"y\\" z",2\n4,5\n', "after a closing quotation mark the field goes on"),
    ],
)
def test_bad_records_of_a_table(tmp_path: Path, text: str, reason: str) -> None:
    items = read(write(tmp_path, text, "data.csv"))
    assert [type(item) for item in items] == [BadRow, Row]
    assert isinstance(items[0], BadRow)
    assert reason in items[0].reason
    assert items[0].line == 2


def test_a_quotation_mark_that_never_closes_ends_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="line 3: a quotation mark opens here and never closes"):
        read(write(tmp_path, 'q,a\n1,2\n"x,2\n4,5\n', "data.csv"))


def test_a_header_with_one_name_twice_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="the column 'a' twice"):
        read(write(tmp_path, "a,a\n1,2\n", "data.csv"))


def test_what_spreadsheets_write_around_a_table_is_no_part_of_it(tmp_path: Path) -> None:
    table = [{"question": 'a "q" ; x\r\nzweite', "answer": "1,5"}, {"question": "007", "answer": "="}]
    body = 'question;answer\r\n"a ""q"" ; x\r\nzweite";1,5\r\n007;=\r\n'
    for first in ("", "sep=;\r\n", '"sep=;"\r\n', "SEP=;\r\n"):
        assert values(write(tmp_path, first + body, "data.csv", encoding="utf-8-sig")) == table
    tabs = body.replace(";", "\t").replace(" \t ", " ; ")
    assert values(write(tmp_path, "\ufeff" + tabs, "Unicode Text.txt", encoding="utf-16-le")) == table
    empty = values(write(tmp_path, "question;answer;;\r\na;b;;\r\nc;d;;e\r\n", "data.csv"))
    assert empty == [
        {"question": "a", "answer": "b", "column 3": "", "column 4": ""},
        {"question": "c", "answer": "d", "column 3": "", "column 4": "e"},
    ]


def test_a_field_longer_than_the_csv_module_allows_by_default(tmp_path: Path) -> None:
    long = "x" * 200_000
    assert values(write(tmp_path, f"q,a\n{long},1\n", "d.csv")) == [{"q": long, "a": "1"}]


def keys(count: int) -> str:
    return ",".join(f'"k{number}": 1' for number in range(count))


def test_a_million_keys_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="more than 1,000 keys"):
        read(write(tmp_path, f"{{{keys(10**6)}}}", "data.json"))
    [item] = read(write(tmp_path, f'[{{{keys(10**5)}, "k99999": 2}}]', "data.json"))
    assert isinstance(item, BadRow)
    assert item.reason == "an object has 100,001 keys, more than 1,000"


def test_a_hundred_thousand_columns_are_refused_at_once(tmp_path: Path) -> None:
    names = ",".join(f"k{number}" for number in range(100_000))
    with pytest.raises(DataError, match="100,000 columns, more than 1,000"):
        read(write(tmp_path, f"{names}\n{names}\n", "data.csv"))


@pytest.mark.parametrize("text", ['{"q": "a", "a": "b", "a": "c"}', '{"q": 1, "rows": [{"a": 1}], "rows": []}'])
def test_a_key_twice_in_the_one_object_of_a_file_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(DataError, match="occurs twice in one object"):
        read(write(tmp_path, text, "data.json"))


def test_a_bad_value_makes_the_one_object_of_a_file_a_bad_row(tmp_path: Path) -> None:
    (item,) = read(write(tmp_path, '{"q": "\\ud800", "a": "b"}', "data.json"))
    assert isinstance(item, BadRow)
    assert "half of a surrogate pair" in item.reason
    with pytest.raises(DataError, match="property name"):
        read(write(tmp_path, '{"\\ud800": 1}', "data.json"))


def test_places_in_a_file_of_many_values_are_right(tmp_path: Path) -> None:
    items = read(write(tmp_path, "[" + "\n".join(["{}, 1,"] * 50_000) + "\n{}]", "data.json"))
    assert [item.line for item in items if isinstance(item, BadRow)] == list(range(1, 50_001))
    with pytest.raises(DataError, match="line 3, column 3"):
        read(write(tmp_path, '[{"a": 1},\n{"a": 1},\n {a}]', "data.json"))


def test_marks_separate_documents(tmp_path: Path) -> None:
    path = write(tmp_path, "one\n\nstill one<|endoftext|>two<|endoftext|>\n\nthree\n<|endoftext|>\n")
    assert [row["text"] for row in values(path)] == ["one\n\nstill one", "two", "three"]


def test_parquet_types_become_text(tmp_path: Path) -> None:
    import datetime

    import pyarrow
    import pyarrow.parquet

    table = pyarrow.table(
        {
            "n": [1, None],
            "f": [0.5, 2.0],
            "day": [datetime.date(2024, 1, 5), None],
            "at": pyarrow.array([1, 2], type=pyarrow.timestamp("ns")),
            "list": [[{"role": "user", "n": 3}], []],
            "raw": [b"abc", None],
        }
    )
    pyarrow.parquet.write_table(table, tmp_path / "t")
    first, second = values(tmp_path / "t")
    assert first["n"] == "1"
    assert first["f"] == "0.5"
    assert first["day"] == "2024-01-05"
    assert first["at"].startswith("1970-01-01 00:00:00")
    assert first["list"] == [{"role": "user", "n": "3"}]
    assert first["raw"] == "abc"
    assert second["n"] is None


def parquet(folder: Path, **columns: Any) -> Path:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table(columns), folder / "t.parquet")
    return folder / "t.parquet"


def test_values_of_a_parquet_file_are_the_text_they_were(tmp_path: Path) -> None:
    import decimal

    import pyarrow as pa

    nested = pa.array([{"at": 1_704_416_523_000_000_001}], pa.struct([("at", pa.timestamp("ns"))]))
    turns = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
    path = parquet(
        tmp_path,
        category=pa.array(["a"]).dictionary_encode(),
        day=pa.array([1_704_416_523], pa.timestamp("s")).dictionary_encode(),
        price=pa.array([decimal.Decimal("1.50")]),
        small=pa.array([0.1], pa.float32()),
        large=pa.array([2**53 + 1]),
        missing=pa.array([float("nan")]),
        nothing=pa.nulls(1),
        nested=nested,
        map=pa.array([[("k", "v")]], pa.map_(pa.string(), pa.string())),
        messages=pa.array([[{"role": "user", "content": None}]], turns),
    )
    assert values(path) == [
        {
            "category": "a",
            "day": "2024-01-05 01:02:03.000",
            "price": "1.50",
            "small": "0.1",
            "large": "9007199254740993",
            "missing": None,
            "nothing": None,
            "nested": {"at": "2024-01-05 01:02:03.000000001"},
            "map": [["k", "v"]],
            "messages": [{"role": "user", "content": None}],
        }
    ]


def test_a_picture_beside_the_text_does_no_harm_and_damaged_text_is_a_bad_row(tmp_path: Path) -> None:
    import pyarrow as pa

    assert values(parquet(tmp_path, text=["x"], image=[b"\xff\xd8\xff"])) == [{"text": "x", "image": {"bytes": "3"}}]
    damaged = pa.Array.from_buffers(
        pa.string(), 1, [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    )
    texts = pa.concat_arrays([pa.array(["good"] * 1500), damaged, pa.array(["good"])])
    items = read(parquet(tmp_path, text=texts))
    assert [item for item in items if isinstance(item, BadRow)] == [
        BadRow(tmp_path / "t.parquet", 1501, None, "the column 'text' holds text that is not UTF-8")
    ]
    assert len(items) == 1502


def test_columns_of_a_parquet_file_have_one_name_each_and_are_not_too_many(tmp_path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / "t"
    pyarrow.parquet.write_table(pa.table([["a"], ["b"]], names=["answer", "answer"]), path)
    with pytest.raises(DataError, match="the column 'answer' twice"):
        read(path)
    with pytest.raises(DataError, match="1,001 columns, more than 1,000"):
        read(parquet(tmp_path, **{f"c{n}": ["x"] for n in range(1001)}))


def test_a_damaged_parquet_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no sound Parquet file"):
        read(write(tmp_path, "PAR1 and nothing more"))


def test_a_parquet_file_damaged_in_the_middle_is_no_fault_of_the_disk(tmp_path: Path) -> None:
    import pyarrow
    import pyarrow.parquet

    path = tmp_path / "t"
    pyarrow.parquet.write_table(pyarrow.table({"a": ["x"] * 1000, "b": ["y"] * 1000}), path)
    whole = path.read_bytes()
    for at in range(4, len(whole) - 60, 60):
        path.write_bytes(whole[:at] + b"\xff" * 50 + whole[at + 50 :])
        try:
            read(path)
        except DataError as error:
            assert "is no sound Parquet file" in error.what
            assert str(error).isprintable()


def test_numbers_keep_their_source_text_and_can_be_had_back() -> None:
    found = parse_json('{"a": 1e400, "b": 1984, "c": 0.10, "d": [true, null], "e": -7}')
    assert found == {"a": "1e400", "b": "1984", "c": "0.10", "d": [True, None], "e": "-7"}
    assert all(isinstance(found[key], NumberText) for key in "abce")
    assert plain(found) == {"a": "1e400", "b": 1984, "c": 0.1, "d": [True, None], "e": -7}


def test_case_001_a_byte_order_mark_is_no_part_of_the_text(tmp_path: Path) -> None:
    table = [{"instruction": "问题", "input": "", "output": f"答案{n}"} for n in range(3)]
    for kind in ("json", "jsonl"):
        assert values(write(tmp_path, WRITERS[kind](table), encoding="utf-8-sig")) == table
    text = "instruction,input,output\r\n" + "".join(f"问题,,答案{n}\r\n" for n in range(3))
    assert values(write(tmp_path, text, encoding="utf-8-sig")) == table


@pytest.mark.parametrize(
    ("encoding", "text"),
    [
        ("gbk", "这是一个例子"),
        ("gb18030", "这是一个例子，还有一句"),
        ("cp1252", "Das wäre schön: £5 für zwei Brötchen"),
        ("shift_jis", "これは一つの例です"),
        ("utf-16", "这是一个例子"),
    ],
)
@pytest.mark.parametrize("place", [0, 10, 19])
def test_case_003_a_gbk_file_is_read(tmp_path: Path, encoding: str, text: str, place: int) -> None:
    table = [{"text": f"plain {n}"} for n in range(20)]
    table[place] = {"text": text}
    assert values(write(tmp_path, _jsonl(table), encoding=encoding)) == table


def test_case_001_marks_that_stand_inside_because_files_were_joined_are_no_text_either(tmp_path: Path) -> None:
    one, two = '{"question": "a", "answer": "b"}\n', '{"question": "c", "answer": "d"}\n'
    table = [json.loads(one), json.loads(two)]
    joined = write(tmp_path, f"\ufeff\ufeff{one}\ufeff\n\ufeff{two}\ufeff", "joined.jsonl")
    assert values(joined) == table
    assert values(write(tmp_path, f"\ufeff\ufeff[{one},\n\ufeff{two}]\n", "joined.json")) == table
    items = read(write(tmp_path, "\ufeffq,a\r\n1,2\r\n\ufeffq,a\r\n3,4\r\n\ufeff5,6\r\n", "joined.csv"))
    assert [item.values["q"] for item in items if isinstance(item, Row)] == ["1", "3", "5"]
    assert [item for item in items if isinstance(item, BadRow)] == [
        BadRow(tmp_path / "joined.csv", 3, None, "the header stands here again")
    ]


def test_case_009_a_trailing_comma_names_its_place(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        read(write(tmp_path, '[\n {"a": "x",\n  "b": "y",\n }\n]', "registry.json"))
    error = caught.value
    assert (error.path, error.line) == (tmp_path / "registry.json", 4)
    assert "comma" in str(error)


def test_case_011_a_column_of_several_types_is_text(tmp_path: Path) -> None:
    table = [{"text": "t", "flag": None if n % 2 else n} for n in range(100)] + [{"text": "t", "flag": "word"}]
    found = values(write(tmp_path, _jsonl(table)))  # type: ignore[arg-type]
    assert [row["flag"] for row in found[:2]] + [found[-1]["flag"]] == ["0", None, "word"]


def test_case_013_a_very_long_record_is_read(tmp_path: Path) -> None:
    table = [{"text": "x" * 5_000_000}, {"text": "y"}]
    assert values(write(tmp_path, _jsonl(table))) == table
    # And where it is damaged, what is told is its own place and reason, not that more data follows.
    broken = _jsonl(table).replace('"}', '",}', 1)
    first = read(write(tmp_path, broken))[0]
    assert first == BadRow(tmp_path / "data", 1, 5_000_013, "a comma before a closing bracket")


def test_case_015_a_compressed_file_has_all_its_rows(tmp_path: Path) -> None:
    path = tmp_path / "data.json.gz"
    path.write_bytes(gzip.compress(_jsonl([{"text": str(n)} for n in range(50)]).encode()))
    assert len(values(path)) == 50


def test_case_017_one_malformed_line_is_one_bad_row(tmp_path: Path) -> None:
    good = '{"instruction": "a", "output": "b"}\n'
    items = read(write(tmp_path, good * 718 + '{"instruction": "a", "output": "b",}\n' + good * 5))
    bad = [item for item in items if isinstance(item, BadRow)]
    assert len(items) == 724
    assert [(item.line, item.reason) for item in bad] == [(719, "a comma before a closing bracket")]


def test_case_019_020_nulls_first_change_nothing(tmp_path: Path) -> None:
    table: list[dict[str, Any]] = [{"meta": {"items": None}, "note": None}] * 500
    table += [{"meta": {"items": [{"k": "v"}]}, "note": "text"}] * 500
    assert values(write(tmp_path, _jsonl(table))) == table
    assert values(write(tmp_path, _jsonl(table[::-1]))) == table[::-1]


def test_case_023_numbers_in_a_text_column_are_their_source_text(tmp_path: Path) -> None:
    lines = '{"answer": "x"}\n' * 1231 + '{"answer": 1984}\n{"answer": true}\n{"answer": 1e400}\n{"answer": NaN}\n'
    items = read(write(tmp_path, lines))
    assert [item.values["answer"] for item in items[1231:1234] if isinstance(item, Row)] == ["1984", True, "1e400"]
    last = items[1234]
    assert isinstance(last, BadRow)
    assert (last.line, last.reason) == (1235, "NaN is no JSON number")


def test_case_043_dates_stay_text(tmp_path: Path) -> None:
    table = [{"response": "2024-01-01"}, {"response": "2024-01-01T10:00:00Z"}]
    assert values(write(tmp_path, _jsonl(table))) == table


GOOD = '{"q": "why", "a": "so"}'


def crowded(times: int) -> list[str]:
    """Rows with `times` as many keys, or commas, as a row may have."""
    pairs = ",".join(f'"k{number}" : "v"' for number in range(times * rows_module.MAX_KEYS + 1))
    commas = times * rows_module.MAX_COMMAS + 1
    return [f'{{"q": "why", "x": {end}}}' for end in (f"{{{pairs}}}", f"[{'1,' * commas}1]", f"[{'[],' * commas}[]]")]


@pytest.mark.parametrize(
    ("number", "reason"),
    [
        (0, "more than 100,000 keys in one row"),
        (1, "more than 600,000 commas in one row"),
        (2, "more than 600,000 commas in one row"),
    ],
)
def test_a_row_of_too_many_values_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, reason: str
) -> None:
    def make(text: str, _start: int) -> Any:
        raise AssertionError(f"{len(text):,} characters were decoded")

    monkeypatch.setattr(rows_module, "MAX_COMMAS", 600_000)  # the same, sooner
    crowd = crowded(1)[number]
    [first, bad, last] = read(write(tmp_path, f"{GOOD}\n{crowd}\n{GOOD}\n", "data.jsonl"))
    assert isinstance(bad, BadRow)
    assert isinstance(first, Row) and isinstance(last, Row)
    assert (bad.line, bad.reason) == (2, f"there are {reason}")
    with pytest.raises(DataError, match=f"in the value that begins here, there are {reason}") as caught:
        read(write(tmp_path, f"[{GOOD},\n{crowded(3)[number]},\n{GOOD}]", "data.json"))
    assert (caught.value.line, caught.value.column) == (2, 1)
    monkeypatch.setattr(rows_module, "_scan_once", make)
    with pytest.raises(ValueError, match=reason):
        parse_json(crowd)
    assert isinstance(rows_module._json_row(tmp_path, 1, crowd), BadRow)


def test_a_long_row_of_ordinary_text_is_read(tmp_path: Path) -> None:
    table = [{"q": "why", "a": 'Well, he said: "no, never" ' * 60_000, "x": [{"k": "v"}] * 40_000}]
    assert values(write(tmp_path, json.dumps(table), "data.json")) == table
    assert values(write(tmp_path, _jsonl(table) + GOOD + "\n", "data.jsonl"))[:1] == table


@pytest.mark.parametrize("line", ["," * 2_000_001, '"a",' * 2_000_001])
def test_a_line_of_too_many_fields_is_refused_before_they_are_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    path = write(tmp_path, f"q,a\nwhy,so\n{line}\n", "data.csv")
    rows = rows_of(path, Layout(format="csv"))
    assert isinstance(next(rows), Row)
    with pytest.raises(DataError, match="line 3: the line has more than 2,000,000 fields"):
        next(rows)
    with pytest.raises(DataError, match="line 1: the line has more than 2,000,000 fields"):
        read(write(tmp_path, f"{line}\n1\n", "wide.csv"))
    monkeypatch.setattr(rows_module, "MAX_ROW_CHARS", 1000)
    with pytest.raises(DataError, match="line 3: the line is longer than"):
        read(path)


def test_a_line_beyond_the_real_limit_is_a_bad_row(tmp_path: Path) -> None:
    """120 million characters, more than MAX_ROW_CHARS, between two good rows."""
    path = tmp_path / "data.jsonl"
    with path.open("w", encoding="utf-8") as file:
        file.write(GOOD + '\n{"q": "')
        for _ in range(120):
            file.write("x" * 1_000_000)
        file.write(f'", "a": "so"}}\n{GOOD}\n')
    [first, bad, last] = read(path)
    assert isinstance(bad, BadRow)
    assert isinstance(first, Row) and isinstance(last, Row)
    assert (bad.line, bad.reason, last.line) == (2, "the line is longer than 64 million characters", 3)


def test_a_hundred_thousand_brackets_are_refused(tmp_path: Path) -> None:
    deep = "[" * 100_000 + "]" * 100_000
    for text in (deep, f"[{GOOD}, {deep}]", '{"a":' * 100_000 + "1" + "}" * 100_000):
        with pytest.raises(DataError, match="nested more than 64 deep"):
            read(write(tmp_path, text, "data.json"))
    [_, bad, _] = read(write(tmp_path, f"{GOOD}\n{deep}\n{GOOD}\n", "data.jsonl"))
    assert isinstance(bad, BadRow)
    assert bad.reason == "values are nested more than 64 deep"
