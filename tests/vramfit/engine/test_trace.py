"""The traced step against real ones, against the closed form, and its own extrapolation against whole traces."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from vramfit.engine.trace import StorageFollower, _Depths, answer, trace
from vramfit.errors import ModelError, UserError
from vramfit.models import catalogue
from vramfit.models.architecture import Architecture, from_config
from vramfit.models.config_json import config_values
from vramfit.planning.cap import needs_of
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Plan, Workload

BENCH = Path(__file__).parents[3] / "bench"
ADAPTED: dict[str, Any] = {"method": "lora", "lora_rank": 8, "lora_targets": ("all-linear",)}
IN_16_BITS: dict[str, Any] = {**ADAPTED, "compute": "bf16", "weight_format": "bf16"}
EAGER: dict[str, Any] = {**IN_16_BITS, "attention": "eager"}

pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning", "ignore::RuntimeWarning"),
]


def load_bench(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, BENCH / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def plan(**changes: Any) -> Plan:
    values: dict[str, Any] = {
        "method": "full",
        "device": "cpu",
        "budget_bytes": 0,
        "compute": "fp32",
        "weight_format": "fp32",
        "max_length": 512,
        "micro_batch": 2,
        "accumulation": 1,
        "recompute": 0,
        "loss": "chunked",
        "loss_chunk_tokens": 128,
    }
    return Plan(**{**values, **changes})


def closed_form(architecture: Architecture, wish: Plan) -> int:
    work = Workload(sequences=10, mean_tokens=wish.max_length, longest_tokens=wish.max_length, exact=True)
    return estimate_memory(architecture, wish, work).peak_bytes


class Live(StorageFollower):
    """Follows real tensors: operations do what they do, and nothing is answered in their place."""

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return func(*args, **kwargs)


def filled(model: nn.Module) -> None:
    with torch.no_grad():
        for weight in model.parameters():
            weight.normal_(std=0.02)


RESIDENT = (
    "pretrain recompute 0 full",
    "pretrain recompute 0 fused",
    "pretrain recompute 4 chunked",
    "pretrain recompute 2 chunked",
    "pretrain untied accumulation 2",
    "lora recompute 4 chunked",
    "lora dropout",
    "pretrain short recompute",
    "pretrain packed",
    "pretrain compress",
    "lora compress and recompute",
    "qwen3 with head norms",
    "gpt2 recompute",
)


@pytest.mark.parametrize("name", RESIDENT)
def test_a_trace_is_the_live_bytes_of_a_real_step(name: str) -> None:
    """In every phase, to the byte; and to half a percent what the allocator hands out, which has buffers inside kernels
    that no operation returns (torch's fused loss makes more of them)."""
    bench = load_bench("memory_against_cpu")
    case = next(case for case in bench.cases() if case.name == name)
    tracer = _Depths(case.config, bench.architecture_of(case), case.plan, case.plan.max_length, 1.0)
    layers = tracer.architecture.layers
    live, traced = tracer.follower(Live), tracer.follower()

    tracer.follow(case.plan, layers, live, filled)
    with FakeTensorMode(allow_non_fake_inputs=True):
        tracer.follow(case.plan, layers, traced)

    assert traced.peaks == live.peaks
    # Steps that are measured do not evaluate.
    peak = max(size for phase, size in live.peaks.items() if phase != "evaluation")
    assert peak == pytest.approx(bench.measured(case), rel=0.02 if case.plan.loss == "fused" else 0.005)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize(("loss", "compute"), [("full", "fp32"), ("full", "bf16"), ("chunked", "fp32")])
def test_a_tied_tables_two_gradients_are_summed_in_a_third_place_or_not(
    loss: str, compute: str, accumulation: int
) -> None:
    """Few tokens and many words, so that this is the peak; allocator, trace and closed form agree."""
    bench = load_bench("memory_against_cpu")
    base = bench.cases()[0].plan
    few = {"max_length": 16, "micro_batch": 1, "recompute": 4, "loss_chunk_tokens": 0 if loss == "full" else 16}
    wish = dataclasses.replace(base, **few, loss=loss, compute=compute, accumulation=accumulation)
    case = bench.Case("tied", {**bench.MODEL, "vocab_size": 32_768}, wish)
    closed, phase = bench.predicted(case)

    assert phase == "embedding"
    assert closed == pytest.approx(bench.measured(case), rel=0.001)
    assert closed == pytest.approx(trace(case.config, wish, length=16).peak_bytes, rel=0.001)


@pytest.mark.parametrize(
    ("method", "changes"),
    [("full", {}), ("lora", {"recompute": 7}), ("full", {"recompute": 3}), ("lora", {"recompute": 2, "compress": 4})]
    + [(method, {"recompute": 5, "input_tier": "host"}) for method in ("full", "lora")],
)
def test_extrapolated_depths_are_the_whole_trace(method: str, changes: dict[str, Any]) -> None:
    values = config_values(model("HuggingFaceTB/SmolLM2-135M"), layers=7)
    wish = plan(**changes, **(ADAPTED if method == "lora" else {}))

    few, whole = trace(values, wish, length=512), trace(values, wish, length=512, whole=True)

    assert whole.traced_blocks == 7
    assert few.peak_bytes == pytest.approx(whole.peak_bytes, rel=0.002)


def test_another_block_may_be_the_highest_at_few_blocks() -> None:
    """The first block, which has no experts, is as long as few blocks keep their inputs; at eight it is the last."""
    narrow = {"hidden_size": 256, "intermediate_size": 600, "moe_intermediate_size": 64, "n_routed_experts": 32}
    narrow |= {"num_experts_per_tok": 2, "n_shared_experts": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    values = {**config_values(model("moonshotai/Moonlight-16B-A3B"), layers=8), **narrow, "vocab_size": 512}
    few, whole = (trace(values, plan(recompute=8, **ADAPTED), length=256, whole=each) for each in (False, True))

    assert (few.traced_blocks, whole.traced_blocks) == (5, 8)
    assert few.phases == whole.phases


@pytest.mark.parametrize(
    "changes", [{"recompute": 4}, {"recompute": 4, "accumulation": 2}, ADAPTED, {"recompute": 4, "input_tier": "host"}]
)
def test_states_in_ram_are_not_on_the_device(changes: dict[str, Any]) -> None:
    """Nor are copies of weights, places of gradients and what the processor makes in its step: the device's peaks of
    forward are those of states there, less the states; at the step it holds the weights alone."""
    values = load_bench("memory_against_cpu").MODEL
    wish = plan(**changes)
    there, away = (
        trace(values, dataclasses.replace(wish, optimizer_tier=tier), length=512) for tier in ("device", "host")
    )
    architecture = from_config(values, "small")
    work = Workload(sequences=10, mean_tokens=512, longest_tokens=512, exact=True)
    states = estimate_memory(architecture, wish, work).peak.parts["optimizer"]

    assert there.phases["evaluation"] - away.phases["evaluation"] == pytest.approx(states, rel=0.001)
    assert away.phases["step"] == pytest.approx(away.phases["load"], rel=0.05)
    assert closed_form(architecture, dataclasses.replace(wish, optimizer_tier="host")) == pytest.approx(
        away.peak_bytes, rel=0.03
    )


def test_inputs_in_ram_are_not_on_the_device() -> None:
    """Fewer bytes by the inputs of all blocks but the one that is recomputed and the one that is fetched."""
    values = config_values(model("HuggingFaceTB/SmolLM2-135M"), layers=7)
    peaks = [
        trace(values, plan(recompute=7, **ADAPTED, input_tier=tier), length=512, whole=True).phases["backward"]
        for tier in ("device", "host")
    ]
    stream = 2 * 512 * 576 * 4
    assert 4 * stream <= peaks[0] - peaks[1] <= 6 * stream


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("meta-llama/Meta-Llama-3-8B", {"compute": "bf16", "recompute": 32}),
        ("Qwen/Qwen3-30B-A3B", {"recompute": 48}),
        ("mistralai/Mixtral-8x7B-v0.1", IN_16_BITS),
        ("meta-llama/Meta-Llama-3-70B", {**ADAPTED, "method": "qlora", "compute": "bf16", "weight_format": "nf4"}),
        ("EleutherAI/gpt-j-6b", {"recompute": 28}),
        ("google/gemma-3-270m", {**IN_16_BITS, "max_length": 1024}),  # its window of 512 is a mask
        ("deepseek-ai/DeepSeek-V2-Lite", IN_16_BITS),
        ("openai/gpt-oss-20b", EAGER),
        ("EleutherAI/gpt-neo-125m", EAGER),
        ("bigscience/bloom-560m", {**EAGER, "recompute": 24}),
        ("HuggingFaceTB/SmolLM2-135M", {**IN_16_BITS, "packing": True}),
        ("mistralai/Mistral-7B-v0.1", {"method": "full", "last_blocks": 8, "compute": "bf16", "recompute": 8}),
        ("allenai/OLMoE-1B-7B-0924", {"method": "full", "last_blocks": 4}),
    ],
)
def test_the_closed_form_is_within_three_percent_of_the_trace(name: str, changes: dict[str, Any]) -> None:
    architecture, wish = model(name), plan(**changes)

    made = trace(config_values(architecture), wish, length=wish.max_length, name=name)

    assert closed_form(architecture, wish) == pytest.approx(made.peak_bytes, rel=0.03)


