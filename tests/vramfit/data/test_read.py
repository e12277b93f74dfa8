from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import DataChoice
from vramfit.data import read as read_module
from vramfit.data.read import ReadOptions, guess_workload, open_sources, read_rows, survey
from vramfit.errors import DataError

Write = Callable[..., Path]
PAIR = {"question": "hello", "answer": "world"}


def test_a_survey_says_what_the_data_is(write_rows: Write) -> None:
    rows: list[Any] = [PAIR, PAIR, {"question": "x", "answer": None}, {"question": "x", "answer": "y" * 96}]
    path = write_rows(rows)
    path.write_text(path.read_text(encoding="utf-8") + "{bad\n", encoding="utf-8")
    found = survey([path])
    assert (found.format, found.encoding, found.shape) == ("jsonl", "utf-8", "question/answer")
    assert (found.rows, found.bad_rows, found.duplicates) == (3, 1, 1)
    assert found.dropped == {"'answer' is null or missing": 1}
    assert found.dropped_rows == (("data.jsonl", 3, "'answer' is null or missing"),)
    assert [(bad.line, bad.column) for bad in found.bad] == [(5, 2)]
    assert found.columns == {"prompt": "question", "completion": "answer"}
    assert found.roles == {"user": 3, "assistant": 3}
    assert found.bytes == path.stat().st_size
    assert found.text_bytes == 10 + 10 + 97
    assert (found.row_bytes[0], found.row_bytes[-1]) == (10, 97)
    assert found.trained_share == pytest.approx(106 / 117)
    assert any("line 5" in warning for warning in found.warnings)
    assert any("answer" in warning for warning in found.warnings)


def test_read_rows_stops_or_skips(write_rows: Write) -> None:
    path = write_rows([PAIR, ["no object"], PAIR])
    assert len(list(read_rows([path], ReadOptions(bad_rows="skip")))) == 2
    rows = read_rows([path])
    assert next(rows).values == PAIR
    with pytest.raises(DataError, match="line 2: the row is a list"):
        next(rows)


def test_case_002_a_byte_order_mark_changes_nothing_that_is_told(write_rows: Write) -> None:
    plain = survey([write_rows([PAIR], "plain.jsonl")])
    marked = survey([write_rows([PAIR], "marked.jsonl", encoding="utf-8-sig")])
    same = ("format", "encoding", "shape", "columns", "rows", "bad_rows", "warnings", "text_bytes")
    assert all(getattr(plain, name) == getattr(marked, name) for name in same)


def test_case_027_leftover_files_of_a_folder_are_not_rows(tmp_path: Path, write_rows: Write) -> None:
    (tmp_path / "train.csv").write_text("question,answer\nwhy,so\nhow,thus\n", encoding="utf-8")
    (tmp_path / "training_params.json").write_text('{"lr": 3e-5, "model": "x"}', encoding="utf-8")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    (tmp_path / ".ipynb_checkpoints" / "train-checkpoint.csv").write_text("question,answer\na,b\n", encoding="utf-8")
    found = survey([tmp_path])
    assert found.rows == 2
    assert any("training_params.json was left out" in warning for warning in found.warnings)
    with pytest.raises(DataError, match="none that are known"):
        survey([tmp_path / "training_params.json"])


