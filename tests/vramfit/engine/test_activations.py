from __future__ import annotations

import functools
import itertools
import weakref

import pytest
import torch

from vramfit.engine import offload
from vramfit.engine.activations import (
    MODES,
    activation_modes,
    find_blocks,
    is_changed,
    plan_activations,
    planned_modes,
    recompute_blocks,
    set_activations,
    tighter,
)
from vramfit.engine.compression import Compressed
from vramfit.engine.loss import TokenLoss, model_inputs, targets_of
from vramfit.errors import ModelError
from vramfit.models.adapters import attach_adapters

CPU = torch.device("cpu")


def loss_and_gradients(model, batch):
    model.zero_grad()
    torch.manual_seed(7)  # dropout, where there is any
    loss = TokenLoss(model, device=CPU, kind="chunked")(model_inputs(batch, torch.device("cpu")), targets_of(batch))
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


def test_case_105_106_adapters_receive_gradients_through_recomputed_blocks_and_dropout_repeats(tiny):
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
        loss = TokenLoss(model, device=CPU, kind="chunked")
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


WIDE = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 32, "num_hidden_layers": 3, "initializer_range": 0.05}
NONE_LOST = ["recompute", "offload"]


def with_adapters(model, *, dropout=0.2):
    model = attach_adapters(model, rank=4, alpha=8, dropout=dropout, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


def cosine(found, wanted) -> float:
    assert found.keys() == wanted.keys()
    one, other = (torch.cat([values[name].double().flatten() for name in wanted]) for values in (found, wanted))
    return float(one @ other / (one.norm() * other.norm()))


@pytest.mark.parametrize("mode", NONE_LOST)
@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi", "mixtral"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("packed", [False, True])
def test_where_nothing_is_lost_no_bit_changes(tiny, family, mode, adapters, packed):
    """Grouped heads, experts, tied embeddings, dropout in attention and adapters, packed rows."""
    changes = {"attention_dropout": 0.1, "tie_word_embeddings": True} if family != "gpt2" else {"attn_pdrop": 0.1}
    model = tiny.build(family, **(changes if family not in ("gemma2", "phi") else {}))
    model = (with_adapters(model) if adapters else model).train()
    sequences = tiny.sequences(9, 17)
    batch = (tiny.pack if packed else tiny.pad)(sequences)
    kept_loss, kept = loss_and_gradients(model, batch)
    set_activations(model, [mode] * 2)
    loss, gradients = loss_and_gradients(model, batch)
    assert torch.equal(loss, kept_loss) and gradients.keys() == kept.keys() and kept
    assert all(torch.equal(gradients[name], kept[name]) for name in kept)


def test_inputs_wait_in_ram_and_nowhere_else(tiny):
    """Between forward and backward the graph holds no hidden state of an offloaded block on the device."""
    model, batch = tiny.build("llama", **WIDE).train(), tiny.pad(tiny.sequences(30, 30))
    set_activations(model, ["offload"] * 3)
    seen = []
    for block in find_blocks(model):
        block.register_forward_pre_hook(lambda module, args: seen.append(weakref.ref(args[0].untyped_storage())))
    loss = TokenLoss(model, device=CPU, kind="chunked")
    seen.clear()
    made = loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    host = find_blocks(model)[0].__dict__["forward"].host
    assert len(seen) == 3 and all(storage() is None for storage in seen)
    assert host.waiting_bytes == 3 * 2 * 30 * 128 * 4
    made.backward()
    del made
    assert host.waiting_bytes == 0


def test_the_input_before_is_fetched_while_a_block_is_recomputed(tiny, monkeypatch):
    model, batch = tiny.build("llama", **WIDE).train(), tiny.pad(tiny.sequences(30, 30))
    set_activations(model, ["offload"] * 3)
    order = []
    kinds = {"fetch": offload._HostInput.fetch, "arrived": offload._HostInput.arrived}
    for name, own in kinds.items():
        monkeypatch.setattr(
            offload._HostInput, name, lambda one, name=name, own=own: (order.append((name, id(one))), own(one))[1]
        )
    for _ in range(2):  # the second step's inputs know nothing of the first's
        order.clear()
        loss_and_gradients(model, batch)
        arrivals = [one for name, one in order if name == "arrived"]
        assert len(arrivals) == 3
        for first, second in itertools.pairwise(arrivals):
            assert order.index(("fetch", second)) < order.index(("arrived", second))
            assert order.index(("arrived", first)) < order.index(("fetch", second))


def test_an_input_given_by_name_waits_in_ram_too():
    class Named(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = block(input=x)
            return x

    model = Named()
    x = torch.randn(4, 8)
    wanted = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    set_activations(model, ["offload", "offload"])
    made = model(x).square().sum()
    assert model.blocks[0].__dict__["forward"].host.waiting_bytes == 2 * 4 * 8 * 4
    found = torch.autograd.grad(made, list(model.parameters()))
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(found, wanted, strict=True))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "mixtral", "gemma2"])
@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_compressed_blocks_change_no_loss_and_little_of_the_gradients(tiny, family, adapters, codec):
    model = tiny.build(family, **(WIDE if family != "gpt2" else {"n_embd": 128, "n_layer": 3}))
    model = (with_adapters(model) if adapters else model).train()
    batch = tiny.pad(tiny.sequences(30, 50))
    kept_loss, kept = loss_and_gradients(model, batch)
    torch.manual_seed(1)
    random_before = torch.get_rng_state()
    set_activations(model, ["compress"] * 3, codec=codec)
    loss, gradients = loss_and_gradients(model, batch)
    assert torch.equal(loss, kept_loss)
    assert 0.999 < cosine(gradients, kept) < 1.0 - 1e-9
    state = torch.get_rng_state()
    set_activations(model, [])
    loss_and_gradients(model, batch)
    assert torch.equal(state, torch.get_rng_state()) and not torch.equal(state, random_before)


