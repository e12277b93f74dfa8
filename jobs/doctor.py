"""The doctor of a data folder: python -m jobs.store doctor [--data-dir DIR] [--repair] [--json]. And backups.

It looks at the database (damage, rows without a job), at the jobs (states nobody stands for), at the runs' folders (no
row, no folder, leftovers of a crash, damaged checkpoints) and at the cache (leftovers), and says what it found.
`--repair` does only what loses nothing anybody could use, and copies the database first. Exit code 0: nothing is left
to do, 1: something is.
"""

from __future__ import annotations

import argparse
import json
import re
import sqlite3
import sys
import time
import typing
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from jobs import file_systems, schema
from jobs.job import ACTIVE, State
from jobs.store import DATABASE, SUPERVISOR_LEASE, Store
from jobs.supervisor import holder_alive
from vramfit import scratch
from vramfit.config import RunConfig
from vramfit.console import use_utf8
from vramfit.errors import JobError, UserError, VramfitError
from vramfit.places import default_data_folder, runs_folder, typed_path
from vramfit.sentences import say
from vramfit.training import checkpoint

Kind = Literal["database", "state", "folder", "leftover", "checkpoint"]

_INDEX_ONLY: Final = re.compile(r"missing from index|wrong # of entries in index|non-unique entry in index")
_STATES: Final = frozenset(typing.get_args(State))


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing that is not as it should be. `repair` says what --repair does about it; "": nothing that is safe."""

    kind: Kind
    message: str
    repair: str = ""
    mend: Callable[[], None] | None = field(default=None, repr=False, compare=False)


def examine(data_dir: Path) -> list[Finding]:
    """Everything that is wrong with a data folder. Raises JobError: there is no database, or a newer VRAMFit's."""
    data_dir = typed_path(data_dir).resolve()
    path = data_dir / DATABASE
    if not path.is_file():
        raise JobError(f"There is no job database {path}", "Give the data folder with --data-dir.")
    notice = file_systems.notice(data_dir)
    found = [] if notice is None else [Finding(kind="database", message=notice)]
    damage = _damage(path)
    if damage:
        return [*found, _of_damage(path, damage)]  # what its rows say cannot be trusted, so nothing is built on them
    with Store(data_dir) as store:
        rows = store.job_rows()
        found += [*_of_rows(data_dir, store), *_of_states(data_dir, rows, store)]
        return [*found, *_of_folders(data_dir, rows), *_of_cache(data_dir)]


def repair(data_dir: Path, findings: Sequence[Finding]) -> Path | None:
    """Mend what can be mended, after a copy of the database was made beside it. Returns the copy; None: nothing to do.

    Raises UserError, with nothing mended when the copy could not be made.
    """
    mendable = [finding.mend for finding in findings if finding.mend is not None]
    if not mendable:
        return None
    with Store(typed_path(data_dir)) as store:
        copy = store.backup(store.data_dir / time.strftime("vramfit-before-repair-%Y%m%d-%H%M%S.db"))
    for mend in mendable:
        mend()
    return copy


# ---- the database -----------------------------------------------------------------------------------------------


def _damage(path: Path) -> list[str]:
    """What SQLite's own check of every page, row and index finds."""
    try:
        with closing(schema.connect(path)) as db:
            found = [str(row[0]) for row in db.execute("PRAGMA integrity_check")]
    except sqlite3.Error as error:
        return [str(error)]
    return [] if found == ["ok"] else found


def _of_damage(path: Path, damage: Sequence[str]) -> Finding:
    more = f" (and {len(damage) - 1} more)" if len(damage) > 1 else ""
    what = f"The database {path} is damaged: {damage[0]}{more}."
    if all(map(_INDEX_ONLY.search, damage)):
        return Finding(kind="database", message=what, repair="its indexes are made anew", mend=lambda: _reindex(path))
    return Finding(
        kind="database",
        message=f"{what} Put a backup in its place (`python -m jobs.store backup` makes them), or move it away: the "
        "runs' folders hold configs, checkpoints and results.",
    )


