"""Rows to token ids with a loss mask: conversations through the model's chat template, documents as they are.

The rules, each with its test: the mask covers exactly the answers and the token that ends them; that token is learned
even when it is also the padding token; BOS is never doubled; a document ends in exactly one end token.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from vramfit.data.byte_offsets import ByteOffsets, Spans, byte_spans
from vramfit.data.rendering import TemplateRefusal
from vramfit.data.shapes import Conversation, Document, Dropped
from vramfit.data.template import Rendered, Template, default_template

TrainedOn = Literal["auto", "everything", "assistant", "last"]
IntArray = NDArray[np.int32]
BoolArray = NDArray[np.bool_]
FloatArray = NDArray[np.float32]
Masked = tuple[IntArray, BoolArray, FloatArray | None]

MAX_TEXT_CHARS: Final = 2**31 - 1

Content = Conversation | Document
RenderedBatch = list[tuple[int, Rendered | Document | Dropped]]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """One training sequence. `input_ids` int32 [n] and `trained` bool [n]: which tokens are to be predicted.

    The first token of a sequence has nothing before it and is never trained. `row` counts usable rows from 0. A packed
    sequence has `parts`, the lengths of its documents, and `rows`, the row of each; otherwise both are (). `weights`
    float32 [n] are the tokens' shares in the loss, 0 where they are not trained; None: all trained ones have 1.
    """

    input_ids: IntArray
    trained: BoolArray
    row: int
    parts: tuple[int, ...] = ()
    rows: tuple[int, ...] = ()
    weights: FloatArray | None = None

    def __len__(self) -> int:
        return len(self.input_ids)

    @property
    def trained_tokens(self) -> int:
        return int(self.trained.sum())

    def token_weights(self) -> FloatArray:
        return self.trained.astype(np.float32) if self.weights is None else self.weights


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
        self._weighted_rows, self._weights = 0, (math.inf, 0.0)
        self._template = self._make_template() if conversations else None
        self._bos, self._eos = _bos_in_front(tokenizer), tokenizer.eos_token_id
        self._backend = tokenizer.backend_tokenizer if getattr(tokenizer, "is_fast", False) else None
        self._places = ByteOffsets.of(self._backend) if conversations and self._backend is not None else None
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
        if self._weighted_rows:
            least, most = self._weights
            found.append(
                f"Answers in {self._weighted_rows:,} rows have weights from {least:g} to {most:g}; "
                "a step's loss is their weighted mean."
            )
        return found + [f"{count:,} {fact}." for fact, count in self.facts.most_common()]

    def encode(self, contents: Sequence[tuple[int, Content]]) -> list[Example | Dropped]:
        """Encode a batch of (row number, content), in order. Raises DataError for a template that goes over
        its limits, never for what a row holds."""
        return self.tokenise(self.render(contents))

    def render(self, contents: Sequence[tuple[int, Content]]) -> RenderedBatch:
        """The first half of `encode`, which waits for the process that renders. Raises DataError."""
        _remove_limits(self._backend)
        talks = [(row, content) for row, content in contents if isinstance(content, Conversation)]
        texts = iter(self._render([talk for _, talk in talks]))
        return [(row, next(texts) if isinstance(content, Conversation) else content) for row, content in contents]

    def tokenise(self, batch: RenderedBatch) -> list[Example | Dropped]:
        """The second half of `encode`, most of it in the tokenizer's own threads. Several threads may call it."""
        documents = iter(self._ids([item.text for _, item in batch if isinstance(item, Document)]))
        conversations = iter(self._masked([item for _, item in batch if isinstance(item, Rendered)]))
        results: list[Example | Dropped] = []
        for row, item in batch:
            if isinstance(item, Dropped):
                results.append(item)
            elif isinstance(item, Document):
                results.append(self._document(row, next(documents)))
            else:
                results.append(self._conversation(row, item, *next(conversations)))
        return results

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
        if item.weights and self._everything:
            self.facts["conversations give weights to answers, which are not used where everything is learned"] += 1
        elif item.weights:
            self._weighted_rows += 1
            self._weights = min(self._weights[0], *item.weights), max(self._weights[1], *item.weights)
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

    def _conversation(
        self, row: int, item: Rendered, ids: IntArray, trained: BoolArray, weights: FloatArray | None
    ) -> Example:
        if self._everything:
            trained, weights = np.ones(len(ids), dtype=np.bool_), None
        bos = self.tokenizer.bos_token_id
        if len(ids) > 1 and bos is not None and ids[0] == ids[1] == bos:
            ids, trained = ids[1:], trained[1:]
            weights = None if weights is None else weights[1:]
        if item.ends_with_answer and self._eos is not None and not self._is_closed(ids, trained):
            ids = np.append(ids, np.int32(self._eos))
            trained = np.append(trained, item.learns_end or self._everything)
            if weights is not None:
                weights = np.append(weights, np.float32(item.weights[-1] * item.learns_end))
        return _example(ids, trained, row, weights)

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
        batch = self._backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(item.ids, dtype=np.int32) for item in batch]

    def _masked(self, items: list[Rendered]) -> list[Masked]:
        """Token ids, which of them lie in the spans, and their weights, by the places of the tokens."""
        if not items:
            return []
        if self._backend is None:
            return [self._piecewise(item) for item in items]
        if self._places is None:
            return self._looked_up(items)
        found = self._ids([item.text for item in items])
        places = [self._places.find(ids, item.text) for ids, item in zip(found, items, strict=True)]
        others = iter(self._looked_up([item for item, known in zip(items, places, strict=True) if known is None]))
        return [
            next(others) if known is None else _marked(ids, known, item, byte_spans(item.text, item.spans))
            for ids, known, item in zip(found, places, items, strict=True)
        ]

    def _looked_up(self, items: list[Rendered]) -> list[Masked]:
        """The same with the places that the tokenizer's library gives."""
        if not items or self._backend is None:
            return []
        batch = self._backend.encode_batch([item.text for item in items], add_special_tokens=False)
        return [
            _marked(np.array(found.ids, dtype=np.int32), np.array(found.offsets, dtype=np.int64), item, item.spans)
            for found, item in zip(batch, items, strict=True)
        ]

    def _slow(self, text: str) -> IntArray:
        return np.array(self.tokenizer.encode(text, add_special_tokens=False), dtype=np.int32)

    def _piecewise(self, item: Rendered) -> Masked:
        """For tokenizers without offsets: what is learned and what is not are encoded piece by piece."""
        cuts = [0, *(edge for span in item.spans for edge in span), len(item.text)]
        pieces = [self._slow(item.text[a:b]) for a, b in pairwise(cuts)]
        shares = np.zeros(len(pieces), dtype=np.float32)
        shares[1::2] = item.weights or 1
        weights = np.repeat(shares, [len(piece) for piece in pieces])
        return np.concatenate(pieces), weights > 0, weights if item.weights else None


