"""Families without a row: counted by a process of its own, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vramfit.config import ModelChoice, RunConfig
from vramfit.errors import ModelError
from vramfit.hardware.catalogue import machine_with
from vramfit.models import counted as counting
from vramfit.models import families
from vramfit.models.architecture import from_config
from vramfit.models.catalogue import architecture_of
from vramfit.models.count_worker import counted
from vramfit.models.counted import from_count
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run
from vramfit.planning.reasons import ASSUMED

pytestmark = pytest.mark.long

HELIUM = {
    "model_type": "helium",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 1000,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}


def folder(place: Path, values: dict[str, object]) -> ModelChoice:
    place.mkdir()
    (place / "config.json").write_text(json.dumps(values), encoding="utf-8")
    return ModelChoice(source=str(place))


def test_an_undescribed_family_is_counted_exactly_and_says_so(tmp_path: Path) -> None:
    assert "helium" not in families.FAMILIES
    choice = folder(tmp_path / "helium", HELIUM)
    found = architecture_of(choice)

    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**HELIUM))
    assert found.params == sum(parameter.numel() for parameter in model.parameters())
    assert (found.layers, found.hidden_size, found.kv_heads, found.counted) == (3, 64, 2, True)

    forecast = forecast_run(
        RunConfig.parse({"method": "lora", "model": {"source": choice.source}}),
        architecture=found,
        machine=machine_with("RTX 3060"),
        workload=Workload(sequences=10, mean_tokens=50, longest_tokens=100),
    )
    (told,) = [
        choice.reason for choice in forecast.plan.reasons if "does not know the family 'helium'" in choice.reason
    ]
    assert f"its {found.params:,} parameters were counted" in told
    assert told in [choice.reason for choice in forecast.plan.reasons if choice.setting == ASSUMED]


def test_a_family_nobody_knows_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no_such_family|cannot build"):
        architecture_of(folder(tmp_path / "odd", {**HELIUM, "model_type": "no_such_family"}))


@pytest.mark.parametrize(
    ("worker", "says"),
    [
        ("import os; os._exit(3)", "ended with exit code 3)"),
        ("import os; os.kill(os.getpid(), 9)", "ended with signal 9)"),
        ("import a_module_that_is_not_there", "exit code 1: ModuleNotFoundError: No module named 'a_module"),
        ("import time; time.sleep(60)", "did not answer within 0.3 seconds"),
    ],
)
def test_a_count_that_ends_is_told_from_one_that_takes_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, worker: str, says: str
) -> None:
    (tmp_path / "worker.py").write_text(worker, encoding="utf-8")
    monkeypatch.setattr(counting, "_ROOT", tmp_path)
    monkeypatch.setattr(counting, "_WORKER", "worker")
    monkeypatch.setattr(counting, "_SECONDS", 0.3 if "within" in says else 60.0)
    with pytest.raises(ModelError) as raised:
        counting.counted_architecture({"model_type": "helium", "worker": worker}, "m")
    assert says in str(raised.value)


def test_a_model_is_counted_from_any_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds VRAMFit where its parent has it from."""
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(tmp_path)
    assert architecture_of(folder(tmp_path / "helium", HELIUM)).layers == 3


def test_widths_that_an_undescribed_family_s_file_lacks_are_its_class_s_own_and_told(tmp_path: Path) -> None:
    """Helium has 20 key heads where its file says nothing, Llama as many as there are heads."""
    from transformers import AutoConfig

    less = {key: value for key, value in HELIUM.items() if key not in ("num_key_value_heads", "head_dim")}
    less["num_attention_heads"] = 40
    read = AutoConfig.for_model(**less)
    found = architecture_of(folder(tmp_path / "helium", less))
    assert (found.kv_heads, found.head_dim) == (read.num_key_value_heads, read.head_dim)
    assert found.kv_heads != found.heads
    assert f"num_key_value_heads ({read.num_key_value_heads})" in found.notes[0]
    assert f"head_dim ({read.head_dim})" in found.notes[0]


