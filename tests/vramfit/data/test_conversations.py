from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vramfit.data.conversations import Encoder, Example, tokens_in_spans
from vramfit.data.shapes import Conversation, Document, Dropped, Turn

Make = Callable[..., Any]
TALK = Conversation(
    (Turn("user", "hello"), Turn("assistant", "world 你好"), Turn("user", "the cat"), Turn("assistant", "ran home"))
)


def encode(encoder: Encoder, *contents: Conversation | Document) -> list[Example]:
    results = encoder.encode(list(enumerate(contents)))
    assert all(isinstance(result, Example) for result in results), results
    return [result for result in results if isinstance(result, Example)]


def learned(tokenizer: Any, example: Example) -> str:
    return str(tokenizer.decode(example.input_ids[example.trained].tolist()))


def test_the_mask_covers_exactly_the_answers(tokenizer: Any) -> None:
    [example] = encode(Encoder(tokenizer), TALK)
    assert learned(tokenizer, example) == "world 你好<|im_end|>ran home<|im_end|>"
    assert example.input_ids.dtype == np.int32
    assert example.trained.dtype == np.bool_


def test_ids_are_those_the_tokenizer_makes_of_its_own_template(tokenizer: Any) -> None:
    messages = [{"role": turn.role, "content": turn.text} for turn in TALK.turns]
    [example] = encode(Encoder(tokenizer), TALK)
    assert example.input_ids.tolist() == tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]


@pytest.mark.parametrize(("trained_on", "text"), [
    ("last", "ran home<|im_end|>"),
    ("assistant", "world 你好<|im_end|>ran home<|im_end|>"),
])  # fmt: skip
def test_trained_on(tokenizer: Any, trained_on: Any, text: str) -> None:
    [example] = encode(Encoder(tokenizer, trained_on=trained_on), TALK)
    assert learned(tokenizer, example) == text


def test_everything_is_all_but_the_first_token(tokenizer: Any) -> None:
    [example] = encode(Encoder(tokenizer, trained_on="everything"), TALK)
    assert example.trained.tolist() == [False] + [True] * (len(example) - 1)


def test_the_end_token_is_learned_also_where_it_is_the_padding(tokenizer: Any) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    [example] = encode(Encoder(tokenizer), TALK)
    ends = example.input_ids == tokenizer.eos_token_id
    assert example.trained[ends].tolist() == [False, True, False, True]


