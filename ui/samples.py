"""What the chosen model makes of the data's first rows: asked of a child process, kept while files and settings stay.

The panel loads no tokenizer. One child at a time works, for a bounded time, and only while a page asks for its answer.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vramfit import errors
from vramfit.config import RunConfig
from vramfit.errors import InternalError, UserError, VramfitError
from vramfit.places import cache_folder

KEPT: Final = 32
PATIENCE_S: Final = 0.05
ASKED_S: Final = 2.0
"""A child whose answer nobody has asked for in this time is ended. (A page that waits asks twice a second.)"""
LIMIT_S: Final = 60.0
_ROOT: Final = Path(__file__).parent.parent
_COMMAND: Final = (sys.executable, "-m", "vramfit.data.sample")


@dataclass(frozen=True, kw_only=True)
class Example:
    """One row as the model sees it: pieces (text, learned, tokens) of its beginning, and its length in tokens."""

    file: str
    line: int
    tokens: int
    pieces: tuple[tuple[str, bool, int], ...]


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The first rows in tokens, before any cutting; `whole` when they are all there are.

    `trained` has for each row the places where learned tokens begin and end, in turns.
    """

    lengths: tuple[int, ...]
    trained: tuple[tuple[int, ...], ...]
    whole: bool
    notes: tuple[str, ...]
    examples: tuple[Example, ...]

    @classmethod
    def of(cls, values: dict[str, Any]) -> Sample:
        """From what vramfit/data/sample.py prints."""
        examples = [
            Example(
                file=row["file"],
                line=row["line"],
                tokens=row["tokens"],
                pieces=tuple((text, bool(learned), count) for text, learned, count in row["pieces"]),
            )
            for row in values["examples"]
        ]
        return cls(
            lengths=tuple(values["lengths"]),
            trained=tuple(tuple(edges) for edges in values["trained"]),
            whole=values["whole"],
            notes=tuple(values["notes"]),
            examples=tuple(examples),
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


class _Asked:
    """A sample under way, or its outcome."""

    def __init__(self) -> None:
        self.asked_at = time.monotonic()
        self.done = threading.Event()
        self.found: Sample | None = None
        self.error: VramfitError | None = None


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
        self._data_dir, self._version, self._patience_s, self._command = data_dir, version, patience_s, tuple(command)
        self._lock = threading.Lock()
        self._turn = threading.Lock()
        self._asked: OrderedDict[object, _Asked] = OrderedDict()

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
                asked = self._asked[key] = _Asked()
                threading.Thread(target=self._make, args=(key, asked, config), name="sample", daemon=True).start()
            asked.asked_at = time.monotonic()
            self._asked.move_to_end(key)
            while len(self._asked) > KEPT:
                self._asked.popitem(last=False)
        asked.done.wait(self._patience_s)
        if asked.error is not None:
            raise asked.error.with_traceback(None)
        return asked.found

    def _key(self, config: RunConfig) -> object:
        deciding = config.data.model_dump_json(
            include={"paths", "columns", "encoding", "bad_rows", "documents", "trained_on"}
        )
        versions = tuple(self._version(path) for path in (*config.data.paths, config.model.source))
        return deciding, config.model.source, config.model.revision, versions

    def _make(self, key: object, asked: _Asked, config: RunConfig) -> None:
        with self._turn:
            try:
                text = self._answer_of_child(config, wanted=lambda: time.monotonic() - asked.asked_at < ASKED_S)
                if text is None:
                    with self._lock:
                        self._asked.pop(key, None)
                    return
                asked.found = _sample(text)
            except VramfitError as error:
                asked.error = error
            except Exception as error:
                asked.error = InternalError(f"The data's tokens could not be counted ({type(error).__name__}: {error})")
            asked.done.set()

    def _answer_of_child(self, config: RunConfig, *, wanted: Callable[[], bool]) -> str | None:
        """What the child printed; None when nobody waits for it any more. Raises UserError when it takes too long."""
        if not wanted():
            return None
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        # A look at the data downloads nothing; the run itself may.
        surroundings = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1", "PYTHONUTF8": "1"}
        with tempfile.TemporaryFile() as asked, tempfile.TemporaryFile() as said:
            asked.write(config.to_json().encode("utf-8"))
            asked.seek(0)
            command = [*self._command, "--cache", str(cache_folder(self._data_dir))]
            child = subprocess.Popen(command, stdin=asked, stdout=said, stderr=subprocess.DEVNULL, env=surroundings)
            try:
                until = time.monotonic() + LIMIT_S
                while not _ended(child, 0.1):
                    if not wanted():
                        return None
                    if time.monotonic() > until:
                        raise UserError(f"Counting the data's tokens took more than {LIMIT_S:.0f} s", "The run counts.")
            finally:
                child.kill()
                child.wait()
            said.seek(0)
            return said.read().decode("utf-8", "replace")


def _ended(child: subprocess.Popen[bytes], seconds: float) -> bool:
    try:
        child.wait(seconds)
    except subprocess.TimeoutExpired:
        return False
    return True


def _sample(text: str) -> Sample:
    lines = text.strip().splitlines()
    if not lines:
        raise UserError("The process that counts the data's tokens ended without an answer", "The run will count them.")
    values = json.loads(lines[-1])
    if "error" in values:
        kind = getattr(errors, values["error"]["kind"], UserError)
        raise _again(kind, values["error"]["what"], values["error"]["remedy"])
    return Sample.of(values["sample"])


def _again(kind: type[VramfitError], what: str, remedy: str) -> VramfitError:
    try:
        return kind(what, remedy)
    except TypeError:  # a kind that is made of other parts
        return UserError(what, remedy)
