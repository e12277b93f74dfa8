"""What the chosen model makes of the data: an even draw of its rows in tokens, and any row as the model sees it.

The panel loads no tokenizer: it asks one process (vramfit/data/sample_worker.py), which stays for the next question and
ends when the panel does. Answers are kept while files and settings stay.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from vramfit import errors
from vramfit.config import DataChoice, RunConfig
from vramfit.errors import InternalError, UserError, VramfitError
from vramfit.places import cache_folder

KEPT: Final = 32
KEPT_ROWS: Final = 32
PATIENCE_S: Final = 0.05
ASKED_S: Final = 2.0
"""A sample that nobody has asked for in this time is given up. (A page that waits asks twice a second.)"""
LIMIT_S: Final = 60.0
_ROOT: Final = Path(__file__).parent.parent
_COMMAND: Final = (sys.executable, "-m", "vramfit.data.sample_worker")


class Piece(NamedTuple):
    """A bit of a row's text: whether it is learned, its tokens, whether it is a special token."""

    text: str
    learned: bool
    tokens: int
    special: bool


@dataclass(frozen=True, kw_only=True)
class RowView:
    """One row as the model sees it: its place, its length in tokens (`about`: reckoned from a part), the pieces of its
    beginning, and why it is left out if it is. Rows count from 0 through all files."""

    number: int
    file: str
    line: int | None
    tokens: int
    about: bool
    left_out: str
    pieces: tuple[Piece, ...]
    column: int | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> RowView:
        """From what the worker answers."""
        pieces = (
            Piece(text, bool(learned), tokens, bool(special)) for text, learned, tokens, special in values["pieces"]
        )
        return cls(**{**values, "pieces": tuple(pieces)})


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Rows drawn evenly, in tokens before any cutting, and what was seen of the files on the way.

    `whole`: all rows, so the numbers are exact; `even`: drawn from all files to their ends, not only the beginning.
    `numbers` says which rows the `lengths` are of; `trained` has for each the places where learned tokens begin and
    end, in turns; `refused` are numbers and reasons of rows that this model cannot train on; `total` is how many rows
    there are, bad ones too, where that is known. `several` files are they where a row's file has to be named. `columns`
    are the first file's, each with a value. `token` is what `Samples` knows it by.
    """

    lengths: tuple[int, ...]
    trained: tuple[tuple[int, ...], ...]
    whole: bool
    numbers: tuple[int, ...] = ()
    even: bool = True
    total: int | None = None
    refused: tuple[tuple[int, str], ...] = ()
    notes: tuple[str, ...] = ()
    format: str = ""
    encoding: str = ""
    shape: str = ""
    several: bool = False
    columns: dict[str, str] = field(default_factory=dict)
    token: str = ""

    @classmethod
    def of(cls, values: dict[str, Any], *, token: str) -> Sample:
        """From what the worker answers."""
        return cls(
            **{
                **values,
                "lengths": tuple(values["lengths"]),
                "trained": tuple(map(tuple, values["trained"])),
                "numbers": tuple(values["numbers"]),
                "refused": tuple((number, reason) for number, reason in values["refused"]),
                "notes": tuple(values["notes"]),
                "token": token,
            }
        )

    def trained_tokens(self, row: int, limit: int | None = None) -> int:
        """Learned tokens of a row, of its first `limit` tokens where given."""
        end = self.lengths[row] if limit is None else limit
        edges = self.trained[row]
        return sum(max(min(last, end) - first, 0) for first, last in zip(edges[::2], edges[1::2], strict=True))

    @property
    def trained_share(self) -> float:
        """Learned tokens among all, 0..1."""
        learned = sum(self.trained_tokens(row) for row in range(len(self.lengths)))
        return learned / max(sum(self.lengths), 1)

    @property
    def spread(self) -> bool:
        """Whether rows are spread over sequences and never cut: those of text files are."""
        return self.format.startswith("text")

    def left_out(self, choice: DataChoice, limit: int | None) -> Counter[str]:
        """Drawn rows that would not be trained on, by reason."""
        found = Counter(reason for _, reason in self.refused)
        if limit is not None and not self.spread:
            for row, length in enumerate(self.lengths):
                if length > limit and choice.too_long == "drop":
                    found[f"it is longer than {limit:,} tokens"] += 1
                elif length > limit and choice.too_long == "cut" and not self.trained_tokens(row, limit):
                    found[f"what is to be learned lies beyond the maximum length of {limit:,} tokens"] += 1
        return found


class _Asked:
    """A sample under way, or its outcome; and rows of the same data that were shown."""

    def __init__(self, request: dict[str, Any]) -> None:
        self.request = request
        self.token = secrets.token_hex(8)
        self.asked_at = time.monotonic()
        self.done = threading.Event()
        self.found: Sample | None = None
        self.error: VramfitError | None = None
        self.rows: OrderedDict[int, RowView] = OrderedDict()


class Samples:
    """Samples by (settings, versions of files and model). Thread-safe. `version` changes when a path's content does."""

    def __init__(
        self,
        data_dir: Path,
        *,
        version: Callable[[str], object],
        patience_s: float = PATIENCE_S,
        command: Sequence[str] = _COMMAND,
    ) -> None:
        self._version, self._patience_s = version, patience_s
        self._worker = _Worker([*command, "--cache", str(cache_folder(data_dir))])
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._asked: OrderedDict[tuple[str, str], _Asked] = OrderedDict()
        weakref.finalize(self, self._worker.end)

    def known(self, config: RunConfig) -> Sample | None:
        """The sample if there is one already; none is begun."""
        with self._lock:
            asked = self._asked.get(self._key(config))
        return asked.found if asked is not None else None

    def ask(self, config: RunConfig) -> Sample | None:
        """The sample, or None while it is being made. Raises the UserError that kept it from being made."""
        key = self._key(config)
        with self._lock:
            asked = self._asked.get(key)
            if asked is None:
                request = {"config": config.model_dump(mode="json"), "data": key[0], "model": key[1]}
                asked = self._asked[key] = _Asked(request)
                threading.Thread(target=self._make, args=(key, asked), name="sample", daemon=True).start()
            asked.asked_at = time.monotonic()
            self._asked.move_to_end(key)
            while len(self._asked) > KEPT:
                self._asked.popitem(last=False)
        asked.done.wait(self._patience_s)
        if asked.error is not None:
            raise asked.error.with_traceback(None)
        return asked.found

    def row(self, token: str, number: int) -> RowView:
        """Row `number` of the data that the sample of this token was drawn from. Raises UserError."""
        asked = self._of(token)
        with self._lock:
            shown = asked.rows.get(number)
        if shown is None:
            shown = RowView.of(self._ask_now(asked, "row", number))
            with self._lock:
                asked.rows[number] = shown
                while len(asked.rows) > KEPT_ROWS:
                    asked.rows.popitem(last=False)
        return shown

    def next_left_out(self, token: str, after: int) -> tuple[int | None, int]:
        """The next row behind `after` that cannot be read or used, if one was found; the last row looked at."""
        found = self._ask_now(self._of(token), "next_left_out", after)
        return found["number"], found["looked"]

    def sample(self, token: str) -> Sample:
        """The sample of this token. Raises UserError."""
        found = self._of(token).found
        if found is None:
            raise _gone()
        return found

    def _of(self, token: str) -> _Asked:
        with self._lock:
            for asked in self._asked.values():
                if asked.token == token:
                    return asked
        raise _gone()

    def _key(self, config: RunConfig) -> tuple[str, str]:
        """What changes when the data, or how it is read, does; and what changes when the tokenizer does."""
        deciding = config.data.model_dump_json(
            include={"paths", "columns", "encoding", "bad_rows", "documents", "trained_on"}
        )
        data = repr((deciding, [self._version(path) for path in config.data.paths]))
        model = repr((config.model.source, config.model.revision, self._version(config.model.source)))
        return data, model

    def _make(self, key: tuple[str, str], asked: _Asked) -> None:
        with self._turn:
            try:
                found = self._answer(
                    {**asked.request, "do": "sample"}, lambda: time.monotonic() - asked.asked_at < ASKED_S
                )
                if found is None:
                    with self._lock:
                        self._asked.pop(key, None)
                    return
                asked.found = Sample.of(found, token=asked.token)
            except VramfitError as error:
                asked.error = error
            except Exception as error:
                asked.error = InternalError(f"The data's tokens could not be counted ({type(error).__name__}: {error})")
            asked.done.set()

    def _ask_now(self, asked: _Asked, what: str, number: int) -> dict[str, Any]:
        with self._turn:
            found = self._answer({**asked.request, "do": what, "number": number}, lambda: True)
        if found is None:
            raise AssertionError("an answer that is always wanted was given up")
        return found

    def _answer(self, request: dict[str, Any], wanted: Callable[[], bool]) -> dict[str, Any] | None:
        """What the worker found; None when nobody waits for it any more. Raises what the worker raised."""
        reply = self._worker.ask(request, wanted=wanted)
        if reply is None:
            return None
        if "error" in reply:
            told = reply["error"]
            raise _again(getattr(errors, told["kind"], UserError), told["what"], told["remedy"])
        found: dict[str, Any] = reply["found"]
        return found


