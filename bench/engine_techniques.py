"""The engine's techniques, one entry each: what is asked for with it and without it, on which work.

`engine.py` runs both, in turns, and prints memory and speed. To add a technique, add an entry.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final, Literal


@dataclass(frozen=True, kw_only=True)
class Technique:
    """`with_` and `without` are a side's options: "memory" are wishes of a RunConfig, "plan" fields of its Plan.

    `same_loss` is how far the losses of the first steps may lie apart (relative); None where the technique changes the
    numbers by design. `needs` names what it cannot do without: "card", or a package.
    """

    name: str
    work: Literal["full", "lora"] = "full"
    with_: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] = field(default_factory=dict)
    same_loss: float | None = 1e-5
    needs: tuple[str, ...] = ()
    compute: str = ""


def _wish(**memory: Any) -> dict[str, Any]:
    return {"memory": memory}


_WHOLE: Final = _wish(activations="keep")

TECHNIQUES: Final = (
    Technique(name="accumulation: 2 rows at a time", with_=_wish(micro_batch=2), without=_WHOLE),
    Technique(name="loss in chunks", with_=_WHOLE, without=_wish(activations="keep", loss="full")),
    Technique(name="fused loss", with_=_wish(activations="keep", loss="fused"), without=_WHOLE),
    Technique(name="head on trained tokens alone", work="lora", without={"projects_all": True}),
    Technique(name="packing", work="lora", with_={"packing": True}),
    Technique(name="recompute, all blocks", with_=_wish(activations="recompute"), without=_WHOLE),
    Technique(name="compress, all blocks", with_=_wish(activations="compress"), without=_WHOLE, same_loss=1e-3),
    Technique(
        name="recompute, inputs in RAM",
        with_=_wish(activations="offload"),
        without=_wish(activations="recompute"),
        needs=("card",),
    ),
    Technique(name="step in backward, two passes", with_=_wish(optimizer_step="in backward"), without=_WHOLE),
    Technique(
        name="step in backward, one pass",
        with_=_wish(optimizer_step="in backward, one pass"),
        without=_WHOLE,
        same_loss=None,
    ),
    Technique(name="AdamW states in 8 bits", with_=_wish(optimizer_bits="8"), without=_WHOLE, same_loss=1e-3),
    Technique(name="AdamW states in 4 bits", with_=_wish(optimizer_bits="4"), without=_WHOLE, same_loss=1e-3),
    Technique(name="states in RAM", with_=_wish(optimizer_place="host"), without=_WHOLE, needs=("card",)),
    Technique(
        name="paged states", with_=_wish(optimizer_place="paged"), without=_WHOLE, needs=("card", "bitsandbytes")
    ),
    Technique(name="Adafactor", with_=_wish(optimizer="adafactor"), without=_WHOLE, same_loss=None),
    Technique(name="Lion", with_=_wish(optimizer="lion"), without=_WHOLE, same_loss=None),
    Technique(name="Muon", with_=_wish(optimizer="muon"), without=_WHOLE, same_loss=None),
    Technique(
        name="weights in bf16, rounded by chance",
        with_=_wish(trained_weights="bf16"),
        without=_WHOLE,
        same_loss=1e-2,
        compute="bf16",
    ),
    Technique(name="bf16 autocast", with_=_wish(precision="bf16"), without=_wish(precision="fp32"), same_loss=1e-2),
    Technique(
        name="4-bit base (QLoRA)",
        work="lora",
        with_={"sections": {"method": "qlora"}},
        same_loss=None,
        needs=("bitsandbytes",),
    ),
    Technique(name="DoRA", work="lora", with_={"sections": {"adapter": {"variant": "dora"}}}, same_loss=None),
    Technique(name="freed memory kept", without={"keeps_memory": False}, same_loss=0.0, needs=("cpu",)),
    Technique(name="compiled blocks", with_=_wish(compile="default"), without=_wish(compile="off"), same_loss=1e-4),
)
