"""Bases packed on the way in: every matrix of a block, experts' too, and nothing else."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.test_streaming import a_config, a_plan, assert_equal_runs, resident, saved, streaming
from vramfit.config import RunConfig
from vramfit.engine.packed import Packed, packed_weights
from vramfit.errors import ModelError
from vramfit.models.adapters import merged_state
from vramfit.models.architecture import from_config
from vramfit.models.load import load_model
from vramfit.models.quantised import PACKED, load_quantised
from vramfit.planning.stored import weight_bytes

FAMILIES = [
    ("llama", {}),
    ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    ("qwen3", {"tie_word_embeddings": True, "head_dim": 16, "hidden_size": 80, "intermediate_size": 72}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("qwen3_moe", {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}),
    ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}),
]
IDS = [family for family, _ in FAMILIES]


def qlora(kind: str, **changes: Any) -> Any:
    return a_plan("qlora", **{"weight_format": kind, "attention": "sdpa", **changes})


def folder_and_plan(family: str, changes: dict[str, Any], kind: str, tmp_path: Path) -> tuple[Path, Any]:
    plan = qlora(kind, attention="eager" if family == "gpt_oss" else "sdpa")
    return saved(family, tmp_path / "model", **changes), plan


@pytest.mark.parametrize("kind", list(PACKED))
@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=IDS)
def test_logits_are_those_of_the_restored_weights(
    family: str, changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    """Widths that are no multiple of 64 among them, which the library's 4-bit kernel gets wrong on CPUs."""
    import transformers

    folder, plan = folder_and_plan(family, changes, kind, tmp_path)
    few: Any = load_quantised(a_config(folder, "qlora"), plan).eval()
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation=plan.attention).eval()
    exact = dict(plain.named_parameters())
    changed = 0
    with torch.no_grad():
        for path, module in few.named_modules():
            for leaf, inner in packed_weights(module).items():
                weight, name = inner.whole.unpacked(torch.float32), f"{path}.{leaf}"
                restored = weight.t() if getattr(module, "transposed", False) else weight
                assert 0 < (restored - exact[name]).norm() < (0.12 if kind == "nf4" else 0.02) * exact[name].norm()
                exact[name].copy_(restored)
                changed += restored.numel()
    tokens = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(few(tokens).logits, plain(tokens).logits, rtol=1e-4, atol=1e-4)
    # All matrices of the blocks but routers are in few bits; embedding and head are not.
    blocks = sum(each.numel() for name, each in exact.items() if ".layers." in name or ".h." in name)
    assert changed > 0.97 * blocks


@pytest.mark.parametrize("kind", list(PACKED))
@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=IDS)
def test_streamed_and_resident_bases_train_to_the_same_bits(
    family: str, changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    folder, plan = folder_and_plan(family, changes, kind, tmp_path)
    streamed = dataclasses.replace(plan, weights_tier="host", resident_blocks=1)
    assert_equal_runs(resident(folder, plan, tmp_path), streaming(folder, streamed, tmp_path), steps=1)


@pytest.mark.parametrize("kind", list(PACKED))
@pytest.mark.parametrize(("family", "changes"), [FAMILIES[0], FAMILIES[4]], ids=["llama", "qwen3_moe"])
def test_the_planned_bytes_are_those_that_are_there(
    family: str, changes: dict[str, Any], kind: str, tmp_path: Path
) -> None:
    wide = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    if family == "qwen3_moe":
        wide |= {"moe_intermediate_size": 512, "head_dim": 64}
    folder, plan = folder_and_plan(family, {**changes, **wide}, kind, tmp_path)
    model: Any = load_quantised(a_config(folder, "qlora"), plan)
    packed = [module for module in model.modules() if isinstance(module, Packed)]
    parts = sum(part.nbytes for module in packed for part in module.parts.values())
    whole = sum(each.untyped_storage().nbytes() for each in model.parameters())
    planned = weight_bytes(from_config(model.config.to_dict(), "model"), plan)
    assert parts + whole == pytest.approx(planned, rel=0.01)


def test_gradients_reach_adapters_of_experts_in_few_bits(tmp_path: Path) -> None:
    family, changes = FAMILIES[3]
    folder, plan = folder_and_plan(family, changes, "nf4", tmp_path)
    values = a_config(folder, "qlora").model_dump()
    config = RunConfig.parse({**values, "adapter": {**values["adapter"], "experts": True}})
    model = load_model(config, dataclasses.replace(plan, lora_experts=True), cache=tmp_path)
    model(torch.arange(64).view(2, 32)).logits.square().mean().backward()
    learned = {name for name, each in model.named_parameters() if each.grad is not None and each.grad.any()}
    assert {name for name in learned if "lora_experts.up.B" in name} and {
        name for name in learned if "lora_experts.down.B" in name
    }
    merged = merged_state(model)
    assert merged["model.layers.0.mlp.experts.gate_up_proj"].shape == (4, 256, 64)
    assert not [name for name in merged if "packed" in name]


def test_nothing_but_what_is_loaded_and_one_matrix_is_ever_there(tmp_path: Path) -> None:
    """The largest tensor made while loading is a matrix of the model's, never several of them."""
    from tests.vramfit.models.test_expert_adapters import LargestMade

    folder, plan = folder_and_plan("llama", {"num_hidden_layers": 6}, "nf4", tmp_path)
    with LargestMade() as made:
        model = load_quantised(a_config(folder, "qlora"), plan)
    assert made.largest <= max(each.nbytes for each in model.parameters())


def test_a_base_stored_in_4_bits_cannot_be_had_in_8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from vramfit.models import quantised

    folder = saved("llama", tmp_path / "model")
    monkeypatch.setattr(quantised, "is_stored_quantised", lambda model: True)
    with pytest.raises(ModelError, match="stored in 4 bits, and cannot be had in int8"):
        load_model(a_config(folder, "qlora"), qlora("int8"), cache=tmp_path)