def _remove_limits(backend: Any) -> None:
    """An earlier call of the tokenizer may have left truncation or padding switched on in its Rust half, which cannot
    be changed while it encodes for another thread."""
    if backend is not None and (backend.truncation or backend.padding):
        backend.no_truncation()
        backend.no_padding()


def _example(ids: IntArray, trained: BoolArray, row: int, weights: FloatArray | None = None) -> Example:
    if len(trained):
        trained = trained.copy()
        trained[0] = False
    return Example(ids, trained, row, weights=None if weights is None else weights * trained)


def _bos_in_front(tokenizer: Any) -> int | None:
    """The BOS id when the tokenizer puts it in front of plain text by itself."""
    bos = tokenizer.bos_token_id
    if bos is None:
        return None
    ids = tokenizer("a")["input_ids"]
    return int(bos) if len(ids) and ids[0] == bos else None


def _marked(ids: IntArray, offsets: NDArray[np.int64], item: Rendered, spans: Spans) -> Masked:
    if not item.weights:
        return ids, tokens_in_spans(offsets, spans), None
    weights = np.zeros(len(ids), dtype=np.float32)
    for weight, span in sorted(zip(item.weights, spans, strict=True)):  # of two weights a token takes the greater
        weights[tokens_in_spans(offsets, [span])] = weight
    return ids, weights > 0, weights


def tokens_in_spans(offsets: NDArray[np.int64], spans: Spans) -> BoolArray:
    """Which tokens hold at least one character of a span. `offsets` [n, 2] are [start, end) per token, or only the ends
    [n] where each token begins where the one before it ends.

    Some tokenizers trim white space off the offsets, which leaves a token of white space with no width; it then covers
    what lies between the token before it and itself, so that a line end of the prompt is never taken for the answer's.
    """
    trained = np.zeros(len(offsets), dtype=np.bool_)
    if not len(offsets) or not spans:
        return trained
    if offsets.ndim == 1:
        edges = offsets.searchsorted([edge for first, last in spans for edge in (first + 1, last)]).tolist()
        for (first, last), begin, end in zip(spans, edges[::2], edges[1::2], strict=True):
            if first < last:
                trained[begin : end + 1] = True
        return trained
    start, end = offsets[:, 0], offsets[:, 1]
    empty = end <= start
    if empty.any():
        before = np.concatenate([[0], np.maximum.accumulate(end)[:-1]])
        start = np.where(empty, np.minimum(before, start), start)
    for first, last in spans:
        trained |= np.minimum(end, last) > np.maximum(start, first)
    return trained
