"""Known decoders and their shapes (`catalogue.json` beside this file), and which architecture a choice of model means.

Pure look-ups and one small file: no network, no torch.
"""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

from vramfit.config import STARTER_MODEL, ModelChoice
from vramfit.errors import ModelError
from vramfit.json_text import JsonProblem, load_json
from vramfit.models.architecture import Architecture, Experts, LatentAttention, from_config, is_described
from vramfit.models.counted import counted_architecture
from vramfit.places import is_file, is_folder, typed_path

_FILE = Path(__file__).with_name("catalogue.json")
_NAME = r"[A-Za-z0-9_](?:[\w.-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"(?:{_NAME}/)?{_NAME}", re.ASCII)


def known() -> list[str]:
    """Names of all models of the catalogue, in its order (families together)."""
    return [architecture.name for architecture in _entries()]


def find(name: str) -> Architecture | None:
    """The model called `name`: its id, an alias, or the part after the slash; upper and lower case are the same."""
    index = _index()
    wanted = name.strip().lower()
    return index.get(wanted) or index.get(wanted.replace("_", "-"))


def architecture_of(model: ModelChoice) -> Architecture:
    """What `model` is: the starter, a local folder's config.json, or a name of the catalogue.

    Raises ModelError: the folder has no readable config.json, the family is unknown, or the name is.
    """
    if model.source == STARTER_MODEL:
        from vramfit.starter import shape

        return shape.architecture()
    folder = typed_path(model.source)
    if is_folder(folder):
        return _of_folder(folder)
    found = find(model.source)
    if found is not None:
        return found
    if is_file(folder):
        raise ModelError(f"{folder} is a file", "Give the folder that holds config.json and the .safetensors files.")
    shown = model.source if len(model.source) <= 200 else f"{model.source[:200]}..."
    raise ModelError(
        f"There is no folder {shown!r}, and the catalogue of {len(_entries())} models does not have it",
        f"Download the model and give its folder.{_nearest(model.source)}",
    )


def may_be_hub_id(source: str) -> bool:
    """`name` or `owner/name`, as the hub allows them: up to 96 letters, digits, and `-`, `_`, `.` within."""
    well_formed = _HUB_ID.fullmatch(source) is not None and not source.endswith(".git")
    return well_formed and len(source) <= 96 and "--" not in source and ".." not in source


def _of_folder(folder: Path) -> Architecture:
    path = folder / "config.json"
    try:
        if path.exists() and not is_file(path):  # reading a pipe would wait for ever
            raise ModelError(f"{path} is not a file", "Give a model's folder in Hugging Face format.")
        values = load_json(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        if (folder / "adapter_config.json").is_file():
            raise ModelError(
                f"{folder} holds an adapter (adapter_config.json), not a whole model",
                "Give the folder of its base model, or export that run again as merged.",
            ) from None
        raise ModelError(
            f"The folder {folder} has no config.json", "Give a model's folder in Hugging Face format."
        ) from None
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror}", "Check the folder's permissions.") from None
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not UTF-8 text", "Download the model's folder again.") from None
    except JsonProblem as error:
        raise ModelError(f"{path} {error}", "Download the model's folder again.") from None
    name = folder.name or str(folder)
    return architecture_in(values, name)


def architecture_in(values: Any, name: str) -> Architecture:
    """The architecture of what a config.json holds, counted where it is not described. Raises ModelError."""
    return from_config(values, name) if is_described(values) else counted_architecture(values, name)


def _nearest(name: str) -> str:
    import difflib

    tails = {key: value.name for key, value in _index().items()}
    close = difflib.get_close_matches(name.strip().lower(), tails, n=3, cutoff=0.6)
    names = dict.fromkeys(tails[key] for key in close)
    return f" Or did you mean {' or '.join(names)}?" if names else ""


@cache
def _entries() -> tuple[Architecture, ...]:
    return tuple(_architecture(row) for row in json.loads(_FILE.read_text(encoding="utf-8")))


def _architecture(row: dict[str, Any]) -> Architecture:
    values = {key: value for key, value in row.items() if key not in ("aliases", "count_verified")}
    if "experts" in values:
        values["experts"] = Experts(**values["experts"])
    if "latent" in values:
        values["latent"] = LatentAttention(**values["latent"])
    return Architecture(**values)


@cache
def _index() -> dict[str, Architecture]:
    """Lower-case names to models. Full ids win over aliases, aliases over the part after the slash."""
    rows = json.loads(_FILE.read_text(encoding="utf-8"))
    ids: dict[str, Architecture] = {}
    aliases: dict[str, Architecture] = {}
    tails: dict[str, Architecture] = {}
    for row, architecture in zip(rows, _entries(), strict=True):
        ids[architecture.name.lower()] = architecture
        for alias in (name.lower() for name in row.get("aliases", ())):
            aliases.setdefault(alias, architecture)
            tails.setdefault(alias.rpartition("/")[2], architecture)
        tails.setdefault(architecture.name.lower().rpartition("/")[2], architecture)
    return {**tails, **aliases, **ids}
