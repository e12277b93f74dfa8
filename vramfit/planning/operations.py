"""What a block's operations ask of a device: matrix products, bytes moved between them, kernels launched.

The same walk that gives memory gives work: an operation reads its inputs and writes its output; its backward reads the
gradient and what was saved and writes a gradient for each input; a value with two consumers has their gradients added
(two read, one written). Operations that libraries write in Python are several kernels, each with its own pass over
memory; `COMPOSITES` counts those passes once, from what the modelling code does. A compiler makes one pass of what lies
between products, so there only the passes of `_FUSED` remain.

Everything is per token of a micro-batch, except weights, which are per pass.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, NamedTuple

from vramfit.models.architecture import Architecture
from vramfit.planning.block import Formats, block_tape
from vramfit.planning.tape import Operation, Tape


class Passes(NamedTuple):
    """A composite operation: how many times the bytes of the plain walk it moves, and how many kernels it is."""

    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int


COMPOSITES: Final = {
    # y = x rsqrt(mean(x^2) + eps) on fp32: square r w, mean r, product r w: 20 bytes a number, where the walk has 8.
    # Backward: product 2 x (2r w), sum r, square's 2x r w and 2r w, sum of both paths 2r w: 56, where the walk has 20.
    "normalise": Passes(2.5, 2.8, 5, 11),
    # x cos + rotate(x) sin: r w, negate half and join 3/2 r w, r w, 2r w: 10 sizes against the walk's 6; backward the
    # same with the zero-filled halves added: 15 against 6.
    "rope": Passes(1.7, 2.5, 5, 10),
    # GELU with tanh, written in Python: 8 operations of 2 to 3 sizes forward; their derivatives backward.
    "gelu in Python": Passes(3.6, 3.0, 8, 14),
    # eager attention scales the scores, a pass over them
    "scores": Passes(2.0, 1.5, 2, 4),
    "softmax": Passes(1.0, 1.0, 1, 1),
    "attention": Passes(1.0, 1.0, 1, 3),
    "mul": Passes(1.0, 1.2, 1, 2),
    # sorting, counting, gathering rows to their experts
    "gather": Passes(1.0, 1.0, 8, 4),
    "combine": Passes(1.5, 1.5, 4, 4),
}
"""Against the walk's own bytes (inputs and outputs once, temporaries written and read)."""

_PLAIN: Final = Passes(1.0, 1.0, 1, 1)
_FUSED: Final = frozenset({"norm", "rope", "gated", "attention", "scores", "softmax", "gather", "combine"})
"""What is still a kernel of its own behind a compiler, beside products and residual additions."""


_KERNELS_OF_PIECE: Final = 8
"""Some experts in few bits through their product: scales widened, codes unpacked, the product, its place."""

_RANK_SIZED: Final = frozenset({"lora_A", "lora_B", "expert_A", "expert_B"})
"""Products of adapters."""


@dataclass(frozen=True)
class Product:
    """A matrix product of a block: each row of `inputs` numbers times a matrix of `outputs` columns.

    `copies` matrices (experts) get `share` of the rows each, in rows per token. `trained`: its weights get a gradient.
    `base`: a frozen matrix, which a quantised base has in few bits.
    """

    inputs: float
    outputs: float
    copies: int = 1
    share: float = 1.0
    trained: bool = True
    base: bool = False

    @property
    def weights(self) -> float:
        return self.inputs * self.outputs * self.copies


@dataclass(frozen=True)
class BlockWork:
    """What one block does: its products, attention's width, and everything between by bytes and kernels.

    `backward_products` are those whose input needs a gradient; all forward ones with `trained` get weight gradients.
    `forward_bytes`, `backward_bytes` per token; `attended` is FLOPs per token and position looked at, forward.
    """

    products: tuple[Product, ...]
    attended: float
    forward_bytes: float
    backward_bytes: float
    forward_kernels: int
    backward_kernels: int

    @property
    def flops(self) -> float:
        """Forward FLOPs per token in products of the base and adapters, attention's own left out."""
        return sum(2.0 * product.inputs * product.outputs * product.copies * product.share for product in self.products)


