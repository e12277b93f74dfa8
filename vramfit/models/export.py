"""What a run leaves behind: an adapter, a merged model or a whole model, with its tokenizer, in Hugging Face format.

Plain peft and plain transformers load it; nothing of ours is needed.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from torch import nn

from vramfit.config import STARTER_MODEL, RunConfig
from vramfit.engine.head import base_model
from vramfit.errors import ModelError, OutOfDisk, Unwritable
from vramfit.faults import reach
from vramfit.models.export_parts import Part, bytes_of, write_parts
from vramfit.places import UNWRITABLE, cure_of
from vramfit.sentences import say
from vramfit.units import format_bytes

ExportKind = Literal["adapter", "merged", "model"]

_SPARE_BYTES = 64 * 2**20  # tokenizer, config, and room for the database and the log


def export_run(
    model: nn.Module,
    tokenizer: Any,
    config: RunConfig,
    folder: Path,
    *,
    parts: Callable[[], Sequence[Part]] | None = None,
) -> Path:
    """Write the result of a run to `folder` (replaced when it exists) and return it.

    "auto" is the adapter where there is one, else the whole model. `parts` gives the whole model, adapters merged into
    it, where that is not in memory. The files are written beside `folder` and moved in
    at the end, so that `folder` is complete or as it was. Raises OutOfDisk, ModelError.
    """
    from vramfit.models.load import quiet_transformers

    quiet_transformers()
    kind = export_kind(config)
    in_parts = parts() if parts is not None and kind != "adapter" else None
    if in_parts is None:
        needed = _bytes_needed(model, kind) + _SPARE_BYTES
    else:
        needed = sum(bytes_of(each) for part in in_parts for each in part.values()) + _SPARE_BYTES
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_room(folder.parent, needed)
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    writers: dict[ExportKind, Callable[[Any, RunConfig, Path], None]] = {
        "adapter": _write_adapter,
        "merged": _write_merged,
        "model": _write_model,
    }
    try:
        partial.mkdir()
        if in_parts is None:
            writers[kind](model, config, partial)
        else:
            write_parts(base_model(model), in_parts, partial)
        reach("export: weights written")
        tokenizer.save_pretrained(partial)
        reach("export: before the move")
        _move(partial, folder)
    except Exception as error:
        shutil.rmtree(partial, ignore_errors=True)
        if _is_disk_full(error):
            raise OutOfDisk(
                say("export.full", size=format_bytes(needed), folder=str(folder)), say("cure.room.run")
            ) from error
        cause = _forbidden(error)
        if cause is not None:
            raise Unwritable(
                say("export.refused", folder=str(folder), reason=str(cause.strerror)), cure_of(cause, resume=True)
            ) from error
        raise
    return folder


def export_kind(config: RunConfig) -> ExportKind:
    """What "auto" means: the adapter where there is one, else the whole model."""
    wish = config.output.export
    if wish == "auto":
        return "adapter" if config.trains_adapter else "model"
    return wish


def _write_adapter(model: Any, config: RunConfig, folder: Path) -> None:
    from vramfit.models.adapter_files import write_adapter

    write_adapter(model, folder, base=_base_name(config))


def _write_merged(model: Any, config: RunConfig, folder: Path) -> None:
    """Through an empty model of the same shape, so that the trained one stays as it is and no quantisation is saved."""
    if not hasattr(model, "get_base_model"):
        raise ModelError("This model has no adapter to merge", "Set the export to model.")
    import torch
    from transformers import AutoModelForCausalLM

    from vramfit.models.adapters import merged_state

    base = model.get_base_model()
    state = {name: tensor.cpu() for name, tensor in merged_state(model).items()}
    shape = type(base.config).from_dict(base.config.to_dict())
    if hasattr(shape, "quantization_config"):
        del shape.quantization_config
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(shape, trust_remote_code=False)
    shape.dtype = max(
        {tensor.dtype for tensor in state.values() if tensor.is_floating_point()}, key=lambda d: d.itemsize
    )
    if base.can_generate():
        empty.generation_config = base.generation_config
    empty.save_pretrained(folder, state_dict=state)


def _write_model(model: Any, config: RunConfig, folder: Path) -> None:
    model.save_pretrained(folder)


def _base_name(config: RunConfig) -> str:
    """What peft will load the base from: an absolute folder, or the hub id."""
    from vramfit.models.tokenizer import local_folder

    if config.model.source == STARTER_MODEL:
        raise ModelError("The starter has no folder an adapter could name", "Set the export to merged.")
    folder = local_folder(config.model)
    return str(folder) if folder is not None else config.model.source


def _bytes_needed(model: nn.Module, kind: ExportKind) -> int:
    """Bytes of the weight files, an upper bound for a merged 4-bit base."""
    if kind == "adapter":
        from vramfit.models.adapter_start import taken_from_base

        trained = sum(p.numel() * p.element_size() for p in model.parameters() if p.requires_grad)
        return 2 * trained if taken_from_base(model) else trained
    total = 0
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        total += state.shape.numel() * state.dtype.itemsize if state is not None else parameter.nbytes
    return total


def _check_room(parent: Path, needed: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise OutOfDisk(
            say("export.no_room", needed=format_bytes(needed), folder=str(parent), free=format_bytes(free)),
            say("cure.room.run"),
        )


def _move(partial: Path, folder: Path) -> None:
    """Put the finished folder in place. A folder cannot be renamed onto another, on no system."""
    old = folder.with_name(f"{folder.name}.old")
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _forbidden(error: Exception) -> OSError | None:
    """The system's error for a folder that takes no writes, where that is what is behind `error`."""
    for code in UNWRITABLE:  # of the error that safetensors wraps only the text is left
        if getattr(error, "errno", None) == code or f"(os error {code})" in str(error):
            return OSError(code, os.strerror(code))
    return None


def _is_disk_full(error: Exception) -> bool:
    # safetensors wraps the system's error in one of its own and keeps only the text.
    return getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error) or "os error 28" in str(error)
