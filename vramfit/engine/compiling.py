"""Compiled blocks: one graph for all blocks of a structure, made by torch.compile, used only where it pays.

The class's forward is compiled once and called with each block: parameters are the graph's inputs, so blocks of the
same structure share it. The first shape gets a graph of its own and the second one a graph for any shape (torch calls
that automatic dynamic shapes): micro-batches differ in rows and length, and a graph for each would take minutes.
Recorded launches (reduce-overhead, max-autotune) hold for one shape only, so there every shape is compiled.

Only training passes are compiled. Evaluation and writing text meet other shapes, and stay as they are; so does a block
whose activations are compressed, whose hooks a compiler does not see. A compiler that fails is told and done without.

Blocks that visit have a training pass without gradients, too, whose graph is one of its own. Recorded launches cannot
have weights that come to another place at each visit; and as a compiler draws other random numbers in a pass with
gradients than in one without, blocks that drop out are not compiled where they visit.
"""

from __future__ import annotations

import contextlib
import gc
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from vramfit.engine.accelerators import synchronize
from vramfit.engine.activations import find_blocks, mode_of
from vramfit.engine.randomness import random_state, set_random_state
from vramfit.engine.recovery import is_out_of_memory
from vramfit.errors import ModelError
from vramfit.planning.plan import CompileMode, records_graphs

if TYPE_CHECKING:
    from vramfit.engine.resident import Piece, ResidentExecutor
    from vramfit.engine.visiting import VisitedBlocks

TRIAL_PAIRS: Final = 5
WORTH_IT: Final = 1.02
"""How much faster compiled passes must be: less is within what two runs of the same code differ by."""


