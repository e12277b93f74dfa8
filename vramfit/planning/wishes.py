"""What a person fixed about optimizer, attention and compiling, as fields of a plan; or why it cannot be honoured here.

A wish is never bent: what this device or this model cannot do is refused, with the setting that can be had instead.
"""

from __future__ import annotations

from typing import Any, Final

from vramfit.config import Precision, RunConfig
from vramfit.errors import ConfigError, Problem
from vramfit.hardware.devices import Device
from vramfit.models.architecture import Architecture
from vramfit.models.families import EAGER_ONLY
from vramfit.planning.plan import records_graphs, without_graphs

OPTIMIZER_BITS: Final = {"adamw": ("32", "8", "4"), "lion": ("32", "8")}
"""In how many bits an optimizer's states can be kept; those that are not named: 32."""


def refused(field: str, what: str, remedy: str) -> ConfigError:
    """A wish that cannot be honoured, as the form shows it."""
    return ConfigError([Problem(field=field, what=what, remedy=remedy)])


def wished(config: RunConfig, architecture: Architecture, device: Device, compute: Precision) -> dict[str, Any]:
    """Fields of a Plan. Raises ConfigError naming the wish that cannot be honoured and why."""
    return {
        **_optimizer(config, device),
        **_trained_format(config, compute),
        **_base_format(config),
        **_compiled(config, device),
        "attention": _attention(config, architecture, device, compute),
        "input_tier": _input_tier(config, device),
        "compress": trained_layers(config, architecture) if config.memory.activations == "compress" else 0,
        **_adapters(config, architecture),
        **_last_blocks(config, architecture),
    }


def trained_layers(config: RunConfig, architecture: Architecture) -> int:
    """How many of the model's blocks have a backward."""
    return config.train_last_blocks or architecture.layers


def _last_blocks(config: RunConfig, architecture: Architecture) -> dict[str, Any]:
    wish = config.train_last_blocks
    if wish is not None and wish > architecture.layers:
        raise refused(
            "train_last_blocks",
            f"train_last_blocks is {wish}, and {architecture.name} has {architecture.layers} blocks",
            f"Set it to {architecture.layers} or less, or leave it empty to train all weights.",
        )
    return {"last_blocks": wish or 0}


def _adapters(config: RunConfig, architecture: Architecture) -> dict[str, Any]:
    if not config.trains_adapter:
        return {}
    choice = config.adapter
    if choice.start in ("pissa", "olora") and config.method == "qlora":
        raise refused(
            "adapter.start",
            f"{choice.start} takes a part out of the base's weights, and what is left of a 4-bit base would be "
            "rounded anew: the adapter would fit no other copy of it",
            "Choose the method lora, or the start eva, orthogonal or usual.",
        )
    if choice.start == "orthogonal" and choice.rank % 2:
        raise refused(
            "adapter.start",
            f"The orthogonal start halves the rank, and {choice.rank} is odd",
            f"Set the rank to {choice.rank + 1}, or choose another start.",
        )
    if choice.experts:
        _check_experts(config, architecture)
    return {"dora": choice.variant == "dora", "lora_experts": choice.experts}


def _check_experts(config: RunConfig, architecture: Architecture) -> None:
    if architecture.experts is None:
        raise refused("adapter.experts", f"{architecture.name} has 0 experts", "Turn the adapters of experts off.")
    if config.adapter.variant == "dora":
        raise refused(
            "adapter.variant",
            "Experts lie in one tensor, which has no form of DoRA",
            "Choose lora or rslora, or turn the adapters of experts off.",
        )
    if config.adapter.start != "usual":
        raise refused(
            "adapter.start",
            f"Adapters of experts begin as usual, not as {config.adapter.start}",
            "Choose the start usual, or turn the adapters of experts off.",
        )


