from __future__ import annotations

import dataclasses
import json

import pytest

from vramfit.engine.memory_limits import FILE, MOST_AGE_S, MOST_ENTRIES, Limit, MemoryLimits, run_kind
from vramfit.models.catalogue import find as find_architecture

GIB = 2**30
LIMIT = Limit(rows=4, bytes=8 * GIB, time=1000.0)


def found(folder, kind="kind", *, budget=8 * GIB, recomputed=0, now=1000.0):
    return MemoryLimits(folder).find(kind, budget_bytes=budget, recomputed=recomputed, now=now)


def test_what_is_remembered_is_found_by_the_next_run(tmp_path):
    MemoryLimits(tmp_path).remember("kind", LIMIT, recomputed=0)
    assert found(tmp_path) == LIMIT
    assert found(tmp_path, "another kind") is None
    assert [path.name for path in tmp_path.iterdir()] == [FILE]
    MemoryLimits(tmp_path).remember("kind", dataclasses.replace(LIMIT, rows=2), recomputed=0)
    assert found(tmp_path).rows == 2


def test_it_does_not_hold_where_there_is_more_room(tmp_path):
    MemoryLimits(tmp_path).remember("kind", LIMIT, recomputed=3)
    assert found(tmp_path, budget=9 * GIB, recomputed=3) is None
    assert found(tmp_path, budget=int(8.2 * GIB), recomputed=3) == LIMIT
    assert found(tmp_path, budget=2 * GIB, recomputed=3) == LIMIT
    assert found(tmp_path, recomputed=4) is None  # more blocks are recomputed: less memory is needed
    assert found(tmp_path, recomputed=2) == LIMIT


def test_a_notch_is_kept_beside_rows_or_alone_and_older_files_have_none(tmp_path):
    alone = dataclasses.replace(LIMIT, rows=0, notch="recompute", notch_rows=8)
    MemoryLimits(tmp_path).remember("kind", alone, recomputed=0)
    assert found(tmp_path) == alone
    entry = {"rows": 4, "bytes": 8 * GIB, "time": 1000.0, "ended_run": False, "recomputed": 0}
    (tmp_path / FILE).write_text(json.dumps({"version": 1, "limits": {"kind": entry}}), encoding="utf-8")
    assert found(tmp_path) == LIMIT


def test_an_old_limit_is_forgotten(tmp_path):
    MemoryLimits(tmp_path).remember("kind", LIMIT, recomputed=0)
    assert found(tmp_path, now=1000.0 + MOST_AGE_S) == LIMIT
    assert found(tmp_path, now=1001.0 + MOST_AGE_S) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 99, "limits": {}}',
        '{"version": 1}',
        '{"version": 1, "limits": {"kind": {"rows": 0, "bytes": 1, "time": 1, "ended_run": false, "recomputed": 0}}}',
        '{"version": 1, "limits": {"kind": 3}}',
        '{"version": 1, "limits": []}',
        '{"version": 1, "limits": {"kind": {"rows": 1e999, "bytes": 1, "time": 1, "ended_run": 0, "recomputed": 0}}}',
        "[" * 20_000,
        "9" * 5000,
    ],
)
def test_a_bad_file_is_an_empty_one_and_is_replaced(tmp_path, text):
    (tmp_path / FILE).write_text(text, encoding="utf-8")
    assert found(tmp_path) is None
    MemoryLimits(tmp_path).remember("kind", LIMIT, recomputed=0)
    assert found(tmp_path) == LIMIT


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("", encoding="utf-8")
    MemoryLimits(blocked).remember("kind", LIMIT, recomputed=0)
    assert found(blocked) is None


def test_the_oldest_make_room(tmp_path):
    limits = MemoryLimits(tmp_path)
    for number in range(MOST_ENTRIES + 3):
        limits.remember(f"kind {number}", dataclasses.replace(LIMIT, time=1000.0 + number), recomputed=0)
    assert found(tmp_path, "kind 2") is None and found(tmp_path, "kind 3") is not None


def test_the_kind_of_a_run_is_all_that_memory_depends_on_but_how_much_of_it_there_is(tiny):
    architecture = find_architecture("meta-llama/Llama-3.1-8B")

    def kind(*, card="RTX 3060", tokens=1000, versions="2.13", **plan):
        return run_kind(tiny.plan(**plan), architecture, card=card, longest_tokens=tokens, versions=versions)

    assert kind() == kind(micro_batch=9, accumulation=1, budget_bytes=5, max_length=99, tokens=1024, recompute=3)
    others = [
        kind(card="RTX 3090"),
        kind(tokens=1025),
        kind(versions="2.14"),
        kind(method="lora"),
        kind(compute="bf16"),
        kind(lora_rank=8),
        kind(optimizer_bits=8),
    ]
    assert len({kind(), *others}) == 1 + len(others)
    renamed = dataclasses.replace(architecture, name="my own copy")
    assert kind() == run_kind(tiny.plan(), renamed, card="RTX 3060", longest_tokens=1000, versions="2.13")
