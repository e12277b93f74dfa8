"""Whether every adapter learns: a small backward before step 1, whose gradients are looked at and thrown away.

An adapter can lie beside a layer that the loss never passes (a head for several tokens at once, a part that is left out
in training) or that is cut off from it. Such a run would look well and learn nothing, or less than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from vramfit.engine.loss import Batch, targets_of
from vramfit.engine.randomness import own_randomness
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.errors import ModelError

TOKENS = 64
"""Of one sequence, around its first trained token."""


def check_gradients_reach(executor: ResidentExecutor, batches: Iterable[Batch]) -> None:
    """Run the first of `batches` that has a trained token; weights and random numbers stay as they were.

    Raises ModelError when a trained parameter gets no gradient, or all gradients are zero. A gradient of zeros is none
    that is missing: A's is, while B is zero, and that of experts which no token was sent to.
    """
    piece = next(filter(None, map(_excerpt, batches)), None)
    if piece is None:
        return  # the first step says that no token carries loss
    with own_randomness(executor.device, 0):
        _, gradients = executor.gradients(piece, scale=executor.loss_scale)
    missing = [name for name, gradient in gradients.items() if gradient is None]
    if missing:
        layers = sorted({name.partition(".lora_")[0].removeprefix("base_model.model.") for name in missing})
        raise ModelError(
            f"No gradient reaches {len(missing)} of {len(gradients)} adapter tensors; the first layer is {layers[0]}",
            "Name targets without it: the loss does not depend on that layer.",
        )
    if not any(bool(gradient.any()) for gradient in gradients.values() if gradient is not None):
        raise ModelError(
            f"The gradients of all {len(gradients)} adapter tensors are zero",
            "The loss does not depend on the chosen targets: choose all-linear.",
        )


def _excerpt(batch: Batch) -> Piece | None:
    """A short row with a trained token; None where there is none."""
    whole = Piece.of(batch)
    targets = targets_of(whole)
    if targets.count == 0:
        return None
    row, column = divmod(int(targets.positions.flatten()[0]), whole.input_ids.shape[1])
    start = max(0, column - TOKENS // 2)
    piece = whole.part(row, row + 1)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None or tensor.ndim != 2 else tensor[:, start : start + TOKENS]

    return Piece(
        input_ids=piece.input_ids[:, start : start + TOKENS],
        labels=piece.labels[:, start : start + TOKENS],
        attention_mask=cut(piece.attention_mask),
        position_ids=cut(piece.position_ids),
        weights=cut(piece.weights),
    )
