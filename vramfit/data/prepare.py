"""From a DataChoice to sequences ready for training: read, encode, fit to the maximum length, hold out, pack.

Every row is accounted for: it becomes sequences, or is counted under the reason why not. The result is cached on disk
(see cache.py), so the same data with the same tokenizer and settings is tokenised once.
"""

from __future__ import annotations

import gc
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from vramfit.config import STARTER_QUESTIONS, STARTER_STORIES, DataChoice
from vramfit.data import cache as disk
from vramfit.data.conversations import Content, Encoder, Example, RenderedBatch
from vramfit.data.packing import pack
from vramfit.data.pipeline import pipelined
from vramfit.data.read import (
    ReadOptions,
    Source,
    Survey,
    content_hash,
    open_sources,
    packs_by_itself,
    source_rows,
    survey_sources,
)
from vramfit.data.report import LengthSummary, Report, check_dropped, survey_from_json, survey_to_json
from vramfit.data.rows import BadRow, Row
from vramfit.data.shapes import Document, Dropped
from vramfit.data.sources import check_unchanged
from vramfit.errors import DataError
from vramfit.places import typed_path
from vramfit.planning.plan import Workload

BATCH_ROWS: Final = 250
BATCH_CHARS: Final = 4_000_000
"""About a million tokens, each of some 150 bytes before it is a number. Four batches are at work at once."""
DROPPED_SHARE_TO_WARN: Final = 0.1
LISTED_DROPPED: Final = 20
LISTED_REASONS: Final = 5

Progress = Callable[[float, float], None]


@dataclass(frozen=True, kw_only=True)
class PreparedData:
    """Sequences to train on and to evaluate on, and everything that was found and decided on the way.

    `pad_id` fills the right of a batch; it is never trained, also where it is the end token. `fingerprint` is a hash
    of all token ids and masks: equal fingerprints train the same thing. `workload` is exact.
    """

    train: list[Example]
    held_out: list[Example]
    survey: Survey
    report: Report
    pad_id: int
    fingerprint: str

    @property
    def workload(self) -> Workload:
        lengths = [len(example) for example in self.train]
        total = sum(lengths)
        return Workload(
            sequences=len(lengths),
            mean_tokens=total / len(lengths),
            longest_tokens=max(lengths),
            trained_share=sum(example.trained_tokens for example in self.train) / total,
            packed=self.report.packed,
            exact=True,
        )


def prepare(
    choice: DataChoice,
    *,
    tokenizer: Any,
    max_length: int,
    seed: int,
    cache: Path,
    progress: Progress = lambda _done, _total: None,
) -> PreparedData:
    """Read, tokenise, hold out and pack what `choice` names. Raises DataError with the reason when nothing is left, and
    TooManyDropped when more is left out than was agreed to.

    `progress(done, total)` counts rows; the total is 0 until the first pass has counted them. A tokenizer without
    chat template is given the default one when it is needed.
    """
    started = time.perf_counter()
    options = ReadOptions.of(choice)
    sources = open_sources(data_paths(choice, cache), options)
    encoder = Encoder(
        tokenizer, trained_on=choice.trained_on, conversations=any(s.shape.kind != "text" for s in sources)
    )
    key = disk.cache_key(_deciding(choice, sources, tokenizer, max_length, seed))
    stored = disk.load(cache, key)
    if stored is not None:
        progress(1, 1)
        groups, facts = stored
        prepared = _from_cache(groups, facts, tokenizer, sources, time.perf_counter() - started)
        # A changed or damaged entry whose arrays still fit each other must not train something else.
        if _fingerprint(prepared.train, prepared.held_out) == prepared.fingerprint:
            check_dropped(prepared.report.dropped, rows=prepared.report.rows, choice=choice)
            return prepared
    progress(0, 0)
    found = survey_sources(sources)
    if found.bad and (refused := options.refusal(found.bad_rows, found.bad[0])) is not None:
        raise refused
    check_dropped(found.dropped, rows=found.rows + sum(found.dropped.values()), choice=choice)
    work = _Preparation(choice, encoder, max_length, seed, found)
    work.read(sources, progress)
    for source in sources:  # or another content would be kept under this content's hash
        check_unchanged(source.scan)
    prepared = work.finish(tokenizer, started)
    facts = {"survey": survey_to_json(found), "report": prepared.report.to_json(), "print": prepared.fingerprint}
    try:
        disk.store(cache, key, [prepared.train, prepared.held_out], facts)
    except OSError as error:
        note = f"The tokenised data could not be kept for the next run: {error.strerror or error}."
        prepared.report.notes.append(note)
    # After it was kept: who agrees and starts again does not wait again.
    check_dropped(prepared.report.dropped, rows=prepared.report.rows, choice=choice)
    return prepared


