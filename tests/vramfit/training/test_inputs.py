"""Marks of what a run is made from: they change with the bytes, and only with those; what changed is told by name."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from vramfit.config import RunConfig
from vramfit.errors import Changed, CheckpointError
from vramfit.training import inputs
from vramfit.training.inputs import changes, marks_of, settle_changes, versions


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}", encoding="utf-8")
    (model / "tokenizer.json").write_text("{}", encoding="utf-8")
    (model / "chat_template.jinja").write_text("{{ x }}", encoding="utf-8")
    (model / "model.safetensors").write_bytes(bytes(range(256)) * 40)
    (model / "pytorch_model.bin").write_bytes(b"not read")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n', encoding="utf-8")
    return RunConfig.parse(
        {"method": "lora", "model": {"source": str(model)}, "data": {"paths": [str(tmp_path / "rows.jsonl")]}}
    )


def test_what_is_marked_and_that_touching_a_small_file_changes_nothing(config: RunConfig, tmp_path: Path) -> None:
    before = marks_of(config)
    assert [Path(path).name for path in before["data"]] == ["rows.jsonl"]
    named = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json"]
    assert sorted(Path(path).name for path in before["model"]) == named
    assert before["versions"] == versions()
    assert {"torch", "transformers"} <= versions().keys()
    os.utime(tmp_path / "rows.jsonl", (1, 1))
    os.utime(tmp_path / "model" / "model.safetensors", (1, 1))
    assert changes(json.loads(json.dumps(before)), marks_of(config)) == {}
    started = marks_of(RunConfig())
    assert (started["data"], started["model"]) == ({}, {})


def test_a_model_of_the_hub_is_marked_by_its_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not in the cache then, or is not now, is no change: which commit it is, loading it will tell."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    config = RunConfig.parse({"method": "lora", "model": {"source": "someone/tiny"}})
    place = tmp_path / "models--someone--tiny" / "refs" / "main"
    place.parent.mkdir(parents=True)
    never = marks_of(config)
    place.write_text("a" * 40, encoding="ascii")
    before = marks_of(config)
    assert (never["model"], before["model"]) == ({}, {"someone/tiny (main)": f"commit {'a' * 40}"})
    assert changes(never, before) == changes(before, never) == {}
    place.write_text("b" * 40, encoding="ascii")
    told = {"model": f"someone/tiny (main) was commit {'a' * 40}, is commit {'b' * 40}"}
    assert changes(before, marks_of(config)) == told
    with pytest.raises(Changed, match="The model changed since the run was queued: someone/tiny"):
        settle_changes(told, "ask", since="the run was queued")


@pytest.mark.parametrize(
    ("name", "part"),
    [("rows.jsonl", "data"), ("model/tokenizer.json", "model"), ("model/model.safetensors", "model")],
)
def test_other_bytes_of_the_same_length_are_told_by_name(
    config: RunConfig, tmp_path: Path, name: str, part: str
) -> None:
    before, path = marks_of(config), tmp_path / name
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    assert changes(before, marks_of(config)) == {part: f"{path} has changed"}
    path.unlink()
    assert changes(before, marks_of(config)) == {part: f"{path} is gone"}


def test_of_a_large_file_pieces_from_both_ends_and_between_decide(
    config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inputs, "FULL_BYTES", 1000)
    monkeypatch.setattr(inputs, "PIECE_BYTES", 16)
    monkeypatch.setattr(inputs, "PIECES", 5)
    path = tmp_path / "model" / "model.safetensors"
    state, whole = path.stat(), path.read_bytes()

    def with_byte(at: int) -> bool:
        content = bytearray(whole)
        content[at] ^= 1
        path.write_bytes(content)
        os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
        return bool(changes(before, marks_of(config)))

    before = marks_of(config)
    last = len(whole) - 16
    seen = [at + 7 for at in (0, last // 4, last // 2, 3 * last // 4, last)]
    assert [with_byte(at) for at in seen] == [True] * 5
    assert not with_byte(last // 8)  # between two pieces: only the time of the write would tell
    path.write_bytes(whole)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns + 1))
    assert changes(before, marks_of(config)) == {"model": f"{path} has changed"}


def test_the_choice_decides_what_becomes_of_a_change() -> None:
    found = {"data": "a.jsonl has changed", "versions": "torch was 1, is 2"}
    told = ["The data changed since then: a.jsonl has changed.", "The versions changed since then: torch was 1, is 2."]
    assert settle_changes(found, "go on", since="then") == told
    assert settle_changes({}, "refuse", since="then") == []
    assert settle_changes({"versions": found["versions"]}, "ask", since="then") == told[1:]
    with pytest.raises(Changed, match=r"a\.jsonl has changed"):
        settle_changes(found, "ask", since="then")
    with pytest.raises(CheckpointError, match="torch was 1, is 2") as refused:
        settle_changes(found, "refuse", since="then")
    assert not isinstance(refused.value, Changed)


def test_many_changes_are_counted() -> None:
    before = {"data": {f"/d/{n}": "1 a" for n in range(9)}}
    assert changes(before, {"data": {}})["data"] == "/d/0 is gone; /d/1 is gone; /d/2 is gone and 6 more"
    assert changes({}, before) == {}
