"""The comparison with fp32: its predicted memory against the live bytes of a real one, on the real engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
import transformers

from tests.vramfit.engine.conftest import make_plan
from tests.vramfit.engine.pseudo_card import PseudoCard
from vramfit.config import ScheduleChoice
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.models.adapters import attach_adapters
from vramfit.models.architecture import from_config
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import Plan, Workload

ROWS, LENGTH, LAYERS, VOCABULARY = 4, 128, 3, 1000
WORK = Workload(sequences=100, mean_tokens=LENGTH, longest_tokens=LENGTH)
LORA = {"method": "lora", "weight_format": "bf16", "lora_rank": 8, "lora_targets": ("all-linear",)}
BF16 = {"weight_format": "bf16", "trained_format": "bf16"}
SHAPE = transformers.LlamaConfig(
    vocab_size=VOCABULARY,
    hidden_size=128,
    intermediate_size=352,
    num_hidden_layers=LAYERS,
    num_attention_heads=4,
    tie_word_embeddings=False,
)


def measured(plan: Plan) -> int:
    """Peak of live bytes of a forward and backward in fp32, with the model and the optimizer's states there."""
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(SHAPE)
    if plan.weight_format == "bf16":
        model = model.bfloat16()
    if plan.lora_rank:
        model = attach_adapters(model, rank=plan.lora_rank, alpha=16, seed=0)
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    tokens = torch.randint(3, VOCABULARY, (ROWS, LENGTH))
    piece = Piece(input_ids=tokens, labels=tokens.clone(), attention_mask=None, position_ids=None)
    executor.step([piece], 1e-3)
    card = PseudoCard(model)
    for state in executor.optimizer.state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor):
                card._follow(value.untyped_storage())
    with card, executor.raised.exactly("all"):
        executor.measure(piece)
    return card.peak_bytes


@pytest.mark.parametrize("recompute", [0, 1, LAYERS])
@pytest.mark.parametrize("changes", [{}, BF16, LORA], ids=["fp32 weights", "bf16 weights", "lora on bf16"])
def test_the_predicted_peak_is_that_of_a_real_comparison(changes: dict[str, Any], recompute: int) -> None:
    plan = make_plan(
        compute="bf16",
        micro_batch=ROWS,
        accumulation=1,
        max_length=LENGTH,
        loss_chunk_tokens=128,
        recompute=recompute,
        calibrates=True,
        **changes,
    )
    phases = estimate_memory(from_config(SHAPE.to_dict(), "tiny"), plan, WORK).phases
    predicted = max(phase.total_bytes for phase in phases if phase.name == "calibration")
    assert predicted == pytest.approx(measured(plan), rel=0.08)


def test_only_a_run_that_compares_has_the_phase() -> None:
    plan = make_plan(compute="bf16", micro_batch=ROWS, max_length=LENGTH, recompute=0, accumulation=1)
    shape = from_config(SHAPE.to_dict(), "tiny")
    assert "calibration" not in {phase.name for phase in estimate_memory(shape, plan, WORK).phases}
    compared = estimate_memory(shape, dataclasses.replace(plan, calibrates=True), WORK)
    assert compared.peak.name == "calibration"
    assert compared.device_bytes > estimate_memory(shape, plan, WORK).device_bytes
