"""Blocks that visit the device give the bits of blocks that stay on it, and come no more often than they must."""

from __future__ import annotations

import dataclasses
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.vramfit.engine.conftest import make_sequences, pack, pad
from tests.vramfit.models.tiny_families import TINY
from vramfit.config import RunConfig, ScheduleChoice
from vramfit.engine.blocks import Layout
from vramfit.engine.optimizers import build_optimizer
from vramfit.engine.resident import ResidentExecutor
from vramfit.engine.streaming import StreamingExecutor
from vramfit.engine.waiting import WaitingInputs
from vramfit.errors import ModelError
from vramfit.models import streamed
from vramfit.models.adapters import attach_adapters
from vramfit.models.block_tiers import own_tier
from vramfit.models.generate import generate
from vramfit.models.load import load_model, own_weights
from vramfit.models.streamed import open_streamed
from vramfit.planning.plan import Plan
from vramfit.training import opening

FAMILIES = [(family, changes) for family, changes in TINY if family not in ("gpt_neo",)]
EAGER = {"gemma2", "gpt_oss", "mpt", "bloom", "gpt_neo"}


def saved(family: str, folder: Path, **changes: Any) -> Path:
    """A small model of a family with random weights, as the hub has them."""
    import transformers

    values = {
        "hidden_size": 64,
        "num_hidden_layers": 5,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 128,
        "vocab_size": 128,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
        **changes,
    }
    torch.manual_seed(1)
    shape = transformers.AutoConfig.for_model(family, **values)
    transformers.AutoModelForCausalLM.from_config(shape).save_pretrained(folder)
    return folder


def a_plan(method: str = "lora", **changes: Any) -> Plan:
    usual: dict[str, Any] = {
        "method": method,
        "device": "cpu",
        "budget_bytes": 2**33,
        "compute": "fp32",
        "weight_format": "nf4" if method == "qlora" else "fp32",
        "max_length": 64,
        "micro_batch": 2,
        "accumulation": 2,
        "recompute": 0,
        "loss": "chunked",
        "loss_chunk_tokens": 16,
        "lora_rank": 4,
        "lora_targets": ("all-linear",),
    }
    return Plan(**{**usual, **changes})


def a_config(folder: Path, method: str = "lora") -> RunConfig:
    return RunConfig.parse(
        {
            "method": method,
            "model": {"source": str(folder)},
            "data": {"paths": ["rows.json"]},
            "adapter": {"rank": 4, "alpha": 8},
            "seed": 3,
        }
    )


def resident(folder: Path, plan: Plan, tmp_path: Path) -> ResidentExecutor:
    model = load_model(a_config(folder, plan.method), plan, cache=tmp_path)
    return ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))


def streaming(folder: Path, plan: Plan, tmp_path: Path) -> StreamingExecutor:
    model, visits = open_streamed(
        a_config(folder, plan.method),
        plan,
        scratch=tmp_path / "scratch",
        attach=lambda model: attach_adapters(model, rank=4, alpha=8.0, seed=3),
    )
    return StreamingExecutor(
        model,
        visits=visits,
        plan=plan,
        optimizer=build_optimizer(model, ScheduleChoice(), plan),
        inputs_file=tmp_path / "scratch" / "inputs.bin",
    )


def batches() -> list[Any]:
    """Unequal ones, the last of them packed."""
    return [
        pad(make_sequences(24, 17, seed=0)),
        pad(make_sequences(9, 9, seed=1)),
        pack(make_sequences(11, 8, 5, seed=2)),
    ]


def trained(executor: ResidentExecutor) -> dict[str, torch.Tensor]:
    return {name: value.detach() for name, value in executor.model.named_parameters() if value.requires_grad}


def assert_equal_runs(one: ResidentExecutor, other: ResidentExecutor, *, steps: int = 2) -> None:
    for _ in range(steps):
        first, second = one.step(batches(), 1e-2), other.step(batches(), 1e-2)
        assert (first.loss, first.grad_norm) == (second.loss, second.grad_norm)
    left, right = trained(one), trained(other)
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert one.evaluate(batches()) == other.evaluate(batches())


