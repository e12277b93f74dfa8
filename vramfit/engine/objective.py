"""What is minimised of a token's logits: cross-entropy, and what may be added to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import torch.nn.functional as F  # noqa: N812 - the name everybody knows it by
from torch import Tensor


class SummedLoss(NamedTuple):
    """Two sums over tokens, fp32 scalars: what is minimised, which has a gradient, and the cross-entropy in it."""

    objective: Tensor
    cross_entropy: Tensor


@dataclass(frozen=True, kw_only=True)
class Objective:
    """What is minimised of a token's logits x with the right word y, V words:

        logsumexp(x) - (1 - s) x[y] - s mean(x) + z logsumexp(x)^2

    with s = `label_smoothing` (Szegedy et al. 2016; as torch's cross_entropy has it) and z = `z_loss` (Chowdhery et
    al. 2022, PaLM).
    """

    z_loss: float = 0.0
    label_smoothing: float = 0.0

    @property
    def is_plain(self) -> bool:
        return self.z_loss == 0 and self.label_smoothing == 0


PLAIN: Final = Objective()


def whole_sum(logits: Tensor, targets: Tensor, weights: Tensor | None, objective: Objective = PLAIN) -> SummedLoss:
    """The sums from all logits [N, V] fp32 of N targets, by torch's own functions."""
    if objective.is_plain and weights is None:
        loss = F.cross_entropy(logits, targets, reduction="sum")
        return SummedLoss(loss, loss.detach())
    entropies = F.cross_entropy(logits, targets, reduction="none")
    each = entropies
    if objective.label_smoothing:
        each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=objective.label_smoothing)
    if objective.z_loss:
        each = each + objective.z_loss * logits.logsumexp(dim=1).square()
    shares = 1.0 if weights is None else weights
    return SummedLoss((each * shares).sum(), (entropies.detach() * shares).sum())
