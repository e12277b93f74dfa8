"""How a program trains, as facts: ours, and those of the trainers whose measured runs prove the estimator.

A program decides what its operations keep for backward, how many bytes a logit takes, what the optimizer step makes on
the way, and what sharding holds. One of these read wrongly is worth more than everything else together, so each is
written down here with its source, and none is fitted to a measurement.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from vramfit.config import Method
from vramfit.models.architecture import Linear
from vramfit.units import GIB


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """What operations keep for backward, where programs differ.

    `norm`, `rope` and `mlp`: "python" as the library writes them, "fused" into one kernel that keeps its input,
    "recomputed" by a compiler. A norm in "fp32" also multiplies with its weight in fp32 and casts last. `layer_norm`
    and `gelu`: "native" operations, or "python" from single ones; GELU as the "library" has it for the activation.
    `adapter`: "python" as PEFT does it, "fused" one kernel per input. `dora`: columns have a trained magnitude, so that
    both results, the linear's and the adapter's, are factors of products. `keeps_frozen_inputs`: bitsandbytes before
    0.43.2 keeps what a quantised linear is given.

    `repeats_kv`: keys and values are copied to every query head before the kernel. `fuses_qkv`: one projection, whose
    result stays whole because the values are a view of it. `pads_adapters`: adapters of some parts of it are copied
    into zeros of its width, an operation that keeps what it copies. `copies_heads`: queries lie head by head in memory,
    so does the kernel's result, which is copied to lie token by token. `eager_fp32`: attention's softmax is in fp32.
    `dropout`: the model's own, of attention's weights and of what each branch returns. `packs_experts`: a base in few
    bits has experts that lie in one tensor so, too, not only linear modules.
    """

    norm: Literal["python", "fp32", "fused", "recomputed"] = "python"
    layer_norm: Literal["native", "python"] = "native"
    gelu: Literal["library", "native", "python"] = "library"
    rope: Literal["python", "fused"] = "python"
    mlp: Literal["python", "fused", "recomputed"] = "python"
    adapter: Literal["python", "fused"] = "python"
    dora: bool = False
    keeps_frozen_inputs: bool = False
    repeats_kv: bool = False
    fuses_qkv: bool = False
    pads_adapters: bool = False
    copies_heads: bool = False
    eager_fp32: bool = True
    dropout: bool = False
    packs_experts: bool = False

    def packs(self, linear: Linear) -> bool:
        """Whether a base in few bits has this matrix so."""
        return linear.module or (self.packs_experts and linear.part == "expert")

    def compiled(self) -> Kernels:
        """Behind torch.compile. What lies between products is one kernel that computes what it needs again from what
        it was given. Inputs of products stay: a default partition never recomputes what backward would have to write
        to memory again."""
        return replace(
            self,
            norm="fused",
            layer_norm="native",
            gelu="native",
            rope="fused",
            mlp="recomputed",
            copies_heads=False,
        )


PYTHON_KERNELS: Final = Kernels()
"""As `transformers` writes them."""


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """What a program's sharding holds besides its share.

    `holds_frozen_inputs`: FSDP1 of torch 2.1 to 2.4 with frozen parameters and reentrant recompute keeps every block's
    input and that input's gradient until backward ends. `keeps_gathered`: FSDP1 of torch 2.0 and older never frees a
    gathered frozen block. `keeps_scales`: scales of a 4-bit base are no parameters, every card holds all of them.
    `replicates_adapters`: adapters beside a quantised base are left out of the sharding, every
    card holds all of them with gradients and states. `adapter_units`: FSDP1 makes each adapter this many units of its
    own, whose small gathers wait in the blocks' queue. `bucket_bytes` are buffers held all the time (DeepSpeed's live
    parameters, prefetch and reduce buckets).
    """

    holds_frozen_inputs: bool = False
    keeps_gathered: bool = False
    keeps_scales: bool = False
    replicates_adapters: bool = False
    bucket_bytes: float = 0.0
    adapter_units: int = 0


PLAIN_SHARDING: Final = Sharding()


@dataclass(frozen=True, kw_only=True)
class Program:
    """Facts of a program that trains. Bytes per trained parameter unless the name says otherwise.

    `gradient` of a weight that trains, None: of the weight's own format. `master` is a separate fp32 copy of 16-bit
    weights, `host_master` one that is kept only where the states live in RAM or on disk. `own_optimizers`: our
    own, whose chunks `optimizer_memory.py` counts; gradients leave for states in RAM as they come, and the head's is
    summed in fp32. `step_temporary` is what the
    optimizer step makes beside the states, in units of the trained weights (foreach AdamW: 1, fused kernels: 0),
    `step_gradient` bytes of an fp32 copy of the gradients there. `accumulates`: its recipes make a step of several
    micro-batches unless told otherwise.

    `autocast`: matrix products cast what they are given; `caches_casts`: 16-bit copies of all weights stay until
    forward ends. `adapter` is bytes of an adapter's weight. `unties_head`: the head is a matrix of its own even where
    the model ties it to the embedding.

    `logits` are bytes per token and vocabulary entry at the worst moment of the loss, by loss kind
    (`logits_in_compute`: of fp32 runs, half in 16 bits). Where only the head or the loss goes in chunks, `logits_kept`
    are those that all chunks keep. `logits_held` are those a variable keeps through backward. `keeps_last_loss`: the
    loss of the micro-batch before is in a variable until the next is there, with all that its graph holds and autograd
    does not free.

    `holds_output`: recompute holds the block's output while its backward runs (reentrant checkpoints); `input_grads`:
    the first block's input needs a gradient although nothing before it trains, so that such checkpoints work with
    adapters. `selective` recompute keeps the results of "every other product" and of attention, or all but what is
    inside "attention". `copies_buffers`: a step begins with a copy of the model's buffers, to put them back if memory
    runs out.

    `loss` is the one that is on unless told otherwise, `inputs_in_ram`: recompute keeps the blocks' inputs there,
    `methods` are those that the program has. These say what another program would make of a run; of a measured row its
    columns do (our own planner decides the first two for ours).

    `context_bytes`: what the driver takes on a card before the first tensor; `process_bytes`: interpreter and libraries
    in RAM.
    """

    name: str
    kernels: Kernels = PYTHON_KERNELS
    sharding: Sharding = PLAIN_SHARDING
    gradient: float | None = None
    master: float = 0.0
    host_master: float = 0.0
    own_optimizers: bool = False
    step_temporary: float = 1.0
    step_gradient: float = 0.0
    autocast: bool = True
    caches_casts: bool = False
    adapter: float = 4.0
    logits: Mapping[str, float] = field(default_factory=lambda: {"full": 12.0, "chunked": 0.0, "fused": 0.0})
    logits_in_compute: bool = False
    logits_kept: float = 0.0
    logits_held: float = 0.0
    keeps_last_loss: bool = False
    selective: Literal["every other product", "attention"] = "every other product"
    unties_head: bool = False
    accumulates: bool = False
    holds_output: bool = False
    input_grads: bool = False
    loss: Literal["full", "chunked", "fused"] = "full"
    inputs_in_ram: bool = False
    methods: tuple[Method, ...] = ("pretrain", "full", "lora", "qlora")
    copies_buffers: bool = False
    context_bytes: int = int(0.6 * GIB)
    process_bytes: int = int(0.55 * GIB)

    def __hash__(self) -> int:
        return hash(self.name)


OURS: Final = Program(
    name="vramfit",
    kernels=Kernels(packs_experts=True),
    host_master=4.0,
    own_optimizers=True,
    step_temporary=0.0,
    caches_casts=True,
    copies_buffers=True,
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

_FMS: Final = replace(_TRAINER, name="fms", sharding=Sharding(holds_frozen_inputs=True, adapter_units=2))
"""fms-acceleration's benchmarks: the Trainer with flash attention, torch 2.4.1, FSDP1, adapters fp32 under autocast."""

