"""One block against worked and measured values: bytes per token in units of the hidden size."""

from __future__ import annotations

import dataclasses

import pytest

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.block import Formats, block_memory
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


@pytest.mark.parametrize("name", catalogue.known())
def test_every_known_model_has_a_block(name: str) -> None:
    architecture = catalogue.find(name)
    assert architecture is not None
    for layer in {0, architecture.layers - 1}:
        block = block_memory(architecture, layer, BF16_FULL)
        assert 0 < worst(block.evaluation) <= worst(block.forward) <= worst(block.backward)
        assert block.saved < worst(block.backward)
