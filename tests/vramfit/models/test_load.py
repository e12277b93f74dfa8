from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
import torch

from vramfit.config import ModelChoice, RunConfig
from vramfit.engine.packed import packed_weights
from vramfit.errors import ModelError
from vramfit.models.load import load_model, read_architecture, weights_fingerprint
from vramfit.models.tokenizer import load_tokenizer, local_folder

TOKENS = torch.tensor([[5, 9, 33, 120, 7]])


def test_a_folder_gives_its_weights_in_the_planned_format(small, model_folder, tmp_path):
    from safetensors.torch import load_file

    saved = load_file(model_folder / "model.safetensors")
    model = load_model(small.config(model_folder), small.plan(), cache=tmp_path)
    assert all(torch.equal(saved[name], value) for name, value in model.state_dict().items())
    assert all(parameter.requires_grad for parameter in model.parameters())
    half = load_model(small.config(model_folder), small.plan(weight_format="bf16"), cache=tmp_path)
    assert half.lm_head.weight.dtype == torch.bfloat16


def test_weights_lie_in_memory_of_their_own(small, model_folder, tmp_path):
    """Not in the file as it lies on the disk: neither its header's length nor its later fate reaches the run."""
    model = load_model(small.config(model_folder), small.plan(), cache=tmp_path)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with (model_folder / "model.safetensors").open("r+b") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(size // 2)
        file.write(b"\xff" * (size - size // 2))

    assert all(value.data_ptr() % 64 == 0 for value in model.state_dict().values())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())


def test_a_tokenizer_comes_with_its_template(model_folder, tmp_path):
    tokenizer = load_tokenizer(ModelChoice(source=str(model_folder)), tmp_path)
    assert tokenizer.eos_token == "</s>" and "assistant" in tokenizer.chat_template
    assert tokenizer.decode(tokenizer("grüß dich").input_ids) == "grüß dich"


def test_pretraining_a_folder_begins_at_random_weights_of_its_shape(small, model_folder, tmp_path):
    (model_folder / "model.safetensors").unlink()  # not needed
    first, again = (
        load_model(small.config(model_folder, "pretrain"), small.plan(method="pretrain"), cache=tmp_path)
        for _ in range(2)
    )
    other = load_model(small.config(model_folder, "pretrain", seed=1), small.plan(method="pretrain"), cache=tmp_path)
    assert first.config.hidden_size == 64 and torch.equal(first.lm_head.weight, again.lm_head.weight)
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)


def test_the_starter_is_built_from_its_shape_and_the_seed(small, tmp_path):
    from vramfit.starter.shape import MODEL_CONFIG

    first, again = (load_model(RunConfig(), small.plan(method="pretrain"), cache=tmp_path) for _ in range(2))
    assert first.config.vocab_size == MODEL_CONFIG["vocab_size"]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    tokenizer = load_tokenizer(ModelChoice(), tmp_path)
    assert len(tokenizer) <= MODEL_CONFIG["vocab_size"]
    assert tokenizer.eos_token_id is not None and tokenizer.pad_token_id is not None and tokenizer.chat_template


def test_the_starter_needs_neither_adapters_nor_the_automatic_classes():
    """A first run waits for every import."""
    code = (
        "import sys, torch, vramfit.models.load as load; load.build_starter();"
        "heavy = [name for name in ('peft', 'bitsandbytes', 'pandas', 'sklearn', 'scipy', 'gradio')"
        " if name in sys.modules]; assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ | {"HF_HUB_OFFLINE": "1"})


def test_qlora_has_a_four_bit_base_that_trains_on_the_cpu(small, model_folder, tmp_path):
    plan = small.plan(method="qlora", weight_format="nf4")
    model = load_model(small.config(model_folder, "qlora"), plan, cache=tmp_path)
    layer = model.get_submodule("base_model.model.model.layers.0.mlp.up_proj")
    packed = packed_weights(layer.base_layer)["weight"]
    assert packed.codes.dtype == torch.uint8 and packed.codes.numel() == layer.base_layer.weight.numel() / 2
    assert packed.scales.dtype == torch.uint8  # double quantisation
    exact = load_model(small.config(model_folder), small.plan(), cache=tmp_path)(TOKENS).logits
    logits = model(TOKENS).logits
    assert (logits - exact).norm() < 0.5 * exact.norm()  # 4 bits of normal random weights
    logits.sum().backward()
    assert layer.lora_B.default.weight.grad.abs().max() > 0


@pytest.mark.parametrize("stored", [False, True], ids=["packed on the way in", "stored in 4 bits"])
def test_rows_that_are_no_whole_number_of_blocks_are_computed_rightly_on_the_cpu(small, tmp_path, stored):
    """Widths of 96 and 160: bitsandbytes takes wrong scales there. Logits, an adapter's gradient and merged weights are
    those of a model whose linears hold what the 4 bits stand for."""
    pytest.importorskip("bitsandbytes")
    import transformers

    from vramfit.engine.nf4 import dequantise_plainly, quantise_plainly
    from vramfit.models.adapters import attach_adapters, merged_state

    torch.manual_seed(5)
    shape = transformers.LlamaConfig(
        vocab_size=128, hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=4
    )
    plain = transformers.LlamaForCausalLM(shape)
    plain.save_pretrained(tmp_path / "odd")
    plan = small.plan(method="qlora", weight_format="nf4")
    if stored:
        four = transformers.BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
        )
        few = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "odd", quantization_config=four)
        few.save_pretrained(tmp_path / "odd")
    model = load_model(small.config(tmp_path / "odd", "qlora"), plan, cache=tmp_path)
    for module in plain.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            shape_of = tuple(module.weight.shape)
            module.weight.data = dequantise_plainly(quantise_plainly(module.weight), shape_of, torch.float32)
    exact = attach_adapters(
        plain,
        rank=small.config(tmp_path / "odd", "qlora").adapter.rank,
        alpha=small.config(tmp_path / "odd", "qlora").lora_alpha,
        seed=small.config(tmp_path / "odd", "qlora").seed,
    )
    name = "base_model.model.model.layers.0.mlp.down_proj.lora_B.default.weight"
    found = []
    for each in (model, exact):
        logits = each(TOKENS).logits
        gradient = torch.autograd.grad(logits.square().mean(), each.get_parameter(name))[0]
        found.append((logits, gradient, merged_state(each)["model.layers.1.mlp.down_proj.weight"]))
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 1e-3 * other.norm()


