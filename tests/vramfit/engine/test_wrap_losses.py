"""Whose loss the three lines take: the token loss where it is the model's own, else what the model returns."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
import transformers
from torch import Tensor, nn

import vramfit
from vramfit.errors import ConfigError

SMALL = {
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


class Smoothed(transformers.LlamaForCausalLM):
    """A causal model whose own loss is another than the usual one."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None, **others: Any) -> Any:
        output = super().forward(input_ids=input_ids, **others)
        if labels is not None:
            output.loss = F.cross_entropy(
                output.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.3
            )
        return output


def plain() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL))


def with_routers() -> nn.Module:
    shape = transformers.MixtralConfig(
        **SMALL, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=0.5
    )
    return transformers.MixtralForCausalLM(shape)


def unshifted() -> nn.Module:
    shape = transformers.BartConfig(
        vocab_size=64,
        d_model=16,
        decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        max_position_embeddings=32,
        dropout=0.0,
        is_decoder=True,
        is_encoder_decoder=False,
    )
    return transformers.BartForCausalLM(shape)


def smoothed() -> nn.Module:
    return Smoothed(transformers.LlamaConfig(**SMALL))


def rows(**more: Any) -> dict[str, Any]:
    ids = torch.randint(2, 64, (4, 12), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids.clone(), **more}


@pytest.mark.parametrize("make", [plain, with_routers, unshifted, smoothed])
def test_a_step_has_the_loss_and_the_gradient_of_the_models_own_loop(make: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model = make().train()
    wrapped = copy.deepcopy(model)
    loss = model(**rows()).loss
    loss.backward()
    norm = torch.stack([each.grad.norm() for each in model.parameters() if each.grad is not None]).norm()

    result = vramfit.wrap(wrapped, torch.optim.SGD(wrapped.parameters(), lr=0.1))(rows())

    assert result.loss == pytest.approx(loss.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm.item(), rel=1e-5)


def test_keys_that_say_nothing_do_not_change_how_tokens_are_counted() -> None:
    torch.manual_seed(0)
    model = plain()
    results = []
    for more in ({}, {"token_type_ids": None, "use_cache": False}):
        again = copy.deepcopy(model)
        step = vramfit.wrap(again, torch.optim.SGD(again.parameters(), lr=0.1), micro_batch=1)
        results.append(step(rows(**more)))
    assert (results[0].loss, results[0].grad_norm, results[0].tokens) == (
        results[1].loss,
        results[1].grad_norm,
        results[1].tokens,
    )
    assert results[0].tokens == 4 * 11


def test_a_limit_that_is_no_number_is_refused() -> None:
    model = plain()
    with pytest.raises(ConfigError, match="max_grad_norm is nan, and a norm is a number"):
        vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=float("nan"))
