"""The starter's tokenizer: byte-level BPE, trained on the starter's own texts at first use and kept in the cache.

Byte-level, so that any text a user types can be encoded. Training takes part of a second and needs neither torch nor
transformers; the same texts give the same file, byte for byte.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

from vramfit.starter.kept import keep, starter_key
from vramfit.starter.questions import chats
from vramfit.starter.stories import stories

END: Final = "<|im_end|>"
PAD: Final = "<|pad|>"
START: Final = "<|im_start|>"
SPECIAL_TOKENS: Final = (PAD, START, END)
"""In the order of their ids, from 0. One end token closes stories and turns of a chat, so that writing always stops."""

VOCAB_SIZE: Final = 1536
MAX_LENGTH: Final = 512
TRAINING_SEED: Final = 1
TRAINING_STORIES: Final = 2000
TRAINING_CHATS: Final = 500

CHAT_TEMPLATE: Final = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def tokenizer_folder(cache: Path) -> Path:
    """The folder that `AutoTokenizer.from_pretrained` loads, made at first use. Raises OutOfDisk."""

    def write(folder: Path) -> None:
        save(train(training_texts(), vocab_size=VOCAB_SIZE), folder)

    return keep(cache / f"starter-tokenizer-{starter_key()}", write)


def training_texts() -> Iterator[str]:
    """What the tokenizer learns its pieces from: stories, and chats as the template writes them."""
    for story in stories(TRAINING_SEED, TRAINING_STORIES):
        yield story.text
    for chat in chats(TRAINING_SEED, TRAINING_CHATS):
        yield f"user\n{chat.user}"
        yield f"assistant\n{chat.assistant}"


def train(texts: Iterable[str], *, vocab_size: int) -> Any:
    """A `tokenizers.Tokenizer` with at most `vocab_size` entries: special tokens, 256 bytes, then merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        show_progress=False,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    """Write the files transformers expects of a tokenizer."""
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": END,
        "pad_token": PAD,
        "extra_special_tokens": [START],
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "padding_side": "right",
    }
    files = {
        "tokenizer.json": tokenizer.to_str(),
        "tokenizer_config.json": json.dumps(settings, indent=1),
        "chat_template.jinja": CHAT_TEMPLATE,
    }
    for name, text in files.items():
        (folder / name).write_text(text, encoding="utf-8", newline="\n")