def test_a_four_bit_base_that_was_evaluated_still_has_its_gradients(small, model_folder, tmp_path):
    """On CPUs with bf16 units bitsandbytes' own modules repack an evaluated weight, for good."""
    plan = small.plan(method="qlora", weight_format="nf4")
    model = load_model(small.config(model_folder, "qlora"), plan, cache=tmp_path)
    adapters = [parameter for parameter in model.parameters() if parameter.requires_grad]

    def gradients():
        logits = model(TOKENS).logits
        return torch.autograd.grad(logits.square().mean(), adapters, allow_unused=True)

    before = gradients()
    model.eval()
    with torch.no_grad():
        model(TOKENS)
    model.train()
    after = gradients()
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True) if one is not None)
    assert any(one is not None and one.any() for one in before)


def test_weights_that_do_not_fill_the_model_are_refused(small, model_folder, tmp_path):
    path = model_folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"num_hidden_layers": 3}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"9 tensors are missing.*model\.layers\.2"):
        load_model(small.config(model_folder), small.plan(), cache=tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_weights_of_another_shape_are_refused(small, model_folder, tmp_path):
    path = model_folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(values | {"intermediate_size": 96}), encoding="utf-8")
    with pytest.raises(ModelError, match=r"cannot be loaded.*shapes of its tensors are not those that config\.json"):
        load_model(small.config(model_folder), small.plan(), cache=tmp_path)


