from __future__ import annotations

import pytest
import torch

from vramfit.engine.activations import find_blocks, recompute_blocks
from vramfit.engine.loss import TokenLoss, model_inputs, targets_of
from vramfit.errors import ModelError
from vramfit.models.adapters import attach_adapters


def loss_and_gradients(model, batch):
    model.zero_grad()
    torch.manual_seed(7)  # dropout, where there is any
    loss = TokenLoss(model, kind="chunked")(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    loss.backward()
    return loss.detach(), {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi"])
@pytest.mark.parametrize("count", [1, 2])
def test_recompute_changes_no_bit(tiny, family, count):
    model, batch = tiny.build(family), tiny.pad(tiny.sequences(9, 17))
    model.train()
    kept_loss, kept = loss_and_gradients(model, batch)
    assert recompute_blocks(model, count) == count
    loss, gradients = loss_and_gradients(model, batch)
    assert torch.equal(loss, kept_loss) and gradients.keys() == kept.keys()
    assert all(torch.equal(gradients[name], kept[name]) for name in kept)


def test_adapters_receive_gradients_through_recomputed_blocks_and_dropout_repeats(tiny):
    model = attach_adapters(tiny.build("llama"), rank=4, alpha=8, dropout=0.2, seed=0).train()
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = tiny.pad(tiny.sequences(9, 17))
    kept_loss, kept = loss_and_gradients(model, batch)
    recompute_blocks(model, 2)
    loss, gradients = loss_and_gradients(model, batch)
    assert torch.equal(loss, kept_loss)
    assert len(kept) == 2 * 7 * 2 and all("lora_" in name for name in kept)
    assert all(torch.equal(gradients[name], kept[name]) and kept[name].abs().max() > 0 for name in kept)


def test_blocks_are_run_again_in_backward_and_fewer_activations_wait(tiny):
    model, batch = tiny.build("llama").train(), tiny.pad(tiny.sequences(9, 17))
    runs = []
    original = type(model.model.layers[0].mlp).forward

    def counted(self, *args, **kwargs):
        runs.append(self)
        return original(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.layers[0].mlp), "forward", counted)
        recompute_blocks(model, 1)
        loss = TokenLoss(model, kind="chunked")
        runs.clear()
        loss(model_inputs(batch, torch.device("cpu")), targets_of(batch)).backward()
    first, second = (layer.mlp for layer in model.model.layers)
    assert runs == [first, second, first]


def test_the_number_can_change_and_everything_is_put_back(tiny):
    model = tiny.build("llama")
    assert recompute_blocks(model, 99) == 2
    assert recompute_blocks(model, 1) == 1
    assert "forward" in model.model.layers[0].__dict__ and "forward" not in model.model.layers[1].__dict__
    recompute_blocks(model, 0)
    assert not any("forward" in layer.__dict__ for layer in model.model.layers)


def test_the_list_of_blocks_is_the_largest_one(tiny):
    model = tiny.build("llama")
    model.extra = torch.nn.ModuleList([torch.nn.Linear(4, 4)])
    assert find_blocks(model) is model.model.layers


def test_a_model_without_blocks_is_refused_only_when_asked():
    model = torch.nn.Linear(2, 2)
    assert recompute_blocks(model, 0) == 0
    with pytest.raises(ModelError, match="no list of blocks"):
        recompute_blocks(model, 1)
