"""The files of a data set: found, opened, hashed, and refused when they hold something other than data.

One pass over every byte (`scan`) answers what no look at the head can: is it all valid UTF-8, where is the first NUL
byte, what is its content hash. Reading (rows.py) is a second pass. Memory is bounded by the chunk size in both.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from vramfit.errors import DataError
from vramfit.places import is_file, is_folder
from vramfit.units import GIB, format_bytes

HEAD_BYTES: Final = 64 * 1024
CHUNK_BYTES: Final = 1024 * 1024
FOREIGN_SAMPLE_BYTES: Final = 512 * 1024
FOREIGN_AROUND_BYTES: Final = 2000
MAX_UNPACKED_BYTES: Final = 256 * GIB
MAX_GZIP_RATIO: Final = 300  # JSON of one repeated row packs about 200 to 1; a gzip bomb 1,000 to 1
UNSUSPECTED_BYTES: Final = 64 * 1024 * 1024  # a small file may pack well: a bomb of this size does no harm
FOLDER_SUFFIXES: Final = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", ".parquet", ".txt")
MAX_FOLDER_FILES: Final = 10_000
NO_ROWS: Final = ("readme", "license", "licence", "copying", "notice", "changelog", "requirements")
"""Text files that lie beside the data of a folder and are none, by their names without ending."""

_NOT_DATA: Final[tuple[tuple[bytes, str], ...]] = (
    (b"\x7fELF", "a program (ELF)"),
    (b"MZ", "a program (Windows)"),
    (b"\xfe\xed\xfa", "a program (macOS)"),
    (b"\xcf\xfa\xed\xfe", "a program (macOS)"),
    (b"PK\x03\x04", "a ZIP archive (also .xlsx, .docx and PyTorch checkpoints are ones)"),
    (b"PK\x05\x06", "an empty ZIP archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"Rar!", "a RAR archive"),
    (b"BZh", "a bzip2 archive"),
    (b"\xfd7zXZ\x00", "an xz archive"),
    (b"\x28\xb5\x2f\xfd", "a Zstandard archive"),
    (b"\x1f\x8b", "gzip inside gzip"),
    (b"%PDF", "a PDF document"),
    (b"{\\rtf", "an RTF document"),
    (b"\x89PNG", "a PNG picture"),
    (b"\xff\xd8\xff", "a JPEG picture"),
    (b"GIF8", "a GIF picture"),
    (b"SQLite format 3\x00", "an SQLite database"),
    (b"\x93NUMPY", "a NumPy array"),
    (b"\x89HDF", "an HDF5 file"),
    (b"ARROW1", "an Arrow file"),
    (b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1", "an old Office file (.xls, .doc)"),
    (b"\x1f\x9d", "a compressed file (.Z)"),
    (b"\x04\x22\x4d\x18", "an LZ4 archive"),
    (b"Obj\x01", "an Avro file"),
    (b"GGUF", "model weights (GGUF)"),
    (b"version https://git-lfs", "a Git LFS pointer, not the file itself"),
)
# Possessive: a comment that was passed is never tried again as part of a longer one.
_HTML: Final = re.compile(
    rb"(?>\s|<!--(?s:.)*?-->)*+(?:<!doctype\s+html|<html[\s>]|<\?xml|<head[\s>]|<body[\s>])", re.IGNORECASE
)
# Protocols 2 to 5 begin with their number; 1 and 0 with a list, dict or tuple, or an object of a module.
_PICKLE: Final = re.compile(
    rb"\x80[\x02-\x05]|[\])}]q\x00|\((?:lp|dp|tp?|ip)\d+\r?\n"
    rb"|\(*[VS][^\n]{0,10000}\np\d+\r?\n|\(+[IFL]-?[\d.e+-]+L?\r?\n|c[\w.]+\n\w+\n(?:p\d+\n|q\x00|\(S['\"]|\)?R)"
)
_FOREIGN: Final = re.compile(rb"[\x80-\xff]")


@dataclass(frozen=True, kw_only=True)
class Scan:
    """What one pass over a file's bytes found. Offsets count from 0 in the unpacked bytes; None: there is none.

    `stamp` tells whether the file has changed since (see `check_unchanged`).
    `blank_lines` are those in runs of a thousand. `sha256` is of the unpacked bytes; `foreign` are lines with bytes
    that are not UTF-8, for guessing the encoding.
    """

    path: Path
    size_bytes: int
    unpacked_bytes: int
    gzipped: bool
    sha256: str
    head: bytes
    bad_utf8_bytes: int
    multibyte_bytes: int
    first_nul: int | None
    nul_bytes: int
    lines: int
    blank_lines: int
    foreign: bytes
    stamp: tuple[int, int, int]

    @property
    def parquet(self) -> bool:
        return self.head.startswith(b"PAR1")


def find_files(paths: tuple[Path, ...]) -> tuple[list[Path], list[str]]:
    """The files to read, in the given order, and sentences about what was left out. Raises DataError.

    A named file is read whatever its name. A folder gives its data files, sorted by name, through all its
    sub-folders; hidden files and folders, links that lead out of it and files of other kinds are left out.
    """
    files: list[Path] = []
    notes: list[str] = []
    for path in paths:
        if is_folder(path):
            files += _files_in(path, notes)
        else:
            _check_exists(path)
            files.append(path)
    unique: dict[Path, Path] = {}
    for path in files:
        place = path.resolve()
        if place in unique:
            notes.append(f"{path.name} was given more than once and is read once.")
        unique.setdefault(place, path)
    if not unique:
        raise DataError("No data file was given", "Name a file or a folder that holds some.")
    return list(unique.values()), list(dict.fromkeys(notes))


def _check_exists(path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        raise DataError(f"There is no file {path}", "Check the path.") from None
    except (OSError, ValueError) as error:
        shown = str(path) if len(str(path)) <= 200 else f"{str(path)[:200]}..."
        raise DataError(f"{shown} cannot be opened: {_reason(error)}", "Check the path and its permissions.") from None
    if not stat.S_ISREG(mode):
        raise DataError(f"{path} is a device or pipe, not a file", "Save the data to a file first.")


def _files_in(folder: Path, notes: list[str]) -> list[Path]:
    found: list[Path] = []
    ignored: list[str] = []
    links: list[Path] = []
    root = folder.resolve()
    for path in _walk(folder):
        if not _is_data_name(path.name):
            ignored.append(path.name)
        elif not path.resolve().is_relative_to(root):
            links.append(path)
        else:
            found.append(path)
    if not found and links:
        raise DataError(
            f"The folder {folder} holds no data file but links out of it, the first {links[0].name}",
            "Copy the files into the folder, or name them one by one.",
        )
    if not found:
        raise DataError(
            f"The folder {folder} holds no data file",
            f"Data files end with {', '.join(FOLDER_SUFFIXES)} or one of these with .gz.",
        )
    notes += [f"{path.name} was left out: it is a link to a place outside {folder.name}." for path in links]
    if ignored:
        shown = ", ".join(sorted(ignored)[:5]) + (" ..." if len(ignored) > 5 else "")
        notes.append(f"{len(ignored)} files of other kinds in {folder.name} were left out: {shown}.")
    return found


def _walk(folder: Path) -> Iterator[Path]:
    """Files under `folder`, sorted, hidden ones and linked folders left out. Raises DataError."""
    waiting, seen = [folder], 0
    while waiting:
        current = waiting.pop()
        try:
            entries = sorted(current.iterdir(), key=lambda entry: entry.name)
        except OSError as error:
            raise DataError(
                f"The folder {current} cannot be read: {_reason(error)}", "Check its permissions."
            ) from None
        visible = [entry for entry in entries if not entry.name.startswith((".", "__"))]
        yield from (entry for entry in visible if is_file(entry))
        waiting += [entry for entry in reversed(visible) if is_folder(entry) and not entry.is_symlink()]
        seen += len(visible)
        if seen > MAX_FOLDER_FILES:
            raise DataError(
                f"The folder {folder} holds more than {MAX_FOLDER_FILES:,} files", "Name the data files one by one."
            )


def _is_data_name(name: str) -> bool:
    stem, _, suffix = name.lower().removesuffix(".gz").rpartition(".")
    return f".{suffix}" in FOLDER_SUFFIXES and not (suffix == "txt" and stem in NO_ROWS)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


@contextmanager
def open_bytes(path: Path) -> Iterator[IO[bytes]]:
    """The file's unpacked bytes as a stream. Raises DataError, also for damage met while the stream is read."""
    try:
        with path.open("rb") as raw:
            packed = raw.read(2) == b"\x1f\x8b"
            raw.seek(0)
            yield gzip.GzipFile(fileobj=raw, mode="rb") if packed else raw  # type: ignore[misc]
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        reason = "the compressed data ends too early" if isinstance(error, EOFError) else "it is damaged"
        raise DataError(f"cannot be unpacked: {reason}", "Copy or compress the file again.", path=path) from None
    except OSError as error:
        raise DataError(f"cannot be read: {_reason(error)}", "Check the file and its permissions.", path=path) from None