def _reindex(path: Path) -> None:
    with closing(schema.connect(path)) as db:
        db.execute("REINDEX")


def _of_rows(data_dir: Path, store: Store) -> Iterator[Finding]:
    unowned = store.unowned_rows()
    if unowned:
        counts = ", ".join(f"{count:,} of {table}" for table, count in unowned.items())
        yield Finding(
            kind="database",
            message=f"Rows belong to no job: {counts}.",
            repair="they are deleted",
            mend=lambda: _with_store(data_dir, Store.remove_unowned_rows),
        )
    with closing(schema.connect(store.path)) as db:
        tables = {str(row[0]) for row in db.execute("PRAGMA foreign_key_check")}
    for table in sorted(tables - unowned.keys()):
        yield Finding(kind="database", message=f"Rows of {table} name a job that is not there.")


def _with_store(data_dir: Path, change: Callable[[Store], None]) -> None:
    with Store(data_dir) as store:
        change(store)


# ---- the jobs ---------------------------------------------------------------------------------------------------


def _of_states(data_dir: Path, rows: Sequence[dict[str, Any]], store: Store) -> Iterator[Finding]:
    """Jobs that nobody can be working on, and rows that no job can be made of."""
    lease = store.lease(SUPERVISOR_LEASE)
    watched = lease is not None and holder_alive(*lease, now=store.clock())
    for row in rows:
        name = f"Job {row['id']} ({row['name']})"
        if row["state"] not in _STATES:
            yield Finding(kind="state", message=f"{name} is in a state that does not exist: {row['state']!r}.")
        if problem := _config_problem(row["config"]):
            yield Finding(kind="state", message=f"{name} has a config that cannot be read: {problem}")
        if row["state"] in ACTIVE and not watched and not _worked_on(row, store):
            yield Finding(
                kind="state",
                message=f"{name} is {row['state']}, but neither its trainer nor a supervisor lives.",
                repair="it becomes interrupted, from where Resume goes on",
                mend=lambda row=row: _interrupt(data_dir, row),  # type: ignore[misc]
            )


def _worked_on(row: dict[str, Any], store: Store) -> bool:
    return row["owner"] is not None and holder_alive(row["owner"], row["heartbeat_at"] or 0.0, now=store.clock())


def _config_problem(text: str) -> str:
    try:
        RunConfig.from_json(text)
    except (VramfitError, ValueError) as error:
        return next(iter(str(error).splitlines()), type(error).__name__)
    return ""


def _interrupt(data_dir: Path, row: dict[str, Any]) -> None:
    with Store(data_dir) as store:
        store.transition(
            row["id"],
            expected=(row["state"],),
            state="interrupted",
            attempt=row["attempt"],
            failure=say("death.unseen"),
            remedy=say("next.resume.log"),
        )


# ---- the folders ------------------------------------------------------------------------------------------------


def _of_folders(data_dir: Path, rows: Sequence[dict[str, Any]]) -> Iterator[Finding]:
    known = {data_dir / row["folder"]: row for row in rows}
    for folder, row in known.items():
        if not folder.is_dir() and row["state"] not in ("draft", "queued"):  # these get a new one when they start
            yield Finding(kind="folder", message=f"Job {row['id']} ({row['name']}) has lost its folder {folder}.")
    for folder in sorted(path for path in runs_folder(data_dir).iterdir() if path.is_dir()):
        if folder not in known:
            yield Finding(kind="folder", message=f"{folder} belongs to no job; it is left as it is.")
        active = folder in known and known[folder]["state"] in ACTIVE
        if not active:  # a trainer at work tidies up after itself
            yield from _of_leftovers(folder)
        for damaged in checkpoint.damaged(folder / "checkpoints"):
            yield Finding(
                kind="checkpoint",
                message=f"{folder / 'checkpoints'}: {damaged}. Resume passes it over where there is another.",
            )


