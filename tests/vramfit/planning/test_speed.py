"""FLOPs by hand, and seconds against what has been measured."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Device, power_share
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture, from_config
from vramfit.planning.plan import Plan, SpeedEstimate, Workload
from vramfit.planning.program import PROGRAMS
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


def sharded(plan: Callable[..., Plan], **changes: object) -> Plan:
    """QLoRA of a 70B on two cards."""
    values: dict[str, object] = {
        "method": "qlora",
        "device": "cuda:0",
        "compute": "bf16",
        "weight_format": "nf4",
        "lora_rank": 64,
        "lora_targets": ("all-linear",),
        "max_length": 2048,
        "recompute": 80,
        "cards": 2,
        "sharding": "fsdp",
        "loss": "full",
    }
    return plan(**{**values, **changes})


LONG = Workload(sequences=100, mean_tokens=2048, longest_tokens=2048)


@pytest.mark.parametrize(
    ("name", "link", "watts", "measured"), [("4090", 25.5e9, 450, 476.7), ("3090", 6.4e9, 280, 177.8)]
)
def test_the_published_70b_on_two_cards_is_met(
    plan: Callable[..., Plan], name: str, link: float, watts: float, measured: float
) -> None:
    """QLoRA with parameters in RAM; the 3090s have slow lanes and a power limit, says their owner."""
    card = machine_with(name).devices[0]
    slowed = power_share(watts, card.power_watts)
    card = dataclasses.replace(
        card, link_bandwidth=link, flops={dtype: slowed * rate for dtype, rate in card.flops.items()}
    )
    wish = sharded(plan, weights_tier="host", optimizer_tier="host")
    program = PROGRAMS["answerai fsdp_qlora"]
    speed = estimate_speed(model("meta-llama/Llama-2-70b-hf"), wish, card, LONG, program=program)

    assert speed.tokens_per_s == pytest.approx(measured, rel=0.2)


def test_two_cards_are_not_twice_as_fast_and_a_slow_link_shows(plan: Callable[..., Plan]) -> None:
    llama, card = model("meta-llama/Meta-Llama-3-8B"), machine_with("RTX 4090").devices[0]
    slow = dataclasses.replace(card, link_bandwidth=3e9)
    wish = {"method": "full", "compute": "bf16", "trained_format": "fp32", "max_length": 2048, "recompute": 32}
    one = estimate_speed(llama, plan(**wish), card, LONG)
    two = estimate_speed(llama, plan(**wish, cards=2, sharding="fsdp"), card, LONG)
    slowed = estimate_speed(llama, plan(**wish, cards=2, sharding="fsdp"), slow, LONG)

    assert one.bounds["link"] == 0 < two.bounds["link"] < slowed.bounds["link"]
    assert slowed.tokens_per_s < two.tokens_per_s < 2.4 * one.tokens_per_s
    assert slowed.bound_by == "link"


def test_streaming_is_bound_by_the_link_until_a_step_has_tokens_enough(plan: Callable[..., Plan]) -> None:
    """A step brings every block twice, whatever its micro-batches: bytes / link seconds; and below it computes."""
    llama, card = model("meta-llama/Llama-2-70b-hf"), machine_with("RTX 4090").devices[0]

    def speed(length: int, **changes: object) -> SpeedEstimate:
        wish = sharded(plan, cards=1, sharding="none", weights_tier="host", micro_batch=1, **changes)
        work = dataclasses.replace(LONG, mean_tokens=length, longest_tokens=length)
        return estimate_speed(llama, wish, card, work)

    short, long, twice = speed(64), speed(2048), speed(2048, accumulation=2)
    assert short.step_seconds == pytest.approx(2 * 35.6e9 / card.link_bandwidth, rel=0.1)
    assert short.bound_by == "link"
    assert long.bounds["link"] < 0.05 * long.step_seconds
    assert twice.bounds["link"] == pytest.approx(long.bounds["link"])
    assert twice.bounds["compute"] == pytest.approx(2 * long.bounds["compute"])
    assert speed(64, resident_blocks=40).bounds["link"] < 0.6 * short.bounds["link"]


def test_a_disk_is_slower_than_ram_and_named(plan: Callable[..., Plan]) -> None:
    llama, card = model("meta-llama/Llama-2-70b-hf"), machine_with("RTX 4090").devices[0]
    wish = sharded(plan, cards=1, sharding="none", weights_tier="disk", micro_batch=1)
    speed = estimate_speed(llama, wish, card, LONG)

    assert speed.bound_by == "disk"
    assert speed.step_seconds > 2 * 35e9 / 3e9


def test_inputs_of_visited_blocks_go_to_ram_and_back_while_nothing_is_computed(plan: Callable[..., Plan]) -> None:
    """80 blocks' inputs of 8192 numbers in 16 bits, twice over the link, for every token of the step."""
    llama, card = model("meta-llama/Llama-2-70b-hf"), machine_with("RTX 4090").devices[0]

    def link(**changes: object) -> float:
        wish = sharded(plan, cards=1, sharding="none", micro_batch=1, **{"weights_tier": "disk", **changes})
        return estimate_speed(llama, wish, card, LONG).bounds["link"]

    tokens = padded_length(sharded(plan, cards=1, sharding="none", micro_batch=1), LONG)
    once = 2 * 80 * 8192 * 2 * tokens / card.link_bandwidth
    assert link() == 0
    assert link(input_tier="host") == pytest.approx(once)
    assert link(input_tier="host", accumulation=3) == pytest.approx(3 * once)
    assert link(input_tier="host", weights_tier="host") == pytest.approx(once + link(weights_tier="host"), rel=0.01)


