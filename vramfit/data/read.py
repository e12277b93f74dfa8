"""A data set without a model: what it is (`survey`), its rows (`read_rows`), how much there is (`guess_workload`).

No torch, no transformers: the panel calls these. Memory stays bounded whatever the files' size; see `Survey`.
"""

from __future__ import annotations

import hashlib
import math
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Literal

from vramfit.config import DataChoice
from vramfit.data.crew import Crew, CrewLost, processors
from vramfit.data.layouts import layout_of
from vramfit.data.rows import BadRow, Layout, Row, rows_of
from vramfit.data.shapes import Shape, UnknownColumns, recognise
from vramfit.data.sources import Scan, find_files, open_bytes, scan
from vramfit.data.tally import Part, Tally, split, tally_of, total
from vramfit.data.threads import THREAD_SHAPE, Threads, find_threads
from vramfit.errors import DataError
from vramfit.places import is_folder
from vramfit.planning.plan import Workload

SHAPE_SAMPLE_ROWS: Final = 100
MOST_BAD_FIRST: Final = 100_000
"""A file that begins with more bad rows than that is refused as one without rows."""
CREW_BYTES: Final = 32 * 1024 * 1024
"""Files of fewer bytes are read sooner by this process than others have started."""
PART_BYTES: Final = 64 * 1024 * 1024
BYTES_PER_TOKEN: Final = 4.0
"""A guess until there is a tokenizer. With SmolLM2's (49 K entries) English files measured 4.3 to 4.8 bytes per token;
Chinese in UTF-8 only 1.8, because that vocabulary has few Chinese words."""
TURN_TOKENS: Final = 5.0  # what a chat template puts around one turn


@dataclass(frozen=True, kw_only=True)
class ReadOptions:
    """How to read, as in DataChoice: `columns` maps parts ("instruction") to column names; `documents` is where text
    files are split; `most_bad_rows` is how many unreadable rows may be left out (None: any number)."""

    encoding: str = "auto"
    bad_rows: Literal["stop", "skip"] = "stop"
    columns: Mapping[str, str] = field(default_factory=dict)
    most_bad_rows: int | None = None
    documents: str = "auto"

    @classmethod
    def of(cls, choice: DataChoice) -> ReadOptions:
        """The reading part of a DataChoice."""
        return cls(
            encoding=choice.encoding,
            bad_rows=choice.bad_rows,
            columns=choice.columns,
            most_bad_rows=choice.most_bad_rows,
            documents=choice.documents,
        )

    def refusal(self, bad: int, first: BadRow) -> DataError | None:
        """What to raise when `bad` rows of a data set cannot be read, `first` the first of them; None to go on."""
        if self.bad_rows == "stop":
            return first.error()
        if self.most_bad_rows is None or bad <= self.most_bad_rows:
            return None
        return DataError(
            f"{bad:,} rows cannot be read, and {self.most_bad_rows:,} may be left out; the first: {first.reason}",
            "Correct the rows, or allow more of them to be left out.",
            path=first.path,
            line=first.line,
            column=first.column,
        )


@dataclass(frozen=True, kw_only=True)
class Source:
    """One file that was scanned and recognised. `notes` are sentences a person should know."""

    path: Path
    scan: Scan
    layout: Layout
    shape: Shape
    notes: tuple[str, ...]
    threads: Threads | None = None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """What a data set is. Counts are of all files together; of several formats, encodings or shapes all are named.

    `rows` can be read and used; `bad_rows` cannot be read (the first 100 are listed in `bad`), `dropped` can be read
    and not used, counted by reason. `duplicates` are rows whose values occurred before; with more than
    8,000,000 rows only the first that many are compared. `row_bytes` are 101 quantiles of the UTF-8 bytes of a row's
    text, `trained_share` is the share of these bytes in assistant turns (1 for documents).
    """

    files: tuple[str, ...]
    format: str
    encoding: str
    shape: str
    columns: dict[str, str]
    rows: int
    bad_rows: int
    bad: tuple[BadRow, ...]
    dropped: dict[str, int]
    dropped_rows: tuple[tuple[str, int, str], ...]
    roles: dict[str, int]
    bytes: int
    text_bytes: int
    duplicates: int
    content_hash: str
    row_bytes: tuple[int, ...]
    mean_turns: float
    trained_share: float
    warnings: tuple[str, ...]

    @property
    def documents(self) -> bool:
        return self.shape == "text"


