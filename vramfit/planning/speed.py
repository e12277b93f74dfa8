"""How long an optimizer step takes and what bounds it: from a plan, a shape and a device, by arithmetic alone.

FLOPs per token that passes the model, with N the numbers in matrix products a token passes (active parameters without
the embedding look-up): forward 2N, gradient of the input 2N, gradient of the weights 2N. So full training 6N, LoRA 4N
(plus 6 times the adapters), 2N for blocks before the first that trains, and 2N more for blocks that are recomputed.
Attention adds, forward and causal, 2 x query width x length per token and block, twice that backward; a block with a
sliding window less (`_attended`). The head counts only for tokens that carry loss.

Seconds are those of the operations (`operations.py`) at what the device reaches (`rates.py`):

    compute    products and attention
    memory     what lies between them, logits, casts and unpacked weights
    launch     the host's time for kernels, beyond what the device is busy anyway
    optimizer  states read and written, where they live
    link       what crosses between cards, or between card and RAM, beyond what computing hides
    disk       the same for the disk

What runs at the same time takes as long as the longest, and a part of the shorter that nothing hides: the first block
that must arrive, the last that must leave, and the units that a collective takes from computing.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Final

from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.planning.block import Formats
from vramfit.planning.formats import formats_of
from vramfit.planning.operations import BlockWork, block_work
from vramfit.planning.plan import Plan, SpeedEstimate, Workload
from vramfit.planning.program import OURS, Program
from vramfit.planning.rates import Rates, rates_of
from vramfit.planning.slots import SplitBlock
from vramfit.planning.stored import BYTES, QUANTISED, Stored, head_trains, stored

ATTENTION_BACKWARD: Final = 0.85
"""Attention's backward against its forward in FLOP/s (FlashAttention-2's own figures)."""

MASKED_ATTENTION: Final = 0.7
"""With a mask another kernel runs, slower, and nothing is skipped."""

LOGIT_TRIPS: Final = 4.0
"""Each copy of the logits is written and read once forward and once backward."""

FUSED_LOGITS: Final = 16.0
"""Bytes moved per token and entry where a loss holds hardly any logits: its chunk is written, read by the softmax,
overwritten by its gradient and read by two products."""

FOREACH_TRIPS: Final = 3.5
"""AdamW as a list of operations on all tensors reads and writes 25 numbers where a fused kernel has 7."""

CLIPPING_GRADIENTS: Final = 3.0
"""The norm reads every gradient, scaling reads and writes it."""

COLLECTIVE_SHARE: Final = 0.15
"""Of a hidden collective's time, what computing loses: it holds about a sixth of a card's units."""

UNIT_SECONDS: Final = 150e-6
"""What gathering and freeing one sharded unit costs the host: its hooks are Python."""

SMALL_COLLECTIVE_SECONDS: Final = 30e-6
"""A collective of next to nothing."""

UNPACKED_BYTES: Final = 2.1
"""Written per weight that is unpacked to 16 bits, scales read beside."""

FORWARD_KERNELS_OF_SLICE: Final = 16
BACKWARD_KERNELS_OF_SLICE: Final = 60
"""For one micro-batch's rows of a slice of experts: picked, sent through both products, weighted, added to the sums."""

KERNELS_OUTSIDE: Final = 60
"""Embedding, final norm, head, loss and their backward."""


def estimate_speed(
    architecture: Architecture,
    plan: Plan,
    device: Device,
    workload: Workload,
    *,
    sequences_per_step: int | None = None,
    program: Program = OURS,
) -> SpeedEstimate:
    """Seconds per optimizer step and trained tokens/s of `plan` on `plan.cards` of `device`, done by `program`.

    `bounds` are seconds of the step by what takes them (above); they add up to `step_seconds`. `mfu` counts useful
    FLOPs, recompute left out, against the dense rate. `watts` is what all cards may draw: an upper bound.
    """
    sequences = sequences_per_step or plan.micro_batch * plan.accumulation * plan.cards
    padded, share = padded_length(plan, workload), workload.trained_share
    flops = sequences * padded * flops_per_token(architecture, plan, length=padded, trained_share=share)
    again = sequences * padded * _recomputed_flops(architecture, plan, padded)
    rates = rates_of(device, plan.compute, compiled=plan.compiled)
    step = _Step(
        architecture=architecture,
        plan=plan,
        program=program,
        rates=rates,
        length=padded,
        trained_share=share,
        passes=sequences / (plan.micro_batch * plan.cards),
    )
    bounds = step.bounds()
    seconds = sum(bounds.values())
    return SpeedEstimate(
        step_seconds=seconds,
        tokens_per_s=sequences * workload.mean_tokens * share / seconds,
        bounds=bounds,
        flops_per_step=flops,
        rate_source=rates.source,
        mfu=(flops - again) / (seconds * rates.dense * plan.cards),
        watts=plan.cards * device.power_watts,
    )


