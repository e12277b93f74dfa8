"""Rows as plans and programs: what the columns say, and whatever else they may hold."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from reference_rows import Unusable, plan_of, program_of, read_rows, run_of

from vramfit.models import catalogue
from vramfit.planning.memory import estimate_memory

ROW = {
    "id": "T1",
    "model_id": "meta-llama/Llama-2-7b-hf",
    "method": "lora",
    "lora_rank": "8",
    "lora_targets": "q_proj+v_proj",
    "weight_dtype": "bf16",
    "compute_dtype": "bf16",
    "optimizer": "adamw_fp32",
    "micro_batch": "1",
    "seq_len": "512",
    "seq_len_is_cap": "0",
    "grad_ckpt": "none",
    "attention": "sdpa",
    "loss_impl": "full",
    "compile": "no",
    "offload": "none",
    "gpus": "1",
    "sharding": "none",
    "gpu_model": "RTX 4090",
    "peak_gib": "20",
    "metric": "allocated",
    "tokens_per_s": "",
    "program": "a trainer",
    "software": "",
    "quality": "B",
    "dedup_weight": "1",
    "source_url": "https://example.org/a",
    "notes": "",
}

ODD = {
    "method": ["full", "lora", "qlora", "dora", "pretrain", ""],
    "lora_rank": ["", "8", "16.0", "unknown"],
    "lora_targets": ["", "unknown", "all-linear", "c_attn", "save:embed_tokens+save:lm_head+q_proj", "strange"],
    "weight_dtype": ["bf16", "fp32", "nf4", "nf4-dq", "gptq-int4", "gptq-int8", "fp8", "", "unknown"],
    "compute_dtype": ["bf16", "fp16", "fp32", "float8 rowwise", "mxfp8_cublas", ""],
    "optimizer": ["adamw_bf16", "adamw_8bit", "paged_adamw_8bit", "adafactor", "muon", "", "unknown"],
    "grad_ckpt": ["none", "full", "selective", "unsloth", "", "unknown"],
    "attention": ["sdpa", "flash", "eager", "unknown", ""],
    "loss_impl": ["full", "chunked", "fused", "", "unknown"],
    "compile": ["yes", "no", "thunder", ""],
    "offload": ["none", "params", "optimizer", "activations", "", "optimizer+params"],
    "gpus": ["1", "2", "8", "", "unknown"],
    "sharding": ["none", "ddp", "fsdp", "fsdp2", "zero1", "zero2", "zero3", "tp", ""],
    "program": [
        "fms/none",
        "litgpt",
        "litgpt+thunder",
        "trl",
        "NeMo",
        "deepspeed",
        "unsloth",
        "torchtune",
        "",
        "other",
    ],
}


def row(**changes: str) -> dict[str, str]:
    return {**ROW, **changes}


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"program": "fms/accelerated-peft-bnb-foak", "method": "qlora"}, "fms/foak-quantised"),
        ({"program": "fms/none"}, "fms"),
        ({"program": "litgpt", "method": "qlora"}, "litgpt-quantised"),
        ({"program": "litgpt", "gpus": "2", "sharding": "fsdp"}, "litgpt/fsdp"),
        ({"program": "litgpt+thunder"}, "litgpt+thunder"),
        ({"program": "torchtune", "compile": "yes"}, "torchtune/compiled"),
        ({"program": "NeMo 2.0"}, "megatron"),
        ({"program": "peft metamathqa", "method": "dora"}, "peft/dora"),
        ({"program": "nobody knows"}, "transformers"),
        ({"program": "nobody knows", "sharding": "zero3", "gpus": "8"}, "deepspeed"),
        ({"program": "nobody knows", "loss_impl": "fused"}, "transformers+liger"),
        ({"program": "rasbt LLMs-from-scratch", "notes": "cumulative step: 06 native LayerNorm"}, "rasbt/native"),
        ({"program": "rasbt LLMs-from-scratch", "notes": "cumulative step: 04/05 bf16"}, "rasbt"),
    ],
)
def test_a_row_finds_its_program_or_the_closest(changes: dict[str, str], name: str) -> None:
    assert program_of(row(**changes)).name == name


def test_moments_in_16_bits_tell_that_adapters_are() -> None:
    assert program_of(row(optimizer="adamw_bf16")).adapter == 2.0
    assert program_of(row()).adapter == 4.0


def test_columns_become_a_plan() -> None:
    architecture = catalogue.find("meta-llama/Llama-2-7b-hf")
    assert architecture is not None
    found = plan_of(
        row(
            method="qlora",
            weight_dtype="nf4",
            optimizer="paged_adamw_8bit",
            grad_ckpt="selective",
            offload="activations",
            gpus="8",
            sharding="fsdp2",
            compile="thunder",
            notes="optimizer step fused into backward",
        ),
        architecture,
    )

    assert (found.method, found.weight_format, found.optimizer_bits) == ("qlora", "nf4-plain", 8)
    assert (found.optimizer_tier, found.optimizer_in_backward) == ("host", True)
    assert (found.recompute, found.selective, found.input_tier) == (32, True, "host")
    assert (found.cards, found.sharding, found.compiled) == (8, "fsdp", True)


def test_targets_are_found_in_a_fused_projection() -> None:
    architecture = catalogue.find("EleutherAI/pythia-6.9b")
    assert architecture is not None
    found = plan_of(row(model_id="EleutherAI/pythia-6.9b"), architecture)

    assert found.lora_targets == ("query_key_value",)


def test_litgpt_gives_a_tied_model_a_head_of_its_own() -> None:
    run = run_of(row(program="litgpt", model_id="meta-llama/Llama-3.2-1B"))

    assert not run.architecture.tied_embeddings


@pytest.mark.parametrize(
    "changes",
    [
        {"model_id": "nobody/nothing"},
        {"model_id": ""},
        {"seq_len": ""},
        {"seq_len": "-1"},
        {"seq_len": "1e999"},
        {"micro_batch": "unknown"},
        {"micro_batch": "999999999999"},
    ],
)
def test_what_cannot_be_compared_says_why(changes: dict[str, str]) -> None:
    with pytest.raises(Unusable):
        run_of(row(**changes))


@pytest.mark.parametrize("seed", range(40))
def test_odd_values_never_stop_it(seed: int) -> None:
    draw = random.Random(seed)
    values: dict[str, Any] = {name: draw.choice(choices) for name, choices in ODD.items()}
    run = run_of(row(model_id=draw.choice(catalogue.known()), **values))

    assert estimate_memory(run.architecture, run.plan, run.workload, program=run.program).peak_bytes > 0


@pytest.mark.parametrize("rank", ["-1", "inf", "nan", "1e30", "unknown", ""])
def test_a_rank_that_is_no_number_is_the_usual_one(rank: str) -> None:
    run = run_of(row(method="lora", lora_rank=rank))

    assert run.plan.lora_rank == 8


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("meta-llama/Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B"),
        ("unsloth/llama-3-8b-bnb-4bit", "meta-llama/Meta-Llama-3-8B"),
        ("google/gemma-2-9b-it", "google/gemma-2-9b"),
        ("TheBloke/Mistral-7B-v0.1-GPTQ", "mistralai/Mistral-7B-v0.1"),
    ],
)
def test_a_variant_has_the_shapes_of_its_model(name: str, model: str) -> None:
    assert run_of(row(model_id=name)).architecture.name == model


def test_rows_are_read_with_their_blank_missing_and_surplus_fields(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("id,method,seq_len,model_id\n a , lora\nb,full,512,x,y,z\n", encoding="utf-8-sig")
    first, second = read_rows(path)

    assert (first["id"], first["method"], first["seq_len"], first["peak_gib"]) == ("a", "lora", "", "")
    assert (second["id"], second["seq_len"], second["notes"]) == ("b", "512", "")
