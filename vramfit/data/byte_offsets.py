"""Where each token begins and ends, from token ids alone, for tokenizers that spell a text byte by byte.

Asking the tokenizer's library for places costs a third of the whole encoding. The tokens of a byte-level vocabulary put
end to end are the text, so their lengths say the same; where they do not add up, the library is asked after all.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Spans = Sequence[tuple[int, int]]

_SPACE = "\u0120"  # how byte-level vocabularies write a space


class ByteOffsets:
    """For one tokenizer; `of` gives None for all but byte-level ones without steps that change the text.

    Offsets are in bytes of UTF-8. Where the tokenizer trims spaces off its offsets, so do these.
    """

    def __init__(self, spelled: dict[int, str], sizes: dict[int, int], *, trims: bool, composes: bool) -> None:
        count = max((*spelled, *sizes)) + 1
        self._composes = composes
        self._trims = trims
        self._size = np.zeros(count, dtype=np.int64)
        self._size[list(spelled)] = [len(text) for text in spelled.values()]
        self._leading, self._trailing = np.zeros((2, count if trims else 0), dtype=np.int64)
        if trims:
            self._leading[list(spelled)] = [len(text) - len(text.lstrip(_SPACE)) for text in spelled.values()]
            self._trailing[list(spelled)] = [len(text) - len(text.rstrip(_SPACE)) for text in spelled.values()]
            self._leading[list(sizes)] = self._trailing[list(sizes)] = 0
        self._size[list(sizes)] = list(sizes.values())

    @classmethod
    def of(cls, backend: Any) -> ByteOffsets | None:
        """The lengths of all tokens of a `tokenizers.Tokenizer`, or None."""
        trims = any(part.get("trim_offsets") for part in _steps(backend.post_processor))
        added = {token: str(one.content) for token, one in backend.get_added_tokens_decoder().items()}
        spelled = {token: text for text, token in backend.get_vocab(with_added_tokens=False).items()}
        forms = [step["type"] for step in _steps(backend.normalizer)]
        if (
            not _spells(backend.model, set(spelled.values()))
            or not _cuts_only(_steps(backend.pre_tokenizer))
            or forms not in ([], ["NFC"])
            or (trims and any(text != text.strip().strip(_SPACE) for text in added.values()))
        ):
            return None
        sizes = {token: len(text.encode()) for token, text in added.items()}
        return cls(spelled, sizes, trims=trims, composes=bool(forms))

    def find(self, ids: NDArray[np.int32], text: str) -> NDArray[np.int64] | None:
        """[start, end) of each token of `text`, [n, 2], or only the ends, [n], where each begins where the one before
        it ends; None where the tokens do not spell the text.

        Tokens that swallow white space around them and text that is rewritten leave a sum that is too small.
        """
        if self._composes and not unicodedata.is_normalized("NFC", text):
            return None
        if self._trims and text.startswith(" "):  # trimmed in a way of its own
            return None
        ends = np.cumsum(self._size[ids])
        if len(ids) and ends[-1] != (len(text) if text.isascii() else len(text.encode())):
            return None
        if not self._trims:
            return ends
        starts = np.minimum(np.concatenate([[0], ends[:-1]]) + self._leading[ids], ends)
        return np.stack([starts, np.maximum(ends - self._trailing[ids], starts)], axis=1)


def byte_spans(text: str, spans: Spans) -> Spans:
    """Character spans of a text as byte spans of its UTF-8."""
    if text.isascii():
        return spans
    places: dict[int, int] = {}
    at = size = 0
    for edge in sorted({edge for span in spans for edge in span}):
        size += len(text[at:edge].encode())
        places[edge] = size
        at = edge
    return [(places[start], places[end]) for start, end in spans]


def _spells(model: Any, vocabulary: set[str]) -> bool:
    """Whether a token is always written as the bytes it stands for.

    A byte without a token is left out of the ids, which the sum tells, unless a token for unknown ones takes its place.
    """
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    if not isinstance(model, BPE) or model.continuing_subword_prefix or model.end_of_word_suffix:
        return False
    return model.unk_token is None or set(ByteLevel.alphabet()) <= vocabulary


def _cuts_only(steps: list[dict[str, Any]]) -> bool:
    """Whether these steps before the model turn a text to bytes and cut it, and put nothing in."""
    levels = [step for step in steps if step["type"] == "ByteLevel"]
    known = all(step["type"] in ("ByteLevel", "Split", "Digits") for step in steps)
    return known and bool(levels) and not any(step["add_prefix_space"] for step in levels)


def _steps(component: Any) -> list[dict[str, Any]]:
    """The steps of one part of a tokenizer, each with its type and settings."""
    if component is None:
        return []
    state = json.loads(component.__getstate__())
    for name in ("pretokenizers", "normalizers", "processors"):
        if name in state:
            return list(state[name])
    return [state]
