"""The planner: what it decides, what it refuses and what it advises."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import random
import re
import subprocess
import sys
from typing import Any

import pytest

from vramfit.config import RunConfig
from vramfit.errors import ConfigError, DataError, HardwareError, WontFit
from vramfit.hardware.catalogue import cards, machine_with
from vramfit.hardware.devices import Device, Machine
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.abilities import DESIGNED, ENGINE, Abilities
from vramfit.planning.memory import least_memory
from vramfit.planning.plan import Forecast, Workload
from vramfit.planning.planner import forecast_run, total_steps
from vramfit.planning.search import Search
from vramfit.planning.start import length_limit
from vramfit.planning.stored import adapter_params
from vramfit.starter import shape
from vramfit.starter.corpus import corpus_workload
from vramfit.starter.recipe import starter_run
from vramfit.units import GIB

LONG = Workload(sequences=1000, mean_tokens=400, longest_tokens=1500)
WITHOUT_A_START = dataclasses.replace(ENGINE, features=ENGINE.features - {"streamed_start"})


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def wish(method: str = "lora", **changes: Any) -> RunConfig:
    values = {"method": method, "model": {"source": "some/model"}, "data": {"paths": ["data.json"]}}
    return RunConfig.parse({**values, **changes})


def laptop(free_gib: float = 12) -> Machine:
    cpu = Device(
        kind="cpu",
        name="CPU (4 cores)",
        torch_device="cpu",
        identity="cpu",
        memory_bytes=16 * GIB,
        free_bytes=int(free_gib * GIB),
        bf16=False,
        fp16=False,
        flops={"fp32": 180e9},
    )
    return Machine(devices=(cpu,), ram_bytes=16 * GIB, ram_free_bytes=12 * GIB, disk_free_bytes=100 * GIB, cpu_cores=4)


def forecast(
    config: RunConfig, *, of: str = "Qwen/Qwen3-0.6B", on: str = "RTX 4090", workload: Workload = LONG
) -> Forecast:
    machine = laptop() if on == "laptop" else machine_with(on)
    return forecast_run(config, architecture=model(of), machine=machine, workload=workload)


def reason(found: Forecast, setting: str) -> str:
    return next(choice.reason for choice in found.plan.reasons if choice.setting == setting)


def test_what_fits_keeps_its_activations_and_says_so() -> None:
    found = forecast(wish())

    assert found.fits
    assert found.plan.recompute == 0
    assert found.plan.compute == found.plan.weight_format == "bf16"
    assert found.plan.max_length == 1504  # the longest, rounded up to eighths
    assert "keeping them is fastest" in reason(found, "activations")
    assert all(choice.reason for choice in found.plan.reasons)


def test_what_is_tight_recomputes_no_more_blocks_than_it_must() -> None:
    found = forecast(wish(), of="meta-llama/Meta-Llama-3-8B")

    assert found.fits
    assert 0 < found.plan.recompute < 32
    assert found.plan.micro_batch == 1
    fewer = forecast(wish(memory={"activations": "recompute"}), of="meta-llama/Meta-Llama-3-8B")
    assert found.speed.step_seconds < fewer.speed.step_seconds


@pytest.mark.parametrize("sequences", [1, 2, 7, 12, 16, 30, 97])
@pytest.mark.parametrize("name", ["RTX 3060", "RTX 4090", "laptop"])
def test_micro_batches_cover_the_step_and_no_more(name: str, sequences: int) -> None:
    plan = forecast(wish(schedule={"sequences_per_step": sequences}), on=name).plan

    assert plan.accumulation == math.ceil(sequences / plan.micro_batch)
    assert plan.micro_batch == math.ceil(sequences / plan.accumulation)


@pytest.mark.parametrize("card", ["RTX 3060", "RTX 4090", "A770", "A100"])
@pytest.mark.parametrize("method", ["pretrain", "full", "lora", "qlora"])
@pytest.mark.parametrize("name", ["HuggingFaceTB/SmolLM2-135M", "google/gemma-2-2b", "meta-llama/Meta-Llama-3-8B"])
def test_a_forecast_fits_or_the_refusal_names_the_number(name: str, method: str, card: str) -> None:
    try:
        found = forecast(wish(method), of=name, on=card)
    except WontFit as refusal:
        assert refusal.needed_bytes > refusal.available_bytes > 0
        assert refusal.phase
        assert refusal.suggestions
    else:
        assert found.memory.device_bytes <= found.plan.budget_bytes
        assert found.seconds == found.steps * found.speed.step_seconds


def test_a_cpu_computes_in_fp32_within_ram() -> None:
    found = forecast(wish(), on="laptop")

    assert found.plan.device == "cpu"
    assert found.plan.compute == found.plan.weight_format == "fp32"
    assert found.memory.device_bytes + found.memory.save_copy_bytes == found.memory.host_bytes <= 11 * GIB


@pytest.mark.parametrize("on", ["laptop", "RTX 4090"])
def test_a_checkpoint_is_written_from_a_copy_where_ram_has_room_for_one(on: str) -> None:
    shape = model("HuggingFaceTB/SmolLM2-135M")

    def on_machine(ram: int, budget: float | str = "auto") -> Forecast:
        machine = laptop() if on == "laptop" else dataclasses.replace(machine_with(on), ram_bytes=ram)
        within = wish("full", memory={"budget_gib": budget})
        return forecast_run(within, architecture=shape, machine=machine, workload=LONG)

    roomy = on_machine(64 * GIB)
    copy = roomy.memory.save_copy_bytes
    assert copy == 12 * shape.params  # fp32 weights and two moments
    assert roomy.memory.saves_aside
    assert "copy" in reason(roomy, "checkpoints")
    least = roomy.memory.host_bytes - 1
    tight = on_machine(64 * GIB, least / GIB) if on == "laptop" else on_machine(least)
    if tight.plan == dataclasses.replace(roomy.plan, budget_bytes=tight.plan.budget_bytes, reasons=tight.plan.reasons):
        assert not tight.memory.saves_aside
        assert tight.memory.host_bytes == roomy.memory.host_bytes - copy
        assert "does not fit in RAM" in reason(tight, "checkpoints")


def test_what_trains_on_a_tier_is_written_from_there() -> None:
    small = wish("full", memory={"budget_gib": 1.5}, data={"paths": ["data.json"], "max_length": 128})
    found = forecast(small, of="HuggingFaceTB/SmolLM2-135M", on="laptop")

    assert found.plan.weights_tier != "device"
    assert found.memory.save_copy_bytes == 0
    assert not found.memory.saves_aside
    assert "one tensor at a time" in reason(found, "checkpoints")


def test_case_092_a_card_without_bf16_computes_in_fp16_and_refuses_bf16() -> None:
    machine = machine_with("RTX 4090")
    old = dataclasses.replace(machine.devices[0], bf16=False)

    def on_old(**memory: Any) -> Forecast:
        return forecast_run(
            wish("full", memory=memory),
            architecture=model("HuggingFaceTB/SmolLM2-135M"),
            machine=dataclasses.replace(machine, devices=(old,)),
            workload=LONG,
        )

    found = on_old()
    with pytest.raises(ConfigError, match=rf"memory\.precision: {old.name} cannot compute in bf16.*auto"):
        on_old(precision="bf16")
    assert found.plan.compute == "fp16"
    assert found.plan.weight_format == "fp32"


def test_fixed_wishes_are_kept_and_marked() -> None:
    found = forecast(
        wish(
            memory={
                "micro_batch": 3,
                "activations": "recompute",
                "loss": "full",
                "precision": "fp32",
                "budget_gib": 20,
            },
            data={"paths": ["x"], "max_length": 300},
        )
    )
    plan = found.plan

    assert (plan.micro_batch, plan.accumulation) == (3, 6)
    assert plan.recompute == 28
    assert (plan.loss, plan.loss_chunk_tokens) == ("full", 0)
    assert (plan.compute, plan.max_length, plan.budget_bytes) == ("fp32", 300, 20 * GIB)
    fixed = {choice.setting for choice in plan.reasons if choice.fixed}
    assert fixed == {"memory budget", "precision", "max length", "micro-batch", "activations", "loss"}


def test_a_fused_loss_of_capped_logits_is_for_devices_that_ligers_kernel_runs_on() -> None:
    """Whether it is installed decides the run alone: a plan is the same wherever it is made."""
    capped = wish(memory={"loss": "fused"}, method="lora")
    plan = forecast(capped, of="google/gemma-2-2b").plan
    assert plan.loss == "fused" and plan.loss_chunk_tokens > 0
    assert forecast(wish(method="lora"), of="google/gemma-2-2b").plan.loss == "chunked"
    with pytest.raises(ConfigError, match=r"memory.loss.*gemma2.*caps its logits at 30, .* does not run on CPU"):
        forecast(capped, of="google/gemma-2-2b", on="laptop")


def test_wishes_that_cannot_be_honoured_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"memory.budget_gib.*40\.0 GiB is more than the 24\.0 GiB"):
        forecast(wish(memory={"budget_gib": 40}))
    with pytest.raises(ConfigError, match=r"memory.loss.*cohere.*scales its logits"):
        forecast(wish(memory={"loss": "fused"}, method="qlora"), of="CohereForAI/c4ai-command-r-v01")
    with pytest.raises(ConfigError, match=r"memory.loss.*minicpm.*logits in a way of its own"):
        forecast(wish(memory={"loss": "chunked"}), of="openbmb/MiniCPM-2B-sft-bf16")
    with pytest.raises(ConfigError, match=r"memory.loss.*neither a z-loss \(0.001\) nor label smoothing \(0\)"):
        forecast(wish(memory={"loss": "fused"}, loss={"z_loss": 0.001}))
    with pytest.raises(ConfigError, match=r"data.max_length.*2000 tokens are more than the 1024 positions"):
        length_limit(wish(data={"paths": ["x"], "max_length": 2000}), model("openai-community/gpt2"))
    with pytest.raises(HardwareError, match="no device 'cuda:1'"):
        forecast(wish(device="cuda:1"))


def test_no_sequence_is_longer_than_learned_positions() -> None:
    tiny = dataclasses.replace(model("openai-community/gpt2"), max_position=4, learned_positions=4)
    found = forecast_run(wish(), architecture=tiny, machine=machine_with("RTX 4090"), workload=LONG)
    assert found.plan.max_length == 4


def test_a_budget_beyond_what_is_free_is_cut_and_said() -> None:
    found = forecast_run(
        wish(memory={"budget_gib": 15}),
        architecture=model("HuggingFaceTB/SmolLM2-135M"),
        machine=laptop(free_gib=8),
        workload=LONG,
    )

    assert found.plan.budget_bytes < 8 * GIB
    assert "You asked for 15.0 GiB, but only 8.0 GiB" in reason(found, "memory budget")


def test_logits_that_are_capped_or_scaled_go_in_chunks_and_unknown_ones_are_made_whole() -> None:
    capped = forecast(wish(), of="google/gemma-2-2b").plan
    assert (capped.loss, capped.loss_chunk_tokens) == ("chunked", 64)
    assert forecast(wish(), of="ibm-granite/granite-3.0-2b-base").plan.loss == "chunked"
    assert forecast(wish(), of="openbmb/MiniCPM-2B-sft-bf16").plan.loss == "full"


def test_every_suggestion_of_a_refusal_works() -> None:
    with pytest.raises(WontFit) as raised:
        forecast(wish("full", memory={"optimizer_place": "device"}), of="meta-llama/Meta-Llama-3-8B")

    assert raised.value.needed_bytes > 100 * GIB
    assert raised.value.available_bytes < 24 * GIB
    lora = next(text for text in raised.value.suggestions if text.startswith("LoRA instead"))
    assert "GiB" in lora
    assert forecast(wish("lora"), of="meta-llama/Meta-Llama-3-8B").fits
    assert any(text.startswith("QLoRA") for text in raised.value.suggestions)


def held(free_gib: list[float]) -> Machine:
    """A machine of 4090s of which other programs have left `free_gib`."""
    machine = machine_with("RTX 4090", count=len(free_gib))
    pairs = zip(machine.devices, free_gib, strict=True)
    cards = tuple(dataclasses.replace(card, free_bytes=int(free * GIB)) for card, free in pairs)
    return dataclasses.replace(machine, devices=cards)


def refusal_on(
    machine: Machine, of: str = "Qwen/Qwen3-8B", method: str = "lora", abilities: Abilities = ENGINE
) -> WontFit:
    with pytest.raises(WontFit) as raised:
        forecast_run(wish(method), architecture=model(of), machine=machine, workload=LONG, abilities=abilities)
    return raised.value


def test_what_other_programs_hold_is_named_and_no_other_card_advised() -> None:
    found = refusal_on(held([4.15]))

    assert "Other programs hold 19.5 GiB of GeForce RTX 4090: without them it would fit." in found.suggestions
    assert not any("smallest card" in sentence for sentence in found.suggestions)


def test_what_is_designed_is_named_as_it_is_written() -> None:
    found = refusal_on(machine_with("RTX 3060", ram_gib=256), method="pretrain", abilities=WITHOUT_A_START)

    assert any(sentence.startswith("Another way (streaming from RAM) would need") for sentence in found.suggestions)


def test_a_card_beside_it_that_is_free_is_named() -> None:
    found = refusal_on(held([4, 23, 5]))

    assert "GeForce RTX 4090 (cuda:1) has 23.0 GiB free, enough for it." in found.suggestions
    assert not any("cuda:2" in sentence for sentence in found.suggestions)


def test_other_programs_are_not_blamed_for_what_would_not_fit_without_them() -> None:
    found = refusal_on(held([4]), of="meta-llama/Llama-3.1-70B")

    assert not any("Other programs" in sentence for sentence in found.suggestions)


@pytest.mark.parametrize(("mean", "longest"), [(0.0, 0), (math.nan, 5), (-1.0, 5), (5.0, 0)])
def test_sequences_without_a_token_are_refused(mean: float, longest: int) -> None:
    with pytest.raises(DataError, match="There are 0 tokens to train on"):
        forecast(wish(), workload=Workload(sequences=3, mean_tokens=mean, longest_tokens=longest))


@pytest.mark.parametrize("share", [0.0, -0.5, 1.5, float("nan")])
def test_data_in_which_no_token_carries_loss_is_refused(share: float) -> None:
    architecture = catalogue.find("Qwen/Qwen3-0.6B")
    assert architecture is not None
    work = Workload(sequences=10, mean_tokens=100, longest_tokens=200, trained_share=share)
    with pytest.raises(DataError, match=r"% of the tokens carry loss"):
        forecast_run(RunConfig(), architecture=architecture, machine=machine_with("RTX 4090"), workload=work)


def test_a_fixed_wish_that_breaks_the_plan_is_suggested_to_be_freed() -> None:
    with pytest.raises(WontFit, match=r"Leaving memory\.micro_batch to auto would need"):
        forecast(wish(memory={"micro_batch": 512}, schedule={"sequences_per_step": 512}), of="Qwen/Qwen3-8B")


@pytest.mark.parametrize(
    ("schedule", "steps"),
    [
        ({}, 63),  # 1000 sequences, 16 a step: 62 whole steps and one of 8
        ({"epochs": 3}, 189),
        ({"epochs": 0.5}, 32),
        ({"epochs": 0.001}, 1),
        ({"sequences_per_step": 1000}, 1),
        ({"max_steps": 7, "epochs": 100}, 7),
    ],
)
def test_steps_are_counted_as_the_training_counts_them(schedule: dict[str, Any], steps: int) -> None:
    assert total_steps(wish(schedule=schedule), LONG) == steps


def test_steps_are_those_of_the_step_order() -> None:
    from vramfit.data.batches import StepOrder

    for sequences in (1, 7, 100, 1001):
        for per_step in (1, 4, 16, 2000):
            for epochs in (0.1, 0.5, 1, 1.7, 3):
                order = StepOrder([1] * sequences, sequences_per_step=per_step, seed=0, epochs=epochs)
                schedule = {"epochs": epochs, "sequences_per_step": per_step}
                workload = Workload(sequences=sequences, mean_tokens=1, longest_tokens=1)
                assert total_steps(wish(schedule=schedule), workload) == order.total_steps


def test_adapter_targets_that_match_nothing_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.targets.*query_key_value matches 0"):
        forecast(wish(adapter={"targets": ["query_key_value"]}))


def test_each_target_must_match_and_endings_count_as_their_names() -> None:
    with pytest.raises(ConfigError, match=r"adapter\.targets.*: nope matches 0"):
        forecast(wish(adapter={"targets": ["q_proj", "nope"]}))
    short, long = (forecast(wish(adapter={"targets": [name]})) for name in ("q_proj", "self_attn.q_proj"))
    assert long.memory == short.memory
    assert long.memory.breakdown["adapters"] > 0


def test_a_micro_batch_is_no_larger_than_the_step() -> None:
    found = forecast(wish(memory={"micro_batch": 64}, schedule={"sequences_per_step": 4}), on="RTX 3060")
    assert (found.plan.micro_batch, found.plan.accumulation) == (4, 1)
    assert "You set it to 64, and a step has 4 sequences" in reason(found, "micro-batch")


def test_a_step_is_no_larger_than_an_epoch() -> None:
    few = Workload(sequences=5, mean_tokens=400, longest_tokens=1500)
    found = forecast(wish(schedule={"sequences_per_step": 512}), workload=few)
    assert found.plan.micro_batch * found.plan.accumulation in (5, 6)
    assert found.speed.tokens_per_s * found.speed.step_seconds == pytest.approx(5 * 400)


def test_no_sequences_are_refused() -> None:
    with pytest.raises(DataError, match="0 sequences"):
        forecast(wish(), workload=Workload(sequences=0, mean_tokens=0, longest_tokens=0))


@pytest.mark.parametrize(
    ("changes", "tier", "words"),
    [
        (
            {"ram_bytes": 2 * GIB, "ram_free_bytes": GIB},
            "host",
            r"3\.\d GiB of RAM .* has 2\.0 GiB, 1\.0 GiB of it free",
        ),
        ({"disk_free_bytes": 11 * GIB}, "disk", r"of disk, and 11\.0 GiB are free"),
    ],
)
def test_case_125_ram_and_disk_are_tiers_that_can_be_too_small(changes: dict[str, Any], tier: str, words: str) -> None:
    machine = dataclasses.replace(machine_with("RTX 4090"), **changes)
    with pytest.raises(WontFit, match=words) as raised:
        forecast_run(wish("full"), architecture=model("Qwen/Qwen3-0.6B"), machine=machine, workload=LONG)
    assert raised.value.tier == tier
    assert raised.value.needed_bytes > raised.value.available_bytes
    if tier == "disk":
        assert raised.value.suggestions[0].startswith("Keeping 1 checkpoint")
        kept = wish("full", output={"keep_checkpoints": 1})
        assert forecast_run(kept, architecture=model("Qwen/Qwen3-0.6B"), machine=machine, workload=LONG).fits


def test_a_plan_is_plain_values_with_reasons() -> None:
    values = json.loads(json.dumps(forecast(wish()).to_json()))["plan"]

    assert values["micro_batch"] >= 1
    assert {"setting", "value", "reason", "fixed"} <= values["reasons"][0].keys()


def test_a_small_step_is_not_cut_where_the_passes_cost_more_than_the_padding_they_save() -> None:
    """The starter on two cores: four sequences at once took 36.9 ms, two at a time 42.1 (in turn, in one run)."""
    machine = laptop()
    cpu = dataclasses.replace(machine.devices[0], flops={"fp32": 90e9})
    machine = dataclasses.replace(machine, devices=(cpu,))
    workload = corpus_workload(starter_run().data.paths[0])
    plan = forecast_run(starter_run(), architecture=shape.architecture(), machine=machine, workload=workload).plan
    assert (plan.micro_batch, plan.accumulation) == (4, 1)


def test_planning_imports_no_torch() -> None:
    code = "import vramfit.planning.planner, sys; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_other_ways_are_told_with_what_this_version_lacks() -> None:
    found = forecast(wish(), of="meta-llama/Meta-Llama-3-8B")
    names = [other.name for other in found.alternatives]

    assert "streaming from RAM" in names
    assert all(other.needs == () for other in found.alternatives)  # this version has all ways for adapters on one card
    assert all(other.reason for other in found.alternatives)
    fitting = [other.step_seconds for other in found.alternatives if other.fits]
    assert fitting == sorted(fitting)


def test_what_this_version_lacks_is_never_chosen() -> None:
    """An 8B from random weights fits 24 GiB only by streaming: an engine that cannot begin so refuses it."""
    machine = machine_with("RTX 4090", ram_gib=256)
    with pytest.raises(WontFit) as refusal:
        forecast_run(
            wish("pretrain"),
            architecture=model("meta-llama/Meta-Llama-3-8B"),
            machine=machine,
            workload=LONG,
            abilities=WITHOUT_A_START,
        )
    designed = forecast_run(
        wish("pretrain"),
        architecture=model("meta-llama/Meta-Llama-3-8B"),
        machine=machine,
        workload=LONG,
        abilities=DESIGNED,
    )

    assert designed.fits
    assert designed.plan.weights_tier == "host"
    assert (
        any("not in this version" in sentence for sentence in refusal.value.suggestions)
        or designed.memory.host_bytes > 64 * GIB
    )
    assert any(sentence.startswith("The smallest card") for sentence in refusal.value.suggestions)


def test_several_cards_are_planned_together_within_the_design() -> None:
    machine = machine_with("A100 80GB", count=4, ram_gib=512)
    found = forecast_run(
        wish("full"),
        architecture=model("meta-llama/Meta-Llama-3-8B"),
        machine=machine,
        workload=LONG,
        abilities=DESIGNED,
    )

    assert found.plan.cards == 4
    assert found.plan.micro_batch * found.plan.accumulation * 4 >= 16
    assert any(choice.setting == "cards" for choice in found.plan.reasons)


def test_streaming_keeps_as_many_blocks_as_fit() -> None:
    def resident(gib: float) -> int:
        config = wish("qlora", memory={"budget_gib": gib})
        found = Search.of(config, model("meta-llama/Meta-Llama-3-70B"), machine_with("RTX 4090", ram_gib=128), LONG)
        family = next(family for family in found.designed.families if family.name == "streaming from RAM")
        best = found.fitting(family)[0]
        assert best.memory.device_bytes <= gib * GIB
        return best.plan.resident_blocks

    assert resident(12) < resident(16) < resident(22)


def test_a_tier_on_disk_that_is_too_small_is_named() -> None:
    machine = dataclasses.replace(machine_with("RTX 4090", ram_gib=64), disk_free_bytes=200 * GIB)
    with pytest.raises(
        WontFit, match=r"Blocks and optimizer states that live on disk.* need \d+\.\d GiB of disk"
    ) as told:
        forecast_run(wish("full"), architecture=model("meta-llama/Meta-Llama-3-8B"), machine=machine, workload=LONG)

    assert told.value.tier == "disk"
    assert told.value.needed_bytes > 200 * GIB == told.value.available_bytes


def test_what_a_run_writes_to_a_drive_is_among_the_reasons() -> None:
    machine = machine_with("RTX 4090", ram_gib=64)
    found = forecast_run(wish("full"), architecture=model("meta-llama/Meta-Llama-3-8B"), machine=machine, workload=LONG)

    told = {choice.setting: choice for choice in found.plan.reasons}
    steps = 2_400 * 10**12 // found.memory.written_per_step_bytes
    assert (found.plan.weights_tier, found.plan.optimizer_tier) == ("disk", "disk")
    assert found.plan.trained_format == found.plan.weight_format == "bf16"
    assert f"{steps:,} such steps" in told["disk writes"].reason
    assert "fp32 copy" in told["weights"].reason
    # gradients, weights and 12 bytes of states with their fp32 copy: 2 + 2 + 12 a weight of the blocks, 12 of the rest
    inside = found.memory.written_per_step_bytes
    shape = model("meta-llama/Meta-Llama-3-8B")
    assert inside == pytest.approx(4 * (shape.params - shape.outside_params) + 12 * shape.params, rel=1e-6)


def test_a_way_that_needs_less_disk_is_taken_where_the_disk_is_small() -> None:
    """Three checkpoints with states in 32 bits need 22 GiB, in 8 bits 13."""
    roomy = machine_with("RTX 4090")
    small = dataclasses.replace(roomy, disk_free_bytes=20 * GIB)
    architecture = model("Qwen/Qwen3-0.6B")
    at_ease = forecast_run(wish("full"), architecture=architecture, machine=roomy, workload=LONG)
    found = forecast_run(wish("full"), architecture=architecture, machine=small, workload=LONG)

    assert (at_ease.plan.optimizer_bits, found.plan.optimizer_bits) == (32, 8)
    assert at_ease.memory.disk_bytes > 20 * GIB >= found.memory.disk_bytes
    why = next(other.reason for other in found.alternatives if other.name == "on the device")
    assert "of disk, and 20.0 GiB are free" in why


def test_checkpoints_that_stay_for_good_take_disk_by_their_number() -> None:
    architecture, machine = model("Qwen/Qwen3-0.6B"), machine_with("RTX 4090")

    def disk(**output: Any) -> int:
        config = wish("full", schedule={"max_steps": 1000}, output=output)
        return forecast_run(config, architecture=architecture, machine=machine, workload=LONG).memory.disk_bytes

    each = 12 * architecture.params  # weights and two moments in fp32
    assert disk() == 3 * each + 4 * architecture.params
    assert disk(keep_every=100) - disk() == 10 * each
    assert disk(keep_every=300) - disk() == 3 * each
    assert disk(keep_every=1001) == disk()
    assert disk(keep_best=True) - disk() == each


def test_the_result_takes_disk_as_it_is_exported() -> None:
    architecture, machine = model("Qwen/Qwen3-0.6B"), machine_with("RTX 4090")

    def disk(**output: Any) -> int:
        config = wish("qlora", output=output)
        return forecast_run(config, architecture=architecture, machine=machine, workload=LONG).memory.disk_bytes

    adapters = adapter_params(architecture, rank=16, targets=("all-linear",))
    assert disk() == (3 * 12 + 4) * adapters
    assert disk(export="merged") == 3 * 12 * adapters + 2 * architecture.params


@pytest.mark.parametrize(("bits", "each"), [("32", 12.0), ("8", 4 + 2 * (1 + 4 / 256))])
def test_a_checkpoint_is_as_large_as_what_trains_and_its_states(bits: str, each: float) -> None:
    config = wish("full", memory={"optimizer_bits": bits})
    architecture = model("Qwen/Qwen3-0.6B")
    found = forecast_run(config, architecture=architecture, machine=machine_with("RTX 4090"), workload=LONG)
    assert found.memory.written_per_checkpoint_bytes == pytest.approx(each * architecture.params, rel=0.001)


def test_a_refusal_names_changes_that_stream_and_the_ram_that_would_do() -> None:
    machine = machine_with("RTX 4060 Ti 16GB", ram_gib=16)
    found = refusal_on(machine, of="Qwen/Qwen3-32B", method="full")
    named = next(text for text in found.suggestions if text.startswith("QLoRA with sequences of at most"))
    assert "of RAM (streaming from disk)" in named
    shorter = wish("qlora", data={"max_length": int(named.split()[6])})
    changed = forecast_run(shorter, architecture=model("Qwen/Qwen3-32B"), machine=machine, workload=LONG)
    assert changed.plan.weights_tier == "disk"
    little = dataclasses.replace(machine, ram_bytes=4 * GIB, disk_free_bytes=10 * GIB)  # of either for blocks' inputs
    lacks = refusal_on(little, of="Qwen/Qwen3-32B", method="lora")
    needed = next(text for text in lacks.suggestions if "of RAM, of which this machine has 4.0 GiB" in text)
    enough = dataclasses.replace(little, ram_bytes=int((float(needed.split()[1]) + 0.1) * GIB))
    assert forecast_run(wish("lora"), architecture=model("Qwen/Qwen3-32B"), machine=enough, workload=LONG).fits


@pytest.mark.parametrize(
    ("of", "method"),
    [("Qwen/Qwen3-8B", "full"), ("Qwen/Qwen3-4B", "full"), ("Qwen/Qwen3-32B", "qlora"), ("google/gemma-2-27b", "lora")],
)
def test_the_smallest_card_is_one_on_which_the_wish_fits_with_this_machine_s_ram_and_disk(of: str, method: str) -> None:
    """As by trying every card; by whatever way: streaming counts."""
    config, architecture = wish(method, memory={"activations": "keep"}), model(of)
    machine = machine_with("RTX 3060", ram_gib=64)
    with pytest.raises(WontFit) as raised:
        forecast_run(config, architecture=architecture, machine=machine, workload=LONG)
    named = [text for text in raised.value.suggestions if text.startswith("The smallest card")]

    fitting = []
    for card in sorted(cards(), key=lambda card: card.memory_bytes):
        there = machine_with(card, ram_gib=64)
        with contextlib.suppress(WontFit):
            forecast_run(config, architecture=architecture, machine=there, workload=LONG)
            fitting.append(card.memory_gib)
    assert fitting
    assert f"({fitting[0]:g} GiB)" in named[0]


@pytest.mark.parametrize(("method", "tokens"), [("full", 131072), ("lora", 16384)])
def test_shorter_sequences_are_named_as_long_as_they_may_be(method: str, tokens: int) -> None:
    """Of all halves down to 64 tokens the longest that fits, however far down: found as by trying every one."""
    machine, architecture = machine_with("RTX 4060 Ti 16GB", ram_gib=16), model("google/gemma-2-27b")
    work = Workload(sequences=100, mean_tokens=tokens, longest_tokens=tokens)
    config = wish(method, data={"max_length": tokens})
    with pytest.raises(WontFit) as raised:
        forecast_run(config, architecture=architecture, machine=machine, workload=work)
    named = next(text for text in raised.value.suggestions if text.startswith("QLoRA with sequences of at most"))

    fitting = []
    for length in (tokens >> power for power in range(1, 12) if tokens >> power >= 64):
        with contextlib.suppress(WontFit):
            changed = wish("qlora", data={"max_length": length})
            forecast_run(changed, architecture=architecture, machine=machine, workload=work)
            fitting.append(length)
    assert 64 <= fitting[0] < tokens // 2
    assert int(named.split()[6]) == fitting[0]


def test_where_no_single_change_is_enough_all_that_was_fixed_is_left_to_auto() -> None:
    fixed = {"activations": "keep", "loss": "full", "micro_batch": 64}
    config = wish("lora", memory=fixed, schedule={"sequences_per_step": 64}, data={"max_length": 8192})
    work = Workload(sequences=100, mean_tokens=8192, longest_tokens=8192)
    machine, architecture = machine_with("RTX 3060", ram_gib=32), model("google/gemma-2-27b")
    with pytest.raises(WontFit) as raised:
        forecast_run(config, architecture=architecture, machine=machine, workload=work)
    told = [text for text in raised.value.suggestions if "every memory setting left to auto" in text]
    named = next(text for text in told if text.startswith("QLoRA with sequences of at most"))
    changed = wish("qlora", schedule={"sequences_per_step": 64}, data={"max_length": int(named.split()[6])})

    assert len(told) == 2
    assert forecast_run(changed, architecture=architecture, machine=machine, workload=work).fits


@pytest.mark.parametrize("method", ["full", "lora", "qlora"])
@pytest.mark.parametrize("on", ["RTX 3060", "RTX 4090", "laptop"])
@pytest.mark.parametrize(
    "of", ["Qwen/Qwen3-0.6B", "bigscience/bloom", "Qwen/Qwen3-30B-A3B", "google/gemma-3-27b-pt (text)"]
)
def test_what_is_refused_without_an_estimate_does_not_fit_by_one(of: str, on: str, method: str) -> None:
    machine = laptop() if on == "laptop" else machine_with(on)
    search = Search.of(wish(method), model(of), machine, LONG, abilities=DESIGNED)

    for family in search.families:
        least = search.least(family)
        known = least_memory(search.architecture, least.plan, LONG, checkpoints=search.checkpoints)
        assert known.device_bytes <= least.memory.device_bytes
        assert known.disk_bytes == least.memory.disk_bytes
        if on != "laptop":
            assert known.host_bytes == least.memory.host_bytes
        assert not (search.is_hopeless(family) and least.fits), family.name


def test_a_family_whose_states_alone_are_too_much_is_refused_without_an_estimate() -> None:
    """27 billion parameters with their gradients and states are over 400 GiB, wherever they lie."""
    search = Search.of(wish("full"), model("google/gemma-3-27b-pt (text)"), machine_with("RTX 3060"), LONG)
    hopeless = {family.name for family in search.families if search.is_hopeless(family)}

    assert {"on the device", "8-bit optimizer", "optimizer in RAM", "streaming from RAM"} <= hopeless
    small = Search.of(wish("lora"), model("Qwen/Qwen3-0.6B"), machine_with("RTX 3060"), LONG)
    assert not any(map(small.is_hopeless, small.families))


@pytest.mark.parametrize(
    ("of", "on", "ram_gib", "changes", "micro_batch"),
    [
        ("mistralai/Mistral-7B-v0.3", "A100 80GB", 64, {"data": {"max_length": 256}}, 16),
        ("bigcode/starcoder2-15b", "MI300X", 64, {"schedule": {"sequences_per_step": 2}}, 2),
        (
            "THUDM/glm-4-9b",
            "H100 PCIe",
            128,
            {"schedule": {"sequences_per_step": 4}, "memory": {"optimizer_place": "host"}, "data": {"max_length": 512}},
            4,
        ),
    ],
)
def test_a_step_in_one_pass_is_tried_where_gradients_would_wait_for_a_second(
    of: str, on: str, ram_gib: int, changes: dict[str, Any], micro_batch: int
) -> None:
    """With one sequence at a time these needed a disk, or were refused: the gradients of billions of weights wait."""
    card = next(card for card in cards() if on in card.name)
    length = changes.get("data", {}).get("max_length", 2048)
    work = Workload(sequences=1000, mean_tokens=length, longest_tokens=length)
    found = forecast_run(
        wish("full", **changes), architecture=model(of), machine=machine_with(card, ram_gib=ram_gib), workload=work
    )

    assert found.fits
    assert (found.plan.micro_batch, found.plan.accumulation) == (micro_batch, 1)
    assert found.plan.weights_tier == "device"


@pytest.mark.parametrize("seed", range(12))
def test_nothing_fixed_is_never_worse_than_the_whole_step_fixed(seed: int) -> None:
    pick = random.Random(seed)
    of = pick.choice(["Qwen/Qwen3-8B", "microsoft/phi-2", "google/gemma-2-2b", "mistralai/Mistral-7B-v0.3"])
    sequences, length = pick.choice((2, 8, 16)), pick.choice((256, 1024))
    memory = pick.choice(({}, {"optimizer_place": "host"}, {"trained_weights": "bf16"}, {"optimizer": "sgd"}))
    machine = machine_with(pick.choice(cards()), ram_gib=pick.choice((32, 64, 128)))
    work = Workload(sequences=1000, mean_tokens=length, longest_tokens=length)

    def search(**wishes: Any) -> Search:
        config = wish(
            "full",
            memory={**memory, **wishes},
            schedule={"sequences_per_step": sequences},
            data={"paths": ["data.json"], "max_length": length},
        )
        return Search.of(config, model(of), machine, work)

    free, fixed = search(), search(micro_batch=sequences).best()
    best = free.best()
    if fixed is not None:
        assert best is not None
        assert best.speed.step_seconds <= 1.15 * fixed.speed.step_seconds  # exact numbers may cost a tenth
    for family in free.families:
        assert not (free.is_hopeless(family) and free.fitting(family)), family.name


@pytest.mark.parametrize(
    ("of", "on", "changes"),
    [
        ("meta-llama/Llama-3.1-70B", "RTX 4090", {"method": "full"}),
        ("meta-llama/Llama-3.1-405B", "RTX 4090", {"memory": {"activations": "keep", "micro_batch": 1}}),
        ("Qwen/Qwen3-4B", "laptop", {"method": "full", "memory": {"optimizer": "muon", "activations": "keep"}}),
    ],
)
def test_a_device_with_what_is_named_would_do(of: str, on: str, changes: dict[str, Any]) -> None:
    """With its reserve, and the RAM and disk that are named beside it."""
    machine = laptop() if on == "laptop" else machine_with(on, ram_gib=3)
    work = Workload(sequences=1000, mean_tokens=2048, longest_tokens=2048)

    def refusal(there: Machine) -> WontFit | None:
        try:
            forecast_run(wish(**changes), architecture=model(of), machine=there, workload=work)
        except WontFit as error:
            return error
        return None

    error = refusal(machine)
    assert error is not None
    told = next(each for each in map(str, error.suggestions) if "would do" in each)
    named = re.search(r"([\d.]+) GiB (?:of RAM )?free", told)
    assert named is not None
    free = int(float(named[1]) * GIB)
    beside = {what: int(float(number) * GIB) for number, what in re.findall(r"([\d.]+) GiB of (RAM|free disk)", told)}
    device = dataclasses.replace(machine.devices[0], memory_bytes=free, free_bytes=free)
    ram = free if device.kind == "cpu" else beside.get("RAM", machine.ram_bytes)
    disk = beside.get("free disk", machine.disk_free_bytes)
    assert refusal(dataclasses.replace(machine, devices=(device,), ram_bytes=ram, disk_free_bytes=disk)) is None
