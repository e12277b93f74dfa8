"""A survey by several processes is the survey by one."""

import gzip
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vramfit.data import read
from vramfit.data.crew import Crew, CrewLost
from vramfit.data.read import ReadOptions, Survey, open_sources, survey, survey_sources
from vramfit.errors import DataError

GOOD = b'{"instruction": "Say hi", "output": "Hi."}'
LINES = st.one_of(
    st.text(max_size=9).map(lambda text: json.dumps({"instruction": text, "output": "a" + text}).encode()),
    st.sampled_from(
        [b"", b" ", b"{not json}", b'{"instruction": "no answer"}', b'{"instruction": "Q", "output": "\xff"}', b"[1]"]
    ),
)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(2) as crew:
        yield crew


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if every file were large."""
    monkeypatch.setattr(read, "CREW_BYTES", 4)
    monkeypatch.setattr(read, "processors", lambda: 2)


def both(paths: list[Path], crew: Crew) -> tuple[Survey, Survey]:
    """By one process, by several."""
    sources = open_sources(paths, ReadOptions())
    return survey_sources(sources), survey_sources(sources, crew)


@given(rows=st.lists(LINES, max_size=30), copies=st.integers(0, 3))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_the_same_survey(tmp_path_factory: pytest.TempPathFactory, crew: Crew, rows: list[bytes], copies: int) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b'{"instruction": "another", "output": "row"}', *rows, *[GOOD] * copies]))
    alone, together = both([path], crew)
    assert asdict(together) == asdict(alone)
    assert alone.duplicates >= copies


def test_several_files_of_several_kinds(tmp_path: Path, crew: Crew) -> None:
    lines, table, packed = tmp_path / "a.jsonl", tmp_path / "b.csv", tmp_path / "c.jsonl.gz"
    lines.write_bytes(b"\n".join([GOOD, b"{bad}", GOOD] * 5))
    table.write_text("instruction,output\nSay hi,Hi.\n\nQ,\n", encoding="utf-8")
    packed.write_bytes(gzip.compress(b"\n".join([GOOD, b"[]"] * 3)))
    alone, together = both([lines, table, packed], crew)
    assert asdict(together) == asdict(alone)
    assert (alone.rows, alone.duplicates, alone.bad_rows, sum(alone.dropped.values())) == (14, 13, 8, 1)


def test_survey_uses_a_crew_for_a_large_file_and_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Crew] = []

    class Watched(Crew):
        def __init__(self, processes: int) -> None:
            super().__init__(processes)
            started.append(self)

    monkeypatch.setattr(read, "Crew", Watched)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD] * 50))
    assert survey([path]).rows == 50
    assert [process.returncode is not None for crew in started for process in crew._processes] == [True, True]


@pytest.mark.parametrize("processors", [1, 2])
def test_a_damaged_file_is_refused_by_name_whoever_reads_it(
    tmp_path: Path, crew: Crew, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(read, "processors", lambda: processors)
    good, damaged = tmp_path / "a.jsonl", tmp_path / "b.json"
    good.write_bytes(b"\n".join([GOOD] * 20))
    damaged.write_text(json.dumps([{"instruction": "Q", "output": "A"}] * 200)[:-2] + ",", encoding="utf-8")
    with pytest.raises(DataError, match=r"b\.json, line 1, column \d+: ") as caught:
        survey([good, damaged])
    assert (caught.value.path, caught.value.line) == (damaged, 1)


def test_without_processes_the_survey_is_made_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"{bad}"] * 20))
    expected = survey([path])

    def none(_processes: int) -> Crew:
        raise CrewLost

    monkeypatch.setattr(read, "Crew", none)
    assert survey([path]) == expected


def test_a_lost_process_costs_time_only(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"{bad}"] * 20))
    sources = open_sources([path], ReadOptions())
    expected = survey_sources(sources)
    with Crew(2) as lost:
        for process in lost._processes:
            process.kill()
        assert survey_sources(sources, lost) == expected


def test_a_command_that_is_none_is_a_lost_crew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/no/such/python")
    with pytest.raises(CrewLost):
        Crew(2)


def test_a_changed_row_changes_the_survey(tmp_path: Path, crew: Crew) -> None:
    """The comparisons above can fail."""
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD] * 9))
    before, _ = both([path], crew)
    path.write_bytes(b"\n".join([GOOD] * 8 + [GOOD.replace(b"Hi.", b"Ho.")]))
    _, after = both([path], crew)
    assert replace(after, duplicates=8, content_hash=before.content_hash) == before
    assert after.duplicates == 7
