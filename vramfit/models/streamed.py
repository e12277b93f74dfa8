"""A model opened for streaming: hollow blocks, their weights on a tier, everything else on the device.

At no moment is more than one block in memory beside what the tier itself takes.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.config import STARTER_MODEL, RunConfig
from vramfit.engine.activations import find_blocks
from vramfit.engine.blocks import BlockStream, WideningStream
from vramfit.engine.expert_slices import SliceStream
from vramfit.engine.last_blocks import train_last_blocks
from vramfit.engine.later import Later
from vramfit.engine.precision import DTYPES
from vramfit.engine.tiers import FilesTier
from vramfit.engine.visiting import VisitedBlocks, VisitingTable
from vramfit.errors import ModelError
from vramfit.models.attention import implementation
from vramfit.models.block_tiers import experts_tier, shared_tier, slices_of, split_blocks
from vramfit.models.hollow import hollow, hollow_model, is_hollow
from vramfit.models.load import starter_shape, starter_sources, untrained_shape
from vramfit.models.quantised import (
    PACKED,
    folder_of,
    load_buffers,
    make_quantised,
    read,
    shape_of,
)
from vramfit.models.random_start import random_sources
from vramfit.models.stored import StoredTensor
from vramfit.models.weight_sources import Source, weight_sources
from vramfit.planning.plan import Plan
from vramfit.planning.slots import together
from vramfit.planning.standing import head_visits
from vramfit.planning.stored import QUANTISED

_FORMATS: Final = ("fp32", "bf16", "fp16", *PACKED)

Attach = Callable[[nn.Module], nn.Module]


def open_streamed(
    config: RunConfig, plan: Plan, *, scratch: Path, attach: Attach | None = None, leaves: bool = False
) -> tuple[nn.Module, VisitedBlocks]:
    """(the model of `config`, its visiting blocks), with `attach` having put adapters beside it. Without, the model's
    own weights train, all or those of the plan's last blocks.

    `scratch` is where a disk tier that is not the model's own files is made; `leaves` as in DiskTier. Raises
    ModelError, OutOfDisk.
    """
    if plan.weight_format not in _FORMATS:
        raise ModelError(
            f"Weights in {plan.weight_format} cannot be streamed", f"Choose one of: {', '.join(_FORMATS)}."
        )
    shape, sources_for = _chosen(config)
    dtype = DTYPES[plan.compute if plan.weight_format in QUANTISED else plan.weight_format]
    model = hollow_model(shape, dtype=dtype, attention=implementation(plan))
    if attach is None:
        train_last_blocks(model, plan.last_blocks)
    else:
        model.requires_grad_(False)
    sources = sources_for(model)
    blocks, prefix = _blocks_of(model)
    own = [_sources_of(block, f"{prefix}.{index}", sources) for index, block in enumerate(blocks)]
    if plan.weight_format in PACKED:
        for block in blocks:
            make_quantised(block, PACKED[plan.weight_format])
    turn = plan.first_trained(len(blocks))
    trains = range(turn, len(blocks)) if attach is None else range(0)
    split = {} if attach is None else split_blocks(plan, blocks)
    tier = shared_tier(plan, blocks, own, scratch, trains=trains, split=split, leaves=leaves)
    experts = experts_tier(plan, blocks, own, split, scratch) if split else None
    device = torch.device(plan.device)
    looked_up = _load_outside(model, prefix, sources, device, plan)
    head = _visiting_head(model, sources) if head_visits(plan) else None
    table: nn.Parameter = model.get_input_embeddings().weight  # type: ignore[operator]
    whole = attach(model) if attach is not None else model
    for parameter in whole.parameters():
        if attach is not None and parameter.requires_grad:  # put beside weights that are nowhere yet
            parameter.data = parameter.data.to(device)
    _stand_on(device, whole, table)
    stay = plan.staying(len(blocks))
    stored = sum(layout.nbytes for layout in tier.stored) if isinstance(tier, FilesTier) else math.inf
    stream: BlockStream
    if isinstance(tier, FilesTier) and device.type == "cpu" and stored < sum(layout.nbytes for layout in tier.layouts):
        stream = WideningStream(tier, device, resident=stay)
    else:
        room = together([layout.nbytes for layout in tier.layouts], plan.slot_bytes, splits=bool(split))
        stream = BlockStream(tier, device, resident=stay, turn=turn, together=room)
    slices = None
    if experts is not None:
        slices = SliceStream(experts, device, slices_of(split), stay=stay, traffic=stream.traffic)
    visits = VisitedBlocks(whole, stream, trains=trains, experts=slices)
    visits.looked_up, visits.head = looked_up, head
    return whole, visits


def _chosen(config: RunConfig) -> tuple[Any, Callable[[nn.Module], Mapping[str, Source]]]:
    """(the shape of `config`'s model, where each parameter of such a hollow model comes from)."""
    if config.model.source == STARTER_MODEL:
        return starter_shape(), lambda _: starter_sources(config.seed)
    if config.method == "pretrain":
        return untrained_shape(config.model), lambda model: random_sources(model, config.seed)
    folder = folder_of(config.model)
    return shape_of(config.model, folder), lambda model: weight_sources(model, folder)


def _blocks_of(model: nn.Module) -> tuple[list[nn.Module], str]:
    """(the blocks, what their list is called)."""
    found = find_blocks(model)
    return list(found), next(name for name, module in model.named_modules() if module is found)


def _sources_of(block: nn.Module, prefix: str, sources: Mapping[str, Source]) -> dict[str, Source]:
    return {name: sources[f"{prefix}.{name}"] for name, _ in block.named_parameters()}


# --- what is not a block ---------------------------------------------------------------------------------------------


def _load_outside(
    model: Any, prefix: str, sources: Mapping[str, Source], device: torch.device, plan: Plan
) -> dict[str, Later]:
    """Embedding, final norm, head and the rest: to the device. A frozen table of tokens stays where it is, in its file
    or in RAM, and is looked up there, unless it is the head too and that stays on the device; a head that visits is
    left out as well. Those are returned, by their names."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    frozen, visits = not embedding.weight.requires_grad, head_visits(plan)
    looks_up = frozen and (visits or head is None or head.weight is not embedding.weight)
    left_out = [embedding.weight] * looks_up + [head.weight] * visits
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        if path.startswith(f"{prefix}."):
            continue
        for name, parameter in module._parameters.items():
            if parameter is None or any(parameter is each for each in left_out):
                continue
            if id(parameter) not in made:
                made[id(parameter)] = _loaded(sources[_name_of(model, parameter)], parameter, device)
            module._parameters[name] = made[id(parameter)]
    load_buffers(model, sources, device)
    if looks_up:
        source = sources[_name_of(model, embedding.weight)]
        in_file = plan.weights_tier == "disk" and isinstance(source, StoredTensor)
        rows = source.rows if in_file and isinstance(source, StoredTensor) else _rows_in_ram(source, embedding.weight)
        embedding.forward = functools.partial(_look_up, embedding, embedding.forward, rows)
    return {name: _later(sources[name], each) for each in left_out for name in (_name_of(model, each),)}


def _stand_on(device: torch.device, model: nn.Module, table: nn.Parameter) -> None:
    """A table that is looked up elsewhere is hollow on the device: libraries take where a model's first parameter is
    for where the model is, and put there what they generate from. After adapters, whose random numbers are a CPU's."""
    if table.device == device or not is_hollow(table):
        return
    there = nn.Parameter(hollow(table, device), requires_grad=False)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is table:
                module._parameters[name] = there


def _visiting_head(model: Any, sources: Mapping[str, Source]) -> VisitingTable:
    """The head's weight as a table that comes when logits are made, and goes."""
    head = model.get_output_embeddings()
    table = VisitingTable(head.weight, _later(sources[_name_of(model, head.weight)], head.weight).read)
    head.forward = table.around(head.forward)
    return table


def _later(source: Source, like: Tensor) -> Later:
    empty = like.detach()  # hollow
    return Later(shape=tuple(like.shape), dtype=like.dtype, read=functools.partial(read, source, empty))


def _name_of(model: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, each in model.named_parameters() if each is parameter)


def _loaded(source: Source, like: nn.Parameter, device: torch.device) -> nn.Parameter:
    return nn.Parameter(read(source, like).to(device), requires_grad=like.requires_grad)


def _rows_in_ram(source: Source, like: nn.Parameter) -> Callable[[Tensor], Tensor]:
    whole = read(source, like)
    return lambda indices: whole[indices]


def _look_up(
    embedding: Any, forward: Callable[[Tensor], Tensor], rows: Callable[[Tensor], Tensor], tokens: Tensor
) -> Tensor:
    """The embedding's own forward, over the rows that `tokens` need instead of the whole table."""
    needed, places = torch.unique(tokens.cpu(), return_inverse=True)
    table, padding = embedding._parameters["weight"], embedding.padding_idx
    few = rows(needed).to(dtype=table.dtype, device=tokens.device)
    embedding._parameters["weight"], embedding.padding_idx = nn.Parameter(few, requires_grad=False), None
    try:
        return forward(places.to(tokens.device))
    finally:
        embedding._parameters["weight"], embedding.padding_idx = table, padding
