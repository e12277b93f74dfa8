"""Full training of the last blocks alone: they, the final norm and the head have gradients, what is before has none.

Backward ends at the first block that trains: blocks before it are passed forward, keep nothing, and cost a third of the
work of one that trains. A head that is the embedding's own table lies before them, too: it stays frozen, because its
gradient as an embedding would have to come through every block.
"""

from __future__ import annotations

from typing import Any, Final

from torch import nn

from vramfit.engine.activations import find_blocks

_BEFORE_THE_LIST: Final = ("final_layer_norm", "project_out")
"""Modules of OPT that stand before the list of blocks and come after them. All other families list what comes after the
blocks behind them (a test compares with the order in which 40 families call their modules)."""


def train_last_blocks(model: nn.Module, count: int) -> None:
    """Set which parameters of a causal language model have gradients: those of the last `count` blocks and of what
    comes after them. 0: all of them."""
    model.requires_grad_(count == 0)
    if not count:
        return
    for block in list(find_blocks(model))[-count:]:
        block.requires_grad_(True)
    for parameter in after_blocks(model):
        parameter.requires_grad_(True)


def after_blocks(model: nn.Module) -> list[nn.Parameter]:
    """Parameters of what comes after the blocks, without a table that is the embedding's, too."""
    blocks: Any = find_blocks(model)
    whole: Any = model
    table = whole.get_input_embeddings().weight
    inside = {id(parameter) for parameter in blocks.parameters()}
    found: dict[int, nn.Parameter] = {}
    passed = False
    for name, module in model.named_modules():
        passed = passed or module is blocks
        if not passed and name.rpartition(".")[2] not in _BEFORE_THE_LIST:
            continue
        for parameter in module.parameters(recurse=False):
            if parameter is not table and id(parameter) not in inside:
                found[id(parameter)] = parameter
    return list(found.values())
