from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

from vramfit.engine.head import ShardedHead
from vramfit.engine.loss import IGNORED, TokenLoss, model_inputs, targets_of
from vramfit.engine.objective import PLAIN, Objective
from vramfit.models.adapters import attach_adapters

CPU = torch.device("cpu")

WEIGHTS = (0.5, 1.0, 2.0, 0.0)
FAMILIES = ["llama", "mistral", "qwen2", "qwen3", "gpt2", "phi"]
CHANGED = {
    "gemma2": {"final_logit_softcapping": 3.0},
    "cohere": {"logit_scale": 0.3},
    "granite": {"logits_scaling": 3.0},
}
OBJECTIVES = [Objective(z_loss=1e-2), Objective(label_smoothing=0.1), Objective(z_loss=1e-2, label_smoothing=0.3)]


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


def reference_objective(model, batch, objective) -> tuple[torch.Tensor, torch.Tensor]:
    """(what is minimised, cross-entropy) by torch's cross_entropy and an explicit z-loss."""
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask, use_cache=False).logits
    logits, labels = logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten()
    shares = (labels != IGNORED).float()
    if batch.weights is not None:
        shares = shares * batch.weights[:, 1:].flatten()
    smoothed, plain = (
        F.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORED, label_smoothing=share)
        for share in (objective.label_smoothing, 0.0)
    )
    z_loss = objective.z_loss * logits.logsumexp(dim=1) ** 2
    return ((smoothed + z_loss) * shares).sum(), (plain.detach() * shares).sum()


def attach_saved_head(model):
    import peft

    options = peft.LoraConfig(r=4, target_modules=["q_proj"], modules_to_save=["lm_head"], task_type="CAUSAL_LM")
    return peft.get_peft_model(model, options)


class ProjectedRows(TorchDispatchMode):
    """Rows that were multiplied with a matrix of `shape` forward: products whose result is as wide as it is long."""

    def __init__(self, shape):
        super().__init__()
        self.shape, self.rows = shape, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default and args[1].shape == (self.shape[1], self.shape[0]):
            self.rows += args[0].shape[0]
        return made


def our_loss(model, batch, **options) -> torch.Tensor:
    return TokenLoss(model, device=CPU, **options)(model_inputs(batch, torch.device("cpu")), targets_of(batch))


def gradients(model) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


def assert_close(found, wanted, *, relative=1e-5) -> None:
    assert found.keys() == wanted.keys() and wanted
    for name, value in wanted.items():
        assert (found[name] - value).norm() <= relative * value.norm() + 1e-9, name


@pytest.mark.parametrize("kind", ["fused", "chunked", "full"])
@pytest.mark.parametrize("family", [*FAMILIES, *CHANGED])
def test_equals_the_models_own_logits(tiny, family, kind):
    model, batch = tiny.build(family, **CHANGED.get(family, {})), tiny.pad(tiny.sequences(9, 17, 5))
    wanted = reference_loss(model, batch)
    wanted.backward()
    wanted_gradients = gradients(model)
    told = TokenLoss(model, device=CPU, kind=kind, chunk_tokens=7)
    assert told.kind == ("chunked" if kind == "fused" and family in CHANGED else kind)
    loss = told(model_inputs(batch, torch.device("cpu")), targets_of(batch))
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
    told = TokenLoss(model, device=CPU, kind=kind)
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


