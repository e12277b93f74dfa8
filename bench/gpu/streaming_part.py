"""Streaming on a card: the bits of resident runs, a 4-bit 70 B under a cap of 21 GiB, all weights of a 3 B.

The 70 B's numbers are random 4-bit codes put straight into RAM: it would be 140 GB of files. The full run is of a 3 B,
not a 7 B, whose weights, copies, states and gradients take 112 GB of RAM: more than most machines have beside all else.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any, Final

import torch
from streaming import SHAPES, Shape, write_model

from vramfit.config import RunConfig, ScheduleChoice
from vramfit.data.batches import MicroBatch
from vramfit.engine.accelerators import empty_cache, peak_of, reset_peak, synchronize
from vramfit.engine.activations import find_blocks
from vramfit.engine.blocks import BlockStream, Layout
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.streaming import StreamingExecutor
from vramfit.engine.tiers import RamTier
from vramfit.engine.visiting import VisitedBlocks
from vramfit.hardware.devices import probe
from vramfit.models.adapters import attach_adapters
from vramfit.models.architecture import from_config
from vramfit.models.hollow import hollow_model
from vramfit.models.quantised import make_quantised, tensors_of
from vramfit.planning.plan import Plan, Workload
from vramfit.planning.speed import estimate_speed
from vramfit.training.opening import open_executor

GIB: Final = 2**30
CAP_GIB: Final = 21.0
LLAMA_70B: Final = Shape(hidden=8192, inner=28672, layers=80, heads=64, key_heads=8, words=128_256)
TINY: Final = Shape(hidden=64, inner=128, layers=4, heads=4, key_heads=2, words=512)


def batches(count: int, tokens: int, words: int = 500) -> list[MicroBatch]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for _ in range(count):
        ids = torch.randint(3, words, (1, tokens), generator=generator)
        found.append(
            MicroBatch(
                input_ids=ids,
                labels=ids.clone(),
                attention_mask=None,
                position_ids=None,
                rows=(0,),
                trained_tokens=tokens - 1,
            )
        )
    return found


def plan_of(
    device: torch.device, method: str, compute: str, *, micro_batches: int, tokens: int, **changes: Any
) -> Plan:
    full = method == "full"
    values: dict[str, Any] = {
        "method": method,
        "device": str(device),
        "budget_bytes": 2**40,
        "compute": compute,
        "weight_format": "nf4" if method == "qlora" else compute,
        "trained_format": compute if full else "fp32",
        "optimizer_tier": "host" if full else "device",
        "weights_tier": "host",
        "max_length": tokens,
        "micro_batch": 1,
        "accumulation": micro_batches,
        "recompute": 10_000,
        "loss": "chunked",
        "loss_chunk_tokens": 512,
        "lora_rank": 0 if full else 16,
        "lora_targets": () if full else ("all-linear",),
    }
    return Plan(**{**values, **changes})


def opened(folder: Path, plan: Plan) -> Any:
    """The executor of a plan for a model's folder."""
    config = RunConfig.parse(
        {"method": plan.method, "model": {"source": str(folder)}, "data": {"paths": ["none"]}, "adapter": {"rank": 16}}
    )
    layers = json.loads((folder / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"]
    plan = dataclasses.replace(plan, recompute=layers)
    return open_executor(
        config,
        _Plans(plan),  # type: ignore[arg-type]
        cache=folder,
        folder=folder,
        start_file=folder / "start",
        resumed=False,
    )


@dataclasses.dataclass(frozen=True)
class _Memory:
    """As much of an estimate as opening asks for: there is room."""

    device_bytes: int = 0


@dataclasses.dataclass(frozen=True)
class _Plans:
    """As much of a forecast as opening asks for."""

    plan: Plan
    memory: _Memory = _Memory()
    seconds: float = 0.0


def equality(device: torch.device, compute: str, scratch: Path) -> list[dict[str, Any]]:
    """Losses and gradient norms of three steps, streamed and resident."""
    folder = write_model(dataclasses.replace(TINY, stored="float32"), scratch / "tiny")
    found = []
    for method in ("lora", "full"):
        here = plan_of(device, method, compute, micro_batches=2, tokens=32, loss_chunk_tokens=16)
        there = dataclasses.replace(here, weights_tier="device")
        sides = [opened(folder, plan) for plan in (there, here)]
        steps = [[side.step(batches(2, 32), 1e-3) for _ in range(3)] for side in sides]
        pairs = [(one.loss, one.grad_norm, other.loss, other.grad_norm) for one, other in zip(*steps, strict=True)]
        apart = max(max(abs(a - c) / abs(a), abs(b - d) / abs(b)) for a, b, c, d in pairs)
        found.append({"name": f"streamed as resident, {method}", "apart": apart, "ok": apart < 1e-3})
    return found


def in_parts(device: torch.device, compute: str, scratch: Path) -> list[dict[str, Any]]:
    """Three steps of a small mixture: its blocks whole, their experts some at a time, and several blocks at once."""
    folder = _small_mixture(scratch / "mixture")
    found = []
    for method in ("lora", "qlora"):
        whole = plan_of(device, method, compute, micro_batches=2, tokens=32, loss_chunk_tokens=16)
        plans = {slot: dataclasses.replace(whole, slot_bytes=slot) for slot in (0, 20_000, 2**22)}
        sides = {slot: opened(folder, plan) for slot, plan in plans.items()}
        steps = {slot: [side.step(batches(2, 32), 1e-3) for _ in range(3)] for slot, side in sides.items()}
        for slot, name in ((20_000, "experts some at a time"), (2**22, "blocks together")):
            pairs = [(a.loss, b.loss, a.grad_norm, b.grad_norm) for a, b in zip(steps[0], steps[slot], strict=True)]
            apart = max(max(abs(a - b) / abs(a), abs(c - d) / abs(c)) for a, b, c, d in pairs)
            cut, groups = len(sides[slot].visits.split), len(set(sides[slot].visits.stream._group_of.values()))
            as_meant = cut == 4 if slot == 20_000 else (cut == 0 and groups == 1)
            found.append({"name": f"{name}, {method}", "apart": apart, "ok": as_meant and apart < 5e-3})
    return found


def _small_mixture(folder: Path) -> Path:
    """Four blocks of eight experts, random, in fp32."""
    import transformers

    torch.manual_seed(1)
    shape = transformers.AutoConfig.for_model(
        "mixtral",
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=512,
        num_local_experts=8,
        num_experts_per_tok=3,
        max_position_embeddings=64,
    )
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def of_70b(device: torch.device, compute: str, *, quick: bool) -> list[dict[str, Any]]:
    """QLoRA steps of a 70 B whose blocks come from RAM, under a cap; and what the planner expects of them."""
    shape = TINY if quick else LLAMA_70B
    micro_batches, tokens = (2, 32) if quick else (4, 1024)
    plan = plan_of(device, "qlora", compute, micro_batches=micro_batches, tokens=tokens, recompute=shape.layers)
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, CAP_GIB * GIB / total), device)
    began = time.perf_counter()
    executor = _random_qlora(shape, plan)
    opening = time.perf_counter() - began
    reset_peak(device)
    seconds, waits, moved = [], [], []
    for _ in range(3):
        before = executor.visits.stream.traffic.moved_bytes
        synchronize(device)
        began = time.perf_counter()
        result = executor.step(batches(micro_batches, tokens, shape.words), 1e-4)
        synchronize(device)
        seconds.append(time.perf_counter() - began)
        waits.append(result.waits.link_seconds)
        moved.append(executor.visits.stream.traffic.moved_bytes - before)
    per_step = micro_batches * (tokens - 1)
    expected = _expected(plan, shape, micro_batches, tokens)
    peak = peak_of(device)[0] if device.type == "cuda" else 0
    return [
        {
            "name": "70B NF4 LoRA under 21 GiB",
            "parameters": shape.params,
            "tokens_per_s": per_step / min(seconds[1:]),
            "planned_tokens_per_s": expected,
            "seconds": seconds,
            "waited": waits,
            "moved_gib": [each / GIB for each in moved],
            "peak_gib": peak / GIB,
            "opening_seconds": opening,
            "ok": peak <= CAP_GIB * GIB,
        }
    ]


