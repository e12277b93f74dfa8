"""The optimizer of a plan: which kind, in how many bits its states, and where they live. Imports torch only when built.

AdamW on fp32 weights with 32-bit states is torch's own, one fused kernel. Everything else is ours (`chunked.py`), or
bitsandbytes' where a card has its kernel (`bitsandbytes_states.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from vramfit.config import ScheduleChoice
from vramfit.engine.accelerators import backend_of
from vramfit.engine.schedule import learning_rate_at as learning_rate_at
from vramfit.errors import ConfigError, ModelError, Problem
from vramfit.planning.plan import Plan

if TYPE_CHECKING:
    import torch

    from vramfit.engine.update import StepEnd

_EPSILON: Final = 1e-8
_MUON_MOMENTUM: Final = 0.95  # as published
_ADAFACTOR_DECAY: Final = -0.8  # as published
_BITS: Final = {"adamw": (32, 8, 4), "lion": (32, 8)}  # what is not named: 32


def build_optimizer(
    model: torch.nn.Module, schedule: ScheduleChoice, plan: Plan, *, seed: int = 0
) -> torch.optim.Optimizer:
    """The plan's optimizer over the trained parameters of `model`; the loop sets the learning rate before every step.

    `seed` decides how bf16 weights are rounded. Betas are the schedule's, SGD's momentum is beta1; Muon's momentum and
    Adafactor's decay are as published. Raises ModelError when nothing is trained, ConfigError for what cannot be had.
    """
    _check_bits(plan)
    groups = parameter_groups(model, weight_decay=schedule.weight_decay)
    if plan.optimizer == "muon":
        groups = _apart(groups, outside_blocks(model), _norms_and_biases(model))
    if plan.optimizer_tier == "device":
        return _on_device(groups, schedule, plan, seed=seed)
    from vramfit.engine.host_states import HostStates

    # Their weights are fp32 copies in RAM, whatever the model's are.
    return HostStates(groups, lambda own: _optimizer(own, schedule, plan, device="cpu", seed=seed))


def build_host_optimizer(
    model: torch.nn.Module, schedule: ScheduleChoice, plan: Plan, *, seed: int = 0
) -> tuple[torch.optim.Optimizer, dict[str, torch.nn.Parameter]]:
    """(the plan's optimizer, what it steps by the names of the model's weights): fp32 stand-ins without numbers.

    For weights whose numbers come and go. Raises as `build_optimizer`.
    """
    import torch

    from vramfit.models.hollow import hollow

    _check_bits(plan)
    groups = parameter_groups(model, weight_decay=schedule.weight_decay)
    if plan.optimizer == "muon":
        groups = _apart(groups, outside_blocks(model), _norms_and_biases(model))
    made = {
        parameter: torch.nn.Parameter(hollow(torch.empty((), dtype=torch.float32).expand(parameter.shape)))
        for group in groups
        for parameter in group["params"]
    }
    own = [{**group, "params": [made[each] for each in group["params"]]} for group in groups]
    optimizer = _optimizer(own, schedule, plan, device="cpu", seed=seed)
    return optimizer, {name: made[each] for name, each in model.named_parameters() if each in made}


def _on_device(
    groups: list[dict[str, Any]], schedule: ScheduleChoice, plan: Plan, *, seed: int
) -> torch.optim.Optimizer:
    import torch

    from vramfit.engine import bitsandbytes_states

    formats = {parameter.dtype for group in groups for parameter in group["params"]}
    if plan.optimizer_paged:
        for each in formats:
            bitsandbytes_states.check_paged(plan.device, plan.optimizer, plan.optimizer_bits, each)
    has_kernel = formats == {torch.float32} and bitsandbytes_states.has_kernel(plan.device, plan.optimizer)
    if plan.optimizer_paged or (plan.optimizer_bits == 8 and has_kernel):
        bits: Any = plan.optimizer_bits
        return bitsandbytes_states.build(
            groups,
            kind=plan.optimizer,
            bits=bits,
            paged=plan.optimizer_paged,
            options=_options(plan.optimizer, schedule),
        )
    return _optimizer(groups, schedule, plan, device=plan.device, seed=seed)


def _optimizer(
    groups: list[dict[str, Any]], schedule: ScheduleChoice, plan: Plan, *, device: str, seed: int
) -> torch.optim.Optimizer:
    """torch's or ours, whose weights are on `device`."""
    import torch

    options = _options(plan.optimizer, schedule)
    plain = all(parameter.dtype == torch.float32 for group in groups for parameter in group["params"])
    if plan.optimizer == "adamw" and plan.optimizer_bits == 32 and plain:
        # One kernel for all where the device has it: it saves the parameter-sized temporary of the foreach kind.
        return torch.optim.AdamW(groups, lr=0.0, fused=backend_of(device).fused, **options)
    from vramfit.engine.adafactor import Adafactor
    from vramfit.engine.adamw import AdamW
    from vramfit.engine.chunked import ChunkedOptimizer, Rule
    from vramfit.engine.lion import Lion
    from vramfit.engine.muon import Muon
    from vramfit.engine.sgd import Sgd

    product = torch.float32 if device == "cpu" else torch.bfloat16
    rules: dict[str, Rule] = {
        "adamw": AdamW(),
        "adafactor": Adafactor(),
        "lion": Lion(),
        "muon": Muon(product),
        "sgd": Sgd(),
    }
    bits: Any = plan.optimizer_bits
    own = [{"rule": plan.optimizer, **options, **group} for group in groups]
    for group in own:
        group |= _options(group["rule"], schedule)
    return ChunkedOptimizer(own, rules={name: rules[name] for name in {g["rule"] for g in own}}, bits=bits, seed=seed)


