"""Where the blocks of a streamed model live: tiers, made and filled from the model's files.

A mixture's block that is more than a slot holds is split: its experts lie in a tier of their own, in slices of whole
experts, and all else of it among the other blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from vramfit.engine.accelerators import backend_of
from vramfit.engine.blocks import Layout, Tier
from vramfit.engine.expert_slices import Slice
from vramfit.engine.grouped import has_known_layout, modules_of_experts, up_name
from vramfit.engine.tiers import DiskTier, FilesTier, FrozenBeforeTrained, RamTier
from vramfit.errors import ModelError
from vramfit.models.quantised import PACKED, quantise_into, tensors_of
from vramfit.models.weight_sources import Source, some_experts
from vramfit.planning.plan import Plan
from vramfit.planning.slots import experts_at_once
from vramfit.units import format_bytes

Tensors = Mapping[str, tuple[tuple[int, ...], torch.dtype]]


@dataclass(frozen=True, kw_only=True)
class Split:
    """A block whose experts come `at_once`: their `weights`, by name, and the `tensors` these are kept in."""

    experts: int
    at_once: int
    weights: tuple[str, ...]
    tensors: Tensors

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """(first, last, left out) of each slice."""
        return [(at, min(self.experts, at + self.at_once)) for at in range(0, self.experts, self.at_once)]


def split_blocks(plan: Plan, blocks: Sequence[nn.Module]) -> dict[int, Split]:
    """Those of more than the plan's slots hold that have experts. Raises ModelError where they cannot be split."""
    if not plan.slot_bytes:
        return {}
    return {
        at: _split_of(block, plan.slot_bytes)
        for at, block in enumerate(blocks)
        if Layout(tensors_of(block)).nbytes > plan.slot_bytes and next(modules_of_experts(block), None)
    }


def _split_of(block: nn.Module, slot_bytes: int) -> Split:
    found = list(modules_of_experts(block))
    path, experts = found[0]
    if len(found) > 1 or not has_known_layout(experts):
        raise ModelError(
            f"A block of {format_bytes(Layout(tensors_of(block)).nbytes)} is more than a place for blocks has here, "
            f"{format_bytes(slot_bytes)}, and VRAMFit cannot bring {path} ({type(experts).__name__}) in parts",
            "Give the run a larger budget of device memory, or choose another model.",
        )
    weights = tuple(f"{path}.{leaf}" for leaf in (up_name(experts), "down_proj"))
    packed = {f"{path}.packed.{leaf}." for leaf in (up_name(experts), "down_proj")}
    tensors = {
        name: place
        for name, place in tensors_of(block).items()
        if name in weights or any(name.startswith(each) for each in packed)
    }
    whole, count = Layout(tensors).nbytes, int(experts.num_experts)
    return Split(
        experts=count, at_once=experts_at_once(whole / count, count, slot_bytes), weights=weights, tensors=tensors
    )


def slices_of(split: Mapping[int, Split]) -> list[Slice]:
    return [Slice(block, *bounds) for block, each in sorted(split.items()) for bounds in each.bounds]


def experts_tier(
    plan: Plan,
    blocks: Sequence[nn.Module],
    own: Sequence[Mapping[str, Source]],
    split: Mapping[int, Split],
    scratch: Path,
) -> Tier:
    """The slices of all blocks that are split. Raises OutOfDisk."""
    layouts, sources = [], []
    for each in slices_of(split):
        of, count = split[each.block], each.last - each.first
        layouts.append(Layout({name: ((count, *shape[1:]), dtype) for name, (shape, dtype) in of.tensors.items()}))
        shapes = {name: tuple(_weight(blocks[each.block], name).shape) for name in of.weights}
        some = {name: some_experts(own[each.block][name], shapes[name], each.first, each.last) for name in of.weights}
        sources.append(some)
    if _stays_in_files(plan):
        return FilesTier(layouts, sources, layouts)
    tier = own_tier(plan, plan.weights_tier, layouts, scratch, "experts")
    flat = torch.empty(max(layout.nbytes for layout in layouts), dtype=torch.uint8)
    for at, each in enumerate(slices_of(split)):
        views = layouts[at].views(flat)
        for name, source in sources[at].items():
            if name in views:
                source.read_into(views[name])
            else:
                quantise_into(views, name, source, blocks[each.block], experts=each.last - each.first)
        tier.write(at, flat[: layouts[at].nbytes])
    return tier