def test_states_in_ram_cost_their_way_and_the_hosts_step(plan: Callable[..., Plan]) -> None:
    llama, card = model("Qwen/Qwen3-0.6B"), machine_with("RTX 4090").devices[0]
    wish = {"method": "full", "compute": "bf16", "max_length": 2048}
    there = estimate_speed(llama, plan(**wish), card, LONG)
    in_ram = estimate_speed(llama, plan(**wish, optimizer_tier="host"), card, LONG)

    assert in_ram.bounds["link"] == pytest.approx(8 * llama.params / card.link_bandwidth)
    assert in_ram.bounds["optimizer"] > 10 * there.bounds["optimizer"]


def test_small_models_wait_for_launches_and_compiling_helps(plan: Callable[..., Plan]) -> None:
    card = machine_with("H100").devices[0]
    short = Workload(sequences=100, mean_tokens=64, longest_tokens=64)
    wish = {"method": "full", "compute": "bf16", "max_length": 64}
    eager = estimate_speed(model("HuggingFaceTB/SmolLM2-135M"), plan(**wish), card, short)
    compiled = estimate_speed(model("HuggingFaceTB/SmolLM2-135M"), plan(**wish, compiled=True), card, short)

    assert eager.bound_by == "launch"
    assert compiled.step_seconds < 0.7 * eager.step_seconds


def test_a_quantised_base_is_unpacked_in_every_pass(plan: Callable[..., Plan]) -> None:
    """Bits read, 2 bytes written and scales, per weight and pass; three passes with recompute."""
    llama, card = model("meta-llama/Meta-Llama-3-8B"), machine_with("RTX 4090").devices[0]
    wish = {"method": "lora", "compute": "bf16", "lora_rank": 8, "lora_targets": ("q_proj",), "recompute": 32}
    plain = estimate_speed(llama, plan(**wish, weight_format="bf16"), card, LONG)
    packed = estimate_speed(llama, plan(**wish, weight_format="nf4"), card, LONG)

    weights = sum(linear.weights for layer in range(32) for linear in llama.linears(layer))
    added = 3 * weights * 2.6 / (0.85 * card.memory_bandwidth)
    assert packed.step_seconds - plain.step_seconds == pytest.approx(added, rel=0.05)


def test_utilisation_leaves_recompute_out_and_energy_is_watts_times_seconds(plan: Callable[..., Plan]) -> None:
    llama, card = model("meta-llama/Meta-Llama-3-8B"), machine_with("RTX 4090").devices[0]
    wish = {"method": "full", "compute": "bf16", "trained_format": "bf16", "max_length": 2048}
    kept, again = (estimate_speed(llama, plan(**wish, recompute=blocks), card, LONG) for blocks in (0, 32))

    for speed, blocks in ((kept, 0), (again, 32)):
        useful = flops_per_token(llama, plan(**wish), length=2048) * 2 * 2048
        assert speed.mfu == pytest.approx(useful / speed.step_seconds / card.flops["bf16"]), blocks
    assert kept.step_joules == 450 * kept.step_seconds
    assert kept.steps_per_s == 1 / kept.step_seconds