class CompiledBlocks:
    """The blocks of a model, computed by a compiler while `on`. `problem` is why it no longer is, or ""."""

    def __init__(self, model: nn.Module, mode: CompileMode = "default", *, visits: VisitedBlocks | None = None) -> None:
        """Raises ModelError for a model without blocks, or whose blocks somebody else has changed already.

        `visits`: the model's blocks are those, whose weights come and go.
        """
        self.on, self.problem, self.mode = True, "", mode
        self._blocks = list(find_blocks(model))
        self._visit = visits is not None
        self._compiled = {kind: self._compile(kind) for kind in {type(block) for block in self._blocks}}
        if visits is not None:
            visits.own = [
                _Forward(self, block, plain, first=index == 0)
                for index, (block, plain) in enumerate(zip(self._blocks, visits.own, strict=True))
            ]
            return
        if any("forward" in block.__dict__ for block in self._blocks):
            raise ModelError(
                f"The blocks of {type(model).__name__} were changed by something else before",
                "Compile them before their activations are set.",
            )
        for index, block in enumerate(self._blocks):
            block.forward = _Forward(self, block, block.forward, first=index == 0)

    def close(self) -> None:
        """The blocks as they were."""
        for block in self._blocks:
            if isinstance(block.__dict__.get("forward"), _Forward):
                del block.__dict__["forward"]

    def run(self, block: nn.Module, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        trains = torch.is_grad_enabled() or (self._visit and block.training)
        if not self.on or not trains or mode_of(block) == "compress":
            return plain(*args, **kwargs)
        try:
            return self._compiled[type(block)](block, *args, **kwargs)
        except (
            Exception
        ) as error:  # the compiler's own, of many classes; what the block itself raises comes again below
            if is_out_of_memory(error) or _in_backward():  # there torch ends a recompute early by an exception
                raise
            self.give_up(error)
        return plain(*args, **kwargs)

    def give_up(self, error: Exception) -> None:
        self.on, self.problem = False, _first_line(error)

    def begin_pass(self) -> None:
        """Before a forward pass: recorded launches write where the last pass's did."""
        if not records_graphs(self.mode):
            return
        torch.compiler.cudagraph_mark_step_begin()  # type: ignore[no-untyped-call]
        for block in self._blocks:
            for parameter in block.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    # A recording's own gradient would be overwritten by its next replay: add to one of ours.
                    parameter.grad = torch.zeros_like(parameter)

    def _compile(self, kind: type[nn.Module]) -> Callable[..., Any]:
        dynamic = False if records_graphs(self.mode) else None
        made: Callable[..., Any] = torch.compile(kind.forward, mode=self.mode, dynamic=dynamic)
        return made


class _Forward:
    """What stands for a block's `forward`."""

    def __init__(self, blocks: CompiledBlocks, block: nn.Module, plain: Callable[..., Any], *, first: bool) -> None:
        self._blocks, self._block, self._first, self._plain = blocks, block, first, plain

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first and self._blocks.on and torch.is_grad_enabled() and not _in_backward():
            self._blocks.begin_pass()
        return self._blocks.run(self._block, self._plain, args, kwargs)


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Seconds of a forward and backward pass, the median of each way, in turns; and what the passes launched.

    `launches` are kernels on a card and operators on a CPU, before and after. `first_s` is how long the first compiled
    pass took, the compiler included.
    """

    eager_s: float
    compiled_s: float
    first_s: float
    launches: tuple[int, int]

    @property
    def faster(self) -> float:
        return self.eager_s / self.compiled_s

    @property
    def pays(self) -> bool:
        return self.faster >= WORTH_IT

    def __str__(self) -> str:
        return (
            f"{self.faster:.2f} times as fast in {2 * TRIAL_PAIRS} passes in turns ({1e3 * self.eager_s:.0f} and "
            f"{1e3 * self.compiled_s:.0f} ms); the compiler took {self.first_s:.0f} s"
        )


def first_pass(executor: ResidentExecutor, blocks: CompiledBlocks, piece: Piece) -> float:
    """Compile by going forward and backward once, before the first step, and return the seconds it took.

    A compiler that fails leaves the blocks as they were (`blocks.on` is then False). No weight and no random state is
    changed. Raises what is raised without a compiler too.
    """
    with nothing_changed(executor), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what a compiler notes about torch's own code tells a user nothing
        began = time.perf_counter()
        try:
            _pass(executor, piece)
        except Exception as error:  # backward is compiled when it first runs, outside of the blocks
            if is_out_of_memory(error) or not blocks.on:
                raise
            blocks.give_up(error)
            _pass(executor, piece)
        return time.perf_counter() - began


def trial(executor: ResidentExecutor, blocks: CompiledBlocks, piece: Piece) -> Trial | None:
    """Passes over `piece` compiled and not, in turns, with nothing changed; None where the compiler fails.

    Leaves the blocks compiled when that pays, as they were otherwise.
    """
    first_s = first_pass(executor, blocks, piece)
    if not blocks.on:
        return None
    took: dict[bool, list[float]] = {False: [], True: []}
    launches = launches_of(executor, blocks, piece)  # the first pass in each way also warms caches
    with nothing_changed(executor):
        for _ in range(TRIAL_PAIRS):
            for on in (False, True):
                blocks.on = on
                began = time.perf_counter()
                _pass(executor, piece)
                took[on].append(time.perf_counter() - began)
    made = Trial(
        eager_s=statistics.median(took[False]),
        compiled_s=statistics.median(took[True]),
        first_s=first_s,
        launches=launches,
    )
    blocks.on = made.pays
    return made


def launches_of(executor: ResidentExecutor, blocks: CompiledBlocks, piece: Piece) -> tuple[int, int]:
    """Launches of a forward and backward pass without the compiler and with it; leaves the blocks compiled."""
    counts = []
    with nothing_changed(executor):
        for on in (False, True):
            blocks.on = on
            counts.append(count_launches(lambda: _pass(executor, piece), executor.device))
    return counts[0], counts[1]


def count_launches(work: Callable[[], object], device: torch.device) -> int:
    """Kernels that `work` starts on a card; on the CPU the operators it calls, those that others call included."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    on_card = device.type != "cpu"
    if on_card:
        activities = list(torch.profiler.supported_activities())  # type: ignore[no-untyped-call]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        synchronize(device)
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    events: list[Any] = [] if results is None else list(results.events())
    if on_card:
        copies = ("Memcpy", "Memset")
        own = [event for event in events if event.device_type() != torch._C._autograd.DeviceType.CPU]
        return sum(not event.name().startswith(copies) for event in own)
    return sum(event.name().startswith("aten::") for event in events)


def launches_told(launches: tuple[int, int], *, device: torch.device, passes: int) -> str:
    """What `launches_of` counted as a sentence, for one pass and for a step of `passes` of them."""
    before, after = launches
    what = "calls {:,} of torch's operators" if device.type == "cpu" else "starts {:,} kernels on the card"
    told = f"One pass forward and backward {what.format(before)} without the compiler and {after:,} with it"
    if passes > 1:
        told += f"; a step has {passes} such passes, {passes * before:,} and {passes * after:,}"
    return f"{told}, and what the optimizer does besides."


def plain_pass(executor: ResidentExecutor, blocks: CompiledBlocks, piece: Piece) -> None:
    """Forward and backward once without the compiler, which stays off; nothing else is changed."""
    blocks.on = False
    with nothing_changed(executor):
        _pass(executor, piece)


def _pass(executor: ResidentExecutor, piece: Piece) -> None:
    """Forward and backward; gradients are made and let go."""
    executor.measure(piece, scale=executor.loss_scale)
    synchronize(executor.device)


@contextlib.contextmanager
def nothing_changed(executor: ResidentExecutor) -> Iterator[None]:
    """Random numbers are drawn as if nothing had happened, buffers are put back, and no gradient stays."""
    before = random_state(executor.device)
    try:
        with executor.recovery.buffers_kept():
            yield
    finally:
        set_random_state(executor.device, before)
        executor.optimizer.zero_grad(set_to_none=True)
        gc.collect()


def _first_line(error: Exception) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0].strip()}" if lines else type(error).__name__
