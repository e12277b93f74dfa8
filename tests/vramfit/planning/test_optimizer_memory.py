"""States and temporaries of optimizers, against the real ones on a small model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from vramfit.config import ScheduleChoice
from vramfit.models.architecture import from_config
from vramfit.planning import optimizer_memory
from vramfit.planning.memory import Work, estimate_memory
from vramfit.planning.optimizer_memory import Weight, state_bytes, step_bytes
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS
from vramfit.planning.stored import moment_bytes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,  # k and v have 32 x 128 numbers: just enough for few bits
    "intermediate_size": 352,
    "vocab_size": 512,
    "tie_word_embeddings": True,
}
ADAPTED: dict[str, Any] = {"method": "lora", "lora_rank": 8, "lora_targets": ("all-linear",)}


@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"optimizer_bits": 8},
        {"optimizer_bits": 4},
        {"optimizer": "lion", "optimizer_bits": 8},
        {"optimizer": "sgd"},
        {"optimizer": "muon"},
        {"optimizer": "adafactor"},
    ],
)
def test_states_are_those_of_the_real_optimizer(
    plan: Callable[..., Plan], changes: dict[str, Any], adapted: bool
) -> None:
    """But for the scales of last blocks that are not full, and the counts of steps."""
    torch = pytest.importorskip("torch")
    import transformers

    from vramfit.engine.optimizers import build_optimizer
    from vramfit.models.adapters import attach_adapters

    wish = plan(**{"method": "full", **(ADAPTED if adapted else {}), "device": "cpu", **changes})
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**CONFIG))
    if adapted:
        model = attach_adapters(model, rank=8, alpha=16.0, seed=0)
    optimizer = build_optimizer(model, ScheduleChoice(), wish)
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    optimizer.step()

    states = (value for state in optimizer.state.values() for value in state.values())
    real = sum(value.nbytes for value in states if isinstance(value, torch.Tensor) and value.numel() > 1)
    assert moment_bytes(from_config(CONFIG, "small"), wish) == pytest.approx(real, rel=0.002)


def test_sizes_are_those_of_the_engine() -> None:
    chunked = pytest.importorskip("vramfit.engine.chunked")

    assert optimizer_memory.SMALL == chunked.SMALL
    assert optimizer_memory.CHUNK_ON_CPU == chunked.CHUNK_ON_CPU
    assert optimizer_memory.CHUNK_ON_CARD == chunked.CHUNK_ON_CARD


def test_what_a_step_makes_grows_with_the_weight_up_to_a_chunk(plan: Callable[..., Plan]) -> None:
    few = plan(method="full", device="cuda:0", optimizer_bits=8)
    small, large = Weight(2**20, 2**11), Weight(2**24, 2**13)

    assert step_bytes(few, [small], bf16=False) == 25 * 2**20
    assert step_bytes(few, [small, large], bf16=False) == 25 * 2**21
    assert step_bytes(dataclasses.replace(few, optimizer_bits=32), [large], bf16=False) == 0
    assert step_bytes(dataclasses.replace(few, device="cpu"), [large], bf16=True) == 29 * 2**17


def test_muons_step_has_a_whole_matrix_and_no_stack_of_them(plan: Callable[..., Plan]) -> None:
    """A square matrix: 20 bytes a number with fp32 products, 14 with 16-bit ones and weights."""
    square, stack = Weight(1024**2, 2048), Weight(8 * 1024**2, 8 * 2048, copies=8)
    muon = plan(method="full", device="cpu", optimizer="muon", optimizer_bits=32)

    assert step_bytes(muon, [square], bf16=False) == 20 * 1024**2
    assert step_bytes(muon, [stack], bf16=False) == 20 * 1024**2
    assert step_bytes(dataclasses.replace(muon, device="cuda:0"), [square], bf16=True) == 14 * 1024**2
    assert state_bytes(muon, square) == 4 * 1024**2
    assert state_bytes(muon, dataclasses.replace(square, inside=False)) == 8 * 1024**2


@pytest.mark.parametrize(("trained_format", "bytes_a_number"), [("fp32", 16), ("bf16", 14)])
def test_states_in_ram_take_copy_gradient_and_moments(
    plan: Callable[..., Plan], workload: Callable[..., Workload], trained_format: str, bytes_a_number: int
) -> None:
    shape = from_config(CONFIG, "small")
    wish = plan(method="full", device="cuda:0", optimizer_tier="host", trained_format=trained_format, accumulation=1)

    assert Work.of(shape, wish, workload(), OURS).host_states == bytes_a_number * shape.params
    phases = {phase.name: phase for phase in estimate_memory(shape, wish, workload()).phases}
    assert phases["step"].parts["gradients"] == 0  # each is sent away as it comes
    several = estimate_memory(shape, dataclasses.replace(wish, accumulation=2), workload())
    summed = next(phase for phase in several.phases if phase.name == "step")
    assert summed.parts["gradients"] == shape.params * (4 if trained_format == "fp32" else 2)


def test_a_tied_heads_gradient_waits_for_the_embeddings(
    plan: Callable[..., Plan], workload: Callable[..., Workload]
) -> None:
    tied = from_config(CONFIG, "small")
    untied = from_config({**CONFIG, "tie_word_embeddings": False}, "small")
    wish = plan(method="full", device="cpu", optimizer_in_backward=True, accumulation=1, recompute=2)

    gradients = [
        next(phase for phase in estimate_memory(shape, wish, workload()).phases if phase.name == "embedding").parts[
            "gradients"
        ]
        for shape in (tied, untied)
    ]
    assert gradients == [2 * 4 * tied.embedding_params, 4 * tied.embedding_params]
