"""How a program trains, as facts: ours, and those of the trainers whose measured runs prove the estimator.

A program decides what its operations keep for backward, how many bytes a logit takes, what the optimizer step makes on
the way, and what sharding holds. One of these read wrongly is worth more than everything else together, so each is
written down here with its source, and none is fitted to a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vramfit.units import GIB


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What operations keep for backward, where programs differ.

    `norm`, `rope` and `mlp`: "python" as the library writes them, "fused" into one kernel that keeps its input,
    "recomputed" by a compiler. `adapter`: "python" as PEFT does it, "fused" one kernel per input.
    `recomputes_inputs`: a compiler computes inputs of linears from what it keeps. `keeps_frozen_inputs`: bitsandbytes
    before 0.43.2. `repeats_kv`: keys and values are copied to every query head before the kernel. `fuses_qkv`: one
    projection, whose result stays whole because the values are a view of it. `model_dropout`: attention's weights are
    dropped out.
    """

    norm: Literal["python", "fused", "recomputed"] = "python"
    rope: Literal["python", "fused"] = "python"
    mlp: Literal["python", "fused", "recomputed"] = "python"
    adapter: Literal["python", "fused"] = "python"
    recomputes_inputs: bool = False
    keeps_frozen_inputs: bool = False
    repeats_kv: bool = False
    fuses_qkv: bool = False
    model_dropout: bool = False


PYTHON_KERNELS: Final = Kernels()
"""As `transformers` writes them."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What a program's sharding holds besides its share.

    `holds_frozen_inputs`: FSDP1 of torch 2.1 to 2.4 with frozen parameters and reentrant recompute keeps every block's
    input and that input's gradient until backward ends. `keeps_gathered`: FSDP1 of torch 2.0 and older never frees a
    gathered frozen block. `replicates_adapters`: adapters beside a quantised base are left out of the sharding, every
    card holds all of them with gradients and states. `bucket_bytes` are buffers held all the time (DeepSpeed's live
    parameters, prefetch and reduce buckets).
    """

    holds_frozen_inputs: bool = False
    keeps_gathered: bool = False
    replicates_adapters: bool = False
    bucket_bytes: float = 0.0


PLAIN_SHARDING: Final = Sharding()


@dataclass(frozen=True, kw_only=True)
class Program:
    """Facts of a program that trains. Bytes per trained parameter unless the name says otherwise.

    `gradient` of a weight that trains, None: of the weight's own format. `master` is a separate fp32 copy of 16-bit
    weights, `host_master` one that is kept only where the states live in RAM or on disk. `step_temporary` is what the
    optimizer step makes beside the states, in units of the trained weights (foreach AdamW: 1, fused kernels: 0).
    `frees_gradients`: they are gone before the next forward.

    `autocast`: matrix products cast what they are given; `caches_casts`: 16-bit copies of all weights stay until
    forward ends. `adapter` is bytes of an adapter's weight. `logits` are bytes per token and vocabulary entry at the
    worst moment of the loss, by loss kind. `holds_output`: recompute holds the block's output while its backward runs
    (reentrant checkpoints); `input_grads`: the first block's input needs a gradient although nothing before it trains,
    so that such checkpoints work with adapters.

    `context_bytes`: what the driver takes on a card before the first tensor; `process_bytes`: interpreter and libraries
    in RAM.
    """

    name: str
    kernels: Kernels = PYTHON_KERNELS
    sharding: Sharding = PLAIN_SHARDING
    gradient: float | None = None
    master: float = 0.0
    host_master: float = 0.0
    step_temporary: float = 1.0
    frees_gradients: bool = True
    autocast: bool = True
    caches_casts: bool = False
    adapter: float = 4.0
    logits: Mapping[str, float] = field(default_factory=lambda: {"full": 12.0, "chunked": 0.0, "fused": 0.0})
    holds_output: bool = False
    input_grads: bool = False
    context_bytes: int = int(0.6 * GIB)
    process_bytes: int = int(0.55 * GIB)

    def __hash__(self) -> int:
        return hash(self.name)


OURS: Final = Program(
    name="vramfit",
    host_master=4.0,
    step_temporary=0.0,
    caches_casts=True,
    # full: log-softmax 4, the gradient of the picked entries 4, the gradient of the logits 4. chunked: logits 4 and a
    # temporary of logsumexp 4. fused: one buffer (torch's own kernel; in 16 bits we chunk).
    logits={"full": 12.0, "chunked": 8.0, "fused": 4.0},
)
"""Our engine: trained weights fp32, AdamW's two fp32 moments, fused kernel, autocast with its cache.

Context 0.5-0.8 GiB on NVIDIA cards; process: 0.40 GiB measured after torch, transformers, peft and a tiny step, and
0.15 for tokenizer and data.
"""

_TRAINER: Final = Program(
    name="transformers",
    kernels=Kernels(repeats_kv=False),
    # logits in fp32 4, shifted copy 4, log-softmax 4; backward the same again
    logits={"full": 12.0, "chunked": 12.0, "fused": 0.0},
    holds_output=True,
    input_grads=True,
)
"""Hugging Face's Trainer on torch 2.4: foreach AdamW, reentrant recompute, logits made whole and in fp32."""

_FMS: Final = replace(_TRAINER, name="fms", sharding=Sharding(holds_frozen_inputs=True))
"""fms-acceleration's benchmarks: the Trainer with flash attention, torch 2.4.1, FSDP1, adapters fp32 under autocast."""

_FMS_QUANTISED: Final = Sharding(holds_frozen_inputs=True, replicates_adapters=True)

_FAST_KERNELS: Final = Kernels(norm="fused", rope="fused")
"""Its fast kernels: RMSNorm, rotary positions in place, cross-entropy in place of fp32 logits (4) with the shifted copy
(4), whose gradient is again 4 + 4."""

_FOAK: Final = replace(_FMS, name="fms/foak", kernels=_FAST_KERNELS, logits={"full": 8.0, "chunked": 8.0, "fused": 0.0})

PROGRAMS: Final[Mapping[str, Program]] = {
    "vramfit": OURS,
    "transformers": _TRAINER,
    "fms": _FMS,
    "fms/foak": _FOAK,
    "fms-quantised": replace(_FMS, name="fms-quantised", sharding=_FMS_QUANTISED),
    "fms/foak-quantised": replace(
        # 4-bit bases also get its fused adapters, which keep an input once and a dropped copy per projection
        _FOAK,
        name="fms/foak-quantised",
        sharding=_FMS_QUANTISED,
        kernels=replace(_FAST_KERNELS, adapter="fused"),
    ),
}
"""By name. Which record a measured row belongs to is decided where rows are read (`bench/estimator_accuracy.py`)."""
