"""The closed form against real steps, and the rules every estimate obeys."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.memory import Work, estimate_memory
from vramfit.planning.plan import MemoryEstimate, PhaseMemory, Plan, Workload
from vramfit.planning.program import OURS
from vramfit.planning.stored import adapter_params, trained_params
from vramfit.units import GIB

BENCH = Path(__file__).parents[3] / "bench" / "memory_against_cpu.py"


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    """The measurement, which is a script."""
    import sys

    spec = importlib.util.spec_from_file_location("memory_against_cpu", BENCH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "name",
    [
        "pretrain recompute 0 full",
        "pretrain recompute 4 chunked",
        "pretrain compress",
        "lora recompute 2 chunked",
        "lora dropout",
        "lora compress and recompute",
    ],
)
@pytest.mark.filterwarnings("ignore::FutureWarning")  # peft asks transformers for a renamed property
def test_predicted_peak_is_that_of_a_real_step_within_three_percent(bench: ModuleType, name: str) -> None:
    case = next(case for case in bench.cases() if case.name == name)

    predicted, _ = bench.predicted(case)

    assert predicted == pytest.approx(bench.measured(case), rel=0.03)


def test_states_of_full_training_are_16_bytes_a_parameter(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    """fp32 weights 4, gradients 4, moments 8; torch's fused AdamW adds no temporary (the foreach one adds 4)."""
    architecture = model("HuggingFaceTB/SmolLM2-135M")
    estimate = estimate_memory(architecture, plan(method="full"), workload())
    step = next(phase for phase in estimate.phases if phase.name == "step")

    assert step.total_bytes == 16 * architecture.params


def test_lora_parameters_are_rank_times_inputs_and_outputs() -> None:
    """Llama-3-8B, rank 16 on all linears: 41.9 million, as PEFT prints it."""
    architecture = model("meta-llama/Meta-Llama-3-8B")

    assert adapter_params(architecture, rank=16, targets=("all-linear",)) == 41_943_040
    assert adapter_params(architecture, rank=16, targets=("q_proj", "v_proj")) == 6_815_744


def test_a_4_bit_70b_base_takes_35_to_40_gib(plan: Callable[..., Plan], workload: Callable[..., Workload]) -> None:
    architecture = model("meta-llama/Meta-Llama-3-70B")
    wish = plan(
        method="qlora", weight_format="nf4", compute="bf16", device="cuda:0", lora_rank=16, lora_targets=("all-linear",)
    )
    estimate = estimate_memory(architecture, wish, workload())

    assert 35 * GIB < estimate.peak.parts["weights"] < 40 * GIB


