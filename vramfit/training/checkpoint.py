"""Checkpoints: a folder of safetensors and JSON that exists once its manifest says so. Never pickle.

    checkpoints/step-00000100/
        tensors.safetensors     trained parameters and optimizer states
        values.json             plain values: random states, scaler, identity of the run
        manifest.json           sizes and SHA-256 of the two, written last and fsynced

Commit order: files, fsync; manifest, fsync; rename from a `.partial` name; fsync of the parent folder. So a crash
leaves either the whole checkpoint or a folder that is not taken for one. Rotation goes by step number, never by file
time, and touches only folders of this form; what it removes loses its name first (`.removed`). So a folder under a
whole one's name without a manifest has lost it: a resume sets it aside (`.incomplete`) until the next checkpoint.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import math
import os
import re
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vramfit.errors import CheckpointError, ModelError, OutOfDisk, Unwritable
from vramfit.faults import reach
from vramfit.json_text import load_json
from vramfit.models.files import check_safetensors
from vramfit.places import NO_ROOM, UNWRITABLE, cure_of
from vramfit.sentences import say
from vramfit.units import format_bytes

if TYPE_CHECKING:
    import torch

    from vramfit.engine.later import Later

FORMAT = "vramfit-checkpoint-1"
TENSORS, VALUES, MANIFEST = "tensors.safetensors", "values.json", "manifest.json"

_NAME = re.compile(r"^step-(\d{8})$")
_UNFINISHED, _REMOVED, _ASIDE = ".partial", ".removed", ".incomplete"
_MANIFEST_BYTES = 2**20
_VALUES_BYTES = 2**26
_CAN_RUN_CODE = {".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".py", ".pyc", ".so", ".dll"}
_SPARE_BYTES = 64 * 2**20  # what must stay free beside the checkpoint, for the database and the log


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint that was verified: tensors by name, read from its file when they are asked for, and plain values."""

    step: int
    path: Path
    tensors: Mapping[str, torch.Tensor]
    values: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Newest:
    """The newest usable checkpoint, and the names of newer ones that were damaged, each with its reason."""

    checkpoint: Checkpoint
    damaged: tuple[str, ...]


def save(
    root: Path,
    *,
    step: int,
    tensors: Mapping[str, torch.Tensor | Later],
    values: Mapping[str, Any],
    keep: int,
    best: int | None = None,
    keep_every: int = 0,
) -> Path:
    """Write checkpoint `step` under `root`, tensor by tensor, then remove all but the newest `keep`, that of `best` and
    those whose step is a multiple of `keep_every` (0: none). Returns its folder.

    Later ones are of a future that was given up, such as damaged ones a resume has passed over: they are removed too.

    Raises OutOfDisk, with the older checkpoints untouched, when there is too little room or the disk fills meanwhile;
    CheckpointError when the folder cannot be written to.
    """
    needed = sum(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in tensors.values())
    final = root / f"step-{step:08d}"
    partial = root / f"{final.name}{_UNFINISHED}"
    try:
        root.mkdir(parents=True, exist_ok=True)
        _sweep(root, _UNFINISHED, _REMOVED)
        _check_room(root, needed)
        reach("save: before the files")
        _write(partial, step=step, tensors=tensors, values=values)
        if final.exists():  # the same step again after a resume: the new one is equal, and complete
            shutil.rmtree(final)
        partial.rename(final)
        reach("save: renamed")
        _sync_folder(root)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise _disk_error(error, root, needed) from error
    rotate(root, step=step, keep=keep, best=best, keep_every=keep_every)
    _remove([path for at, path in _own(root) if at > step])
    _sweep(root)  # also what was set aside: nobody needs it now
    return final


def newest(root: Path) -> Newest | None:
    """The newest checkpoint that is complete and unharmed; None when there is none at all.

    Raises CheckpointError when there are some and every one is damaged: a run never starts from scratch silently.
    """
    damaged: list[str] = []
    for step, path in reversed(_complete(root)):
        try:
            return Newest(checkpoint=_read(path, step=step), damaged=tuple(damaged))
        except CheckpointError as error:
            damaged.append(error.what)
    if damaged:
        raise CheckpointError(
            f"All {len(damaged)} checkpoints of this run are damaged: {'; '.join(damaged)}",
            "Start the run again from the beginning as a new run.",
        )
    return None


def peek(root: Path) -> dict[str, Any]:
    """The newest complete checkpoint's plain values as they are written there, their hash unchecked: for what can be
    decided before it is loaded. {} where there is none, or it cannot be read."""
    for _, path in reversed(_complete(root)):
        try:
            _check_files(path)
            values = load_json(_content(path / VALUES, most=_VALUES_BYTES))
        except (OSError, ValueError, CheckpointError):
            continue
        return values if isinstance(values, dict) else {}
    return {}