@pytest.mark.parametrize(("length", "changes", "unit"), [(511, {}, 1), (512, {}, 6), (512, EAGER, 1)])
def test_depths_differ_by_whole_patterns_of_windows(length: int, changes: dict[str, Any], unit: int) -> None:
    """Every sixth block of Gemma 3 has no mask, where windows of 512 are masks and not added to the scores."""
    architecture, wish = model("google/gemma-3-270m"), plan(**{**changes, "max_length": length})

    assert _Depths(config_values(architecture), architecture, wish, length, 1.0)._unit == unit


def test_a_request_is_answered_by_a_process_of_its_own() -> None:
    architecture = model("HuggingFaceTB/SmolLM2-135M")
    request = {"config": config_values(architecture), "plan": dataclasses.asdict(plan()), "length": 128}

    done = subprocess.run(
        [sys.executable, "-m", "vramfit.engine.trace"],
        input=json.dumps(request).encode(),
        stdout=subprocess.PIPE,
        check=True,
    )
    told = json.loads(done.stdout.splitlines()[-1])["trace"]

    assert told["peak_bytes"] == trace(request["config"], plan(), length=128).peak_bytes  # type: ignore[arg-type]
    assert {phase for _, _, phase in told["timeline"]} >= {"loss", "backward", "step"}