def scan(path: Path) -> Scan:
    """Look at every byte once. Raises DataError for an empty, unreadable or damaged file and for what is no data."""
    _check_exists(path)
    stamp = _stamp(path)
    with open_bytes(path) as stream:
        head = stream.read(HEAD_BYTES)
        _refuse_other_kinds(path, head)
        counter = _ByteCounter()
        chunk = head
        size = path.stat().st_size
        while chunk:
            counter.add(chunk)
            _check_ratio(path, counter.size, size)
            chunk = stream.read(CHUNK_BYTES)
        counter.finish()
    return Scan(
        path=path,
        size_bytes=size,
        unpacked_bytes=counter.size,
        gzipped=isinstance(stream, gzip.GzipFile),
        sha256=counter.hash.hexdigest(),
        head=head,
        bad_utf8_bytes=counter.bad,
        multibyte_bytes=counter.multibyte,
        first_nul=counter.first_nul,
        nul_bytes=counter.nuls,
        lines=counter.newlines + (not counter.ended),
        blank_lines=counter.blank,
        foreign=bytes(counter.foreign),
        stamp=stamp,
    )


def check_unchanged(found: Scan) -> None:
    """Raises DataError for a file that was written to since it was scanned: what was read of it is not one state."""
    try:
        same = _stamp(found.path) == found.stamp
    except OSError:
        same = False
    if not same:
        raise DataError("changed while it was read", "Start again when it is complete.", path=found.path)


