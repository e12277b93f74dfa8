"""The three lines on plain PyTorch models of many kinds: each trains as its own loop would, in pieces or not."""

from __future__ import annotations

import copy
import io
import warnings
from collections import UserDict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import vramfit
from tests.vramfit.engine.pseudo_card import PseudoCard
from vramfit.errors import ConfigError, DataError, ModelError, WontFit

ROWS = 6
Loss = Callable[[nn.Module, Any], tuple[Tensor, int]]


class Convolutions(nn.Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4) if norm else nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()
        )
        self.head = nn.Linear(4 * 6 * 6, 3)

    def forward(self, pictures):
        return self.head(self.layers(pictures))


class Recurrent(nn.Module):
    """Its forward gives (outputs, state): a tuple without a loss."""

    def __init__(self, *, batch_first: bool = True) -> None:
        super().__init__()
        self.cell = nn.LSTM(4, 8, num_layers=2, dropout=0.3, batch_first=batch_first)
        self.head = nn.Linear(8, 3)

    def forward(self, series):
        outputs, state = self.cell(series)
        return self.head(outputs[:, -1]), state


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.embedding, self.head = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, tokens, padding=None):
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding).mean(dim=1))


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(4, 8), nn.Linear(5, 8), nn.Bilinear(8, 8, 3)

    def forward(self, left, right, scale=1.0):
        return self.head(self.left(left).tanh(), self.right(right).tanh()) * scale


class Autoencoder(nn.Module):
    """Its forward is its loss, a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode = nn.Linear(6, 3, bias=False), nn.Linear(3, 6)

    def forward(self, rows):
        return F.mse_loss(self.decode(self.encode(rows).relu()), rows)


class Tied(nn.Module):
    """Embedding and head are one weight, and half of the model is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.middle = nn.Embedding(20, 8), nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight
        self.middle.requires_grad_(False)

    def forward(self, tokens):
        return self.head(self.middle(self.embedding(tokens)).tanh())


class Residual(nn.Module):
    """Blocks in a ModuleList: what can be recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 8))
            for _ in range(4)
        )
        self.head = nn.Linear(8, 3)

    def forward(self, rows):
        for block in self.blocks:
            rows = rows + block(rows)
        return self.head(rows)


class Experts(nn.Module):
    """Only some parameters get a gradient in a step, and it counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 3), nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.unused = nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, rows):
        self.calls += 1
        weights = self.gate(rows).softmax(dim=1)
        return sum(weights[:, index, None] * expert(rows) for index, expert in enumerate(self.experts))


def classes(rows: int = ROWS) -> Tensor:
    return torch.randint(3, (rows,))


def classify(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    *inputs, wanted = batch.values() if isinstance(batch, dict) else batch
    output = model(*inputs)
    logits = output[0] if isinstance(output, tuple) else output
    return F.cross_entropy(logits, wanted, reduction="sum"), len(wanted)


def nested(model: nn.Module, batch: Any) -> tuple[Tensor, int]:
    wanted = batch["wanted"]["classes"]
    return F.cross_entropy(model(batch["inputs"]["left"], batch["inputs"]["right"]), wanted, reduction="sum"), len(
        wanted
    )


def next_tokens(model: nn.Module, tokens: Tensor) -> tuple[Tensor, int]:
    logits = model(tokens[:, :-1]).flatten(0, 1)
    return F.cross_entropy(logits, tokens[:, 1:].flatten(), reduction="sum"), logits.shape[0]


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Loss | None = classify
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "convolutions": Case(Convolutions, lambda: (torch.randn(ROWS, 1, 8, 8), classes())),
    "recurrent": Case(Recurrent, lambda: (torch.randn(ROWS, 7, 4), classes())),
    "encoder": Case(Encoder, lambda: {"tokens": torch.randint(20, (ROWS, 5)), "padding": None, "wanted": classes()}),
    "two inputs": Case(TwoInputs, lambda: [torch.randn(ROWS, 4), torch.randn(ROWS, 5), classes()]),
    "a number beside rows": Case(TwoInputs, lambda: (torch.randn(ROWS, 4), torch.randn(ROWS, 5), 0.5, classes())),
    "nested": Case(
        TwoInputs,
        lambda: {
            "inputs": {"left": torch.randn(ROWS, 4), "right": torch.randn(ROWS, 5)},
            "wanted": {"classes": classes()},
        },
        nested,
    ),
    "own loss": Case(Autoencoder, lambda: torch.randn(ROWS, 6), None),
    "tied and frozen": Case(Tied, lambda: torch.randint(20, (ROWS, 5)), next_tokens),
    "recomputed": Case(Residual, lambda: (torch.randn(ROWS, 8), classes()), classify, {"recompute": "all"}),
    "experts": Case(Experts, lambda: (torch.randn(ROWS, 8), classes())),
}


