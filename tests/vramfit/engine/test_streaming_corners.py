"""What a streamed step does with unusual models, drives and memory: the numbers of a resident one, or a sentence."""

from __future__ import annotations

import dataclasses
import gc
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.vramfit.engine import test_streaming as adapted
from tests.vramfit.engine import test_trained_blocks as in_full
from tests.vramfit.engine.pseudo_card import PseudoCard
from tests.vramfit.engine.test_streaming import a_config, a_plan, batches, saved
from tests.vramfit.engine.test_trained_blocks import disk, full_plan
from tests.vramfit.models.tiny_families import TINY
from vramfit.config import LossChoice, ScheduleChoice
from vramfit.engine.drift import Calibrator
from vramfit.engine.later import Later
from vramfit.engine.mapped import MappedFile
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import Piece, ResidentExecutor
from vramfit.engine.streaming import StreamingExecutor
from vramfit.engine.trained_blocks import Where
from vramfit.engine.visiting import Call
from vramfit.errors import CheckpointError, ConfigError, ModelError, WontFit
from vramfit.models.adapters import attach_adapters, merged_state
from vramfit.models.export_parts import write_parts
from vramfit.models.load import load_model, own_weights
from vramfit.models.streamed import open_streamed
from vramfit.planning.plan import Plan

ROUTERS_BIAS = "e_score_correction_bias"
UNTIED_GPT2 = {"tie_word_embeddings": False, "attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}


def from_files(plan: Plan, **changes: Any) -> Plan:
    """Blocks from the model's own files, states of adapters where they are."""
    return dataclasses.replace(plan, **{"weights_tier": "disk", **changes})


def one_pass(plan: Plan) -> Plan:
    return dataclasses.replace(plan, optimizer_in_backward=True, clip_passes=1)


def with_biases(family: str, folder: Path) -> Path:
    """A model whose routers have biases, which are persistent buffers and zero in a new model."""
    saved(family, folder, **dict(TINY)[family])
    tensors = load_file(folder / "model.safetensors")
    biases = [name for name in tensors if ROUTERS_BIAS in name]
    assert biases
    for name in biases:
        tensors[name] = 5 * torch.randn_like(tensors[name])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def assert_close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert found
    assert [name for name in found if not torch.allclose(found[name], wanted[name], rtol=1e-4, atol=1e-7)] == []


# --- unusual models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_persistent_buffers_come_from_the_files(family: str, tmp_path: Path) -> None:
    """They decide which experts a token goes to, and are no parameters."""
    folder = with_biases(family, tmp_path / "model")
    plan = a_plan()
    there = adapted.resident(folder, plan, tmp_path)

    assert adapted.streaming(folder, from_files(plan), tmp_path).evaluate(batches()) == there.evaluate(batches())


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe"])
def test_persistent_buffers_are_exported(family: str, tmp_path: Path) -> None:
    folder = with_biases(family, tmp_path / "model")
    here = in_full.streaming(folder, disk(full_plan()), tmp_path)
    (tmp_path / "parts").mkdir()

    write_parts(here.model, here.parts(), tmp_path / "parts")

    found, wanted = load_file(tmp_path / "parts" / "model.safetensors"), load_file(folder / "model.safetensors")
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_experts_without_tokens(in_one_pass: bool, tmp_path: Path) -> None:
    """Their gradients are zero, and are stepped as such."""
    folder = saved("mixtral", tmp_path / "model", num_local_experts=16, num_experts_per_tok=1)
    plan = one_pass(full_plan()) if in_one_pass else full_plan()

    in_full.assert_equal_runs(
        in_full.resident(folder, plan, tmp_path), in_full.streaming(folder, disk(plan), tmp_path), steps=2
    )


def test_an_untied_gpt2_with_positions_and_a_changed_loss(tmp_path: Path) -> None:
    """Its embedding of positions trains beside that of tokens, before the blocks."""
    folder = saved("gpt2", tmp_path / "model", **UNTIED_GPT2)
    plan, options = full_plan(), {"loss": LossChoice(z_loss=0.01, label_smoothing=0.1)}

    in_full.assert_equal_runs(
        in_full.resident(folder, plan, tmp_path, **options),
        in_full.streaming(folder, disk(plan), tmp_path, **options),
        steps=2,
    )


# --- random numbers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "attention"), [("llama", "eager"), ("granite", "sdpa")])
def test_attention_dropout_that_only_the_config_names_is_drawn_alike_twice(
    family: str, attention: Any, tmp_path: Path
) -> None:
    """No module draws it. With one block, random numbers fall in the order of a resident run."""
    folder = saved(family, tmp_path / "model", attention_dropout=0.5, num_hidden_layers=1)
    plan = a_plan(attention=attention)
    measured = []
    for executor in (
        adapted.resident(folder, plan, tmp_path),
        adapted.streaming(folder, from_files(plan), tmp_path),
    ):
        torch.manual_seed(5)
        measured.append(executor.gradients(Piece.of(batches()[0])))
    (loss, wanted), (own_loss, found) = measured

    assert own_loss == loss
    assert_close({name: each for name, each in found.items() if each is not None}, dict(wanted))  # type: ignore[arg-type]


def test_dropout_of_an_embedding_that_trains_is_drawn_alike_twice(tmp_path: Path) -> None:
    """What comes before the blocks has a second forward of its own, after theirs."""
    folder = saved("gpt2", tmp_path / "model", n_layer=1, **{**UNTIED_GPT2, "embd_pdrop": 0.5})
    plan = full_plan()
    gradients = []
    for executor in (
        in_full.resident(folder, plan, tmp_path),
        in_full.streaming(folder, disk(plan), tmp_path),
    ):
        torch.manual_seed(5)
        executor.rehearse(batches()[:1])
        named = executor.model.named_parameters()
        gradients.append({name: each.grad.clone() for name, each in named if each.grad is not None})
    wanted, outside_blocks = gradients

    assert {"transformer.wte.weight", "transformer.wpe.weight"} <= outside_blocks.keys()
    assert_close(outside_blocks, wanted)


# --- adapters --------------------------------------------------------------------------------------------------------


def test_states_of_adapters_in_ram_see_the_sum_of_all_micro_batches(tmp_path: Path) -> None:
    """An adapter's gradient leaves for RAM when it is whole: with its block's last micro-batch, not before."""
    folder = saved("llama", tmp_path / "model")
    plan = a_plan(optimizer_tier="host")

    adapted.assert_equal_runs(
        adapted.resident(folder, plan, tmp_path), adapted.streaming(folder, from_files(plan), tmp_path)
    )


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"targets": ("q_proj", "lm_head")}),
        ("llama", {"variant": "rslora"}),
        ("mixtral", {"experts": True}),
    ],
    ids=["head", "rslora", "experts"],
)
def test_a_merged_export_has_every_adapter(family: str, options: dict[str, Any], tmp_path: Path) -> None:
    changes = {"num_local_experts": 4, "num_experts_per_tok": 2} if family == "mixtral" else {}
    folder = saved(family, tmp_path / "model", **changes)
    plan = a_plan(lora_targets=options.get("targets", ("all-linear",)), lora_experts="experts" in options)

    def attach(model: nn.Module) -> nn.Module:
        return attach_adapters(model, rank=4, alpha=8.0, seed=3, **options)

    whole = attach(own_weights(load_model(a_config(folder, "full"), full_plan(), cache=tmp_path)))
    there = ResidentExecutor(whole, plan=plan, optimizer=build_optimizer(whole, ScheduleChoice(), plan))
    streamed = from_files(plan)
    model, visits = open_streamed(a_config(folder), streamed, scratch=tmp_path / "scratch", attach=attach)
    optimizer = build_optimizer(model, ScheduleChoice(), streamed)
    here = StreamingExecutor(model, visits=visits, plan=streamed, optimizer=optimizer)
    adapted.assert_equal_runs(there, here)

    found = {
        name: each.read() if isinstance(each, Later) else each for part in here.parts() for name, each in part.items()
    }
    wanted = merged_state(there.model)
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.allclose(found[name], wanted[name], atol=1e-6)] == []


