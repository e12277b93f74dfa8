"""From a plan to the executor that carries it out: a model on the device, or one whose blocks visit it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch

from vramfit.config import RunConfig
from vramfit.engine.heap import keep_freed_memory, return_freed_memory
from vramfit.engine.optimizers import build_host_optimizer, build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import ConfigError, Problem
from vramfit.models.dora import measure_rows
from vramfit.models.load import adapted, load_model, quiet_transformers
from vramfit.planning.plan import Forecast, Plan
from vramfit.training.compile_choice import compiled_blocks

SCRATCH: Final = "blocks"
"""Inside a run's folder: blocks that live on disk in another format than the model's own files, and their inputs."""

INPUTS: Final = "inputs.bin"
"""There: the file in which blocks' inputs wait for their backward, where a plan has them on disk."""

MOST_KEPT: Final = 0.6
"""Of the budget: what a streamed run may need for freed memory to be kept."""

_CHANGES_BASE: Final = ("pissa", "olora")


def open_executor(
    config: RunConfig, forecast: Forecast, *, cache: Path, folder: Path, start_file: Path, resumed: bool
) -> ResidentExecutor:
    """The model of `config` with its optimizer, ready for steps. Raises UserError."""
    plan = forecast.plan
    if plan.weights_tier == "device":
        if plan.device == "cpu":
            keep_freed_memory()
        model = load_model(config, plan, cache=cache, start_file=start_file, resumed=resumed)
        optimizer = build_optimizer(model, config.schedule, plan, seed=config.seed)
        blocks = compiled_blocks(config, plan, model, run_s=forecast.seconds)
        executor = ResidentExecutor(
            model, plan=plan, optimizer=optimizer, max_grad_norm=config.schedule.max_grad_norm, loss=config.loss
        )
        executor.compiled = blocks
        return executor
    roomy = forecast.memory.device_bytes <= MOST_KEPT * plan.budget_bytes
    if plan.device == "cpu":
        # Keeping it is faster by a third where activations are large; a run that needs most of its budget cannot.
        keep_freed_memory() if roomy else return_freed_memory()
    return _streaming(
        config,
        plan,
        folder=folder,
        start_file=start_file,
        resumed=resumed,
        run_s=forecast.seconds,
        leaves=plan.device == "cpu" and not roomy,
    )


def _streaming(
    config: RunConfig,
    plan: Plan,
    *,
    folder: Path,
    start_file: Path,
    resumed: bool,
    run_s: float = 0.0,
    leaves: bool = False,
) -> ResidentExecutor:
    from vramfit.engine.streaming import StreamingExecutor
    from vramfit.models.streamed import open_streamed

    _check(config, plan)
    quiet_transformers()
    torch.manual_seed(config.seed)  # as a model on the device begins
    if not config.trains_adapter:
        return _streaming_all(config, plan, scratch=folder / SCRATCH, run_s=run_s, leaves=leaves)
    model, visits = open_streamed(
        config,
        plan,
        scratch=folder / SCRATCH,
        attach=lambda bare: adapted(bare, config, start_file, resumed=resumed),
    )
    if config.adapter.variant == "dora":
        for index, block in enumerate(visits.blocks):
            with visits.present(index, "up"):
                measure_rows(block)
    blocks = compiled_blocks(config, plan, model, run_s=run_s, visits=visits)
    executor = StreamingExecutor(
        model,
        visits=visits,
        plan=plan,
        optimizer=build_optimizer(model, config.schedule, plan, seed=config.seed),
        inputs_file=folder / SCRATCH / INPUTS,
        max_grad_norm=config.schedule.max_grad_norm,
        loss=config.loss,
    )
    executor.check()
    executor.compiled = blocks
    return executor


def _streaming_all(config: RunConfig, plan: Plan, *, scratch: Path, run_s: float, leaves: bool) -> ResidentExecutor:
    """Where the blocks that visit train. `leaves` as in DiskTier."""
    from vramfit.engine.streaming import StreamingExecutor
    from vramfit.engine.trained_blocks import TrainedBlocks
    from vramfit.models.block_tiers import own_tier
    from vramfit.models.streamed import open_streamed

    model, visits = open_streamed(config, plan, scratch=scratch, leaves=leaves)
    optimizer, stand_ins = build_host_optimizer(model, config.schedule, plan, seed=config.seed)
    weights: Any = visits.stream.tier
    trained = TrainedBlocks(
        visits,
        weights,
        optimizer,
        stand_ins,
        lambda layouts, name: own_tier(plan, plan.optimizer_tier, layouts, scratch, name, leaves=leaves),
    )
    blocks = compiled_blocks(config, plan, model, run_s=run_s, visits=visits)
    executor = StreamingExecutor(
        model,
        visits=visits,
        trained=trained,
        plan=plan,
        optimizer=optimizer,
        inputs_file=scratch / INPUTS,
        max_grad_norm=config.schedule.max_grad_norm,
        loss=config.loss,
    )
    executor.check()
    executor.compiled = blocks
    return executor


def _check(config: RunConfig, plan: Plan) -> None:
    """Raise ConfigError for what cannot be had while the base's blocks are only visitors."""
    if config.adapter.start in _CHANGES_BASE:
        raise _refused(
            "adapter.start",
            f"{config.adapter.start} changes the base's weights, which are only read while blocks stream",
            "Choose another start of the adapters, or more memory for the run.",
        )
    if plan.records_graphs:
        raise _refused(
            "memory.compile",
            "A recorded graph needs weights that stay in place, and in this run blocks visit the device one by one",
            "Set compile to default or auto, or give the run more memory.",
        )


def _refused(field: str, what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=field, what=what, remedy=remedy)])
