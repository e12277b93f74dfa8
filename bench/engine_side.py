"""One side of a comparison in a process of its own: python bench/engine_side.py, an order as JSON on the first line.

The order says which work, on which device, and which side: "ours" is the engine as a run uses it, "trainer" the
`Trainer` of transformers (with peft for LoRA), "hand" a loop written by hand around the engine's loss. It then obeys a
line at a time: {"steps": n} times n optimizer steps, {"memory": "resident"} or "allocated" measures one, or as
many as "steps" says. Answers are JSON lines.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))
sys.path.insert(0, str(Path(__file__).parent))

if __name__ == "__main__":  # before torch is imported, as a run does
    ORDER = json.loads(sys.stdin.readline())
    if ORDER["side"] == "ours":
        from vramfit.engine.threads import let_threads_sleep

        let_threads_sleep()
    OUT, sys.stdout = sys.stdout, sys.stderr

import torch
from engine_works import LEARNING_RATE, SEED, Work, model_folder, run_config, step_examples, trained_tokens
from torch import Tensor, nn

from vramfit.data.batches import collate, split
from vramfit.errors import VramfitError
from vramfit.models.random_start import make_start
from vramfit.planning.plan import Plan

EPSILON, BETAS, WEIGHT_DECAY, CLIP = 1e-8, (0.9, 0.999), 0.01, 1.0


def say(values: dict[str, Any]) -> None:
    OUT.write(json.dumps(values) + "\n")
    OUT.flush()


class Meter:
    """Seconds, processor seconds and losses of steps; and the memory of one, above the weights, in bytes.

    Allocated is what lies there beside the weights before the step and the most the allocator hands out inside it, by
    its own records; resident is the highest resident set less the one with nothing but the weights loaded (Linux).
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self.model, self.device = model, device
        self.weights = _bytes_of([*model.parameters(), *model.buffers()])
        gc.collect()
        self.resident_at_start = _status("VmRSS")
        self._profile: Any = None

    def now(self) -> tuple[float, float]:
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter(), time.process_time()

    def begin_memory(self, optimizer: torch.optim.Optimizer, what: str) -> None:
        """`what` is "resident" or "allocated": following the allocator takes memory itself."""
        gc.collect()
        self._what = what
        self._at_rest = _bytes_of([*self.model.parameters(), *self.model.buffers(), *_states(optimizer)])
        if what == "resident":
            _forget_highest_resident()
            return
        if self.device.type != "cpu":
            torch.accelerator.reset_peak_memory_stats()
            return
        self._profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
        self._profile.__enter__()

    def end_memory(self) -> dict[str, int]:
        if self._what == "resident":
            return {"resident": _status("VmHWM") - self.resident_at_start}
        if self.device.type != "cpu":
            torch.accelerator.synchronize()
            highest = torch.accelerator.max_memory_allocated()
        else:
            from vramfit.engine.peak import _highest_rise

            self._profile.__exit__(None, None, None)
            highest = self._at_rest + _highest_rise(self._profile)
        return {"allocated": highest - self.weights, "weights": self.weights}


def _bytes_of(tensors: list[Tensor]) -> int:
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def _states(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]


