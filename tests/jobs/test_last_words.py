"""How a run ended, where the database did not take it: a full disk, SQLite's own limit, another program's lock."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from jobs import last_words, schema, supervisor
from jobs.foreground import foreground_job
from jobs.run_job import run
from jobs.store import SUPERVISOR_LEASE, Store
from tests.jobs.test_supervisor import HASTY, add, recorded_steps
from vramfit.config import RunConfig
from vramfit.errors import JobError, OutOfDisk
from vramfit.sentences import Sentence, say
from vramfit.training.metrics import RunResult

FAILURE = say("failed.full", reason="/somewhere")


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of its own, of 8 MiB."""
    folder = tmp_path / "small disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(folder)]
    if sys.platform != "linux" or os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("a file system can be mounted by root alone, on Linux, and not in every container")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_what_was_noted_is_read_again_and_only_by_its_own_attempt(tmp_path: Path) -> None:
    assert last_words.read(tmp_path, attempt=3) is None
    assert not last_words.note(tmp_path, attempt=3, state="paused", values={}), "no room was made"
    last_words.reserve(tmp_path)
    assert last_words.read(tmp_path, attempt=3) is None
    values = {"failure": FAILURE, "remedy": None, "final_loss": 0.25, "asks": True}
    assert last_words.note(tmp_path, attempt=3, state="paused", values=values)
    assert (tmp_path / last_words.NAME).stat().st_size == last_words.BYTES, "no byte more than was reserved"
    words = last_words.read(tmp_path, attempt=3)
    assert words == last_words.LastWords(state="paused", values=values)
    assert isinstance(words.values["failure"], Sentence) and words.values["failure"].key == "failed.full"
    assert last_words.read(tmp_path, attempt=4) is None
    last_words.forget(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    ["[]", "{", "\0", "[" * 10_000, '{"attempt": 1}', '{"attempt": 1, "state": "running", "values": {}}',
     '{"attempt": 1, "state": "paused", "values": {"owner = 1; --": 2}}',
     '{"attempt": 1, "state": "paused", "values": {"failure": {"text": 1}}}'],
)  # fmt: skip
def test_what_cannot_be_used_is_no_word(tmp_path: Path, text: str) -> None:
    (tmp_path / last_words.NAME).write_text(text, encoding="utf-8")
    assert last_words.read(tmp_path, attempt=1) is None


def test_an_end_that_sqlite_has_no_room_for_is_told_by_the_supervisor(
    store: Store, drive: Callable[..., object]
) -> None:
    id_ = add(store, mishap="full")
    job = drive(HASTY).until_over(id_)
    assert job.state == "paused"
    assert job.failure == f"The disk is full: {'/a long name' * 250}."
    assert job.remedy == "Free some room and resume the run; checkpoints saved so far are kept."
    assert "The end (paused) is left to the supervisor: The disk that holds" in store.log_tail(id_)
    assert not (job.folder / last_words.NAME).exists()
    assert [alert.kind for alert in store.alerts()] == ["interrupted"]


def test_an_end_while_another_program_has_the_database_is_told_once_it_has_not(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch, drive_on: Callable[..., object]
) -> None:
    monkeypatch.setattr(schema, "BUSY_TIMEOUT_S", 0.1)
    with Store(data_dir) as store:
        id_ = add(store, mishap="held", steps=4)
        job = drive_on(store, HASTY).until_over(id_)
        assert (job.state, job.failure, job.final_loss) == ("succeeded", None, 0.25)
        assert "The end (succeeded) is left to the supervisor" in store.log_tail(id_)