def load(root: Path, step: int) -> Checkpoint:
    """The checkpoint of one step. Raises CheckpointError when it is not there, or damaged."""
    return _read(root / f"step-{step:08d}", step=step)


def steps(root: Path) -> list[int]:
    """Steps of the complete checkpoints under `root`, oldest first."""
    return [step for step, _ in _complete(root)]


def refuse_another_run(root: Path) -> None:
    """A run that begins has no checkpoints yet: those of another run would be rotated away as if they were its own.

    Raises CheckpointError.
    """
    old = steps(root)
    if old:
        raise CheckpointError(
            f"{root} holds checkpoints of another run ({len(old)}, the newest of step {old[-1]:,})",
            "Give this run a folder of its own, or resume the run that is there.",
        )


def damaged(root: Path) -> list[str]:
    """What is wrong with each complete checkpoint under `root` that is damaged or not ours, by name, oldest first."""
    found = []
    for step, path in _complete(root):
        try:
            _verify(path, step=step)
        except CheckpointError as error:
            found.append(error.what)
    return found


def leftovers(root: Path) -> list[Path]:
    """What is no checkpoint of the folders under `root` that are named like one: unfinished, half removed, set aside,
    or without a manifest."""
    if not root.is_dir():
        return []
    found = []
    for path in sorted(root.iterdir()):
        name, dot, kind = path.name.partition(".")
        lost = not dot and not (path / MANIFEST).is_file()
        rest = _NAME.match(name) and (lost or dot + kind in (_UNFINISHED, _REMOVED, _ASIDE))
        if rest and path.is_dir() and not path.is_symlink():
            found.append(path)
    return found


def tidy(root: Path) -> list[str]:
    """Before a run begins or goes on: remove what a crash left behind, and set aside what holds tensors and has lost
    its manifest. Returns what a person should know of it, a sentence each.

    Only the trainer whose run this is may do so.
    """
    told = []
    for path in leftovers(root):
        step = int(path.name.partition(".")[0].removeprefix("step-"))
        if path.suffix == _UNFINISHED:
            told.append(f"The save of step {step:,} was cut short; what it had written is removed.")
        elif not path.suffix and (path / TENSORS).exists():
            aside = path.with_name(f"{path.name}{_ASIDE}")
            shutil.rmtree(aside, ignore_errors=True)
            try:
                path.rename(aside)
            except OSError:  # in use (Windows): it stays where it is
                aside = path
            told.append(
                f"The checkpoint of step {step:,} has lost its {MANIFEST} and is passed over: it cannot be told "
                f"whether it is whole. It is kept as {aside.name} until the next one is complete."
            )
    _sweep(root, _UNFINISHED, _REMOVED)
    return told


def _sweep(root: Path, *kinds: str) -> None:
    """Remove leftovers, or only those whose name ends in one of `kinds`."""
    for path in leftovers(root):
        if not kinds or path.suffix in kinds:
            shutil.rmtree(path, ignore_errors=True)


