"""What a model makes of the data comes from one process: asked once while nothing changes, ended when nobody waits."""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from ui import samples
from ui.samples import Piece, Sample, Samples
from vramfit.config import DataChoice, RunConfig
from vramfit.errors import InternalError, ModelError, UserError

CONFIG = RunConfig.parse({"data": {"paths": ["starter:stories"]}})
FOUND = {
    "lengths": [3], "trained": [[1, 3]], "whole": True, "even": True, "total": 1, "numbers": [0], "refused": [],
    "notes": [], "format": "jsonl", "encoding": "utf-8", "shape": "text", "several": False, "columns": {"text": "a"},
}  # fmt: skip
ROW = {"number": 4, "file": "a", "line": 5, "tokens": 2, "about": False, "left_out": "", "pieces": [["a", 1, 2, 0]]}
SAY_SAMPLE = f"say({{'found': {FOUND!r}}})"
SAY_ALL = (
    f"say({{'found': {FOUND!r} if request['do'] == 'sample' else "
    f"{ROW!r} if request['do'] == 'row' else {{'number': 7, 'looked': 7}}}})"
)
Make = Callable[..., Samples]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Samples whose worker is a program that runs `body` for each request; each start leaves a line in `starts`."""
    made: list[Samples] = []

    def samples_of(body: str, version: Callable[[str], object] = lambda _: 0) -> Samples:
        program = tmp_path / "child.py"
        program.write_text(
            "import json, sys, time\n"
            f"open({str(tmp_path / 'starts')!r}, 'a', encoding='utf-8').write('x\\n')\n"
            "say = lambda reply: print(json.dumps(reply), flush=True)\n"
            "for line in sys.stdin:\n    request = json.loads(line)\n"
            f"    open({str(tmp_path / 'asks')!r}, 'a', encoding='utf-8').write('x\\n')\n    {body}\n",
            encoding="utf-8",
        )
        made.append(Samples(tmp_path, version=version, command=[sys.executable, str(program)]))
        return made[-1]

    yield samples_of
    for one in made:
        one._worker.end()


def _count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines()) if path.exists() else 0


def _wait(asked: Samples, config: RunConfig = CONFIG) -> Sample:
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found = asked.ask(config)
        if found is not None:
            return found
        time.sleep(0.05)
    raise AssertionError("no answer")


def test_a_sample_is_made_once_until_something_changes(make: Make, tmp_path: Path) -> None:
    version = [1]
    asked = make(SAY_SAMPLE, lambda _: version[0])
    assert asked.known(CONFIG) is None
    first = _wait(asked)
    assert first.lengths == (3,)
    assert asked.known(CONFIG) == _wait(asked) == first
    longer = RunConfig.parse({"data": {"paths": ["starter:stories"], "max_length": 64}})
    assert asked.known(longer) == first  # lengths are counted before cutting
    version[0] = 2
    assert asked.known(CONFIG) is None
    assert _wait(asked).token != first.token
    assert _count(tmp_path / "asks") == 2
    assert _count(tmp_path / "starts") == 1  # one process answered both


def test_any_row_of_a_sample_is_asked_for_once(make: Make) -> None:
    asked = make(SAY_ALL)
    token = _wait(asked).token
    shown = asked.row(token, 4)
    assert (shown.number, shown.line, shown.pieces) == (4, 5, (Piece("a", True, 2, False),))
    assert asked.row(token, 4) is shown
    assert asked.next_left_out(token, 4) == (7, 7)
    assert asked.sample(token).token == token
    with pytest.raises(UserError, match="too long ago"):
        asked.row("unknown", 4)


def test_the_workers_error_is_the_panels(make: Make) -> None:
    error = {"error": {"kind": "ModelError", "what": "There is no tokenizer", "remedy": "Find one."}}
    with pytest.raises(ModelError, match="There is no tokenizer"):
        _wait(make(f"say({error!r})"))


@pytest.mark.parametrize(("body", "kind"), [("sys.exit(3)", UserError), ("print('{', flush=True)", InternalError)])
def test_a_worker_that_dies_or_babbles_is_one_sentence(make: Make, body: str, kind: type[Exception]) -> None:
    with pytest.raises(kind):
        _wait(make(body))


def test_a_worker_that_ended_meanwhile_is_started_again(make: Make, tmp_path: Path) -> None:
    asked = make(SAY_ALL + "; sys.exit(0)")
    token = _wait(asked).token
    assert asked.row(token, 4).number == 4
    assert asked.next_left_out(token, 4) == (7, 7)
    assert _count(tmp_path / "starts") == 3


def test_a_sample_nobody_waits_for_makes_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "ASKED_S", 0.5)
    asked = make("time.sleep(60 if 'stories' in line else 0); " + SAY_SAMPLE)
    assert asked.ask(CONFIG) is None
    other = RunConfig.parse({"data": {"paths": ["starter:questions"]}})
    began = time.monotonic()
    assert _wait(asked, other).lengths == (3,)
    assert time.monotonic() - began < 20


def test_a_worker_that_takes_too_long_is_ended(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "LIMIT_S", 0.5)
    with pytest.raises(UserError, match="took more than"):
        _wait(make("time.sleep(60)"))


def test_the_worker_ends_with_its_owner(tmp_path: Path) -> None:
    program = f"import sys\nfor line in sys.stdin: print({json.dumps({'found': FOUND})!r}, flush=True)"
    asked = Samples(tmp_path, version=lambda _: 0, command=[sys.executable, "-c", program])
    _wait(asked)
    child = psutil.Process(asked._worker._child.pid)
    del asked
    gc.collect()
    assert not child.is_running()


def test_the_real_worker_ends_with_its_input(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a fox"}\n{bad\n', encoding="utf-8")
    config = RunConfig.parse({"data": {"paths": [str(path)], "bad_rows": "skip"}})
    asked = Samples(tmp_path, version=lambda _: 0)
    found = _wait(asked, config)
    assert (found.format, found.total, len(found.lengths), found.whole) == ("jsonl", 2, 1, True)
    assert "".join(piece.text for piece in asked.row(found.token, 0).pieces).startswith("a fox")
    assert asked.row(found.token, 1).left_out
    with pytest.raises(UserError, match="no row 3"):
        asked.row(found.token, 2)
    child = asked._worker._child
    child.stdin.close()
    assert child.wait(20) == 0
    asked._worker.end()


def test_rows_that_would_be_left_out_by_reason() -> None:
    values = {**FOUND, "lengths": [10, 40, 50], "trained": [[5, 10], [35, 40], [2, 50]], "refused": [[3, "no token"]]}
    found = Sample.of(values, token="t")
    assert found.left_out(DataChoice(), None) == {"no token": 1}
    assert found.left_out(DataChoice(), 20) == {
        "no token": 1,
        "what is to be learned lies beyond the maximum length of 20 tokens": 1,
    }
    assert found.left_out(DataChoice(too_long="drop"), 20) == {"no token": 1, "it is longer than 20 tokens": 2}
    assert found.left_out(DataChoice(too_long="split"), 20) == {"no token": 1}
    assert Sample.of({**values, "format": "text.gz"}, token="t").left_out(DataChoice(), 20) == {"no token": 1}