def open_sources(paths: Iterable[str | Path], options: ReadOptions) -> list[Source]:
    """Find, scan and recognise every file. Raises DataError for anything that is no usable data file."""
    files, found_notes = find_files(tuple(Path(path) for path in paths))
    folders = {Path(path) for path in paths if is_folder(Path(path))}
    sources: list[Source] = []
    refused: list[DataError] = []
    for path in files:
        in_folder = any(folder in path.parents for folder in folders) and len(files) > 1
        try:
            sources.append(_open_source(path, options))
        except DataError as error:
            if not (in_folder and isinstance(error, UnknownColumns)):
                raise
            # A leftover settings file beside the data is no data; a named file that is none is an error.
            refused.append(error)
            found_notes.append(f"{path.name} was left out: it holds no rows of a known shape.")
    if not sources:
        raise refused[0]
    if found_notes:
        first = sources[0]
        sources[0] = Source(**{**first.__dict__, "notes": (*found_notes, *first.notes)})
    return sources


def _open_source(path: Path, options: ReadOptions) -> Source:
    notes: list[str] = []
    scanned = scan(path)
    layout = layout_of(scanned, encoding=options.encoding, split=options.documents, note=notes.append)
    if layout.format == "text":
        return Source(path=path, scan=scanned, layout=layout, shape=_TEXT_SHAPE, notes=tuple(notes))
    items = rows_of(path, layout)
    sample = [item for item in islice(items, SHAPE_SAMPLE_ROWS) if isinstance(item, Row)]
    # More bad rows than the sample holds may come first; go on until one row is good.
    if not sample:
        sample = list(islice((item for item in islice(items, MOST_BAD_FIRST) if isinstance(item, Row)), 1))
    if not sample:
        _refuse_without_rows(path, next(iter(rows_of(path, layout)), None), more=next(items, None) is not None)
    # Who maps columns reads each row by itself.
    threads = None if options.columns else find_threads(sample)
    if threads is not None:
        notes.append(
            f"Rows of {path.name} were joined to conversations by the column {threads.parent!r}; "
            "map the columns to read each row by itself."
        )
    shape = recognise(sample, options.columns) if threads is None else THREAD_SHAPE
    return Source(path=path, scan=scanned, layout=layout, shape=shape, notes=tuple(notes), threads=threads)


def source_rows(source: Source, layout: Layout | None = None) -> Iterator[Row | BadRow]:
    """Every row of a source, good and bad, as its shape takes them: whole conversations where rows name parents."""
    rows = rows_of(source.path, layout or source.layout)
    return rows if source.threads is None else source.threads.conversations(rows)


_TEXT_SHAPE: Final = Shape(kind="text", columns={"text": "text"})


def _refuse_without_rows(path: Path, first: Row | BadRow | None, *, more: bool = False) -> None:
    if isinstance(first, BadRow):
        which = f"None of the first {MOST_BAD_FIRST:,} rows" if more else "No row"
        raise DataError(
            f"{which} can be read; the first: {first.reason}",
            "Correct the file, or choose another.",
            path=path,
            line=first.line,
            column=first.column,
        )
    raise DataError("The file holds no rows", "Choose a file that holds some.", path=path)


def read_rows(paths: Iterable[str | Path], options: ReadOptions | None = None) -> Iterator[Row]:
    """Every good row of all files in order. A bad row ends it with DataError, or is skipped where the options say so.

    Skipped rows are not lost to sight: `survey` counts and lists them.
    """
    options = options or ReadOptions()
    first: BadRow | None = None
    bad = 0
    for source in open_sources(paths, options):
        for item in source_rows(source):
            if isinstance(item, Row):
                yield item
                continue
            first, bad = first or item, bad + 1
            if (refused := options.refusal(bad, first)) is not None:
                raise refused


def content_hash(sources: Iterable[Source]) -> str:
    """A hash of every byte of all files: two data sets with one hash hold the same text in the same order."""
    return hashlib.sha256("\n".join(source.scan.sha256 for source in sources).encode()).hexdigest()


