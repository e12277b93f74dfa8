"""Rows to token ids with a loss mask: conversations through the model's chat template, documents as they are.

The rules, each with its test: the mask covers exactly the answers and the token that ends them; that token is learned
even when it is also the padding token; BOS is never doubled; a document ends in exactly one end token.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vramfit.data.rendering import TemplateRefusal
from vramfit.data.shapes import Conversation, Document, Dropped
from vramfit.data.template import Rendered, Template, default_template

TrainedOn = Literal["auto", "everything", "assistant", "last"]
IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]

MAX_TEXT_CHARS: Final = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence. `input_ids` int32 [n] and `trained` bool [n]: which tokens are to be predicted.

    The first token of a sequence has nothing before it and is never trained. `row` counts usable rows from 0. A packed
    sequence has `parts`, the lengths of its documents, and `rows`, the row of each; otherwise both are ().
    """

    input_ids: IntArray
    trained: BoolArray
    row: int
    parts: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())


class Encoder:
    """Encodes rows with one tokenizer.

    `trained_on`: the answers, everything, the last answer; "auto" is everything for documents and the answers for
    conversations. A tokenizer without chat template is given ours (`used_default` is then True, and the tokenizer's
    `chat_template` is set, so that it is saved with the export).
    """

    def __init__(self, tokenizer: Any, *, trained_on: TrainedOn = "auto", conversations: bool = True) -> None:
        self.tokenizer = tokenizer
        self._everything = trained_on == "everything"
        self._last_only = trained_on == "last"
        self.used_default = False
        self.facts: Counter[str] = Counter()
        self._template = self._make_template() if conversations else None
        self._bos, self._eos = _bos_in_front(tokenizer), tokenizer.eos_token_id
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        self._ends = {self._eos, *tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", {})}

    def _make_template(self) -> Template:
        if not self.tokenizer.chat_template:
            self.tokenizer.chat_template = default_template(self.tokenizer)
            self.used_default = True
        return Template(self.tokenizer)

    def notes(self) -> list[str]:
        """What was decided or changed on the way, as sentences with counts."""
        found = []
        if self.used_default:
            found.append("The model has no chat template; ChatML is used and will be saved with the export.")
        if self._eos is None:
            found.append("The tokenizer has no end token, so the model cannot learn where to stop.")
        if self._template is not None:
            found += [f"In {count:,} rows {change}." for change, count in self._template.changes.most_common()]
        return found + [f"{count:,} {fact}." for fact, count in self.facts.most_common()]

    def encode(self, contents: Sequence[tuple[int, Conversation | Document]]) -> list[Example | Dropped]:
        """Encode a batch of (row number, content), in order. Raises DataError for a template that goes over
        its limits, never for what a row holds."""
        results: list[Example | Dropped | None] = [None] * len(contents)
        talks: list[tuple[int, int, Conversation]] = []
        rendered: list[tuple[int, int, Rendered]] = []
        documents: list[tuple[int, int, str]] = []
        for index, (row, content) in enumerate(contents):
            if isinstance(content, Document):
                documents.append((index, row, content.text))
            else:
                talks.append((index, row, content))
        for (index, row, _), result in zip(talks, self._render([talk for *_, talk in talks]), strict=True):
            if isinstance(result, Dropped):
                results[index] = result
            else:
                rendered.append((index, row, result))
        for (index, row, _), ids in zip(documents, self._ids([text for *_, text in documents]), strict=True):
            results[index] = self._document(row, ids)
        for (index, row, item), (ids, trained) in zip(
            rendered, self._masked([item for *_, item in rendered]), strict=True
        ):
            results[index] = self._conversation(row, item, ids, trained)
        return [result for result in results if result is not None]

    def _render(self, conversations: list[Conversation]) -> list[Rendered | Dropped]:
        if not conversations:
            return []
        if self._template is None:
            raise AssertionError("this encoder was made for documents")
        return [self._verdict(item) for item in self._template.render_all(conversations, last_only=self._last_only)]

    def _verdict(self, item: Rendered | TemplateRefusal) -> Rendered | Dropped:
        if isinstance(item, TemplateRefusal):
            return Dropped(f"the model's chat template refuses it: {item}")
        if not item.ends_with_answer:
            self.facts["conversations do not end with the assistant; what follows its last turn is not learned"] += 1
        return item

    def _document(self, row: int, ids: IntArray) -> Example:
        """One BOS in front where the tokenizer puts one, one EOS at the end, whatever the text brought itself."""
        if self._bos is not None and (not len(ids) or ids[0] != self._bos):
            ids = np.concatenate([np.array([self._bos], dtype=np.int32), ids])
        if self._eos is not None:
            while len(ids) and ids[-1] == self._eos:
                ids = ids[:-1]
            ids = np.append(ids, np.int32(self._eos))
        return _example(ids, np.ones(len(ids), dtype=np.bool_), row)

    def _conversation(self, row: int, item: Rendered, ids: IntArray, trained: BoolArray) -> Example:
        if self._everything:
            trained = np.ones(len(ids), dtype=np.bool_)
        bos = self.tokenizer.bos_token_id
        if len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
            ids, trained = ids[1:], trained[1:]
        if item.ends_with_answer and self._eos is not None and not self._is_closed(ids, trained):
            ids = np.append(ids, np.int32(self._eos))
            trained = np.append(trained, bool(item.spans) or self._everything)
        return _example(ids, trained, row)

    def _is_closed(self, ids: IntArray, trained: BoolArray) -> bool:
        """Whether the last answer's last token, or for a turn without loss the last token, is one that ends."""
        places = np.flatnonzero(trained)
        last = int(ids[places[-1]]) if len(places) and not self._everything else -1
        return last in self._ends or bool(len(ids) and set(ids[-2:].tolist()) & self._ends)

    def _ids(self, texts: list[str]) -> list[IntArray]:
        """Token ids without special tokens added, in one batch on all cores."""
        if not texts:
            return []
        if self._backend is None:
            return [self._slow(text) for text in texts]
        batch = _without_limits(self._backend).encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(item.ids, dtype=np.int32) for item in batch]

    def _masked(self, items: list[Rendered]) -> list[tuple[IntArray, BoolArray]]:
        """Token ids and which of them lie in the spans, by character offsets."""
        if not items:
            return []
        if self._backend is None:
            return [self._piecewise(item) for item in items]
        batch = _without_limits(self._backend).encode_batch([item.text for item in items], add_special_tokens=False)
        return [
            (np.array(found.ids, dtype=np.int32), tokens_in_spans(np.array(found.offsets, dtype=np.int64), item.spans))
            for found, item in zip(batch, items, strict=True)
        ]

    def _slow(self, text: str) -> IntArray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _piecewise(self, item: Rendered) -> tuple[IntArray, BoolArray]:
        """For tokenizers without offsets: what is learned and what is not are encoded piece by piece."""
        cuts = [0, *(edge for span in item.spans for edge in span), len(item.text)]
        pieces = [self._slow(item.text[a:b]) for a, b in pairwise(cuts)]
        masks = [np.full(len(piece), number % 2 == 1) for number, piece in enumerate(pieces)]
        return np.concatenate(pieces), np.concatenate(masks)


