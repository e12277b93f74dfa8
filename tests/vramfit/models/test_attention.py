"""The kernel that was planned is the model's; one that is not installed is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.errors import ConfigError
from vramfit.models.architecture import LatentAttention, from_config
from vramfit.models.attention import described, implementation, kernel_of
from vramfit.models.load import load_model
from vramfit.planning.plan import Plan

SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 64,
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}


def plan_with(attention: str) -> Plan:
    return Plan(
        method="pretrain",
        device="cpu",
        budget_bytes=2**30,
        compute="fp32",
        weight_format="fp32",
        max_length=32,
        micro_batch=1,
        accumulation=1,
        recompute=0,
        loss="chunked",
        attention=attention,  # type: ignore[arg-type]
    )


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("starter", [True, False])
def test_a_model_from_random_weights_has_the_planned_kernel(attention: str, starter: bool, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SHAPE), encoding="utf-8")
    config = RunConfig.parse({} if starter else {"model": {"source": str(tmp_path)}})
    model = load_model(config, plan_with(attention), cache=tmp_path)
    assert model.config._attn_implementation == attention


@pytest.mark.parametrize(
    ("shape", "changes", "operator", "words"),
    [
        ({}, {}, "_scaled_dot_product_flash_attention_for_cpu", "takes flash attention here"),
        ({}, {"packing": True}, "_scaled_dot_product_flash_attention_for_cpu", "takes flash attention here"),
        ({"num_key_value_heads": 1}, {}, "_scaled_dot_product_flash_attention_for_cpu", "takes flash attention"),
        (
            {"latent": LatentAttention(q_rank=0, kv_rank=8, nope_dim=8, rope_dim=8, value_dim=8)},
            {},
            "_scaled_dot_product_attention_math",
            "takes plain products, with all scores in memory here",
        ),
    ],
)
def test_the_kernel_that_sdpa_picks_here_for_the_runs_heads_is_named(
    shape: dict[str, Any], changes: dict[str, Any], operator: str, words: str
) -> None:
    """Values of another width than the keys have no fused kernel on a CPU."""
    latent = shape.pop("latent", None)
    architecture = dataclasses.replace(from_config({**SHAPE, **shape}, name="tiny"), latent=latent)
    plan = dataclasses.replace(plan_with("sdpa"), **changes)
    kernel = kernel_of(plan, architecture)
    assert kernel.operator == operator and kernel.makes_scores is ("math" in operator)
    assert described(plan, kernel).startswith("Attention is sdpa: ") and words in described(plan, kernel)


@pytest.mark.parametrize(("attention", "scores"), [("eager", True), ("flash", False)])
def test_a_kernel_that_was_chosen_by_name_is_told_without_a_try(attention: str, scores: bool) -> None:
    kernel = kernel_of(plan_with(attention), from_config(SHAPE, name="tiny"))
    assert (kernel.operator, kernel.makes_scores) == ("", scores)


def test_flash_without_its_package_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("vramfit.models.attention.importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="flash_attn, which is not installed"):
        load_model(RunConfig(), plan_with("flash"), cache=tmp_path)


def test_flash_with_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("vramfit.models.attention.importlib.util.find_spec", lambda name: object())
    assert implementation(plan_with("flash")) == "flash_attention_2"
