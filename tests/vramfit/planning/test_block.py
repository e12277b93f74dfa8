"""One block against worked and measured values: bytes per token in units of the hidden size."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.block import Formats, block_memory, block_tape
from vramfit.planning.program import Kernels
from vramfit.planning.tape import Moment

BF16_FULL = Formats(residual=2, compute=2, trains=True, autocast=False)


def llama_8b() -> Architecture:
    found = catalogue.find("meta-llama/Meta-Llama-3-8B")
    assert found is not None
    return found


def worst(moments: tuple[Moment, ...]) -> float:
    """The most bytes per token alive at any of them."""
    return max(moment.per_token for moment in moments)


@pytest.mark.parametrize(
    ("kernels", "saved", "backward"),
    [
        (Kernels(), 49, 65),
        (Kernels(norm="fused"), 39, 55),
        (Kernels(norm="fused", mlp="fused"), 32, 41),
    ],
)
def test_llama_3_8b_in_pure_bf16(kernels: Kernels, saved: float, backward: float) -> None:
    """The worked values of full fine-tuning in units of the hidden size, the block's own input counted in neither."""
    block = block_memory(llama_8b(), 1, dataclasses.replace(BF16_FULL, kernels=kernels))

    assert block.saved / 4096 == pytest.approx(saved, abs=0.1)
    assert worst(block.backward) / 4096 == pytest.approx(backward, abs=0.1)


@pytest.mark.parametrize(("adapter", "backward"), [("python", 63), ("fused", 61)])
def test_an_adapted_4_bit_block_needs_what_was_measured(adapter: str, backward: float) -> None:
    """Llama-3-8B, LoRA with dropout on attention under autocast: 63 h and 61 h measured, less the block's output (2 h)
    that reentrant recompute holds."""
    formats = Formats(
        residual=2,
        compute=2,
        trains=False,
        autocast=True,
        adapted=frozenset({"q_proj", "k_proj", "v_proj", "o_proj"}),
        rank=16,
        dropout_mask=1,
        kernels=Kernels(norm="fused", rope="fused", adapter=adapter),  # type: ignore[arg-type]
    )

    assert worst(block_memory(llama_8b(), 1, formats).backward) / 4096 == pytest.approx(backward, abs=0.1)


def test_a_frozen_block_keeps_less_and_an_adapted_one_between() -> None:
    frozen = dataclasses.replace(BF16_FULL, trains=False)
    names = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
    adapted = dataclasses.replace(frozen, adapted=names, rank=16, autocast=True)
    saved = [block_memory(llama_8b(), 1, formats).saved for formats in (frozen, adapted, BF16_FULL)]

    assert saved[0] < saved[1] < saved[2]


def test_dropout_keeps_its_mask() -> None:
    without = Formats(residual=4, compute=4, trains=False, autocast=False, adapted=frozenset({"q_proj"}), rank=8)
    masked = dataclasses.replace(without, dropout_mask=1)
    difference = block_memory(llama_8b(), 1, masked).saved - block_memory(llama_8b(), 1, without).saved

    # A keeps the dropped copy instead of the norm's output: only the mask is new.
    assert difference == pytest.approx(4096)


def test_the_first_frozen_block_keeps_nothing_for_its_first_norm() -> None:
    formats = Formats(residual=4, compute=4, trains=False, autocast=False, adapted=frozenset({"o_proj"}), rank=8)
    first = block_memory(llama_8b(), 0, formats, input_grad=False)

    assert first.saved < block_memory(llama_8b(), 0, formats).saved


