from __future__ import annotations

import contextlib
import random
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

from tests.vramfit.engine.pseudo_card import PseudoCard
from vramfit.config import ScheduleChoice
from vramfit.engine.governor import build_governor
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.recovery import Recovery, asked_bytes, halves, is_out_of_memory
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import WontFit
from vramfit.models.adapters import attach_adapters

LENGTHS = (9, 17, 5, 30)
STEPS = 2


def executor_of(tiny, *, adapters=False, dropout=0.2, **plan):
    model = tiny.build("llama", attention_dropout=dropout)
    if adapters:
        model = attach_adapters(model, rank=4, alpha=8, dropout=dropout, seed=0)
    plan = tiny.plan(**plan)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))


@dataclass
class Trained:
    """All that two steps leave: weights, optimizer states, random states; losses and norms; who was repeated."""

    tensors: dict[str, torch.Tensor]
    losses: list[float]
    repeated: tuple[bool, ...]


def trained(tiny, executor, *, card=None, limit=(0, 0)) -> Trained:
    """Two steps, within `card` if there is one. `limit` is (step, rows): from then on no more rows at once."""
    torch.manual_seed(7)
    batches = [tiny.pad(tiny.sequences(*LENGTHS)), tiny.pad(tiny.sequences(8, 12, 3, seed=1))]
    results = []
    for step in range(STEPS):
        if limit[1] and step == limit[0]:
            executor.recovery.most_rows = limit[1]
        with card or contextlib.nullcontext():
            results.append(executor.step(batches, 1e-2))
    return Trained(
        {name: tensor.clone() for name, tensor in executor.state()[0].items()},
        [value for result in results for value in (result.loss, result.grad_norm)],
        tuple(bool(result.recovered) for result in results),
    )


def assert_same(found, wanted) -> None:
    assert found.keys() == wanted.keys()
    different = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    assert not different


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("recompute", [0, 2])
def test_wherever_memory_runs_out_the_steps_are_those_of_an_undisturbed_run_bit_for_bit(tiny, adapters, recompute):
    """Out of memory at random points of forward, backward and optimizer, dropout on: the same masks are drawn."""
    options = {"adapters": adapters, "recompute": recompute}
    card = PseudoCard()
    undisturbed = {(0, 0): trained(tiny, executor_of(tiny, **options), card=card)}
    limits = set()
    for point in random.Random(recompute + adapters).sample(range(1, card.allocations), 5):
        executor = executor_of(tiny, **options)
        found = trained(tiny, executor, card=PseudoCard(failing=(point,)))
        assert sum(found.repeated) == 1
        rows = executor.recovery.most_rows
        limit = (found.repeated.index(True), rows) if rows else (0, 0)
        if limit not in undisturbed:
            undisturbed[limit] = trained(tiny, executor_of(tiny, **options), limit=limit)
        assert found.losses == undisturbed[limit].losses
        assert_same(found.tensors, undisturbed[limit].tensors)
        assert all(parameter.grad is None for parameter in executor.model.parameters())
        limits.add(limit)
    assert any(rows == 2 for _, rows in limits)  # of 4


@pytest.mark.parametrize(
    "options",
    [
        {"compress": 2},  # its rounding draws random numbers of its own
        {"recompute": 2, "input_tier": "host"},
        {"optimizer_bits": 8},
        {"optimizer_tier": "host"},
        {"optimizer": "lion", "loss": "full"},
    ],
    ids=str,
)
def test_other_techniques_are_repeated_bit_for_bit_too(tiny, options):
    card = PseudoCard()
    undisturbed = {(0, 0): trained(tiny, executor_of(tiny, **options), card=card)}
    for point in random.Random(1).sample(range(1, card.allocations), 3):
        executor = executor_of(tiny, **options)
        try:
            found = trained(tiny, executor, card=PseudoCard(failing=(point,)))
        except WontFit as refused:  # 8-bit states are written chunk by chunk: the first ones had been
            assert "had already changed" in str(refused)
            continue
        rows = executor.recovery.most_rows
        limit = (found.repeated.index(True), rows) if rows else (0, 0)
        if limit not in undisturbed:
            undisturbed[limit] = trained(tiny, executor_of(tiny, **options), limit=limit)
        assert found.losses == undisturbed[limit].losses
        assert_same(found.tensors, undisturbed[limit].tensors)


