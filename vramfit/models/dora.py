"""DoRA (Liu et al. 2024) without the matrix it speaks of: m / |W + s B A| (W + s B A) x, where |.| is of each row.

peft's forward makes B A, its sum with W and a unit matrix to learn the rows' lengths: three to four copies of every
adapted matrix, one after the other. The squared length of a row is |w|^2 + 2 s b (W A^T) + s^2 b (A A^T) b^T: the first
never changes, the others are products of rank size. As in the paper, lengths are constants in backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vramfit.engine.packed import PackedLinear, packed_weights
from vramfit.models.hollow import is_hollow

_SQUARES = "base_squares"
_ROWS_AT_ONCE = 1024


def use_short_dora(model: nn.Module) -> None:
    """Replace peft's forward of every DoRA layer of `model` by this one, and set m to the rows' lengths, in fp32.

    Call it again after the base's weights have changed.
    """
    from peft.tuners.lora.variants import DoraLinearVariant

    class ShortDora(DoraLinearVariant):  # type: ignore[misc]
        forward = staticmethod(_forward)

    for module in model.modules():
        variants = getattr(module, "lora_variant", {})
        for adapter, variant in variants.items():
            if isinstance(variant, DoraLinearVariant):
                variants[adapter] = ShortDora()
                if not _visits(module):
                    _prepare(module, adapter)


def measure_rows(part: nn.Module) -> None:
    """Set m to the rows' lengths in a part of a model whose weights are there only now."""
    for module in part.modules():
        for adapter in getattr(module, "lora_magnitude_vector", {}):
            _prepare(module, adapter)


def _visits(module: Any) -> bool:
    """Whether the base's weights are not there, and are measured when they come."""
    base = module.get_base_layer()
    if isinstance(base, PackedLinear):
        return any(part is None for part in packed_weights(base)["weight"].parts.values())
    weight = base.weight
    return isinstance(weight, Tensor) and not weight.is_meta and is_hollow(weight)


@torch.no_grad()
def _prepare(module: Any, adapter: str) -> None:
    dora = module.lora_magnitude_vector[adapter]
    squares = _row_squares(module)
    # Not in checkpoints: it follows from the base.
    dora.register_buffer(_SQUARES, squares.to(dora.weight.device), persistent=False)
    dora.weight.data = row_lengths(module, adapter).to(dora.weight.dtype)


@torch.no_grad()
def row_lengths(module: Any, adapter: str) -> Tensor:
    """|W + s B A| of each of the [out] rows, fp32."""
    dora, scale = module.lora_magnitude_vector[adapter], module.scaling[adapter]
    a, b = module.lora_A[adapter].weight.float(), module.lora_B[adapter].weight.float()
    cross = (b * _through_base(module, a).float()).sum(dim=1)
    own = ((b @ (a @ a.T)) * b).sum(dim=1)
    squares: Tensor = getattr(dora, _SQUARES)
    whole: Tensor = squares + 2 * scale * cross + scale**2 * own
    return whole.clamp_min(torch.finfo(torch.float32).tiny).sqrt()


def _forward(module: Any, active_adapter: str, x: Tensor, result: Tensor, **_: Any) -> Tensor:
    """m / |W + s B A| (W x + s B A dropout(x)) + bias, from `result` = W x + bias.

    Where there is dropout, peft sends what it has dropped out through W a second time; here W x stays whole.
    """
    low = module.lora_A[active_adapter](module.lora_dropout[active_adapter](x))
    moved = module.lora_B[active_adapter](low) * module.scaling[active_adapter]
    bias = module.get_base_layer().bias
    straight = result if bias is None else result - bias
    both = straight + moved
    with torch.autocast(x.device.type, enabled=False):
        change = module.lora_magnitude_vector[active_adapter].weight / row_lengths(module, active_adapter) - 1.0
    # As a difference from 1, a factor keeps its digits in 16 bits.
    turned = torch.addcmul(both, both, change.to(both.dtype))
    whole = turned if bias is None else turned + bias
    return whole.to(result.dtype)


def _through_base(module: Any, rows: Tensor) -> Tensor:
    """rows [r, in] through the base's weights, without bias: [r, out] transposed to [out, r]."""
    base = module.get_base_layer()
    weight = base.weight
    if isinstance(base, PackedLinear):
        found: Tensor = base.forward(rows.to(weight.dtype)).float()
        return (found if base.bias is None else found - base.bias.float()).T
    if getattr(weight, "quant_state", None) is not None:  # the kernel unpacks it, a piece at a time where it can
        # Not through hooks, which are about what the model gives this layer.
        product: Tensor = base.forward(rows.to(base.compute_dtype or rows.dtype)).float()
        return (product if base.bias is None else product - base.bias.float()).T
    straight: Tensor = weight.T if module.fan_in_fan_out else weight
    return straight @ rows.to(weight.dtype).T


def _row_squares(module: Any) -> Tensor:
    """Squared length of each row of the base's weights, in fp32, a piece at a time."""
    from peft.utils.integrations import dequantize_module_weight

    base = module.get_base_layer()
    weight: Tensor = base.unpacked() if isinstance(base, PackedLinear) else dequantize_module_weight(base)
    rows = weight.T if module.fan_in_fan_out else weight
    starts = range(0, len(rows), _ROWS_AT_ONCE)
    return torch.cat([rows[start : start + _ROWS_AT_ONCE].float().square().sum(dim=1) for start in starts])
