"""The parts of the check on a card: python bench/gpu/parts.py NAME --device cuda:0 --scratch FOLDER [--quick]

Each prints what it found as JSON objects, one a line; "ok" is there where something can be right or wrong.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent.parent.parent))

import torch
from engine_side import Side, built_engine
from engine_techniques import TECHNIQUES
from engine_works import LLAMA_1B, LLAMA_TINY, SEED, Work, step_examples, works

from vramfit.config import ScheduleChoice
from vramfit.data.batches import split
from vramfit.engine.accelerators import empty_cache, has_hardware, reset_peak, synchronize
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.errors import VramfitError
from vramfit.planning.plan import Plan

MIB: Final = 2**20
BENCH: Final = Path(__file__).parent.parent
TECHNIQUES_S: Final = 95.0
"""For all techniques together; those after it are named as left out."""


@dataclass(frozen=True)
class Place:
    """Where, and on how much: `quick` is a tiny model."""

    device: torch.device
    quick: bool
    scratch: Path

    @property
    def compute(self) -> str:
        """What a run on this device computes in."""
        return "bf16" if self.device.type != "cpu" and has_hardware(self.device, "bf16") else "fp32"

    @property
    def works(self) -> tuple[Work, Work]:
        return works("tiny" if self.quick else "card")

    def shape(self, layers: int) -> dict[str, Any]:
        # The usual first weights of 0.02 make all logits alike and hide mistakes.
        return {**(LLAMA_TINY if self.quick else LLAMA_1B), "num_hidden_layers": layers, "initializer_range": 0.1}


def say(name: str, **values: Any) -> None:
    print(json.dumps({"name": name, **values}), flush=True)


def free() -> None:
    gc.collect()
    empty_cache("cuda" if torch.cuda.is_available() else "cpu")


def machine(place: Place) -> None:
    """What this is, and which kernels attention uses."""
    import transformers

    here: dict[str, Any] = {"torch": torch.__version__, "transformers": transformers.__version__}
    if place.device.type == "cuda":
        properties = torch.cuda.get_device_properties(place.device)
        here |= {"card": properties.name, "memory_mib": properties.total_memory // MIB}
        here |= {"capability": torch.cuda.get_device_capability(place.device), "cuda": torch.version.cuda}
    say("machine", **here)
    from vramfit.hardware.devices import probe

    say("probe", devices=[dataclasses.asdict(device) for device in probe(place.scratch).devices])
    say("attention", kernels=_attention_kernels(place))


def _attention_kernels(place: Place) -> list[str]:
    dtype = torch.bfloat16 if place.compute == "bf16" else torch.float32
    query, key, value = torch.randn(3, 2, 8, 256, 64, device=place.device, dtype=dtype)
    with torch.profiler.profile() as profile:
        torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        synchronize(place.device)
    return sorted(
        {event.name[:120] for event in profile.events() if "attention" in event.name or "flash" in event.name}
    )


# --- right -----------------------------------------------------------------------------------------------------------


def model_of(place: Place, layers: int = 2, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    torch.manual_seed(SEED)
    shape = transformers.AutoConfig.for_model(**place.shape(layers))
    model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
    return model.to(place.device)


def plan_of(place: Place, **changes: Any) -> Plan:
    values: dict[str, Any] = {
        "method": "full",
        "device": str(place.device),
        "budget_bytes": 2**40,
        "compute": "fp32",
        "weight_format": "fp32",
        "max_length": 64,
        "micro_batch": 8,
        "accumulation": 1,
        "recompute": 0,
        "loss": "chunked",
        "loss_chunk_tokens": 128,
    }
    return Plan(**{**values, **changes})


def rows_of(place: Place, count: int, length: int) -> list[Any]:
    work = Work(name="", method="full", shape=place.shape(2), data="uneven", length=length, rows_per_step=count)
    return step_examples(work, place.scratch, most_steps=1)[0]


def engine(place: Place, plan: Plan, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> ResidentExecutor:
    model = model_of(place, layers, dtype)
    optimizer = build_optimizer(model, ScheduleChoice(), plan, seed=SEED)
    return ResidentExecutor(model, plan=plan, optimizer=optimizer)


EQUAL: Final = {
    "accumulation": {"micro_batch": 2},
    "whole logits": {"loss": "full", "loss_chunk_tokens": 0},
    "fused loss": {"loss": "fused"},
    "recompute": {"recompute": 2},
    "recompute, inputs in RAM": {"recompute": 2, "input_tier": "host"},
    "compress": {"compress": 2},
    "in backward": {"optimizer_in_backward": True, "clip_passes": 2},
    "states in RAM": {"optimizer_tier": "host"},
}
LOOSE: Final = {"compress": 30.0}
"""How many times the usual tolerance a technique may have that changes numbers by design."""


def equality(place: Place) -> None:
    """Each technique against plain autograd on this device: the gradients' cosine, and of two steps the losses, the
    gradient norms and what weights they leave."""
    rows = rows_of(place, 8, 64)
    formats = ("fp32", "bf16") if place.compute == "bf16" or place.quick else ("fp32",)
    for compute in formats:
        tolerance = 1e-4 if compute == "fp32" else 2e-2
        wanted, gradients = _plain_steps(place, rows, compute)
        for name, changes in {"as planned": {}, **EQUAL, "packed rows": {"packing": True}}.items():
            if place.device.type == "cpu" and "in RAM" in name:
                continue
            with _told(f"{compute}, {name}"):
                found, cosine = _engine_steps(place, rows, plan_of(place, compute=compute, **changes), gradients)
                apart = max(abs(one - other) / abs(other) for one, other in zip(found, wanted, strict=True))
                right = apart <= tolerance * LOOSE.get(name, 1.0) and cosine >= 0.999
                say(f"{compute}, {name}", apart=apart, cosine=cosine, ok=right)
            free()


def _engine_steps(
    place: Place, rows: list[Any], plan: Plan, gradients: dict[str, torch.Tensor]
) -> tuple[list[float], float]:
    from vramfit.data.packing import pack

    executor = engine(place, plan)
    laid = pack(rows, 64 * 4) if plan.packing else rows
    whole = executor.pieces(split(laid, len(laid), 0)[0])[0]
    mine = executor.gradients(whole)[1]
    cosine = _cosine(mine, gradients)
    executor.optimizer.zero_grad(set_to_none=True)
    found = []
    for _ in range(2):
        result = executor.step(split(laid, plan.micro_batch, 0), 1e-3)
        found += [result.loss, result.grad_norm]
    return [*found, _weights_norm(executor.model)], cosine


def _cosine(mine: dict[str, torch.Tensor | None], wanted: dict[str, torch.Tensor]) -> float:
    """Of all gradients taken as one vector."""
    pairs = [(mine[name].float(), other.float()) for name, other in wanted.items()]  # type: ignore[union-attr]
    product = sum(float((one * other).sum()) for one, other in pairs)
    norms = [sum(float(side.square().sum()) for side in sides) ** 0.5 for sides in zip(*pairs, strict=True)]
    return product / (norms[0] * norms[1])


def _plain_steps(place: Place, rows: list[Any], compute: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The model's own loss, one batch, torch's own clipping and AdamW."""
    model = model_of(place)
    plan = plan_of(place)
    optimizer = build_optimizer(model, ScheduleChoice(), plan, seed=SEED)
    batch = split(rows, len(rows), 0)[0]
    found: list[float] = []
    gradients: dict[str, torch.Tensor] = {}
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    for _ in range(2):
        with torch.autocast(place.device.type, dtype=torch.bfloat16, enabled=compute == "bf16"):
            output = model(
                input_ids=batch.input_ids.to(place.device), labels=batch.labels.to(place.device), use_cache=False
            )
        output.loss.backward()
        if not gradients:
            gradients = {name: each.grad.clone() for name, each in model.named_parameters()}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        found += [output.loss.item(), norm.item()]
        optimizer.step()
        optimizer.zero_grad()
    return [*found, _weights_norm(model)], gradients


