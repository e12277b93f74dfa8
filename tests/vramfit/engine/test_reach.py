"""Adapters that cannot learn are refused by name; those that can are not, and the check leaves no trace."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.reach import TOKENS, check_gradients_reach
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import ModelError
from vramfit.models.adapters import attach_adapters


def executor_for(model: Any, tiny: Any, **plan: Any) -> ResidentExecutor:
    made = tiny.plan(method="lora", **plan)
    return ResidentExecutor(model, plan=made, optimizer=build_optimizer(model, ScheduleChoice(), made))


@pytest.fixture
def batches(tiny: Any) -> list[Any]:
    return [tiny.pad(tiny.sequences(length)) for length in (12, 20)]


def test_a_layer_that_the_loss_never_passes_is_named(tiny: Any, batches: list[Any]) -> None:
    model = tiny.build("llama")
    model.model.layers[1].mlp.ahead_proj = torch.nn.Linear(32, 8)  # as heads for tokens further ahead are
    executor = executor_for(attach_adapters(model, rank=4, alpha=8, seed=0), tiny)
    with pytest.raises(ModelError, match=r"No gradient reaches 2 of 30 .* model\.layers\.1\.mlp\.ahead_proj"):
        check_gradients_reach(executor, batches)


def test_case_105_a_part_that_is_cut_off_is_named(tiny: Any, batches: list[Any]) -> None:
    model = tiny.build("llama")
    block = model.model.layers[0]
    block.mlp.forward = torch.no_grad()(block.mlp.forward)
    executor = executor_for(attach_adapters(model, rank=4, alpha=8, seed=0), tiny)
    with pytest.raises(
        ModelError, match=r"6 of 28 adapter tensors; the first layer is model\.layers\.0\.mlp\.down_proj"
    ):
        check_gradients_reach(executor, batches)


@pytest.mark.parametrize(("bears", "known"), [(64, True), (16, True), (8, True), (7, False)])
def test_a_trial_without_room_is_made_with_fewer_tokens_or_told(
    tiny: Any, monkeypatch: pytest.MonkeyPatch, bears: int, known: bool
) -> None:
    executor = executor_for(attach_adapters(tiny.build("llama"), rank=4, alpha=8, seed=0), tiny)
    real, tried = ResidentExecutor._sums, []

    def limited(self: Any, piece: Any, *arguments: Any, **options: Any) -> Any:
        tried.append(piece.input_ids.shape[1])
        if tried[-1] > bears:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, piece, *arguments, **options)

    monkeypatch.setattr(ResidentExecutor, "_sums", limited)
    told = check_gradients_reach(executor, [tiny.pad(tiny.sequences(100))])
    assert told == "" if known else "memory ran out in the trial (Tried to allocate 2.00 GiB)" in told
    assert tried[-1] <= max(bears, 8)


def test_the_governor_makes_room_for_the_trial(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    executor = executor_for(attach_adapters(tiny.build("llama"), rank=4, alpha=8, seed=0), tiny)
    real, room = ResidentExecutor._sums, []

    def limited(self: Any, piece: Any, *arguments: Any, **options: Any) -> Any:
        if len(room) < 2:
            raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")
        return real(self, piece, *arguments, **options)

    monkeypatch.setattr(ResidentExecutor, "_sums", limited)
    executor.recovery.relieve = lambda: room.append("a block recomputes") or "so"  # type: ignore[func-returns-value]
    assert check_gradients_reach(executor, [tiny.pad(tiny.sequences(20))]) == ""


def test_gradients_that_are_all_zero_are_refused(tiny: Any, batches: list[Any]) -> None:
    model = tiny.build("llama", tie_word_embeddings=False)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    executor = executor_for(attach_adapters(model, rank=4, alpha=8, seed=0), tiny)
    with pytest.raises(ModelError, match="gradients of all 28 adapter tensors are zero"):
        check_gradients_reach(executor, batches)


@pytest.mark.parametrize("recompute", [0, 2])
@pytest.mark.parametrize("loss", ["fused", "chunked", "full"])
@pytest.mark.parametrize(
    ("family", "options"),
    [("llama", {}), ("gpt2", {"variant": "dora"}), ("mixtral", {"experts": True, "variant": "rslora"})],
)
def test_what_learns_passes_and_stays_as_it_was(
    tiny: Any, batches: list[Any], family: str, options: dict[str, Any], loss: str, recompute: int
) -> None:
    model = attach_adapters(tiny.build(family), rank=4, alpha=8, dropout=0.2, seed=0, **options)
    executor = executor_for(model, tiny, loss=loss, recompute=recompute)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random = torch.get_rng_state()
    check_gradients_reach(executor, batches)
    assert torch.equal(torch.get_rng_state(), random)
    assert all(value.grad is None for value in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_four_bit_base_passes(tiny: Any, batches: list[Any]) -> None:
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = tiny.build("llama")
    linear = model.model.layers[0].mlp.down_proj
    packed = bitsandbytes.nn.Linear4bit(64, 32, bias=False, compute_dtype=torch.float32, quant_type="nf4")
    packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    packed.support_avx512bf16_for_cpu = False  # as a loaded model has it: that layout lets no gradient through
    model.model.layers[0].mlp.down_proj = packed.to("cpu")
    model.is_loaded_in_4bit = True
    executor = executor_for(attach_adapters(model, rank=4, alpha=8, seed=0), tiny)
    check_gradients_reach(executor, batches)


def test_only_a_short_part_around_the_first_trained_token_is_run(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids, labels = tiny.sequences(120)[0]
    labels[:100] = -100
    long = tiny.pad([(ids, labels)])
    nothing = tiny.pad([(ids, torch.full_like(ids, -100))])
    executor = executor_for(attach_adapters(tiny.build("llama"), rank=4, alpha=8, seed=0), tiny)
    seen = []
    gradients = executor.gradients
    monkeypatch.setattr(executor, "gradients", lambda piece, **rest: (seen.append(piece), gradients(piece, **rest))[1])
    check_gradients_reach(executor, [nothing, long])
    [piece] = seen
    assert piece.input_ids.shape[1] <= TOKENS
    assert (piece.labels[:, 1:] != -100).any()