# --- FLOPs -----------------------------------------------------------------------------------------------------------


def flops_per_token(architecture: Architecture, plan: Plan, *, length: float, trained_share: float = 1.0) -> float:
    """FLOPs of forward and backward for one token of a sequence of `length` tokens (derivation above)."""
    passes, head = 4.0 if plan.lora_rank else 6.0, 6.0 if head_trains(architecture, plan) else 4.0
    with_backward = _share_with_backward(architecture, plan)
    return (
        (2.0 + (passes - 2.0) * with_backward) * _block_params(architecture)
        + head * architecture.head_params * trained_share
        + 6.0 * stored(architecture, plan).adapter_params
        + _attention_flops(architecture, length)
        + 2.0 * _attention_flops(architecture, length, first=plan.first_trained(architecture.layers))
        + _recomputed_flops(architecture, plan, length)
    )


def _share_with_backward(architecture: Architecture, plan: Plan) -> float:
    """Of the blocks, those that are not only passed forward."""
    return plan.trained_layers(architecture.layers) / architecture.layers


def _recomputed_flops(architecture: Architecture, plan: Plan, length: float) -> float:
    """FLOPs per token of the forward that is done again."""
    layers = architecture.layers
    attention = _attention_flops(architecture, length, first=plan.first_trained(layers)) / plan.trained_layers(layers)
    forward = 2.0 * (_block_params(architecture) + stored(architecture, plan).adapter_params) / layers + attention
    return (0.5 if plan.selective else 1.0) * plan.recompute * forward


def _block_params(architecture: Architecture) -> float:
    """Numbers in products of the blocks that a token passes."""
    outside = architecture.embedding_params + (0 if architecture.tied_embeddings else architecture.head_params)
    positions = architecture.learned_positions * architecture.hidden_size
    return max(0, architecture.active_params - outside - positions)


def _attention_flops(architecture: Architecture, length: float, *, first: int = 0) -> float:
    """FLOPs per token of attention forward, in the blocks from `first` on: a multiplication and an addition for each
    position looked at and number of a query, and as many for the values."""
    width = architecture.q_width + architecture.attention_out_width
    attended = {slides: _attended(architecture, length, slides=slides) for slides in (False, True)}
    return float(width * sum(attended[slides] for slides in architecture.windows[first:]))


def _attended(architecture: Architecture, length: float, *, slides: bool) -> float:
    """Twice the mean number of positions a token of a block looks at: the length L when causal; where the block slides
    with a window w below L, its first w tokens look at w/2 in the mean and the others at w: 2w - w^2 / L."""
    window = architecture.sliding_window
    if not slides or window is None or length <= window:
        return length
    return window * (2.0 - window / length)


def padded_length(plan: Plan, workload: Workload) -> float:
    """Tokens a sequence takes in its micro-batch, padding included.

    The n sequences of a step are sorted by length and cut into micro-batches of m, each padded to its longest. With
    lengths spread evenly around the mean, the expected longest of n is mean + (longest - mean) (n - 1) / (n + 3), and
    the mean padding of a micro-batch (m - 1) / (n - 1) of that distance.
    """
    longest = min(plan.max_length, workload.longest_tokens)
    mean = min(workload.mean_tokens, longest)
    if plan.packing:
        return mean
    sequences = plan.micro_batch * plan.accumulation
    return mean + (longest - mean) * (plan.micro_batch - 1) / (sequences + 3)


# --- seconds ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Busy:
    """Seconds a device computes, and moves its memory."""

    compute: float
    memory: float

    @property
    def total(self) -> float:
        return self.compute + self.memory

    def __add__(self, other: _Busy) -> _Busy:
        return _Busy(self.compute + other.compute, self.memory + other.memory)

    def times(self, count: float) -> _Busy:
        return _Busy(count * self.compute, count * self.memory)


