"""A block's products, bytes and kernels, counted by hand."""

from __future__ import annotations

import pytest

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.block import Formats
from vramfit.planning.operations import block_work
from vramfit.planning.program import Kernels


def model(name: str) -> Architecture:
    found = catalogue.find(name)
    assert found is not None
    return found


FULL = Formats(residual=2, compute=2, trains=True, autocast=False)
FUSED = Formats(
    residual=2, compute=2, trains=True, autocast=False, kernels=Kernels(norm="fused", rope="fused", mlp="fused")
)


def test_products_are_the_blocks_matrices() -> None:
    llama = model("meta-llama/Meta-Llama-3-8B")
    work = block_work(llama, 0, FULL)

    assert work.flops == 2 * sum(linear.weights for linear in llama.linears(0))
    assert sorted((product.inputs, product.outputs) for product in work.products) == sorted(
        (linear.inputs, linear.outputs) for linear in llama.linears(0)
    )
    assert work.attended == 4 * llama.q_width


def test_a_token_passes_only_its_experts() -> None:
    mixture = model("Qwen/Qwen3-30B-A3B")
    work = block_work(mixture, mixture.layers - 1, FULL)
    experts = mixture.experts
    assert experts is not None

    own = sum(linear.weights for linear in mixture.linears(mixture.layers - 1) if linear.part == "expert")
    others = sum(linear.weights for linear in mixture.linears(mixture.layers - 1) if linear.part == "attention")
    assert work.flops == pytest.approx(2 * (others + own * experts.active / experts.count))
    assert {product.copies for product in work.products} == {1, experts.count}


def test_adapters_add_thin_products_and_leave_the_base_untrained() -> None:
    llama = model("meta-llama/Meta-Llama-3-8B")
    formats = Formats(
        residual=2, compute=2, trains=False, autocast=False, adapted=frozenset({"q_proj"}), rank=16, adapter=2
    )
    work = block_work(llama, 0, formats)

    trained = sum(product.weights for product in work.products if product.trained)
    assert trained == 16 * (llama.hidden_size + llama.q_width)
    assert sum(product.base for product in work.products) == 7
    assert len(work.products) == 7 + 2


def test_fused_and_compiled_code_moves_less_in_fewer_kernels() -> None:
    llama = model("meta-llama/Meta-Llama-3-8B")
    plain, fused = block_work(llama, 0, FULL), block_work(llama, 0, FUSED)
    compiled = block_work(llama, 0, FUSED, compiled=True)

    assert plain.forward_bytes > 2 * fused.forward_bytes
    assert fused.backward_bytes > compiled.backward_bytes
    assert plain.forward_kernels > fused.forward_kernels > compiled.forward_kernels
    assert compiled.flops == plain.flops


def test_bytes_of_fused_norms_and_gate_are_their_inputs_and_outputs() -> None:
    """Forward, h = hidden, I = MLP width, bytes of 2: two norms 2 x 4h, rope views move nothing, attention reads q, k
    and v and writes h, the gate reads 2I and writes I, two additions read 2h and write h."""
    llama = model("huggyllama/llama-7b")
    h, wide = llama.hidden_size, llama.mlp_width

    assert block_work(llama, 0, FUSED).forward_bytes == 2 * (2 * 2 * h) + 2 * (4 * h) + 2 * 3 * wide + 2 * 2 * 3 * h


def test_what_a_python_norm_moves_is_told_by_its_kernels() -> None:
    """RMSNorm in Python on 16-bit rows: cast 2 + 4, normalise 20, cast 4 + 2, scale 2 + 2: 36 bytes against 4."""
    llama = model("huggyllama/llama-7b")
    python = Formats(residual=2, compute=2, trains=True, autocast=False, kernels=Kernels(rope="fused", mlp="fused"))
    more = block_work(llama, 0, python).forward_bytes - block_work(llama, 0, FUSED).forward_bytes

    assert more == 2 * (36 - 4) * llama.hidden_size
