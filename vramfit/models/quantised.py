"""A frozen base whose blocks' matrices are in few bits, experts' too: packed on the way in, one matrix at a time.

Embedding, norms, routers and head stay in the format that is computed in. What is stored in few bits already is
`transformers`' to load (`models.load`).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor, nn

from vramfit.config import ModelChoice, RunConfig
from vramfit.engine.activations import find_blocks
from vramfit.engine.grouped import modules_of_experts, pack_experts
from vramfit.engine.packed import PackedFormat, PackedLinear, packed_weights
from vramfit.engine.precision import DTYPES
from vramfit.models.architecture import is_quantised
from vramfit.models.attention import implementation
from vramfit.models.files import check_folder, read_config
from vramfit.models.hollow import hollow, hollow_model
from vramfit.models.tokenizer import cannot_load, load_options, local_folder
from vramfit.models.weight_sources import Source, weight_sources
from vramfit.planning.plan import Plan

PACKED: Final[Mapping[str, PackedFormat]] = {"nf4": "nf4", "int8": "int8"}
"""The formats of a plan's base that are packed here."""


def make_quantised(block: nn.Module, kind: PackedFormat) -> None:
    """Its linears and experts become ones whose weights come in few bits. Raises ModelError for experts of a layout
    that is not known."""
    for name, experts in list(modules_of_experts(block)):
        pack_experts(name, experts, kind)
    for name, module in list(block.named_modules()):
        if type(module) is nn.Linear or type(module).__name__ == "Conv1D":
            parent, _, leaf = name.rpartition(".")
            setattr(block.get_submodule(parent) if parent else block, leaf, PackedLinear.of(module, kind))


def tensors_of(block: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and format of all that a block needs; a weight in few bits needs its parts instead."""
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for path, module in block.named_modules():
        packed = packed_weights(module)
        for leaf, parameter in module.named_parameters(recurse=False):
            name = f"{path}.{leaf}".removeprefix(".")
            if leaf in packed:
                found |= {part_name(name, part): place for part, place in packed[leaf].places.items()}
            else:
                found[name] = (tuple(parameter.shape), parameter.dtype)
    return found


def part_name(weight: str, part: str) -> str:
    """What a part of the weight of that name is called: "mlp.up_proj.weight" -> "mlp.up_proj.packed.weight.codes"."""
    module, _, leaf = weight.rpartition(".")
    return f"{module}.packed.{leaf}.{part}".removeprefix(".")


def quantise_into(
    views: Mapping[str, Tensor], name: str, source: Source, block: nn.Module, *, experts: int | None = None
) -> None:
    """The weight `name` of a block, from its file to the parts among `views`; of so many `experts` alone."""
    module, _, leaf = name.rpartition(".")
    parts = _parts_of(block.get_submodule(module), leaf, source, torch.device("cpu"), experts=experts)
    for part, tensor in parts.items():
        views[part_name(name, part)].copy_(tensor)


def _parts_of(
    module: Any, leaf: str, source: Source, device: torch.device, *, experts: int | None = None
) -> dict[str, Tensor]:
    """The weight `leaf` of `module`, from its file, packed on `device`."""
    like, turned = getattr(module, leaf)[:experts], getattr(module, "transposed", False)
    numbers = torch.empty(like.t().shape if turned else like.shape, dtype=like.dtype)
    source.read_into(numbers)
    return packed_weights(module)[leaf].quantised(numbers.t().contiguous() if turned else numbers, device)


def load_quantised(config: RunConfig, plan: Plan) -> nn.Module:
    """The base of `config` on `plan.device`, whole, its blocks' matrices in `plan.weight_format`; nothing trains.

    Never more than one matrix in memory beside what is loaded. Raises ModelError.
    """
    folder = folder_of(config.model)
    model = hollow_model(
        shape_of(config.model, folder), dtype=DTYPES[plan.compute], attention=implementation(plan)
    ).requires_grad_(False)
    sources = weight_sources(model, folder)
    for block in find_blocks(model):
        make_quantised(block, PACKED[plan.weight_format])
    device = torch.device(plan.device)
    made: dict[int, nn.Parameter] = {}
    for path, module in model.named_modules():
        packed = packed_weights(module)
        for leaf, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            if id(parameter) not in made:  # tied ones have one name among the sources
                source = sources.get(f"{path}.{leaf}".removeprefix(".")) or sources[_name_of(model, parameter)]
                if leaf in packed:
                    packed[leaf].take(_parts_of(module, leaf, source, device))
                numbers = hollow(parameter, device) if leaf in packed else read(source, parameter).to(device)
                made[id(parameter)] = nn.Parameter(numbers, requires_grad=False)
            module._parameters[leaf] = made[id(parameter)]
    load_buffers(model, sources, device)
    return model


def load_buffers(model: nn.Module, sources: Mapping[str, Source], device: torch.device) -> None:
    """All of the model's buffers, which are small, to the device: from its files where they have them."""
    for path, module in model.named_modules():
        for name, buffer in module._buffers.items():
            source = sources.get(f"{path}.{name}".removeprefix("."))
            if buffer is not None:
                module._buffers[name] = (buffer if source is None else read(source, buffer)).to(device)


def read(source: Source, like: Tensor) -> Tensor:
    """A tensor of the shape and format of `like`, in memory of its own."""
    whole = torch.empty(like.shape, dtype=like.dtype)
    source.read_into(whole)
    return whole


def _name_of(model: nn.Module, parameter: nn.Parameter) -> str:
    return next(name for name, each in model.named_parameters() if each is parameter)


# --- where it comes from ---------------------------------------------------------------------------------------------


def is_stored_quantised(model: ModelChoice) -> bool:
    """Whether the model's files have few bits already. Raises ModelError."""
    return is_quantised(read_config(folder_of(model)))


def folder_of(model: ModelChoice) -> Path:
    """The model's folder; one on the hub is fetched into the hub's own cache. Raises ModelError."""
    folder = local_folder(model)
    if folder is not None:
        check_folder(folder)
        return folder
    from huggingface_hub import snapshot_download

    try:
        found = snapshot_download(
            model.source, revision=model.revision, allow_patterns=["*.safetensors", "*.json", "*.jinja"]
        )
    except Exception as error:
        raise cannot_load(model, None, error, part="weights") from error
    check_folder(Path(found))
    return Path(found)


def shape_of(model: ModelChoice, folder: Path) -> Any:
    """The config.json of `folder` as `transformers` reads it. Raises ModelError."""
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, **load_options(model, folder))
    except Exception as error:
        raise cannot_load(model, folder, error, part="config.json") from error
