"""The first rows of a data set as a model sees them, soon: python -m vramfit.data.sample --cache FOLDER < config.json.

For the panel, which never loads a tokenizer itself: it hands a RunConfig to this process and reads one line of JSON.
The first rows stand for all of them; where all rows were read, `whole` is true and the numbers are exact.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np

from vramfit.config import DataChoice, RunConfig
from vramfit.data.conversations import Encoder, Example
from vramfit.data.prepare import data_paths
from vramfit.data.read import ReadOptions, open_sources, source_rows
from vramfit.data.rows import Row
from vramfit.data.shapes import Conversation, Document, Dropped
from vramfit.errors import VramfitError

SAMPLE_ROWS: Final = 1000
SAMPLE_SECONDS: Final = 3.0
LONGEST_CHARS: Final = 200_000
"""A document is encoded up to here; its length is then reckoned from the part."""
SHOWN_ROWS: Final = 12
SHOWN_TOKENS: Final = 600
_BATCH: Final = 50

Content = Conversation | Document


def sample_rows(
    choice: DataChoice, *, tokenizer: Any, cache: Path, rows: int = SAMPLE_ROWS, seconds: float = SAMPLE_SECONDS
) -> dict[str, Any]:
    """Token counts of the first `rows` usable rows (an equal share of each file), or of those done in `seconds`.

    `lengths` are tokens per row before any cutting; `trained` lists per row where learned tokens begin and end, in
    turns; `examples` are the first rows as pieces [text, learned 0/1, tokens]. Raises DataError.
    """
    sources = open_sources(data_paths(choice, cache), ReadOptions.of(choice))
    encoder = Encoder(
        tokenizer, trained_on=choice.trained_on, conversations=any(s.shape.kind != "text" for s in sources)
    )
    share, until, whole = max(rows // len(sources), 1), time.monotonic() + seconds, len(sources) <= rows
    lengths: list[int] = []
    trained: list[list[int]] = []
    examples: list[dict[str, Any]] = []
    for source in sources[:rows]:
        contents = _usable(source)
        taken = 0
        while taken < share and (time.monotonic() < until or not lengths):
            batch = list(islice(contents, min(_BATCH, share - taken)))
            if not batch:
                break
            taken += len(batch)
            shortened = [_shortened(content) for _, content in batch]
            whole = whole and all(scale == 1 for _, scale in shortened)
            results = encoder.encode([(index, content) for index, (content, _) in enumerate(shortened)])
            for (line, _), (_, scale), result in zip(batch, shortened, results, strict=True):
                if isinstance(result, Dropped):
                    continue
                lengths.append(round(len(result) * scale))
                trained.append(_edges(result, lengths[-1]))
                if len(examples) < SHOWN_ROWS:
                    examples.append(_shown(result, tokenizer, file=source.path.name, line=line))
        whole = whole and next(contents, None) is None
    return {
        "rows": len(lengths),
        "whole": whole,
        "lengths": lengths,
        "trained": trained,
        "notes": encoder.notes(),
        "examples": examples,
    }


def _usable(source: Any) -> Iterator[tuple[int, Content]]:
    """Line and content of every row that can be read and used."""
    for item in source_rows(source):
        if isinstance(item, Row):
            content = source.shape.convert(item)
            if not isinstance(content, Dropped):
                yield item.line, content


def _shortened(content: Content) -> tuple[Content, float]:
    """The content, a very long document only its beginning, and how many times longer the whole is."""
    if isinstance(content, Document) and len(content.text) > LONGEST_CHARS:
        return replace(content, text=content.text[:LONGEST_CHARS]), len(content.text) / LONGEST_CHARS
    return content, 1.0


def _edges(example: Example, length: int) -> list[int]:
    """Where runs of learned tokens begin and end, in turns; what was not encoded goes on as its beginning ended."""
    flags = np.concatenate([[False], example.trained, [False]])
    edges: list[int] = np.flatnonzero(flags[1:] != flags[:-1]).tolist()
    if edges and length != len(example) and edges[-1] == len(example):
        edges[-1] = length
    return edges


def _shown(example: Example, tokenizer: Any, *, file: str, line: int) -> dict[str, Any]:
    ids, flags = example.input_ids[:SHOWN_TOKENS].tolist(), example.trained[:SHOWN_TOKENS].tolist()
    return {"file": file, "line": line, "tokens": len(example), "pieces": pieces(ids, flags, tokenizer)}


def pieces(ids: list[int], learned: list[bool], tokenizer: Any) -> list[tuple[str, int, int]]:
    """(text, learned, tokens) for each token; tokens that only together make a character are one piece.

    Each is decoded behind the piece before it, because some tokenizers drop the space in front of a first word.
    """
    decode = _decoder(tokenizer)
    found: list[tuple[str, int, int]] = []
    before: list[int] = []
    waiting: list[int] = []
    for index, token in enumerate(ids):
        waiting.append(token)
        ahead = decode(before)
        text = decode([*before, *waiting])[len(ahead) :]
        last = index + 1 == len(ids) or learned[index + 1] != learned[index]
        if text.endswith("\ufffd") and not last and len(waiting) < 8:
            continue
        found.append((text, int(learned[index]), len(waiting)))
        before, waiting = waiting, []
    return found


def _decoder(tokenizer: Any) -> Any:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return lambda ids: tokenizer.decode(ids) if ids else ""
    return lambda ids: backend.decode(ids, skip_special_tokens=False) if ids else ""


def answer(text: str, cache: Path) -> dict[str, Any]:
    """{"sample": ...} for a RunConfig as JSON, or {"error": {kind, what, remedy}}."""
    try:
        config = RunConfig.from_json(text)
        from vramfit.models.load import load_tokenizer

        tokenizer = load_tokenizer(config.model, cache)
        return {"sample": sample_rows(config.data, tokenizer=tokenizer, cache=cache)}
    except VramfitError as error:
        return {"error": {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}}


def main() -> None:
    """Read a config from standard input, write the answer as the last line of standard output."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, required=True)
    options = parser.parse_args()
    if hasattr(os, "nice"):
        os.nice(10)  # the panel reads the whole data set meanwhile, and a run may be at work
    found = answer(sys.stdin.buffer.read().decode("utf-8"), options.cache)
    sys.stdout.write("\n" + json.dumps(found, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
