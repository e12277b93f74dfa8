"""What the model is asked to continue, before and after: the config's prompts, or beginnings of held-out rows.

A token of text is a pass over the whole model, with all its weights on their way where it streams: texts end when their
time is over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Final

from vramfit.config import RunConfig
from vramfit.data.conversations import Example
from vramfit.data.prepare import PreparedData

HELD_OUT_PROMPTS = 2
DOCUMENT_PROMPT_TOKENS = 16
LONGEST_PROMPT_TOKENS = 512
LEAST_SECONDS: Final = 60.0
MOST_SHARE: Final = 0.01
LEAST_TOKENS: Final = 8
"""Before and after, texts take a minute or a hundredth of the run, and each gets so many tokens in any case."""


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """`text` as shown; `tokens` as the model sees it, or None to tokenise it (`as_chat`: as a user's turn)."""

    text: str
    as_chat: bool = False
    tokens: tuple[int, ...] | None = None


@dataclass
class TextTime:
    """One text's `seconds`: whether there is time for another token, and whether it ended for want of it."""

    seconds: float
    tokens: int = 0
    over: bool = False
    _began: float = field(default_factory=time.monotonic)

    def go_on(self, tokens: int) -> bool:
        """There are so many now."""
        self.tokens = tokens
        self.over = tokens >= LEAST_TOKENS and self.took >= self.seconds
        return not self.over

    @property
    def took(self) -> float:
        return time.monotonic() - self._began


def seconds_of_a_text(run_s: float, texts: int) -> float:
    """For each of the texts before or after a run of `run_s` predicted seconds."""
    return max(LEAST_SECONDS, MOST_SHARE * run_s) / max(1, texts)


def sample_prompts(config: RunConfig, data: PreparedData, tokenizer: Any) -> list[Prompt]:
    """At most a few prompts, the same ones at every call. None when the config asks for 0 sample tokens."""
    if config.output.sample_tokens == 0:
        return []
    if config.output.prompts:
        as_chat = not data.survey.documents
        return [Prompt(text=text, as_chat=as_chat) for text in config.output.prompts]
    found = (_beginning(example) for example in data.held_out)
    usable = [tokens for tokens in found if 0 < len(tokens) <= LONGEST_PROMPT_TOKENS][:HELD_OUT_PROMPTS]
    return [Prompt(text=tokenizer.decode(tokens, skip_special_tokens=True), tokens=tokens) for tokens in usable]


def prompt_ids(config: RunConfig, data: PreparedData, tokenizer: Any) -> set[int]:
    """Every token the samples begin with."""
    from vramfit.models.generate import prompt_tokens

    found: set[int] = set()
    for prompt in sample_prompts(config, data, tokenizer):
        text = prompt.text if prompt.tokens is None else prompt.tokens
        found.update(prompt_tokens(tokenizer, text, as_chat=prompt.as_chat).flatten().tolist())
    return found


def _beginning(example: Example) -> tuple[int, ...]:
    """The tokens before the first answer; the first few of a document, where everything is to be learned."""
    first = int(example.trained.argmax())
    untrained_start = first > 1  # the very first token of a sequence is never trained
    return tuple(example.input_ids[: first if untrained_start else DOCUMENT_PROMPT_TOKENS].tolist())