def _status(name: str) -> int:
    """Bytes of one line of this process's status; 0 where there is none to read."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
            if line.startswith(name + ":"):
                return int(line.split()[1]) * 1024
    return 0


def _forget_highest_resident() -> None:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


# --- sides -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Side:
    """What all sides are given."""

    work: Work
    device: torch.device
    steps: list[list[Any]]
    options: dict[str, Any]
    scratch: Path
    compute: str

    def examples(self, step: int) -> list[Any]:
        return self.steps[step % len(self.steps)]


def orders() -> Iterator[dict[str, Any]]:
    for line in sys.stdin:
        yield json.loads(line)


def serve(side: Side, model: nn.Module, optimizer: Any, one_step: Any, about: dict[str, Any]) -> None:
    """Obey until there are no more orders. `one_step(step number)` returns the loss."""
    meter = Meter(model, side.device)
    say({"ready": True, **about})
    done = 0
    for order in orders():
        if order.get("memory"):
            meter.begin_memory(optimizer, order["memory"])
            for _ in range(order.get("steps", 1)):
                one_step(done)
                done += 1
            say(meter.end_memory())
            continue
        answer: dict[str, list[float]] = {"seconds": [], "cpu": [], "losses": [], "tokens": []}
        for _ in range(order["steps"]):
            wall, cpu = meter.now()
            answer["losses"].append(one_step(done))
            wall_after, cpu_after = meter.now()
            answer["seconds"].append(wall_after - wall)
            answer["cpu"].append(cpu_after - cpu)
            answer["tokens"].append(trained_tokens(side.examples(done)))
            done += 1
        say(answer)


def plan_of(side: Side, config: Any) -> Plan:
    """What a run's planner decides for these rows on this machine, and then what the order changes of it."""
    from vramfit.hardware.devices import probe
    from vramfit.models.load import read_architecture
    from vramfit.planning.plan import Workload
    from vramfit.planning.planner import forecast_run

    laid = [example for step in laid_out(side) for example in step]
    total = sum(map(len, laid))
    workload = Workload(
        sequences=len(laid),
        mean_tokens=total / len(laid),
        longest_tokens=max(map(len, laid)),
        trained_share=sum(example.trained_tokens for example in laid) / total,
        packed=any(example.parts for example in laid),
        exact=True,
    )
    plan = forecast_run(
        config, architecture=read_architecture(config.model), machine=probe(side.scratch), workload=workload
    ).plan
    return dataclasses.replace(plan, **side.options.get("plan", {}))


def laid_out(side: Side) -> list[list[Any]]:
    """The rows of each step as they are, or packed: the same documents in fewer rows."""
    if not side.options.get("packing"):
        return side.steps
    from vramfit.data.packing import pack

    return [pack(step, side.work.length) for step in side.steps]


@dataclasses.dataclass
class Engine:
    """Our side, ready for steps."""

    plan: Plan
    executor: Any
    rows: list[list[Any]]
    calibrator: Any = None
    calibrate_every: int = 0
    shortage: Any = None

    def train(self, number: int) -> float:
        """One step and what a run does around it. Returns its loss."""
        batches = split(self.rows[number % len(self.rows)], self.plan.micro_batch, 0)
        if self.calibrate_every and number % self.calibrate_every == 0:
            self.calibrator.check(batches[0])
        if self.shortage:
            self.shortage.begin()
        loss: float = self.executor.step(batches, LEARNING_RATE).loss
        return loss

    def step(self, number: int) -> float:
        loss = self.train(number)
        self.executor.memory()
        return loss


class Shortage:
    """Memory runs out once in each step, behind the last block: as late as a forward can, for logits are what there is
    no room for. Rows are halved, and whole again in the next step."""

    def __init__(self, executor: Any) -> None:
        from vramfit.engine.activations import find_blocks

        self._recovery, self._waits = executor.recovery, False
        find_blocks(executor.model)[-1].register_forward_hook(self._run_out)

    def begin(self) -> None:
        self._recovery.most_rows, self._waits = 0, True

    def _run_out(self, *_: Any) -> None:
        if self._waits:
            self._waits = False
            raise torch.OutOfMemoryError("as if there were no more")


def ours(side: Side) -> None:
    began = time.perf_counter()
    made = built_engine(side)
    start_s = time.perf_counter() - began
    shown = ("micro_batch", "accumulation", "recompute", "loss", "loss_chunk_tokens", "compute", "packing", "compiled")
    about = {"plan": {name: getattr(made.plan, name) for name in shown}, "start_s": start_s}
    serve(side, made.executor.model, made.executor.optimizer, made.step, about)