def _without_limits(backend: Any) -> Any:
    """An earlier call of the tokenizer may have left truncation or padding switched on in its Rust half."""
    backend.no_truncation()
    backend.no_padding()
    return backend


def _example(ids: IntArray, trained: BoolArray, row: int) -> Example:
    if len(trained):
        trained = trained.copy()
        trained[0] = False
    return Example(ids, trained, row)


def _bos_in_front(tokenizer: Any) -> int | None:
    """The BOS id when the tokenizer puts it in front of plain text by itself."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    ids = tokenizer("a")["input_ids"]
    return int(bos) if len(ids) and ids[0] == bos else None


def tokens_in_spans(offsets: NDArray[np.int64], spans: Sequence[tuple[int, int]]) -> BoolArray:
    """Which tokens hold at least one character of a span. `offsets` [n, 2] are character [start, end) per token.

    Some tokenizers trim white space off the offsets, which leaves a token of white space with no width; it then covers
    what lies between the token before it and itself, so that a line end of the prompt is never taken for the answer's.
    """
    trained = np.zeros(len(offsets), dtype=np.bool_)
    if not len(offsets) or not spans:
        return trained
    start, end = offsets[:, 0].copy(), offsets[:, 1]
    before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
    empty = end <= start
    start[empty] = np.minimum(before, start)[empty]
    for first, last in spans:
        trained |= np.minimum(end, last) > np.maximum(start, first)
    return trained