def test_modes_change_between_steps_in_any_order_and_keep_takes_everything_back(tiny):
    model, batch = tiny.build("llama", **WIDE).train(), tiny.pad(tiny.sequences(30, 20))
    _, kept = loss_and_gradients(model, batch)
    for modes in itertools.permutations(MODES, 3):
        assert set_activations(model, modes) == activation_modes(model) == modes
        _, gradients = loss_and_gradients(model, batch)
        assert cosine(gradients, kept) > 0.999
    set_activations(model, [])
    assert not is_changed(model) and not any("forward" in module.__dict__ for module in model.modules())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    _, gradients = loss_and_gradients(model, batch)
    assert all(torch.equal(gradients[name], kept[name]) for name in kept)


def test_what_somebody_else_put_over_a_block_stays_over_it(tiny):
    """First ours, then another's, then our mode changes, and in the end both are taken off."""
    model = tiny.build("llama")
    block = model.model.layers[0]
    set_activations(model, ["recompute"])
    ours = block.forward
    block.forward = functools.partial(lambda forward, *args, **kwargs: forward(*args, **kwargs), ours)
    theirs = block.forward
    set_activations(model, ["offload"])
    assert block.forward is theirs and activation_modes(model) == ("offload", "keep")
    set_activations(model, [])
    assert block.forward is theirs and activation_modes(model) == ("keep", "keep")


def test_evaluation_compresses_and_recomputes_nothing(tiny, monkeypatch):
    model, batch = tiny.build("llama", **WIDE), tiny.pad(tiny.sequences(30))
    set_activations(model, ["compress", "recompute", "offload"])
    for name in ("checkpoint", "_by_name"):
        monkeypatch.setattr(f"vramfit.engine.activations.{name}", lambda *args, **kwargs: pytest.fail("not kept"))
    monkeypatch.setattr(Compressed, "of", lambda *args: pytest.fail("compressed"))
    with torch.no_grad():
        assert torch.isfinite(model(input_ids=batch.input_ids).logits).all()


@pytest.mark.parametrize(
    ("changes", "modes"),
    [
        ({"recompute": 2}, ("recompute", "recompute", "keep", "keep")),
        ({"recompute": 1, "compress": 2}, ("recompute", "compress", "compress", "keep")),
        ({"recompute": 3, "compress": 4, "input_tier": "host"}, ("offload", "offload", "offload", "compress")),
        ({"recompute": 9}, ("recompute",) * 4),
        ({"compress": 9}, ("compress",) * 4),
    ],
)
def test_a_plan_says_the_mode_of_each_block(tiny, changes, modes):
    assert planned_modes(tiny.plan(**changes), 4) == modes
    model = tiny.build("llama", num_hidden_layers=4)
    assert plan_activations(model, tiny.plan(**changes)) == modes == activation_modes(model)
    assert plan_activations(model, tiny.plan()) == ("keep",) * 4
    assert plan_activations(torch.nn.Linear(2, 2), tiny.plan()) == ()


def test_the_tighter_of_two_modes_needs_less():
    assert tighter("keep", "compress") == tighter("compress", "keep") == "compress"
    assert tighter("offload", "recompute") == "offload"
