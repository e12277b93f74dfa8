"""One transformer block as operations: what a decoder block does, in the formats and with the kernels of a program.

Derivation: the modelling files of `transformers` (RMSNorm in fp32, rotary positions, SDPA, gated or plain MLP, experts
by grouped products) and which tensors each PyTorch operation saves for backward. Sizes are bytes per token.

| operation | saves |
|---|---|
| RMSNorm written in Python | fp32 input (itself when it is fp32), the normalised values when its weight trains |
| LayerNorm written in Python | its input, the centred and the normalised values |
| fused RMSNorm, native LayerNorm | its input |
| linear that trains | its input; under autocast a 16-bit copy of it, one per linear |
| frozen linear | nothing (bitsandbytes before 0.43.2: its input) |
| LoRA on a linear | its input in the format it computes in: of its own where that is a copy, and a dropout mask |
| rotary positions | nothing of size |
| SDPA, flash | q, k, v, output, one fp32 number per head |
| eager attention | fp32 scores after softmax, and their 16-bit copy |
| SiLU or GELU | its input; GELU written in Python also its tanh and both factors of its product |
| product of the gated MLP | both factors; fused kernels keep gate and up alone |

In a block that is compressed, inputs of linears wait in 8 bits where nothing else keeps them (`Tape.in_eight_bits`).
Behind a compiler what lies between products keeps its inputs alone; inputs of products that train stay.
Selective recompute keeps some results for backward and makes the rest again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from vramfit.models.architecture import Architecture, Linear
from vramfit.models.families import (
    CLAMPS_GATE,
    FP32_DISTANCES,
    FP32_NORM_WEIGHT,
    NAMES_BRANCH,
    PLAIN_SOFTMAX,
    RETURNS_SCORES,
    WEIGHS_IN_FP32,
    WIDE_LAYER_NORM,
)
from vramfit.planning.program import PYTHON_KERNELS, Kernels
from vramfit.planning.tape import Given, Moment, Tape, Value, highest

UNPACKED_AT_ONCE: Final = 2**25
"""Numbers of experts in one tensor and in few bits that are unpacked together, as whole matrices: at least one."""


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes per number: `residual` between blocks, `compute` in matrix products. `trains` is whether base weights do.

    `autocast` is whether linears cast what they are given; `adapted` are the linears with LoRA, of `rank`, in
    `adapter` bytes, `dora` whether each output's length trains, too, `adapts_experts` whether experts in one tensor
    have adapters. `dropout_mask` is bytes per number that their dropout keeps (0: none; cards keep a byte, the
    CPU a factor). `quantised` is whether the block's linears are in few bits. `masked` is whether attention gets a
    mask, as packed rows do, `window` whether the blocks that slide do; `length` is tokens of a sequence, wherever one
    attends to all others in memory (0: nowhere). `softmax` is bytes per number of a softmax that names no format.
    """

    residual: int
    compute: int
    trains: bool
    autocast: bool
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    adapter: int = 4
    dora: bool = False
    adapts_experts: bool = False
    dropout_mask: int = 0
    quantised: bool = False
    attention: str = "sdpa"
    branch_mask: int = 0
    masked: bool = False
    window: bool = False
    length: int = 0
    softmax: int = 4
    kernels: Kernels = PYTHON_KERNELS

    @property
    def casts(self) -> bool:
        return self.autocast and self.residual != self.compute


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """One block, its input not counted: bytes per token `saved` for backward (and whether its `input_saved` is among
    what backward needs), and the moments that can be the highest of forward, of backward, and of a forward that keeps
    nothing. Backward begins with everything saved and the gradient of the block's output.

    `selected`: what selective recompute keeps of it (every second product's result and attention's), `beyond` what of
    that backward itself would not keep; `frozen_inputs`: what functions hold that autograd does not free; `returned`:
    attention's weights, where the block returns them."""

    input: float
    input_saved: bool
    saved: float
    forward: tuple[Moment, ...]
    backward: tuple[Moment, ...]
    evaluation: tuple[Moment, ...]
    selected: float = 0.0
    beyond: float = 0.0
    frozen_inputs: float = 0.0
    returned: float = 0.0


