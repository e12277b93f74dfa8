"""The same data on different ways to the model: what must not change the losses does not change them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from vramfit.config import DataChoice
from vramfit.data import prepare as preparing
from vramfit.data.batches import IGNORED, StepOrder, collate, split
from vramfit.data.conversations import Encoder, Example
from vramfit.data.prepare import PreparedData, prepare
from vramfit.data.read import ReadOptions, open_sources, source_rows
from vramfit.data.rows import Row

Prepare = Callable[..., PreparedData]
ROWS = [{"question": "hello " * n, "answer": "the cat ran " * (n % 5 + 1)} for n in range(1, 24)]


@pytest.fixture(scope="module")
def model() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=600, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture
def prepared(tokenizer: Any, tmp_path: Path) -> Prepare:
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf-8")

    def make(*, max_length: int = 256, cache: str = "cache", **choice: Any) -> PreparedData:
        wish = DataChoice(paths=(str(path),), eval_share=0.0, **choice)
        return prepare(wish, tokenizer=tokenizer, max_length=max_length, seed=1, cache=tmp_path / cache)

    return make


def token_losses(model: torch.nn.Module, example: Example) -> torch.Tensor:
    """The loss of each trained token of one sequence by itself."""
    batch = collate([example], pad_id=0)
    with torch.no_grad():
        logits = model(input_ids=batch.input_ids, position_ids=batch.position_ids, use_cache=False).logits[0, :-1]
    labels = batch.labels[0, 1:]
    losses = torch.nn.functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return losses[labels != IGNORED]


def step_losses(model: torch.nn.Module, data: list[Example], *, micro_batch: int) -> list[float]:
    """Summed losses of every step of an epoch."""
    order = StepOrder([len(example) for example in data], sequences_per_step=5, seed=1)
    found = []
    for step in range(1, order.total_steps + 1):
        batches = split([data[row] for row in order.rows(step)], micro_batch, 0)
        with torch.no_grad():
            logits = [
                model(input_ids=b.input_ids, position_ids=b.position_ids, use_cache=False).logits for b in batches
            ]
        found.append(
            sum(
                torch.nn.functional.cross_entropy(
                    one[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), ignore_index=IGNORED, reduction="sum"
                ).item()
                for one, batch in zip(logits, batches, strict=True)
            )
        )
    return found


def test_a_cut_row_has_the_losses_of_the_full_row_up_to_the_cut(model: torch.nn.Module, prepared: Prepare) -> None:
    full = {example.row: example for example in prepared().train}
    cut = prepared(max_length=24, most_dropped_share=1.0).train
    shorter = [example for example in cut if len(example) < len(full[example.row])]
    assert len(shorter) >= 5
    for example in cut:
        whole = full[example.row]
        assert example.input_ids.tolist() == whole.input_ids[: len(example)].tolist()
        kept = token_losses(model, example)
        torch.testing.assert_close(kept, token_losses(model, whole)[: len(kept)], rtol=1e-5, atol=1e-6)


def test_packed_and_unpacked_files_have_the_same_sum_of_losses(model: torch.nn.Module, prepared: Prepare) -> None:
    alone, packed = prepared(packing=False).train, prepared(packing=True).train
    assert len(packed) < len(alone)
    assert sum(example.trained_tokens for example in packed) == sum(example.trained_tokens for example in alone)
    losses = [torch.cat([token_losses(model, example) for example in data]) for data in (alone, packed)]
    torch.testing.assert_close(losses[0].sort().values, losses[1].sort().values, rtol=1e-4, atol=1e-5)


def test_streamed_in_small_parts_from_memory_and_from_the_cache_are_the_same(
    model: torch.nn.Module, prepared: Prepare, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepared()
    monkeypatch.setattr(preparing, "BATCH_ROWS", 2)
    streamed = prepared(cache="another")
    again = prepared(cache="another")
    assert (streamed.report.from_cache, again.report.from_cache) == (False, True)
    [source] = open_sources([tmp_path / "rows.jsonl"], ReadOptions())
    contents = [source.shape.convert(row) for row in source_rows(source) if isinstance(row, Row)]
    memory = [item for item in Encoder(tokenizer).encode(list(enumerate(contents))) if isinstance(item, Example)]
    assert len(memory) == len(ROWS)
    expected = step_losses(model, memory, micro_batch=5)
    for data in (whole.train, streamed.train, again.train):
        assert step_losses(model, data, micro_batch=5) == expected  # the same numbers, not nearly
    assert np.allclose(step_losses(model, memory, micro_batch=2), expected, rtol=1e-5)


@pytest.fixture
def weighted(tokenizer: Any, tmp_path: Path) -> Callable[..., list[Example]]:
    """Conversations of two answers with weights; every third has none."""
    rows = []
    for n in range(1, 13):
        weights = [{"weight": 0.5}, {"weight": 2}] if n % 3 else [{}, {"weight": 0}]
        asked = {"role": "user", "content": "hello " * n}
        answers = [{"role": "assistant", "content": "the cat ran " * (n % 4 + 1), **weight} for weight in weights]
        rows.append({"messages": [asked, answers[0], asked, answers[1]]})
    path = tmp_path / "weighted.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    def make(**choice: Any) -> list[Example]:
        wish = DataChoice(paths=(str(path),), eval_share=0.0, **choice)
        return prepare(wish, tokenizer=tokenizer, max_length=256, seed=1, cache=tmp_path / "cache").train

    return make


def test_weighted_answers_train_their_weighted_mean_packed_or_not(
    model: torch.nn.Module, weighted: Callable[..., list[Example]]
) -> None:
    from vramfit.engine.resident import ResidentExecutor
    from vramfit.planning.plan import Plan

    apart, packed = weighted(), weighted(packing=True)
    assert len(packed) < len(apart) == 12
    losses = torch.cat([token_losses(model, example) for example in apart])
    weights = np.concatenate([example.token_weights()[example.trained] for example in apart])
    assert sorted(set(weights.tolist())) == [0.5, 1, 2]
    wanted = float((losses * torch.from_numpy(weights)).sum() / weights.sum())
    plan = Plan(
        method="full", device="cpu", budget_bytes=2**30, compute="fp32", weight_format="fp32", max_length=256,
        micro_batch=2, accumulation=2, recompute=0, loss="chunked",
    )  # fmt: skip
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    executor = ResidentExecutor(model, plan=plan, optimizer=optimizer, max_grad_norm=0.0)
    results = [executor.step(split(data, size, 0), 0.0) for data in (apart, packed) for size in (1, 5)]
    model.eval()
    for result in results:
        assert result.loss == pytest.approx(wanted, rel=1e-5)
        assert result.tokens == len(weights)
        assert result.grad_norm == pytest.approx(results[0].grad_norm, rel=1e-5)
