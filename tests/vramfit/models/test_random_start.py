"""Random weights are those of the seed and the part, however a model is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.vramfit.engine.test_streaming import a_config, batches
from tests.vramfit.engine.test_trained_blocks import (
    assert_equal_runs,
    assert_equal_states,
    disk,
    full_plan,
    resident,
    streaming,
)
from tests.vramfit.models.tiny_families import BASE, TINY
from vramfit.config import RunConfig
from vramfit.errors import ModelError
from vramfit.models.hollow import hollow_model, is_hollow
from vramfit.models.load import load_model
from vramfit.models.random_start import make_start, random_sources

FAMILIES = ("llama", "gpt2", "gemma3_text", "mixtral", "gpt_oss", "deepseek_v3", "falcon", "opt")


def shape_of(family: str, **changes: Any) -> Any:
    import transformers

    values = {**BASE, **dict(TINY)[family], "num_hidden_layers": 2, **changes}
    return transformers.AutoConfig.for_model(family, **values)


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_made_one_by_one_in_any_order_are_those_of_a_model_made_whole(family: str, tmp_path: Path) -> None:
    """And numbers of the size that transformers itself begins with."""
    import transformers

    shape = shape_of(family)
    shape.save_pretrained(tmp_path)
    plan = full_plan(attention="eager")
    whole = load_model(a_config(tmp_path, "pretrain"), plan, cache=tmp_path)
    usual = dict(transformers.AutoModelForCausalLM.from_config(shape).named_parameters())
    hollow = hollow_model(shape, dtype=torch.float32, attention="eager")
    sources = random_sources(hollow, 3)

    before = torch.random.get_rng_state()
    for name, parameter in reversed(list(whole.named_parameters())):
        read = torch.empty(parameter.shape)
        sources[name].read_into(read)
        assert torch.equal(read, parameter)
        if parameter.numel() >= 2048:
            assert read.std().item() == pytest.approx(usual[name].std().item(), rel=0.1)
    assert sources.keys() == usual.keys()
    assert torch.equal(before, torch.random.get_rng_state())
    assert all(is_hollow(each) for each in hollow.parameters() if each.numel() > 1)


def test_blocks_and_seeds_have_numbers_of_their_own() -> None:
    import transformers

    one, other = (transformers.AutoModelForCausalLM.from_config(shape_of("llama")) for _ in range(2))
    make_start(one, 3)
    make_start(other, 4)

    first, second = (layer.mlp.up_proj.weight for layer in one.model.layers)
    assert not torch.equal(first, second)
    assert not torch.equal(first, other.model.layers[0].mlp.up_proj.weight)
    assert not torch.equal(one.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_a_parameter_whose_beginning_nobody_knows_is_named() -> None:
    import transformers

    class Silent(transformers.LlamaForCausalLM):
        def _init_weights(self, module: nn.Module) -> None:
            if not isinstance(module, nn.Linear):  # of which it has the head; its decoder has a way of its own
                super()._init_weights(module)

    with pytest.raises(ModelError, match=r"Silent does not say how lm_head\.weight begins"):
        make_start(Silent(shape_of("llama", tie_word_embeddings=False)), 3)


@pytest.mark.parametrize("changes", [{}, {"weights_tier": "host", "optimizer_tier": "host", "resident_blocks": 1}])
@pytest.mark.parametrize("tied", [False, True])
def test_a_streamed_run_from_random_weights_is_a_resident_one(
    changes: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    shape_of("llama", tie_word_embeddings=tied).save_pretrained(tmp_path)  # there are no weights
    plan = full_plan(method="pretrain")

    there = resident(tmp_path, plan, tmp_path)
    here = streaming(tmp_path, disk(plan, **changes), tmp_path)
    assert_equal_states(there, here)
    assert_equal_runs(there, here, steps=2)


def test_the_starter_begins_streamed_as_it_begins_on_the_device(tmp_path: Path) -> None:
    plan = full_plan(method="pretrain")
    starter = RunConfig.parse({"seed": 3})

    there = resident(tmp_path, plan, tmp_path, config=starter)
    here = streaming(tmp_path, disk(plan), tmp_path, config=starter)
    assert_equal_states(there, here)
    assert there.step(batches(), 1e-3).loss == here.step(batches(), 1e-3).loss