@lru_cache(maxsize=512)
def block_memory(
    architecture: Architecture, layer: int, formats: Formats, *, input_grad: bool = True, compressed: bool = False
) -> BlockMemory:
    """Walk block `layer`; `input_grad` is False for the first block of a frozen model: its input needs none.
    `compressed`: inputs of its linears wait in 8 bits."""
    tape, start = block_tape(architecture, layer, formats, input_grad=input_grad, compressed=compressed)
    if input_grad and not compressed:
        evaluation = highest(tape.forward(keeps=False))
    else:  # what is kept for backward is no matter to a forward that keeps nothing
        evaluation = block_memory(architecture, layer, formats, compressed=False).evaluation
    return BlockMemory(
        input=start.size,
        input_saved=any(start.storage in operation.saves for operation in tape.operations),
        saved=tape.saved,
        forward=highest(tape.forward()),
        backward=highest(tape.backward()),
        evaluation=evaluation,
        returned=_returned(architecture, formats),
        **_held_otherwise(tape),
    )


def _returned(architecture: Architecture, formats: Formats) -> float:
    """Bytes per token of attention's weights, in the format they are multiplied with the values in."""
    if formats.attention != "eager" or architecture.family not in RETURNS_SCORES:
        return 0.0
    return float(formats.compute * architecture.heads * formats.length)


def _held_otherwise(tape: Tape) -> dict[str, float]:
    """Bytes per token that selective recompute keeps, and that frozen 4-bit linears hold of what they are given.

    Products are counted in the order they run; the first is kept, the second made again, and so on.
    """
    products = [operation for operation in tape.operations if operation.weights]
    kept = {operation.output.storage for operation in products[::2]}
    kept |= {operation.output.storage for operation in tape.operations if operation.name == "attention"}
    saved = {storage for operation in tape.operations for storage in operation.saves}
    frozen = {storage for operation in products if not operation.trained for storage in operation.saves}
    return {
        "selected": tape.total(kept),
        "beyond": tape.total(kept - saved),
        "frozen_inputs": tape.total(frozen),
    }


def block_tape(
    architecture: Architecture, layer: int, formats: Formats, *, input_grad: bool = True, compressed: bool = False
) -> tuple[Tape, Value]:
    """Block `layer` on a tape, and its input."""
    tape, start = _Writer(architecture, formats, layer, input_grad=input_grad).write()
    return tape.in_eight_bits() if compressed else tape, start


