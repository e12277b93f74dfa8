from __future__ import annotations

import shutil
from collections import namedtuple

import pytest
import torch

from vramfit.config import ModelChoice
from vramfit.errors import ConfigError, OutOfDisk
from vramfit.hardware.catalogue import machine_with
from vramfit.models.export import export_kind, export_run
from vramfit.models.load import load_model, read_architecture
from vramfit.models.tokenizer import load_tokenizer
from vramfit.planning.plan import Workload
from vramfit.planning.planner import forecast_run

TOKENS = torch.tensor([[5, 9, 33, 120, 7]])
Usage = namedtuple("Usage", "total used free")

# peft 0.21 reads a name that transformers 5.24 has renamed.
plain_peft = pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")


def trained(small, folder, method, tmp_path, **config):
    """A model with adapters that do something, its tokenizer and its config."""
    plan = small.plan(method=method, weight_format="nf4" if method == "qlora" else "fp32")
    config = small.config(folder, method, **config)
    model = load_model(config, plan, cache=tmp_path).eval()
    for name, value in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(value, std=0.05)
    return model, load_tokenizer(config.model, tmp_path), config


def plain_transformers(folder):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype=torch.float32).eval()
    return model, AutoTokenizer.from_pretrained(folder, local_files_only=True)


@plain_peft
def test_an_adapter_loads_with_plain_peft_and_gives_the_same_logits(small, model_folder, tmp_path):
    import peft

    model, tokenizer, config = trained(small, model_folder, "lora", tmp_path)
    folder = export_run(model, tokenizer, config, tmp_path / "runs" / "export")
    assert {path.name for path in folder.iterdir()} >= {
        "adapter_model.safetensors",
        "adapter_config.json",
        "tokenizer.json",
        "chat_template.jinja",
    }
    reloaded = peft.AutoPeftModelForCausalLM.from_pretrained(folder).eval()
    assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)


def test_a_merged_model_gives_the_same_logits_and_the_trained_one_is_untouched(small, model_folder, tmp_path):
    model, tokenizer, config = trained(small, model_folder, "lora", tmp_path, output={"export": "merged"})
    logits = model(TOKENS).logits
    merged, merged_tokenizer = plain_transformers(export_run(model, tokenizer, config, tmp_path / "export"))
    torch.testing.assert_close(merged(TOKENS).logits, logits, rtol=1e-4, atol=1e-4)
    assert torch.equal(model(TOKENS).logits, logits)
    assert merged_tokenizer.chat_template == tokenizer.chat_template
    assert merged.config.eos_token_id == model.config.eos_token_id


def test_case_077_a_merged_tied_model_stays_tied(small, model_folder, tmp_path):
    small.write_model(model_folder, tie_word_embeddings=True)
    model, tokenizer, config = trained(small, model_folder, "lora", tmp_path, output={"export": "merged"})
    merged, _ = plain_transformers(export_run(model, tokenizer, config, tmp_path / "export"))
    assert merged.config.tie_word_embeddings
    assert merged.lm_head.weight is merged.model.embed_tokens.weight
    torch.testing.assert_close(merged(TOKENS).logits, model(TOKENS).logits, rtol=1e-4, atol=1e-4)


def test_case_077_a_tied_table_that_trained_is_the_same_after_a_reload(small, model_folder, tmp_path):
    small.write_model(model_folder, tie_word_embeddings=True)
    model, tokenizer, config = trained(small, model_folder, "full", tmp_path)
    with torch.no_grad():
        model.model.embed_tokens.weight.add_(torch.randn(260, 64, generator=torch.Generator().manual_seed(1)))
    reloaded, _ = plain_transformers(export_run(model, tokenizer, config, tmp_path / "export"))
    assert reloaded.config.tie_word_embeddings
    assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)