# --- measuring -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_a_drift_check_changes_nothing(in_one_pass: bool, tmp_path: Path) -> None:
    """Its gradients go neither to the tier nor, in one pass, into weights."""
    folder = saved("llama", tmp_path / "model")
    plan = full_plan(compute="bf16")
    here = in_full.streaming(folder, disk(one_pass(plan) if in_one_pass else plan), tmp_path)
    here.step(batches(), 1e-2)
    before, values = in_full.state_of(here), here.state()[1]

    check = Calibrator(here, limit=0.003, may_raise=False).check(batches()[0])

    assert not check.skipped and check.drifts[0].grad_norm > 0
    after = in_full.state_of(here)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert here.state()[1] == values


@pytest.mark.parametrize("in_one_pass", [False, True])
def test_a_measured_norm_is_that_of_all_weights(in_one_pass: bool, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = full_plan()
    there = in_full.resident(folder, plan, tmp_path)
    here = in_full.streaming(folder, disk(one_pass(plan) if in_one_pass else plan), tmp_path)

    piece = Piece.of(batches()[0])
    assert here.measure(piece) == pytest.approx(there.measure(piece), rel=1e-5)


# --- memory that runs out, drives that fail --------------------------------------------------------------------------


@pytest.mark.parametrize("trains", ["adapters", "all"])
def test_memory_that_runs_out_in_an_evaluation_halves_what_goes_together(trains: str, tmp_path: Path) -> None:
    """First micro-batches, of which two go together, then the rows of one. What is done already counts once."""
    folder = saved("llama", tmp_path / "model")

    def executor() -> StreamingExecutor:
        if trains == "all":
            return in_full.streaming(folder, disk(full_plan()), tmp_path)
        return adapted.streaming(folder, from_files(a_plan()), tmp_path)

    undisturbed, here = executor(), executor()
    loss, tokens = undisturbed.evaluate(batches())
    held_out = batches()

    with PseudoCard(failing=(40, 400)) as card:  # in the first two, then in the second of them
        found, counted = here.evaluate(held_out)

    assert card.raised == 2 and here.evaluation_rows == 1 and here.recovery.most_rows == 0
    assert "evaluations go on with 1 sequences at a time" in here.evaluation_recovered
    assert counted == tokens and found == pytest.approx(loss, rel=1e-6)
    with PseudoCard(failing=(40,)), pytest.raises(WontFit, match="in an evaluation, with a single sequence"):
        here.evaluate(held_out)  # one micro-batch of one row at a time by now
    undisturbed.step(batches(), 1e-3)
    here.step(batches(), 1e-3)
    assert undisturbed.evaluate(batches()) == undisturbed.evaluate(batches())
    one, other = (dict(executor.model.named_parameters()) for executor in (undisturbed, here))
    assert all(torch.equal(one[name], other[name]) for name in one if one[name].device.type != "meta")


def test_memory_that_runs_out_while_a_block_is_stepped_never_steps_it_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last block's weights change only after the error, in another thread: that, too, is known to who repeats."""
    folder = saved("llama", tmp_path / "model")
    here = in_full.streaming(folder, disk(one_pass(full_plan())), tmp_path)
    here.step(batches(), 1e-3)
    assert here.trained is not None
    step, backward = here.trained.step, here._backward_of
    stepped: list[str] = []
    failed = threading.Event()

    def late(where: Where, *args: Any) -> None:
        assert failed.wait(timeout=60)
        time.sleep(0.02)
        stepped.append(where.name)
        step(where, *args)

    def without_room(block: int, index: int, upstream: list[Tensor], call: Call) -> None:
        if block == 3 and not failed.is_set():
            try:
                with PseudoCard(failing=(1,)):
                    backward(block, index, upstream, call)
            finally:
                failed.set()
        backward(block, index, upstream, call)

    monkeypatch.setattr(here.trained, "step", late)
    monkeypatch.setattr(here, "_backward_of", without_room)

    with pytest.raises(WontFit, match="had already changed, so the step cannot be repeated"):
        here.step(batches(), 1e-3)
    assert stepped and all(name.startswith("model.layers.4.") for name in stepped)
    assert len(stepped) == len(set(stepped))


def test_fp16_in_one_pass_is_refused(tmp_path: Path) -> None:
    """As in a resident run: weights that have moved cannot be taken back when a later gradient overflows."""
    folder = saved("llama", tmp_path / "model")

    with pytest.raises(ConfigError, match="one pass cannot be taken back"):
        in_full.streaming(folder, disk(one_pass(full_plan(compute="fp16"))), tmp_path)


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads are made in another way here")
@pytest.mark.parametrize(("trains", "kind"), [("adapters", ModelError), ("all", CheckpointError)])
def test_a_drive_that_cannot_be_read_is_told(
    trains: str, kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model's own file, or the run's. Reads are made by threads of their own, whose errors come to the step."""
    folder = saved("llama", tmp_path / "model")
    if trains == "all":
        here = in_full.streaming(folder, disk(full_plan()), tmp_path)
    else:
        here = adapted.streaming(folder, from_files(a_plan()), tmp_path)
    here.step(batches(), 1e-2)

    def broken(*_: object) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", broken)
    monkeypatch.setattr(MappedFile, "_ask", broken)  # what is computed with where it lies is asked for
    with pytest.raises(kind, match=r"cannot be read \(Input/output error\)"):
        here.step(batches(), 1e-2)


@pytest.mark.skipif(sys.platform == "win32", reason="files are not numbered there")
def test_no_threads_and_no_files_are_left(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")

    def train(run: int) -> None:
        for executor in (
            in_full.streaming(folder, disk(full_plan()), tmp_path / str(run)),
            adapted.streaming(folder, from_files(a_plan()), tmp_path / str(run)),
        ):
            executor.step(batches(), 1e-3)
            executor.evaluate(batches())

    train(0)  # what torch begins once stays
    gc.collect()
    threads, files = set(threading.enumerate()), psutil.Process().num_fds()

    for run in range(1, 5):
        train(run)
    gc.collect()

    begun = set(threading.enumerate()) - threads
    for thread in begun:
        thread.join(timeout=30)  # a thread ends soon after its owner
    assert not any(thread.is_alive() for thread in begun)
    assert psutil.Process().num_fds() <= files
