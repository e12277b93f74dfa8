from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vramfit.config import DataChoice
from vramfit.data.prepare import PreparedData, prepare
from vramfit.data.report import TooManyDropped
from vramfit.errors import DataError

Write = Callable[..., Path]
ROOT = Path(__file__).parents[3]
TALK = {"question": "hello the cat", "answer": "the cat ran away home"}


@pytest.fixture
def run(tokenizer: Any, tmp_path: Path) -> Callable[..., PreparedData]:
    def prepared(*paths: Path, max_length: int = 64, seed: int = 1, **choice: Any) -> PreparedData:
        values = {"eval_share": 0.0, "most_dropped_share": 1.0, **choice}
        data = DataChoice(paths=tuple(map(str, paths)), **values)
        return prepare(data, tokenizer=tokenizer, max_length=max_length, seed=seed, cache=tmp_path / "cache")

    return prepared


def talks(count: int) -> list[dict[str, str]]:
    return [{"question": f"hello {n}", "answer": f"world {n}"} for n in range(count)]


def test_rows_become_examples_with_exact_numbers(run: Any, write_rows: Write) -> None:
    data = run(write_rows(talks(20)))
    assert (len(data.train), len(data.held_out)) == (20, 0)
    assert [example.row for example in data.train] == list(range(20))
    report, work = data.report, data.workload
    assert (report.rows, report.rows_used, report.train_sequences) == (20, 20, 20)
    assert report.tokens == sum(len(example) for example in data.train)
    assert work.exact
    assert work.sequences == 20
    assert work.longest_tokens == report.sequence_tokens.max == max(map(len, data.train))
    assert work.trained_share == pytest.approx(report.trained_tokens / report.tokens)


def test_the_held_out_share_depends_on_the_seed_alone(run: Any, write_rows: Write) -> None:
    path = write_rows(talks(40))
    one, again, other = run(path, eval_share=0.2), run(path, eval_share=0.2), run(path, eval_share=0.2, seed=2)
    rows = [sorted(example.row for example in data.held_out) for data in (one, again, other)]
    assert rows[0] == rows[1] != rows[2]
    assert len(rows[0]) == 8
    assert sorted(rows[0] + [example.row for example in one.train]) == list(range(40))


@pytest.mark.parametrize("packing", [False, True])
def test_equal_rows_are_never_on_both_sides(run: Any, write_rows: Write, packing: bool) -> None:
    data = run(write_rows(talks(10) * 3), eval_share=0.3, packing=packing)

    def rows(examples: list[Any]) -> set[int]:
        return {row % 10 for example in examples for row in (example.rows or (example.row,))}

    assert rows(data.held_out)
    assert not rows(data.train) & rows(data.held_out)
    assert data.survey.duplicates == 20


def test_rows_that_are_all_the_same_still_train(run: Any, write_rows: Write) -> None:
    data = run(write_rows([TALK] * 6), eval_share=0.5)
    assert (len(data.train), len(data.held_out)) == (6, 0)
    assert any("no evaluation" in note for note in data.report.notes)


def test_an_empty_held_out_share_is_told(run: Any, write_rows: Write) -> None:
    data = run(write_rows([TALK]), eval_share=0.05)
    assert (len(data.train), len(data.held_out)) == (1, 0)
    assert "A held-out share of 5% of 1 rows is empty, so there will be no evaluation." in data.report.notes
    assert len(run(write_rows(talks(2), "two.jsonl"), eval_share=0.05).held_out) == 1


LONG = {"question": "hello", "answer": "world " * 100}


def test_case_040_cut_cuts_and_keeps_every_row(run: Any, write_rows: Write) -> None:
    data = run(write_rows([LONG, TALK, {"question": "a", "answer": "cat " * 5000}]), max_length=32)
    assert [len(example) for example in data.train] == [32, len(data.train[1]), 32]
    report = data.report
    assert (report.truncated_rows, report.rows_used) == (2, 3)
    assert report.truncated_share == pytest.approx(2 / 3)
    assert report.tokens_lost == report.row_tokens.max - 32 + report.row_tokens.median - 32
    assert any("were cut" in note for note in report.notes)


def test_case_066_the_maximum_length_is_the_one_asked_for(run: Any, write_rows: Write) -> None:
    data = run(write_rows([{"question": "a", "answer": "cat " * 3000}]), max_length=4096)
    assert 3000 <= len(data.train[0]) == data.report.row_tokens.max <= 4096


