"""What a card could train: verdicts that agree with the planner."""

from __future__ import annotations

from vramfit.config import RunConfig
from vramfit.hardware.catalogue import cards, machine_with
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.explore import across_cards, heat_map, outcome, over_lengths
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def test_what_fits_is_what_the_planner_plans() -> None:
    architecture, machine = model("Qwen/Qwen3-8B"), machine_with("RTX 4090")
    found = outcome(machine, architecture, "qlora", length=1024)
    config = RunConfig.parse({"method": "qlora", "model": {"source": "x"}, "data": {"max_length": 1024}})
    planned = forecast_run(
        config,
        architecture=architecture,
        machine=machine,
        workload=Workload(sequences=10_000, mean_tokens=1024, longest_tokens=1024),
    )

    assert found.verdict == "fits"
    assert found.device_bytes == planned.memory.device_bytes
    assert found.tokens_per_s == planned.speed.tokens_per_s


def test_a_70b_streams_on_24_gib() -> None:
    found = outcome(machine_with("RTX 4090", ram_gib=96), model("meta-llama/Meta-Llama-3-70B"), "qlora")

    assert found.verdict == "streams"
    assert found.way == "streaming from RAM"
    assert found.needs == ()
    assert found.host_bytes <= 96 * 2**30


def test_a_full_8b_streams() -> None:
    found = outcome(machine_with("RTX 4090", ram_gib=256), model("meta-llama/Meta-Llama-3-8B"), "full")

    assert found.verdict == "streams"
    assert found.needs == ()


def test_a_405b_in_full_is_impossible_on_a_card_and_the_tier_is_named() -> None:
    found = outcome(machine_with("RTX 4090"), model("meta-llama/Llama-3.1-405B"), "full")

    assert found.verdict == "no"
    assert found.limit in ("device memory", "RAM")
    assert found.tokens_per_s == 0


def test_the_heat_map_has_a_cell_for_each_model_and_method() -> None:
    models = [model("HuggingFaceTB/SmolLM2-135M"), model("Qwen/Qwen3-14B")]
    found = heat_map(machine_with("RTX 3060"), models)

    assert [(one.model, one.method) for one in found] == [
        (architecture.name, method) for architecture in models for method in ("full", "lora", "qlora")
    ]


def test_a_model_is_planned_for_every_card() -> None:
    found = across_cards(model("Qwen/Qwen3-4B"), "lora")

    assert [one.card for one in found] == [card.name for card in cards()]
    assert all(one.verdict == "fits" for one in found if "80GB" in one.card)


def test_memory_grows_with_length_as_far_as_the_model_has_positions() -> None:
    found = over_lengths(machine_with("H100"), model("Qwen/Qwen3-0.6B"), "qlora")

    assert found[-1].length == 32768  # Qwen3 was made for 40,960
    least = [one.device_bytes for one in found if one.verdict == "fits"]
    assert len(least) == len(found)


def test_lengths_beyond_learned_positions_are_refused_in_words() -> None:
    found = outcome(machine_with("H100"), model("openai-community/gpt2"), "lora", length=4096)

    assert found.verdict == "no"
    assert "1024 positions" in found.limit
