"""Compiled blocks: the eager step's numbers, one graph for all blocks, and a way back when the compiler fails."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.vramfit.engine import test_streaming as adapted
from tests.vramfit.engine import test_trained_blocks as trained
from tests.vramfit.engine.test_streaming import a_config, batches, saved
from tests.vramfit.engine.test_trained_blocks import disk, full_plan
from vramfit.config import ScheduleChoice
from vramfit.engine import compiling
from vramfit.engine.activations import set_activations
from vramfit.engine.compiling import CompiledBlocks, count_launches, first_pass, launches_of, trial
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.randomness import random_state
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import ModelError


def has_cpp_compiler() -> bool:
    try:
        from torch._inductor.cpp_builder import get_cpp_compiler

        return bool(get_cpp_compiler())
    except Exception:
        return False


pytestmark = [
    pytest.mark.long,
    pytest.mark.filterwarnings("ignore"),  # a compiler notes much about torch's own code
]
needs_compiler = pytest.mark.skipif(not has_cpp_compiler(), reason="torch's compiler for CPUs needs a C++ compiler")


@pytest.fixture(autouse=True)
def fresh_compiler():
    """No graphs of other tests."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def quick(monkeypatch):
    """The same capture of graphs and the same backward, without a compiler's minute: kernels are torch's own."""
    real = torch.compile
    monkeypatch.setattr(
        compiling.torch, "compile", lambda f, *, mode, dynamic: real(f, backend="aot_eager", dynamic=dynamic)
    )


def executor_of(tiny, *, compiled: bool, lora: bool = False, **changes):
    """(executor, its compiled blocks or None) of a model that is the same each time."""
    model = tiny.build("llama")
    if lora:
        from vramfit.models.adapters import attach_adapters

        model = attach_adapters(model, rank=4, alpha=8.0, targets="all-linear", seed=3)
    blocks = CompiledBlocks(model) if compiled else None
    plan = tiny.plan(**changes)
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    return executor, blocks


def steps(executor, tiny, *lengths: tuple[int, ...]) -> list[float]:
    return [executor.step([tiny.pad(tiny.sequences(*each))], 1e-2).loss for each in lengths]


def weights(executor) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in executor.model.parameters()]


def graphs() -> int:
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


def assert_near(found, wanted, *, within: float) -> None:
    for one, other in zip(weights(found), weights(wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=within, atol=within)


@needs_compiler
def test_torchs_compiler_gives_the_eager_steps_numbers_in_fewer_launches(tiny):
    eager, _ = executor_of(tiny, compiled=False, recompute=1)
    compiled, blocks = executor_of(tiny, compiled=True, recompute=1)
    piece = compiled.pieces(tiny.pad(tiny.sequences(12, 9)))[0]
    first_pass(compiled, blocks, piece)
    before, after = launches_of(compiled, blocks, piece)
    assert 0 < after < before
    lengths = ((12, 9), (12, 9))
    assert steps(compiled, tiny, *lengths) == pytest.approx(steps(eager, tiny, *lengths), rel=1e-5)
    assert blocks.on and not blocks.problem
    assert_near(compiled, eager, within=1e-4)


@pytest.mark.parametrize(("lora", "recompute"), [(False, 0), (False, 2), (True, 1)])
def test_a_compiled_step_is_the_eager_step(tiny, quick, lora, recompute):
    """Trained whole or by adapters, kept or recomputed, whatever the rows: the same kernels give the same bits."""
    options = {"lora": lora, "recompute": recompute}
    eager, _ = executor_of(tiny, compiled=False, **options)
    compiled, blocks = executor_of(tiny, compiled=True, **options)
    lengths = ((12, 9), (7, 5, 3))
    assert steps(compiled, tiny, *lengths) == steps(eager, tiny, *lengths)
    assert_near(compiled, eager, within=0.0)
    assert blocks.on and graphs() > 0


def test_all_blocks_share_a_graph_and_any_shape_has_the_second_one(tiny, quick):
    compiled, _ = executor_of(tiny, compiled=True)
    steps(compiled, tiny, (12, 9))
    assert graphs() == 1
    steps(compiled, tiny, (7, 5, 3), (16, 4), (33, 2))
    assert graphs() <= 3  # rows and lengths that vary, and where torch keeps one row apart


def test_under_autocast(tiny, quick):
    eager, _ = executor_of(tiny, compiled=False, compute="bf16")
    compiled, _ = executor_of(tiny, compiled=True, compute="bf16")
    assert steps(compiled, tiny, (12, 9), (12, 9)) == steps(eager, tiny, (12, 9), (12, 9))
    assert graphs() > 0


def test_evaluation_and_compressed_blocks_stay_as_they_are(tiny, quick):
    compiled, _ = executor_of(tiny, compiled=True)
    compiled.evaluate([tiny.pad(tiny.sequences(9, 5))])
    set_activations(compiled.model, ["compress", "compress"])
    steps(compiled, tiny, (12, 9))
    assert graphs() == 0


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_compiler_that_fails_is_done_without(tiny, monkeypatch, where):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, value):
            return value.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise RuntimeError("no such kernel\nand more")

    def failing(forward, **_):
        def run(block, *args, **kwargs):
            if where == "forward":
                raise RuntimeError("no such kernel\nand more")
            return Fails.apply(forward(block, *args, **kwargs))

        return run

    monkeypatch.setattr(compiling.torch, "compile", failing)
    eager, _ = executor_of(tiny, compiled=False)
    compiled, blocks = executor_of(tiny, compiled=True)
    first_pass(compiled, blocks, compiled.pieces(tiny.pad(tiny.sequences(12, 9)))[0])
    assert not blocks.on and blocks.problem == "RuntimeError: no such kernel"
    assert steps(compiled, tiny, (12, 9)) == steps(eager, tiny, (12, 9))
    assert_near(compiled, eager, within=0.0)


