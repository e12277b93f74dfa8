from __future__ import annotations

import pytest
import torch

from vramfit.engine.head import LogitChange, ShardedHead, logits_way

CPU = torch.device("cpu")

CHANGED = {
    "gemma2": ({"final_logit_softcapping": 3.0}, LogitChange(cap=3.0)),
    "gemma3": ({"final_logit_softcapping": 3.0}, LogitChange(cap=3.0)),
    "cohere": ({"logit_scale": 0.3}, LogitChange(times=0.3)),
    "cohere2": ({"logit_scale": 0.3}, LogitChange(times=0.3)),
    "granite": ({"logits_scaling": 3.0}, LogitChange(over=3.0)),
    "hyperclovax": ({"logits_scaling": 3.0}, LogitChange(times=3.0)),
    "nanochat": ({"final_logit_softcapping": 3.0}, LogitChange(cap=3.0)),
}


@pytest.mark.parametrize("family", CHANGED)
def test_what_a_family_does_to_its_logits_is_found(tiny, family):
    values, change = CHANGED[family]
    way = logits_way(tiny.build(family, **values), CPU)
    assert way.reason == "" and way.head is not None and way.head.change == change and len(way.head.weights) == 1


def test_falcon_h1_multiplies(tiny):
    import transformers

    config = transformers.FalconH1Config(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1,
        lm_head_multiplier=0.7, initializer_range=0.3,
    )  # fmt: skip
    way = logits_way(transformers.FalconH1ForCausalLM(config), CPU)
    assert way.head is not None and way.head.change == LogitChange(times=0.7)


def test_a_field_that_a_family_does_not_use_changes_nothing(tiny):
    way = logits_way(tiny.build("llama", logit_scale=0.5, final_logit_softcapping=30.0), CPU)
    assert way.head is not None and way.head.change == LogitChange()


def test_an_unknown_change_is_found_by_trying(tiny):
    model = tiny.build("llama")
    own_forward = model.forward

    def doubled(*args, **kwargs):
        output = own_forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    way = logits_way(model, CPU)
    assert way.head is None and way.decoder is None and "more to its logits" in way.reason


def test_logits_that_are_all_zero_tell_nothing(tiny):
    model = tiny.build("gemma2", final_logit_softcapping=3.0)
    torch.nn.init.zeros_(model.lm_head.weight)
    assert logits_way(model, CPU).head is None


def test_looking_changes_no_mode_and_draws_no_number(tiny):
    model = tiny.build("llama", attention_dropout=0.5).train()
    before = torch.get_rng_state()
    logits_way(model, CPU)
    assert model.training and torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("change", [LogitChange(), LogitChange(times=0.3), LogitChange(over=3.0, cap=2.0)])
def test_in_place_is_the_same_and_the_slope_is_autograds(change):
    product = torch.randn(5, 7, requires_grad=True)
    logits = change.applied(product)
    assert torch.equal(change.apply_(product.detach().clone()), logits)
    wanted = torch.autograd.grad(logits.sum(), product)[0]
    torch.testing.assert_close(torch.ones(5, 7) * change.slope(logits.detach()), wanted, rtol=1e-5, atol=1e-7)


def test_a_head_in_parts_is_its_parts_side_by_side():
    parts = [torch.nn.Linear(4, 3), torch.nn.Linear(4, 2)]
    hidden = torch.randn(6, 4)
    whole = ShardedHead(parts)(hidden)
    assert torch.equal(whole, torch.cat([part(hidden) for part in parts], dim=1))
