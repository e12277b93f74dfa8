"""FLOPs by hand, and seconds against what has been measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Device
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture, from_config
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.speed import estimate_speed, flops_per_token, padded_length

TWO_CORES = Device(
    kind="cpu", name="CPU", torch_device="cpu", identity="cpu", memory_bytes=2**34, free_bytes=2**34, bf16=False,
    fp16=False, flops={"fp32": 90e9},
)  # fmt: skip


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def test_full_training_takes_6_flops_per_weight_lora_4_and_recompute_2_more(plan: Callable[..., Plan]) -> None:
    llama = model("huggyllama/llama-7b")
    matrices = llama.params - llama.embedding_params
    lora = plan(lora_rank=1, lora_targets=("q_proj",))

    assert flops_per_token(llama, plan(), length=0) == pytest.approx(6 * matrices, rel=1e-3)
    assert flops_per_token(llama, lora, length=0) == pytest.approx(4 * matrices, rel=1e-3)
    blocks = matrices - llama.head_params
    difference = flops_per_token(llama, plan(recompute=32), length=0) - flops_per_token(llama, plan(), length=0)
    assert difference == pytest.approx(2 * blocks, rel=1e-3)


def test_causal_attention_adds_6_times_layers_width_length(plan: Callable[..., Plan]) -> None:
    """12 x layers x hidden x length / 2 per token."""
    llama = model("huggyllama/llama-7b")
    added = flops_per_token(llama, plan(), length=2048) - flops_per_token(llama, plan(), length=0)

    assert added == pytest.approx(12 * 32 * 4096 * 2048 / 2)


def test_a_mixture_counts_the_experts_a_token_passes(plan: Callable[..., Plan]) -> None:
    mixture = model("Qwen/Qwen3-30B-A3B")

    assert flops_per_token(mixture, plan(), length=0) < 6 * mixture.active_params * 1.01 < 6 * mixture.params / 5


def test_the_measured_small_llama_is_met_within_a_third(plan: Callable[..., Plan]) -> None:
    """18.7 M Llama, 4 x 256 tokens, 2 cores: 483 tokens/s, 2.1 s a step."""
    shape = {
        "model_type": "llama",
        "hidden_size": 384,
        "num_hidden_layers": 8,
        "num_attention_heads": 6,
        "num_key_value_heads": 6,
        "intermediate_size": 1024,
        "vocab_size": 6000,
        "max_position_embeddings": 256,
    }
    llama = from_config(shape, "measured")
    workload = Workload(sequences=100, mean_tokens=256, longest_tokens=256)
    speed = estimate_speed(llama, plan(micro_batch=4, max_length=256), TWO_CORES, workload)

    assert llama.params == pytest.approx(18.7e6, rel=0.02)
    assert speed.tokens_per_s == pytest.approx(483, rel=0.33)


def test_the_measured_smollm2_adapter_is_met_within_a_third(plan: Callable[..., Plan]) -> None:
    """LoRA of SmolLM2-135M on two cores: about 79 tokens/s."""
    workload = Workload(sequences=100, mean_tokens=256, longest_tokens=256)
    wish = plan(method="lora", lora_rank=16, lora_targets=("all-linear",), max_length=256)
    speed = estimate_speed(model("HuggingFaceTB/SmolLM2-135M"), wish, TWO_CORES, workload)

    assert speed.tokens_per_s == pytest.approx(79, rel=0.33)


def test_seconds_are_split_by_what_takes_them_and_more_rows_are_not_slower(plan: Callable[..., Plan]) -> None:
    card = machine_with("RTX 4090").devices[0]
    workload = Workload(sequences=100, mean_tokens=512, longest_tokens=512)

    def speed(rows: int) -> float:
        wish = plan(method="full", compute="bf16", micro_batch=rows, accumulation=16 // rows, max_length=512)
        found = estimate_speed(model("Qwen/Qwen3-0.6B"), wish, card, workload)
        assert sum(found.bounds.values()) == pytest.approx(found.step_seconds)
        assert found.rate_source == "catalogue"
        return found.tokens_per_s

    assert speed(1) < speed(4) < speed(16)


def test_no_card_runs_faster_than_its_dense_rate(plan: Callable[..., Plan]) -> None:
    workload = Workload(sequences=100, mean_tokens=2048, longest_tokens=2048)
    for name in ("RTX 3060", "RTX 4090", "A770", "H100"):
        card = machine_with(name).devices[0]
        wish = plan(method="full", compute="bf16", micro_batch=8, max_length=2048)
        speed = estimate_speed(model("meta-llama/Meta-Llama-3-8B"), wish, card, workload)
        reached = speed.flops_per_step / speed.step_seconds / card.flops["bf16"]
        assert 0.2 < reached < 0.8


def test_an_unknown_card_is_answered_with_an_assumption(plan: Callable[..., Plan]) -> None:
    card = dataclasses.replace(machine_with("RTX 4090").devices[0], flops={}, memory_bandwidth=0.0, rates="assumed")
    speed = estimate_speed(
        model("Qwen/Qwen3-0.6B"), plan(compute="bf16"), card, Workload(sequences=9, mean_tokens=128, longest_tokens=128)
    )

    assert speed.rate_source == "assumed"
    assert speed.tokens_per_s > 0


def test_padding_grows_with_the_rows_of_a_micro_batch(plan: Callable[..., Plan]) -> None:
    workload = Workload(sequences=100, mean_tokens=50, longest_tokens=120)
    padded = [padded_length(plan(micro_batch=rows, accumulation=16 // rows), workload) for rows in (1, 4, 16)]

    assert padded[0] == 50
    assert padded == sorted(padded)
    assert padded[2] < 120
    assert padded_length(plan(micro_batch=16, packing=True), workload) == 50
