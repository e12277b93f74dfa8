"""The first rows as the model sees them, for the panel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vramfit.config import DataChoice, RunConfig
from vramfit.data import sample
from vramfit.data.prepare import prepare
from vramfit.data.sample import answer, pieces, sample_rows

Write = Callable[..., Path]
ROWS = [{"question": f"hello {'the ' * n}", "answer": "world " * n} for n in range(1, 31)]


def test_a_whole_sample_counts_what_prepare_counts(tokenizer: Any, write_rows: Write, tmp_path: Path) -> None:
    choice = DataChoice(paths=(str(write_rows(ROWS)),), eval_share=0.0)
    found = sample_rows(choice, tokenizer=tokenizer, cache=tmp_path, seconds=60)
    made = prepare(choice, tokenizer=tokenizer, max_length=4096, seed=1, cache=tmp_path)
    assert found["whole"]
    assert found["lengths"] == [len(example) for example in made.train]
    learned = [sum(b - a for a, b in zip(edges[::2], edges[1::2], strict=True)) for edges in found["trained"]]
    assert learned == [example.trained_tokens for example in made.train]
    assert json.loads(json.dumps(found))["rows"] == 30
    shown = found["examples"][3]
    assert "".join(text for text, _, _ in shown["pieces"]) == tokenizer.decode(made.train[3].input_ids.tolist())
    assert "".join(text for text, flag, _ in shown["pieces"] if flag).startswith("world")
    assert sum(count for *_, count in shown["pieces"]) == shown["tokens"]


def test_a_part_is_called_a_part(tokenizer: Any, write_rows: Write, tmp_path: Path) -> None:
    choice = DataChoice(paths=(str(write_rows(ROWS)),))
    found = sample_rows(choice, tokenizer=tokenizer, cache=tmp_path, rows=7, seconds=60)
    assert (found["rows"], found["whole"]) == (7, False)
    hasty = sample_rows(choice, tokenizer=tokenizer, cache=tmp_path, seconds=0)
    assert hasty["rows"] >= 1


def test_a_long_document_is_reckoned_from_its_beginning(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    path = tmp_path / "book.txt"
    path.write_text("hello world " * 1000, encoding="utf-8")
    choice = DataChoice(paths=(str(path),))
    whole = sample_rows(choice, tokenizer=tokenizer, cache=tmp_path, seconds=60)
    monkeypatch.setattr(sample, "LONGEST_CHARS", 1200)
    part = sample_rows(choice, tokenizer=tokenizer, cache=tmp_path, seconds=60)
    assert (whole["whole"], part["whole"]) == (True, False)
    assert abs(part["lengths"][0] / whole["lengths"][0] - 1) < 0.05
    assert part["trained"][0][-1] == part["lengths"][0]


def test_characters_of_several_tokens_are_one_piece(tokenizer: Any) -> None:
    ids = tokenizer.encode("hello", add_special_tokens=False)
    assert "".join(text for text, *_ in pieces(ids, [True] * len(ids), tokenizer)) == tokenizer.decode(ids)


def test_errors_are_answers(tmp_path: Path) -> None:
    config = RunConfig.parse(
        {"data": {"paths": [str(tmp_path / "none.jsonl")]}, "model": {"source": "./none"}, "method": "lora"}
    )
    found = answer(config.to_json(), tmp_path)
    assert found["error"]["kind"] == "ModelError"
    assert found["error"]["what"]
