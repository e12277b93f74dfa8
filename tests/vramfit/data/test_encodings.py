from __future__ import annotations

from pathlib import Path

import pytest

from vramfit.data.encodings import Encoding, detect, named, wished
from vramfit.data.sources import scan
from vramfit.errors import DataError

CHINESE = "识别并解释给定列表中的两个科学理论：细胞理论和日心说。它认为所有生命体都是由微小的基本单元构成。"
JAPANESE = "むかしむかし、あるところにおじいさんとおばあさんが住んでいました。おじいさんは山へ行きました。"
FRENCH = "Le système a été créé à l'été; le garçon préfère le thé où naît l'œuvre. Ça coûte 5 £."
GERMAN = "Die Größe der Bäume übertrifft für gewöhnlich die Häuser."


def detected(folder: Path, content: bytes) -> Encoding:
    path = folder / "data.txt"
    path.write_bytes(content)
    return detect(scan(path))


@pytest.mark.parametrize(
    ("text", "codec", "name"),
    [
        (CHINESE, "utf-8", "utf-8"),
        (CHINESE, "utf-8-sig", "utf-8"),
        (CHINESE, "utf-16", "utf-16"),
        (CHINESE, "utf-32", "utf-32"),
        (FRENCH, "utf-16-le", "utf-16-le"),
        (FRENCH, "utf-16-be", "utf-16-be"),
        (CHINESE, "gb18030", "gb18030"),
        (CHINESE, "gbk", "gb18030"),
        (JAPANESE, "shift_jis", "shift_jis"),
        (JAPANESE, "euc_jp", "euc_jp"),
        (CHINESE, "utf-16-le", "utf-16-le"),
        ("一" * 6 + CHINESE, "utf-16-be", "utf-16-be"),
        (FRENCH, "cp1252", "cp1252"),
        (GERMAN, "latin-1", "cp1252"),
        ("plain words", "ascii", "utf-8"),
    ],
)
@pytest.mark.parametrize("ending", ["", "\n"])
def test_encodings_are_recognised(tmp_path: Path, text: str, codec: str, name: str, ending: str) -> None:
    encoded = ('{"instruction": "' + text + '"}' + ending).encode(codec)
    found = detected(tmp_path, encoded)
    assert found.name == name
    assert encoded.decode(found.codec).strip("\ufeff") == '{"instruction": "' + text + '"}' + ending


KOREAN = "옛날 옛적에 한 할아버지와 할머니가 살고 있었습니다. 할아버지는 산으로 나무를 하러 갔습니다."


@pytest.mark.parametrize("codec", ["euc-kr", "cp949"])
def test_korean_is_not_taken_for_chinese(tmp_path: Path, codec: str) -> None:
    assert detected(tmp_path, KOREAN.encode(codec)) == Encoding("cp949", "cp949", guessed=True)
    assert detected(tmp_path, ("a,b\n" + KOREAN[:20]).encode(codec)).codec == "cp949"
    for text in (CHINESE, CHINESE[:14], CHINESE[10:24], CHINESE[30:]):
        assert detected(tmp_path, text.encode("gb18030")).codec == "gb18030"


def test_other_encodings_come_from_the_library(tmp_path: Path) -> None:
    text = "Съешь же ещё этих мягких французских булок, да выпей чаю. " * 5
    found = detected(tmp_path, text.encode("cp1251"))
    assert found.guessed
    assert text.encode("cp1251").decode(found.codec) == text


def test_one_bad_byte_in_utf8_is_damage_and_not_another_encoding(tmp_path: Path) -> None:
    assert detected(tmp_path, (CHINESE * 3).encode() + b"\xff").name == "utf-8"


def test_nul_bytes_are_refused_with_their_place(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"line 2: holds 1 NUL bytes, the first at byte 7"):
        detected(tmp_path, b"hello\nw\x00rld\n")
    with pytest.raises(DataError, match="NUL bytes"):
        detected(tmp_path, bytes(range(256)) * 4)
    with pytest.raises(DataError, match="NUL bytes"):
        detected(tmp_path, b"".join((number % 500).to_bytes(2, "little") for number in range(5000)))
    with pytest.raises(DataError, match="holds 1 NUL bytes, the first at byte 21"):
        detected(tmp_path, b"question,answer\ncaf\xe9s\x00,b\n")


def test_the_user_can_name_an_encoding() -> None:
    assert named("GBK").codec == "gbk"
    assert named("utf-8").codec == "utf-8-sig"
    for wrong in ("klingon", "hex", "rot13"):
        with pytest.raises(DataError, match="no text encoding called"):
            named(wrong)


def test_case_004_the_whole_file_decides_the_encoding(tmp_path: Path) -> None:
    rows = b"question,answer\n" + b"what is it,plain words\n" * 140_000 + b"how much,\xa35\n"
    assert len(rows) > 3_000_000
    found = detected(tmp_path, rows)
    assert (found.codec, found.guessed) == ("cp1252", True)


def test_utf16_by_name_needs_no_byte_order_mark(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("Grüße, said she.".encode("utf-16-be"))
    assert wished("utf-16", scan(path)).codec == "utf-16-be"
    path.write_bytes("Grüße".encode("utf-16"))
    assert wished("utf-16", scan(path)).codec == "utf-16"
    path.write_text("Gruss", encoding="utf-8")
    with pytest.raises(DataError, match="is not utf-16"):
        wished("utf-16", scan(path))
    with pytest.raises(DataError, match="no text encoding called 'idna'"):
        wished("idna", scan(path))
