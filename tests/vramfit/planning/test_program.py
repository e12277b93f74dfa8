"""What programs keep, hold and make: every fact against its own arithmetic, in units of the hidden size."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.block import BlockMemory, Formats, block_memory
from vramfit.planning.memory import Work, estimate_memory
from vramfit.planning.plan import MemoryEstimate, Plan, Workload
from vramfit.planning.program import PROGRAMS, Kernels, Program
from vramfit.units import GIB

PURE_BF16 = Formats(residual=2, compute=2, trains=True, autocast=False)


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


def kept(name: str, formats: Formats) -> tuple[BlockMemory, float]:
    """(a middle block, what it keeps in units of the hidden size, its input and attention's sums left out)."""
    architecture = model(name)
    block = block_memory(architecture, 1, formats)
    return block, (block.saved - 4 * architecture.heads) / architecture.hidden_size


def bf16_card(plan: Callable[..., Plan], **changes: Any) -> Plan:
    usual = {"device": "cuda:0", "compute": "bf16", "weight_format": "bf16", "trained_format": "bf16"}
    return plan(**{**usual, **changes})


def phase(estimate: MemoryEstimate, name: str) -> int:
    return next(phase.total_bytes for phase in estimate.phases if phase.name.startswith(name))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_record_is_called_as_it_is_found(name: str) -> None:
    assert PROGRAMS[name].name == name


# --- LitGPT ----------------------------------------------------------------------------------------------------------


LITGPT_LORA = dataclasses.replace(
    PURE_BF16,
    trains=False,
    adapted=frozenset({"q_proj", "v_proj"}),
    rank=8,
    adapter=2,
    dropout_mask=1,
    kernels=PROGRAMS["litgpt"].kernels,
)


def test_litgpt_keeps_padded_adapters_and_the_whole_projection() -> None:
    """Norms 4 + 4, dropped input 2 with its mask 1, adapters of q and v 4, q, k and the whole projection 2 + 2 + 6,
    attention 2, gated product 6 I; and the rank's 2 x 2 x 8 bytes."""
    _, found = kept("meta-llama/Llama-2-7b-hf", LITGPT_LORA)

    assert found == pytest.approx(8 + 3 + 4 + 10 + 2 + 6 * 11008 / 4096 + 32 / 4096)


def test_old_4_bit_linears_keep_their_inputs_beside_that() -> None:
    """Two normalised inputs 2 + 2, attention's result copied to lie token by token 2, the gated product 2 I."""
    formats = dataclasses.replace(LITGPT_LORA, kernels=PROGRAMS["litgpt-quantised"].kernels, quantised=True)
    block, found = kept("meta-llama/Llama-2-7b-hf", formats)
    _, before = kept("meta-llama/Llama-2-7b-hf", LITGPT_LORA)

    assert found - before == pytest.approx(6 + 2 * 11008 / 4096)
    assert block.frozen_inputs / 4096 == pytest.approx(6 + 2 * 11008 / 4096)


def test_index_copy_keeps_what_it_copies() -> None:
    """The operation that writes adapters into zeros, as autograd has it."""
    kept_tensors: list[torch.Tensor] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        kept_tensors.append(tensor)
        return tensor

    source = torch.ones(3, 4, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        torch.zeros(3, 6).index_copy(1, torch.tensor([0, 1, 4, 5]), source)

    assert source.shape in [tensor.shape for tensor in kept_tensors]


def test_chunks_of_the_head_alone_keep_8_bytes_of_every_logit(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("meta-llama/Llama-2-7b-hf")

    def logits(program: Program, length: int) -> float:
        wish = bf16_card(
            plan,
            method="lora",
            lora_rank=8,
            lora_targets=("q_proj", "v_proj"),
            max_length=length,
            micro_batch=1,
            loss_chunk_tokens=128,
        )
        found = Work.of(architecture, wish, workload(length), program).logits()[0]
        return found - 2 * architecture.hidden_size * length

    grows = logits(PROGRAMS["litgpt"], 2048) - logits(PROGRAMS["litgpt"], 1024)

    assert grows == 8 * 1024 * architecture.vocab_size
    assert logits(PROGRAMS["vramfit"], 2048) == logits(PROGRAMS["vramfit"], 1024)


def test_the_loss_before_holds_frozen_inputs_of_rows_of_mean_length(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("meta-llama/Llama-2-7b-hf")
    wish = bf16_card(
        plan, method="qlora", weight_format="nf4", lora_rank=8, lora_targets=("q_proj", "v_proj"), max_length=1024
    )
    program = PROGRAMS["litgpt-quantised"]
    even = estimate_memory(architecture, wish, workload(1024), program=program)
    short = estimate_memory(architecture, wish, workload(1024, mean_tokens=256), program=program)
    a_token = 32 * (6 * 4096 + 2 * 11008) - 2 * 4096  # the first block's first input needs no gradient
    inputs = a_token * 2 * (1024 - 256)

    assert phase(even, "loss") - phase(short, "loss") == pytest.approx(inputs)


# --- compilers, selective recompute ----------------------------------------------------------------------------------


def test_a_compiler_keeps_inputs_of_products_and_what_lies_between_once() -> None:
    """Llama-3.2-3B in torchtune, compiled: both norms' outputs 2 + 2, the residual between 2, q, k, v of all heads 6,
    attention 2, gate, up and their product 6 I."""
    kernels = PROGRAMS["torchtune"].kernels.compiled()
    _, found = kept("meta-llama/Llama-3.2-3B", dataclasses.replace(PURE_BF16, kernels=kernels))

    assert found == pytest.approx(4 + 2 + 6 + 2 + 6 * 8192 / 3072)


def test_selective_recompute_keeps_every_second_product_and_attention() -> None:
    """Llama-3-8B: q 2, v 1/2, gate 2 I, down 2, attention 2; of those backward itself would not keep down's."""
    block, _ = kept(
        "meta-llama/Meta-Llama-3-8B", dataclasses.replace(PURE_BF16, kernels=PROGRAMS["torchtitan"].kernels)
    )

    assert block.selected / 4096 == pytest.approx(2 + 0.5 + 2 * 3.5 + 2 + 2)
    assert 2 <= block.beyond / 4096 <= 2 + 2 + 0.5


def test_selective_recompute_lies_between_all_and_nothing(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("meta-llama/Meta-Llama-3-8B")

    def loss(**changes: object) -> int:
        wish = bf16_card(plan, method="full", max_length=4096, **changes)
        return phase(estimate_memory(architecture, wish, workload(4096), program=PROGRAMS["torchtitan"]), "loss")

    assert loss(recompute=32) < loss(recompute=32, selective=True) < loss()


# --- models written out, DoRA, experts -------------------------------------------------------------------------------


def test_layer_norm_and_gelu_from_single_operations_keep_their_parts() -> None:
    """GPT-2 in fp32: a norm keeps x, x - mean and the quotient instead of x alone; GELU three more of 4 h."""
    fp32 = Formats(residual=4, compute=4, trains=True, autocast=False)
    _, native = kept("openai-community/gpt2", dataclasses.replace(fp32, kernels=Kernels(gelu="native")))
    _, written = kept(
        "openai-community/gpt2", dataclasses.replace(fp32, kernels=Kernels(gelu="python", layer_norm="python"))
    )

    assert written - native == pytest.approx(2 * 2 * 4 + 3 * 16)


def test_dora_keeps_both_results() -> None:
    formats = dataclasses.replace(
        PURE_BF16, trains=False, autocast=True, adapted=frozenset({"q_proj"}), rank=8, kernels=Kernels()
    )
    _, lora = kept("meta-llama/Llama-2-7b-hf", formats)
    _, dora = kept("meta-llama/Llama-2-7b-hf", dataclasses.replace(formats, kernels=Kernels(dora=True)))

    assert dora - lora == pytest.approx(4)


def test_experts_that_are_modules_are_quantised_and_unpacked_one_by_one(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    together = model("mistralai/Mixtral-8x7B-v0.1")
    assert together.experts is not None
    apart = dataclasses.replace(together, experts=dataclasses.replace(together.experts, modules=True))
    wish = bf16_card(
        plan, method="qlora", weight_format="nf4", lora_rank=8, lora_targets=("q_proj",), recompute=together.layers
    )
    weights, dequantised = [], []
    for architecture in (together, apart):
        estimate = estimate_memory(architecture, wish, workload(), program=PROGRAMS["transformers"])
        weights.append(estimate.peak.parts["weights"])
        dequantised.append(max(phase.parts["dequantised"] for phase in estimate.phases))

    assert apart.params == together.params
    assert weights[1] < 25 * GIB < 80 * GIB < weights[0]
    assert dequantised[1] == 2 * 4096 * 14336
    assert dequantised[0] <= 2 * 4096 * 4096


# --- several cards ---------------------------------------------------------------------------------------------------


def test_shards_in_ram_leave_only_scales_on_a_card(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    """FSDP with CPU offload and a 4-bit base: 8-bit scales of every 64 weights, fp32 ones of every 256 of those."""
    architecture = model("meta-llama/Llama-2-7b-hf")
    wish = bf16_card(
        plan,
        method="qlora",
        weight_format="nf4",
        weights_tier="host",
        optimizer_tier="host",
        cards=2,
        sharding="fsdp",
        lora_rank=8,
        lora_targets=("all-linear",),
    )
    work = Work.of(architecture, wish, workload(), PROGRAMS["answerai fsdp_qlora"])
    linears = 32 * sum(linear.weights for linear in architecture.linears(0))

    assert work.weights == pytest.approx(linears * (1 / 64 + 4 / 16384))
    assert work.adapters == work.optimizer == work.gradients == 0


def test_ddp_has_a_second_place_for_every_gradient(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    architecture = model("Qwen/Qwen3-0.6B")
    one = estimate_memory(architecture, bf16_card(plan, method="full"), workload(), program=PROGRAMS["transformers"])
    two = estimate_memory(
        architecture,
        bf16_card(plan, method="full", cards=2, sharding="ddp"),
        workload(),
        program=PROGRAMS["transformers"],
    )

    for name in ("load", "loss", "step"):
        assert phase(two, name) - phase(one, name) == 2 * architecture.params


def test_zero_2_casts_its_share_of_the_gradients_to_fp32(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    """Weights 2, of two cards' shares half of master and moments 12, of the gradient 2 and its fp32 copy 4."""
    architecture = model("meta-llama/Llama-2-7b-hf")
    wish = bf16_card(plan, method="full", cards=2, sharding="zero2", recompute=32)
    estimate = estimate_memory(architecture, wish, workload(), program=PROGRAMS["colossalchat"])

    assert phase(estimate, "step") == pytest.approx((2 + (12 + 2 + 4) / 2) * architecture.params)
