from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn

from vramfit.config import ScheduleChoice
from vramfit.engine import compression
from vramfit.engine.compression import BLOCK, Compressed, InputCompressor, codec_for, described
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.randomness import restart_rounding
from vramfit.engine.resident import ResidentExecutor

BENCH = Path(__file__).parents[3] / "bench" / "compression.py"
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(3)
    restart_rounding(CPU)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(4, 128), (3, 5, 40), (7,), (1, 1), (3, 2**21 + 1)])
def test_int8_is_off_by_less_than_one_level_of_its_128_numbers(shape, dtype):
    tensor = torch.randn(shape).to(dtype)
    packed = Compressed.of(tensor)
    restored = packed.restored()
    assert restored.shape == tensor.shape and restored.dtype == dtype
    padded = F.pad(tensor.float().flatten(), (0, -tensor.numel() % BLOCK)).view(-1, BLOCK)
    level = (padded.abs().amax(1, keepdim=True) / 127).expand_as(padded).flatten()[: tensor.numel()].view(shape)
    rounding = 0 if dtype == torch.float32 else torch.finfo(dtype).eps
    allowed = level * 1.0001 + restored.float().abs() * rounding
    assert ((restored.float() - tensor.float()).abs() <= allowed).all()


@pytest.mark.parametrize(("codec", "error"), [("int8", 0.011), ("fp8", 0.04)])
def test_the_error_of_normal_numbers_is_as_stated(codec, error):
    numbers = torch.randn(512, 1024)
    restored = Compressed.of(numbers, codec).restored()
    found = float((restored - numbers).norm() / numbers.norm())
    assert error / 2 < found < error


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_rounding_by_chance_is_right_in_the_mean(codec):
    numbers = torch.rand(128) + 0.5
    mean = torch.stack([Compressed.of(numbers, codec).restored() for _ in range(4000)]).mean(0)
    one = (Compressed.of(numbers, codec).restored() - numbers).norm()
    assert (mean - numbers).norm() < one / 20


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_bytes_are_one_a_number_and_a_scale_per_128(codec):
    assert Compressed.of(torch.randn(64, 256), codec).nbytes == 64 * 256 * (1 + 4 / 128)


@pytest.mark.parametrize(("has", "codec"), [(True, "fp8"), (False, "int8")])
def test_blocks_keep_fp8_where_the_device_computes_in_it_else_int8(tiny, monkeypatch, has, codec):
    """As planned, and as a governor or a checkpoint set them later; a step is then taken in that format."""
    asked, kept = [], []
    monkeypatch.setattr(compression, "has_hardware", lambda device, number: asked.append((str(device), number)) or has)
    real = Compressed.of.__func__
    monkeypatch.setattr(
        Compressed, "of", classmethod(lambda cls, tensor, codec="int8": kept.append(codec) or real(cls, tensor, codec))
    )
    # Narrower inputs than the 128 numbers that share a scale are not compressed.
    model, plan = tiny.build("llama", hidden_size=128, intermediate_size=256), tiny.plan(compress=2)
    executor = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    batch = tiny.pad(tiny.sequences(12, 9))
    assert executor.step([batch], 1e-3).loss > 0
    assert set(kept) == {codec} and set(asked) == {("cpu", "fp8")}
    kept.clear()
    executor.set_activations(["keep", "compress"])
    executor.step([batch], 1e-3)
    assert set(kept) == {codec}
    assert described(codec_for("cpu"), "cpu").startswith(f"What compressed blocks keep is in {codec}: cpu ")


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_zeros_stay_and_what_is_not_finite_spoils_its_own_128_alone(codec):
    numbers = torch.ones(3, BLOCK)
    numbers[0] = 0.0
    numbers[1, 5] = torch.inf
    restored = Compressed.of(numbers, codec).restored()
    assert torch.equal(restored[0], numbers[0]) and not restored[1].isfinite().all()
    torch.testing.assert_close(restored[2], numbers[2])


def test_rounding_leaves_torchs_own_random_numbers_alone():
    before = torch.get_rng_state()
    Compressed.of(torch.ones(4, 128))
    assert torch.equal(torch.get_rng_state(), before)


class Saved:
    """What autograd saves inside a block, by a compressor's own eyes."""

    def __init__(self, block, *args, codec="int8", **kwargs):
        compressor = InputCompressor(block, codec)
        self.packed, own = [], compressor._pack
        compressor._pack = lambda tensor: self.packed.append(own(tensor)) or self.packed[-1]
        self.output = compressor.run(block, *args, **kwargs)
        compressor.close()

    @property
    def compressed(self):
        return [packed for packed in self.packed if isinstance(packed, Compressed)]

    @property
    def distinct(self) -> int:
        return len({packed.codes.data_ptr() for packed in self.compressed})


class Branches(nn.Module):
    """Three linears on one input, an activation that keeps its own, a product, a linear on that."""

    def __init__(self, width=128, inner=256):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, inner, bias=False) for _ in range(3))
        self.out = nn.Linear(inner, width)

    def forward(self, x):
        x = x * 2
        return self.out(F.silu(self.q(x)) * self.k(x) * self.v(x))


