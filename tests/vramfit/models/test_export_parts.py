"""A model that was never in memory as a whole is written as one that was, and others load it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.vramfit.engine.test_streaming import EAGER, a_plan, batches, resident, saved, streaming
from tests.vramfit.engine.test_trained_blocks import disk, full_plan
from tests.vramfit.engine.test_trained_blocks import resident as resident_in_full
from tests.vramfit.engine.test_trained_blocks import streaming as streaming_in_full
from tests.vramfit.models.tiny_families import TINY
from vramfit.engine.head import base_model
from vramfit.models import export_parts
from vramfit.models.adapters import merged_state
from vramfit.models.export_parts import write_parts

FAMILIES = [
    (family, changes)
    for family, changes in TINY
    if family in ("llama", "gpt2", "mixtral", "gemma2", "qwen3_moe", "deepseek_v3", "gpt_neox", "phi3", "gpt_oss")
]


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: each for path in sorted(folder.glob("*.safetensors")) for name, each in load_file(path).items()}


def assert_same_folder(found: Path, wanted: Path) -> None:
    left, right = tensors_of(found), tensors_of(wanted)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)])
def test_a_model_that_trained_in_blocks(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    known = transformers.AutoConfig.for_model(family).to_dict()
    at_random = [key for key in known if "drop" in key or "jitter" in key]
    folder = saved(family, tmp_path / "model", **dict.fromkeys(at_random, 0.0), **changes)
    plan = full_plan(attention="eager" if family in EAGER else "sdpa")
    there, here = resident_in_full(folder, plan, tmp_path), streaming_in_full(folder, disk(plan), tmp_path)
    for executor in (there, here):
        executor.step(batches(), 1e-2)
    there.model.save_pretrained(tmp_path / "whole")
    (tmp_path / "parts").mkdir()

    write_parts(here.model, here.parts(), tmp_path / "parts")

    assert_same_folder(tmp_path / "parts", tmp_path / "whole")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    assert all(torch.equal(value, there.model.get_parameter(name)) for name, value in again.named_parameters())


@pytest.mark.parametrize("method", ["lora", "qlora"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "mixtral"])
def test_adapters_are_merged_block_by_block(method: str, family: str, tmp_path: Path) -> None:
    import transformers

    changes: dict[str, Any] = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    if family == "gpt2":
        changes = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    folder = saved(family, tmp_path / "model", **changes)
    plan = a_plan(method)
    here = streaming(folder, dataclasses.replace(plan, weights_tier="disk"), tmp_path)
    here.step(batches(), 1e-2)
    (tmp_path / "parts").mkdir()

    write_parts(base_model(here.model), here.parts(), tmp_path / "parts")

    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    if (method, family) == ("qlora", "gpt2"):  # bitsandbytes leaves its matrices as they are
        assert all(value.isfinite().all() for value in merged.parameters())
        return
    there = resident(folder, plan, tmp_path)
    there.step(batches(), 1e-2)
    wanted = merged_state(there.model)
    assert all(torch.equal(value, wanted[name]) for name, value in merged.named_parameters())


def test_large_models_are_cut_into_files_with_an_index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import transformers

    folder = saved("llama", tmp_path / "model")
    here = streaming_in_full(folder, disk(full_plan()), tmp_path)
    (tmp_path / "parts").mkdir()
    monkeypatch.setattr(export_parts, "FILE_BYTES", 300_000)

    write_parts(here.model, here.parts(), tmp_path / "parts")

    index = json.loads((tmp_path / "parts" / "model.safetensors.index.json").read_text())
    names = set(index["weight_map"].values())
    assert len(names) > 2
    assert names == {path.name for path in (tmp_path / "parts").glob("*.safetensors")}
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "parts")
    saved_tensors = tensors_of(folder)
    assert all(torch.equal(value, saved_tensors[name]) for name, value in again.named_parameters())
