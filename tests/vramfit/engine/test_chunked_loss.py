from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from vramfit.engine.chunked_loss import chunk_rows, chunked_sum
from vramfit.engine.head import LogitChange
from vramfit.engine.objective import PLAIN, Objective

UNCHANGED = LogitChange()
ALL_TERMS = Objective(z_loss=0.01, label_smoothing=0.2)
CHANGES = [LogitChange(), LogitChange(times=0.3), LogitChange(over=3.0), LogitChange(times=0.5, cap=2.0)]


def leaves_of(bias: bool, *, rows=50, words=300, width=16):
    torch.manual_seed(0)
    hidden, weight = torch.randn(rows, width, requires_grad=True), torch.randn(words, width, requires_grad=True)
    offset = torch.randn(words, requires_grad=True) if bias else None
    return hidden, weight, offset, torch.randint(words, (rows,))


def reference(hidden, weight, offset, targets, objective=PLAIN, change=UNCHANGED, shares=1.0):
    """Whole logits, torch's cross-entropy, autograd through all of it."""
    logits = change.applied(F.linear(hidden, weight, offset))
    each = F.cross_entropy(logits, targets, reduction="none", label_smoothing=objective.label_smoothing)
    return ((each + objective.z_loss * logits.logsumexp(1).square()) * shares).sum()


def assert_same_gradients(found, wanted, leaves, relative=3e-6):
    leaves = [leaf for leaf in leaves if leaf is not None]
    for mine, theirs in zip(
        torch.autograd.grad(found / 50, leaves), torch.autograd.grad(wanted / 50, leaves), strict=True
    ):
        assert (mine - theirs).norm() <= relative * theirs.norm()


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("objective", [PLAIN, Objective(z_loss=0.01), Objective(label_smoothing=0.2), ALL_TERMS])
@pytest.mark.parametrize(("rows", "words"), [(1, 0), (7, 0), (64, 0), (7, 64), (64, 299), (50, 1)])
def test_pieces_give_what_whole_logits_give(rows, words, objective, change):
    hidden, weight, offset, targets = leaves_of(bias=True)
    shares = torch.rand(50) + 0.5
    wanted = reference(hidden, weight, offset, targets, objective, change, shares)
    options = {"weights": shares, "chunk_tokens": rows, "chunk_words": words, "objective": objective, "change": change}
    found = chunked_sum(hidden, weight, offset, targets, **options)
    torch.testing.assert_close(found.objective, wanted, rtol=1e-6, atol=0)
    plain = reference(hidden, weight, offset, targets, PLAIN, change, shares)
    torch.testing.assert_close(found.cross_entropy, plain.detach(), rtol=1e-6, atol=0)
    assert_same_gradients(found.objective, wanted, (hidden, weight, offset), relative=1e-5 if words == 1 else 3e-6)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_without_weights_and_terms_it_is_cross_entropy(chunk, bias):
    hidden, weight, offset, targets = leaves_of(bias)
    wanted = F.cross_entropy(F.linear(hidden, weight, offset), targets, reduction="sum")
    found = chunked_sum(hidden, weight, offset, targets, chunk_tokens=chunk).objective
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert_same_gradients(found, wanted, (hidden, weight, offset))


@pytest.mark.parametrize("words", [0, 40])
@pytest.mark.parametrize("bias", [False, True])
def test_a_head_in_several_matrices_is_one_head(bias, words):
    hidden, weight, offset, targets = leaves_of(bias)
    wanted = reference(hidden, weight, offset, targets, ALL_TERMS, CHANGES[3])
    parts = [weight.detach()[cut].clone().requires_grad_() for cut in (slice(0, 100), slice(100, 101), slice(101, 300))]
    offsets = None if offset is None else [part.clone() for part in offset.detach().split([100, 1, 199])]
    options = {"chunk_tokens": 7, "chunk_words": words, "objective": ALL_TERMS, "change": CHANGES[3]}
    found = chunked_sum(hidden, parts, offsets, targets, **options).objective
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    mine = torch.autograd.grad(found, [hidden, *parts])
    theirs = torch.autograd.grad(wanted, [hidden, weight])
    for ours, other in ((mine[0], theirs[0]), (torch.cat(mine[1:]), theirs[1])):
        assert (ours - other).norm() <= 3e-6 * other.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("words", [0, 64])
