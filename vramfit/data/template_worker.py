"""The process that renders chat templates: requests as JSON lines on stdin, replies as JSON lines on stdout.

A chat template is a program of unknown origin. Here it has jinja2's sandbox with the settings of transformers, no file
or module of ours, and limits on memory, processor time and output. `rendering.py` starts this file by its path, adds
the limit on time that a clock on the wall measures, and trusts nothing that comes back.

A line of requests: {"templates": [without tools, with tools], "tokens", "seconds", "work"}, where "work" lists
[messages, tools, asks, prefixes ([count, asks] each), limit in characters]. One or more lines of replies, each a list,
answer it in order: {"text", "lengths" (per prefix: its length where the text begins with it, else null)}, {"refused":
reason}, or {"over": "memory" | "output"}, which is the last one. An empty line says that the work goes on.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import time
from collections.abc import Iterator
from datetime import datetime
from functools import lru_cache
from typing import Any, Final

import jinja2
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

NEEDED_JINJA: Final = (3, 1, 6)  # older sandboxes have known ways out
SIGN_OF_LIFE_S: Final = 1.0
REPLY_CHARS: Final = 100_000


class OutputOver(Exception):
    """The template wrote more than it may."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an answer for transformers; for the text it means nothing."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> Any:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


class _Namespace(jinja2.utils.Namespace):
    """Jinja's namespace without names that reach into Python."""

    def __init__(*arguments: Any, **named: Any) -> None:
        self, *rest = arguments
        values = dict(*rest, **named)
        for name in values:
            _refuse_hidden(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_hidden(name)
        super().__setitem__(name, value)


def _refuse_hidden(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace cannot hold the hidden name {name!r}")


class _Dict:
    """`dict(...)` and `dict.fromkeys(...)`, and nothing else of the type."""

    def __call__(self, *arguments: Any, **named: Any) -> dict[Any, Any]:
        return dict(*arguments, **named)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        return dict.fromkeys(*arguments)


def _raise(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def environment() -> ImmutableSandboxedEnvironment:
    """The sandbox in which transformers renders chat templates, with the same filters and functions."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"]
    )
    made.filters["tojson"] = _to_json
    made.globals.update(raise_exception=_raise, strftime_now=_now, dict=_Dict(), namespace=_Namespace)
    return made


@lru_cache(maxsize=8)
def compiled(text: str) -> tuple[jinja2.Template, dict[str, Any]]:
    """The template and its globals as a plain dict: jinja's own chain of dicts takes longer to copy than a template
    takes to render. Raises jinja2.TemplateSyntaxError."""
    template = environment().from_string(text)
    return template, dict(template.globals)


class _Rendering:
    """Renders one line of requests. Every conversation, and every beginning of one, has its own time."""

    def __init__(self, line: bytes) -> None:
        values = json.loads(line)
        self._templates: list[str] = values["templates"]
        self._tokens: dict[str, str] = values["tokens"]
        self._seconds: float = values["seconds"]
        self._work: list[list[Any]] = values["work"]
        self._last = time.monotonic()
        limit_processor_time(self._seconds)

    def lines(self) -> Iterator[bytes]:
        """The replies as lines, a new one whenever enough has come together."""
        replies: list[dict[str, Any]] = []
        held = 0
        for request in self._work:
            replies.append(self._answer(*request))
            held += len(replies[-1].get("text", ""))
            if held > REPLY_CHARS:
                yield json.dumps(replies).encode()
                replies, held = [], 0
        if replies:
            yield json.dumps(replies).encode()

    def _answer(self, messages: list[Any], tools: Any, asks: bool, prefixes: list[Any], limit: int) -> dict[str, Any]:
        """The reply to a request; whatever the template raises is in it."""
        try:
            template, known = compiled(self._templates[tools is not None])
            values = {**known, **self._tokens, "tools": tools, "documents": None}
            text = self._render(template, {**values, "messages": messages, "add_generation_prompt": asks}, limit)
            lengths: list[int | None] = []
            for count, asks_there in prefixes:
                beginning = {**values, "messages": messages[:count], "add_generation_prompt": asks_there}
                lengths.append(self._length_of_prefix(template, beginning, limit, text))
            return {"text": text, "lengths": lengths}
        except MemoryError:
            return {"over": "memory"}
        except OutputOver:
            return {"over": "output"}
        except Exception as error:
            reason = str(error).strip()
            return {"refused": reason.splitlines()[0][:200] if reason else repr(error)[:200]}

    def _length_of_prefix(self, template: jinja2.Template, values: dict[str, Any], limit: int, text: str) -> int | None:
        try:
            prefix = self._render(template, values, limit)
        except (MemoryError, OutputOver):
            raise
        except Exception:
            return None
        return len(prefix) if text.startswith(prefix) else None

    def _render(self, template: jinja2.Template, values: dict[str, Any], room: int) -> str:
        """The text, counted while it grows. Raises whatever the template raises."""
        if time.monotonic() - self._last > SIGN_OF_LIFE_S:
            self._last = time.monotonic()
            _write(b"\n")
            limit_processor_time(self._seconds)
        chunks = []
        for chunk in template.root_render_func(template.new_context(values, shared=True)):
            room -= len(chunk)
            if room < 0:
                raise OutputOver
            chunks.append(chunk)
        return "".join(chunks)


def limit_memory(limit_bytes: int) -> None:
    """No more address space than that, no core dumps, no files written; where the system can (not on Windows)."""
    try:
        import resource
    except ImportError:
        return
    limits = ((resource.RLIMIT_AS, limit_bytes), (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, 0))
    for kind, most in limits:
        try:
            resource.setrlimit(kind, (most, resource.getrlimit(kind)[1]))
        except (ValueError, OSError):
            continue  # macOS refuses some of them; the parent watches memory there


def limit_processor_time(seconds: float) -> None:
    """This process is ended by the system after that much more processor time: also when nobody is left to end it."""
    try:
        import resource
    except ImportError:
        return
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    most = math.ceil(time.process_time() + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _write(line: bytes) -> None:
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def main(memory_bytes: int) -> None:
    """Answer until stdin ends. The first line written says that the process is ready, or why it cannot be."""
    version = tuple(int(part) for part in jinja2.__version__.split(".")[:3] if part.isdigit())
    if version < NEEDED_JINJA:
        return _write(json.dumps({"refused": f"jinja2 is {jinja2.__version__}, it must be 3.1.6 or newer"}).encode())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program that started this one
    limit_memory(memory_bytes)
    _write(b"{}\n")
    for line in sys.stdin.buffer:
        try:
            for reply in _Rendering(line).lines():
                _write(reply + b"\n")
        except MemoryError:
            _write(b'[{"over": "memory"}]\n')
    return None


if __name__ == "__main__":
    main(int(sys.argv[1]))
