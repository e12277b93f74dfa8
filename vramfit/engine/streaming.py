"""The executor for models that do not stay on the device: block by block, each brought in once for a whole step.

Forward takes all micro-batches of the step through one block before the next block comes (layer-outer accumulation),
so the traffic of a step is two passes over the weights however many micro-batches it has. Only the blocks' inputs are
kept; backward walks the blocks in reverse, computes each again and takes its gradients, micro-batch by micro-batch in
the order a resident run has, so that sums are made in the same order and the numbers are the same bits. Where only the
last blocks train, those before them are brought once, for forward alone: no input of theirs waits, and the way back
turns at the first that trains.

Dropout is drawn block by block instead of micro-batch by micro-batch: the same distribution, other numbers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from vramfit.engine.evaluation import evaluation_mode
from vramfit.engine.governor import Reading, Stay
from vramfit.engine.head import base_model
from vramfit.engine.later import Later
from vramfit.engine.loss import Batch, Targets, model_inputs, targets_of
from vramfit.engine.optimizer_state import check_kind
from vramfit.engine.peak import VisitsPeak
from vramfit.engine.precision import fp32_products
from vramfit.engine.randomness import draws, random_state, set_random_state
from vramfit.engine.recovery import attempt, halves
from vramfit.engine.resident import (
    MODEL,
    OPTIMIZER,
    Chosen,
    Piece,
    ResidentExecutor,
    StepResult,
    Trained,
    _no_tokens,
)
from vramfit.engine.split_blocks import SplitBlocks
from vramfit.engine.step_of_blocks import AfterLastBlock, BesideBackward
from vramfit.engine.tied import TiedGradient
from vramfit.engine.trained_blocks import TrainedBlocks
from vramfit.engine.update import Around, norms_of, total_norm
from vramfit.engine.visiting import Call, VisitedBlocks
from vramfit.engine.waiting import WaitingInputs
from vramfit.engine.waits import Waits
from vramfit.errors import ModelError
from vramfit.models.adapters import merged_tensors
from vramfit.planning.plan import Plan

HandOver = Callable[[int, Mapping[str, Tensor]], None]
"""(block, gradients of its weights by their names there)"""


class StreamingExecutor(ResidentExecutor):
    """Optimizer steps on a model whose blocks visit `plan.device`; all else is as in ResidentExecutor.

    `inputs_file` is made where the plan has blocks' inputs wait on disk.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        visits: VisitedBlocks,
        plan: Plan,
        optimizer: torch.optim.Optimizer,
        trained: TrainedBlocks | None = None,
        inputs_file: Path | None = None,
        max_grad_norm: float = 1.0,
        **options: Any,
    ) -> None:
        _refuse_running_statistics(model)
        self.visits, self.trained = visits, trained
        self._on = torch.device(plan.device)
        self._peak: VisitsPeak
        self._waiting = WaitingInputs(plan.input_tier, torch.device(plan.device), inputs_file)
        self._micro_batches = max(1, plan.accumulation)
        self._evaluated_together = self._micro_batches
        self._tied: TiedGradient | None = None
        # Each block is recomputed here anyway: it must not do so by itself as well.
        resident = dataclasses.replace(
            plan,
            recompute=0,
            compress=0,
            input_tier="device",
            weights_tier="device",
            optimizer_in_backward=plan.optimizer_in_backward and trained is None,
        )
        with visits.head_present():  # how the loss goes through it is tried
            super().__init__(model, plan=resident, optimizer=optimizer, max_grad_norm=max_grad_norm, **options)
        self._of_blocks: AfterLastBlock | BesideBackward | None = None
        if trained is not None:
            kind = BesideBackward if plan.optimizer_in_backward and plan.clip_passes == 1 else AfterLastBlock
            self._end = self._of_blocks = kind(trained, scaler=self._scaler, max_grad_norm=max_grad_norm)
        self._hand_over: HandOver | None = None if self._of_blocks is None else self._of_blocks.block_is_done
        self._peak = VisitsPeak(model, optimizer, self.device, places=lambda: visits.places, waiting=self._held)
        self._split = SplitBlocks(
            visits, self._waiting, computing=self._computing, drawn=self._drawn, follow=self._followed
        )
        self._draws = draws(model)
        self._drawn_first: list[dict[str, Tensor] | None] = []
        self._first = plan.first_trained(len(visits.blocks))
        # Whether anything before that block has a gradient to come.
        self._goes_on = not plan.last_blocks
        self._embedding_trains = self._goes_on and any(
            value.requires_grad and not _is_in_blocks(name, visits) for name, value in model.named_parameters()
        )

    def step(self, micro_batches: Iterable[Batch], learning_rate: float) -> StepResult:
        before = self._waited()
        result = super().step(micro_batches, learning_rate)
        return dataclasses.replace(result, waits=self._waited().since(before))

    @property
    def stays(self) -> list[Stay]:
        """Which blocks stay on the device."""
        there = self.visits.stream.resident
        return ["stay" if block in there else "visit" for block in range(len(self.visits.blocks))]

    def set_stays(self, stays: Sequence[Stay]) -> None:
        """Other blocks, from the next step on."""
        self.visits.stay([block for block, each in enumerate(stays) if each == "stay"])
        self._peak.measure_again()

    def reading(self) -> Reading:
        """As in ResidentExecutor; blocks that stay count as what a step needs, because they need not stay."""
        found = super().reading()
        return dataclasses.replace(found, at_rest=found.at_rest - self.visits.staying_bytes)

    def _waited(self) -> Waits:
        """Since the run began."""
        stream, end, trained = self.visits.stream, self._of_blocks, self.trained
        self.visits.read_gaps()
        if end is not None:
            end.gaps.read()
        for_blocks, in_step = stream.traffic.waited_seconds, 0.0 if end is None else end.waited_seconds
        for_tier = 0.0 if trained is None else trained.waited_seconds
        on_disk = stream.tier.resident(0) is None
        for_inputs, inputs_written = self._waiting.waited()
        return Waits(
            link_seconds=0.0 if on_disk else for_blocks,
            optimizer_seconds=in_step - for_tier,
            disk_seconds=for_tier + for_inputs + (for_blocks if on_disk else 0.0),
            written_bytes=inputs_written + (0 if trained is None else trained.written_bytes),
        )

    def gradients(self, piece: Piece, *, scale: float = 1.0) -> tuple[float, dict[str, Tensor | None]]:
        """As in ResidentExecutor; block by block, because a graph over all blocks would need them all at once."""
        in_blocks: dict[str, Tensor | None] = {}

        def keep(block: int, found: Mapping[str, Tensor]) -> None:
            inside = f"{self.visits.prefix}.{block}"
            in_blocks.update({f"{inside}.{name}": gradient for name, gradient in found.items()})

        loss, outside = self._measured(piece, scale, keep)
        return loss, {**outside, **in_blocks}

    def measure(self, piece: Piece, *, scale: float = 1.0) -> tuple[float, float]:
        """As in ResidentExecutor, without ever having all gradients."""
        norms: list[Tensor] = []
        loss, outside = self._measured(piece, scale, lambda _, found: norms.extend(norms_of(list(found.values()))))
        norms += norms_of([each for each in outside.values() if each is not None])
        return loss, total_norm(norms).item() / scale

    def _measured(self, piece: Piece, scale: float, hand_over: HandOver) -> tuple[float, dict[str, Tensor | None]]:
        """(mean loss, gradients outside the blocks); those of blocks that train go to `hand_over`, and no further."""
        held = {name: value.grad for name, value in self._trained.items()}
        for value in self._trained.values():
            value.grad = None
        targets, usual = targets_of(piece), self._hand_over
        self._hand_over = None if self.trained is None else hand_over
        try:
            with fp32_products(self.raised.compute):
                losses = self._gradients_of([(piece, targets)], scale / targets.weight, _nothing_around)
            made = {name: value.grad for name, value in self._trained.items()}
        finally:
            self._hand_over = usual
            for name, value in self._trained.items():
                value.grad = held[name]
        return losses[0].item() / targets.weight, made

    def state(self) -> tuple[dict[str, Tensor | Later], dict[str, Any]]:
        """As in ResidentExecutor; what is on the tier is read when it is asked for, one tensor at a time."""
        tensors, values = super().state()
        if self.trained is not None:
            tensors |= {MODEL + name: value for name, value in self.trained.stored_weights().items()}
            tensors |= {OPTIMIZER + name: value for name, value in self.trained.stored_states().items()}
        return tensors, values

    def parts(self) -> list[dict[str, Tensor | Later]]:
        """What is not a block, then each block: the model as it is now, adapters merged into it."""
        inside = self.visits.prefix + "."
        if self.trained is not None:
            blocks: list[dict[str, Tensor | Later]] = [
                {} if block in self.visits.trains else self._merged_block(block)
                for block in range(len(self.visits.blocks))
            ]
            for name, value in self.trained.stored_weights().items():
                blocks[int(name.removeprefix(inside).partition(".")[0])][name] = value
            return [{**self._frozen_outside(), **self._saved_tensors(), **self.visits.looked_up}, *blocks]
        base = base_model(self.model)
        looked_up = dict(self.visits.looked_up)
        adapted = [name for name in looked_up if _is_adapted(base, name)]
        with self.visits.head_present() if adapted else contextlib.nullcontext():
            outside = merged_tensors(base, without=self.visits.prefix)
        for name in adapted:
            del looked_up[name]
        once = dict(base.named_parameters())
        again = [name for name, _ in base.named_parameters(remove_duplicate=False) if name not in once]
        outside = {name: value for name, value in outside.items() if name not in again}
        return [{**outside, **looked_up}, *map(self._merged_block, range(len(self.visits.blocks)))]

    def _frozen_outside(self) -> dict[str, Tensor]:
        """Weights outside the blocks that do not train and are on the device."""
        return {
            name: value.detach()
            for name, value in self.model.named_parameters()
            if not value.requires_grad
            and name not in self.visits.looked_up
            and not name.startswith(f"{self.visits.prefix}.")
        }

    def _merged_block(self, block: int) -> dict[str, Tensor | Later]:
        """The block's weights with its adapters, made when the first of them is asked for."""
        made: dict[str, Tensor] = {}

        def take(name: str) -> Tensor:
            if name not in made:
                with torch.no_grad(), self.visits.whole(block):
                    made.update(
                        {key: each.cpu().clone() for key, each in merged_tensors(self.visits.blocks[block]).items()}
                    )
            return made.pop(name)

        return {
            f"{self.visits.prefix}.{block}.{name}": Later(
                shape=tuple(each.shape),
                dtype=each.dtype,
                read=lambda name=name: take(name),  # type: ignore[misc]
            )
            for name, each in _published(self.visits.blocks[block]).items()
        }

    def has_finite_weights(self) -> bool:
        return super().has_finite_weights() and (self.trained is None or self.trained.all_finite())

    def check(self) -> None:
        """Raise ModelError when this model's blocks cannot be taken apart: found on three tokens, before step 1."""
        tokens = torch.arange(3, device=self.device).unsqueeze(0)
        with evaluation_mode(self.model), self._computing():
            self.visits.check(lambda: self._decoder(input_ids=tokens, use_cache=False))
        if not self._goes_on:
            with torch.enable_grad():
                caught = self.visits.catch(lambda: self._decoder(input_ids=tokens, use_cache=False))
            if caught.hidden.requires_grad:
                raise ModelError(
                    f"Something of {type(self.model).__name__} that trains comes before its first block, and only its "
                    "last blocks are to train",
                    "Train all weights, or give the run more memory.",
                )

    def evaluate(self, micro_batches: Iterable[Batch]) -> tuple[float, int]:
        """As in ResidentExecutor, as many micro-batches at a time as a step has, or as memory has shown to bear."""
        self.evaluation_recovered = ""
        total, tokens, weight = 0.0, 0, 0.0
        # Asked for as they are needed: who gives them may end the evaluation between two groups.
        coming = (piece for batch in micro_batches for piece in self.pieces(batch))
        waiting: list[Piece] = []
        with evaluation_mode(self.model), fp32_products(self.raised.compute):
            while True:
                missing = max(0, self._evaluated_together - len(waiting))
                waiting += self._evaluated(itertools.islice(coming, missing))
                if not waiting:
                    break
                pieces = waiting[: self._evaluated_together]
                found, failure = attempt(lambda pieces=pieces: self._losses_of(pieces), self.device)  # type: ignore[misc]
                if found is None and len(pieces) > 1:
                    self._evaluated_together = halves(len(pieces))[0]
                    self.evaluation_recovered = (
                        f"Memory ran out in an evaluation; evaluations go on with {self._evaluated_together} "
                        "micro-batches together, and training with as many as before"
                    )
                elif found is None:
                    self._evaluate_fewer(pieces[0], failure)
                    waiting = self._evaluated(waiting)
                else:
                    total += math.fsum(found)
                    targets = [targets_of(piece) for piece in pieces]
                    tokens += sum(each.count for each in targets)
                    weight += math.fsum(each.weight for each in targets)
                    del waiting[: len(pieces)]
        if tokens == 0:
            raise _no_tokens("The held-out share")
        return total / weight, tokens

    def _losses_of(self, pieces: Sequence[Piece]) -> list[float]:
        """Summed losses of pieces that go through the blocks together."""
        losses = []
        hidden, _ = self._forward(pieces, keep=False)
        with self.visits.head_present():
            for piece, end in zip(pieces, hidden, strict=True):
                targets = targets_of(piece)
                if targets.count:
                    with self.visits.given(end):
                        losses.append(self._sums(piece, targets).cross_entropy.item())
        return losses

    def _load_activations(self, values: Mapping[str, Any]) -> None:
        """Blocks are recomputed whatever they did before; what had to leave the device stays away."""
        governed = values.get("governor") or {}
        saved = governed.get("modes", [])
        if len(saved) == len(self.visits.blocks) and set(saved) <= set(get_args(Stay)):
            pairs = zip(self.stays, saved, strict=True)
            self.set_stays(["stay" if now == then == "stay" else "visit" for now, then in pairs])
        if self.governor:
            self.governor.load_state(governed, modes=self.stays)

    def _device(self) -> torch.device:
        """Not where the first parameter is: it may be hollow."""
        return self._on

    def _load_weights(self, saved: Mapping[str, Tensor]) -> None:
        if self.trained is None:
            super()._load_weights(saved)
            return
        on_tier = self.trained.stored_weights().keys()
        super()._load_weights(Chosen(saved, [name for name in saved if name not in on_tier]))

    def _load_optimizer(
        self, saved: Mapping[str, Tensor], values: Mapping[str, Any], weights: Mapping[str, Tensor]
    ) -> None:
        if self.trained is None:
            super()._load_optimizer(saved, values, weights)
            return
        check_kind(self.optimizer, values)
        self.trained.load(weights, saved)

    def _saved_tensors(self) -> dict[str, Tensor]:
        """Without the blocks' weights, which are on the tier."""
        found = super()._saved_tensors()
        on_tier = {} if self.trained is None else self.trained.stored_weights()
        return {name: value for name, value in found.items() if name not in on_tier}

    def _accumulate(self, pieces: Sequence[Piece], around: Around) -> tuple[list[Tensor], Trained]:
        everything = [(piece, targets_of(piece)) for piece in pieces]
        trained = Trained.of(each for _, each in everything)
        if trained.tokens == 0:
            raise _no_tokens("This step")
        kept = [(piece, each) for piece, each in everything if each.count]
        try:
            return self._gradients_of(kept, self.loss_scale / trained.weight, around), trained
        except BaseException:
            # Who repeats the step must know which weights have changed, and no thread may change one after that.
            if self._of_blocks is not None:
                with contextlib.suppress(Exception):
                    self._of_blocks.settle()
            raise

    def _gradients_of(self, kept: Sequence[tuple[Piece, Targets]], factor: float, around: Around) -> list[Tensor]:
        """The summed losses; gradients of their sum times `factor` in `.grad`."""
        self._waiting.clear()
        with torch.no_grad():
            hidden, calls = self._forward([piece for piece, _ in kept], keep=True)
        tied = self._tied = self._tied_gradient([piece for piece, _ in kept])
        with self.visits.head_present():
            losses, upstream = self._losses(kept, hidden, factor, tied)
        with around(losses) if self._of_blocks is not None else contextlib.nullcontext():
            self._backward(upstream, calls, lambda: around(losses))
        if self._embedding_trains:
            self._before_blocks([piece for piece, _ in kept], upstream, tied)
        if tied is not None:
            tied.finish()
        self._tied = None
        return losses

    def _held(self) -> int:
        """Bytes on the device that neither the model nor its blocks' places are."""
        return self._waiting.nbytes + self._split.nbytes + (0 if self._tied is None else self._tied.nbytes)

    def _tied_gradient(self, pieces: Sequence[Piece]) -> TiedGradient | None:
        """Where the embedding is the head, trains, and gets a gradient from several micro-batches."""
        base = base_model(self.model)
        table, head = base.get_input_embeddings().weight, base.get_output_embeddings()
        if head is None or head.weight is not table or not table.requires_grad or len(pieces) < 2:
            return None
        return TiedGradient(table, [piece.input_ids for piece in pieces])

    def _forward(self, pieces: Sequence[Piece], *, keep: bool) -> tuple[list[Tensor], list[list[Call]]]:
        """(what the last block gives for each piece, each piece's calls of the blocks); inputs wait where planned."""
        hidden, calls = self._embedded(pieces)
        if keep:
            self._waiting.expect(self._states_that_wait * sum(each.nbytes for each in hidden))
        for block in range(len(self.visits.blocks)):
            with self.visits.present(block, "up"):
                if block in self.visits.split:
                    self._split.forward(block, hidden, [each[block] for each in calls], keep=keep)
                    continue
                for index, each in enumerate(calls):
                    if keep and block >= self._first:
                        self._waiting.put((block, index), hidden[index], self._drawn())
                    with self._computing():
                        hidden[index] = self.visits.compute(block, hidden[index], each[block])
        return hidden, calls

    @property
    def _states_that_wait(self) -> int:
        """Hidden states of a micro-batch that wait for backward: each block's input, and the answer of a split one's
        experts."""
        return sum(2 if block in self.visits.split else 1 for block in range(self._first, len(self.visits.blocks)))

    def _embedded(self, pieces: Sequence[Piece]) -> tuple[list[Tensor], list[list[Call]]]:
        """(what the first block is given for each piece, each piece's calls of the blocks)."""
        hidden, calls = [], []
        self._drawn_first.clear()
        for piece in pieces:
            self._drawn_first.append(self._drawn())
            caught = self.visits.catch(lambda piece=piece: self._call_decoder(piece))  # type: ignore[misc]
            hidden.append(caught.hidden)
            calls.append(caught.calls)
        return hidden, calls

    def _losses(
        self, kept: Sequence[tuple[Piece, Targets]], hidden: list[Tensor], factor: float, tied: TiedGradient | None
    ) -> tuple[list[Tensor], list[Tensor]]:
        """(the summed loss of each piece, its gradient with respect to what the last block gave)."""
        losses, upstream = [], []
        for index, (piece, each) in enumerate(kept):
            end = hidden[index].detach().requires_grad_()
            hidden[index] = end.detach()[:0]  # not needed any more, and large
            with self._followed("head", index, len(kept)):
                with self.visits.given(end):
                    sums = self._sums(piece, each, gradient_scale=factor)
                (sums.objective * factor).backward()  # type: ignore[no-untyped-call]
            losses.append(sums.cross_entropy)
            if tied is not None:
                tied.add_head()
            assert end.grad is not None
            upstream.append(end.grad)
        return losses, upstream

    def _backward(
        self,
        upstream: list[Tensor],
        calls: Sequence[Sequence[Call]],
        around: Callable[[], contextlib.AbstractContextManager[None]],
    ) -> None:
        """Through the blocks in reverse, down to the first that trains. `upstream` [pieces] becomes the gradient of its
        inputs, where one is asked for. Where adapters train, `around` goes around each block's last micro-batch, which
        makes their gradients whole."""
        after, last = random_state(self.device) if self._draws else None, len(upstream) - 1
        for block in reversed(range(self._first, len(self.visits.blocks))):
            with self.visits.present(block, "down"):
                if block in self.visits.split:
                    self._split.backward(block, upstream, [each[block] for each in calls], around)
                    continue
                for index in range(len(upstream)):
                    with around() if index == last and self.trained is None else contextlib.nullcontext():
                        self._backward_of(block, index, upstream, calls[index][block])
                if self._hand_over is not None:
                    self._hand_over(block, self.visits.gradients(block))
        if after is not None:
            set_random_state(self.device, after)

    def _backward_of(self, block: int, index: int, upstream: list[Tensor], call: Call) -> None:
        start, drawn = self._waiting.take((block, index))
        if drawn is not None:
            set_random_state(self.device, drawn)
        asked = self._goes_on or block > self._first
        start = start.detach().requires_grad_(asked)
        with self._followed("block", index, len(upstream)):
            self._backward_through(block, start, call, upstream[index])
        if asked:
            assert start.grad is not None
            upstream[index] = start.grad

    def _backward_through(self, block: int, start: Tensor, call: Call, upstream: Tensor) -> None:
        with torch.enable_grad(), self._computing():
            end = self.visits.compute(block, start, call)
        torch.autograd.backward(end, upstream)

    def _followed(
        self, part: Literal["head", "block", "experts", "embedding"], index: int, count: int
    ) -> contextlib.AbstractContextManager[None]:
        """Follows the last micro-batch's: it has the gradients of the others beside it."""
        return self._peak.visit(part) if index == count - 1 else contextlib.nullcontext()

    def _before_blocks(self, pieces: Sequence[Piece], upstream: Sequence[Tensor], tied: TiedGradient | None) -> None:
        """Gradients of what comes before the blocks: their forward once more, now to be differentiated."""
        after = random_state(self.device) if self._draws else None
        for index, (piece, gradient) in enumerate(zip(pieces, upstream, strict=True)):
            drawn = self._drawn_first[index]
            if drawn is not None:
                set_random_state(self.device, drawn)
            with torch.enable_grad():
                caught = self.visits.catch(lambda piece=piece: self._call_decoder(piece))  # type: ignore[misc]
            if caught.hidden.requires_grad:
                with self._followed("embedding", index, len(pieces)):
                    torch.autograd.backward(caught.hidden, gradient)
                if tied is not None:
                    tied.add_embedding()
        if after is not None:
            set_random_state(self.device, after)

    def _call_decoder(self, piece: Piece) -> None:
        with self._computing():
            base: Any = self._decoder
            base(**model_inputs(piece, self.device), use_cache=False)

    def _drawn(self) -> dict[str, Tensor] | None:
        return random_state(self.device) if self._draws and self.model.training else None

    @property
    def _decoder(self) -> Any:
        base = base_model(self.model)
        found = base.get_decoder() if hasattr(base, "get_decoder") else None
        return base if found is None else found


