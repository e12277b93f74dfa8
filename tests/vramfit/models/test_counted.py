"""Families without a row: counted by a process of its own, exactly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vramfit.config import ModelChoice, RunConfig
from vramfit.errors import ModelError
from vramfit.hardware.catalogue import machine_with
from vramfit.models import families
from vramfit.models.catalogue import architecture_of
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run

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
    assert "does not know the family 'helium'" in forecast.plan.reasons[0].reason


def test_a_family_nobody_knows_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no_such_family|cannot build"):
        architecture_of(folder(tmp_path / "odd", {**HELIUM, "model_type": "no_such_family"}))


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