def made(case: Case) -> tuple[nn.Module, torch.optim.Optimizer, list[Any]]:
    torch.manual_seed(0)
    model = case.build()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return model, torch.optim.AdamW(trained, lr=1e-2, fused=True), [case.batch() for _ in range(3)]


def plain(case: Case) -> tuple[list[float], nn.Module]:
    """The loop a person would write."""
    model, optimizer, batches = made(case)
    losses = []
    torch.manual_seed(1)
    for batch in batches:
        optimizer.zero_grad()
        if case.loss is None:
            loss = model(batch)
        else:
            total, count = case.loss(model, batch)
            loss = total / count
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, model


def wrapped(case: Case, *, cards: tuple[PseudoCard, ...] = (), **options: Any) -> tuple[list[float], nn.Module, Any]:
    model, optimizer, batches = made(case)
    step = vramfit.wrap(model, optimizer, loss=case.loss, max_grad_norm=1.0, **{**case.options, **options})
    torch.manual_seed(1)
    losses = []
    for number, batch in enumerate(batches):
        with cards[number] if number < len(cards) else warnings.catch_warnings():
            losses.append(step(batch).loss)
    return losses, model, step


def assert_same_weights(model: nn.Module, wanted: nn.Module, *, exactly: bool) -> None:
    found, other = model.state_dict(), wanted.state_dict()
    assert list(found) == list(other)
    for name in found:
        torch.testing.assert_close(found[name], other[name], rtol=0 if exactly else 1e-4, atol=0 if exactly else 1e-5)


def has_dropout(model: nn.Module) -> bool:
    return any(getattr(part, "p", 0) or getattr(part, "dropout", 0) for part in model.modules())


@pytest.mark.parametrize("name", CASES)
def test_a_plain_model_trains_as_in_its_own_loop_and_stays_what_it_is(name):
    case = CASES[name]
    wanted, model_before = plain(case)
    losses, model, _ = wrapped(case)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same_weights(model, model_before, exactly=False)
    assert type(model) is type(model_before) and model.training


