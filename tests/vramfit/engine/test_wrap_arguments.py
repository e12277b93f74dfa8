"""What wrap is given: arguments of a wrong kind are refused all together; encoder-decoders recompute as they train."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import nn

import vramfit
from vramfit.errors import ConfigError


def plain() -> tuple[nn.Module, torch.optim.Optimizer]:
    model = nn.Sequential(nn.Linear(3, 1))
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("micro_batch", [1.5, "8", 0, -2, None, True, math.nan, [4], "all", 2.0]),
        ("recompute", ["some", -1, 1.0, None, True, math.inf, "auto"]),
        ("budget_gib", ["4", -1, math.nan, math.inf, None, True, 1j, "auto"]),
        ("max_grad_norm", ["1", -0.5, math.nan, None, True, torch.ones(2)]),
        ("precision", ["bf32", 16, None, torch.bfloat16, ["fp32"]]),
        ("loss", [3, "mse", nn.Parameter(torch.ones(1))]),
    ],
)
def test_an_argument_of_a_wrong_kind_is_refused_in_three_parts(argument: str, values: list[Any]) -> None:
    model, optimizer = plain()
    for value in values:
        if argument == "loss" and value is None:
            continue
        with pytest.raises(ConfigError) as refused:
            vramfit.wrap(model, optimizer, **{argument: value})
        (problem,) = refused.value.problems
        assert problem.field == argument and problem.remedy.endswith(".")
        assert problem.what.startswith(f"{argument} is ")


def test_all_that_is_wrong_is_told_together() -> None:
    wrong: dict[str, Any] = {
        "micro_batch": "8",
        "recompute": "some",
        "budget_gib": "4",
        "max_grad_norm": math.nan,
        "precision": "bf32",
        "loss": 3,
    }
    with pytest.raises(ConfigError) as refused:
        vramfit.wrap(*plain(), **wrong)
    assert {problem.field for problem in refused.value.problems} == set(wrong)
    assert "micro_batch is '8', and a piece has a whole number of rows, 1 at least" in str(refused.value)


@pytest.mark.parametrize(
    "right", [{"micro_batch": np.int64(2)}, {"max_grad_norm": 1}, {"max_grad_norm": math.inf}, {"budget_gib": 0}]
)
def test_numbers_of_any_kind_are_numbers(right: dict[str, Any]) -> None:
    step = vramfit.wrap(*plain(), loss=lambda model, rows: (model(rows).sum(), len(rows)), **right)
    assert step(torch.ones(4, 3)).tokens == 4


def t5() -> nn.Module:
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2, decoder_start_token_id=0
        )
    )


def bart() -> nn.Module:
    return transformers.BartForConditionalGeneration(
        transformers.BartConfig(
            vocab_size=64,
            d_model=16,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=2,
            decoder_attention_heads=2,
            encoder_ffn_dim=32,
            decoder_ffn_dim=32,
            max_position_embeddings=32,
        )
    )


@pytest.mark.parametrize("make", [t5, bart])
@pytest.mark.parametrize("extra", [{}, {"use_cache": True}])
def test_encoder_decoders_recompute_what_they_compute(make: Callable[[], nn.Module], extra: dict[str, Any]) -> None:
    """Their decoders fill a cache of keys and values unless somebody says no: a second forward would fill it twice."""
    torch.manual_seed(0)
    model = make()
    tokens = torch.arange(1, 29).view(4, 7)
    batch = {"input_ids": tokens, "labels": tokens.flip(1), **extra}
    losses = []
    for recompute in (0, "all"):
        own = copy.deepcopy(model)
        if recompute:
            with pytest.warns(UserWarning, match=r"blocks of \S*decoder\S* are recomputed; those of \S*encoder"):
                step = vramfit.wrap(own, torch.optim.SGD(own.parameters(), lr=0.1), recompute="all", precision="fp32")
        else:
            step = vramfit.wrap(own, torch.optim.SGD(own.parameters(), lr=0.1), precision="fp32")
        torch.manual_seed(1)
        losses.append([step(batch).loss for _ in range(2)])
    assert losses[0] == losses[1]


def test_a_loss_of_ones_own_may_leave_the_cache_on() -> None:
    torch.manual_seed(0)
    shape = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    model = transformers.LlamaForCausalLM(shape)

    def own(module: nn.Module, piece: Any) -> Any:
        return module(input_ids=piece, labels=piece, use_cache=True).loss * len(piece), len(piece)

    losses = []
    for recompute in (0, 2):
        copied = copy.deepcopy(model)
        optimizer = torch.optim.SGD(copied.parameters(), lr=0.1)
        step = vramfit.wrap(copied, optimizer, loss=own, recompute=recompute, precision="fp32")
        losses.append([step(torch.arange(1, 29).view(4, 7)).loss for _ in range(2)])
    assert losses[0] == losses[1]
