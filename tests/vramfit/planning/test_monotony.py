"""Memory grows with everything there is more of, and shares of several cards make the whole, over drawn plans."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import pytest

from vramfit.models import catalogue
from vramfit.models.architecture import Architecture
from vramfit.planning.memory import estimate_memory
from vramfit.planning.plan import MemoryEstimate, Plan, Workload

MODELS = (
    "HuggingFaceTB/SmolLM2-135M",
    "google/gemma-2-2b",
    "Qwen/Qwen3-30B-A3B",
    "deepseek-ai/DeepSeek-V2-Lite",
    "openai-community/gpt2",
    "tiiuae/falcon-7b",
    "microsoft/phi-2",
    "CohereForAI/c4ai-command-r7b-12-2024",
)


def drawn(seed: int, plan: Callable[..., Plan]) -> tuple[Architecture, Plan]:
    """A model and a plan for it, the same for the same seed."""
    pick = random.Random(seed)
    architecture = catalogue.find(MODELS[seed % len(MODELS)])
    assert architecture is not None
    method = pick.choice(("full", "lora", "qlora"))
    adapts = method != "full"
    values: dict[str, Any] = {
        "method": method,
        "device": pick.choice(("cuda:0", "cpu")),
        "compute": pick.choice(("bf16", "fp32")),
        "weight_format": {"full": "fp32", "lora": "bf16", "qlora": "nf4"}[method],
        "trained_format": "fp32",
        "lora_rank": pick.choice((4, 16, 64)) if adapts else 0,
        "lora_targets": ("all-linear",) if adapts else (),
        "max_length": pick.choice((256, 1024, 4096)),
        "micro_batch": pick.choice((1, 3, 8)),
        "accumulation": pick.choice((1, 4)),
        "recompute": pick.choice((0, architecture.layers // 2, architecture.layers)),
        "attention": pick.choice(("sdpa", "eager", "flash")),
        "packing": pick.choice((False, True)),
        "loss": pick.choice(("full", "chunked")),
        "optimizer_bits": pick.choice((32, 8)),
    }
    return architecture, plan(**values)


def memory(architecture: Architecture, plan: Plan) -> MemoryEstimate:
    length = plan.max_length
    return estimate_memory(
        architecture, plan, Workload(sequences=100, mean_tokens=length, longest_tokens=length, exact=True)
    )


@pytest.mark.parametrize("seed", range(40))
def test_more_of_anything_never_needs_less(seed: int, plan: Callable[..., Plan]) -> None:
    architecture, base = drawn(seed, plan)
    least = memory(architecture, base)
    larger: dict[str, tuple[Architecture, Plan]] = {
        "vocabulary": (dataclasses.replace(architecture, vocab_size=architecture.vocab_size + 4096), base),
        "length": (architecture, dataclasses.replace(base, max_length=base.max_length + 128)),
        "double length": (architecture, dataclasses.replace(base, max_length=2 * base.max_length)),
        "micro-batch": (architecture, dataclasses.replace(base, micro_batch=base.micro_batch + 1)),
        "layers": (
            dataclasses.replace(architecture, layers=architecture.layers + 1),
            dataclasses.replace(base, recompute=base.recompute + bool(base.recompute)),
        ),
    }
    if base.lora_rank:
        larger["rank"] = (architecture, dataclasses.replace(base, lora_rank=2 * base.lora_rank))
    fewer = [
        f"{name}: {field} {getattr(found, field)} < {getattr(least, field)}"
        for name, wish in larger.items()
        for found in [memory(*wish)]
        for field in ("peak_bytes", "device_bytes", "host_bytes", "disk_bytes")
        if getattr(found, field) < getattr(least, field)
    ]
    assert fewer == []


ALL = {"method": "full", "trained_format": "fp32"}
ADAPTERS = {"method": "qlora", "weight_format": "nf4", "lora_rank": 16, "lora_targets": ("all-linear",)}


@pytest.mark.parametrize("cards", [2, 8])
@pytest.mark.parametrize("method", [ALL, ADAPTERS], ids=["full", "qlora"])
@pytest.mark.parametrize(
    ("sharding", "split"),
    [
        ("ddp", ()),
        ("zero1", ("optimizer",)),
        ("zero2", ("gradients", "optimizer")),
        ("zero3", ("gradients", "optimizer", "weights", "adapters")),
        ("fsdp", ("gradients", "optimizer", "weights", "adapters")),
    ],
)
def test_shares_of_the_cards_make_the_whole(
    plan: Callable[..., Plan], sharding: str, split: tuple[str, ...], method: dict[str, Any], cards: int
) -> None:
    """At the optimizer's step: what is split times the cards is what one card holds, what is not is on each whole. What
    is written is the same, and there once."""
    architecture = catalogue.find("Qwen/Qwen3-8B")
    assert architecture is not None
    common = {**method, "device": "cuda:0", "compute": "bf16", "recompute": 36}
    alone = memory(architecture, plan(**common))
    shared = memory(architecture, plan(**common, cards=cards, sharding=sharding))

    held, whole = (next(dict(at.parts) for at in found.phases if at.name == "step") for found in (shared, alone))
    for kind in ("weights", "adapters", "gradients", "optimizer"):
        share = cards if kind in split else 1
        assert share * held[kind] == pytest.approx(whole[kind], rel=0.001), kind  # type: ignore[index]
    assert shared.written_per_checkpoint_bytes == alone.written_per_checkpoint_bytes
    assert shared.disk_bytes == alone.disk_bytes