def built_engine(side: Side) -> Engine:
    """What a run builds for this work, after the same planner."""
    from vramfit.engine.compiling import CompiledBlocks
    from vramfit.engine.optimizers import build_optimizer
    from vramfit.engine.resident import ResidentExecutor
    from vramfit.models.load import load_model

    memory = {"precision": side.compute, **side.options.get("memory", {})}
    config = run_config(side.work, side.scratch, str(side.device), memory=memory, **side.options.get("sections", {}))
    plan = plan_of(side, config)
    if plan.device == "cpu" and side.options.get("keeps_memory", True):
        from vramfit.engine.heap import keep_freed_memory

        keep_freed_memory()
    model = load_model(config, plan, cache=side.scratch, start_file=side.scratch / "start.safetensors")
    if side.options.get("head_parts"):
        cut_head(model, side.options["head_parts"])
    optimizer = build_optimizer(model, config.schedule, plan, seed=SEED)
    if plan.compiled:
        CompiledBlocks(model, plan.compile_mode)
    executor = ResidentExecutor(model, plan=plan, optimizer=optimizer, max_grad_norm=CLIP, loss=config.loss)
    if side.options.get("projects_all"):
        from vramfit.engine import resident

        resident.targets_of = all_positions  # type: ignore[assignment]
    if config.adapter.start == "eva":
        start_from_data(executor, side.steps)
    return ready(side, Engine(plan=plan, executor=executor, rows=laid_out(side)))


def ready(side: Side, made: Engine) -> Engine:
    """With what the order asks for that no RunConfig says."""
    if side.options.get("codec"):
        from vramfit.engine.activations import set_activations

        set_activations(made.executor.model, made.executor.activations, codec=side.options["codec"])
    if side.options.get("calibrate_every"):
        from vramfit.engine.drift import Calibrator

        made.calibrate_every = side.options["calibrate_every"]
        made.calibrator = Calibrator(made.executor, limit=1.0, may_raise=False)
    if side.options.get("runs_out"):
        made.shortage = Shortage(made.executor)
    return made


def cut_head(model: nn.Module, count: int) -> None:
    """The same head in `count` parts along the vocabulary, each a matrix of its own."""
    from vramfit.engine.head import ShardedHead

    whole: Any = model.get_output_embeddings()  # type: ignore[operator]
    parts = []
    for rows in whole.weight.detach().chunk(count):
        part = nn.Linear(rows.shape[1], rows.shape[0], bias=False, device=rows.device, dtype=rows.dtype)
        part.weight.data.copy_(rows)
        parts.append(part)
    model.set_output_embeddings(ShardedHead(parts))  # type: ignore[operator]


def start_from_data(executor: Any, steps: list[list[Any]]) -> None:
    """As a run does it: EVA's directions from the first rows, one at a time."""
    from vramfit.models.adapter_start import start_from_inputs
    from vramfit.training.run import EVA_SEQUENCES

    rows = [row for step in steps for row in step][:EVA_SEQUENCES]
    start_from_inputs(executor.model, lambda: executor.evaluate([split([row], 1, 0)[0] for row in rows]))
    executor.weights_were_changed()