def test_drop_drops_and_split_splits(run: Any, write_rows: Write) -> None:
    path = write_rows([LONG, TALK])
    dropped = run(path, max_length=32, too_long="drop")
    assert len(dropped.train) == 1
    assert dropped.report.dropped == {"it is longer than 32 tokens": 1}
    assert any("50% of the rows are not used" in note for note in dropped.report.notes)
    pieces = run(path, max_length=32, too_long="split").train
    whole = run(path, max_length=1000).train
    first = np.concatenate([piece.input_ids for piece in pieces if piece.row == 0])
    assert first.tolist() == whole[0].input_ids.tolist()
    assert all(len(piece) <= 32 and not piece.trained[0] for piece in pieces)


def test_a_text_file_is_spread_over_sequences(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("the cat ran home " * 200, encoding="utf-8")
    data = run(path, max_length=64)
    assert data.report.rows == 1
    assert data.report.tokens_lost == 0
    assert len(data.train) == -(-data.report.tokens // 64)
    assert any("were split" in note for note in data.report.notes)


def test_case_061_rows_whose_answer_is_cut_off_are_dropped_and_counted(run: Any, write_rows: Write) -> None:
    lost = {"prompt": "hello " * 100, "completion": "world"}
    kept = {"prompt": "hello", "completion": "world"}
    data = run(write_rows([lost, kept, lost]), max_length=32)
    assert len(data.train) == 1
    assert data.report.dropped == {"what is to be learned lies beyond the maximum length of 32 tokens": 2}
    with pytest.raises(DataError, match=r"No row is left to train on \(2 rows: what is to be learned lies beyond"):
        run(write_rows([lost, lost], "lost.jsonl"), max_length=32)


def test_case_062_held_out_rows_always_have_something_to_predict(run: Any, write_rows: Write) -> None:
    rows = [{"prompt": f"hello {n} " * (100 if n % 4 == 0 else 1), "completion": "world"} for n in range(16)]
    data = run(write_rows(rows), max_length=32, eval_share=0.5)
    assert data.held_out
    assert all(example.trained_tokens for example in data.held_out + data.train)


def test_case_065_no_target_tokens_is_a_refusal(run: Any, write_rows: Write) -> None:
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", "weight": 0}]
    with pytest.raises(DataError, match="no token of it is to be learned"):
        run(write_rows([{"messages": messages}]))


def test_case_035_037_038_rows_blocks_and_steps_are_stated(run: Any, write_rows: Write) -> None:
    data = run(write_rows([{"text": f"the cat ran away home {n}"} for n in range(200)]), max_length=256)
    assert data.report.packed
    assert data.report.sequences_before_packing == 200
    assert any(f"200 rows were packed into {len(data.train)} sequences" in note for note in data.report.notes)
    assert sorted(row for block in data.train for row in (block.rows or (block.row,))) == list(range(200))
    few = run(write_rows([{"text": "the cat ran home"}] * 5, "few.jsonl"), max_length=2048, packing=True)
    assert len(few.train) == 1


def test_conversations_are_packed_only_when_asked(run: Any, write_rows: Write) -> None:
    path = write_rows(talks(20))
    assert not run(path).report.packed
    assert run(path, packing=True).report.packed


def test_bad_rows_stop_or_are_skipped_and_counted(run: Any, tmp_path: Path) -> None:
    path = tmp_path / "data.jsonl"
    good = json.dumps(TALK)
    path.write_text(f"{good}\n{{bad\n{good}\n", encoding="utf-8")
    with pytest.raises(DataError) as caught:
        run(path)
    assert (caught.value.path, caught.value.line, caught.value.column) == (path, 2, 2)
    assert "skip" in caught.value.remedy
    data = run(path, bad_rows="skip")
    assert (len(data.train), data.report.bad_rows, data.survey.bad[0].line) == (2, 1, 2)
    assert len(run(path, bad_rows="skip", most_bad_rows=1).train) == 2
    with pytest.raises(DataError, match="1 rows cannot be read, and 0 may be left out"):
        run(path, bad_rows="skip", most_bad_rows=0)


def test_case_034_a_third_of_the_rows_lost_is_told_by_reason(run: Any, write_rows: Write) -> None:
    rows = [TALK, {"question": None, "answer": "x"}, TALK]
    data = run(write_rows(rows))
    assert data.report.dropped == {"'question' is null or missing": 1}
    assert data.report.dropped_rows == [("data.jsonl", 2, "'question' is null or missing")]
    assert any("33% of the rows are not used" in note for note in data.report.notes)


def test_case_034_a_third_of_the_rows_lost_is_refused_until_someone_agrees(run: Any, write_rows: Write) -> None:
    rows = [TALK, LONG, {"question": None, "answer": "x"}, *talks(6)]
    path = write_rows(rows)
    early = (
        "1 of 9 rows (11.1%) would be left out, the most without asking is 5% (1 rows: 'question' is null or missing)"
    )
    with pytest.raises(TooManyDropped) as caught:
        run(path, most_dropped_share=0.05)
    assert caught.value.what == early
    with pytest.raises(TooManyDropped, match=r"2 of 9 rows \(22.2%\).*longer than 32 tokens") as caught:
        run(path, max_length=32, too_long="drop", most_dropped_share=0.2)
    assert "most_dropped_share to 0.3" in caught.value.remedy
    data = run(path, max_length=32, too_long="drop", most_dropped_share=caught.value.agreed)
    assert len(data.train) == 7
    assert data.report.from_cache  # what was refused was kept, so agreeing costs no second wait
    with pytest.raises(TooManyDropped):
        run(path, max_length=32, too_long="drop", most_dropped_share=0.2)


def test_one_row_in_twenty_may_be_lost_without_asking(run: Any, write_rows: Write) -> None:
    lost = {"question": None, "answer": "x"}
    assert len(run(write_rows([lost, *talks(19)]), most_dropped_share=0.05).train) == 19
    with pytest.raises(TooManyDropped):
        run(write_rows([lost, *talks(18)], "more.jsonl"), most_dropped_share=0.05)


def test_the_second_time_comes_from_the_disk(run: Any, write_rows: Write) -> None:
    path = write_rows(talks(30))
    first, second = run(path, eval_share=0.2), run(path, eval_share=0.2)
    assert (first.report.from_cache, second.report.from_cache) == (False, True)
    assert first.fingerprint == second.fingerprint
    assert first.survey == second.survey
    assert first.report.notes == second.report.notes
    assert first.report.row_tokens == second.report.row_tokens
    for one, other in zip(first.train + first.held_out, second.train + second.held_out, strict=True):
        assert one.input_ids.tolist() == other.input_ids.tolist()
        assert one.trained.tolist() == other.trained.tolist()


def test_case_142_143_an_edited_file_is_never_served_from_the_cache(run: Any, write_rows: Write) -> None:
    import gzip
    import os

    path = write_rows(talks(3))
    one = run(path)
    path.write_text(path.read_text(encoding="utf-8") + json.dumps(TALK) + "\n", encoding="utf-8")
    assert (len(one.train), len(run(path).train)) == (3, 4)
    packed = path.with_name("data.jsonl.gz")
    packed.write_bytes(gzip.compress(json.dumps({"text": "the cat"}).encode(), mtime=0))
    before, times = run(packed), packed.stat()
    packed.write_bytes(gzip.compress(json.dumps({"text": "the dog"}).encode(), mtime=0))
    os.utime(packed, ns=(times.st_atime_ns, times.st_mtime_ns))
    after = run(packed)
    assert (before.report.from_cache, after.report.from_cache) == (False, False)
    assert before.fingerprint != after.fingerprint


def test_a_copy_that_is_served_from_the_cache_is_named_by_its_own_place(run: Any, tmp_path: Path) -> None:
    text = json.dumps(TALK) + "\n{bad\n"
    for folder in ("one", "two"):
        path = tmp_path / folder / "rows.jsonl"
        path.parent.mkdir()
        path.write_text(text, encoding="utf-8")
        data = run(path, bad_rows="skip")
        assert data.report.from_cache == (folder == "two")
        assert data.survey.files == (str(path),)
        assert [row.path for row in data.survey.bad] == [path]


def test_a_file_that_changes_while_it_is_read_is_refused_and_not_kept(
    run: Any, write_rows: Write, tokenizer: Any, tmp_path: Path
) -> None:
    path = write_rows(talks(3))

    def add_a_row(done: float, total: float) -> None:
        if done == 0 and total:
            path.write_text(path.read_text(encoding="utf-8") + json.dumps(TALK) + "\n", encoding="utf-8")

    with pytest.raises(DataError, match="changed while it was read"):
        prepare(
            DataChoice(paths=(str(path),), eval_share=0.0),
            tokenizer=tokenizer,
            max_length=64,
            seed=1,
            cache=tmp_path / "cache",
            progress=add_a_row,
        )
    after = run(path)
    assert (len(after.train), after.report.from_cache) == (4, False)


def test_other_settings_are_another_entry(run: Any, write_rows: Write) -> None:
    path = write_rows(talks(8))
    run(path)
    for change in (
        {"max_length": 63},
        {"seed": 2},
        {"trained_on": "everything"},
        {"packing": True},
        {"eval_share": 0.5},
    ):
        assert not run(path, **change).report.from_cache


def test_a_changed_entry_is_not_trusted(run: Any, write_rows: Write, tmp_path: Path) -> None:
    path = write_rows(talks(8))
    first = run(path)
    [tokens] = (tmp_path / "cache").rglob("input_ids.npy")
    ids = np.load(tokens)
    np.save(tokens, ids + 1)
    again = run(path)
    assert not again.report.from_cache
    assert again.fingerprint == first.fingerprint


def test_a_cache_that_cannot_be_written_costs_only_the_reuse(
    run: Any, write_rows: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("vramfit.data.cache.store", full)
    data = run(write_rows(talks(3)))
    assert len(data.train) == 3
    assert any("No space left on device" in note for note in data.report.notes)


def test_progress_counts_rows(tokenizer: Any, write_rows: Write, tmp_path: Path) -> None:
    seen: list[tuple[float, float]] = []
    choice = DataChoice(paths=(str(write_rows(talks(600))),))
    prepare(
        choice, tokenizer=tokenizer, max_length=64, seed=1, cache=tmp_path / "c",
        progress=lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(0, 0), (0, 600), (250, 600), (500, 600), (600, 600)]


def test_several_files_are_one_data_set(run: Any, write_rows: Write) -> None:
    one, two = write_rows(talks(3), "a.jsonl"), write_rows([{"text": "the cat ran"}] * 2, "b.jsonl")
    data = run(one, two)
    assert len(data.train) == 5
    assert data.survey.shape == "question/answer + text"
    assert [example.row for example in data.train] == list(range(5))


def test_missing_and_empty_data_are_refused(run: Any, tmp_path: Path, write_rows: Write) -> None:
    with pytest.raises(DataError, match="There is no file"):
        run(tmp_path / "none.jsonl")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(DataError, match="is empty"):
        run(empty)
    for text, words in (("[]", "holds no rows"), (" \n\n", "No row can be used|holds no rows|is empty")):
        empty.write_text(text, encoding="utf-8")
        with pytest.raises(DataError, match=words):
            run(empty)


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_case_144_preparing_works_in_spawned_processes(
    run: Any, write_rows: Write, tokenizer: Any, tmp_path: Path, method: str
) -> None:
    if method not in multiprocessing.get_all_start_methods():
        pytest.skip(f"this system has no {method}")
    path = write_rows(talks(30))
    choice = DataChoice(paths=(str(path),), eval_share=0.0)
    settings = [
        {"tokenizer": tokenizer, "max_length": 64, "seed": 1, "cache": tmp_path / f"cache {number}"}
        for number in (1, 2)
    ]
    with multiprocessing.get_context(method).Pool(2) as pool:
        waiting = [pool.apply_async(prepare, (choice,), values) for values in settings]
        found = [one.get(timeout=120) for one in waiting]
    assert {data.fingerprint for data in found} == {run(path).fingerprint}


def test_case_107_rows_sides_and_order_are_the_same_in_every_process(
    run: Any, write_rows: Write, tokenizer: Any, tmp_path: Path
) -> None:
    """Python's own hashes differ from process to process; nothing that is trained may follow them."""
    path = write_rows([*talks(30), *talks(5)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    program = (
        "import sys; from pathlib import Path; from transformers import AutoTokenizer\n"
        "from vramfit.config import DataChoice; from vramfit.data.batches import StepOrder\n"
        "from vramfit.data.prepare import prepare\n"
        "data = prepare(DataChoice(paths=(sys.argv[1],), eval_share=0.2), max_length=64, seed=7,\n"
        "               tokenizer=AutoTokenizer.from_pretrained(sys.argv[2]), cache=Path(sys.argv[3]))\n"
        "order = StepOrder([len(e) for e in data.train], sequences_per_step=4, seed=7, epochs=2)\n"
        "print(data.fingerprint, [order.rows(step) for step in range(1, order.total_steps + 1)])\n"
    )
    said = set()
    for salt in ("0", "1", "random"):
        arguments = [str(path), str(tmp_path / "tokenizer"), str(tmp_path / f"cache {salt}")]
        done = subprocess.run(
            [sys.executable, "-c", program, *arguments],
            env={**os.environ, "PYTHONHASHSEED": salt},
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
            timeout=120,
        )
        said.add(done.stdout)
    [one] = said
    assert one.startswith(run(path, seed=7, eval_share=0.2).fingerprint)
    assert not one.startswith(run(path, seed=8, eval_share=0.2).fingerprint)


def test_case_038_three_rows_packed_still_make_a_step(run: Any, write_rows: Write) -> None:
    from vramfit.data.batches import StepOrder

    rows = [{"text": f"the cat ran away home {n} " * 20} for n in range(3)]
    data = run(write_rows(rows), max_length=2048, packing=True, eval_share=0.1)
    assert 100 < data.report.row_tokens.median < 200
    assert len(data.train) == 1
    order = StepOrder([len(example) for example in data.train], sequences_per_step=2 * 4, seed=1, epochs=1)
    assert (order.total_steps, list(order.rows(1))) == (1, [0])


def test_case_110_a_streamed_file_has_a_length_before_the_first_step(run: Any, tmp_path: Path) -> None:
    import gzip

    from vramfit.data.batches import StepOrder

    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in talks(23)).encode()))
    data = run(path)
    assert (data.workload.sequences, data.workload.exact) == (23, True)
    order = StepOrder([len(example) for example in data.train], sequences_per_step=5, seed=1, epochs=3)
    assert order.total_steps == 3 * 5


def test_case_014_the_content_and_not_the_name_says_json_or_jsonl(run: Any, tmp_path: Path) -> None:
    lines, array = tmp_path / "export.json", tmp_path / "export.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in talks(5)), encoding="utf-8")
    array.write_text(json.dumps(talks(5)), encoding="utf-8")
    found = [run(path) for path in (lines, array)]
    assert [data.survey.format for data in found] == ["jsonl", "json"]
    assert found[0].fingerprint == found[1].fingerprint


def weighed_talk(first: float, second: float, words: int = 1) -> dict[str, Any]:
    asked = {"role": "user", "content": "hello"}
    answers = [{"role": "assistant", "content": "the cat ran " * words, "weight": weight} for weight in (first, second)]
    return {"messages": [asked, answers[0], asked, answers[1]]}


def test_weights_reach_the_sequences_the_cache_and_the_report(run: Any, write_rows: Write) -> None:
    path = write_rows([weighed_talk(0.5, 2), weighed_talk(1, 1), weighed_talk(0, 1.5)])
    data = run(path, max_length=256)
    values = [None if one.weights is None else sorted(set(one.weights.tolist())) for one in data.train]
    assert values == [[0, 0.5, 2], None, [0, 1.5]]
    assert "Answers in 2 rows have weights from 0.5 to 2; a step's loss is their weighted mean." in data.report.notes
    assert data.report.trained_tokens == sum(int(one.trained.sum()) for one in data.train)
    again = run(path, max_length=256)
    assert again.report.from_cache
    for one, other in zip(data.train, again.train, strict=True):
        assert np.array_equal(one.token_weights(), other.token_weights())
    [packed] = run(path, max_length=256, packing=True).train
    assert np.array_equal(packed.token_weights(), np.concatenate([one.token_weights() for one in data.train]))
    other = run(write_rows([weighed_talk(0.5, 3), weighed_talk(1, 1), weighed_talk(0, 1.5)]), max_length=256)
    assert other.fingerprint != data.fingerprint


@pytest.mark.parametrize("how", ["cut", "split"])
def test_pieces_keep_the_weights_of_their_tokens(run: Any, write_rows: Write, how: str) -> None:
    path = write_rows([weighed_talk(0.5, 2, words=12)])
    [whole] = run(path, max_length=1000).train
    pieces = run(path, max_length=32, too_long=how).train
    assert len(pieces) == 1 if how == "cut" else len(pieces) > 2
    at = 0
    for piece in pieces:
        wanted = whole.weights[at : at + len(piece)].copy()
        wanted[0] = 0
        assert np.array_equal(piece.token_weights(), wanted)
        assert np.array_equal(piece.trained, wanted > 0)
        at += len(piece)


def test_a_weight_that_cannot_be_is_counted_with_its_key_and_value(run: Any, write_rows: Write) -> None:
    data = run(write_rows([weighed_talk(-1, 1), *[weighed_talk(1, 1)] * 30]))
    assert data.report.dropped == {"the 'weight' of an answer is -1, and must be 0 to 100": 1}
