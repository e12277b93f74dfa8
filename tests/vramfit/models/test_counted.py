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