def built_plainly(side: Side) -> nn.Module:
    """The model and adapters as the libraries' own documentation makes them."""
    import transformers

    folder = model_folder(side.work, side.scratch)
    torch.manual_seed(SEED)
    # A frozen base in 16 bits where 16 bits are computed with, as is usual; what is trained is fp32.
    dtype = DTYPES[side.compute] if side.work.method == "lora" else torch.float32
    if side.work.method == "lora":
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa")
    else:
        shape = transformers.AutoConfig.from_pretrained(folder)
        model = transformers.AutoModelForCausalLM.from_config(shape, dtype=dtype, attn_implementation="sdpa")
        make_start(model, SEED)  # the numbers that our side begins with, so that losses can be compared
    if side.work.method == "lora":
        import peft

        torch.manual_seed(SEED)
        model = peft.get_peft_model(
            model,
            peft.LoraConfig(
                task_type="CAUSAL_LM",
                r=side.work.rank,
                lora_alpha=2 * side.work.rank,
                lora_dropout=0.0,
                target_modules="all-linear",
            ),
        )
    return model.to(side.device)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def trainer(side: Side) -> None:
    """transformers.Trainer at its usual good settings: fused AdamW, SDPA, rows padded to the batch's longest, no
    logging, no saving. `micro_batch` and `accumulation` may be ordered; the usual way is the whole step at once."""
    import transformers

    micro_batch = side.options.get("micro_batch", side.work.rows_per_step)
    model = built_plainly(side)
    meter = Meter(model, side.device)
    rows = [_features(example) for step in side.steps for example in step]

    class InOrder(transformers.Trainer):
        step_loss = 0.0

        def _get_train_sampler(self, *_: Any, **__: Any) -> Any:
            return torch.utils.data.SequentialSampler(self.train_dataset)

        def training_step(self, *arguments: Any, **named: Any) -> Tensor:
            loss = super().training_step(*arguments, **named)
            self.step_loss += loss.item()
            return loss

    class Obey(transformers.TrainerCallback):
        """Steps are timed from one's end to the next one's: fetching and collating count."""

        answer: dict[str, list[float]]
        left = 0
        measuring = False
        done = 0

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.resident_at_start = _status("VmRSS")  # what the Trainer itself imports is no step's memory
            say({"ready": True})
            self.next(control)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            wall, cpu = meter.now()
            if self.measuring:
                say(meter.end_memory())
                self.measuring = False
            else:
                self.answer["seconds"].append(wall - self.began[0])
                self.answer["cpu"].append(cpu - self.began[1])
                self.answer["losses"].append(made.step_loss)
                self.answer["tokens"].append(trained_tokens(side.examples(self.done)))
                self.left -= 1
                if self.left == 0:
                    say(self.answer)
            self.done += 1
            made.step_loss = 0.0
            if self.left == 0:
                self.next(control)
            self.began = meter.now()

        def next(self, control: Any) -> None:
            order = next(waiting, None)
            if order is None:
                control.should_training_stop = True
            elif order.get("memory"):
                self.measuring = True
                meter.begin_memory(made.optimizer, order["memory"])
            else:
                self.left = order["steps"]
                self.answer = {"seconds": [], "cpu": [], "losses": [], "tokens": []}
            self.began = meter.now()

    waiting = orders()
    arguments = transformers.TrainingArguments(
        output_dir=str(side.scratch / "trainer"),
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=side.work.rows_per_step // micro_batch,
        max_steps=1_000_000,
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        weight_decay=WEIGHT_DECAY,
        max_grad_norm=CLIP,
        optim="adamw_torch_fused",
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        remove_unused_columns=False,
        use_cpu=side.device.type == "cpu",
        dataloader_pin_memory=side.device.type != "cpu",
        bf16=side.compute == "bf16",
        fp16=side.compute == "fp16",
        seed=SEED,
        gradient_checkpointing=bool(side.options.get("checkpointing")),
    )
    made = InOrder(model=model, args=arguments, train_dataset=rows, data_collator=padded, callbacks=[Obey()])
    made.train()


def _features(example: Any) -> dict[str, Any]:
    labels = [int(token) if on else -100 for token, on in zip(example.input_ids, example.trained, strict=True)]
    return {"input_ids": example.input_ids.tolist(), "labels": labels}


