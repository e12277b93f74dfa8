"""In which encoding a text file is written: BOM, UTF-8, UTF-16, GB18030, Shift-JIS, cp1252 and what a library knows.

The whole file decides (see sources.scan), never its head alone: a CSV can be ASCII for 3 MB and end in one pound sign.
"""

from __future__ import annotations

import codecs
import re
import unicodedata
from dataclasses import dataclass
from typing import Final

from vramfit.data.sources import Scan
from vramfit.errors import DataError

MARK: Final = "\udc80"
"""Stands for bytes that the encoding has no character for; no valid text holds it."""

_BOMS: Final = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
# In one file of mostly good UTF-8, a few bad bytes are damage, not another encoding.
_GOOD_PER_BAD: Final = 10


# Python's codecs for something other than a file of text.
_NO_WRITING: Final = ("idna", "punycode", "unicode-escape", "raw-unicode-escape")


@dataclass(frozen=True)
class Encoding:
    """`codec` is Python's name, `name` the one shown; `guessed` when neither a BOM nor validity proves it."""

    codec: str
    name: str
    guessed: bool = False


def _mark(error: UnicodeError) -> tuple[str, int]:
    if not isinstance(error, UnicodeDecodeError):
        raise error
    return MARK, max(error.end, error.start + 1)


codecs.register_error("vramfit_mark", _mark)


def named(encoding: str) -> Encoding:
    """The encoding a user asked for by name. Raises DataError."""
    try:
        codec = codecs.lookup(encoding).name
        "".encode(codec)
        if codec in _NO_WRITING:
            raise LookupError
    except (LookupError, ValueError, TypeError):
        raise DataError(
            f"There is no text encoding called {encoding!r}",
            "Use auto, or a name such as utf-8, utf-16, gb18030, shift_jis or cp1252.",
        ) from None
    # A BOM is never part of the text, whoever chose the encoding.
    return Encoding("utf-8-sig" if codec == "utf-8" else codec, codec)


def wished(encoding: str, scan: Scan) -> Encoding:
    """`named`, for this file: the byte order of UTF-16 and UTF-32 is told by a BOM or the bytes. Raises DataError."""
    found = named(encoding)
    if found.codec not in ("utf-16", "utf-32") or any(scan.head.startswith(bom) for bom, _ in _BOMS[1:]):
        return found
    if found.codec == "utf-16" and scan.first_nul is not None:
        return _utf16_without_bom(scan)
    raise DataError(
        f"is not {found.name}: no byte order mark and no NUL byte is in it",
        "Choose the encoding auto, or one that names the byte order, such as utf-16-le.",
        path=scan.path,
    )


def detect(scan: Scan) -> Encoding:
    """The encoding of a scanned file. Raises DataError when it holds NUL bytes and so is no text."""
    for bom, codec in _BOMS:
        if scan.head.startswith(bom):
            return Encoding(codec, codec.removesuffix("-sig"))
    if scan.first_nul is not None:
        return _utf16_without_bom(scan)
    if scan.bad_utf8_bytes == 0 or scan.multibyte_bytes > _GOOD_PER_BAD * scan.bad_utf8_bytes:
        return Encoding("utf-8", "utf-8")
    return _guess(scan.foreign)