def _expected(plan: Plan, shape: Shape, micro_batches: int, tokens: int) -> float:
    architecture = from_config(_config_of(shape), "shape")
    work = Workload(sequences=1000, mean_tokens=tokens, longest_tokens=tokens, exact=True)
    device = probe(Path.cwd()).device(plan.device)
    return estimate_speed(architecture, plan, device, work, sequences_per_step=micro_batches).tokens_per_s


def _config_of(shape: Shape) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": shape.hidden,
        "intermediate_size": shape.inner,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.key_heads,
        "vocab_size": shape.words,
        "max_position_embeddings": 8192,
    }


def _random_qlora(shape: Shape, plan: Plan) -> StreamingExecutor:
    """A model of this shape with random 4-bit blocks in RAM; what is not a block lies on the device."""
    import transformers

    device, dtype = torch.device(plan.device), getattr(torch, {"bf16": "bfloat16", "fp32": "float32"}[plan.compute])
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(**_config_of(shape))
    model: Any = hollow_model(config, dtype=dtype, attention="sdpa")
    model.requires_grad_(False)
    blocks = list(find_blocks(model))
    for block in blocks:
        make_quantised(block, "nf4")
    layout = Layout(tensors_of(blocks[0]))
    tier = RamTier([layout] * len(blocks), pinned=device.type != "cpu")
    _fill_first(layout, tier.flats[0])
    for flat in tier.flats[1:]:
        flat.copy_(tier.flats[0])
    inside = {id(module) for block in blocks for module in block.modules()}
    for module in model.modules():
        for name, parameter in module._parameters.items() if id(module) not in inside else ():
            if parameter is not None:
                numbers = torch.randn(parameter.shape, device=device, dtype=dtype).mul_(0.02)
                module._parameters[name] = torch.nn.Parameter(numbers, requires_grad=False)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else buffer.to(device)
    whole = attach_adapters(model, rank=plan.lora_rank, alpha=16.0, seed=0)
    for parameter in whole.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.data.to(device)
    visits = VisitedBlocks(whole, BlockStream(tier, device))
    optimizer = build_optimizer(whole, ScheduleChoice(), plan)
    return StreamingExecutor(whole, visits=visits, plan=plan, optimizer=optimizer)