def test_bad_folders_are_refused_with_the_file(small, model_folder, tmp_path):
    (model_folder / "model.safetensors").write_bytes(b"version https://git-lfs.github.com/spec/v1\n")
    with pytest.raises(ModelError, match="LFS"):
        load_model(small.config(model_folder), small.plan(), cache=tmp_path)
    for path in model_folder.glob("token*"):
        path.unlink()
    with pytest.raises(ModelError, match="tokenizer"):
        load_tokenizer(ModelChoice(source=str(model_folder)), tmp_path)
    with pytest.raises(ModelError, match="no folder"):
        load_tokenizer(ModelChoice(source=str(tmp_path / "nowhere")), tmp_path)


def test_a_hub_that_cannot_be_reached_is_one_sentence(tmp_path, monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(ModelError, match="cannot be fetched from the hub"):
        load_tokenizer(ModelChoice(source="nobody/nothing-of-the-kind"), tmp_path)
    with pytest.raises(ModelError, match="cannot be fetched from the hub"):
        read_architecture(ModelChoice(source="nobody/nothing-of-the-kind"))


@pytest.mark.parametrize("source", ["./gone", "../gone", "/gone/away", "~/gone", r"C:\models\gone", "a/b/c"])
def test_what_looks_like_a_path_is_never_asked_of_the_hub(source):
    assert local_folder(ModelChoice(source=source)) is not None


@pytest.mark.parametrize("source", ["gpt2", "meta-llama/Llama-3.1-8B"])
def test_what_looks_like_an_id_is_an_id(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert local_folder(ModelChoice(source=source)) is None


def test_an_adapter_is_not_taken_for_a_model(model_folder):
    (model_folder / "config.json").rename(model_folder / "adapter_config.json")
    with pytest.raises(ModelError, match="holds an adapter"):
        read_architecture(ModelChoice(source=str(model_folder)))


def test_the_architecture_of_a_folder(model_folder):
    assert read_architecture(ModelChoice(source=str(model_folder))).layers == 2


@pytest.mark.parametrize(
    ("method", "stored", "words"),
    [
        ("full", {"quant_method": "bitsandbytes", "load_in_4bit": True}, "stored quantised, and 'full'"),
        ("qlora", {"quant_method": "bitsandbytes", "load_in_8bit": True}, "stored in 8 bits"),
    ],
)
def test_quantised_weights_that_the_method_cannot_train_are_refused(small, model_folder, method, stored, words):
    from vramfit.models.load import check_weights

    path = model_folder / "config.json"
    values = json.loads(path.read_text(encoding="utf-8"))
    check_weights(small.config(model_folder, method=method))
    path.write_text(json.dumps(values | {"quantization_config": stored}), encoding="utf-8")
    with pytest.raises(ModelError, match=words):
        check_weights(small.config(model_folder, method=method))


def test_memory_that_runs_out_while_loading_is_not_blamed_on_the_files(small, model_folder, tmp_path, monkeypatch):
    import transformers

    def full(*_: object, **__: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 46137344 bytes")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", full)
    with pytest.raises(ModelError, match=r"Memory ran out while the weights of .* were loaded") as told:
        load_model(small.config(model_folder), small.plan(), cache=tmp_path)
    assert "streams" in told.value.remedy


def test_a_base_of_the_hub_is_told_by_the_commit_that_lies_here(small, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    place = tmp_path / "models--someone--tiny" / "refs" / "main"
    place.parent.mkdir(parents=True)
    for commit in ("a" * 40, "b" * 40):
        place.write_text(commit, encoding="ascii")
        assert weights_fingerprint(small.config("someone/tiny", "lora")) == commit
    assert weights_fingerprint(small.config("someone/tiny", "full")) == "", "its checkpoints have all weights"


def test_a_base_is_told_from_another_of_its_shape_and_not_by_where_it_lies(small, model_folder, tmp_path):
    import shutil

    here = weights_fingerprint(small.config(model_folder, "lora"))
    moved = tmp_path / "moved"
    shutil.copytree(model_folder, moved)
    assert weights_fingerprint(small.config(moved, "lora")) == here != ""
    with (moved / "model.safetensors").open("r+b") as file:
        file.seek(-4, os.SEEK_END)
        file.write(b"\x00\x01\x02\x03")
    assert weights_fingerprint(small.config(moved, "lora")) != here
    assert weights_fingerprint(small.config(moved, "full")) == "", "its checkpoints have all weights"