@dataclass(frozen=True, kw_only=True)
class _Kind:
    """Blocks that do the same: how many, how many of them have a backward, what one does, whether it slides, and in
    which parts it comes, if it does."""

    count: int
    back: int
    work: BlockWork
    slides: bool
    split: SplitBlock | None = None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """One optimizer step on one card: `passes` micro-batches, each of `tokens`."""

    architecture: Architecture
    plan: Plan
    program: Program
    rates: Rates
    length: float
    trained_share: float
    passes: float

    @property
    def tokens(self) -> float:
        return self.plan.micro_batch * self.length

    @cached_property
    def formats(self) -> Formats:
        return formats_of(self.architecture, self.plan, self.program, length=int(self.length))

    @property
    def writes_scores(self) -> bool:
        """Whether attention has the scores of all pairs in memory."""
        return self.formats.attention in ("eager", "math")

    @cached_property
    def stored(self) -> Stored:
        return stored(self.architecture, self.plan, self.program)

    @cached_property
    def kinds(self) -> tuple[_Kind, ...]:
        """The blocks, by whether they have experts and whether they slide."""
        shape, first = self.architecture.shape, self.plan.first_trained(self.architecture.layers)
        # Only scores that are written out depend on the length, which is another for every micro-batch's padding.
        formats = self.formats if self.writes_scores else dataclasses.replace(self.formats, length=0)
        alike: dict[tuple[bool, bool], list[int]] = {}
        for layer in range(shape.layers):
            alike.setdefault((shape.mixtures[layer], shape.windows[layer]), []).append(layer)
        return tuple(
            _Kind(
                count=len(layers),
                back=sum(layer >= first for layer in layers),
                work=block_work(shape, layers[0], formats, compiled=self.plan.compiled),
                slides=slides,
                split=self.stored.split[layers[0]],
            )
            for (_, slides), layers in alike.items()
        )

    @cached_property
    def trained(self) -> int:
        return self.stored.trained

    @property
    def trains_base(self) -> bool:
        return not self.plan.lora_rank

    @property
    def shares_weights(self) -> bool:
        return self.plan.sharding in ("zero3", "fsdp")

    @property
    def streams(self) -> bool:
        return self.plan.weights_tier != "device" and not self.shares_weights

    def bounds(self) -> dict[str, float]:
        """Seconds of the step by what takes them."""
        busy = self.busy.times(self.passes)
        launches = self.launches
        if not self.rates.on_cpu:
            launches = max(0.0, launches - busy.total)
        working = busy.total + launches
        optimizer, optimizer_link = self.optimizer()
        link = self.exposed_link(working)
        disk = self.exposed_disk(working + link) + self.disk_of_step(optimizer)
        if self.streams and self.plan.optimizer_tier != "device" and self.at_once and not self.rates.on_cpu:
            # the host steps a block while the device computes the next
            optimizer = max(0.0, optimizer - working - link - disk) + optimizer / self.architecture.layers
        return {
            "compute": busy.compute,
            "memory": busy.memory,
            "launch": launches,
            "optimizer": optimizer,
            "link": link + optimizer_link,
            "disk": disk,
        }

    # --- what the device does ----------------------------------------------------------------------------------------

    @cached_property
    def busy(self) -> _Busy:
        """One micro-batch: forward, what is recomputed, backward, head and loss."""
        total = self.head() + _Busy(0.0, self.weight_traffic / self.rates.bandwidth)
        for kind in self.kinds:
            total += self.forward(kind).times(kind.count) + (self.again(kind) + self.backward(kind)).times(kind.back)
            if kind.split is not None:
                total += self.around_experts(kind).times(2 * kind.count)
        return total

    def around_experts(self, kind: _Kind) -> _Busy:
        """The forward of what is not an expert, which a split block does once more on each way; of what lies between
        products, half."""
        around = tuple(product for product in kind.work.products if product.copies == 1)
        found = self.forward(dataclasses.replace(kind, work=dataclasses.replace(kind.work, products=around)))
        return _Busy(found.compute, found.memory / 2)

    @property
    def recomputed(self) -> float:
        """The share of the blocks with a backward whose forward is done again."""
        return self.plan.recompute / self.plan.trained_layers(self.architecture.layers)

    def again(self, kind: _Kind) -> _Busy:
        """What backward does of forward again: all of it, or when recompute is selective what the program makes again
        (every second product and what lies between, or attention's inside)."""
        whole = self.forward(kind).times(self.recomputed)
        if not self.plan.selective:
            return whole
        attention = self.attention(kind) * self.recomputed
        if self.program.selective == "attention":
            return _Busy(attention, 0.0)
        return _Busy((whole.compute - attention) / 2, whole.memory)

    def forward(self, kind: _Kind) -> _Busy:
        size, tokens, work = float(self.formats.compute), self.tokens, kind.work
        products = sum(
            product.copies
            * self.rates.product_seconds(tokens * product.share, product.inputs, product.outputs, size=size)
            for product in work.products
        )
        return _Busy(products + self.attention(kind), tokens * work.forward_bytes / self.rates.bandwidth)

    def backward(self, kind: _Kind) -> _Busy:
        """The gradient of each product's input, that of its weights where they train, and twice attention."""
        size, tokens, work, seconds = float(self.formats.compute), self.tokens, kind.work, 0.0
        for product in work.products:
            rows = tokens * product.share
            each = self.rates.product_seconds(rows, product.outputs, product.inputs, size=size)
            if product.trained:
                each += self.rates.product_seconds(product.inputs, rows, product.outputs, size=size)
            seconds += product.copies * each
        return _Busy(
            seconds + 2.0 * self.attention(kind) / ATTENTION_BACKWARD,
            tokens * work.backward_bytes / self.rates.bandwidth,
        )

    def attention(self, kind: _Kind) -> float:
        """Seconds of one block's attention forward. Where a kernel knows that it is causal (and FlashAttention of the
        window) it skips what nobody looks at; scores that are written out, and SDPA with a mask, take all pairs."""
        shape, formats = self.architecture, self.formats
        written = self.writes_scores
        masked = not written and (formats.masked or (formats.window and kind.slides))
        pairs = self.length if written or masked else _attended(shape, self.length, slides=kind.slides) / 2.0
        rate = self.rates.attention_rate(self.length, shape.head_dim)
        if masked:
            rate *= MASKED_ATTENTION
        if written:
            rate = self.rates.dense * self.rates.reach
        return self.tokens * kind.work.attended * pairs / rate

    def head(self) -> _Busy:
        """Logits of the tokens that carry loss, and everything made of them."""
        shape, size = self.architecture, float(self.formats.compute)
        rows, width = self.tokens * self.trained_share, float(shape.hidden_size)
        vocabulary = float(shape.vocab_size)
        seconds = self.rates.product_seconds(rows, width, vocabulary, size=size)
        seconds += self.rates.product_seconds(rows, vocabulary, width, size=size)
        if head_trains(self.architecture, self.plan):
            seconds += self.rates.product_seconds(width, rows, vocabulary, size=size)
        held = self.program.logits[self.plan.loss]
        moved = LOGIT_TRIPS * held if held else FUSED_LOGITS
        if self.plan.compiled:
            moved = min(moved, FUSED_LOGITS)
        return _Busy(seconds, rows * vocabulary * moved / self.rates.bandwidth)

    @property
    def weight_traffic(self) -> float:
        """Bytes per micro-batch that weights cause: unpacked from 4 bits in each pass, cast to 16 bits by autocast and
        their gradients back, gradients of further micro-batches added."""
        plan, size = self.plan, float(self.formats.compute)
        blocks = sum(
            kind.count * sum(product.weights for product in kind.work.products if product.base) for kind in self.kinds
        )
        moved = 0.0
        if plan.lora_rank and plan.weight_format in QUANTISED:
            moved += (2.0 + self.recomputed) * blocks * (BYTES[plan.weight_format] + UNPACKED_BYTES)
        if self.trains_base and plan.trained_format == "fp32" and size < 4:
            share = 1.0 / plan.cards if self.shares_weights else 1.0
            passes = 1.0 if self.program.caches_casts or self.shares_weights else 1.0 + self.recomputed
            passed = self.architecture.params - self.trained  # cast for forward alone
            moved += ((passes + 1.0) * self.trained + passed) * (4.0 + size) * share
        if self.passes > 1:
            moved += 3.0 * self.gradient * self.trained / (plan.cards if self.shares_weights else 1)
        return moved

    @property
    def gradient(self) -> float:
        """Bytes of a trained parameter's gradient."""
        own = self.program.adapter if self.plan.lora_rank else BYTES[self.plan.trained_format]
        return own if self.program.gradient is None else self.program.gradient

    @property
    def launches(self) -> float:
        """Seconds the host needs for all kernels of the step, and for the hooks of sharded units."""
        forward = (
            sum((kind.count + kind.back * self.recomputed) * kind.work.forward_kernels for kind in self.kinds)
            + KERNELS_OUTSIDE / 3
        )
        backward = sum(kind.back * kind.work.backward_kernels for kind in self.kinds) + KERNELS_OUTSIDE * 2 / 3
        for kind in self.kinds:
            if kind.split is not None:
                slices = kind.count * kind.split.slices
                forward += 2 * kind.count * kind.work.forward_kernels + FORWARD_KERNELS_OF_SLICE * slices
                backward += BACKWARD_KERNELS_OF_SLICE * slices
        kernels = forward * self.rates.forward_launch + backward * self.rates.backward_launch
        hooks = UNIT_SECONDS * sum(self.gathers) if self.shares_weights else 0.0
        return self.passes * (kernels + hooks)

    # --- the optimizer -----------------------------------------------------------------------------------------------

    def optimizer(self) -> tuple[float, float]:
        """(seconds of the step itself, seconds its numbers take over the link when the states live in RAM)."""
        plan = self.plan
        weight = self.program.adapter if plan.lora_rank else BYTES[plan.trained_format]
        states = self.stored.moments / max(1, self.trained)
        trips = FOREACH_TRIPS if self.program.step_temporary and plan.optimizer_bits >= 16 else 1.0
        if plan.optimizer_tier != "device":
            trips = 1.0  # such optimizers are kernels of their own
        share = 1.0 / plan.cards if plan.sharding not in ("none", "ddp") else 1.0
        numbers = self.trained * share
        moved = trips * (2 * weight + self.gradient + 2 * states) + CLIPPING_GRADIENTS * self.gradient
        on_device = plan.optimizer_tier == "device" and not self.rates.on_cpu
        bandwidth = self.rates.bandwidth if on_device else self.rates.ram
        on_link = 0.0
        if plan.optimizer_tier != "device" and plan.weights_tier == "device" and not self.rates.on_cpu:
            on_link = numbers * (self.gradient + weight) / self.rates.link
        return numbers * moved / bandwidth, on_link

    # --- links and disk ----------------------------------------------------------------------------------------------

    @property
    def gathers(self) -> tuple[float, float]:
        """(collectives of a micro-batch with something in them, those of adapters that are units of their own)."""
        layers = self.architecture.layers
        small = 0.0
        if self.plan.lora_rank and self.program.sharding.adapter_units:
            adapted = len(self.formats.adapted)
            # forward, recompute and backward each gather them; a block is gathered around the last two at once
            small = layers * adapted * self.program.sharding.adapter_units * (2.0 + self.recomputed)
        return 2.0 * layers, small

    def exposed_link(self, working: float) -> float:
        """Seconds of the step that links add to `working` ones."""
        if self.streams:
            return self._exposed_visits(working)
        exposed = 0.0
        if self.plan.cards > 1:
            exposed = self.exposed_collectives(working)
        if self.plan.input_tier == "host":
            inputs = 2.0 * self.plan.recompute * self.formats.residual * self.architecture.hidden_size * self.tokens
            exposed += self._hidden(self.passes * inputs / self.rates.link, working)
        return exposed

    def _exposed_visits(self, working: float) -> float:
        """Those of a step whose blocks visit. Inputs that wait in RAM, or pass it on their way to disk, move in the
        stream that computes: nothing is computed meanwhile, and on their way back they have the half of the link that
        blocks come over."""
        inputs = 0.0 if self.rates.on_cpu else sum(self.waiting_inputs) / self.rates.link
        if self.plan.weights_tier != "host":
            return inputs
        return inputs + self._hidden(self.visits / self.rates.link, working + inputs / 2.0)

    @cached_property
    def waiting_inputs(self) -> tuple[float, float]:
        """Bytes of a step's inputs (away from the device, back), where blocks visit: of every block that has a
        backward. One that comes in parts asks for its input twice, and has its experts' answer wait as well."""
        if self.plan.input_tier == "device":
            return 0.0, 0.0
        hidden = self.passes * self.tokens * self.architecture.hidden_size * float(self.formats.residual)
        away = sum(kind.back * (1.0 if kind.split is None else 2.0) for kind in self.kinds)
        back = sum(kind.back * (1.0 if kind.split is None else 4.0) for kind in self.kinds)
        return hidden * away, hidden * back

    def exposed_collectives(self, working: float) -> float:
        """Gathering weights, reducing gradients: in every micro-batch where weights are shared, else once a step."""
        plan, others = self.plan, (self.plan.cards - 1) / self.plan.cards
        gradients = self.trained * (float(self.formats.compute) if self.shares_weights else self.gradient)
        if not self.shares_weights:
            trips = {"ddp": 2.0, "zero1": 3.0, "zero2": 2.0}.get(plan.sharding, 0.0)
            reduced = trips * others * gradients / self.rates.collective
            return self._hidden(reduced, working / self.passes)
        weights = self.gathered_bytes
        gathered = (2.0 * weights + gradients) * others / self.rates.collective
        if plan.weights_tier != "device":  # each card brings its share from RAM first, and hands its gradients back
            gathered += (2.0 * weights + gradients) / plan.cards / self.rates.link
        gathered += SMALL_COLLECTIVE_SECONDS * sum(self.gathers)
        seconds = self.passes * gathered
        if plan.lora_rank and self.program.sharding.adapter_units:
            # Adapters' own small gathers are in the same queue, so that no block's is ever ahead of computing.
            return seconds
        return self._hidden(seconds, working, lost=COLLECTIVE_SHARE)

    @property
    def gathered_bytes(self) -> float:
        """Bytes of all weights as they are gathered: quantised as stored, others as they are computed with."""
        if self.plan.lora_rank and self.plan.weight_format in QUANTISED:
            return self.stored.weight_bytes
        return float(self.formats.compute) * self.architecture.params

    @property
    def visits(self) -> float:
        """Bytes a step brings to the device: every block that does not stay, forward and, where it has one, backward,
        whatever the number of micro-batches; and what has changed of those that stay and train. Blocks that train send
        their gradients back at the same time, over the link's other half."""
        layers, plan = self.architecture.layers, self.plan
        blocks = self.stored.weight_bytes * (1.0 - self.architecture.outside_params / self.architecture.params)
        first, stay = plan.first_trained(layers), plan.staying(layers)
        passes = sum(2.0 if layer >= first else 1.0 for layer in range(layers) if layer not in stay)
        if self.trains_base:
            passes += sum(layer >= first for layer in stay)
        return blocks * passes / layers

    def exposed_disk(self, working: float) -> float:
        """Seconds of the step that the disk adds to forward and backward: blocks are read, gradients that wait for the
        norm of all are written, inputs that wait there are written and read."""
        plan, rates = self.plan, self.rates
        read = self.visits if self.streams and plan.weights_tier == "disk" else 0.0
        if self.at_once:
            in_step, written = self._on_disk_in_step
            read += in_step
        else:
            written = self.gradient * self.block_numbers if plan.optimizer_tier == "disk" else 0.0
        if plan.input_tier == "disk":
            away, back = self.waiting_inputs
            read, written = read + back, written + away
        seconds = read / rates.disk_read + written / rates.disk_write
        return self._hidden(seconds, working) if seconds else 0.0

    def disk_of_step(self, optimizer: float) -> float:
        """Seconds that the disk adds to an optimizer's step after backward, of which `optimizer` are computing."""
        if self.at_once:
            return 0.0
        read, written = self._on_disk_in_step
        return max(0.0, read / self.rates.disk_read + written / self.rates.disk_write - optimizer)

    @property
    def at_once(self) -> bool:
        """Whether each block is stepped while backward goes on."""
        return self.plan.optimizer_in_backward and self.plan.clip_passes == 1

    @property
    def block_numbers(self) -> float:
        """Trained weights in the blocks."""
        return float(self.trained - self.stored.trained_outside)

    @property
    def _on_disk_in_step(self) -> tuple[float, float]:
        """(bytes read, bytes written) where optimizer states are on disk: states, the blocks' weights, and gradients
        that have waited."""
        plan = self.plan
        if plan.optimizer_tier != "disk":
            return 0.0, 0.0
        weight = BYTES[plan.trained_format]
        master = self.program.host_master * self.trained if weight < 4 else 0.0
        states = self.stored.moments + master + weight * self.block_numbers
        gradients = 0.0 if self.at_once else self.gradient * self.block_numbers
        return states + gradients, states

    def _hidden(self, moving: float, working: float, *, lost: float = 0.0) -> float:
        """What `moving` adds to `working` when both run at once: the excess, the first block's or bucket's part that
        nothing hides, and what computing loses of the rest."""
        first = moving / self.architecture.layers
        return max(first + lost * min(moving, working), moving - working + first)
