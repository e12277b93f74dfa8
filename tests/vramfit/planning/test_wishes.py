"""What a person fixes reaches the plan as it was meant, or is refused with the setting and what can be had instead."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import pytest

from vramfit.config import RunConfig
from vramfit.errors import ConfigError
from vramfit.hardware.catalogue import machine_with
from vramfit.hardware.devices import Machine
from vramfit.models import catalogue
from vramfit.planning.abilities import DESIGNED, ENGINE, FEATURES, missing
from vramfit.planning.plan import CompileMode, Plan, Workload, records_graphs, without_graphs
from vramfit.planning.planner import forecast_run
from vramfit.units import GIB

WORK = Workload(sequences=1000, mean_tokens=400, longest_tokens=1500)


def planned(
    memory: dict[str, Any],
    *,
    method: str = "full",
    of: str = "Qwen/Qwen3-0.6B",
    on: Machine | str = "RTX 4090",
    **changes: Any,
) -> Plan:
    values = {"method": method, "model": {"source": "some/model"}, "data": {"paths": ["data.json"]}, "memory": memory}
    architecture = catalogue.find(of)
    assert architecture is not None
    machine = machine_with(on) if isinstance(on, str) else on
    config = RunConfig.parse({**values, **changes})
    found = forecast_run(config, architecture=architecture, machine=machine, workload=WORK, abilities=DESIGNED)
    return found.plan


def without_card() -> Machine:
    machine = machine_with("RTX 4090")
    cpu = dataclasses.replace(
        machine.devices[0],
        kind="cpu",
        name="CPU",
        torch_device="cpu",
        memory_bytes=64 * GIB,
        free_bytes=48 * GIB,
        bf16=False,
        fp16=False,
    )
    return dataclasses.replace(machine, devices=(cpu,))


def test_nothing_fixed_is_adamw_in_32_bits_after_backward_on_the_device() -> None:
    plan = planned({})

    assert (plan.optimizer, plan.optimizer_bits, plan.optimizer_tier) == ("adamw", 32, "device")
    assert not plan.optimizer_in_backward
    assert not plan.optimizer_paged
    assert not plan.compiled
    assert plan.trained_format == "fp32"
    assert plan.attention == "sdpa"


@pytest.mark.parametrize(
    ("memory", "fields"),
    [
        ({"optimizer": "lion", "optimizer_bits": "8"}, {"optimizer": "lion", "optimizer_bits": 8}),
        ({"optimizer": "muon"}, {"optimizer": "muon", "optimizer_bits": 32}),
        ({"optimizer_bits": "4"}, {"optimizer": "adamw", "optimizer_bits": 4}),
        ({"optimizer_place": "host"}, {"optimizer_tier": "host", "optimizer_paged": False}),
        ({"optimizer_place": "paged"}, {"optimizer_tier": "device", "optimizer_paged": True}),
        ({"trained_weights": "bf16"}, {"trained_format": "bf16", "weight_format": "bf16"}),
        ({"activations": "compress"}, {"compress": 28, "recompute": 0}),
        ({"activations": "offload"}, {"recompute": 28, "input_tier": "host", "compress": 0}),
        ({"activations": "recompute"}, {"recompute": 28, "input_tier": "device"}),
        ({"compile": "reduce-overhead"}, {"compiled": True, "compile_mode": "reduce-overhead"}),
        ({"compile": "max-autotune"}, {"compiled": True, "compile_mode": "max-autotune"}),
        ({"compile": "off"}, {"compiled": False}),
        ({"attention": "flash"}, {"attention": "flash"}),
        ({"precision": "tf32"}, {"compute": "tf32", "weight_format": "fp32"}),
    ],
)
def test_a_fixed_wish_is_the_plan(memory: dict[str, Any], fields: dict[str, Any]) -> None:
    plan = planned(memory)

    assert {name: getattr(plan, name) for name in fields} == fields


def test_the_longest_search_goes_without_graphs_where_none_can_be_recorded() -> None:
    """On a CPU, and where blocks visit, which has their weights in another place each time: told with its reason."""
    stays = planned({"compile": "max-autotune"})
    on_cpu = planned({"compile": "max-autotune"}, on=without_card())
    visits = planned({"compile": "max-autotune", "budget_gib": 8.0}, method="lora", of="Qwen/Qwen3-8B")

    assert (stays.weights_tier, visits.weights_tier) == ("device", "host")
    assert stays.records_graphs and not on_cpu.records_graphs and not visits.records_graphs
    assert on_cpu.compile_mode == visits.compile_mode == "max-autotune-no-cudagraphs"
    assert on_cpu.compiled and visits.compiled
    told = {
        plan.device: choice.reason for plan in (stays, on_cpu) for choice in plan.reasons if choice.setting == "compile"
    }
    assert told["cuda:0"] == "You set it" and "graphs are recorded on NVIDIA and AMD cards alone" in told["cpu"]


def test_which_modes_record_graphs_is_what_torch_says() -> None:
    torch = pytest.importorskip("torch")
    for mode in get_args(CompileMode):
        options = torch._inductor.list_mode_options(mode)
        assert records_graphs(mode) is bool(options.get("triton.cudagraphs"))
        other = without_graphs(mode)
        left = {name: value for name, value in options.items() if name != "triton.cudagraphs"}
        assert (torch._inductor.list_mode_options(other) if other else {}) == left


def test_a_step_in_backward_takes_the_whole_step_at_once_and_finds_the_norm_in_a_pass_of_its_own() -> None:
    schedule = {"sequences_per_step": 4}
    exact = planned({"optimizer_step": "in backward"}, schedule=schedule)
    one = planned({"optimizer_step": "in backward, one pass"}, schedule=schedule)
    unclipped = planned({"optimizer_step": "in backward"}, schedule={**schedule, "max_grad_norm": 0})

    assert (exact.micro_batch, exact.accumulation, exact.clip_passes) == (4, 1, 2)
    assert one.optimizer_in_backward
    assert one.clip_passes == 1
    assert unclipped.optimizer_in_backward
    assert unclipped.clip_passes == 1


def test_kinds_of_adapters() -> None:
    mixture = planned({}, method="qlora", of="Qwen/Qwen3-30B-A3B", adapter={"experts": True})

    assert mixture.lora_experts
    assert not mixture.dora
    assert planned({}, method="lora", adapter={"variant": "dora"}).dora
    assert not planned({}, method="lora", adapter={"variant": "rslora"}).dora


@pytest.mark.parametrize(
    ("memory", "field", "says"),
    [
        ({"optimizer": "sgd", "optimizer_bits": "8"}, "memory.optimizer_bits", "sgd keeps its states in 32 bits"),
        ({"optimizer": "lion", "optimizer_bits": "4"}, "memory.optimizer_bits", "in 32 or 8 bits, not in 4"),
        ({"optimizer_bits": "4", "optimizer_place": "paged"}, "memory.optimizer_place", "adamw in 4 bits has none"),
        (
            {"optimizer_place": "host", "optimizer_step": "in backward"},
            "memory.optimizer_step",
            "are not done together",
        ),
        ({"trained_weights": "bf16", "precision": "fp32"}, "memory.trained_weights", "this run computes in fp32"),
        ({"attention": "flash", "precision": "fp32"}, "memory.attention", "this run computes in fp32"),
    ],
)
def test_wishes_that_contradict_each_other(memory: dict[str, Any], field: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        planned(memory)

    assert [problem.field for problem in caught.value.problems] == [field]
    assert caught.value.problems[0].remedy


@pytest.mark.parametrize(
    ("memory", "says"),
    [
        ({"optimizer_place": "host"}, "in RAM already"),
        ({"optimizer_place": "paged"}, "CPU has none"),
        ({"activations": "offload"}, "in RAM already"),
        ({"attention": "flash"}, "CPU is none"),
        ({"compile": "reduce-overhead"}, "CUDA graphs need"),
        ({"precision": "tf32"}, "cannot compute in tf32"),
        ({"trained_weights": "bf16"}, "computes in fp32"),
    ],
)
def test_what_a_machine_without_a_card_cannot_do(memory: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        planned(memory, on=without_card())


def test_tf32_needs_a_card_that_has_it() -> None:
    with pytest.raises(ConfigError, match="cannot compute in tf32"):
        planned({"precision": "tf32"}, on="Arc A770")


def test_adapters_stay_in_fp32() -> None:
    with pytest.raises(ConfigError, match="lora trains adapters"):
        planned({"trained_weights": "bf16"}, method="lora")


def test_a_family_without_a_kernel_for_its_attention() -> None:
    assert planned({}, of="google/gemma-2-2b", method="lora").attention == "eager"
    with pytest.raises(ConfigError, match="sdpa has no kernel"):
        planned({"attention": "sdpa"}, of="google/gemma-2-2b", method="lora")


def test_the_engine_can_do_nothing_that_is_not_designed() -> None:
    assert ENGINE.features <= DESIGNED.features == set(FEATURES)
    assert set(ENGINE.optimizers) <= set(DESIGNED.optimizers)
    assert set(ENGINE.optimizer_bits) <= set(DESIGNED.optimizer_bits)


def test_what_an_engine_lacks_is_refused_by_name() -> None:
    bare = dataclasses.replace(ENGINE, features=frozenset(), optimizers=("adamw",), optimizer_bits=(32,))
    plan = planned({"optimizer_bits": "8", "activations": "compress"})

    assert missing(plan, bare) == ("8-bit optimizer states", "activations in 8 bits")
    assert missing(plan, DESIGNED) == ()


def test_states_are_rounded_only_where_that_is_worth_it() -> None:
    """A 0.6B is as fast with states of 32 bits, and a 1.7B does not fit with them."""
    assert planned({}, of="Qwen/Qwen3-0.6B").optimizer_bits == 32
    assert planned({}, of="Qwen/Qwen3-1.7B").optimizer_bits == 8
