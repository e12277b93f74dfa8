"""Counts a model nobody described: python -m vramfit.models.count_worker < config.json.

`transformers` builds it on the meta device, without memory. For the planner, which never imports torch: it reads one
line of JSON, {"counted": {params, embedding_params, tied_embeddings, layers, block_params, widths, absent}} or
{"error": reason}.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any

import torch

from vramfit.models.families import USUAL_KEYS


def counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner needs of a config.json. Raises whatever `transformers` raises when it cannot build the model."""
    from transformers import AutoConfig, AutoModelForCausalLM

    from vramfit.engine.activations import find_blocks

    config = AutoConfig.for_model(**values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    blocks, widths = find_blocks(model), _widths(config)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    return {
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "embedding_params": embedding.numel(),
        "tied_embeddings": head is not None and head.weight is embedding,
        "vocab_size": embedding.shape[0],
        "hidden_size": embedding.shape[1],
        "layers": len(blocks),
        "block_params": [sum(parameter.numel() for parameter in block.parameters()) for block in blocks],
        "widths": widths,
        "absent": [key for key in widths if not {key, config.attribute_map.get(key, key)} & values.keys()],
    }


def _widths(config: Any) -> dict[str, Any]:
    """The usual keys as the family's own class has them, its defaults and other names included."""
    found = {key: getattr(config, key, None) for key in USUAL_KEYS.values()}
    return {key: value for key, value in found.items() if isinstance(value, (int, str)) and not isinstance(value, bool)}


def main() -> None:
    """Read a config from standard input, write the answer as the last line of standard output."""
    try:
        answer: dict[str, Any] = {"counted": counted(json.loads(sys.stdin.buffer.read().decode("utf-8")))}
    except Exception as error:  # transformers raises everything from KeyError to its own
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        answer = {"error": f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__}
    sys.stdout.write("\n" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
