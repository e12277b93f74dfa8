"""A small real tokenizer, and files written for a test."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)

WORDS = (
    "the a cat dog ran sat home away Once upon time there was hello world question answer Bonjour 你好 世界 système "
    "temperature is 21 degrees get_weather city Paris arguments name user assistant system tool content"
)


@pytest.fixture(scope="session")
def make_tokenizer() -> Callable[..., Any]:
    """A byte-level BPE tokenizer, trained on a few words. `bos` puts that token in front of plain text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    def make(
        *, template: str | None = CHATML, bos: str | None = None, eos: str | None = "<|im_end|>", pad: str | None = None
    ) -> Any:
        special = ["<unk>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<pad>", "<start_of_turn>", "<end_of_turn>"]
        raw = Tokenizer(models.BPE(unk_token="<unk>"))
        raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        raw.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=500,
            special_tokens=special,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        raw.train_from_iterator([WORDS] * 3, trainer)
        if bos:
            raw.post_processor = processors.TemplateProcessing(
                single=f"{bos} $A", special_tokens=[(bos, raw.token_to_id(bos))]
            )
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=raw, unk_token="<unk>", bos_token=bos, eos_token=eos, pad_token=pad or eos
        )
        tokenizer.chat_template = template
        return tokenizer

    return make


@pytest.fixture
def tokenizer(make_tokenizer: Callable[..., Any]) -> Any:
    """ChatML, where the token that ends a turn is also the padding."""
    return make_tokenizer()


@pytest.fixture
def write_rows(tmp_path: Path) -> Callable[..., Path]:
    """Write objects as JSONL under `tmp_path` and give the path."""

    def write(rows: Sequence[Any], name: str = "data.jsonl", encoding: str = "utf-8") -> Path:
        path = tmp_path / name
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_bytes(text.encode(encoding))
        return path

    return write