def padded(features: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded to the longest, as DataCollatorForSeq2Seq does; without a mask where there is nothing to hide."""
    longest = max(len(each["input_ids"]) for each in features)
    ids = torch.zeros(len(features), longest, dtype=torch.long)
    labels, mask = torch.full_like(ids, -100), torch.zeros_like(ids)
    for row, each in enumerate(features):
        length = len(each["input_ids"])
        ids[row, :length], labels[row, :length] = torch.tensor(each["input_ids"]), torch.tensor(each["labels"])
        mask[row, :length] = 1
    return {"input_ids": ids, "labels": labels, **({} if bool(mask.all()) else {"attention_mask": mask})}


def hand(side: Side) -> None:
    """The engine's techniques without the engine: only trained tokens are projected, a chunk at a time; the same
    pieces, fused AdamW, clipping. What a careful person writes for one model."""
    from vramfit.engine.chunked_loss import chunk_rows, chunked_sum
    from vramfit.engine.heap import keep_freed_memory

    if side.device.type == "cpu":
        keep_freed_memory()
    model: Any = built_plainly(side)
    model.train()
    base = model.get_base_model() if side.work.method == "lora" else model
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [each for each in trained if each.ndim >= 2], "weight_decay": WEIGHT_DECAY},
        {"params": [each for each in trained if each.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(
        [group for group in groups if group["params"]], lr=LEARNING_RATE, betas=BETAS, eps=EPSILON, fused=True
    )
    micro_batch = side.options.get("micro_batch", side.work.rows_per_step)
    rows = laid_out(side)
    chunk = side.options.get("chunk", 0) or chunk_rows(base.config.vocab_size)
    dtype = DTYPES[side.compute]

    def one_step(step: int) -> float:
        batches = [
            collate(rows[step % len(rows)][at : at + micro_batch], 0)
            for at in range(0, len(rows[step % len(rows)]), micro_batch)
        ]
        shifted = [torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100).flatten() for batch in batches]
        count = sum(int((labels != -100).sum()) for labels in shifted)
        total = 0.0
        losses = []
        for batch, labels in zip(batches, shifted, strict=True):
            positions = (labels != -100).nonzero().squeeze(1)
            inputs = {"input_ids": batch.input_ids.to(side.device)}
            if batch.position_ids is not None:
                inputs["position_ids"] = batch.position_ids.to(side.device)
            with torch.autocast(side.device.type, dtype=dtype, enabled=dtype != torch.float32):
                hidden = base.model(**inputs, use_cache=False).last_hidden_state.flatten(0, 1)
                loss = chunked_sum(
                    hidden.index_select(0, positions.to(side.device)),
                    base.lm_head.weight,
                    None,
                    labels[positions].to(side.device),
                    chunk_tokens=chunk,
                    dtype=dtype,
                ).objective
            (loss / count).backward()
            losses.append(loss.detach())
        torch.nn.utils.clip_grad_norm_(trained, CLIP)
        total = torch.stack(losses).sum().item()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return total / count

    serve(side, model, optimizer, one_step, {})


def all_positions(batch: Any) -> Any:
    """As `targets_of`, but every token is projected and those without loss weigh 0: what a head does that does not
    know which tokens are trained."""
    from vramfit.engine.loss import Targets

    labels = torch.nn.functional.pad(batch.labels[:, 1:], (0, 1), value=-100)
    if batch.position_ids is not None:
        labels[:, :-1].masked_fill_(batch.position_ids[:, 1:] == 0, -100)
    labels = labels.flatten()
    on = labels != -100
    return Targets(positions=torch.arange(labels.numel()), tokens=labels.clamp(min=0), weights=on.float())


def products(side: Side) -> None:
    """The rate of matrix products on this device at their best of some sizes, in FLOP/s."""
    from vramfit.hardware.calibrate_worker import Bench
    from vramfit.hardware.calibrate_worker import products as measured

    bench = Bench(side.device, 0.5)
    sizes = ((2048,), (1024, 2048)) if side.device.type == "cpu" else ((8192, 16384), (4096, 8192))
    say({"ready": True, "flops": max(rate.flops for rate in measured(bench, side.compute, *sizes))})


def main() -> None:
    import warnings

    import transformers

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    scratch = Path(ORDER["scratch"])
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    work = Work(**ORDER["work"])
    try:
        side = Side(
            work=work,
            device=torch.device(ORDER["device"]),
            steps=step_examples(work, scratch),
            options=ORDER.get("options", {}),
            scratch=scratch,
            compute=ORDER.get("compute", "fp32"),
        )
        {"ours": ours, "trainer": trainer, "hand": hand, "products": products}[ORDER["side"]](side)
    except (VramfitError, ImportError) as error:
        say({"refused": str(error)})


if __name__ == "__main__":
    main()