def test_case_024_lists_printed_into_a_table_are_conversations_or_refused(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": 'say "a, b"'}, {"role": "assistant", "content": "c"}]
    for name, printed, rows in (("json.csv", json.dumps(turns), 1), ("python.csv", str(turns), 0)):
        path = tmp_path / name
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows([["id", "messages"], ["1", printed]])
        if rows:
            assert (survey([path]).rows, survey([path]).roles) == (1, {"user": 1, "assistant": 1})
        else:
            with pytest.raises(DataError, match="'messages' holds a printed list that is not JSON"):
                survey([path])


@pytest.mark.parametrize(
    "name", ["my models", "it's 100% mine", "-x", "--json", "模型 😀", "a" * 200, "{curly} [x] #1 &"]
)
def test_case_140_a_file_may_lie_anywhere_and_be_called_anything(
    write_rows: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    folder = tmp_path / "C D" / name
    folder.mkdir(parents=True)
    path = folder / f"{name}.jsonl"
    write_rows([PAIR]).rename(path)
    monkeypatch.chdir(folder)
    for given in ([path], [folder], [f"{name}.jsonl"], [str(path)]):
        assert (survey(given).rows, Path(survey(given).files[0]).name) == (1, path.name)
    path.write_text("{", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        survey([path])
    assert caught.value.path == path


@pytest.mark.parametrize(("asked", "answered"), [("user", "assistant"), ("human", "gpt"), ("prompter", "bot")])
@pytest.mark.parametrize("names", [("role", "content"), ("from", "value"), ("role", "text")])
def test_case_047_tags_are_known_without_being_named(
    write_rows: Write, asked: str, answered: str, names: tuple[str, str]
) -> None:
    role, text = names
    rows = [{"conversations": [{role: asked, text: f"q{n}"}, {role: answered, text: "a"}]} for n in range(5)]
    found = survey([write_rows(rows)])
    assert (found.rows, found.dropped, found.roles) == (5, {}, {"user": 5, "assistant": 5})


def test_case_057_a_conversation_of_a_system_turn_alone_is_left_out_and_counted(write_rows: Write) -> None:
    system = {"role": "system", "content": "Be kind."}
    turns = [system, {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    found = survey([write_rows([{"messages": turns}, {"messages": [system]}])])
    assert (found.rows, found.dropped) == (1, {"no turn is the assistant's": 1})
    assert found.dropped_rows == (("data.jsonl", 2, "no turn is the assistant's"),)


def test_case_045_roles_are_counted_and_a_strange_one_is_told(write_rows: Write) -> None:
    turns = [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]
    strange = [{"from": "hummany", "value": "q"}, {"from": "gpt", "value": "a"}]
    found = survey([write_rows([{"conversations": turns}, {"conversations": strange}])])
    assert found.roles == {"user": 1, "assistant": 1}
    [reason] = found.dropped
    assert "'hummany'" in reason
    with pytest.raises(DataError, match="No row can be used; in 1 of 1 rows unknown role 'hummany'"):
        survey([write_rows([{"conversations": strange}])])


def test_a_file_without_a_good_row_names_the_first_reason(write_rows: Write) -> None:
    with pytest.raises(DataError, match=r"line 1: No row can be read; the first: the row is a list"):
        survey([write_rows([[1]] * 200)])


def test_a_good_row_after_many_bad_ones_is_found(write_rows: Write) -> None:
    found = survey([write_rows([[1]] * 200 + [PAIR])])
    assert (found.rows, found.bad_rows, len(found.bad)) == (1, 200, 100)


def test_the_content_hash_is_of_the_content(write_rows: Write) -> None:
    one, two = survey([write_rows([PAIR], "a.jsonl")]), survey([write_rows([PAIR], "b.jsonl")])
    assert one.content_hash == two.content_hash
    assert one.content_hash != survey([write_rows([PAIR, PAIR], "a.jsonl")]).content_hash


def test_the_encoding_can_be_set(tmp_path: Path) -> None:
    path = tmp_path / "x.txt"
    path.write_bytes("çà et là".encode("cp437"))
    [row] = read_rows([path], ReadOptions(encoding="cp437"))
    assert row.values["text"] == "çà et là"


@pytest.mark.parametrize("text", ["a", "ab cd", "word " * 3, "word " * 7, "word " * 2001])
@pytest.mark.parametrize("packing", [True, False])
def test_no_guessed_mean_is_above_the_longest(write_rows: Write, text: str, packing: bool) -> None:
    work = guess_workload(survey([write_rows([{"text": text}])]), 1000, packing=packing)
    assert work.mean_tokens <= work.longest_tokens <= 1000


def test_guessing_the_work(write_rows: Write, tmp_path: Path) -> None:
    found = survey([write_rows([{"text": "word " * 80}] * 10)])
    work = guess_workload(found, 150)
    assert (work.sequences, work.exact, work.trained_share) == (10, False, 1.0)
    assert 80 <= work.mean_tokens <= 120
    assert guess_workload(found, 50).longest_tokens == 50
    assert guess_workload(found, 2048, packing=False).sequences == 10
    packed = guess_workload(found, 512)
    assert packed.sequences == 2
    assert packed.mean_tokens <= 512
    assert guess_workload(found, 150, eval_share=0.2).sequences == 8
    book = tmp_path / "book.txt"
    book.write_text("word " * 8000, encoding="utf-8")
    spread = guess_workload(survey([book]), 1000)
    assert spread.sequences == pytest.approx(10, abs=1)
    assert spread.mean_tokens <= 1000


def test_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, vramfit.data.read as r; r.survey([sys.argv[1]]);"
        "heavy = {'torch', 'transformers', 'pyarrow', 'tokenizers'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code, str(Path(__file__))], check=True, cwd=Path(__file__).parents[3])


def test_options_come_from_a_choice() -> None:
    options = ReadOptions.of(DataChoice(encoding="gbk", bad_rows="skip", columns={"text": "a"}))
    assert (options.encoding, options.bad_rows, options.columns) == ("gbk", "skip", {"text": "a"})


def test_a_mapping_is_checked_against_every_file(write_rows: Write) -> None:
    with pytest.raises(DataError, match="no column 'foo'"):
        open_sources([write_rows([PAIR])], ReadOptions(columns={"text": "foo"}))


HOSTILE = [
    b"\x00" * 100, b"\xff" * 100, b"{" * 100_000, b"[" * 100_000, b'{"a":' * 50_000, b'"', b",,,\n,,\n", b"\n\n\n",
    b"\xef\xbb\xbf", b"\xff\xfe", b"[1, 2]", b"{}", b"[]\n[]", b"{}\n{}",
]  # fmt: skip


@pytest.mark.parametrize("content", HOSTILE)
def test_hostile_files_are_refused_or_read_and_never_crash(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "data"
    path.write_bytes(content)
    try:
        found = survey([path])
    except DataError as error:
        assert error.what
    else:
        assert found.rows


def test_many_keys_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    path.write_text(json.dumps({str(n): "" for n in range(100_000)}) + "\n" + json.dumps(PAIR) + "\n", encoding="utf-8")
    found = survey([path])
    assert (found.rows, found.bad_rows) == (1, 1)
    assert "100,000 keys" in found.bad[0].reason


@pytest.mark.parametrize(
    ("documents", "texts"),
    [
        ("auto", ["one\ntwo", "three ## four", "five"]),
        ("whole", ["one\ntwo\n\nthree ## four\n\nfive"]),
        ("blank lines", ["one\ntwo", "three ## four", "five"]),
        ("lines", ["one", "two", "three ## four", "five"]),
        ("##", ["one\ntwo\n\nthree ", " four\n\nfive"]),
    ],
)
def test_the_user_says_where_documents_end(tmp_path: Path, documents: str, texts: list[str]) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one\ntwo\n\nthree ## four\n\nfive\n", encoding="utf-8")
    options = ReadOptions.of(DataChoice(documents=documents))
    assert [row.values["text"] for row in read_rows([path], options)] == texts
    assert survey([path], options).rows == len(texts)


def test_a_mark_that_is_nowhere_is_told(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("one\n\ntwo\n", encoding="utf-8")
    found = survey([path], ReadOptions(documents="###"))
    assert found.rows == 1
    assert "The mark '###' is nowhere in book.txt, so it is one document." in found.warnings


def test_text_that_looks_like_a_table_is_text_where_its_split_is_said(tmp_path: Path) -> None:
    for name, kind in (("notes.txt", "text"), ("notes.csv", "csv")):
        path = tmp_path / name
        path.write_text("question,answer\nhello,world\n", encoding="utf-8")
        assert survey([path]).format == "csv"
        [source] = open_sources([path], ReadOptions(documents="lines"))
        assert source.layout.format == kind


@pytest.mark.parametrize("mark", ["", "  ", "a\nb"])
def test_a_mark_is_part_of_one_line(mark: str) -> None:
    with pytest.raises(ValueError, match="documents"):
        DataChoice(documents=mark)


def test_so_many_unreadable_rows_and_no_more_are_left_out(write_rows: Write) -> None:
    path = write_rows([PAIR, PAIR])
    path.write_text(path.read_text(encoding="utf-8") + "{bad\n{worse\n", encoding="utf-8")
    for most in (2, None):
        assert len(list(read_rows([path], ReadOptions(bad_rows="skip", most_bad_rows=most)))) == 2
    with pytest.raises(DataError, match="2 rows cannot be read, and 1 may be left out") as caught:
        list(read_rows([path], ReadOptions(bad_rows="skip", most_bad_rows=1)))
    assert (caught.value.line, caught.value.path) == (3, path)


def test_a_file_of_numbers_is_refused_before_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_module, "MOST_BAD_FIRST", 200)
    path = tmp_path / "data.json"
    path.write_text(json.dumps([1] * 299), encoding="utf-8")
    with pytest.raises(DataError, match="No row can be read; the first: the row is a number"):
        survey([path])
    path.write_text(json.dumps([1] * 500), encoding="utf-8")
    with pytest.raises(DataError, match="None of the first 200 rows can be read; the first: the row is a number"):
        survey([path])
    path.write_text(json.dumps([*[1] * 250, PAIR]), encoding="utf-8")
    assert survey([path]).bad_rows == 250
