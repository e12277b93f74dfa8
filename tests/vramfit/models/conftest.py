"""A tiny model's folder in Hugging Face format, with a tokenizer, and the plan and config to load it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.planning.plan import Plan

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def write_tokenizer(folder: Path) -> None:
    """A byte-level tokenizer of 260 tokens: 4 special ones and the bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    specials = ["<pad>", "</s>", "<user>", "<assistant>"]
    symbols = specials + sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(symbols)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="</s>", additional_special_tokens=specials[2:]
    )
    fast.chat_template = CHAT_TEMPLATE
    fast.save_pretrained(folder)


def write_model(folder: Path, *, seed: int = 3, **changes: Any) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    values: dict[str, Any] = {
        "vocab_size": 260,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    LlamaForCausalLM(LlamaConfig(**(values | changes))).save_pretrained(folder)


@dataclass(frozen=True)
class Tools:
    write_model: Callable[..., None]
    write_tokenizer: Callable[[Path], None]
    config: Callable[..., RunConfig]
    plan: Callable[..., Plan]


def make_config(folder: Path, method: str = "full", **changes: Any) -> RunConfig:
    return RunConfig.parse({"method": method, "model": {"source": str(folder)}, **changes})


def make_plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "method": "full",
        "device": "cpu",
        "budget_bytes": 2**30,
        "compute": "fp32",
        "weight_format": "fp32",
        "max_length": 64,
        "micro_batch": 2,
        "accumulation": 2,
        "recompute": 0,
        "loss": "chunked",
    }
    return Plan(**(values | changes))


@pytest.fixture(scope="session")
def small() -> Tools:
    return Tools(write_model, write_tokenizer, make_config, make_plan)


@pytest.fixture(scope="session")
def _model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "a model ü"  # spaces and letters of any script are usual in paths
    write_model(folder)
    write_tokenizer(folder)
    return folder


@pytest.fixture
def model_folder(_model_folder: Path, tmp_path: Path) -> Path:
    """A copy to break at will."""
    import shutil

    return Path(shutil.copytree(_model_folder, tmp_path / _model_folder.name))


@pytest.fixture(autouse=True)
def no_network(monkeypatch) -> None:
    """A local folder must never lead to a connection."""
    import socket

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a test tried to use the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
