import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from vramfit.config import STARTER_QUESTIONS, STARTER_STORIES
from vramfit.data.conversations import Encoder, Example
from vramfit.data.shapes import Conversation, Document, Turn
from vramfit.errors import DataError
from vramfit.starter import corpus
from vramfit.starter.recipe import CHAT_TOKENS, STORY_TOKENS
from vramfit.starter.tokenizer import tokenizer_folder


def _contents(path: Path) -> list[tuple[int, Conversation | Document]]:
    contents: list[tuple[int, Conversation | Document]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file):
            row = json.loads(line)
            if "text" in row:
                contents.append((number, Document(row["text"])))
            else:
                turns = tuple(Turn(turn["role"], turn["content"]) for turn in row["messages"])
                contents.append((number, Conversation(turns)))
    return contents


@pytest.mark.parametrize("source, limit", [(STARTER_STORIES, STORY_TOKENS), (STARTER_QUESTIONS, CHAT_TOKENS)])
def test_workload_is_what_tokenising_counts(source: str, limit: int, starter_cache: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tokenizer_folder(starter_cache))
    contents = _contents(corpus.write_corpus(source, starter_cache))
    examples = Encoder(tokenizer).encode(contents)
    assert all(isinstance(example, Example) for example in examples)
    lengths = [len(example) for example in examples if isinstance(example, Example)]
    trained = sum(example.trained_tokens for example in examples if isinstance(example, Example))
    workload = corpus.corpus_workload(source)
    assert workload.exact
    assert workload.sequences == len(lengths)
    assert workload.mean_tokens == sum(lengths) / len(lengths)
    assert workload.longest_tokens == max(lengths) <= limit
    assert workload.trained_share == trained / sum(lengths)


def test_corpus_is_megabytes_of_json_lines_made_once(starter_cache: Path) -> None:
    path = corpus.write_corpus(STARTER_STORIES, starter_cache)
    made = path.stat()
    assert made.st_size > 4_000_000
    assert corpus.write_corpus(STARTER_STORIES, starter_cache) == path and path.stat().st_mtime_ns == made.st_mtime_ns


def test_corpus_is_the_same_bytes_elsewhere(starter_cache: Path, tmp_path: Path) -> None:
    for source in (STARTER_STORIES, STARTER_QUESTIONS):
        here, there = corpus.write_corpus(source, starter_cache), corpus.write_corpus(source, tmp_path)
        assert here.name == there.name and here.read_bytes() == there.read_bytes()
        assert b"\r" not in here.read_bytes()


def test_unknown_source_is_told(tmp_path: Path) -> None:
    for call in (corpus.corpus_workload, lambda source: corpus.write_corpus(source, tmp_path)):
        with pytest.raises(DataError, match="'starter:poems' is not one of the starter's 2 data sets"):
            call("starter:poems")
    assert not list(tmp_path.iterdir())


def test_planning_the_starter_needs_no_torch() -> None:
    code = (
        "import sys; from vramfit.starter import corpus, recipe, shape; "
        "corpus.corpus_workload('starter:stories'); recipe.starter_run(); shape.architecture(); "
        "assert not {'torch', 'transformers', 'tokenizers'} & set(sys.modules)"
    )
    root = Path(__file__).parents[3]
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": str(root)})


def test_every_third_text_is_a_question_about_a_new_story() -> None:
    texts = [row["text"] for row in corpus.corpus_rows(STARTER_STORIES)]
    told = {text for text in texts if not text.startswith("<|im_start|>user\n")}
    chats = [text for text in texts if text.startswith("<|im_start|>user\n")]
    assert len(chats) * corpus.PRACTICE_ONE_IN == len(texts) == len(told) + len(chats)
    assert all(text.count("<|im_end|>") == 1 and "<|im_start|>assistant\n" in text for text in chats)
    asked = {row["messages"][0]["content"].split("\n\n")[0] for row in corpus.corpus_rows(STARTER_QUESTIONS)}
    stories = asked - {content for content in asked if content.startswith("Tell me a story")}
    assert len(stories) > 2000 and not stories & told
