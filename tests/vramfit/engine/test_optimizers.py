from __future__ import annotations

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine.optimizers import build_optimizer, parameter_groups
from vramfit.errors import ModelError


def test_norms_and_biases_do_not_decay(tiny):
    model = tiny.build("phi")  # has biases and LayerNorms
    decayed, free = parameter_groups(model, weight_decay=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    free_names = {names[id(parameter)] for parameter in free["params"]}
    assert decayed["weight_decay"] == 0.1 and free["weight_decay"] == 0.0
    assert all(name.endswith("bias") or "norm" in name for name in free_names) and len(free_names) > 4
    assert not any("norm" in names[id(parameter)] for parameter in decayed["params"])
    assert len(names) == len(decayed["params"]) + len(free["params"])


def test_frozen_parameters_are_left_out_and_none_at_all_is_refused(tiny):
    model = tiny.build("llama")
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="0 trained parameters"):
        build_optimizer(model, ScheduleChoice(), tiny.plan())


def test_it_is_adamw(tiny):
    """Three steps against the formula of Loshchilov and Hutter (2019), written out."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(3, 2, bias=False)
    weight, first, second = layer.weight.detach().clone(), torch.zeros(2, 3), torch.zeros(2, 3)
    schedule = ScheduleChoice(weight_decay=0.1, beta1=0.9, beta2=0.95)
    optimizer = build_optimizer(layer, schedule, tiny.plan())
    for step in range(1, 4):
        gradient = torch.randn(2, 3)
        layer.weight.grad = gradient.clone()
        for group in optimizer.param_groups:
            group["lr"] = 0.01
        optimizer.step()
        first = 0.9 * first + 0.1 * gradient
        second = 0.95 * second + 0.05 * gradient**2
        direction = (first / (1 - 0.9**step)) / ((second / (1 - 0.95**step)).sqrt() + 1e-8)
        weight = weight * (1 - 0.01 * 0.1) - 0.01 * direction
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=1e-5, atol=1e-7)