def test_with_a_workload_the_answer_says_what_the_card_must_have() -> None:
    architecture = model("HuggingFaceTB/SmolLM2-135M")
    wish = plan(device="cuda:0", budget_bytes=8 * 2**30, recompute=30, max_length=128)
    work = Workload(sequences=10, mean_tokens=128, longest_tokens=128, exact=True)
    request = {
        "config": config_values(architecture),
        "plan": dataclasses.asdict(wish),
        "length": 128,
        "workload": dataclasses.asdict(work),
    }

    found = answer(request)["trace"]
    tensors = found["peak_bytes"]
    assert found["needs"] == dataclasses.asdict(
        needs_of(architecture, wish, work, tensors=tensors, device_bytes=wish.budget_bytes)
    )
    assert tensors < found["needs"]["reserved"] < found["needs"]["smallest"] < 1.5 * tensors + 0.6 * 2**30


def test_a_model_that_cannot_be_built_is_refused_in_words() -> None:
    with pytest.raises(ModelError, match="shape alone"):
        config_values(model("Qwen/Qwen-7B"))


@pytest.mark.parametrize("changes", [{"optimizer_bits": 8}, {"optimizer": "adafactor"}])
def test_the_steps_of_other_optimizers_are_traced_and_have_the_planned_states(changes: dict[str, Any]) -> None:
    smol = model("HuggingFaceTB/SmolLM2-135M")
    planned = plan(micro_batch=1, recompute=30, **changes)
    found = trace(config_values(smol), planned, length=64)
    work = Workload(sequences=10, mean_tokens=64, longest_tokens=64, exact=True)
    wanted = {phase.name: phase.total_bytes for phase in estimate_memory(smol, planned, work).phases}
    on_card = dataclasses.replace(planned, device="cuda:0")  # whose chunks are traced
    step = next(phase for phase in estimate_memory(smol, on_card, work).phases if phase.name == "step")
    assert found.phases["step"] == pytest.approx(step.total_bytes, rel=0.01)
    assert found.phases["evaluation"] == pytest.approx(wanted["evaluation"], rel=0.01)


def test_a_step_in_backward_is_traced_without_all_gradients() -> None:
    smol = model("HuggingFaceTB/SmolLM2-135M")
    after, within = (
        trace(config_values(smol), plan(micro_batch=1, recompute=30, optimizer_in_backward=each), length=64)
        for each in (False, True)
    )
    head = 4 * smol.head_params  # tied: its gradient waits for the embedding's
    assert after.phases["backward"] - within.phases["backward"] == pytest.approx(4 * smol.params - head, rel=0.02)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer_bits": 16}, "16-bit optimizer states"),
        ({"optimizer_tier": "disk"}, "states are in a file"),
        ({"compiled": True}, "fused by a compiler"),
        ({"cards": 2, "sharding": "fsdp"}, "several cards"),
        ({"weights_tier": "host"}, "blocks visit it one by one"),
        ({"weights_tier": "host", **ADAPTED}, "blocks visit it one by one"),
    ],
)
def test_a_plan_the_engine_cannot_run_is_refused_not_traced_as_another(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=words):
        trace(config_values(model("HuggingFaceTB/SmolLM2-135M")), plan(**changes), length=64)


@pytest.mark.parametrize("changes", [{}, {"optimizer_bits": 8}, {"optimizer": "muon"}, {"optimizer_in_backward": True}])
def test_states_are_those_of_a_step_that_ran_forward_and_backward(changes: dict[str, Any]) -> None:
    """They are made from made-up gradients: a second step, whose states a first one has left, has the same peaks."""
    values, wish = config_values(model("HuggingFaceTB/SmolLM2-135M"), layers=1), plan(**changes)
    made = trace(values, wish, length=64, whole=True)

    again = _Depths(values, from_config(values, "small"), wish, 64, 1.0, steps=2).trace(whole=True)

    assert again.phases == made.phases