@pytest.mark.parametrize(("family", "changes"), FAMILIES, ids=[f"{name}-{i}" for i, (name, _) in enumerate(FAMILIES)])
def test_every_family_streams_to_the_same_bits(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    import transformers

    known = transformers.AutoConfig.for_model(family).to_dict()
    # Random numbers fall in another order when all micro-batches go through a block before the next block.
    at_random = [key for key in known if "drop" in key or "jitter" in key]
    folder = saved(family, tmp_path / "model", **dict.fromkeys(at_random, 0.0), **changes)
    plan = a_plan(attention="eager" if family in EAGER else "sdpa")
    there = resident(folder, plan, tmp_path)

    assert_equal_runs(there, streaming(folder, dataclasses.replace(plan, weights_tier="disk"), tmp_path), steps=1)


@pytest.mark.parametrize(
    ("method", "tier", "stay"),
    [
        *[("lora", "disk", stay) for stay in range(6)],
        *[("qlora", "disk", stay) for stay in (0, 3, 5)],
        *[("lora", "host", 1), ("qlora", "host", 0)],
    ],
)
def test_any_number_of_blocks_may_stay(method: str, tier: Any, stay: int, tmp_path: Path) -> None:
    _any_number_of_blocks(method, tier, stay, tmp_path)


@pytest.mark.usefixtures("copied")
@pytest.mark.parametrize(("method", "tier", "stay"), [("lora", "host", 0), ("qlora", "host", 3), ("qlora", "disk", 1)])
def test_any_number_of_blocks_may_be_copied(method: str, tier: Any, stay: int, tmp_path: Path) -> None:
    _any_number_of_blocks(method, tier, stay, tmp_path)


def _any_number_of_blocks(method: str, tier: Any, stay: int, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = a_plan(method)

    assert_equal_runs(
        resident(folder, plan, tmp_path),
        streaming(folder, dataclasses.replace(plan, weights_tier=tier, resident_blocks=stay), tmp_path),
    )


def test_adapters_of_experts_meet_the_visiting_experts(tmp_path: Path) -> None:
    folder = saved("mixtral", tmp_path / "model", num_local_experts=4, num_experts_per_tok=2)
    plan = a_plan(lora_experts=True)
    options: dict[str, Any] = {"rank": 4, "alpha": 8.0, "seed": 3, "experts": True}
    import transformers

    there = attach_adapters(own_weights(transformers.AutoModelForCausalLM.from_pretrained(folder)), **options)
    disk = dataclasses.replace(plan, weights_tier="disk")
    here, visits = open_streamed(
        a_config(folder), disk, scratch=tmp_path / "scratch", attach=lambda model: attach_adapters(model, **options)
    )

    assert_equal_runs(
        ResidentExecutor(there, plan=plan, optimizer=build_optimizer(there, ScheduleChoice(), plan)),
        StreamingExecutor(here, visits=visits, plan=disk, optimizer=build_optimizer(here, ScheduleChoice(), disk)),
    )


@pytest.mark.parametrize("method", ["lora", "qlora"])
def test_dora_begins_with_the_rows_of_blocks_that_visit(method: str, tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model", attention_bias=True)
    values = a_config(folder, method).model_dump()
    config = RunConfig.parse({**values, "adapter": {**values["adapter"], "variant": "dora"}})
    plan = a_plan(method, dora=True)
    model = load_model(config, plan, cache=tmp_path)
    there = ResidentExecutor(model, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan))
    disk = dataclasses.replace(plan, weights_tier="disk")
    here = opening._streaming(config, disk, folder=tmp_path, start_file=tmp_path / "start", resumed=False)

    for _ in range(2):
        first, second = there.step(batches(), 1e-2), here.step(batches(), 1e-2)
        assert first.loss == pytest.approx(second.loss, rel=1e-6)
        assert first.grad_norm == pytest.approx(second.grad_norm, rel=1e-5)
    left, right = trained(there), trained(here)
    assert all(torch.allclose(left[name], right[name], rtol=1e-4, atol=1e-6) for name in left)


def test_tied_weights_and_a_head_in_full(tmp_path: Path) -> None:
    folder = saved("qwen3", tmp_path / "model", tie_word_embeddings=True, head_dim=16)
    plan = a_plan(loss="full", loss_chunk_tokens=0)

    assert_equal_runs(
        resident(folder, plan, tmp_path), streaming(folder, dataclasses.replace(plan, weights_tier="disk"), tmp_path)
    )


def test_a_step_moves_two_passes_less_what_is_there_already_however_many_micro_batches(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = a_plan(weights_tier="host", resident_blocks=1)
    executor = streaming(folder, plan, tmp_path)
    block = executor.visits.stream.tier.layouts[0].nbytes
    executor.step(batches()[:1], 1e-3)
    moved = []
    for count in (1, 2, 3):
        before = executor.visits.stream.traffic.moved_bytes
        executor.step(batches()[:count], 1e-3)
        moved.append(executor.visits.stream.traffic.moved_bytes - before)

    # Four blocks visit two slots: two of four are there where the way turns, at the top and at the bottom.
    assert moved == [2 * 2 * block] * 3


def test_stored_in_16_bits_and_computed_in_32(tmp_path: Path) -> None:
    """The file's own numbers, widened when a block's turn comes."""
    import transformers

    folder = saved("llama", tmp_path / "model")
    transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(folder)
    plan = a_plan()
    executor = streaming(folder, dataclasses.replace(plan, weights_tier="disk"), tmp_path)

    assert_equal_runs(resident(folder, plan, tmp_path), executor)
    assert type(executor.visits.stream).__name__ == "WideningStream"


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = a_plan(weights_tier="disk")
    whole, begun, resumed = (streaming(folder, plan, tmp_path) for _ in range(3))
    for _ in range(4):
        expected = whole.step(batches(), 1e-2)
    for _ in range(2):
        begun.step(batches(), 1e-2)
    resumed.load_state(*begun.state())
    for _ in range(2):
        found = resumed.step(batches(), 1e-2)

    assert found == expected
    assert all(torch.equal(value, trained(whole)[name]) for name, value in trained(resumed).items())


def test_a_streamed_model_writes_the_text_of_a_resident_one(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    plan = a_plan()
    prompt = torch.tensor([[5, 9, 33, 12]])

    def text(executor: ResidentExecutor) -> list[int]:
        executor.model.eval()
        model: Any = executor.model
        tokens: list[int] = model.generate(input_ids=prompt, max_new_tokens=12, do_sample=False)[0].tolist()
        return tokens

    there, here = (
        resident(folder, plan, tmp_path),
        streaming(folder, dataclasses.replace(plan, weights_tier="disk"), tmp_path),
    )
    assert text(there) == text(here)


@pytest.mark.parametrize(("device", "tier"), [("cpu", "device"), ("mps", "device"), ("cuda:0", "host")])
def test_inputs_wait_in_ram_only_where_that_is_other_memory(device: str, tier: str) -> None:
    assert WaitingInputs("host", torch.device(device)).tier == tier


def test_apple_silicon_locks_no_pages(tmp_path: Path) -> None:
    """Torch has none there: asked for, they would be an error, as they are here."""
    layout = Layout({"weight": ((8,), torch.float32)})

    assert own_tier(a_plan(device="mps"), "host", [layout], tmp_path, "blocks").in_memory


class Numbers:
    """A tokenizer whose text is its tokens."""

    pad_token_id = 0
    eos_token_id = None

    def decode(self, tokens: torch.Tensor, **_: Any) -> str:
        return str(tokens.tolist())


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_no_one_asks_where_a_table_is_that_is_looked_up(
    tier: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is the model's first parameter and hollow. Here it lies on torch's device for nothing, where no run is."""
    folder = saved("llama", tmp_path / "model")
    stand_on = streamed._stand_on
    there = streaming(folder, a_plan(weights_tier=tier), tmp_path / "there")
    monkeypatch.setattr(streamed, "_stand_on", lambda device, *model: stand_on(torch.device("meta"), *model))

    here = streaming(folder, a_plan(weights_tier=tier), tmp_path / "here")
    here.check()

    assert next(here.model.parameters()).is_meta and here.device == torch.device("cpu")
    assert_equal_runs(there, here)
    said = [
        generate(each.model, Numbers(), [5, 9, 33, 12], 8, 0, device=each.device, temperature=0)
        for each in (there, here)
    ]
    assert said[0] == said[1] and len(said[0]) > 8


def test_what_the_embedding_gave_is_gone_when_the_first_block_is_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of all micro-batches: in an evaluation nothing waits for backward."""
    folder = saved("llama", tmp_path / "model")
    here = streaming(folder, a_plan(weights_tier="host"), tmp_path)
    catch, compute = here.visits.catch, here.visits.compute
    given: list[weakref.ref[torch.UntypedStorage]] = []
    there: list[int] = []

    def caught(forward: Any) -> Any:
        found = catch(forward)
        given.append(weakref.ref(found.hidden.untyped_storage()))
        return found

    def computed(block: int, *args: Any) -> torch.Tensor:
        if block == 1:
            there.append(sum(each() is not None for each in given))
        return compute(block, *args)

    monkeypatch.setattr(here.visits, "catch", caught)
    monkeypatch.setattr(here.visits, "compute", computed)
    here.evaluate(batches())

    assert len(given) == 3 and there == [0, 0, 0]


def test_a_weight_file_that_changes_is_told_by_name(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    executor = streaming(folder, a_plan(weights_tier="disk"), tmp_path)
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])

    with pytest.raises(ModelError, match=r"model\.safetensors has changed since the run began"):
        executor.step(batches(), 1e-2)


def test_a_tensor_that_is_missing_is_told_before_anything_is_read(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = saved("llama", tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(ModelError, match=r"1 tensors are missing .* model\.layers\.3\.mlp\.up_proj\.weight"):
        streaming(folder, a_plan(weights_tier="disk"), tmp_path)


def test_blocks_that_depend_on_more_than_the_hidden_state_are_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "model")
    executor = streaming(folder, a_plan(weights_tier="host"), tmp_path)
    second: Any = executor.visits.blocks[1]
    usual = second.forward
    whole: Any = executor.model
    decoder = whole.get_base_model().model
    seen: dict[str, torch.Tensor] = {}
    decoder.layers[0].register_forward_hook(lambda module, args, result: seen.update(more=result.sum()))
    second.forward = lambda hidden, *args, **kwargs: usual(hidden, *args, more=seen["more"], **kwargs)

    with pytest.raises(ModelError, match="given more of the blocks before it than their hidden state"):
        executor.check()


def test_dropout_is_drawn_alike_in_forward_and_in_the_second_forward(tmp_path: Path) -> None:
    """Not the numbers of a resident run, but the loss falls and the same seed gives the same run."""
    folder = saved("llama", tmp_path / "model")

    def losses() -> list[float]:
        model, visits = open_streamed(
            a_config(folder),
            a_plan(weights_tier="host", lora_dropout=0.3),
            scratch=tmp_path / "scratch",
            attach=lambda model: attach_adapters(model, rank=4, alpha=8.0, dropout=0.3, seed=3),
        )
        plan = a_plan(weights_tier="host", lora_dropout=0.3)
        executor = StreamingExecutor(
            model, visits=visits, plan=plan, optimizer=build_optimizer(model, ScheduleChoice(), plan)
        )
        torch.manual_seed(7)
        return [executor.step(batches(), 2e-2).loss for _ in range(12)]

    first = losses()
    assert first == losses()
    assert first[-1] < first[0] - 0.1