def _fill_first(layout: Layout, flat: torch.Tensor) -> None:
    """Codes by chance; scales such that weights are about 0.02."""
    for name, tensor in layout.views(flat).items():
        if tensor.dtype == torch.uint8:
            tensor.random_(0, 256)
        elif name.endswith("scale_scales"):
            tensor.fill_(0.005)
        elif name.endswith("offset"):
            tensor.fill_(0.03)
        else:
            tensor.fill_(1.0)


def of_all_weights(device: torch.device, compute: str, scratch: Path, *, quick: bool) -> list[dict[str, Any]]:
    """Full steps with weights, fp32 copies and states in RAM, against a model on the device whose states are in RAM."""
    shape, name = (TINY, "tiny") if quick else (SHAPES["3B"], "3B")
    micro_batches, tokens = (2, 32) if quick else (8, 1024)
    folder = write_model(shape, scratch / f"{name}-bf16")
    found: dict[str, Any] = {"name": f"{name} full, blocks from RAM against on the device", "ok": True}
    for side, changes in (("streamed", {}), ("resident", {"weights_tier": "device"})):
        plan = plan_of(device, "full", compute, micro_batches=micro_batches, tokens=tokens, **changes)
        executor = opened(folder, plan)
        reset_peak(device)
        seconds = []
        for _ in range(3):
            synchronize(device)
            began = time.perf_counter()
            result = executor.step(batches(micro_batches, tokens), 1e-5)
            synchronize(device)
            seconds.append(time.perf_counter() - began)
        found[f"{side}_seconds"], found[f"{side}_loss"] = seconds, result.loss
        found[f"{side}_waits"] = result.waits
        found[f"{side}_peak_gib"] = peak_of(device)[0] / GIB if device.type == "cuda" else 0.0
        del executor
        empty_cache(device)
    found["ok"] = abs(found["streamed_loss"] - found["resident_loss"]) <= 1e-2 * abs(found["resident_loss"])
    return [found]
