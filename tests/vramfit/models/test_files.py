from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from vramfit.errors import ModelError
from vramfit.models.files import check_folder, check_safetensors

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0123\nsize 500000000\n"


def edit_config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | changes), encoding="utf-8")


def test_a_good_folder_is_good(model_folder):
    assert check_folder(model_folder)["model_type"] == "llama"


def test_a_sharded_folder_is_good_and_a_missing_shard_is_named(small, tmp_path):
    from transformers import LlamaForCausalLM

    small.write_model(tmp_path / "whole")
    LlamaForCausalLM.from_pretrained(tmp_path / "whole").save_pretrained(tmp_path / "parts", max_shard_size="100KB")
    check_folder(tmp_path / "parts")
    lost = sorted((tmp_path / "parts").glob("*.safetensors"))[1]
    lost.unlink()
    with pytest.raises(ModelError, match=lost.name):
        check_folder(tmp_path / "parts")


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", "", "config.json cannot be read as JSON"),
        ("config.json", "[1]", "model_type"),
        ("config.json", "9" * 5000, "config.json cannot be read as JSON"),
        ("model.safetensors.index.json", "[" * 20_000, "index of weights"),
        ("model.safetensors.index.json", "9" * 5000, "index of weights"),
        ("config.json", '{"model_type": 5}', "model_type"),
        ("model.safetensors", POINTER, "Git LFS pointer"),
        ("model.safetensors", "", "0 bytes"),
        ("model.safetensors", "<html>not found</html>", "cut off or not a safetensors file"),
        ("model.safetensors", "\x08\0\0\0\0\0\0\0[1, 2]  ", "header is damaged"),
        ("model.safetensors.index.json", "{}", "index of weights"),
    ],
)
def test_damaged_files_are_named(model_folder, name, content, words):
    (model_folder / name).write_text(content, encoding="utf-8")
    with pytest.raises(ModelError, match=words) as caught:
        check_folder(model_folder)
    assert caught.value.remedy and name in str(caught.value)


@pytest.mark.parametrize("share", [0.0001, 0.01, 0.5, 0.999])
def test_a_truncated_file_is_named(model_folder, share):
    path = model_folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        check_safetensors(path)


def test_missing_files_are_named(model_folder, tmp_path):
    (model_folder / "model.safetensors").rename(tmp_path / "away")
    with pytest.raises(ModelError, match=r"no model\.safetensors"):
        check_folder(model_folder)
    (model_folder / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(ModelError, match=r"pytorch_model\.bin, a format that can run code"):
        check_folder(model_folder)
    (model_folder / "config.json").unlink()
    with pytest.raises(ModelError, match=r"no config\.json"):
        check_folder(model_folder)
    (model_folder / "adapter_config.json").write_text("{}", encoding="utf-8")
    with pytest.raises(ModelError, match="holds an adapter"):
        check_folder(model_folder)


def test_a_folder_that_is_no_folder(model_folder, tmp_path):
    with pytest.raises(ModelError, match="no folder"):
        check_folder(tmp_path / "nowhere")
    with pytest.raises(ModelError, match="is a file"):
        check_folder(model_folder / "config.json")
    empty = tmp_path / "gguf"
    empty.mkdir()
    shutil.copy(model_folder / "config.json", empty / "model.gguf")
    with pytest.raises(ModelError, match=r"only model\.gguf"):
        check_folder(empty)


def test_custom_code_and_unknown_kinds_are_refused(model_folder):
    edit_config(model_folder, model_type="mine", auto_map={"AutoModelForCausalLM": "modeling_mine.Mine"})
    with pytest.raises(ModelError, match="auto_map"):
        check_folder(model_folder)
    edit_config(model_folder, auto_map=None)
    with pytest.raises(ModelError, match="'mine'"):
        check_folder(model_folder)
    edit_config(model_folder, model_type="vit")
    with pytest.raises(ModelError, match="'vit'"):
        check_folder(model_folder)
