"""Whether every adapter learns: a small backward before step 1, whose gradients are looked at and thrown away.

An adapter can lie beside a layer that the loss never passes (a head for several tokens at once, a part that is left out
in training) or that is cut off from it. Such a run would look well and learn nothing, or less than was asked for.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from vramfit.engine.loss import Batch, targets_of
from vramfit.engine.randomness import own_randomness
from vramfit.engine.recovery import attempt
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.errors import ModelError

TOKENS = 64
"""Of one sequence, around its first trained token."""
FEWEST = 8
"""Tokens down to which it is tried where memory runs out."""


def check_gradients_reach(executor: ResidentExecutor, batches: Iterable[Batch]) -> str:
    """Run the first of `batches` that has a trained token; weights, buffers and random numbers stay as they were.

    Returns why it could not be known, one sentence: memory ran out, which is the first step's to mend or to refuse.
    Raises ModelError when a trained parameter gets no gradient, or all gradients are zero. A gradient of zeros is none
    that is missing: A's is, while B is zero, and that of experts which no token was sent to.
    """
    whole = next((piece for piece in map(Piece.of, batches) if targets_of(piece).count), None)
    if whole is None:
        return ""  # the first step says that no token carries loss
    gradients, failure = _gradients(executor, whole)
    if gradients is None:
        return f"Whether gradients reach every adapter is not known: memory ran out in the trial ({failure})."
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
    return ""


def _gradients(executor: ResidentExecutor, whole: Piece) -> tuple[dict[str, Tensor | None] | None, str]:
    """(gradients of a few tokens, ""), or (None, why memory ran out) where not even the fewest have room, nor had once
    the governor has made some."""
    tokens = TOKENS
    with own_randomness(executor.device, 0), executor.recovery.buffers_kept():
        while True:
            piece = _excerpt(whole, tokens)
            made, failure = attempt(
                lambda piece=piece: executor.gradients(piece, scale=executor.loss_scale),  # type: ignore[misc]
                executor.device,
            )
            if made is not None:
                return made[1], ""
            if tokens > FEWEST:
                tokens //= 2
            elif not executor.recovery.relieve():
                return None, failure.splitlines()[0]


def _excerpt(whole: Piece, tokens: int) -> Piece:
    """A short row with a trained token."""
    row, column = divmod(int(targets_of(whole).positions.flatten()[0]), whole.input_ids.shape[1])
    start = max(0, column - tokens // 2)
    piece = whole.part(row, row + 1)

    def cut(tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None or tensor.ndim != 2 else tensor[:, start : start + tokens]

    return Piece(
        input_ids=piece.input_ids[:, start : start + tokens],
        labels=piece.labels[:, start : start + tokens],
        attention_mask=cut(piece.attention_mask),
        position_ids=cut(piece.position_ids),
        weights=cut(piece.weights),
    )
