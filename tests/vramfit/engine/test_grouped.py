"""Experts in one tensor, in few bits: against the library's own forward over the restored weights."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import transformers

from tests.vramfit.models.tiny_families import BASE, TINY, tiny_config
from vramfit.engine import grouped
from vramfit.engine.grouped import grouped_product, modules_of_experts, pack_experts, up_name
from vramfit.engine.packed import packed_weights
from vramfit.errors import ModelError

MIXTURES = [
    (kind, values) for kind, values in TINY if {"num_experts", "num_local_experts", "n_routed_experts"} & {*values}
]
IDS = [f"{kind}-{i}" for i, (kind, _) in enumerate(MIXTURES)]
CPU = torch.device("cpu")


def experts_of(model_type: str, values: dict[str, Any]) -> tuple[str, Any]:
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(model_type, values))
    return next(iter(modules_of_experts(model)))


def packed(name: str, experts: Any, kind: Any) -> tuple[Any, Any]:
    """(experts in few bits, the library's with the numbers that are restored)."""
    plain, few = experts, copy.deepcopy(experts)
    pack_experts(name, few, kind)
    with torch.no_grad():
        for leaf, inner in packed_weights(few).items():
            inner.take(inner.quantised(getattr(plain, leaf), CPU))
            getattr(plain, leaf).copy_(inner.whole.unpacked(torch.float32))
            getattr(few, leaf).data = torch.zeros(()).expand(inner.shape)
    return few, plain


def routed(experts: Any, tokens: int = 20) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Hidden states, two experts for each token (never the last one), their shares."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(tokens, BASE["hidden_size"], generator=generator, requires_grad=True)
    order = [torch.randperm(experts.num_experts - 1, generator=generator)[:2] for _ in range(tokens)]
    return hidden, torch.stack(order), torch.rand(tokens, 2, generator=generator)


@pytest.mark.parametrize("at_once", [1, 5_000, 2**25], ids=["one", "some", "all"])
@pytest.mark.parametrize("kind", ["nf4", "int8"])
@pytest.mark.parametrize(("model_type", "values"), MIXTURES, ids=IDS)
def test_few_bits_compute_what_the_restored_weights_do(
    model_type: str, values: dict[str, Any], kind: Any, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouped, "UNPACKED_AT_ONCE", at_once)
    few, plain = packed(*experts_of(model_type, values), kind)
    hidden, chosen, shares = routed(plain)

    made, wanted = few(hidden, chosen, shares), plain(hidden, chosen, shares)

    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)
    ours, theirs = (torch.autograd.grad(each.square().sum(), hidden)[0] for each in (made, wanted))
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_only_experts_with_tokens_are_unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grouped, "UNPACKED_AT_ONCE", 1)
    few, plain = packed(*experts_of("mixtral", dict(TINY)["mixtral"]), "int8")
    hidden, _, shares = routed(plain)
    asked: list[int] = []
    stretch = packed_weights(few)[up_name(few)]
    before = stretch.stretch
    monkeypatch.setattr(stretch, "stretch", lambda first, last: asked.append(first) or before(first, last))

    few(hidden, torch.tensor([[0, 2]]).expand(20, 2), shares)

    assert asked == [0, 2]


def test_no_tokens_at_all_give_no_rows() -> None:
    few, plain = packed(*experts_of("mixtral", dict(TINY)["mixtral"]), "nf4")
    none = torch.zeros(0, BASE["hidden_size"]), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    assert few(*none).shape == plain(*none).shape == (0, BASE["hidden_size"])


def test_experts_of_another_layout_are_refused_by_name() -> None:
    class Strange(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = torch.nn.Parameter(torch.zeros(2, 3, 4))

    with pytest.raises(ModelError, match=r"mlp\.odd \(Strange\).*cannot keep in few bits.*method lora"):
        pack_experts("mlp.odd", Strange(), "nf4")


def test_without_a_kernel_products_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(10, 8, generator=generator, requires_grad=True)
    matrices = torch.randn(4, 8, 12, generator=generator, requires_grad=True)
    ends = torch.tensor([3, 3, 7, 10], dtype=torch.int32)

    def made() -> list[torch.Tensor]:
        product = grouped_product(rows, matrices, ends)
        return [product.detach(), *torch.autograd.grad(product.square().sum(), (rows, matrices))]

    with_kernel = made()
    monkeypatch.setattr(grouped, "_has_kernel", lambda device, dtype: False)
    for one, other in zip(with_kernel, made(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
