"""Templates that misbehave, each against its limit; and the same text as transformers renders in its own process."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from vramfit.data import rendering
from vramfit.data.conversations import Encoder
from vramfit.data.rendering import Answer, Renderer, Request, TemplateRefusal
from vramfit.data.shapes import Conversation, Turn
from vramfit.data.template import Template
from vramfit.errors import DataError

Make = Callable[..., Any]
TALK = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
BLOCKS = (  # what chat templates use: macros, namespaces, loop controls, filters, generation marks, dates, white space
    "{%- set ns = namespace(seen=0, first=true) -%}\n"
    "{%- macro show(m) %}<{{ m.role }}|{{ m['content'] | trim }}>{% endmacro %}\n"
    "{{ bos_token or '' }}{% for m in messages %}\n"
    "    {% if m.role == 'nobody' %}{% continue %}{% endif %}\n"
    "{% set ns.seen = ns.seen + 1 %}"
    "    {% generation %}{% set ns.first = false %}{{ show(m) }}{% endgeneration %}\n"
    "{% endfor %}{{ ns.seen }} {{ ns.first }} {{ dict(a=1, b=ns.seen) | tojson }}"
    "{{ {'text': 'ä<>&', 'n': 1.5, 'none': none} | tojson(indent=2) }}"
    "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
    "{% if add_generation_prompt %}{{ '<assistant|' }}{% endif %}"
)


def render(tokenizer: Any, messages: Any = TALK, tools: Any = None, *, asks: bool = False) -> str:
    [found] = Renderer(tokenizer).render([Request(messages=messages, tools=tools, asks=asks)])
    if isinstance(found, TemplateRefusal):
        raise found
    return found.text


@pytest.mark.parametrize("asks", [False, True])
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "weather", "x": [1, 2.5, None]}}]])
def test_the_text_is_the_one_transformers_renders(make_tokenizer: Make, tools: Any, asks: bool) -> None:
    messages = [*TALK, {"role": "user", "content": " 你好 \n\U0001f600 \t"}, {"role": "nobody", "content": "x"}]
    for template in (BLOCKS, make_tokenizer().chat_template):
        tokenizer = make_tokenizer(template=template, bos="<s>")
        expected = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=asks)
        assert render(tokenizer, messages, tools, asks=asks) == expected


def test_a_template_of_its_own_for_tools_is_used(make_tokenizer: Make) -> None:
    tokenizer = make_tokenizer(template={"default": "plain", "tool_use": "with tools"})
    assert render(tokenizer) == "plain"
    assert render(tokenizer, tools=[{"name": "x"}]) == "with tools"


def test_prefixes_are_measured_where_the_text_begins_with_them(make_tokenizer: Make) -> None:
    last = "{% for m in messages %}{{ m.content + ('!' if loop.last else '.') }}{% endfor %}"
    for template, lengths in ((None, (26 + 7, 59)), (last, (None, None))):
        tokenizer = make_tokenizer(template=template) if template else make_tokenizer()
        messages = [*TALK, {"role": "user", "content": "more"}]
        [found] = Renderer(tokenizer).render([Request(messages=messages, prefixes=((1, False), (2, False)))])
        assert isinstance(found, Answer)
        whole = tokenizer.apply_chat_template(messages, tokenize=False)
        begins = [tokenizer.apply_chat_template(messages[:n], tokenize=False) for n in (1, 2)]
        assert found.text == whole
        assert found.lengths == tuple(len(part) if whole.startswith(part) else None for part in begins)
        assert (found.lengths == (None, None)) == (lengths == (None, None))


@pytest.mark.parametrize(
    "template",
    [
        # Ranges in a row, because the sandbox allows no longer one than 100,000.
        "{% for a in range(99999) %}{% for b in range(99999) %}{% if a > b > a %}x{% endif %}{% endfor %}{% endfor %}",
        "{{ 10 ** (10 ** 9) }}",  # one operation inside Python that nothing interrupts
    ],
)
def test_a_template_without_end_is_ended(make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch, template: str) -> None:
    monkeypatch.setattr(rendering, "TIME_LIMIT_S", 1.0)
    tokenizer = make_tokenizer(template="{% if messages | length > 0 %}" + template + "{% endif %}")
    started = time.monotonic()
    with pytest.raises(DataError, match="takes longer than 1 seconds") as caught:
        Template(tokenizer)
    assert time.monotonic() - started < 8
    assert "chat_template.jinja" in caught.value.remedy
    assert render(make_tokenizer()).startswith("<|im_start|>user")  # another process took its place


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the memory is watched, not limited")
@pytest.mark.parametrize(
    "template",
    [
        "{% set big = messages[0].content * 10 ** 10 %}{{ big | length }}",
        "{% set ns = namespace(x='aa') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    ],
)
def test_a_template_that_takes_memory_without_end_is_refused(make_tokenizer: Make, template: str) -> None:
    with pytest.raises(DataError, match="needs more than 1,024 MiB"):
        Template(make_tokenizer(template=template))


def test_memory_is_watched_where_the_system_sets_no_limit(
    make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendering.stop()
    monkeypatch.setattr(rendering, "MEMORY_LIMIT_BYTES", 2**40)  # what the new process is told: no limit
    render(make_tokenizer())
    monkeypatch.setattr(rendering, "MEMORY_LIMIT_BYTES", 2**20)  # less than any Python takes
    slow = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(DataError, match="MiB of memory"):
        render(make_tokenizer(template=slow))
    rendering.stop()


def test_a_template_that_writes_without_end_is_refused(make_tokenizer: Make) -> None:
    template = "{% for a in range(99999) %}{{ 'x' * 10000 }}{% endfor %}"  # 10 ** 9 characters
    request = Request(messages=TALK)
    with pytest.raises(DataError, match=r"writes more than 1,000,\d\d\d characters"):
        Renderer(make_tokenizer(template=template)).render([request])


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ raise_exception('not today') }}", "not today"),
        ("{% set ns = namespace(__init__=1) %}", "__init__"),
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{{ cycler.__init__.__globals__.os.getcwd() }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{% for %}", "xpected"),
        ("{{ 1 / 0 }}", "division"),
    ],
)
def test_what_a_template_must_not_do_is_its_refusal(make_tokenizer: Make, template: str, words: str) -> None:
    with pytest.raises(TemplateRefusal, match=words):
        render(make_tokenizer(template=template))
    with pytest.raises(DataError, match="cannot render a question and its answer"):
        Template(make_tokenizer(template=template))


@pytest.mark.skipif(sys.platform == "win32", reason="needs a signal that pauses a process")
def test_a_process_that_was_paused_is_given_its_time_again(
    make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    import signal
    import threading

    monkeypatch.setattr(rendering, "TIME_LIMIT_S", 0.4)
    tokenizer = make_tokenizer()
    expected = render(tokenizer)
    worker = rendering._worker
    assert worker is not None
    pid = worker._process.pid
    os.kill(pid, signal.SIGSTOP)
    threading.Timer(1.0, os.kill, (pid, signal.SIGCONT)).start()
    started = time.monotonic()
    assert render(tokenizer) == expected
    assert time.monotonic() - started > 0.9


def test_a_limit_reached_by_one_row_stops_the_run_with_its_number(
    make_tokenizer: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "TIME_LIMIT_S", 1.0)
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    template = "{% for m in messages %}{% if m.content == 'go' %}" + loop + "{% endif %}"
    encoder = Encoder(make_tokenizer(template=template + "{{ m.role + m.content + '<|im_end|>' }}{% endfor %}"))
    good = Conversation((Turn("user", "q"), Turn("assistant", "a")))
    bad = Conversation((Turn("user", "go"), Turn("assistant", "a")))
    with pytest.raises(DataError, match="1 seconds"):
        encoder.encode([(0, good), (1, bad), (2, good)])
    assert len(encoder.encode([(0, good)])) == 1


def test_many_large_conversations_pass_the_pipe_both_ways(make_tokenizer: Make) -> None:
    """More than both pipes hold at once: nobody waits for the other."""
    tokenizer = make_tokenizer()
    messages = [{"role": "user", "content": "long " * 20_000}, {"role": "assistant", "content": "yes"}]
    found = Renderer(tokenizer).render([Request(messages=messages, prefixes=((1, True),))] * 40)
    whole = tokenizer.apply_chat_template(messages, tokenize=False)
    assert [item.text == whole for item in found if isinstance(item, Answer)] == [True] * 40


def test_the_process_imports_neither_torch_nor_ours_and_ends_with_its_parent(make_tokenizer: Make) -> None:
    import psutil

    render(make_tokenizer())
    worker = rendering._worker
    assert worker is not None
    process = psutil.Process(worker._process.pid)
    assert process.ppid() == os.getpid()
    assert process.memory_info().rss < 100 * 2**20
    rendering.stop()
    assert not psutil.pid_exists(process.pid)
    assert render(make_tokenizer()) != ""
