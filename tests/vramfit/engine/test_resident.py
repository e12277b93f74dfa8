from __future__ import annotations

import json
import weakref
from collections import Counter

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from safetensors.torch import load, save
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vramfit.config import LossChoice, ScheduleChoice
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import CheckpointError, ConfigError, DataError, WontFit
from vramfit.models.adapters import attach_adapters

LENGTHS = (9, 17, 5, 30, 12, 8, 21, 3)
WEIGHTS = (0.5, 1.0, 2.0, 0.0)


def executor_for(model, tiny, *, max_grad_norm=1.0, schedule=None, terms=None, **plan):
    plan = tiny.plan(**plan)
    optimizer = build_optimizer(model, schedule or ScheduleChoice(), plan)
    terms = terms or LossChoice()
    return ResidentExecutor(model, plan=plan, optimizer=optimizer, max_grad_norm=max_grad_norm, loss=terms)


def step_gradients(executor, batches) -> tuple[dict[str, torch.Tensor], object]:
    """The gradients a step hands to the optimizer."""
    found = {}

    def grab(optimizer, args, kwargs):
        for name, parameter in executor.model.named_parameters():
            if parameter.grad is not None:
                found[name] = parameter.grad.clone()

    handle = executor.optimizer.register_step_pre_hook(grab)
    result = executor.step(batches, 0.0)
    handle.remove()
    return found, result


def relative_difference(found, wanted) -> float:
    assert found.keys() == wanted.keys() and wanted
    return max(float((found[name] - wanted[name]).norm() / wanted[name].norm()) for name in wanted)


@pytest.mark.parametrize("loss", ["fused", "chunked", "full"])
@pytest.mark.parametrize("adapters", [False, True])
def test_eight_by_one_gives_the_gradients_of_one_by_eight(tiny, loss, adapters):
    model = tiny.build("llama")
    if adapters:
        model = attach_adapters(model, rank=4, alpha=8, seed=0)
    sequences = tiny.sequences(*LENGTHS)
    executor = executor_for(model, tiny, max_grad_norm=0.0, loss=loss)
    whole, one = step_gradients(executor, [tiny.pad(sequences)])
    single, eight = step_gradients(executor, [tiny.pad([sequence]) for sequence in sequences])
    packed, _ = step_gradients(executor, [tiny.pack(sequences)])
    assert one.tokens == eight.tokens and eight.loss == pytest.approx(one.loss, rel=1e-6)
    if adapters:  # B is zero at first, so that A has no gradient yet
        whole, single, packed = (
            {name: value for name, value in found.items() if "lora_B" in name} for found in (whole, single, packed)
        )
    assert relative_difference(single, whole) < 1e-6
    assert relative_difference(packed, whole) < 1e-5


@pytest.mark.parametrize("loss", ["fused", "chunked", "full"])
@pytest.mark.parametrize("adapters", [False, True])
def test_the_gradient_is_the_weighted_mean_of_plain_torch_however_it_is_cut(tiny, loss, adapters):
    model = tiny.build("llama")
    if adapters:
        model = attach_adapters(model, rank=4, alpha=8, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # zero at first, so that A would have no gradient
                torch.nn.init.normal_(parameter, std=0.1)
    sequences = tiny.sequences(*LENGTHS, weights=WEIGHTS)
    batch = tiny.pad(sequences)
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none", ignore_index=-100
    )
    weights = batch.weights[:, 1:].masked_fill(batch.labels[:, 1:] == -100, 0).flatten()
    mean = (each * weights).sum() / weights.sum()
    mean.backward()
    wanted = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
    model.zero_grad()
    executor = executor_for(model, tiny, max_grad_norm=0.0, loss=loss)
    for batches in ([batch], [tiny.pad([one]) for one in sequences], [tiny.pack(sequences)]):
        found, result = step_gradients(executor, batches)
        assert relative_difference(found, wanted) < 1e-5
        assert result.loss == pytest.approx(mean.item(), rel=1e-6) and result.tokens == int((weights > 0).sum())
        assert executor.evaluate(batches) == (pytest.approx(mean.item(), rel=1e-6), result.tokens)


