"""The real engine step without its memory: python -m vramfit.engine.trace < request.json.

The model is built and trained for two steps on fake tensors (`torch._subclasses.FakeTensorMode`): shapes and storages
are real, numbers are not there. A dispatch mode follows every storage from its first use to its end, so the peak is
known to the byte. Memory is exactly linear in blocks, so two or three depths are traced and the model's own depth is
reckoned from them; one more trace checks that it is linear.

What it does not see: the kernels of another device (traced is the CPU's set), the allocator (asked for with a workload,
`planning.cap` replays it for the traced peak), and 4-bit weights, which are traced in 16 bits and counted as they are
stored.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramfit.config import ScheduleChoice
from vramfit.engine.activations import find_blocks, planned_modes, waiting_bytes
from vramfit.engine.chunked import CHUNK_ON_CARD, ChunkedOptimizer
from vramfit.engine.host_states import HostStates
from vramfit.engine.last_blocks import train_last_blocks
from vramfit.engine.loss import Targets
from vramfit.engine.objective import SummedLoss
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.precision import DTYPES
from vramfit.engine.resident import Piece, ResidentExecutor, StepResult, Trained
from vramfit.errors import InternalError, ModelError, UserError, VramfitError
from vramfit.models.architecture import Architecture, from_config
from vramfit.models.families import FULL_ATTENTION_EVERY
from vramfit.planning.abilities import Untraced, missing, untraced
from vramfit.planning.cap import needs_of
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.stored import QUANTISED, weight_bytes

PHASES: Final = ("load", "loss", "backward", "step", "evaluation")
_LAST: Final = "backward of the last block"
"""A phase of its own while depths are traced. A peak in another block may be higher at few blocks, and lower at many:
here all that the blocks before keep is there."""

LINEAR_WITHIN: Final = 0.002
"""How far a third depth may lie off the line through the first two, as a share."""


@dataclass(frozen=True, kw_only=True)
class Trace:
    """Peaks of allocated bytes by phase at the model's own depth, and how they were found.

    `linear` is False when a check depth was off the line by more than 0.2 %, and then the whole model was traced.
    `timeline` is (operation number, bytes alive, phase) of the deepest trace, which had `traced_blocks` blocks.
    """

    phases: dict[str, int]
    traced_blocks: int
    linear: bool
    operations: int
    timeline: tuple[tuple[int, int, str], ...]

    @property
    def peak_bytes(self) -> int:
        return max(self.phases.values())


_ATTENTION_DROPOUTS: Final = ("attention_dropout", "attn_pdrop", "attn_dropout")


class StorageFollower(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Bytes of storages alive, from the first operation that returns one until its last tensor is gone.

    Operations that would need numbers are answered: a scalar is 1, two tensors are equal, and `trained_share` of the
    labels of a micro-batch carry loss, which has `tokens` in `sequences`. `in_ram` says how many of the bytes alive
    are not on the device.
    """

    def __init__(self, *, sequences: int, tokens: int, trained_share: float = 1.0, packed: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sequences, self._tokens = sequences, tokens
        self._packed = packed
        self.alive = 0
        self.phase = "load"
        self.peaks: dict[str, int] = dict.fromkeys((*PHASES, _LAST), 0)
        self.in_last_block = True
        self.operations = 0
        self.timeline: list[tuple[int, int, str]] = []
        self._trained_share = trained_share
        self.in_ram: Callable[[], int] = lambda: 0
        self._before: float = math.inf
        self._storages: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is _WHERE:  # more than half of all that is asked; it makes nothing
            return args[0].fake_device
        self.operations += 1
        self._note()
        result = self._made(func, args, kwargs or {})
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._follow(leaf.untyped_storage())
        if not self._is_in_place(func, args):
            self._note(inside=args[0].numel() * args[0].element_size() if func in _BUFFERS_INSIDE else 0)
        self.timeline.append((self.operations, self._on_device, self.phase))
        return result

    @contextlib.contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Peaks inside belong to `phase`, those after it to what was before."""
        before, self.phase = self.phase, phase
        self._note()
        try:
            yield
        finally:
            self.phase = before

    @contextlib.contextmanager
    def elsewhere(self) -> Iterator[None]:
        """What is made inside is made in RAM: the processor is at work, and the device holds what it held."""
        self._before = self.alive
        try:
            yield
        finally:
            self._before = math.inf

    def forget(self) -> None:
        """Peaks and timeline begin anew; what is alive stays."""
        self.peaks = {**dict.fromkeys(self.peaks, 0), "load": self.peaks["load"]}
        self.timeline.clear()

    def picked(self, args: tuple[Any, ...]) -> Tensor:
        """`nonzero` of a mask whose values nobody knows: as many rows as tokens carry loss."""
        mask: Tensor = args[0]
        picked = max(1, round(mask.numel() * self._trained_share))
        if mask.numel() == self._tokens > self._sequences:  # the last token of a sequence has none to predict
            picked = min(picked, self._tokens - self._sequences)
        return torch.ops.aten.new_empty.default(mask, [picked, mask.ndim], dtype=torch.long)  # type: ignore[no-any-return]

    def scalar(self, args: tuple[Any, ...]) -> bool | float:
        """The number in a tensor. Questions about masks ask whether a mask hides nothing: not where rows are packed."""
        return not self._packed if args[0].dtype == torch.bool else 1.0

    def grouped_product(self, args: tuple[Any, ...]) -> Tensor:
        """Experts' products: its own rule for fake tensors knows 16-bit numbers only."""
        left, right, *rest = args
        groups = rest[0].numel() if rest else right.shape[0]
        if left.ndim == 2 and right.ndim == 2:
            shape = [groups, left.shape[0], right.shape[1]]
        elif left.ndim == 2:
            shape = [left.shape[0], right.shape[2]]
        else:
            shape = [left.shape[1], right.shape[1]]
        return torch.ops.aten.new_empty.default(left, shape)  # type: ignore[no-any-return]

    def _made(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        answer = _ANSWERS.get(func)
        return answer(self, args) if answer else func(*args, **kwargs)

    def _is_in_place(self, func: Any, args: tuple[Any, ...]) -> bool:
        """Whether autograd adds one gradient to another, which makes a third only where a dispatch mode looks on.

        It makes one in any case where the first is a view: its base is alive, too. A matrix's gradient in a product
        with its transpose is such a view, and so is a hidden state's in three dimensions.
        """
        adds = func is torch.ops.aten.add.Tensor and self.phase == "backward" and not torch.is_grad_enabled()
        return adds and not args[0]._is_view()

    def _follow(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._storages:
            return
        size = storage.nbytes()
        self._storages[key] = weakref.ref(storage, lambda _: self._end(key, size))
        self.alive += size

    def _end(self, key: int, size: int) -> None:
        self._storages.pop(key, None)
        self.alive -= size

    def _note(self, *, inside: int = 0) -> None:
        """The peak of the phase, with `inside` bytes that a kernel makes and frees by itself."""
        phase = _LAST if self.phase == "backward" and self.in_last_block else self.phase
        self.peaks[phase] = max(self.peaks[phase], self._on_device + inside)

    @property
    def _on_device(self) -> int:
        return int(min(self.alive, self._before)) - self.in_ram()


_WHERE: Final = torch.ops.prim.device.default
"""Where a fake tensor would be."""

_BUFFERS_INSIDE: Final = frozenset({torch.ops.aten.logsumexp.default})
"""Kernels that make a copy of their input which no operation returns."""

_ANSWERS: Final[Mapping[Any, Callable[[StorageFollower, tuple[Any, ...]], Any]]] = {
    torch.ops.aten._local_scalar_dense.default: StorageFollower.scalar,
    torch.ops.aten._grouped_mm.default: StorageFollower.grouped_product,
    torch.ops.aten.equal.default: lambda follower, args: True,
    torch.ops.aten.nonzero.default: StorageFollower.picked,
}


_REFUSED: Final[Mapping[Untraced, tuple[str, str]]] = {
    "several cards": ("A trace follows one card, and this plan has several", "Trace a plan for one card."),
    "streams": (
        "A trace follows weights that stay on the device, and this plan's blocks visit it one by one",
        "Trace the plan with its weights on the device.",
    ),
    "disk": (
        "A trace follows the device's memory and RAM, and this plan's optimizer states are in a file",
        "Trace the plan with its states on the device or in RAM.",
    ),
    "compiled": (
        "A trace follows operations one by one, and this plan's are fused by a compiler",
        "Trace the plan with compile off.",
    ),
}


class TracedExecutor(ResidentExecutor):
    """The engine's own executor; only says which phase it is in."""

    def __init__(self, model: nn.Module, *, follower: StorageFollower, **options: Any) -> None:
        super().__init__(model, **options)
        self._follower = follower
        self._peak = _NoMeter()  # type: ignore[assignment]
        find_blocks(model)[-1].register_forward_pre_hook(self._last_block, with_kwargs=True)
        if self.plan.input_tier != "device":  # asking walks all modules, at every operation
            states = follower.in_ram()
            follower.in_ram = lambda: states + waiting_bytes(model)

    def step(self, micro_batches: Any, learning_rate: float) -> StepResult:
        with self._follower.within("backward"):
            return super().step(micro_batches, learning_rate)

    def _last_block(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """The last block's backward is over when its input has a gradient."""
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(self._leave_last_block)

    def _leave_last_block(self, _: Tensor) -> None:
        self._follower.in_last_block = False

    def _sums(self, piece: Piece, targets: Targets, *, gradient_scale: float = 1.0) -> SummedLoss:
        self._follower.in_last_block = True
        phase = "loss" if self._follower.phase == "backward" else self._follower.phase
        with self._follower.within(phase):
            return super()._sums(piece, targets, gradient_scale=gradient_scale)

    def _finish(self, losses: list[Tensor], trained: Trained, recovered: str) -> StepResult:
        on_device = self.plan.optimizer_tier == "device"
        place = contextlib.nullcontext() if on_device else self._follower.elsewhere()
        with self._follower.within("step"), place:
            return super()._finish(losses, trained, recovered)


class _NoMeter:
    """Fake tensors have no allocator to ask."""

    def watch(self, tokens: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def trace(
    values: Mapping[str, Any],
    plan: Plan,
    *,
    length: int,
    trained_share: float = 1.0,
    name: str = "model",
    whole: bool = False,
) -> Trace:
    """Trace `plan` for the model of a config.json, every sequence `length` tokens long; `whole` traces every block.

    Raises ModelError when `transformers` cannot build it, UserError for a plan this version's engine cannot run.
    """
    lacks = missing(plan)
    reason = untraced(plan)
    if lacks:
        raise UserError(
            f"A trace runs this version's engine, which lacks {', '.join(lacks)}", "Trace a plan that can be run."
        )
    if reason is not None:
        raise UserError(*_REFUSED[reason])
    architecture = from_config(values, name)
    tracer = _Depths(values, architecture, plan, length, trained_share)
    return tracer.trace(whole=whole)


@dataclass
class _Depths:
    """Traces of fewer blocks than the model has. A depth is (frozen, recomputed, compressed, kept) blocks, in that
    order. Of `steps` the last one counts: one is enough, as states are there before it."""

    values: Mapping[str, Any]
    architecture: Architecture
    plan: Plan
    length: int
    trained_share: float
    steps: int = 1

    def trace(self, *, whole: bool) -> Trace:
        frozen = self.plan.first_trained(self.architecture.layers)
        modes = planned_modes(self.plan, self.architecture.layers)[frozen:]
        compressed, kept = modes.count("compress"), modes.count("keep")
        wanted = (frozen, len(modes) - compressed - kept, compressed, kept)
        fewest = self._fewest
        start = tuple(min(count, fewest) for count in wanted)
        if whole or sum(wanted) <= sum(start) + 2 * self._unit or self._unit > 4:
            return self._whole(wanted)
        base = self._run(start)
        found, linear, deepest = dict(base.phases), True, base
        for axis, (count, few) in enumerate(zip(wanted, start, strict=True)):
            if count <= few:
                continue
            one, two = (self._run(_moved(start, axis, steps * self._unit)) for steps in (1, 2))
            for phase in base.phases:
                each = one.phases[phase] - base.phases[phase]
                expected = one.phases[phase] + each
                linear = linear and abs(two.phases[phase] - expected) <= LINEAR_WITHIN * max(expected, 1)
                found[phase] += each * (count - few) // self._unit
            deepest = max(deepest, two, key=lambda made: made.traced_blocks)
        if not linear:
            return dataclasses.replace(self._whole(wanted), linear=False)
        return dataclasses.replace(deepest, phases=self._stored(found))

    @property
    def _unit(self) -> int:
        """Blocks after which the pattern repeats: of experts, and of windows where those are masks."""
        experts, window = self.architecture.experts, self.architecture.sliding_window
        every = FULL_ATTENTION_EVERY.get(self.architecture.family, 1)
        masks = window is not None and window <= self.length and self.plan.attention != "eager"
        if masks and self.architecture.sliding_layers is not None:  # named one by one
            every = self.architecture.layers
        return math.lcm(experts.every if experts else 1, every if masks else 1)

    @property
    def _fewest(self) -> int:
        """Blocks of each kind in the smallest trace: those that are not like the others, and two that are."""
        experts = self.architecture.experts
        first = experts.first_moe_layer if experts else 0
        return first + 2 * self._unit

    def _whole(self, wanted: tuple[int, ...]) -> Trace:
        made = self._run(wanted)
        return dataclasses.replace(made, phases=self._stored(made.phases))

    def _stored(self, phases: Mapping[str, int]) -> dict[str, int]:
        """4-bit weights were traced in 16 bits: the difference does not move."""
        phases = {**phases, "backward": max(phases["backward"], phases[_LAST])}
        del phases[_LAST]
        if self.plan.weight_format not in QUANTISED or not self.plan.lora_rank:
            return phases
        plain = dataclasses.replace(
            self.plan, weight_format="fp32" if self.plan.compute == "tf32" else self.plan.compute
        )
        less = int(weight_bytes(self.architecture, plain) - weight_bytes(self.architecture, self.plan))
        return {phase: size - less for phase, size in phases.items()}

    def _run(self, depth: tuple[int, ...]) -> Trace:
        frozen, recomputed, compressed, _ = depth
        follower = self.follower()
        # Paged states are traced as if the driver never had to move them.
        plan = dataclasses.replace(
            self.plan,
            recompute=recomputed,
            compress=compressed,
            last_blocks=sum(depth) - frozen if self.plan.last_blocks else 0,
            device="cpu",
            optimizer_paged=False,
        )
        with FakeTensorMode(allow_non_fake_inputs=True):
            self.follow(plan, sum(depth), follower)
        return Trace(
            phases=dict(follower.peaks),
            traced_blocks=sum(depth),
            linear=True,
            operations=follower.operations,
            timeline=thinned(follower.timeline),
        )

    def follower(self, kind: type[StorageFollower] = StorageFollower) -> StorageFollower:
        """One that knows a micro-batch's shape."""
        return kind(
            sequences=self.plan.micro_batch * (_DOCUMENTS if self.plan.packing else 1),
            tokens=self.plan.micro_batch * self.length,
            trained_share=self.trained_share,
            packed=self.plan.packing,
        )

    def follow(
        self,
        plan: Plan,
        layers: int,
        follower: StorageFollower,
        fill: Callable[[nn.Module], None] | None = None,
    ) -> None:
        """Build a model of `layers` blocks, train and evaluate it as planned before the follower's eyes. `fill` gives
        its weights their numbers, where there are any."""
        model = self._model(plan, layers)
        with _untraced_masks(), follower:
            materialise(model)
            if fill is not None:
                fill(model)
            optimizer = _optimizer(model, plan, follower)
            executor = TracedExecutor(model, follower=follower, plan=plan, optimizer=optimizer)
            batch = _batch(plan.micro_batch, self.length, packed=plan.packing)
            for _ in range(self.steps):
                follower.forget()
                executor.step([batch] * min(plan.accumulation, 2), learning_rate=1e-4)
            with follower.within("evaluation"):
                executor.evaluate([batch])

    def _model(self, plan: Plan, layers: int) -> nn.Module:
        """On the meta device: without numbers and without memory."""
        with torch.device("meta"):
            model = _built(self.values, plan, layers)
            if not plan.lora_rank:
                train_last_blocks(model, plan.last_blocks)
                return model
            from vramfit.models.adapters import attach_adapters

            targets = "all-linear" if plan.lora_targets == ("all-linear",) else plan.lora_targets
            return attach_adapters(
                model,
                rank=plan.lora_rank,
                alpha=16.0,
                dropout=plan.lora_dropout,
                targets=targets,
                variant="dora" if plan.dora else "lora",
                experts=plan.lora_experts,
                seed=0,
            )


@contextlib.contextmanager
def _untraced_masks() -> Iterator[None]:
    """`transformers` makes masks it would not need when it sees fake tensors, because a compiler's graph must bear any
    mask. A real step makes none, so for the trace it is told that nothing is traced."""
    from transformers import masking_utils

    asked = getattr(masking_utils, "is_tracing", None)
    if asked is None:
        yield
        return
    masking_utils.is_tracing = lambda tensor=None: False
    try:
        yield
    finally:
        masking_utils.is_tracing = asked


def materialise(model: nn.Module) -> None:
    """Give every parameter and buffer on the meta device a storage of its own, shared ones one storage."""
    made: dict[int, Any] = {}
    for module in model.modules():
        for places in (module._parameters, module._buffers):
            for name, value in places.items():
                if value is None:
                    continue
                if id(value) not in made:
                    empty = torch.empty(value.shape, dtype=value.dtype, device="cpu")
                    trains = isinstance(value, nn.Parameter)
                    made[id(value)] = nn.Parameter(empty, requires_grad=value.requires_grad) if trains else empty
                places[name] = made[id(value)]


def make_states(optimizer: torch.optim.Optimizer) -> None:
    """The states of all weights that train, as a first step leaves them; its gradients are made up, so that no model
    has to run for it."""
    weights = [weight for group in optimizer.param_groups for weight in group["params"]]
    for weight in weights:
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for weight in weights:
        weight.grad = None


def _optimizer(model: nn.Module, plan: Plan, follower: StorageFollower) -> torch.optim.Optimizer:
    """The plan's, with its states there; those in RAM, with copies and places of gradients, are not on the device."""
    weights, on_device = follower.alive, plan.optimizer_tier == "device"
    with contextlib.nullcontext() if on_device else follower.elsewhere():
        optimizer = build_optimizer(model, ScheduleChoice(), plan)
    steps = optimizer.inner if isinstance(optimizer, HostStates) else optimizer
    if isinstance(steps, ChunkedOptimizer):
        steps.chunk_numbers = CHUNK_ON_CARD  # on a CPU's own there would be sixteen times the operations
    with follower.within("step"):
        make_states(optimizer)
    if not on_device:
        states = follower.alive - weights
        follower.in_ram = lambda: states
    return optimizer


def _moved(depth: tuple[int, ...], axis: int, steps: int) -> tuple[int, ...]:
    return tuple(count + (steps if index == axis else 0) for index, count in enumerate(depth))


def _built(values: Mapping[str, Any], plan: Plan, layers: int) -> nn.Module:
    """The model with `layers` blocks, its lists (one entry per block) as long. Raises ModelError."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**_shortened(values, layers))
    for name in _ATTENTION_DROPOUTS:  # cards' kernels drop out inside; the CPU's would make all scores for it
        if hasattr(config, name):
            setattr(config, name, 0.0)
    dtype = DTYPES[plan.compute if plan.weight_format in QUANTISED and plan.lora_rank else plan.weight_format]
    try:
        model: nn.Module = AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation="eager" if plan.attention == "eager" else "sdpa"
        )
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(f"transformers cannot build this model: {reason}", "Check its config.json.") from error
    return model


def _shortened(values: Mapping[str, Any], layers: int) -> dict[str, Any]:
    from vramfit.models import families

    family = families.FAMILIES[families.ALIASES.get(str(values["model_type"]), str(values["model_type"]))]
    key = family.keys.get("layers", families.USUAL_KEYS["layers"])
    whole = values[key]
    cut = {
        name: value[:layers] if isinstance(value, list) and len(value) == whole else value
        for name, value in values.items()
    }
    if "attention_types" in values:  # GPT-Neo: [[kinds that repeat, how often], ...]
        kinds = [kind for repeated, times in values["attention_types"] for kind in repeated * times]
        cut["attention_types"] = [[kinds[:layers], 1]]
    return {**cut, key: layers}


@dataclass(frozen=True)
class _Batch:
    input_ids: Tensor
    labels: Tensor
    attention_mask: Tensor | None = None
    position_ids: Tensor | None = None
    weights: Tensor | None = None


_DOCUMENTS: Final = 2
"""In a packed row."""


def _batch(rows: int, length: int, *, packed: bool) -> _Batch:
    ids = torch.zeros(rows, length, dtype=torch.long)
    if not packed:
        return _Batch(ids, ids.clone())
    half = torch.arange(length) % max(1, length // _DOCUMENTS)
    return _Batch(ids, ids.clone(), position_ids=half.repeat(rows, 1))


def thinned(timeline: list[tuple[int, int, str]], most: int = 600) -> tuple[tuple[int, int, str], ...]:
    """At most about `most` points, each the highest of its stretch."""
    stretch = max(1, -(-len(timeline) // most))
    return tuple(
        max(timeline[start : start + stretch], key=lambda point: point[1]) for start in range(0, len(timeline), stretch)
    )


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """{"trace": ...} for {config, plan, length, trained_share}, or {"error": {what, remedy}}. With a `workload` the
    trace has `needs`: what the allocator makes of its peak on a device with the plan's budget."""
    try:
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in request["plan"].items()
        }
        plan = Plan(**{**values, "reasons": ()})
        made = trace(
            request["config"],
            plan,
            length=int(request["length"]),
            trained_share=float(request.get("trained_share", 1.0)),
            name=str(request.get("name", "model")),
        )
        found = {**dataclasses.asdict(made), "peak_bytes": made.peak_bytes}
        if "workload" in request:
            architecture = from_config(request["config"], str(request.get("name", "model")))
            work = Workload(**request["workload"])
            needs = needs_of(architecture, plan, work, tensors=made.peak_bytes, device_bytes=plan.budget_bytes)
            found["needs"] = dataclasses.asdict(needs)
        return {"trace": found}
    except VramfitError as error:
        return {"error": {"kind": type(error).__name__, "what": error.what, "remedy": error.remedy}}
    except Exception as error:  # torch refuses on fake tensors what it does with real ones
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        wrong = InternalError(f"This model cannot be traced: {type(error).__name__}: {reason}")
        return {"error": {"kind": "InternalError", "what": str(wrong), "remedy": ""}}


def main() -> None:
    """Read a request from standard input, write the answer as the last line of standard output."""
    found = answer(json.loads(sys.stdin.buffer.read().decode("utf-8")))
    sys.stdout.write("\n" + json.dumps(found, ensure_ascii=True) + "\n")


if __name__ == "__main__":
    main()
