"""Places of tokens from their ids, against the ones the tokenizers library gives, for every kind it is used for."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from vramfit.data.byte_offsets import ByteOffsets, byte_spans
from vramfit.data.conversations import tokens_in_spans

WORDS = "the cat  ran home naïve 你好 世界 😀 e\u0301 12345 \n\n x\u3000y \u00a0 tab\t end"
CUTS = Regex(r"\p{N}{1,3}|[^\r\n\p{L}\p{N}]?\p{L}+| ?[^\s\p{L}\p{N}]+|\s+")


def byte_level(**changes: Any) -> Tokenizer:
    """A byte-level BPE tokenizer with parts of it exchanged."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<|end|>"], initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator([WORDS] * 3, trainer)
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def with_added(token: AddedToken) -> Tokenizer:
    made = byte_level()
    made.add_tokens([token])
    return made


KINDS = {
    "plain": byte_level(),
    "trimmed": byte_level(post_processor=processors.ByteLevel(trim_offsets=True)),
    "trimmed otherwise": byte_level(
        post_processor=processors.Sequence([processors.ByteLevel(trim_offsets=True, add_prefix_space=False)])
    ),
    "composed": byte_level(normalizer=normalizers.NFC()),
    "cut by a rule": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(CUTS, "isolated"),
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    ),
    "a rule that removes": byte_level(
        pre_tokenizer=pre_tokenizers.Sequence(
            [pre_tokenizers.Split("x", "removed"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    ),
    "added token that swallows spaces": with_added(AddedToken("<|gap|>", lstrip=True, rstrip=True)),
    "added token": with_added(AddedToken("你<|gap|>")),
}
PARTS = st.sampled_from([*WORDS.split(" "), " ", "  ", "<|end|>", "<|gap|>", "你<|gap|>", "\n", "x", "q"])


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(PARTS, max_size=12), places=st.lists(st.integers(0, 60), max_size=6))
@pytest.mark.parametrize("kind", KINDS)
def test_the_same_tokens_lie_in_the_same_spans(kind: str, parts: list[str], places: list[int]) -> None:
    tokenizer, text = KINDS[kind], "".join(parts)
    found = ByteOffsets.of(tokenizer)
    assert found is not None
    encoded = tokenizer.encode(text, add_special_tokens=False)
    offsets = found.find(np.array(encoded.ids, dtype=np.int32), text)
    if offsets is None:
        assert kind in ("trimmed", "trimmed otherwise", "composed", "a rule that removes") or "swallows" in kind
        return
    edges = sorted(min(place, len(text)) for place in places)
    spans = list(zip(edges[::2], edges[1::2], strict=False))
    expected = tokens_in_spans(np.array(encoded.offsets, dtype=np.int64).reshape(-1, 2), spans)
    assert tokens_in_spans(offsets, byte_spans(text, spans)).tolist() == expected.tolist()


def test_ordinary_text_needs_no_library() -> None:
    for kind, tokenizer in KINDS.items():
        found = ByteOffsets.of(tokenizer)
        assert found is not None
        ids = np.array(tokenizer.encode("the cat ran home naïve 你好<|end|>").ids, dtype=np.int32)
        offsets = found.find(ids, "the cat ran home naïve 你好<|end|>")
        assert offsets is not None, kind
        last = offsets[-1].tolist()
        assert last == (30 + 7 if offsets.ndim == 1 else [30, 30 + 7])


def test_what_is_not_spelled_is_seen() -> None:
    swallowing = KINDS["added token that swallows spaces"]
    found = ByteOffsets.of(swallowing)
    assert found is not None
    assert found.find(np.array(swallowing.encode("cat <|gap|> cat").ids, dtype=np.int32), "cat <|gap|> cat") is None
    composed = ByteOffsets.of(KINDS["composed"])
    assert composed is not None
    text = "e\u0301"
    assert composed.find(np.array(KINDS["composed"].encode(text).ids, dtype=np.int32), text) is None


@pytest.mark.parametrize(
    "other",
    [
        byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        byte_level(pre_tokenizer=pre_tokenizers.Metaspace()),
        byte_level(pre_tokenizer=None),
        byte_level(normalizer=normalizers.NFKC()),
        byte_level(normalizer=normalizers.Sequence([normalizers.Prepend("x")])),
        Tokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##re": 2}, unk_token="[UNK]")),
        Tokenizer(models.Unigram([("<unk>", 0.0), ("a", -1.0)], unk_id=0)),
        Tokenizer(models.BPE({"<unk>": 0, "a": 1}, [], unk_token="<unk>")),
    ],
)
def test_other_tokenizers_are_left_to_the_library(other: Tokenizer) -> None:
    assert ByteOffsets.of(other) is None


def test_a_vocabulary_without_some_bytes_is_seen_by_the_sum() -> None:
    """As SmolLM2's, which lacks bytes that no text has: they leave no token."""
    tokenizer = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found = ByteOffsets.of(tokenizer)
    assert found is not None
    for text, known in (("abab", True), ("abcab", False)):
        ids = np.array(tokenizer.encode(text).ids, dtype=np.int32)
        assert (found.find(ids, text) is not None) == known