@pytest.mark.parametrize("loss", ["fused", "chunked", "full"])
def test_weights_of_one_are_no_weights_and_of_zero_a_mask_bit_for_bit(tiny, loss):
    sequences = tiny.sequences(*LENGTHS, weights=(0.0, 1.0))
    masked = [(ids, labels.masked_fill(weights == 0, -100)) for ids, labels, weights in sequences]
    executor = executor_for(tiny.build("llama"), tiny, loss=loss)
    found, one = step_gradients(executor, [tiny.pad(sequences[:5]), tiny.pad(sequences[5:])])
    wanted, other = step_gradients(executor, [tiny.pad(masked[:5]), tiny.pad(masked[5:])])
    assert one == other and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_weighted_and_plain_micro_batches_share_one_denominator(tiny):
    weighted, plain = tiny.sequences(*LENGTHS[:4], weights=(0.5, 2.0)), tiny.sequences(*LENGTHS[4:], seed=1)
    executor = executor_for(tiny.build("llama"), tiny, max_grad_norm=0.0)
    ones = [(ids, labels, torch.ones(len(ids))) for ids, labels in plain]
    found, _ = step_gradients(executor, [tiny.pad(weighted), tiny.pad(plain)])
    wanted, _ = step_gradients(executor, [tiny.pad([*weighted, *ones])])
    assert relative_difference(found, wanted) < 1e-6


def test_the_gradient_is_that_of_plain_torch(tiny):
    model, batch = tiny.build("qwen2"), tiny.pad(tiny.sequences(*LENGTHS))
    found, result = step_gradients(executor_for(model, tiny, max_grad_norm=0.0), [batch])
    output = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=batch.labels)
    output.loss.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert relative_difference(found, wanted) < 1e-5
    assert result.loss == pytest.approx(output.loss.item(), rel=1e-6)
    norm = torch.nn.utils.get_total_norm(list(wanted.values())).item()
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)


def test_clipping_scales_to_the_limit_and_reports_the_norm_before(tiny):
    model, batches = tiny.build("llama"), [tiny.pad(tiny.sequences(9, 17))]
    free, unclipped = step_gradients(executor_for(model, tiny, max_grad_norm=0.0), batches)
    limited, clipped = step_gradients(executor_for(model, tiny, max_grad_norm=0.01), batches)
    assert clipped.grad_norm == pytest.approx(unclipped.grad_norm) and unclipped.grad_norm > 0.01
    assert torch.nn.utils.get_total_norm(list(limited.values())).item() == pytest.approx(0.01, rel=1e-3)
    assert relative_difference({n: v * unclipped.grad_norm / 0.01 for n, v in limited.items()}, free) < 1e-3


def test_it_learns(tiny):
    executor = executor_for(tiny.build("llama"), tiny)
    batches = [tiny.pad(tiny.sequences(9, 17)), tiny.pad(tiny.sequences(12, 4))]
    losses = [executor.step(batches, 1e-2).loss for _ in range(8)]
    assert losses[-1] < losses[0] - 0.5
    assert all(parameter.grad is None for parameter in executor.model.parameters())


def test_evaluation_changes_nothing_and_weighs_tokens(tiny):
    model = attach_adapters(tiny.build("llama"), rank=4, alpha=8, dropout=0.5, seed=0)
    executor = executor_for(model, tiny)
    sequences = tiny.sequences(*LENGTHS)
    before = [parameter.clone() for parameter in model.parameters()]
    random_before = torch.get_rng_state()
    together = executor.evaluate([tiny.pad(sequences)])
    apart = executor.evaluate([tiny.pad([sequence]) for sequence in sequences])
    assert together[0] == pytest.approx(apart[0], rel=1e-6) and together[1] == apart[1]
    assert torch.equal(torch.get_rng_state(), random_before) and model.training
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


class LiveBytes(TorchDispatchMode):
    """The most bytes that tensors made under it held at once."""

    def __init__(self):
        super().__init__()
        self.users, self.now, self.most = Counter(), 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self._hold(storage.data_ptr(), storage.nbytes())
                weakref.finalize(tensor, self._let_go, storage.data_ptr(), storage.nbytes())
        return made

    def _hold(self, place, size):
        self.users[place] += 1
        self.now += size if self.users[place] == 1 else 0
        self.most = max(self.most, self.now)

    def _let_go(self, place, size):
        self.users[place] -= 1
        self.now -= size if self.users[place] == 0 else 0


@pytest.mark.parametrize("loss", ["fused", "chunked", "full"])
def test_case_112_evaluation_needs_the_memory_of_one_piece_however_many_there_are(tiny, loss):
    """What is kept of a piece is its loss: logits of a held-out share never lie side by side."""
    executor = executor_for(tiny.build("llama"), tiny, loss=loss)
    most = []
    for count in (2, 40):
        pieces = [tiny.pad(tiny.sequences(32, 32)) for _ in range(count)]
        with LiveBytes() as live:
            executor.evaluate(pieces)
        most.append(live.most)
    assert most[0] == most[1] > 0