@pytest.mark.parametrize("name", CASES)
def test_in_pieces_the_gradient_is_that_of_the_whole_batch(name):
    case = CASES[name]
    if has_dropout(case.build()):
        pytest.skip("pieces meet other random numbers than the whole")
    wanted, model_before = plain(case)
    losses, model, step = wrapped(case, micro_batch=4)
    assert losses == pytest.approx(wanted, rel=1e-5) and step.micro_batch == 4
    for found, value in zip(model.parameters(), model_before.parameters(), strict=True):
        torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_wherever_memory_runs_out_the_loop_goes_on_as_if_it_had_not(name):
    """The second step runs out once in forward, backward or the optimizer. Dropout draws the same numbers again."""
    case = CASES[name]
    counted = (PseudoCard(), PseudoCard())
    undisturbed = {0: wrapped(case, cards=counted)}
    for point in range(1, counted[1].allocations, max(1, counted[1].allocations // 5)):
        cards = (PseudoCard(), PseudoCard(failing=(point,)))
        losses, model, step = wrapped(case, cards=cards)
        assert cards[1].raised == 1
        if step.micro_batch not in undisturbed:
            undisturbed[step.micro_batch] = limited(case, step.micro_batch)
        wanted, other, _ = undisturbed[step.micro_batch]
        assert losses == wanted
        assert_same_weights(model, other, exactly=True)


def limited(case: Case, rows: int) -> tuple[list[float], nn.Module, Any]:
    """From the second step on in pieces."""
    model, optimizer, batches = made(case)
    step = vramfit.wrap(model, optimizer, loss=case.loss, max_grad_norm=1.0, **case.options)
    torch.manual_seed(1)
    losses = []
    for number, batch in enumerate(batches):
        step.micro_batch = rows if number else 0
        losses.append(step(batch).loss)
    return losses, model, step


def test_a_budget_makes_blocks_recompute_and_says_so():
    case = CASES["recomputed"]
    model, optimizer, _ = made(case)
    batch = (torch.randn(64, 8), classes(64))
    free = vramfit.wrap(model, optimizer, loss=classify, budget_gib=100.0)
    torch.manual_seed(2)
    wanted = [free(batch) for _ in range(6)]
    assert all(result.adapted == () for result in wanted)
    peak = free._care._peak.read()[0]
    model, optimizer, _ = made(case)
    step = vramfit.wrap(model, optimizer, loss=classify, budget_gib=peak / 0.9 / 2**30)
    torch.manual_seed(2)
    found = [step(batch) for _ in range(6)]
    told = [message for result in found for message in result.adapted]
    assert told and "now recomputes its activations" in told[0]
    assert [result.loss for result in found] == [result.loss for result in wanted]
    other = vramfit.wrap(*made(case)[:2], loss=classify, budget_gib=peak / 0.9 / 2**30)
    other.load_state_dict(step.state_dict())
    assert other.state_dict() == step.state_dict()
    with pytest.raises(ConfigError, match=r"budget_gib is -1, .* more than 0"):
        vramfit.wrap(model, optimizer, budget_gib=-1)


def test_one_row_that_does_not_fit_is_recomputed_before_the_loop_ends():
    case = CASES["recomputed"]
    model, optimizer, _ = made(case)
    step = vramfit.wrap(model, optimizer, loss=classify, budget_gib=100.0)
    batch = (torch.randn(1, 300, 8), torch.randint(3, (1, 3)))

    def loss(model, piece):
        return F.cross_entropy(model(piece[0]).mean(dim=1), piece[1][:, 0], reduction="sum"), len(piece[0])

    step._loss = loss
    step(batch)
    with PseudoCard(model) as free:
        step(batch)
    with PseudoCard(model, budget_bytes=int(free.peak_bytes * 0.7)):
        result = step(batch)
    assert "4 blocks went on to another way" in result.recovered


# ---- what is refused, and what is only warned of ----


def test_batch_normalisation_is_exact_on_the_whole_and_warned_of_in_pieces():
    case = Case(lambda: Convolutions(norm=True), CASES["convolutions"].batch)
    wanted, model_before = plain(case)
    losses, model, _ = wrapped(case)
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert_same_weights(model, model_before, exactly=False)
    with pytest.warns(UserWarning, match="1 layers of batch normalisation"):
        wrapped_once(case, micro_batch=4)


def wrapped_once(case: Case, **options: Any) -> Any:
    model, optimizer, batches = made(case)
    return vramfit.wrap(model, optimizer, loss=case.loss, **options)(batches[0])


def test_time_before_rows_is_warned_of():
    case = Case(lambda: Recurrent(batch_first=False), CASES["recurrent"].batch)
    wrapped_once(case)
    with pytest.warns(UserWarning, match="LSTM with batch_first=False"):
        wrapped_once(case, micro_batch=2)


def test_what_a_step_would_do_wrongly_is_refused_when_wrapped():
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ModelError, match=r"DataParallel.*model\.module"):
        vramfit.wrap(nn.DataParallel(model), optimizer)
    with pytest.raises(ConfigError, match=r"a list, .*Call wrap once for each"):
        vramfit.wrap(model, [optimizer, optimizer])
    with pytest.raises(ConfigError, match="LBFGS"):
        vramfit.wrap(model, torch.optim.LBFGS(model.parameters()))
    words = nn.EmbeddingBag(5, 2, sparse=True)
    with pytest.raises(ModelError, match="EmbeddingBag with sparse gradients"):
        vramfit.wrap(words, torch.optim.SGD(words.parameters(), lr=0.1))
    for options in ({"recompute": "all"}, {"recompute": 2}, {"budget_gib": 1.0}):
        with pytest.raises(ModelError, match=r"Linear has no list of blocks \(torch.nn.ModuleList\)"):
            vramfit.wrap(model, optimizer, **options)


def test_a_gan_is_two_loops():
    """Each has its own optimizer; what one leaves in the other's gradients, the other clears."""

    def run(pieces: Any) -> tuple[dict[str, Tensor], list[float]]:
        torch.manual_seed(0)
        generator, critic = nn.Linear(4, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        ours = torch.optim.SGD(generator.parameters(), lr=0.1)
        theirs = torch.optim.SGD(critic.parameters(), lr=0.1)

        def fools(model, noise):
            return F.softplus(-critic(model(noise))).sum(), len(noise)

        def tells_apart(model, batch):
            real, noise = batch
            with torch.no_grad():
                fake = generator(noise)
            return (F.softplus(-model(real)) + F.softplus(model(fake))).sum(), len(real)

        one = vramfit.wrap(generator, ours, loss=fools, micro_batch=pieces)
        other = vramfit.wrap(critic, theirs, loss=tells_apart, micro_batch=pieces)
        losses = []
        for _ in range(4):
            noise, real = torch.randn(8, 4), torch.randn(8, 6)
            losses += [other((real, noise)).loss, one(noise).loss]
        return {**generator.state_dict(), **critic.state_dict()}, losses

    whole, cut = run("auto"), run(3)
    assert cut[1] == pytest.approx(whole[1], rel=1e-5)
    for name in whole[0]:
        torch.testing.assert_close(cut[0][name], whole[0][name], rtol=1e-4, atol=1e-6)


def test_a_scheduler_of_the_loops_own_goes_on_working():
    model, optimizer, batches = made(CASES["two inputs"])
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=6)
    step = vramfit.wrap(model, optimizer, loss=classify)
    rates = []
    for batch in batches * 2:
        step(batch)
        rates.append(optimizer.param_groups[0]["lr"])
        if len(rates) < 6:
            scheduler.step()
    assert max(rates) == pytest.approx(0.1, rel=0.2) and rates[0] < rates[1]


def test_the_model_can_still_be_copied_and_saved():
    model, optimizer, batches = made(CASES["recomputed"])
    names = list(model.state_dict())
    step = vramfit.wrap(model, optimizer, loss=classify, recompute="all")
    step(batches[0])
    assert list(model.state_dict()) == names and type(model) is Residual
    average = copy.deepcopy(model)
    rows = torch.randn(2, 8)
    model.eval(), average.eval()
    assert torch.equal(average(rows), model(rows))
    torch.save(model.state_dict(), io.BytesIO())
    other = Residual()
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(rows), model(rows))