def _optimizer(config: RunConfig, device: Device) -> dict[str, Any]:
    wishes = config.memory
    kind = "adamw" if wishes.optimizer == "auto" else wishes.optimizer
    bits = "32" if wishes.optimizer_bits == "auto" else wishes.optimizer_bits
    possible = OPTIMIZER_BITS.get(kind, ("32",))
    if bits not in possible:
        raise refused(
            "memory.optimizer_bits",
            f"{kind} keeps its states in {' or '.join(possible)} bits, not in {bits}",
            f"Choose {' or '.join(possible)}, or the optimizer adamw.",
        )
    place = wishes.optimizer_place
    if place == "host" and device.kind == "cpu":
        raise refused(
            "memory.optimizer_place",
            "Without a card the optimizer's states are in RAM already",
            "Set the place of the optimizer's states to auto.",
        )
    if place == "paged" and (device.kind != "cuda" or bits == "4" or kind not in OPTIMIZER_BITS):
        what = f"{device.name} has none" if device.kind != "cuda" else f"{kind} in {bits} bits has none"
        raise refused(
            "memory.optimizer_place",
            f"Paged states need an NVIDIA or AMD card and adamw or lion in 32 or 8 bits; {what}",
            "Set the place of the optimizer's states to auto or host.",
        )
    in_backward = wishes.optimizer_step.startswith("in backward")
    if in_backward and place == "host":
        raise refused(
            "memory.optimizer_step",
            "A step in backward and states in RAM are not done together",
            "Leave one of the two to auto.",
        )
    two_passes = wishes.optimizer_step == "in backward" and config.schedule.max_grad_norm > 0
    return {
        "optimizer": kind,
        "optimizer_bits": int(bits),
        "optimizer_tier": "host" if place == "host" else "device",
        "optimizer_paged": place == "paged",
        "optimizer_in_backward": in_backward,
        "clip_passes": 2 if two_passes else 1,
    }


def _trained_format(config: RunConfig, compute: Precision) -> dict[str, Any]:
    if config.memory.trained_weights != "bf16":
        return {}
    if config.trains_adapter:
        raise refused(
            "memory.trained_weights",
            f"{config.method} trains adapters, which are small and stay in fp32",
            "Set the trained weights to auto.",
        )
    if compute != "bf16":
        raise refused(
            "memory.trained_weights",
            f"Weights in bf16 are computed with in bf16, and this run computes in {compute}",
            "Set the precision to bf16, or the trained weights to fp32.",
        )
    return {"trained_format": "bf16"}


def _base_format(config: RunConfig) -> dict[str, Any]:
    wish = config.memory.base_weights
    if wish != "auto" and config.method != "qlora":
        raise refused(
            "memory.base_weights",
            f"{config.method} has no base in few bits, so {wish} has nothing to be the format of",
            "Choose the method qlora, or set the base's weights to auto.",
        )
    return {}


def _compiled(config: RunConfig, device: Device) -> dict[str, Any]:
    mode = config.memory.compile
    if mode == "auto" or mode == "off":
        return {}
    if without_graphs(mode) is None and device.kind != "cuda":
        raise refused(
            "memory.compile",
            f"CUDA graphs need an NVIDIA card, and {device.name} is none",
            "Choose default, or auto.",
        )
    recorded = records_graphs(mode) and device.kind != "cuda"
    return {"compiled": True, "compile_mode": without_graphs(mode) if recorded else mode}


def _attention(config: RunConfig, architecture: Architecture, device: Device, compute: Precision) -> str:
    wish = config.memory.attention
    needs_eager = architecture.family in EAGER_ONLY
    if wish == "auto":
        return "eager" if needs_eager else "sdpa"
    if needs_eager and wish != "eager":
        raise refused(
            "memory.attention",
            f"{architecture.name} ({architecture.family}) has attention that {wish} has no kernel for",
            "Choose eager, or auto.",
        )
    if wish == "flash" and (device.kind != "cuda" or compute not in ("bf16", "fp16")):
        what = f"{device.name} is none" if device.kind != "cuda" else f"this run computes in {compute}"
        raise refused(
            "memory.attention",
            f"FlashAttention 2 needs an NVIDIA or AMD card and 16-bit numbers; {what}",
            "Choose sdpa: torch's own kernel is as fast on most cards.",
        )
    return wish


def _input_tier(config: RunConfig, device: Device) -> str:
    if config.memory.activations != "offload":
        return "device"
    if device.kind == "cpu":
        raise refused(
            "memory.activations",
            "Without a card the inputs of recomputed blocks are in RAM already",
            "Choose recompute, or auto.",
        )
    return "host"
