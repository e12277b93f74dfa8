"""A tiny decoder, uneven sequences and a plan: what every engine test begins with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from vramfit.engine.tiers import DiskTier, RamTier
from vramfit.planning.plan import Plan

VOCAB = 128


@dataclass(frozen=True)
class TinyBatch:
    input_ids: torch.Tensor
    labels: torch.Tensor
    attention_mask: torch.Tensor | None = None
    position_ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None


Tokens = tuple[torch.Tensor, ...]
"""Token ids, labels, and where there are any, the labels' weights."""


def make_sequences(*lengths: int, seed: int = 0, weights: Sequence[float] = ()) -> list[Tokens]:
    """(token ids, labels) of these lengths; about a third of the labels carry no loss. With `weights`, each label
    gets one of them."""
    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for length in lengths:
        ids = torch.randint(3, VOCAB, (length,), generator=generator)
        masked = torch.rand(length, generator=generator) < 0.3
        shares = torch.tensor(weights)[torch.randint(len(weights), (length,), generator=generator)] if weights else None
        sequences.append((ids, ids.masked_fill(masked, -100), *([] if shares is None else [shares])))
    return sequences


def pad(sequences: list[Tokens]) -> TinyBatch:
    """One right-padded micro-batch."""
    longest = max(len(ids) for ids, *_ in sequences)
    ids = torch.zeros(len(sequences), longest, dtype=torch.long)
    labels = torch.full_like(ids, -100)
    mask = torch.zeros_like(ids)
    weights = torch.zeros(ids.shape) if len(sequences[0]) == 3 else None
    for row, (tokens, wanted, *shares) in enumerate(sequences):
        ids[row, : len(tokens)], labels[row, : len(tokens)], mask[row, : len(tokens)] = tokens, wanted, 1
        if weights is not None:
            weights[row, : len(tokens)] = shares[0]
    return TinyBatch(ids, labels, mask, weights=weights)


def pack(sequences: list[Tokens]) -> TinyBatch:
    """All sequences one after another in one row, positions restarting."""
    ids, labels, *weights = (torch.cat(parts).unsqueeze(0) for parts in zip(*sequences, strict=True))
    positions = torch.cat([torch.arange(len(tokens)) for tokens, *_ in sequences]).unsqueeze(0)
    return TinyBatch(ids, labels, None, positions, *weights)


def build(family: str, *, seed: int = 1, **changes: Any) -> torch.nn.Module:
    """A two-block model of a family, fp32 on the CPU."""
    import transformers

    torch.manual_seed(seed)
    common: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.3,  # the usual 0.02 makes all logits alike and hides mistakes
        "pad_token_id": 0,
    }
    if family == "gpt2":
        common = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
        common |= {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "initializer_range": 0.3}
    if family == "phi":
        del common["head_dim"]
    config_class, model_class = {
        "llama": ("LlamaConfig", "LlamaForCausalLM"),
        "mistral": ("MistralConfig", "MistralForCausalLM"),
        "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
        "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
        "gemma2": ("Gemma2Config", "Gemma2ForCausalLM"),
        "cohere": ("CohereConfig", "CohereForCausalLM"),
        "granite": ("GraniteConfig", "GraniteForCausalLM"),
        "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM"),
        "cohere2": ("Cohere2Config", "Cohere2ForCausalLM"),
        "hyperclovax": ("HyperCLOVAXConfig", "HyperCLOVAXForCausalLM"),
        "nanochat": ("NanoChatConfig", "NanoChatForCausalLM"),
        "mixtral": ("MixtralConfig", "MixtralForCausalLM"),
        "gpt2": ("GPT2Config", "GPT2LMHeadModel"),
        "phi": ("PhiConfig", "PhiForCausalLM"),
    }[family]
    config = getattr(transformers, config_class)(**(common | changes))
    return getattr(transformers, model_class)(config)


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


@dataclass(frozen=True)
class Tools:
    build: Callable[..., torch.nn.Module]
    plan: Callable[..., Plan]
    sequences: Callable[..., list[Tokens]]
    pad: Callable[..., TinyBatch]
    pack: Callable[..., TinyBatch]


@pytest.fixture(scope="session")
def tiny() -> Tools:
    return Tools(build, make_plan, make_sequences, pad, pack)


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks come to places of their own, as they do on a card, wherever they lie."""
    for tier in (RamTier, DiskTier):
        monkeypatch.setattr(tier, "lies", lambda self, block: None)


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> None:
    """Two threads on operations this small wait for each other longer than they work."""
    torch.set_num_threads(1)
