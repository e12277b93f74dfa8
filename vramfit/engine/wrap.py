"""The three lines: an existing PyTorch loop gains precision, accumulation, clipping and memory care.

    import vramfit
    step = vramfit.wrap(model, optimizer, max_grad_norm=1.0)
    for batch in batches:
        print(step(batch).loss)

One call is one optimizer step over one batch. The batch goes through the model in pieces that fit, in the precision
that suits the device; the gradient is that of the whole batch, however it was cut. The model's class, its state_dict,
its mode and its device stay what they are.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import math
import numbers
import reprlib
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from vramfit.config import Auto, Precision
from vramfit.engine.activations import Mode, activation_modes, find_blocks, recompute_blocks, set_activations
from vramfit.engine.evaluation import evaluation_mode
from vramfit.engine.governor import Governor, Reading, StepCost, build_governor
from vramfit.engine.head import base_model
from vramfit.engine.loss import IGNORED, TokenLoss, model_inputs, targets_of
from vramfit.engine.peak import PeakMeter
from vramfit.engine.precision import (
    DTYPES,
    PrecisionChoice,
    autocast,
    check_precision,
    choose_precision,
    fp32_products,
    loss_scaler,
)
from vramfit.engine.recovery import Recovery
from vramfit.engine.resident import Piece, StepResult
from vramfit.engine.update import finish_step
from vramfit.errors import ConfigError, DataError, ModelError, Problem, VramfitError
from vramfit.units import GIB

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
    budget_gib: float = 0.0,
) -> WrappedStep:
    """Make `step(batch)` out of a model and its optimizer. The model stays where it is and what it is.

    `loss` gives (sum, count) of a piece of a batch. Without it, a Hugging Face causal model gets the memory-saving
    token loss, in which a batch's "weights" [B, S] fp32 are each label's share; any other model must
    return its mean loss (`.loss`, `["loss"]`, or the scalar itself), taken to be over rows, or over labels other than
    -100 where labels have more than one dimension.
    `micro_batch` is rows per piece; "auto" is the whole batch until memory runs out, then half, and so on.
    `max_grad_norm=0` does not clip. `recompute` is the number of transformer blocks recomputed in backward. With
    `budget_gib` (GiB of device memory, of RAM without a card) more of them are when a step needs more than 80 % of it,
    and fewer again below 70 %.
    Raises ConfigError with all that is wrong with these, or ModelError when nothing can be trained, when the model lies
    on several devices, or when blocks are to be recomputed and there are none.
    """
    _check_kind(model, optimizer)
    problems = list(
        _problems_of(
            loss=loss,
            precision=precision,
            micro_batch=micro_batch,
            max_grad_norm=max_grad_norm,
            recompute=recompute,
            budget_gib=budget_gib,
        )
    )
    if problems:
        raise ConfigError(problems)
    device = _only_device(model)
    _check_trained(model, optimizer)
    choice = (
        choose_precision(device) if precision == "auto" else PrecisionChoice(compute=precision, reason="you set it")
    )
    check_precision(device, choice.compute)
    if recompute or budget_gib:
        _check_blocks(model, "recompute" if recompute else "budget_gib")
    recompute_blocks(model, len(find_blocks(model)) if recompute == "all" else recompute)
    return WrappedStep(
        model,
        optimizer,
        loss=loss,
        precision=choice,
        micro_batch=micro_batch,
        max_grad_norm=max_grad_norm,
        budget_bytes=int(budget_gib * GIB),
    )


class WrappedStep:
    """One optimizer step per call. `micro_batch` is rows per piece (0: the whole batch), `compute` the precision and
    `precision_reason` why it is that one."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        loss: LossFunction | None,
        precision: PrecisionChoice,
        micro_batch: int | Auto,
        max_grad_norm: float,
        budget_bytes: int = 0,
    ) -> None:
        self.model, self.optimizer, self.max_grad_norm = model, optimizer, max_grad_norm
        self.compute, self.precision_reason = precision.compute, precision.reason
        self.device = next(model.parameters()).device
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self._scaler = loss_scaler(self.device, self.compute, trained=self._parameters)
        self._loss: Any = loss or _loss_of(model, self.device, self.compute)
        self._recovery = Recovery(model, optimizer, device=self.device, scaler=self._scaler, budget_bytes=budget_bytes)
        self._recovery.most_rows = 0 if micro_batch == "auto" else micro_batch
        self._care = _Care(model, optimizer, self.device, budget_bytes) if budget_bytes else None
        if self._care is not None:
            self._recovery.relieve = self._care.governor.relieve
        self._warned = False

    @property
    def micro_batch(self) -> int:
        """Rows that go through the model at once; 0: all of a batch."""
        return self._recovery.most_rows

    @micro_batch.setter
    def micro_batch(self, rows: int) -> None:
        self._recovery.most_rows = rows

    def __call__(self, batch: BatchLike) -> StepResult:
        """One step over all rows of `batch`: tensors, or a dict, tuple or list of them, whose first dimension is rows.

        Returns the mean loss over the batch's items, their number as `tokens`, the gradient norm before clipping, and
        whether the step was refused. Raises DataError for a batch without rows or items, WontFit when memory runs out
        with a single row.
        """
        rows, began = _rows_of(batch), time.perf_counter()
        watched = self._care.watch(_numbers_in(batch)) if self._care else contextlib.nullcontext()
        with watched, fp32_products(self.compute):
            result = self._recovery.run(
                lambda most_rows: self._accumulate(batch, rows, most_rows), self._finish, rows=rows
            )
        if self._care is None:
            return result
        share = min(self.micro_batch or rows, rows) / rows
        told = self._care.after_step(time.perf_counter() - began, _numbers_in(batch), share)
        return dataclasses.replace(result, adapted=told)

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs beside the model's and the optimizer's own state: plain values."""
        return {
            "micro_batch": self.micro_batch,
            "scaler": self._scaler.state_dict() if self._scaler else None,
            "care": self._care.state() if self._care else None,
        }

    def load_state_dict(self, values: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.micro_batch = values["micro_batch"]
        if self._scaler and values["scaler"]:
            self._scaler.load_state_dict(dict(values["scaler"]))
        if self._care and values.get("care"):
            self._care.load_state(values["care"])

    def _accumulate(self, batch: BatchLike, rows: int, size: int) -> tuple[list[Tensor], int, float, float]:
        """(losses, items, their weight, what the gradients must still be multiplied by) of the whole batch.

        What all items weigh is known only after the last piece, so pieces are divided by the rows meanwhile.
        """
        self.optimizer.zero_grad(set_to_none=True)
        if size < rows:
            self._about_to_cut(batch, rows)
        losses, items, total = [], 0, 0.0
        scale = self._scaler.get_scale() if self._scaler else 1.0
        divisor = float(rows)
        for start in range(0, rows, size):
            piece = _move(batch if size >= rows else _part(batch, start, start + size, rows), self.device)
            with autocast(self.device, self.compute):
                loss, count, weight = _checked(self._loss(self.model, piece))
            if size == rows and count:
                divisor = weight
            if count:
                (loss * (scale / divisor)).backward()  # type: ignore[no-untyped-call]
                losses.append(loss.detach())
                items, total = items + count, total + weight
            del loss, piece  # or they would lie beside the next piece's
        if items == 0:
            raise DataError("The batch has 0 items that carry loss", "Leave it out, or check its labels.")
        return losses, items, total, divisor / total

    def _finish(self, made: tuple[list[Tensor], int, float, float], recovered: str) -> StepResult:
        losses, items, weight, factor = made
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

    def _about_to_cut(self, batch: BatchLike, rows: int) -> None:
        """Refuse what cannot be cut by rows, and warn once of what pieces do not leave as it was."""
        _check_rows(batch, rows)
        if not self._warned:
            self._warned = True
            for warning in _changed_by_pieces(self.model):
                warnings.warn(warning, stacklevel=5)


class _Care:
    """The governor of a loop that has a budget, and what it needs to know."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device, budget_bytes: int
    ) -> None:
        self._peak = PeakMeter(model, optimizer, device)
        self._steps = 0

        def apply(modes: Sequence[Mode]) -> None:
            set_activations(model, modes)
            self._peak.measure_again()

        modes = activation_modes(model)
        self.governor: Governor = build_governor(
            modes, device=device, apply=apply, budget_bytes=budget_bytes, fixed=True
        )
        self._model = model

    def watch(self, numbers: int) -> contextlib.AbstractContextManager[None]:
        return self._peak.watch(numbers)

    def after_step(self, seconds: float, numbers: int, share: float) -> tuple[str, ...]:
        self._steps += 1
        allocated, reserved = self._peak.read()
        at_rest, reach = self._peak.around()
        reading = Reading(allocated=allocated, reserved=reserved, at_rest=at_rest, reach=reach)
        cost = StepCost(step=self._steps, seconds=seconds, tokens=numbers, largest_tokens=math.ceil(numbers * share))
        return tuple(action.message for action in self.governor.after_step(reading, cost))

    def state(self) -> dict[str, Any]:
        return {"steps": self._steps, **self.governor.state()}

    def load_state(self, values: Mapping[str, Any]) -> None:
        modes = set_activations(self._model, values["modes"])
        self.governor.load_state(values, modes=modes)
        self._steps = values["steps"]


