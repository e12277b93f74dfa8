from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.data.layouts import layout_of
from vramfit.data.sources import scan
from vramfit.errors import DataError


def layout(folder: Path, text: str, name: str = "data") -> tuple[str, str]:
    path = folder / name
    path.write_text(text, encoding="utf-8", newline="")
    found = layout_of(scan(path))
    return found.format, found.split if found.format == "text" else found.delimiter


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ('[{"a": 1}]', "json"),
        ('\n\n [ {"a": 1}\n]', "json"),
        ('{"data": [{"a": "b"}]}', "json"),
        ('{\n  "data": [\n {"a": "b"},\n {"a": "b"}\n]}', "json"),
        ('{"a": 1}\n{"a": 2}\n', "jsonl"),
        ('{"a": 1}', "json"),
        ('{"messages": [{"role": "user"}]}', "json"),
        ('{"a": 1, }\n{"a": 2}\n', "jsonl"),
        ('{"a": "cut\n{"a": 2}\n', "jsonl"),
        ("{'a': 1}\n{'a': 2}\n", "jsonl"),
        ("question,answer\nwhy,so\n", "csv"),
        ('question;answer\n"a;b";c\n', "csv"),
        ("question\tanswer\nwhy\tso, it is\n", "tsv"),
        ("Once upon a time, there was a cat.\nIt sat, and it sat.\n", "text"),
        ("[Verse 1]\nHello, hello\n", "text"),
        ("{{name}} is my name\n", "text"),
        ("one line", "text"),
        ("[note] this is text", "text"),
        ("[1] Introduction\n\nAs in [2].\n", "text"),
        ("[2024-01-05] user: hello\n[2024-01-06] bot: hi\n", "text"),
        ('["Hello," she said.] And then it ended.\n', "text"),
        ("[ ] to do\n[x] done\n", "text"),
        ("[[A link]] in a wiki\n", "text"),
        ("one two<|im_end|>\n\nthree <|im_start|>four", "text"),
        ("<|user|>hi<|assistant|>yes\n<|user|>you<|assistant|>no\n", "text"),
        ("[1, 2,\n 3]", "json"),
        ('["one", "two"]\n', "json"),
        ('["one", "tw', "json"),
        ("[[1, 2], [3]]", "json"),
        ("[1, 2]\n[3]\n", "jsonl"),
    ],
)
def test_formats_are_told_by_content(tmp_path: Path, text: str, kind: str) -> None:
    assert layout(tmp_path, text)[0] == kind


def test_the_name_decides_only_what_the_content_leaves_open(tmp_path: Path) -> None:
    assert layout(tmp_path, "text\nhello\n", "a.csv") == ("csv", ",")
    assert layout(tmp_path, "text\nhello\n", "a.txt")[0] == "text"
    assert layout(tmp_path, '{"a": 1}\n{"a": 2}\n', "a.csv")[0] == "jsonl"
    assert layout(tmp_path, '[{"a": 1}]', "a.txt")[0] == "json"


@pytest.mark.parametrize(
    "text",
    [
        '// a comment\n[{"a": 1}]',
        '# a comment\n{"a": 1}\n',
        '"a": "b","c": "d"}\n{"a": "b","c": "d"}\n',
        "just prose\n",
    ],
)
def test_what_is_named_json_and_is_none_is_never_learned_as_text(tmp_path: Path, text: str) -> None:
    for name in ("a.json", "a.jsonl", "a.ndjson"):
        assert layout(tmp_path, text, name)[0] == "jsonl"
    assert layout(tmp_path, "question,answer\nwhy,so\n", "a.json") == ("csv", ",")


def test_a_first_line_may_name_the_delimiter(tmp_path: Path) -> None:
    assert layout(tmp_path, "sep=;\r\nquestion;answer\r\nwhy, oh why;so\r\n", "a.csv") == ("csv", ";")
    assert layout(tmp_path, "sep=\t\nquestion\tanswer\nwhy\tso\n", "a.csv") == ("tsv", "\t")
    assert layout(tmp_path, "sep=^\nquestion^answer\nwhy^so\n", "a.txt") == ("csv", "^")


def test_columns_without_a_name_are_no_reason_to_take_another_delimiter(tmp_path: Path) -> None:
    assert layout(tmp_path, ";question;answer\n0;why, oh why;so\n1;how;thus\n", "a.csv") == ("csv", ";")
    assert layout(tmp_path, "question;answer;;\nwhy;so;;\n", "a.csv") == ("csv", ";")


@pytest.mark.parametrize(
    ("text", "split"),
    [
        ("one\ntwo\n", "whole"),
        ("one\n\ntwo\n", "blank lines"),
        (("word " * 200 + "\n") * 3, "lines"),
        ("one\n\ntwo<|endoftext|>three", "marks"),
    ],
)
def test_documents_of_a_text_file(tmp_path: Path, text: str, split: str) -> None:
    assert layout(tmp_path, text) == ("text", split)


@pytest.mark.parametrize("text", ['"hello"', "42", "  -1e5\n", "null", "true", '"a \\"quoted\\" word"\n'])
def test_one_json_value_is_no_data_set(tmp_path: Path, text: str) -> None:
    path = tmp_path / "data"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match="holds one JSON value and no rows"):
        layout_of(scan(path))
    assert layout_of(scan(path), split="whole").format == "text"  # who says that it is text is believed


@pytest.mark.parametrize(
    "text", ['"Hello," said he.', '"Hello,"\n"and goodbye."\n', "42 is the answer", "007", "nullify"]
)
def test_text_that_begins_like_a_json_value_is_text(tmp_path: Path, text: str) -> None:
    assert layout(tmp_path, text)[0] == "text"


def test_one_row_and_a_cut_character_are_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_bytes(b'{"a": "1"}\n\xe4')
    assert layout_of(scan(path), encoding="utf-8").format == "jsonl"


@pytest.mark.parametrize("end", ["", "\n"])
def test_two_rows_of_which_the_first_is_long_are_lines(tmp_path: Path, end: str) -> None:
    long = '{"a": "' + "x" * 70_000 + '", "more": [{"b": "c"}]}'
    assert layout(tmp_path, long + '\n{"a": "y"}' + end)[0] == "jsonl"
    assert layout(tmp_path, long + end)[0] == "json"


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_file_of_blank_lines_is_refused(tmp_path: Path, end: str) -> None:
    path = tmp_path / "data.jsonl"
    row = '{"a": "b"}'
    path.write_text(end * 1_200_000 + row, encoding="utf-8", newline="")
    with pytest.raises(DataError, match=r"1,[01]\d\d,000 blank lines in a file of 1,200,001"):
        layout_of(scan(path))
    path.write_text((row + end * 999) * 1500, encoding="utf-8", newline="")
    assert layout_of(scan(path)).format == "jsonl"
