"""What A and B begin as, besides random A and zero B: PiSSA, OLoRA, EVA and orthogonal.

| start | A, B | the base |
|---|---|---|
| pissa (Meng et al. 2024) | the r largest singular vectors of W, each side with the root of its value | W - s B A |
| olora (Buyukakyuz 2024) | the first r columns of Q and rows of R, W = Q R | W - s B A |
| eva (Paischer et al. 2024) | A: the r main directions of what the layer is given by the data; B zero | as it is |
| orthogonal | random, B A is zero because their inner sides are orthogonal | as it is |

With the first two the model is the same at the start, up to the rounding of the base's format. What was taken from
the base is kept, in a file of the run, too: to make the same base again on resume whatever a later library's
decomposition would give, and to write an adapter for the base as it was.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from vramfit.errors import CheckpointError, ModelError
from vramfit.models.adapters import NAME, adapted_layers
from vramfit.models.dora import use_short_dora

Start = Literal["usual", "pissa", "eva", "olora", "orthogonal"]

CHANGES_BASE: Final = frozenset({"pissa", "olora"})
EXACT_UP_TO: Final = 1024
"""Sides of a matrix up to which PiSSA's singular vectors are computed in full; of larger ones, by random projection."""
ROWS_OF_A_BATCH: Final = 256
_PLACE: Final = "taken_from_base"
_ROUNDED: Final = "rounded_away"


@dataclass(frozen=True)
class Taken:
    """A [r, in] and B [out, r] of a layer as they began, fp32, on the CPU: the base has lost s B A."""

    a: Tensor
    b: Tensor


def start_adapters(model: nn.Module, start: Start, *, seed: int, file: Path | None = None, again: bool = False) -> None:
    """Give the adapters of `model` their start; eva is left for `start_from_inputs`, which needs data.

    Where that changes the base, what was taken is written to `file`, or read from it `again`: a run that is resumed.
    Raises ModelError when this base or rank cannot start so, CheckpointError when `file` is not of this model.
    """
    torch.manual_seed(seed)
    if start == "orthogonal":
        for _, layer in adapted_layers(model):
            _start_orthogonal(layer)
    if start not in CHANGES_BASE:
        return
    layers = dict(adapted_layers(model))
    _refuse_packed(layers, start)
    if file is not None and again:
        taken = _read(file, layers)
    else:
        find = _pissa if start == "pissa" else _olora
        taken = {name: find(layer) for name, layer in layers.items()}
        if file is not None:
            _write(file, taken)
    lost, whole = 0.0, 0.0
    for name, layer in layers.items():
        of_layer = _take(layer, taken[name])
        lost, whole = lost + of_layer[0], whole + of_layer[1]
    setattr(model, _PLACE, taken)
    setattr(model, _ROUNDED, math.sqrt(lost / whole) if whole else 0.0)
    use_short_dora(model)  # lengths of rows are of the new base


def taken_from_base(model: nn.Module) -> dict[str, Taken]:
    """What the base has lost, by the layer's name; {} where the base is as it was."""
    found: dict[str, Taken] = getattr(model, _PLACE, {})
    return found


def rounded_away(model: nn.Module) -> float:
    """The norm of what was lost when what is left of the base was rounded to its format, as a share of its weights'."""
    share: float = getattr(model, _ROUNDED, 0.0)
    return share


@torch.no_grad()
def start_from_inputs(model: nn.Module, forward: Callable[[], object]) -> None:
    """EVA: `forward` runs the model on some of its data, without padding; A becomes the main directions of what each
    layer was given, B stays zero. All layers keep their rank. Layers that see the same numbers share the work; a layer
    that sees fewer directions than its rank keeps random ones for the rest."""
    with _watched_inputs(model) as directions:
        forward()
    for name, layer in adapted_layers(model):
        found = directions.get(name)
        if found is not None:
            weight = layer.lora_A[NAME].weight
            weight[: len(found)] = found[: len(weight)].to(weight)


