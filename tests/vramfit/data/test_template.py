"""Chat templates of several model families, written after their public documentation, and where answers are in them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from vramfit.data.shapes import Conversation, Turn
from vramfit.data.template import Template, TemplateRefusal, default_template
from vramfit.errors import DataError

HEADER = (  # Llama 3: headers, every turn closed by an end-of-turn mark, text trimmed
    "{{ bos_token or '' }}{% for m in messages %}{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
    "{{ m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
INSTRUCT = (  # Llama 2, Mistral: no generation prompt, roles alternate, the system turn only inside the first question
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] + '\n\n' %}"
    "{% set rest = messages[1:] %}{% else %}{% set system = '' %}{% set rest = messages %}{% endif %}"
    "{{ '<s>' }}{% for m in rest %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    "{% if m['role'] == 'user' %}{{ '[INST] ' + (system if loop.first else '') + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
TURNS = (  # Gemma 2: no system turn, "model" for the assistant
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim + '<end_of_turn>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
THINKING = (  # Qwen 3: the last answer alone gets an empty block of thoughts; tools and calls have their own marks
    "{% if tools %}{{ '<|im_start|>system\n# Tools\n' }}{% for tool in tools %}{{ tool | tojson + '\n' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' }}"
    "{% if m['role'] == 'assistant' and loop.last %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{{ m['content'] }}"
    "{% for call in m.tool_calls or [] %}"
    '{{ \'\n<tool_call>\n{"name": "\' + call.function.name + \'", "arguments": \' }}'
    "{{ call.function.arguments | tojson + '}\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
PLAIN = (  # Vicuna: words instead of marks
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] + '</s>' }}"
    "{% else %}{{ m['content'] + '\n\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)

CLOSED = (  # Phi-3: an end mark per turn, and the end token behind the whole conversation
    "{% for m in messages %}{{ '<|' + m['role'] + '|>\n' + m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ '<|endoftext|>' }}{% endif %}"
)

TALK = (Turn("user", "q one"), Turn("assistant", "a one"), Turn("user", "q two"), Turn("assistant", "a two"))
Make = Callable[..., Any]


def parts(tokenizer: Any, *turns: Turn, tools: tuple[dict[str, Any], ...] = (), last: bool = False) -> list[str]:
    """The trained parts of the rendered conversation."""
    item = Template(tokenizer).render(Conversation(turns, tools), last_only=last)
    return [item.text[start:end] for start, end in item.spans]


@pytest.mark.parametrize(
    ("template", "answers"),
    [
        (None, ["a one<|im_end|>", "a two<|im_end|>"]),
        (HEADER, ["a one<|eot_id|>", "a two<|eot_id|>"]),
        (INSTRUCT, ["a one</s>", "a two</s>"]),
        (TURNS, ["a one<end_of_turn>", "a two<end_of_turn>"]),
        (THINKING, ["a one<|im_end|>", "<think>\n\n</think>\n\na two<|im_end|>"]),
        (PLAIN, [" a one</s>", " a two</s>"]),
        (CLOSED, ["a one<|end|>", "a two<|end|>"]),
    ],
)
def test_answers_are_found_in_every_family(make_tokenizer: Make, template: str | None, answers: list[str]) -> None:
    tokenizer = make_tokenizer(template=template) if template else make_tokenizer()
    assert parts(tokenizer, *TALK) == answers
    assert parts(tokenizer, *TALK, last=True) == answers[1:]


@pytest.mark.parametrize("template", [None, HEADER, INSTRUCT, TURNS, THINKING, PLAIN, CLOSED])
def test_an_answer_that_repeats_its_question_is_found_in_its_place(make_tokenizer: Make, template: str | None) -> None:
    tokenizer = make_tokenizer(template=template) if template else make_tokenizer()
    same = (Turn("user", "yes"), Turn("assistant", "yes"), Turn("user", "yes"), Turn("assistant", "yes"))
    item = Template(tokenizer).render(Conversation(same))
    assert len(item.spans) == 2
    assert [item.text[:start].count("yes") for start, _ in item.spans] == [1, 3]
    assert all(item.text[start:end].count("yes") == 1 for start, end in item.spans)


def test_what_the_templates_can_is_found_by_trying(make_tokenizer: Make) -> None:
    thinking = Template(make_tokenizer(template=THINKING)).can
    assert (thinking.system, thinking.tools, thinking.call_style, thinking.repeats) == (True, True, "object", True)
    turns = Template(make_tokenizer(template=TURNS)).can
    assert (turns.system, turns.tools, turns.call_style, turns.repeats) == (False, False, None, False)
    assert turns.assistant_first is False
    assert Template(make_tokenizer(template=INSTRUCT)).can.generation_prompt is False


def test_case_057_a_refused_system_turn_moves_into_the_first_question(make_tokenizer: Make) -> None:
    template = Template(make_tokenizer(template=TURNS))
    item = template.render(Conversation((Turn("system", "Be kind."), Turn("user", "q"), Turn("assistant", "a"))))
    assert "<start_of_turn>user\nBe kind.\n\nq<end_of_turn>" in item.text
    assert [item.text[slice(*span)] for span in item.spans] == ["a<end_of_turn>"]
    assert any("system" in change for change in template.changes)


def test_case_046_turns_out_of_order_are_joined_or_refused(make_tokenizer: Make) -> None:
    strict, free = Template(make_tokenizer(template=TURNS)), Template(make_tokenizer())
    twice = Conversation((Turn("user", "q"), Turn("user", "more"), Turn("assistant", "a")))
    answers = Conversation((Turn("user", "q"), Turn("assistant", "a"), Turn("assistant", "b")))
    first = Conversation((Turn("assistant", "hello"), Turn("user", "q"), Turn("assistant", "a")))
    assert "q\n\nmore" in strict.render(twice).text
    assert "a\n\nb" in strict.render(answers).text
    assert strict.changes.total() == 2
    with pytest.raises(TemplateRefusal, match="begins with the assistant"):
        strict.render(first)
    assert len(free.render(first).spans) == 2
    assert len(free.render(answers).spans) == 2
    assert free.changes.total() == 0


TOOL = {"type": "function", "function": {"name": "weather", "parameters": {}}}
CALL = {"name": "weather", "arguments": {"city": "Paris"}}
CALLED = (
    Turn("user", "q"),
    Turn("assistant", "", (CALL,)),
    Turn("tool", "21"),
    Turn("assistant", "It is 21."),
)


def test_tool_calls_are_rendered_as_the_template_wants_them(make_tokenizer: Make) -> None:
    found = parts(make_tokenizer(template=THINKING), *CALLED, tools=(TOOL,))
    call = '\n<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>'
    assert found == [call, "<think>\n\n</think>\n\nIt is 21.<|im_end|>"]


def test_tool_calls_without_a_form_are_written_out(make_tokenizer: Make) -> None:
    template = Template(make_tokenizer())
    item = template.render(Conversation(CALLED, (TOOL,)))
    assert '{"name": "weather", "arguments": {"city": "Paris"}}<|im_end|>' in item.text
    assert "You may call these tools:" in item.text
    assert template.changes.total() == 2


def test_case_050_several_calls_in_a_row(make_tokenizer: Make) -> None:
    turns = (Turn("user", "q"), Turn("assistant", "", (CALL,)), Turn("assistant", "", (CALL,)),
             Turn("tool", "1"), Turn("tool", "2"), Turn("assistant", "both"))  # fmt: skip
    assert len(parts(make_tokenizer(template=THINKING), *turns)) == 3
    assert len(parts(make_tokenizer(template=TURNS), *turns)) == 2  # joined: the template wants turns to alternate


def test_turns_without_weight_are_not_learned(make_tokenizer: Make) -> None:
    turns = (Turn("user", "q"), Turn("assistant", "no", (), 0.0), Turn("user", "q"), Turn("assistant", "yes"))
    assert parts(make_tokenizer(), *turns) == ["yes<|im_end|>"]


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{% for m in messages %}{{ m['content'] }", "cannot render a question and its answer"),
        ("{{ nothing.at.all }}", "cannot render a question and its answer"),
        ("{{ raise_exception('no') }}", "no"),
        ("hello", "leaves the text of a turn out"),
    ],
)
def test_a_broken_template_is_told_in_one_sentence(make_tokenizer: Make, template: str, words: str) -> None:
    with pytest.raises(DataError, match=words) as caught:
        Template(make_tokenizer(template=template))
    assert "chat_template.jinja" in caught.value.remedy


def test_the_default_template_ends_turns_with_a_token_the_model_has(make_tokenizer: Make) -> None:
    def rendered(**kinds: Any) -> str:
        tokenizer = make_tokenizer(template=None, **kinds)
        tokenizer.chat_template = default_template(tokenizer)
        return Template(tokenizer).render(Conversation(TALK[:2])).text

    assert rendered() == "<|im_start|>user\nq one<|im_end|>\n<|im_start|>assistant\na one<|im_end|>\n"
    assert rendered(bos="<s>", eos="</s>").startswith("<s><|im_start|>user")


def test_the_default_template_uses_the_end_token_where_chatml_has_none(make_tokenizer: Make) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2}, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", eos_token="</s>")
    tokenizer.chat_template = default_template(tokenizer)
    assert parts(tokenizer, *TALK) == ["a one</s>", "a two</s>"]


@pytest.mark.parametrize("template", [HEADER, INSTRUCT, TURNS, THINKING, PLAIN, CLOSED])
def test_answers_keep_their_weights(make_tokenizer: Make, template: str) -> None:
    turns = (TALK[0], replace(TALK[1], weight=0.5), TALK[2], replace(TALK[3], weight=2.0))
    found = Template(make_tokenizer(template=template)).render(Conversation(turns))
    assert found.weights == (0.5, 2.0)
    for word, (start, end) in zip(("a one", "a two"), found.spans, strict=True):
        assert word in found.text[start:end]
    assert Template(make_tokenizer(template=template)).render(Conversation(TALK)).weights == ()


def test_joined_answers_have_the_least_weight_and_it_is_told(make_tokenizer: Make) -> None:
    turns = (*TALK[:1], replace(TALK[1], weight=2.0), replace(TALK[3], weight=0.5))
    apart = Template(make_tokenizer()).render(Conversation(turns))
    assert apart.weights == (2.0, 0.5)  # where the template takes them apart, each keeps its own
    template = Template(make_tokenizer(template=TURNS))
    assert template.render(Conversation(turns)).weights == (0.5,)
    assert template.changes["joined answers had different weights, of which the least was taken"] == 1
    template.render(Conversation((TALK[0], TALK[1], replace(TALK[1], text="", weight=0.0))))
    assert template.changes["joined answers had different weights, of which the least was taken"] == 1
