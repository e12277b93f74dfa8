"""Buffers that a forward moves: recomputed or not, a step leaves them, and the weights, the same bit for bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import vramfit
from vramfit.config import ScheduleChoice
from vramfit.engine.activations import set_activations
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor


class Moving(nn.Module):
    """A linear, batch normalisation, and a power iteration whose buffer the output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.normal = nn.Linear(6, 6), nn.BatchNorm1d(6, momentum=0.3)
        self.spectral = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("still", torch.ones(6))

    def forward(self, hidden: Tensor) -> Tensor:
        self.seen += 1
        return hidden + torch.tanh(self.spectral(self.normal(self.linear(hidden)))) * self.still * self.seen


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Moving() for _ in range(3)])
        self.head = nn.Linear(6, 1)

    def forward(self, rows: Tensor) -> Tensor:
        for layer in self.layers:
            rows = layer(rows)
        return self.head(rows)


def loss(model: nn.Module, rows: Tensor) -> tuple[Tensor, int]:
    return model(rows).square().sum(), len(rows)


def trained(model: nn.Module, **options: Any) -> dict[str, Tensor]:
    step = vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.05), loss=loss, precision="fp32", **options)
    for seed in range(3):
        step(torch.randn(8, 6, generator=torch.Generator().manual_seed(seed)))
    return model.state_dict()


@pytest.mark.parametrize("recompute", [1, "all"])
@pytest.mark.filterwarnings("ignore:Model has 3 layers of batch normalisation")
@pytest.mark.parametrize("micro_batch", ["auto", 4])
def test_wrapped_models_move_their_buffers_once(recompute: Any, micro_batch: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    wanted = trained(copy.deepcopy(model), micro_batch=micro_batch)
    found = trained(model, recompute=recompute, micro_batch=micro_batch)
    assert wanted["layers.0.seen"] == (3 if micro_batch == "auto" else 6)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []


@pytest.mark.parametrize("mode", ["recompute", "offload", "compress"])
def test_a_backward_that_is_done_twice_computes_the_same_twice(mode: Any) -> None:
    torch.manual_seed(0)
    model = Model()
    set_activations(model, [mode] * 3)
    summed = model(torch.randn(8, 6)).square().sum()
    weights = list(model.parameters())
    first = torch.autograd.grad(summed, weights, retain_graph=True)
    after = {name: each.clone() for name, each in model.named_buffers()}
    second = torch.autograd.grad(summed, weights)
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))
    assert all(torch.equal(each, after[name]) for name, each in model.named_buffers())
    assert float(after["layers.1.seen"]) == 1.0


def with_batch_normalisation(tiny: Any, **plan: Any) -> ResidentExecutor:
    model = tiny.build("llama")
    torch.manual_seed(3)
    for block in model.model.layers:
        normal = nn.BatchNorm1d(32)
        block.mlp.add_module("normal", normal)
        block.mlp.register_forward_hook(
            lambda module, given, output: module.normal(output.reshape(-1, 32)).view(output.shape)
        )
    made = tiny.plan(**plan)
    return ResidentExecutor(model, plan=made, optimizer=build_optimizer(model, ScheduleChoice(), made))


@pytest.mark.parametrize(
    "plan",
    [
        {"recompute": 2},
        {"recompute": 1},
        {"recompute": 2, "input_tier": "host"},
        {"optimizer_in_backward": True, "clip_passes": 2},
        {"recompute": 2, "optimizer_in_backward": True, "clip_passes": 2},
    ],
    ids=str,
)
def test_steps_of_a_run_move_buffers_once(tiny: Any, plan: dict[str, Any]) -> None:
    """Recomputed blocks, and steps whose forward runs twice to clip exactly."""
    batches = [tiny.pad(tiny.sequences(9, 12)), tiny.pad(tiny.sequences(7, 5, seed=1))]
    plain, other = with_batch_normalisation(tiny), with_batch_normalisation(tiny, **plan)
    for executor in (plain, other):
        for _ in range(2):
            executor.step(batches, 1e-3)
    wanted, found = dict(plain.model.named_buffers()), dict(other.model.named_buffers())
    assert wanted["model.layers.0.mlp.normal.num_batches_tracked"] == 4
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
