"""Streaming: exact, small, and what it costs.

    python bench/streaming.py [--json] [--only WORDS] [--large] [--scratch FOLDER]

Models have random weights, written block by block. Memory is limited from outside (`memory_limit.py`).
`--large` adds the 3 B in bf16 and the 7 B in 4 bits, each inside 2 GiB, and full training of a 1 B inside 3 GiB: 25 GB
of disk and, on two cores, half an hour. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(Path(__file__).parent))

from memory_limit import Ended, run_inside  # noqa: E402

GIB: Final = 2**30


@dataclass(frozen=True, kw_only=True)
class Shape:
    """A Llama, written in bf16 (or fp32)."""

    hidden: int
    inner: int
    layers: int
    heads: int
    key_heads: int
    words: int = 32_000
    stored: str = "bfloat16"

    @property
    def params(self) -> int:
        width = self.hidden // self.heads * self.key_heads
        block = 2 * self.hidden * (self.hidden + width) + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.layers * block + 2 * self.words * self.hidden + self.hidden


SHAPES: Final = {
    "small": Shape(hidden=256, inner=704, layers=6, heads=4, key_heads=2, words=2000, stored="float32"),
    "medium": Shape(hidden=1024, inner=2816, layers=8, heads=16, key_heads=8, words=8000, stored="float32"),
    "medium bf16": Shape(hidden=1024, inner=2816, layers=8, heads=16, key_heads=8, words=8000),
    "1B": Shape(hidden=2048, inner=5632, layers=22, heads=32, key_heads=4),
    "3B": Shape(hidden=3072, inner=8192, layers=28, heads=24, key_heads=8),
    "7B": Shape(hidden=4096, inner=11008, layers=32, heads=32, key_heads=32),
}


@dataclass(frozen=True, kw_only=True)
class Figure:
    name: str
    value: float | None
    unit: str
    goal: float | None
    met: bool | None
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What a side is to do. `limit_gib` of 0: no limit. `resident`: everything stays on the device."""

    folder: str
    method: str = "lora"
    resident: bool = False
    tier: str = "disk"
    stay: int = 0
    tokens: int = 256
    micro_batches: int = 2
    steps: int = 3
    limit_gib: float = 0.0
    rank: int = 8
    threads: int = 2


# --- models ----------------------------------------------------------------------------------------------------------