def _stamp(path: Path) -> tuple[int, int, int]:
    found = path.stat()
    return found.st_size, found.st_mtime_ns, found.st_ino


def _check_ratio(path: Path, unpacked: int, packed: int) -> None:
    if unpacked > MAX_UNPACKED_BYTES or (unpacked > UNSUSPECTED_BYTES and unpacked > MAX_GZIP_RATIO * packed):
        raise DataError(
            f"unpacks from {format_bytes(packed)} to more than {format_bytes(unpacked)}",
            "Unpack it yourself if that is meant, and name the unpacked file.",
            path=path,
        )


class _ByteCounter:
    """Counts over a stream of chunks: size, hash, NUL bytes, bytes that are not UTF-8."""

    def __init__(self) -> None:
        self.size = self.bad = self.multibyte = self.nuls = self.newlines = self.blank = 0
        self.first_nul: int | None = None
        self.ended = True  # with a line end
        self.hash = hashlib.sha256()
        self.foreign = bytearray()
        self._rest = b""

    def add(self, chunk: bytes) -> None:
        self.hash.update(chunk)
        nuls = chunk.count(0)
        if nuls and self.first_nul is None:
            self.first_nul = self.size + chunk.index(0)
        self.nuls += nuls
        self.newlines += chunk.count(b"\n")
        self.blank += sum(chunk.count(run) for run in _BLANK_RUNS) * 1000
        self.ended = chunk.endswith(b"\n")
        self.size += len(chunk)
        if self._rest or not chunk.isascii():
            self._check_utf8(self._rest + chunk, last=False)

    def finish(self) -> None:
        if self._rest:
            self._check_utf8(self._rest, last=True)

    def _check_utf8(self, data: bytes, *, last: bool) -> None:
        # A character cut by the chunk's end is not an error: up to three bytes wait for the next chunk.
        self._rest = b"" if last else _unfinished_tail(data)
        whole = data[: len(data) - len(self._rest)]
        try:
            text = whole.decode("utf-8")
            bad = 0
        except UnicodeDecodeError:
            # Surrogates written as if they were characters are damage within UTF-8, no sign of another encoding.
            whole = _SURROGATES.sub(b"", whole)
            text = whole.decode("utf-8", "surrogateescape")
            bad = len(_ESCAPED.findall(text))
            if bad:
                self._keep_foreign(whole)
        self.bad += bad
        self.multibyte += len(whole) - len(text)

    def _keep_foreign(self, data: bytes) -> None:
        # One pattern for byte and surroundings would look 2,000 bytes ahead from every byte of a long line.
        end = 0
        while len(self.foreign) < FOREIGN_SAMPLE_BYTES and (match := _FOREIGN.search(data, end)) is not None:
            place = match.start()
            first = max(end, place - FOREIGN_AROUND_BYTES)
            start = max(first, data.rfind(b"\n", first, place) + 1)
            last = min(place + FOREIGN_AROUND_BYTES, len(data))
            line_end = data.find(b"\n", place, last)
            end = last if line_end < 0 else line_end
            self.foreign += data[start:end] + b"\n"


