"""The six real data sets, read and encoded with a real model's tokenizer and template (SmolLM2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import DataChoice
from vramfit.data.prepare import prepare
from vramfit.data.read import ReadOptions, guess_workload, open_sources, survey
from vramfit.data.rows import Row, rows_of

SETS = {
    "alpaca_en_demo.json": ("json", "alpaca", 999),
    "alpaca_zh_demo.json": ("json", "alpaca", 1000),
    "glaive_toolcall_en_demo.json": ("json", "sharegpt", 300),
    "identity.json": ("json", "alpaca", 91),
    "v1_sft_demo.jsonl": ("jsonl", "messages", 500),
    "wiki_demo.txt": ("text", "text", 30),
}


@pytest.fixture(scope="module")
def smollm2(smollm2_folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(smollm2_folder)


@pytest.mark.parametrize("name", SETS)
def test_every_row_is_read_and_its_shape_known(reference_data: Path, name: str) -> None:
    kind, shape, rows = SETS[name]
    found = survey([reference_data / "datasets" / name])
    assert (found.format, found.shape, found.rows, found.encoding) == (kind, shape, rows, "utf-8")
    assert (found.bad_rows, found.dropped) == (0, {})


def test_values_are_those_a_plain_json_reader_gives(reference_data: Path) -> None:
    for name in ("alpaca_en_demo.json", "alpaca_zh_demo.json", "glaive_toolcall_en_demo.json", "identity.json"):
        path = reference_data / "datasets" / name
        [source] = open_sources([path], ReadOptions())
        read = [item.values for item in rows_of(path, source.layout) if isinstance(item, Row)]
        assert read == json.loads(path.read_text(encoding="utf-8"))


def learned_parts(tokenizer: Any, example: Any) -> list[str]:
    """Runs of trained tokens as text."""
    parts: list[list[int]] = []
    before = False
    for token, flag in zip(example.input_ids.tolist(), example.trained.tolist(), strict=True):
        if flag and not before:
            parts.append([])
        if flag:
            parts[-1].append(token)
        before = flag
    return [tokenizer.decode(part) for part in parts]


def answers(row: dict[str, Any]) -> list[str]:
    """What the assistant says in a row, by the data set's own documentation."""
    if "output" in row:
        return [row["output"]]
    if "messages" in row:
        return ["".join(part["value"] for part in turn["content"]) for turn in row["messages"] if turn["loss_weight"]]
    return [turn["value"] for turn in row["conversations"] if turn["from"] in ("gpt", "function_call")]


@pytest.mark.parametrize("name", [name for name in SETS if name != "wiki_demo.txt"])
def test_the_mask_covers_exactly_the_answers(reference_data: Path, smollm2: Any, tmp_path: Path, name: str) -> None:
    path = reference_data / "datasets" / name
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    data = prepare(choice, tokenizer=smollm2, max_length=16384, seed=1, cache=tmp_path)
    text = path.read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.splitlines()] if name.endswith("l") else json.loads(text)
    assert len(data.train) == len(rows) == SETS[name][2]
    for example in data.train:
        expected = answers(rows[example.row])
        found = learned_parts(smollm2, example)
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert one.endswith("<|im_end|>")
            said = one.removesuffix("<|im_end|>")
            assert said == other or json.loads(said) == json.loads(other)  # calls are written anew as JSON


@pytest.mark.parametrize("name", ["alpaca_en_demo.json", "glaive_toolcall_en_demo.json", "wiki_demo.txt"])
def test_the_guess_before_tokenising_is_near(reference_data: Path, smollm2: Any, tmp_path: Path, name: str) -> None:
    choice = DataChoice(paths=(str(reference_data / "datasets" / name),), eval_share=0.0)
    exact = prepare(choice, tokenizer=smollm2, max_length=512, seed=1, cache=tmp_path).workload
    guess = guess_workload(survey(choice.paths), 512, packing=choice.packing)
    assert guess.sequences == pytest.approx(exact.sequences, rel=0.15)
    assert guess.mean_tokens == pytest.approx(exact.mean_tokens, rel=0.15)
    assert guess.longest_tokens == exact.longest_tokens == 512


def test_a_wiki_article_ends_in_one_end_token(reference_data: Path, smollm2: Any, tmp_path: Path) -> None:
    choice = DataChoice(paths=(str(reference_data / "datasets" / "wiki_demo.txt"),), eval_share=0.1)
    data = prepare(
        choice,
        tokenizer=smollm2,
        max_length=65536,
        seed=1,
        cache=tmp_path,
    )
    assert (len({row for e in data.train for row in (e.rows or (e.row,))}), data.report.held_out_rows) == (27, 3)
    ends = sum(int((example.input_ids == smollm2.eos_token_id).sum()) for example in data.train + data.held_out)
    assert ends == 30
    assert smollm2.pad_token_id == smollm2.eos_token_id
    assert data.report.trained_tokens == data.report.tokens - 27
