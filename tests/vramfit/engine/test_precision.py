from __future__ import annotations

import pytest
import torch

from vramfit.engine.precision import autocast, choose_precision, loss_scaler
from vramfit.errors import ConfigError


def test_the_cpu_computes_in_fp32():
    choice = choose_precision("cpu")
    assert choice.compute == "fp32" and choice.reason


@pytest.mark.parametrize(("has_bf16", "compute"), [(True, "bf16"), (False, "fp16")])
@pytest.mark.parametrize("kind", ["cuda", "xpu"])
def test_a_card_computes_in_bf16_when_it_can(monkeypatch, kind, has_bf16, compute):
    monkeypatch.setattr(f"torch.{kind}.is_bf16_supported", lambda *args, **kwargs: has_bf16)
    assert choose_precision(f"{kind}:0").compute == compute


@pytest.mark.parametrize(("compute", "dtype"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_autocast_computes_products_in_the_planned_format(compute, dtype):
    layer = torch.nn.Linear(4, 4)
    with autocast("cpu", compute):
        assert layer(torch.ones(1, 4)).dtype == dtype
    assert layer.weight.dtype == torch.float32


@pytest.mark.parametrize("compute", ["fp32", "bf16"])
def test_only_fp16_has_a_scaler(compute):
    assert loss_scaler("cpu", compute, trained=[]) is None
    assert loss_scaler("cpu", "fp16", trained=[]).is_enabled()


def test_fp16_weights_with_fp16_scaling_are_refused():
    weights = list(torch.nn.Linear(2, 2).half().parameters())
    with pytest.raises(ConfigError, match="fp32") as caught:
        loss_scaler("cpu", "fp16", trained=weights)
    assert caught.value.problems[0].field == "memory.precision"