def test_one_input_of_three_linears_is_compressed_once_and_nothing_else_is():
    saved = Saved(Branches(), torch.randn(2, 8, 128, requires_grad=True))
    assert len(saved.compressed) == 4 and saved.distinct == 2  # x three times, the product once
    as_they_are = [packed for packed in saved.packed if isinstance(packed, torch.Tensor)]
    assert {packed.shape[-1] for packed in as_they_are} >= {256} and len(as_they_are) >= 5


@pytest.mark.parametrize("autocast", [False, True])
def test_casts_of_one_input_are_compressed_once(autocast):
    block = Branches()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        saved = Saved(block, torch.randn(16, 128, requires_grad=True))
    assert len(saved.compressed) == 4 and saved.distinct == 2
    assert {packed.dtype for packed in saved.compressed} == {torch.bfloat16 if autocast else torch.float32}


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("tokens", [128, 64])
def test_weights_are_never_compressed_not_even_where_all_is_square(autocast, tokens):
    block = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Tanh(), nn.Linear(128, 128, bias=False))
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        given = torch.randn(tokens, 128, requires_grad=True)
        saved = Saved(block, given)
    assert len(saved.compressed) == 1  # Tanh keeps what it returns, which is the second's input
    restored = saved.compressed[0].restored()
    torch.testing.assert_close(restored.float(), given.detach(), atol=0.05, rtol=0.01)


def test_what_another_operation_keeps_anyway_is_not_copied():
    block = nn.Sequential(nn.Sigmoid(), nn.Linear(128, 64))
    assert not Saved(block, torch.randn(16, 128, requires_grad=True)).compressed


def test_an_input_changed_in_between_is_another_input():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = nn.Linear(128, 8), nn.Linear(128, 8)

        def forward(self, x):
            x = x * 1
            first = self.one(x)
            with torch.no_grad():
                x.add_(1)
            return first + self.two(x)

    saved = Saved(Changing(), torch.randn(16, 128, requires_grad=True))
    first, second = (packed.restored() for packed in saved.compressed)
    torch.testing.assert_close(second, first + 1, atol=0.1, rtol=0)


def test_narrow_inputs_stay_as_they_are():
    assert not Saved(nn.Linear(64, 8), torch.randn(16, 64, requires_grad=True)).compressed


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_adapters_on_one_input_share_it_unless_dropout_makes_each_its_own(dropout):
    import peft

    options = peft.LoraConfig(r=4, target_modules=["q", "k", "v"], lora_dropout=dropout)
    block = peft.inject_adapter_in_model(options, Branches().requires_grad_(False)).train()
    saved = Saved(block, torch.randn(16, 128))
    assert len(saved.compressed) == 3 and saved.distinct == (3 if dropout else 1)


def test_a_checkpoint_inside_keeps_its_own_way():
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.out = Branches(), nn.Linear(128, 128)

        def forward(self, x):
            return self.out(torch.utils.checkpoint.checkpoint(self.inner, x * 1, use_reentrant=False))

    block, x = Checkpointed(), torch.randn(16, 128)
    wanted = torch.autograd.grad(block(x).square().sum(), list(block.parameters()))
    saved = Saved(block, x)
    assert len(saved.compressed) == 1
    found = torch.autograd.grad(saved.output.square().sum(), list(block.parameters()))
    for mine, theirs in zip(found[:-2], wanted[:-2], strict=True):
        assert torch.equal(mine, theirs)  # recomputed, from an input that was kept whole


def test_closing_takes_every_hook_off_and_an_error_inside_leaves_nothing_behind():
    block = Branches()
    compressor = InputCompressor(block)
    with pytest.raises(RuntimeError):
        compressor.run(block, torch.randn(2, 99))
    assert compressor._linear is None and not compressor._known and not compressor._runs
    compressor.close()
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in block.modules())


def load_bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("compression", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_the_starters_gradient_points_the_same_way(codec):
    bench = load_bench()
    model, text = bench._starter()
    row = bench.compare("starter", model, bench.Text(text.input_ids[:2], text.labels[:2]), "fp32", codec)
    assert row.cosine >= 0.999 and row.share < 0.9


@pytest.mark.parametrize("adapters", [False, True])
def test_a_real_models_gradient_points_the_same_way_and_bytes_are_those_reckoned(smollm2_folder, adapters):
    """Real text. Of what a block keeps, the inputs of q, k and v, of gate and up, and of down are compressed; o's is
    kept by attention anyway."""
    bench = load_bench()
    bench.SMOLLM2 = smollm2_folder
    model, text = bench._smollm2(adapters=adapters)
    text = bench.Text(text.input_ids[:1, :64], text.labels[:1, :64])
    row = bench.compare("SmolLM2-135M", model, text, "fp32", "int8")
    assert row.cosine >= 0.999
    numbers = 30 * 64 * (576 + 576 + 1536)
    assert row.kept_bytes - row.compressed_bytes == pytest.approx(numbers * (4 - 1 - 4 / 128), rel=0.005)
