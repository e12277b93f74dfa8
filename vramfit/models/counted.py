"""Models of families that have no row in `families.py`: counted by a process of its own instead of by arithmetic.

Its parameters are then exact, and what its blocks keep and need is taken for that of a Llama of the same widths.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, Final

from vramfit.errors import ModelError
from vramfit.json_text import load_json
from vramfit.models.architecture import Architecture, Experts, decoder_values, from_config, is_described, needs_own_code
from vramfit.models.config_keys import ACTIVATIONS, tidy
from vramfit.sentences import say

_SECONDS: Final = 120.0
_WORKER: Final = "vramfit.models.count_worker"
_ROOT: Final = Path(__file__).parent.parent.parent


def counted_architecture(values: Mapping[str, Any], name: str) -> Architecture:
    """The architecture of a config.json whose family nobody described. Takes seconds the first time.

    Raises ModelError: `transformers` cannot build it, or a width is missing.
    """
    values = {key: value for key, value in values.items() if key != "quantization_config"}  # no matter of its shape
    return _counted(json.dumps(values, sort_keys=True), name)


@cache
def _counted(text: str, name: str) -> Architecture:
    return from_count(json.loads(text), _ask(text, name), name)


def from_count(values: Mapping[str, Any], found: Mapping[str, Any], name: str) -> Architecture:
    """The architecture of a config.json of which `count_worker` has `found` the numbers."""
    decoder = decoder_values(values)
    if decoder is not values and is_described(decoder):
        return _with_other_parts(from_config(values, name), found, name)
    values = decoder
    # The usual names of widths, as nearly all families have them.
    widths: dict[str, Any] = found["widths"]
    hidden = found["hidden_size"]
    ours = {key: value for key, value in _usual(hidden).items() if key not in widths}
    activation = str(widths.get("hidden_act"))
    like_llama = from_config(
        {
            "max_position_embeddings": 2048,
            **{key: values[key] for key in ("sliding_window", "use_sliding_window") if key in values},
            **widths,
            **ours,
            "model_type": "llama",
            "hidden_size": hidden,
            "num_hidden_layers": found["layers"],
            "vocab_size": found["vocab_size"],
            "tie_word_embeddings": found["tied_embeddings"],
            "hidden_act": activation if activation in ACTIVATIONS else "silu",  # a newer library may have others
        },
        name,
    )
    family = str(values.get("model_type"))
    gated = dataclasses.replace(like_llama, family=family, counted=True, experts=_experts(found))
    shapes = (_completed(gated, found), _completed(dataclasses.replace(gated, mlp="plain"), found))
    nearest = min(shapes, key=lambda shape: abs(shape.extra_block_params))
    return dataclasses.replace(nearest, notes=tuple(_notes(found, ours)))


def _with_other_parts(decoder: Architecture, found: Mapping[str, Any], name: str) -> Architecture:
    """A described decoder with what a run loads beside it: frozen or not, it lies on the device from the start to the
    end. Raises ModelError when the decoder is not the counted one."""
    beside = found["params"] - decoder.params
    if beside < 0 or found["layers"] != decoder.layers:
        raise ModelError(
            f"{name} has {found['layers']} blocks and {found['params']:,} parameters as transformers builds it, and "
            f"its text part says {decoder.layers} and {decoder.params:,}",
            "Choose a model whose decoder is a file of its own.",
        )
    if not beside:
        return decoder
    note = say("model.whole", count=f"{beside:,}")
    return dataclasses.replace(decoder, extra_params=decoder.extra_params + beside, notes=(*decoder.notes, note))


def _usual(hidden: int) -> dict[str, int]:
    """Widths that nobody says: a model without attention has no heads, and some name its other width in a way of their
    own."""
    heads = next(heads for heads in (hidden // 64, 1) if heads and hidden % heads == 0)
    return {"num_attention_heads": heads, "intermediate_size": 4 * hidden}


def _notes(found: Mapping[str, Any], ours: Mapping[str, int]) -> Iterator[str]:
    """What the file does not say: what the family's class has instead, and what is only usual."""
    widths = found["widths"]
    for name, values in (("assumed.keys", {key: widths[key] for key in found["absent"]}), ("assumed.ours", ours)):
        if told := ", ".join(f"{key} ({tidy(value)})" for key, value in sorted(values.items())):
            yield say(name, keys=told)


def _completed(shape: Architecture, found: Mapping[str, Any]) -> Architecture:
    """The shape with what it lacks beside the counted model: the mean of all blocks in each, the rest outside."""
    each = enumerate(found["block_params"])
    missing = sum(params - shape.params_of_block(layer) for layer, params in each) // shape.layers
    shape = dataclasses.replace(shape, extra_block_params=missing)
    return dataclasses.replace(shape, extra_params=found["params"] - shape.params)


def _experts(found: Mapping[str, Any]) -> Experts | None:
    """Experts as wide as their number of parameters says, of three matrices each; None where it has none."""
    count, each = found["experts"], found["expert_params"]
    width = max(each, default=0) // max(1, 3 * count * found["hidden_size"])
    if not width:
        return None
    return Experts(
        count=count,
        active=min(count, found["active_experts"] or count),
        expert_width=width,
        dense_layers=tuple(layer for layer, params in enumerate(each) if not params),
    )


def _ask(text: str, name: str) -> dict[str, Any]:
    answer = _answer(text)
    values = json.loads(text)
    if "error" in answer and values.get("auto_map"):
        raise needs_own_code(str(values.get("model_type")), name)
    if "error" in answer and decoder_values(values) is not values:
        raise ModelError(
            f"{name} is a multimodal model ({tidy(values.get('model_type'))}), which transformers does not load as a "
            f"language model ({answer['error']})",
            "Choose a text model, or a copy that holds the decoder alone (model_type "
            f"{tidy(decoder_values(values).get('model_type'))}).",
        )
    if "error" in answer:
        raise ModelError(
            f"{name} is of a family VRAMFit does not know, and transformers cannot build it ({answer['error']})",
            "Choose a model of another family, or a newer transformers that knows it.",
        )
    found: dict[str, Any] = answer["counted"]
    return found


def _answer(text: str) -> dict[str, Any]:
    """What `count_worker` says of a config.json: {"counted": ...} or {"error": reason}."""
    try:
        done = subprocess.run(
            [sys.executable, "-m", _WORKER],
            input=text.encode("utf-8"),
            capture_output=True,
            timeout=_SECONDS,
            check=False,
            cwd=_ROOT,  # so that it is found wherever the command was given
            creationflags=getattr(subprocess, "CREATE_NO_WINDOW", 0),
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it did not answer within {_SECONDS:g} seconds"}
    except OSError as error:
        return {"error": f"the process that counts it cannot be started: {error.strerror or error}"}
    try:
        answer: dict[str, Any] = load_json(done.stdout.decode("utf-8").strip().splitlines()[-1])
    except (ValueError, IndexError):
        return {"error": _ended(done.returncode, done.stderr.decode("utf-8", errors="replace"))}
    return answer


def _ended(code: int, told: str) -> str:
    """Of a process that ended without an answer: by which signal or exit code, and its last words."""
    how = f"signal {-code}" if code < 0 else f"exit code {code}"
    last = next((line.strip() for line in reversed(told.splitlines()) if line.strip()), "")
    return f"the process that counts it ended with {how}{': ' if last else ''}{last[:200]}"
