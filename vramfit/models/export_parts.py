"""A model written part by part: what is read when it is asked for is in memory one part at a time.

The files have the names and the form that the checkpoint had which the model was loaded from, or else that its family
is published in: `transformers` knows how to turn one into the other.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from vramfit.engine.later import Later
from vramfit.models.stored import write_tensors

FILE_BYTES: Final = 4 * 2**30
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

Part = Mapping[str, Tensor | Later]
"""Tensors that are converted together, by the model's own names: those of a block, or what is not a block."""


def write_parts(model: Any, parts: Sequence[Part], folder: Path) -> None:
    """Weights and config of `model`, a `transformers` model, in Hugging Face format. Raises OSError."""
    files = _in_files([_as_published(model, part) for part in parts])
    if len(files) == 1:
        write_tensors(folder / WEIGHTS, files[0])
    else:
        where: dict[str, str] = {}
        for number, tensors in enumerate(files, start=1):
            name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
            write_tensors(folder / name, tensors)
            where |= dict.fromkeys(tensors, name)
        whole = sum(bytes_of(tensor) for tensors in files for tensor in tensors.values())
        index = {"metadata": {"total_size": whole}, "weight_map": where}
        (folder / INDEX).write_text(json.dumps(index, indent=1), encoding="utf-8")
    write_config(model, folder, formats={each.dtype for tensors in files for each in tensors.values()})


def write_config(model: Any, folder: Path, *, formats: set[torch.dtype]) -> None:
    """config.json without a word of how the weights were held while they were trained, and generation's settings."""
    shape = type(model.config).from_dict(model.config.to_dict())
    if hasattr(shape, "quantization_config"):
        del shape.quantization_config
    shape.architectures = [type(model).__name__]
    shape.dtype = max((each for each in formats if each.is_floating_point), key=lambda each: each.itemsize)
    shape.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.save_pretrained(folder)


def bytes_of(tensor: Tensor | Later) -> int:
    return math.prod(tensor.shape) * tensor.dtype.itemsize


def _as_published(model: Any, part: Part) -> dict[str, Later]:
    """The part's tensors as they are written. What comes of the conversion is known from tensors without numbers."""
    from transformers.core_model_loading import revert_weight_conversion

    hollow = {name: torch.empty(each.shape, dtype=each.dtype, device="meta") for name, each in part.items()}
    turned: Callable[[dict[str, Tensor]], dict[str, Tensor]] = lambda state: revert_weight_conversion(model, state)  # noqa: E731
    made = _Made(part, turned)
    return {
        name: Later(
            shape=tuple(each.shape),
            dtype=each.dtype,
            read=lambda name=name: made.take(name),  # type: ignore[misc]
        )
        for name, each in turned(hollow).items()
    }


class _Made:
    """A part that is read and converted when its first tensor is asked for, and let go of tensor by tensor."""

    def __init__(self, part: Part, turned: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
        self._part, self._turned = part, turned
        self._there: dict[str, Tensor] = {}

    def take(self, name: str) -> Tensor:
        if name not in self._there:
            read = {key: each.read() if isinstance(each, Later) else each for key, each in self._part.items()}
            self._there = self._turned({key: each.detach().cpu() for key, each in read.items()})
        return self._there.pop(name)


def _in_files(parts: Sequence[dict[str, Later]]) -> list[dict[str, Later]]:
    """Parts together in files, each as large as FILE_BYTES at most unless a single part is larger."""
    files: list[dict[str, Later]] = []
    size = 0
    for part in parts:
        own = sum(map(bytes_of, part.values()))
        if not files or size + own > FILE_BYTES:
            files.append({})
            size = 0
        files[-1] |= part
        size += own
    return files
