from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import DataChoice
from vramfit.data.read import survey
from vramfit.data.report import LengthSummary, report_json, survey_from_json, survey_to_json
from vramfit.errors import DataError

Write = Callable[..., Path]
KEYS = {
    "format", "encoding", "shape", "rows", "bad_rows", "tokens", "truncated_share", "trained_tokens", "duplicates",
    "warnings", "examples",
}  # fmt: skip
ROWS = [{"question": "hello", "answer": "world " * 30}, {"question": "the cat", "answer": "ran"}]


def test_lengths() -> None:
    assert LengthSummary.of(list(range(1, 11))) == LengthSummary(min=1, median=5, p90=10, max=10)
    assert LengthSummary.of([7]) == LengthSummary(min=7, median=7, p90=7, max=7)


def test_the_report_with_a_tokenizer(tokenizer: Any, write_rows: Write, tmp_path: Path) -> None:
    path = write_rows([*ROWS, {"question": None, "answer": "x"}])
    path.write_text(path.read_text(encoding="utf-8") + "{bad\n", encoding="utf-8")
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    found = report_json(choice, cache=tmp_path, tokenizer=tokenizer, max_length=32)
    assert found.keys() >= KEYS
    assert json.loads(json.dumps(found)) == found
    assert [(row["line"], row["column"]) for row in found["bad_rows"]] == [(4, 2), (3, None)]
    assert all(row["reason"] for row in found["bad_rows"])
    assert (found["rows"], found["bad_row_count"], found["truncated_share"]) == (2, 1, 0.5)
    assert found["tokens"]["max"] > 32 > found["tokens"]["min"] > 0
    for example in found["examples"]:
        ids = [token for token, flag in zip(example["token_ids"], example["mask"], strict=True) if flag]
        assert len(example["token_ids"]) <= 32
        assert tokenizer.decode(example["token_ids"]) == example["text"]
        assert tokenizer.decode(ids).startswith(("world", "ran"))
    assert found["trained_tokens"] == sum(sum(example["mask"]) for example in found["examples"])
    assert any("were cut" in warning for warning in found["warnings"])


def test_the_report_gives_the_weights_of_tokens_where_there_are_any(
    tokenizer: Any, write_rows: Write, tmp_path: Path
) -> None:
    answers = [{"role": "assistant", "content": "world", **weight} for weight in ({"weight": 0.5}, {})]
    path = write_rows([{"messages": [{"role": "user", "content": "hello"}, answer]} for answer in answers])
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    found = report_json(choice, cache=tmp_path, tokenizer=tokenizer, max_length=32)
    weighted, plain = found["examples"]
    assert weighted["weights"] == [0.5 * flag for flag in weighted["mask"]]
    assert "weights" not in plain
    assert any("1 rows have weights from 0.5 to 0.5" in warning for warning in found["warnings"])


def test_the_report_without_a_tokenizer(write_rows: Write, tmp_path: Path) -> None:
    found = report_json(DataChoice(paths=(str(write_rows(ROWS)),)), cache=tmp_path)
    assert found.keys() >= KEYS
    assert found["tokens"] is found["trained_tokens"] is found["truncated_share"] is None
    assert found["examples"][1]["text"] == "[user] the cat\n\n[assistant] ran"


def test_what_cannot_be_used_raises(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        report_json(DataChoice(paths=(str(tmp_path / "none"),)), cache=tmp_path)


def test_a_survey_survives_json(write_rows: Write) -> None:
    path = write_rows([*ROWS, ["bad"], {"question": 1, "answer": None}])
    found = survey([path])
    assert survey_from_json(json.loads(json.dumps(survey_to_json(found)))) == found
