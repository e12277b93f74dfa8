"""Whether every token of the data has a row in the model's embedding: another model's tokenizer is found out here."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from vramfit.data.prepare import PreparedData
from vramfit.errors import ModelError
from vramfit.models.architecture import Architecture


def with_known_tokens(
    data: PreparedData, architecture: Architecture, tokenizer: Any, prompts: Iterable[int] = ()
) -> PreparedData:
    """`data`, once all its tokens and those of `prompts` are rows of the embedding.

    A padding token without a row (often added to a tokenizer later) becomes 0: nothing sees padding. A tokenizer with
    more tokens than rows, none of which the data holds, is told in the report. Raises ModelError with both numbers.
    """
    rows = architecture.vocab_size
    examples = (*data.train, *data.held_out)
    highest = max((int(example.input_ids.max()) for example in examples if len(example)), default=0)
    highest = max([highest, *prompts])
    if highest >= rows:
        raise ModelError(
            f"The tokenizer gives token {highest}, and the embedding of {architecture.name} has {rows} rows "
            f"(0 to {rows - 1})",
            "Use the tokenizer that belongs to this model, or a model whose embedding was enlarged for it.",
        )
    tokens = max(tokenizer.get_vocab().values(), default=0) + 1
    if tokens > rows:
        data.report.notes.append(
            f"The tokenizer has {tokens:,} tokens and the embedding of {architecture.name} {rows:,} rows; "
            "the data holds none of the tokens without a row."
        )
    return data if data.pad_id < rows else dataclasses.replace(data, pad_id=0)
