"""What plain peft reads gives the trained model's logits on the base as it was published."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file

from tests.vramfit.models.tiny_families import TINY, tiny_config
from vramfit.errors import ModelError
from vramfit.models.adapter_files import check_writable, write_adapter
from vramfit.models.adapter_start import start_adapters
from vramfit.models.adapters import attach_adapters

TOKENS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
FAMILIES = dict(TINY)
MIXTURES = [
    kind for kind, values in FAMILIES.items() if {"num_experts", "num_local_experts", "n_routed_experts"} & {*values}
]

# peft 0.21 reads a name that transformers 5.24 has renamed, and tells that GPT-2's weights are transposed.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*fan_in_fan_out is set to False"),
]


def base(model_type: str):
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, FAMILIES[model_type])).eval()


def trained(model_type: str, *, start: str = "usual", rank: int = 4, **options):
    adapted = attach_adapters(base(model_type), rank=rank, alpha=8, seed=1, **options).eval()
    start_adapters(adapted, start, seed=1)
    torch.manual_seed(2)
    for value in adapted.parameters():
        if value.requires_grad:
            value.data += 0.05 * torch.randn_like(value)
    return adapted


def check_reload(adapted, model_type: str, folder) -> None:
    import peft

    write_adapter(adapted, folder, base="somewhere")
    untouched = base(model_type)
    before = untouched(TOKENS).logits
    again = peft.PeftModel.from_pretrained(untouched, folder).eval()
    logits = adapted(TOKENS).logits
    assert (logits - before).abs().max() > 0.02
    torch.testing.assert_close(again(TOKENS).logits, logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("start", ["usual", "pissa", "olora", "orthogonal"])
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
def test_variants_and_starts(model_type, variant, start, tmp_path):
    check_reload(trained(model_type, variant=variant, start=start), model_type, tmp_path)


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("model_type", MIXTURES)
def test_mixtures_with_and_without_adapters_beside_experts(model_type, experts, tmp_path):
    adapted = trained(model_type, rank=3, variant="rslora", experts=experts, dropout=0.1)
    check_reload(adapted, model_type, tmp_path)
    names = load_file(tmp_path / "adapter_model.safetensors").keys()
    assert any(".experts.base_layer.lora_A" in name for name in names) == experts


def test_a_start_from_the_base_is_written_as_twice_the_rank(tmp_path):
    write_adapter(trained("llama", start="pissa", variant="rslora"), tmp_path, base="somewhere")
    settings = json.loads((tmp_path / "adapter_config.json").read_text(encoding="utf-8"))
    assert (settings["r"], settings["lora_alpha"], settings["use_rslora"]) == (
        8,
        32.0,
        False,
    )  # alpha / sqrt(4) = 32 / 8
    assert settings["base_model_name_or_path"] == "somewhere"


def test_dora_that_peft_could_not_read_is_refused():
    with pytest.raises(ModelError, match=r"peft takes .*gate_proj|down_proj|up_proj for the experts'"):
        check_writable(trained("deepseek_v2", variant="dora"))
    check_writable(trained("deepseek_v2", variant="dora", targets=["q_b_proj", "kv_b_proj"]))