def test_steps_inside_backward_are_repeated_until_the_first_weight_has_changed(tiny):
    """Out of memory in forward is as ever. In backward, behind the first step of a weight, nothing can be put back."""
    options = {"optimizer_in_backward": True, "clip_passes": 1, "dropout": 0.0}
    wanted = trained(tiny, executor_of(tiny, **options))
    card = PseudoCard()
    trained(tiny, executor_of(tiny, **options), card=card)
    ends = []
    for point in (5, 60, *range(100, card.allocations, card.allocations // 8)):
        executor = executor_of(tiny, **options)
        try:
            found = trained(tiny, executor, card=PseudoCard(failing=(point,)))
            ends.append("repeated")
            assert found.losses == pytest.approx(wanted.losses, rel=1e-5)
        except WontFit as refused:
            ends.append("refused")
            assert "had already changed" in str(refused) and executor.recovery.most_rows == 2
    assert ends[0] == "repeated" and set(ends) == {"repeated", "refused"}


@pytest.mark.parametrize("adapters", [False, True])
def test_in_the_optimizers_step_the_same_sizes_are_tried_again(tiny, adapters):
    """Where its states are made, one after another: half of them there is not half a step."""
    wanted = trained(tiny, executor_of(tiny, adapters=adapters))
    for made in (1, 2, 5, 8):
        executor = executor_of(tiny, adapters=adapters)
        real, card = executor.optimizer.step, PseudoCard(failing=(made,))

        def limited(*args, real=real, card=card, **kwargs):
            with card:
                return real(*args, **kwargs)

        executor.optimizer.step = limited
        found = trained(tiny, executor)
        assert card.raised == 1 and found.repeated == (True, False) and executor.recovery.most_rows == 0
        assert found.losses == wanted.losses
        assert_same(found.tensors, wanted.tensors)


@pytest.mark.parametrize("point", [30, 100, 200])
def test_a_smaller_split_gives_the_same_gradient(tiny, point):
    wanted = trained(tiny, executor_of(tiny, dropout=0.0))
    executor = executor_of(tiny, dropout=0.0)
    found = trained(tiny, executor, card=PseudoCard(failing=(point,)))
    assert executor.recovery.most_rows == 2
    assert found.losses == pytest.approx(wanted.losses, rel=1e-6)


@pytest.mark.parametrize(
    ("budget", "accumulation", "recomputes"), [(2**20, 1, True), (2**20, 2, False), (2**30, 1, False)]
)
def test_a_step_in_one_pass_is_not_halved_where_its_gradients_would_wait(tiny, budget, accumulation, recomputes):
    """Half a micro-batch's activations may be less than the gradients of all weights: blocks are recomputed first."""
    batches = [tiny.pad(tiny.sequences(*LENGTHS)), tiny.pad(tiny.sequences(8, 12, 3, seed=1))][:accumulation]
    wanted = executor_of(tiny, dropout=0.0, accumulation=accumulation).step(batches, 1e-2)
    executor = executor_of(tiny, dropout=0.0, accumulation=accumulation, budget_bytes=budget)
    executor.govern(
        build_governor(["keep"] * 2, device=executor.device, apply=executor.set_activations, budget_bytes=budget)
    )
    with PseudoCard(failing=(60,)):
        found = executor.step(batches, 1e-2)

    assert executor.governor.modes == ["recompute" if recomputes else "keep"] * 2
    assert executor.recovery.most_rows == (0 if recomputes else 2)
    assert found.recovered
    assert found.loss == (wanted.loss if recomputes else pytest.approx(wanted.loss, rel=1e-6))


def test_a_budget_ends_in_the_largest_split_that_fits(tiny):
    """Nothing is told which number fits: it is found by running out."""
    executor = executor_of(tiny)
    free = PseudoCard(executor.model)
    trained(tiny, executor, card=free)
    executor = executor_of(tiny)
    card = PseudoCard(executor.model, budget_bytes=int(free.peak_bytes * 0.8))
    found = trained(tiny, executor, card=card)
    rows = executor.recovery.most_rows
    assert card.raised >= 1 and rows in (1, 2)
    wanted = trained(tiny, executor_of(tiny), limit=(found.repeated.index(True), rows))
    assert_same(found.tensors, wanted.tensors)


def test_what_never_fits_ends_with_the_numbers(tiny):
    executor = executor_of(tiny, budget_bytes=3 * 2**20)
    before = {name: value.clone() for name, value in executor.model.state_dict().items()}
    card = PseudoCard(executor.model)
    card.budget_bytes = card.allocated + 20_000
    with pytest.raises(WontFit, match=r"single sequence of 30 tokens.*\d bytes.*may use 3 MiB") as caught:
        trained(tiny, executor, card=card)
    assert caught.value.needed_bytes > caught.value.available_bytes == 3 * 2**20
    assert executor.recovery.most_rows == 1 and card.raised == 3
    assert all(torch.equal(before[name], value) for name, value in executor.model.state_dict().items())
    assert all(parameter.grad is None for parameter in executor.model.parameters())
    assert not executor.optimizer.state


def test_when_weights_had_changed_the_step_is_not_repeated(tiny):
    """As an optimizer inside backward does."""
    executor = executor_of(tiny)
    calls = []

    def half_a_step(*args, **kwargs):
        with torch.no_grad():
            executor.model.model.norm.weight.mul_(0.9)
        calls.append(1)
        raise torch.OutOfMemoryError("tried to allocate 2.00 GiB")

    executor.optimizer.step = half_a_step
    with pytest.raises(WontFit, match=r"1 of \d+ tensors .* had already changed.*last checkpoint"):
        executor.step([tiny.pad(tiny.sequences(*LENGTHS))], 1e-2)
    assert len(calls) == 1


def test_an_optimizer_whose_changes_nobody_sees_is_not_tried_twice(tiny):
    calls = []

    class ByPointer(torch.optim.SGD):
        def step(self, closure=None):
            calls.append(1)
            raise torch.OutOfMemoryError("no room")

    ByPointer.__module__ = "somebodys.kernels"
    model = tiny.build("llama")
    executor = ResidentExecutor(model, plan=tiny.plan(), optimizer=ByPointer(model.parameters(), lr=0.1))
    with pytest.raises(WontFit, match="optimizer's step"):
        executor.step([tiny.pad(tiny.sequences(*LENGTHS))], 1e-2)
    assert len(calls) == 1


class Norm(nn.Module):
    """Everything a forward may change beside gradients: running means, and three generators."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))

    def forward(self, rows):
        return self.layers(rows) * (1 + random.random() + np.random.random())


@pytest.mark.parametrize("failing_call", [1, 2])
def test_running_means_and_every_generator_are_as_if_nothing_had_happened(failing_call):
    """Both halves of the first attempt have gone through the normalisation when memory runs out in the second."""
    rows = torch.randn(8, 4)

    def stepped(fails: bool) -> tuple[dict[str, torch.Tensor], float]:
        for seed in (torch.manual_seed, random.seed, np.random.seed):
            seed(3)
        model = Norm()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        recovery = Recovery(model, optimizer, device=torch.device("cpu"))
        recovery.most_rows = 2 if not fails else 4
        seen = []

        def accumulate(most_rows):
            for start in range(0, 8, most_rows):
                model(rows[start : start + most_rows]).sum().backward()
                seen.append(most_rows)
                if fails and len(seen) == failing_call:
                    raise torch.OutOfMemoryError("tried to allocate 1 MiB")
            return True

        told = recovery.run(accumulate, lambda made, story: optimizer.step() or story, rows=8)
        assert bool(told) is fails
        return model.state_dict(), torch.rand(()).item() + random.random() + np.random.random()

    wanted, found = stepped(False), stepped(True)
    assert wanted[1] == found[1]
    assert_same(found[0], wanted[0])


def test_case_096_fp16s_scaler_may_unscale_again(tiny):
    executor = executor_of(tiny, compute="fp16", dropout=0.0)
    real, failures = executor.optimizer.step, [True]

    def failing_once(*args, **kwargs):
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("no room for the states")
        return real(*args, **kwargs)

    executor.optimizer.step = failing_once
    batches = [tiny.pad(tiny.sequences(4, 6, seed=seed)) for seed in range(4)]
    result = executor.step(batches, 1e-2)
    wanted = executor_of(tiny, compute="fp16", dropout=0.0)
    assert "optimizer's step" in result.recovered
    assert result.loss == wanted.step(batches, 1e-2).loss
    for name, value in wanted.model.state_dict().items():
        assert torch.equal(value, executor.model.state_dict()[name])


def test_large_buffers_are_watched_and_not_copied(monkeypatch):
    monkeypatch.setattr("vramfit.engine.recovery.LARGEST_COPY_BYTES", 100)
    model = nn.Linear(2, 2)
    model.register_buffer("packed", torch.zeros(1000))
    recovery = Recovery(model, torch.optim.SGD(model.parameters(), lr=0.1), device=torch.device("cpu"))

    def accumulate(most_rows):
        model.packed.add_(1)
        raise torch.OutOfMemoryError("no room")

    with pytest.raises(WontFit, match="1 of 3 tensors"):
        recovery.run(accumulate, lambda made, story: None, rows=4)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("x"), True),
        (MemoryError(), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 5 GB)"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_out_of_memory_is_recognised_on_every_device(error, expected):
    assert is_out_of_memory(error) is expected


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of 23.69 GiB", int(2.5 * 2**30)),
        ("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes. Error code 12", 4096),
        ("out of memory", 0),
    ],
)
def test_what_was_asked_for_is_read_from_the_message(message, size):
    assert asked_bytes(message) == size


def test_halves_lose_no_row():
    assert [halves(rows) for rows in (8, 5, 2, 1)] == [(4, 4), (3, 2), (1, 1), (1, 0)]


def test_memory_that_runs_out_before_the_step_begins_is_told_with_the_numbers(tiny, monkeypatch):
    executor = executor_of(tiny)

    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr("vramfit.engine.recovery._Buffers.note", full)
    with pytest.raises(WontFit, match=r"Memory ran out before the step began.*The run may use"):
        executor.step([tiny.pad(tiny.sequences(*LENGTHS))], 1e-3)
