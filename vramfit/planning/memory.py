"""Device memory of a plan, phase by phase: closed form, in milliseconds, from what the program does.

T = micro-batch x length (tokens), h hidden, V vocabulary rows, L blocks, P parameters, N cards. All figures are of one
card. The peak is the largest phase, never their sum:

    load        weights as they come
    forward     states + root + inputs of the recomputed blocks + one block's forward that keeps nothing
    loss        states + root + kept activations of all blocks + final norm + logits and their gradient
    backward    states + root + gathered blocks + what the blocks before keep + one block's backward, operation by
                operation, with the gradients made so far
    embedding   states + root + all gradients + the embedding's dense gradient beside the one it is added to
    step        states + all gradients + the optimizer's temporaries
    evaluation  states + root + one block's forward, or logits: nothing kept
    save        states: what is saved goes to RAM tensor by tensor, and adds nothing on the device
    calibration where the run compares itself with fp32: the loss and backward of one micro-batch in fp32, with all
                gradients, and the fp32 copies of 16-bit weights that backward needs

states = weights + adapters + optimizer, each its share of N cards. The root is what sharding gathers outside the blocks
(embedding, head), from the first forward to the end of backward. Under accumulation the gradients of the micro-batches
before are there in every phase. What a block keeps and needs is walked operation by operation in `block.py`; where
programs differ is in `program.py`, what stands through all phases in `standing.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Final

from vramfit.models.architecture import Architecture
from vramfit.planning.block import BlockMemory, Formats, block_memory
from vramfit.planning.plan import MEMORY_KINDS, MemoryEstimate, MemoryKind, PhaseMemory, Plan, Workload
from vramfit.planning.program import OURS, Program
from vramfit.planning.standing import Standing, head_visits
from vramfit.planning.stored import BYTES, QUANTISED
from vramfit.planning.tape import Moment
from vramfit.units import GIB

COMMUNICATION_BYTES: Final = GIB
"""Buffers of NCCL on one card: 0.5 to 1.5 GiB."""


def estimate_memory(
    architecture: Architecture,
    plan: Plan,
    workload: Workload,
    *,
    program: Program = OURS,
    checkpoints: int = 2,
    merged: bool = False,
) -> MemoryEstimate:
    """Predicted device memory of `plan`: its phases, what the device shows, the interval, RAM and disk.

    Lengths are the longest a micro-batch can have: max_length when rows are packed, else the longest sequence.
    `checkpoints` is how many there will be at the end; `merged`: adapters are exported with their base.
    """
    work = Work.of(architecture, plan, workload, program)
    phases = (
        work.phase("load"),
        work.forward_phase(),
        work.loss_phase(),
        *work.backward_phases(),
        work.embedding_phase(),
        work.step_phase(),
        work.evaluation_phase(),
        work.save_phase(),
        *(work.calibration_phases(workload) if plan.calibrates else ()),
    )
    peak = max(phases, key=lambda phase: phase.total_bytes)
    device = max(_device_bytes(phase, work) for phase in phases)
    spread = 0.04 if plan.device == "cpu" and plan.compute in ("fp32", "tf32") else 0.08
    moving = peak.total_bytes - work.states
    return MemoryEstimate(
        phases=phases,
        device_bytes=device,
        low_bytes=int(peak.total_bytes - spread * peak.total_bytes - (0 if workload.exact else 0.3 * moving)),
        high_bytes=int(peak.total_bytes * (1 + spread)),
        host_bytes=work.host_bytes(device),
        disk_bytes=work.disk_bytes(checkpoints=checkpoints, merged=merged),
        written_per_step_bytes=int(work.written_per_step),
        written_per_checkpoint_bytes=int(work.checkpoint),
        save_copy_bytes=0 if work.trains_visitors else int(work.checkpoint),
    )


@dataclass(frozen=True, kw_only=True)
class LeastMemory:
    """Bytes below which a plan cannot be: of the device, of RAM beside it, and of disk. `waiting_bytes` of the device
    are gradients that wait for the step's other micro-batches: none where a step is one. `inputs_bytes` are those of
    blocks that wait for their backward, wherever they do."""

    device_bytes: int
    waiting_bytes: int
    inputs_bytes: int
    host_bytes: int
    disk_bytes: int


def least_memory(
    architecture: Architecture, plan: Plan, workload: Workload, *, checkpoints: int = 2, merged: bool = False
) -> LeastMemory:
    """What `estimate_memory` can never be below, by a phase that needs no walk of a block: the optimizer's step. RAM
    beside a card and disk are whole."""
    work = Work.of(architecture, plan, workload, OURS)
    device = _device_bytes(work.step_phase(), work)
    return LeastMemory(
        device_bytes=device,
        waiting_bytes=int(work.held),
        inputs_bytes=int(work.waiting),
        host_bytes=work.host_bytes(device),
        disk_bytes=work.disk_bytes(checkpoints=checkpoints, merged=merged),
    )


def _device_bytes(phase: PhaseMemory, work: Work) -> int:
    """What the device must have in a phase: tensors, what the allocator cannot fill, the driver's or the process's own
    part."""
    if work.plan.device == "cpu":
        return phase.total_bytes + work.program.process_bytes + int(0.03 * phase.total_bytes)
    return phase.total_bytes + outside_bytes(work.plan, work.program) + _fragmentation(phase, work)


def _fragmentation(phase: PhaseMemory, work: Work) -> int:
    """Bytes the allocator must have beside a phase's tensors, because what is free lies in pieces.

    Holes are as large as what moves while something stays. In backward that is the working memory of a block, between
    it the gradients that stay and, where weights train, what the blocks before keep: 0.4 of the one, a quarter of the
    others, and all of an unpacked matrix. At the loss the last step's blocks have left holes of about four times what
    the final norm needs, and where whole logits and all weights' gradients come together a fifth of the logits. The
    optimizer's few large tensors leave none, nor does a table that is made whole: 2 % for rounding, as everywhere.

    The shares are those of 540 replays of our program on the simulated allocator (`cap.py`): 7 models of 135M to 9B,
    all methods, 512 to 16,384 tokens. Against the smallest cap of the replay this is 2.4 % more in the median, between
    2 % less and 6 % more in nine of ten; where the peak is a table's gradient 4 % more, between 4 % less and 7 %
    more (138 plans of 512 and 1,024 tokens).
    """
    parts, trains = phase.parts, not work.plan.lora_rank
    if phase.name == "loss":
        whole = trains and work.plan.loss == "full"
        holes = 4.0 * parts["working"] + (0.2 if whole else 0.03) * parts["logits"]
        holes += (0.02 if trains else 0.04) * parts["kept"] + (0.05 if trains else 0.5) * parts["gradients"]
    elif phase.name == "embedding" or phase.name.startswith("backward"):
        made = work.made_table if phase.name == "embedding" and not work.shares_weights else 0.0
        holes = 0.4 * parts["working"] + parts["dequantised"] + 0.25 * (parts["gradients"] - made)
        holes += (0.2 if trains else 0.03) * parts["kept"]
    else:
        holes = 0.0
    return int(holes + 0.02 * phase.total_bytes)


def outside_bytes(plan: Plan, program: Program) -> int:
    """What a card gives away beside tensors: the driver's context and, among several cards, NCCL's buffers."""
    return program.context_bytes + (COMMUNICATION_BYTES if plan.cards > 1 else 0)


@dataclass(frozen=True, kw_only=True)
class Work(Standing):
    """The phases of a step: what stands, and what comes and goes. `blocks` and `tokens` say what scales with the
    micro-batch; in `casts` are copies of weights that wait for backward."""

    @cached_property
    def blocks(self) -> tuple[BlockMemory, ...]:
        """Every block's walk. Where what comes before them is frozen the first block with a backward differs: its
        input needs no gradient."""
        shape, formats, layers = self.architecture.shape, self.formats, self.architecture.layers
        own = None if self.plan.trains_all or self.program.input_grads else self.first
        kept = walks(shape, formats, own, compressed=False)
        if not self.plan.compress:
            return kept
        few = walks(shape, formats, own, compressed=True)
        return tuple(few[layer] if compresses(self.plan, layer, layers) else kept[layer] for layer in range(layers))

    def phase(self, name: str, **parts: float) -> PhaseMemory:
        """A phase: states and what `parts` add by kind."""
        found = dict(self._always)
        copies = 2 if self.program.copies_buffers and name != "load" else 1
        found["weights"] = int(self.weights + copies * self.buffers + parts.pop("weights", 0.0))
        found["optimizer"] = int((self.optimizer if name != "load" else 0.0) + parts.pop("optimizer", 0.0))
        for kind, value in parts.items():
            found[kind] += int(value)  # type: ignore[index]
        return PhaseMemory(name=name, parts=found)

    @cached_property
    def _always(self) -> dict[MemoryKind, int]:
        """What every phase has as much of, and nothing of all other kinds."""
        there: dict[MemoryKind, int] = dict.fromkeys(MEMORY_KINDS, 0)
        return there | {"adapters": int(self.adapters), "slots": int(self.slots), "buckets": int(self.buckets)}

    @cached_property
    def _kept(self) -> tuple[float, ...]:
        """Bytes each block keeps from forward to its backward, its input included where something needs it."""
        first, behind = self.first, self.first + self.plan.recompute
        on_device, products = self.plan.input_tier == "device", self.keeps_products
        again = [
            (
                (block.input * self.stored.states_between[layer] if on_device else 0.0)
                + (block.selected if products else 0.0)
            )
            * self.tokens
            for layer, block in enumerate(self.blocks[first:behind], start=first)
        ]
        once = [
            ((block.input if block.input_saved else 0.0) + block.saved) * self.tokens for block in self.blocks[behind:]
        ]
        return (*[0.0] * first, *again, *once)

    def recomputes(self, layer: int) -> bool:
        """Whether block `layer` runs again in backward."""
        return self.plan.recomputes(layer, self.architecture.layers)

    @cached_property
    def keeps_products(self) -> bool:
        return self.plan.selective and self.program.selective == "every other product"

    def kept_before(self, layer: int) -> float:
        """What the blocks before `layer` keep; inputs that wait elsewhere have two places on the device."""
        elsewhere = 2 * self.stream if self.plan.recompute and self.plan.input_tier != "device" else 0.0
        return self.micro_batches_at_once * sum(self._kept[:layer]) + elsewhere

    @cached_property
    def final_norm(self) -> float:
        """After the blocks: the last hidden state, its normalised copy, and what the norm keeps."""
        norm = self.formats.kernels.norm
        if self.architecture.norm != "rmsnorm" or norm in ("fused", "recomputed"):
            return 2 * self.stream
        width = self.architecture.hidden_size * self.tokens
        normal = float((4 if norm == "fp32" else self.formats.residual) * width) if self.formats.trains else 0.0
        copy = 4.0 * width if self.formats.residual < 4 else 0.0
        return 2 * self.stream + normal + copy

    @cached_property
    def mask(self) -> float:
        """Attention's mask, one for all blocks of its kind. Eager attention adds it to the scores; others get yes or
        no, a byte per pair of positions, unless ALiBi's distances of every head are in it."""
        shape, length = self.architecture, self.length
        kinds = len(set(shape.windows))
        if self.formats.attention == "eager":
            return float(kinds * self.formats.residual * length * self.tokens)
        if shape.position == "alibi":
            return float(self.formats.residual * shape.heads * length * self.tokens)
        if not self.formats.masked and not self.formats.window:
            return 0.0
        return float((kinds if self.formats.masked else 1) * length * self.tokens)

    @cached_property
    def held_mask(self) -> float:
        """The mask after forward: blocks that run again are given it again, and attention keeps ALiBi's."""
        alibi = self.architecture.position == "alibi" and self.formats.attention != "eager"
        return self.mask if alibi or self.plan.recompute else 0.0

    def forward_phase(self) -> PhaseMemory:
        """The last recomputed block's forward, which keeps nothing; a block that keeps is highest in its backward."""
        last = min(self.first + self.plan.recompute, self.architecture.layers) - 1
        layers = {self.first - 1, last} if self.first else {last}
        found = [self._forward_of(layer) for layer in layers if layer >= 0]
        return max(found, key=lambda phase: phase.total_bytes, default=self.phase("forward", gradients=self.held))

    def _forward_of(self, layer: int) -> PhaseMemory:
        """The forward of a block that keeps nothing but perhaps its input."""
        block, before = self.blocks[layer], self.blocks[layer - 1].returned if layer else 0.0
        casts = sum(self.stored.casts) if self.caches_casts else max(self.stored.casts)
        passed = layer < self.first  # its input is nobody's; casts of weights without a gradient do not stay
        if passed:
            casts = self.stored.passing_cast
        moment = self._highest(block.evaluation)
        return self.phase(
            "forward",
            gradients=self.held,
            kept=self.kept_before(layer + 1) + self.mask + self.sent(layer, back=False),
            working=(moment.per_token + before + (block.input if passed else 0.0)) * self.tokens,
            weights=self.root + casts,
            dequantised=self._unpacked_at(moment),
        )

    def _highest(self, moments: tuple[Moment, ...]) -> Moment:
        """Of a forward that keeps nothing the moment that needs most."""
        return max(moments, key=lambda moment: moment.per_token * self.tokens + self._unpacked_at(moment))

    def loss_phase(self) -> PhaseMemory:
        casts = sum(self.stored.casts) if self.caches_casts else 0.0
        logits, gradients = self.logits()
        return self.phase(
            "loss",
            gradients=self.held + gradients,
            kept=self.kept_before(self.architecture.layers) + self._last_graph + self.held_mask,
            working=self.final_norm,
            logits=logits,
            weights=self.root + casts + self.head_cast + (self.visiting_head if head_visits(self.plan) else 0.0),
        )

    @cached_property
    def _last_graph(self) -> float:
        """What the graph of the micro-batch before still holds while the variable of its loss does: inputs of frozen
        4-bit linears. Its rows are of the mean length."""
        if not self.program.keeps_last_loss:
            return 0.0
        return self.last_tokens * sum(block.frozen_inputs for block in self.blocks)

    @cached_property
    def head_cast(self) -> float:
        """The head's weight in the compute format, when it is stored in another."""
        if self.shares_weights:
            return 0.0
        trains = self.head_trains or self.plan.trains_base
        stored = BYTES[self.plan.trained_format] if trains else self.formats.residual
        return float(self.formats.compute * self.architecture.head_params) if stored != self.formats.compute else 0.0

    def logits(self) -> tuple[float, float]:
        """(logits with all that is made of them, gradients made with them) at the worst moment of the loss.

        Whole logits: the program's bytes per entry, and one number more where the family caps them after the head. In
        chunks: of the rows of one chunk, with the hidden state's gradient, and the head's when it trains. Fused: what
        needs more, torch's kernel or ours in its place, or Liger's, which may be there.
        """
        vocab, hidden = self.architecture.vocab_size, self.architecture.hidden_size
        entry = self.logit_bytes
        if self.plan.loss == "full":
            # A soft cap keeps its tanh, in the format the head computes in.
            extra = float(self.formats.compute) if self.architecture.logit_softcap else 0.0
            return (entry + extra) * self.tokens * vocab, 0.0
        rows = min(self.tokens, self.plan.loss_chunk_tokens or self.tokens)
        picked = float(self.formats.residual * hidden * self.tokens)
        capped = self.architecture.logit_softcap is not None
        if self.plan.loss == "fused" and (capped or self.plan.compute not in ("fp32", "tf32")):
            entry = self._chunk_bytes
        ligers = self._liger_rows
        chunk = max(entry * rows, float(self.formats.compute * ligers)) * vocab
        if self.program.own_optimizers and self.head_gradient:
            # A chunk's part of the head's gradient is a 16-bit product beside its logits' gradient; their sum is fp32
            # and at last goes to the weight's format.
            narrow, head = self.formats.compute, self.architecture.head_params
            product = narrow * (max(rows, ligers) * vocab + head) if narrow < 4 or ligers else 0.0
            if ligers and narrow < 4:
                product += 4.0 * head  # it widens the product before it adds it
            copy = self.head_gradient if self.whole_gradient < 4 else 0.0
            return max(chunk, product, copy) + picked, 4.0 * head
        if not self.program.logits_kept:
            return chunk + picked, self.head_gradient
        # All chunks' losses run before any head's backward, which adds one chunk's gradient of the head to the others'.
        gradients = 2.0 * self.head_gradient
        kept = self.program.logits_kept * self.tokens * vocab
        return kept + max(0.0, entry * rows * vocab - gradients) + picked, gradients

    @cached_property
    def _liger_rows(self) -> int:
        """Rows of logits that Liger's fused kernel has at once: about as many numbers as the hidden states have, the
        next power of two of T / ceil(V / h). 0 where it is not what may run: fp16's gradients it cannot scale."""
        on_card = self.plan.device.partition(":")[0] in ("cuda", "xpu")
        if self.plan.loss != "fused" or not on_card or not self.program.own_optimizers or self.plan.compute == "fp16":
            return 0
        tokens = math.ceil(self.tokens)
        wanted = math.ceil(tokens / math.ceil(self.architecture.vocab_size / self.architecture.hidden_size))
        return min(tokens, 1 << max(0, wanted - 1).bit_length())

    @cached_property
    def logit_bytes(self) -> float:
        """Bytes per token and vocabulary entry of the plan's loss."""
        if self.plan.loss == "chunked":
            return self._chunk_bytes
        narrow = self.program.logits_in_compute and self.formats.compute < 4
        return self.program.logits[self.plan.loss] * (0.5 if narrow else 1.0)

    @cached_property
    def _chunk_bytes(self) -> float:
        """The same in chunks. A CPU writes logarithms over logits that the family leaves as they are: fp32 beside the
        narrow ones they come from, or go back to."""
        if self.plan.device == "cpu" and self.architecture.plain_logits and not self.program.logits_kept:
            return 4.0 + (self.formats.compute if self.formats.compute < 4 else 0)
        narrow = self.program.logits_in_compute and self.formats.compute < 4
        return self.program.logits["chunked"] * (0.5 if narrow else 1.0)

    @cached_property
    def held_logits(self) -> float:
        """Logits a variable keeps through backward."""
        narrow = self.program.logits_in_compute and self.formats.compute < 4
        held = self.program.logits_held * (0.5 if narrow else 1.0) * self.tokens * self.architecture.vocab_size
        return held if self.plan.loss == "full" or self.program.logits_kept else 0.0

    def backward_phases(self) -> tuple[PhaseMemory, ...]:
        """At the last block, at the last of each kind, and at the first: between them memory changes linearly."""
        last, first = self.architecture.layers - 1, self.first
        again = first + self.plan.recompute
        compressed = min(last, max(first, again + self.plan.compress - 1))
        layers = sorted({last, max(first, again - 1), compressed, first}, reverse=True)
        if self.shares_weights and last > first + 1:
            layers.insert(1, last - 1)  # where the next block is fetched ahead
        return tuple(self.backward_phase(layer) for layer in dict.fromkeys(layers))

    def backward_phase(self, layer: int) -> PhaseMemory:
        """The worst moment of block `layer`'s backward, or of the forward that comes before it."""
        block, again = self.blocks[layer], self.recomputes(layer)
        gradients = self._gradients_in(layer)

        def moving(moment: Moment) -> float:
            return moment.alive(self.tokens) + gradients(moment) + self._unpacked_at(moment)

        moment = max(block.forward, key=moving)
        beside = self.stream if again else 0.0  # forward runs again beside the gradient of the block's output
        highest = max(block.backward, key=moving, default=moment)
        if moving(highest) >= moving(moment) + beside:
            moment = highest
            beside = beside if self.program.holds_output else 0.0
        own_input = block.input * self.tokens if again or block.input_saved else 0.0
        own_input += block.beyond * self.tokens if again and self.keeps_products else 0.0
        kept_casts = (each for at, each in enumerate(self.stored.casts[:layer]) if not self.recomputes(at))
        casts = self.stored.casts[layer] + (sum(kept_casts) if self.caches_casts else 0.0)
        return self.phase(
            f"backward of block {layer + 1}",
            gradients=gradients(moment),
            kept=self.kept_before(layer)
            + own_input
            + self._held_inputs(layer)
            + self.held_mask
            + self._other_gradients
            + self.sent(layer, back=True),
            working=moment.alive(self.tokens) + beside,
            logits=self.held_logits,
            weights=self.root + self.gathered(layer) + casts,
            dequantised=self._unpacked_at(moment),
        )

    @cached_property
    def _other_gradients(self) -> float:
        """Gradients of the hidden states of the step's other micro-batches."""
        return (self.micro_batches_at_once - 1) * self.stream

    def _unpacked_at(self, moment: Moment) -> float:
        """The matrix in use, unpacked from a quantised base to 16 bits."""
        quantised = self.plan.weight_format in QUANTISED and self.plan.lora_rank
        return 2.0 * moment.weights if quantised else 0.0

    def _gradients_in(self, layer: int) -> Callable[[Moment], float]:
        """Gradients there while an operation of block `layer` runs backward, by the moment of that operation."""
        plan, whole = self.plan, self.whole_gradient
        each_cast = float(self.formats.compute) if self.formats.casts else 0.0
        if self.trains_visitors:  # the block's own are counted with the places of blocks; what is added to them is not
            added = whole if plan.accumulation > 1 else 0.0
            return lambda moment: self.head_gradient + max(added, each_cast) * moment.making
        if self.uses_up_gradients:
            in_step = self.stored.step_chunk if plan.optimizer_in_backward else 0.0
            return lambda moment: self.head_waits + whole * moment.making + max(each_cast * moment.making, in_step)
        if plan.accumulation > 1 or plan.records_graphs:
            return lambda moment: self.held + self.head_waits + (whole + each_cast) * moment.making
        above = self.head_gradient + self.gradient * self.gradient_share * self.stored.trained_after[layer]
        return lambda moment: above + whole * moment.made + (whole + each_cast) * moment.making

    def _held_inputs(self, layer: int) -> float:
        """Inputs and their gradients of frozen blocks that sharding does not let go (see `Sharding`): inputs of the
        blocks from the next on, gradients from the one after it on, as the next one's is this block's own."""
        holds = self.program.sharding.holds_frozen_inputs and self.shares_weights and self.plan.cards > 1
        if not holds or not self.plan.lora_rank or not self.plan.recompute:
            return 0.0
        later = self.architecture.layers - 1 - layer
        return (later + max(0, later - 1)) * self.stream

    def embedding_phase(self) -> PhaseMemory:
        """The embedding's gradient is made whole, then added to the one there is (tied head, accumulation), and that to
        what accumulation has."""
        return self.phase(
            "embedding",
            gradients=self.gradients + self.made_table,
            kept=0.0 if self.plan.last_blocks else self.stream,
            weights=0.0 if self.plan.last_blocks else self.root,
        )

    @cached_property
    def made_table(self) -> float:
        """The embedding's gradient beside all that are counted as there, with what it is added to."""
        if self.plan.last_blocks:  # nothing comes before the first of them
            return self.outside_gradient if self.streams else 0.0
        whole = self.whole_gradient * self.architecture.embedding_params
        again = int(self.plan.accumulation > 1)
        tied = int(self.architecture.tied_embeddings)
        if self.trains_visitors:
            # A tied table's parts are summed apart: what there is of it, and the one that is made.
            return self.outside_gradient + (whole if tied or again else 0.0)
        if self.plan.lora_rank:
            return 0.0
        if self.shares_weights:
            return self.root
        if self.uses_up_gradients:
            return whole + max(self.head_waits + self.tied_sum, self.stored.step_chunk)
        return whole * (again + tied) + self.tied_sum

    @cached_property
    def tied_sum(self) -> float:
        """The sum of a tied table's two gradients, where it has a place of its own.

        Autograd adds the second to the first in place, unless the first is a view. A weight's gradient from a product
        with its transpose is one; one that was cast to another format, or that a loss in chunks has filled, is not.
        """
        view = self.plan.loss == "full" and not self.head_cast and not self.shares_weights
        return self.head_gradient if view and self.architecture.tied_embeddings else 0.0

    def step_phase(self) -> PhaseMemory:
        """All gradients, and what the optimizer makes beside them: fused and low-bit kernels nothing. Some programs
        cast the gradients to fp32 first."""
        plan, share = self.plan, self.trained * self.optimizer_share
        if self.trains_visitors:
            at_work = self.numbers_in_step if plan.device == "cpu" else 0.0
            return self.phase("step", gradients=self.outside_gradient, optimizer=at_work)
        if plan.optimizer_tier != "device" or self.uses_up_gradients:
            return self.phase("step", gradients=self.gradients)
        if self.program.own_optimizers:
            return self.phase("step", gradients=self.gradients, optimizer=self.stored.step_chunk)
        extra = self.program.step_temporary * self.weight * share if plan.optimizer_bits >= 16 else 0.0
        return self.phase("step", gradients=self.gradients + self.program.step_gradient * share, optimizer=extra)

    def evaluation_phase(self) -> PhaseMemory:
        """Forward without gradients: nothing is kept. The highest is a block's forward, or the logits."""
        casts = sum(self.stored.casts) if self.caches_casts else max(self.stored.casts)
        blocks = {id(block): (layer, block) for layer, block in enumerate(self.blocks)}.values()
        in_blocks = [
            self.phase(
                "evaluation",
                working=(block.input + block.returned + moment.per_token) * self.tokens,
                kept=self.mask + self.sent(layer, back=False),
                weights=casts + self.root,
                dequantised=self._unpacked_at(moment),
            )
            for layer, block in blocks
            for moment in (self._highest(block.evaluation),)
        ]
        at_head = self.phase(
            "evaluation",
            working=2 * self.stream,
            logits=self.evaluated_logits,
            weights=casts + self.head_cast + self.root + (self.visiting_head if head_visits(self.plan) else 0.0),
        )
        return max(*in_blocks, at_head, key=lambda phase: phase.total_bytes)

    def save_phase(self) -> PhaseMemory:
        """Between two steps: gradients are there only where recorded launches write to their places. A copy in RAM
        (`save_copy_bytes`) is taken where there is room, so it is no part of what a run needs."""
        return self.phase("save", gradients=self.gradients if self.plan.records_graphs else 0.0)

    def calibration_phases(self, workload: Workload) -> tuple[PhaseMemory, ...]:
        """One micro-batch in fp32 before a step (`vramfit.engine.drift`): nothing is held of others, all gradients are
        made, and stay until their norm is known.

        What moves is that of a plan in fp32; what lies there is this plan's. Weights that are stored in 16 bits are
        widened one module at a time, and backward needs the copies: of each block that is not recomputed from its
        forward to its backward, of one that is during its own, and of the head.
        """
        frozen16 = self.plan.weight_format in ("bf16", "fp16") and bool(self.plan.lora_rank)
        wide = dataclasses.replace(
            self.plan,
            compute="fp32",
            weight_format="fp32" if frozen16 else self.plan.weight_format,
            accumulation=1,
            optimizer_in_backward=False,
        )
        exact = Work.of(self.architecture, wide, workload, self.program)
        narrow = frozen16 or self.plan.trained_format in ("bf16", "fp16")
        last, again = self.architecture.layers - 1, self.plan.recompute
        found = []
        layers = sorted({last, max(0, again - 1), 0}, reverse=True)
        for layer, phase in ((last, exact.loss_phase()), *((layer, exact.backward_phase(layer)) for layer in layers)):
            there = range(again, layer + 1) if layer >= again else range(layer, layer + 1)
            copies = 4.0 * sum(map(self.architecture.params_of_block, there)) if narrow else 0.0
            if phase.name == "loss":
                copies += 4.0 * self.architecture.head_params if narrow else 0.0
                copies -= 4.0 * self.architecture.params_of_block(layer) if narrow and layer < again else 0.0
            moved = phase.parts["weights"] - int(exact.weights) + int(self.weights) + int(copies)
            found.append(PhaseMemory(name="calibration", parts={**phase.parts, "weights": moved}))
        return tuple(found)

    @cached_property
    def evaluated_logits(self) -> float:
        """Whole logits, in the format they are computed in too, and their log-softmax; in chunks what a chunk takes."""
        vocab = self.architecture.vocab_size
        if self.plan.loss == "full":
            first = float(self.formats.compute) if self.formats.compute < 4 else 0.0
            return min(8.0 + first, self.program.logits["full"]) * self.tokens * vocab
        rows = min(self.tokens, self.plan.loss_chunk_tokens or self.tokens)
        return min(self._chunk_bytes or 8.0, self.program.logits["full"]) * rows * vocab


@lru_cache(maxsize=256)
def walks(shape: Architecture, formats: Formats, own: int | None, *, compressed: bool) -> tuple[BlockMemory, ...]:
    """Every block's walk; the input of block `own` needs no gradient."""
    usual = shape.by_kind(
        lambda layer: block_memory(shape, layer, formats, compressed=compressed), windows=formats.window
    )
    if own is None:
        return usual
    first = block_memory(shape, own, formats, input_grad=False, compressed=compressed)
    return (*usual[:own], first, *usual[own + 1 :])


def compresses(plan: Plan, layer: int, layers: int) -> bool:
    """Whether block `layer` of `layers` keeps its linears' inputs in 8 bits."""
    first = plan.first_trained(layers) + plan.recompute
    return first <= layer < first + plan.compress