class _Worker:
    """The process that answers, started when it is first asked, and anew after it ended. For one thread at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = tuple(command)
        self._child: subprocess.Popen[bytes] | None = None
        self._lines: queue.Queue[bytes] = queue.Queue()

    def ask(self, request: dict[str, Any], *, wanted: Callable[[], bool]) -> dict[str, Any] | None:
        """The reply. None when it was not `wanted` any more, and UserError when it took more than LIMIT_S: the process
        is ended then. UserError also when it ended by itself."""
        if not wanted():
            return None
        line = json.dumps(request).encode() + b"\n"
        fresh = self._is_fresh()
        answer = self._reply(line, wanted)
        if answer == b"" and not fresh:  # it had ended, for want of questions
            self._is_fresh()
            answer = self._reply(line, wanted)
        if answer == b"":
            raise UserError(
                "The process that counts the data's tokens ended without an answer", "The run will count them."
            )
        reply: dict[str, Any] | None = None if answer is None else json.loads(answer)
        return reply

    def end(self) -> None:
        """End the process, if there is one."""
        child, self._child = self._child, None
        if child is not None:
            child.kill()
            child.wait()
            self._reader.join(5)
            for pipe in filter(None, (child.stdin, child.stdout)):
                with contextlib.suppress(OSError):  # what was still to be written has no reader
                    pipe.close()

    def _is_fresh(self) -> bool:
        """Whether the process had to be started."""
        if self._child is not None and self._child.poll() is None:
            return False
        self.end()
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A look at the data downloads nothing; the run itself may.
        surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        self._lines = queue.Queue()
        self._child = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=surroundings,
        )
        self._reader = threading.Thread(target=_pass_on, args=(self._child.stdout, self._lines), daemon=True)
        self._reader.start()
        return True

    def _reply(self, line: bytes, wanted: Callable[[], bool]) -> bytes | None:
        """The reply's line; b"" when the process ended, None when it was ended because nobody waits."""
        if self._child is None or self._child.stdin is None:
            return b""
        try:
            self._child.stdin.write(line)
            self._child.stdin.flush()
        except OSError:
            self.end()
            return b""
        until = time.monotonic() + LIMIT_S
        while wanted():
            try:
                answer = self._lines.get(timeout=0.1)
            except queue.Empty:
                if time.monotonic() > until:
                    self.end()
                    raise UserError(f"Looking at the data took more than {LIMIT_S:.0f} s", "The run counts.") from None
                continue
            if not answer:
                self.end()
            return answer
        self.end()
        return None


def _pass_on(pipe: Any, lines: queue.Queue[bytes]) -> None:
    """Lines as they come, and an empty one at the end. A thread reads: a pipe has no time limit everywhere."""
    try:
        for line in pipe:
            lines.put(line)
    except (OSError, ValueError):  # closed meanwhile
        pass
    lines.put(b"")


def _gone() -> UserError:
    return UserError("The data was looked at too long ago", "Choose it again.")


def _again(kind: type[VramfitError], what: str, remedy: str) -> VramfitError:
    try:
        return kind(what, remedy)
    except TypeError:  # a kind that is made of other parts
        return UserError(what, remedy)