def test_an_end_token_is_added_where_the_template_has_none(make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    template += "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
    tokenizer = make_tokenizer(template=template)
    [example] = encode(Encoder(tokenizer), TALK)
    assert example.input_ids[-1] == tokenizer.eos_token_id
    assert example.trained[-1]
    assert (example.input_ids == tokenizer.eos_token_id).sum() == 1


def test_case_071_a_document_ends_in_exactly_one_end_token(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(bos="<s>", eos="</s>")
    encoder = Encoder(tokenizer, conversations=False)
    texts = ["hello world", "hello world</s>", "<s>hello world", "<s>hello world</s></s>"]
    found = encode(encoder, *[Document(text) for text in texts])
    assert len({tuple(example.input_ids.tolist()) for example in found}) == 1
    assert found[0].input_ids[0] == tokenizer.bos_token_id
    assert found[0].input_ids[-1] == tokenizer.eos_token_id
    assert found[0].trained.tolist() == [False] + [True] * (len(found[0]) - 1)


def test_bos_is_not_doubled_in_a_conversation(make_tokenizer: Make) -> None:
    template = "{{ bos_token }}{% for m in messages %}{{ m['role'] + ' ' + m['content'] + '</s>' }}{% endfor %}"
    tokenizer = make_tokenizer(template=template, bos="<s>", eos="</s>")
    [example] = encode(Encoder(tokenizer), TALK)
    assert (example.input_ids == tokenizer.bos_token_id).sum() == 1


def test_a_tokenizer_without_end_token_is_told(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(eos=None)
    encoder = Encoder(tokenizer, conversations=False)
    assert any("no end token" in note for note in encoder.notes())
    assert len(encode(encoder, Document("hello"))) == 1


def test_case_063_064_answers_are_found_by_place_whatever_surrounds_them(make_tokenizer: Make) -> None:
    for marker in ("Answer:", "Answer: ", "Answer:\n", "\nAnswer:\n\n"):
        template = "{% for m in messages %}{% if m['role'] == 'user' %}{{ m['content'] }}"
        template += "{% else %}{{ '" + marker.replace("\n", "\\n") + "' + m['content'] + eos_token }}{% endif %}"
        template += "{% endfor %}{% if add_generation_prompt %}{{ '" + marker.replace("\n", "\\n") + "' }}{% endif %}"
        tokenizer = make_tokenizer(template=template)
        [example] = encode(Encoder(tokenizer), TALK)
        assert learned(tokenizer, example).replace(" ", "") == "world你好<|im_end|>ranhome<|im_end|>"


def test_case_068_no_generation_block_is_needed(tokenizer: Any) -> None:
    assert "{% generation" not in tokenizer.chat_template
    [example] = encode(Encoder(tokenizer), Conversation(TALK.turns[:2]))
    assert learned(tokenizer, example) == "world 你好<|im_end|>"


def test_case_059_the_default_template_goes_with_the_tokenizer(make_tokenizer: Make, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = make_tokenizer(template=None)
    encoder = Encoder(tokenizer)
    assert encoder.used_default
    assert any("ChatML" in note for note in encoder.notes())
    [example] = encode(encoder, TALK)
    tokenizer.save_pretrained(tmp_path / "export")
    again = AutoTokenizer.from_pretrained(tmp_path / "export")
    messages = [{"role": turn.role, "content": turn.text} for turn in TALK.turns]
    assert again.apply_chat_template(messages)["input_ids"] == example.input_ids.tolist()


def test_a_row_the_template_refuses_is_a_verdict(make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{% if m['content'] == 'bad' %}{{ raise_exception('not that') }}{% endif %}"
    template += "{{ m['content'] + '<|im_end|>' }}{% endfor %}"
    bad = Conversation((Turn("user", "bad"), Turn("assistant", "a")))
    results = Encoder(make_tokenizer(template=template)).encode([(0, TALK), (1, bad), (2, TALK)])
    assert [type(result) for result in results] == [Example, Dropped, Example]
    assert isinstance(results[1], Dropped)
    assert "not that" in results[1].reason


def test_case_056_a_conversation_that_does_not_end_with_an_answer_is_told(tokenizer: Any) -> None:
    encoder = Encoder(tokenizer)
    talk = Conversation((*TALK.turns[:2], Turn("user", "x"), Turn("user", "really the answer")))
    [example] = encode(encoder, talk)
    assert learned(tokenizer, example) == "world 你好<|im_end|>"
    assert any("do not end with the assistant" in note for note in encoder.notes())


def test_a_tokenizer_without_offsets_gives_the_same(tokenizer: Any) -> None:
    [fast] = encode(Encoder(tokenizer), TALK)
    slow_encoder = Encoder(tokenizer)
    slow_encoder._backend = None
    [slow] = encode(slow_encoder, TALK)
    assert slow.input_ids.tolist() == fast.input_ids.tolist()
    assert slow.trained.tolist() == fast.trained.tolist()


ANSWER_LAST = (  # Qwen 3, DeepSeek: what was thought is left out; and text trimmed, as Llama 3 and Gemma do
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'].split('</think>')[-1] | trim) }}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def test_what_a_template_leaves_out_of_an_answer_moves_no_edge(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template=ANSWER_LAST)
    talk = Conversation(
        (
            Turn("user", "  ran home "),
            Turn("assistant", "<think>\nran home\n</think>\n\nran home\n"),
            Turn("user", "ran home"),
            Turn("assistant", "\n  away <|im_start|> away \n"),
            Turn("user", ""),
            Turn("assistant", "<think>\n\n</think>\n\n世界"),
        )
    )
    [example] = encode(Encoder(tokenizer), talk)
    assert learned(tokenizer, example) == "ran home<|im_end|>away <|im_start|> away<|im_end|>世界<|im_end|>"
    [last] = encode(Encoder(tokenizer, trained_on="last"), talk)
    assert last.input_ids.tolist() == example.input_ids.tolist()
    assert learned(tokenizer, last) == "世界<|im_end|>"


@pytest.mark.parametrize(
    "settings",
    [
        {"padding_side": "left", "truncation_side": "left", "model_max_length": 4},
        {"pad_token": "<unk>"},
        {"pad_token": None},
        {"pad_token": "<|im_start|>"},
        {"add_bos_token": True, "add_eos_token": True},
    ],
)
def test_how_a_tokenizer_pads_and_cuts_by_itself_changes_nothing(tokenizer: Any, settings: dict[str, Any]) -> None:
    [whole] = encode(Encoder(tokenizer), TALK)
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    [again] = encode(Encoder(tokenizer), TALK)
    assert again.input_ids.tolist() == whole.input_ids.tolist()
    assert again.trained.tolist() == whole.trained.tolist()


def test_truncation_left_on_by_another_call_is_undone(tokenizer: Any) -> None:
    [whole] = encode(Encoder(tokenizer), TALK)
    tokenizer("hello world the cat", truncation=True, max_length=2)
    [again] = encode(Encoder(tokenizer), TALK)
    assert again.input_ids.tolist() == whole.input_ids.tolist()


def test_tokens_of_no_width_belong_to_what_is_before_them() -> None:
    # A line end of the prompt whose offset was trimmed to (5, 5), where the answer begins.
    offsets = np.array([[0, 4], [5, 5], [5, 8], [8, 9]])
    assert tokens_in_spans(offsets, [(5, 8)]).tolist() == [False, False, True, False]
    assert tokens_in_spans(np.zeros((0, 2), dtype=np.int64), [(0, 1)]).tolist() == []


WEIGHED = Conversation(
    (
        Turn("user", "hello"),
        Turn("assistant", "world 你好", weight=0.5),
        Turn("user", "the cat"),
        Turn("assistant", "away", weight=0.0),
        Turn("user", "the dog"),
        Turn("assistant", "ran home", weight=2.0),
    )
)


def weighed(tokenizer: Any, example: Example) -> dict[float, str]:
    """Weight to the text of the tokens that have it."""
    assert example.weights is not None
    assert example.weights.dtype == np.float32
    assert np.array_equal(example.weights > 0, example.trained)
    values = sorted(set(example.weights[example.trained].tolist()))
    return {value: str(tokenizer.decode(example.input_ids[example.weights == value].tolist())) for value in values}


@pytest.mark.parametrize("backend", [True, False])
def test_each_answer_has_its_weight(tokenizer: Any, backend: bool) -> None:
    encoder = Encoder(tokenizer)
    encoder._backend = encoder._backend if backend else None
    example, plain = encode(encoder, WEIGHED, TALK)
    assert weighed(tokenizer, example) == {0.5: "world 你好<|im_end|>", 2.0: "ran home<|im_end|>"}
    assert plain.weights is None
    assert encoder.notes() == ["Answers in 1 rows have weights from 0.5 to 2; a step's loss is their weighted mean."]


def test_weights_of_zero_and_one_are_only_a_mask(tokenizer: Any) -> None:
    turns = tuple(replace(turn, weight=float(turn.weight > 0)) for turn in WEIGHED.turns)
    encoder = Encoder(tokenizer)
    [example] = encode(encoder, Conversation(turns))
    assert learned(tokenizer, example) == "world 你好<|im_end|>ran home<|im_end|>"
    assert example.weights is None
    assert encoder.notes() == []


def test_an_added_end_token_has_the_weight_of_its_answer(make_tokenizer: Make) -> None:
    template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    tokenizer = make_tokenizer(template=template, eos="</s>")
    silent = Conversation((*WEIGHED.turns[:5], replace(WEIGHED.turns[5], weight=0.0)))
    last, other = encode(Encoder(tokenizer), WEIGHED, silent)
    assert last.input_ids[-1] == other.input_ids[-1] == tokenizer.eos_token_id
    assert last.trained[-1]
    assert last.token_weights()[-1] == 2
    assert not other.trained[-1]
    assert weighed(tokenizer, other).keys() == {0.5}


def test_the_last_answer_keeps_its_weight_and_everything_has_none(tokenizer: Any) -> None:
    [example] = encode(Encoder(tokenizer, trained_on="last"), WEIGHED)
    assert weighed(tokenizer, example) == {2.0: "ran home<|im_end|>"}
    encoder = Encoder(tokenizer, trained_on="everything")
    [example] = encode(encoder, WEIGHED)
    assert example.trained_tokens == len(example) - 1
    assert example.weights is None
    assert any("1 conversations give weights to answers, which are not used" in note for note in encoder.notes())
