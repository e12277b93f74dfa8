"""What an engine can do: ours today, and all that is designed. The planner plans within one of them.

A run is planned within `ENGINE`. To say what a card could train, `DESIGNED` is planned too, and `missing` names what
this version cannot do yet, so that nothing is promised that does not start.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from vramfit.planning.plan import InputTier, Plan, ShardingKind, Tier


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Where an engine can put weights, optimizer states and the inputs of recomputed blocks, in how many bits it keeps
    states, how it shares a run among cards, and which optimizers and other features it has."""

    weights: tuple[Tier, ...]
    optimizer: tuple[Tier, ...]
    inputs: tuple[InputTier, ...]
    optimizer_bits: tuple[int, ...]
    sharding: tuple[ShardingKind, ...]
    optimizers: tuple[str, ...] = ("adamw",)
    features: frozenset[str] = frozenset()


FEATURES: Final = {
    "compress": "activations in 8 bits",
    "optimizer_in_backward": "a step in backward",
    "optimizer_paged": "paged optimizer states",
    "compiled": "compiled blocks",
    "bf16_weights": "trained weights in bf16",
    "dora": "DoRA",
    "lora_experts": "adapters on experts",
    "tf32": "tf32",
    "streamed_training": "streaming of weights that train",
    "streamed_start": "streaming from random weights",
}
"""What an engine may have beside the places and formats of its numbers, by name, and its words for "needs ..."."""

ENGINE: Final = Abilities(
    weights=("device", "host", "disk"),
    optimizer=("device", "host", "disk"),
    inputs=("device", "host", "disk"),
    optimizer_bits=(32, 8, 4),
    sharding=("none",),
    optimizers=("adamw", "adafactor", "lion", "muon", "sgd"),
    features=frozenset(
        {
            "compress",
            "tf32",
            "optimizer_in_backward",
            "optimizer_paged",
            "bf16_weights",
            "dora",
            "lora_experts",
            "compiled",
            "streamed_training",
            "streamed_start",
        }
    ),
)
"""The engine of this version."""

SEVERAL_CARDS: Final = dataclasses.replace(ENGINE, weights=("device",), sharding=("none", "ddp", "fsdp"))
"""The engine of this version, were it to share a run among cards: what all cards of a machine would do together."""

DESIGNED: Final = Abilities(
    weights=("device", "host", "disk"),
    optimizer=("device", "host", "disk"),
    inputs=("device", "host", "disk"),
    optimizer_bits=(32, 8, 4),
    sharding=("none", "ddp", "fsdp"),
    optimizers=("adamw", "adafactor", "lion", "muon", "sgd"),
    features=frozenset(FEATURES),
)
"""What the design holds."""


Untraced = Literal["several cards", "streams", "disk", "compiled"]


def untraced(plan: Plan) -> Untraced | None:
    """Why the engine's step cannot be traced for `plan` (`engine/trace.py`), None where it can: a trace follows torch's
    operations in one memory. It is not of several cards, of blocks that visit the device, of states in a file, nor of
    what a compiler fuses, which other kernels do than those a trace would see."""
    if plan.cards > 1:
        return "several cards"
    if plan.weights_tier != "device":
        return "streams"
    if plan.optimizer_tier == "disk":
        return "disk"
    return "compiled" if plan.compiled else None


def missing(plan: Plan, abilities: Abilities = ENGINE) -> tuple[str, ...]:
    """What of `plan` is beyond `abilities`, as words for "needs ...": empty when it can be run."""
    return tuple(_missing(plan, abilities))


def _missing(plan: Plan, abilities: Abilities) -> Iterator[str]:
    places = {"host": "in RAM", "disk": "on disk", "device": "on the device"}
    if plan.weights_tier not in abilities.weights:
        yield f"streaming from {'RAM' if plan.weights_tier == 'host' else 'disk'}"
    if plan.optimizer_tier not in abilities.optimizer:
        yield f"an optimizer {places[plan.optimizer_tier]}"
    if plan.input_tier not in abilities.inputs or (plan.input_tier == "disk" and plan.weights_tier == "device"):
        yield f"activations {places[plan.input_tier]}"
    if plan.optimizer_bits not in abilities.optimizer_bits:
        yield f"{plan.optimizer_bits}-bit optimizer states"
    if plan.sharding not in abilities.sharding:
        yield f"several cards ({plan.sharding.upper()})"
    if plan.optimizer not in abilities.optimizers:
        yield f"the optimizer {plan.optimizer}"
    asked = {name for name in FEATURES if getattr(plan, name, False)}
    asked |= {"bf16_weights"} if plan.trained_format == "bf16" and plan.weights_tier == "device" else set()
    if plan.weights_tier != "device" and not plan.lora_rank:
        asked |= {"streamed_training"} | ({"streamed_start"} if plan.method == "pretrain" else set())
    asked |= {"tf32"} if plan.compute == "tf32" else set()
    yield from (words for name, words in FEATURES.items() if name in asked - abilities.features)