def _weights_norm(model: Any) -> float:
    return float(torch.stack([each.detach().float().norm() for each in model.parameters()]).norm())


def fp16(place: Place) -> None:
    """Loss scaling: it learns, skipped steps change nothing, and the scale is finite."""
    rows = rows_of(place, 8, 64)
    executor = engine(place, plan_of(place, compute="fp16"))
    results = [executor.step(split(rows, 8, 0), 1e-3) for _ in range(6 if place.quick else 30)]
    skipped = sum(result.skipped for result in results)
    taken = [result.loss for result in results if not result.skipped]
    scale = results[-1].loss_scale
    say(
        "fp16",
        first=results[0].loss,
        last=results[-1].loss,
        skipped=skipped,
        scale=scale,
        ok=len(taken) >= 2 and taken[-1] < taken[0] and bool(scale and 2.0**-6 < scale < 2.0**32),
    )
    before = _weights_norm(executor.model)
    executor._scaler._scale.fill_(2.0**120)  # type: ignore[union-attr] - gradients overflow: the step is skipped
    result = executor.step(split(rows, 8, 0), 1e-3)
    say("fp16, overflow", skipped=result.skipped, ok=result.skipped and _weights_norm(executor.model) == before)


def out_of_memory(place: Place) -> None:
    """A step that does not fit is done again in halves: the loss, norm and weights of one that did."""
    rows = (
        rows_of(place, 8, 64)
        if place.quick
        else step_examples(
            Work(name="", method="full", shape=place.shape(2), data="blocks", length=1024, rows_per_step=32),
            place.scratch,
            most_steps=1,
        )[0]
    )
    plan = plan_of(place, micro_batch=len(rows), max_length=1024, compute=place.compute)
    executor = engine(place, plan)
    executor.step(split(rows, len(rows), 0), 1e-3)
    wanted = executor.step(split(rows, len(rows), 0), 1e-3)
    weights = _weights_norm(executor.model)
    peak = executor.memory()[0]
    del executor
    free()
    executor = engine(place, plan)
    executor.step(split(rows, len(rows), 0), 1e-3)
    with _cap(place, executor, peak):
        found = executor.step(split(rows, len(rows), 0), 1e-3)
    apart = max(
        abs(found.loss - wanted.loss) / abs(wanted.loss),
        abs(found.grad_norm - wanted.grad_norm) / wanted.grad_norm,
        abs(_weights_norm(executor.model) - weights) / weights,
    )
    say("replay", told=found.recovered, apart=apart, ok=bool(found.recovered) and apart <= 1e-3)


