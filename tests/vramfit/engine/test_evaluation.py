"""Evaluation mode is put back as it was, and weights that are no numbers are found."""

from __future__ import annotations

import pytest
import torch

from vramfit.engine.evaluation import evaluation_mode, has_finite_weights


def test_every_module_has_its_own_mode_back() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Dropout())
    model[1].eval()
    with evaluation_mode(model):
        assert not any(module.training for module in model.modules())
        assert not torch.is_grad_enabled()
    assert [model.training, model[0].training, model[1].training] == [True, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf"), -float("inf")])
def test_one_weight_that_is_no_number_is_found(dtype: torch.dtype, wrong: float) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2)).to(dtype)
    assert has_finite_weights(model)
    with torch.no_grad():
        model[1].weight[1, 3] = wrong
    assert not has_finite_weights(model)
    model[1].weight.requires_grad_(False)  # only what is trained is asked: a frozen base may have its own oddities
    assert has_finite_weights(model)


def test_large_weights_are_numbers() -> None:
    model = torch.nn.Linear(1000, 10)
    with torch.no_grad():
        model.weight.fill_(1e38)
    assert has_finite_weights(model)