def test_what_a_block_itself_raises_is_raised(tiny, quick):
    compiled, blocks = executor_of(tiny, compiled=True)
    with pytest.raises(IndexError):
        compiled.step([tiny.pad([(torch.tensor([999_999, 1, 2]), torch.tensor([1, 1, 2]))])], 1e-2)
    assert blocks.on  # that was the embedding, no block


def test_memory_that_runs_out_is_no_failure_of_the_compiler(tiny, monkeypatch):
    def full(forward, **_):
        def run(block, *args, **kwargs):
            raise torch.OutOfMemoryError("out of memory")

        return run

    monkeypatch.setattr(compiling.torch, "compile", full)
    compiled, blocks = executor_of(tiny, compiled=True)
    with pytest.raises(torch.OutOfMemoryError):
        first_pass(compiled, blocks, compiled.pieces(tiny.pad(tiny.sequences(12)))[0])
    assert blocks.on


def test_a_trial_changes_nothing(tiny, quick):
    compiled, blocks = executor_of(tiny, compiled=True)
    before, random = weights(compiled), random_state(compiled.device)
    made = trial(compiled, blocks, compiled.pieces(tiny.pad(tiny.sequences(12, 9)))[0])
    assert made is not None and made.eager_s > 0 and made.compiled_s > 0
    assert blocks.on == made.pays
    assert all(torch.equal(one, other) for one, other in zip(weights(compiled), before, strict=True))
    assert all(torch.equal(state, random[name]) for name, state in random_state(compiled.device).items())
    assert all(parameter.grad is None for parameter in compiled.model.parameters())


def test_launches_are_counted_one_by_one():
    here = torch.ones(3)
    assert count_launches(lambda: here.neg(), torch.device("cpu")) == 1
    assert count_launches(lambda: here.neg().exp().sqrt(), torch.device("cpu")) == 3


def test_closed_they_are_as_before(tiny):
    model = tiny.build("llama")
    blocks = CompiledBlocks(model)
    with pytest.raises(ModelError, match="before"):
        CompiledBlocks(model)
    blocks.close()
    assert not any("forward" in block.__dict__ for block in model.model.layers)


@pytest.mark.parametrize("mode", ["default", "max-autotune-no-cudagraphs", "max-autotune", "reduce-overhead"])
def test_recorded_launches_add_to_gradients_of_ours_in_every_mode_that_records(tiny, monkeypatch, mode):
    """A replay writes where the one before wrote: a gradient of its own would be lost under accumulation."""
    asked, passes = [], []
    monkeypatch.setattr(compiling.torch, "compile", lambda f, **options: asked.append(options) or f)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: passes.append(1))
    model, plan = tiny.build("llama"), tiny.plan()
    blocks = CompiledBlocks(model, mode)
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    records = mode in ("max-autotune", "reduce-overhead")
    assert asked == [{"mode": mode, "dynamic": False if records else None}]

    blocks.begin_pass()
    made = {name: value.grad for name, value in model.named_parameters() if value.grad is not None}
    assert all(name.startswith("model.layers.") and not each.any() for name, each in made.items())
    assert bool(made) is records and len(passes) == records
    executor.rehearse([tiny.pad(tiny.sequences(12, 9)), tiny.pad(tiny.sequences(7, 5))])
    assert len(passes) == (3 if records else 0)  # one for each pass forward
    assert all(model.get_parameter(name).grad is each for name, each in made.items())


def streamed(tmp_path, *, compiled: bool, method: str, **changes):
    """(executor, its compiled blocks or None) of a small Llama whose blocks visit."""
    folder = saved("llama", tmp_path / "model")
    config, plan = a_config(folder, method), disk(full_plan(method, **changes))
    if method == "full":
        here = trained.streaming(folder, plan, tmp_path / str(compiled), config=config)
    else:
        here = adapted.streaming(folder, dataclasses.replace(plan, lora_rank=4, lora_targets=("all-linear",)), tmp_path)
    blocks = CompiledBlocks(here.model, visits=here.visits) if compiled else None
    here.compiled = blocks
    return here, blocks


@pytest.mark.parametrize("method", ["full", "lora"])
def test_blocks_that_visit_share_a_graph_for_each_pass(quick, tmp_path, method):
    """One without gradients and one with them, for all blocks; the same kernels give the same bits."""
    eager, _ = streamed(tmp_path, compiled=False, method=method)
    compiled, blocks = streamed(tmp_path, compiled=True, method=method)
    batch = batches()[:1]

    taken = [(one.step(batch, 1e-2), other.step(batch, 1e-2)) for one, other in [(eager, compiled)] * 2]
    assert all((one.loss, one.grad_norm) == (other.loss, other.grad_norm) for one, other in taken)
    trained.assert_equal_states(eager, compiled)
    assert blocks.on and not blocks.problem
    assert graphs() == 2
    assert compiled.evaluate(batch) == eager.evaluate(batch)
    assert graphs() == 2