@pytest.mark.parametrize("targets", [["lm_head"], ["embed_tokens", "lm_head"], ["q_proj", "lm_head"]])
def test_case_077_078_adapters_on_the_head_or_the_embedding_are_refused_before_the_model_is_read(
    small, model_folder, targets
):
    """So that none can be merged into the other table of a tied model."""
    small.write_model(model_folder, tie_word_embeddings=True)
    config = small.config(model_folder, "lora", adapter={"targets": targets}, data={"paths": ["rows.jsonl"]})
    with pytest.raises(
        ConfigError, match=r"adapter\.targets: .*lm_head matches 0 .*Choose all-linear, or from: down_proj"
    ):
        forecast_run(
            config,
            architecture=read_architecture(config.model),
            machine=machine_with("RTX 4090"),
            workload=Workload(sequences=10, mean_tokens=10, longest_tokens=10),
        )


def test_a_merged_four_bit_model_is_whole_again(small, model_folder, tmp_path):
    pytest.importorskip("bitsandbytes")
    model, tokenizer, config = trained(small, model_folder, "qlora", tmp_path, output={"export": "merged"})
    merged, _ = plain_transformers(export_run(model, tokenizer, config, tmp_path / "export"))
    assert type(merged.model.layers[0].mlp.up_proj) is torch.nn.Linear
    wanted = model(TOKENS).logits
    # bitsandbytes computes on the CPU with 0.3 % less precision than it dequantises with.
    assert (merged(TOKENS).logits - wanted).norm() < 0.02 * wanted.norm()


def test_a_whole_model_gives_the_same_logits(small, model_folder, tmp_path):
    model, tokenizer, config = trained(small, model_folder, "full", tmp_path)
    with torch.no_grad():
        model.model.norm.weight.add_(0.1)
    reloaded, _ = plain_transformers(export_run(model, tokenizer, config, tmp_path / "export"))
    assert torch.equal(reloaded(TOKENS).logits, model(TOKENS).logits)
    again = load_tokenizer(ModelChoice(source=str(tmp_path / "export")), tmp_path)
    assert again.get_vocab() == tokenizer.get_vocab()


def test_an_older_result_is_replaced_whole(small, model_folder, tmp_path):
    model, tokenizer, config = trained(small, model_folder, "full", tmp_path)
    (tmp_path / "export").mkdir()
    (tmp_path / "export" / "old.txt").write_text("old", encoding="utf-8")
    export_run(model, tokenizer, config, tmp_path / "export")
    assert not (tmp_path / "export" / "old.txt").exists()
    assert [path.name for path in tmp_path.glob("export*")] == ["export"]


def test_too_little_disk_is_said_with_both_numbers_before_anything_is_written(
    small, model_folder, tmp_path, monkeypatch
):
    model, tokenizer, config = trained(small, model_folder, "full", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(2**40, 2**40, 10 * 2**20))
    with pytest.raises(OutOfDisk, match=r"needs 64 MiB .*10 MiB free"):
        export_run(model, tokenizer, config, tmp_path / "export")
    assert not list(tmp_path.glob("export*"))


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("I/O error: (os error 28)")])
def test_a_disk_that_fills_up_meanwhile_leaves_the_older_result(small, model_folder, tmp_path, monkeypatch, error):
    model, tokenizer, config = trained(small, model_folder, "full", tmp_path)
    export_run(model, tokenizer, config, tmp_path / "export")

    def full(*args, **kwargs):
        raise error

    monkeypatch.setattr(type(model), "save_pretrained", full)
    with pytest.raises(OutOfDisk, match="filled up"):
        export_run(model, tokenizer, config, tmp_path / "export")
    assert [path.name for path in tmp_path.glob("export*")] == ["export"]
    assert (tmp_path / "export" / "model.safetensors").is_file()


@pytest.mark.parametrize(("method", "kind"), [("full", "model"), ("lora", "adapter"), ("qlora", "adapter")])
def test_auto_is_the_adapter_where_there_is_one(small, model_folder, method, kind):
    assert export_kind(small.config(model_folder, method)) == kind