def test_on_a_disk_that_is_full_to_the_last_byte_the_supervisor_goes_on_and_the_page_says_why(
    small_disk: Path,
    monkeypatch: pytest.MonkeyPatch,
    drive_on: Callable[..., object],
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(supervisor, "START_BYTES", 0)
    folder = small_disk / "data"
    with Store(folder) as store:
        id_ = add(store, mishap="fill")
        driven = drive_on(store, HASTY)
        driven.until(lambda: (folder / "filler").exists())
        other = driven.supervisor._trainers[id_]
        driven.until(lambda: other.process.poll() is not None)
        for _ in range(300):
            driven.supervisor.step(driven.now)
            driven.now += 0.1
        said = capsys.readouterr().out.splitlines()
        assert len(said) < 20, said
        (folder / "filler").unlink()
        job = driven.until_over(id_)
        assert (job.state, job.failure) == ("paused", "The disk is full: No space left on device.")
        assert not (job.folder / last_words.NAME).exists()
        assert job.attempt == 1


def test_one_burial_that_fails_holds_up_no_other_trainer_and_is_told_once(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    dead, well = add(store, mishap="kill"), store.add_job(RunConfig(name="steps=60 delay=0.01", device="cuda:0"))
    driven = drive(HASTY)
    driven.devices = ("cuda:0", "cpu")
    store.move(well, later=False)
    usual, failing = store.transition, [True]

    def transition(id_: int, **values: object) -> None:
        if id_ == dead and failing[0]:
            try:
                store._db.execute("no SQL")
            except Exception as error:
                raise OutOfDisk("The disk that holds the database is full") from error
        usual(id_, **values)

    monkeypatch.setattr(store, "transition", transition)
    monkeypatch.setattr(supervisor, "_said", {})
    assert driven.until_over(well).state == "succeeded"
    driven.until(lambda: driven.supervisor._trainers[dead].gone)
    for _ in range(100):
        driven.supervisor.step(driven.now)
        driven.now += 0.1
    assert store.job(dead).state == "running"
    assert capsys.readouterr().out.count("is full") == 1
    failing[0] = False
    job = driven.until_over(dead)
    assert (job.state, job.attempt) == ("interrupted", 1)
    assert "(SIGKILL)" in (job.failure or ""), "the cause is not lost meanwhile"


def test_a_stop_that_the_trainer_had_not_heard_counts(store: Store, drive: Callable[..., object]) -> None:
    """It was asked for after the last words, before the supervisor read them."""
    ids = [store.add_job(RunConfig()) for _ in range(3)]
    for id_ in ids:
        job = store.job(id_)
        last_words.reserve(job.folder)
        last_words.note(job.folder, attempt=0, state="paused", values={"failure": FAILURE, "remedy": "Free some room."})
        store.transition(id_, expected=("queued",), state="running")
    store.request_stop(ids[1])
    store.request_pause(ids[2])
    driven = drive(HASTY)
    driven.until(lambda: all(store.job(id_).final for id_ in ids))
    found = [(job.state, job.failure) for job in map(store.job, ids)]
    assert found == [("paused", FAILURE), ("cancelled", FAILURE), ("paused", FAILURE)]


def test_a_foreground_run_that_could_not_tell_its_end_leaves_it_too(
    store: Store, data_dir: Path, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    with foreground_job(data_dir, RunConfig()) as job:
        attempt = job._attempt
        monkeypatch.setattr("jobs.attempt.INSIST_S", 0.0)
        monkeypatch.setattr(attempt.store, "transition", refused)
        job.finish(
            RunResult(
                steps=2, total_steps=2, stopped=False, final_loss=0.5, eval_loss=None, peak_allocated_bytes=5,
                export=None,
            )
        )  # fmt: skip
    id_ = job.job.id
    assert store.job(id_).state == "running"
    store._db.execute("UPDATE jobs SET owner = 'another-boot|1|1', heartbeat_at = 0")
    drive(HASTY).until(lambda: store.job(id_).final)
    assert (store.job(id_).state, store.job(id_).final_loss) == ("succeeded", 0.5)


def test_an_attempt_that_cannot_begin_for_want_of_the_database_waits_for_a_person(
    store: Store, drive: Callable[..., object], monkeypatch: pytest.MonkeyPatch
) -> None:
    id_ = store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    store.claim_next("me")
    store.release_lease(SUPERVISOR_LEASE, owner="me")
    monkeypatch.setattr("jobs.attempt.INSIST_S", 0.0)
    with monkeypatch.context() as patched, pytest.raises(OutOfDisk):
        patched.setattr(store, "begin_attempt", refused)
        run(store, id_, attempt=1, train=lambda *_: pytest.fail("it never began"))
    driven = drive(HASTY)
    driven.until(lambda: store.job(id_).final)
    assert (store.job(id_).state, store.job(id_).failure) == ("paused", "The disk that holds the database is full.")
    assert recorded_steps(store, id_) == []


def refused(*_: object, **__: object) -> None:
    import sqlite3

    raise OutOfDisk("The disk that holds the database is full", "Free some room.") from sqlite3.OperationalError("full")


def test_a_change_that_is_refused_for_good_is_no_last_word(store: Store) -> None:
    id_ = store.add_job(RunConfig())
    store.take_lease(SUPERVISOR_LEASE, owner="me", alive=lambda *_: True)
    store.claim_next("me")

    def train(session: object, resume: bool) -> RunResult:
        store.transition(id_, expected=("running",), state="cancelled")
        raise MemoryError

    with pytest.raises(JobError, match="is cancelled"):
        run(store, id_, attempt=1, train=train)
    assert store.job(id_).state == "cancelled"
    assert json.dumps(store.job(id_).failure) == "null"
