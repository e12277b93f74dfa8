"""Plans and workloads to start from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from vramfit.planning.plan import Plan, Workload


@pytest.fixture
def plan() -> Callable[..., Plan]:
    """A pretraining plan on the CPU; give what differs."""

    def make(**changes: Any) -> Plan:
        values: dict[str, Any] = {
            "method": "pretrain",
            "device": "cpu",
            "budget_bytes": 2**33,
            "compute": "fp32",
            "weight_format": "fp32",
            "max_length": 128,
            "micro_batch": 2,
            "accumulation": 1,
            "recompute": 0,
            "loss": "chunked",
            "loss_chunk_tokens": 64,
        }
        return Plan(**{**values, **changes})

    return make


@pytest.fixture
def workload() -> Callable[..., Workload]:
    """100 sequences, all of one length."""

    def make(length: int = 128, **changes: Any) -> Workload:
        values: dict[str, Any] = {"sequences": 100, "mean_tokens": length, "longest_tokens": length, "exact": True}
        return Workload(**{**values, **changes})

    return make
