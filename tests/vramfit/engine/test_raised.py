"""Raised parts compute in fp32, whatever the rest does and however weights are stored; lowered, all is as before."""

from __future__ import annotations

import pytest
import torch

from vramfit.config import ScheduleChoice
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.raised import is_norm
from vramfit.engine.resident import ResidentExecutor
from vramfit.models.adapters import attach_adapters


def executor_for(model, tiny, **plan):
    plan = tiny.plan(**plan)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))


def measured(executor, tiny, *lengths) -> tuple[float, float]:
    [piece] = executor.pieces(tiny.pad(tiny.sequences(*(lengths or (9, 5)))))
    return executor.measure(piece)


def watched_outputs(model) -> dict[str, torch.dtype]:
    """Filled by the next forward: what each module that has weights of its own returns."""
    found: dict[str, torch.dtype] = {}

    def hook(name):
        def note(module, args, output):
            found[name] = output.dtype

        return note

    for name, module in model.named_modules():
        if any(value is not None for value in module._parameters.values()):
            module.register_forward_hook(hook(name))
    return found


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_all_raised_is_fp32_bit_for_bit_and_lowered_is_as_before(tiny, compute, loss):
    exact = measured(executor_for(tiny.build("llama"), tiny, loss=loss), tiny)
    executor = executor_for(tiny.build("llama"), tiny, compute=compute, loss=loss)
    before = measured(executor, tiny)
    with executor.raised.exactly("all"):
        assert executor.raised.compute == "fp32"
        assert measured(executor, tiny) == exact
    assert executor.raised.now == () and executor.raised.compute == compute
    assert measured(executor, tiny) == before != exact
    assert not any("forward" in module.__dict__ for module in executor.model.modules())


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi"])
def test_weights_stored_in_16_bits_are_computed_with_in_fp32(tiny, family):
    """Frozen bf16 weights beside adapters: as if they had been widened before."""
    wide = attach_adapters(tiny.build(family).bfloat16().float(), rank=4, alpha=8, seed=0)
    narrow = attach_adapters(tiny.build(family).bfloat16(), rank=4, alpha=8, seed=0)
    for (name, one), other in zip(wide.named_parameters(), narrow.parameters(), strict=True):
        if "lora_" in name:  # they begin as they were rounded, and B is not 0, or A would have no gradient
            one.data.normal_(std=0.1, generator=torch.Generator().manual_seed(len(name)))
            other.data.copy_(one)
    loss = "full" if family == "gemma2" else "chunked"
    executor = executor_for(narrow, tiny, compute="bf16", loss=loss)
    executor.raised.set(["all"])
    assert measured(executor, tiny) == measured(executor_for(wide, tiny, loss=loss), tiny)
    stored = {value.dtype for name, value in narrow.named_parameters() if "lora_" not in name}
    assert stored == {torch.bfloat16}


def test_recomputed_blocks_keep_what_is_raised(tiny):
    kept = executor_for(tiny.build("llama"), tiny, compute="bf16")
    recomputed = executor_for(tiny.build("llama"), tiny, compute="bf16", recompute=2)
    for executor in (kept, recomputed):
        executor.raised.set(["norms", "head"])
    assert measured(kept, tiny) == measured(recomputed, tiny)


def test_raised_norms_and_head_give_fp32_and_the_rest_does_not(tiny):
    executor = executor_for(tiny.build("llama"), tiny, compute="bf16", loss="full")
    outputs = watched_outputs(executor.model)
    executor.raised.set(["head", "norms"])
    measured(executor, tiny)
    assert outputs["lm_head"] == torch.float32
    norms = [name for name in outputs if "norm" in name]
    assert len(norms) == 5 and all(outputs[name] == torch.float32 for name in norms)
    assert outputs["model.layers.0.mlp.down_proj"] == torch.bfloat16


@pytest.mark.parametrize("loss", ["chunked", "full"])
def test_a_raised_head_sums_and_projects_in_fp32(tiny, loss):
    """The head alone makes the rest of the loss's error go: hidden states come in 16 bits, products do not."""
    executor = executor_for(tiny.build("llama"), tiny, compute="bf16", loss=loss)
    [piece] = executor.pieces(tiny.pad(tiny.sequences(9, 5)))
    found = []
    executor.model.model.norm.register_forward_hook(lambda module, args, output: found.append(output.detach()))
    executor.raised.set(["head"])
    loss_found, _ = executor.measure(piece)
    from vramfit.engine.loss import targets_of

    targets = targets_of(piece)
    logits = found[0].flatten(0, 1)[targets.positions].float() @ executor.model.lm_head.weight.T
    wanted = torch.nn.functional.cross_entropy(logits, targets.tokens).item()
    assert loss_found == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "gpt2", "phi", "cohere"])
def test_norms_are_found_in_every_family(tiny, family):
    found = [name for name, module in tiny.build(family).named_modules() if is_norm(module)]
    assert found and all("norm" in name or "ln_" in name for name in found)


def test_what_is_raised_is_in_the_state(tiny):
    executor = executor_for(tiny.build("llama"), tiny, compute="bf16")
    executor.raised.set(["norms", "head"])
    resumed = executor_for(tiny.build("llama"), tiny, compute="bf16")
    resumed.load_state(*executor.state())
    assert resumed.raised.now == ("head", "norms")
    assert measured(resumed, tiny) == measured(executor, tiny)


def test_fp32_has_nothing_to_raise_and_tf32_only_everything(tiny):
    exact = executor_for(tiny.build("llama"), tiny)
    assert exact.raised.next is None
    exact.raised.set(["head", "all"])
    assert exact.raised.now == ()
    rounded = executor_for(tiny.build("llama"), tiny, compute="tf32")
    assert rounded.raised.next == "all"
    rounded.raised.set(["all"])
    assert rounded.raised.compute == "fp32"


def test_a_forward_that_somebody_else_had_replaced_is_given_back(tiny):
    model = tiny.build("llama")
    norm = model.model.norm
    usual = norm.forward
    norm.forward = lambda hidden: usual(hidden)
    theirs = norm.forward
    executor = executor_for(model, tiny, compute="bf16")
    with executor.raised.exactly("norms"):
        assert norm.forward is not theirs
    assert norm.forward is theirs


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at it
def test_compiled_blocks_notice_what_is_raised(tiny):
    """Traced by the compiler's front end, without its slow back end."""
    executor = executor_for(tiny.build("llama"), tiny, compute="bf16")
    for block in executor.model.model.layers:
        block.compile(backend="eager")
    before = measured(executor, tiny)
    executor.raised.set(["norms"])
    raised = measured(executor, tiny)
    plain = executor_for(tiny.build("llama"), tiny, compute="bf16")
    plain.raised.set(["norms"])
    assert raised == pytest.approx(measured(plain, tiny), rel=1e-6)
    executor.raised.set([])
    assert measured(executor, tiny) == before
