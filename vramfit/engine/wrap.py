"""The three lines: an existing PyTorch loop gains precision, accumulation, clipping and memory care.

    import vramfit
    step = vramfit.wrap(model, optimizer, max_grad_norm=1.0)
    for batch in batches:
        print(step(batch).loss)

One call is one optimizer step over one batch. The batch goes through the model in pieces that fit, in the precision
that suits the device; the gradient is that of the whole batch, however it was cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn

from vramfit.config import Auto, Precision
from vramfit.engine.activations import find_blocks, recompute_blocks
from vramfit.engine.head import base_model
from vramfit.engine.loss import IGNORED, TokenLoss, model_inputs, targets_of
from vramfit.engine.precision import (
    DTYPES,
    autocast,
    check_precision,
    choose_precision,
    fp32_products,
    loss_scaler,
)
from vramfit.engine.randomness import random_state, set_random_state
from vramfit.engine.recovery import halves, is_out_of_memory, release_memory
from vramfit.engine.resident import Piece, StepResult
from vramfit.engine.update import finish_step
from vramfit.errors import ConfigError, DataError, ModelError, Problem, WontFit

BatchLike: TypeAlias = Mapping[str, Any] | tuple[Any, ...] | list[Any] | Tensor
LossFunction: TypeAlias = Callable[[nn.Module, Any], tuple[Tensor, int | Tensor] | tuple[Tensor, int | Tensor, float]]
"""(model, piece of a batch, on the model's device) -> (loss summed over items, number of items); where items weigh
unequally, (weighted sum, number of items, sum of their weights)."""

_CONTAINERS = (Tensor, Mapping, tuple, list)
_CAUSAL_KEYS = {"input_ids", "labels", "attention_mask", "position_ids", "weights"}


def wrap(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    loss: LossFunction | None = None,
    precision: Precision | Auto = "auto",
    micro_batch: int | Auto = "auto",
    max_grad_norm: float = 0.0,
    recompute: int | Literal["all"] = 0,
) -> WrappedStep:
    """Make `step(batch)` out of a model and its optimizer. The model stays where it is and what it is.

    `loss` gives (sum, count) of a piece of a batch. Without it, a Hugging Face causal model gets the memory-saving
    token loss, in which a batch's "weights" [B, S] fp32 are each label's share; any other model must
    return its mean loss (`.loss`, `["loss"]`, or the scalar itself), taken to be over rows, or over labels other than
    -100 where labels have more than one dimension.
    `micro_batch` is rows per piece; "auto" is the whole batch until memory runs out, then half, and so on.
    `max_grad_norm=0` does not clip. `recompute` is the number of transformer blocks recomputed in backward.
    Raises ConfigError, or ModelError when nothing can be trained, when the model lies on several devices, or when
    blocks are to be recomputed and there are none.
    """
    device = _only_device(model)
    _check_trained(model, optimizer)
    if precision not in ("auto", *DTYPES):
        raise _wrong("precision", f"{precision!r} is no precision", f"Choose auto, {', '.join(DTYPES)}.")
    compute: Precision = choose_precision(device).compute if precision == "auto" else precision
    check_precision(device, compute)
    if micro_batch != "auto" and micro_batch < 1:
        raise _wrong("micro_batch", f"A micro-batch of {micro_batch} rows holds nothing", "Give 1 or more, or auto.")
    if max_grad_norm < 0:
        raise _wrong("max_grad_norm", f"The gradient norm cannot be limited to {max_grad_norm}", "Give 0 or more.")
    if recompute != "all" and recompute < 0:
        raise _wrong("recompute", f"{recompute} blocks cannot be recomputed", "Give 0 or more, or all.")
    recompute_blocks(model, len(find_blocks(model)) if recompute == "all" else recompute)
    return WrappedStep(
        model, optimizer, loss=loss, compute=compute, micro_batch=micro_batch, max_grad_norm=max_grad_norm
    )


class WrappedStep:
    """One optimizer step per call. `micro_batch` is rows per piece (0: the whole batch), `compute` the precision."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: LossFunction | None,
        compute: Precision,
        micro_batch: int | Auto,
        max_grad_norm: float,
    ) -> None:
        self.model, self.optimizer, self.compute, self.max_grad_norm = model, optimizer, compute, max_grad_norm
        self.device = next(model.parameters()).device
        self.micro_batch = 0 if micro_batch == "auto" else micro_batch
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scaler = loss_scaler(self.device, compute, trained=self._parameters)
        self._loss: Any = loss or _loss_of(model, compute)

    def __call__(self, batch: BatchLike) -> StepResult:
        """One step over all rows of `batch`: tensors, or a dict, tuple or list of them, whose first dimension is rows.

        Returns the mean loss over the batch's items, their number as `tokens`, the gradient norm before clipping, and
        whether the step was refused. Raises DataError for a batch without rows or items, WontFit when memory runs out
        with a single row.
        """
        rows = _rows_of(batch)
        before = random_state(self.device)
        recovered = ""
        while True:
            self.optimizer.zero_grad(set_to_none=True)
            size = min(self.micro_batch or rows, rows)
            try:
                with fp32_products(self.compute):
                    losses, items, weight, factor = self._accumulate(batch, rows, size)
                break
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                failure = str(error)
            # Outside the except block: while it lasts, the traceback keeps the failed attempt's tensors alive.
            self.optimizer.zero_grad(set_to_none=True)
            if size == 1:
                raise _wont_fit(failure)
            self.micro_batch = halves(size)[0]
            release_memory(self.device)
            set_random_state(self.device, before)
            recovered = f"Memory ran out with {size} rows at a time; the step was repeated with {self.micro_batch}"
        finish = finish_step(
            self.optimizer,
            parameters=self._parameters,
            scaler=self._scaler,
            max_grad_norm=self.max_grad_norm,
            losses=losses,
            gradient_factor=factor,
        )
        return StepResult(
            loss=finish.loss_sum / weight,
            tokens=items,
            grad_norm=finish.grad_norm,
            skipped=finish.skipped,
            loss_scale=finish.loss_scale,
            problem=finish.problem,
            recovered=recovered,
        )

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the model's and the optimizer's own state: plain values."""
        return {"micro_batch": self.micro_batch, "scaler": self._scaler.state_dict() if self._scaler else None}

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.micro_batch = values["micro_batch"]
        if self._scaler and values["scaler"]:
            self._scaler.load_state_dict(dict(values["scaler"]))

    def _accumulate(self, batch: BatchLike, rows: int, size: int) -> tuple[list[Tensor], int, float, float]:
        """(losses, items, their weight, what the gradients must still be multiplied by) of the whole batch.

        What all items weigh is known only after the last piece, so pieces are divided by the rows meanwhile.
        """
        losses, items, total = [], 0, 0.0
        scale = self._scaler.get_scale() if self._scaler else 1.0
        divisor = float(rows)
        for start in range(0, rows, size):
            piece = _move(_part(batch, start, start + size, rows), self.device)
            with autocast(self.device, self.compute):
                loss, count, weight = _checked(self._loss(self.model, piece))
            if size == rows and count:
                divisor = weight
            if count:
                (loss * (scale / divisor)).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                items, total = items + count, total + weight
        if items == 0:
            raise DataError("The batch has 0 items that carry loss", "Leave it out, or check its labels.")
        return losses, items, total, divisor / total


def _only_device(model: nn.Module) -> torch.device:
    """The one device all parameters are on."""
    devices = sorted({str(parameter.device) for parameter in model.parameters()})
    if not devices:
        raise ModelError(f"{type(model).__name__} has 0 parameters, so there is nothing to train", "Give a model.")
    if len(devices) > 1:
        raise ModelError(
            f"{type(model).__name__} lies on {len(devices)} devices ({', '.join(devices)}), and a step runs on one",
            "Move the whole model to one of them.",
        )
    return torch.device(devices[0])


def _check_trained(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """The optimizer must hold parameters of this model that learn: else every step would silently do nothing."""
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    if not trained:
        raise ModelError(
            f"{type(model).__name__} has 0 parameters that require a gradient", "Unfreeze some before wrapping it."
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if not any(id(parameter) in trained for parameter in held):
        raise _wrong(
            "optimizer",
            f"The optimizer holds 0 of the {len(trained)} trained parameters of {type(model).__name__}",
            "Make it from this model's parameters, after moving or changing the model.",
        )


def _checked(returned: Any) -> tuple[Tensor, int, float]:
    """(loss, count, weight) as a loss function must give them; without a third value, every item weighs 1."""
    if not (isinstance(returned, tuple | list) and len(returned) in (2, 3)):
        raise _wrong(
            "loss",
            f"The loss function returned a {type(returned).__name__}, not a pair",
            "Return (loss summed over items, number of items).",
        )
    loss, count, weight = returned[0], int(returned[1]), float(returned[-1])
    if not isinstance(loss, Tensor) or loss.numel() != 1:
        shape = list(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        raise _wrong("loss", f"The loss is not one number but {shape}", "Sum it over the items: loss.sum(), count.")
    if count and not loss.requires_grad:
        raise _wrong("loss", "The loss does not depend on the trained parameters", "Do not detach it.")
    if count and not 0 < weight < math.inf:
        raise _wrong("loss", f"The weights of {count} items sum to {weight}", "Return a sum above 0.")
    return loss.reshape(()), count, weight


def _loss_of(model: nn.Module, compute: Precision) -> LossFunction:
    """The loss of a model that came without one."""
    if not type(base_model(model)).__name__.endswith(("ForCausalLM", "LMHeadModel")):
        return _own_loss
    token_loss: Any = TokenLoss(model, kind="fused", compute=compute)

    def causal_loss(_: nn.Module, piece: Any) -> tuple[Tensor, int, float]:
        if not isinstance(piece, Mapping) or not {"input_ids", "labels"} <= piece.keys() <= _CAUSAL_KEYS:
            if isinstance(piece, Mapping) and "weights" in piece:  # many forwards take any keyword, and drop it
                extra = ", ".join(sorted(map(str, piece.keys() - _CAUSAL_KEYS))) or "no labels"
                raise _wrong("weights", f"The batch has weights beside {extra}", "Give wrap(..., loss=function).")
            loss, count = _own_loss(model, piece)
            return loss, count, count
        rows = Piece(
            input_ids=piece["input_ids"],
            labels=piece["labels"],
            attention_mask=piece.get("attention_mask"),
            position_ids=piece.get("position_ids"),
            weights=piece.get("weights"),
        )
        targets = targets_of(rows)
        if targets.count == 0:
            return rows.input_ids.new_zeros((), dtype=torch.float32), 0, 0.0
        return token_loss(model_inputs(rows, rows.input_ids.device), targets), targets.count, targets.weight

    return causal_loss


def _own_loss(model: nn.Module, piece: Any) -> tuple[Tensor, int]:
    """The mean loss a model returns, times the items it is the mean of."""
    if isinstance(piece, Mapping):
        output = model(**piece)
    elif isinstance(piece, tuple | list):
        output = model(*piece)
    else:
        output = model(piece)
    mean = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", output)
    if not isinstance(mean, Tensor) or mean.numel() != 1:
        raise _wrong(
            "loss",
            f"{type(model).__name__} returned no loss for the batch",
            "Give wrap(..., loss=function) a function (model, batch) -> (summed loss, count).",
        )
    count = _items_of(piece)
    return mean.reshape(()) * count, count


def _items_of(piece: Any) -> int:
    labels = piece.get("labels") if isinstance(piece, Mapping) else None
    if isinstance(labels, Tensor) and labels.ndim > 1 and not labels.is_floating_point():
        return int((labels != IGNORED).sum())
    return _rows_of(piece)


def _rows_of(batch: Any) -> int:
    """The first dimension of the first tensor. Raises DataError when there is none, or it is 0."""
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    for value in values:
        if isinstance(value, Tensor) and value.ndim:
            if value.shape[0] == 0:
                raise DataError("The batch has 0 rows", "Leave it out.")
            return int(value.shape[0])
    raise DataError("The batch holds no tensor", "Give tensors, or a dict, tuple or list of them.")


def _part(batch: Any, start: int, stop: int, rows: int) -> Any:
    """Rows start..stop of all that has `rows` rows, tensors and lists of plain values; everything else as it is."""
    if isinstance(batch, Mapping):
        return {name: _part(value, start, stop, rows) for name, value in batch.items()}
    if isinstance(batch, tuple | list):
        if len(batch) == rows and not any(isinstance(value, _CONTAINERS) for value in batch):
            return batch[start:stop]  # one plain value a row, such as its name
        return _like(batch, [_part(value, start, stop, rows) for value in batch])
    if isinstance(batch, Tensor) and batch.ndim and batch.shape[0] == rows:
        return batch[start:stop]
    return batch


def _like(batch: Any, values: list[Any]) -> Any:
    """`values` in a container of the kind of `batch`: a list, a tuple, or its own kind of named tuple."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _move(piece: Any, device: torch.device) -> Any:
    if isinstance(piece, Mapping):
        return {name: _move(value, device) for name, value in piece.items()}
    if isinstance(piece, tuple | list):
        return _like(piece, [_move(value, device) for value in piece])
    return piece.to(device, non_blocking=True) if isinstance(piece, Tensor) else piece


def _wrong(field: str, what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=field, what=what, remedy=remedy)])


def _wont_fit(failure: str) -> WontFit:
    first_line = failure.splitlines()[0] if failure else "out of memory"
    return WontFit(
        f"Memory ran out with a single row at a time ({first_line})",
        needed_bytes=0,
        available_bytes=0,
        phase="step",
        suggestions=("Shorten the rows, recompute blocks (recompute='all'), or use a smaller model.",),
    )