def test_a_width_under_its_family_s_own_name_is_said(tmp_path: Path) -> None:
    assert "codegen" not in families.FAMILIES
    values = {"model_type": "codegen", "n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 100, "n_ctx": 32}
    found = architecture_of(folder(tmp_path / "codegen", {**values, "n_positions": 32, "intermediate_size": 256}))
    assert (found.hidden_size, found.heads, found.layers) == (64, 4, 2)
    assert not any("num_attention_heads" in note or "hidden_size" in note for note in found.notes)


def test_a_file_that_says_all_widths_has_no_notes(tmp_path: Path) -> None:
    assert architecture_of(folder(tmp_path / "whole", {**HELIUM, "hidden_act": "silu"})).notes == ()


TINY: dict[str, dict[str, object]] = {
    "two matrices": {**HELIUM, "model_type": "arcee"},
    "experts": {
        **HELIUM,
        "model_type": "ernie4_5_moe",
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_intermediate_size": 32,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
    },
    "experts alone, in a multimodal file": {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            "hidden_size": 64,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "vocab_size": 1000,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    },
    "another name for its width": {
        "model_type": "xglm",
        "d_model": 64,
        "num_layers": 3,
        "attention_heads": 4,
        "ffn_dim": 160,
        "vocab_size": 1000,
        "max_position_embeddings": 256,
    },
    "no attention": {"model_type": "mamba", "hidden_size": 64, "num_hidden_layers": 3, "vocab_size": 1000},
    "an infinity as transformers writes it": {
        "model_type": "mamba2",
        "hidden_size": 64,
        "num_heads": 8,
        "head_dim": 16,
        "num_hidden_layers": 3,
        "vocab_size": 1000,
        "time_step_limit": [0.0, {"__float__": "Infinity"}],
    },
    "blocks of different widths": {
        "model_type": "gemma4_text",
        "hidden_size": 64,
        "intermediate_size": 160,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 32,
        "vocab_size": 1000,
        "vocab_size_per_layer_input": 1000,
        "hidden_size_per_layer_input": 8,
    },
    "parts that blocks share": {
        **HELIUM,
        "model_type": "zamba",
        "num_hidden_layers": 8,
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "n_mamba_heads": 2,
    },
    "its own code beside the library's": {**HELIUM, "auto_map": {"AutoConfig": "configuration.Mine"}},
}


@pytest.mark.parametrize("name", TINY)
def test_counted_models_of_all_kinds_are_exact_and_can_be_planned(name: str, tmp_path: Path) -> None:
    """Of the whole, of the blocks together (what streams and is quantised), and of what one token passes.

    Counted here, not in a process of its own: that takes seconds, and is tested above."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    choice = folder(tmp_path / "model", TINY[name])
    found = from_count(TINY[name], counted(TINY[name]), name)

    with torch.device("meta"):
        text = AutoConfig.from_pretrained(choice.source, trust_remote_code=False).get_text_config(decoder=True)
        model = AutoModelForCausalLM.from_config(text)
    params = sum(parameter.numel() for parameter in model.parameters())
    layers = getattr(model, "model", None) or model.backbone
    in_blocks = sum(parameter.numel() for parameter in layers.layers.parameters())
    assert (found.params, found.layers) == (params, len(layers.layers))
    assert 0 <= found.outside_params - (params - in_blocks) < found.layers  # what does not divide evenly
    experts = sum(
        parameter.numel() for name, parameter in layers.named_parameters() if ".experts." in name
    )  # two of eight are passed
    assert found.active_params == params - experts * 3 // 4
    for method in ("full", "qlora"):
        forecast = forecast_run(
            RunConfig.parse({"method": method, "model": {"source": choice.source}}),
            architecture=found,
            machine=machine_with("RTX 3060"),
            workload=Workload(sequences=10, mean_tokens=50, longest_tokens=100),
        )
        assert all(value >= 0 for phase in forecast.memory.phases for value in phase.parts.values())
        assert forecast.fits


def test_a_plain_feed_forward_is_told_from_a_gated_one_by_its_number() -> None:
    plain, gated = (from_count(values, counted(values), "m") for values in (TINY["two matrices"], HELIUM))
    assert (plain.mlp, gated.mlp) == ("plain", "gated")
    assert plain.extra_block_params == gated.extra_block_params == 0


def test_a_family_that_only_its_folder_has_code_for_is_refused_as_such(tmp_path: Path) -> None:
    values = {**HELIUM, "model_type": "no_such_family", "auto_map": {"AutoConfig": "configuration.Mine"}}
    with pytest.raises(ModelError, match="only loads with code from its own folder"):
        architecture_of(folder(tmp_path / "odd", values))


GEMMA3: dict[str, object] = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 4,
    "text_config": {
        "model_type": "gemma3_text",
        "hidden_size": 64,
        "num_hidden_layers": 6,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 160,
        "vocab_size": 1000,
        "sliding_window": 32,
        "max_position_embeddings": 256,
    },
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "intermediate_size": 64,
        "image_size": 28,
        "patch_size": 14,
    },
}


def test_a_multimodal_model_that_is_loaded_whole_is_counted_whole_and_says_so(tmp_path: Path) -> None:
    """Gemma 3: the loader's class has the vision tower; the decoder stays described (its blocks, its windows)."""
    import torch
    from transformers import AutoConfig

    from vramfit.models.hollow import hollow_model

    choice = folder(tmp_path / "gemma", GEMMA3)
    found = from_count(GEMMA3, counted(GEMMA3), "gemma")
    shape = AutoConfig.from_pretrained(choice.source)
    loaded = hollow_model(shape, dtype=torch.bfloat16, attention="sdpa")
    part = from_config(GEMMA3, "gemma")
    of_decoder = sum(p.numel() for p in loaded.model.language_model.parameters())

    assert (part.params, part.extra_params) == (of_decoder, 0)
    assert found.params == sum(parameter.numel() for parameter in loaded.parameters()) > of_decoder
    assert (found.family, found.counted, found.block_params) == ("gemma3_text", False, part.block_params)
    assert [found.slides(layer) for layer in range(6)] == [True] * 5 + [False]
    assert f"{found.params - of_decoder:,} parameters of its other parts" in found.notes[-1]


def test_a_multimodal_model_that_is_not_loaded_as_a_language_model_is_refused_by_name(tmp_path: Path) -> None:
    llava = {"model_type": "llava", "text_config": {**HELIUM, "model_type": "llama"}, "vision_config": {}}
    with pytest.raises(ModelError, match=r"multimodal model \('?llava'?\).*does not load as a language model"):
        architecture_of(folder(tmp_path / "llava", llava))


def test_a_text_part_that_is_not_what_is_loaded_is_refused() -> None:
    part = {**GEMMA3["text_config"], "num_hidden_layers": 7}  # type: ignore[dict-item]
    with pytest.raises(ModelError, match="has 6 blocks"):
        from_count({**GEMMA3, "text_config": part}, counted(GEMMA3), "gemma")