class _Writer:
    """Puts one block on a tape."""

    def __init__(self, architecture: Architecture, formats: Formats, layer: int, *, input_grad: bool) -> None:
        self.shape, self.formats, self.layer, self.input_grad = architecture, formats, layer, input_grad
        self.kernels = formats.kernels
        self.tape = Tape()
        self.linears = architecture.linears(layer)
        self.masked = formats.masked or (formats.window and architecture.slides(layer))

    def write(self) -> tuple[Tape, Value]:
        """The block's operations, and its input."""
        shape, residual = self.shape, self.formats.residual * self.shape.hidden_size
        start = self.tape.input(residual, grad=self.input_grad)
        normed = self.norm(start)
        attention = self.after_norm(self.branch_dropout(self.attention(normed)))
        if shape.parallel_residual:
            mlp = self.branch_dropout(self.mlp(normed if shape.norms_per_layer == 1 else self.norm(start)))
            both = self.tape.operation("add", (attention, mlp), residual, passes=True)
            self.tape.operation("add", (both, start), residual, passes=True)
            return self.tape, start
        middle = self.tape.operation("add", (start, attention), residual, passes=True)
        mlp = self.after_norm(self.branch_dropout(self.mlp(self.norm(middle))))
        held = (attention,) if shape.family in NAMES_BRANCH else ()
        self.tape.operation("add", (middle, mlp), residual, passes=True, holds=held)
        return self.tape, start

    def branch_dropout(self, value: Value) -> Value:
        """Families that drop out what a branch gives keep its mask: a byte a number on cards, a factor on a CPU."""
        if not self.shape.drops_out or not self.formats.branch_mask:
            return value
        numbers = float(self.formats.branch_mask * self.shape.hidden_size)
        return self.tape.operation("dropout", (value,), value.size, saves_new=numbers)

    def norm(self, value: Value, width: int | None = None) -> Value:
        """RMSNorm as written in Python works on an fp32 copy; LayerNorm and fused kernels are one operation that keeps
        its input."""
        numbers = width or self.shape.hidden_size
        out = self.formats.residual * numbers
        trained = numbers if self.formats.trains else 0
        if self.shape.norm != "rmsnorm" and self.kernels.layer_norm == "python":
            return self.written_layer_norm(value, out, trained)
        if self.shape.norm != "rmsnorm" and self.kernels.norm == "python" and self.shape.family in WIDE_LAYER_NORM:
            return self.wide_layer_norm(value, out, trained)
        if self.shape.norm != "rmsnorm" or self.kernels.norm in ("fused", "recomputed"):
            return self.tape.operation("norm", (value,), out, saves=(value,), trained=trained)
        wide = value
        if value.size < 4.0 * numbers:
            wide = self.tape.operation("to fp32", (value,), 4.0 * numbers)
        # pow and mean: the square is a temporary; backward makes one fp32 gradient through each of two paths
        normal = self.tape.operation(
            "normalise", (wide,), 4.0 * numbers, saves=(wide,), forward_temporary=0.0, backward_temporary=4.0 * numbers
        )
        if out < 4.0 * numbers and (self.kernels.norm == "fp32" or self.shape.family in FP32_NORM_WEIGHT):
            kept = (normal,) if trained else ()
            normal = self.tape.operation("scale", (normal,), 4.0 * numbers, saves=kept, trained=trained)
            return self.tape.operation("to 16 bits", (normal,), out)
        if out < 4.0 * numbers:
            normal = self.tape.operation("to 16 bits", (normal,), out)
        return self.tape.operation("scale", (normal,), out, saves=(normal,) if trained else (), trained=trained)

    def wide_layer_norm(self, value: Value, out: float, trained: int) -> Value:
        """A LayerNorm in fp32: one kernel that keeps the fp32 copy, or written out, where the variance keeps x - mean
        and the quotient a second one."""
        width = 2.0 * out if value.size < 2.0 * out and self.formats.residual == 2 else out
        wide = self.tape.operation("to fp32", (value,), width) if width > out else value
        if WIDE_LAYER_NORM[self.shape.family] == "kernel":
            normal = self.tape.operation("norm", (wide,), width, saves=(wide,), trained=trained)
        else:
            spread = self.tape.operation("centre", (wide,), width)
            centred = self.tape.operation("centre", (wide,), width)
            normal = self.tape.operation(
                "normalise", (centred, spread), width, saves=(centred, spread), backward_temporary=width
            )
            kept = (normal,) if trained else ()
            normal = self.tape.operation("scale", (normal,), width, saves=kept, trained=trained)
        return self.tape.operation("to 16 bits", (normal,), out) if width > out else normal

    def written_layer_norm(self, value: Value, out: float, trained: int) -> Value:
        """scale (x - mean) / sqrt(var + eps) + shift: the variance keeps x, the quotient x - mean, the product the
        quotient."""
        centred = self.tape.operation("centre", (value,), out, saves=(value,))
        normal = self.tape.operation("normalise", (centred,), out, saves=(centred,), backward_temporary=out)
        scaled = self.tape.operation("scale", (normal,), out, saves=(normal,) if trained else (), trained=trained)
        return self.tape.operation("add", (scaled,), out, passes=True)

    def after_norm(self, value: Value) -> Value:
        """Families with four norms also normalise what a branch returns."""
        return self.norm(value) if self.shape.norms_per_layer == 4 else value

    def linear(self, value: Value, linear: Linear, *, named: Sequence[Value] = ()) -> Value:
        """x W: keeps x when W trains. LoRA keeps its input for A and the rank-sized product for B. `named` are
        variables of the module that ends with this linear, its argument among them: they live until it returns."""
        formats, compute = self.formats, self.formats.compute
        out = float(compute * linear.outputs)
        adapted = linear.module and linear.name in formats.adapted
        copy = float(compute * linear.inputs) if formats.casts and value.size > compute * linear.inputs else 0.0
        holds = self.kernels.keeps_frozen_inputs and formats.quantised and linear.module
        keeps = formats.trains or holds
        # The bias, when it trains, keeps nothing. A cast's gradient is made beside the product's.
        result = self.tape.operation(
            linear.name,
            (value,),
            out,
            saves=(value,) if keeps and not copy else (),
            saves_new=copy if keeps else 0.0,
            trained=linear.params if formats.trains else 0,
            weights=linear.weights,
            backward_temporary=copy,
            holds=named,
            given=Given(value.number, linear.inputs, copy or value.size) if linear.module else None,
        )
        return self.adapter(value, result, linear, named) if adapted else result

    def adapter(self, value: Value, result: Value, linear: Linear, named: Sequence[Value]) -> Value:
        """result + scale B A dropout(x). The input goes to the adapter's format first, and under autocast to 16 bits
        behind the dropout; adapters of the input's own format share it."""
        formats, width, rank = self.formats, linear.inputs, self.formats.rank
        compute = formats.compute if formats.autocast else max(formats.compute, formats.adapter)
        fed, held = value, [value, *named]  # what the linear was given, and its cast, are variables until it returns
        if formats.kernels.adapter == "fused":  # one kernel for the projections of an input: it and a dropped copy each
            fed = self.tape.operation("dropout", (value,), float(formats.compute * width), saves=(value,))
        else:
            inner = max(formats.compute, formats.adapter)
            if inner * width > fed.size:
                fed = self.tape.operation("to fp32", (fed,), float(inner * width))
                held.append(fed)
            fed = self.dropout(fed, width, float(inner))
            if fed.size > compute * width:
                fed = self.tape.operation("to 16 bits", (fed,), float(compute * width))
        trained = rank * linear.inputs, rank * linear.outputs
        source = fed if formats.dropout_mask else value  # each adapter drops out for itself
        given = Given(source.number, width, fed.size)
        low = self.tape.operation(
            "lora_A", (fed,), float(compute * rank), saves=(fed,), trained=trained[0], given=given
        )
        out = float(compute * linear.outputs)
        given = Given(low.number, rank, low.size)
        high = self.tape.operation("lora_B", (low,), out, saves=(low,), trained=trained[1], given=given)
        if self.kernels.dora:
            result = self.tape.operation("mul", (result,), result.size, saves=(result,), trained=linear.outputs)
            high = self.tape.operation("mul", (high,), out, saves=(high,), trained=linear.outputs)
        scaled = self.tape.operation("scale", (high,), out)
        total = self.tape.operation("add", (result, scaled), out, passes=out == result.size, holds=held)
        if formats.dora and not self.kernels.dora:  # our own: one factor for both, which keeps their sum
            total = self.tape.operation(
                "turn", (total,), out, saves=(total,), trained=linear.outputs, backward_temporary=2.0 * out
            )
        return total if out == result.size else self.tape.operation("to 16 bits", (total,), result.size)

    def dropout(self, value: Value, width: int, size: float) -> Value:
        """A copy, and the mask for backward."""
        mask = float(self.formats.dropout_mask * width)
        if not mask:
            return value
        return self.tape.operation("dropout", (value,), size * width, saves_new=mask)

    def attention(self, value: Value) -> Value:
        """Projections, positions, the kernel, the output projection."""
        shape, kind = self.shape, self.formats.attention
        projections = [linear for linear in self.linears if linear.part == "attention"]
        queries, keys, values = named = (
            self.latent_heads(value, projections[:-1]) if shape.latent else self.heads(value, projections[:-1])
        )
        repeats = shape.kv_width < shape.q_width and (self.masked or kind == "eager" or self.kernels.repeats_kv)
        if repeats and (shape.kv_heads > 1 or kind == "eager"):  # one head for all is spread without a copy
            wide = float(self.formats.compute * shape.q_width)
            keys = self.tape.operation("repeat", (keys,), wide)
            values = self.tape.operation("repeat", (values,), wide)
        if kind == "eager":
            kernel = self.sinks(queries, keys, values) if shape.attn_sinks else self.eager(queries, keys, values)
        elif kind == "math":
            kernel = self.unfused(queries, keys, values)
        else:
            kernel = self.flash(queries, keys, values, grouped=not repeats)
        if self.kernels.copies_heads and kind != "eager":
            kernel = self.tape.operation("copy", (kernel,), kernel.size)
        return self.dropped(self.linear(kernel, projections[-1], named=(value, *named)), float(shape.hidden_size))

    def flash(self, queries: Value, keys: Value, values: Value, *, grouped: bool) -> Value:
        """One kernel. Its backward adds the queries' gradient up in fp32 where it computes in 16 bits; with fewer kv
        heads than heads it makes their gradients for every head first."""
        shape, size = self.shape, self.formats.compute
        expanded = 2.0 * size * (shape.q_width - shape.kv_width) if grouped else 0.0
        adds_up = 4.0 * shape.q_width if size < 4 else 0.0
        mask = float(size * self.formats.length) if self.masked else 0.0
        return self.tape.operation(
            "attention",
            (queries, keys, values),
            float(size * shape.attention_out_width),
            saves=(queries, keys, values),
            saves_output=True,
            # A mask becomes numbers to add, and each block keeps its own: one per pair of positions.
            saves_new=4.0 * shape.heads + mask,
            backward_temporary=expanded + adds_up,
        )

    def unfused(self, queries: Value, keys: Value, values: Value) -> Value:
        """SDPA without a fused kernel, as it is for heads that it must spread out itself and, on CPUs, for values of
        another width than the keys: all in fp32, queries and keys scaled, scores kept. Its variables live until the
        end."""
        shape, size, tape = self.shape, self.formats.compute, self.tape
        wide, out = 4.0 * shape.q_width, 4.0 * shape.attention_out_width
        factors = [queries, keys, values]
        if size < 4:
            factors = [
                tape.operation("to fp32", (value,), each)
                for value, each in zip(factors, (wide, wide, out), strict=True)
            ]
        held = factors[:2]
        scaled = [tape.operation("scale", (value,), wide) for value in held]
        pairs = 4.0 * shape.heads * self.formats.length
        scores = tape.operation("scores", scaled, pairs, saves=scaled, holds=held)
        if self.masked:
            scores = tape.operation("mask", (scores,), pairs, passes=True)
        soft = tape.operation("softmax", (scores,), pairs, saves_output=True, holds=held)
        product = tape.operation("product", (soft, factors[2]), out, saves=(soft, factors[2]), holds=held)
        if size == 4:
            return product
        return tape.operation("to 16 bits", (product,), float(size * shape.attention_out_width))

    def eager(self, queries: Value, keys: Value, values: Value) -> Value:
        """Scores of every pair of positions, softmax (in fp32 unless the program says otherwise, then a 16-bit copy for
        the product with the values)."""
        shape, size, tape = self.shape, self.formats.compute, self.tape
        pairs = float(shape.heads * self.formats.length)
        first = scores = tape.operation("scores", (queries, keys), size * pairs, saves=(queries, keys))
        if shape.attn_softcap:  # cap * tanh(scores / cap)
            scores = tape.operation("tanh", (scores,), size * pairs, saves_output=True)
            scores = tape.operation("scale", (scores,), size * pairs)
        library, soft_size = self.kernels.eager_fp32, 4
        held: tuple[Value, ...] = ()
        if shape.family in FP32_DISTANCES:
            scores = tape.operation("distances", (scores,), 4 * pairs, passes=size == 4)
            scores = tape.operation("mask", (scores,), 4 * pairs)
            held = (scores,)
        elif library:  # its mask is added, not written into the scores
            if shape.family in PLAIN_SOFTMAX:  # another mask of its own is written into a copy of them
                soft_size = self.formats.softmax
                scores = tape.operation("mask", (scores,), size * pairs)
            scores = tape.operation("mask", (scores,), size * pairs, passes=True)
            held = (first, scores) if shape.position == "alibi" else (scores,)
        widens = library and scores.size < soft_size * pairs
        wide = tape.operation("to fp32", (scores,), 4 * pairs) if widens else scores
        soft = tape.operation("softmax", (wide,), wide.size, saves_output=True, holds=held)
        if soft.size > size * pairs:
            soft = tape.operation("to 16 bits", (soft,), size * pairs, holds=held)
        soft = self.dropped(soft, pairs)
        return tape.operation("product", (soft, values), float(size * shape.attention_out_width), saves=(soft, values))

    def sinks(self, queries: Value, keys: Value, values: Value) -> Value:
        """GPT-OSS: every head has one score more that takes a share of the softmax and is cut off again, all in the
        format attention computes in. The largest score is subtracted first; its gradient is written into zeros."""
        shape, tape = self.shape, self.tape
        pairs = float(self.formats.compute * shape.heads * self.formats.length)
        scores = tape.operation("scores", (queries, keys), pairs, saves=(queries, keys))
        masked = tape.operation("mask", (scores,), pairs, passes=True)
        joined = tape.operation("join", (masked,), pairs, passes=True)
        shifted = tape.operation("shift", (joined,), pairs, backward_temporary=pairs, holds=(masked,))
        soft = tape.operation(
            "softmax", (shifted,), pairs, saves_output=True, backward_temporary=pairs, holds=(masked, shifted)
        )
        cut = tape.operation("cut", (soft,), pairs, view=True)
        return tape.operation(
            "product",
            (cut, values),
            float(self.formats.compute * shape.attention_out_width),
            saves=(cut, values),
            holds=(shifted,),
        )

    def dropped(self, value: Value, numbers: float) -> Value:
        """Dropout of the model itself, where the program trains with it: a copy and a byte a number."""
        if not self.kernels.dropout:
            return value
        return self.tape.operation("dropout", (value,), value.size, saves_new=numbers)

    def heads(self, value: Value, projections: Sequence[Linear]) -> tuple[Value, Value, Value]:
        """Queries and keys with their positions, values: separate projections or slices of one."""
        shape, size = self.shape, self.formats.compute
        q, k = float(size * shape.q_width), float(size * shape.kv_width)
        if self.kernels.fuses_qkv and len(projections) == 3:
            return self.fused_heads(value, projections)
        made = [self.linear(value, linear) for linear in projections]
        if len(made) == 1:  # values stay a view of the fused result, which therefore stays whole
            whole = made[0]
            return self.positioned(whole, q), self.positioned(whole, k), self.part(whole, k)
        queries, keys, values = made
        queries, keys = self.head_norm(queries), self.head_norm(keys)
        return self.positioned(queries, q), self.positioned(keys, k, named=(queries,)), values

    def fused_heads(self, value: Value, projections: Sequence[Linear]) -> tuple[Value, Value, Value]:
        """A program with one projection for all three, where the checkpoint has three; adapters stay each its own."""
        shape, size = self.shape, self.formats.compute
        q, k = float(size * shape.q_width), float(size * shape.kv_width)
        whole = self.linear(
            value,
            Linear(
                name="qkv",
                part="attention",
                inputs=projections[0].inputs,
                outputs=sum(linear.outputs for linear in projections),
                bias=projections[0].bias,
            ),
        )
        adapted = [linear for linear in projections if linear.name in self.formats.adapted]
        if adapted:
            fed = self.dropout(value, projections[0].inputs, float(size))
            rank = self.formats.rank
            first, second = (rank * sum(getattr(linear, side) for linear in adapted) for side in ("inputs", "outputs"))
            low = self.tape.operation("lora_A", (fed,), float(size * rank * len(adapted)), saves=(fed,), trained=first)
            spread = self.tape.operation("lora_B", (low,), self.spread(adapted), saves=(low,), trained=second)
            if len(adapted) < len(projections):
                kept = (spread,) if self.kernels.pads_adapters else ()
                spread = self.tape.operation("pad", (spread,), whole.size, saves=kept)
            whole = self.tape.operation("add", (whole, spread), whole.size, passes=True)
        return self.positioned(whole, q), self.positioned(whole, k), self.part(whole, k)

    def spread(self, adapted: Sequence[Linear]) -> float:
        """Bytes per token of the adapters' results side by side."""
        return float(self.formats.compute * sum(linear.outputs for linear in adapted))

    def part(self, whole: Value, size: float) -> Value:
        """A slice: a view forward, a buffer of the whole's size backward."""
        return self.tape.operation("slice", (whole,), size, view=True)

    def head_norm(self, value: Value) -> Value:
        if self.shape.qk_norm == "none":
            return value
        return self.norm(value, int(value.size / self.formats.compute))

    def positioned(self, value: Value, size: float, *, named: Sequence[Value] = ()) -> Value:
        """x cos + rotate(x) sin: three temporaries of x's size. cos and sin come in the residual's format. A fused
        kernel works in place. `named` are variables that live until it is done."""
        if self.shape.position != "rope":
            return value if value.size == size else self.part(value, size)
        if self.kernels.rope == "fused" and value.size == size:
            return self.tape.operation("rope", (value,), size, view=True)
        wide = size * max(1.0, self.formats.residual / self.formats.compute)
        rotated = self.tape.operation(
            "rope", (value,), wide, forward_temporary=2.0 * wide, backward_temporary=2.0 * wide, holds=named
        )
        if wide == size:
            return rotated
        return self.tape.operation("to 16 bits", (rotated,), size)

    def latent_heads(self, value: Value, projections: Sequence[Linear]) -> tuple[Value, Value, Value]:
        """Low-rank queries, keys and values of DeepSeek; keys and queries are put together from two parts."""
        latent, size = self.shape.latent, self.formats.compute
        if latent is None:
            raise AssertionError("only latent attention has these projections")
        *query_linears, down, up = projections
        queries = value
        for number, linear in enumerate(query_linears):
            queries = self.linear(self.norm(queries, linear.inputs) if number else queries, linear)
        compressed = self.linear(value, down)
        normed = self.norm(compressed, latent.kv_rank)
        turned = float(size * self.shape.heads * latent.rope_dim)
        rotated = self.positioned(self.part(queries, turned), turned)
        shared = self.positioned(self.part(compressed, turned / self.shape.heads), turned / self.shape.heads)
        width = float(size * self.shape.q_width)
        joined = self.tape.operation("cat", (queries, rotated), width)
        expanded = self.linear(normed, up)
        keys = self.tape.operation("cat", (expanded, shared), width)
        return joined, keys, self.part(expanded, float(size * self.shape.heads * latent.value_dim))

    def mlp(self, value: Value) -> Value:
        """The block's MLP, or its experts beside the shared ones."""
        own = [linear for linear in self.linears if linear.part == "mlp"]
        if own:
            return self.dropped(self.branch(value, own), float(self.shape.hidden_size))
        experts = self.experts(value)
        shared = [linear for linear in self.linears if linear.part == "shared" and linear.outputs > 1]
        if not shared:
            return experts
        return self.tape.operation("add", (experts, self.branch(value, shared)), experts.size, passes=True)

    def branch(self, value: Value, linears: Sequence[Linear]) -> Value:
        """down(act(gate) * up), or down(act(up))."""
        *ups, down = linears
        width = float(self.formats.compute * down.inputs)
        first = self.linear(value, ups[0])
        if self.shape.mlp == "plain":
            return self.linear(self.activation(first, width), down, named=(value,))
        gate = first if len(ups) == 2 else self.part(first, width)
        active = self.activation(gate, width) if self.kernels.mlp == "python" else gate
        up = self.linear(value, ups[1]) if len(ups) == 2 else self.part(first, width)
        if self.kernels.mlp == "python":
            product = self.tape.operation("mul", (active, up), width, saves=(active, up))
        else:
            # A fused kernel writes the gradients of gate and up over them; a compiler's are new.
            in_place = -2 * width if self.kernels.mlp == "fused" else 0.0
            product = self.tape.operation("gated", (gate, up), width, saves=(gate, up), backward_temporary=in_place)
        return self.linear(product, down, named=(value,))

    def activation(self, value: Value, width: float) -> Value:
        """SiLU, GELU and ReLU keep one tensor. GPT-2's GELU is written in Python and keeps four more."""
        name = self.shape.activation
        if self.kernels.mlp != "python":
            return self.tape.operation(name, (value,), width, saves=(value,))
        if name == "relu":
            return self.tape.operation("relu", (value,), width, saves_output=True)
        written = self.kernels.gelu == "python" or (
            self.kernels.gelu == "library" and name in ("gelu_new", "gelu_fast")
        )
        if name.startswith("gelu") and written:
            return self.tape.operation(
                name, (value,), width, saves=(value,), saves_new=3.0 * width, backward_temporary=width
            )
        if name == "relu2":  # the square keeps what ReLU gave, which ReLU keeps too
            positive = self.tape.operation("relu", (value,), width, saves_output=True)
            return self.tape.operation("square", (positive,), width, saves=(positive,))
        return self.tape.operation(name, (value,), width, saves=(value,))

    def experts(self, value: Value) -> Value:
        """Tokens are copied to each of their experts, sorted, and their answers weighted and summed."""
        experts, size, hidden = self.shape.experts, self.formats.compute, self.shape.hidden_size
        if experts is None:
            raise AssertionError("only blocks with experts have them")
        copies, trains = experts.active, self.formats.trains
        own = [linear for linear in self.linears if linear.part == "expert"]
        *ups, down = own
        adapted = [linear for linear in own if linear.module and linear.name in self.formats.adapted]
        routed = self.tape.operation("gather", (value,), float(copies * size * hidden))
        wide = float(copies * size * experts.expert_width)
        up = self.tape.operation(
            "up",
            (routed,),
            (2 if self.shape.mlp == "gated" else 1) * wide,
            saves=(routed,) if trains or set(adapted) & set(ups) else (),
            trained=self.expert_trained(ups, adapted),
            weights=sum(linear.weights for linear in ups),
            unpacks=self.unpacked_experts(ups),
        )
        up = self.beside_experts(routed, up, ups)
        if self.shape.family in CLAMPS_GATE:
            product = self.clamped_gate(up, wide)
        elif self.shape.mlp == "gated":
            active = self.activation(self.part(up, wide), wide)
            product = self.tape.operation("mul", (active, self.part(up, wide)), wide, saves=(active, up))
        else:
            product = self.activation(up, wide)
        answers = self.tape.operation(
            "down",
            (product,),
            float(copies * size * hidden),
            saves=(product,) if trains or down in adapted else (),
            trained=self.expert_trained((down,), adapted),
            weights=down.weights,
            unpacks=self.unpacked_experts((down,)),
        )
        answers = self.beside_experts(product, answers, (down,))
        return self.combine(answers, routed, copies)

    def unpacked_experts(self, linears: Sequence[Linear]) -> int:
        """Numbers of experts in few bits that are unpacked together: a module's matrix, or some of a tensor's."""
        if all(linear.module for linear in linears):
            return max(linear.inputs * linear.outputs for linear in linears)
        if not self.kernels.packs_experts:
            return 0
        one = sum(linear.inputs * linear.outputs for linear in linears)
        return one * min(linears[0].copies, max(1, UNPACKED_AT_ONCE // one))

    def beside_experts(self, value: Value, result: Value, linears: Sequence[Linear]) -> Value:
        """result + scale B A dropout(x), row by row of what the experts are given."""
        if not self.formats.adapts_experts or any(linear.module for linear in linears):
            return result
        experts, rank, size = self.shape.experts, self.formats.rank, self.formats.compute
        if experts is None:
            raise AssertionError("only blocks with experts have them")
        inputs, copies = linears[0].inputs, linears[0].copies
        fed = value
        if self.formats.dropout_mask:  # of the format that is computed in: a CPU's factors are no wider
            mask = float(experts.active * inputs * min(self.formats.dropout_mask, size))
            fed = self.tape.operation("dropout", (value,), float(experts.active * inputs * size), saves_new=mask)
        outputs = sum(linear.outputs for linear in linears)
        low = self.tape.operation(
            "expert_A", (fed,), float(experts.active * size * rank), saves=(fed,), trained=copies * rank * inputs
        )
        high = self.tape.operation("expert_B", (low,), result.size, saves=(low,), trained=copies * rank * outputs)
        scaled = self.tape.operation("scale", (high,), result.size)
        return self.tape.operation("add", (result, scaled), result.size, passes=True)

    def clamped_gate(self, up: Value, width: float) -> Value:
        """GPT-OSS: (up + 1) gate sigmoid(alpha gate), both limited first; the limits keep what they are given."""
        tape = self.tape
        gate = tape.operation("clamp", (self.part(up, width),), width, saves=(up,))
        linear = tape.operation("clamp", (self.part(up, width),), width, saves=(up,))
        scaled = tape.operation("scale", (gate,), width)
        share = tape.operation("sigmoid", (scaled,), width, saves_output=True)
        glu = tape.operation("mul", (gate, share), width, saves=(gate, share))
        above = tape.operation("add", (linear,), width, passes=True)
        return tape.operation("mul", (above, glu), width, saves=(above, glu))

    def combine(self, answers: Value, routed: Value, copies: int) -> Value:
        """Each answer times its weight, put back in the tokens' order, summed per token. What the experts were given is
        a variable until then."""
        size, hidden = self.formats.compute, self.shape.hidden_size
        in_fp32 = size < 4 and self.shape.family in WEIGHS_IN_FP32
        width = 4.0 * hidden if in_fp32 else float(size * hidden)
        # Backward multiplies for the weights' gradient, too, and casts the answers' to their format.
        spare = copies * width * (2 if in_fp32 else 1)
        weighted = self.tape.operation("weigh", (answers,), copies * width, saves=(answers,), backward_temporary=spare)
        ordered = self.tape.operation("order", (weighted,), copies * width, holds=(routed,))
        total = self.tape.operation("combine", (ordered,), width)
        return self.tape.operation("to 16 bits", (total,), float(size * hidden)) if in_fp32 else total

    def expert_trained(self, linears: Sequence[Linear], adapted: Sequence[Linear]) -> int:
        """Parameters of these matrices that get a gradient: all of them, or those of the adapters every expert has."""
        if self.formats.trains:
            return sum(linear.params for linear in linears)
        rank = self.formats.rank
        return sum(rank * (one.inputs + one.outputs) * one.copies for one in linears if one in adapted)