def data_paths(choice: DataChoice, cache: Path) -> list[Path]:
    """The files named; the starter's data sets are written first where they are not there yet."""
    paths = []
    for path in choice.paths:
        if path in (STARTER_STORIES, STARTER_QUESTIONS):
            from vramfit.starter.corpus import write_corpus

            paths.append(write_corpus(path, cache))
        else:
            paths.append(typed_path(path))
    return paths


def _deciding(choice: DataChoice, sources: list[Source], tokenizer: Any, max_length: int, seed: int) -> dict[str, Any]:
    """Everything that decides the result, for the cache's key."""
    import tokenizers

    return {
        "data": content_hash(sources),
        "layouts": [(s.layout.format, s.layout.codec, s.layout.delimiter, s.layout.split) for s in sources],
        "shapes": [(s.shape.kind, sorted(s.shape.columns.items())) for s in sources],
        "tokenizer": disk.tokenizer_hash(tokenizer),
        "tokenizers": tokenizers.__version__,
        "settings": choice.model_dump(mode="json", exclude={"paths", "max_length", "most_dropped_share"}),
        "max_length": max_length,
        "seed": seed,
        "names": [source.path.name for source in sources],
    }


def _from_cache(
    groups: list[list[Example]], facts: dict[str, Any], tokenizer: Any, sources: list[Source], seconds: float
) -> PreparedData:
    report = Report.from_json({**facts["report"], "from_cache": True, "seconds": seconds})
    return PreparedData(
        train=groups[0],
        held_out=groups[1],
        survey=_lying_at(survey_from_json(facts["survey"]), [source.path for source in sources]),
        report=report,
        pad_id=pad_id(tokenizer),
        fingerprint=facts["print"],
    )


def _lying_at(found: Survey, paths: list[Path]) -> Survey:
    """A survey of the same files where they lie now: they may have been copied or moved since it was kept."""
    now = dict(zip(found.files, paths, strict=True))
    bad = tuple(replace(row, path=now[str(row.path)]) for row in found.bad)
    return replace(found, files=tuple(map(str, paths)), bad=bad)


def pad_id(tokenizer: Any) -> int:
    """An id to fill batches with: the pad token, else the end token, else 0. It carries no loss and is never seen."""
    for found in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        if found is not None:
            return int(found)
    return 0


@dataclass(frozen=True)
class _Batch:
    """Rows of one source, in order, and what they hold; `spread` is whether its documents are spread over sequences."""

    spread: bool
    rows: list[Row] = field(default_factory=list)
    contents: list[tuple[int, Content]] = field(default_factory=list)
    dropped: list[tuple[Row, str]] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.rows) + len(self.dropped)


def _batches(sources: list[Source]) -> Iterator[_Batch]:
    """Every row that can be read, numbered through all sources."""
    numbers = itertools.count()
    for source in sources:
        spread = source.layout.format == "text"
        batch, chars = _Batch(spread), 0
        for row in source_rows(source):
            if isinstance(row, BadRow):
                continue
            number, content = next(numbers), source.shape.convert(row)
            if isinstance(content, Dropped):
                batch.dropped.append((row, content.reason))
            else:
                batch.rows.append(row)
                batch.contents.append((number, content))
                chars += _chars(content)
            if len(batch) >= BATCH_ROWS or chars >= BATCH_CHARS:
                yield batch
                batch, chars = _Batch(spread), 0
        if len(batch):
            yield batch


def _chars(content: Content) -> int:
    return len(content.text) if isinstance(content, Document) else sum(len(turn.text) for turn in content.turns)