def test_steps_without_trained_tokens_are_refused(tiny):
    executor = executor_for(tiny.build("llama"), tiny)
    batch = tiny.pad(tiny.sequences(9))
    empty = type(batch)(batch.input_ids, torch.full_like(batch.labels, -100), batch.attention_mask)
    for call in (lambda: executor.step([empty], 1e-3), lambda: executor.step([], 1e-3)):
        with pytest.raises(DataError, match="0 trained tokens"):
            call()
    with pytest.raises(DataError, match="held-out"):
        executor.evaluate([empty])
    with_one = executor.step([empty, batch], 1e-3)
    assert with_one.tokens == int((batch.labels[:, 1:] != -100).sum())


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_a_step_that_is_not_finite_leaves_the_weights_alone(tiny, where):
    model = tiny.build("llama")
    executor = executor_for(model, tiny)
    if where == "loss":
        with torch.no_grad():
            model.model.norm.weight[0] = torch.inf
    else:
        model.model.norm.weight.register_hook(lambda gradient: gradient * torch.nan)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-2)
    assert result.skipped and where in result.problem
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def run(tiny, build, steps, *, state=None, first=1, **plan):
    executor = executor_for(build(), tiny, **plan)
    if state is not None:
        executor.load_state(*state)
    for step in range(first, first + steps):
        executor.step([tiny.pad(tiny.sequences(9, 17, seed=step)), tiny.pad(tiny.sequences(5, seed=-step))], 1e-2)
    return executor


@pytest.mark.parametrize("compute", ["fp32", "fp16"])
@pytest.mark.parametrize("adapters", [False, True])
def test_a_resumed_run_is_the_same_bit_for_bit(tiny, adapters, compute):
    """Dropout is on, so that the random state matters; the file formats lie between save and load."""

    def build():
        model = tiny.build("llama", attention_dropout=0.1)
        return attach_adapters(model, rank=4, alpha=8, dropout=0.1, seed=0) if adapters else model

    torch.manual_seed(5)
    whole = run(tiny, build, 6, compute=compute)
    torch.manual_seed(5)
    half = run(tiny, build, 3, compute=compute)
    tensors, values = half.state()
    kept = load(save({name: tensor.contiguous() for name, tensor in tensors.items()})), json.loads(json.dumps(values))
    torch.manual_seed(99)
    resumed = run(tiny, build, 3, state=kept, first=4, compute=compute)
    wanted = whole.model.state_dict()
    assert all(torch.equal(wanted[name], value) for name, value in resumed.model.state_dict().items())
    whole_state, resumed_state = whole.state(), resumed.state()
    assert whole_state[1] == resumed_state[1] and whole_state[0].keys() == resumed_state[0].keys()
    assert all(torch.equal(whole_state[0][name], value) for name, value in resumed_state[0].items())


def test_the_state_holds_only_what_is_trained(tiny):
    executor = executor_for(attach_adapters(tiny.build("llama"), rank=4, alpha=8, seed=0), tiny)
    executor.step([tiny.pad(tiny.sequences(9))], 1e-3)
    weights = [name for name in executor.state()[0] if name.startswith("model.")]
    assert weights and all("lora_" in name for name in weights)


def test_a_state_of_another_model_is_refused(tiny):
    state = executor_for(tiny.build("llama"), tiny).state()
    other = executor_for(tiny.build("llama", intermediate_size=32), tiny)
    with pytest.raises(CheckpointError, match="another model"):
        other.load_state(*state)


def test_fp16_skips_overflowing_steps_and_halves_the_scale(tiny):
    executor = executor_for(tiny.build("llama"), tiny, compute="fp16")
    batches = [tiny.pad(tiny.sequences(6))]
    first = executor.step(batches, 1e-3)
    assert first.loss_scale is not None and not first.problem
    executor._scaler.load_state_dict({**executor._scaler.state_dict(), "scale": 2.0**40})
    before = {name: value.clone() for name, value in executor.model.state_dict().items()}
    refused = executor.step(batches, 1e-3)
    assert refused.skipped and refused.loss_scale == 2.0**39 and not refused.problem
    assert all(torch.equal(before[name], value) for name, value in executor.model.state_dict().items())


