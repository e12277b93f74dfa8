from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from vramfit.engine.loss import (
    IGNORED,
    TokenLoss,
    chunk_rows,
    chunked_sum,
    fused_sum,
    has_fused,
    model_inputs,
    targets_of,
)
from vramfit.models.adapters import attach_adapters

WEIGHTS = (0.5, 1.0, 2.0, 0.0)
PLAIN = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "phi"]
CHANGED = ["gemma2", "cohere", "granite"]


def reference_loss(model, batch) -> torch.Tensor:
    """What the model's own forward says, with plain torch after it."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    return F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="sum", ignore_index=IGNORED
    )


def weighted_reference(model, batch) -> torch.Tensor:
    """The same with each token's loss multiplied by its weight, by hand."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    each = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none", ignore_index=IGNORED
    )
    return (each * batch.weights[:, 1:].flatten()).sum()


def our_loss(model, batch, **options) -> torch.Tensor:
    return TokenLoss(model, **options)(model_inputs(batch, torch.device("cpu")), targets_of(batch))


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found, wanted, *, relative=1e-5) -> None:
    assert found.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= relative * value.norm() + 1e-9, name


@pytest.mark.parametrize("kind", ["fused", "chunked", "full"])
@pytest.mark.parametrize("family", PLAIN)
def test_equals_the_models_own_logits(tiny, family, kind):
    model, batch = tiny.build(family), tiny.pad(tiny.sequences(9, 17, 5))
    wanted = reference_loss(model, batch)
    wanted.backward()
    wanted_gradients = gradients(model)
    loss = our_loss(model, batch, kind=kind, chunk_tokens=7)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    assert_close(gradients(model), wanted_gradients)


