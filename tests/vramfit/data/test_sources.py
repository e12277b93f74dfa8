from __future__ import annotations

import gzip
import os
import pickle
import zipfile
from pathlib import Path

import pytest

from vramfit.data.encodings import detect
from vramfit.data.sources import Scan, find_files, scan
from vramfit.errors import DataError


def refused(path: Path) -> DataError:
    with pytest.raises(DataError) as caught:
        scan(path)
    return caught.value


def write(folder: Path, content: bytes, name: str = "data.json") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (pickle.dumps({"a": 1}), "pickle"),
        (pickle.dumps([1, 2], protocol=2), "pickle"),
        (b"\x7fELF" + bytes(60), "program"),
        (b"MZ\x90\x00\x03\x00" + bytes(60), "program"),
        (b"<!DOCTYPE html><html></html>", "web page"),
        (b"\xef\xbb\xbf \n<html lang='en'>", "web page"),
        (b"%PDF-1.7", "PDF"),
        (b"\x89PNG\r\n\x1a\n", "PNG"),
        (b"SQLite format 3\x00", "SQLite"),
        (b"\xfd7zXZ\x00", "xz archive"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "Git LFS pointer"),
        (bytes(257) + b"ustar" + bytes(200), "TAR"),
        (pickle.dumps([{"a": "b"}], protocol=0), "pickle"),
        (pickle.dumps({"a": "b"}, protocol=1), "pickle"),
        (pickle.dumps(Path("a"), protocol=0), "pickle"),
        (pickle.dumps("hello", protocol=0), "pickle"),
        (pickle.dumps(("a", "b"), protocol=0), "pickle"),
        (pickle.dumps((1, 2.5), protocol=0), "pickle"),
        ("<!doctype html><p>x".encode("utf-16"), "web page"),
        ("\n<html><p>x".encode("utf-16-be"), "web page"),
        (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1" + bytes(60), "Office"),
        (b"Obj\x01\x04\x14avro.codec", "Avro"),
        (b"cos\nsystem\n(S'echo'\ntR.", "pickle"),
        (b"cbuiltins\ndict\n)R.", "pickle"),
        (b"\n<!-- saved from --> <!-- x -->\n<HTML><p>", "web page"),
        (b"{\\rtf1 hello}", "RTF"),
    ],
)
def test_what_is_no_data_is_refused_by_name(tmp_path: Path, content: bytes, words: str) -> None:
    error = refused(write(tmp_path, content))
    assert words in str(error)
    assert "data.json" in str(error)
    assert error.remedy


def test_zip_is_refused(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "data.jsonl", "w") as archive:
        archive.writestr("a.jsonl", "{}")
    assert "ZIP archive" in str(refused(tmp_path / "data.jsonl"))


def test_archives_inside_gzip_are_refused(tmp_path: Path) -> None:
    assert "gzip inside gzip" in str(refused(write(tmp_path, gzip.compress(gzip.compress(b"{}")), "a.gz")))
    assert "TAR" in str(refused(write(tmp_path, gzip.compress(bytes(257) + b"ustar" + bytes(200)), "b.gz")))


def test_many_comments_are_no_reason_to_think_long(tmp_path: Path) -> None:
    assert scan(write(tmp_path, b"<!-- a --> " * 5000)).lines == 1


@pytest.mark.parametrize("text", [b"MZ was a band\n", b"BZh was too\n", b"PKs\n"])
def test_a_text_that_begins_like_a_program_is_text(tmp_path: Path, text: bytes) -> None:
    assert scan(write(tmp_path, text)).head == text


def test_a_cut_gzip_file_is_refused(tmp_path: Path) -> None:
    whole = gzip.compress(os.urandom(5000))
    assert "ends too early" in str(refused(write(tmp_path, whole[:-100])))
    assert "damaged" in str(refused(write(tmp_path, whole[:50] + b"xxxxxxxx" + whole[58:])))


def test_a_gzip_bomb_ends_in_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.data.sources.UNSUSPECTED_BYTES", 2**20)
    assert "unpacks from" in str(refused(write(tmp_path, gzip.compress(bytes([65]) * 4_000_000))))


def test_missing_unreadable_and_special_files(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="There is no file"):
        find_files((tmp_path / "none.json",))
    with pytest.raises(DataError, match="holds no data file"):
        find_files((tmp_path,))
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(DataError, match="device or pipe"):
            find_files((tmp_path / "pipe",))


def test_an_unreadable_folder_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_self: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", denied)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        find_files((tmp_path,))