@contextlib.contextmanager
def _cap(place: Place, executor: ResidentExecutor, peak: int) -> Iterator[None]:
    """Less memory than the step takes: a real cap on a card, the tests' pseudo-card on the CPU."""
    if place.device.type != "cuda":
        from tests.vramfit.engine.pseudo_card import PseudoCard

        at_rest = sum(parameter.nbytes for parameter in executor.model.parameters())
        with PseudoCard(executor.model, budget_bytes=at_rest + int(0.7 * (peak - at_rest))):
            yield
        return
    free()
    at_rest = torch.cuda.memory_allocated(place.device)
    total = torch.cuda.get_device_properties(place.device).total_memory
    torch.cuda.set_per_process_memory_fraction((at_rest + 0.7 * (peak - at_rest)) / total, place.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, place.device)


# --- how much, how fast ----------------------------------------------------------------------------------------------


def memory(place: Place) -> None:
    """Predicted against measured peaks of real steps, allocated."""
    from vramfit.models.architecture import from_config
    from vramfit.planning.memory import estimate_memory
    from vramfit.planning.plan import Workload

    layers, length = (2, 32) if place.quick else (8, 1024)
    cases: dict[str, dict[str, Any]] = {
        "kept": {},
        "recomputed": {"recompute": layers},
        "half recomputed": {"recompute": layers // 2},
        "compressed": {"compress": layers},
        "whole logits": {"loss": "full", "loss_chunk_tokens": 0},
        "accumulated": {"accumulation": 2},
        "8-bit states": {"optimizer_bits": 8},
        "in backward": {"optimizer_in_backward": True, "recompute": layers},
        "one row": {"micro_batch": 1},
    }
    for name, changes in cases.items():
        with _told(name):
            values = {"micro_batch": 4, "max_length": length, "compute": place.compute, "method": "pretrain"}
            plan = plan_of(place, **{**values, **changes})
            count = plan.micro_batch * plan.accumulation
            work = Work(
                name="", method="full", shape=place.shape(layers), data="blocks", length=length, rows_per_step=count
            )
            rows = step_examples(work, place.scratch, most_steps=1)[0]
            executor = engine(place, plan, layers=layers)
            executor.step(split(rows, plan.micro_batch, 0), 1e-3)
            executor.memory()
            executor._peak.measure_again()
            executor.step(split(rows, plan.micro_batch, 0), 1e-3)
            measured, reserved = executor.memory()
            workload = Workload(sequences=100, mean_tokens=length, longest_tokens=length, exact=True)
            estimate = estimate_memory(from_config(place.shape(layers), "llama"), plan, workload)
            predicted = max(phase.total_bytes for phase in estimate.phases if phase.name != "evaluation")
            say(
                name,
                predicted_mib=predicted / MIB,
                measured_mib=measured / MIB,
                reserved_mib=reserved / MIB,
                ratio=predicted / measured,
                ok=0.9 <= predicted / measured <= 1.1,
            )
            del executor
        free()


def techniques(place: Place) -> None:
    """Each technique with and without it: steps a second and memory above the weights, in one process."""
    began = time.monotonic()
    known: dict[str, dict[str, float]] = {}
    for technique in TECHNIQUES:
        lacking = technique.lacking(str(place.device))
        if time.monotonic() - began > TECHNIQUES_S:
            lacking = "no time was left"
        if lacking:
            say(technique.name, left_out=lacking)
            continue
        work = technique.work_of(*place.works)
        compute = technique.compute or place.compute
        if (place.device.type == "cpu" and compute == "bf16") or "compiled" in technique.name:
            continue  # that one is a part of its own
        with _told(technique.name):
            found = []
            for options in (technique.with_, technique.without):
                key = json.dumps([work.to_json(), compute, options, technique.steps], sort_keys=True)
                if key not in known:
                    known[key] = _measured(place, work, compute, options, steps=technique.steps)
                found.append(known[key])
            one, other = found
            say(
                technique.name,
                faster=other["seconds"] / one["seconds"],
                mib=[one["mib"], other["mib"]],
                seconds=[one["seconds"], other["seconds"]],
                losses_apart=abs(one["loss"] - other["loss"]) / abs(other["loss"]),
                ok=technique.same_loss is None
                or abs(one["loss"] - other["loss"]) <= max(technique.same_loss, 1e-3) * abs(other["loss"]),
            )


def _measured(place: Place, work: Work, compute: str, options: dict[str, Any], *, steps: int = 1) -> dict[str, float]:
    """The second step's loss, seconds a step (median of 4, or the mean of `steps`), MiB above the weights."""
    free()
    side = Side(
        work=work,
        device=place.device,
        steps=step_examples(work, place.scratch, most_steps=8),
        options=options,
        scratch=place.scratch,
        compute=compute,
    )
    made = built_engine(side)
    weights = sum(each.nbytes for each in (*made.executor.model.parameters(), *made.executor.model.buffers()))
    losses = [made.step(number) for number in range(2)]
    if place.device.type != "cpu":
        reset_peak(place.device)
    made.executor._peak.measure_again()
    made.executor.memory()
    took = []
    for number in range(2, 2 + (4 if steps == 1 else steps)):
        synchronize(place.device)
        began = time.perf_counter()
        made.train(number)
        synchronize(place.device)
        took.append(time.perf_counter() - began)
    return {
        "loss": losses[-1],
        "seconds": statistics.median(took) if steps == 1 else statistics.fmean(took),
        "mib": (made.executor.memory()[0] - weights) / MIB,
    }


def trainer(place: Place) -> None:
    """Against transformers' Trainer: bench/engine.py's comparison, on this device."""
    command = [sys.executable, str(BENCH / "engine.py"), "--json", "--part", "trainer", "--pairs", "3"]
    command += ["--device", str(place.device), "--compute", place.compute, "--threads", "1" if place.quick else "8"]
    command += ["--size", "tiny" if place.quick else "card"]
    for rival in ("fast", "small"):
        made = subprocess.run([*command, "--only", rival], capture_output=True, text=True, encoding="utf-8")
        if made.returncode:
            say(rival, ok=False, why=made.stderr.splitlines()[-3:])
            continue
        for figure in json.loads(made.stdout):
            # Whether a goal is met is a finding here, not a failure of the check; different losses are one.
            say(**figure, **({"ok": bool(figure["met"])} if "loss" in figure["name"] else {}))


def compile(place: Place) -> None:  # noqa: A001 - the part's name
    """Compiled blocks: equal losses and gradients, also summed over two passes, launches before and after, and whether
    it pays, in each mode."""
    from vramfit.engine.compiling import CompiledBlocks, trial

    layers, length = (2, 32) if place.quick else (16, 1024)
    modes = ("default",) if place.device.type == "cpu" else ("default", "reduce-overhead", "max-autotune")
    for mode in modes:
        ways = {"kept": {}, "recomputed": {"recompute": layers}}
        for name, changes in ways.items() if mode != "max-autotune" else [("kept", {})]:  # its search takes long
            with _told(f"{mode}, {name}"):
                torch._dynamo.reset()
                plan = plan_of(place, compute=place.compute, micro_batch=4, max_length=length, **changes)
                work = Work(
                    name="", method="full", shape=place.shape(layers), data="blocks", length=length, rows_per_step=4
                )
                rows = step_examples(work, place.scratch, most_steps=1)[0]
                model = model_of(place, layers)
                blocks = CompiledBlocks(model, mode)  # type: ignore[arg-type]
                executor = ResidentExecutor(
                    model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan, seed=SEED)
                )
                batch = split(rows, 4, 0)[0]
                made = trial(executor, blocks, executor.pieces(batch)[0])
                losses = {}
                for on in (False, True):
                    blocks.on = on and not blocks.problem
                    losses[on] = (*executor.measure(executor.pieces(batch)[0]), _summed_norm(executor, batch))
                apart = max(abs(one - other) / abs(other) for one, other in zip(*losses.values(), strict=True))
                say(
                    f"{mode}, {name}",
                    problem=blocks.problem,
                    trial=None if made is None else {**dataclasses.asdict(made), "faster": made.faster},
                    apart=apart,
                    ok=made is not None and apart <= (1e-4 if place.compute == "fp32" else 2e-2),
                )
                del executor, model, blocks
            free()


