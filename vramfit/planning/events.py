"""The tensors of a run in the order in which they are made and freed, for the allocator's simulation.

Loading, three optimizer steps (in the first the optimizer's states come; how they lie is what later ones meet) and an
evaluation, from the same tapes and quantities as the closed form of `memory.py`: its phases are the highest moments of
this sequence. What the closed form need not know is decided here: sizes of single tensors, the order inside a phase,
and on which stream a tensor is made, for what one stream has freed no other can use.

Sharded weights are gathered on a stream of their own. A gathered block is freed there only when the computation on
it is done, which is known when the next but one is asked for; the sharded gradients come from a third stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Final, NamedTuple

from vramfit.models.architecture import Architecture
from vramfit.planning.allocator import Event
from vramfit.planning.block import block_tape
from vramfit.planning.memory import Work, compresses
from vramfit.planning.optimizer_memory import STATES, Weight, state_bytes
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.program import OURS, Program
from vramfit.planning.stored import BYTES, QUANTISED, block_weights, outside_weights, sizes_of_block
from vramfit.planning.tape import GRADIENT, PACKING, PIECE, RESTORING, Step, Tape

_STEPS: Final = 3
_GATHER: Final = 1
_REDUCE: Final = 2


def training_events(
    architecture: Architecture, plan: Plan, workload: Workload, *, program: Program = OURS, evaluates: bool = True
) -> tuple[Event, ...]:
    """Tensors of loading, three steps and, when it `evaluates`, a pass without gradients.

    A step of many micro-batches is told by its first two: all later ones are as the second.
    """
    run = _Run(Work.of(architecture, plan, workload, program))
    run.load()
    for _ in range(_STEPS):
        for number in range(min(2, plan.accumulation)):
            run.micro_batch(first=number == 0)
        run.optimizer_step()
    if evaluates:
        run.evaluation()
    return tuple(run.events)


class _Kept(NamedTuple):
    """What a block's backward finds: the block's input (0: elsewhere), what was saved by storage, its cast weights."""

    start: int
    saved: dict[int, int]
    casts: list[int]


class _Run:
    """Writes the events of one run."""

    def __init__(self, work: Work) -> None:
        self.work, self.plan, self.shape = work, work.plan, work.architecture
        self.events: list[Event] = []
        self._tensors = 0
        self._tapes: dict[tuple[bool, bool, bool, bool], Tape] = {}
        self._steps: dict[tuple[int, bool], list[Step]] = {}
        self._gradients: list[int] = []  # of parameters; they live until the optimizer step
        self._until_backward_ends: list[int] = []
        self._has_states = False

    # --- writing -----------------------------------------------------------------------------------------------------

    def make(self, size: float, stream: int = 0) -> int:
        """A tensor of `size` bytes; 0, which can be freed without effect, when that is nothing."""
        if size < 1:
            return 0
        self._tensors += 1
        self.events.append(Event(self._tensors, int(size), stream))
        return self._tensors

    def free(self, *tensors: int) -> None:
        self.events.extend(Event(tensor, 0) for tensor in tensors if tensor)

    # --- what is there from the start --------------------------------------------------------------------------------

    def load(self) -> None:
        """Weights tensor by tensor, adapters, buffers, places for what visits."""
        for size, unpacked in self._weights():
            whole = self.make(unpacked)  # quantised on the device, from the 16-bit matrix
            self.make(size)
            self.free(whole)
        for size in self._adapters():
            self.make(size)
        for size in self.work.slot_sizes:
            self.make(size)
        for _ in range(2 if self.work.program.copies_buffers else 1):
            self.make(self.work.buffers)
        self.make(self.work.buckets)
        if self.plan.recompute and self.plan.input_tier != "device":
            self.make(self.work.stream)
            self.make(self.work.stream)

    def _weights(self) -> Iterator[tuple[float, float]]:
        """(bytes, bytes of the 16-bit matrix it is quantised from or 0) of every tensor of weights on this card."""
        work, plan = self.work, self.plan
        if work.shares_weights:
            yield work.stored.scales, 0.0
            left = work.weights - work.stored.scales
            shares = [0.0 if work.streams else size / plan.cards for size in work.stored.block_bytes]
            shares = [share - work.stored.scales / plan.cards / len(shares) for share in shares]
            yield from ((share, 0.0) for share in shares if not work.streams)
            yield from self._outside(left - sum(shares) if not work.streams else 0.0)
            return
        stay = list(range(self.shape.layers))
        if work.streams:
            stay = sorted(stay, key=lambda layer: -work.stored.block_bytes[layer])[: plan.resident_blocks]
        yield from self._outside(work.weights - sum(work.stored.block_bytes[layer] for layer in stay))
        for layer in stay:
            yield from self._block_weights(layer)

    def _outside(self, size: float) -> Iterator[tuple[float, float]]:
        """Embedding, head and the rest."""
        matrices = 1 if self.shape.tied_embeddings or self.work.streams else 2
        each = min(size / matrices, size * self.shape.embedding_params / max(1, self._outside_params))
        yield from [(each, 0.0)] * matrices
        yield size - matrices * each, 0.0

    @cached_property
    def _outside_params(self) -> int:
        return self.shape.params - sum(self.shape.params_of_block(layer) for layer in range(self.shape.layers))

    def _block_weights(self, layer: int) -> Iterator[tuple[float, float]]:
        plan, left = self.plan, self.work.stored.block_bytes[layer]
        packs = bool(plan.lora_rank) and plan.weight_format in QUANTISED
        stored = BYTES[plan.weight_format if plan.lora_rank else plan.trained_format]
        for linear in self.shape.linears(layer):
            packed = packs and self.work.program.kernels.packs(linear)
            size = linear.weights * (BYTES[plan.compute] if packs and not packed else stored)
            left -= size
            yield size, 2.0 * linear.inputs * linear.outputs if packed else 0.0
        yield left, 0.0

    def _adapters(self) -> Iterator[float]:
        work = self.work
        if not self.plan.lora_rank or work.shards_in_ram:
            return
        share = 1.0 / self.plan.cards if work.shares_adapters else 1.0
        yield from (2.0 * self.shape.embedding_params * share for _ in self.plan.saved_modules)
        yield from (work.weight * share * size for layer in range(self.shape.layers) for size in self._adapter(layer))

    def _adapter(self, layer: int) -> Iterator[int]:
        """Numbers of each adapter matrix of a block. Sharding takes each for itself: what trains is apart."""
        yield from sizes_of_block(self.shape, layer, self.plan)

    # --- a micro-batch -----------------------------------------------------------------------------------------------

    def micro_batch(self, *, first: bool) -> None:
        """Forward, loss and backward. `first`: no gradients are there yet."""
        work, layers = self.work, range(self.shape.layers)
        root = self.make(work.root, _GATHER)
        hidden = self.make(work.stream)
        mask, returned = self.make(work.mask), 0
        blocks: list[_Kept] = []
        for layer in layers:
            gathered = self._gather(layer)
            kept, output = self._block_forward(layer, hidden)
            blocks.append(kept)
            self.free(gathered, returned, hidden if not kept.start else 0)
            passes_on = layer < work.first or work.recomputes(layer)
            returned = self.make(work.blocks[layer].returned * work.tokens) if passes_on else 0
            hidden = output
        self.free(returned, 0 if work.held_mask else mask)
        head_cast = self.make(work.head_cast)
        gradient, head_gradient = self._loss(hidden)
        if work.uses_up_gradients and not work.head_waits:
            self.free(head_gradient)
            head_gradient = 0
        held_logits = self.make(work.held_logits)
        again = [kept for layer, kept in enumerate(blocks) if work.recomputes(layer)]
        self.free(head_cast, *(cast for kept in again for cast in kept.casts))
        gradient = self._backward(blocks, gradient, first=first)
        self.free(mask if work.held_mask else 0)
        self._embedding(gradient, head_gradient, first=first)
        self.free(root, held_logits, *self._until_backward_ends)
        self._until_backward_ends = []

    def _block_forward(self, layer: int, hidden: int) -> tuple[_Kept, int]:
        """(what a block keeps for its backward, its output)."""
        if layer < self.work.first:
            output, _ = self._forward(layer, keeps=False)
            return _Kept(0, {}, []), output
        casts, again = self._casts(layer), self.work.recomputes(layer)
        output, saved = self._forward(layer, keeps=not again)
        if again and not self.work.caches_casts:
            self.free(*casts)
            casts = []
        if again and self.work.keeps_products:
            saved = {0: self.make(self.work.blocks[layer].selected * self.work.tokens)}
        return _Kept(hidden if self._keeps_input(layer) else 0, saved, casts), output

    def _tape(self, layer: int) -> Tape:
        experts = self.shape.experts
        input_grad = layer > self.work.first or self.plan.trains_all or self.work.program.input_grads
        slides = self.work.formats.window and self.shape.slides(layer)
        small = compresses(self.plan, layer, self.shape.layers)
        key = bool(experts and experts.at(layer)), slides, input_grad, small
        if key not in self._tapes:
            formats = self.work.formats
            self._tapes[key] = block_tape(self.shape, layer, formats, input_grad=input_grad, compressed=small)[0]
        return self._tapes[key]

    @property
    def _keeps_gathered(self) -> bool:
        return self.work.program.sharding.keeps_gathered and self.work.shares_weights and self.plan.lora_rank > 0

    def _gather(self, layer: int) -> int:
        return self.make(self.work.gathered_bytes[layer], _GATHER) if self.work.shares_weights else 0

    def _casts(self, layer: int) -> list[int]:
        """16-bit copies of a block's trained matrices."""
        whole = self.work.stored.casts[layer]
        if not whole or self.plan.lora_rank:
            return [self.make(whole)]
        linears = self.shape.linears(layer)
        return [self.make(whole * linear.weights / sum(each.weights for each in linears)) for linear in linears]

    def _keeps_input(self, layer: int) -> bool:
        if self.work.recomputes(layer):
            return self.plan.input_tier == "device"
        return self.work.blocks[layer].input_saved

    def _forward(self, layer: int, *, keeps: bool) -> tuple[int, dict[int, int]]:
        """Run a block: (its output, what it saved by storage)."""
        tape, live = self._tape(layer), dict[int, int]()
        for step in self._forward_steps(layer, keeps=keeps):
            self._walk(step, live, keeps=keeps)
        return live.pop(tape.end), live

    def _forward_steps(self, layer: int, *, keeps: bool) -> list[Step]:
        tape = self._tape(layer)
        found = self._steps.get((id(tape), keeps))
        if found is None:
            found = self._steps[id(tape), keeps] = list(tape.forward_steps(keeps=keeps))
        return found

    def _walk(self, step: Step, live: dict[int, int], *, keeps: bool) -> None:
        """The tensors of one operation; a matrix in few bits is unpacked for it."""
        tokens = self.work.tokens
        unpacked = self.make(self._unpacked(step))
        temporary = self.make(step.temporary * tokens)
        for number, size in step.changes:
            if size > 0:
                live[number] = self.make(size * tokens)
            elif size < 0:
                self.free(live.pop(number))
        piece = self._piece(PACKING, step.operation.packs) if keeps else 0
        self.free(temporary, unpacked, piece)

    def _piece(self, each: int, numbers: int) -> int:
        """fp32 copies of what goes to 8 bits, or comes from them."""
        return self.make(each * min(PIECE, numbers * self.work.tokens))

    def _unpacked(self, step: Step) -> float:
        plan = self.plan
        return 2.0 * step.operation.unpacks if plan.weight_format in QUANTISED and plan.lora_rank else 0.0

    # --- the loss ----------------------------------------------------------------------------------------------------

    def _loss(self, hidden: int) -> tuple[int, int]:
        """(gradient of the last hidden state, gradient of the head's weight), after final norm, logits and loss."""
        work, stream = self.work, self.work.stream
        norm = [self.make(work.final_norm - 2 * stream), self.make(stream)]
        if self.plan.loss == "full":
            of_normal, head_gradient = self._whole_logits()
        else:
            of_normal, head_gradient = self._chunks()
        gradient = self.make(stream)
        self.free(of_normal, *norm, hidden)
        return gradient, head_gradient

    def _whole_logits(self) -> tuple[int, int]:
        """Logits in the compute format, then the program's fp32 copies one after another; backward the same again."""
        work = self.work
        logits, head_gradient = work.logits()
        entries = work.tokens * self.shape.vocab_size
        compute = work.formats.compute
        wide = compute if work.program.logits_in_compute else 4
        copies = max(1, int(logits / entries // wide))
        stays = logits / entries % wide > 0  # the narrow logits are there all the while
        narrow = self.make(compute * entries) if wide > compute else 0
        made = [self.make(wide * entries)]
        self.free(0 if stays else narrow)
        made += [self.make(wide * entries) for _ in range(copies - 1)]
        self.free(*made[:-1])
        back = [self.make(wide * entries) for _ in range(copies - 1)]
        self.free(made[-1] if back else 0, *back[:-1], narrow if stays else 0)
        of_logits = self.make(compute * entries) if wide > compute else 0
        last = back[-1] if back else made[-1]
        self.free(last if of_logits else 0)
        of_normal = self.make(work.stream)
        head = self.make(head_gradient or work.head_gradient)
        self.free(of_logits or last)
        return of_normal, head

    def _chunks(self) -> tuple[int, int]:
        """Rows of logits a chunk at a time, the gradients filled on the way."""
        work, vocab = self.work, self.shape.vocab_size
        logits, head_gradient = work.logits()
        of_normal = self.make(work.formats.residual * self.shape.hidden_size * work.tokens)
        head = self.make(head_gradient)
        rows = min(work.tokens, self.plan.loss_chunk_tokens or work.tokens)
        chunk = logits - work.formats.residual * self.shape.hidden_size * work.tokens
        all_rows = self.make(work.program.logits_kept * work.tokens * vocab)
        chunk -= work.program.logits_kept * work.tokens * vocab
        pieces = [4.0 * rows * vocab] * int(chunk // (4.0 * rows * vocab))
        pieces.append(chunk - sum(pieces))
        for share in (1.0, 1.0, (work.tokens % rows) / rows):
            self.free(*[self.make(share * piece) for piece in pieces])
        self.free(all_rows)
        if work.program.own_optimizers and work.whole_gradient < 4:  # the sum is fp32
            whole, head = head, self.make(work.head_gradient)
            self.free(whole)
        return of_normal, head

    # --- backward ----------------------------------------------------------------------------------------------------

    def _backward(self, blocks: list[_Kept], gradient: int, *, first: bool) -> int:
        """Blocks in reverse, as far as they train; the gradient of the first one's input."""
        there, leaving = dict[int, int](), 0
        for layer in range(self.shape.layers - 1, self.work.first - 1, -1):
            for needed in (layer, layer - 1) if self.work.fetches_ahead(layer) else (layer,):
                if needed not in there:
                    there[needed] = self._gather(needed)
            self.free(leaving)
            gradient = self._block_backward(layer, blocks[layer], gradient, first=first)
            leaving = there.pop(layer)
            if self._keeps_gathered:
                self._until_backward_ends.append(leaving)
                leaving = 0
        self.free(leaving)
        return gradient

    def _block_backward(self, layer: int, kept: _Kept, gradient: int, *, first: bool) -> int:
        """One block: its forward again where nothing was kept, then its operations in reverse."""
        again = self.work.recomputes(layer)
        own_input, saved, casts, output = kept.start, kept.saved, kept.casts, 0
        if again:
            own_input = own_input or self.make(self.work.blocks[layer].input * self.work.tokens)
            casts = self._casts(layer)
            self.free(*saved.values())
            output, saved = self._forward(layer, keeps=True)
        holds = again and self.work.program.holds_output
        if not holds:
            self.free(output)
        shared = holds or self._holds_inputs
        made, left = self._walk_back(layer, saved, gradient, shared=shared, first=first)
        self._reduce(layer, made, first=first)
        self.free(*casts, output if holds else 0)
        if self._holds_inputs:
            self._until_backward_ends += [own_input, left]
        else:
            self.free(own_input)
        # Shared, the gradient that came in is still there: until backward ends, where the block behind holds it.
        if shared and not (self._holds_inputs and layer < self.shape.layers - 1):
            self.free(gradient)
        return left

    @property
    def _holds_inputs(self) -> bool:
        work = self.work
        holds = work.program.sharding.holds_frozen_inputs and work.shares_weights and self.plan.cards > 1
        return bool(holds and self.plan.lora_rank and self.plan.recompute)

    def _walk_back(
        self, layer: int, saved: dict[int, int], gradient: int, *, shared: bool, first: bool
    ) -> tuple[list[int], int]:
        """(gradients of the block's parameters, gradient of its input)."""
        work, made = self.work, list[int]()
        steps, left = self._tape(layer).backward_steps(shared=shared)
        live = {**saved, GRADIENT: gradient}
        at_once = self._gradients_leave_at_once(first=first)
        for step in steps:
            trained, whole = step.operation.trained, 0
            temporary = self.make(step.temporary * work.tokens)
            unpacked = self.make(self._unpacked(step))
            self.free(self._piece(RESTORING, step.operation.restores))
            for change in step.changes:
                if change.size > 0:
                    live[change.number] = self.make(change.size * work.tokens)
                    continue
                if trained and not whole:  # made while what it is made from is there
                    whole = self._weight_gradient(trained)
                self.free(live.pop(change.number))
            if trained and not whole:
                whole = self._weight_gradient(trained)
            self.free(temporary, unpacked)
            if at_once:
                steps_now = whole and self.plan.optimizer_in_backward and work.uses_up_gradients
                self.free(self.make(work.stored.step_chunk) if steps_now else 0, whole)
            else:
                made.append(whole)
        return made, live[left] if left else 0

    def _weight_gradient(self, trained: int) -> int:
        """A parameter's gradient; from a cast copy it is made in the copy's format first."""
        work = self.work
        narrow = self.make(work.formats.compute * trained if work.formats.casts else 0.0)
        whole = self.make(work.whole_gradient * trained)
        self.free(narrow)
        return whole

    def _gradients_leave_at_once(self, *, first: bool) -> bool:
        """Used by the optimizer as soon as they are there, or added to those of the micro-batches before."""
        plan = self.plan
        visits = self.work.shards_in_ram or (self.work.streams and not plan.lora_rank)
        return self.work.uses_up_gradients or visits or (not first and self.work.gradient_share == 1.0)

    def _reduce(self, layer: int, made: list[int], *, first: bool) -> None:
        """Gradients of a block are kept, or this card's share of them."""
        work = self.work
        if work.gradient_share == 1.0:
            self._gradients += made
            return
        if first and not work.shards_in_ram:
            share = work.gradient * work.gradient_share
            found = self._trained_of_block(layer, flat=not self.plan.lora_rank)
            self._gradients += [self.make(share * numbers, _REDUCE) for numbers in found]
        self.free(*made)

    def _embedding(self, gradient: int, head_gradient: int, *, first: bool) -> None:
        """The embedding's gradient is made whole; with the head's it becomes what stays."""
        work, plan = self.work, self.plan
        trains = plan.trains_all or "embedding" in plan.saved_modules
        own = self.make(work.whole_gradient * self.shape.embedding_params) if trains else 0
        self.free(gradient if not self._holds_inputs else 0)
        if self._gradients_leave_at_once(first=first):
            self.free(own, head_gradient, self.make(work.tied_sum))
        elif work.gradient_share < 1.0:
            if first:
                left = work.trained - sum(work.block_trained)
                self._gradients.append(self.make(work.gradient * work.gradient_share * left, _REDUCE))
            self.free(own, head_gradient)
        elif self.shape.tied_embeddings and head_gradient:
            apart = self.make(work.tied_sum)
            self.free(own, head_gradient if apart else 0)
            self._gradients.append(apart or head_gradient)
        else:
            self._gradients += [own, head_gradient]

    # --- step and evaluation -----------------------------------------------------------------------------------------

    def optimizer_step(self) -> None:
        """States come in the first step; foreach kernels make a temporary for every parameter before they free one."""
        work, plan = self.work, self.plan
        on_device = plan.optimizer_tier == "device"
        if on_device and not self._has_states:
            count = max(1, STATES[plan.optimizer])
            for numbers, states in self._trained_tensors():
                for size in (work.program.master * numbers, *[states / count] * count):
                    self.make(size)
            self._has_states = True
        if on_device and not work.uses_up_gradients:
            self.free(self.make(work.stored.step_chunk))
        if on_device and plan.optimizer_bits >= 16 and not plan.optimizer_in_backward:
            casts = [self.make(work.program.step_gradient * numbers) for numbers, _ in self._trained_tensors()]
            scale = work.program.step_temporary * work.weight
            self.free(*casts, *[self.make(scale * numbers) for numbers, _ in self._trained_tensors()])
        self.free(*self._gradients)
        self._gradients = []

    def _trained_tensors(self) -> Iterator[tuple[float, float]]:
        """(numbers, bytes of states) of each trained tensor on this card, in the model's order: embedding, blocks, what
        else is outside them. Where sharding makes one tensor of a block, it makes one of all that is outside, too."""
        work, share = self.work, self.work.optimizer_share
        flat = work.shares_weights and not self.plan.lora_rank
        outside = list(outside_weights(self.shape, self.plan))
        first, rest = (outside, []) if flat else (outside[:1], outside[1:])
        groups = [first]
        for layer in range(self.shape.layers):
            of_block = list(block_weights(self.shape, layer, self.plan))
            groups += [of_block] if flat else [[weight] for weight in of_block]
        groups.append(rest)
        for group in groups:
            states = sum(state_bytes(self.plan, weight) for weight in group)
            yield share * _numbers(group), share * states

    def _trained_of_block(self, layer: int, *, flat: bool) -> Iterator[int]:
        weights = list(block_weights(self.shape, layer, self.plan))
        yield from (_numbers(group) for group in ([weights] if flat else [[weight] for weight in weights]))

    def evaluation(self) -> None:
        """Forward with nothing kept."""
        work = self.work
        root, hidden, casts = self.make(work.root, _GATHER), self.make(work.stream), list[int]()
        mask, returned = self.make(work.mask), 0
        for layer in range(self.shape.layers):
            gathered = self._gather(layer)
            casts += self._casts(layer)
            output, _ = self._forward(layer, keeps=False)
            self.free(gathered, hidden, returned)
            returned = self.make(work.blocks[layer].returned * work.tokens)
            if not work.caches_casts:
                self.free(*casts)
                casts = []
            hidden = output
        self.free(mask, returned)
        head_cast, normal = self.make(work.head_cast), self.make(work.stream)
        self.free(*[self.make(work.evaluated_logits / 2) for _ in range(2)])
        self.free(root, hidden, *casts, head_cast, normal)


def _numbers(weights: Iterable[Weight]) -> int:
    return sum(weight.numbers for weight in weights)