@pytest.mark.parametrize("kind", ["fused", "chunked", "full"])
@pytest.mark.parametrize("weights", [(), WEIGHTS])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_a_z_loss_and_smoothing_are_what_plain_torch_adds(tiny, kind, weights, objective):
    model, batch = tiny.build("llama"), tiny.pad(tiny.sequences(9, 17, 5, weights=weights))
    wanted, entropy = reference_objective(model, batch, objective)
    wanted.backward()
    wanted_gradients = gradients(model)
    loss = TokenLoss(model, device=CPU, kind=kind, chunk_tokens=7, objective=objective)
    assert loss.kind == ("chunked" if kind == "fused" else kind)
    assert ("plain cross-entropy alone" in loss.reason) == (kind == "fused")
    found = loss.sums(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    found.objective.backward()
    torch.testing.assert_close(found.objective, wanted, rtol=2e-6, atol=0)
    torch.testing.assert_close(found.cross_entropy, entropy, rtol=2e-6, atol=0)
    assert not found.cross_entropy.requires_grad
    assert_close(gradients(model), wanted_gradients)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
def test_a_head_trained_whole_beside_adapters_is_projected_in_chunks(tiny):
    model = attach_saved_head(tiny.build("llama"))
    batch = tiny.pad(tiny.sequences(9, 17, 5))
    wanted = reference_loss(model, batch)
    wanted.backward()
    wanted_gradients = gradients(model)
    assert any("lm_head" in name for name in wanted_gradients)
    loss = TokenLoss(model, device=CPU, kind="chunked", chunk_tokens=7)
    assert loss.kind == "chunked" and loss.reason == ""
    found = loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert_close(gradients(model), wanted_gradients)


@pytest.mark.parametrize("objective", [PLAIN, Objective(z_loss=1e-2, label_smoothing=0.1)])
@pytest.mark.parametrize("kind", ["chunked", "full"])
def test_a_head_with_adapters_goes_in_chunks_through_its_module(tiny, kind, objective):
    model = attach_adapters(tiny.build("llama"), rank=4, alpha=8, targets=["lm_head", "q_proj"], seed=0)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    batch = tiny.pad(tiny.sequences(9, 17, 5, weights=WEIGHTS))
    wanted, _ = reference_objective(model, batch, objective)
    wanted.backward()
    wanted_gradients = gradients(model)
    assert any("lm_head" in name for name in wanted_gradients)
    loss = TokenLoss(model, device=CPU, kind=kind, chunk_tokens=7, objective=objective)
    assert loss.kind == kind and loss.reason == ""
    found = loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    assert_close(gradients(model), wanted_gradients)


def test_a_head_in_parts_gives_the_loss_of_a_whole_one(tiny):
    model, batch = tiny.build("llama"), tiny.pad(tiny.sequences(9, 17, 5))
    wanted = our_loss(model, batch, kind="chunked", chunk_tokens=7)
    wanted.backward()
    whole = gradients(model)
    parts = []
    for rows in (slice(0, 50), slice(50, 128)):
        part = torch.nn.Linear(32, rows.stop - rows.start, bias=False)
        part.weight.data.copy_(model.lm_head.weight[rows])
        parts.append(part)
    model.lm_head = ShardedHead(parts)
    loss = TokenLoss(model, device=CPU, kind="fused", chunk_tokens=7)
    assert loss.kind == "chunked" and "one matrix" in loss.reason
    found = loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    found.backward()
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=0)
    parted = gradients(model)
    head = torch.cat([parted.pop(f"lm_head.shards.{index}.weight") for index in range(2)])
    assert_close({**parted, "lm_head.weight": head}, whole)


def test_a_chat_with_three_tenths_trained_projects_three_tenths(tiny):
    """What the head's products see is rows of trained tokens, in training and in evaluation."""
    model = tiny.build("llama")
    ids = torch.randint(3, 128, (4, 101))
    labels = ids.clone()
    labels[:, :71] = IGNORED  # the question; of 100 predicted tokens 30 are answer
    batch = type(tiny.pad(tiny.sequences(2)))(ids, labels)
    loss = TokenLoss(model, device=CPU, kind="chunked", chunk_tokens=50)
    with ProjectedRows(model.lm_head.weight.shape) as seen:
        loss(model_inputs(batch, torch.device("cpu")), targets_of(batch)).backward()
    assert seen.rows == 0.3 * 400


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
    loss = TokenLoss(model, device=CPU, kind="full")
    seen.clear()
    loss(model_inputs(batch, torch.device("cpu")), targets_of(batch))
    trained = int((batch.labels[:, 1:] != IGNORED).sum())
    assert seen == [torch.Size([trained, 128])] and trained < batch.input_ids.numel()


def test_the_mask_is_left_out_only_when_it_hides_nothing_but_row_ends(tiny):
    batch = tiny.pad(tiny.sequences(4, 6))
    assert "attention_mask" not in model_inputs(batch, torch.device("cpu"))
    left_padded = type(batch)(batch.input_ids, batch.labels, batch.attention_mask.flip(1))
    assert "attention_mask" in model_inputs(left_padded, torch.device("cpu"))