# ---- batches ----


class Rows(NamedTuple):
    features: Tensor
    wanted: Tensor


@dataclass
class Record:
    features: Tensor
    wanted: Tensor
    name: str = "a batch"


class Encoding(UserDict):
    """As a tokenizer's: a mapping whose entries are attributes too."""

    def __getattr__(self, name):
        if name in ("data", "__setstate__"):
            raise AttributeError(name)
        return self.data[name]


@pytest.mark.parametrize(
    "build",
    [
        Rows,
        Record,
        lambda features, wanted: Encoding(features=features, wanted=wanted),
        lambda features, wanted: Rows(features=features, wanted=wanted),
    ],
)
def test_a_batch_keeps_its_kind(build):
    seen = []

    def loss(model, batch):
        seen.append((type(batch), len(batch.wanted)))
        return F.cross_entropy(model(batch.features), batch.wanted, reduction="sum"), len(batch.wanted)

    model = nn.Linear(4, 3)
    batch = build(torch.randn(5, 4), classes(5))
    step = vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), loss=loss, micro_batch=3)
    assert step(batch).tokens == 5
    assert seen == [(type(batch), 3), (type(batch), 2)]
    assert len(batch.wanted) == 5  # the caller's own is left alone


def test_pictures_of_different_sizes_are_rows_of_a_list():
    """As detection models take them: one tensor and one dict a row."""
    seen = []

    def loss(model, batch):
        pictures, targets = batch
        seen.append((len(pictures), len(targets)))
        sums = [
            (model(picture.mean(dim=(1, 2))) - target["box"]).square().sum()
            for picture, target in zip(*batch, strict=True)
        ]
        return torch.stack(sums).sum(), len(pictures)

    model = nn.Linear(3, 4)
    pictures = [torch.randn(3, 8 + size, 9) for size in range(5)]
    targets = [{"box": torch.randn(4)} for _ in pictures]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = vramfit.wrap(model, optimizer, loss=loss)
    assert whole((pictures, targets)).tokens == 5
    vramfit.wrap(model, optimizer, loss=loss, micro_batch=2)((pictures, targets))
    assert seen == [(5, 5), (2, 2), (2, 2), (1, 1)]
    with pytest.raises(DataError, match="list of 3 tensors with 3 rows each"):  # three pictures of three colours
        vramfit.wrap(model, optimizer, loss=loss, micro_batch=2)((pictures[:3], targets[:3]))