def _check_kind(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """What a step of ours would silently do wrongly is refused by name."""
    name = type(model).__name__
    if isinstance(model, nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise ModelError(
            f"{name} shares a batch between devices itself, and a step runs on one",
            "Wrap the model inside it (model.module), once per process.",
        )
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise _wrong(
            "optimizer",
            f"The optimizer is a {type(optimizer).__name__}, and a step has one torch.optim.Optimizer",
            "Call wrap once for each model and its optimizer.",
        )
    if isinstance(optimizer, torch.optim.LBFGS):
        raise _wrong("optimizer", "LBFGS evaluates a batch several times a step", "Choose another optimizer.")
    sparse = next((part for part in model.modules() if getattr(part, "sparse", False) is True), None)
    if sparse is not None:
        raise ModelError(
            f"{name} has a {type(sparse).__name__} with sparse gradients, which have no norm and are not clipped",
            "Make it with sparse=False.",
        )


def _problems_of(
    *, loss: Any, precision: Any, micro_batch: Any, max_grad_norm: Any, recompute: Any, budget_gib: Any
) -> Iterator[Problem]:
    """Everything that is wrong with the arguments beside model and optimizer, whatever their kind."""
    if loss is not None and not callable(loss):
        what = f"loss is {_shown(loss)}, which cannot be called"
        yield Problem(field="loss", what=what, remedy="Give a function (model, batch) -> (summed loss, count).")
    if precision not in ("auto", *DTYPES):
        what = f"precision is {_shown(precision)}, which is none of the {len(DTYPES)} there are"
        yield Problem(field="precision", what=what, remedy=f"Choose auto, {', '.join(DTYPES)}.")
    if micro_batch != "auto" and not (_is_whole(micro_batch) and micro_batch >= 1):
        what = f"micro_batch is {_shown(micro_batch)}, and a piece has a whole number of rows, 1 at least"
        yield Problem(field="micro_batch", what=what, remedy="Give 1 or more, or auto.")
    if not (_is_number(max_grad_norm) and max_grad_norm >= 0):
        what = f"max_grad_norm is {_shown(max_grad_norm)}, and a norm is a number, 0 at least"
        yield Problem(field="max_grad_norm", what=what, remedy="Give the most the norm may be, or 0 not to clip.")
    if recompute != "all" and not (_is_whole(recompute) and recompute >= 0):
        what = f"recompute is {_shown(recompute)}, and it is a whole number of blocks, 0 at least"
        yield Problem(field="recompute", what=what, remedy="Give 0 or more, or all.")
    if not (_is_number(budget_gib) and 0 <= budget_gib < math.inf):
        what = f"budget_gib is {_shown(budget_gib)}, and a budget is a finite number of GiB, more than 0"
        yield Problem(field="budget_gib", what=what, remedy="Give more than 0, or leave it out.")


def _is_whole(value: Any) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _shown(value: Any) -> str:
    shown: str = reprlib.repr(value)
    return shown


def _check_blocks(model: nn.Module, wish: str) -> None:
    try:
        blocks = find_blocks(model)
    except ModelError:
        raise ModelError(
            f"{wish}: {type(model).__name__} has no list of blocks (torch.nn.ModuleList) whose activations could be "
            "recomputed",
            f"Leave {wish} out, or keep the model's repeated parts in a ModuleList.",
        ) from None
    others = _other_blocks(model, blocks)
    if others:
        warnings.warn(
            f"{wish}: the {len(blocks)} blocks of {_name_in(model, blocks)} are recomputed; those of "
            f"{', '.join(others)} keep their activations.",
            stacklevel=3,
        )


def _other_blocks(model: nn.Module, blocks: nn.ModuleList) -> list[str]:
    """Lists of blocks beside the one that is recomputed, such as an encoder's: as long, and no part of another."""
    lists = [(name, part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList) and part]
    inside = {id(part) for _, each in lists for block in each for part in block.modules()}
    outermost = [(name, part) for name, part in lists if id(part) not in inside and part is not blocks]
    return [name for name, part in outermost if len(part) >= max(2, len(blocks) // 2)]


def _name_in(model: nn.Module, part: nn.Module) -> str:
    found: str = next(name for name, each in model.named_modules() if each is part)
    return found


def _changed_by_pieces(model: nn.Module) -> list[str]:
    """Why a batch in pieces is not the batch for this model."""
    found = []
    norms = [part for part in model.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm) and part.training]
    if norms:
        found.append(
            f"{type(model).__name__} has {len(norms)} layers of batch normalisation: they see the rows of a piece, not "
            "of the whole batch, so the gradient is not that of the whole batch. Give a micro_batch that always fits, "
            "put them in evaluation mode, or use another normalisation."
        )
    kinds = (nn.RNNBase, nn.MultiheadAttention)
    times = [part for part in model.modules() if isinstance(part, kinds) and not part.batch_first]
    if times:
        found.append(
            f"{type(model).__name__} has a {type(times[0]).__name__} with batch_first=False, and a batch is cut along "
            "its first dimension: that must be rows, not time."
        )
    return found


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


def _loss_of(model: nn.Module, device: torch.device, compute: Precision) -> LossFunction:
    """The loss of a model that came without one."""
    base = base_model(model)
    plain = getattr(base, "_orig_mod", base)  # behind torch.compile
    if not _predicts_the_next_token(model if plain is base else plain):
        return _own_loss
    if plain is not base:
        return lambda module, piece: _own_loss(module, piece, shifted=True)
    token_loss: Any = TokenLoss(model, device=device, kind="fused", compute=compute)

    def causal_loss(_: nn.Module, piece: Any) -> tuple[Tensor, int, float]:
        if isinstance(piece, Mapping):
            piece = {name: value for name, value in piece.items() if value is not None and name != "use_cache"}
        if not isinstance(piece, Mapping) or not {"input_ids", "labels"} <= piece.keys() <= _CAUSAL_KEYS:
            if isinstance(piece, Mapping) and "weights" in piece:  # many forwards take any keyword, and drop it
                extra = ", ".join(sorted(map(str, piece.keys() - _CAUSAL_KEYS))) or "no labels"
                raise _wrong("weights", f"The batch has weights beside {extra}", "Give wrap(..., loss=function).")
            loss, count = _own_loss(model, piece, shifted=True)
            return loss, count, count
        return _summed(token_loss, piece)

    return causal_loss


def _summed(token_loss: Any, piece: Mapping[str, Any]) -> tuple[Tensor, int, float]:
    """(the loss summed over the tokens that are predicted, their number, the sum of their weights)."""
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


def _predicts_the_next_token(model: nn.Module) -> bool:
    """Whether a model's own loss is the usual one of a causal language model: its name says so, and on two short rows,
    one of them padded, it is the same number. Some add a loss of their routers, smooth it, or do not shift labels."""
    base = base_model(model)
    named = type(base).__name__.endswith(("ForCausalLM", "LMHeadModel"))
    if not named or not hasattr(base, "get_input_embeddings") or not hasattr(base, "config"):
        return False
    table = base.get_input_embeddings().weight
    ids = (torch.arange(16, device=table.device) * 7 % len(table)).view(2, 8)
    mask = torch.ones_like(ids)
    mask[1, 5:] = 0
    labels = ids.masked_fill(mask == 0, IGNORED)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    exact = table.dtype == torch.float32
    try:
        with evaluation_mode(model):
            own = model(**inputs).loss.item()
            loss = TokenLoss(model, device=table.device, kind="full", compute="fp32" if exact else "bf16")
            total, count, _ = _summed(loss, inputs)
    except (RuntimeError, TypeError, ValueError, AttributeError, VramfitError):
        return False
    return math.isclose(own, total.item() / count, rel_tol=1e-4 if exact else 1e-2)


def _own_loss(model: nn.Module, piece: Any, *, shifted: bool = False) -> tuple[Tensor, int]:
    """The mean loss a model returns, times the items it is the mean of: where it is `shifted`, a row's first label is
    none."""
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
    count = _items_of({**piece, "labels": piece["labels"][:, 1:]} if shifted and "labels" in piece else piece)
    if count == 0:  # a mean of nothing is no number
        return mean.new_zeros(()), 0
    return mean.reshape(()) * count, count


def _items_of(piece: Any) -> int:
    labels = piece.get("labels") if isinstance(piece, Mapping) else None
    if isinstance(labels, Tensor) and labels.ndim and not labels.is_floating_point():
        return int((labels != IGNORED).sum())
    return _rows_of(piece)


def _rows_of(batch: Any) -> int:
    """The first dimension that most tensors share. Raises DataError when there is none, or it is 0."""
    sizes = _row_counts(batch)
    if not sizes:
        raise DataError("The batch holds no tensor", "Give tensors, or a dict, tuple or list of them.")
    rows = Counter(sizes).most_common(1)[0][0]
    if rows == 0:
        raise DataError("The batch has 0 rows", "Leave it out.")
    return rows


def _check_rows(batch: Any, rows: int) -> None:
    """Raises DataError for a batch that cannot be cut, because nobody can say what its rows are."""
    parts = list(_parts(batch))
    if any(isinstance(part, PackedSequence) for part in parts):
        raise DataError(
            "The batch holds a PackedSequence, which cannot be cut into rows",
            "Give padded rows and their lengths, and pack them in the model or in the loss function.",
        )
    if any(isinstance(part, list) and len(part) == rows and _is_columns(part, rows) for part in parts):
        raise DataError(
            f"The batch holds a list of {rows} tensors with {rows} rows each, which may be rows or columns",
            "Give a tuple where each tensor holds something of all rows.",
        )
    counted = Counter(_row_counts(batch)).most_common(2)
    if len(counted) == 2 and counted[0][1] == counted[1][1]:
        one, other = sorted((counted[0][0], counted[1][0]))
        raise DataError(
            f"The batch has as many tensors with {one} rows as with {other}, so it cannot be cut",
            "Give tensors whose first dimension is rows; keep what belongs to all rows in the loss function.",
        )


def _row_counts(batch: Any) -> list[int]:
    """The first dimension of every tensor; where all are in lists with one entry a row, the lengths of those."""
    parts = list(_parts(batch))
    tensors = [part.shape[0] for part in parts if isinstance(part, Tensor) and part.ndim]
    return tensors or [len(part) for part in parts if isinstance(part, list) and part and _holds_tensor(part)]


def _parts(batch: Any, *, inside: bool = False) -> Iterator[Any]:
    """Everything a batch is made of, in columns: tensors, and lists with one entry a row as they are.

    The outermost list is what a DataLoader makes of a tuple: columns, unless it holds one dict a row.
    """
    one_a_row = isinstance(batch, list) and (inside or (batch and all(isinstance(each, Mapping) for each in batch)))
    if one_a_row or isinstance(batch, PackedSequence):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _parts(value, inside=True)
    elif isinstance(batch, tuple | list):
        for value in batch:
            yield from _parts(value, inside=True)
    elif _is_record(batch):
        for field in dataclasses.fields(batch):
            yield from _parts(getattr(batch, field.name), inside=True)
    else:
        yield batch


def _is_columns(values: list[Any], rows: int) -> bool:
    """Whether a list is several tensors of all rows, not one entry a row."""
    return all(isinstance(value, Tensor) and value.ndim > 0 and value.shape[0] == rows for value in values)


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return any(map(_holds_tensor, value)) if isinstance(value, tuple | list) else isinstance(value, Tensor)


def _numbers_in(batch: Any) -> int:
    """The numbers of the largest tensor: what a step's memory and time grow with."""
    return max((part.numel() for part in _parts(batch) if isinstance(part, Tensor)), default=1)


def _is_record(batch: Any) -> bool:
    return dataclasses.is_dataclass(batch) and not isinstance(batch, type)


def _part(batch: Any, start: int, stop: int, rows: int) -> Any:
    """Rows start..stop of all that has `rows` rows, tensors and lists of anything; everything else as it is."""
    if isinstance(batch, Tensor):
        return batch[start:stop] if batch.ndim and batch.shape[0] == rows else batch
    if isinstance(batch, list) and len(batch) == rows and not _is_columns(batch, rows):
        return batch[start:stop]
    if isinstance(batch, tuple) and len(batch) == rows and not any(isinstance(value, _CONTAINERS) for value in batch):
        return batch[start:stop]  # one plain value a row, such as its name
    return _each(batch, lambda value: _part(value, start, stop, rows))


def _each(batch: Any, change: Callable[[Any], Any]) -> Any:
    """A batch of the same kind whose values are changed."""
    if isinstance(batch, Mapping):
        values = {name: change(value) for name, value in batch.items()}
        if not isinstance(batch, MutableMapping):
            return values
        made = copy.copy(batch)  # keeps what the class adds: BatchEncoding's attributes, an own dict's methods
        made.update(values)
        return made
    if isinstance(batch, tuple | list):
        return _like(batch, [change(value) for value in batch])
    if _is_record(batch):
        fields = {field.name: change(getattr(batch, field.name)) for field in dataclasses.fields(batch) if field.init}
        return dataclasses.replace(batch, **fields)
    return batch


def _like(batch: Any, values: list[Any]) -> Any:
    """`values` in a container of the kind of `batch`: a list, a tuple, or its own kind of named tuple."""
    return type(batch)(*values) if hasattr(batch, "_fields") else type(batch)(values)


def _move(piece: Any, device: torch.device) -> Any:
    if isinstance(piece, Tensor):
        return piece.to(device, non_blocking=True)
    if isinstance(piece, PackedSequence):
        return piece.to(device)  # type: ignore[arg-type]
    return _each(piece, lambda value: _move(value, device))


def _wrong(field: str, what: str, remedy: str) -> ConfigError:
    return ConfigError([Problem(field=field, what=what, remedy=remedy)])