def test_a_folder_gives_its_data_files_in_order(tmp_path: Path) -> None:
    inner = tmp_path / "data" / "part two"
    inner.mkdir(parents=True)
    for name in ("b.jsonl", "a.json.gz", "README.md", ".hidden.json"):
        (tmp_path / "data" / name).write_text("{}", encoding="utf-8")
    (inner / "c.txt").write_text("x", encoding="utf-8")
    (tmp_path / "outside.json").write_text("{}", encoding="utf-8")
    try:
        (tmp_path / "data" / "link.json").symlink_to(tmp_path / "outside.json")
    except OSError:
        pytest.skip("this system does not allow links")
    files, notes = find_files((tmp_path / "data",))
    assert [path.name for path in files] == ["a.json.gz", "b.jsonl", "c.txt"]
    assert any("README.md" in note for note in notes)
    assert any("link to a place outside" in note for note in notes)


def test_one_file_under_two_names_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "inner").mkdir()
    path = write(tmp_path, b"{}", "a.jsonl")
    monkeypatch.chdir(tmp_path)
    named = (path, path, Path("a.jsonl"), tmp_path / "inner" / ".." / "a.jsonl", tmp_path)
    assert find_files(named) == ([path], ["a.jsonl was given more than once and is read once."])
    try:
        (tmp_path / "other.jsonl").symlink_to(path)
    except OSError:
        pytest.skip("this system does not allow links")
    assert find_files((path, tmp_path / "other.jsonl"))[0] == [path]


def test_what_lies_beside_the_data_of_a_folder_is_left_out(tmp_path: Path) -> None:
    for name in ("train.txt", "README.txt", "LICENSE.txt", "requirements.txt", "readme.jsonl"):
        write(tmp_path, b"text", name)
    files, notes = find_files((tmp_path,))
    assert [path.name for path in files] == ["readme.jsonl", "train.txt"]
    assert "LICENSE.txt, README.txt, requirements.txt" in notes[0]
    assert find_files((tmp_path / "README.txt",))[0] == [tmp_path / "README.txt"]  # who names it wants it


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1000])
def test_utf8_cut_by_a_chunk_is_not_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr("vramfit.data.sources.CHUNK_BYTES", chunk)
    monkeypatch.setattr("vramfit.data.sources.HEAD_BYTES", chunk)
    found = scan(write(tmp_path, "a é 你好 😀 z".encode()))
    assert found.bad_utf8_bytes == 0
    assert found.multibyte_bytes == 1 + 2 * 2 + 3  # continuation bytes
    assert scan(write(tmp_path, b"abc\xff\xe4\xbd")).bad_utf8_bytes == 3


def test_the_hash_is_of_the_unpacked_bytes(tmp_path: Path) -> None:
    one: Scan = scan(write(tmp_path, b"hello\n", "a.txt"))
    two: Scan = scan(write(tmp_path, gzip.compress(b"hello\n"), "b.txt.gz"))
    assert one.sha256 == two.sha256
    assert (one.gzipped, two.gzipped) == (False, True)


def test_a_folder_of_links_out_of_it_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "outside.json").write_text("{}", encoding="utf-8")
    try:
        (tmp_path / "data" / "my link.json").symlink_to(tmp_path / "outside.json")
    except OSError:
        pytest.skip("this system does not allow links")
    with pytest.raises(DataError, match=r"no data file but links out of it, the first my link\.json"):
        find_files((tmp_path / "data",))


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 1024])
def test_surrogates_written_as_characters_are_damage_within_utf8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chunk: int
) -> None:
    monkeypatch.setattr("vramfit.data.sources.CHUNK_BYTES", chunk)
    found = scan(write(tmp_path, '{"a": "b\ud800\udfff"}\n'.encode("utf-8", "surrogatepass")))
    assert (found.bad_utf8_bytes, found.foreign) == (0, b"")
    assert detect(found).name == "utf-8"


def test_lines_that_are_not_utf8_are_kept_with_what_is_around(tmp_path: Path) -> None:
    found = scan(write(tmp_path, b"a,b\ncaf\xe9,\xe0 c\nplain\n\xe9t\xe9\n"))
    assert found.foreign == b"caf\xe9,\xe0 c\n\xe9t\xe9\n"
    # One long line: each byte is kept once, and this ends soon (it took minutes where every byte began a search).
    line = (b"x" * 1_000_000 + b"\xe9" + b"y" * 10 + b"\xe8") * 4
    found = scan(write(tmp_path, line))
    assert found.foreign[:2013] == b"x" * 2000 + b"\xe9" + b"y" * 10 + b"\xe8" + b"x"
    assert (found.foreign.count(b"\xe9"), found.foreign.count(b"\xe8"), found.bad_utf8_bytes) == (4, 4, 8)