def _of_leftovers(folder: Path) -> Iterator[Finding]:
    """What a crash left of a checkpoint or of a result."""
    for path in checkpoint.leftovers(folder / "checkpoints"):
        yield _leftover(path, "an unfinished or half-removed checkpoint, or one without its manifest")
    partial, old, result = folder / "export.partial", folder / "export.old", folder / "export"
    if partial.is_dir():
        yield _leftover(partial, "an unfinished result")
    if old.is_dir() and result.exists():
        yield _leftover(old, "a result that was replaced")
    elif old.is_dir():
        yield Finding(
            kind="leftover",
            message=f"{old} is a whole result under its interim name.",
            repair="it gets its name back",
            mend=lambda: _rename(old, result),
        )


def _of_cache(data_dir: Path) -> Iterator[Finding]:
    """What a process that is gone was about to put into the cache. A living one's is none of it."""
    for path in scratch.abandoned(data_dir / "cache"):
        yield _leftover(path, "an unfinished part of the cache, whose writer is gone")


def _leftover(path: Path, what: str) -> Finding:
    return Finding(
        kind="leftover", message=f"{path} is {what}.", repair="it is removed", mend=lambda: scratch.remove(path)
    )


def _rename(path: Path, to: Path) -> None:
    path.rename(to)


# ---- the command line -------------------------------------------------------------------------------------------


def main(arguments: Sequence[str] | None = None) -> int:
    """`doctor` and `backup`. Exit code 2: the command cannot do what it was asked for."""
    parser = argparse.ArgumentParser(prog="python -m jobs.store", description=__doc__.partition("\n")[0])
    commands = parser.add_subparsers(dest="command", required=True)
    doctor = commands.add_parser("doctor", help="say what is wrong with a data folder")
    doctor.add_argument("--repair", action="store_true", help="mend what can be mended safely, after a backup")
    doctor.add_argument("--json", action="store_true", help="print the findings as JSON")
    backup = commands.add_parser("backup", help="copy the database, also while runs are on")
    backup.add_argument("target", type=Path, help="a new file, or a folder")
    for command in (doctor, backup):
        command.add_argument("--data-dir", type=Path, default=default_data_folder(), help="where runs are kept")
    options = parser.parse_args(arguments)
    try:
        if options.command == "backup":
            return _backup(options.data_dir, options.target)
        return _doctor(options.data_dir, mend=options.repair, as_json=options.json)
    except (UserError, OSError) as error:
        print(f"vramfit: {error}", file=sys.stderr)
        return 2


def _backup(data_dir: Path, target: Path) -> int:
    data_dir = typed_path(data_dir).resolve()
    if not (data_dir / DATABASE).is_file():
        raise JobError(f"There is no job database {data_dir / DATABASE}", "Give the data folder with --data-dir.")
    with Store(data_dir) as store:
        print(f"The database was copied to {store.backup(typed_path(target))}.")
    return 0


def _doctor(data_dir: Path, *, mend: bool, as_json: bool) -> int:
    before = examine(data_dir)
    copy = repair(data_dir, before) if mend else None
    left = before if copy is None else examine(data_dir)
    mended = [finding for finding in before if finding not in left]
    if as_json:
        print(json.dumps({"mended": _plain(mended), "found": _plain(left), "backup": copy and str(copy)}, indent=1))
        return 1 if left else 0
    if copy is not None:
        print(f"The database was copied to {copy} before anything was changed.")
    for finding in mended:
        print(f"mended    {finding.kind}: {finding.message} ({finding.repair})")
    for finding in left:
        print(f"found     {finding.kind}: {finding.message}{_hint(finding)}")
    if not left:
        print("Nothing is wrong with this data folder." if not mended else "Nothing else is wrong with it.")
    return 1 if left else 0


def _hint(finding: Finding) -> str:
    return f" With --repair {finding.repair}." if finding.repair else ""


def _plain(findings: Sequence[Finding]) -> list[dict[str, str]]:
    return [{"kind": each.kind, "message": each.message, "repair": each.repair} for each in findings]


if __name__ == "__main__":
    use_utf8()
    sys.exit(main())