def _summed_norm(executor: ResidentExecutor, batch: Any) -> float:
    """Of gradients summed over two passes, which a replay must not write over. None is left."""
    executor.optimizer.zero_grad(set_to_none=True)
    executor.rehearse([batch, batch])
    made = [each.grad for each in executor.model.parameters() if each.grad is not None]
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each.float()) for each in made]))
    executor.optimizer.zero_grad(set_to_none=True)
    return norm.item()


def streaming(place: Place) -> None:
    """Whether streamed steps on this device are those of a model that stays."""
    import streaming_part

    equal = streaming_part.equality(place.device, place.compute, place.scratch)
    for found in [*equal, *streaming_part.in_parts(place.device, place.compute, place.scratch)]:
        say(**found)


def streamed_70b(place: Place) -> None:
    """A 70 B with a 4-bit base from RAM, under a cap of 21 GiB."""
    import streaming_part

    for found in streaming_part.of_70b(place.device, place.compute, quick=place.quick):
        say(**found)


def streamed_full(place: Place) -> None:
    """Full steps with everything in RAM, against a model that stays on the device."""
    import streaming_part

    for found in streaming_part.of_all_weights(place.device, place.compute, place.scratch, quick=place.quick):
        say(**found)


def calibration(place: Place) -> None:
    """This device's rates, as `python -m vramfit calibrate` measures them."""
    from vramfit.hardware.calibrate import calibrate
    from vramfit.hardware.devices import probe

    device = probe(place.scratch).device(str(place.device))
    say("calibration", **calibrate(device, place.scratch, tiny=place.quick).to_json())


@contextlib.contextmanager
def _told(name: str) -> Iterator[None]:
    """One entry that fails is told; the next one is tried."""
    try:
        yield
    except VramfitError as refusal:
        say(name, refused=str(refusal))
    except Exception as error:
        lines = str(error).splitlines() or [""]
        say(name, ok=False, why=f"{type(error).__name__}: {lines[0][:300]}")


def main() -> None:
    found: dict[str, Callable[[Place], None]] = {
        part.__name__: part
        for part in (
            machine,
            equality,
            fp16,
            out_of_memory,
            memory,
            techniques,
            streaming,
            streamed_70b,
            streamed_full,
            trainer,
            compile,
            calibration,
        )
    }
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=sorted(found))
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--scratch", type=Path, required=True)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    torch.set_num_threads(1 if options.quick else min(8, torch.get_num_threads()))
    found[options.part](Place(device=device, quick=options.quick, scratch=options.scratch))


if __name__ == "__main__":
    main()
