"""The optimizer: AdamW with its parameter groups. Imports torch only when one is built."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vramfit.config import ScheduleChoice
from vramfit.engine.accelerators import backend_of
from vramfit.engine.schedule import learning_rate_at as learning_rate_at
from vramfit.errors import ModelError
from vramfit.planning.plan import Plan

if TYPE_CHECKING:
    import torch

_EPSILON = 1e-8


def build_optimizer(model: torch.nn.Module, schedule: ScheduleChoice, plan: Plan) -> torch.optim.Optimizer:
    """AdamW over the trained parameters of `model`; the loop sets the learning rate before every step.

    One fused kernel per step where the device has it: it saves the parameter-sized temporary of the foreach kind.
    Raises ModelError when nothing is trained.
    """
    import torch

    groups = parameter_groups(model, weight_decay=schedule.weight_decay)
    return torch.optim.AdamW(
        groups,
        lr=0.0,
        betas=(schedule.beta1, schedule.beta2),
        eps=_EPSILON,
        fused=backend_of(plan.device).fused,
    )


def parameter_groups(model: torch.nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Trained parameters in two groups: matrices decay; norms, biases and other vectors do not.

    Decay pulls towards zero. For a norm's gain that is no regularisation but a wrong target, and a vector has too few
    numbers for it to matter. Raises ModelError when the model has no trained parameter.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trained:
        raise ModelError(
            "The model has 0 trained parameters", "Choose another method, or adapter targets that match its layers."
        )
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]
