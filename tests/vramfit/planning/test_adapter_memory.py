"""DoRA and adapters beside experts: counted as they are built, and their memory against traced steps."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.vramfit.models.tiny_families import TINY, tiny_config
from vramfit.models.architecture import from_config
from vramfit.planning.formats import formats_of
from vramfit.planning.memory import estimate_memory
from vramfit.planning.operations import block_work
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS
from vramfit.planning.stored import adapter_params, trained_params

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning")

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "max_position_embeddings": 512,
}
MIXTURE = {"model_type": "mixtral", **SHAPE, "num_local_experts": 8, "num_experts_per_tok": 2}
DENSE = {"model_type": "llama", **SHAPE}

_COUNTS = {"num_experts", "num_local_experts", "n_routed_experts"}
BUILT = [(*each, "dora") for each in TINY] + [(*each, "experts") for each in TINY if _COUNTS & {*each[1]}]


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "method": "lora",
        "device": "cpu",
        "budget_bytes": 0,
        "compute": "bf16",
        "weight_format": "bf16",
        "max_length": 256,
        "micro_batch": 4,
        "accumulation": 1,
        "recompute": 0,
        "loss": "chunked",
        "loss_chunk_tokens": 64,
        "lora_rank": 16,
        "lora_targets": ("all-linear",),
    }
    return Plan(**{**values, **changes})


@pytest.mark.parametrize(("model_type", "values", "kind"), BUILT, ids=[f"{each[0]}-{each[2]}" for each in BUILT])
def test_what_is_built_is_what_is_counted(model_type: str, values: dict[str, Any], kind: str) -> None:
    import torch
    import transformers

    from vramfit.models.adapters import attach_adapters

    config = tiny_config(model_type, values)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    architecture = from_config(json.loads(config.to_json_string(use_diff=True)), model_type)
    chosen: dict[str, Any] = {"variant": "dora"} if kind == "dora" else {"experts": True}
    adapted = attach_adapters(model, rank=3, alpha=6, seed=0, **chosen)
    built = sum(value.numel() for value in adapted.parameters() if value.requires_grad)
    assert built == adapter_params(architecture, rank=3, targets=("all-linear",), **{kind: True})
    assert built == trained_params(architecture, plan(lora_rank=3, dora=kind == "dora", lora_experts=kind == "experts"))


@pytest.mark.parametrize(
    ("values", "changes"),
    [
        (DENSE, {"dora": True}),
        (MIXTURE, {"dora": True, "lora_dropout": 0.1, "recompute": 4}),
        (MIXTURE, {"lora_experts": True}),
        (MIXTURE, {"lora_experts": True, "lora_dropout": 0.1}),
        (MIXTURE, {"lora_experts": True, "recompute": 4}),
    ],
    ids=["dora", "dora of a mixture", "experts", "experts with dropout", "recomputed experts"],
)
def test_the_closed_form_is_within_three_percent_of_the_trace(values: dict[str, Any], changes: dict[str, Any]) -> None:
    from vramfit.engine.trace import trace

    wish = plan(**changes)
    made = trace(values, wish, length=wish.max_length)
    work = Workload(sequences=10, mean_tokens=256, longest_tokens=256, exact=True)
    estimate = estimate_memory(from_config(values, "tiny"), wish, work)
    assert estimate.peak_bytes == pytest.approx(made.peak_bytes, rel=0.03)


def test_work_of_adapters_beside_experts_is_that_of_the_experts_a_token_passes() -> None:
    architecture, rank = from_config(MIXTURE, "tiny"), 16
    without, beside = (
        block_work(architecture, 0, formats_of(architecture, plan(lora_experts=experts), OURS))
        for experts in (False, True)
    )
    h, w = SHAPE["hidden_size"], SHAPE["intermediate_size"]
    assert beside.flops - without.flops == pytest.approx(2 * 2 * rank * ((h + 2 * w) + (w + h)))