_FMS_QUANTISED: Final = Sharding(holds_frozen_inputs=True, replicates_adapters=True)

_FAST_KERNELS: Final = Kernels(norm="fused", rope="fused")
"""Its fast kernels: RMSNorm, rotary positions in place, cross-entropy in place of fp32 logits (4) with the shifted copy
(4), whose gradient is again 4 + 4."""

_FOAK: Final = replace(_FMS, name="fms/foak", kernels=_FAST_KERNELS, logits={"full": 8.0, "chunked": 8.0, "fused": 0.0})

_LITGPT: Final = Program(
    name="litgpt",
    kernels=Kernels(norm="fp32", repeats_kv=True, fuses_qkv=True, pads_adapters=True, copies_heads=True),
    autocast=False,
    adapter=2.0,
    # Whole head: fp32 logits 4 in a variable of the loop, the copy without the last position 4, log-softmax 4.
    logits={"full": 12.0, "chunked": 8.0, "fused": 0.0},
    # A head in chunks of 128 rows: every chunk goes to fp32 (4, the variable again) and its log-softmax stays (4). In
    # backward each of these becomes a gradient; all chunks' losses run before any head.
    logits_kept=8.0,
    logits_held=4.0,
    keeps_last_loss=True,
    unties_head=True,
    accumulates=True,
    loss="chunked",
)
"""LitGPT: Lightning Fabric in "bf16-true" (no autocast, adapters in bf16, every output converted to fp32), model and
fine-tuning scripts of its repository. One projection for q, k, v; keys and values expanded to all heads; RMSNorm wholly
in fp32; rotary results joined head by head; adapters of q and v written into zeros by index_copy, which keeps them."""