@contextmanager
def _objects_left_alone() -> Iterator[None]:
    """Python's collector looks through all objects again and again while rows are made. The imported libraries' 220,000
    cost a tenth of the whole time and are never free."""
    if gc.get_freeze_count():  # someone else's
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class _Preparation:
    """One pass over the rows, and the counts it makes."""

    choice: DataChoice
    encoder: Encoder
    max_length: int
    seed: int
    found: Survey
    examples: list[Example] = field(default_factory=list)
    digests: list[tuple[bytes, int]] = field(default_factory=list)  # per row kept: its content's digest, its sequences
    lengths: list[int] = field(default_factory=list)
    dropped: Counter[str] = field(default_factory=Counter)
    dropped_rows: list[tuple[str, int, str]] = field(default_factory=list)
    truncated: int = 0
    split: int = 0
    tokens_lost: int = 0
    untrained_pieces: int = 0

    def read(self, sources: list[Source], progress: Progress) -> None:
        """Encode every usable row in batches."""
        total = self.found.rows + sum(self.found.dropped.values())
        done = 0
        progress(0, total)
        with _objects_left_alone():
            for batch, results in pipelined(_batches(sources), self._render, self._tokenise):
                self._take(batch, results)
                done += len(batch)
                progress(min(done, total), total)

    def _render(self, batch: _Batch) -> tuple[_Batch, RenderedBatch]:
        return batch, self.encoder.render(batch.contents)

    def _tokenise(self, rendered: tuple[_Batch, RenderedBatch]) -> tuple[_Batch, list[Example | Dropped]]:
        return rendered[0], self.encoder.tokenise(rendered[1])

    def _take(self, batch: _Batch, results: list[Example | Dropped]) -> None:
        for row, reason in batch.dropped:
            self._drop(row, reason)
        for row, result in zip(batch.rows, results, strict=True):
            if isinstance(result, Dropped):
                self._drop(row, result.reason)
            else:
                self._keep(row, result, spread=batch.spread)

    def _drop(self, row: Row, reason: str) -> None:
        self.dropped[reason] += 1
        if len(self.dropped_rows) < LISTED_DROPPED:
            self.dropped_rows.append((row.path.name, row.line, reason))

    def _keep(self, row: Row, example: Example, *, spread: bool) -> None:
        """Fit one row to the maximum length. A text file's documents are spread over sequences: cutting them would
        lose nearly all of a book."""
        self.lengths.append(len(example))
        if not example.trained_tokens:
            return self._drop(row, "no token of it is to be learned")
        how = "split" if spread and self.choice.too_long == "cut" else self.choice.too_long
        pieces = [example]
        if len(example) > self.max_length:
            if how == "drop":
                return self._drop(row, f"it is longer than {self.max_length:,} tokens")
            pieces = _pieces(example, self.max_length)
            self.truncated += how == "cut"
            self.split += how == "split"
            if how == "cut":
                self.tokens_lost += sum(len(piece) for piece in pieces[1:])
                pieces = pieces[:1]
        kept = [piece for piece in pieces if piece.trained_tokens]
        if not kept:
            return self._drop(
                row, f"what is to be learned lies beyond the maximum length of {self.max_length:,} tokens"
            )
        self.untrained_pieces += len(pieces) - len(kept)
        self.examples += kept
        digest = hashlib.blake2b(example.input_ids.tobytes(), digest_size=16, key=self.seed.to_bytes(8, "little"))
        self.digests.append((digest.digest(), len(kept)))
        return None

    def finish(self, tokenizer: Any, started: float) -> PreparedData:
        """Hold out, pack and report. Raises DataError when no row is left."""
        if not self.examples:
            self._refuse()
        train, held_out = self._hold_out()
        sequences = len(train) + len(held_out)
        packing = self._packs()
        if packing:
            train, held_out = pack(train, self.max_length), pack(held_out, self.max_length)
        report = self._report(train, held_out, sequences=sequences, packing=packing)
        report.seconds = time.perf_counter() - started
        return PreparedData(
            train=train,
            held_out=held_out,
            survey=self.found,
            report=report,
            pad_id=pad_id(tokenizer),
            fingerprint=_fingerprint(train, held_out),
        )

    def _refuse(self) -> None:
        reasons = "; ".join(f"{count:,} rows: {reason}" for reason, count in self.dropped.most_common(3))
        raise DataError(
            f"No row is left to train on ({reasons or 'the data holds none'})",
            "Raise the maximum length, choose what is trained on, or correct the data.",
        )

    def _hold_out(self) -> tuple[list[Example], list[Example]]:
        """Rows for evaluation, chosen by a keyed hash of their tokens: equal rows always fall on the same side, and
        the choice depends on nothing but the seed and the rows."""
        rows = len(self.digests)
        wanted = 0 if not self.choice.eval_share else max(round(self.choice.eval_share * rows), 1)
        chosen = self._chosen(min(wanted, rows - 1)) if wanted and rows > 1 else set()
        train: list[Example] = []
        held_out: list[Example] = []
        at = 0
        for digest, count in self.digests:
            (held_out if digest in chosen else train).extend(self.examples[at : at + count])
            at += count
        return train, held_out

    def _chosen(self, wanted: int) -> set[bytes]:
        """Digests whose rows together are as near to `wanted` as whole groups of equal rows allow, never all rows."""
        groups = Counter(digest for digest, _ in self.digests)
        chosen: set[bytes] = set()
        taken = 0
        for digest in sorted(groups):
            if taken >= wanted:
                break
            if taken + groups[digest] <= max(2 * wanted, 1) and taken + groups[digest] < len(self.digests):
                chosen.add(digest)
                taken += groups[digest]
        return chosen

    def _packs(self) -> bool:
        """Whether to pack. "auto" packs documents that would leave most of a sequence empty, and no conversations.

        Five conversations in one sequence make a step five times as many rows: a small set then trains for a handful
        of steps. What packing would save is the padding that is left after grouping a step by length: 6 % of the
        tokens at 2 sequences per micro-batch, 18 % at 4, 36 % at 8 (alpaca_en, steps of 16, SmolLM2's tokenizer); on
        a CPU the mask costs as much at 1,024 tokens.
        """
        if self.choice.packing != "auto":
            return bool(self.choice.packing)
        return packs_by_itself(self.found, float(np.median(self.lengths)), self.max_length)

    def _report(self, train: list[Example], held_out: list[Example], *, sequences: int, packing: bool) -> Report:
        tokens = sum(len(example) for example in train)
        report = Report(
            rows=self.found.rows + sum(self.found.dropped.values()),
            rows_used=len(self.digests),
            bad_rows=self.found.bad_rows,
            dropped=dict(self.dropped.most_common()),
            dropped_rows=list(self.dropped_rows),
            max_length=self.max_length,
            row_tokens=LengthSummary.of(self.lengths),
            sequence_tokens=LengthSummary.of([len(example) for example in train]),
            truncated_rows=self.truncated,
            split_rows=self.split,
            truncated_share=self.truncated / len(self.lengths),
            tokens_lost=self.tokens_lost,
            sequences_before_packing=sequences,
            packed=packing,
            train_sequences=len(train),
            held_out_sequences=len(held_out),
            held_out_rows=len({row for example in held_out for row in (example.rows or (example.row,))}),
            tokens=tokens,
            trained_tokens=sum(example.trained_tokens for example in train),
            block_fill=tokens / (len(train) * self.max_length),
            default_template=self.encoder.used_default,
            notes=self.encoder.notes(),
        )
        report.notes += self._warnings(report)
        return report

    def _warnings(self, report: Report) -> Iterator[str]:
        if self.found.documents and self.choice.trained_on in ("assistant", "last"):
            yield "Plain text has no assistant turns, so all of it is learned."
        if report.dropped_share > DROPPED_SHARE_TO_WARN:
            yield f"{report.dropped_share:.0%} of the rows are not used; look at the reasons before you start."
        for reason, count in self.dropped.most_common(LISTED_REASONS):
            if reason not in self.found.dropped:  # these the survey tells
                yield f"{count:,} of {report.rows:,} rows are left out: {reason}."
        if report.truncated_rows:
            yield (
                f"{report.truncated_rows:,} rows ({report.truncated_share:.0%}) are longer than {self.max_length:,} "
                f"tokens and were cut; {report.tokens_lost:,} tokens are lost."
            )
        if report.split_rows:
            yield f"{report.split_rows:,} rows are longer than {self.max_length:,} tokens and were split."
        if self.untrained_pieces:
            yield f"{self.untrained_pieces:,} pieces of split rows hold nothing to learn and were left out."
        if report.packed:
            yield (
                f"{report.rows_used:,} rows were packed into {report.train_sequences + report.held_out_sequences:,} "
                f"sequences of at most {self.max_length:,} tokens."
            )
        if self.choice.eval_share and not report.held_out_sequences:
            yield (
                f"A held-out share of {self.choice.eval_share:.0%} of {report.rows_used:,} rows is empty, "
                "so there will be no evaluation."
            )


def _pieces(example: Example, size: int) -> list[Example]:
    """The example in consecutive pieces of at most `size` tokens; the first token of a piece is not trained.

    The first token of every later piece is so never learned, one in `size`: nothing before it is in its piece.
    """
    pieces = []
    for at in range(0, len(example), size):
        trained = example.trained[at : at + size].copy()
        trained[0] = False
        weights = None if example.weights is None else example.weights[at : at + size] * trained
        pieces.append(Example(example.input_ids[at : at + size], trained, example.row, weights=weights))
    return pieces


def _fingerprint(train: list[Example], held_out: list[Example]) -> str:
    digest = hashlib.sha256()
    for group in (train, held_out):
        digest.update(len(group).to_bytes(8, "little"))
        for example in group:
            digest.update(len(example).to_bytes(8, "little"))
            digest.update(example.input_ids.tobytes())
            digest.update(example.trained.tobytes())
            if example.weights is not None:
                digest.update(example.weights.tobytes())
            digest.update(repr(example.parts).encode())
    return digest.hexdigest()