def test_weights_of_one_change_no_bit_of_a_chunk(dtype, words):
    hidden, weight, _, targets = leaves_of(bias=False)
    with_ones, without = (
        chunked_sum(hidden, weight, None, targets, weights=ones, chunk_tokens=7, chunk_words=words, dtype=dtype)
        for ones in (torch.ones(50), None)
    )
    assert torch.equal(with_ones.objective, without.objective)
    found, wanted = (torch.autograd.grad(loss.objective, [hidden, weight]) for loss in (with_ones, without))
    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


@pytest.mark.parametrize("words", [0, 64])
def test_sixteen_bit_pieces_are_near_and_sum_in_fp32(words):
    hidden, weight, offset, targets = leaves_of(bias=True)
    wanted = reference(hidden, weight, offset, targets, ALL_TERMS, CHANGES[3])
    options = {"chunk_tokens": 7, "chunk_words": words, "objective": ALL_TERMS, "change": CHANGES[3]}
    found = chunked_sum(hidden, weight, offset, targets, dtype=torch.bfloat16, **options).objective
    assert found.dtype == torch.float32 and found.item() == pytest.approx(wanted.item(), rel=5e-3)
    assert_same_gradients(found, wanted, (hidden, weight, offset), relative=3e-2)


def peak_bytes(words: int, **options) -> int:
    """The most that the loss of 512 tokens has alive at once, its result and the hidden state's gradient included; the
    head is frozen."""
    hidden, weight = torch.randn(512, 32, requires_grad=True), torch.randn(words, 32)
    targets = torch.randint(words, (512,))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        chunked_sum(hidden, weight, None, targets, **options).objective.backward()
    changes = sorted(
        (event.start_ns(), event.nbytes())
        for event in profile.profiler.kineto_results.events()
        if event.name() == "[memory]"
    )
    alive = most = 0
    for _, change in changes:
        alive += change
        most = max(most, alive)
    return most


@pytest.mark.parametrize("options", [{"chunk_tokens": 64, "chunk_words": 2048}, {}])
@pytest.mark.parametrize("terms", [{}, {"objective": ALL_TERMS, "change": LogitChange(cap=30.0)}])
def test_memory_does_not_depend_on_the_vocabulary(monkeypatch, options, terms):
    """Neither with planned chunks nor with those it chooses itself, of 2^17 logits here: 8,192 words of 16 tokens, so
    that both of these are cut by words too."""
    monkeypatch.setattr("vramfit.engine.chunked_loss.CHUNK_ENTRIES", 2**17)
    small, large = (peak_bytes(words, **options, **terms) for words in (16_384, 65_536))
    assert large == pytest.approx(small, rel=0.02)
    assert (
        large < 3 * 2**17 * 4 < 512 * 16_384 * 4
    )  # two pieces of logits and little else; never all of the smaller head


def test_chunked_logits_never_exist_whole():
    """No allocation inside forward and backward is as large as the logits."""
    hidden, weight = torch.randn(512, 32, requires_grad=True), torch.randn(4096, 32)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        chunked_sum(hidden, weight, None, torch.zeros(512, dtype=torch.long), chunk_tokens=16).objective.backward()
    largest = max(event.nbytes() for event in profile.profiler.kineto_results.events() if event.name() == "[memory]")
    assert largest <= 16 * 4096 * 4 * 2 < 512 * 4096 * 4


@pytest.mark.parametrize("words", [0, 512])
def test_fp16_logit_gradients_survive_with_the_scale_known_in_forward(words):
    """With 4,096 words most probabilities are below what fp16 can hold once divided by the tokens of a step."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(8, 16, requires_grad=True), torch.randn(4096, 16) * 0.1
    targets = torch.randint(4096, (8,))
    exact = torch.autograd.grad(F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum"), hidden)[0]
    options = {"dtype": torch.float16, "gradient_scale": 1024.0, "chunk_words": words}
    loss = chunked_sum(hidden, weight, None, targets, **options).objective
    found = torch.autograd.grad(loss * 1024.0, hidden)[0] / 1024.0
    assert (found - exact).norm() < 2e-3 * exact.norm()


def test_a_chunked_loss_is_differentiated_once():
    hidden = torch.randn(4, 8, requires_grad=True)
    loss = chunked_sum(hidden, torch.randn(16, 8), None, torch.zeros(4, dtype=torch.long)).objective
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize("vocab_size", [1, 100, 32_000, 128_256, 2**24, 2**25])
def test_automatic_chunks_are_powers_of_two_and_bounded(vocab_size):
    rows = chunk_rows(vocab_size)
    assert rows >= 16 and rows & (rows - 1) == 0
    assert rows == 16 or rows * vocab_size <= 2**24