def survey(paths: Iterable[str | Path], options: ReadOptions | None = None) -> Survey:
    """Read every row once and say what the data set is. Bad rows never stop a survey. Raises DataError."""
    named = tuple(paths)
    with _crew_for(named) as crew:  # its processes start while the files are scanned
        return survey_sources(open_sources(named, options or ReadOptions()), crew)


def survey_sources(sources: list[Source], crew: Crew | None = None) -> Survey:
    """`survey` for files that are already open; `crew` reads parts of them side by side. Raises DataError."""
    parts = [part for source in sources for part in _parts(source, crew)]
    try:
        tally = total(parts, crew.tallies(parts) if crew and len(parts) > 1 else map(tally_of, parts))
    except CrewLost:
        tally = total(parts, map(tally_of, parts))
    return _survey_of(tally, sources)


def _crew_for(paths: tuple[str | Path, ...]) -> AbstractContextManager[Crew | None]:
    """A crew where it pays: large files that can be read side by side, and processors for it. Raises DataError."""
    files, _ = find_files(tuple(Path(path) for path in paths))
    size = sum(path.stat().st_size for path in files)
    if size < CREW_BYTES or processors() < 2 or (len(files) == 1 and not _begins_with_object(files[0])):
        return nullcontext()
    try:
        return Crew(processors())
    except CrewLost:
        return nullcontext()


