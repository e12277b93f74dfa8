"""Which kernel computes attention: as planned, refused before loading where it is not installed, and told."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Final

from vramfit.errors import ConfigError, Problem
from vramfit.models.architecture import Architecture
from vramfit.planning.plan import Plan

_NAMES: Final = {"sdpa": "sdpa", "eager": "eager", "flash": "flash_attention_2"}
_WORDS: Final = {
    "eager": "the model's own code, with all scores in memory",
    "flash": "FlashAttention 2",
}
FLASH_PACKAGE: Final = "flash_attn"

_TRIED_TOKENS: Final = 256
_KERNELS: Final = (  # parts of the names of torch's operators; of two that are in a name, the first
    ("attention_math", "plain products, with all scores in memory"),
    ("flash_attention", "flash attention"),
    ("efficient_attention", "memory-efficient attention"),
    ("cudnn_attention", "cuDNN's attention"),
    ("fused_attention", "the device's own fused attention"),
)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What computes attention, in words; whether all scores are in memory; and torch's operator ("": not asked)."""

    words: str
    makes_scores: bool = False
    operator: str = ""


def implementation(plan: Plan) -> str:
    """transformers' word for `plan.attention`. Raises ConfigError for flash without its package."""
    if plan.attention == "flash" and importlib.util.find_spec(FLASH_PACKAGE) is None:
        raise ConfigError(
            [
                Problem(
                    field="memory.attention",
                    what=f"FlashAttention 2 needs the package {FLASH_PACKAGE}, which is not installed",
                    remedy="Choose sdpa, torch's own kernel of that kind; or install flash-attn for your torch.",
                )
            ]
        )
    return _NAMES[plan.attention]


def kernel_of(plan: Plan, architecture: Architecture) -> Kernel:
    """The kernel that runs on `plan.device`, which must be here. Of sdpa, which picks one by device, format, head
    width and mask, a small call with those of the run is looked at."""
    if plan.attention != "sdpa":
        return Kernel(words=_WORDS[plan.attention], makes_scores=plan.attention == "eager")
    operator = _operator_of(plan, architecture)
    words = next((words for part, words in _KERNELS if part in operator), operator or "a kernel that it does not name")
    return Kernel(
        words=f"torch's scaled_dot_product_attention, which takes {words} here",
        makes_scores="attention_math" in operator,
        operator=operator,
    )


def described(plan: Plan, kernel: Kernel) -> str:
    """The kernel as one sentence."""
    return f"Attention is {plan.attention}: {kernel.words}."


def _operator_of(plan: Plan, architecture: Architecture) -> str:
    """The operator that a small training call of the run's kind calls; "" where it cannot be made or names none.

    Rows of packed documents and blocks that slide have a mask, for which some kernels have no way.
    """
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    from vramfit.engine.precision import DTYPES

    heads, length = architecture.heads, min(plan.max_length, _TRIED_TOKENS)
    keys = heads if architecture.latent else architecture.kv_heads
    width, out = architecture.q_width // heads, architecture.attention_out_width // heads
    place: dict[str, Any] = {"device": plan.device, "dtype": DTYPES[plan.compute], "requires_grad": True}
    inputs = [torch.zeros(1, *size, **place) for size in ((heads, length, width), (keys, length, width))]
    inputs.append(torch.zeros(1, keys, length, out, **place))
    masked = plan.packing or 0 < (architecture.sliding_window or 0) <= plan.max_length
    mask = torch.ones(1, 1, length, length, device=plan.device, dtype=torch.bool).tril() if masked else None
    module = SimpleNamespace(num_key_value_groups=heads // keys, is_causal=True)
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            sdpa_attention_forward(module, *inputs, mask)
    except RuntimeError:  # it only names: what the model itself cannot do, its own step says
        return ""
    results = profile.profiler.kineto_results if profile.profiler is not None else None
    names = [] if results is None else [event.name() for event in results.events()]
    found = sorted({name for name in names if name.startswith("aten::_scaled_dot_product")})
    return found[0].removeprefix("aten::") if found else ""
