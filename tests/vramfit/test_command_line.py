"""python -m vramfit: names, --json, exit codes, one sentence on stderr."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vramfit.__main__ import main

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(autouse=True)
def data_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("VRAMFIT_DATA_DIR", str(tmp_path / "data"))
    return tmp_path / "data"


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main([*arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(list(arguments)) == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err.count("\n") == 1
    assert "Traceback" not in heard.err
    return heard.err


LLAMA_ON_4090 = ("--model", "meta-llama/Llama-3.1-8B", "--card", "RTX 4090")


def test_estimate_tells_memory_speed_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(
        capsys, "estimate", *LLAMA_ON_4090, "--method", "lora", "--max-length", "1024", "--max-steps", "100"
    )
    assert values["fits"] is True
    assert values["steps"] == 100
    memory = values["memory"]
    assert 16 * 2**30 < memory["peak_bytes"] < 24 * 2**30  # 8.03e9 frozen parameters in bf16 are 15.0 GiB alone
    assert sum(memory["breakdown"].values()) == memory["device_bytes"]
    assert memory["low_bytes"] <= memory["peak_bytes"] <= memory["high_bytes"]
    assert values["speed"]["tokens_per_s"] > 0
    assert values["seconds"] == pytest.approx(100 * values["speed"]["step_seconds"])


QWEN_ON_4090 = ("--model", "Qwen/Qwen3-0.6B", "--method", "full", "--max-length", "1024", "--card", "RTX 4090")


def test_the_same_run_in_another_program(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(capsys, "estimate", *QWEN_ON_4090, "--program", "transformers", "--micro-batch", "1")
    assert values["program"] == "transformers"
    assert values["plan"]["loss"] == "full"
    assert values["memory"]["breakdown"]["logits"] in (0, 12 * 1024 * 151936)
    assert values["seconds"] == pytest.approx(values["steps"] * values["speed"]["step_seconds"])
    assert main(["estimate", *QWEN_ON_4090, "--program", "torchtune"]) == 0
    assert capsys.readouterr().out.startswith("Program         torchtune, micro-batch ")


def test_a_program_may_share_the_run_among_cards(capsys: pytest.CaptureFixture[str]) -> None:
    """Full training of a 7B: 16-bit weights on every card, of master, moments and gradients a fourth."""
    wanted = ("estimate", "--model", "meta-llama/Llama-2-7b-hf", "--method", "full", "--card", "A100 80GB")
    shared = ("--cards", "4", "--program", "deepspeed", "--max-length", "512", "--micro-batch", "1")
    values = answer(capsys, *wanted, *shared, "--sharding", "zero2", "--recompute", "all")
    params = 6_738_415_616
    plan, parts = values["plan"], next(each for each in values["memory"]["phases"] if each["name"] == "step")["parts"]
    assert (plan["cards"], plan["sharding"], plan["recompute"]) == (4, "zero2", 32)
    assert parts["weights"] == pytest.approx(2 * params, rel=1e-3)
    assert parts["optimizer"] == pytest.approx(12 * params / 4, rel=1e-3)
    selective = answer(capsys, *wanted, *shared, "--sharding", "fsdp", "--recompute", "selective")
    assert selective["plan"]["selective"] is True


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--program", "axolotl"), "--program axolotl is none of the"),
        (("--sharding", "fsdp"), "--sharding is for another program"),
        (("--recompute", "all"), "--recompute is for another program"),
        (("--program", "deepspeed", "--sharding", "zero3"), "shares a run among 1 card"),
    ],
)
def test_a_program_without_a_record_is_refused_with_those_there_are(
    capsys: pytest.CaptureFixture[str], flags: tuple[str, ...], words: str
) -> None:
    said = complaint(capsys, "estimate", *QWEN_ON_4090, *flags)
    assert words in said
    assert "unsloth" in said or "--cards 2" in said


def test_an_estimate_tells_what_bounds_it_and_what_it_costs(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(capsys, "estimate", *QWEN_ON_4090, "--max-steps", "100")
    speed, memory, cost = values["speed"], values["memory"], values["cost"]
    assert speed["steps_per_s"] == pytest.approx(1 / speed["step_seconds"])
    assert speed["bound_by"] == max(speed["bounds"], key=speed["bounds"].get)
    assert values["kwh"] == pytest.approx(100 * speed["step_seconds"] * 450 / 3.6e6)
    assert cost["kwh"] == pytest.approx(100 * speed["step_seconds"] * (0.85 * 450 + 150) / 3.6e6)
    assert cost["electricity_usd"] == pytest.approx(0.17 * cost["kwh"])
    assert values["checkpoints"] == 10
    assert values["written_bytes"] == 10 * memory["written_per_checkpoint_bytes"]
    assert memory["phases"][-1]["name"] == "save"
    assert main(["estimate", *LLAMA_ON_4090]) == 0
    said = capsys.readouterr().out
    for words in ("Run             meta-llama/Llama-3.1-8B, lora on GeForce RTX 4090", "MFU ", "  compute ", " kWh, "):
        assert words in said
    assert "Assumed         No method was named: LoRA is taken (--method)" in said
    assert "No method was named" not in str(answer(capsys, "estimate", *LLAMA_ON_4090, "--set", "method=qlora"))


def test_plan_gives_a_reason_for_each_choice(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(capsys, "plan", *LLAMA_ON_4090, "--method", "qlora", "--set", "memory.loss=chunked")
    reasons = values["plan"]["reasons"]
    assert all(choice["reason"] for choice in reasons)
    assert any(choice["fixed"] for choice in reasons)
    assert values["plan"]["loss"] == "chunked"


def test_an_estimate_that_does_not_fit_still_tells_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["estimate", "--model", "meta-llama/Llama-3.1-70B", "--method", "full", "--card", "RTX 3060", "--json"]
    assert main(arguments) == 2
    heard = capsys.readouterr()
    values = json.loads(heard.out)
    assert values["fits"] is False
    assert values["memory"]["device_bytes"] > 70e9 * 16  # weights, gradients and two moments, 4 bytes each
    assert "GiB" in heard.err


@pytest.mark.parametrize("command", ["plan", "estimate"])
def test_a_refusal_is_json_too_where_that_is_asked_for(capsys: pytest.CaptureFixture[str], command: str) -> None:
    wanted = ("--model", "meta-llama/Llama-3.1-70B", "--method", "full", "--card", "RTX 3060", "--json")
    assert main([command, *wanted]) == 2
    heard = capsys.readouterr()
    values = json.loads(heard.out)
    assert values["fits"] is False
    assert values["needed_bytes"] > values["available_bytes"] > 0
    assert values["tier"] in ("device", "host", "disk")
    assert isinstance(values["phase"], str)
    assert values["suggestions"]
    assert all(type(suggestion) is str and suggestion in values["message"] for suggestion in values["suggestions"])
    assert values["message"] in heard.err
    assert ("memory" in values) is (command == "estimate")


def test_without_data_a_model_is_planned_for_sequences_as_long_as_allowed(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(capsys, "estimate", *LLAMA_ON_4090, "--method", "qlora", "--max-length", "512")
    assert values["workload"]["longest_tokens"] == values["workload"]["mean_tokens"] == 512
    assert values["plan"]["max_length"] == 512
    assert values["workload"]["exact"] is False


def test_both_also_speak_plainly(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *LLAMA_ON_4090]) == 0
    text = capsys.readouterr().out
    assert "fits" in text
    assert "tokens/s" in text
    assert "GiB" in text
    assert "GB" not in text


def test_a_config_file_and_flags_on_top_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("schedule: {max_steps: 12, sequences_per_step: 8}\nseed: 3\n", encoding="utf-8")
    assert answer(capsys, "estimate", str(file), "--device", "cpu")["steps"] == 12
    assert answer(capsys, "estimate", str(file), "--device", "cpu", "--max-steps", "40")["steps"] == 40


@pytest.mark.parametrize("method", ["pretrain", "full", "lora", "qlora"])
def test_a_method_set_by_its_dotted_name_is_the_method(capsys: pytest.CaptureFixture[str], method: str) -> None:
    small = ("--model", "Qwen/Qwen3-0.6B", "--card", "RTX 4090")
    assert answer(capsys, "estimate", *small, "--set", f"method={method}")["plan"]["method"] == method
    assert answer(capsys, "estimate", *small)["plan"]["method"] == "lora"


def test_a_choice_of_digits_may_be_a_number(capsys: pytest.CaptureFixture[str]) -> None:
    values = answer(capsys, "estimate", *LLAMA_ON_4090, "--set", "memory.optimizer_bits=8")
    assert values["plan"]["optimizer_bits"] == 8


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("estimate", "--model", "Qwen/Qwen3-0.6B", "--set", "method=best"), "method is 'best'"),
        (("estimate", "--model", "Qwen/Qwen3-0.6B", "--set", "method.x=1"), "method is {'x': 1}"),
        (("estimate", "--set", "memory.optimizer_bits=16"), "memory.optimizer_bits is 16"),
        (("estimate", "--card", "GTX 9999"), "GTX 9999"),
        (("estimate", "--model", "nobody/nothing-7b"), "nobody/nothing-7b"),
        (("estimate", "--max-length", "many"), "data.max_length"),
        (("estimate", "--set", "memory.loss"), "has no value"),
        (("estimate", "--set", "memory.los=full"), "memory.los"),
        (("estimate", "absent.yaml"), "absent.yaml"),
        (("plan", "--model", "meta-llama/Llama-3.1-70B", "--method", "full", "--card", "RTX 3060"), "GiB"),
        (("train", "absent.yaml"), "absent.yaml"),
        (("data", "absent.json"), "absent.json"),
        (("data", "absent.json", "--max-length", "3"), "data.max_length is '3', the least is 8"),
        (("data", "absent.json", "--max-length", "many"), "not a whole number"),
        (("data", ""), "empty path"),
        (("data", "absent.json", "--model", ""), "model.source is empty"),
        (("estimate", "--set", "seed=[1"), "--set seed cannot be read"),
        (("estimate", "--set", "seed=" + "[" * 5000), "nested more than 32 deep"),
        (("estimate", "--set", "seed=" + "9" * 5000), "4300 digits"),
        (("estimate", "--set", "=3"), "names no setting"),
        (("estimate", "--set", "memory..loss=full"), "names no setting"),
        (("estimate", "--card", ""), "no ''"),
        (("estimate", "--card", "RTX 4090", "--ram-gib", "nan"), "--ram-gib is nan"),
        (("estimate", "--card", "RTX 4090", "--ram-gib", "1e300"), "at most 1,048,576"),
        (("estimate", "--card", "RTX 4090", "--ram-gib", "-1"), "--ram-gib is -1"),
        (("estimate", "--ram-gib", "32"), "--card"),
        (("explore", "--card", "RTX 4090", "--length", "7"), "--length is 7, it must be 8 to 1,048,576"),
        (("explore", "--card", "RTX 4090", "--length", "1048577"), "--length is 1048577"),
        (("explore", "--card", "RTX 4090", "--length", "0"), "--length is 0"),
        (("explore", "--card", "RTX 4090", "--length=-5"), "--length is -5"),
        (("explore", "--card", "RTX 4090", "--cards", "0"), "--cards is 0, it must be 1 to 1024"),
        (("explore", "--presets", "--card", "GTX 9999"), "GTX 9999"),
        (("explore", "--across", "--card", "RTX 4090"), "--card does not go with --across"),
        (("explore", "--across", "--ram-gib", "64"), "--ram-gib goes with --lengths or --presets or"),
        (("explore", "--presets", "--model", "starter"), "--model goes with --across or --lengths or --cost"),
        (("explore", "--lengths", "--length", "512"), "--length does not go with --lengths"),
        (("explore", "--method", "full"), "--method goes with --across or --lengths or --cost"),
        (("explore", "--tokens", "1B", "--setup", "RTX 4090"), "--tokens goes with --cost; --setup goes with --cost"),
        (("estimate", "--card", "RTX 4090", "--ram-gib", "0"), "--ram-gib is 0"),
        (("explore", "--card", "RTX 4090", "--lengths", "--model", ""), "model.source is empty"),
        (("explore", "--cost", "--model", ""), "model.source is empty"),
        (("estimate", "--max-length", "0"), "data.max_length"),
        (("estimate", "--micro-batch=-1"), "memory.micro_batch"),
        (("estimate", "--sequences-per-step", "0"), "schedule.sequences_per_step"),
        (("estimate", "--max-steps", "0"), "schedule.max_steps"),
        (("estimate", "--set", "train_last_blocks=2"), "a run from random weights trains all of them"),
        (
            ("plan", "--model", "meta-llama/Llama-3.2-1B", "--method", "full", "--set", "train_last_blocks=17"),
            "has 16 blocks",
        ),
        (("estimate", "--set", "memory.budget_gib=-3"), "memory.budget_gib"),
        (("estimate", "--set", "memory.budget_gib=.nan"), "memory.budget_gib"),
        (("estimate", "--set", "memory.budget_gib=1e300", "--card", "RTX 4090"), "memory.budget_gib"),
    ],
)
def test_wrong_input_is_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], words: str
) -> None:
    assert words in complaint(capsys, *arguments)


@pytest.mark.parametrize(
    "arguments", [(), ("dance",), ("data",), ("data", "x", "--colour"), ("estimate", "--ram-gib", "much")]
)
def test_a_wrong_command_line_is_one_sentence_too(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(list(arguments))
    assert caught.value.code == 2
    heard = capsys.readouterr()
    assert heard.out == ""
    assert heard.err.count("\n") == 1
    assert "--help" in heard.err


def test_data_stops_at_a_bad_row_where_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "b",}\n', encoding="utf-8")
    assert answer(capsys, "data", str(file))["bad_row_count"] == 1
    assert "rows.jsonl, line 2" in complaint(capsys, "data", str(file), "--bad-rows", "stop", "--json")
    assert answer(capsys, "data", str(file), "--most-bad-rows", "1")["bad_row_count"] == 1
    told = complaint(capsys, "data", str(file), "--most-bad-rows", "0")
    assert "rows.jsonl, line 2" in told
    assert "0 may be left out" in told


def test_data_refuses_when_more_rows_are_left_out_than_allowed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n{"prompt": "b"}\n', encoding="utf-8")
    assert answer(capsys, "data", str(file))["readable_rows"] == 2
    assert answer(capsys, "data", str(file), "--most-dropped-share", "0.5")["rows"] == 1
    told = complaint(capsys, "data", str(file), "--most-dropped-share", "0.4")
    assert "1 of 2 rows (50.0%) would be left out" in told
    assert "most_dropped_share" in told


def test_data_splits_text_where_it_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "book.txt"
    file.write_text("one\ntwo ## three\n", encoding="utf-8")
    assert answer(capsys, "data", str(file))["rows"] == 1
    assert answer(capsys, "data", str(file), "--documents", "lines")["rows"] == 2
    texts = [shown["text"] for shown in answer(capsys, "data", str(file), "--documents", "##")["examples"]]
    assert texts == ["one\ntwo ", " three"]


def test_data_takes_columns_of_other_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"foo": "a", "bar": "b"}\n', encoding="utf-8")
    assert "'foo', 'bar'" in complaint(capsys, "data", str(file))
    mapped = answer(capsys, "data", str(file), "--column", "prompt=foo", "--column", "completion=bar")
    assert mapped["shape"] == "prompt/completion"
    assert "no column 'baz'" in complaint(capsys, "data", str(file), "--column", "text=baz")
    assert "--column foo" in complaint(capsys, "data", str(file), "--column", "foo")


def test_every_named_data_set_counts_in_the_estimate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "b"}\n' * 5000, encoding="utf-8")
    steps = [
        answer(capsys, "estimate", "--card", "RTX 4090", "--set", f"data.paths={paths}")["steps"]
        for paths in (["starter:stories"], [str(file)], ["starter:stories", str(file)])
    ]
    assert steps[2] > max(steps[:2])


def test_data_tells_what_was_recognised(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"prompt": "a", "completion": "007"}\n{"prompt": "b",}\n{"prompt": "c", "completion": "d"}\n')
    values = answer(capsys, "data", str(file))
    assert (values["format"], values["rows"]) == ("jsonl", 2)
    assert [row["line"] for row in values["bad_rows"]] == [2]
    assert values["examples"][0]["text"].endswith("007")


def test_a_bad_row_is_told_with_its_line_and_column(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "rows.jsonl"
    file.write_text('{"text": "good"}\n{"text": "unterminated}\n')
    assert main(["data", str(file)]) == 0
    told = "bad row: rows.jsonl, line 2, column 10: a string begins here and does not end"
    assert told in capsys.readouterr().out.splitlines()


def test_data_with_a_model_counts_tokens(
    reference_data: Path, smollm2_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = reference_data / "datasets" / "identity.json"
    values = answer(capsys, "data", str(path), "--model", str(smollm2_folder))
    assert values["rows"] == len(json.loads(path.read_text(encoding="utf-8")))
    assert values["trained_tokens"] > 0
    assert values["tokens"]["min"] <= values["tokens"]["median"] <= values["tokens"]["max"]
    example = values["examples"][0]
    assert len(example["token_ids"]) == len(example["mask"])


def test_train_records_where_the_panel_looks(tmp_path: Path, data_folder: Path) -> None:
    """As a person would: a process of its own, on a console that knows no Unicode."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(f'{{"text": "Der Fuchs läuft {n} mal."}}' for n in range(12)), encoding="utf-8")
    file = tmp_path / "lauf größer.yaml"
    file.write_text(
        f"name: größer\ndata: {{paths: ['{rows.as_posix()}'], max_length: 32}}\n"
        "schedule: {max_steps: 4, sequences_per_step: 2}\noutput: {sample_tokens: 4}\n",
        encoding="utf-8",
    )
    environment = {**os.environ, "PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-m", "vramfit", "train", str(file)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()
    assert "Finished at step 4 of 4" in done.stdout.decode()

    from jobs.store import Store

    with Store(data_folder) as store:
        (job,) = store.jobs()
        assert (job.name, job.state, job.step) == ("größer", "succeeded", 4)
        assert store.series(job.id).columns["step"] == [1, 2, 3, 4]
        assert job.export is not None
        assert (Path(job.export) / "config.json").is_file()
