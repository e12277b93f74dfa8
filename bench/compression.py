"""What compressed activations save, cost and change: python bench/compression.py [--only NAME] [--json]

One micro-batch of real text through real models, every block kept against every block compressed. Bytes are what lies
there between forward and backward more than before, by torch's CPU allocator; gradients are of all trained weights.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
from torch import Tensor, nn

from vramfit.config import Precision
from vramfit.engine.activations import find_blocks, set_activations
from vramfit.engine.compression import Codec
from vramfit.engine.loss import Targets, TokenLoss, targets_of
from vramfit.engine.peak import PeakMeter  # noqa: F401 - tells the profiler's library to be quiet
from vramfit.engine.precision import autocast

ROOT = Path(__file__).parent.parent
SMOLLM2 = ROOT / ".cache" / "smollm2-135m-instruct"
TEXT = ROOT / "docs" / "architecture.md"
CPU = torch.device("cpu")


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Kept bytes of all blocks and seconds of forward and backward with blocks kept and compressed; the cosine between
    both gradients, and how far apart they are, relative."""

    name: str
    codec: Codec
    kept_bytes: int
    compressed_bytes: int
    cosine: float
    difference: float
    kept_seconds: float
    compressed_seconds: float

    @property
    def share(self) -> float:
        return self.compressed_bytes / self.kept_bytes


@dataclass(frozen=True)
class Text:
    """Some rows of a text, every token of which is trained."""

    input_ids: Tensor
    labels: Tensor
    attention_mask: None = None
    position_ids: None = None
    weights: None = None


def cases() -> Iterator[tuple[str, nn.Module, Text, Precision]]:
    """(name, model, batch, compute)"""
    starter, words = _starter()
    yield "starter, all weights, fp32", starter, words, "fp32"
    few = Text(words.input_ids[:1, :64], words.labels[:1, :64])
    yield "starter, all weights, bf16", starter, few, "bf16"
    if not SMOLLM2.is_dir():
        return
    for adapters in (False, True):
        model, words = _smollm2(adapters=adapters)
        yield f"SmolLM2-135M, {'LoRA' if adapters else 'all weights'}, fp32", model, words, "fp32"
    model, words = _smollm2(adapters=True, dtype=torch.bfloat16)
    yield "SmolLM2-135M, LoRA, bf16", model, Text(words.input_ids[:, :32], words.labels[:, :32]), "bf16"


def _starter() -> tuple[nn.Module, Text]:
    from vramfit.models.load import build_starter

    torch.manual_seed(0)
    model: Any = build_starter()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(model.config.vocab_size, (4, 256), generator=generator)
    return model, Text(ids, ids.clone())


def _smollm2(*, adapters: bool, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Text]:
    import transformers

    from vramfit.models.adapters import attach_adapters
    from vramfit.models.load import quiet_transformers

    quiet_transformers()
    tokenizer = transformers.AutoTokenizer.from_pretrained(SMOLLM2)
    ids = torch.tensor(tokenizer(TEXT.read_text(encoding="utf-8"))["input_ids"][:512]).view(2, 256)
    model: nn.Module = transformers.AutoModelForCausalLM.from_pretrained(SMOLLM2, dtype=dtype)
    if adapters:
        model = attach_adapters(model, rank=16, alpha=32, seed=0)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:  # 0 at first, so that A would have no gradient
                nn.init.normal_(parameter, std=0.02)
    return model, Text(ids, ids.clone())


def compare(name: str, model: nn.Module, text: Text, compute: Precision, codec: Codec) -> Compared:
    """One row of the table."""
    model.train()
    loss = TokenLoss(model, device=torch.device("cpu"), kind="chunked", compute=compute)
    targets = targets_of(text)
    blocks = len(find_blocks(model))
    set_activations(model, [])
    kept, kept_seconds, wanted = _measured(model, loss, text, targets, compute)
    set_activations(model, ["compress"] * blocks, codec=codec)
    compressed, compressed_seconds, found = _measured(model, loss, text, targets, compute)
    set_activations(model, [])
    return Compared(
        name=name,
        codec=codec,
        kept_bytes=kept,
        compressed_bytes=compressed,
        cosine=float(found @ wanted / (found.norm() * wanted.norm())),
        difference=float((found - wanted).norm() / wanted.norm()),
        kept_seconds=kept_seconds,
        compressed_seconds=compressed_seconds,
    )


def _measured(
    model: nn.Module, loss: TokenLoss, text: Text, targets: Targets, compute: Precision
) -> tuple[int, float, Tensor]:
    """(bytes the blocks keep, seconds, gradients of all trained weights in one fp64 vector)"""
    model.zero_grad()
    decoder: Any = loss._decoder
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile,
        autocast(CPU, compute),
    ):
        hidden = decoder(input_ids=text.input_ids, use_cache=False)
    events: Any = profile.profiler.kineto_results.events()
    kept = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del hidden
    began = time.perf_counter()
    with autocast(CPU, compute):
        total = loss({"input_ids": text.input_ids}, targets)
    (total / targets.count).backward()  # type: ignore[no-untyped-call]
    seconds = time.perf_counter() - began
    gradients = [value.grad.double().flatten() for value in model.parameters() if value.grad is not None]
    return kept, seconds, torch.cat(gradients)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    rows = []
    for name, model, text, compute in cases():
        if options.only not in name:
            continue
        for codec in ("int8", "fp8"):
            row = compare(name, model, text, compute, codec)
            rows.append({**asdict(row), "share": row.share})
            if not options.json:
                print(
                    f"{row.name:<34}{row.codec:<6}{row.kept_bytes / 2**20:8.1f} -> {row.compressed_bytes / 2**20:7.1f} "
                    f"MiB ({row.share:.3f})  cosine {row.cosine:.6f}  off by {row.difference:.4f}  "
                    f"{row.kept_seconds:.2f} -> {row.compressed_seconds:.2f} s",
                    flush=True,
                )
    if options.json:
        print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
