from __future__ import annotations

import pytest
import torch
import transformers

from vramfit.errors import ModelError
from vramfit.models.adapter_targets import linear_names
from vramfit.models.adapters import attach_adapters, merged_state
from vramfit.models.load import load_model

TOKENS = torch.tensor([[5, 9, 33, 120, 7]])


@pytest.fixture
def model(small, model_folder, tmp_path):
    return load_model(small.config(model_folder), small.plan(), cache=tmp_path)


def lora_weights(model) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in model.named_parameters() if "lora_" in name}


def test_all_linear_adapts_every_linear_but_the_head_and_freezes_the_rest(model):
    logits = model(TOKENS).logits
    linears = [name for name in linear_names(model) if name != "lm_head"]
    adapted = attach_adapters(model, rank=4, alpha=8, seed=1)
    trained = {name for name, value in adapted.named_parameters() if value.requires_grad}
    assert len(linears) == 2 * 7 and len(trained) == 2 * len(linears)
    assert all("lora_" in name and "lm_head" not in name for name in trained)
    assert torch.equal(adapted(TOKENS).logits, logits)  # B begins at zero


@pytest.mark.parametrize(
    ("family", "width", "beside"),
    [("DeepseekV2", "n_shared_experts", "kv_b_proj"), ("Qwen2Moe", "shared_expert_intermediate_size", "down_proj")],
)
def test_all_linear_leaves_experts_alone_that_are_one_tensor(family: str, width: str, beside: str) -> None:
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    widths = {"intermediate_size": 48, "moe_intermediate_size": 16, "vocab_size": 40, width: 2}
    latent = {"kv_lora_rank": 8, "q_lora_rank": None, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
    config = getattr(transformers, f"{family}Config")(
        **shape, **widths, num_experts_per_tok=2, **(latent if family == "DeepseekV2" else {})
    )
    adapted = attach_adapters(getattr(transformers, f"{family}ForCausalLM")(config), rank=4, alpha=8, seed=1)
    trained = [name for name, value in adapted.named_parameters() if value.requires_grad]

    assert not [name for name in trained if ".experts." in name]
    assert all(any(f".{name}.lora_A" in one for one in trained) for name in ("q_proj", "o_proj", beside))
    assert not adapted.peft_config["default"].target_parameters


def test_the_seed_decides_the_start(small, model_folder, tmp_path):
    def weights(seed):
        model = load_model(small.config(model_folder), small.plan(), cache=tmp_path)
        return lora_weights(attach_adapters(model, rank=4, alpha=8, seed=seed))

    first, again, other = weights(1), weights(1), weights(2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("form", ["bf16", "fp16"])
def test_case_094_adapters_of_a_sixteen_bit_base_are_fp32(small, model_folder, tmp_path, form):
    plan = small.plan(weight_format=form, compute=form)
    model = load_model(small.config(model_folder, "lora"), plan, cache=tmp_path)
    formats = {(name.split(".")[-3] if "lora_" in name else "base"): p.dtype for name, p in model.named_parameters()}
    assert {value.dtype for value in lora_weights(model).values()} == {torch.float32}
    assert formats["base"] == {"bf16": torch.bfloat16, "fp16": torch.float16}[form]


@pytest.mark.parametrize("targets", [["q_proj"], ["self_attn.q_proj", "down_proj"], ["model.layers.1.mlp.up_proj"]])
def test_targets_are_names_or_endings(model, targets):
    adapted = attach_adapters(model, rank=2, alpha=4, targets=targets, seed=1)
    touched = {name.split(".lora_")[0] for name in lora_weights(adapted)}
    assert touched and all(any(name.endswith(target) for target in targets) for name in touched)


@pytest.mark.parametrize("targets", [["query"], ["q_proj", "qproj"], ["proj"], []])
def test_a_target_that_matches_nothing_is_refused_with_the_real_names(model, targets):
    with pytest.raises(ModelError, match=r"q_proj.*up_proj") as caught:
        attach_adapters(model, rank=2, alpha=4, targets=targets, seed=1)
    assert "0 of the model's 15 linear layers" in str(caught.value)
    assert not lora_weights(model)


def test_merging_adds_the_adapters_and_leaves_the_model_alone(model):
    adapted = attach_adapters(model, rank=4, alpha=8, seed=1)
    for name, value in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.1)
    before = {name: value.clone() for name, value in adapted.state_dict().items()}
    merged = merged_state(adapted)
    name = "model.layers.0.self_attn.q_proj"
    layer = adapted.get_submodule(f"base_model.model.{name}")
    wanted = layer.base_layer.weight + 2.0 * layer.lora_B.default.weight @ layer.lora_A.default.weight
    torch.testing.assert_close(merged[f"{name}.weight"], wanted.detach())
    assert all(torch.equal(before[name], value) for name, value in adapted.state_dict().items())
    assert not any("lora" in name or "base_layer" in name for name in merged)
