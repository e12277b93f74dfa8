"""How much of a mixture's blocks adapters train, told before the run: experts in one tensor are no layers to name."""

from __future__ import annotations

from typing import Literal

from vramfit.models.architecture import Architecture
from vramfit.planning.plan import Plan
from vramfit.planning.stored import sizes_of_block
from vramfit.units import format_percent


def adapted_share(architecture: Architecture, plan: Plan) -> tuple[Literal["info", "warning"], str] | None:
    """Level and sentence about the first block with experts: what adapters train of it, and whether its experts have
    any.

    A warning where a target has the name of an expert's projection and adapts none of them. None without adapters, and
    for a model without experts.
    """
    layer = next(filter(lambda index: _experts(architecture, index), range(architecture.layers)), None)
    if not plan.lora_rank or layer is None:
        return None
    sizes = sizes_of_block(architecture, layer, plan)
    whole = architecture.params_of_block(layer)
    found = f"Adapters train {sum(sizes):,} numbers beside the {whole:,} of a block with experts, "
    found += format_percent(sum(sizes) / whole)
    own = _experts(architecture, layer)
    if plan.lora_experts or not any(own.values()):
        return "info", f"{found}; its experts have adapters, too."
    named = [name for name in plan.lora_targets if name.rpartition(".")[2] in own]
    missed = f": no target means them ({', '.join(named)} matches 0)" if named else ""
    return "warning" if named else "info", (
        f"{found}. Its experts, {format_percent(sum(own.values()) / whole)} of the block, have none{missed}. Turn on "
        "adapter.experts to put some beside each."
    )


def _experts(architecture: Architecture, layer: int) -> dict[str, int]:
    """Weights of the experts' projections in block `layer` by name; 0 for those that a target can mean."""
    own = (linear for linear in architecture.linears(layer) if linear.part == "expert")
    return {linear.name: 0 if linear.module else linear.weights for linear in own}