def test_a_batch_whose_rows_nobody_can_tell_is_refused_only_where_it_has_to_be_cut():
    def loss(model, batch):
        return F.cross_entropy(model(batch["x"]), batch["y"].expand(32), reduction="sum"), 32

    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = {"y": torch.zeros(1, dtype=torch.long), "x": torch.randn(32, 4)}
    assert vramfit.wrap(model, optimizer, loss=loss)(batch).tokens == 32
    with pytest.raises(DataError, match="cannot be cut"):
        vramfit.wrap(model, optimizer, loss=loss, micro_batch=8)({"shares": torch.ones(9), "x": torch.randn(32, 4)})


def test_a_packed_sequence_is_taken_whole_and_not_cut():
    cell, head = nn.LSTM(4, 8, batch_first=True), nn.Linear(8, 3)
    model = nn.ModuleDict({"cell": cell, "head": head})

    def loss(model, batch):
        _, (state, _) = model["cell"](batch[0])
        return F.cross_entropy(model["head"](state[-1]), batch[1], reduction="sum"), len(batch[1])

    packed = nn.utils.rnn.pack_sequence([torch.randn(length, 4) for length in (5, 3, 2)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert vramfit.wrap(model, optimizer, loss=loss)((packed, classes(3))).tokens == 3
    with pytest.raises(DataError, match="PackedSequence"):
        vramfit.wrap(model, optimizer, loss=loss, micro_batch=2)((packed, classes(3)))


def test_labels_that_carry_no_loss_do_not_count():
    """The model's mean is over the others."""

    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, features, labels):
            return {"loss": F.cross_entropy(self.layer(features), labels)}

    torch.manual_seed(0)
    features, labels = torch.randn(6, 4), torch.tensor([0, -100, 1, 2, -100, -100])
    model = Own()
    wanted = model(features, labels)["loss"].item()
    step = vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=2)
    result = step({"features": features, "labels": labels})
    assert result.loss == pytest.approx(wanted, rel=1e-6) and result.tokens == 3


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_that_fails_in_the_middle_ends_the_loop_with_a_sentence(monkeypatch, fused):
    """One kernel after another: weights have decayed when there is no room for a temporary. Or after the fused one."""
    model, _, batches = made(CASES["two inputs"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=not fused, fused=fused)
    step = vramfit.wrap(model, optimizer, loss=classify)
    step(batches[0])

    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("Tried to allocate 2.00 GiB")

    if fused:
        optimizer.register_step_post_hook(no_room)
    else:
        monkeypatch.setattr(torch, "_foreach_sqrt", no_room)
    with pytest.raises(WontFit, match="had already changed, so the step cannot be repeated"):
        step(batches[1])


def test_what_never_fits_ends_with_the_numbers():
    model, optimizer, batches = made(CASES["convolutions"])
    step = vramfit.wrap(model, optimizer, loss=classify)
    card = PseudoCard(model)
    card.budget_bytes = card.allocated + 10
    with card, pytest.raises(WontFit, match=r"single row.*bytes.*may use .*GiB") as caught:
        step(batches[0])
    assert caught.value.needed_bytes > caught.value.available_bytes > 0
    assert all(parameter.grad is None for parameter in model.parameters())
