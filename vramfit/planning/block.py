"""One transformer block as operations: what a Hugging Face decoder block does, in the formats a plan computes in.

Derivation: the modelling files of `transformers` 5 (RMSNorm in fp32, rotary positions, SDPA, gated or plain MLP,
experts by grouped products) and which tensors each PyTorch operation saves for backward. Sizes are bytes per token.

| operation | saves |
|---|---|
| RMSNorm written in Python | fp32 input (itself when it is fp32), the normalised values when its weight trains |
| native LayerNorm | its input |
| linear that trains | its input; under autocast a 16-bit copy of it, one per linear |
| frozen linear | nothing |
| LoRA on a linear | the input (under autocast a 16-bit copy of its own), the rank-sized product, a dropout mask |
| rotary positions | nothing of size |
| SDPA | q, k, v, output, one fp32 number per head |
| SiLU or GELU | its input |
| product of the gated MLP | both factors |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from vramfit.models.architecture import Architecture, Linear
from vramfit.planning.tape import Tape, Value


@dataclass(frozen=True, kw_only=True)
class Formats:
    """Bytes per number: `residual` between blocks, `compute` in matrix products. `trains` is whether base weights do.

    `autocast` is whether linears cast what they are given; `adapted` are the linears with LoRA, of `rank`, and
    `dropout_mask` is bytes per number that their dropout keeps (0: none; cards keep a byte, the CPU a factor).
    `masked` is whether attention gets a mask, as packed rows do.
    """

    residual: int
    compute: int
    trains: bool
    autocast: bool
    adapted: frozenset[str] = frozenset()
    rank: int = 0
    dropout_mask: int = 0
    attention: str = "sdpa"
    masked: bool = False

    @property
    def casts(self) -> bool:
        return self.autocast and self.residual != self.compute


@dataclass(frozen=True, kw_only=True)
class BlockMemory:
    """Bytes per token of one block: `saved` for backward besides its input, and peaks that include its input.

    `backward` starts with everything saved; `evaluation` is forward with nothing saved. `per_token_and_length` is
    bytes per token and token of length, of attention that writes its scores.
    """

    input: float
    saved: float
    forward: float
    backward: float
    evaluation: float
    per_token_and_length: float = 0.0


@lru_cache(maxsize=512)
def block_memory(architecture: Architecture, layer: int, formats: Formats, *, input_grad: bool = True) -> BlockMemory:
    """Walk block `layer`; `input_grad` is False for the first block of a frozen model: its input needs none."""
    writer = _Writer(architecture, formats, layer, input_grad=input_grad)
    tape, start = writer.write()
    # The kernel wants the mask as numbers to add, and each block keeps its own: one per pair of positions.
    scores = float(formats.compute) if formats.masked else 0.0
    if formats.attention == "eager":  # fp32 softmax and its 16-bit copy, per head and pair of positions
        scores += architecture.heads * (4.0 + (formats.compute if formats.compute != 4 else 0))
    return BlockMemory(
        input=start.size,
        saved=tape.saved(without=(start,)),
        forward=tape.forward_peak(),
        backward=max(tape.backward_peak(), tape.forward_peak()),
        evaluation=tape.forward_peak(keeps=False),
        per_token_and_length=scores,
    )


class _Writer:
    """Puts one block on a tape."""

    def __init__(self, architecture: Architecture, formats: Formats, layer: int, *, input_grad: bool) -> None:
        self.shape, self.formats, self.layer, self.input_grad = architecture, formats, layer, input_grad
        self.tape = Tape()
        self.linears = architecture.linears(layer)

    def write(self) -> tuple[Tape, Value]:
        """The block's operations, and its input."""
        shape, residual = self.shape, self.formats.residual * self.shape.hidden_size
        start = self.tape.input(residual, grad=self.input_grad)
        normed = self.norm(start)
        attention = self.after_norm(self.attention(normed))
        if shape.parallel_residual:
            mlp = self.mlp(normed if shape.norms_per_layer == 1 else self.norm(start))
            both = self.tape.operation("add", (attention, mlp), residual, passes=True)
            self.tape.operation("add", (both, start), residual, passes=True)
            return self.tape, start
        middle = self.tape.operation("add", (start, attention), residual, passes=True)
        mlp = self.after_norm(self.mlp(self.norm(middle)))
        self.tape.operation("add", (middle, mlp), residual, passes=True)
        return self.tape, start

    def norm(self, value: Value, width: int | None = None) -> Value:
        """RMSNorm as written in Python works on an fp32 copy; LayerNorm is one kernel that keeps its input."""
        trains = self.formats.trains
        numbers = width or self.shape.hidden_size
        out = self.formats.residual * numbers
        if self.shape.norm != "rmsnorm":
            return self.tape.operation("layernorm", (value,), out, saves=(value,), trains=trains)
        wide = value
        if value.size < 4.0 * numbers:
            wide = self.tape.operation("to fp32", (value,), 4.0 * numbers)
        # pow and mean: the square is a temporary; backward makes one fp32 gradient through each of two paths
        normal = self.tape.operation(
            "normalise", (wide,), 4.0 * numbers, saves=(wide,), forward_temporary=0.0, backward_temporary=4.0 * numbers
        )
        if out < 4.0 * numbers:
            normal = self.tape.operation("to 16 bits", (normal,), out)
        return self.tape.operation("scale", (normal,), out, saves=(normal,) if trains else (), trains=trains)

    def after_norm(self, value: Value) -> Value:
        """Families with four norms also normalise what a branch returns."""
        return self.norm(value) if self.shape.norms_per_layer == 4 else value

    def linear(self, value: Value, linear: Linear) -> Value:
        """x W: keeps x when W trains. LoRA keeps its input for A and the rank-sized product for B."""
        formats, compute = self.formats, self.formats.compute
        out = float(compute * linear.outputs)
        adapted = linear.module and linear.name in formats.adapted
        copy = float(compute * linear.inputs) if formats.casts and value.size > compute * linear.inputs else 0.0
        # The bias, when it trains, keeps nothing. A cast's gradient is made beside the product's.
        result = self.tape.operation(
            linear.name,
            (value,),
            out,
            saves=(value,) if formats.trains and not copy else (),
            saves_new=copy if formats.trains else 0.0,
            trains=formats.trains,
            backward_temporary=copy,
        )
        return self.adapter(value, result, linear) if adapted else result

    def adapter(self, value: Value, result: Value, linear: Linear) -> Value:
        """result + scale B A dropout(x). PEFT casts x to the adapter's fp32, autocast casts that back to 16 bits."""
        formats, compute = self.formats, self.formats.compute
        width, rank, out = linear.inputs, formats.rank, float(compute * linear.outputs)
        fed = value
        if compute < 4:
            wide = self.tape.operation("to fp32", (fed,), 4.0 * width)
            wide = self.dropout(wide, width, 4.0)
            fed = self.tape.operation("to 16 bits", (wide,), float(compute * width))
        else:
            fed = self.dropout(fed, width, 4.0)
        low = self.tape.operation("lora_A", (fed,), float(compute * rank), saves=(fed,), trains=True)
        high = self.tape.operation("lora_B", (low,), out, saves=(low,), trains=True)
        scaled = self.tape.operation("scale", (high,), out)
        return self.tape.operation("add", (result, scaled), out, passes=True)

    def dropout(self, value: Value, width: int, size: float) -> Value:
        """A copy, and the mask for backward."""
        mask = float(self.formats.dropout_mask * width)
        if not mask:
            return value
        return self.tape.operation("dropout", (value,), size * width, saves_new=mask)

    def attention(self, value: Value) -> Value:
        """Projections, positions, the kernel, the output projection."""
        shape, size = self.shape, self.formats.compute
        projections = [linear for linear in self.linears if linear.part == "attention"]
        queries, keys, values = (
            self.latent_heads(value, projections[:-1]) if shape.latent else self.heads(value, projections[:-1])
        )
        out_width = float(size * shape.attention_out_width)
        grouped = shape.kv_width < shape.q_width
        if grouped and self.formats.masked:  # with a mask the library copies keys and values to every query head
            wide = float(size * shape.q_width)
            keys = self.tape.operation("repeat", (keys,), wide)
            values = self.tape.operation("repeat", (values,), wide)
        kernel = self.tape.operation(
            "sdpa",
            (queries, keys, values),
            out_width,
            saves=(queries, keys, values),
            saves_output=True,
            saves_new=4.0 * shape.heads,
            # With fewer kv heads their gradients are first made for every query head.
            backward_temporary=2.0 * size * (shape.q_width - shape.kv_width)
            if grouped and not self.formats.masked
            else 0.0,
        )
        return self.linear(kernel, projections[-1])

    def heads(self, value: Value, projections: Sequence[Linear]) -> tuple[Value, Value, Value]:
        """Queries and keys with their positions, values: separate projections or slices of one."""
        shape, size = self.shape, self.formats.compute
        q, k = float(size * shape.q_width), float(size * shape.kv_width)
        made = [self.linear(value, linear) for linear in projections]
        if len(made) == 1:  # values stay a view of the fused result, which therefore stays whole
            whole = made[0]
            return self.positioned(whole, q), self.positioned(whole, k), self.part(whole, k)
        queries, keys, values = made
        return self.positioned(self.head_norm(queries), q), self.positioned(self.head_norm(keys), k), values

    def part(self, whole: Value, size: float) -> Value:
        """A slice: a view forward, a buffer of the whole's size backward."""
        return self.tape.operation("slice", (whole,), size, view=True)

    def head_norm(self, value: Value) -> Value:
        if self.shape.qk_norm == "none":
            return value
        return self.norm(value, int(value.size / self.formats.compute))

    def positioned(self, value: Value, size: float) -> Value:
        """x cos + rotate(x) sin: three temporaries of x's size. cos and sin come in the residual's format."""
        if self.shape.position != "rope":
            return value if value.size == size else self.part(value, size)
        wide = size * max(1.0, self.formats.residual / self.formats.compute)
        rotated = self.tape.operation(
            "rope", (value,), wide, forward_temporary=2.0 * wide, backward_temporary=2.0 * wide
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
        width = float(size * self.shape.q_width)
        queries = self.positioned(queries, width)
        compressed = self.linear(value, down)
        expanded = self.linear(self.norm(compressed, latent.kv_rank), up)
        keys = self.tape.operation("cat", (expanded,), width)
        return queries, keys, self.part(expanded, float(size * self.shape.heads * latent.value_dim))

    def mlp(self, value: Value) -> Value:
        """The block's MLP, or its experts beside the shared ones."""
        own = [linear for linear in self.linears if linear.part == "mlp"]
        if own:
            return self.branch(value, own)
        experts = self.experts(value)
        shared = [linear for linear in self.linears if linear.part == "shared" and linear.outputs > 1]
        if not shared:
            return experts
        return self.tape.operation("add", (experts, self.branch(value, shared)), experts.size, passes=True)

    def branch(self, value: Value, linears: Sequence[Linear]) -> Value:
        """down(act(gate) * up), or down(act(up))."""
        *ups, down = linears
        made = [self.linear(value, linear) for linear in ups]
        width = float(self.formats.compute * down.inputs)
        if self.shape.mlp == "plain":
            return self.linear(self.activation(made[0], width), down)
        gate, up = made if len(made) == 2 else (self.part(made[0], width), self.part(made[0], width))
        active = self.activation(gate, width)
        product = self.tape.operation("mul", (active, up), width, saves=(active, up))
        return self.linear(product, down)

    def activation(self, value: Value, width: float) -> Value:
        """SiLU, GELU and ReLU keep one tensor. GPT-2's GELU is written in Python and keeps four more."""
        name = self.shape.activation
        if name == "relu":
            return self.tape.operation("relu", (value,), width, saves_output=True)
        if name in ("gelu_new", "gelu_fast"):
            return self.tape.operation(
                name, (value,), width, saves=(value,), saves_new=3.0 * width, backward_temporary=width
            )
        return self.tape.operation(name, (value,), width, saves=(value,), saves_new=width if name == "relu2" else 0.0)

    def experts(self, value: Value) -> Value:
        """Tokens are copied to each of their experts, sorted, and their answers weighted and summed."""
        experts, size, hidden = self.shape.experts, self.formats.compute, self.shape.hidden_size
        if experts is None:
            raise AssertionError("only blocks with experts have them")
        copies = experts.active
        routed = self.tape.operation("gather", (value,), float(copies * size * hidden))
        wide = float(copies * size * experts.expert_width)
        keeps = (routed,) if self.formats.trains else ()
        up = self.tape.operation("up", (routed,), 2 * wide, saves=keeps, trains=self.formats.trains)
        active = self.activation(self.part(up, wide), wide)
        product = self.tape.operation("mul", (active, self.part(up, wide)), wide, saves=(active, up))
        keeps = (product,) if self.formats.trains else ()
        down = self.tape.operation(
            "down", (product,), float(copies * size * hidden), saves=keeps, trains=self.formats.trains
        )
        return self.tape.operation("combine", (down,), float(size * hidden), saves=(down,))
