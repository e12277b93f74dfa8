"""The commit of a hub's model, from a cache made by hand: no network is asked."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from vramfit.config import ModelChoice
from vramfit.models.hub_commit import hub_commit

OLD, NEW = "0123456789abcdef" * 2 + "01234567", "f" * 40


@pytest.fixture
def references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the cache keeps what the names of one model's revisions mean."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "hub" / "models--someone--tiny" / "refs"
    (folder / "pr").mkdir(parents=True)
    return folder


def test_a_name_is_the_commit_that_the_cache_has_for_it_now(references: Path) -> None:
    tiny = ModelChoice(source="someone/tiny")
    assert hub_commit(tiny) == "", "nothing was fetched yet"
    (references / "main").write_text(OLD, encoding="ascii")
    (references / "pr" / "7").write_text(f"{NEW}\n", encoding="ascii")
    assert hub_commit(tiny) == OLD
    assert hub_commit(ModelChoice(source="someone/tiny", revision="pr/7")) == NEW
    (references / "main").write_text(NEW, encoding="ascii")
    assert hub_commit(tiny) == NEW


def test_a_commit_names_itself(references: Path) -> None:
    (references / "main").write_text(OLD, encoding="ascii")
    assert hub_commit(ModelChoice(source="someone/tiny", revision=NEW)) == NEW


@pytest.mark.parametrize("content", [b"", b"main", b"\xff" * 40, b"0" * 41])
def test_what_is_no_commit_is_none(references: Path, content: bytes) -> None:
    (references / "main").write_bytes(content)
    assert hub_commit(ModelChoice(source="someone/tiny")) == ""


def test_the_starter_and_folders_have_none(references: Path, tmp_path: Path) -> None:
    (references / "main").write_text(OLD, encoding="ascii")
    (tmp_path / "someone" / "tiny").mkdir(parents=True)
    assert hub_commit(ModelChoice()) == ""
    assert hub_commit(ModelChoice(source="someone/tiny")) == "", "a folder of that name comes first"