def test_the_peak_is_the_largest_phase_and_what_shows_on_the_device_is_more(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    for device, compute in (("cpu", "fp32"), ("cuda:0", "bf16")):
        estimate = estimate_memory(
            model("Qwen/Qwen3-0.6B"), plan(device=device, compute=compute, method="full"), workload()
        )

        assert estimate.peak_bytes == max(phase.total_bytes for phase in estimate.phases)
        assert estimate.low_bytes < estimate.peak_bytes < estimate.high_bytes
        assert estimate.device_bytes > estimate.peak_bytes
        assert sum(estimate.breakdown.values()) == estimate.device_bytes


@pytest.mark.parametrize("method", ["full", "lora"])
@pytest.mark.parametrize(
    "name", ["Qwen/Qwen3-0.6B", "openai-community/gpt2", "google/gemma-2-2b", "Qwen/Qwen3-30B-A3B"]
)
def test_saving_measures_save(
    plan: Callable[..., Plan], workload: Callable[..., Workload], name: str, method: str
) -> None:
    architecture = model(name)
    adapter = {"lora_rank": 8, "lora_targets": ("all-linear",)} if method == "lora" else {}

    def peak(**changes: object) -> int:
        usual = {"method": method, "micro_batch": 8, "max_length": 512, "loss": "full"}
        wish = plan(**{**usual, **adapter, **changes})
        return estimate_memory(architecture, wish, workload(512)).peak_bytes

    # Where the optimizer step is the peak (many experts), saving activations changes nothing.
    assert peak(recompute=architecture.layers) <= peak(recompute=architecture.layers // 2) <= peak()
    assert peak(micro_batch=4) <= peak()
    assert peak(max_length=256) <= peak()
    assert peak(loss="chunked") <= peak()
    assert peak(accumulation=4) >= peak()
    assert peak(recompute=architecture.layers, loss="chunked", micro_batch=1) < peak()


@pytest.mark.parametrize("mode", ["max-autotune", "reduce-overhead"])
def test_behind_recorded_launches_all_gradients_are_there_from_the_start(
    plan: Callable[..., Plan], workload: Callable[..., Workload], mode: str
) -> None:
    """4 bytes for each of fp32's, at the loss too; and a step in backward uses none of them up."""

    def at_loss(**changes: object) -> int:
        found = estimate_memory(model("HuggingFaceTB/SmolLM2-135M"), plan(compiled=True, **changes), workload())
        return next(phase.parts["gradients"] for phase in found.phases if phase.name == "loss")

    every = 4 * model("HuggingFaceTB/SmolLM2-135M").params
    without = at_loss(compile_mode="max-autotune-no-cudagraphs")
    assert at_loss(compile_mode=mode) - without == every
    assert at_loss(compile_mode=mode, optimizer_in_backward=True) - without == every


@pytest.mark.parametrize(
    ("device", "compute", "rows"),
    [
        ("cuda:0", "bf16", 128),  # 8,192 tokens over 49,152 / 576 = 86 pieces are 96: the next power of two
        ("cuda:0", "fp16", 0),
        ("cpu", "fp32", 0),
    ],
)
def test_a_fused_loss_counts_ligers_chunk_where_its_kernel_may_run(
    plan: Callable[..., Plan], workload: Callable[..., Workload], device: str, compute: str, rows: int
) -> None:
    """2 bytes a logit of its rows, or 8 of ours: whichever is more."""
    shape = model("HuggingFaceTB/SmolLM2-135M")
    options = {"device": device, "compute": compute, "micro_batch": 64, "loss_chunk_tokens": 16, "lora_rank": 8}
    options |= {"method": "lora", "lora_targets": ("all-linear",), "weight_format": compute}

    def logits(loss: str) -> int:
        found = estimate_memory(shape, plan(loss=loss, **options), workload())
        return next(phase.parts["logits"] for phase in found.phases if phase.name == "loss")

    assert logits("fused") - logits("chunked") == rows * 49_152 * 2 - (16 * 49_152 * 8 if rows else 0)


def test_only_the_longest_sequence_counts_unless_rows_are_packed(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("Qwen/Qwen3-0.6B")
    short = estimate_memory(architecture, plan(max_length=1024), workload(128))
    packed = estimate_memory(architecture, plan(max_length=1024, packing=True), workload(128))

    assert short.peak_bytes == estimate_memory(architecture, plan(max_length=128), workload(128)).peak_bytes
    assert packed.peak_bytes > short.peak_bytes


def test_what_trains_is_all_or_the_adapters(plan: Callable[..., Plan]) -> None:
    architecture = model("Qwen/Qwen3-0.6B")

    assert trained_params(architecture, plan()) == architecture.params
    assert trained_params(architecture, plan(lora_rank=4, lora_targets=("all-linear",))) < architecture.params / 50


def phase(estimate: MemoryEstimate, name: str) -> PhaseMemory:
    return next(phase for phase in estimate.phases if phase.name == name)


def test_evaluation_is_a_block_or_the_logits_never_both(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("EleutherAI/pythia-70m")
    small, large = (
        phase(
            estimate_memory(architecture, plan(method="full", loss="chunked", loss_chunk_tokens=rows), workload()),
            "evaluation",
        )
        for rows in (1, 64)
    )

    assert small.parts["logits"] == 0 < small.parts["working"]
    assert large.parts["logits"] > 0
    assert large.parts["working"] < small.parts["working"]


def test_a_mask_over_all_positions_is_in_every_block_of_gpt_neo(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("EleutherAI/gpt-neo-125m")
    loaded = phase(estimate_memory(architecture, plan(method="full", attention="eager"), workload()), "load")

    assert loaded.parts["weights"] == 4 * architecture.params + 12 * 2048**2


def test_scores_that_a_block_returns_are_there_in_the_next_ones_forward(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    """BLOOM's forward of recomputed blocks keeps nothing, yet what the block before returned is still in a variable."""
    architecture = model("bigscience/bloom-560m")
    wish = plan(method="full", attention="eager", recompute=24)
    work = Work.of(architecture, wish, workload(), OURS)
    inside = max(moment.per_token for moment in work.blocks[23].evaluation) * work.tokens

    assert work.forward_phase().parts["working"] == pytest.approx(
        inside + 4 * architecture.heads * work.length * work.tokens, abs=1
    )


def test_a_save_finds_states_alone_and_gradients_where_launches_are_recorded(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    """fp32 weights and two moments, 12 bytes a parameter; no phase of a step needs less than that and its gradients."""
    architecture = catalogue.find("Qwen/Qwen3-0.6B")
    assert architecture is not None
    plain = estimate_memory(architecture, plan(), workload())
    save = next(phase for phase in plain.phases if phase.name == "save")
    assert save.total_bytes == 12 * architecture.params
    assert plain.peak.name != "save"
    recorded = plan(device="cuda:0", compiled=True, compile_mode="reduce-overhead")
    held = next(phase for phase in estimate_memory(architecture, recorded, workload()).phases if phase.name == "save")
    assert held.parts["gradients"] == 4 * architecture.params
