"""Rows of published runs (the reference columns) as models, plans and records of the programs that ran.

Nothing here is fitted: a column says what a run was, its program's record says what that means. Odd and missing values
fall to the closest that is known, and a program nobody wrote a record for to the one whose columns are alike.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from vramfit.models import catalogue, families
from vramfit.models.architecture import Architecture
from vramfit.planning.other_programs import chunk_rows, shape_for, with_buckets
from vramfit.planning.plan import Plan, ShardingKind, Workload
from vramfit.planning.program import PROGRAMS, Program

Row = Mapping[str, str]


_COLUMNS: Final = (
    "id",
    "model_id",
    "method",
    "lora_rank",
    "lora_targets",
    "weight_dtype",
    "compute_dtype",
    "optimizer",
    "micro_batch",
    "seq_len",
    "seq_len_is_cap",
    "grad_ckpt",
    "attention",
    "loss_impl",
    "compile",
    "offload",
    "gpus",
    "sharding",
    "gpu_model",
    "peak_gib",
    "metric",
    "tokens_per_s",
    "program",
    "quality",
    "dedup_weight",
    "source_url",
    "notes",
    "card_gib",
    "likely_oom",
)


class NoRows(Exception):
    """Why a file holds no rows of the reference columns, as a sentence."""


_LEAST_COLUMNS: Final = ("id", "model_id", "method")
"""Without these a file is about something else."""


def read_rows(path: Path) -> list[Row]:
    """The rows of a csv file. Columns it lacks, and fields of rows that are too short, are blank. Raises NoRows."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file)
            lacking = [name for name in _LEAST_COLUMNS if name not in (reader.fieldnames or ())]
            if lacking:
                raise NoRows(f"{path} has no column {' or '.join(lacking)}: it is no csv of the reference columns")
            return [complete(row) for row in reader]
    except OSError as error:
        raise NoRows(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NoRows(f"{path} is not UTF-8 text, as a csv is") from None
    except (csv.Error, ValueError) as error:  # ValueError: a path with a NUL character
        raise NoRows(f"{path} is not a csv: {error}") from None


def complete(row: Mapping[Any, Any]) -> Row:
    """`row` with every column that is asked for, without space around its values."""
    given = {name: value.strip() for name, value in row.items() if isinstance(name, str) and value is not None}
    return {**dict.fromkeys(_COLUMNS, ""), **given}


class Unusable(Exception):
    """Why a row cannot be compared."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row as the planner's words."""

    architecture: Architecture
    plan: Plan
    workload: Workload
    program: Program


def run_of(row: Row) -> Run:
    """Raises Unusable: the catalogue lacks the model, or the row has no length or micro-batch."""
    architecture = _model(row["model_id"])
    if architecture is None:
        raise Unusable(f"the catalogue has no {row['model_id'] or 'model without a name'}")
    program = program_of(row)
    architecture = shape_for(architecture, program)
    if not _number(row["seq_len"]) or not _number(row["micro_batch"]):
        raise Unusable("neither length nor micro-batch can be missing")
    plan = plan_of(row, architecture)
    program = with_buckets(program, plan, architecture)
    # Where only the longest row is known, those around it are short: the mean of instruction data is about a tenth.
    mean = plan.max_length * (0.1 if "longest sample" in row["notes"] else 1.0)
    workload = Workload(sequences=1000, mean_tokens=mean, longest_tokens=plan.max_length, exact=True)
    return Run(architecture=architecture, plan=plan, workload=workload, program=program)


_VARIANT: Final = re.compile(r"-(instruct|chat|it|hf|base|bnb|[48]bit|int4|gptq|awq|v\d+(\.\d+)?|unsloth)$")


def _model(name: str) -> Architecture | None:
    """The model of that name, or the one that `name` is a tuned or quantised variant of: it has the same shapes."""
    while name:
        tail = name.rpartition("/")[2]
        if found := catalogue.find(name) or catalogue.find(tail) or catalogue.find(f"meta-{tail}"):
            return found
        shorter = _VARIANT.sub("", name.lower())
        if shorter == name.lower():
            return None
        name = shorter
    return None


# --- programs --------------------------------------------------------------------------------------------------------

_NAMED: Final = (
    ("thunder", "litgpt+thunder"),
    ("litgpt", "litgpt"),
    ("lit-gpt", "litgpt"),
    ("torchtune", "torchtune"),
    ("torchtitan", "torchtitan"),
    ("rasbt", "rasbt"),
    ("fsdp_qlora", "answerai fsdp_qlora"),
    ("colossal", "colossalchat"),
    ("unsloth", "unsloth"),
    ("qwen", "qwen"),
    ("megatron", "megatron"),
    ("nemo", "megatron"),
    ("peft", "peft"),
    ("deepspeed", "deepspeed"),
)
"""What a program's name has in it, and its record."""


def program_of(row: Row) -> Program:
    """The record of the program that ran a row, with the precision its columns give adapters."""
    program = PROGRAMS[_record(row)]
    if _is_adapter(row) and _bits(row["optimizer"]) == 16:
        program = replace(program, adapter=2.0)
    return program


def stand_in(row: Row) -> str:
    """The record that stands in for a program nobody wrote one for; "" where the program has its own."""
    return "" if _own_record(row) else _closest(row)


def _record(row: Row) -> str:
    return _own_record(row) or _closest(row)


def _own_record(row: Row) -> str:
    """The record of the row's program, "" where there is none."""
    name, quantised = row["program"].lower(), row["method"] == "qlora"
    if name.startswith("fms"):
        found = "fms/foak" if "foak" in name else "fms"
        return f"{found}-quantised" if quantised else found
    found = next((record for part, record in _NAMED if part in name), "")
    if found == "litgpt" and row["sharding"] == "fsdp" and _is_adapter(row):
        return "litgpt/fsdp"
    if found == "litgpt" and quantised:
        return "litgpt-quantised"
    if found == "torchtune" and _compiled(row):
        return "torchtune/compiled"
    if found == "rasbt" and _step_number(row["notes"]) >= _RASBT_NATIVE:
        return "rasbt/native"
    if found == "peft" and row["method"] == "dora":
        return "peft/dora"
    if found == "qwen" and row["compute_dtype"] == "fp16":
        return "qwen-fp16"
    return found


def _closest(row: Row) -> str:
    """For a program without a record: what its columns say it uses."""
    if row["sharding"].startswith("zero"):
        return "deepspeed"
    if row["grad_ckpt"] == "unsloth":
        return "unsloth"
    return "transformers+liger" if row["loss_impl"] == "fused" else "transformers"


_RASBT_NATIVE: Final = 6
"""The step of its tutorial from which LayerNorm and GELU are PyTorch's."""


def _step_number(notes: str) -> int:
    found = re.search(r"cumulative step: (\d+)", notes)
    return int(found[1]) if found else 0


# --- plans -----------------------------------------------------------------------------------------------------------

_WEIGHTS: Final = {
    "nf4": "nf4-plain",
    "nf4-dq": "nf4",
    "fp4": "nf4-plain",
    "int4": "gptq-int4",
    "awq-int4": "gptq-int4",
}
_DOUBLY_QUANTISED: Final = ("fms", "answerai")
"""fms-acceleration quantises doubly (its steady state is 0.516 bytes a parameter); answer.ai's linears by default."""
_WHOLE_COLUMNS: Final = ("llama-2-70b", "mixtral-8x7b")
"""Models whose public GPTQ checkpoints (main branch) have no groups; fms-acceleration loads those."""
_DROPOUT: Final = {"fms": 0.1, "answerai": 0.1, "unsloth": 0.0, "torchtune": 0.0, "peft": 0.0, "colossal": 0.0}
_USUAL_DROPOUT: Final = 0.05
_FUSED_LOSS_ROWS: Final = 1024
_KNOWN_WEIGHTS: Final = (
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "nf4",
    "nf4-plain",
    "gptq-int4",
    "gptq-int4-whole",
    "gptq-int8",
)


def plan_of(row: Row, architecture: Architecture) -> Plan:
    """The row's settings as a plan."""
    values: dict[str, Any] = {
        **_weights(row),
        **_optimizer(row),
        **_recompute(row, architecture),
        **_loss(row, architecture),
        **_adapter(row, architecture),
        **_cards(row),
    }
    return Plan(
        device="cuda:0",
        budget_bytes=0,
        max_length=_number(row["seq_len"]),
        micro_batch=_number(row["micro_batch"]),
        accumulation=2 if program_of(row).accumulates else 1,
        attention=_one_of(row["attention"], ("eager", "flash", "sdpa"), "sdpa"),  # type: ignore[arg-type]
        compiled=_compiled(row),
        **values,
    )


def _compiled(row: Row) -> bool:
    return row["compile"].lower() not in ("", "no", "none", "false", "0", "unknown")


def _is_adapter(row: Row) -> bool:
    return row["method"] in ("lora", "qlora", "dora") or bool(_number(row["lora_rank"]))


def _weights(row: Row) -> dict[str, Any]:
    stored = _WEIGHTS.get(row["weight_dtype"], row["weight_dtype"])
    if stored == "nf4-plain" and row["program"].startswith(_DOUBLY_QUANTISED):
        stored = "nf4"
    if stored == "gptq-int4" and any(part in row["model_id"].lower() for part in _WHOLE_COLUMNS):
        stored = "gptq-int4-whole"
    stored = _one_of(stored, _KNOWN_WEIGHTS, "nf4" if row["method"] == "qlora" else "bf16")
    plain = stored in ("fp32", "bf16", "fp16")
    adapter = _is_adapter(row)
    return {
        "method": ("lora" if plain else "qlora") if adapter else "full",
        "weight_format": stored,
        "trained_format": stored if plain else "bf16",
        "compute": _one_of(row["compute_dtype"], ("bf16", "fp16", "fp32"), "bf16"),  # float8 keeps 16-bit activations
        "weights_tier": "host" if "params" in row["offload"] or row["offload"] == "all" else "device",
    }


def _bits(optimizer: str) -> int:
    return {"bf16": 16, "fp32": 32, "8bit": 8, "4bit": 4}.get(optimizer.rpartition("_")[2], 32)


def _optimizer(row: Row) -> dict[str, Any]:
    name = row["optimizer"].lower()
    away = name.startswith("paged") or any(part in row["offload"] for part in ("optimizer", "params", "all"))
    return {
        "optimizer": next((kind for kind in ("adafactor", "lion", "muon", "sgd") if kind in name), "adamw"),
        "optimizer_bits": _bits(name),
        "optimizer_tier": "host" if away else "device",
        "optimizer_in_backward": "fused into backward" in row["notes"],
    }


def _recompute(row: Row, architecture: Architecture) -> dict[str, Any]:
    kind = row["grad_ckpt"]
    if kind in ("", "none", "no", "unknown") or (kind == "selective" and program_of(row).selective == "attention"):
        return {"recompute": 0}
    waits = "activations" in row["offload"] or kind == "unsloth"
    return {
        "recompute": architecture.layers,
        "selective": kind == "selective",
        "input_tier": "host" if waits else "device",
    }


def _loss(row: Row, architecture: Architecture) -> dict[str, Any]:
    kind = _one_of(row["loss_impl"], ("full", "chunked", "fused"), "full")
    batch, tokens = _number(row["micro_batch"]), _number(row["micro_batch"]) * _number(row["seq_len"])
    rows = chunk_rows(program_of(row), kind, architecture, micro_batch=batch, tokens=tokens)
    return {"loss": kind, "loss_chunk_tokens": rows}


def _adapter(row: Row, architecture: Architecture) -> dict[str, Any]:
    if not _is_adapter(row):
        return {}
    names = [name for name in row["lora_targets"].split("+") if name and name != "unknown"]
    places = {"wte": "embedding", "embed_tokens": "embedding", "lm_head": "head"}
    saved = tuple(places[name[5:]] for name in names if name.startswith("save:") and name[5:] in places)
    linears = tuple(name for name in names if not name.startswith("save:") and name != "lm_head")
    dropout = next((value for part, value in _DROPOUT.items() if row["program"].startswith(part)), _USUAL_DROPOUT)
    return {
        "lora_rank": _number(row["lora_rank"]) or 8,
        "lora_targets": _targets(linears or ("q_proj", "v_proj"), architecture),
        "lora_dropout": dropout,
        "saved_modules": saved,
    }


def _targets(names: tuple[str, ...], architecture: Architecture) -> tuple[str, ...]:
    """The model's own names: a part of what it has in one projection is that projection."""
    names = ("all-linear",) if "all-linear" in names else names
    own = {linear.name for linear in architecture.linears(architecture.layers - 1)}
    if names == ("all-linear",) or own & set(names):
        return names
    family = families.family(architecture.family)
    parts = {"q_proj": family.qkv, "k_proj": family.qkv, "v_proj": family.qkv, "o_proj": (family.out,)}
    parts |= {"gate_proj": family.up, "up_proj": family.up, "down_proj": (family.down,)}
    found = tuple(dict.fromkeys(own_name for name in names for own_name in parts.get(name, ())))
    return found or ("all-linear",)


def _cards(row: Row) -> dict[str, Any]:
    cards = max(1, _number(row["gpus"]))
    text = row["sharding"].lower()
    kinds: tuple[ShardingKind, ...] = ("zero1", "zero2", "zero3", "fsdp", "ddp")
    kind = next((kind for kind in kinds if kind in text), "ddp" if text in ("", "none", "unknown") else "fsdp")
    return {"cards": cards, "sharding": kind if cards > 1 else "none"}


def _one_of(value: str, known: tuple[str, ...], otherwise: str) -> str:
    return value if value in known else otherwise


_MOST: Final = 10**8
"""No length, micro-batch, rank or number of cards is larger."""


def _number(text: str) -> int:
    """A whole number above 0, 0 when there is none."""
    found = decimal(text)
    return int(found) if 0 < found <= _MOST else 0


def decimal(text: str) -> float:
    """A finite number, NaN when `text` is none."""
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def measured(row: Row, column: str) -> float:
    """What a column says was measured. Raises Unusable when that is no number above 0."""
    found = decimal(row[column])
    if not found > 0:
        raise Unusable(f"{column} is {row[column]!r}, no number above 0")
    return found


def is_set(text: str) -> bool:
    """Whether a column of 0 and 1 says yes."""
    return text.lower() in ("1", "1.0", "true", "yes")
