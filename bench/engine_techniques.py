"""The engine's techniques, one entry each: what is asked for with it and without it, on which work.

`engine.py` runs both, in turns, and prints memory and speed. To add a technique, add an entry.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from dataclasses import dataclass, field
from typing import Any, Final, Literal, get_args

from engine_works import Work

Option = Literal[
    "memory",
    "sections",
    "plan",
    "packing",
    "projects_all",
    "keeps_memory",
    "codec",
    "head_parts",
    "calibrate_every",
    "runs_out",
]
"""What a side may be asked for: "memory" are wishes of a RunConfig, "sections" its other parts, "plan" fields of its
Plan; "codec" is the format of compressed activations, "head_parts" how many parts the head is cut into,
"calibrate_every" after how many steps one is compared with fp32, and with "runs_out" memory runs out in each."""

OPTIONS: Final = frozenset(get_args(Option))


@dataclass(frozen=True, kw_only=True)
class Technique:
    """`with_` and `without` are a side's options (see `Option`); `shape` changes the work's config.json for both.

    `same_loss` is how far the losses of the first steps may lie apart (relative); None where the technique changes the
    numbers by design. `needs` names what it cannot do without: "card", "cpu", a format of numbers, or a package.
    `steps` are taken in each turn, where what it costs is not in every step. `tells_start`: what it costs is before the
    first step.
    """

    name: str
    work: Literal["full", "lora"] = "full"
    with_: dict[str, Any] = field(default_factory=dict)
    without: dict[str, Any] = field(default_factory=dict)
    same_loss: float | None = 1e-5
    needs: tuple[str, ...] = ()
    compute: str = ""
    shape: dict[str, Any] = field(default_factory=dict)
    steps: int = 1
    tells_start: bool = False

    def work_of(self, full: Work, lora: Work) -> Work:
        work = full if self.work == "full" else lora
        return dataclasses.replace(work, shape={**(work.shape or {}), **self.shape}) if self.shape else work

    def lacking(self, device: str) -> str:
        """Why it cannot be measured on `device`, in words; "" where it can."""
        return next(filter(None, (_why_not(need, device) for need in self.needs)), "")


def _why_not(need: str, device: str) -> str:
    if need == "card":
        return "needs a card" if device == "cpu" else ""
    if need == "cpu":
        return "of the CPU alone" if device != "cpu" else ""
    if need in ("fp16", "tf32"):
        from vramfit.engine.accelerators import has_hardware

        return "" if has_hardware(device, need) else f"this {device} has no units for {need}"
    return "" if importlib.util.find_spec(need) else f"{need} is not installed"


def _wish(**memory: Any) -> dict[str, Any]:
    return {"memory": memory}


def _adapter(**choice: Any) -> dict[str, Any]:
    return {"sections": {"adapter": choice}}


def _loss(**choice: Any) -> dict[str, Any]:
    return {**_WHOLE, "sections": {"loss": choice}}


_WHOLE: Final = _wish(activations="keep")
_GEMMA: Final = {
    "architectures": ["Gemma2ForCausalLM"],
    "model_type": "gemma2",
    "head_dim": 64,
    "final_logit_softcapping": 30.0,
    "attn_logit_softcapping": None,
}

TECHNIQUES: Final = (
    Technique(name="accumulation: 2 rows at a time", with_=_wish(micro_batch=2), without=_WHOLE),
    Technique(name="loss in chunks", with_=_WHOLE, without=_wish(activations="keep", loss="full")),
    Technique(name="fused loss", with_=_wish(activations="keep", loss="fused"), without=_WHOLE),
    Technique(name="z-loss", with_=_loss(z_loss=1e-4), without=_WHOLE, same_loss=None),
    Technique(name="label smoothing", with_=_loss(label_smoothing=0.1), without=_WHOLE, same_loss=None),
    Technique(
        name="soft-capped head, in chunks", with_=_WHOLE, without=_wish(activations="keep", loss="full"), shape=_GEMMA
    ),
    Technique(
        name="head in 4 parts",
        with_={**_WHOLE, "head_parts": 4},
        without=_WHOLE,
        shape={"tie_word_embeddings": False},
    ),
    Technique(name="head on trained tokens alone", work="lora", without={"projects_all": True}),
    Technique(name="packing", work="lora", with_={"packing": True}),
    Technique(name="recompute, all blocks", with_=_wish(activations="recompute"), without=_WHOLE),
    Technique(name="compress, all blocks", with_=_wish(activations="compress"), without=_WHOLE, same_loss=1e-3),
    Technique(
        name="compress in fp8, all blocks",
        with_={**_wish(activations="compress"), "codec": "fp8"},
        without=_WHOLE,
        same_loss=1e-3,
    ),
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
    Technique(name="SGD", with_=_wish(optimizer="sgd"), without=_WHOLE, same_loss=None),
    Technique(
        name="weights in bf16, rounded by chance",
        with_=_wish(trained_weights="bf16"),
        without=_WHOLE,
        same_loss=1e-2,
        compute="bf16",
    ),
    Technique(name="bf16 autocast", with_=_wish(precision="bf16"), without=_wish(precision="fp32"), same_loss=1e-2),
    Technique(
        name="fp16 autocast, loss scaled",
        with_=_wish(precision="fp16"),
        without=_wish(precision="fp32"),
        same_loss=1e-2,
        needs=("fp16",),
    ),
    Technique(
        name="tf32 products",
        with_=_wish(precision="tf32"),
        without=_wish(precision="fp32"),
        same_loss=1e-2,
        needs=("tf32",),
    ),
    Technique(
        name="one step in 10 compared with fp32",
        with_={**_WHOLE, "calibrate_every": 10},
        without=_WHOLE,
        same_loss=0.0,
        compute="bf16",
        steps=10,
    ),
    Technique(name="memory runs out: replay in halves", with_={**_WHOLE, "runs_out": True}, without=_WHOLE),
    Technique(
        name="4-bit base (QLoRA)",
        work="lora",
        with_={"sections": {"method": "qlora"}},
        same_loss=None,
        needs=("bitsandbytes",),
    ),
    Technique(name="rsLoRA", work="lora", with_=_adapter(variant="rslora"), same_loss=None),
    Technique(name="DoRA", work="lora", with_=_adapter(variant="dora"), same_loss=None),
    Technique(name="PiSSA start", work="lora", with_=_adapter(start="pissa"), same_loss=None, tells_start=True),
    Technique(name="EVA start", work="lora", with_=_adapter(start="eva"), same_loss=None, tells_start=True),
    Technique(name="freed memory kept", without={"keeps_memory": False}, same_loss=0.0, needs=("cpu",)),
    Technique(name="compiled blocks", with_=_wish(compile="default"), without=_wish(compile="off"), same_loss=1e-4),
    Technique(
        name="compiled blocks, reduce-overhead",
        with_=_wish(compile="reduce-overhead"),
        without=_wish(compile="off"),
        same_loss=1e-4,
        needs=("card",),
    ),
    Technique(
        name="compiled blocks, max-autotune",
        with_=_wish(compile="max-autotune"),
        without=_wish(compile="off"),
        same_loss=1e-4,
        needs=("card",),
    ),
)
