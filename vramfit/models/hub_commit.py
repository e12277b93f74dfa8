"""Which commit of a hub's model lies in this machine's cache: a branch such as main moves on, a commit does not.

Read from the cache's own files, as `huggingface_hub` writes them: no network, no torch.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from vramfit.config import STARTER_MODEL, ModelChoice
from vramfit.models.tokenizer import local_folder

MAIN: Final = "main"
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")


def hub_commit(model: ModelChoice) -> str:
    """The commit (40 hexadecimal digits) that `model.revision` names here; a revision that is one names itself.

    "" where the cache has none yet, and of the starter and folders, which have no commits.
    """
    if model.source == STARTER_MODEL or local_folder(model) is not None:
        return ""
    revision = model.revision or MAIN
    if _COMMIT.fullmatch(revision):
        return revision
    from huggingface_hub import constants

    place = Path(constants.HF_HUB_CACHE) / f"models--{model.source.replace('/', '--')}" / "refs" / revision
    try:
        commit = place.read_text(encoding="ascii").strip()
    except (OSError, ValueError):
        return ""
    return commit if _COMMIT.fullmatch(commit) else ""
