"""Looking at a model without changing it: evaluation mode, put back exactly as it was."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import nn


@contextlib.contextmanager
def evaluation_mode(model: nn.Module) -> Iterator[None]:
    """No gradients and no dropout inside; afterwards every module has its own mode back, not its parent's."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


def has_finite_weights(model: nn.Module) -> bool:
    """Whether all trained weights are numbers. One pass over them, and one wait for the device."""
    trained = [value.detach() for value in model.parameters() if value.requires_grad]
    largest = [torch.linalg.vector_norm(value, ord=float("inf"), dtype=torch.float32) for value in trained]
    return not largest or bool(torch.stack(largest).isfinite().all().item())