def _nothing_around(losses: Sequence[Tensor]) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _refuse_running_statistics(model: nn.Module) -> None:
    """Blocks that visit are computed twice a step, and what is around them is called twice, too."""
    kinds = nn.modules.batchnorm._NormBase
    found = [part for part in model.modules() if isinstance(part, kinds) and part.track_running_stats]
    if found:
        raise ModelError(
            f"{type(model).__name__} has {len(found)} {type(found[0]).__name__}, whose running statistics would move "
            "twice a step where blocks stream",
            "Give the run more memory, so that the model stays on the device.",
        )


def _is_adapted(base: nn.Module, name: str) -> bool:
    return hasattr(base.get_submodule(name.rpartition(".")[0]), "get_delta_weight")


def _published(block: nn.Module) -> dict[str, Tensor]:
    """A block's own weights and buffers by the names they have without adapters."""
    skipped = {
        f"{path}.{name}" for path, module in block.named_modules() for name in module._non_persistent_buffers_set
    }
    own = {
        **dict(block.named_parameters()),
        **{name: each for name, each in block.named_buffers() if name not in skipped},
    }
    plain = {name.replace(".base_layer.", "."): each for name, each in own.items() if ".lora_" not in name}
    turned = {f"{path}.weight" for path, module in block.named_modules() if getattr(module, "transposed", False)}
    turned = {name.replace(".base_layer.", ".") for name in turned}
    return {name: each.t() if name in turned else each for name, each in plain.items()}


def _is_in_blocks(name: str, visits: VisitedBlocks) -> bool:
    inside = {id(parameter) for block in visits.blocks for parameter in block.parameters()}
    return id(visits.model.get_parameter(name)) in inside