def _weight(block: nn.Module, name: str) -> Tensor:
    module, _, leaf = name.rpartition(".")
    found: Tensor = getattr(block.get_submodule(module), leaf)
    return found


def _shared_tensors(block: nn.Module, split: Split | None) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: place for name, place in tensors_of(block).items() if split is None or name not in split.tensors}


def _shared_sources(sources: Mapping[str, Source], split: Split | None) -> dict[str, Source]:
    return {name: source for name, source in sources.items() if split is None or name not in split.weights}


def _stays_in_files(plan: Plan) -> bool:
    return plan.weight_format not in PACKED and plan.weights_tier == "disk"


def shared_tier(
    plan: Plan,
    blocks: Sequence[nn.Module],
    own: Sequence[Mapping[str, Source]],
    scratch: Path,
    *,
    trains: range,
    split: Mapping[int, Split],
    leaves: bool = False,
) -> Tier:
    """Blocks on disk stay in the model's own files as long as their numbers do not change; all others are copied. Of
    those in `split` all but the experts. `leaves` as in DiskTier."""
    layouts = [Layout(_shared_tensors(block, split.get(at))) for at, block in enumerate(blocks)]
    own = [_shared_sources(sources, split.get(at)) for at, sources in enumerate(own)]
    in_files = _stays_in_files(plan)
    if in_files and not trains:
        return _files_tier(layouts, own)
    turn = trains.start if in_files else 0
    copied = [Layout({})] * turn + layouts[turn:]
    tier = own_tier(plan, plan.weights_tier, copied, scratch, "blocks", leaves=leaves)
    _fill(blocks, copied, own, tier.write, since=turn)
    if not turn or not isinstance(tier, DiskTier):
        return tier
    return FrozenBeforeTrained(_files_tier(layouts, own), tier, turn=turn)


def _files_tier(layouts: Sequence[Layout], own: Sequence[Mapping[str, Source]]) -> FilesTier:
    stored = [_as_stored(layout, sources) for layout, sources in zip(layouts, own, strict=True)]
    return FilesTier(layouts, own, stored)


def own_tier(
    plan: Plan, where: str, layouts: Sequence[Layout], scratch: Path, name: str, *, leaves: bool = False
) -> RamTier | DiskTier:
    """A tier of the run's own, in RAM or in a file of that name; `leaves` as in DiskTier. Raises OutOfDisk."""
    if where == "disk":
        return DiskTier(layouts, scratch / f"{name}.bin", leaves=leaves)
    return RamTier(layouts, pinned=backend_of(plan.device).pinned)


def _as_stored(layout: Layout, sources: Mapping[str, Source]) -> Layout:
    """The layout of a block in the formats of its files; what is put together on the way is as it is computed with."""
    formats = {name: getattr(sources[name], "dtype", place.dtype) for name, place in layout.places.items()}
    return Layout({name: (place.shape, formats[name]) for name, place in layout.places.items()})


def _fill(
    blocks: Sequence[nn.Module],
    layouts: Sequence[Layout],
    own: Sequence[Mapping[str, Source]],
    write: Callable[[int, Tensor], None],
    *,
    since: int,
) -> None:
    """The numbers of every block from `since` on to the tier, one after another through one buffer."""
    flat = torch.empty(max(layout.nbytes for layout in layouts), dtype=torch.uint8)
    for index, (block, layout, sources) in list(enumerate(zip(blocks, layouts, own, strict=True)))[since:]:
        views = layout.views(flat)
        for name, source in sources.items():
            if name in views:
                source.read_into(views[name])
            else:
                quantise_into(views, name, source, block)
        write(index, flat[: layout.nbytes])