def _begins_with_object(path: Path) -> bool:
    with open_bytes(path) as stream:
        return stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{")


def _parts(source: Source, crew: Crew | None) -> list[Part]:
    part = Part(path=source.path, layout=source.layout, shape=source.shape, threads=source.threads)
    # At least two for each process, so that none waits long for the last one; small enough to hold while others go on.
    size = max(min(source.scan.size_bytes // (2 * processors()), PART_BYTES), CREW_BYTES // 4)
    return [part] if crew is None else split(part, size)


def _survey_of(tally: Tally, sources: list[Source]) -> Survey:
    if not tally.rows:
        _refuse_unusable(tally, sources)
    notes = [note for source in sources for note in source.notes] + tally.notes
    return Survey(
        files=tuple(str(source.path) for source in sources),
        format=_joined(source.layout.format + (".gz" if source.scan.gzipped else "") for source in sources),
        encoding=_joined(source.layout.encoding for source in sources),
        shape=_joined(source.shape.kind for source in sources),
        columns=sources[0].shape.columns,
        rows=tally.rows,
        bad_rows=tally.bad_rows,
        bad=tuple(tally.bad),
        dropped=dict(tally.dropped.most_common()),
        dropped_rows=tuple(tally.dropped_rows),
        roles=dict(tally.roles.most_common()),
        bytes=sum(source.scan.size_bytes for source in sources),
        text_bytes=tally.text_bytes,
        duplicates=_count_duplicates(tally.hashes),
        content_hash=content_hash(sources),
        row_bytes=_quantiles(tally.sizes),
        mean_turns=tally.turns / tally.rows,
        trained_share=tally.trained_bytes / max(tally.text_bytes, 1),
        warnings=tuple(dict.fromkeys(notes + _row_warnings(tally))),
    )


def _row_warnings(tally: Tally) -> list[str]:
    total_rows = tally.rows + tally.bad_rows + sum(tally.dropped.values())
    found = []
    if tally.bad_rows:
        first = tally.bad[0]
        found.append(
            f"{tally.bad_rows:,} of {total_rows:,} rows cannot be read, the first in {first.path.name}"
            f"{f', line {first.line}' if first.line else ''}: {first.reason}."
        )
    for reason, count in tally.dropped.most_common(5):
        found.append(f"{count:,} of {total_rows:,} rows are left out: {reason}.")
    return found


def _refuse_unusable(tally: Tally, sources: list[Source]) -> None:
    path = sources[0].path
    if tally.dropped:
        reason, count = tally.dropped.most_common(1)[0]
        line = next(line for _, line, why in tally.dropped_rows if why == reason)
        raise DataError(
            f"No row can be used; in {count:,} of {tally.bad_rows + sum(tally.dropped.values()):,} rows {reason}",
            "Correct the file, or map its columns.",
            path=path,
            line=line,
        )
    _refuse_without_rows(path, tally.bad[0] if tally.bad else None)


def _joined(names: Iterable[str]) -> str:
    return " + ".join(dict.fromkeys(names))


def _count_duplicates(hashes: array[int]) -> int:
    import numpy as np

    # Sorted in place: numpy's unique would hold several copies of millions of numbers.
    values = np.array(hashes, dtype=np.int64)
    values.sort()
    return int(np.count_nonzero(values[1:] == values[:-1]))


def _quantiles(sizes: array[int]) -> tuple[int, ...]:
    import numpy as np

    values = np.frombuffer(sizes, dtype=np.uintc)
    return tuple(int(value) for value in np.quantile(values, np.linspace(0, 1, 101), method="nearest"))


def packs_by_itself(survey: Survey, median_tokens: float, max_length: int) -> bool:
    """What packing="auto" means: documents are packed that would leave most of a sequence empty (see prepare.py)."""
    return survey.documents and 2 * median_tokens <= max_length


def guess_workload(
    survey: Survey,
    max_length: int,
    *,
    packing: bool | Literal["auto"] = "auto",
    eval_share: float = 0.0,
    measured: Sequence[int] = (),
    trained_share: float | None = None,
) -> Workload:
    """How much there is to train before a tokenizer has seen all of it: tokens from bytes (see BYTES_PER_TOKEN), or
    from the `measured` lengths in tokens and `trained_share` of a sample of the rows.

    `max_length` cuts rows; text files and packed documents are spread over blocks of that length instead. Packing
    and `eval_share` are meant as in DataChoice.
    """
    around = TURN_TOKENS * survey.mean_turns + 1
    lengths = _measured_lengths(survey, measured) or [size / BYTES_PER_TOKEN + around for size in survey.row_bytes]
    rows = max(round(survey.rows * (1 - eval_share)), 1)
    mean = sum(lengths) / len(lengths)
    trained = max(min(survey.trained_share if trained_share is None else trained_share, 1.0), 0.01)
    if packing == "auto":
        packing = packs_by_itself(survey, lengths[len(lengths) // 2], max_length)
    if survey.documents and (packing or survey.format.startswith("text")):
        tokens = rows * mean
        blocks = max(round(tokens / max_length + 0.5), 1) if packing else sum(-(-n // max_length) for n in lengths)
        sequences = int(blocks) if packing else max(round(rows * blocks / len(lengths)), 1)
        longest = math.ceil(min(max_length, tokens))
        return Workload(
            sequences=sequences,
            mean_tokens=min(max(tokens / sequences, 1.0), max_length),
            longest_tokens=max(longest, 1),
            trained_share=trained,
        )
    cut = [min(length, max_length) for length in lengths]
    return Workload(
        sequences=rows,
        mean_tokens=sum(cut) / len(cut),
        longest_tokens=max(math.ceil(max(cut)), 1),
        trained_share=trained,
    )


def _measured_lengths(survey: Survey, measured: Sequence[int]) -> list[float]:
    """The measured lengths in order. Of rows that were not measured only the longest counts, reckoned from its bytes:
    memory is needed for the longest."""
    if not measured:
        return []
    lengths = sorted(float(length) for length in measured)
    if len(lengths) < survey.rows:
        longest = survey.row_bytes[-1] * sum(lengths) / max(survey.text_bytes / survey.rows * len(lengths), 1)
        # One row in the place of the sample's longest moves the mean little where there are many.
        lengths[-1] = max(lengths[-1], longest) if len(lengths) >= 100 else lengths[-1]
    return lengths


def bad_row_list(found: Survey) -> list[dict[str, Any]]:
    """File, line, column and reason of the listed rows that cannot be read, then of those that are left out."""
    unreadable: list[dict[str, Any]] = [
        {"file": bad.path.name, "line": bad.line, "column": bad.column, "reason": bad.reason} for bad in found.bad
    ]
    left_out = [
        {"file": name, "line": line, "column": None, "reason": reason} for name, line, reason in found.dropped_rows
    ]
    return unreadable + left_out
