"""Whole runs with each variant and start of adapters: resumed bit for bit, exported for the base as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from vramfit.config import RunConfig
from vramfit.errors import CheckpointError, ConfigError, ModelError
from vramfit.training.loop import ADAPTER_START, train

Build = Callable[..., RunConfig]
Keep = Callable[[], Any]

# peft 0.21 reads a name that transformers 5.24 has renamed.
plain_peft = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def write_model(folder: Path, cache: Path, *, experts: bool = False) -> str:
    """A tiny model with the starter's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM, PreTrainedTokenizerFast

    from vramfit.starter.shape import architecture
    from vramfit.starter.tokenizer import tokenizer_folder

    PreTrainedTokenizerFast.from_pretrained(tokenizer_folder(cache)).save_pretrained(folder)
    torch.manual_seed(1)
    values: dict[str, Any] = {
        "vocab_size": architecture().vocab_size,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "bos_token_id": None,
        "eos_token_id": 0,
    }
    if experts:
        MixtralForCausalLM(MixtralConfig(**values, num_local_experts=4)).save_pretrained(folder)
    else:
        LlamaForCausalLM(LlamaConfig(**values)).save_pretrained(folder)
    return str(folder)


@pytest.fixture
def adapter_run(small_run: Build, cache: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    def build(*, experts: bool = False, **adapter: Any) -> RunConfig:
        model = write_model(tmp_path / "model", cache, experts=experts)
        return small_run(
            method="lora",
            model={"source": model},
            adapter={"rank": 4, "dropout": 0.1, "experts": experts, **adapter},
            schedule={"max_steps": 5},
            data={"packing": False},
        )

    return build


@plain_peft
@pytest.mark.parametrize(
    "adapter",
    [
        {"variant": "rslora"},
        {"variant": "dora"},
        {"start": "pissa"},
        {"start": "olora", "variant": "dora"},
        {"start": "eva"},
        {"start": "orthogonal"},
        {"experts": True},
    ],
    ids=str,
)
def test_a_resumed_run_is_the_whole_one_and_its_adapter_fits_the_base(
    adapter: dict[str, Any], adapter_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    import peft

    config = adapter_run(**adapter)
    whole, first, second = kept(), kept(), kept()
    train(config, folder=tmp_path / "whole", cache=cache, recorder=whole)
    cut = {"folder": tmp_path / "cut", "cache": cache}
    train(config, **cut, recorder=first, should_stop=lambda: len(first.metrics) >= 2)
    train(config, **cut, recorder=second, resume=True)
    assert first.losses + second.losses == whole.losses
    assert len(first.losses) == 2
    one, other = (load_file(tmp_path / name / "export" / "adapter_model.safetensors") for name in ("whole", "cut"))
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)

    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "whole" / "export").eval()
    trained = held_out_loss(again, config, cache)
    assert trained == pytest.approx(whole.evaluations[-1].loss, rel=1e-5)
    assert trained < whole.evaluations[0].loss


def held_out_loss(model: Any, config: RunConfig, cache: Path) -> float:
    """The loss on the held-out rows, by the model's own forward."""
    from vramfit.data.batches import split
    from vramfit.data.prepare import prepare
    from vramfit.models.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.model, cache)
    data = prepare(config.data, tokenizer=tokenizer, max_length=48, seed=config.seed, cache=cache)
    total, tokens = 0.0, 0
    for batch in split(data.held_out, 1, data.pad_id):
        counted = int((batch.labels[:, 1:] != -100).sum())
        with torch.no_grad():
            total += float(model(input_ids=batch.input_ids, labels=batch.labels).loss) * counted
        tokens += counted
    return total / tokens


def test_eva_begins_where_the_data_says(adapter_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    """Rows of A are unit vectors, which random ones are not; the whole run is the same however often it is begun."""
    from vramfit.training import checkpoint

    config = adapter_run(start="eva").model_copy(update={"seed": 7})
    still = config.model_copy(
        update={"schedule": config.schedule.model_copy(update={"learning_rate": 1e-30, "weight_decay": 0.0})}
    )
    heard = kept()
    train(still, folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=lambda: len(heard.metrics) >= 1)
    found = checkpoint.newest(tmp_path / "run" / "checkpoints")
    assert found is not None
    started = {
        name: value for name, value in found.checkpoint.tensors.items() if "lora_A" in name and "model." in name[:6]
    }
    assert started
    for value in started.values():
        torch.testing.assert_close(value @ value.T, torch.eye(4), rtol=0, atol=1e-4)
    assert any("the adapters, from 15 sequences" in phase.detail for phase in heard.phases)


def test_a_base_that_cannot_be_made_again_refuses_to_go_on(
    adapter_run: Build, kept: Keep, cache: Path, tmp_path: Path
) -> None:
    config = adapter_run(start="pissa")
    heard = kept()
    train(config, folder=tmp_path / "run", cache=cache, recorder=heard, should_stop=lambda: len(heard.metrics) >= 1)
    (tmp_path / "run" / ADAPTER_START).unlink()
    with pytest.raises(CheckpointError, match="the base cannot be made as it was"):
        train(config, folder=tmp_path / "run", cache=cache, recorder=kept(), resume=True)


@pytest.mark.parametrize(
    ("adapter", "method", "experts", "says"),
    [
        ({"start": "pissa"}, "qlora", False, "4-bit base"),
        ({"start": "orthogonal", "rank": 5}, "lora", False, "5 is odd"),
        ({"experts": True}, "lora", False, "0 experts"),
        ({"experts": True, "variant": "dora"}, "lora", True, "no form of DoRA"),
        ({"experts": True, "start": "eva"}, "lora", True, "begin as usual, not as eva"),
        ({"targets": ["down_proj"]}, "lora", True, "down_proj matches 0"),  # Mixtral's are experts, all in one tensor
    ],
)
def test_what_cannot_be_had_is_refused_before_the_model_is_read(
    adapter: dict[str, Any],
    method: str,
    experts: bool,
    says: str,
    small_run: Build,
    kept: Keep,
    cache: Path,
    tmp_path: Path,
) -> None:
    model = write_model(tmp_path / "model", cache, experts=experts)
    config = small_run(method=method, model={"source": model}, adapter=adapter)
    with pytest.raises((ConfigError, ModelError), match=says):
        train(config, folder=tmp_path / "run", cache=cache, recorder=kept())


def test_the_other_exports(adapter_run: Build, kept: Keep, cache: Path, tmp_path: Path) -> None:
    """Merged: plain transformers gives the evaluation's loss, with experts and a changed base alike."""
    from transformers import AutoModelForCausalLM

    for number, adapter in enumerate(({"experts": True, "variant": "rslora"}, {"start": "pissa", "variant": "dora"})):
        config = adapter_run(**adapter)
        config = config.model_copy(update={"output": config.output.model_copy(update={"export": "merged"})})
        heard = kept()
        train(config, folder=tmp_path / f"run{number}", cache=cache, recorder=heard)
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"run{number}" / "export").eval()
        assert held_out_loss(merged, config, cache) == pytest.approx(heard.evaluations[-1].loss, rel=1e-5)
