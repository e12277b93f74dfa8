"""Chat templates rendered in a process of their own (template_worker.py), with limits on time, memory and output.

One such process serves a whole program; it starts with the first request, ends with the program, and is ended and
started anew when a template goes over a limit.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import math
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from vramfit.errors import DataError, InternalError

WORKER: Final = Path(__file__).with_name("template_worker.py")
TIME_LIMIT_S: Final = 10.0
"""For one rendering, by the clock on the wall. An ordinary one takes under a millisecond."""
MEMORY_LIMIT_BYTES: Final = 1024 * 1024 * 1024
LEAST_OUTPUT_CHARS: Final = 1_000_000
OUTPUT_PER_INPUT: Final = 8
"""A rendering may write a million characters and eight times the characters of the conversation."""
_START_LIMIT_S: Final = 60.0
_LOOK_EVERY_S: Final = 0.1
_LINE_CHARS: Final = 100_000
_TIMES_AGAIN: Final = 5

Message = dict[str, Any]


class TemplateRefusal(Exception):
    """The template cannot render this conversation; the text is its own reason."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A conversation to render. `asks`: with the prompt for an answer behind it. `prefixes`: (how many messages,
    asks) of beginnings of it, whose lengths are wanted."""

    messages: Sequence[Message]
    tools: Sequence[Any] | None = None
    asks: bool = False
    prefixes: tuple[tuple[int, bool], ...] = ()


@dataclass(frozen=True)
class Answer:
    """The text, and for each prefix its length in characters, or None where the text does not begin with it."""

    text: str
    lengths: tuple[int | None, ...] = ()


class Renderer:
    """Renders with the templates of one tokenizer, which may have another one for conversations with tools."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokens = {str(name): str(token) for name, token in tokenizer.special_tokens_map.items()}
        self._plain = _template_of(tokenizer, None)
        self._with_tools = _template_of(tokenizer, [{}])

    def render(self, requests: Sequence[Request]) -> list[Answer | TemplateRefusal]:
        """One result per request, in order. Raises DataError where the template goes over a limit."""
        with _lock:
            return _running().ask(list(self._lines(requests)), requests)

    def _lines(self, requests: Sequence[Request]) -> Iterator[bytes]:
        """The requests, many in a line: what a line costs on its way is more than what a small conversation costs."""
        about = {"templates": [self._plain, self._with_tools], "tokens": self._tokens, "seconds": TIME_LIMIT_S}
        head = json.dumps(about)[:-1] + ', "work": ['
        work: list[str] = []
        held = 0
        for request in requests:
            content = _content(request)
            rest = json.dumps([request.asks, request.prefixes, _most_chars(content)])
            work.append(f"{content[:-1]}, {rest[1:]}")
            held += len(content)
            if held > _LINE_CHARS:
                yield (head + ",".join(work) + "]}\n").encode()
                work, held = [], 0
        if work:
            yield (head + ",".join(work) + "]}\n").encode()


def _content(request: Request) -> str:
    return json.dumps([request.messages, request.tools])


def _most_chars(content: str) -> int:
    """How many characters the rendering of a conversation may have."""
    return LEAST_OUTPUT_CHARS + OUTPUT_PER_INPUT * len(content)


def _template_of(tokenizer: Any, tools: list[Any] | None) -> str:
    try:
        return str(tokenizer.get_chat_template(None, tools))
    except ValueError as error:
        raise _fault(f"cannot be chosen: {str(error).splitlines()[0][:200]}") from None


def _fault(what: str) -> DataError:
    return DataError(
        f"The model's chat template {what}",
        "Mend chat_template.jinja in the model's folder, or remove it to use ChatML.",
    )