_LITGPT_OLD_FSDP: Final = replace(
    _LITGPT, name="litgpt/fsdp", sharding=Sharding(keeps_gathered=True), methods=("lora",)
)
"""Its tables with FSDP and adapters: torch 2.0, where frozen blocks are never sharded again."""

_THUNDER: Final = replace(
    _LITGPT,
    name="litgpt+thunder",
    kernels=replace(_LITGPT.kernels, pads_adapters=False),
    step_temporary=0.0,
    keeps_last_loss=False,
    accumulates=False,
    loss="full",
    methods=("pretrain", "full"),
)
"""lightning-thunder's benchmark_litgpt.py: the same model behind its compiler, fused AdamW, torch's cross-entropy."""

_TORCHTUNE: Final = Program(
    name="torchtune",
    kernels=Kernels(repeats_kv=True),
    step_temporary=0.0,
    autocast=False,
    adapter=2.0,
    # full: as everywhere, logits in fp32, log-softmax, gradients. chunked: eight chunks of 16-bit logits, each in fp32
    # while its loss is made (4) with its log-softmax (4).
    logits={"full": 12.0, "chunked": 8.0, "fused": 0.0},
    logits_kept=6.0,
    loss="chunked",
)
"""torchtune: pure bf16, fused AdamW, keys and values expanded, non-reentrant recompute. Its chunked cross-entropy keeps
the 16-bit logits of all chunks (2), and log-softmax (4) unless a compiler makes that again in backward."""

_TORCHTITAN: Final = Program(
    name="torchtitan",
    kernels=Kernels(norm="fused", repeats_kv=True),
    step_temporary=0.0,
    # 16-bit logits are freed before backward: log-softmax 4, its gradient 4, the logits' gradient 4
    logits={"full": 12.0, "chunked": 0.0, "fused": 0.0},
    methods=("pretrain", "full"),
)
"""torchtitan: FSDP2 with fp32 shards, fused AdamW, native RMSNorm; selective recompute keeps the result of every second
product and of attention (its list of operations)."""

_RASBT: Final = Program(
    name="rasbt",
    kernels=Kernels(layer_norm="python", gelu="python", dropout=True, eager_fp32=False),
    autocast=False,
    # Cross-entropy in the model's own format, in a function that returns the loss alone: in fp32 log-softmax 4,
    # gradient of the picked 4, of the logits 4; in bf16 half.
    logits={"full": 12.0, "chunked": 12.0, "fused": 0.0},
    logits_in_compute=True,
    methods=("pretrain", "full"),
)
"""The GPT-2 of "Build a Large Language Model (From Scratch)": LayerNorm and GELU from single operations, dropout after
each branch, everything in the model's format."""

_ANSWERAI: Final = replace(
    _TRAINER,
    name="answerai fsdp_qlora",
    autocast=False,
    adapter=2.0,
    # the script keeps the model's output in a variable through backward: the fp32 logits on top of the usual 12
    logits={"full": 16.0, "chunked": 16.0, "fused": 0.0},
    logits_held=4.0,
    sharding=Sharding(keeps_scales=True, adapter_units=2),
    holds_output=False,
    methods=("lora", "qlora"),
)
"""answer.ai's fsdp_qlora: pure bf16 with PEFT adapters in bf16, FSDP1, non-reentrant recompute (its inputs are
no leaves, so that sharding's hooks hold no gradient of them), torch 2.2."""

_PEFT: Final = replace(_TRAINER, name="peft", autocast=False, holds_output=False, methods=("lora", "qlora"))
"""PEFT's own comparison of methods: a loop of its own without autocast, the base in bf16 and adapters in fp32, so that
every adapted linear keeps an fp32 copy of its input."""

