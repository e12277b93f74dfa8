"""What adapters begin as: the model stays the same, the factors are what the papers say, and a resume repeats them."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers

from tests.vramfit.models.tiny_families import TINY, tiny_config
from vramfit.errors import CheckpointError, ModelError
from vramfit.models.adapter_start import (
    ROWS_OF_A_BATCH,
    rounded_away,
    start_adapters,
    start_from_inputs,
    taken_from_base,
)
from vramfit.models.adapters import NAME, adapted_layers, attach_adapters, scale_of

TOKENS = torch.randint(0, 128, (2, 12), generator=torch.Generator().manual_seed(0))
STARTS = ["pissa", "olora", "orthogonal"]


def base(model_type: str = "llama", **values):
    torch.manual_seed(3)
    config = tiny_config(model_type, {**dict(TINY)[model_type], **values})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def started(model, start, *, seed=1, variant="lora", rank=4, **options):
    adapted = attach_adapters(model, rank=rank, alpha=8, variant=variant, seed=seed).eval()
    start_adapters(adapted, start, seed=seed, **options)
    return adapted


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("variant", ["lora", "rslora", "dora"])
@pytest.mark.parametrize("model_type", ["llama", "gpt2", "qwen2_moe"])  # qwen2_moe has a linear with one output
def test_the_model_is_the_same_at_the_start_and_b_has_its_gradient(model_type, variant, start):
    model = base(model_type)
    logits = model(TOKENS).logits
    adapted = started(model, start, variant=variant)
    torch.testing.assert_close(adapted(TOKENS).logits, logits, rtol=1e-5, atol=2e-6)
    if start != "orthogonal":
        assert all(layer.lora_B[NAME].weight.any() for _, layer in adapted_layers(adapted))


@pytest.mark.parametrize("start", [*STARTS, "usual"])
def test_the_seed_decides(start):
    first, again, other = (started(base(), start, seed=seed).state_dict() for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    same = all(torch.equal(first[name], other[name]) for name in first)
    assert same == (start in ("pissa", "olora"))  # those come from the weights alone


@pytest.mark.parametrize("variant", ["lora", "rslora"])
def test_pissa_takes_the_largest_singular_values_and_leaves_the_others(variant):
    model = base()
    weights = {
        name: module.weight.detach().clone() for name, module in model.named_modules() if hasattr(module, "weight")
    }
    adapted = started(model, "pissa", variant=variant)
    for name, layer in adapted_layers(adapted):
        values = torch.linalg.svdvals(weights[name])
        left = torch.linalg.svdvals(layer.base_layer.weight)
        torch.testing.assert_close(left[: len(values) - 4], values[4:], rtol=1e-4, atol=1e-5)
        taken = torch.linalg.svdvals(scale_of(variant, 4, 8) * layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight)
        torch.testing.assert_close(taken[:4], values[:4], rtol=1e-4, atol=1e-5)


def test_pissa_of_a_large_matrix_finds_nearly_the_same(monkeypatch):
    exact = started(base(), "pissa")
    monkeypatch.setattr("vramfit.models.adapter_start.EXACT_UP_TO", 16)
    drawn = started(base(), "pissa")
    for (_, one), (_, other) in zip(adapted_layers(exact), adapted_layers(drawn), strict=True):
        first, second = (layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight for layer in (one, other))
        assert (first - second).norm() < 0.05 * first.norm()
    torch.testing.assert_close(drawn(TOKENS).logits, exact(TOKENS).logits, rtol=1e-5, atol=2e-6)


def test_olora_has_the_first_columns_of_q_and_rows_of_r():
    model = base()
    weights = {
        name: module.weight.detach().clone() for name, module in model.named_modules() if hasattr(module, "weight")
    }
    for name, layer in adapted_layers(started(model, "olora")):
        left, right = torch.linalg.qr(weights[name])
        torch.testing.assert_close(
            layer.lora_B[NAME].weight @ layer.lora_A[NAME].weight, left[:, :4] @ right[:4], rtol=1e-4, atol=1e-5
        )


def test_orthogonal_factors_cancel_and_an_odd_rank_is_refused():
    for _, layer in adapted_layers(started(base(), "orthogonal")):
        a, b = layer.lora_A[NAME].weight, layer.lora_B[NAME].weight
        assert a.any() and b.any()
        assert (b @ a).norm() < 1e-5 * a.norm() * b.norm()
    with pytest.raises(ModelError, match="halves the rank, and 3 is odd"):
        started(base(), "orthogonal", rank=3)


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_what_rounding_the_base_anew_loses_is_known(start):
    """As much as the published base with the exported adapter differs from what was trained."""
    whole = base().bfloat16()
    published = {name: each.clone().float() for name, each in whole.named_parameters()}
    model = started(whole, start)
    taken = taken_from_base(model)
    lost = wanted = 0.0
    for name, layer in adapted_layers(model):
        scale = layer.scaling[NAME]
        exported = published[f"{name}.weight"] - scale * taken[name].b @ taken[name].a
        lost += (exported - layer.get_base_layer().weight.float()).square().sum().item()
        wanted += published[f"{name}.weight"].square().sum().item()
    assert 1e-4 < rounded_away(model) < 1e-2
    assert rounded_away(model) == pytest.approx((lost / wanted) ** 0.5, rel=1e-4)
    assert rounded_away(started(base(), start)) < 1e-6


@pytest.mark.parametrize("start", ["pissa", "olora"])
def test_a_resumed_run_makes_the_same_base_from_what_was_saved(start, tmp_path, monkeypatch):
    file = tmp_path / "run" / "start.safetensors"
    first = started(base(), start, file=file).state_dict()

    def changed(*args, **kwargs):
        raise AssertionError("a later library's decomposition need not be the same")

    monkeypatch.setattr(torch.linalg, "svd", changed)
    monkeypatch.setattr(torch.linalg, "qr", changed)
    again = started(base(), start, file=file, again=True)
    assert all(torch.equal(first[name], value) for name, value in again.state_dict().items())
    assert taken_from_base(again)


def test_what_was_saved_for_another_model_is_refused(tmp_path):
    file = tmp_path / "start.safetensors"
    started(base(), "pissa", file=file)
    with pytest.raises(CheckpointError, match="of another model or rank"):
        started(base(), "pissa", rank=8, file=file, again=True)
    file.write_bytes(b"torn")
    with pytest.raises(CheckpointError, match="cannot be read"):
        started(base(), "pissa", file=file, again=True)


def test_a_new_run_does_not_read_an_older_start(tmp_path):
    file = tmp_path / "start.safetensors"
    started(base(), "pissa", file=file)
    model = base(hidden_size=32)
    adapted = started(model, "pissa", file=file)
    assert taken_from_base(adapted)


def test_a_quantised_base_is_refused():
    bitsandbytes = pytest.importorskip("bitsandbytes")
    model = base()
    linear = model.model.layers[0].self_attn.q_proj
    packed = bitsandbytes.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, quant_type="nf4")
    packed.weight = bitsandbytes.nn.Params4bit(linear.weight.data, requires_grad=False, quant_type="nf4")
    model.model.layers[0].self_attn.q_proj = packed.to("cpu")
    model.is_loaded_in_4bit = True
    with pytest.raises(ModelError, match="q_proj is quantised"):
        started(model, "pissa")


def test_eva_finds_the_main_directions_of_what_each_layer_is_given():
    model = base()
    inputs: dict[str, torch.Tensor] = {}
    reference = copy.deepcopy(model)
    names = [name for name, _ in adapted_layers(attach_adapters(copy.deepcopy(model), rank=4, alpha=8, seed=1))]
    for name in names:
        reference.get_submodule(name).register_forward_hook(
            lambda module, args, out, name=name: inputs.__setitem__(name, args[0].detach().flatten(0, 1))
        )
    reference(TOKENS)
    assert TOKENS.numel() < ROWS_OF_A_BATCH

    adapted = attach_adapters(model, rank=4, alpha=8, seed=1)
    logits = adapted(TOKENS).logits
    start_from_inputs(adapted, lambda: adapted(TOKENS))
    for name, layer in adapted_layers(adapted):
        found = layer.lora_A[NAME].weight
        _, _, right = torch.linalg.svd(inputs[name], full_matrices=False)
        torch.testing.assert_close((found @ right[:4].T).abs(), torch.eye(4), rtol=0, atol=1e-2)
        assert not layer.lora_B[NAME].weight.any()
    assert torch.equal(adapted(TOKENS).logits, logits)
    assert not any(module._forward_pre_hooks for module in adapted.modules())


def test_eva_over_several_batches_keeps_nearly_all_that_one_would_find():
    generator = torch.Generator().manual_seed(5)
    batches = [torch.randint(0, 128, (4, 16), generator=generator) for _ in range(6)]
    whole, parts = (attach_adapters(base(), rank=4, alpha=8, seed=1) for _ in range(2))
    start_from_inputs(whole, lambda: whole(torch.cat(batches)[:16]))
    start_from_inputs(parts, lambda: [parts(batch) for batch in batches])
    for (_, one), (_, other) in zip(adapted_layers(whole), adapted_layers(parts), strict=True):
        first, second = one.lora_A[NAME].weight, other.lora_A[NAME].weight
        torch.testing.assert_close(second @ second.T, torch.eye(4), rtol=0, atol=1e-5)
        assert (first[:1] @ second.T).norm() > 0.95  # the main direction is within what the parts found


def test_eva_reaches_the_copies_of_states_in_ram():
    """Which are what is trained: a step must not bring the random start back."""
    from vramfit.config import ScheduleChoice
    from vramfit.engine.host_states import HostStates
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.resident import ResidentExecutor
    from vramfit.planning.plan import Plan

    model = started(base(), "eva")
    plan = Plan(
        method="lora",
        device="cpu",
        budget_bytes=2**33,
        compute="fp32",
        weight_format="fp32",
        optimizer_tier="host",
        max_length=12,
        micro_batch=2,
        accumulation=1,
        recompute=0,
        loss="full",
        lora_rank=4,
        lora_targets=("all-linear",),
    )
    optimizer = build_optimizer(model, ScheduleChoice(), plan)
    executor = ResidentExecutor(model, plan=plan, optimizer=optimizer)
    start_from_inputs(model, lambda: model(input_ids=TOKENS))
    executor.weights_were_changed()

    assert isinstance(optimizer, HostStates)
    for _, layer in adapted_layers(model):
        weight = layer.lora_A[NAME].weight
        assert torch.equal(optimizer.master(weight), weight)
