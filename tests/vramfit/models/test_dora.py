"""DoRA's short forward against peft's own, and what it must not make."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.vramfit.models.tiny_families import TINY, tiny_config
from vramfit.models.adapters import NAME, adapted_layers, attach_adapters
from vramfit.models.dora import row_lengths

TOKENS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))


def adapted(model_type: str, dtype: torch.dtype = torch.float32):
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, dict(TINY)[model_type])).to(dtype)
    made = attach_adapters(model, rank=4, alpha=8, variant="dora", seed=1).eval()
    torch.manual_seed(2)
    for value in made.parameters():
        if value.requires_grad:
            value.data += 0.1 * torch.randn_like(value)
    return made


@pytest.mark.parametrize("model_type", ["llama", "gpt2", "phi"])  # without bias, transposed, with bias
def test_output_and_gradients_are_those_of_peft(model_type: str) -> None:
    from peft.tuners.lora.variants import DoraLinearVariant

    ours = adapted(model_type)
    peft_made = copy.deepcopy(ours)
    for _, layer in adapted_layers(peft_made):
        layer.lora_variant[NAME] = DoraLinearVariant()
    for model in (ours, peft_made):
        model(TOKENS).logits.square().sum().backward()
    torch.testing.assert_close(ours(TOKENS).logits, peft_made(TOKENS).logits, rtol=1e-5, atol=1e-6)
    reference = {name: value.grad for name, value in peft_made.named_parameters() if value.requires_grad}
    assert any("lora_magnitude_vector" in name for name in reference)
    for name, value in ours.named_parameters():
        if value.requires_grad:
            torch.testing.assert_close(value.grad, reference[name], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lengths_are_of_the_sum_and_the_start_changes_nothing(dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", {})).to(dtype).eval()
    before = model(TOKENS[:1, :4]).logits
    made = attach_adapters(model, rank=4, alpha=8, variant="dora", seed=1).eval()
    assert torch.equal(made(TOKENS[:1, :4]).logits, before)

    for _, layer in adapted_layers(made):
        torch.nn.init.normal_(layer.lora_B[NAME].weight, std=0.1)
        whole = layer.base_layer.weight.float() + layer.get_delta_weight(NAME).float()
        tolerance = 1e-6 if dtype == torch.float32 else 1e-3
        torch.testing.assert_close(row_lengths(layer, NAME), whole.norm(dim=1), rtol=tolerance, atol=0)


def test_lengths_of_a_four_bit_base() -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    from peft.utils.integrations import dequantize_module_weight

    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config("llama", {}))
    for block in model.model.layers:
        for parent, name in ((block.self_attn, "q_proj"), (block.mlp, "down_proj")):
            linear = getattr(parent, name)
            packed = bitsandbytes.nn.Linear4bit(
                linear.in_features, linear.out_features, bias=False, compute_dtype=torch.float32, quant_type="nf4"
            )
            packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
            packed.support_avx512bf16_for_cpu = False  # as a loaded model has it: that layout lets no gradient through
            setattr(parent, name, packed.to("cpu"))
    model.is_loaded_in_4bit = True
    made = attach_adapters(model, rank=4, alpha=8, variant="dora", targets=["q_proj", "down_proj"], seed=1)
    for _, layer in adapted_layers(made):
        torch.nn.init.normal_(layer.lora_B[NAME].weight, std=0.1)
        whole = dequantize_module_weight(layer.base_layer).float() + layer.get_delta_weight(NAME).float()
        # bitsandbytes computes on the CPU with 0.3 % less precision than it dequantises with.
        torch.testing.assert_close(row_lengths(layer, NAME), whole.norm(dim=1), rtol=3e-3, atol=0)
    made(TOKENS).logits.sum().backward()
    assert all(value.grad is not None for value in made.parameters() if value.requires_grad)


def test_nothing_the_forward_makes_is_as_large_as_a_weight() -> None:
    from tests.vramfit.models.test_expert_adapters import LargestMade

    torch.manual_seed(3)
    config = tiny_config("llama", {"hidden_size": 128, "intermediate_size": 512, "vocab_size": 16})
    model = transformers.AutoModelForCausalLM.from_config(config)
    made = attach_adapters(model, rank=4, alpha=8, variant="dora", seed=1)
    smallest = min(layer.base_layer.weight.nbytes for _, layer in adapted_layers(made))
    with LargestMade() as seen:
        made(TOKENS[:1, :4] % 16).logits.sum().backward()
    assert 0 < seen.largest < smallest
