"""LoRA beside experts in one tensor, against the same model with W + scale B A written into its weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers
from torch.utils._python_dispatch import TorchDispatchMode

from tests.vramfit.models.tiny_families import BASE, TINY, tiny_config
from vramfit.engine.activations import recompute_blocks
from vramfit.errors import ModelError
from vramfit.models.adapters import attach_adapters, merged_state, modules_of_experts
from vramfit.models.expert_adapters import ExpertAdapter, attach_expert_adapters, expert_adapters

MIXTURES = [
    (kind, values) for kind, values in TINY if {"num_experts", "num_local_experts", "n_routed_experts"} & {*values}
]
IDS = [f"{kind}-{i}" for i, (kind, _) in enumerate(MIXTURES)]
TOKENS = torch.randint(0, BASE["vocab_size"], (2, 12), generator=torch.Generator().manual_seed(0))


def build(model_type: str, values: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    return transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, values))


def with_adapters(model: Any, *, rank: int = 3, **options: Any) -> Any:
    """Adapters that do something: B is random, too."""
    adapted = attach_adapters(model, rank=rank, alpha=6, experts=True, variant="rslora", seed=1, **options)
    torch.manual_seed(2)
    for value in adapted.parameters():
        if value.requires_grad:
            torch.nn.init.normal_(value, std=0.1)
    return adapted


@pytest.mark.parametrize(("model_type", "values"), MIXTURES, ids=IDS)
def test_the_output_is_that_of_the_weights_with_the_adapters_in_them(model_type: str, values: dict[str, Any]) -> None:
    model = build(model_type, values).eval()
    merged = copy.deepcopy(model)
    untouched = model(TOKENS).logits
    adapted = with_adapters(model)
    merged.load_state_dict(merged_state(adapted))

    logits = adapted(TOKENS).logits
    assert (logits - untouched).abs().max() > 0.05
    torch.testing.assert_close(logits, merged(TOKENS).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("model_type", "values"), MIXTURES, ids=IDS)
def test_a_start_changes_nothing(model_type: str, values: dict[str, Any]) -> None:
    model = build(model_type, values).eval()
    logits = model(TOKENS).logits
    adapted = attach_adapters(model, rank=3, alpha=6, experts=True, seed=1)
    torch.testing.assert_close(adapted(TOKENS).logits, logits, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("model_type", "values"), MIXTURES, ids=IDS)
def test_gradients_of_one_module_are_those_of_the_written_out_sum(model_type: str, values: dict[str, Any]) -> None:
    """dL/dA = scale B^T dL/dW and dL/dB = scale dL/dW A^T, with dL/dW of the library's own forward on W + scale B A."""
    model = build(model_type, values).double()
    written = copy.deepcopy(model)
    adapted = with_adapters(model)
    name, experts = next(modules_of_experts(adapted))
    reference = written.get_submodule(name)
    reference.config._experts_implementation = "eager"  # its grouped products know no fp64
    for adapter in expert_adapters(experts).values():
        adapter.double()
    with torch.no_grad():
        for key, adapter in expert_adapters(experts).items():
            getattr(reference, key).copy_(adapter.merged(getattr(experts, key)))
    hidden = torch.randn(20, BASE["hidden_size"], dtype=torch.float64)
    chosen = torch.stack([torch.randperm(experts.num_experts - 1)[:2] for _ in range(20)])  # the last one gets no token
    shares = torch.rand(20, 2, dtype=torch.float64)

    for module in (experts, reference):
        module(hidden, chosen, shares).square().sum().backward()
    for key, adapter in expert_adapters(experts).items():
        whole = getattr(reference, key).grad
        whole = whole.transpose(1, 2) if experts.is_transposed else whole
        torch.testing.assert_close(
            adapter.A.grad, adapter.scale * adapter.B.transpose(1, 2) @ whole, rtol=1e-6, atol=1e-6
        )
        torch.testing.assert_close(
            adapter.B.grad, adapter.scale * whole @ adapter.A.transpose(1, 2), rtol=1e-6, atol=1e-6
        )
        assert getattr(experts, key).grad is None
        assert not adapter.A.grad[-1].any() and adapter.A.grad[0].any()


class LargestMade(TorchDispatchMode):
    """Bytes of the largest tensor that an operation makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        given = {value.untyped_storage().data_ptr() for value in args if isinstance(value, torch.Tensor)}
        for made in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(made, torch.Tensor) and made.untyped_storage().data_ptr() not in given:
                self.largest = max(self.largest, made.untyped_storage().nbytes())
        return result


def test_no_operation_makes_anything_as_large_as_the_experts() -> None:
    config = tiny_config("mixtral", {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512})
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(config)
    adapted = attach_adapters(model, rank=4, alpha=8, experts=True, seed=1)
    weights = next(modules_of_experts(adapted))[1].down_proj.nbytes
    with LargestMade() as made:
        adapted(TOKENS[:1, :4]).logits.sum().backward()
    assert 0 < made.largest < weights / 2


def test_recomputed_blocks_give_the_same_gradients_with_dropout() -> None:
    def gradients(recomputed: int) -> list[torch.Tensor]:
        adapted = with_adapters(build("olmoe", dict(TINY)["olmoe"]), dropout=0.3).train()
        recompute_blocks(adapted, recomputed)
        torch.manual_seed(4)
        adapted(TOKENS).logits.square().sum().backward()
        return [value.grad for value in adapted.parameters() if value.requires_grad]

    for kept, again in zip(gradients(0), gradients(3), strict=True):
        assert torch.equal(kept, again)


def test_sixteen_bit_experts_have_fp32_adapters_and_sixteen_bit_results() -> None:
    model = build("mixtral", dict(TINY)["mixtral"]).to(torch.bfloat16)
    adapted = with_adapters(model)
    experts = next(modules_of_experts(adapted))[1]
    assert {value.dtype for value in experts.lora_experts.parameters()} == {torch.float32}
    assert adapted(TOKENS[:1, :4]).logits.dtype == torch.bfloat16
    with torch.autocast("cpu", dtype=torch.bfloat16):
        adapted(TOKENS[:1, :4]).logits.float().sum().backward()
    assert experts.lora_experts["up"].A.grad.dtype == torch.float32


def test_an_unknown_layout_is_refused_by_name() -> None:
    class StrangeExperts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all_in_one = torch.nn.Parameter(torch.zeros(2, 3, 4))

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = StrangeExperts()

    with pytest.raises(ModelError, match=r"experts \(StrangeExperts\) lays out its experts in a way"):
        attach_expert_adapters(Model(), rank=2, scale=1.0, dropout=0.0)
    with pytest.raises(ModelError, match="0 experts"):
        attach_expert_adapters(torch.nn.Linear(2, 2), rank=2, scale=1.0, dropout=0.0)


def test_transposed_weights_have_their_sides_exchanged() -> None:
    weight = torch.zeros(4, 6, 10)
    straight = ExpertAdapter(weight, transposed=False, rank=2, scale=1.0, dropout=0.0)
    turned = ExpertAdapter(weight, transposed=True, rank=2, scale=1.0, dropout=0.0)
    assert (straight.A.shape, straight.B.shape) == ((4, 2, 10), (4, 6, 2))
    assert (turned.A.shape, turned.B.shape) == ((4, 2, 6), (4, 10, 2))
