"""Models of families that have no row in `families.py`: counted by a process of its own instead of by arithmetic.

Its parameters are then exact, and what its blocks keep and need is taken for that of a Llama of the same widths.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, Final

from vramfit.errors import ModelError
from vramfit.models.architecture import Architecture, from_config
from vramfit.models.config_keys import ACTIVATIONS, tidy
from vramfit.sentences import say

_SECONDS: Final = 120.0


def counted_architecture(values: Mapping[str, Any], name: str) -> Architecture:
    """The architecture of a config.json whose family nobody described. Takes seconds the first time.

    Raises ModelError: `transformers` cannot build it, or a width is missing.
    """
    return _counted(json.dumps(values, sort_keys=True), name)


@cache
def _counted(text: str, name: str) -> Architecture:
    found = _ask(text, name)
    values = json.loads(text)
    # The usual names of widths, as nearly all families have them; what is missing is complained of by its name.
    widths: dict[str, Any] = found["widths"]
    activation = str(widths.get("hidden_act"))
    like_llama = from_config(
        {
            **values,
            **widths,
            "model_type": "llama",
            "hidden_size": found["hidden_size"],
            "num_hidden_layers": found["layers"],
            "vocab_size": found["vocab_size"],
            "tie_word_embeddings": found["tied_embeddings"],
            "hidden_act": activation if activation in ACTIVATIONS else "silu",  # a newer library may have others
        },
        name,
    )
    shape = dataclasses.replace(like_llama, family=str(values.get("model_type")), counted=True)
    told = ", ".join(f"{key} ({tidy(widths[key])})" for key in sorted(found["absent"]))
    notes = (say("assumed.keys", keys=told),) if told else ()
    return dataclasses.replace(shape, extra_params=found["params"] - shape.params, notes=notes)


def _ask(text: str, name: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "vramfit.models.count_worker"]
    try:
        done = subprocess.run(
            command,
            input=text.encode("utf-8"),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            timeout=_SECONDS,
            check=False,
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
        answer: dict[str, Any] = json.loads(done.stdout.decode("utf-8").strip().splitlines()[-1])
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        answer = {"error": f"it did not answer within {_SECONDS:g} seconds"}
    if "error" in answer:
        raise ModelError(
            f"{name} is of a family VRAMFit does not know, and transformers cannot build it ({answer['error']})",
            "Choose a model of another family, or a newer transformers that knows it.",
        )
    found: dict[str, Any] = answer["counted"]
    return found