def _options(kind: str, schedule: ScheduleChoice) -> dict[str, Any]:
    betas = (schedule.beta1, schedule.beta2)
    options: dict[str, dict[str, Any]] = {
        "adamw": {"betas": betas, "eps": _EPSILON},
        "lion": {"betas": betas},
        "sgd": {"momentum": schedule.beta1},
        "muon": {"momentum": _MUON_MOMENTUM},
        "adafactor": {"decay_power": _ADAFACTOR_DECAY},
    }
    return options[kind]


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
    gains = _norms_and_biases(model)
    matrices = [parameter for parameter in trained if parameter.ndim >= 2 and id(parameter) not in gains]
    vectors = [parameter for parameter in trained if parameter.ndim < 2 or id(parameter) in gains]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def _norms_and_biases(model: torch.nn.Module) -> set[int]:
    """Some families keep these as matrices: a norm's gain for each head, a bias for each expert."""
    from vramfit.engine.raised import is_norm

    of_norms = {id(each) for module in model.modules() if is_norm(module) for each in module.parameters(recurse=False)}
    return of_norms | {id(each) for name, each in model.named_parameters() if name.endswith("bias")}


def outside_blocks(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """The matrices that look up or choose among tokens or positions: embeddings, and the head."""
    import torch

    found: list[Any] = [module.weight for module in model.modules() if isinstance(module, torch.nn.Embedding)]
    whole: Any = model
    base: Any = whole.get_base_model() if hasattr(model, "get_base_model") else model
    head = base.get_output_embeddings() if hasattr(base, "get_output_embeddings") else None
    return found if head is None else [*found, head.weight]


def _apart(groups: list[dict[str, Any]], outside: list[torch.nn.Parameter], gains: set[int]) -> list[dict[str, Any]]:
    """Muon's groups: the matrices inside the blocks are its own, everything else is AdamW's."""
    others = {id(parameter) for parameter in outside} | gains
    found = []
    for group in groups:
        hidden = [each for each in group["params"] if each.ndim >= 2 and id(each) not in others]
        rest = [each for each in group["params"] if each.ndim < 2 or id(each) in others]
        found += [{**group, "params": hidden, "rule": "muon"}, {**group, "params": rest, "rule": "adamw"}]
    return [group for group in found if group["params"]]


def _check_bits(plan: Plan) -> None:
    possible = _BITS.get(plan.optimizer, (32,))
    if plan.optimizer_bits not in possible:
        words = " or ".join(map(str, possible))
        raise ConfigError(
            [
                Problem(
                    field="memory.optimizer_bits",
                    what=f"{plan.optimizer} keeps its states in {words} bits, not in {plan.optimizer_bits}",
                    remedy=f"Choose {words}.",
                )
            ]
        )


def build_step_end(
    plan: Plan,
    optimizer: torch.optim.Optimizer,
    *,
    parameters: list[torch.nn.Parameter],
    scaler: torch.amp.GradScaler | None,
    max_grad_norm: float,
) -> StepEnd:
    """When the plan's weights are stepped: after backward, in it, or in RAM. Raises ConfigError for what cannot be."""
    from vramfit.engine.host_states import HostStates, StepOnHost
    from vramfit.engine.step_in_backward import OnePass, TwoPasses
    from vramfit.engine.update import AfterBackward

    options: dict[str, Any] = {"scaler": scaler, "max_grad_norm": max_grad_norm}
    if isinstance(optimizer, HostStates):
        return StepOnHost(optimizer, parameters, **options)
    if not plan.optimizer_in_backward:
        return AfterBackward(optimizer=optimizer, parameters=parameters, **options)
    return (TwoPasses if plan.clip_passes == 2 else OnePass)(optimizer, parameters, **options)
