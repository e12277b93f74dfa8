"""Checkpoints: whole or not at all, newest by step number, never silently from scratch."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path

import pytest
import torch

from vramfit.errors import CheckpointError, OutOfDisk, Unwritable, UserError
from vramfit.training import checkpoint


def write(root: Path, step: int, *, keep: int = 3) -> Path:
    tensors = {"w": torch.full((4, 3), float(step)), "moment": torch.arange(5, dtype=torch.bfloat16)}
    return checkpoint.save(root, step=step, tensors=tensors, values={"seed": 7, "step": step}, keep=keep)


def test_round_trip_is_exact(tmp_path: Path) -> None:
    write(tmp_path, 12)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 12
    assert found.damaged == ()
    assert torch.equal(found.checkpoint.tensors["w"], torch.full((4, 3), 12.0))
    assert found.checkpoint.tensors["moment"].dtype == torch.bfloat16
    assert found.checkpoint.values == {"seed": 7, "step": 12}


def test_no_checkpoint_is_none(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "absent") is None
    assert checkpoint.newest(tmp_path) is None


def test_case_114_rotation_goes_by_step_number_not_by_file_time(tmp_path: Path) -> None:
    for step in (100, 200, 300):
        path = write(tmp_path, step)
        os.utime(path, (2_000_000_000 - step * 1_000_000, 2_000_000_000 - step * 1_000_000))
    write(tmp_path, 400)
    assert checkpoint.steps(tmp_path) == [200, 300, 400]


def test_a_rotation_that_was_ended_is_done_again_and_leaves_later_ones(tmp_path: Path) -> None:
    """As after a kill between the new one's name and the old one's removal, with a damaged one of a later step."""
    for step in (100, 200, 300, 400, 500):
        write(tmp_path, step, keep=5)
    checkpoint.rotate(tmp_path, step=400, keep=1, best=200, keep_every=300)
    assert checkpoint.steps(tmp_path) == [200, 300, 400, 500]
    write(tmp_path, 400, keep=1)
    assert checkpoint.steps(tmp_path) == [400]


def test_case_115_rotation_touches_only_its_own_folders(tmp_path: Path) -> None:
    strange = [tmp_path / "checkpoint-500", tmp_path / "step-7", tmp_path / "notes"]
    for folder in strange:
        folder.mkdir()
    for step in range(1, 6):
        write(tmp_path, step, keep=1)
    assert checkpoint.steps(tmp_path) == [5]
    assert all(folder.is_dir() for folder in strange)


def test_case_115_a_run_that_begins_refuses_a_folder_with_checkpoints_of_another(tmp_path: Path) -> None:
    checkpoint.refuse_another_run(tmp_path / "absent")
    (tmp_path / "checkpoint-500").mkdir()
    checkpoint.refuse_another_run(tmp_path)
    for step in (500, 600, 700):
        write(tmp_path, step)
    with pytest.raises(
        CheckpointError, match=r"holds checkpoints of another run \(3, the newest of step 700\)"
    ) as refused:
        checkpoint.refuse_another_run(tmp_path)
    assert "a folder of its own" in refused.value.remedy


def test_case_113_incomplete_newest_falls_back_to_the_one_before(tmp_path: Path) -> None:
    """With notice, and what there is of it set aside until another one is complete."""
    write(tmp_path, 10)
    (write(tmp_path, 20) / checkpoint.MANIFEST).unlink()
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 10
    (told,) = checkpoint.tidy(tmp_path)
    assert "of step 20 has lost its manifest.json and is passed over" in told
    assert "kept as step-00000020.incomplete until" in told
    aside = tmp_path / "step-00000020.incomplete"
    assert (aside / checkpoint.TENSORS).is_file() and (aside / checkpoint.VALUES).is_file()
    assert checkpoint.tidy(tmp_path) == [], "told once"
    assert checkpoint.leftovers(tmp_path) == [aside], "and still there"
    assert checkpoint.steps(tmp_path) == [10], "not taken for a checkpoint"
    write(tmp_path, 20)
    assert checkpoint.steps(tmp_path) == [10, 20]
    assert checkpoint.leftovers(tmp_path) == []


def test_case_113_a_save_that_fails_leaves_what_was_set_aside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, 10)
    for _ in range(2):  # lost twice: only the newer one is kept
        (write(tmp_path, 20) / checkpoint.MANIFEST).unlink()
        assert len(checkpoint.tidy(tmp_path)) == 1

    def fail(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OutOfDisk):
        write(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020.incomplete"]


def test_case_113_a_save_that_was_cut_short_is_told_and_removed(tmp_path: Path) -> None:
    write(tmp_path, 10)
    write(tmp_path, 20).rename(tmp_path / "step-00000020.partial")
    (tmp_path / "step-00000005.removed").mkdir()  # rotation is no event
    (tmp_path / "step-00000040").mkdir()
    assert checkpoint.tidy(tmp_path) == ["The save of step 20 was cut short; what it had written is removed."]
    assert [path.name for path in checkpoint.leftovers(tmp_path)] == ["step-00000040"], (
        "empty: the next save removes it"
    )
    write(tmp_path, 20)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010", "step-00000020"]


def test_what_rotation_could_not_finish_is_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed while it removes an old one: that has lost its name before its first file."""
    write(tmp_path, 10, keep=1)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.shutil, "rmtree", lambda *_, **__: None)
        write(tmp_path, 20, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010.removed", "step-00000020"]
    assert checkpoint.tidy(tmp_path) == []
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000020"]


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="where a descriptor's file is, only Linux tells")
def test_the_files_are_on_disk_before_the_manifest_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut could leave a manifest that vouches for files that are not there."""
    synced: list[tuple[str, bool]] = []

    def note(descriptor: int) -> None:
        path = Path(f"/proc/self/fd/{descriptor}").readlink()
        folder = path if path.is_dir() else path.parent
        synced.append((path.name, (folder / checkpoint.MANIFEST).is_file()))

    monkeypatch.setattr(checkpoint.os, "fsync", note)
    write(tmp_path, 7)
    partial, written = "step-00000007.partial", [checkpoint.TENSORS, checkpoint.VALUES]
    assert synced == [
        *((name, False) for name in written),
        (checkpoint.MANIFEST, True),
        (partial, True),
        (tmp_path.name, False),
    ]


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.VALUES, checkpoint.MANIFEST])
def test_damaged_newest_is_named_and_the_one_before_is_used(tmp_path: Path, name: str) -> None:
    write(tmp_path, 10)
    damaged = write(tmp_path, 20) / name
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 0xFF
    damaged.write_bytes(content)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 10
    assert len(found.damaged) == 1
    assert "step-00000020" in found.damaged[0]


def test_all_damaged_is_an_error_never_a_fresh_start(tmp_path: Path) -> None:
    for step in (1, 2):
        (write(tmp_path, step) / checkpoint.TENSORS).write_bytes(b"")
    with pytest.raises(CheckpointError, match="All 2 checkpoints"):
        checkpoint.newest(tmp_path)


def test_unknown_format_is_refused(tmp_path: Path) -> None:
    manifest = write(tmp_path, 3) / checkpoint.MANIFEST
    values = json.loads(manifest.read_text(encoding="utf-8"))
    manifest.write_text(json.dumps({**values, "format": "other-9"}), encoding="utf-8")
    with pytest.raises(CheckpointError, match="other-9"):
        checkpoint.newest(tmp_path)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_case_123_full_disk_keeps_the_older_ones_and_leaves_no_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    write(tmp_path, 10)

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(OutOfDisk, match="disk filled up"):
        write(tmp_path, 20)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    assert checkpoint.steps(tmp_path) == [10]


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (errno.ENOSPC, OutOfDisk),
        (errno.EDQUOT, OutOfDisk),
        (errno.EROFS, CheckpointError),
        (errno.EACCES, CheckpointError),
        (errno.ENAMETOOLONG, CheckpointError),
        (errno.EMFILE, CheckpointError),
    ],
    ids=lambda value: errno.errorcode[value] if isinstance(value, int) else value.__name__,
)
def test_case_126_every_refusal_of_the_disk_has_its_own_words_and_leaves_the_older_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, kind: type[UserError]
) -> None:
    write(tmp_path, 10)

    def fail(descriptor: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(checkpoint.os, "fsync", fail)
    with pytest.raises(kind) as caught:
        write(tmp_path, 20)
    words = {
        errno.ENOSPC: "The disk filled up while",
        errno.EDQUOT: "the quota is used up",
        errno.EROFS: "Read-only file system",
        errno.EACCES: "Permission denied",
        errno.ENAMETOOLONG: "File name too long",
        errno.EMFILE: "Too many open files",
    }
    assert [other for other, said in words.items() if said in caught.value.what] == [code]
    assert "resume the run; checkpoints saved so far are kept" in caught.value.remedy
    assert ("ulimit -n" in caught.value.remedy) == (code == errno.EMFILE)
    monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000010"]
    write(tmp_path, 20)
    assert checkpoint.steps(tmp_path) == [10, 20]


def test_case_126_a_folder_that_cannot_be_made_is_told_in_words(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way", encoding="utf-8")
    for root, words in ((tmp_path / ("n" * 300), "File name too long"), (tmp_path / "file" / "deeper", "directory")):
        with pytest.raises(CheckpointError, match=words):
            write(root, 1)


def test_too_little_room_is_refused_with_both_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.shutil, "disk_usage", lambda path: _Usage(free=1024))
    with pytest.raises(OutOfDisk, match=r"needs 64 MiB of disk, .* has 1 KiB free"):
        write(tmp_path, 1)


class _Usage:
    def __init__(self, *, free: int) -> None:
        self.free = free


def test_saving_the_same_step_again_replaces_it(tmp_path: Path) -> None:
    write(tmp_path, 5)
    checkpoint.save(tmp_path, step=5, tensors={"w": torch.zeros(1)}, values={"again": True}, keep=2)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.checkpoint.values == {"again": True}


def test_leftovers_of_a_crash_are_swept_at_the_next_save(tmp_path: Path) -> None:
    (tmp_path / "step-00000004.partial").mkdir()
    write(tmp_path, 5)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000005"]


def test_checkpoints_of_a_future_that_was_given_up_go_at_the_next_save(tmp_path: Path) -> None:
    """A resume has passed over damaged ones: they must neither push out good ones nor be passed over again."""
    for step in (10, 20, 30):
        write(tmp_path, step)
    for step in (20, 30):
        (tmp_path / f"step-{step:08d}" / checkpoint.TENSORS).write_bytes(b"damaged")
    write(tmp_path, 15, keep=2)
    assert checkpoint.steps(tmp_path) == [10, 15]


def test_the_best_outlives_rotation_until_another_is_the_best(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2)}
    for step, best in ((1, 1), (2, 1), (3, 1), (4, 1), (5, 5), (6, 5)):
        checkpoint.save(tmp_path, step=step, tensors=tensors, values={}, keep=2, best=best)
        assert best in checkpoint.steps(tmp_path)
    assert checkpoint.steps(tmp_path) == [5, 6]
    for step in (7, 8):
        checkpoint.save(tmp_path, step=step, tensors=tensors, values={}, keep=2, best=5)
    assert checkpoint.steps(tmp_path) == [5, 7, 8]


def test_the_checkpoint_of_one_step_is_verified_when_it_is_loaded(tmp_path: Path) -> None:
    path = write(tmp_path, 3)
    assert torch.equal(checkpoint.load(tmp_path, 3).tensors["w"], torch.full((4, 3), 3.0))
    (path / checkpoint.VALUES).write_text("{}", encoding="utf-8")
    with pytest.raises(CheckpointError, match="does not match its manifest"):
        checkpoint.load(tmp_path, 3)
    with pytest.raises(CheckpointError, match="step-00000004 cannot be read"):
        checkpoint.load(tmp_path, 4)


def test_every_nth_step_stays_for_good_beside_the_newest_and_the_best(tmp_path: Path) -> None:
    for step in range(1, 13):
        checkpoint.save(
            tmp_path, step=step, tensors={"w": torch.ones(2)}, values={}, keep=2, best=min(step, 3), keep_every=5
        )
    assert checkpoint.steps(tmp_path) == [3, 5, 10, 11, 12]
    write(tmp_path, 13, keep=1)
    assert checkpoint.steps(tmp_path) == [13], "0 keeps none"


# ---- folders that somebody made to do harm -----------------------------------------------------------------------


class _Trap:
    """What a pickle runs when it is read."""

    def __init__(self, witness: Path) -> None:
        self.witness = witness

    def __reduce__(self) -> tuple[object, ...]:
        return os.mkdir, (str(self.witness),)


def forge(folder: Path, *, values: object = None, files: dict[str, object] | None = None, **manifest: object) -> None:
    """Make the manifest fit what is in the folder: an attacker can compute hashes as well as we can."""
    if values is not None:
        (folder / checkpoint.VALUES).write_text(json.dumps(values), encoding="utf-8")
    honest = {name: checkpoint._fingerprint(folder / name) for name in (checkpoint.TENSORS, checkpoint.VALUES)}
    content = {"format": checkpoint.FORMAT, "step": 20, "files": {**honest, **(files or {})}, **manifest}
    (folder / checkpoint.MANIFEST).write_text(json.dumps(content), encoding="utf-8")


def refusal(root: Path) -> str:
    """Why checkpoint 20 is passed over; the one of step 10 is used."""
    found = checkpoint.newest(root)
    assert found is not None
    assert found.checkpoint.step == 10
    (reason,) = found.damaged
    assert checkpoint.damaged(root) == [reason], "the doctor says the same, without loading a tensor"
    assert "step-00000020" in reason
    return reason


@pytest.fixture
def hostile(tmp_path: Path) -> Path:
    """The folder of checkpoint 20, to be made hostile; an honest one of step 10 is beside it."""
    write(tmp_path / "checkpoints", 10)
    return write(tmp_path / "checkpoints", 20)


@pytest.mark.parametrize("name", ["optimizer.pt", "extra.pkl", "weights.BIN", "hook.py"])
def test_a_file_that_can_run_code_is_never_opened_and_named(hostile: Path, tmp_path: Path, name: str) -> None:
    (hostile / name).write_bytes(pickle.dumps(_Trap(tmp_path / "executed")))
    assert name in refusal(hostile.parent)
    assert not (tmp_path / "executed").exists()


def test_a_pickle_under_the_name_of_the_tensors_is_refused(hostile: Path, tmp_path: Path) -> None:
    torch.save({"w": _Trap(tmp_path / "executed")}, hostile / checkpoint.TENSORS)
    forge(hostile)
    assert "tensors.safetensors cannot be read" in refusal(hostile.parent)
    assert not (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", [checkpoint.TENSORS, checkpoint.VALUES, checkpoint.MANIFEST])
def test_a_link_out_of_the_folder_is_refused(hostile: Path, tmp_path: Path, name: str) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((hostile / name).read_bytes())
    (hostile / name).unlink()
    (hostile / name).symlink_to(outside)
    assert f"{name} is a link to {outside}" in refusal(hostile.parent)


def test_a_folder_that_is_a_link_is_neither_read_nor_removed(tmp_path: Path) -> None:
    outside = write(tmp_path / "elsewhere", 20)
    root = tmp_path / "checkpoints"
    write(root, 10)
    (root / "step-00000020").symlink_to(outside)
    assert f"step-00000020 is a link to {outside}" in refusal(root)
    write(root, 15, keep=1)
    assert (outside / checkpoint.MANIFEST).is_file(), "rotation does not reach out of its folder"


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
def test_a_pipe_that_would_be_waited_on_for_ever_is_refused(hostile: Path) -> None:
    (hostile / checkpoint.VALUES).unlink()
    os.mkfifo(hostile / checkpoint.VALUES)
    assert "values.json is not a plain file" in refusal(hostile.parent)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="this system has no named pipes")
@pytest.mark.parametrize("kind", ["pipe", "endless", "big"])
def test_a_look_at_the_values_neither_waits_nor_reads_without_end(
    hostile: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """A resume looks at them before the checkpoint is verified."""
    values = hostile / checkpoint.VALUES
    if kind == "big":
        monkeypatch.setattr(checkpoint, "_VALUES_BYTES", 1024)
        forge(hostile, values={"text": "x" * 1024})
    else:
        values.unlink()
        os.mkfifo(values) if kind == "pipe" else values.symlink_to("/dev/zero")
    assert checkpoint.peek(hostile.parent) == {"seed": 7, "step": 10}
    words = {"pipe": "is not a plain file", "endless": "is a link to /dev/zero", "big": "1,024 are the most"}
    assert words[kind] in refusal(hostile.parent)


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "hook.txt"])
def test_a_manifest_that_names_another_file_is_refused(hostile: Path, name: str) -> None:
    forge(hostile, files={name: {"bytes": 0, "sha256": ""}})
    assert repr(name) in refusal(hostile.parent)


@pytest.mark.parametrize(
    "manifest",
    ['[1, 2]', '"x"', "null", "{", '{"format": "vramfit-checkpoint-1"}', "[" * 100_000, " " * (2**20 + 1)],
    ids=["list", "text", "null", "cut", "empty", "deep", "big"],
)  # fmt: skip
def test_a_manifest_that_is_none_is_refused(hostile: Path, manifest: str) -> None:
    (hostile / checkpoint.MANIFEST).write_text(manifest, encoding="utf-8")
    assert refusal(hostile.parent)


def test_a_checkpoint_under_the_name_of_another_step_is_refused(hostile: Path) -> None:
    forge(hostile, step=19)
    assert "says in its manifest that it is of step 19" in refusal(hostile.parent)


@pytest.mark.parametrize("values", [[1], "x", 7])
def test_values_without_names_are_refused(hostile: Path, values: object) -> None:
    forge(hostile, values=values)
    assert "does not hold values by name" in refusal(hostile.parent)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**9, 10**9], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [-16, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [16, 0]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [-2, -2], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, "16"]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 10**15]},
        {"dtype": "F32", "shape": [8], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": "4", "data_offsets": [0, 16, 32]},
        {"dtype": "OBJECT", "shape": [4], "data_offsets": [0, 16]},
        [],
    ],
    ids=str,
)
def test_a_header_of_lies_is_refused_before_memory_is_asked_for(hostile: Path, entry: object) -> None:
    header = json.dumps({"w": entry}).encode()
    (hostile / checkpoint.TENSORS).write_bytes(len(header).to_bytes(8, "little") + header + bytes(16))
    forge(hostile)
    found = checkpoint.newest(hostile.parent)
    assert found is not None
    assert found.checkpoint.step == 10
    assert "step-00000020/tensors.safetensors cannot be read" in found.damaged[0]


@pytest.mark.parametrize("length", [0, 2**63, 2**64 - 1, 17])
def test_a_header_of_an_impossible_length_is_refused(hostile: Path, length: int) -> None:
    (hostile / checkpoint.TENSORS).write_bytes(length.to_bytes(8, "little") + b"{}")
    forge(hostile)
    assert "cannot be read" in refusal(hostile.parent)


@pytest.mark.parametrize(
    ("code", "cure"), [(errno.EROFS, "mount it for writing"), (errno.EACCES, "Give the folder back its right")]
)
def test_a_folder_that_takes_no_writes_is_told_with_its_cure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, cure: str
) -> None:
    write(tmp_path, 1)

    def refuse(point: str) -> None:
        if point == "save: tensors written":
            raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "reach", refuse)
        with pytest.raises(Unwritable, match=os.strerror(code)) as told:
            write(tmp_path, 2)
    assert cure in told.value.remedy
    assert checkpoint.steps(tmp_path) == [1]
    assert checkpoint.leftovers(tmp_path) == []
