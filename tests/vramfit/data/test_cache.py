from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vramfit.data import cache
from vramfit.data.conversations import Example


def examples() -> list[list[Example]]:
    first = Example(np.arange(5, dtype=np.int32), np.array([False, True, False, True, True]), 3)
    packed = Example(np.arange(4, dtype=np.int32), np.array([False, True, False, True]), 1, (2, 2), (1, 2))
    weights = np.array([0, 0.5, 0, 2], dtype=np.float32)
    weighted = Example(np.arange(4, dtype=np.int32), weights > 0, 4, weights=weights)
    return [[first, packed, weighted], [Example(np.array([9], dtype=np.int32), np.array([False]), 0), weighted]]


def same(one: Example, other: Example) -> bool:
    return (
        np.array_equal(one.input_ids, other.input_ids)
        and np.array_equal(one.trained, other.trained)
        and (one.weights is None) == (other.weights is None)
        and np.array_equal(one.token_weights(), other.token_weights())
        and (one.row, one.parts, one.rows) == (other.row, other.parts, other.rows)
    )


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    cache.store(tmp_path, "k", examples(), {"a": "é"})
    found = cache.load(tmp_path, "k")
    assert found is not None
    groups, facts = found
    assert facts == {"a": "é"}
    assert [len(group) for group in groups] == [3, 2]
    for mine, theirs in zip(examples(), groups, strict=True):
        assert all(same(one, other) for one, other in zip(mine, theirs, strict=True))
    assert [path.name for path in (tmp_path / "tokenised").iterdir()] == ["k"]


def test_nothing_and_empty_groups(tmp_path: Path) -> None:
    assert cache.load(tmp_path, "none") is None
    cache.store(tmp_path, "k", [[], []], {})
    found = cache.load(tmp_path, "k")
    assert found is not None
    assert found[0] == [[], []]


@pytest.mark.parametrize("name", ["facts.json", "input_ids.npy", "lengths.npy", "parts.npy", "weights.npy"])
@pytest.mark.parametrize("damage", ["gone", "short", "noise"])
def test_a_damaged_entry_is_no_entry_and_is_replaced(tmp_path: Path, name: str, damage: str) -> None:
    cache.store(tmp_path, "k", examples(), {})
    path = tmp_path / "tokenised" / "k" / name
    content = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(content[:-3] if damage == "short" else b"noise")
    assert cache.load(tmp_path, "k") is None
    cache.store(tmp_path, "k", examples(), {})
    assert cache.load(tmp_path, "k") is not None


def test_a_pickle_is_never_opened(tmp_path: Path) -> None:
    cache.store(tmp_path, "k", examples(), {})
    np.save(tmp_path / "tokenised" / "k" / "input_ids.npy", np.array([print], dtype=object), allow_pickle=True)
    assert cache.load(tmp_path, "k") is None


def test_only_the_newest_entries_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "KEPT_ENTRIES", 2)
    for name in "abcd":
        cache.store(tmp_path, name, examples(), {})
    assert len(list((tmp_path / "tokenised").iterdir())) == 2
    assert cache.load(tmp_path, "d") is not None


def test_the_key_depends_on_everything(make_tokenizer: Any) -> None:
    assert cache.cache_key({"a": 1}) == cache.cache_key({"a": 1})
    assert cache.cache_key({"a": 1}) != cache.cache_key({"a": 2})
    plain = make_tokenizer()
    others = [make_tokenizer(template="{{ messages }}"), make_tokenizer(bos="<s>"), make_tokenizer(eos="</s>")]
    assert len({cache.tokenizer_hash(tokenizer) for tokenizer in (plain, *others)}) == 4
    before = cache.tokenizer_hash(plain)
    plain("hello", truncation=True, max_length=1)
    assert cache.tokenizer_hash(plain) == before