def _write(folder: Path, *, step: int, tensors: Mapping[str, torch.Tensor | Later], values: Mapping[str, Any]) -> None:
    from vramfit.models.stored import write_tensors

    folder.mkdir()
    write_tensors(folder / TENSORS, tensors)
    reach("save: tensors written")
    (folder / VALUES).write_text(json.dumps(values, ensure_ascii=False), encoding="utf-8")
    files = {name: _fingerprint(folder / name) for name in (TENSORS, VALUES)}
    for name in files:  # on disk before there is anything that vouches for them
        _sync_file(folder / name)
    manifest = {"format": FORMAT, "step": step, "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    reach("save: manifest written")
    _sync_file(folder / MANIFEST)
    _sync_folder(folder)


def _read(folder: Path, *, step: int) -> Checkpoint:
    from vramfit.models.stored import TensorsOnDisk

    values = _verify(folder, step=step)
    try:
        tensors = TensorsOnDisk(folder / TENSORS)
    except (OSError, ModelError) as error:
        raise CheckpointError(f"{folder.name}/{TENSORS} cannot be read ({type(error).__name__})") from error
    return Checkpoint(step=step, path=folder, tensors=tensors, values=values)


def _verify(folder: Path, *, step: int) -> dict[str, Any]:
    """Check everything that can be checked without loading a tensor, and return the plain values. Raises
    CheckpointError.

    The folder may come from anywhere: it must hold plain files of its own, no link out of it, nothing that could run
    code, and a manifest that names these files alone. No file is opened before it is known to be a plain one.
    """
    try:
        _check_files(folder)
        manifest = load_json(_content(folder / MANIFEST, most=_MANIFEST_BYTES))
        if manifest.get("format") != FORMAT:
            raise CheckpointError(f"{folder.name} has format {manifest.get('format')!r}, this version reads {FORMAT!r}")
        if manifest["step"] != step:
            raise CheckpointError(f"{folder.name} says in its manifest that it is of step {manifest['step']!r}")
        strange = sorted(set(manifest["files"]) - {TENSORS, VALUES})
        if strange:
            raise CheckpointError(f"{folder.name} names {strange[0]!r} in its manifest, which is not part of one")
        content = _content(folder / VALUES, most=_VALUES_BYTES)
        for name in (TENSORS, VALUES):
            if manifest["files"][name] != _fingerprint(folder / name):
                raise CheckpointError(f"{folder.name}/{name} does not match its manifest")
        check_safetensors(folder / TENSORS)
        values = load_json(content)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{folder.name} cannot be read ({type(error).__name__})") from error
    except ModelError as error:
        raise CheckpointError(f"{folder.name}/{TENSORS} cannot be read: {error.what}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{folder.name}/{VALUES} does not hold values by name")
    return values


def _check_files(folder: Path) -> None:
    """Raises CheckpointError: a link, something that is no plain file, or a file of a kind that can run code."""
    if folder.is_symlink():
        raise CheckpointError(f"{folder.name} is a link to {folder.readlink()}, not a checkpoint of this run")
    for name in (MANIFEST, TENSORS, VALUES):
        mode = (folder / name).lstat().st_mode
        if stat.S_ISLNK(mode):
            raise CheckpointError(f"{folder.name}/{name} is a link to {(folder / name).readlink()}")
        if not stat.S_ISREG(mode):
            raise CheckpointError(f"{folder.name}/{name} is not a plain file")
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in _CAN_RUN_CODE:
            raise CheckpointError(f"{folder.name} holds {path.name}, a kind of file that can run code when it is read")


def _content(path: Path, *, most: int) -> bytes:
    """A plain file's bytes. No more of it are read than a byte above `most`, whatever it becomes meanwhile. Raises
    CheckpointError: it has more."""
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(
            f"{path.parent.name}/{path.name} has {path.stat().st_size:,} bytes; {most:,} are the most"
        )
    return content


def _complete(root: Path) -> list[tuple[int, Path]]:
    """(step, folder) of every folder with a manifest, oldest first."""
    if not root.is_dir():
        return []
    found = []
    for path in root.iterdir():
        match = _NAME.match(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def rotate(root: Path, *, step: int, keep: int, best: int | None, keep_every: int) -> None:
    """Of the checkpoints up to `step` remove all but those that `save` leaves. What a save does last; a resume does it
    for one that was ended before that."""
    past = [(at, path) for at, path in _own(root) if at <= step]
    _remove(path for at, path in past[:-keep] if at != best and not (keep_every and at % keep_every == 0))


def _own(root: Path) -> list[tuple[int, Path]]:
    return [(at, path) for at, path in _complete(root) if not path.is_symlink()]  # what that names is elsewhere


def _remove(checkpoints: Iterable[Path]) -> None:
    for path in checkpoints:
        # The name goes first: a half-removed one must not be taken for a whole one, nor for one that lost a part.
        gone = path.with_name(f"{path.name}{_REMOVED}")
        try:
            path.rename(gone)
        except OSError:  # in use (Windows): it stays whole, and the next save tries again
            continue
        with contextlib.suppress(OSError):
            reach("save: rotating")
        shutil.rmtree(gone, ignore_errors=True)


def _check_room(root: Path, needed: int) -> None:
    free = shutil.disk_usage(root).free
    if free < needed + _SPARE_BYTES:
        raise OutOfDisk(
            say(
                "save.no_room",
                needed=format_bytes(needed + _SPARE_BYTES),
                folder=str(root),
                free=format_bytes(free),
            ),
            say("cure.room.run"),
        )


def _disk_error(error: OSError, root: Path, needed: int) -> OutOfDisk | CheckpointError:
    cure = cure_of(error, resume=True)
    if error.errno in NO_ROOM:
        key = "save.full" if error.errno == errno.ENOSPC else "save.quota"
        return OutOfDisk(say(key, size=format_bytes(needed), folder=str(root)), cure)
    refused = say("save.refused", folder=str(root), reason=str(error.strerror or error))
    if error.errno in UNWRITABLE:
        return Unwritable(refused, cure)
    return CheckpointError(refused, cure or say("cure.folder.run"))


def _fingerprint(path: Path) -> dict[str, int | str]:
    with path.open("rb") as file:
        return {"bytes": path.stat().st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync_file(path: Path) -> None:
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    """Make renames inside `path` durable. Windows has no such call and needs none."""
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