class _Worker:
    """The process. `ask` is called by one thread at a time."""

    def __init__(self) -> None:
        # -P: nothing beside the file can stand in for a module it imports.
        command = [sys.executable, "-P", str(WORKER), str(MEMORY_LIMIT_BYTES)]
        flags = getattr(subprocess, "CREATE_NO_WINDOW", 0)
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env={**os.environ, "PYTHONUTF8": "1"},
                creationflags=flags,
            )
        except OSError as error:
            raise InternalError(f"The process that renders chat templates cannot start: {error}") from None
        self.owner = os.getpid()
        # Bounded, so that a flood of replies waits in the pipe and not in our memory.
        self._lines: queue.Queue[bytes] = queue.Queue(maxsize=16)
        self._closing = False
        self._reader = threading.Thread(target=self._read, daemon=True, name="template replies")
        self._reader.start()
        try:
            ready = json.loads(self._next(_START_LIMIT_S))
        except (queue.Empty, ValueError, EOFError):
            self.close()
            raise InternalError("The process that renders chat templates did not start") from None
        if "refused" in ready:
            self.close()
            raise DataError(ready["refused"], "Install it: pip install -U jinja2")

    @property
    def alive(self) -> bool:
        return not self._closing and self._process.poll() is None

    def ask(self, lines: Sequence[bytes], requests: Sequence[Request]) -> list[Answer | TemplateRefusal]:
        """Send all, read all. Writing has a thread of its own: a busy process reads nothing while its replies wait."""
        writer = threading.Thread(target=self._write, args=(lines,), daemon=True, name="template requests")
        writer.start()
        try:
            results: list[Answer | TemplateRefusal] = []
            while len(results) < len(requests):
                replies = self._replies()
                if len(results) + len(replies) > len(requests):
                    raise InternalError("The process that renders chat templates gave more texts than it was asked for")
                results += map(_checked, replies, requests[len(results) :])
        except BaseException:
            self.close()
            raise
        finally:
            writer.join()
        return results

    def _write(self, lines: Iterable[bytes]) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it ended; reading finds out why
            for line in lines:
                self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with contextlib.suppress(OSError, ValueError):
            for line in self._process.stdout:
                self._put(line)
        self._put(b"")

    def _put(self, line: bytes) -> None:
        while not self._closing:
            with contextlib.suppress(queue.Full):
                return self._lines.put(line, timeout=_LOOK_EVERY_S)
        return None

    def _replies(self) -> list[dict[str, Any]]:
        try:
            return list(json.loads(self._next(TIME_LIMIT_S)))
        except queue.Empty:
            raise _fault(f"takes longer than {TIME_LIMIT_S:g} seconds for one conversation") from None
        except EOFError:
            raise _fault(self._end()) from None

    def _next(self, limit_s: float) -> bytes:
        """The next line that says something. Raises queue.Empty after `limit_s` without any line, EOFError at the
        end, DataError when the process holds too much memory.

        A process that hardly got to run, because the machine is busy or was asleep, is given the time again.
        """
        until = time.monotonic() + limit_s
        again, used = _TIMES_AGAIN, None
        while True:
            try:
                line = self._lines.get(timeout=max(min(_LOOK_EVERY_S, until - time.monotonic()), 0))
            except queue.Empty:
                now = self._processor_time()
                used = now if used is None else used
                if time.monotonic() >= until:
                    if not again or now - used > limit_s / 2:
                        raise
                    again, used, until = again - 1, now, time.monotonic() + limit_s
                self._check_memory()
                continue
            if not line:
                raise EOFError
            if line.strip():
                return line
            until = time.monotonic() + limit_s

    def _processor_time(self) -> float:
        try:
            times = psutil.Process(self._process.pid).cpu_times()
        except psutil.Error:
            return math.inf  # it ended
        return float(times.user + times.system)

    def _check_memory(self) -> None:
        """For systems that do not limit a process's memory by themselves."""
        try:
            held = psutil.Process(self._process.pid).memory_info().rss
        except psutil.Error:
            return
        if held > MEMORY_LIMIT_BYTES:
            raise _fault(_TOO_MUCH_MEMORY)

    def _end(self) -> str:
        """Why the process ended by itself."""
        code = self._process.wait(timeout=_START_LIMIT_S)
        if sys.platform != "win32":
            import signal

            if code == -signal.SIGXCPU:
                return f"takes longer than {TIME_LIMIT_S:g} seconds for one conversation"
        return f"ended the process that renders it (exit code {code}); it may use {MEMORY_LIMIT_BYTES // 2**20:,} MiB"

    def close(self) -> None:
        """End the process, whatever it is doing."""
        self._closing = True
        if self.owner != os.getpid():  # after a fork it is another process's
            return
        self._process.kill()
        self._process.wait()
        self._reader.join()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


_TOO_MUCH_MEMORY: Final = f"needs more than {MEMORY_LIMIT_BYTES // 2**20:,} MiB of memory for one conversation"


def _checked(reply: dict[str, Any], request: Request) -> Answer | TemplateRefusal:
    """A reply as a result; nothing in it is believed. Raises DataError."""
    if "over" in reply:
        written = f"writes more than {_most_chars(_content(request)):,} characters for one conversation"
        raise _fault(_TOO_MUCH_MEMORY if reply["over"] == "memory" else written)
    if "refused" in reply:
        return TemplateRefusal(str(reply["refused"]))
    text, lengths = str(reply["text"]), reply["lengths"]
    if len(lengths) != len(request.prefixes) or not all(n is None or 0 <= n <= len(text) for n in lengths):
        raise InternalError("The process that renders chat templates gave lengths that do not fit its text")
    return Answer(text, tuple(lengths))


_lock: Final = threading.Lock()
_worker: _Worker | None = None


def _running() -> _Worker:
    global _worker
    if _worker is None or _worker.owner != os.getpid() or not _worker.alive:
        if _worker is not None:
            _worker.close()
        _worker = _Worker()
    return _worker


@atexit.register
def stop() -> None:
    """End the process that renders; the next request starts another."""
    global _worker
    with _lock:
        if _worker is not None:
            _worker.close()
            _worker = None
