"""What was found and decided, in numbers: for the page, for `python -m vramfit data`, for the run's log."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from vramfit.config import DataChoice, ModelChoice
from vramfit.data.read import ReadOptions, Survey, bad_row_list, open_sources, source_rows, survey
from vramfit.data.rows import BadRow, Row
from vramfit.data.shapes import Document, Dropped
from vramfit.errors import DataError

if TYPE_CHECKING:
    from vramfit.data.prepare import PreparedData

SHOWN_EXAMPLES: Final = 3
SHOWN_CHARS: Final = 20_000
DEFAULT_MAX_LENGTH: Final = 2048


class TooManyDropped(DataError):
    """More of the rows would be left out than somebody agreed to: `count` of `rows`. `agreed` is the share to set where
    that is meant."""

    def __init__(self, dropped: Mapping[str, int], *, rows: int, limit: float, about: bool = False) -> None:
        self.count, self.rows = sum(dropped.values()), rows
        self.agreed = agreed_share(self.count / rows)
        reasons = sorted(dropped.items(), key=lambda item: -item[1])
        shown = "; ".join(f"{count:,} rows: {reason}" for reason, count in reasons[:3])
        super().__init__(
            f"{'About ' if about else ''}{self.count:,} of {rows:,} rows ({self.count / rows:.1%}) would be left out, "
            f"the most without asking is {limit:.0%} ({shown})",
            "Correct the data, raise the maximum length, or agree to train on the rest: set "
            f"most_dropped_share to {self.agreed:g}.",
        )


def agreed_share(share: float) -> float:
    """What to allow, by someone who agrees to leave out this share: a little more, since the page may have counted only
    a part of the rows; far more than that is to be asked about again."""
    return min(math.ceil(share * 20 + 1) / 20, 1.0)


def check_dropped(dropped: Mapping[str, int], *, rows: int, choice: DataChoice, about: bool = False) -> None:
    """Raises TooManyDropped when more than `choice.most_dropped_share` of `rows` are `dropped`, counted by reason."""
    if sum(dropped.values()) > choice.most_dropped_share * rows:
        raise TooManyDropped(dropped, rows=rows, limit=choice.most_dropped_share, about=about)


@dataclass(frozen=True, kw_only=True)
class LengthSummary:
    """Tokens of rows or sequences: the least, the middle, what nine in ten do not exceed, the most."""

    min: int
    median: int
    p90: int
    max: int

    @classmethod
    def of(cls, lengths: Sequence[int]) -> LengthSummary:
        ordered = sorted(lengths)
        last = len(ordered) - 1
        return cls(
            min=ordered[0], median=ordered[last // 2], p90=ordered[min(-(-9 * last // 10), last)], max=ordered[last]
        )


@dataclass(kw_only=True)
class Report:
    """Where every row went. Shares are 0..1.

    `rows` could be read; `rows_used` became sequences, `dropped` counts the others by reason. `row_tokens` are before,
    `sequence_tokens` after cutting and packing. `tokens` and `trained_tokens` are of the training sequences, the
    held-out ones excluded. `block_fill` is the share of `max_length` that a sequence fills.
    """

    rows: int
    rows_used: int
    bad_rows: int
    dropped: dict[str, int]
    dropped_rows: list[tuple[str, int, str]]
    max_length: int
    row_tokens: LengthSummary
    sequence_tokens: LengthSummary
    truncated_rows: int
    split_rows: int
    truncated_share: float
    tokens_lost: int
    sequences_before_packing: int
    packed: bool
    train_sequences: int
    held_out_sequences: int
    held_out_rows: int
    tokens: int
    trained_tokens: int
    block_fill: float
    default_template: bool
    notes: list[str] = field(default_factory=list)
    from_cache: bool = False
    seconds: float = 0.0

    @property
    def dropped_share(self) -> float:
        return sum(self.dropped.values()) / max(self.rows, 1)

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Report:
        """The inverse of `to_json`, also after a trip through JSON text."""
        lengths = {name: LengthSummary(**values[name]) for name in ("row_tokens", "sequence_tokens")}
        rows = [(name, line, reason) for name, line, reason in values["dropped_rows"]]
        return cls(**{**values, **lengths, "dropped_rows": rows})


def survey_to_json(found: Survey) -> dict[str, Any]:
    """Plain values for the cache and `--json`."""
    values = {entry.name: getattr(found, entry.name) for entry in dataclasses.fields(found)}
    bad = [[str(row.path), row.line, row.column, row.reason] for row in found.bad]
    return {**values, "bad": bad}


def survey_from_json(values: dict[str, Any]) -> Survey:
    """The inverse of `survey_to_json`, also after a trip through JSON text."""
    bad = tuple(BadRow(Path(path), line, column, reason) for path, line, column, reason in values["bad"])
    dropped = tuple((name, line, reason) for name, line, reason in values["dropped_rows"])
    tuples = {name: tuple(values[name]) for name in ("files", "row_bytes", "warnings")}
    return Survey(**{**values, **tuples, "bad": bad, "dropped_rows": dropped})


def example_views(prepared: PreparedData, tokenizer: Any, count: int = SHOWN_EXAMPLES) -> list[dict[str, Any]]:
    """The first training sequences as the model sees them: text, token ids, and per token 1 where it is learned;
    where answers have weights, each token's."""
    return [
        {
            "row": example.row,
            "text": tokenizer.decode(example.input_ids.tolist()),
            "token_ids": example.input_ids.tolist(),
            "mask": [int(flag) for flag in example.trained],
            **({} if example.weights is None else {"weights": example.weights.tolist()}),
        }
        for example in prepared.train[:count]
    ]


