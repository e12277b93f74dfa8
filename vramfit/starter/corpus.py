"""The starter's data sets as files: stories to learn to write from, and questions about stories to learn to answer.

Every third text of the stories is a story with a question and its answer, as the chat template writes them. A model
that never saw a question learns the form of an answer from a short fine-tuning, but not to look it up in the story; and
looking things up keeps its own stories consistent. A plain prompt is still continued as a plain story.

Made at first use, the same bytes on every machine, kept in the cache under a name that follows the code that made them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vramfit.config import STARTER_QUESTIONS, STARTER_STORIES
from vramfit.errors import DataError
from vramfit.planning.plan import Workload
from vramfit.starter.kept import keep, starter_key
from vramfit.starter.questions import Chat, chats
from vramfit.starter.stories import stories
from vramfit.starter.tokenizer import END, START

CORPUS_SEED: Final = 42
STORIES: Final = 6_000
PRACTICE_ONE_IN: Final = 3
PRACTICE_SEED: Final = 43
CHATS_SEED: Final = 44
"""Series of their own: two series of one seed draw the same numbers and can fall into step."""
CHATS: Final = 3_000


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Token counts of a data set under the starter's tokenizer, end tokens included. A test counts them again."""

    rows: int
    tokens: int
    trained_tokens: int
    longest: int


COUNTED: Final = {
    STARTER_STORIES: Counted(rows=STORIES, tokens=1_027_903, trained_tokens=1_021_903, longest=222),
    STARTER_QUESTIONS: Counted(rows=CHATS, tokens=564_318, trained_tokens=83_768, longest=221),
}


def corpus_rows(source: str) -> Iterator[dict[str, Any]]:
    """The rows of a data set: {"text": story} or {"messages": [...]}. Raises DataError for an unknown source."""
    if source == STARTER_STORIES:
        return ({"text": text} for text in _texts())
    if source == STARTER_QUESTIONS:
        return (chat.row for chat in chats(CHATS_SEED, CHATS))
    raise _unknown(source)


def _texts() -> Iterator[str]:
    told = stories(CORPUS_SEED, STORIES)
    practice = chats(PRACTICE_SEED, STORIES // PRACTICE_ONE_IN)
    for number, story in enumerate(told, start=1):
        yield _as_chat(next(practice)) if number % PRACTICE_ONE_IN == 0 else story.text


def _as_chat(chat: Chat) -> str:
    """The chat as the template writes it, without the last end token: every text of a data set is given that."""
    return f"{START}user\n{chat.user}{END}\n{START}assistant\n{chat.assistant}"


def write_corpus(source: str, cache: Path) -> Path:
    """The data set as a JSONL file in `cache`, made at first use (under a second). Raises DataError, OutOfDisk."""
    rows = corpus_rows(source)
    name = source.removeprefix("starter:")

    def write(folder: Path) -> None:
        with (folder / f"{name}.jsonl").open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)

    return keep(cache / f"starter-{name}-{starter_key()}", write) / f"{name}.jsonl"


def corpus_workload(source: str) -> Workload:
    """Exact sequences and tokens of the whole data set, one row a sequence, without making it. Raises DataError."""
    counted = COUNTED.get(source)
    if counted is None:
        raise _unknown(source)
    return Workload(
        sequences=counted.rows,
        mean_tokens=counted.tokens / counted.rows,
        longest_tokens=counted.longest,
        trained_share=counted.trained_tokens / counted.tokens,
        exact=True,
    )


def _unknown(source: str) -> DataError:
    return DataError(
        f"{source!r} is not one of the starter's {len(COUNTED)} data sets", f"Choose {' or '.join(COUNTED)}."
    )