@lru_cache(maxsize=512)
def block_work(architecture: Architecture, layer: int, formats: Formats, *, compiled: bool = False) -> BlockWork:
    """Walk block `layer`. `compiled`: a compiler fuses what lies between products."""
    tape, _ = block_tape(architecture, layer, formats)
    names = {linear.name for linear in architecture.linears(layer)}
    products = tuple(
        _product(operation, architecture, formats) for operation in tape.operations if _multiplies(operation, names)
    )
    between = [operation for operation in tape.operations if not _multiplies(operation, names)]
    # A product also writes and reads its rows; that is bound by arithmetic, save for a rank-sized one.
    thin = [operation for operation in tape.operations if operation.name in _RANK_SIZED]
    casts = sum(1 for product in products if product.trained) if formats.casts else 0
    grouped = [operation for operation in tape.operations if operation.name in ("up", "down") and operation.unpacks]
    pieces = _KERNELS_OF_PIECE * sum(-(-operation.weights // operation.unpacks) for operation in grouped)
    pieces = pieces if formats.quantised and formats.kernels.packs_experts else 0
    return BlockWork(
        products=products,
        attended=2.0 * (architecture.q_width + architecture.attention_out_width),
        forward_bytes=sum(_forward(operation, compiled=compiled) for operation in between + thin),
        backward_bytes=sum(_backward(operation, compiled=compiled) for operation in between + thin)
        + (1.0 if compiled else 3.0) * _added(tape),
        forward_kernels=sum(_launches(operation, compiled=compiled)[0] for operation in between)
        + len(products)
        + pieces
        + (0 if compiled else casts),
        backward_kernels=sum(_launches(operation, compiled=compiled)[1] for operation in between)
        + sum(3 if product.trained else 1 for product in products)
        + pieces
        + (0 if compiled else casts + _joins(tape)),
    )


def _multiplies(operation: Operation, names: set[str]) -> bool:
    return bool(operation.weights) or operation.name in names or operation.name in _RANK_SIZED


def _product(operation: Operation, architecture: Architecture, formats: Formats) -> Product:
    """Its shape, from the numbers of its matrix and of its output."""
    experts, size = architecture.experts, float(formats.compute)
    outputs = operation.output.size / size
    if operation.name in ("lora_A", "lora_B"):
        return Product(operation.trained / outputs, outputs)
    if experts is not None and operation.name in ("expert_A", "expert_B"):
        each = outputs / experts.active
        share = experts.active / experts.count
        return Product(operation.trained / experts.count / each, each, copies=experts.count, share=share)
    if experts is not None and operation.name in ("up", "down"):
        each = outputs / experts.active
        return Product(
            operation.weights / experts.count / each,
            each,
            copies=experts.count,
            share=experts.active / experts.count,
            trained=formats.trains,
            base=not formats.trains and (experts.modules or formats.kernels.packs_experts),
        )
    return Product(operation.weights / outputs, outputs, trained=formats.trains, base=not formats.trains)


def _forward(operation: Operation, *, compiled: bool) -> float:
    """Bytes per token an operation moves forward: reads its inputs, writes its output and what it makes for backward,
    writes and reads its temporaries. A view moves nothing."""
    if _is_view(operation):
        return 0.0
    made = operation.output.size + 2.0 * operation.forward_temporary
    if not compiled:
        factor = _composite(operation).forward_bytes
        return factor * (sum(value.size for value in operation.inputs) + made)
    if operation.name in _FUSED:
        return sum(value.size for value in operation.inputs) + operation.output.size
    # an addition's sum is written by the kernel that made the branch, or by the norm that follows
    return 2.0 * operation.output.size if operation.passes else 0.0


def _backward(operation: Operation, *, compiled: bool) -> float:
    """Bytes per token of its backward: reads the gradient and what was saved, writes the inputs' gradients."""
    if not operation.output.grad:
        return 0.0
    if operation.passes and not _is_view(operation):
        return 0.0  # an addition hands its gradient on
    if _is_view(operation):
        return 0.0 if compiled else operation.inputs[0].size + operation.output.size
    gradients = sum(value.size for value in operation.inputs if value.grad)
    saved = sum(value.size for value in operation.inputs) if operation.saves else 0.0
    plain = operation.output.size + saved + gradients
    if compiled:
        return plain if operation.name in _FUSED else 0.0
    return _composite(operation).backward_bytes * (plain + 2.0 * max(0.0, operation.backward_temporary))


def _composite(operation: Operation) -> Passes:
    # GELU written in Python keeps more than its input
    written = operation.name.startswith("gelu") and len(operation.saves) > 1
    return COMPOSITES.get("gelu in Python" if written else operation.name, _PLAIN)


def _launches(operation: Operation, *, compiled: bool) -> tuple[int, int]:
    if _is_view(operation):
        return 0, 0 if compiled else 1
    if compiled:
        return (1, 1) if operation.name in _FUSED else (0, 0)
    passes = _composite(operation)
    backward = 0 if operation.passes or not operation.output.grad else passes.backward_kernels
    return passes.forward_kernels, backward


def _is_view(operation: Operation) -> bool:
    return operation.output.storage == operation.inputs[0].storage


def _consumers(tape: Tape) -> Counter[tuple[int, float]]:
    return Counter(
        (value.number, value.size)
        for operation in tape.operations
        for value in dict.fromkeys(operation.inputs)
        if value.grad and operation.output.grad
    )


def _added(tape: Tape) -> float:
    """Bytes per token of gradients that are added to another of the same value."""
    return sum((count - 1) * size for (_, size), count in _consumers(tape).items())


def _joins(tape: Tape) -> int:
    return sum(count - 1 for count in _consumers(tape).values())
