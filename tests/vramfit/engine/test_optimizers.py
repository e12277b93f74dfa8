from __future__ import annotations

import dataclasses

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine import bitsandbytes_states
from vramfit.engine.accelerators import BACKENDS, backend_of
from vramfit.engine.chunked import ChunkedOptimizer
from vramfit.engine.host_states import HostStates
from vramfit.engine.optimizers import build_optimizer, outside_blocks, parameter_groups
from vramfit.errors import ConfigError, ModelError
from vramfit.models.adapters import attach_adapters
from vramfit.planning.abilities import ENGINE


def names_of(model, parameters) -> set[str]:
    known = {id(parameter): name for name, parameter in model.named_parameters()}
    return {known[id(parameter)] for parameter in parameters}


def test_norms_and_biases_do_not_decay(tiny):
    model = tiny.build("phi")  # has biases and LayerNorms
    decayed, free = parameter_groups(model, weight_decay=0.1)
    free_names, decayed_names = names_of(model, free["params"]), names_of(model, decayed["params"])
    assert decayed["weight_decay"] == 0.1 and free["weight_decay"] == 0.0
    assert all(name.endswith("bias") or "norm" in name for name in free_names) and len(free_names) > 4
    assert not any("norm" in name for name in decayed_names)
    assert len(list(model.parameters())) == len(decayed["params"]) + len(free["params"])


def test_frozen_parameters_are_left_out_and_none_at_all_is_refused(tiny):
    model = tiny.build("llama")
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="0 trained parameters"):
        build_optimizer(model, ScheduleChoice(), tiny.plan())


def test_it_is_adamw(tiny):
    """Three steps against the formula of Loshchilov and Hutter (2019), written out."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, bias=False)
    weight, first, second = layer.weight.detach().clone(), torch.zeros(2, 3), torch.zeros(2, 3)
    schedule = ScheduleChoice(weight_decay=0.1, beta1=0.9, beta2=0.95)
    optimizer = build_optimizer(layer, schedule, tiny.plan())
    for step in range(1, 4):
        gradient = torch.randn(2, 3)
        layer.weight.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        direction = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * direction
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("kind", ENGINE.optimizers)
@pytest.mark.parametrize("tier", [tier for tier in ENGINE.optimizer if tier != "disk"])  # there, weights visit
def test_every_optimizer_the_engine_says_it_has_learns(tiny, kind, tier):
    model = tiny.build("llama")
    optimizer = build_optimizer(model, ScheduleChoice(), tiny.plan(optimizer=kind, optimizer_tier=tier))
    assert isinstance(optimizer, HostStates) == (tier == "host")
    tokens = torch.arange(60).view(2, 30)
    losses = []
    for _ in range(8):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        losses.append(loss.item())
        for group in optimizer.param_groups:
            group["lr"] = 2e-2 if kind == "sgd" else 5e-3
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.2


def test_muon_is_for_the_matrices_inside_the_blocks_and_adamw_for_all_else(tiny):
    model = tiny.build("phi")
    groups = build_optimizer(model, ScheduleChoice(), tiny.plan(optimizer="muon")).param_groups
    by_rule = {
        rule: names_of(model, [each for group in groups if group["rule"] == rule for each in group["params"]])
        for rule in ("muon", "adamw")
    }
    assert all(".layers." in name and name.endswith("weight") for name in by_rule["muon"])
    assert {"model.embed_tokens.weight", "lm_head.weight", "model.final_layernorm.weight"} <= by_rule["adamw"]
    assert not any(name.endswith(("proj.weight", "fc1.weight", "fc2.weight")) for name in by_rule["adamw"])
    assert len(by_rule["muon"]) + len(by_rule["adamw"]) == len(list(model.parameters()))


def test_a_tied_head_and_learned_positions_are_outside_the_blocks(tiny):
    gpt = tiny.build("gpt2")
    assert names_of(gpt, outside_blocks(gpt)) == {"transformer.wte.weight", "transformer.wpe.weight"}
    adapted = attach_adapters(tiny.build("llama"), rank=4, alpha=8, seed=0)
    assert len(outside_blocks(adapted)) == 2


@pytest.mark.parametrize(("kind", "bits"), [("adafactor", 8), ("muon", 8), ("sgd", 4), ("lion", 4), ("adamw", 16)])
def test_bits_that_an_optimizer_has_no_states_in_are_refused(tiny, kind, bits):
    with pytest.raises(ConfigError, match=f"{kind} keeps its states in 32"):
        build_optimizer(tiny.build("llama"), ScheduleChoice(), tiny.plan(optimizer=kind, optimizer_bits=bits))


@pytest.mark.parametrize("bits", [8, 4])
def test_low_bits_are_ours_where_bitsandbytes_has_no_faster_kernel(tiny, bits):
    optimizer = build_optimizer(tiny.build("llama"), ScheduleChoice(), tiny.plan(optimizer_bits=bits))
    assert isinstance(optimizer, ChunkedOptimizer) and optimizer.kind == f"adamw in {bits} bits"


def test_on_a_card_8_bits_are_bitsandbytes_work_where_it_is_installed(tiny, monkeypatch):
    """The card is a row of the table; the kernel that then runs here is bitsandbytes' for the processor."""
    pytest.importorskip("bitsandbytes")
    assert bitsandbytes_states.has_kernel("cuda:0", "adamw") and not bitsandbytes_states.has_kernel("cpu", "adamw")
    assert not bitsandbytes_states.has_kernel("mps", "adamw") and not bitsandbytes_states.has_kernel("cuda:0", "muon")
    model, plan = tiny.build("llama"), tiny.plan(optimizer_bits=8, device="cuda:0")
    optimizer = build_optimizer(model, ScheduleChoice(beta2=0.95), plan)
    assert type(optimizer).__name__ == "AdamW8bit" and optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    assert optimizer.param_groups[1]["weight_decay"] == 0.0  # norms
    assert isinstance(build_optimizer(model.bfloat16(), ScheduleChoice(), plan), ChunkedOptimizer)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert not bitsandbytes_states.has_kernel("cuda:0", "adamw")


