"""Counts a model nobody described: python -m vramfit.models.count_worker < config.json.

`transformers` builds it on the meta device, without memory. For the planner, which never imports torch: it reads one
line of JSON, {"counted": {params, layers, block_params, widths, ...}} or {"error": reason}.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from vramfit.models.families import USUAL_KEYS

EXPERT_COUNTS: Final = (
    *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"),
)
EXPERTS_ACTIVE: Final = (
    *("num_experts_per_tok", "num_experts_per_token", "num_selected_experts", "top_k_experts", "moe_topk", "moe_top_k"),
    *("moe_k", "moe_num_active_experts", "router_top_k"),
)
"""How families call the number of a block's experts, and of those that a token is sent to."""

MLP_WIDTHS: Final = ("ffn_dim", "ffn_hidden_size", "n_inner", "d_inner", "dim_ff", "moe_intermediate_size")
"""Other names of a feed-forward's width."""


def counted(values: Mapping[str, Any]) -> dict[str, Any]:
    """What the planner needs of a config.json. Raises whatever `transformers` raises when it cannot build the model.

    Of a multimodal model it is what a run loads: the decoder, or the whole where there is no class of it alone.
    """
    from transformers import AutoModelForCausalLM

    from vramfit.engine.activations import find_blocks

    config = _read(values)
    text = config.get_text_config(decoder=True)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    blocks, widths = find_blocks(model), _widths(text)
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings()
    experts, expert_params = _first_number(text, EXPERT_COUNTS), []
    block_params, seen = [], set[int]()
    for block in blocks:  # what several blocks share counts in the first of them
        new = [parameter for parameter in block.parameters() if id(parameter) not in seen]
        seen.update(map(id, new))
        block_params.append(sum(parameter.numel() for parameter in new))
        expert_params.append(_expert_params(block, experts))
    part = values.get("text_config")
    said = part.keys() if isinstance(part, Mapping) else values.keys()
    return {
        "params": sum(parameter.numel() for parameter in model.parameters()),
        "embedding_params": embedding.numel(),
        "tied_embeddings": head is not None and head.weight is embedding,
        "vocab_size": embedding.shape[0],
        "hidden_size": _first_number(text, ("hidden_size",)) or embedding.shape[1],  # some embed in a narrower space
        "layers": len(blocks),
        "block_params": block_params,
        "expert_params": expert_params,
        "experts": experts,
        "active_experts": _first_number(text, EXPERTS_ACTIVE),
        "widths": widths,
        "absent": [key for key in widths if not {key, text.attribute_map.get(key, key), *_others(key)} & said],
    }


def _read(values: Mapping[str, Any]) -> Any:
    """The config as `transformers` reads it from a model's folder: old names, nested parts, numbers JSON has no word
    for."""
    from transformers import AutoConfig

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values), encoding="utf-8")
        return AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)


def _expert_params(block: nn.Module, experts: int) -> int:
    """Parameters of the experts that a token may or may not be sent to: modules in a list, or one tensor for all."""
    return sum(
        parameter.numel()
        for name, parameter in block.named_parameters()
        if experts > 0 and ("experts" in name.split(".") or (parameter.dim() == 3 and parameter.shape[0] == experts))
    )


def _widths(config: Any) -> dict[str, Any]:
    """The usual keys as the family's own class has them, its defaults and other names included."""
    found = {key: _value(config, key) for key in USUAL_KEYS.values()}
    width = found["intermediate_size"]
    if isinstance(width, list):  # block by block
        found["intermediate_size"] = max(width, default=None)
    if found["intermediate_size"] is None:
        found["intermediate_size"] = _first_number(config, MLP_WIDTHS) or None
    return {key: value for key, value in found.items() if isinstance(value, str) or _is_size(value)}


def _others(key: str) -> tuple[str, ...]:
    return MLP_WIDTHS if key == "intermediate_size" else ()


def _first_number(config: Any, keys: tuple[str, ...]) -> Any:
    """The first of `keys` that holds a number above 0; 0 where none does."""
    found = (_value(config, key) for key in keys)
    return next((value for value in found if _is_size(value)), 0)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _value(config: Any, key: str) -> Any:
    """A setting; where blocks differ in it, the largest of theirs."""
    try:
        return getattr(config, key, None)
    except RuntimeError:  # no attribute of the whole: a library that lets blocks differ has it block by block
        found = [getattr(block, key, None) for block in config.per_layer_config]
        return max((value for value in found if isinstance(value, int)), default=None)


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
