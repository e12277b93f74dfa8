"""A tokenizer that does not belong to the model is refused before step 1; padding without a row is harmless."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from vramfit.config import RunConfig
from vramfit.errors import ModelError
from vramfit.training.loop import train

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]


def model_with(cache: Path, folder: Path, *, vocab_size: int, pad: str | None = None) -> Path:
    """A tiny Llama with that many embedding rows beside the starter's tokenizer, which may get a new pad token."""
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from vramfit.starter.tokenizer import tokenizer_folder

    tokenizer = PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(cache))
    if pad:
        tokenizer.add_special_tokens({"pad_token": pad})
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    shape = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(shape).save_pretrained(folder)
    return folder


def starter_vocabulary() -> int:
    from vramfit.starter.shape import architecture

    return architecture().vocab_size


def test_case_074_a_token_without_a_row_is_refused_with_both_numbers(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    folder = model_with(cache, tmp_path / "model", vocab_size=64)
    heard = kept()
    config = small_run(model={"source": str(folder)}, method="full")
    with pytest.raises(ModelError, match=r"gives token \d+, and the embedding of model has 64 rows \(0 to 63\)"):
        train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert heard.metrics == [] and heard.samples == []


def test_a_prompt_may_not_have_one_either(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = starter_vocabulary()
    folder = model_with(cache, tmp_path / "model", vocab_size=rows, pad="<added>")
    config = small_run(
        model={"source": str(folder)}, method="full", output={"prompts": ["Once <added>"], "sample_tokens": 8}
    )
    with pytest.raises(ModelError, match=rf"gives token {rows}, "):
        train(config, folder=tmp_path / "run", cache=cache, recorder=kept())


@pytest.mark.parametrize("method", ["full", "lora"])
def test_case_073_padding_without_a_row_trains_all_the_same(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path, method: str
) -> None:
    """Rows of different lengths, so there is padding; its id is one more than the embedding has rows."""
    losses, said = [], []
    for pad in (None, "<added>"):
        folder = model_with(cache, tmp_path / f"model{pad is None}", vocab_size=starter_vocabulary(), pad=pad)
        heard = kept()
        config = small_run(
            model={"source": str(folder)}, method=method, schedule={"max_steps": 2}, memory={"micro_batch": 3}
        )
        train(config, folder=tmp_path / f"run{pad is None}", cache=cache, recorder=heard)
        losses.append(heard.losses)
        said.append([event.message for event in heard.events if "tokens without a row" in event.message])
    assert losses[0] == losses[1]
    rows = starter_vocabulary()
    assert said == [
        [],
        [
            f"The tokenizer has {rows + 1:,} tokens and the embedding of modelFalse {rows:,} rows; "
            "the data holds none of the tokens without a row."
        ],
    ]


def test_case_074_a_config_that_counts_other_rows_than_the_weights_hold_is_refused(
    small_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    rows = starter_vocabulary()
    folder = model_with(cache, tmp_path / "model", vocab_size=rows)
    settings = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**settings, "vocab_size": rows + 1}), encoding="utf-8")
    heard = kept()
    config = small_run(model={"source": str(folder)}, method="full")
    wrong = rf"holds {rows:,} rows of model\.embed_tokens\.weight, and config\.json says vocab_size {rows + 1:,}"
    with pytest.raises(ModelError, match=wrong):
        train(config, folder=tmp_path / "run", cache=cache, recorder=heard)
    assert [phase.name for phase in heard.phases] == ["loading"]  # nothing was read or tokenised in vain
