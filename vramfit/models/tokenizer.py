"""Where a choice of model is, and its tokenizer. Nothing here needs torch: the data's own process loads none."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

from vramfit.config import STARTER_MODEL, ModelChoice
from vramfit.errors import ModelError
from vramfit.models.catalogue import may_be_hub_id
from vramfit.models.files import read_config
from vramfit.places import is_file, is_folder, typed_path

_FILES: Final = "tokenizer.json and tokenizer_config.json"


def load_tokenizer(model: ModelChoice, cache: Path) -> Any:
    """The tokenizer of `model`; the starter's is made in `cache` at first use. Raises ModelError."""
    if model.source == STARTER_MODEL:
        from transformers import PreTrainedTokenizerFast

        from vramfit.starter.tokenizer import tokenizer_folder

        return PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(cache))
    from transformers import AutoTokenizer

    folder = local_folder(model)
    if folder is not None:
        read_config(folder)  # says more clearly than the tokenizer what is wrong with a folder
    try:
        return AutoTokenizer.from_pretrained(folder or model.source, **load_options(model, folder))
    except Exception as error:
        raise cannot_load(model, folder, error, part=f"tokenizer ({_FILES})") from error


def local_folder(model: ModelChoice) -> Path | None:
    """The folder a choice of model means; None when it must be a hub id."""
    path = typed_path(model.source)
    if is_folder(path) or is_file(path) or not may_be_hub_id(model.source):
        return path.absolute()
    return None


def load_options(model: ModelChoice, folder: Path | None) -> dict[str, Any]:
    """How `transformers` is to load: from a folder without the network, never a model's own code."""
    if folder is not None:
        return {"local_files_only": True, "trust_remote_code": False}
    return {"revision": model.revision, "trust_remote_code": False}


_OUT_OF_MEMORY = ("out of memory", "allocate memory")


def cannot_load(model: ModelChoice, folder: Path | None, error: Exception, *, part: str) -> ModelError:
    """transformers raises everything from OSError to KeyError: keep its first line, say what to do."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    reason = f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
    if "ignore_mismatched_sizes" in str(error):  # its advice is for programmers; the log has the list above it
        reason = "the shapes of its tensors are not those that config.json describes"
    if isinstance(error, MemoryError) or any(words in str(error).lower() for words in _OUT_OF_MEMORY):
        return ModelError(
            f"Memory ran out while the {part} of {model.source} were loaded ({reason})",
            "End other programs that use it, choose qlora, or set a budget below what is free: the run then streams.",
        )
    if folder is None:
        return ModelError(
            f"The {part} of {model.source!r} cannot be fetched from the hub ({reason})",
            "Check the id, the network and whether the model needs an account; or give a folder on this machine.",
        )
    return ModelError(f"The {part} of {folder} cannot be loaded ({reason})", "Download the model again, completely.")
