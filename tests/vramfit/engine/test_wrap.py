from __future__ import annotations

import io
import re
import subprocess
import sys
from collections import namedtuple
from contextlib import redirect_stdout
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

import vramfit
from vramfit.errors import ConfigError, DataError, ModelError, WontFit

ROOT = Path(__file__).parents[3]


class Classifier(nn.Module):
    """A plain model; returns its mean loss when labels come along."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))
        self.largest_rows = 0

    def forward(self, features, labels=None):
        self.largest_rows = max(self.largest_rows, features.shape[0])
        logits = self.layers(features)
        return logits if labels is None else {"loss": F.cross_entropy(logits, labels), "logits": logits}


def classifier(dropout: float = 0.0):
    torch.manual_seed(0)
    model = Classifier(dropout)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def batches(count=4, rows=7):
    generator = torch.Generator().manual_seed(1)
    return [
        {
            "features": torch.randn(rows, 8, generator=generator),
            "labels": torch.randint(3, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


def summed_loss(model, batch):
    return F.cross_entropy(model(batch["features"]), batch["labels"], reduction="sum"), len(batch["labels"])


def plain_loop(model, optimizer, data, *, limit):
    losses = []
    for batch in data:
        loss = model(**batch)["loss"]
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), limit)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def assert_equal_weights(model, wanted, *, relative=1e-6):
    for found, value in zip(model.parameters(), wanted.parameters(), strict=True):
        assert (found - value).norm() <= relative * value.norm()


@pytest.mark.parametrize("loss", [None, summed_loss])
@pytest.mark.parametrize("micro_batch", ["auto", 1, 3, 100])
def test_the_wrapped_loop_equals_the_plain_loop(loss, micro_batch):
    wanted, plain_optimizer = classifier()
    plain_losses = plain_loop(wanted, plain_optimizer, batches(), limit=0.5)
    model, optimizer = classifier()
    step = vramfit.wrap(model, optimizer, loss=loss, micro_batch=micro_batch, max_grad_norm=0.5)
    losses = [step(batch).loss for batch in batches()]
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_equal_weights(model, wanted, relative=1e-5)
    assert model.largest_rows == (7 if micro_batch == "auto" else min(micro_batch, 7))


@pytest.mark.parametrize("micro_batch", ["auto", 1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_a_causal_model_needs_no_loss_and_weighs_tokens(tiny, family, micro_batch):
    batch = tiny.pad(tiny.sequences(9, 17, 5, 30))
    values = {"input_ids": batch.input_ids, "labels": batch.labels, "attention_mask": batch.attention_mask}
    wanted = tiny.build(family)
    optimizer = torch.optim.SGD(wanted.parameters(), lr=0.1)
    loss = wanted(**values).loss
    loss.backward()
    optimizer.step()
    model = tiny.build(family)
    step = vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batch=micro_batch, recompute="all")
    result = step(values)
    assert result.loss == pytest.approx(loss.item(), rel=1e-6)
    assert result.tokens == int((batch.labels[:, 1:] != -100).sum())
    assert_equal_weights(model, wanted)


def test_tuples_and_bare_tensors_are_batches_too():
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = torch.randn(6, 4), torch.randn(6, 1)
    by_pair = vramfit.wrap(
        model, optimizer, loss=lambda m, pair: (F.mse_loss(m(pair[0]), pair[1], reduction="sum"), 6), micro_batch=6
    )
    assert by_pair((x, y)).tokens == 6
    by_tensor = vramfit.wrap(model, optimizer, loss=lambda m, rows: (m(rows).sum(), rows.shape[0]), micro_batch=4)
    assert by_tensor(x).tokens == 6


def test_out_of_memory_halves_the_micro_batch_and_repeats_the_same_step():
    wanted, plain_optimizer = classifier()
    plain_loop(wanted, plain_optimizer, batches(), limit=0.5)
    model, optimizer = classifier()
    original = model.forward

    def limited(features, labels=None):
        if features.shape[0] > 2:
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return original(features, labels)

    model.forward = limited
    step = vramfit.wrap(model, optimizer, max_grad_norm=0.5)
    results = [step(batch) for batch in batches()]
    assert "repeated with 2" in results[0].recovered and step.micro_batch == 2
    assert not any(result.recovered for result in results[1:])
    assert_equal_weights(model, wanted, relative=1e-5)


def test_a_replay_draws_the_same_random_numbers():
    """Out of memory comes after dropout has been drawn, once; the step must be as if it had not."""
    wanted, wanted_optimizer = classifier(dropout=0.5)
    torch.manual_seed(3)
    vramfit.wrap(wanted, wanted_optimizer, micro_batch=4)(batches()[0])
    model, optimizer = classifier(dropout=0.5)
    original, failures = model.forward, [True]

    def failing_once(features, labels=None):
        output = original(features, labels)
        if failures:
            failures.pop()
            raise torch.OutOfMemoryError("tried to allocate 2 GiB")
        return output

    model.forward = failing_once
    torch.manual_seed(3)
    vramfit.wrap(model, optimizer)(batches()[0])
    assert_equal_weights(model, wanted, relative=0)


def test_out_of_memory_with_one_row_is_one_sentence():
    model, optimizer = classifier()

    def never(features, labels=None):
        raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 10 bytes")

    model.forward = never
    with pytest.raises(WontFit, match="single row"):
        vramfit.wrap(model, optimizer)(batches()[0])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sixteen_bit_precision_trains(precision):
    model, optimizer = classifier()
    step = vramfit.wrap(model, optimizer, precision=precision, micro_batch=3)
    results = [step(batch) for batch in batches() * 10]
    assert results[-1].loss < results[0].loss
    assert (results[-1].loss_scale is not None) == (precision == "fp16")


def test_its_state_is_plain_and_comes_back():
    model, optimizer = classifier()
    step = vramfit.wrap(model, optimizer, precision="fp16", micro_batch=3)
    step(batches()[0])
    state = step.state_dict()
    other = vramfit.wrap(*classifier(), precision="fp16")
    other.load_state_dict(state)
    assert other.state_dict() == state and other.micro_batch == 3


@pytest.mark.parametrize("micro_batch", ["auto", 1, 3])
def test_weights_of_a_causal_batch_are_each_labels_share(tiny, micro_batch):
    batch = tiny.pad(tiny.sequences(9, 17, 5, 8, weights=(0.5, 2.0, 0.0)))
    model = tiny.build("llama")
    logits = model(input_ids=batch.input_ids, attention_mask=batch.attention_mask).logits
    each = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch.labels[:, 1:].flatten(), reduction="none")
    weights = batch.weights[:, 1:].masked_fill(batch.labels[:, 1:] == -100, 0).flatten()
    mean = (each * weights).sum() / weights.sum()
    mean.backward()
    norm = nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()]).item()
    step = vramfit.wrap(model, torch.optim.SGD(model.parameters(), lr=1e-3), precision="fp32", micro_batch=micro_batch)
    result = step(vars(batch) | {"position_ids": torch.arange(17).expand(4, -1)})
    assert result.loss == pytest.approx(mean.item(), rel=1e-5)
    assert result.grad_norm == pytest.approx(norm, rel=1e-5)
    assert result.tokens == int((weights > 0).sum())
    with pytest.raises(ConfigError, match="weights beside pixels"):
        step(vars(batch) | {"position_ids": torch.arange(17).expand(4, -1), "pixels": torch.zeros(4)})


@pytest.mark.parametrize("micro_batch", ["auto", 2])
def test_a_loss_function_may_give_the_sum_of_its_weights(micro_batch):
    shares = torch.tensor([0.5, 2.0, 1.0, 0.25, 1.0, 3.0, 0.5])

    def weighted(model, batch):
        each = F.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")
        return (each * batch["shares"]).sum(), len(each), batch["shares"].sum()

    model, optimizer = classifier()
    batch = batches()[0]
    each = F.cross_entropy(model(batch["features"]), batch["labels"], reduction="none")
    wanted = ((each * shares).sum() / shares.sum()).item()
    result = vramfit.wrap(model, optimizer, loss=weighted, micro_batch=micro_batch)({**batch, "shares": shares})
    assert result.loss == pytest.approx(wanted, rel=1e-6) and result.tokens == 7
    with pytest.raises(ConfigError, match="sum to -"):
        vramfit.wrap(model, optimizer, loss=weighted)({**batch, "shares": -shares})


def test_bad_wishes_and_bad_batches_are_named():
    model, optimizer = classifier()
    with pytest.raises(ConfigError, match="micro_batch is 0, and a piece has"):
        vramfit.wrap(model, optimizer, micro_batch=0)
    with pytest.raises(ConfigError, match="-1"):
        vramfit.wrap(model, optimizer, max_grad_norm=-1)
    step = vramfit.wrap(model, optimizer)
    for batch, words in (({}, "no tensor"), ({"features": torch.zeros(0, 8)}, "0 rows")):
        with pytest.raises(DataError, match=words):
            step(batch)
    with pytest.raises(ConfigError, match="returned no loss"):
        step({"features": torch.zeros(2, 8)})
    nothing = vramfit.wrap(model, optimizer, loss=lambda m, b: (m(b["features"]).sum(), 0))
    with pytest.raises(DataError, match="0 items"):
        nothing(batches()[0])


def test_what_cannot_be_trained_is_refused_when_wrapped():
    model, optimizer = classifier()
    other, _ = classifier()
    with pytest.raises(ConfigError, match="0 of the 4 trained parameters"):
        vramfit.wrap(other, optimizer)
    with pytest.raises(ConfigError, match="precision is 'bf32', which is none of the 4"):
        vramfit.wrap(model, optimizer, precision="bf32")
    with pytest.raises(ConfigError, match="recompute is -1, and it is a whole number"):
        vramfit.wrap(model, optimizer, recompute=-1)
    with pytest.raises(ModelError, match="0 parameters,"):
        vramfit.wrap(nn.Tanh(), optimizer)
    model.requires_grad_(False)
    with pytest.raises(ModelError, match="0 parameters that require a gradient"):
        vramfit.wrap(model, optimizer)
    spread = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    with pytest.raises(ModelError, match=r"2 devices \(cpu, meta\)"):
        vramfit.wrap(spread, torch.optim.SGD(spread.parameters(), lr=0.1))


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda m, b: m(b["features"]).sum(), "not a pair"),
        (lambda m, b: (m(b["features"]), 7), r"not one number but \[7, 3\]"),
        (lambda m, b: (m(b["features"]).sum().detach(), 7), "does not depend"),
    ],
)
def test_a_loss_function_of_the_wrong_form_is_named(loss, words):
    with pytest.raises(ConfigError, match=words):
        vramfit.wrap(*classifier(), loss=loss)(batches()[0])


def test_pieces_keep_the_form_of_the_batch_and_cut_plain_values_too():
    Rows = namedtuple("Rows", "features names labels")
    batch = batches()[0]
    seen = []

    def loss(model, piece):
        seen.append((len(piece.features), piece.names))
        return F.cross_entropy(model(piece.features), piece.labels, reduction="sum"), len(piece.labels)

    step = vramfit.wrap(*classifier(), loss=loss, micro_batch=4)
    assert step(Rows(batch["features"], list("abcdefg"), batch["labels"])).tokens == 7
    assert seen == [(4, list("abcd")), (3, list("efg"))]


def example(name: str) -> str:
    """The code block with this info string, from README.md when it has one, else from docs/three_lines.md."""
    pattern = re.compile(rf"^```python {name}\n(.*?)^```", re.DOTALL | re.MULTILINE)
    for path in (ROOT / "README.md", ROOT / "docs" / "three_lines.md"):
        found = pattern.search(path.read_text(encoding="utf-8")) if path.is_file() else None
        if found:
            return found[1]
    raise AssertionError(f"no document has the example {name!r}")


def run_example(name: str) -> list[float]:
    torch.manual_seed(0)
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(example(name), name, "exec"), {})
    return [float(line) for line in printed.getvalue().split()]


def test_the_documented_example_runs_and_equals_the_loop_it_replaces():
    before, after = run_example("before"), run_example("after")
    assert len(after) == 50 and after == pytest.approx(before, rel=1e-5)
    assert after[-1] < after[0] / 2


def test_the_documented_example_changes_at_most_ten_lines():
    before = [line for line in example("before").splitlines() if line.strip()]
    added = [line for line in example("after").splitlines() if line.strip() and line not in before]
    assert 3 <= len(added) <= 10


def test_the_documented_lines_prepare_the_allocator_before_torch_is_there():
    from vramfit.engine import accelerators

    assert vramfit.prepare_allocator is accelerators.prepare_allocator
    before, behind = example("allocator").split("import torch\n")
    assert "prepare_allocator()" in before and not behind
    code = f"{before}import sys\nprint('torch' in sys.modules)"
    made = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert made.stdout.split() == ["False"]


@pytest.mark.parametrize(
    ("precision", "compute", "why"), [("auto", "fp32", "CPUs without"), ("bf16", "bf16", "you set")]
)
def test_the_precision_says_why(precision, compute, why):
    step = vramfit.wrap(*classifier(), precision=precision)
    assert step.compute == compute and step.precision_reason.startswith(why)


def test_the_documented_hugging_face_lines_run(tiny):
    model = tiny.build("llama")
    batch = tiny.pad(tiny.sequences(9, 17))
    names = {
        "vramfit": vramfit,
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-2),
        "batches": [{"input_ids": batch.input_ids, "labels": batch.labels, "attention_mask": batch.attention_mask}] * 5,
    }
    printed = io.StringIO()
    with redirect_stdout(printed):
        exec(compile(example("hugging-face"), "hugging-face", "exec"), names)
    losses = [float(line) for line in printed.getvalue().split()]
    assert len(losses) == 5 and losses[-1] < losses[0]