_COLOSSAL: Final = replace(
    _TRAINER,
    name="colossalchat",
    autocast=False,
    adapter=2.0,
    master=4.0,
    step_gradient=4.0,
    step_temporary=0.0,
    # the model's output, fp32 logits and all, stays in a variable through backward
    logits={"full": 16.0, "chunked": 16.0, "fused": 0.0},
    logits_held=4.0,
    methods=("full", "lora"),
)
"""ColossalChat: bf16 weights, HybridAdam on fp32 masters and moments, ZeRO-2 with buckets of 24 MB. The step casts this
card's share of the gradients to fp32 first."""

_DEEPSPEED: Final = replace(
    _TRAINER, name="deepspeed", autocast=False, master=4.0, step_gradient=4.0, step_temporary=0.0
)
"""DeepSpeed under the Trainer: 16-bit weights, fp32 masters and moments, fused Adam."""

_UNSLOTH: Final = replace(
    _TRAINER,
    name="unsloth",
    kernels=Kernels(norm="fused", rope="fused", mlp="fused", adapter="fused"),
    # cross-entropy is fused with the head, a chunk of rows at a time
    logits={"full": 8.0, "chunked": 8.0, "fused": 0.0},
    holds_output=False,
    loss="fused",
    inputs_in_ram=True,
)
"""Unsloth: triton kernels for norm, positions, gated product and adapters; block inputs wait in RAM."""

_QWEN: Final = replace(
    _TRAINER,
    name="qwen",
    # accelerate converts the model's 16-bit outputs to fp32 in a wrapper (4) beside the 16-bit ones (2) and their
    # shifted copy; cross-entropy under autocast 4, 4 and 4
    logits={"full": 18.0, "chunked": 18.0, "fused": 0.0},
)
"""Qwen-1's own script on the Trainer in bf16."""

_MEGATRON: Final = Program(
    name="megatron",
    kernels=Kernels(norm="fused", rope="fused", mlp="fused"),
    gradient=4.0,
    master=4.0,
    step_temporary=0.0,
    autocast=False,
    # fp32 logits 4, in place of which the softmax is written; its gradient in 16 bits 2
    logits={"full": 6.0, "chunked": 6.0, "fused": 0.0},
    selective="attention",
    methods=("pretrain", "full"),
)
"""Megatron-LM and NeMo: fused layers, fp32 main gradients and masters; selective recompute is of attention alone."""


PROGRAMS: Final[Mapping[str, Program]] = {
    "vramfit": OURS,
    "transformers": _TRAINER,
    "transformers+liger": replace(
        _TRAINER, name="transformers+liger", kernels=Kernels(norm="fused", rope="fused", mlp="fused"), loss="fused"
    ),
    "fms": _FMS,
    "fms/foak": _FOAK,
    "fms-quantised": replace(_FMS, name="fms-quantised", sharding=_FMS_QUANTISED, methods=("qlora",)),
    "fms/foak-quantised": replace(
        # 4-bit bases also get its fused adapters, which keep an input once and a dropped copy per projection
        _FOAK,
        name="fms/foak-quantised",
        sharding=_FMS_QUANTISED,
        kernels=replace(_FAST_KERNELS, adapter="fused"),
        methods=("qlora",),
    ),
    "litgpt": _LITGPT,
    # bitsandbytes 0.41 and 0.42, which it is pinned to
    "litgpt-quantised": replace(
        _LITGPT,
        name="litgpt-quantised",
        kernels=replace(_LITGPT.kernels, keeps_frozen_inputs=True),
        methods=("qlora",),
    ),
    "litgpt/fsdp": _LITGPT_OLD_FSDP,
    "litgpt+thunder": _THUNDER,
    "torchtune": _TORCHTUNE,
    "torchtune/compiled": replace(_TORCHTUNE, name="torchtune/compiled", logits_kept=2.0),
    "torchtitan": _TORCHTITAN,
    "rasbt": _RASBT,
    "rasbt/native": replace(
        _RASBT, name="rasbt/native", kernels=Kernels(gelu="native", dropout=True, eager_fp32=False)
    ),
    "answerai fsdp_qlora": _ANSWERAI,
    "peft": _PEFT,
    "peft/dora": replace(_PEFT, name="peft/dora", kernels=Kernels(dora=True)),
    "colossalchat": _COLOSSAL,
    "deepspeed": _DEEPSPEED,
    "unsloth": _UNSLOTH,
    "qwen": _QWEN,
    "qwen-fp16": replace(_QWEN, name="qwen-fp16", logits={"full": 8.0, "chunked": 8.0, "fused": 0.0}),
    "megatron": _MEGATRON,
}
"""By name. Which record a measured row belongs to is decided where rows are read (`bench/estimator_accuracy.py`)."""
