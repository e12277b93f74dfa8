"""Tokenised data on disk: flat NumPy arrays and a JSON file, under a name made of everything that decides them.

The name hashes the data's bytes, the tokenizer, the settings and this package's own source, so an edited file, another
template or a newer version can never be served from an old entry. Nothing is pickled.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Sequence
from functools import cache as remembered
from pathlib import Path
from typing import Any, Final

import numpy as np

from vramfit import scratch
from vramfit.data.conversations import Example
from vramfit.json_text import load_json

KEPT_ENTRIES: Final = 20
_FOLDER: Final = "tokenised"
_ARRAYS: Final = (
    "input_ids", "trained", "lengths", "rows", "part_counts", "parts", "part_rows", "weighted", "weights",
)  # fmt: skip


def cache_key(parts: dict[str, Any]) -> str:
    """A name for what `parts` (plain values) decide, together with this package's source."""
    text = json.dumps({"source": _source_hash(), **parts}, sort_keys=True, ensure_ascii=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:40]


def tokenizer_hash(tokenizer: Any) -> str:
    """A hash of all about a tokenizer that can change token ids: vocabulary, merges, special tokens, template."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is not None:
        backend.no_truncation()
        backend.no_padding()
        table = backend.to_str()
    else:
        table = json.dumps(sorted(tokenizer.get_vocab().items()))
    facts = [
        table,
        repr(tokenizer.chat_template),
        repr(tokenizer.special_tokens_map),
        repr(tokenizer("a")["input_ids"]),
    ]
    return hashlib.sha256("\0".join(facts).encode("utf-8", "surrogatepass")).hexdigest()


@remembered
def _source_hash() -> str:
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parent.glob("*")):
        if path.suffix in (".py", ".jinja"):
            digest.update(path.read_bytes())
    return digest.hexdigest()


def store(folder: Path, key: str, groups: Sequence[Sequence[Example]], facts: dict[str, Any]) -> None:
    """Write an entry; it appears whole or not at all. Raises OSError, which costs the caller only the reuse."""
    parent = folder / _FOLDER
    parent.mkdir(parents=True, exist_ok=True)
    unfinished = scratch.beside(parent / key)
    unfinished.mkdir()
    try:
        examples = [example for group in groups for example in group]
        for name, array in _arrays(examples).items():
            np.save(unfinished / f"{name}.npy", array, allow_pickle=False)
        values = {"groups": [len(group) for group in groups], "facts": facts}
        (unfinished / "facts.json").write_text(json.dumps(values, ensure_ascii=True), encoding="utf-8")
        shutil.rmtree(parent / key, ignore_errors=True)  # there is one only when it was found damaged
        with contextlib.suppress(FileExistsError):
            unfinished.rename(parent / key)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    _forget_old(parent)


def _arrays(examples: Sequence[Example]) -> dict[str, np.ndarray[Any, Any]]:
    """Tokens end to end, and per example: tokens, row, how many parts it has, and whether it has weights; parts and
    their rows end to end, and the weights of those that have them."""
    empty = np.zeros(0, dtype=np.int32)
    weights = [example.weights for example in examples if example.weights is not None]
    return {
        "input_ids": np.concatenate([empty, *(example.input_ids for example in examples)]),
        "trained": np.concatenate([empty.astype(np.bool_), *(example.trained for example in examples)]),
        "lengths": np.array([len(example) for example in examples], dtype=np.int64),
        "rows": np.array([example.row for example in examples], dtype=np.int64),
        "part_counts": np.array([len(example.parts) for example in examples], dtype=np.int64),
        "parts": np.array([part for example in examples for part in example.parts], dtype=np.int64),
        "part_rows": np.array([row for example in examples for row in example.rows], dtype=np.int64),
        "weighted": np.array([example.weights is not None for example in examples], dtype=np.bool_),
        "weights": np.concatenate([empty.astype(np.float32), *weights]),
    }


def load(folder: Path, key: str) -> tuple[list[list[Example]], dict[str, Any]] | None:
    """The entry's groups of examples and facts, or None when there is none or it is damaged. Token arrays are mapped
    from disk, not read."""
    entry = folder / _FOLDER / key
    try:
        values = load_json((entry / "facts.json").read_text(encoding="utf-8"))
        arrays = {name: np.load(entry / f"{name}.npy", mmap_mode="r", allow_pickle=False) for name in _ARRAYS}
        groups = _grouped(_examples({name: np.asarray(array) for name, array in arrays.items()}), values["groups"])
        os.utime(entry)
    except (OSError, ValueError, KeyError, TypeError, EOFError):
        return None
    return groups, values["facts"]


def _examples(arrays: dict[str, np.ndarray[Any, Any]]) -> list[Example]:
    """Raises ValueError when the arrays do not fit each other."""
    ends = np.cumsum(arrays["lengths"])
    part_ends = np.cumsum(arrays["part_counts"])
    weight_ends = np.cumsum(arrays["lengths"] * arrays["weighted"])
    total = int(ends[-1]) if len(ends) else 0
    parts_total = int(part_ends[-1]) if len(part_ends) else 0
    weights_total = int(weight_ends[-1]) if len(weight_ends) else 0
    fitting = total == len(arrays["input_ids"]) == len(arrays["trained"]) and weights_total == len(arrays["weights"])
    if not fitting or parts_total != len(arrays["parts"]):
        raise ValueError("the arrays of the cache entry do not fit each other")
    part_lists, row_lists = arrays["parts"].tolist(), arrays["part_rows"].tolist()
    ids, trained, weights = arrays["input_ids"], arrays["trained"], arrays["weights"]
    examples = []
    for row, end, length, part_end, count, weighted, weight_end in zip(
        arrays["rows"].tolist(), ends.tolist(), arrays["lengths"].tolist(), part_ends.tolist(),
        arrays["part_counts"].tolist(), arrays["weighted"].tolist(), weight_ends.tolist(), strict=True,
    ):  # fmt: skip
        places = slice(part_end - count, part_end)
        tokens = slice(end - length, end)
        shares = weights[weight_end - length : weight_end] if weighted else None
        parts, rows = tuple(part_lists[places]), tuple(row_lists[places])
        examples.append(Example(ids[tokens], trained[tokens], row, parts, rows, shares))
    return examples


def _grouped(examples: list[Example], counts: list[int]) -> list[list[Example]]:
    if sum(counts) != len(examples):
        raise ValueError("the cache entry's groups do not fit its examples")
    ends = np.cumsum(counts).tolist()
    return [examples[end - count : end] for end, count in zip(ends, counts, strict=True)]


def _forget_old(parent: Path) -> None:
    """Keep the newest entries. One in use elsewhere stays where the system says so (Windows)."""
    entries = [entry for entry in parent.iterdir() if entry.is_dir() and "unfinished-" not in entry.name]
    for entry in sorted(entries, key=lambda path: path.stat().st_mtime)[:-KEPT_ENTRIES]:
        shutil.rmtree(entry, ignore_errors=True)
