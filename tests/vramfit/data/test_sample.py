"""An even draw of the rows as the model sees them, and any row, for the panel."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import DataChoice
from vramfit.data import sample as module
from vramfit.data.prepare import prepare
from vramfit.data.sample import DataSet, pieces

Write = Callable[..., Path]
ROWS = [{"question": f"hello {'the ' * n}", "answer": "world " * n} for n in range(1, 31)]
LATER = 1e9


@pytest.fixture
def open_set(tokenizer: Any, tmp_path: Path) -> Callable[..., DataSet]:
    def opened(*paths: Path, **choice: Any) -> DataSet:
        data = DataChoice(paths=tuple(map(str, paths)), **choice)
        return DataSet(data, tokenizer=tokenizer, cache=tmp_path)

    return opened


def _json_array(folder: Path, rows: list[Any], name: str = "data.json") -> Path:
    path = folder / name
    path.write_text(json.dumps(rows), encoding="utf-8")
    return path


def test_a_whole_sample_counts_what_prepare_counts(
    open_set: Any, tokenizer: Any, write_rows: Write, tmp_path: Path
) -> None:
    path = write_rows(ROWS)
    found = open_set(path).sample(encode_s=60)
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    made = prepare(choice, tokenizer=tokenizer, max_length=4096, seed=1, cache=tmp_path)
    assert (found["whole"], found["even"], found["total"]) == (True, True, 30)
    assert found["lengths"] == [len(example) for example in made.train]
    learned = [sum(b - a for a, b in zip(edges[::2], edges[1::2], strict=True)) for edges in found["trained"]]
    assert learned == [example.trained_tokens for example in made.train]
    assert found["numbers"] == list(range(30))
    assert (found["format"], found["encoding"], found["shape"]) == ("jsonl", "utf-8", "question/answer")
    assert found["columns"] == {"question": "hello the", "answer": "world"}
    assert json.loads(json.dumps(found)) == found


@pytest.mark.parametrize("indexed", [True, False])
def test_a_draw_is_even_and_lies_in_every_file(open_set: Any, write_rows: Write, tmp_path: Path, indexed: bool) -> None:
    many = [{"question": "q", "answer": f"a {n}"} for n in range(900)]
    paths = [
        write_rows(part, f"{place}.jsonl") if indexed else _json_array(tmp_path, part, f"{place}.json")
        for place, part in enumerate((many[:100], many[100:400], many[400:]))
    ]
    found = open_set(*paths).sample(rows=90, encode_s=60)
    numbers = found["numbers"]
    assert (found["whole"], found["even"], found["total"]) == (False, True, 900)
    assert abs(len(numbers) - 90) <= 2
    assert max(b - a for a, b in zip([-1, *numbers], [*numbers, 900], strict=True)) <= (16 if indexed else 25)
    assert [sum(low <= n < high for n in numbers) for low, high in ((0, 100), (100, 400), (400, 900))] == [10, 30, 50]


def test_drawn_lengths_are_those_of_the_rows(open_set: Any, write_rows: Write) -> None:
    data = open_set(write_rows(ROWS * 40))
    found = data.sample(rows=100, encode_s=60)
    assert [data.view(number)["tokens"] for number in found["numbers"]] == found["lengths"]


def test_without_time_for_all_it_is_the_beginning_and_says_so(
    open_set: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = open_set(_json_array(tmp_path, ROWS * 40))
    monkeypatch.setattr(module, "_LOOK_EVERY", 1)
    found = data.sample(rows=100, read_s=0, encode_s=0)
    assert (found["whole"], found["even"], found["total"]) == (False, False, None)
    assert found["numbers"] == [0]
    indexed = tmp_path / "data.jsonl"
    indexed.write_text("\n".join(map(json.dumps, ROWS * 40)), encoding="utf-8")
    hasty = open_set(indexed).sample(rows=1000, encode_s=0)  # one batch, drawn from everywhere
    assert (hasty["whole"], hasty["even"], hasty["total"]) == (False, True, 1200)
    assert len(hasty["numbers"]) == 50
    assert hasty["numbers"][-1] > 1100


def test_a_draw_of_long_rows_is_thinned(open_set: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRAWN_CHARS", 1000)
    path = tmp_path / "docs.txt"
    path.write_text("\n\n".join(f"{n} " + "word " * 40 for n in range(64)), encoding="utf-8")
    found = open_set(path, documents="blank lines").sample(encode_s=60)
    gaps = {b - a for a, b in zip(found["numbers"], found["numbers"][1:], strict=False)}
    assert len(gaps) == 1
    assert len(found["numbers"]) <= 5
    assert (found["even"], found["whole"], found["total"]) == (True, False, 64)


def test_a_long_document_is_reckoned_from_its_beginning(open_set: Any, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "book.txt"
    path.write_text("hello world " * 1000, encoding="utf-8")
    whole = open_set(path).sample(encode_s=60)
    monkeypatch.setattr(module, "LONGEST_CHARS", 1200)
    part = open_set(path).sample(encode_s=60)
    assert (whole["whole"], part["whole"]) == (True, False)
    assert abs(part["lengths"][0] / whole["lengths"][0] - 1) < 0.05
    assert part["trained"][0][-1] == part["lengths"][0]
    assert open_set(path).view(0)["about"]


def test_any_row_is_shown_as_it_is_trained(open_set: Any, tokenizer: Any, write_rows: Write, tmp_path: Path) -> None:
    path = write_rows(ROWS)
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    made = prepare(choice, tokenizer=tokenizer, max_length=4096, seed=1, cache=tmp_path)
    data = open_set(path)
    for number in (17, 3, 29, 0):
        shown = data.view(number)
        assert (shown["number"], shown["file"], shown["line"], shown["left_out"]) == (number, path.name, number + 1, "")
        assert shown["tokens"] == len(made.train[number]) == sum(count for _, _, count, _ in shown["pieces"])
        text = "".join(text for text, *_ in shown["pieces"])
        assert text == tokenizer.decode(made.train[number].input_ids.tolist())
        assert "".join(text for text, flag, *_ in shown["pieces"] if flag).startswith("world")
        special = [text for text, *_, flag in shown["pieces"] if flag]
        assert special == ["<|im_start|>", "<|im_end|>"] * 2
    assert data.view(30) is None
    assert data.view(-1) is None


def test_rows_are_numbered_through_all_files(open_set: Any, write_rows: Write, tmp_path: Path) -> None:
    paths = [_json_array(tmp_path, ROWS[:7]), write_rows(ROWS[7:9]), _json_array(tmp_path, ROWS[9:], "last.json")]
    data = open_set(*paths)
    places = [data.view(number)["file"] for number in (0, 6, 7, 8, 9, 29)]
    assert places == ["data.json", "data.json", "data.jsonl", "data.jsonl", "last.json", "last.json"]
    assert data.view(30) is None


def test_rows_that_are_left_out_say_why_and_are_found(open_set: Any, tmp_path: Path) -> None:
    weightless = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b", "weight": 0}]}
    good = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    path = tmp_path / "data.jsonl"
    lines = [*[json.dumps(good)] * 50, "{bad", json.dumps({"messages": []}), json.dumps(weightless)]
    path.write_text("\n".join(lines), encoding="utf-8")
    data = open_set(path, bad_rows="skip")
    assert (data.view(50)["left_out"], data.view(50)["column"], data.view(50)["pieces"]) == (
        "expecting property name enclosed in double quotes",
        2,
        [],
    )
    assert data.view(51)["left_out"] == "the conversation is empty"
    assert data.view(51)["pieces"] == [["messages: []", 0, 0, 0]]
    assert data.view(52)["left_out"] == "no token of it is to be learned"
    assert data.view(52)["pieces"]
    assert data.next_left_out(-1) == {"number": 50, "looked": 50}
    assert data.next_left_out(50) == {"number": 51, "looked": 51}
    assert data.next_left_out(51) == {"number": None, "looked": 52}
    found = data.sample(encode_s=60)
    assert found["refused"] == [(52, "no token of it is to be learned")]
    assert (found["total"], len(found["lengths"]), found["whole"]) == (53, 50, True)


def test_a_search_ends_when_its_time_is_up(open_set: Any, write_rows: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_set(write_rows(ROWS * 20))
    monkeypatch.setattr(time, "monotonic", iter(range(10_000)).__next__)
    assert data.next_left_out(0, seconds=2) == {"number": None, "looked": 3 * 64}


def test_characters_of_several_tokens_are_one_piece(tokenizer: Any) -> None:
    ids = tokenizer.encode("你好 hello\nworld", add_special_tokens=False)
    found = pieces(ids, [True] * len(ids), tokenizer)
    assert "".join(text for text, *_ in found) == "你好 hello\nworld"
    assert not any("\ufffd" in text for text, *_ in found)
