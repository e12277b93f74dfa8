"""Only the last blocks train: what has a gradient, nothing before it is touched, and both executors have one's bits."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.vramfit.engine.test_streaming import EAGER, batches, saved
from tests.vramfit.engine.test_trained_blocks import (
    assert_equal_runs,
    assert_equal_states,
    disk,
    full_plan,
    resident,
    state_of,
    streaming,
)
from tests.vramfit.models.tiny_families import TINY, tiny_config, tiny_ids
from vramfit.engine.activations import find_blocks
from vramfit.engine.governor import StepCost, build_governor
from vramfit.engine.last_blocks import after_blocks, train_last_blocks
from vramfit.engine.later import Later
from vramfit.engine.resident import ResidentExecutor
from vramfit.engine.streaming import StreamingExecutor
from vramfit.models import streamed
from vramfit.models.architecture import from_config
from vramfit.models.export_parts import write_parts
from vramfit.planning.plan import Plan
from vramfit.planning.stored import trained_params

OPT = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "ffn_dim": 96, "vocab_size": 128}
FAMILIES = [*TINY, ("opt", {**OPT, "word_embed_proj_dim": 32}), ("opt", {**OPT, "word_embed_proj_dim": 64})]
IDS = [*tiny_ids(), "opt-narrow", "opt"]


def last(count: int, **changes: Any) -> Plan:
    return full_plan(last_blocks=count, **{"recompute": count, **changes})


def called_after_blocks(model: nn.Module) -> set[int]:
    """The parameters of the modules that a forward calls when the last block is done."""
    blocks: Any = find_blocks(model)
    called: list[nn.Module] = []
    for module in model.modules():
        module.register_forward_hook(lambda module, *_: called.append(module))
    with torch.no_grad():
        model(torch.arange(5).unsqueeze(0), use_cache=False)
    done = max(index for index, module in enumerate(called) if module is blocks[-1])
    return {id(each) for module in called[done + 1 :] for each in module.parameters(recurse=False)}


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=IDS)
def test_what_comes_after_the_blocks_is_what_is_called_after_them(family: str, changes: dict[str, Any]) -> None:
    """And the planner counts as many parameters as then train."""
    import transformers

    torch.manual_seed(0)
    config = tiny_config(family, changes)
    config._attn_implementation = "eager"
    model: Any = transformers.AutoModelForCausalLM.from_config(config)
    table = model.get_input_embeddings().weight

    train_last_blocks(model, 2)

    found = {id(each) for each in after_blocks(model)}
    assert found == called_after_blocks(model) - {id(table)}
    assert not table.requires_grad
    trained = sum(each.numel() for each in model.parameters() if each.requires_grad)
    blocks: Any = list(find_blocks(model))[-2:]
    # A router's correction is no parameter of the library's, and the shape counts it.
    trained += sum(each.numel() for block in blocks for name, each in block.named_buffers() if "correction" in name)
    assert trained == trained_params(from_config(config.to_dict(), family), last(2))
    train_last_blocks(model, 0)
    assert all(each.requires_grad for each in model.parameters())


def test_a_resident_run_changes_and_keeps_nothing_before_the_first_trained_block(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    there = resident(folder, last(2), tmp_path)
    before = {name: each.clone() for name, each in there.model.named_parameters()}
    graph: list[bool] = []
    blocks: Any = find_blocks(there.model)
    blocks[2].register_forward_hook(lambda module, given, end: graph.append(end.requires_grad))

    there.step(batches(), 1e-2)

    changed = {name for name, each in there.model.named_parameters() if not torch.equal(before[name], each)}
    assert changed == {name for name in before if name.startswith(("model.layers.3.", "model.layers.4."))} | {
        "model.norm.weight",
        "lm_head.weight",
    }
    assert graph and not any(graph)
    assert there.activations == ("keep", "keep", "keep", "recompute", "recompute")
    kept = [name for name in state_of(there) if name.startswith("model.")]
    assert set(there._trained) == changed and len(kept) == len(changed)


def test_its_gradients_are_those_of_the_same_weights_in_a_run_that_trains_all(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    whole, part = resident(folder, full_plan(), tmp_path), resident(folder, last(2), tmp_path)
    piece = whole.pieces(batches()[0])[0]

    loss, gradients = whole.gradients(piece)
    found, own = part.gradients(piece)

    assert found == loss and 0 < len(own) < len(gradients)
    assert all(torch.equal(each, gradients[name]) for name, each in own.items() if each is not None)


STREAMED = [
    (1, 0, "host"),
    (2, 0, "disk"),
    (2, 1, "disk"),
    (2, 1, "host"),
    (2, 3, "disk"),
    (3, 4, "host"),
    (5, 2, "disk"),
]


@pytest.mark.parametrize(("count", "stay", "tier"), STREAMED)
def test_streamed_ones_train_to_the_same_bits(tier: Any, count: int, stay: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    streams = disk(last(count), weights_tier=tier, optimizer_tier=tier, resident_blocks=stay)

    assert_equal_runs(resident(folder, last(count), tmp_path), streaming(folder, streams, tmp_path), steps=2)


MORE: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"tie_word_embeddings": True}),
    ("gemma2", {"head_dim": 16}),
    ("qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    ("gpt2", {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}),
    ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    ("phi", {}),
    ("opt", {**OPT, "word_embed_proj_dim": 32, "dropout": 0.0, "attention_dropout": 0.0}),
]


@pytest.mark.parametrize(("family", "changes"), MORE, ids=[name for name, _ in MORE])
def test_tied_grouped_and_mixed_families(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    folder = saved(family, tmp_path / "model", **changes)
    plan = last(1, attention="eager" if family in EAGER else "sdpa")
    here = streaming(folder, disk(plan), tmp_path)

    here.check()
    assert_equal_runs(resident(folder, plan, tmp_path), here, steps=2)


@pytest.mark.parametrize(
    "changes",
    [
        {"optimizer": "muon"},
        {"optimizer": "adafactor"},
        {"optimizer_bits": 8},
        {"optimizer_in_backward": True, "clip_passes": 1},
    ],
    ids=["muon", "adafactor", "8 bits", "in backward"],
)
def test_optimizers(changes: dict[str, Any], tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = last(2, **changes)

    assert_equal_runs(resident(folder, plan, tmp_path), streaming(folder, disk(plan), tmp_path), steps=2)


def test_two_passes_in_backward_and_states_in_ram_are_the_plain_step(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plain = resident(folder, last(2), tmp_path)
    twice = resident(folder, last(2, optimizer_in_backward=True, clip_passes=2), tmp_path)
    in_ram = resident(folder, last(2, optimizer_tier="host"), tmp_path)
    for _ in range(2):
        results = [each.step(batches()[:1], 1e-2) for each in (plain, twice, in_ram)]
        assert len({(each.loss, each.grad_norm) for each in results}) == 1
    trained = [dict(run._trained) for run in (plain, twice, in_ram)]
    for other in trained[1:]:
        assert [name for name in other if not torch.equal(other[name], trained[0][name])] == []


def test_bf16_weights(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = last(2, compute="bf16", weight_format="bf16", trained_format="bf16")
    there = resident(folder, dataclasses.replace(plan, optimizer_tier="host"), tmp_path)

    assert_equal_runs(there, streaming(folder, disk(plan), tmp_path))


@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize(("stay", "visits"), [(0, 3 + 2 * 2 - 2), (1, 3 + 2 * 1 - 1), (2, 3 - 1), (4, 0)])
def test_a_step_moves_frozen_blocks_once(stay: int, visits: int, tier: Any, accumulation: int, tmp_path: Path) -> None:
    """Two of five train. Once what is frozen, twice what trains, less what stays and what is there at a turn; from a
    file once what has changed of those that stay, which in RAM is where it is."""
    visits += min(stay, 2) if tier == "disk" else 0
    folder = saved("llama", tmp_path / "model")
    streams = disk(last(2), weights_tier=tier, optimizer_tier=tier, resident_blocks=stay)
    here = streaming(folder, streams, tmp_path)
    assert here.stays == ["stay" if block in streams.staying(5) else "visit" for block in range(5)]
    here.step(batches()[:accumulation], 1e-2)
    traffic, layout = here.visits.stream.traffic, here.visits.stream.tier.layouts[0]
    before = dataclasses.replace(traffic)

    here.step(batches()[:accumulation], 1e-2)

    assert traffic.visits - before.visits == visits
    assert traffic.moved_bytes - before.moved_bytes == visits * layout.nbytes


def test_only_what_trains_is_copied_to_the_runs_own_file(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, disk(last(2)), tmp_path)
    tier: Any = here.visits.stream.tier

    assert tier.written_bytes == 2 * tier.layouts[0].nbytes


def test_no_input_of_a_frozen_block_waits(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, disk(last(2)), tmp_path)
    waited: list[int] = []
    put = here._waiting.put
    here._waiting.put = lambda key, *rest: (waited.append(key[0]), put(key, *rest))[1]  # type: ignore[method-assign]

    here.step(batches(), 1e-2)

    assert sorted(set(waited)) == [3, 4]


def test_a_checkpoint_goes_on_in_the_other_executor_and_stays_may_change(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    there = resident(folder, last(3), tmp_path)
    there.step(batches(), 1e-2)
    tensors, values = state_of(there), there.state()[1]

    here = streaming(folder, disk(last(3), resident_blocks=4), tmp_path)
    here.load_state(tensors, values)
    assert_equal_states(there, here)
    for stays in (["visit"] * 5, ["stay", "visit", "visit", "stay", "visit"], ["stay"] * 5, ["visit"] * 5):
        here.set_stays(stays)  # type: ignore[arg-type]
        assert_equal_runs(there, here, steps=1)

    back = resident(folder, last(3), tmp_path)
    back.load_state(state_of(here), here.state()[1])
    assert_equal_runs(back, here, steps=1)


@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_export_is_the_whole_model(tier: Any, tied: bool, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = saved("llama", tmp_path / "model", tie_word_embeddings=tied)
    streams = disk(last(2), weights_tier=tier, optimizer_tier=tier)
    there, here = resident(folder, last(2), tmp_path), streaming(folder, streams, tmp_path)
    assert_equal_runs(there, here, steps=1)

    model: Any = there.model
    model.save_pretrained(tmp_path / "there")
    (tmp_path / "here").mkdir()
    assert here.parts is not None
    write_parts(here.model, here.parts(), tmp_path / "here")

    whole, parts = (load_file(tmp_path / each / "model.safetensors") for each in ("there", "here"))
    assert whole.keys() == parts.keys()
    assert [name for name in whole if not torch.equal(whole[name], parts[name])] == []


def test_a_governor_leaves_frozen_blocks_alone(tmp_path: Path) -> None:
    there = resident(saved("llama", tmp_path / "model"), last(2, recompute=0), tmp_path)
    modes = there.activations or ("keep",) * 5
    governor = build_governor(modes, device=there.device, apply=there.set_activations, budget_bytes=1000, first=3)
    there.govern(governor)
    reading = dataclasses.replace(there.reading(), allocated=999, reserved=0, reach=0)

    seen = []
    for step in range(1, 4):
        governor.after_step(reading, StepCost(step=step, seconds=1.0, tokens=9, largest_tokens=9))
        seen.append(list(there.activations))

    keep, again = "keep", "recompute"
    assert seen == [[keep, keep, keep, again, keep]] + [[keep, keep, keep, again, again]] * 2
    assert governor.relieve() == ""


def test_whichever_executor_stores_tensors_as_they_are(tmp_path: Path) -> None:
    """Both keep the same names, and the streamed one reads a block's tensors when they are asked for."""
    folder = saved("llama", tmp_path / "model")
    there: ResidentExecutor = resident(folder, last(1), tmp_path)
    here: StreamingExecutor = streaming(folder, disk(last(1)), tmp_path)
    kept, later = there.state()[0], here.state()[0]

    assert kept.keys() == later.keys()
    assert {name for name, each in later.items() if isinstance(each, Later)} >= {
        name for name in later if ".layers." in name
    }


def test_no_one_asks_where_a_frozen_table_is_that_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with adapters: the table of an untied model is hollow, and here it lies where no run is."""
    folder = saved("llama", tmp_path / "model")
    stand_on, plan = streamed._stand_on, disk(last(2))
    there = streaming(folder, plan, tmp_path / "there")
    monkeypatch.setattr(streamed, "_stand_on", lambda device, *model: stand_on(torch.device("meta"), *model))

    here = streaming(folder, plan, tmp_path / "here")
    here.check()

    assert next(here.model.parameters()).is_meta
    assert_equal_runs(there, here, steps=2)
