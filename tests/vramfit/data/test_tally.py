"""Parts of a file, tallied one by one, add up to the file."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.data import tally as tally_module
from vramfit.data.read import ReadOptions, open_sources
from vramfit.data.rows import BadRow
from vramfit.data.tally import Part, Tally, split, tally_of, total

GOOD = b'{"instruction": "Say hi", "output": "Hi."}'
LINES = st.one_of(
    st.just(GOOD),
    st.text(max_size=20).map(lambda text: json.dumps({"instruction": text, "output": "a" + text}).encode()),
    st.text(max_size=9)
    .map(lambda text: json.dumps({"instruction": "Q", "output": "é" + text}, ensure_ascii=False))
    .map(lambda line: line.encode("utf-8", "replace")),
    st.sampled_from(
        [
            b"",
            b"  \r",
            b"{not json}",
            b'{"instruction": "no answer"}',
            b'{"instruction": "Q", "output": "\xff\xe4"}',
            b"[1]",
            b"\xe4",
            b'\xef\xbb\xbf{"instruction": "a mark", "output": "inside the file"}',
            b'{"instruction": "ends in a carriage return", "output": "A"}\r',
        ]
    ),
)


def part_of(path: Path) -> Part:
    [source] = open_sources([path], ReadOptions(encoding="utf-8"))
    return Part(path=source.path, layout=source.layout, shape=source.shape, threads=source.threads)


def content(tally: Tally) -> dict[str, Any]:
    """All of a tally but the line ends, which are counted in parts only."""
    return {name: value for name, value in vars(tally).items() if name != "lines"}


@given(st.lists(LINES, max_size=12), st.integers(1, 200), st.booleans(), st.booleans())
@settings(max_examples=300, deadline=None)
def test_parts_of_any_size_add_up_to_the_file(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes], size: int, marked: bool, ended: bool
) -> None:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    whole = b"\n".join([GOOD, GOOD, *lines]) + (b"\n" if ended else b"")
    path.write_bytes(b"\xef\xbb\xbf" + whole if marked else whole)
    part = part_of(path)
    assert part.layout.format == "jsonl"
    parts = split(part, size)
    assert len(parts) >= (2 if size < len(GOOD) else 1)
    assert content(total(parts, map(tally_of, parts))) == content(tally_of(part))


def test_lines_of_later_parts_count_from_the_beginning_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"", GOOD, b"{bad}", GOOD, b'{"instruction": "Q"}', b"{worse}"]))
    parts = split(part_of(path), 1)
    found = total(parts, map(tally_of, parts))
    assert len(parts) == 6
    assert [row.line for row in found.bad] == [4, 7]
    assert found.dropped_rows == [("rows.jsonl", 6, "'output' is null or missing")]


def test_lists_and_hashes_stop_at_the_same_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tally_module, "LISTED_BAD_ROWS", 3)
    monkeypatch.setattr(tally_module, "MAX_HASHED_ROWS", 5)
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b"{bad}", b'{"instruction": "Q"}'] * 8))
    part = part_of(path)
    parts = split(part, 60)
    found = total(parts, map(tally_of, parts))
    assert len(parts) > 5
    assert content(found) == content(tally_of(part))
    assert (len(found.bad), len(found.dropped_rows), len(found.hashes), found.rows) == (3, 3, 5, 8)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("rows.json", json.dumps([{"instruction": "Q", "output": "A"}] * 9, indent=1)),
        ("rows.csv", "instruction,output\n" + 'Q,"A\nB"\n' * 9),
        ("rows.txt", "A text.\n\n" * 9),
    ],
)
def test_files_whose_rows_are_not_lines_stay_whole(tmp_path: Path, name: str, text: str) -> None:
    path = tmp_path / name
    path.write_text(text, encoding="utf-8", newline="")
    part = part_of(path)
    assert split(part, 10) == [part]


def test_rows_in_other_encodings_or_packed_stay_whole(tmp_path: Path) -> None:
    import gzip

    text = "\n".join([GOOD.decode()] * 9)
    packed, wide = tmp_path / "rows.jsonl.gz", tmp_path / "wide.jsonl"
    packed.write_bytes(gzip.compress(text.encode()))
    wide.write_text(text, encoding="utf-16")
    [source] = open_sources([wide], ReadOptions())
    for part in (part_of(packed), Part(path=wide, layout=source.layout, shape=source.shape)):
        assert split(part, 10) == [part]


def test_rows_that_name_their_parents_stay_together(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = [{"id": str(n), "parent_id": str(n - 1) if n else None, "role": "user", "text": "Hi"} for n in range(9)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    part = part_of(path)
    assert part.threads is not None
    assert split(part, 10) == [part]


def test_a_bad_row_keeps_its_column(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b"\n".join([GOOD, b'{"instruction": 1 2}']))
    parts = split(part_of(path), 1)
    [bad] = total(parts, map(tally_of, parts)).bad
    assert bad == BadRow(path, 2, 19, "expecting ',' delimiter")
