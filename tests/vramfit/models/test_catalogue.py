"""Look-ups by name, folder and alias, and what a wrong one is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vramfit.config import ModelChoice
from vramfit.errors import ModelError
from vramfit.models import catalogue


def test_names_ids_and_aliases_find_the_same_model_in_any_case() -> None:
    llama = catalogue.find("huggyllama/llama-7b")

    assert llama is not None
    assert llama.params == 6_738_415_616
    assert catalogue.find("LLAMA-7B") is llama
    assert catalogue.find(" lmsys/Vicuna-7b-v1.3 ") is llama
    assert catalogue.find("no/such-model") is None


def test_every_known_name_is_found_as_itself() -> None:
    names = catalogue.known()

    assert len(names) == len(set(names)) >= 200
    for name in names:
        found = catalogue.find(name)
        assert found is not None
        assert found.name == name


def test_a_folder_is_read_by_its_config(tmp_path: Path) -> None:
    values = {
        "model_type": "qwen2",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "vocab_size": 100,
        "tie_word_embeddings": True,
    }
    folder = tmp_path / "my modèle 中"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(values), encoding="utf-8-sig")

    architecture = catalogue.architecture_of(ModelChoice(source=str(folder)))

    assert architecture.name == "my modèle 中"
    assert architecture.qkv_bias
    assert architecture.tied_embeddings


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "has no config.json"),
        (b"{", "is not JSON: line 1, column 2"),
        (b"\xff\xfe\x00", "is not UTF-8"),
        (b'{"vocab_size": ' + b"9" * 5000 + b"}", "config.json holds a number of more than 4,300 digits"),
        (b"[" * 20_000, "is nested too deeply"),
        (b'{"model_type": ' + b"[" * 20_000, "is nested too deeply"),
        (b"[]", "holds no settings"),
        (b"{}", "does not say its model_type"),
    ],
)
def test_a_damaged_folder_is_refused(tmp_path: Path, content: bytes | None, says: str) -> None:
    if content is not None:
        (tmp_path / "config.json").write_bytes(content)

    with pytest.raises(ModelError, match=says):
        catalogue.architecture_of(ModelChoice(source=str(tmp_path)))


def test_an_unknown_name_is_told_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"did you mean .*Qwen/Qwen3-8B"):
        catalogue.architecture_of(ModelChoice(source="Qwen/Qwen3-8"))
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ModelError, match="is a file"):
        catalogue.architecture_of(ModelChoice(source=str(file)))


def test_the_smollm2_folder_has_its_published_count(smollm2_folder: Path) -> None:
    architecture = catalogue.architecture_of(ModelChoice(source=str(smollm2_folder)))

    assert architecture.params == 134_515_008