@pytest.mark.parametrize(
    ("device", "plan", "installed", "words"),
    [
        ("cpu", {}, True, "moves no memory"),
        ("mps", {}, True, "moves no memory"),
        ("cuda:0", {"optimizer_bits": 4}, True, "no paged states"),
        ("cuda:0", {"optimizer": "muon"}, True, "no paged states"),
        ("cuda:0", {"trained_format": "bf16"}, True, "to the nearest"),
        ("cuda:0", {}, False, "not installed"),
    ],
)
def test_paged_states_are_refused_with_the_reason(tiny, monkeypatch, device, plan, installed, words):
    model = tiny.build("llama")
    if "trained_format" in plan:
        model = model.bfloat16()
    if not installed:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    made = dataclasses.replace(tiny.plan(optimizer_paged=True, **plan), device=device)
    with pytest.raises(ConfigError, match=words):
        build_optimizer(model, ScheduleChoice(), made)


@pytest.mark.parametrize(("kind", "bits"), [("adamw", 32), ("adamw", 8), ("lion", 32), ("lion", 8)])
def test_paged_states_are_bitsandbytes_paged_classes(tiny, kind, bits):
    pytest.importorskip("bitsandbytes")
    plan = tiny.plan(optimizer=kind, optimizer_bits=bits, optimizer_paged=True, device="cuda:0")
    optimizer = build_optimizer(tiny.build("llama"), ScheduleChoice(), plan)
    assert type(optimizer).__name__ == f"Paged{kind.replace('adamw', 'AdamW').replace('lion', 'Lion')}{bits}bit"
    assert optimizer.is_paged and bitsandbytes_states.is_ours(optimizer)


def test_only_drivers_that_move_memory_have_paged_states():
    assert {name for name, backend in BACKENDS.items() if backend.paged} == {"cuda", "rocm"}
    assert not backend_of("cpu").paged


def test_norms_and_biases_kept_as_matrices_do_not_decay_and_are_not_muons() -> None:
    import transformers

    shape = transformers.CohereConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        use_qk_norm=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.CohereForCausalLM(shape)
    gains = {id(each) for name, each in model.named_parameters() if "norm" in name}
    assert any(each.ndim == 2 for each in model.parameters() if id(each) in gains)

    groups = parameter_groups(model, weight_decay=0.1)

    decaying = {id(each) for group in groups if group["weight_decay"] for each in group["params"]}
    assert not gains & decaying