def test_a_collapsed_scale_is_a_problem(tiny):
    model = tiny.build("llama")
    executor = executor_for(model, tiny, compute="fp16")
    model.model.norm.weight.register_hook(lambda gradient: gradient * torch.inf)
    executor._scaler.load_state_dict({**executor._scaler.state_dict(), "scale": 2.0**-6})
    result = executor.step([tiny.pad(tiny.sequences(6))], 1e-3)
    assert result.skipped and "loss scale" in result.problem


def test_fp16_weights_are_refused(tiny):
    with pytest.raises(ConfigError):
        executor_for(tiny.build("llama").half(), tiny, compute="fp16")


def test_bf16_is_near_fp32(tiny):
    batches = [tiny.pad(tiny.sequences(9, 6))]
    exact = executor_for(tiny.build("llama"), tiny).step(batches, 0.0)
    rounded = executor_for(tiny.build("llama"), tiny, compute="bf16").step(batches, 0.0)
    assert rounded.loss == pytest.approx(exact.loss, rel=0.02) and rounded.loss != exact.loss


def limit_rows(model, most: int) -> None:
    """Make the model raise the real out-of-memory class when more rows than `most` come at once."""
    original = model.model.forward

    def limited(*args, **kwargs):
        if kwargs["input_ids"].shape[0] > most:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return original(*args, **kwargs)

    model.model.forward = limited


@pytest.mark.parametrize("weights", [(), (0.5, 2.0)])
def test_out_of_memory_repeats_the_step_in_smaller_pieces_with_the_same_gradient(tiny, weights):
    sequences = tiny.sequences(*LENGTHS, weights=weights)
    wanted, _ = step_gradients(executor_for(tiny.build("llama"), tiny), [tiny.pad(sequences)])
    model = tiny.build("llama")
    executor = executor_for(model, tiny)
    limit_rows(model, 2)
    found, result = step_gradients(executor, [tiny.pad(sequences)])
    assert relative_difference(found, wanted) < 1e-6
    assert "repeated with 2" in result.recovered
    assert executor.step([tiny.pad(sequences)], 0.0).recovered == ""  # the limit is remembered


def test_out_of_memory_with_a_single_sequence_ends_the_run_with_a_sentence(tiny):
    model = tiny.build("llama")
    executor = executor_for(model, tiny)
    limit_rows(model, 0)
    with pytest.raises(WontFit, match="single sequence of 17 tokens"):
        executor.step([tiny.pad(tiny.sequences(9, 17))], 1e-3)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_out_of_memory_in_evaluation_goes_on_in_smaller_pieces(tiny):
    batches = [tiny.pad(tiny.sequences(*LENGTHS)), tiny.pad(tiny.sequences(4, 6, seed=2))]
    model = tiny.build("llama")
    executor = executor_for(model, tiny)
    wanted, tokens = executor.evaluate(batches)
    limit_rows(model, 2)
    found, same_tokens = executor.evaluate(batches)
    assert (found, same_tokens) == (pytest.approx(wanted, rel=1e-6), tokens)
    limit_rows(model, 0)
    with pytest.raises(WontFit, match="single sequence"):
        executor.evaluate(batches)


def test_what_memory_bears_is_remembered_over_a_resume(tiny):
    """With dropout, other pieces would meet other random numbers."""
    model = tiny.build("llama", attention_dropout=0.3)
    executor = executor_for(model, tiny)
    batch = tiny.pad(tiny.sequences(*LENGTHS))
    limit_rows(model, 2)
    executor.step([batch], 1e-3)
    tensors, values = executor.state()
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    wanted = executor.step([batch], 1e-3)
    other = executor_for(tiny.build("llama", seed=5, attention_dropout=0.3), tiny)
    other.load_state(tensors, json.loads(json.dumps(values)))
    assert other.step([batch], 1e-3).loss == wanted.loss


def test_no_room_for_the_optimizer_is_one_sentence(tiny, monkeypatch):
    executor = executor_for(tiny.build("llama"), tiny)

    def no_room() -> None:
        raise torch.OutOfMemoryError("tried to allocate 2 GiB")

    monkeypatch.setattr(executor.optimizer, "step", no_room)
    with pytest.raises(WontFit, match=r"optimizer's step.*2 GiB"):
        executor.step([tiny.pad(tiny.sequences(9))], 1e-3)


def test_other_errors_are_not_taken_for_out_of_memory(tiny):
    model = tiny.build("llama")
    executor = executor_for(model, tiny)
    model.model.forward = lambda **kwargs: (_ for _ in ()).throw(RuntimeError("size mismatch"))
    with pytest.raises(RuntimeError, match="size mismatch"):
        executor.step([tiny.pad(tiny.sequences(9))], 1e-3)
