"""What a run is made from, as marks of each file: taken when it is queued, compared when it starts.

A mark is the size and the SHA-256 of a file's bytes. Of files above FULL_BYTES it is the size, the time of the last
write and the SHA-256 of PIECES pieces of PIECE_BYTES, evenly spread from the first byte to the last, so that the marks
of any model take a second or two. Marked are the data's files, and of a local model's folder its weights, its index,
and every .json, .jinja, .model and .txt file: config, tokenizer and template. A model of the hub is marked by its
commit in this machine's cache: its branches move on. Before it was ever fetched it has no mark, which is no change. The
starter has none. No torch.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from vramfit.config import STARTER_MODEL, RunConfig
from vramfit.data.sources import find_files
from vramfit.errors import Changed, CheckpointError, UserError
from vramfit.models.files import weight_files
from vramfit.models.hub_commit import MAIN, hub_commit
from vramfit.models.tokenizer import local_folder

IfChanged = Literal["ask", "go on", "refuse"]
Marks = dict[str, dict[str, str]]
"""For data, model and versions: a mark by file or library."""

FULL_BYTES: Final = 256 * 2**20
PIECES: Final = 64
PIECE_BYTES: Final = 64 * 2**10
GONE: Final = "gone"
COMMIT: Final = "commit "

_DESCRIBES: Final = (".json", ".jinja", ".model", ".txt")
_LIBRARIES: Final = ("torch", "transformers", "tokenizers", "peft", "bitsandbytes")
_TOLD: Final = 3


def marks_of(config: RunConfig) -> Marks:
    """The marks of everything that `config` names, as it is now. What is not there is marked as gone; never raises for
    it, since the run itself will say what is wrong."""
    return {
        "data": {str(path): _mark(path) for path in _data_files(config)},
        "model": hub_mark(config) or {str(path): _mark(path) for path in _model_files(config)},
        "versions": versions(),
    }


def hub_mark(config: RunConfig) -> dict[str, str]:
    """The mark of a model of the hub, as it is in this machine's cache now; {} where that has none."""
    commit = hub_commit(config.model)
    name = f"{config.model.source} ({config.model.revision or MAIN})"
    return {name: f"{COMMIT}{commit}"} if commit else {}


def versions() -> dict[str, str]:
    """The libraries that decide a run's numbers, by name."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def changes(before: Mapping[str, Mapping[str, str]], now: Mapping[str, Mapping[str, str]]) -> dict[str, str]:
    """What differs, one sentence part for each of data, model and versions that does: "a.jsonl has changed"."""
    found = {}
    for part, marks in now.items():
        old = before.get(part)
        if old is None or old == marks:
            continue
        if part == "versions":
            names = sorted(old.keys() | marks.keys())
            told = [
                f"{name} was {old.get(name, 'not there')}, is {marks.get(name, 'not there')}"
                for name in names
                if old.get(name) != marks.get(name)
            ]
        else:
            told = [_change(path, old.get(path), marks.get(path)) for path in sorted(old.keys() | marks.keys())]
        told = [each for each in told if each]
        if not told:
            continue
        more = f" and {len(told) - _TOLD} more" if len(told) > _TOLD else ""
        found[part] = "; ".join(told[:_TOLD]) + more
    return found


def settle_changes(found: Mapping[str, str], if_changed: IfChanged, *, since: str) -> list[str]:
    """What is to be told of changes (as from `changes`) where the run goes on. Raises Changed where somebody is to be
    asked, CheckpointError where it is refused."""
    told = [f"The {part} changed since {since}: {what}." for part, what in found.items()]
    asked = [text for part, text in zip(found, told, strict=True) if part != "versions"]
    if if_changed == "refuse" and told:
        raise CheckpointError(
            " ".join(told).rstrip("."), "Put back what changed, or start a new run with what is there."
        )
    if if_changed == "ask" and asked:
        raise Changed(
            " ".join(asked).rstrip("."),
            "Put back what changed and resume, or resume as it is: then it goes on with what is there now.",
        )
    return told


def _change(path: str, old: str | None, new: str | None) -> str:
    if old == new:
        return ""
    if any(mark is not None and mark.startswith(COMMIT) for mark in (old, new)):
        return f"{path} was {old}, is {new}" if old and new else ""  # else not in the cache then, or not now
    if new is None or new == GONE:
        return f"{path} is gone"
    if old is None or old == GONE:
        return f"{path} is new"
    return f"{path} has changed"


def _data_files(config: RunConfig) -> Iterator[Path]:
    named = [Path(path) for path in config.data.paths if not path.startswith("starter:")]
    try:
        yield from (find_files(tuple(named))[0] if named else [])
    except (UserError, OSError):
        yield from named


def _model_files(config: RunConfig) -> Iterator[Path]:
    folder = None if config.model.source == STARTER_MODEL else local_folder(config.model)
    if folder is None:
        return
    try:
        yield from (path for path in sorted(folder.iterdir()) if path.suffix in _DESCRIBES and path.is_file())
        if config.method != "pretrain":  # which begins from random weights
            yield from weight_files(folder)
    except UserError:
        return
    except OSError:
        yield folder


def _mark(path: Path) -> str:
    try:
        with path.open("rb") as file:
            state = os.fstat(file.fileno())
            if state.st_size <= FULL_BYTES:
                return f"{state.st_size} {hashlib.file_digest(file, 'sha256').hexdigest()}"
            digest, last = hashlib.sha256(), state.st_size - PIECE_BYTES
            for number in range(PIECES):
                file.seek(last * number // (PIECES - 1))
                digest.update(file.read(PIECE_BYTES))
            return f"{state.st_size} {state.st_mtime_ns} {digest.hexdigest()}"
    except OSError:
        return GONE
