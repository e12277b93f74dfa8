from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from vramfit.config import DataChoice
from vramfit.data.prepare import prepare
from vramfit.data.read import ReadOptions, open_sources, read_rows, source_rows, survey
from vramfit.data.rows import BadRow, Row
from vramfit.errors import DataError

HEADER = "id,parent_id,question,answer\n"


def write(folder: Path, text: str) -> Path:
    path = folder / "threads.csv"
    path.write_text(text, encoding="utf-8")
    return path


def said(path: Path) -> list[str]:
    """Each conversation in one line, unlearned answers in brackets."""
    rows = read_rows([path], ReadOptions(bad_rows="skip"))
    return [
        " ".join(
            f"({turn['content']})" if turn.get("weight") == 0 else turn["content"] for turn in row.values["messages"]
        )
        for row in rows
    ]


def reasons(path: Path) -> list[tuple[int | None, str]]:
    [source] = open_sources([path], ReadOptions())
    return [(item.line, item.reason) for item in source_rows(source) if isinstance(item, BadRow)]


def test_case_030_an_empty_parent_is_a_root_and_rows_follow_their_parents(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "3,2,q3,a3\n1,,q1,a1\n2,1,q2,a2\n9,,q9,a9\n")
    assert said(path) == ["q1 a1 q2 a2 q3 a3", "q9 a9"]
    found = survey([path])
    assert (found.rows, found.bad_rows, found.shape, found.roles) == (2, 0, "messages", {"user": 4, "assistant": 4})
    assert any("joined to conversations by the column 'parent_id'" in warning for warning in found.warnings)


def test_case_030_a_missing_parent_is_refused_with_its_id(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,,q1,a1\n2,77,q2,a2\n3,2,q3,a3\n4,NaN,q4,a4\n")
    assert reasons(path) == [
        (3, "the parent '77' of '2' is missing"),
        (4, "its thread goes up to '2', which has no root"),
        (5, "the parent 'NaN' of '4' is missing"),
    ]
    assert said(path) == ["q1 a1"]
    with pytest.raises(DataError, match="the parent '77' of '2' is missing") as caught:
        list(read_rows([path]))
    assert caught.value.line == 3


@pytest.mark.parametrize("circle", [["a"], ["a", "b"], ["a", "b", "c"]])
def test_case_030_a_circle_is_refused_with_its_ids(tmp_path: Path, circle: list[str]) -> None:
    parents = dict(zip(circle, [*circle[1:], circle[0]], strict=True))
    rows = "".join(f"{name},{parent},q,a\n" for name, parent in parents.items())
    path = write(tmp_path, HEADER + "1,,q1,a1\n" + rows + "x,a,q,a\n")
    shown = " -> ".join(map(repr, [*circle, "a"]))
    expected = [(3 + index, f"the parents go round in a circle: {shown}") for index in range(len(circle))]
    assert reasons(path) == [*expected, (3 + len(circle), "its thread goes up to 'a', which has no root")]
    assert said(path) == ["q1 a1"]


def test_case_030_a_long_chain_and_a_long_circle_end(tmp_path: Path) -> None:
    chain = "".join(f"{n},{n - 1 if n else ''},q,a\n" for n in range(20_000))
    assert len(said(write(tmp_path, HEADER + chain))[0].split()) == 40_000
    circle = "".join(f"{n},{(n + 1) % 20_000},q,a\n" for n in range(20_000))
    with pytest.raises(DataError, match="'0' -> '1' -> '2' -> '3' -> '4' and 19,996 more"):
        survey([write(tmp_path, HEADER + circle)])


def test_an_answer_that_two_conversations_share_is_learned_once(tmp_path: Path, tokenizer: Any) -> None:
    path = write(tmp_path, HEADER + "1,,q1,a1\n2,1,q2,a2\n3,1,q3,a3\n")
    assert said(path) == ["q1 a1 q2 a2", "(q1) (a1) q3 a3"]
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    data = prepare(choice, tokenizer=tokenizer, max_length=64, seed=1, cache=tmp_path / "cache")
    learned = [tokenizer.decode(one.input_ids[one.trained].tolist()) for one in data.train]
    assert learned == ["a1<|im_end|>a2<|im_end|>", "a3<|im_end|>"]


def test_rows_that_are_single_turns_are_joined(write_rows: Any) -> None:
    turns = [("1", None, "prompter", "q"), ("2", "1", "assistant", "a"), ("3", "1", "assistant", "b")]
    names = ("message_id", "parent_id", "role", "text")
    path = write_rows([dict(zip(names, turn, strict=True)) for turn in turns])
    assert said(path) == ["q a", "(q) b"]
    assert survey([path]).rows == 2


def test_an_id_twice_or_none_is_refused_with_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,,q1,a1\n1,,q2,a2\n,,q3,a3\n")
    assert reasons(path) == [(3, "the id '1' occurs twice, first in line 2"), (4, "the column 'id' is empty")]


def test_who_maps_the_columns_reads_each_row_by_itself(tmp_path: Path) -> None:
    path = write(tmp_path, HEADER + "1,,q1,a1\n2,77,q2,a2\n")
    options = ReadOptions(columns={"prompt": "question", "completion": "answer"})
    [source] = open_sources([path], options)
    assert source.shape.kind == "prompt/completion"
    assert [type(item) for item in source_rows(source)] == [Row, Row]
