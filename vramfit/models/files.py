"""A model's folder, looked at before anything is loaded: what is wrong with it, by file name, in one sentence.

Hugging Face format: config.json, and the weights in model.safetensors or in the shards that
model.safetensors.index.json names.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from vramfit.errors import ModelError
from vramfit.json_text import load_json
from vramfit.units import format_bytes

CONFIG, ADAPTER_CONFIG = "config.json", "adapter_config.json"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_LFS_POINTER = b"version https://git-lfs"
_TOKEN_TABLES = ("embed_tokens.weight", "wte.weight", "embed_in.weight", "word_embeddings.weight")
_DOWNLOAD_AGAIN = "Download it again, completely."
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "I8", "U8", "BOOL"), 8),
}
"""Of one number, by the format's name in a file; other formats are not checked against their bytes."""


def check_folder(folder: Path, *, weights: bool = True) -> dict[str, Any]:
    """Check that `folder` can be loaded and return its config.json. Raises ModelError naming the file at fault."""
    config = read_config(folder)
    if weights:
        for path in weight_files(folder):
            _check_vocabulary(path, check_safetensors(path), config.get("vocab_size"))
    return config


def read_config(folder: Path) -> dict[str, Any]:
    """The values of `folder`/config.json. Raises ModelError: there is none, it is damaged, it wants custom code."""
    if folder.is_file():
        raise ModelError(f"{folder} is a file", "Give the folder that holds config.json and the .safetensors files.")
    if not folder.is_dir():
        raise ModelError(f"There is no folder {folder}", "Check the path.")
    path = folder / CONFIG
    if not path.is_file():
        raise _no_config(folder)
    try:
        values = load_json(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError):
        raise ModelError(f"{path} cannot be read as JSON", _DOWNLOAD_AGAIN) from None
    if not isinstance(values, dict) or not isinstance(values.get("model_type"), str):
        raise ModelError(f"{path} does not say which model_type it is of", _DOWNLOAD_AGAIN)
    _check_known(path, values)
    return values


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of `folder`. Raises ModelError when there are none, or one of the index is missing."""
    index = folder / INDEX
    if index.is_file():
        try:
            names = sorted(set(load_json(index.read_text(encoding="utf-8"))["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise ModelError(f"{index} cannot be read as an index of weights", _DOWNLOAD_AGAIN) from None
        missing = [name for name in names if not (folder / name).is_file()]
        if missing:
            raise ModelError(
                f"{len(missing)} of {len(names)} weight files are missing from {folder}, the first is {missing[0]}",
                _DOWNLOAD_AGAIN,
            )
        return [folder / name for name in names]
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    raise _no_weights(folder)


def _check_vocabulary(path: Path, shapes: dict[str, list[int]], vocab_size: object) -> None:
    """Raises ModelError when the table of tokens has other rows than config.json counts."""
    for name, shape in shapes.items():
        if name.endswith(_TOKEN_TABLES) and isinstance(vocab_size, int) and shape[:1] not in ([], [vocab_size]):
            raise ModelError(
                f"{path} holds {shape[0]:,} rows of {name}, and config.json says vocab_size {vocab_size:,}",
                "Use a config.json and weights that belong together.",
            )


def check_safetensors(path: Path) -> dict[str, list[int]]:
    """Check a safetensors file by its header and its length, without reading the weights, and return the shape of
    every tensor. Raises ModelError.

    The format: 8 bytes with the header's length, the header as JSON with every tensor's offsets, then the tensors.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(64)
        if start.startswith(_LFS_POINTER):
            raise ModelError(
                f"{path} is a Git LFS pointer of {size} bytes, not the weights", "Run `git lfs pull` in that folder."
            )
        if size < 8:
            raise ModelError(f"{path} is not a safetensors file: it has {size} bytes", _DOWNLOAD_AGAIN)
        length = int.from_bytes(start[:8], "little")
        if length > min(size - 8, 100_000_000):
            raise ModelError(
                f"{path} is cut off or not a safetensors file: its header should have {length:,} bytes, "
                f"the file has {size:,}",
                _DOWNLOAD_AGAIN,
            )
        file.seek(8)
        try:
            header = load_json(file.read(length))
            header.pop("__metadata__", None)
            spans = {name: _span(entry["data_offsets"]) for name, entry in header.items()}
            shapes = {name: [int(size) for size in entry["shape"]] for name, entry in header.items()}
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError):  # the last: of infinity
            raise ModelError(f"{path} is not a safetensors file: its header is damaged", _DOWNLOAD_AGAIN) from None
    wanted = 8 + length + max((end for _, end in spans.values()), default=0)
    if size != wanted:
        raise ModelError(
            f"{path} is cut off: it has {format_bytes(size)} ({size:,} bytes) of {wanted:,} bytes", _DOWNLOAD_AGAIN
        )
    for name, (start_at, end_at) in spans.items():
        bits = _BITS.get(str(header[name].get("dtype")))
        if min(shapes[name], default=0) < 0 or (bits and math.prod(shapes[name]) * bits != (end_at - start_at) * 8):
            raise ModelError(
                f"{path} is damaged: its header says that {name} has the shape {shapes[name]} and "
                f"{end_at - start_at:,} bytes",
                _DOWNLOAD_AGAIN,
            )
    return shapes


def _span(offsets: Any) -> tuple[int, int]:
    """Where a tensor begins and ends, counted from the end of the header. Raises ValueError for what cannot be."""
    start, end = offsets
    if not (type(start) is int and type(end) is int and 0 <= start <= end < 2**63):
        raise ValueError(offsets)
    return start, end


def _no_config(folder: Path) -> ModelError:
    if (folder / ADAPTER_CONFIG).is_file():
        return ModelError(
            f"{folder} holds an adapter ({ADAPTER_CONFIG}), not a whole model",
            "Give the folder of its base model, or export that run again as merged.",
        )
    gguf = sorted(folder.glob("*.gguf"))
    if gguf:
        return ModelError(
            f"{folder} has no {CONFIG}, only {gguf[0].name}", "Training needs the model in Hugging Face format."
        )
    return ModelError(f"The folder {folder} has no {CONFIG}", "Give a model's folder in Hugging Face format.")


def _no_weights(folder: Path) -> ModelError:
    pickled = sorted([*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")])
    if pickled:
        return ModelError(
            f"{folder} has its weights only as {pickled[0].name}, a format that can run code when it is opened",
            "Use a copy of the model with .safetensors files.",
        )
    return ModelError(f"{folder} has no {WEIGHTS} and no {INDEX}", _DOWNLOAD_AGAIN)


def _check_known(path: Path, values: dict[str, Any]) -> None:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    kind = values["model_type"]
    if kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        return
    if values.get("auto_map"):
        raise ModelError(
            f"{path} wants to run code that comes with the model (auto_map, model_type {kind!r})",
            "VRAMFit never runs a model's own code: choose a model that transformers knows itself.",
        )
    raise ModelError(
        f"{path} has model_type {kind!r}, which is no language model that transformers knows",
        "Choose a causal language model such as llama, qwen2 or mistral.",
    )