ALL = frozenset({"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
ADAPTED = {"trains": False, "adapted": ALL, "rank": 16}


@pytest.mark.parametrize(
    ("formats", "doubles", "numbers"),
    [
        # Inputs of q, k, v and of gate, up, and of down: once each. That of o is attention's own result.
        ({"residual": 4, "compute": 4, "trains": True}, 0, 2 * 576 + 1536),
        ({"residual": 4, "compute": 4, **ADAPTED}, 0, 2 * 576 + 1536),
        ({"residual": 4, "compute": 4, **ADAPTED, "dropout_mask": 4}, 0, 6 * 576 + 1536),
        # Adapters in fp32 under autocast make a 16-bit copy of every linear's input: o's, too, and three of q, k, v's.
        ({"residual": 2, "compute": 2, "autocast": True, **ADAPTED}, 3 * 576, 3 * 576 + 1536),
        ({"residual": 2, "compute": 2, "autocast": True, **ADAPTED, "dropout_mask": 4}, 0, 6 * 576 + 1536),
        ({"residual": 4, "compute": 2, "autocast": True, "trains": True}, 3 * 576, 2 * 576 + 1536),
    ],
)
def test_inputs_of_linears_wait_in_8_bits_once_each(formats: dict[str, Any], doubles: int, numbers: int) -> None:
    """SmolLM2-135M: each saves its bytes less 1 + 4 / 128, and what was a second copy (`doubles`) all of them."""
    used = Formats(**{"autocast": False, **formats})
    kept = block_memory(found("HuggingFaceTB/SmolLM2-135M"), 1, used)
    few = block_memory(found("HuggingFaceTB/SmolLM2-135M"), 1, used, compressed=True)

    assert kept.saved - few.saved == numbers * (used.compute - 1 - 4 / 128) + doubles * used.compute


def test_an_input_too_narrow_for_a_scale_stays_as_it_is() -> None:
    shape = dataclasses.replace(found("HuggingFaceTB/SmolLM2-135M"), hidden_size=64, mlp_width=96)
    used = Formats(residual=4, compute=4, trains=True, autocast=False)

    assert block_memory(shape, 1, used, compressed=True).saved == block_memory(shape, 1, used).saved


def test_a_compressed_input_is_restored_for_each_backward_that_needs_it() -> None:
    """Never all together: what moves grows by one input at most, what waits is less."""
    shape, used = found("HuggingFaceTB/SmolLM2-135M"), Formats(residual=4, compute=4, trains=True, autocast=False)
    tape, _ = block_tape(shape, 1, used, compressed=True)
    restored = {operation.name: operation.restores for operation in tape.operations if operation.restores}

    assert restored == {
        "q_proj": 576,
        "k_proj": 576,
        "v_proj": 576,
        "gate_proj": 576,
        "up_proj": 576,
        "down_proj": 1536,
    }
    assert [operation.packs for operation in tape.operations if operation.packs] == [576, 576, 1536]
    assert worst(block_memory(shape, 1, used, compressed=True).backward) < worst(block_memory(shape, 1, used).backward)


def found(name: str) -> Architecture:
    architecture = catalogue.find(name)
    assert architecture is not None
    return architecture


def saved(name: str, layer: int = 1, **formats: object) -> float:
    return block_memory(found(name), layer, dataclasses.replace(BF16_FULL, **formats)).saved  # type: ignore[arg-type]


def test_only_blocks_that_slide_keep_a_mask() -> None:
    """Gemma 3 270M: five of six blocks slide; their mask is 16 bits for every position looked at."""
    with_mask = saved("google/gemma-3-270m", 0, window=True, length=1024)

    assert with_mask - saved("google/gemma-3-270m", 0) == pytest.approx(2 * 1024)
    assert saved("google/gemma-3-270m", 5, window=True, length=1024) == saved("google/gemma-3-270m", 5)


def test_attention_without_a_kernel_keeps_its_scores_in_fp32() -> None:
    """DeepSeek-V2-Lite on a CPU: 16 heads, keys of 192, values of 128 numbers. Scaled queries and keys, scores and
    values in fp32; the fused kernel keeps queries, keys, the product that holds the values, its result, a number a
    head."""
    in_memory = saved("deepseek-ai/DeepSeek-V2-Lite", attention="math", length=512)
    fused = 2 * 16 * (192 + 192 + 256 + 128) + 4 * 16
    # The result is kept there, too: the output projection trains.
    math = 4 * 16 * (192 + 192 + 128 + 512) + 2 * 16 * 128

    assert in_memory - saved("deepseek-ai/DeepSeek-V2-Lite") == pytest.approx(math - fused)


def test_sinks_keep_the_softmax_alone() -> None:
    """GPT-OSS: no fp32 and no second copy of the scores: 64 heads, 16 bits; keys and values for every head."""
    short, long = (saved("openai/gpt-oss-20b", attention="eager", length=length) for length in (512, 1024))

    assert long - short == pytest.approx(2 * 64 * 512)


@pytest.mark.parametrize(
    ("name", "bytes_a_pair"), [("bigscience/bloom-560m", 2), ("mosaicml/mpt-7b", 2), ("google/gemma-2-2b", 0)]
)
def test_what_a_block_returns_of_attention(name: str, bytes_a_pair: int) -> None:
    block = block_memory(found(name), 1, dataclasses.replace(BF16_FULL, attention="eager", length=256))

    assert block.returned == bytes_a_pair * found(name).heads * 256


def test_distances_in_fp32_widen_the_scores() -> None:
    """The worst moment of a forward that keeps nothing. MPT: scores, their softmax, both fp32, and its 16-bit copy. A
    family whose mask is in 16 bits has those scores beside their fp32 copy."""
    formats = dataclasses.replace(BF16_FULL, attention="eager", length=4096)
    pairs = {name: found(name).heads * 4096 for name in ("mosaicml/mpt-7b", "meta-llama/Llama-2-7b-hf")}
    highest = {name: worst(block_memory(found(name), 1, formats).evaluation) for name in pairs}

    for name in pairs:
        assert highest[name] / pairs[name] == pytest.approx(10, abs=0.5)


def test_variables_of_a_module_live_until_it_returns() -> None:
    """LoRA keeps its own copies of what the norm gives the MLP; the norm's result lives through it all the same."""
    formats = Formats(
        residual=2, compute=2, trains=False, autocast=True, adapted=frozenset({"down_proj"}), rank=8, quantised=True
    )
    tape, _ = block_tape(llama_8b(), 1, formats)
    given = next(operation for operation in tape.operations if operation.name == "up_proj").inputs[0]
    freed = next(
        step.operation.name
        for step in tape.forward_steps()
        if any(change.number == given.storage and change.size < 0 for change in step.changes)
    )

    assert freed == "add"  # of the last adapter


@pytest.mark.parametrize("name", catalogue.known())
def test_every_known_model_has_a_block(name: str) -> None:
    architecture = catalogue.find(name)
    assert architecture is not None
    for layer in {0, architecture.layers - 1}:
        block = block_memory(architecture, layer, BF16_FULL)
        assert 0 < worst(block.evaluation) <= worst(block.forward) <= worst(block.backward)
        assert block.saved < worst(block.backward)