def _start_orthogonal(layer: Any) -> None:
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    rank = a.shape[0]
    if rank % 2:
        raise ModelError(
            f"The orthogonal start halves the rank, and {rank} is odd", f"Set the rank to {rank + 1} or {rank - 1}."
        )
    basis, _ = torch.linalg.qr(torch.randn(rank, rank))
    with torch.no_grad():
        a.copy_((torch.randn(a.shape[1], rank // 2) @ basis[0::2]).T / 10.0)
        b.copy_(torch.randn(b.shape[0], rank // 2) @ basis[1::2] / 10.0)


@torch.no_grad()
def _pissa(layer: Any) -> Taken:
    weight, scale = _weight(layer), layer.scaling[NAME]
    rank = layer.lora_A[NAME].weight.shape[0]
    if min(weight.shape) <= EXACT_UP_TO:
        left, values, right = torch.linalg.svd(weight, full_matrices=False)
    else:
        left, values, right = torch.svd_lowrank(weight, q=rank + 16, niter=8)
        right = right.T
    half = (values[:rank] / scale).sqrt()
    return _filled(layer, half[:, None] * right[:rank], left[:, :rank] * half)


@torch.no_grad()
def _olora(layer: Any) -> Taken:
    weight, rank = _weight(layer), layer.lora_A[NAME].weight.shape[0]
    # The first columns of Q are those of the first columns of W, and R is Q^T W.
    left, _ = torch.linalg.qr(weight[:, : min(rank, *weight.shape)])
    return _filled(layer, left.T @ weight, left)


def _filled(layer: Any, a: Tensor, b: Tensor) -> Taken:
    """Factors of the layer's rank: a matrix that is too small for it leaves pairs that begin as usual."""
    whole_a, whole_b = (getattr(layer, name)[NAME].weight.detach().clone() for name in ("lora_A", "lora_B"))
    whole_a[: len(a)], whole_b[:, : b.shape[1]] = a, b
    return Taken(whole_a.cpu(), whole_b.cpu())


@torch.no_grad()
def _take(layer: Any, taken: Taken) -> tuple[float, float]:
    """A and B begin as `taken`, and the base is what is left. Returns the squared norms of what rounding that lost, and
    of the weights as they were."""
    a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
    a.copy_(taken.a)
    b.copy_(taken.b)
    base = layer.get_base_layer().weight
    delta = layer.scaling[NAME] * b @ a
    whole = base.float()
    left = whole - (delta.T if layer.fan_in_fan_out else delta)
    base.copy_(left)
    return (left - base.float()).square().sum().item(), whole.square().sum().item()


def _weight(layer: Any) -> Tensor:
    """W [out, in] in fp32."""
    weight: Tensor = layer.get_base_layer().weight.detach().float()
    return weight.T if layer.fan_in_fan_out else weight


def _refuse_packed(layers: dict[str, Any], start: Start) -> None:
    packed = [name for name, layer in layers.items() if not layer.get_base_layer().weight.is_floating_point()]
    if packed:
        raise ModelError(
            f"The start {start} takes a part out of the base's weights, and {packed[0]} is quantised: what is left "
            "would be rounded anew, and the result fit no other copy of the base",
            "Choose the method lora, or the start eva, orthogonal or usual.",
        )


def _write(file: Path, taken: dict[str, Taken]) -> None:
    from safetensors.torch import save_file

    file.parent.mkdir(parents=True, exist_ok=True)
    partial = file.with_name(f"{file.name}.partial")
    save_file(
        {
            key: tensor.contiguous()
            for name, each in taken.items()
            for key, tensor in ((f"{name}.A", each.a), (f"{name}.B", each.b))
        },
        partial,
    )
    partial.replace(file)


def _read(file: Path, layers: dict[str, Any]) -> dict[str, Taken]:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read, and without it the base cannot be made as it was: {error}", "Start a new run."
        ) from error
    taken = {}
    for name, layer in layers.items():
        a, b = tensors.get(f"{name}.A"), tensors.get(f"{name}.B")
        shapes = layer.lora_A[NAME].weight.shape, layer.lora_B[NAME].weight.shape
        if a is None or b is None or (a.shape, b.shape) != shapes:
            raise CheckpointError(
                f"{file} is of another model or rank: {name} is missing or has another shape",
                "Restore the settings the run was started with, or start a new run.",
            )
        taken[name] = Taken(a, b)
    return taken


@contextlib.contextmanager
def _watched_inputs(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Main directions [<= r, in] of the inputs of each adapted layer, kept up to date while the model runs."""
    ranks = {name: layer.lora_A[NAME].weight.shape[0] for name, layer in adapted_layers(model)}
    sketches: dict[str, _Sketch] = {}
    leaders: dict[str, str] = {}
    last: dict[str, Any] = {"input": None, "leader": ""}

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            given = args[0]
            if last["input"] is not given:  # the first layer that is given these numbers works for the others
                last["input"], last["leader"] = given, name
                sketches.setdefault(name, _Sketch(ranks[name])).add(given)
            leaders[name] = last["leader"]

        return hook

    hooks = [layer.get_base_layer().register_forward_pre_hook(watch(name)) for name, layer in adapted_layers(model)]
    found: dict[str, Tensor] = {}
    try:
        yield found
    finally:
        for each in hooks:
            each.remove()
    found.update({name: sketches[leader].directions() for name, leader in leaders.items()})


class _Sketch:
    """The main directions of rows that come in pieces (incremental SVD, Ross et al. 2008): of what was seen, as many
    directions as can matter stay, each as long as its singular value."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._kept: Tensor | None = None

    def add(self, given: Tensor) -> None:
        """Rows [..., in]; of many, an even choice."""
        rows = given.detach().reshape(-1, given.shape[-1])
        step = math.ceil(len(rows) / ROWS_OF_A_BATCH)
        rows = rows[::step].float()
        if self._kept is not None:
            rows = torch.cat([self._kept, rows])
        _, values, right = torch.linalg.svd(rows, full_matrices=False)
        most = 2 * self._rank
        self._kept = values[:most, None] * right[:most]

    def directions(self) -> Tensor:
        """Unit rows, the main one first; those that were never seen are left out."""
        if self._kept is None:
            raise AssertionError("a sketch is made where something comes in")
        lengths = self._kept.norm(dim=1)
        seen = lengths > lengths[0] * 1e-6
        units: Tensor = self._kept[seen] / lengths[seen, None]
        return units[: self._rank]