def _utf16_without_bom(scan: Scan) -> Encoding:
    head = scan.head[: len(scan.head) // 2 * 2]
    odd = head[1::2].count(0)
    even = head[0::2].count(0)
    share = (odd + even) / max(len(head), 1)
    # Latin text in UTF-16 is also valid UTF-8 with NULs, so there nearly every second byte has to be one.
    needed = 0.25 if scan.bad_utf8_bytes == 0 else 0.002
    if share >= needed:
        for codec, here, there in (("utf-16-le", odd, even), ("utf-16-be", even, odd)):
            # Not only Latin characters have a byte 0: so do common Chinese ones, such as U+4E00, on the other side.
            if here > 2 * there and _is_utf16(head, codec):
                return Encoding(codec, codec, guessed=True)
    offset = scan.first_nul or 0
    raise DataError(
        f"holds {scan.nul_bytes:,} NUL bytes, the first at byte {offset:,}, so it is no text",
        "Remove them, or save the file as UTF-8.",
        path=scan.path,
        line=scan.head[:offset].count(b"\n") + 1 if offset < len(scan.head) else None,
    )


def _is_utf16(head: bytes, codec: str) -> bool:
    """Whether bytes read as UTF-16 are writing: hardly a control, private or unassigned character, and not nearly all
    bytes printable ASCII, of which any two make a Chinese character."""
    text = head.decode(codec, "vramfit_mark")[:-2]
    strange = sum(char not in "\t\n\f\r" and unicodedata.category(char) in ("Cc", "Cn", "Co") for char in text)
    printable = sum(0x20 <= byte < 0x7F for byte in head)
    return MARK not in text and strange <= len(text) // 200 and printable < 0.8 * len(head)


def _guess(sample: bytes) -> Encoding:
    """The likeliest encoding of lines that are not UTF-8, by how much the decoded text looks like writing."""
    if _is_korean(sample):
        return Encoding("cp949", "cp949", guessed=True)
    scores = [(_likeness(sample, codec), codec) for codec in ("gb18030", "cp932", "euc_jp", "cp1252")]
    best, codec = max(scores)
    if best >= 0.8:
        return Encoding(codec, {"cp932": "shift_jis"}.get(codec, codec), guessed=True)
    import charset_normalizer

    match = charset_normalizer.from_bytes(sample).best()
    if match is not None:
        return Encoding(match.encoding, match.encoding, guessed=True)
    # cp1252 leaves five bytes undefined; latin-1 gives every byte a character.
    codec = "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", sample) else "cp1252"
    return Encoding(codec, codec, guessed=True)


_KANA: Final = re.compile("[\u3040-\u30fa\u30fc\u3001\u3002]")  # without the middle dot, which Chinese uses too
_KANA_ONLY: Final = re.compile("[\u3040-\u30fa]")
_HALF_KANA: Final = re.compile("[\uff61-\uff9f]")
_CHINESE_SIGNS: Final = re.compile("[\u3000-\u3002\u300a-\u3011\uff01-\uff5e\u2018-\u201d\u2014\u2026]")
_WESTERN: Final = re.compile("(?<=[A-Za-z])[À-ÿŒœŠšŽžŸ’](?![À-ÿ]{2})|[À-ÿŒœŠš](?=[a-zA-Z])|[£€§°©®«»“”‘’–—…•¿¡½¼¾²³µ·]")


def _likeness(sample: bytes, codec: str) -> float:
    """0..1: the share of the non-ASCII characters that are usual for writing in this encoding."""
    text = sample.decode(codec, "replace")  # the sample cuts long lines, so a few halves are no proof against a codec
    foreign = [char for char in text if ord(char) > 127]
    if not foreign or text.count("\ufffd") > max(2, 0.02 * len(foreign)):
        return 0.0
    if codec == "cp1252":
        return len(_WESTERN.findall(text)) / len(foreign)
    if codec in ("cp932", "euc_jp"):
        # EUC-JP has its commas and full stops where GB2312 has them.
        kana = len((_KANA if codec == "cp932" else _KANA_ONLY).findall(text))
        if kana < 0.15 * len(foreign):  # Japanese without kana does not exist in running text
            return 0.0
        return 1.0 - len(_HALF_KANA.findall(text)) / len(foreign)
    return _chinese_likeness(text, foreign)


def _is_korean(sample: bytes) -> bool:
    """EUC-KR (which cp949 extends) puts its syllables where GB2312 has the first half of its everyday characters.
    Running Chinese uses the second half as much, which Korean reads as Chinese characters and hardly ever writes."""
    foreign = [char for char in sample.decode("euc_kr", "replace") if ord(char) > 127]
    syllables = sum("\uac00" <= char <= "\ud7a3" for char in foreign)
    signs = sum(_CHINESE_SIGNS.match(char) is not None for char in foreign)
    return syllables >= 12 and syllables + signs >= 0.97 * len(foreign)


def _chinese_likeness(text: str, foreign: list[str]) -> float:
    """GB2312 puts the 3,755 everyday characters, sorted by sound, into rows B0 to D7: nearly all of running text."""
    common = 0
    for char in foreign:
        code = char.encode("gb18030", "replace")
        if (len(code) == 2 and 0xB0 <= code[0] <= 0xD7 and code[1] >= 0xA1) or _CHINESE_SIGNS.match(char):
            common += 1
        elif unicodedata.category(char) == "Cn":
            return 0.0
    return common / len(foreign)