def write_model(shape: Shape, folder: Path) -> Path:
    """A folder in Hugging Face format with random weights; at no time more than a block of them in memory."""
    import torch
    from safetensors.torch import save_file

    if (folder / "model.safetensors.index.json").is_file():
        return folder
    folder.mkdir(parents=True, exist_ok=True)
    dtype = getattr(torch, shape.stored)
    pool = (torch.randn(2**22, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)
    where: dict[str, str] = {}

    def matrix(rows: int, columns: int) -> torch.Tensor:
        numbers = rows * columns
        return pool.repeat(-(-numbers // pool.numel()))[:numbers].view(rows, columns).clone()

    def put(name: str, tensors: dict[str, torch.Tensor]) -> None:
        save_file(tensors, folder / name, metadata={"format": "pt"})
        where.update(dict.fromkeys(tensors, name))

    hidden, width = shape.hidden, shape.hidden // shape.heads * shape.key_heads
    ones = torch.ones(hidden, dtype=dtype)
    table = {name: matrix(shape.words, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
    put("outside.safetensors", {**table, "model.norm.weight": ones.clone()})
    for layer in range(shape.layers):
        at = f"model.layers.{layer}."
        block = {
            "self_attn.q_proj": matrix(hidden, hidden),
            "self_attn.k_proj": matrix(width, hidden),
            "self_attn.v_proj": matrix(width, hidden),
            "self_attn.o_proj": matrix(hidden, hidden),
            "mlp.gate_proj": matrix(shape.inner, hidden),
            "mlp.up_proj": matrix(shape.inner, hidden),
            "mlp.down_proj": matrix(hidden, shape.inner),
            "input_layernorm": ones.clone(),
            "post_attention_layernorm": ones.clone(),
        }
        put(f"block-{layer:03d}.safetensors", {f"{at}{name}.weight": tensor for name, tensor in block.items()})
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "vocab_size": shape.words,
        "max_position_embeddings": 4096,
        "torch_dtype": shape.stored,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    index = {"metadata": {}, "weight_map": where}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    return folder


# --- one side, in a process of its own -------------------------------------------------------------------------------


def side(order: Order) -> dict[str, Any]:
    """Steps as ordered: losses, seconds, bytes moved, seconds waited, the most memory of the process's own."""
    import torch

    from vramfit.config import RunConfig
    from vramfit.data.batches import MicroBatch
    from vramfit.planning.plan import Plan
    from vramfit.training.opening import open_executor

    config = RunConfig.parse(
        {
            "method": order.method,
            "model": {"source": order.folder},
            "data": {"paths": ["none"]},
            "adapter": {"rank": order.rank},
        }
    )
    layers = json.loads((Path(order.folder) / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    plan = Plan(
        method=config.method,
        device="cpu",
        budget_bytes=int(order.limit_gib * GIB) or 2**40,
        compute="fp32",
        weight_format="nf4" if order.method == "qlora" else "fp32",
        weights_tier="device" if order.resident else order.tier,  # type: ignore[arg-type]
        optimizer_tier="device" if order.resident or order.method != "full" else order.tier,  # type: ignore[arg-type]
        resident_blocks=0 if order.resident else order.stay,
        max_length=order.tokens,
        micro_batch=1,
        accumulation=order.micro_batches,
        recompute=layers,
        loss="chunked",
        loss_chunk_tokens=64,
        lora_rank=0 if order.method == "full" else order.rank,
        lora_targets=() if order.method == "full" else ("all-linear",),
    )
    generator = torch.Generator().manual_seed(0)
    with tempfile.TemporaryDirectory(dir=Path(order.folder).parent) as scratch:
        folder = Path(scratch)
        executor = open_executor(
            config,
            _forecast(config, plan, order),
            cache=folder,
            folder=folder,
            start_file=folder / "start.safetensors",
            resumed=False,
        )
        losses, seconds, waited, moved, written = [], [], [], [], []
        for _ in range(order.steps):
            batches = []
            for _ in range(order.micro_batches):
                ids = torch.randint(3, 1000, (1, order.tokens), generator=generator)
                batches.append(
                    MicroBatch(
                        input_ids=ids,
                        labels=ids.clone(),
                        attention_mask=None,
                        position_ids=None,
                        rows=(0,),
                        trained_tokens=order.tokens - 1,
                    )
                )
            before = _traffic(executor)
            began = time.perf_counter()
            result = executor.step(batches, 1e-3)
            losses.append(result.loss)
            seconds.append(time.perf_counter() - began)
            written.append(result.waits.written_bytes if result.waits else 0)
            after = _traffic(executor)
            moved.append(after[0] - before[0])
            waited.append(after[1] - before[1])
    return {
        "losses": losses,
        "seconds": seconds,
        "moved": moved,
        "waited": waited,
        "written": written,
    }


def _forecast(config: Any, plan: Any, order: Order) -> Any:
    from vramfit.hardware.devices import probe
    from vramfit.models.load import read_architecture
    from vramfit.planning.memory import estimate_memory
    from vramfit.planning.plan import Forecast, Workload
    from vramfit.planning.speed import estimate_speed

    work = Workload(sequences=1000, mean_tokens=order.tokens, longest_tokens=order.tokens, exact=True)
    architecture, device = read_architecture(config.model), probe(Path(order.folder)).device("cpu")
    speed = estimate_speed(architecture, plan, device, work, sequences_per_step=order.micro_batches)
    memory = estimate_memory(architecture, plan, work)
    return Forecast(plan=plan, memory=memory, speed=speed, workload=work, steps=order.steps, seconds=0.0)


def _traffic(executor: Any) -> tuple[int, float]:
    visits = getattr(executor, "visits", None)
    return (visits.stream.traffic.moved_bytes, visits.stream.traffic.waited_seconds) if visits else (0, 0.0)


_FEW_HEAPS: Final = {"MALLOC_ARENA_MAX": "2", "TOKENIZERS_PARALLELISM": "false"}
"""Each heap of malloc reserves 64 MiB of the limit for a thread that may never fill it."""


def ended(order: Order) -> Ended:
    """A side in a process of its own, inside its limit."""
    environment = {**os.environ, **_FEW_HEAPS, "OMP_NUM_THREADS": str(order.threads)}
    command = [sys.executable, __file__, "--side", json.dumps(asdict(order))]
    return run_inside(command, limit_bytes=int(order.limit_gib * GIB), environment=environment)


def answer_of(side: Ended) -> dict[str, Any] | str:
    """What a side found, or the last line of why there is none."""
    lines = [line for line in side.out.splitlines() if line.startswith("{")]
    if side.code == 0 and lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    return side.last_words


def run(order: Order) -> dict[str, Any] | str:
    return answer_of(ended(order))


# --- figures ---------------------------------------------------------------------------------------------------------


def exact(scratch: Path) -> list[Figure]:
    """Losses of resident and streamed runs, bit for bit."""
    folder = str(write_model(SHAPES["small"], scratch / "small"))
    figures = []
    for method in ("lora", "qlora", "full"):
        one = run(Order(folder=folder, method=method, resident=True))
        other = run(Order(folder=folder, method=method))
        same = isinstance(one, dict) and isinstance(other, dict) and one["losses"] == other["losses"]
        figures.append(
            Figure(name=f"bit-equal losses, {method}", value=float(same), unit="yes or no", goal=1.0, met=same)
        )
    return figures


def overhead(scratch: Path, pairs: int = 3) -> Iterator[Figure]:
    """Seconds of a streamed step over a resident one with the same recompute, 512 tokens a block visit, in turns."""
    for name, method, tier in (
        ("medium", "lora", "disk"),
        ("medium bf16", "lora", "disk"),
        ("medium", "full", "host"),
        ("medium", "full", "disk"),
    ):
        folder = str(write_model(SHAPES[name], scratch / name.replace(" ", "-")))
        ratios, waits = [], []
        for _ in range(pairs):
            one, other = (
                run(Order(folder=folder, method=method, resident=there, tier=tier, tokens=256, steps=4))
                for there in (True, False)
            )
            if isinstance(one, str) or isinstance(other, str):
                note = f"{one} {other}"
                yield Figure(name="streamed over resident", value=None, unit="", goal=1.1, met=False, note=note)
                return
            ratios.append(statistics.median(other["seconds"][2:]) / statistics.median(one["seconds"][2:]))
            waits.append(sum(other["waited"][2:]) / sum(other["seconds"][2:]))
        ratio, wait = statistics.median(ratios), statistics.median(waits)
        what = f"{name} {method}, " + ("everything in RAM" if tier == "host" else "everything on disk")
        note = ", ".join(f"{each:.2f}" for each in ratios)
        name = f"streamed over resident, {what}"
        yield Figure(name=name, value=ratio, unit="x", goal=1.1, met=ratio <= 1.1, note=note)
        name = f"wait for the tier, {what}"
        yield Figure(name=name, value=wait, unit="share", goal=0.05, met=wait < 0.05)


def inside(name: str, method: str, limit_gib: float, scratch: Path, *, resident_fails: bool) -> Iterator[Figure]:
    """Steps inside a hard limit, by the most memory seen; and that a resident run lacks memory inside it."""
    shape = SHAPES[name]
    folder = write_model(shape, scratch / name)
    order = Order(folder=str(folder), method=method, limit_gib=limit_gib, tokens=128, steps=2)
    yield inside_figure(f"{name} {method}", ended(order), shape.params)
    if resident_fails:
        there = ended(replace(order, steps=1, resident=True))
        yield Figure(
            name=f"{name} {method} resident lacks memory inside {limit_gib:g} GiB",
            value=float(there.lacked_memory),
            unit="yes or no",
            goal=1.0,
            met=there.lacked_memory,
            note=there.last_words if there.code else "it went to its end",
        )


def inside_figure(name: str, side: Ended, params: int) -> Figure:
    """The most memory of a side against its limit, in GiB; met where it went to its end inside it."""
    answer, limit_gib = answer_of(side), side.limit_bytes / GIB
    note = (
        f"{params / 1e9:.2f} B; {answer['seconds'][-1]:.0f} s a step of 2 x 128 tokens, resident set at most "
        f"{side.resident_bytes / GIB:.2f} GiB, {answer['written'][-1] / GIB:.1f} GiB written a step"
        if isinstance(answer, dict)
        else answer
    )
    return Figure(
        name=f"{name} inside {limit_gib:g} GiB",
        value=side.own_bytes / GIB,
        unit="GiB",
        goal=limit_gib,
        met=side.held and isinstance(answer, dict),
        note=note,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--scratch", type=Path, default=None)
    parser.add_argument("--side", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        from vramfit.engine.threads import let_threads_sleep

        let_threads_sleep()  # before torch is imported
        print(json.dumps(side(Order(**json.loads(options.side)))))
        return
    scratch = options.scratch or Path(tempfile.mkdtemp(prefix="vramfit-streaming-"))
    works: dict[str, Callable[[], Iterable[Figure]]] = {
        "exact": lambda: exact(scratch),
        "overhead": lambda: overhead(scratch),
        "medium": lambda: inside("medium bf16", "lora", 0.9, scratch, resident_fails=True),
    }
    if options.large:
        works["3B"] = lambda: inside("3B", "lora", 2.0, scratch, resident_fails=True)
        works["1B"] = lambda: inside("1B", "full", 3.0, scratch, resident_fails=True)
        works["7B"] = lambda: inside("7B", "qlora", 2.0, scratch, resident_fails=False)
    figures = []
    try:
        for name, work in works.items():
            if options.only not in name:
                continue
            for figure in work():
                figures.append(figure)
                if not options.json:
                    value = "-" if figure.value is None else f"{figure.value:.3g}"
                    print(
                        f"{figure.name:<46}{value:>8} {figure.unit:<10} goal {figure.goal}  {figure.note}", flush=True
                    )
    finally:
        if options.scratch is None:
            shutil.rmtree(scratch, ignore_errors=True)
    if options.json:
        print(json.dumps([asdict(figure) for figure in figures], indent=1))


if __name__ == "__main__":
    main()