@pytest.mark.parametrize("kind", ["fused", "chunked", "full"])
def test_equals_the_models_own_logits_with_adapters(tiny, kind):
    model = attach_adapters(tiny.build("llama", tie_word_embeddings=True), rank=4, alpha=8, seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # zero at first, which would hide the adapters
            torch.nn.init.normal_(parameter, std=0.1)
    batch = tiny.pad(tiny.sequences(9, 17, 5))
    wanted = reference_loss(model, batch)
    wanted.backward()
    wanted_gradients = gradients(model)
    told = TokenLoss(model, kind=kind)
    assert told.kind == kind and told.reason == ""
    loss = our_loss(model, batch, kind=kind, chunk_tokens=7)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    assert_close(gradients(model), wanted_gradients)


@pytest.mark.parametrize("adapters", [False, True])
@pytest.mark.parametrize("kind", ["fused", "chunked", "full"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_weights_multiply_each_tokens_loss(tiny, family, kind, adapters):
    model, batch = tiny.build(family), tiny.pad(tiny.sequences(9, 17, 5, weights=WEIGHTS))
    if adapters:
        model = attach_adapters(model, rank=4, alpha=8, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    wanted = weighted_reference(model, batch)
    wanted.backward()
    wanted_gradients = gradients(model)
    loss = our_loss(model, batch, kind=kind, chunk_tokens=7)
    loss.backward()
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)
    assert_close(gradients(model), wanted_gradients)


def test_targets_weigh_what_their_tokens_weigh(tiny):
    batch = tiny.pad(tiny.sequences(9, 17, 5, weights=WEIGHTS))
    targets = targets_of(batch)
    weighed = (batch.labels[:, 1:] != IGNORED) * batch.weights[:, 1:]
    assert targets.weight == float(weighed.double().sum()) and targets.count == int((weighed > 0).sum())
    plain = targets_of(tiny.pad(tiny.sequences(9, 17, 5)))
    assert plain.weights is None and plain.weight == plain.count


def test_a_weight_of_zero_is_a_mask_and_weights_of_one_are_none(tiny):
    sequences = tiny.sequences(9, 17, 5, weights=(0.0, 1.0))
    masked = [(ids, labels.masked_fill(weights == 0, IGNORED)) for ids, labels, weights in sequences]
    found, wanted = targets_of(tiny.pad(sequences)), targets_of(tiny.pad(masked))
    assert found.weights is None
    assert torch.equal(found.positions, wanted.positions) and torch.equal(found.tokens, wanted.tokens)


@pytest.mark.parametrize("family", CHANGED)
def test_models_that_change_their_logits_use_their_own_forward_and_say_why(tiny, family):
    changes = {"cohere": {"logit_scale": 0.1}, "granite": {"logits_scaling": 4.0}}.get(family, {})
    model, batch = tiny.build(family, **changes), tiny.pad(tiny.sequences(9, 17, 5))
    loss = TokenLoss(model, kind="chunked")
    assert loss.kind == "full" and "changes its logits" in loss.reason
    found = loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    torch.testing.assert_close(found, reference_loss(model, batch), rtol=1e-6, atol=0)


def test_a_head_with_an_adapter_projects_whole_logits_of_trained_positions_only(tiny):
    model = attach_adapters(tiny.build("llama"), rank=4, alpha=8, targets=["lm_head"], seed=0)
    loss = TokenLoss(model, kind="chunked")
    assert loss.kind == "full" and "head" in loss.reason
    batch = tiny.pad(tiny.sequences(9, 17, 5))
    found = loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    torch.testing.assert_close(found, reference_loss(model, batch), rtol=1e-6, atol=0)


def test_an_unknown_change_of_logits_is_found_by_trying(tiny):
    model = tiny.build("llama")
    own_forward = model.forward

    def doubled(*args, **kwargs):
        output = own_forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output

    model.forward = doubled
    loss = TokenLoss(model, kind="chunked")
    assert loss.kind == "full" and "more to its logits" in loss.reason


def test_packed_rows_train_what_padded_rows_train(tiny):
    model, sequences = tiny.build("llama"), tiny.sequences(9, 17, 5)
    padded = our_loss(model, tiny.pad(sequences), kind="chunked")
    packed = our_loss(model, tiny.pack(sequences), kind="chunked")
    torch.testing.assert_close(packed, padded, rtol=1e-5, atol=0)


def test_only_trained_positions_are_projected(tiny):
    """The head sees as many rows as there are labels, not as there are tokens."""
    model, batch = tiny.build("llama"), tiny.pad(tiny.sequences(9, 17, 5))
    seen = []
    model.lm_head.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    loss = TokenLoss(model, kind="full")
    seen.clear()
    loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    trained = int((batch.labels[:, 1:] != IGNORED).sum())
    assert seen == [torch.Size([trained, 128])] and trained < batch.input_ids.numel()


def test_the_mask_is_left_out_only_when_it_hides_nothing_but_row_ends(tiny):
    batch = tiny.pad(tiny.sequences(4, 6))
    assert "attention_mask" not in model_inputs(batch, torch.device("cpu"))
    left_padded = type(batch)(batch.input_ids, batch.labels, batch.attention_mask.flip(1))
    assert "attention_mask" in model_inputs(left_padded, torch.device("cpu"))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
@pytest.mark.parametrize("way", [chunked_sum, fused_sum])
def test_chunks_give_what_whole_logits_give(way, chunk, bias):
    if way is fused_sum and not has_fused():
        pytest.skip("this torch has no F.linear_cross_entropy")
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    offset = torch.randn(300, requires_grad=True) if bias else None
    leaves = [hidden, weight] + ([offset] if bias else [])
    targets = torch.randint(300, (50,))
    wanted = F.cross_entropy(F.linear(hidden, weight, offset), targets, reduction="sum")
    found = way(hidden, weight, offset, targets, chunk_tokens=chunk)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    for mine, theirs in zip(
        torch.autograd.grad(found / 50, leaves), torch.autograd.grad(wanted / 50, leaves), strict=True
    ):
        assert (mine - theirs).norm() <= 2e-6 * theirs.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_of_one_change_no_bit_of_a_chunk(dtype):
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16, requires_grad=True), torch.randn(300, 16, requires_grad=True)
    targets = torch.randint(300, (50,))
    with_ones, without = (
        chunked_sum(hidden, weight, None, targets, weights=weights, chunk_tokens=7, dtype=dtype)
        for weights in (torch.ones(50), None)
    )
    assert torch.equal(with_ones, without)
    found, wanted = (torch.autograd.grad(loss, [hidden, weight]) for loss in (with_ones, without))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_chunked_logits_never_exist_whole():
    """No allocation inside forward and backward is as large as the logits."""
    hidden, weight = torch.randn(512, 32, requires_grad=True), torch.randn(4096, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        chunked_sum(hidden, weight, None, torch.zeros(512, dtype=torch.long), chunk_tokens=16).backward()
    largest = max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    assert largest <= 16 * 4096 * 4 * 2 < 512 * 4096 * 4


def test_fp16_logit_gradients_survive_with_the_scale_known_in_forward():
    """With 4,096 words most probabilities are below what fp16 can hold once divided by the tokens of a step."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(4096, 16) * 0.1
    targets = torch.randint(4096, (8,))
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum"), hidden)[0]

    def relative_error(scale: float) -> float:
        loss = chunked_sum(hidden, weight, None, targets, dtype=torch.float16, gradient_scale=scale)
        found = torch.autograd.grad(loss * 1024.0, hidden)[0] / 1024.0
        return float((found - exact).norm() / exact.norm())

    assert relative_error(1024.0) < 2e-3


def test_a_chunked_loss_is_differentiated_once():
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = chunked_sum(hidden, torch.randn(16, 8), None, torch.zeros(4, dtype=torch.long))
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize("vocab_size", [1, 100, 32_000, 128_256, 2**24, 2**25])
def test_automatic_chunks_are_powers_of_two_and_bounded(vocab_size):
    rows = chunk_rows(vocab_size)
    assert rows >= 16 and rows & (rows - 1) == 0
    assert rows == 16 or rows * vocab_size <= 2**24


@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_sixteen_bit_losses_are_chunked_and_say_why(tiny, compute):
    loss = TokenLoss(tiny.build("llama"), kind="fused", compute=compute)
    assert loss.kind == "chunked" and loss.reason


def test_without_the_fused_kernel_the_loss_is_chunked(tiny, monkeypatch):
    monkeypatch.delattr(F, "linear_cross_entropy", raising=False)
    loss = TokenLoss(tiny.build("llama"), kind="fused")
    assert loss.kind == "chunked" and "2.13" in loss.reason
