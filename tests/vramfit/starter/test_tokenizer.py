import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.data.template import CHATML_FILE
from vramfit.starter import tokenizer as bpe
from vramfit.starter.shape import MODEL_CONFIG
from vramfit.starter.stories import stories


@pytest.fixture(scope="module")
def folder(starter_cache: Path) -> Path:
    return bpe.tokenizer_folder(starter_cache)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_loads_without_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    from transformers import AutoTokenizer

    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with warnings.catch_warnings(), caplog.at_level(logging.WARNING):
        warnings.simplefilter("error")
        AutoTokenizer.from_pretrained(folder, local_files_only=True)
    assert not caplog.records
    assert capsys.readouterr() == ("", "")


def test_special_tokens_are_distinct_and_agree_with_the_shape(tokenizer: Any) -> None:
    assert (tokenizer.pad_token, tokenizer.eos_token, tokenizer.bos_token) == (bpe.PAD, bpe.END, None)
    assert tokenizer.pad_token_id == MODEL_CONFIG["pad_token_id"] != tokenizer.eos_token_id
    assert tokenizer.eos_token_id == MODEL_CONFIG["eos_token_id"]
    assert len(tokenizer) == MODEL_CONFIG["vocab_size"] == bpe.VOCAB_SIZE
    for token in bpe.SPECIAL_TOKENS:
        assert len(tokenizer(token)["input_ids"]) == 1


def test_same_texts_give_the_same_tokenizer(folder: Path, tmp_path: Path) -> None:
    other = bpe.tokenizer_folder(tmp_path)
    assert other.name == folder.name
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (other / name).read_bytes() == (folder / name).read_bytes()


@settings(max_examples=150, deadline=None)
@given(text=st.text(max_size=80))
def test_any_text_round_trips(tokenizer: Any, text: str) -> None:
    ids = tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert tokenizer.decode(ids) == text


def test_stories_round_trip_in_few_tokens(tokenizer: Any) -> None:
    texts = [story.text for story in stories(77, 200)]
    encoded = tokenizer(texts)["input_ids"]
    assert tokenizer.batch_decode(encoded) == texts
    assert sum(map(len, texts)) / sum(map(len, encoded)) > 4.0  # characters a token; measured 4.26


def test_chat_template_is_chatml(tokenizer: Any) -> None:
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Mia."}]
    shown = "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\nMia.<|im_end|>\n"
    assert tokenizer.apply_chat_template(turns, tokenize=False) == shown
    asked = tokenizer.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == "<|im_start|>user\nWho?<|im_end|>\n<|im_start|>assistant\n"
    ids = tokenizer.apply_chat_template(turns, tokenize=True)["input_ids"]
    assert tokenizer.decode(ids) == shown
    ours = CHATML_FILE.read_text(encoding="utf-8")
    assert tokenizer.apply_chat_template(turns, chat_template=ours, tokenize=False) == shown


def test_survives_saving(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert again.eos_token_id == tokenizer.eos_token_id and again.chat_template == tokenizer.chat_template
    assert again("Long ago, a shy girl")["input_ids"] == tokenizer("Long ago, a shy girl")["input_ids"]
