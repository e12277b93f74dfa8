"""The executor for models that stay on the device: one call is one optimizer step."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from vramfit.config import LossChoice
from vramfit.engine.activations import Mode, plan_activations, set_activations, tighter
from vramfit.engine.compiling import CompiledBlocks
from vramfit.engine.evaluation import evaluation_mode, has_finite_weights
from vramfit.engine.governor import Governor, Reading
from vramfit.engine.host_states import HostStates
from vramfit.engine.later import Later
from vramfit.engine.loss import Batch, Targets, TokenLoss, model_inputs, targets_of
from vramfit.engine.objective import Objective, SummedLoss
from vramfit.engine.optimizer_state import load_optimizer_state, optimizer_state
from vramfit.engine.optimizers import build_step_end
from vramfit.engine.peak import PeakMeter
from vramfit.engine.precision import autocast, fp32_products, loss_scaler
from vramfit.engine.raised import RaisedParts
from vramfit.engine.randomness import random_state, restart_rounding, set_random_state
from vramfit.engine.recovery import Recovery, attempt
from vramfit.engine.update import Around
from vramfit.engine.waits import Waits
from vramfit.errors import CheckpointError, DataError
from vramfit.planning.plan import Plan

MODEL, OPTIMIZER, RANDOM = "model.", "optimizer.", "random."
"""What a checkpoint's tensors are called, before their own names."""
_PLAIN_LOSS = LossChoice()
_MUCH: Final = 0.1
"""Of the budget: gradients of more may be more than what half a micro-batch frees."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """One optimizer step. `loss` is the mean over `tokens` trained tokens, weighted where the data gives weights, and
    `grad_norm` the global norm before clipping.

    `skipped` is True when the weights were left as they were: fp16's scaler refused overflowing gradients, or loss or
    gradient were not finite, and then `problem` is one sentence about it (also when the loss scale has collapsed).
    `recovered` is one sentence when memory ran out on the way and the step was done again in smaller pieces.
    `adapted` is one sentence each for what a governor did (`vramfit.wrap` with a budget; a run tells them as events).
    `padded_tokens` counts padding too, and `largest_tokens` are those of what went through the model at once. `waits`
    is what the device waited for, where weights visit it.
    """

    loss: float
    tokens: int
    grad_norm: float
    skipped: bool = False
    loss_scale: float | None = None
    problem: str = ""
    recovered: str = ""
    adapted: tuple[str, ...] = ()
    padded_tokens: int = 0
    largest_tokens: int = 0
    waits: Waits | None = field(default=None, compare=False)


class Trained(NamedTuple):
    """How many tokens carry loss, and the sum of their weights, by which the summed loss is divided."""

    tokens: int
    weight: float

    @classmethod
    def of(cls, targets: Iterable[Targets]) -> Trained:
        counts = [(each.count, each.weight) for each in targets]
        return cls(sum(tokens for tokens, _ in counts), math.fsum(weight for _, weight in counts))


class Chosen(Mapping[str, Tensor]):
    """Some of a checkpoint's tensors, which are read when they are asked for; `prefix` is left out of their names."""

    def __init__(self, tensors: Mapping[str, Tensor], names: Iterable[str], *, prefix: str = "") -> None:
        self._tensors, self._prefix = tensors, prefix
        self._names = {name.removeprefix(prefix): None for name in names}

    @classmethod
    def under(cls, tensors: Mapping[str, Tensor], prefix: str) -> Chosen:
        return cls(tensors, [name for name in tensors if name.startswith(prefix)], prefix=prefix)

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._tensors[self._prefix + name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Rows of a micro-batch, as many as go through the model at once. Tensors [B, S] where the data was made."""

    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None
    position_ids: Tensor | None
    weights: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> Piece:
        return cls(
            input_ids=batch.input_ids,
            labels=batch.labels,
            attention_mask=batch.attention_mask,
            position_ids=batch.position_ids,
            weights=batch.weights,
        )

    @property
    def rows(self) -> int:
        return self.input_ids.shape[0]

    def part(self, start: int, stop: int) -> Piece:
        mask, positions, weights = self.attention_mask, self.position_ids, self.weights
        return Piece(
            input_ids=self.input_ids[start:stop],
            labels=self.labels[start:stop],
            attention_mask=None if mask is None else mask[start:stop],
            position_ids=None if positions is None else positions[start:stop],
            weights=None if weights is None else weights[start:stop],
        )

    def cut(self, most_rows: int) -> list[Piece]:
        if most_rows >= self.rows:
            return [self]
        return [self.part(start, start + most_rows) for start in range(0, self.rows, most_rows)]


class ResidentExecutor:
    """Runs optimizer steps on a causal language model that lies on `plan.device`.

    `activations` is how each block holds its activations: as planned, until `set_activations`; () where all are kept.
    `loss_reason` says why the loss is computed in another way than planned, "" when it is not; `leaves_liger` is
    whether Liger's kernel is there for a loss that is planned in chunks. `loss` is what is added to the cross-entropy
    that is minimised; what steps and evaluations report is the cross-entropy alone.
    `evaluation_rows` go through the model at once in an evaluation (0: as in training), and `evaluation_recovered` is
    one sentence when memory ran out in the last one and the rest was done in smaller pieces.
    `max_grad_norm=0` turns clipping off; the norm is reported all the same.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float = 1.0,
        loss: LossChoice = _PLAIN_LOSS,
    ) -> None:
        self.model, self.plan, self.optimizer = model, plan, optimizer
        self.device = self._device()
        self._trained = {name: value for name, value in model.named_parameters() if value.requires_grad}
        self._loss = TokenLoss(
            model,
            device=self.device,
            kind=plan.loss,
            chunk_tokens=plan.loss_chunk_tokens,
            compute=plan.compute,
            objective=Objective(z_loss=loss.z_loss, label_smoothing=loss.label_smoothing),
        )
        self.loss_kind, self.loss_reason = self._loss.kind, self._loss.reason
        self.leaves_liger = self._loss.may_be_ligers and self.loss_kind == "chunked" and not self.loss_reason
        self.raised = RaisedParts(model, self._loss, plan.compute)
        self._scaler = loss_scaler(plan.device, plan.compute, trained=list(self._trained.values()))
        self._end = build_step_end(
            plan,
            optimizer,
            parameters=list(self._trained.values()),
            scaler=self._scaler,
            max_grad_norm=max_grad_norm,
        )
        self._peak = PeakMeter(model, optimizer, self.device)
        self.governor: Governor | None = None
        self.compiled: CompiledBlocks | None = None  # the model's, where they were made before this
        self.recovery = Recovery(
            model,
            optimizer,
            device=self.device,
            scaler=self._scaler,
            rows_are="sequences",
            budget_bytes=plan.budget_bytes,
        )
        self.evaluation_rows = 0
        self.evaluation_recovered = ""
        restart_rounding(self.device)
        self.activations = plan_activations(model, plan)
        model.train()

    def step(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        """One optimizer step over all `micro_batches` at `learning_rate`.

        The gradient is that of the weighted loss summed over all trained tokens, divided by the sum of their weights
        (their number, without weights): how the step is cut into micro-batches does not change it. Raises DataError
        when no token carries loss, and WontFit when memory runs out even with a single sequence at a time.
        """
        batches = [Piece.of(batch) for batch in micro_batches]
        largest = max((piece.input_ids.numel() for batch in batches for piece in self._cut(batch)), default=0)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        with self._peak.watch(largest), fp32_products(self.raised.compute):
            result = self.recovery.run(
                lambda most_rows: self._passes([piece for batch in batches for piece in batch.cut(most_rows)]),
                lambda made, recovered: self._finish(*made, recovered),
                rows=max((batch.rows for batch in batches), default=1),
                largest=_a_single(batches),
            )
        sizes = [piece.input_ids.numel() for batch in batches for piece in self._cut(batch)]
        return dataclasses.replace(result, padded_tokens=sum(sizes), largest_tokens=max(sizes))

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[float, int]:
        """(weighted mean loss over the trained tokens, their number), without dropout and without changing anything.

        Where memory runs out, the pieces are halved and what is left is done in those; steps go on with theirs. Raises
        DataError when no token carries loss, and WontFit when memory runs out even with a single sequence at a time.
        """
        self.evaluation_recovered = ""
        total, tokens, weight = 0.0, 0, 0.0
        with evaluation_mode(self.model), fp32_products(self.raised.compute):
            for batch in micro_batches:
                waiting = self._evaluated(self.pieces(batch))
                while waiting:
                    targets = targets_of(waiting[0])
                    loss, failure = self._try_loss(waiting[0], targets)
                    if loss is None:
                        self._evaluate_fewer(waiting[0], failure)
                        waiting = self._evaluated(waiting)
                        continue
                    total, tokens, weight = total + loss, tokens + targets.count, weight + targets.weight
                    del waiting[0]
        if tokens == 0:
            raise _no_tokens("The held-out share")
        return total / weight, tokens

    @property
    def loss_scale(self) -> float:
        """fp16's, as it is now; 1 without scaling."""
        return self._scaler.get_scale() if self._scaler else 1.0

    def pieces(self, batch: Batch) -> list[Piece]:
        """A micro-batch as it goes through the model: in one piece, unless memory has shown to bear less."""
        return self._cut(Piece.of(batch))

    def measure(self, piece: Piece, *, scale: float = 1.0) -> tuple[float, float]:
        """(mean loss, gradient norm) of a piece in training mode, without a trace: no gradient is accumulated.

        Backward is given the mean loss times `scale`, as in a step with fp16. Random numbers are drawn.
        """
        loss, gradients = self.gradients(piece, scale=scale)
        # Summed in fp32 whatever the gradients' format: bf16 would round the norm by more than a drift worth telling.
        made = [each for each in gradients.values() if each is not None]
        norms = [torch.linalg.vector_norm(each, dtype=torch.float32) for each in made]
        norm = torch.linalg.vector_norm(torch.stack(norms))
        return loss, norm.item() / scale

    def gradients(self, piece: Piece, *, scale: float = 1.0) -> tuple[float, dict[str, Tensor | None]]:
        """(mean loss, the gradient of every trained parameter) of a piece, None where none arrives; as `measure`."""
        targets = targets_of(piece)
        factor = scale / targets.weight
        with fp32_products(self.raised.compute):
            loss = self._summed_loss(piece, targets, gradient_scale=factor)
            made = torch.autograd.grad(loss * factor, list(self._trained.values()), allow_unused=True)
        return loss.item() / targets.weight, dict(zip(self._trained, made, strict=True))

    def rehearse(self, micro_batches: Iterable[Batch]) -> None:
        """A step's forward and backward passes without its end. Gradients stay in `.grad`; random numbers are drawn.

        Not for a plan that steps in backward, whose weights would change.
        """
        with fp32_products(self.raised.compute):
            self._passes([piece for batch in micro_batches for piece in self.pieces(batch)])

    def rehearsed(self, micro_batches: Iterable[Batch]) -> Reading:
        """Memory around a rehearsal, of which no gradient is left: no optimizer's state is there before the first step.

        Raises as the passes do. What was read of the steps before is forgotten.
        """
        batches = list(micro_batches)
        self._peak.read()
        largest = max((piece.input_ids.numel() for batch in batches for piece in self.pieces(batch)), default=0)
        with self._peak.watch(largest):
            self.rehearse(batches)
        self.optimizer.zero_grad(set_to_none=True)
        reading = self.reading()
        self._peak.measure_again()
        return reading

    def set_activations(self, modes: Sequence[Mode]) -> None:
        """Another mode for each block, from the next step on."""
        self.activations = set_activations(self.model, modes)
        self._peak.measure_again()

    def govern(self, governor: Governor) -> None:
        """Let it change how activations are held, between steps and when memory runs out inside one."""
        self.governor = governor
        self.recovery.relieve = governor.relieve
        self.recovery.relieves_first = self._would_wait()

    def _would_wait(self) -> bool:
        """Whether a step is one pass, and so many gradients would wait for the other half of it that halving it may
        need more memory."""
        gradients = sum(value.nbytes for value in self._trained.values())
        return self.plan.accumulation == 1 and gradients > _MUCH * self.plan.budget_bytes > 0

    def reading(self) -> Reading:
        """Memory around the last step: its peaks (as `memory`, which it stands for), what lies there between steps."""
        allocated, reserved = self._peak.read()
        at_rest, reach = self._peak.around()
        return Reading(allocated=allocated, reserved=reserved, at_rest=at_rest, reach=reach)

    def memory(self) -> tuple[int, int]:
        """(allocated, reserved) peak bytes on the device since the last call; see `vramfit.engine.peak`."""
        return self._peak.read()

    def state(self) -> tuple[dict[str, Tensor | Later], dict[str, Any]]:
        """Everything a resume needs, as tensors for safetensors and plain values for JSON.

        Trained parameters and buffers, optimizer states, random states; the loss scaler. The tensors are the live
        ones, not copies: write them before the next step.
        """
        tensors: dict[str, Tensor | Later] = {
            MODEL + name: tensor.detach() for name, tensor in self._saved_tensors().items()
        }
        states, optimizer_values = optimizer_state(self.optimizer, self._trained)
        tensors |= {OPTIMIZER + name: state for name, state in states.items()}
        for name, state in random_state(self.device).items():
            tensors[RANDOM + name] = state
        # Which rows go through together decides the last bits, and which dropout they meet.
        return tensors, {
            "scaler": self._scaler.state_dict() if self._scaler else None,
            "most_rows": self.recovery.most_rows,
            "evaluation_rows": self.evaluation_rows,
            "optimizer": optimizer_values,
            "step_end": self._end.values(),
            "raised": list(self.raised.now),
            "governor": self.governor.state() if self.governor else {},
            "activations": list(self.activations),
        }

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Put the result of `state` back, bit for bit, reading each of `tensors` once.

        Raises CheckpointError when it is of another model.
        """
        weights = Chosen.under(tensors, MODEL)
        self._load_weights(weights)
        self._load_optimizer(Chosen.under(tensors, OPTIMIZER), values.get("optimizer", {}), weights)
        self._end.load_values(values.get("step_end", {}))
        if self._scaler and values.get("scaler"):
            self._scaler.load_state_dict(dict(values["scaler"]))
        self.recovery.most_rows = int(values.get("most_rows", 0))
        self.evaluation_rows = int(values.get("evaluation_rows", 0))
        self.raised.set(values.get("raised", ()))
        self._load_activations(values)
        set_random_state(self.device, dict(Chosen.under(tensors, RANDOM)))

    def weights_were_changed(self) -> None:
        """From outside: copies that are trained in their place follow."""
        if isinstance(self.optimizer, HostStates):
            self.optimizer.copy_masters()

    def has_finite_weights(self) -> bool:
        """Whether all trained weights are numbers."""
        return has_finite_weights(self.model)

    parts: Callable[[], list[dict[str, Tensor | Later]]] | None = None
    """Gives the model with its adapters merged, for an export, where it is not in memory as a whole."""

    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _load_activations(self, values: Mapping[str, Any]) -> None:
        if values.get("activations"):
            # What was compressed stays so, or the last bits would change; what memory bears less of now goes on so.
            keep: Mode = "keep"
            planned = self.activations or (keep,) * len(values["activations"])
            self.set_activations([tighter(now, then) for now, then in zip(planned, values["activations"], strict=True)])
        if self.governor:
            self.governor.load_state(values.get("governor", {}), modes=self.activations)

    @torch.no_grad()
    def _load_weights(self, saved: Mapping[str, Tensor]) -> None:
        live = self._saved_tensors()
        _check_same(saved.keys(), live.keys())
        for name, tensor in live.items():
            value = saved[name]
            if value.shape != tensor.shape:
                raise _of_another_model(1, name)
            tensor.copy_(value)

    def _load_optimizer(
        self, saved: Mapping[str, Tensor], values: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        """`weights` are those of the checkpoint, where they have to be read again."""
        load_optimizer_state(self.optimizer, self._trained, saved, values)

    def _cut(self, piece: Piece) -> list[Piece]:
        return piece.cut(self.recovery.most_rows or piece.rows)

    def _try_loss(self, piece: Piece, targets: Targets) -> tuple[float | None, str]:
        """(summed loss, ""), or (None, why memory ran out)."""
        if targets.count == 0:
            return 0.0, ""
        return attempt(lambda: self._sums(piece, targets).cross_entropy.item(), self.device)

    def _evaluated(self, pieces: Iterable[Piece]) -> list[Piece]:
        """Pieces as they go through the model in an evaluation."""
        return [part for piece in pieces for part in piece.cut(self.evaluation_rows or piece.rows)]

    def _evaluate_fewer(self, piece: Piece, failure: str) -> None:
        """Memory ran out with `piece`: half of its rows from now on, told once for an evaluation."""
        self.evaluation_rows = self.recovery.smaller(
            piece.rows,
            failure,
            f"in an evaluation, with {_a_single([piece])} at a time",
            "Hold out shorter rows, or turn evaluations off (output.evaluate_every 0).",
        )
        self.evaluation_recovered = (
            f"Memory ran out in an evaluation; evaluations go on with {self.evaluation_rows} sequences at a time, and "
            "training with as many as before"
        )

    def _passes(self, pieces: Sequence[Piece]) -> tuple[list[Tensor], Trained]:
        """The step's forward and backward, as often as its end needs them; buffers move once."""
        passes = 0

        def run(around: Around) -> tuple[list[Tensor], Trained]:
            nonlocal passes
            passes += 1
            if passes > 1:
                self.recovery.put_buffers_back()
            return self._accumulate(pieces, around)

        return self._end.passes(run)

    def _accumulate(self, pieces: Sequence[Piece], around: Around) -> tuple[list[Tensor], Trained]:
        """Gradients of the whole step in `.grad`, unless `around` the last backward they are used up; and its losses
        piece by piece."""
        targets = [targets_of(piece) for piece in pieces]
        trained = Trained.of(targets)
        if trained.tokens == 0:
            raise _no_tokens("This step")
        # The one division of the step: it enters backward as the first gradient, with fp16's scale in the same factor.
        factor = self.loss_scale / trained.weight
        losses: list[Tensor] = []
        waiting = [(piece, each) for piece, each in zip(pieces, targets, strict=True) if each.count]
        for number, (piece, each) in enumerate(waiting, start=1):
            sums = self._sums(piece, each, gradient_scale=factor)
            losses.append(sums.cross_entropy)
            with around(losses) if number == len(waiting) else contextlib.nullcontext():
                (sums.objective * factor).backward()  # type: ignore[no-untyped-call]
        return losses, trained

    def _sums(self, piece: Piece, targets: Targets, *, gradient_scale: float = 1.0) -> SummedLoss:
        on_device = Targets(
            positions=targets.positions.to(self.device, non_blocking=True),
            tokens=targets.tokens.to(self.device, non_blocking=True),
            weights=None if targets.weights is None else targets.weights.to(self.device, non_blocking=True),
        )
        with self._computing():
            return self._loss.sums(model_inputs(piece, self.device), on_device, gradient_scale=gradient_scale)

    def _computing(self) -> contextlib.AbstractContextManager[Any]:
        """Autocast, where anything is to be cast: weights trained in the format they are computed in are not."""
        in_one_format = self.plan.trained_format == self.raised.compute and not self.plan.lora_rank
        if in_one_format and not self.raised.now:
            return contextlib.nullcontext()
        return autocast(self.device, self.raised.compute)

    def _summed_loss(self, piece: Piece, targets: Targets, *, gradient_scale: float = 1.0) -> Tensor:
        """What is minimised."""
        return self._sums(piece, targets, gradient_scale=gradient_scale).objective

    def _finish(self, losses: list[Tensor], trained: Trained, recovered: str) -> StepResult:
        finish = self._end.finish(losses)
        return StepResult(
            loss=finish.loss_sum / trained.weight,
            tokens=trained.tokens,
            grad_norm=finish.grad_norm,
            skipped=finish.skipped,
            loss_scale=finish.loss_scale,
            problem=finish.problem,
            recovered=recovered,
        )

    def _saved_tensors(self) -> dict[str, Tensor]:
        """Trained parameters, and buffers that belong to the model's file. Frozen weights come from their source."""
        buffers = {
            f"{prefix}.{name}".removeprefix("."): buffer
            for prefix, module in self.model.named_modules()
            for name, buffer in module.named_buffers(recurse=False)
            if name not in module._non_persistent_buffers_set
        }
        return {**self._trained, **buffers}


def _a_single(pieces: Sequence[Piece]) -> str:
    longest = max((piece.input_ids.shape[1] for piece in pieces), default=0)
    return f"a single sequence of {longest} tokens"


def _no_tokens(where: str) -> DataError:
    return DataError(
        f"{where} has 0 trained tokens", "Check which parts of the data carry loss (data.trained_on), and max_length."
    )


def _check_same(saved: Set[str], live: Set[str]) -> None:
    wrong = sorted(saved ^ live)
    if wrong:
        raise _of_another_model(len(wrong), wrong[0])


def _of_another_model(count: int, first: str) -> CheckpointError:
    return CheckpointError(
        f"The checkpoint is of another model: {count} tensors differ, the first is {first}",
        "Resume with the settings the run was started with.",
    )
