"""Samples come from a child: one at a time, kept while nothing changes, ended when nobody asks."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from ui import samples
from ui.samples import Sample, Samples
from vramfit.config import RunConfig
from vramfit.errors import InternalError, ModelError, UserError

CONFIG = RunConfig.parse({"data": {"paths": ["starter:stories"]}})
ANSWER = {"lengths": [3], "trained": [[1, 3]], "whole": True, "notes": [], "examples": []}


def _child(folder: Path, body: str) -> list[str]:
    """A program in the child's place; each start leaves a line in `starts`."""
    program = folder / "child.py"
    start = f"open({str(folder / 'starts')!r}, 'a', encoding='utf-8').write('x\\n')\n"
    program.write_text(f"import sys, json, time\n{start}{body}\n", encoding="utf-8")
    return [sys.executable, str(program)]


def _starts(folder: Path) -> int:
    path = folder / "starts"
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _wait(asked: Samples, config: RunConfig = CONFIG) -> Sample:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = asked.ask(config)
        if found is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("no answer")


def test_a_sample_is_made_once_until_something_changes(tmp_path: Path) -> None:
    version = [1]
    say = f"print('noise'); print(json.dumps({{'sample': {ANSWER!r}}}))"
    asked = Samples(tmp_path, version=lambda _: version[0], command=_child(tmp_path, say))
    assert asked.known(CONFIG) is None
    assert _wait(asked).lengths == (3,)
    assert asked.known(CONFIG) == _wait(asked)
    longer = RunConfig.parse({"data": {"paths": ["starter:stories"], "max_length": 64}})
    assert asked.known(longer) is not None  # lengths are counted before cutting
    assert _starts(tmp_path) == 1
    version[0] = 2
    assert asked.known(CONFIG) is None
    _wait(asked)
    assert _starts(tmp_path) == 2


def test_the_childs_error_is_the_panels(tmp_path: Path) -> None:
    error = json.dumps({"error": {"kind": "ModelError", "what": "There is no tokenizer", "remedy": "Find one."}})
    asked = Samples(tmp_path, version=lambda _: 0, command=_child(tmp_path, f"print({error!r})"))
    with pytest.raises(ModelError, match="There is no tokenizer"):
        _wait(asked)


@pytest.mark.parametrize(("body", "kind"), [("sys.exit(3)", UserError), ("print('{')", InternalError)])
def test_a_child_that_dies_or_babbles_is_one_sentence(tmp_path: Path, body: str, kind: type[Exception]) -> None:
    asked = Samples(tmp_path, version=lambda _: 0, command=_child(tmp_path, body))
    with pytest.raises(kind):
        _wait(asked)


def test_a_child_nobody_waits_for_is_ended_and_makes_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ASKED_S", 0.5)
    body = f"'stories' in sys.stdin.read() and time.sleep(60); print(json.dumps({{'sample': {ANSWER!r}}}))"
    asked = Samples(tmp_path, version=lambda _: 0, command=_child(tmp_path, body))
    assert asked.ask(CONFIG) is None
    other = RunConfig.parse({"data": {"paths": ["starter:questions"]}})
    began = time.monotonic()
    assert _wait(asked, other).lengths == (3,)
    assert time.monotonic() - began < 20


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LIMIT_S", 0.5)
    asked = Samples(tmp_path, version=lambda _: 0, command=_child(tmp_path, "time.sleep(60)"))
    with pytest.raises(UserError, match="took more than"):
        _wait(asked)