def test_selective_recompute_costs_half_the_products(plan: Callable[..., Plan]) -> None:
    llama, card = model("meta-llama/Meta-Llama-3-8B"), machine_with("RTX 4090").devices[0]
    wish = {"method": "full", "compute": "bf16", "trained_format": "bf16", "max_length": 2048}
    kept, some, again = (
        estimate_speed(llama, plan(**wish, **how), card, LONG)
        for how in ({}, {"recompute": 32, "selective": True}, {"recompute": 32})
    )

    assert kept.step_seconds < some.step_seconds < again.step_seconds
    products = again.bounds["compute"] - kept.bounds["compute"]
    assert 0.4 < (some.bounds["compute"] - kept.bounds["compute"]) / products < 0.5


def windowed(name: str, window: int | None) -> Architecture:
    return dataclasses.replace(model(name), sliding_window=window)


@pytest.mark.parametrize(
    ("name", "window", "sliding"),
    [
        ("google/gemma-2-2b", 4096, 13),  # every second of 26 blocks sees everything
        ("google/gemma-3-1b-pt", 512, 22),  # every sixth of 26
        ("CohereForAI/c4ai-command-r7b-12-2024", 4096, 24),
        ("allenai/Olmo-3-1025-7B", 4096, 24),
        ("openai/gpt-oss-20b", 128, 12),
        ("bigcode/starcoder2-3b", 4096, 30),  # all of them slide
    ],
)
def test_only_blocks_that_slide_look_at_less(plan: Callable[..., Plan], name: str, window: int, sliding: int) -> None:
    """Of 32768 tokens, position by position: min(position + 1, window) where a block slides, else all before it."""
    shape, length = model(name), 32768
    assert (shape.sliding_window, sum(shape.slides(layer) for layer in range(shape.layers))) == (window, sliding)
    looked_at = sum(min(position + 1, window) for position in range(length)) / length
    all_before = (length + 1) / 2
    by_hand = 3 * 4 * shape.q_width * (sliding * looked_at + (shape.layers - sliding) * all_before)

    added = flops_per_token(shape, plan(), length=length) - flops_per_token(shape, plan(), length=0)

    assert added == pytest.approx(by_hand, rel=1e-3)


@pytest.mark.parametrize("name", ["google/gemma-2-2b", "CohereForAI/c4ai-command-r7b-12-2024", "bigcode/starcoder2-3b"])
def test_flash_skips_what_a_window_hides_and_a_mask_takes_all_pairs(plan: Callable[..., Plan], name: str) -> None:
    """Seconds of attention by the share of blocks that slide: with FlashAttention w (2 - w / L) / L of a causal one's,
    with SDPA's mask twice as many pairs at 0.7 of the rate."""
    card, length, window = machine_with("H100").devices[0], 32768, 4096
    work = dataclasses.replace(LONG, mean_tokens=length, longest_tokens=length)

    def compute(window: int | None, attention: str) -> float:
        wish = plan(
            method="lora", device="cuda:0", compute="bf16", weight_format="bf16", lora_rank=8, lora_targets=("q_proj",),
            max_length=length, micro_batch=1, attention=attention,
        )  # fmt: skip
        return estimate_speed(windowed(name, window), wish, card, work).bounds["compute"]

    shape = model(name)
    share = sum(shape.slides(layer) for layer in range(shape.layers)) / shape.layers
    flash, masked, causal = compute(window, "flash"), compute(window, "sdpa"), compute(None, "sdpa")
    assert compute(None, "flash") == pytest.approx(causal)
    assert compute(length + 1, "flash") == pytest.approx(causal)  # a window that reaches over all hides nothing
    skipped, more = 1 - window * (2 - window / length) / length, 2 / 0.7 - 1
    assert (causal - flash) / (masked - causal) == pytest.approx(skipped / more)
    assert 0 < causal - flash < share * causal
