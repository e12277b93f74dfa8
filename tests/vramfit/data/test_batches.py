from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vramfit.data.batches import IGNORED, MicroBatch, StepOrder, collate, split
from vramfit.data.conversations import Example
from vramfit.data.packing import pack


def example(row: int, length: int, seed: int = 0) -> Example:
    ids = np.random.default_rng([seed, row]).integers(3, 60, length).astype(np.int32)
    return Example(ids, np.arange(length) > 0, row)


def order(count: int, **settings: float) -> StepOrder:
    values = {"sequences_per_step": 4, "seed": 7, **settings}
    return StepOrder([1] * count, **values)  # type: ignore[arg-type]


@settings(max_examples=80, deadline=None)
@given(count=st.integers(1, 60), per_step=st.integers(1, 20), epochs=st.integers(1, 4), seed=st.integers(0, 2**32 - 1))
def test_every_row_once_an_epoch(count: int, per_step: int, epochs: int, seed: int) -> None:
    plan = order(count, sequences_per_step=per_step, epochs=epochs, seed=seed)
    assert plan.total_steps == epochs * -(-count // per_step)
    for epoch in range(epochs):
        steps = range(epoch * plan.steps_per_epoch + 1, (epoch + 1) * plan.steps_per_epoch + 1)
        assert sorted(row for step in steps for row in plan.rows(step)) == list(range(count))
    assert plan.epoch(plan.total_steps) == epochs


def test_the_order_is_known_and_the_same_for_ever() -> None:
    plan = order(10, epochs=2)
    assert [plan.rows(step) for step in range(1, 7)] == [
        (8, 4, 1, 6), (3, 2, 7, 5), (9, 0), (3, 9, 1, 6), (2, 5, 4, 8), (0, 7)
    ]  # fmt: skip


def test_epochs_and_seeds_differ() -> None:
    plan = order(50, epochs=2, sequences_per_step=50)
    assert plan.rows(1) != plan.rows(2)
    assert plan.rows(1) != order(50, sequences_per_step=50, seed=8).rows(1)


@pytest.mark.parametrize(
    ("epochs", "steps"), [(0.1, 1), (0.5, 2), (1.0, 3), (1.5, 5), (2.0, 6), (1e-6, 1)]
)  # fmt: skip
def test_parts_of_epochs(epochs: float, steps: int) -> None:
    assert order(10, epochs=epochs).total_steps == steps


def test_steps_outside_the_run_and_empty_runs_are_mistakes() -> None:
    plan = order(10)
    for step in (0, 4):
        with pytest.raises(ValueError, match=r"outside 1\.\.3"):
            plan.rows(step)
    with pytest.raises(ValueError, match="at least one sequence"):
        order(0)


def test_case_098_099_steps_are_the_ceiling_and_the_tail_is_trained() -> None:
    assert (order(12).total_steps, order(10).total_steps, order(3, epochs=2).total_steps) == (3, 3, 2)
    assert [len(order(7).rows(step)) for step in (1, 2)] == [4, 3]
    assert sorted(order(3, epochs=2).rows(2)) == [0, 1, 2]


def test_case_111_max_steps_decides_instead_of_epochs() -> None:
    plan = order(10, epochs=1, max_steps=50)
    assert plan.total_steps == 50
    seen = Counter(row for step in range(1, 49) for row in plan.rows(step))  # 16 whole epochs
    assert set(seen.values()) == {16}


def test_case_118_119_120_122_a_resumed_run_sees_the_same_rows() -> None:
    whole = order(10, sequences_per_step=2, epochs=3)
    trace = [whole.rows(step) for step in range(1, whole.total_steps + 1)]
    for stopped in (3, 5, 7, 10):
        again = order(10, sequences_per_step=2, epochs=3)
        assert [again.rows(step) for step in range(stopped + 1, again.total_steps + 1)] == trace[stopped:]


def test_padding_is_on_the_right_and_carries_no_loss() -> None:
    batch = collate([example(0, 3), example(1, 5)], pad_id=2)
    assert batch.input_ids.shape == (2, 5)
    assert batch.input_ids[0, 3:].tolist() == [2, 2]
    assert batch.labels[0].tolist() == [IGNORED, *batch.input_ids[0, 1:3].tolist(), IGNORED, IGNORED]
    assert (batch.attention_mask, batch.position_ids) == (None, None)
    assert (batch.trained_tokens, batch.rows) == (6, (0, 1))
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert collate([example(0, 3)], 2, pad_to_multiple=8).input_ids.shape == (1, 8)


def test_an_end_token_that_is_also_the_padding_keeps_its_loss() -> None:
    ids = np.array([5, 6, 2], dtype=np.int32)
    batch = collate([Example(ids, np.array([False, True, True]), 0), example(1, 5)], pad_id=2)
    assert batch.labels[0].tolist() == [IGNORED, 6, 2, IGNORED, IGNORED]


def test_a_step_is_split_by_length_longest_first() -> None:
    batches = split([example(row, length) for row, length in enumerate([3, 9, 4, 8, 2])], 2, 0)
    assert [batch.rows for batch in batches] == [(1, 3), (2, 0), (4,)]
    assert [batch.input_ids.shape[1] for batch in batches] == [9, 4, 2]


def model(attention: str) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, attn_implementation=attention,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def gradients(net: torch.nn.Module, batches: list[MicroBatch]) -> tuple[float, list[torch.Tensor]]:
    """Loss and gradients of a step: summed over tokens, divided by the step's tokens."""
    net.zero_grad()
    total = 0.0
    for batch in batches:
        logits = net(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
        )
        loss = loss / sum(other.trained_tokens for other in batches)
        loss.backward()
        total += loss.item()
    return total, [parameter.grad.clone() for parameter in net.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_and_unpacked_give_the_same_loss_and_gradients(attention: str) -> None:
    examples = [example(row, length) for row, length in enumerate([7, 12, 3, 9, 5, 1, 4])]
    net = model(attention)
    loss, expected = gradients(net, split(examples, 1, 0))
    packed = pack(examples, 16)
    assert any(block.parts for block in packed)
    for micro_batch in (1, 2, 8):
        found_loss, found = gradients(net, split(packed, micro_batch, 0))
        assert found_loss == pytest.approx(loss, rel=1e-6)
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_padded_batches_and_single_rows_give_the_same_gradients() -> None:
    examples = [example(row, length) for row, length in enumerate([7, 12, 3, 9])]
    net = model("sdpa")
    loss, expected = gradients(net, split(examples, 1, 0))
    found_loss, found = gradients(net, split(examples, 4, 0))
    assert found_loss == pytest.approx(loss, rel=1e-6)
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-7)


def test_case_109_packed_documents_do_not_see_each_other() -> None:
    net = model("eager").eval()
    second = example(1, 6)
    logits = []
    for seed in (1, 2):
        batch = collate(pack([example(0, 8, seed), second], 14), 0)
        assert batch.position_ids is not None
        with torch.no_grad():
            logits.append(net(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0])
    assert torch.equal(logits[0][8:], logits[1][8:])
    assert not torch.equal(logits[0][:8], logits[1][:8])


def test_weights_stand_at_their_labels_and_plain_rows_weigh_one() -> None:
    weights = np.array([0, 0, 0.5, 2], dtype=np.float32)
    weighted = Example(np.array([5, 6, 7, 8], dtype=np.int32), weights > 0, 0, weights=weights)
    batch = collate([weighted, example(1, 5)], pad_id=2)
    assert batch.weights is not None
    assert batch.weights.dtype == torch.float32
    assert batch.weights.tolist() == [[0, 0, 0.5, 2, 0], [0, 1, 1, 1, 1]]
    assert torch.equal(batch.weights > 0, batch.labels != IGNORED)
    assert batch.trained_tokens == 6
    assert collate([example(1, 5)], pad_id=2).weights is None