_BLANK_RUNS: Final = (b"\n" * 1000, b"\r\n" * 1000)
_SURROGATES: Final = re.compile(rb"\xed[\xa0-\xbf][\x80-\xbf]")
_ESCAPED: Final = re.compile("[\udc80-\udcff]")


def _unfinished_tail(data: bytes) -> bytes:
    """The start of a UTF-8 character that the end of `data` cuts off, or nothing."""
    for back in range(1, min(4, len(data) + 1)):
        byte = data[-back]
        if byte >= 0xC0:
            needed = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return data[-back:] if needed > back else b""
        if byte < 0x80:
            return b""
    return b""


def _refuse_other_kinds(path: Path, head: bytes) -> None:
    if not head:
        raise DataError("The file is empty", "Choose a file that holds rows.", path=path)
    kind = next((name for magic, name in _NOT_DATA if head.startswith(magic) and _is_magic(magic, head)), None)
    if kind is None and head[257:262] == b"ustar":
        kind = "a TAR archive"
    if kind is None and _PICKLE.match(head):
        kind = "a Python pickle, which can run programs when it is opened"
    # Without NUL bytes and order mark the beginning of a page in UTF-16 is the same as in any other encoding.
    if kind is None and _HTML.match(head.removeprefix(b"\xef\xbb\xbf").lstrip(b"\xff\xfe").replace(b"\0", b"")):
        kind = "a web page (HTML or XML)"
    if kind is not None:
        raise DataError(
            f"This is {kind}, not a data set", "Give a JSON, JSONL, CSV, Parquet or plain text file.", path=path
        )


def _is_magic(magic: bytes, head: bytes) -> bool:
    """False where a short magic is also how a text may begin ("MZ", "BZh"): a program or archive has control bytes."""
    if len(magic) > 3 or not magic.isascii():
        return True
    return any(byte < 9 for byte in head[:256])


def text_stream(stream: IO[bytes], encoding: str) -> io.TextIOWrapper:
    """Decode a stream without touching its line ends. Bytes that do not fit become U+DC80 and on (see rows.py)."""
    buffered = io.BufferedReader(_Raw(stream), CHUNK_BYTES)  # type: ignore[type-var]
    return io.TextIOWrapper(buffered, encoding, errors="vramfit_mark", newline="")


class _Raw(io.RawIOBase):
    """Lets a TextIOWrapper sit on a stream without closing it."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)
