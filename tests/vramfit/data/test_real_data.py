"""The six real data sets, read and encoded with a real model's tokenizer and template (SmolLM2)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import DataChoice
from vramfit.data.conversations import Encoder, Example
from vramfit.data.prepare import prepare
from vramfit.data.read import ReadOptions, guess_workload, open_sources, survey
from vramfit.data.rows import Row, plain, rows_of
from vramfit.data.shapes import Conversation, Turn

SETS = {
    "alpaca_en_demo.json": ("json", "alpaca", 999),
    "alpaca_zh_demo.json": ("json", "alpaca", 1000),
    "glaive_toolcall_en_demo.json": ("json", "sharegpt", 300),
    "identity.json": ("json", "alpaca", 91),
    "v1_sft_demo.jsonl": ("jsonl", "messages", 500),
    "wiki_demo.txt": ("text", "text", 30),
}

TRIED_ROWS = 60  # of each set in each family, evenly spread; trying all takes a minute


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


FAMILIES = {  # the templates in families/, written after each family's documentation: what ends a turn, and all marks
    "llama3": "<|eot_id|> <|start_header_id|> <|end_header_id|> <|begin_of_text|>",
    "qwen25": "<|im_end|> <|im_start|>",
    "mistral": "</s> <s> [INST] [/INST]",
    "gemma": "<end_of_turn> <start_of_turn> <bos>",
    "phi3": "<|end|> <|system|> <|user|> <|assistant|>",
    "zephyr": "</s> <|system|> <|user|> <|assistant|>",
}


@pytest.fixture(scope="module")
def family_encoder(smollm2_folder: Path) -> Any:
    """An Encoder with a family's template and its marks as tokens, all else SmolLM2's tokenizer; and the end mark."""
    from transformers import AutoTokenizer

    def make(family: str) -> tuple[Encoder, str]:
        tokenizer = AutoTokenizer.from_pretrained(smollm2_folder)
        marks = FAMILIES[family].split()
        tokenizer.add_tokens(marks, special_tokens=True)
        tokenizer.eos_token = marks[0]
        template = Path(__file__).parent / "families" / f"{family}.jinja"
        tokenizer.chat_template = template.read_text(encoding="utf-8")
        return Encoder(tokenizer), marks[0]

    return make


def is_said(found: str, answer: str) -> bool:
    """Whether a learned run is this answer: as it is, behind a space of the template, trimmed, or a call as JSON."""
    if found in (answer, " " + answer, answer.strip()):
        return True
    call = found.strip().removeprefix("<tool_call>").removesuffix("</tool_call>")
    try:
        return bool(json.loads(call) == json.loads(answer))
    except ValueError:
        return False


@pytest.mark.parametrize("name", [name for name in SETS if name != "wiki_demo.txt"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_mask_covers_exactly_the_answers_in_every_family(
    reference_data: Path, family_encoder: Any, family: str, name: str
) -> None:
    encoder, end = family_encoder(family)
    [source] = open_sources([reference_data / "datasets" / name], ReadOptions())
    rows = [item for item in rows_of(source.path, source.layout) if isinstance(item, Row)]
    rows = rows[:: max(len(rows) // TRIED_ROWS, 1)]
    contents = [(number, source.shape.convert(row)) for number, row in enumerate(rows)]
    for row, example in zip(rows, encoder.encode(contents), strict=True):
        assert isinstance(example, Example), (row.line, example)
        expected = answers(plain(row.values))
        found = learned_parts(encoder.tokenizer, example)
        assert len(found) == len(expected), (row.line, found)
        for one, answer in zip(found, expected, strict=True):
            assert one.endswith(end)
            assert one.count(end) == 1
            assert is_said(one.removesuffix(end), answer), (row.line, one, answer)


@pytest.mark.parametrize("family", ["gemma", "mistral"])
def test_what_a_strict_family_refuses_is_rewritten_and_told(
    reference_data: Path, family_encoder: Any, family: str
) -> None:
    encoder, _ = family_encoder(family)
    [source] = open_sources([reference_data / "datasets" / "glaive_toolcall_en_demo.json"], ReadOptions())
    rows = [item for item in rows_of(source.path, source.layout) if isinstance(item, Row)][:20]
    contents = [source.shape.convert(row) for row in rows]
    examples = encoder.encode(list(enumerate(contents)))
    with_tools = [number for number, content in enumerate(contents) if getattr(content, "tools", ())]
    told = " ".join(encoder.notes())
    assert f"In {len(with_tools)} rows the list of tools was written into the system turn" in told
    assert f"In {len(with_tools)} rows system turns were put at the head of a user turn" in told
    first = encoder.tokenizer.decode(examples[with_tools[0]].input_ids.tolist())
    asked = contents[with_tools[0]].turns[0].text
    assert "You may call these tools:\n" in first
    assert first.index("You may call these tools:") < first.index(asked[:40])


@pytest.mark.parametrize(("family", "joined"), [
    ("llama3", False), ("qwen25", False), ("mistral", True), ("gemma", True), ("phi3", False), ("zephyr", False),
])  # fmt: skip
def test_turns_of_one_role_are_joined_only_where_the_family_wants_them_to_alternate(
    family_encoder: Any, family: str, joined: bool
) -> None:
    encoder, end = family_encoder(family)
    talk = Conversation(
        (Turn("user", "one"), Turn("user", "two"), Turn("assistant", "three"), Turn("assistant", "four"))
    )
    [example] = encoder.encode([(0, talk)])
    found = [part.strip() for part in learned_parts(encoder.tokenizer, example)]
    assert found == ([f"three\n\nfour{end}"] if joined else [f"three{end}", f"four{end}"])
    assert any("were joined" in note for note in encoder.notes()) == joined
    assert ("one\n\ntwo" in encoder.tokenizer.decode(example.input_ids.tolist())) == joined


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


@pytest.mark.parametrize("name", SETS)
def test_the_fast_way_gives_what_the_plain_one_gives(
    reference_data: Path, smollm2: Any, tmp_path: Path, name: str
) -> None:
    """Two steps at once, many rows in a message, places from lengths: against one row after another and the places
    that the tokenizers library gives."""
    path = reference_data / "datasets" / name
    data = prepare(
        DataChoice(paths=(str(path),), eval_share=0.0, packing=False),
        tokenizer=smollm2,
        max_length=10**6,
        seed=1,
        cache=tmp_path,
    )
    encoder = Encoder(smollm2)
    encoder._places = None
    [source] = open_sources([path], ReadOptions())
    rows = [item for item in rows_of(path, source.layout) if isinstance(item, Row)]
    plainly = [encoder.encode([(number, source.shape.convert(row))])[0] for number, row in enumerate(rows)]
    kept = [example for example in plainly if isinstance(example, Example) and example.trained_tokens]
    assert len(kept) == len(data.train)
    for one, other in zip(data.train, kept, strict=True):
        assert one.row == other.row
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.trained.tolist() == other.trained.tolist()
        assert one.token_weights().tolist() == other.token_weights().tolist()