def data_report(choice: DataChoice, *, model: ModelChoice | None, cache: Path, seed: int = 42) -> dict[str, Any]:
    """`report_json` for a model by name: its tokenizer is loaded when one is given. Raises DataError, ModelError."""
    tokenizer = None
    if model is not None:
        from vramfit.models.tokenizer import load_tokenizer

        tokenizer = load_tokenizer(model, cache)
    limit = None if choice.max_length == "auto" else choice.max_length
    return report_json(choice, cache=cache, tokenizer=tokenizer, max_length=limit, seed=seed)


def report_json(
    choice: DataChoice, *, cache: Path, tokenizer: Any = None, max_length: int | None = None, seed: int = 42
) -> dict[str, Any]:
    """What `python -m vramfit data --json` prints: what was recognised, and with a tokenizer what will be trained.

    Without a tokenizer everything about tokens is None and the examples hold text only. Bad rows are listed, never a
    reason to stop. Raises DataError when the data cannot be used.
    """
    if tokenizer is None:
        from vramfit.data.prepare import data_paths

        paths, options = data_paths(choice, cache), ReadOptions.of(choice)
        found = survey(paths, options)
        return {**_survey_part(found), **_no_tokens(), "examples": _text_examples(paths, options)}
    from vramfit.data.prepare import prepare

    # The whole data set is looked at: nothing is held out, nothing stops at a bad row.
    everything = {"bad_rows": "skip", "most_bad_rows": None, "most_dropped_share": 1.0, "eval_share": 0.0}
    lenient = choice.model_copy(update=everything)
    prepared = prepare(
        lenient, tokenizer=tokenizer, max_length=max_length or DEFAULT_MAX_LENGTH, seed=seed, cache=cache
    )
    report = prepared.report
    values = _survey_part(prepared.survey)
    values["dropped"] = report.dropped
    values["warnings"] = list(dict.fromkeys([*prepared.survey.warnings, *report.notes]))
    return {
        **values,
        "tokens": dataclasses.asdict(report.row_tokens),
        "truncated_share": report.truncated_share,
        "trained_tokens": report.trained_tokens,
        "max_length": report.max_length,
        "rows_used": report.rows_used,
        "sequences": report.train_sequences,
        "packed": report.packed,
        "default_template": report.default_template,
        "examples": example_views(prepared, tokenizer),
    }


def _survey_part(found: Survey) -> dict[str, Any]:
    return {
        "files": list(found.files),
        "format": found.format,
        "encoding": found.encoding,
        "shape": found.shape,
        "columns": found.columns,
        "rows": found.rows,
        "readable_rows": found.rows + sum(found.dropped.values()),
        "bad_rows": bad_row_list(found),
        "bad_row_count": found.bad_rows,
        "dropped": found.dropped,
        "roles": found.roles,
        "bytes": found.bytes,
        "duplicates": found.duplicates,
        "content_hash": found.content_hash,
        "warnings": list(found.warnings),
    }


def _no_tokens() -> dict[str, Any]:
    return {"tokens": None, "truncated_share": None, "trained_tokens": None}


def _text_examples(paths: Sequence[Path], options: ReadOptions) -> list[dict[str, Any]]:
    """The first usable rows as text, before any template."""
    source = open_sources(paths, options)[0]
    shown: list[dict[str, Any]] = []
    for item in source_rows(source):
        content = source.shape.convert(item) if isinstance(item, Row) else Dropped("")
        if isinstance(content, Dropped):
            continue
        if isinstance(content, Document):
            text = content.text
        else:
            text = "\n\n".join(f"[{turn.role}] {turn.text or list(turn.calls)}" for turn in content.turns)
        shown.append({"row": len(shown), "text": text[:SHOWN_CHARS], "token_ids": None, "mask": None})
        if len(shown) == SHOWN_EXAMPLES:
            break
    return shown
